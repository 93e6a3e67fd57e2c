"""Chains by construction: lazy, Metropolis, from counts; and the two-level law.

Each keeps the structure that it has: a lazy chain is pi and one number, a chain from
counts is sparse.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from .. import _trees
from ._checks import floating, probability_vector, tolerance
from .chain import MarkovChain
from .kernels import DenseKernel, LazyKernel, SparseKernel
from .stationary import check_ergodic, eliminate


def lazy_chain(
    pi: Real[ArrayLike, " d"] | Sequence[Any],
    lam: Real[ArrayLike, ""] | float,
    *,
    tokens: Sequence[str] | None = None,
) -> MarkovChain:
    """The chain P = lam I + (1 - lam) 1 pi^T: stay with weight lam, else draw from pi.

    Args:
        pi: stationary law; positive, sums to one.
        lam: below one. May be negative as long as every lam + (1 - lam) pi_i >= 0.
        tokens: names of the d states.

    Raises:
        ValueError: naming the rule and the value that breaks it.
    """
    law = probability_vector(pi)
    if np.ndim(lam) != 0:
        raise ValueError(f"lam must be a scalar; got shape {np.shape(lam)}.")
    weight = jnp.asarray(lam, law.dtype)
    round_off = 4 * float(jnp.finfo(law.dtype).eps)
    if _trees.is_traced((law, weight)):
        lowest = weight + (1 - weight) * jnp.min(law)
        weight = eqx.error_if(
            weight,
            ~((lowest >= -round_off) & (weight < 1)),
            "lam must be below 1 and keep every lam + (1 - lam) pi_i non-negative.",
        )
    else:
        _check_lazy(floating(pi), float(np.asarray(lam)), round_off)
    return MarkovChain(LazyKernel(weight), law, tokens=tokens)


def metropolis_chain(
    pi: Real[ArrayLike, " d"] | Sequence[Any], *, tokens: Sequence[str] | None = None
) -> MarkovChain:
    """The Metropolis chain with stationary law pi and uniform proposals.

        P_ij = min(1, pi_j / pi_i) / d   (j != i),      P_ii = 1 - sum_{j != i} P_ij

    A proposal is uniform over all d tokens, the present one included, so P_ii >= 1/d
    and the chain is aperiodic. It is reversible: pi_i P_ij = min(pi_i, pi_j) / d.

    References:
        Metropolis, Rosenbluth, Rosenbluth, Teller, Teller (1953), J. Chem. Phys. 21,
        1087-1092.
    """
    law = probability_vector(pi)
    accepted = jnp.minimum(1.0, law[None, :] / law[:, None]) / law.size
    # Rejections stay where they are; their sum has less cancellation than 1 - sum.
    rejected = jnp.sum(1.0 / law.size - accepted, axis=-1)
    kernel = DenseKernel(accepted + jnp.diag(rejected))
    return MarkovChain(kernel, law, tokens=tokens)


def two_level_law(
    *,
    vocab: int,
    top: Real[ArrayLike, ""] | float,
    delta: Real[ArrayLike, ""] | float = 0.0,
    pattern: Real[ArrayLike, " low"] | Sequence[Any] | None = None,
) -> Float[Array, " d"]:
    """The law with one top token and low-frequency tokens set apart by delta.

        pi_1 = top,     pi_i = (1 - top) / (d - 1) + c_i delta     (i >= 2)

    Args:
        vocab: number of tokens d, at least 2.
        top: mass of the top token.
        delta: how far the low-frequency tokens are set apart; a traced value allows
            derivatives along the family.
        pattern: c_2 ... c_d, summing to zero. Needed unless delta is zero.

    Raises:
        ValueError: a wrong or missing pattern, or a mass that is not positive.
    """
    if vocab < 2:
        raise ValueError(f"vocab must be at least 2; got {vocab}.")
    for name, value in (("top", top), ("delta", delta)):
        if np.ndim(value) != 0:
            raise ValueError(f"{name} must be a scalar; got shape {np.shape(value)}.")
    if pattern is None:
        if _trees.is_traced(delta) or delta != 0:
            raise ValueError(
                "delta != 0 needs a pattern c_2 ... c_d that sums to zero; got "
                f"delta = {delta} and no pattern."
            )
        pattern = np.zeros(vocab - 1)
    shifts = floating(pattern)
    if shifts.shape != (vocab - 1,):
        raise ValueError(
            f"pattern must be c_2 ... c_d, of shape ({vocab - 1},); "
            f"got shape {shifts.shape}."
        )
    if not _trees.is_traced(shifts):
        allowed = tolerance(shifts.dtype) * np.abs(shifts).sum()
        if not abs(shifts.sum()) <= allowed:
            raise ValueError(f"pattern must sum to zero; its sum is {shifts.sum()}.")
    dtype = jnp.result_type(float)
    mass, size = jnp.asarray(top, dtype), jnp.asarray(delta, dtype)
    low = (1 - mass) / (vocab - 1) + size * jnp.asarray(shifts, dtype)
    return probability_vector(jnp.concatenate([mass[None], low]))


def chain_from_counts(
    counts: Any, *, tokens: Sequence[str] | None = None
) -> MarkovChain:
    """The chain P_ij = n_ij / sum_l n_il estimated from a table of bigram counts.

    The most likely chain given the pairs. Its pi is the stationary law of that P, which
    for one long text agrees with the frequencies of the first tokens of the pairs.
    Runs outside `jit`: where the non-zeros are is structure.

    Args:
        counts: n_ij, how often token j followed token i: an array (d, d) or a SciPy
            sparse matrix.
        tokens: names of the d tokens.

    Raises:
        ValueError: not square, a negative count, a token that never has a successor,
            or an estimated chain that is not ergodic.
    """
    if _trees.is_traced(counts):
        raise ValueError("counts must be concrete: chain_from_counts runs outside jit.")
    # Imported here: it takes as long to load as the whole of flowsim.
    from scipy import sparse

    if not sparse.issparse(counts):
        counts = np.asarray(counts)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or 0 in counts.shape:
        raise ValueError(f"counts must be square (d, d); got shape {counts.shape}.")
    rows, columns, data = sparse.find(counts)
    order = np.lexsort((columns, rows))
    rows, columns, data = rows[order], columns[order], data[order].astype(np.float64)
    bad = np.flatnonzero(~((data > 0) & np.isfinite(data)))
    if bad.size:
        i, j = rows[bad[0]], columns[bad[0]]
        raise ValueError(
            f"counts must be finite and non-negative; counts[{i}, {j}] = "
            f"{data[bad[0]]}."
        )
    num_states = counts.shape[0]
    names = range(num_states) if tokens is None else [repr(name) for name in tokens]
    totals = np.bincount(rows, weights=data, minlength=num_states)
    if not np.all(totals > 0):
        row = int(np.argmin(totals))
        raise ValueError(
            f"every token must have a successor; row {row} (token {names[row]}) has "
            "no counts."
        )
    probabilities = data / totals[rows]
    dense = np.zeros((num_states, num_states))
    dense[rows, columns] = probabilities
    check_ergodic(dense, "the chain estimated from counts", names)
    kernel = SparseKernel(
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(columns, jnp.int32),
        jnp.asarray(probabilities),
    )
    return MarkovChain(kernel, eliminate(dense), tokens=tokens)


def _check_lazy(pi: np.ndarray, lam: float, round_off: float) -> None:
    if not lam < 1:
        raise ValueError(f"lam must be below 1 for an ergodic chain; got {lam}.")
    stay = lam + (1 - lam) * pi
    row = int(np.argmin(stay))
    if not stay[row] >= -round_off:
        raise ValueError(
            "every lam + (1 - lam) pi_i must be non-negative; row "
            f"{row} has {stay[row]} with lam = {lam} and pi[{row}] = {pi[row]}."
        )
    # With three tokens or more, cycles of lengths 2 and 3 exist without staying.
    if pi.size == 2 and np.all(stay <= round_off):
        raise ValueError(
            f"P must be aperiodic; lam = {lam} on two equal tokens gives period 2."
        )
