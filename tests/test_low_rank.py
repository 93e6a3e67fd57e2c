"""The best logits of bounded rank."""

import jax
import jax.numpy as jnp
import pytest

from flowsim import theory
from flowsim.markov import lazy_chain

from .comparisons import DEFAULT, close, every_chain
from .problems import named_chain


def test_best_rank_loss_reproduces_the_later_plateaus_of_the_default_chain():
    chain = named_chain(DEFAULT)
    for rank, level in ((1, 0.63335989), (2, 0.56265472)):
        best = theory.best_rank_loss(chain, rank)
        assert best.outcome == theory.RankOutcome.converged
        close(best.loss, level, 1e-8)
        assert best.grad_norm < 1e-7
        assert best.spread < 1e-12


@every_chain
def test_best_rank_loss_falls_with_the_rank_down_to_the_floor(name):
    chain = named_chain(name)
    losses = [theory.best_rank_loss(chain, rank).loss for rank in (1, 2, 3)]
    assert losses[0] < chain.unigram_entropy
    assert losses[1] < losses[0] - 1e-6
    assert losses[2] < losses[1] - 1e-6
    # Rank d - 1 suffices: a shift of a row of logits changes no prediction.
    close(losses[2], chain.entropy_rate)


@pytest.mark.slow
@every_chain
def test_best_logits_have_the_rank_and_are_stationary_on_its_manifold(name):
    chain = named_chain(name)
    best = theory.best_rank_loss(chain, 2)
    values = jnp.linalg.svd(best.logits, compute_uv=False)
    assert jnp.all(values[2:] < 1e-13 * values[0])

    def loss(logits):
        return -chain.pair_expectation(jax.nn.log_softmax(logits, axis=-1))

    close(loss(best.logits), best.loss)
    slope = jax.grad(loss)(best.logits)
    left, _, right = jnp.linalg.svd(best.logits)
    # The gradient lies in the normal space of the rank-two matrices.
    assert jnp.max(jnp.abs(left[:, :2].T @ slope)) < 1e-7
    assert jnp.max(jnp.abs(slope @ right[:2].T)) < 1e-7
    # No sampled competitor of that rank is better.
    U, V = jax.random.normal(jax.random.key(7), (2, 5000, 4, 2))
    competitors = jax.vmap(loss)(jnp.einsum("nir,njr->nij", U, V))
    assert jnp.min(competitors) > best.loss


@pytest.mark.slow
def test_unfinished_and_unconfirmed_searches_say_so():
    chain = named_chain(DEFAULT)
    short = theory.best_rank_loss(chain, 2, max_steps=5)
    assert short.outcome == theory.RankOutcome.not_converged
    assert short.grad_norm > short.tolerance
    assert short.loss > theory.best_rank_loss(chain, 2).loss
    alone = theory.best_rank_loss(chain, 2, num_starts=1)
    assert alone.outcome == theory.RankOutcome.one_start
    assert "no other start" in str(alone)


@pytest.mark.slow
def test_best_rank_loss_works_under_jit_and_vmap():
    pi = jnp.array([0.75, 0.19, 0.05, 0.01])

    @jax.jit
    @jax.vmap
    def batched(lam):
        return theory.best_rank_loss(lazy_chain(pi, lam), 1)

    lams = jnp.array([0.3, 0.5])
    best = batched(lams)
    assert jnp.all(best.outcome == theory.RankOutcome.converged)
    for lam, loss in zip(lams, best.loss, strict=True):
        close(theory.best_rank_loss(lazy_chain(pi, lam), 1).loss, loss)
