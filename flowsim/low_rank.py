"""The least cross-entropy that logits of bounded rank can reach.

After the second critical point the theory has no closed form for where the flow pauses
next: it pauses where r directions of embedding space are used as well as they can be.
The loss there is a minimum over logits of rank r, computed here numerically, with what
tells how far the number can be trusted.

>>> import flowsim as fs
>>> chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], lam=0.5)
>>> round(float(fs.theory.best_rank_loss(chain, 1).loss), 6)
0.63336
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from . import _summary, _trees
from ._types import Scalar
from .derivatives import value_and_grad_norm
from .markov import MarkovChain


class RankOutcome(eqx.Enumeration):
    """How far a `BestRankLoss` can be trusted."""

    converged = "the best start converged and others reached the same loss"
    one_start = "the best start converged, but no other start reached its loss"
    not_converged = "the gradient norm of the best start is above the tolerance"


class BestRankLoss(eqx.Module):
    """Least cross-entropy of logits of bounded rank, with what vouches for it.

    Attributes:
        loss: the least loss over all starts (nats): an upper bound on the minimum.
        logits: the logits that attain it.
        grad_norm: Euclidean norm of the gradient in both factors, at these logits.
        losses: final loss of every start.
        grad_norms: final gradient norm of every start.
        num_agreeing: starts whose loss is within `tolerance` of the best, itself
            included.
        outcome: a `RankOutcome`.
        rank: the bound on the rank.
        tolerance: on the gradient norm, and on the agreement of two losses.
    """

    loss: Scalar
    logits: Float[Array, "d d"]
    grad_norm: Scalar
    losses: Float[Array, " starts"]
    grad_norms: Float[Array, " starts"]
    num_agreeing: Int[Array, ""]
    outcome: RankOutcome
    rank: int = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)

    @property
    def spread(self) -> Scalar:
        """Largest minus least final loss over the starts; local minima show here."""
        return jnp.max(self.losses) - jnp.min(self.losses)

    def __str__(self) -> str:
        if _trees.is_traced(self.losses) or self.losses.ndim != 1:
            return f"BestRankLoss(rank {self.rank}, batch or traced)"
        return _summary.aligned(
            f"BestRankLoss of rank {self.rank}",
            {
                "outcome": RankOutcome[self.outcome],
                "loss (nats)": self.loss,
                "|grad|": self.grad_norm,
                "agreeing": f"{self.num_agreeing} of {self.losses.size} starts",
                "spread (nats)": self.spread,
            },
        )


def best_rank_loss(
    chain: MarkovChain,
    rank: int,
    *,
    num_starts: int = 8,
    tol: float = 1e-7,
    max_steps: int = 10_000,
    key: PRNGKeyArray | None = None,
) -> BestRankLoss:
    """Least cross-entropy L_r over logits of rank at most r, found numerically.

        L_r = min { - sum_i pi_i sum_j P_ij log softmax(Z_i)_j : rank Z <= r }

    The saddles after theta_c^1 lie at these losses: r directions of embedding space
    used as well as they can be. L_r = H(P) from r = d - 1 on, if P has no zeros.

    Method: Z = U V^T, limited-memory BFGS from random U and V. The problem is not
    convex, so what is returned is the best of several starts, beside all of them. If P
    has zeros the minimum may lie at infinity; the gradient norm then says how close the
    returned loss is to it, and the outcome is `not_converged`.

    Args:
        chain: the chain; small vocabularies (time grows as steps times d^2).
        rank: the bound r on the rank, from 1 to d.
        num_starts: number of random starts.
        tol: on the gradient norm and on the agreement of losses. The error of the loss
            itself is of the order of the squared gradient norm. In single precision,
            take 1e-3.
        max_steps: bound on the steps of each start.
        key: of the random starts; `jax.random.key(0)` when absent.

    Raises:
        ValueError: for a rank outside 1 ... d or fewer than one start.
    """
    if not 1 <= rank <= chain.num_states:
        raise ValueError(
            f"rank must lie between 1 and d = {chain.num_states}; got {rank}."
        )
    if num_starts < 1:
        raise ValueError(f"num_starts must be at least 1; got {num_starts}.")
    key = jax.random.key(0) if key is None else key
    dtype = chain.stationary.dtype
    shape = (2, num_starts, chain.num_states, rank)
    factors, losses, grad_norms = _minimise_factors(
        chain.stationary[:, None] * chain.transition,
        jax.random.normal(key, shape, dtype),
        max_steps,
    )
    # A start that failed numerically must not hide the others.
    best = jnp.nanargmin(losses)
    num_agreeing = jnp.sum(losses - losses[best] <= tol)
    outcome = RankOutcome.where(
        grad_norms[best] <= tol,
        RankOutcome.where(
            num_agreeing > 1, RankOutcome.converged, RankOutcome.one_start
        ),
        RankOutcome.not_converged,
    )
    return BestRankLoss(
        loss=losses[best],
        logits=factors[0][best] @ factors[1][best].T,
        grad_norm=grad_norms[best],
        losses=losses,
        grad_norms=grad_norms,
        num_agreeing=num_agreeing,
        outcome=outcome,
        rank=rank,
        tolerance=tol,
    )


@eqx.filter_jit
def _minimise_factors(pairs, starts, max_steps):
    """Final factors, losses and gradient norms of every start.

    `pairs` are the probabilities pi_i P_ij of consecutive tokens.
    """
    accuracy = float(jnp.finfo(starts.dtype).eps) ** (2 / 3)
    solver = optx.LBFGS(rtol=accuracy, atol=accuracy)

    def objective(factors):
        logits = factors[0] @ factors[1].T
        return -jnp.sum(pairs * jax.nn.log_softmax(logits, axis=-1))

    def minimise(start):
        solution = optx.minimise(
            lambda factors, _: objective(factors),
            solver,
            start,
            max_steps=max_steps,
            throw=False,
        )
        # Evaluated at the point returned, whatever the solver's own verdict.
        return solution.value, *value_and_grad_norm(objective, solution.value)

    # One start after another: they need very different numbers of steps.
    return jax.lax.map(minimise, (starts[0], starts[1]))
