"""Claims and their verdicts; the whole table on the default chain."""

import contextlib
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import theory
from flowsim.__main__ import main
from flowsim.loss import PopulationLoss
from flowsim.model import AttentionModel
from flowsim.saddles import find_saddles
from flowsim.verification import (
    Claim,
    Verdict,
    Verification,
    compare,
    depart,
    verify,
)
from flowsim.verification.flows import avoiding_chain, crossing, read
from flowsim.verification.second_saddle import critical_point_claims
from flowsim.verification.whole_cycle import approaches

from .precision import single_precision
from .problems import CHAINS, named_chain, two_mode_run, two_modes


def _claim(measured, predicted=2.0, tolerance=1e-2, **options) -> Claim:
    return compare("a claim", "a theorem", predicted, measured, tolerance, **options)


def test_a_claim_agrees_up_to_its_tolerance_and_fails_beyond():
    assert _claim(2.019).verdict == Verdict.agrees
    assert _claim(2.021).verdict == Verdict.fails
    assert _claim(1.979).verdict == Verdict.fails


def test_a_measurement_that_is_not_a_number_fails_even_with_a_loose_tolerance():
    for bad in (np.nan, np.inf):
        assert _claim(bad, tolerance=1e300).verdict == Verdict.fails
    assert _claim(1.0, predicted=np.nan, scale=1.0).verdict == Verdict.fails


def test_the_relative_error_is_relative_to_the_prediction_or_to_the_given_scale():
    assert _claim(2.5).relative_error == pytest.approx(0.25)
    assert _claim(2.5, scale=10.0).relative_error == pytest.approx(0.05)


def test_a_prediction_of_zero_needs_a_scale():
    with pytest.raises(ValueError, match=r"scale must be positive; got 0"):
        _claim(1.0, predicted=0.0)


def test_a_departure_differs_only_where_the_corrected_claim_holds():
    good, bad = _claim(2.0), _claim(3.0)
    assert depart(bad, good).verdict == Verdict.differs
    assert "Corrected: a claim; predicted 2" in depart(bad, good).note
    assert depart(bad, bad).verdict == Verdict.fails
    assert depart(good, bad).verdict == Verdict.agrees


def test_only_a_failing_claim_makes_a_verification_unsuccessful():
    good, bad = _claim(2.0), _claim(3.0)
    assert Verification((good, depart(bad, good))).succeeded
    assert not Verification((good, bad)).succeeded


def test_rows_are_plain_data_with_one_set_of_keys_and_the_table_shows_every_claim():
    table = Verification((_claim(2.0), _claim(3.0)))
    for row in table.rows():
        assert list(row) == list(table.rows()[0])
        assert all(isinstance(value, str | float) for value in row.values())
    assert [row["verdict"] for row in table.rows()] == ["agrees", "fails"]
    lines = str(table).splitlines()
    assert len(lines) == 5
    assert len({line.rfind("  ") for line in lines[:3]}) == 1  # Verdicts line up.


@pytest.mark.parametrize("name", CHAINS)
def test_the_avoiding_chain_keeps_the_law_and_turns_the_sign_of_c(name):
    law = named_chain(name).stationary
    chain = avoiding_chain(law)
    P = chain.transition
    assert jnp.all(P >= 0)
    np.testing.assert_allclose(jnp.sum(P, axis=1), 1.0, rtol=1e-14)
    np.testing.assert_allclose(law @ P, law, rtol=1e-14)
    top = int(jnp.argmax(law))
    assert P[top, top] < law[top]
    assert theory.focus_rate(chain) < 0


def test_a_dense_chain_has_the_same_loss_as_its_structured_one():
    chain = named_chain("default")
    model = AttentionModel.init(jax.random.key(0), vocab=4, width=3, scale=0.7)
    np.testing.assert_allclose(
        PopulationLoss(chain.to_dense())(model),
        PopulationLoss(chain)(model),
        rtol=1e-14,
    )


