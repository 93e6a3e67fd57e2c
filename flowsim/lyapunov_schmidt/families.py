"""Families of population losses in delta, around chains with low tokens alike.

Unchecked formulas, so that delta may be traced and differentiated; a law is a law only
while delta is small enough.

    pi_1 = top,   pi_i = (1 - top) / (d - 1) + c_i delta     (i >= 2)
"""

import abc
from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _trees
from .._types import RealLike, Scalar
from ..loss import PopulationLoss
from ..markov import DenseKernel, LazyKernel, MarkovChain
from ..model import AttentionModel


class ChainFamily(eqx.Module):
    """A family of chains as a family of objectives: call it with a model and delta."""

    pattern: eqx.AbstractVar[Float[Array, " low"]]

    @abc.abstractmethod
    def chain(self, delta: RealLike) -> MarkovChain:
        """The member at one delta."""

    def __call__(self, model: AttentionModel, delta: RealLike) -> Scalar:
        return PopulationLoss(self.chain(delta))(model)


class TwoLevelFamily(ChainFamily):
    """Lazy chains on two-level laws: P = lam I + (1 - lam) 1 pi^T.

    Args:
        top: mass of the top token.
        lam: laziness.
        pattern: c_2 ... c_d, summing to zero.
    """

    top: Float[Array, ""]
    lam: Float[Array, ""]
    pattern: Float[Array, " low"]

    def __init__(self, top: RealLike, lam: RealLike, pattern: Sequence[float] | Array):
        self.top, self.lam = jnp.asarray(top, float), jnp.asarray(lam, float)
        self.pattern = _checked(pattern)

    def chain(self, delta: RealLike) -> MarkovChain:
        return MarkovChain(LazyKernel(self.lam), _law(self.top, self.pattern, delta))


class MetropolisFamily(ChainFamily):
    """Metropolis chains on two-level laws, from delta = 0 upwards.

        P_ij = min(1, pi_j / pi_i) / d   (j != i)

    The minimum has a kink where two tokens are alike, at delta = 0. Here the order of
    the frequencies is that of delta > 0 throughout, so the family has one-sided
    derivatives at zero; for delta < 0 it is not the Metropolis chain.

    Args:
        top: mass of the top token, above all others.
        pattern: c_2 ... c_d, summing to zero.
    """

    top: Float[Array, ""]
    pattern: Float[Array, " low"]

    def __init__(self, top: RealLike, pattern: Sequence[float] | Array):
        self.top = jnp.asarray(top, float)
        self.pattern = _checked(pattern)

    def chain(self, delta: RealLike) -> MarkovChain:
        law = _law(self.top, self.pattern, delta)
        rank = jnp.concatenate([jnp.full(1, jnp.inf), self.pattern])
        rarer = rank[None, :] < rank[:, None]
        accepted = jnp.where(rarer, law[None, :] / law[:, None], 1.0) / law.size
        rejected = jnp.sum(1.0 / law.size - accepted, axis=-1)
        return MarkovChain(DenseKernel(accepted + jnp.diag(rejected)), law)


def _law(top: Scalar, pattern: Float[Array, " low"], delta: RealLike):
    low = (1 - top) / pattern.size + jnp.asarray(delta, float) * pattern
    return jnp.concatenate([top[None], low])


def _checked(pattern: Sequence[float] | Array) -> Float[Array, " low"]:
    pattern = jnp.asarray(pattern, float)
    total = jnp.abs(jnp.sum(pattern))
    if pattern.ndim != 1 or (not _trees.is_traced(total) and float(total) > 1e-12):
        raise ValueError(
            f"pattern must be a vector c_2 ... c_d that sums to zero; got {pattern}."
        )
    return pattern
