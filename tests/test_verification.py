"""Claims and their verdicts; the whole table on the default chain."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import theory
from flowsim.loss import PopulationLoss
from flowsim.model import AttentionModel
from flowsim.verification import (
    Claim,
    Verdict,
    Verification,
    compare,
    depart,
    verify,
)
from flowsim.verification.flows import avoiding_chain, crossing, dense, read
from flowsim.verification.second_saddle import critical_point_claims

from .problems import CHAINS, named_chain


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
        PopulationLoss(dense(chain))(model), PopulationLoss(chain)(model), rtol=1e-14
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
    loss = PopulationLoss(dense(named_chain(name)))
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
    loss = PopulationLoss(dense(named_chain("default")))
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
    with jax.enable_x64(False), pytest.raises(ValueError, match="double precision"):
        verify()
