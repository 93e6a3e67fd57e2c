"""Claims about the three local models agree where true and fail where not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flowsim import theory
from flowsim.flow import gradient_flow
from flowsim.loss import PopulationLoss
from flowsim.model import AttentionModel
from flowsim.verification import Verdict, Verification
from flowsim.verification.flows import dense
from flowsim.verification.local_models import (
    family_claims,
    lemma_claims,
    manifold_claims,
    picture_claims,
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
    return PopulationLoss(dense(named_chain("default")))


@pytest.mark.slow
def test_the_lemma_agrees_on_the_default_chain(default):
    assert not bad(lemma_claims(default))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "metropolis"])
def test_the_manifold_claims_agree_and_fail_with_a_wrong_rate(name, monkeypatch):
    loss = PopulationLoss(dense(named_chain(name)))
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
    claims = family_claims(name, FAMILIES[name](), flow=name == "lazy, d = 4")
    table = Verification(tuple(claims))
    assert table.succeeded, bad(claims)
    different = bad(claims)
    if name.startswith("Metropolis"):
        assert list(different) == [
            f"{name}: unfolding: second eigenvalue = O(delta^3): exponent"
        ]
    else:
        assert not different


def test_every_statement_of_a_table_is_said_once():
    assert len(set(FAMILIES)) == len(FAMILIES) >= 3
    assert jax.tree.leaves(FAMILIES["lazy, d = 4"]().chain(0.0))[0].dtype == jnp.float64
