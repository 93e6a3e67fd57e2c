"""The stationary law of a transition matrix, and whether there is exactly one.

The law is found by the elimination of Grassmann, Taksar and Heyman, in which nothing is
subtracted. Eigenvalue routines and LU factorisations lose the small components of a
nearly decomposable chain; these are what low-frequency tokens live on.

>>> from flowsim.markov import stationary_law
>>> [round(mass, 4) for mass in stationary_law([[0.75, 0.25], [0.5, 0.5]]).tolist()]
[0.6667, 0.3333]
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from .. import _trees
from ._checks import floating


def stationary_law(
    P: Real[ArrayLike, "d d"] | Sequence[Any],
) -> Float[Array, " d"]:
    """The law pi with pi P = pi of an irreducible chain.

    Only off-diagonal entries are read, and nothing is subtracted: each component is
    accurate to about d round-offs relative to itself, however small it is and however
    nearly the chain decomposes. A reducible chain gives NaN or a zero mass. Derivatives
    are those of the exact solution, d pi = pi dP (I - P + 1 pi)^{-1}, the diagonal of
    dP being understood to balance each row.

    Args:
        P: transition matrix; assumed non-negative with rows that sum to one.

    References:
        Grassmann, Taksar, Heyman (1985), Operations Research 33, 1107-1116.
        O'Cinneide (1993), Numer. Math. 65, 109-120: the entrywise error bound.
        Golub, Meyer (1986), SIAM J. Alg. Disc. Meth. 7, 273-281: the derivative.
    """
    matrix = floating(P)
    if _trees.is_traced(matrix):
        return _eliminate(matrix)
    return jnp.asarray(eliminate(matrix).astype(matrix.dtype))


def eliminate(P: np.ndarray) -> np.ndarray:
    """The stationary law by GTH elimination in NumPy, always in double precision."""
    A = np.array(P, np.float64)
    num_states = A.shape[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        for n in range(num_states - 1, 0, -1):
            A[:n, n] /= A[n, :n].sum()
            A[:n, :n] += np.outer(A[:n, n], A[n, :n])
        pi = np.ones(num_states)
        for n in range(1, num_states):
            pi[n] = pi[:n] @ A[:n, n]
        return pi / pi.sum()


def check_ergodic(matrix: np.ndarray, name: str, tokens: Sequence[Any]) -> None:
    """Check irreducibility and aperiodicity on the graph of non-zero transitions.

    Raises:
        ValueError: naming two tokens of which one never leads to the other, or the
            period.
    """
    # Imported here: it takes as long to load as the whole of flowsim.
    from scipy.sparse import csgraph, csr_array

    graph = csr_array(matrix > 0)
    num_classes, labels = csgraph.connected_components(graph, connection="strong")
    steps = csgraph.dijkstra(graph, indices=0, unweighted=True)
    if num_classes > 1:
        # Token 0 misses some other, or else some other never leads back to it.
        missed = np.flatnonzero(np.isinf(steps))
        other = np.flatnonzero(labels != labels[0])[0]
        start, end = (0, missed[0]) if missed.size else (other, 0)
        raise ValueError(
            f"{name} must be irreducible; from row {start} (token {tokens[start]}) no "
            f"path leads to token {tokens[end]}."
        )
    # Every cycle's length is a sum of these differences, and their gcd is the period.
    rows, columns = graph.nonzero()
    period = np.gcd.reduce((steps[rows] + 1 - steps[columns]).astype(int))
    if period != 1:
        raise ValueError(
            f"{name} must be aperiodic; row 0 (token {tokens[0]}) is returned to only "
            f"after multiples of {period} steps."
        )


@jax.custom_jvp
def _eliminate(P: Float[Array, "d d"]) -> Float[Array, " d"]:
    # `eliminate` with masks in place of slices, whose sizes may not change in a loop.
    num_states = P.shape[-1]
    index = jnp.arange(num_states)

    def eliminate_last(step, A):
        n = num_states - 1 - step
        row = jnp.where(index < n, A[n], 0.0)
        column = jnp.where(index < n, A[:, n] / jnp.sum(row), 0.0)
        A = A.at[:, n].set(jnp.where(index < n, column, A[:, n]))
        return A + column[:, None] * row[None, :]

    def substitute(n, pi):
        return pi.at[n].set(jnp.sum(jnp.where(index < n, pi * A[:, n], 0.0)))

    A = jax.lax.fori_loop(0, num_states - 1, eliminate_last, P)
    pi = jax.lax.fori_loop(1, num_states, substitute, jnp.ones_like(P[0]))
    return pi / jnp.sum(pi)


@_eliminate.defjvp
def _eliminate_jvp(primals, tangents):
    (P,), (dP,) = primals, tangents
    pi = _eliminate(P)
    dP = dP - jnp.diag(jnp.sum(dP, axis=-1))
    resolvent = jnp.eye(pi.size, dtype=P.dtype) - P + pi[None, :]
    return pi, jnp.linalg.solve(resolvent.T, pi @ dP)