def _run(ts):
    """A stand-in for a run with saved times only: all that reading a curve needs."""
    run: Any = SimpleNamespace(ts=jnp.asarray(ts))
    return run


def test_a_crossing_is_found_between_saved_times_to_the_order_of_a_cubic():
    errors = []
    for num in (20, 40):
        run = _run(np.linspace(0.0, 3.0, num))
        errors.append(abs(crossing(run, np.sin(run.ts), 0.5) - np.pi / 6))
        assert read(run, np.sin(run.ts), 1.1) == pytest.approx(np.sin(1.1), abs=1e-4)
    assert errors[0] < 1e-4 and errors[1] < errors[0] / 8


def test_a_level_that_is_not_crossed_gives_not_a_number():
    run = _run(np.linspace(0.0, 1.0, 9))
    assert np.isnan(crossing(run, np.asarray(run.ts), 2.0))
    assert np.isnan(crossing(run, -np.asarray(run.ts), -0.5))  # Falls through it.
    assert np.isnan(read(run, np.asarray(run.ts), np.nan))


@pytest.mark.parametrize("name", ["default", "metropolis", "dense, defocus"])
def test_theta_c_1_claims_agree_on_chains_of_either_sign(name):
    loss = PopulationLoss(named_chain(name).to_dense())
    like = AttentionModel.init(jax.random.key(0), vocab=4, width=3, key_width=2)
    claims = Verification(tuple(critical_point_claims(loss, like)))
    assert claims.count(Verdict.agrees) == len(claims), str(claims)


@pytest.mark.parametrize(
    ("function", "statement"),
    [
        ("focus_rate", "largest eigenvalue of (WQ, WK)"),
        ("outer_eigenvalues", "(W0, W1) eigenvalue"),
        ("second_critical_point", "|grad L| = 0"),
    ],
)
def test_a_wrong_prediction_fails_its_claim(monkeypatch, function, statement):
    right = getattr(theory, function)

    def wrong(*args, **kwargs):
        return jax.tree.map(lambda x: x * (1 + 1e-6), right(*args, **kwargs))

    monkeypatch.setattr(theory, function, wrong)
    loss = PopulationLoss(named_chain("default").to_dense())
    like = AttentionModel.init(jax.random.key(0), vocab=4, width=3, key_width=2)
    claims = critical_point_claims(loss, like)
    failed = [c.statement for c in claims if c.verdict == Verdict.fails]
    assert any(statement in text for text in failed), failed


def test_verify_refuses_scales_that_do_not_fall():
    with pytest.raises(ValueError, match=r"scales must be at least two .* got \[0.1"):
        verify(scales=[0.1, 0.2])
    with pytest.raises(ValueError, match="scales"):
        verify(scales=[0.1])


def test_verify_refuses_single_precision():
    with single_precision(), pytest.raises(ValueError, match="double precision"):
        verify()


# How the distance from a saddle scales with eps.


@pytest.fixture(scope="module")
def two_searches():
    return [find_saddles(two_mode_run(eps), two_modes) for eps in (1e-3, 1e-5)]


def test_a_saddle_approached_as_eps_falls_has_the_exponent_of_its_distance(
    two_searches,
):
    large, small = two_searches
    found = approaches(large, small, (1e-3, 1e-5))
    # The minimum is not a saddle; the others come in order of falling loss.
    assert [point.index for point in found] == [2, 1]
    np.testing.assert_allclose([point.loss for point in found], [0.505, 0.005])
    # The run starts at distance 2 eps from the origin. Next to the second saddle the
    # distance is that of mode two, eps e^(t/10), and of mode one, e^(-2t) / eps^2.
    assert found[0].exponent == pytest.approx(1.0, abs=1e-6)
    assert found[1].exponent == pytest.approx(6 / 7, abs=1e-3)
    assert [point.distance for point in found] == [v.distance for v in small[:2]]


