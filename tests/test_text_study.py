"""Training on text against the population flow: events, learning, laws, command."""

import dataclasses
import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim import empirical
from flowsim.__main__ import main
from flowsim.diagnostics import diagnose
from flowsim.plots import comparison_figure
from flowsim.verification import Verification
from flowsim.verification.empirical import (
    _control_claims as control_claims,
    _text_claims as text_claims,
)

from .problems import named_chain, random_model

TEXTS = Path(__file__).parents[2] / "shared" / "data"
TOKENISERS = {"wikitext2": "wikitext", "tinystories": "tinystories"}
needs_texts = pytest.mark.skipif(
    not TEXTS.is_dir(), reason=f"the text samples are not at {TEXTS}"
)
KEY = jax.random.key(0)
STORY = "the cat saw the dog . the dog ran . a cat ran to the dog .\n"


@functools.cache
def setting(corpus, vocab=64):
    place = empirical.find_text(corpus, TEXTS)
    return empirical.read_setting(place, tokeniser=TOKENISERS[corpus], vocab=vocab)


@functools.cache
def observed_flow(name="default", t1=150.0):
    chain = named_chain(name)
    loss = fs.PopulationLoss(chain)
    model = fs.AttentionModel.init(jax.random.key(0), vocab=4, width=8, scale=1e-2)
    observe = functools.partial(diagnose, loss)
    return chain, fs.gradient_flow(loss, model, t1=t1, observe=observe)


# Events.


def drawn_run(ts, ratios, attention, entropy):
    """A run with the given curves, all else as of a real one."""
    _, run = observed_flow()
    seen = jax.tree.map(lambda leaf: leaf[: len(ts)], run.observables)
    values = seen.singular_values.W0.at[:, 1].set(
        jnp.asarray(ratios) * seen.singular_values.W0[:, 0]
    )
    replace = {
        "mean_top_attention": jnp.asarray(attention),
        "mean_attention_entropy": jnp.asarray(entropy),
    }
    singular = dataclasses.replace(seen.singular_values, W0=values)
    seen = dataclasses.replace(seen, singular_values=singular, **replace)
    return dataclasses.replace(run, ts=jnp.asarray(ts), observables=seen)


@pytest.mark.slow
def test_events_are_the_crossings_and_extrema_of_the_curves():
    run = drawn_run(
        ts=[0.0, 10.0, 20.0, 30.0, 40.0, 50.0],
        ratios=[0.9, 0.15, 0.01, 0.02, 0.18, 0.3],
        attention=[0.1, 0.1, 0.2, 0.15, 0.05, 0.07],
        entropy=[3.0, 3.0, 2.5, 2.8, 3.1, 2.0],
    )
    events = empirical.find_events(run)
    assert events.condensed == pytest.approx(10 + 10 * (0.15 - 0.05) / 0.14)
    assert events.second_direction == pytest.approx(30 + 10 * 0.08 / 0.16)
    assert events.attention_start == pytest.approx(0.1)
    assert events.attention_peak == pytest.approx((20.0, 0.2))
    assert events.attention_valley == pytest.approx((40.0, 0.05))
    assert events.entropy_minimum == pytest.approx((20.0, 2.5))
    assert "second direction at" in str(events)


def test_what_does_not_happen_is_none():
    flat = [0.1] * 4
    run = drawn_run([0.0, 1.0, 2.0, 3.0], [0.9] * 4, flat, [3.0] * 4)
    events = empirical.find_events(run)
    assert events.condensed is None and events.second_direction is None
    assert events.attention_peak is None and events.attention_valley is None
    assert events.entropy_minimum is None
    # A minimum in the last row may go on falling: it is not one yet.
    falling = drawn_run(
        [0.0, 1.0, 2.0, 3.0], [0.9] * 4, [0.1, 0.09, 0.08, 0.07], [3.0] * 4
    )
    assert empirical.find_events(falling).attention_valley is None


# Learning.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "dense, focus"])
def test_excess_losses_sum_to_the_loss_above_the_floor(name):
    chain, run = observed_flow(name)
    query, target = empirical.excess_loss(chain, run.models)
    above = run.losses - chain.entropy_rate
    np.testing.assert_allclose(query @ chain.stationary, above, atol=1e-12)
    np.testing.assert_allclose(target @ chain.stationary, above, atol=1e-12)
    assert (np.asarray(query) >= -1e-12).all()


def test_attention_received_starts_at_pi_and_sums_to_one():
    chain, run = observed_flow()
    received = empirical.attention_received(chain, run.models)
    np.testing.assert_allclose(received[0], chain.stationary, rtol=1e-3)
    np.testing.assert_allclose(received.sum(axis=1), 1.0, rtol=1e-12)
    assert float(jnp.abs(received - chain.stationary).max()) > 0.01


