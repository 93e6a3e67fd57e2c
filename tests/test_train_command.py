"""`flowsim train`, its figure, and the empirical rows of `flowsim verify`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim import empirical
from flowsim.plots import comparison_figure
from flowsim.verification import Verification
from flowsim.verification.empirical import (
    _limit_claims as limit_claims,
    _no_bigrams_claims as no_bigrams_claims,
    _shuffled_claims as shuffled_claims,
    _text_claims as text_claims,
    verify_empirical,
)

from .commands import run_command
from .problems import STORY, named_chain, observed_flow, random_model

KEY = jax.random.key(0)


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
    flow = fs.load_trajectory(folder / "flow.npz")
    assert flow.models.W0.dtype == jnp.float64 and float(flow.ts[-1]) == 10.0
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
@pytest.mark.parametrize("name", ["wikitext2", "tinystories"])
def test_controls_without_bigrams_agree(name):
    chain = fs.load_chain(name, vocab=64)
    text = empirical.sampled_setting(chain)
    claims = [
        *no_bigrams_claims(name, chain, KEY),
        *shuffled_claims(name, text, 2250, KEY),
    ]
    table = Verification(tuple(claims))
    assert table.succeeded and len(table) == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wikitext2", "tinystories"])
def test_the_limit_of_small_starts_follows_c(name):
    table = Verification(tuple(limit_claims(name, fs.load_chain(name, vocab=64), KEY)))
    assert table.succeeded and len(table) == 3


def test_empirical_claims_need_a_thousand_steps():
    with pytest.raises(ValueError, match="num_steps must be at least 1000; got 999"):
        verify_empirical(num_steps=999)


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
