"""Training on real text: the events of the paper, the population flow, controls."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from flowsim import empirical

TEXTS = Path(__file__).parents[2] / "shared" / "data"
TOKENISERS = {"wikitext2": "wikitext", "tinystories": "tinystories"}
needs_texts = pytest.mark.skipif(
    not TEXTS.is_dir(), reason=f"the text samples are not at {TEXTS}"
)


@functools.cache
def setting(corpus, vocab=64):
    place = empirical.find_text(corpus, TEXTS)
    return empirical.read_setting(place, tokeniser=TOKENISERS[corpus], vocab=vocab)


@functools.cache
def trained(corpus, seed, num_steps, *, vocab=64, scale=1e-2, mixed=False):
    """Training alone, by the command's defaults."""
    text = setting(corpus, vocab)
    text = empirical.shuffled(text) if mixed else text
    model, batch_key = empirical.draw_start(
        text.chain, width=32, scale=scale, dtype=jnp.float32, key=jax.random.key(seed)
    )
    return empirical.train_on(
        text, model, 0.2, num_steps, length=256, batch=512, key=batch_key
    )


# Lowest and highest over seeds 0 ... 4 (wikitext2) and 0 ... 3 (tinystories), widened
# by a few per cent. Measured: see the comments.
RANGES = {
    "wikitext2": {
        "sigma2/sigma1 below .05 at": (86, 99),  # 89.6 ... 95.8
        "attention on top token, start": (0.1262, 0.1264),
        "attention peak": (0.174, 0.193),  # .178 ... .188
        "attention peak at": (110, 138),  # 116 ... 132
        "attention valley": (0.127, 0.141),  # .1315 ... .1364
        "attention valley at": (260, 400),  # 276 ... 383
        "entropy, start": (3.444, 3.445),
        "entropy minimum": (3.12, 3.20),  # 3.137 ... 3.186
        "entropy minimum at": (110, 138),
        "second direction at": (272, 330),  # 286 ... 315
    },
    "tinystories": {
        "sigma2/sigma1 below .05 at": (99, 114),  # 102.3 ... 109.7
        "attention on top token, start": (0.1383, 0.1385),
        "attention peak": (0.149, 0.162),  # .1517 ... .1588
        "attention peak at": (120, 141),  # 125 ... 136
        "attention valley": (0.092, 0.103),  # .0965 ... .0997
        "attention valley at": (335, 420),  # 354 ... 400: flat, and batches are noisy
        "entropy, start": (3.574, 3.575),
        "entropy minimum": (3.485, 3.54),  # 3.4996 ... 3.5256
        "entropy minimum at": (120, 141),
        "second direction at": (305, 380),  # 319 ... 367
    },
}


@needs_texts
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("corpus", "steps"), [("wikitext2", 2250), ("tinystories", 2250)]
)
def test_real_text_goes_through_the_events_of_the_paper(corpus, steps, seed):
    found = empirical.find_events(trained(corpus, seed, steps)).row()
    outside = {
        name: found[name]
        for name, (low, high) in RANGES[corpus].items()
        if found[name] is None or not low <= found[name] <= high
    }
    assert not outside


@needs_texts
@pytest.mark.slow
@pytest.mark.parametrize("corpus", ["wikitext2", "tinystories"])
def test_training_follows_the_population_flow_to_time_200(corpus):
    study = empirical.study_text(setting(corpus), num_steps=1000)
    worst = empirical.agreement(study, 200.0)
    assert worst["loss"][0] < 0.01
    assert worst["attention on top token"][0] < 0.06


@needs_texts
@pytest.mark.slow
@pytest.mark.parametrize("corpus", ["wikitext2", "tinystories"])
def test_shuffled_text_keeps_the_first_bump_alone(corpus):
    run = trained(corpus, 0, 2250, mixed=True)
    events = empirical.find_events(run)
    assert events.attention_peak is not None
    assert events.attention_peak[1] > 1.1 * events.attention_start
    assert events.second_direction is None
    lowest = float(run.observables.mean_top_attention.min())
    assert lowest > 0.97 * events.attention_start


# Larger vocabularies and smaller starts: the flow beside the training, to a time by
# which the burst is over. Measured: see the comments.


@needs_texts
@pytest.mark.slow
def test_256_words_condense_and_focus_like_their_population_flow():
    study = empirical.study_text(setting("wikitext2", 256), num_steps=1200)
    training, flow = (events.row() for events in study.events)
    for found in (training, flow):
        assert 138 < found["sigma2/sigma1 below .05 at"] < 150  # 143.3, 144.5
        assert 0.36 < found["attention peak"] < 0.43  # .398, .410; pi is .103
        assert found["second direction at"] is None  # Nor by 450.
    # The burst of attention takes a few time units, of which the shift is a part: 31 %
    # at its steepest, while the loss stays within 2.1 %.
    worst = empirical.agreement(study, 240.0)
    assert worst["loss"][0] < 0.03
    assert 138 < worst["attention on top token"][1] < 150


# From smaller starts condensation takes as long on the clock of sigma2/sigma1, the rest
# is later. One seed, training and flow; measured: see the comments.
SMALL = {
    ("wikitext2", 1e-3, 3500): {
        "sigma2/sigma1 below .05 at": (90, 96),  # 92.7, 93.2
        "attention peak": (0.143, 0.155),  # .148, .150; it was .180 from 1e-2
        "attention peak at": (188, 208),  # 200, 195
    },
    ("tinystories", 1e-3, 3500): {
        "sigma2/sigma1 below .05 at": (103, 109),  # 106.3, 106.1
        # The first rise is nearly gone, as c < 0 says: .1387, .1388 over .1384.
        "attention peak": (0.1384, 0.1395),
        "attention valley": (0.081, 0.099),  # .0861, .0945
        "second direction at": (585, 635),  # 613, 603
    },
    ("tinystories", 1e-4, 5500): {
        "sigma2/sigma1 below .05 at": (103, 109),  # 106.3, 106.1
        "attention peak": (0.1384, 0.1386),
        "attention valley": (0.076, 0.092),  # .0806, .0869
        "second direction at": (795, 870),  # 835, 824
    },
}


@needs_texts
@pytest.mark.slow
@pytest.mark.parametrize(("corpus", "scale", "steps"), SMALL)
def test_smaller_starts_go_through_the_events_later(corpus, scale, steps):
    study = empirical.study_text(setting(corpus), num_steps=steps, scale=scale)
    ranges = SMALL[corpus, scale, steps]
    for events in study.events:
        found = events.row()
        outside = {
            name: found[name]
            for name, (low, high) in ranges.items()
            if found[name] is None or not low <= found[name] <= high
        }
        assert not outside


@needs_texts
@pytest.mark.slow
def test_from_1e_4_training_parts_from_the_flow_on_wikitext2():
    """Finite contexts and batches matter where the flow is slow, beside theta_c^1."""
    text = setting("wikitext2")
    study = empirical.study_text(text, num_steps=5500, scale=1e-4)
    training, flow = (events.row() for events in study.events)
    assert 90 < training["sigma2/sigma1 below .05 at"] < 96  # 92.7; flow 93.2
    assert 1000 < flow["second direction at"] < 1080  # 1041
    assert training["second direction at"] is None
    assert 0.132 < training["attention peak"] < 0.141  # .136 at 271
    assert 0.142 < flow["attention peak"] < 0.151  # .146 at 1031