def test_bands_part_the_tokens_by_mass_and_average_the_excess():
    chain, run = observed_flow("dense, focus")
    bands = empirical.excess_by_band(run, chain)
    assert sorted(i for band in bands for i in band.tokens) == [0, 1, 2, 3]
    lowest = [min(float(chain.stationary[i]) for i in band.tokens) for band in bands]
    highest = [max(float(chain.stationary[i]) for i in band.tokens) for band in bands]
    assert all(a >= b for a, b in zip(lowest[:-1], highest[1:], strict=True))
    total = sum(band.mass * band.as_query for band in bands)
    np.testing.assert_allclose(total, run.losses - chain.entropy_rate, atol=1e-12)
    for band in bands:
        if band.half_as_query is not None:
            at = run.nearest(band.half_as_query)
            assert band.as_query[at] <= 0.5 * band.as_query[0] < band.as_query[at - 1]


def test_attraction_lists_tokens_by_the_time_of_their_largest_factor():
    chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5, tokens="abcd")
    _, run = observed_flow()
    rows = empirical.attraction(run, chain, tokens=("d", "zebra"), num_most=2)
    assert {"a", "d"} <= {row["token"] for row in rows} and len(rows) <= 3
    times = [row["at"] for row in rows]
    assert times == sorted(times)
    top = next(row for row in rows if row["token"] == "a")
    received = empirical.attention_received(chain, run.models)[:, 0]
    assert top["largest factor"] == pytest.approx(float(received.max()) / 0.75)


# Texts.


def test_shuffling_keeps_the_words_and_loses_their_order():
    chain = named_chain("default")
    text = empirical.sampled_setting(chain, num_tokens=60_000)
    mixed = empirical.shuffled(text)
    np.testing.assert_array_equal(
        np.bincount(mixed.ids.ravel()), np.bincount(text.ids.ravel())
    )
    independent = np.broadcast_to(np.asarray(chain.stationary), (4, 4))
    assert np.abs(mixed.chain.transition - independent).max() < 0.05
    assert abs(float(fs.theory.focus_rate(mixed.chain))) < 0.01
    assert float(fs.theory.focus_rate(chain)) > 0.05


def test_the_text_of_a_corpus_is_found_in_its_usual_place_or_as_given(tmp_path):
    file = tmp_path / "wikitext-2" / "train-subset.txt"
    file.parent.mkdir()
    file.write_text(STORY)
    assert empirical.find_text("wikitext2", tmp_path) == file
    assert empirical.find_text("tinystories", tmp_path) == tmp_path
    assert empirical.find_text("wikitext2", file) == file
    with pytest.raises(FileNotFoundError, match="no text file or folder"):
        empirical.find_text("wikitext2", tmp_path / "nowhere")


def fake_datasets(text):
    """Stands in for the package `datasets`: what it is asked for, and what it gives."""
    asked = []

    def load_dataset(name, part, *, split):
        asked.append((name, part, split))
        return {"text": text}

    module: Any = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    return module, asked


def test_a_downloaded_corpus_is_read_like_its_file(tmp_path, monkeypatch):
    module, asked = fake_datasets([STORY * 10, "", STORY * 10])
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = empirical.download_setting("tinystories", vocab=5)
    assert asked == [("roneneldan/TinyStories", None, "validation")]
    (tmp_path / "story.txt").write_text(STORY * 20)
    known = empirical.read_setting(
        tmp_path / "story.txt", tokeniser="tinystories", vocab=5
    )
    np.testing.assert_array_equal(found.ids, known.ids)
    assert found.chain.tokens == known.chain.tokens
    assert "roneneldan/TinyStories" in found.source


def test_downloading_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"flowsim\[corpora\]"):
        empirical.download_setting("wikitext2", vocab=64)
    with pytest.raises(ValueError, match="got 'wikitext3'"):
        empirical.download_setting("wikitext3", vocab=64)


# Scaling laws.


@pytest.mark.slow
def test_finite_contexts_approach_the_limit_like_1_over_s():
    law = empirical.context_law(
        *DEFAULT_START,
        t1=12.5,
        lengths=(16, 64, 256),
        num_windows=2**14,
        key=jax.random.key(1),
    )
    assert law.exponent == pytest.approx(-1.0, abs=0.12)
    # Measured: 1.41, 1.21, 1.25.
    np.testing.assert_allclose(law.errors * np.array(law.sizes), 1.3, rtol=0.2)


