"""Claims about the three local models agree where true and fail where not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flowsim import theory
from flowsim.flow import gradient_flow
from flowsim.loss import PopulationLoss
from flowsim.lyapunov_schmidt import MetropolisFamily
from flowsim.markov import metropolis_chain
from flowsim.model import AttentionModel
from flowsim.verification import Verdict, Verification, compare
from flowsim.verification.claims import named
from flowsim.verification.dilution import picture_claims
from flowsim.verification.early_stages import random_direction
from flowsim.verification.first_saddle import origin_claims
from flowsim.verification.local_models import (
    family_claims,
    lemma_claims,
    manifold_claims,
    member_claims,
)
from flowsim.verification.second_saddle import (
    critical_point_claims,
    prediction_claims,
)
from flowsim.verification.unfolding import FAMILIES

from .problems import named_chain


def bad(claims) -> dict[str, Any]:
    return {
        claim.statement: (claim.predicted, claim.measured, claim.note)
        for claim in claims
        if claim.verdict != Verdict.agrees
    }


@pytest.fixture(scope="module")
def default():
    return PopulationLoss(named_chain("default").to_dense())


@pytest.mark.slow
def test_the_lemma_agrees_on_the_default_chain(default):
    assert not bad(lemma_claims(default))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "metropolis"])
def test_the_manifold_claims_agree_and_fail_with_a_wrong_rate(name, monkeypatch):
    loss = PopulationLoss(named_chain(name).to_dense())
    assert not bad(manifold_claims(loss))
    right = theory.focus_rate
    monkeypatch.setattr(theory, "focus_rate", lambda chain: 1.05 * right(chain))
    assert any("q kk grows" in text for text in bad(manifold_claims(loss)))


@pytest.mark.slow
def test_the_picture_of_the_embeddings_contracts_and_expands(default):
    start = AttentionModel.init(jax.random.key(0), vocab=4, width=4, scale=1e-3)
    run = gradient_flow(default, start, t1=2e3, rtol=1e-7)
    assert not bad(picture_claims(default, run))
    # Cut off before dilution nothing has contracted yet.
    row = run.nearest(45.0)
    early = jax.tree.map(lambda leaf: leaf[:row] if leaf.ndim else leaf, run)
    assert [text.split()[3] for text in bad(picture_claims(default, early))] == [
        "contract",
        "spread",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_iii_and_iv_on_every_family(name):
    claims = family_claims(name, FAMILIES[name]())
    table = Verification(tuple(claims))
    assert table.succeeded, bad(claims)
    different = bad(claims)
    if name.startswith("Metropolis"):
        assert list(different) == [
            f"{name}: unfolding: second eigenvalue = O(delta^3): exponent"
        ]
    else:
        assert not different


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "lazy, d = 4"])
def test_stages_i_and_ii_on_a_member_of_the_other_families(name):
    claims = member_claims(FAMILIES[name]())
    assert not bad(claims)
    groups = {claim.statement.split(":")[0] for claim in claims}
    assert groups >= {
        "origin",
        "condensation",
        "balance",
        "theta_c^1",
        "focus",
        "escape law",
        "linearised flow",
        "rank-one manifold",
        "embeddings",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_spectra_of_a_member_agree_and_fail_with_a_wrong_theory(name, monkeypatch):
    loss = PopulationLoss(FAMILIES[name]().chain(0.05).to_dense())
    like = random_direction(loss, jax.random.key(0), width=2)

    def measured():
        claims = [*origin_claims(loss, like), *critical_point_claims(loss, like)]
        return bad([*claims, *prediction_claims(loss, like)])

    assert not measured()
    for function, statement in (
        ("origin_rate", "escape rate is mu"),
        ("focus_rate", "largest eigenvalue of (WQ, WK)"),
        ("outer_eigenvalues", "(W0, W1) eigenvalue 1"),
        ("second_critical_point", "every token predicts pi"),
    ):
        right = getattr(theory, function)

        def wrong(*args, right=right, **kwargs):
            return jax.tree.map(lambda x: x * (1 + 1e-6), right(*args, **kwargs))

        with monkeypatch.context() as patch:
            patch.setattr(theory, function, wrong)
            assert any(statement in text for text in measured()), function


def test_a_name_is_put_before_every_statement():
    claim = compare("a claim", "a theorem", 2.0, 2.0, 0.0)
    (called,) = named("a chain", [claim])
    assert called.statement == "a chain: a claim"
    assert called.measured == claim.measured and called.verdict == claim.verdict


def test_the_metropolis_family_is_the_metropolis_chain_from_zero_upwards():
    family = MetropolisFamily(0.6, (1.0, 0.5, 0.25, -0.75, -1.0))
    for delta in (0.0, 0.02, 0.05):
        chain = family.chain(delta)
        exact = metropolis_chain(chain.stationary)
        assert float(jnp.max(jnp.abs(chain.transition - exact.transition))) < 1e-15


def test_every_statement_of_a_table_is_said_once():
    assert len(set(FAMILIES)) == len(FAMILIES) >= 3
    assert jax.tree.leaves(FAMILIES["lazy, d = 4"]().chain(0.0))[0].dtype == jnp.float64
