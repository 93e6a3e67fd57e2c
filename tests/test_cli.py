"""The command line: one table and a run folder, or one line and exit status 2."""

import json

import numpy as np
import pytest

import flowsim as fs
from flowsim.__main__ import main
from flowsim.records import load_chain_file

from .commands import run_command


@pytest.mark.slow
def test_cycle_prints_stages_and_writes_summary_trajectory_and_figure(tmp_path, capsys):
    folder = tmp_path / "run"
    code, out, err = run_command(
        ["cycle", "--t1", 150, "--output", folder, "--quiet"], capsys
    )
    assert code == 0 and err == ""
    assert "condensation" in out and "reached t1" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "reached_t1"
    run = fs.load_trajectory(folder / "trajectory.npz")
    assert float(run.losses[-1]) == summary["final loss (nats)"]
    assert (folder / "cycle.png").stat().st_size > 10_000
    code, out, err = run_command(
        ["cycle", "--t1", 150, "--output", folder, "--quiet"], capsys
    )
    assert code == 2 and "--force" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cycle", "--chain", "wikitext3"], "--chain must be one of"),
        (["cycle", "--vocab", 64], "--vocab is for the shipped chains"),
        (["cycle", "--chain", "wikitext2", "--vocab", 65], "65"),
        (["cycle", "--pi", 0.5, 0.5], "--pi and --lam go together"),
        (["cycle", "--pi", 0.5, 0.6, "--lam", 0.1], "sum"),
        (["cycle", "--pi", 0.5, 0.5, "--lam", 1.5], "lam"),
        (["cycle", "--scale", -1], "--scale must be positive"),
        (["cycle", "--t1", -1], "--t1 must be positive"),
        (["cycle", "--rtol", 2], "--rtol must be below 1"),
        (["cycle", "--max-steps", 0], "--max-steps must be positive"),
        (["cycle", "--width", 0], "width"),
        (["verify", "--width", 0], "--width must be positive"),
        (["cycle", "--t1", "soon"], "soon"),
        (["cycle", "--chain", "missing.npz"], "no chain file"),
        (["cycle", "--wrong", 1], "wrong"),
        (["counts", "missing.txt"], "missing.txt"),
        (["dance"], "dance"),
        ([], ""),
    ],
)
def test_wrong_input_ends_with_one_line_and_status_2(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(arguments, capsys)
    assert code == 2 and out == ""
    assert err.startswith("flowsim: error: ") and err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("not a folder")
    code, _, err = run_command(["cycle", "--output", "text.txt/run"], capsys)
    assert code == 2 and "cannot be written" in err and err.count("\n") == 1


def test_an_internal_error_is_not_called_wrong_input(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("a fault of the library")

    monkeypatch.setattr("flowsim.flow.gradient_flow", broken)
    with pytest.raises(ValueError, match="a fault of the library"):
        main(["cycle", "--t1", "1", "--output", str(tmp_path / "run"), "--quiet"])


def test_every_option_has_help_with_its_default(capsys):
    code, out, _ = run_command(["cycle", "--help"], capsys)
    assert code == 0
    for option in ("--chain", "--pi", "--lam", "--t1", "--rtol", "--scale", "--force"):
        assert option in out
    assert "flow time" in out and "20000" in out


def test_counts_makes_a_table_that_loads_as_a_chain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat saw the dog . the dog ran .\n" * 20)
    code, out, _ = run_command(
        ["counts", "text.txt", "--vocab", 4, "--output", "t.npz"], capsys
    )
    assert code == 0 and "t.npz" in out
    chain = load_chain_file("t.npz")
    assert chain.tokens is not None and chain.tokens[0] == "the"
    # Tokens: the . dog cat. "the" is followed by cat once and by dog twice.
    np.testing.assert_allclose(chain.transition[0], [0, 0, 2 / 3, 1 / 3], atol=1e-14)
    code, _, err = run_command(
        ["counts", "text.txt", "--vocab", 4, "--output", "t.npz"], capsys
    )
    assert code == 2 and "--force" in err
