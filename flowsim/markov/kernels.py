"""Transition probabilities in three forms: dense, lazy, sparse.

A kernel answers the few questions the package asks of a transition matrix, each in the
way its structure makes cheap. It does not hold the stationary law but is handed it, so
that a chain stores each number once and a derivative with respect to pi sees one pi.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._types import Scalar


class AbstractKernel(eqx.Module):
    """The transition probabilities P of a chain whose stationary law is pi."""

    @abc.abstractmethod
    def dense(self, pi: Float[Array, " d"]) -> Float[Array, "d d"]:
        """The matrix P."""

    @abc.abstractmethod
    def pair_expectation(
        self, pi: Float[Array, " d"], values: Float[Array, "d d"]
    ) -> Scalar:
        """sum_ij pi_i P_ij values_ij."""

    @abc.abstractmethod
    def row_entropies(self, pi: Float[Array, " d"]) -> Float[Array, " d"]:
        """- sum_j P_ij log P_ij for each i, in nats."""

    @abc.abstractmethod
    def cumulative(self, pi: Float[Array, " d"]) -> Callable[[Array, Array], Array]:
        """A function (i, j) -> sum_{l <= j} P_il of two arrays of token numbers."""


class DenseKernel(AbstractKernel):
    """All d^2 transition probabilities."""

    matrix: Float[Array, "d d"]

    def dense(self, pi: Float[Array, " d"]) -> Float[Array, "d d"]:
        return self.matrix

    def pair_expectation(
        self, pi: Float[Array, " d"], values: Float[Array, "d d"]
    ) -> Scalar:
        return jnp.sum(pi[:, None] * self.matrix * values)

    def row_entropies(self, pi: Float[Array, " d"]) -> Float[Array, " d"]:
        return jnp.sum(entropy_terms(self.matrix), axis=-1)

    def cumulative(self, pi: Float[Array, " d"]) -> Callable[[Array, Array], Array]:
        return _row_lookup(self.matrix)


class LazyKernel(AbstractKernel):
    """P = lam I + (1 - lam) 1 pi^T, stored as lam alone."""

    lam: Float[Array, ""]

    def dense(self, pi: Float[Array, " d"]) -> Float[Array, "d d"]:
        fresh = jnp.broadcast_to((1 - self.lam) * pi, (pi.size, pi.size))
        return fresh + jnp.diag(jnp.full_like(pi, self.lam))

    def pair_expectation(
        self, pi: Float[Array, " d"], values: Float[Array, "d d"]
    ) -> Scalar:
        stay = jnp.sum(pi * jnp.diagonal(values))
        return self.lam * stay + (1 - self.lam) * (pi @ values @ pi)

    def row_entropies(self, pi: Float[Array, " d"]) -> Float[Array, " d"]:
        fresh = (1 - self.lam) * pi
        terms = entropy_terms(fresh)
        return jnp.sum(terms) - terms + entropy_terms(self.lam + fresh)

    def cumulative(self, pi: Float[Array, " d"]) -> Callable[[Array, Array], Array]:
        fresh = jnp.cumsum((1 - self.lam) * pi)
        return lambda state, token: (
            fresh[token] + jnp.where(token >= state, self.lam, 0.0)
        )


class SparseKernel(AbstractKernel):
    """The non-zero transition probabilities, as triplets ordered by row and column."""

    rows: Int[Array, " nonzero"]
    columns: Int[Array, " nonzero"]
    probabilities: Float[Array, " nonzero"]

    def dense(self, pi: Float[Array, " d"]) -> Float[Array, "d d"]:
        empty = jnp.zeros((pi.size, pi.size), self.probabilities.dtype)
        return empty.at[self.rows, self.columns].set(
            self.probabilities, indices_are_sorted=True, unique_indices=True
        )

    def pair_expectation(
        self, pi: Float[Array, " d"], values: Float[Array, "d d"]
    ) -> Scalar:
        # The promises reach the scatter of the transpose, which they speed up.
        entries = values.at[self.rows, self.columns].get(
            indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
        )
        return jnp.sum(pi[self.rows] * self.probabilities * entries)

    def row_entropies(self, pi: Float[Array, " d"]) -> Float[Array, " d"]:
        terms = entropy_terms(self.probabilities)
        return jnp.zeros_like(pi).at[self.rows].add(terms, indices_are_sorted=True)

    def cumulative(self, pi: Float[Array, " d"]) -> Callable[[Array, Array], Array]:
        return _row_lookup(self.dense(pi))


def entropy_terms(p: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """-p log p in nats, zero at p = 0 with a finite derivative there."""
    # The inner `where` keeps log away from zero, so that the gradient is no NaN.
    positive = p > 0
    return jnp.where(positive, -p * jnp.log(jnp.where(positive, p, 1.0)), 0.0)


def _row_lookup(matrix: Float[Array, "d d"]) -> Callable[[Array, Array], Array]:
    # Sums in order, column by column: a parallel prefix sum may round differently on
    # the two sides of a zero entry and so give an impossible transition a chance.
    def add(total, column):
        total = total + column
        return total, total

    _, columns = jax.lax.scan(add, jnp.zeros_like(matrix[0]), matrix.T)
    return lambda state, token: columns[token, state]