@pytest.mark.slow
def test_finite_samples_approach_the_limit_like_1_over_the_root_of_N():
    law = empirical.sample_law(*DEFAULT_START, t1=12.5, key=jax.random.key(2))
    # The root mean square of 12 samples is itself known to a fifth or so.
    assert law.exponent == pytest.approx(-0.5, abs=0.12)


DEFAULT_START = (
    named_chain("default"),
    fs.AttentionModel.init(jax.random.key(0), vocab=4, width=16, scale=1e-3),
)


# Other transition matrices.

LAW = np.array([0.75, 0.19, 0.05, 0.01])


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_rows_keep_the_stationary_law(seed):
    chain = named_chain("default")
    mixed = empirical.shuffled_rows(chain, seed=seed)
    np.testing.assert_allclose(LAW @ mixed.transition, LAW, rtol=1e-9)
    assert float(jnp.abs(mixed.transition - chain.transition).max()) > 0.1


def test_chains_of_one_law_include_both_signs_of_c():
    chains = empirical.same_law_chains(LAW)
    for chain in chains.values():
        np.testing.assert_allclose(chain.stationary, LAW, rtol=1e-9)
    rates = [float(fs.theory.focus_rate(chain)) for chain in chains.values()]
    assert min(rates) < -0.01 and max(rates) > 0.1


@pytest.mark.slow
def test_one_law_gives_one_time_of_condensation_and_focus_by_each_c():
    found = empirical.stage_times(empirical.same_law_chains(LAW), key=KEY)
    times = [stages.condensation for stages in found]
    assert max(times) < 1.001 * min(times)
    for stages in found:
        row = stages.row()
        assert row["mu dT_I/dlog(1/eps)"] == pytest.approx(1.0, abs=1e-3)
        slope = row["|c| d(T_II - T_I)/dlog(1/eps)"]
        assert slope == pytest.approx(1.0, abs=0.01)
        assert stages.attention is not None
        assert np.sign(stages.attention) == np.sign(stages.focus_rate)


def test_alignment_removes_a_shift_of_time():
    _, run = observed_flow()
    late = dataclasses.replace(run, ts=run.ts + 3.0)
    row = run.nearest(60.0)
    shift, error = empirical.aligned_error(late, run, float(late.ts[row]))
    assert shift == pytest.approx(-3.0) and error == 0.0


# Real text.