def test_a_saddle_near_one_of_two_runs_only_has_no_exponent(two_searches):
    large, small = two_searches
    for found in (
        approaches(large, small[:1], (1e-3, 1e-5)),
        approaches(large[:1], small, (1e-3, 1e-5)),
    ):
        assert [math.isnan(point.exponent) for point in found] == [False, True]
        assert [point.index for point in found] == [2, 1]


# The whole table.


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What `flowsim verify` prints, writes and returns, at a small width."""
    folder, said = tmp_path_factory.mktemp("verify") / "run", io.StringIO()
    arguments = ["verify", "--width", "4", "--output", str(folder), "--quiet"]
    with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(said):
        main(arguments)
    rows = json.loads((folder / "summary.json").read_text())["claims"]
    return end.value.code, said.getvalue(), rows, (folder / "claims.md").read_text()


@pytest.mark.slow
def test_no_claim_fails_and_the_exit_status_says_so(report):
    status, _, rows, _ = report
    failed = [row["statement"] for row in rows if row["verdict"] == "fails"]
    assert status == 0 and failed == []


@pytest.mark.slow
def test_exactly_the_chains_with_negative_c_differ_from_the_paper(report):
    _, _, rows, _ = report
    differ = {row["statement"] for row in rows if row["verdict"] == "differs"}
    negative = ("wikitext2, V = 256", "tinystories, V = 64", "tinystories, V = 256")
    moves = "attention moves to frequent tokens"
    assert differ == {f"{name}: {moves}" for name in negative}
    for row in rows:
        if row["verdict"] == "differs":
            assert (row["predicted"], row["measured"]) == (1.0, -1.0)
            assert "Corrected: attention moves by the sign of c" in row["note"]


@pytest.mark.slow
def test_every_group_of_claims_is_in_the_table(report):
    _, _, rows, _ = report
    groups = {row["statement"].split(":")[0].split(",")[0] for row in rows}
    assert groups >= {
        "conserved",
        "dissipation",
        "origin",
        "condensation",
        "theta_c^1",
        "focus",
        "escape law",
        "c < 0",
        "cycle",
        "second focus",
        "wikitext2",
        "tinystories",
        "control",
    }
    assert len({row["statement"] for row in rows}) == len(rows) == 50
    for row in rows:
        holds = row["relative_error"] <= row["tolerance"]
        assert holds == (row["verdict"] == "agrees")


@pytest.mark.slow
def test_the_readme_shows_these_claims_with_these_verdicts(report):
    _, _, rows, _ = report
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    shown = {}
    for line in readme.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6:
            shown[cells[0].replace("\\|", "|")] = cells[-1]
    for row in rows:
        assert shown.get(row["statement"]) == row["verdict"], row["statement"]


@pytest.mark.slow
def test_the_table_is_printed_and_written_as_json_and_markdown(report):
    _, printed, rows, markdown = report
    assert "50 claims: 47 agree, 3 differs, 0 fails" in printed
    lines = markdown.splitlines()
    assert sum(line.startswith("|") for line in lines) == len(rows) + 2
    for row in rows:
        assert row["statement"] in printed
        assert row["statement"].replace("|", "\\|") in markdown
    assert set(rows[0]) == set(vars(_claim(2.0)))


@pytest.mark.parametrize(("measured", "status"), [(2.0, 0), (3.0, 1)])
def test_only_a_failing_claim_gives_exit_status_1(
    tmp_path, monkeypatch, capsys, measured, status
):
    table = Verification((_claim(2.0), _claim(measured)))
    monkeypatch.setattr("flowsim.verification.verify", lambda *a, **k: table)
    with pytest.raises(SystemExit) as end:
        main(["verify", "--output", str(tmp_path / "run"), "--quiet"])
    assert end.value.code == status
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["claims"]
    assert [row["measured"] for row in rows] == [2.0, measured]
    assert str(table) in capsys.readouterr().out
