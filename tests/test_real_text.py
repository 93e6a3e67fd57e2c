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