@functools.cache
def trained(corpus, seed, num_steps):
    """Training alone, by the command's defaults."""
    text = setting(corpus)
    loss = fs.PopulationLoss(text.chain)
    start_key, batch_key = jax.random.split(jax.random.key(seed))
    model = fs.AttentionModel.init(
        start_key, vocab=64, width=32, scale=1e-2, dtype=jnp.float32
    )
    return fs.train(
        text.batches(length=256, size=512),
        model,
        0.2,
        num_steps,
        key=batch_key,
        evaluate=loss,
        observe=functools.partial(diagnose, loss),
        every=4,
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
def test_shuffled_text_keeps_the_first_bump_alone():
    text = empirical.shuffled(setting("wikitext2"))
    loss = fs.PopulationLoss(text.chain)
    start_key, batch_key = jax.random.split(jax.random.key(0))
    model = fs.AttentionModel.init(
        start_key, vocab=64, width=32, scale=1e-2, dtype=jnp.float32
    )
    run = fs.train(
        text.batches(length=256, size=512),
        model,
        0.2,
        2250,
        key=batch_key,
        evaluate=loss,
        observe=functools.partial(diagnose, loss),
        every=4,
    )
    events = empirical.find_events(run)
    assert events.attention_peak is not None
    assert events.attention_peak[1] > 1.1 * events.attention_start
    assert events.second_direction is None
    lowest = float(run.observables.mean_top_attention.min())
    assert lowest > 0.97 * events.attention_start


# Command and figure.


def test_the_figure_has_six_panels_and_both_runs():
    chain, run = observed_flow()
    figure = comparison_figure(run, run, chain, tokens=[0, 2])
    assert len(figure.axes) == 6
    panel = figure.axes[2]
    ts = np.asarray(run.ts)
    drawn = [line for line in panel.lines if np.size(line.get_xdata()) == len(ts)]
    assert len(drawn) == 2 * 3  # Two tokens and the mean, of both runs.
    np.testing.assert_array_equal(
        drawn[0].get_ydata(), np.asarray(run.observables.top_attention)[:, 0]
    )
    alone = comparison_figure(run, None, chain)
    assert len(alone.axes[0].lines) < len(figure.axes[0].lines)


def run_command(arguments, capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.slow
def test_the_command_trains_on_a_text_file_and_writes_its_folder(tmp_path, capsys):
    (tmp_path / "story.txt").write_text(STORY * 30)
    folder = tmp_path / "run"
    options = ["--vocab", 4, "--width", 4, "--length", 16, "--batch", 8]
    options += ["--steps", 50, "--output", folder, "--quiet", "--tokens", "dog"]
    arguments = ["train", "--corpus", tmp_path / "story.txt", *options]
    code, out, err = run_command(arguments, capsys)
    assert code == 0 and err == ""
    assert "population flow" in out and "float32" in out and "story.txt" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["time reached"] == pytest.approx(10.0, rel=1e-6)
    assert len(summary["events"]) == 10
    assert fs.load_trajectory(folder / "training.npz").models.W0.dtype == jnp.float32
    assert fs.load_trajectory(folder / "flow.npz").models.W0.dtype == jnp.float64
    assert (folder / "train.png").stat().st_size > 10_000
    code, _, err = run_command(arguments, capsys)
    assert code == 2 and "--force" in err and err.count("\n") == 1
    (tmp_path / "state.npz").write_text("not a checkpoint")
    more = ["--force", "--checkpoint", tmp_path / "state.npz"]
    code, out, err = run_command([*arguments, *more], capsys)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "is not a checkpoint" in err


def test_without_text_the_shipped_chain_is_sampled_and_that_is_said():
    from flowsim.commands.train import Train, read_corpus

    found = read_corpus(Train(corpus="tinystories"))
    assert "no --text: sampled from the shipped chain of tinystories" in str(found)
    assert found.chain.tokens == fs.load_chain("tinystories", vocab=64).tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "missing.txt"], "there is no missing.txt"),
        (["--corpus", "empty.txt"], "holds no words"),
        (["--corpus", "binary.txt"], "not UTF-8"),
        (["--corpus", "story.txt", "--vocab", 64], "holds 8"),
        (["--corpus", "story.txt", "--vocab", 4, "--length", 500], "at least 501"),
        (["--corpus", "once.txt", "--vocab", 3], "must have a successor"),
        (["--corpus", "story.txt", "--text", "."], "--text is for the named corpora"),
        (["--corpus", "wikitext2", "--text", "nowhere"], "no text file or folder"),
        (["--corpus", "wikitext2", "--vocab", 65], "no shipped table"),
        (["--corpus", "wikitext2", "--tokens", "zebra"], "'zebra' is not in it"),
        (["--learning-rate", -1], "--learning-rate must be positive"),
        (["--steps", -3], "--steps must be positive"),
        (["--steps", 0], "--steps must be positive"),
        (["--learning-rate", 0], "--learning-rate must be positive"),
        (["--corpus", "story.txt", "--download"], "--download is for a named corpus"),
        (["--vocab", 1], "--vocab must be at least 2"),
        (["--precision", "half"], "half"),
    ],
)
def test_wrong_input_ends_with_one_line_and_status_2(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(bytes(range(128, 256)))
    (tmp_path / "story.txt").write_text(STORY * 20)
    (tmp_path / "once.txt").write_text("the cat the cat the cat end\n")
    before = sorted(tmp_path.iterdir())
    code, out, err = run_command(["train", *arguments], capsys)
    assert code == 2 and out == ""
    assert err.startswith("flowsim: error: ") and err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


def test_empirical_claims_fail_where_training_departs_from_the_flow():
    chain, run = observed_flow()
    late = dataclasses.replace(run, ts=1.3 * run.ts)

    def claims(training):
        study = empirical.TextStudy(
            setting=empirical.sampled_setting(chain, num_tokens=2000),
            training=training,
            flow=run,
            events=(empirical.find_events(training), empirical.find_events(run)),
            focus_rate=0.0,
        )
        return Verification(tuple(text_claims("toy", study))).rows()

    same, shifted = claims(run), claims(late)
    for good, bad in zip(same[:2], shifted[:2], strict=True):
        assert good["verdict"] == "agrees" and good["measured"] == 0.0
        assert bad["verdict"] == "fails"
    condensed = same[2], shifted[2]
    assert [row["verdict"] for row in condensed] == ["agrees", "fails"]


@pytest.mark.slow
def test_controls_without_bigrams_agree():
    table = Verification(tuple(control_claims()))
    assert table.succeeded and len(table) == 3


def test_text_is_for_the_empirical_claims_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(["verify", "--text", "."], capsys)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "--text is for --empirical" in err


def test_the_study_needs_a_flow_time_with_another_optimiser():
    import optax

    text = empirical.sampled_setting(named_chain("default"), num_tokens=5000)
    with pytest.raises(ValueError, match="flow_time must be given"):
        empirical.study_text(text, length=8, batch=4, optimiser=optax.adam(1e-3))
    model = random_model(named_chain("default"))
    assert model.vocab == text.chain.num_states
