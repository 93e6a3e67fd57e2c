"""Ergodic Markov chains on d tokens: stationary law, entropies, constructions, samples.

A chain is the data distribution of the theory: a transition matrix P, whose rows sum to
one, and its stationary law pi with pi P = pi. Everything above needs only averages
under pi_i P_ij, so a chain keeps its structure (a lazy chain is one number and pi, a
chain from counts is sparse) and builds the dense matrix on demand.

Left out: chains with memory, continuous time, and reading text (`flowsim.corpus`).

>>> import flowsim as fs
>>> chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], lam=0.5)
>>> round(float(chain.unigram_entropy), 6), round(float(chain.entropy_rate), 6)
(0.727139, 0.553611)
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray
from scipy.sparse import csgraph

from . import _trees
from ._types import Scalar


class AbstractKernel(eqx.Module):
    """The transition probabilities of a chain, in whatever form is cheapest.

    A kernel does not hold the stationary law; it is handed `pi` where it needs it, so
    that a chain stores each number once.
    """

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
    def cumulative(self, pi: Float[Array, " d"]) -> Any:
        """A function (i, j) -> sum_{l <= j} P_il of two integer arrays."""


class DenseKernel(AbstractKernel):
    """All d^2 transition probabilities."""

    matrix: Float[Array, "d d"]

    def dense(self, pi):
        return self.matrix

    def pair_expectation(self, pi, values):
        return jnp.einsum("i,ij,ij->", pi, self.matrix, values)

    def row_entropies(self, pi):
        return jnp.sum(_minus_p_log_p(self.matrix), axis=-1)

    def cumulative(self, pi):
        table = _cumulative_rows(self.matrix)
        return lambda state, token: table[state, token]


class LazyKernel(AbstractKernel):
    """P = lam I + (1 - lam) 1 pi^T, stored as lam alone."""

    lam: Float[Array, ""]

    def dense(self, pi):
        rest = jnp.broadcast_to((1 - self.lam) * pi, (pi.size, pi.size))
        return rest + jnp.diag(jnp.full_like(pi, self.lam))

    def pair_expectation(self, pi, values):
        stay = jnp.sum(pi * jnp.diagonal(values))
        return self.lam * stay + (1 - self.lam) * (pi @ values @ pi)

    def row_entropies(self, pi):
        leave = (1 - self.lam) * pi
        terms = _minus_p_log_p(leave)
        return jnp.sum(terms) - terms + _minus_p_log_p(self.lam + leave)

    def cumulative(self, pi):
        table = jnp.cumsum((1 - self.lam) * pi)
        return lambda state, token: (
            table[token] + jnp.where(token >= state, self.lam, 0.0)
        )


class SparseKernel(AbstractKernel):
    """The non-zero transition probabilities, as triplets in row order."""

    rows: Int[Array, " nonzero"]
    columns: Int[Array, " nonzero"]
    probabilities: Float[Array, " nonzero"]

    def dense(self, pi):
        empty = jnp.zeros((pi.size, pi.size), self.probabilities.dtype)
        return empty.at[self.rows, self.columns].set(
            self.probabilities, indices_are_sorted=True, unique_indices=True
        )

    def pair_expectation(self, pi, values):
        entries = values.at[self.rows, self.columns].get(
            indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds"
        )
        return jnp.sum(pi[self.rows] * self.probabilities * entries)

    def row_entropies(self, pi):
        terms = _minus_p_log_p(self.probabilities)
        return jnp.zeros_like(pi).at[self.rows].add(terms, indices_are_sorted=True)

    def cumulative(self, pi):
        table = _cumulative_rows(self.dense(pi))
        return lambda state, token: table[state, token]


class MarkovChain(eqx.Module):
    """An ergodic chain: transition matrix P, stationary law pi.

    Every leaf is an array, so a chain can be mapped over and differentiated; the token
    names are static.

    Attributes:
        stationary: pi, the law with pi P = pi; all masses are positive.
        kernel: the transition probabilities in structured form.
        tokens: the names of the states, where they have names.
    """

    stationary: Float[Array, " d"]
    kernel: AbstractKernel
    tokens: tuple[str, ...] | None = eqx.field(static=True, default=None)

    def __init__(
        self,
        P: Float[ArrayLike, "d d"] | AbstractKernel,
        stationary: Float[ArrayLike, " d"] | None = None,
        *,
        tokens: tuple[str, ...] | None = None,
    ):
        """Check P and find its stationary law.

        Args:
            P: transition matrix. An `AbstractKernel` is taken as it is, unchecked,
                together with `stationary`.
            stationary: pi where it is known; found by `stationary_law` when absent.
            tokens: names of the d states.

        Raises:
            ValueError: P is not square, has a negative entry, a row that does not sum
                to one, is reducible or periodic; `stationary` is not positive or is
                not the stationary law. With traced values, irreducibility shows in the
                positivity of pi (`equinox.error_if`) and aperiodicity is not checked.
        """
        if isinstance(P, AbstractKernel):
            if stationary is None:
                raise ValueError("stationary must be given together with a kernel.")
            self.kernel, self.stationary = P, jnp.asarray(stationary)
        else:
            self.kernel, self.stationary = _dense_chain(P, stationary)
        num_states = self.stationary.shape[-1]
        if tokens is not None and len(tokens) != num_states:
            raise ValueError(
                f"tokens must name all {num_states} states; got {len(tokens)} names."
            )
        self.tokens = None if tokens is None else tuple(map(str, tokens))

    @property
    def num_states(self) -> int:
        """Vocabulary size d."""
        return self.stationary.shape[-1]

    @property
    def transition(self) -> Float[Array, "d d"]:
        """The dense transition matrix P; rows sum to one."""
        return self.kernel.dense(self.stationary)

    @property
    def entropy_rate(self) -> Scalar:
        """H(P) = - sum_i pi_i sum_j P_ij log P_ij in nats: the floor of the loss."""
        return jnp.sum(self.stationary * self.kernel.row_entropies(self.stationary))

    @property
    def unigram_entropy(self) -> Scalar:
        """H(pi) = - sum_i pi_i log pi_i nats: the best loss without context."""
        return jnp.sum(_minus_p_log_p(self.stationary))

    def pair_expectation(self, values: Float[Array, "d d"]) -> Scalar:
        """sum_ij pi_i P_ij values_ij, the mean over consecutive pairs of tokens."""
        chain = jax.tree.map(
            lambda leaf: (
                leaf.astype(values.dtype) if eqx.is_inexact_array(leaf) else leaf
            ),
            self,
        )
        return chain.kernel.pair_expectation(chain.stationary, values)

    def sample(
        self, key: PRNGKeyArray, num_sequences: int, length: int
    ) -> Int[Array, "N s"]:
        """Draw N independent stationary sequences of length s.

        Inverse transform sampling, one uniform number and one binary search a step:
        memory is the output and O(N). Compiled once per size and kind of chain.

        Args:
            key: a JAX random key. One key gives different draws in 32 and 64 bit.
            num_sequences: N.
            length: s, the first token included.
        """
        for name, size in (("num_sequences", num_sequences), ("length", length)):
            if size < 1:
                raise ValueError(f"{name} must be a positive integer; got {size}.")
        return _sample(self, key, num_sequences, length)


def lazy_chain(
    pi: Float[ArrayLike, " d"],
    lam: Float[ArrayLike, ""],
    *,
    tokens: tuple[str, ...] | None = None,
) -> MarkovChain:
    """The chain P = lam I + (1 - lam) 1 pi^T: stay with weight lam, else draw from pi.

    Args:
        pi: stationary law; positive, sums to one.
        lam: below one. May be negative as long as every lam + (1 - lam) pi_i >= 0.
        tokens: names of the d states.

    Raises:
        ValueError: naming the rule and the value that breaks it.
    """
    law = _probability_vector(pi)
    weight = jnp.asarray(lam, law.dtype)
    if weight.ndim != 0:
        raise ValueError(f"lam must be a scalar; got shape {weight.shape}.")
    lowest = weight + (1 - weight) * jnp.min(law)
    round_off = 4 * float(jnp.finfo(law.dtype).eps)
    if _trees.is_traced((law, weight)):
        weight = eqx.error_if(
            weight,
            ~((lowest >= -round_off) & (weight < 1)),
            "lam must be below 1 and keep lam + (1 - lam) pi_i non-negative.",
        )
    elif not weight < 1:
        raise ValueError(f"lam must be below 1 for an ergodic chain; got {weight}.")
    elif not lowest >= -round_off:
        state = int(jnp.argmin(law))
        raise ValueError(
            "lam must keep every lam + (1 - lam) pi_i non-negative; got "
            f"lam = {weight} with pi[{state}] = {law[state]}, which gives {lowest}."
        )
    elif law.size == 2 and weight + (1 - weight) * jnp.max(law) <= round_off:
        raise ValueError(f"lam = {weight} makes the chain on two tokens periodic.")
    return MarkovChain(LazyKernel(weight), law, tokens=tokens)


def metropolis_chain(
    pi: Float[ArrayLike, " d"], *, tokens: tuple[str, ...] | None = None
) -> MarkovChain:
    """The Metropolis chain with stationary law pi and uniform proposals.

        P_ij = min(1, pi_j / pi_i) / d   (j != i),      P_ii = 1 - sum_{j != i} P_ij

    A proposal is uniform over all d tokens, the present one included, so P_ii >= 1/d
    and the chain is aperiodic. It is reversible: pi_i P_ij = min(pi_i, pi_j) / d.

    References:
        Metropolis, Rosenbluth, Rosenbluth, Teller, Teller (1953), J. Chem. Phys. 21.
    """
    pi = _probability_vector(pi)
    accepted = jnp.minimum(1.0, pi[None, :] / pi[:, None]) / pi.size
    # The diagonal as a sum of rejections has no cancellation; 1 - sum would.
    rejected = jnp.sum(1.0 / pi.size - accepted, axis=-1)
    return MarkovChain(DenseKernel(accepted + jnp.diag(rejected)), pi, tokens=tokens)


def two_level_law(
    *,
    vocab: int,
    top: Float[ArrayLike, ""],
    delta: Float[ArrayLike, ""] = 0.0,
    pattern: Float[ArrayLike, " d-1"] | None = None,
) -> Float[Array, " d"]:
    """The law with one top token and low-frequency tokens split by delta.

        pi_1 = top,     pi_i = (1 - top) / (d - 1) + c_i delta     (i >= 2)

    Args:
        vocab: number of tokens d, at least 2.
        top: mass of the top token.
        delta: size of the splitting of the low-frequency tokens.
        pattern: c_2 ... c_d, summing to zero. Needed unless delta is zero.

    Raises:
        ValueError: wrong pattern, or a mass that is not positive.
    """
    if vocab < 2:
        raise ValueError(f"vocab must be at least 2; got {vocab}.")
    dtype = jnp.result_type(float)
    if pattern is None:
        if _trees.is_traced(delta) or np.any(np.asarray(delta) != 0):
            raise ValueError(
                "delta != 0 needs a pattern c_2 ... c_d that sums to zero; got "
                f"delta = {delta} and no pattern."
            )
        pattern = jnp.zeros(vocab - 1, dtype)
    elif np.shape(pattern) != (vocab - 1,):
        raise ValueError(
            f"pattern must hold c_2 ... c_d, {vocab - 1} numbers; "
            f"got shape {np.shape(pattern)}."
        )
    elif not _trees.is_traced(pattern):
        total, size = np.sum(_floating(pattern)), np.sum(np.abs(_floating(pattern)))
        if not abs(total) <= _tolerance(_floating(pattern).dtype) * size:
            raise ValueError(f"pattern must sum to zero; its sum is {total}.")
    top, delta = jnp.asarray(top, dtype), jnp.asarray(delta, dtype)
    low = (1 - top) / (vocab - 1) + delta * jnp.asarray(pattern, dtype)
    return _probability_vector(jnp.concatenate([top[None], low]))


def chain_from_counts(
    counts: Any, *, tokens: tuple[str, ...] | None = None
) -> MarkovChain:
    """The chain P_ij = n_ij / sum_l n_il estimated from a table of bigram counts.

    The most likely chain given the pairs; pi is the stationary law of that P, which
    for one long text agrees with the frequencies of the first tokens of the pairs.
    Runs outside `jit`, since the places of the non-zeros are structure.

    Args:
        counts: n_ij, how often token j followed token i: an array (d, d) or a SciPy
            sparse matrix.
        tokens: names of the d tokens.

    Raises:
        ValueError: not square, a negative count, or a token that never has a
            successor; the estimated chain is not ergodic.
    """
    if _trees.is_traced(counts):
        raise ValueError("counts must be concrete: chain_from_counts runs outside jit.")
    if not scipy.sparse.issparse(counts):
        counts = np.asarray(counts)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or 0 in counts.shape:
        raise ValueError(f"counts must be square (d, d); got shape {counts.shape}.")
    table = scipy.sparse.csr_array(counts, dtype=np.float64)
    rows, columns, data = scipy.sparse.find(table)
    order = np.lexsort((columns, rows))
    rows, columns, data = rows[order], columns[order], data[order]
    bad = np.flatnonzero(~((data > 0) & np.isfinite(data)))
    if bad.size:
        i, j = rows[bad[0]], columns[bad[0]]
        raise ValueError(
            f"counts must be finite and non-negative; counts[{i}, {j}] = "
            f"{data[bad[0]]}."
        )
    num_states = counts.shape[0]
    names = range(num_states) if tokens is None else [repr(t) for t in tokens]
    totals = np.bincount(rows, weights=data, minlength=num_states)
    if not np.all(totals > 0):
        raise ValueError(
            f"every token must have a successor; token {names[np.argmin(totals)]} has "
            "none in the counts."
        )
    probabilities = data / totals[rows]
    dense = np.zeros((num_states, num_states))
    dense[rows, columns] = probabilities
    _check_ergodic(dense, "the chain estimated from counts", names)
    kernel = SparseKernel(
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(columns, jnp.int32),
        jnp.asarray(probabilities),
    )
    return MarkovChain(kernel, jnp.asarray(_gth_numpy(dense)), tokens=tokens)


def stationary_law(P: Float[ArrayLike, "d d"]) -> Float[Array, " d"]:
    """The law pi with pi P = pi, by the elimination of Grassmann, Taksar and Heyman.

    Only off-diagonal entries are read, and nothing is subtracted: every component is
    accurate to about d round-offs *relative to itself*, however small it is and however
    nearly the chain decomposes. P must be irreducible (NaN otherwise). Derivatives are
    those of the exact solution, d pi = pi dP (I - P + 1 pi)^{-1}.

    References:
        Grassmann, Taksar, Heyman (1985), Operations Research 33, 1107-1116.
        O'Cinneide (1993), Numer. Math. 65, 109-120 (entrywise error bound).
    """
    matrix = _floating(P)
    if _trees.is_traced(matrix):
        return _gth(matrix)
    return jnp.asarray(_gth_numpy(matrix).astype(matrix.dtype))


def _dense_chain(P: Any, stationary: Any) -> tuple[DenseKernel, Float[Array, " d"]]:
    shape = np.shape(P)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"P must be a square matrix (d, d); got shape {shape}.")
    if stationary is not None and np.shape(stationary) != shape[:1]:
        raise ValueError(
            f"stationary must have shape {shape[:1]} like the rows of P; "
            f"got {np.shape(stationary)}."
        )
    if _trees.is_traced((P, stationary)):
        return _traced_dense_chain(P, stationary)
    matrix = _floating(P)
    _check_transition(matrix)
    _check_ergodic(matrix, "P", range(shape[0]))
    pi = _gth_numpy(matrix)
    if stationary is not None:
        _probability_vector(stationary, "stationary")
        given = _floating(stationary)
        error = np.abs(given - pi) / pi
        worst = int(np.argmax(error))
        round_off = max(jnp.finfo(matrix.dtype).eps, jnp.finfo(given.dtype).eps)
        if not error[worst] <= math.sqrt(round_off):
            raise ValueError(
                "stationary must be the stationary law of P; "
                f"got stationary[{worst}] = {given[worst]} where it is {pi[worst]}."
            )
        pi = given
    return DenseKernel(jnp.asarray(matrix)), jnp.asarray(pi.astype(matrix.dtype))


def _traced_dense_chain(
    P: Any, stationary: Any
) -> tuple[DenseKernel, Float[Array, " d"]]:
    P = jnp.asarray(_floating(P))
    tolerance = _tolerance(P.dtype)
    stochastic = jnp.all(P >= 0) & jnp.all(jnp.abs(P.sum(axis=-1) - 1) <= tolerance)
    P = eqx.error_if(
        P, ~stochastic, "P must be non-negative with rows that sum to one."
    )
    if stationary is None:
        pi = stationary_law(P)
        rule = "P must be irreducible, so that every stationary mass is positive."
        return DenseKernel(P), eqx.error_if(pi, ~jnp.all(pi > 0), rule)
    pi = jnp.asarray(stationary, P.dtype)
    flow = pi @ P
    valid = (
        jnp.all(pi > 0)
        & (jnp.abs(pi.sum() - 1) <= tolerance)
        & jnp.all(jnp.abs(flow - pi) <= math.sqrt(jnp.finfo(P.dtype).eps) * pi)
    )
    rule = "stationary must be positive, sum to one and satisfy pi P = pi."
    return DenseKernel(P), eqx.error_if(pi, ~valid, rule)


def _check_transition(matrix: np.ndarray) -> None:
    bad = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if bad.size:
        i, j = bad[0]
        raise ValueError(
            f"P must be finite and non-negative; row {i} has P[{i}, {j}] = "
            f"{matrix[i, j]}."
        )
    sums = matrix.sum(axis=1)
    tolerance = _tolerance(matrix.dtype)
    bad = np.flatnonzero(~(np.abs(sums - 1) <= tolerance))
    if bad.size:
        raise ValueError(
            f"each row of P must sum to one within {tolerance:.0e}; "
            f"row {bad[0]} sums to {sums[bad[0]]}."
        )


def _check_ergodic(matrix: np.ndarray, name: str, names: Any) -> None:
    """Irreducible and aperiodic, by the graph of the non-zero transitions."""
    graph = scipy.sparse.csr_array(matrix > 0)
    num_classes, labels = csgraph.connected_components(graph, connection="strong")
    steps = csgraph.dijkstra(graph, indices=0, unweighted=True)
    if num_classes > 1:
        # Either 0 misses some token, or some token does not lead back to 0.
        missed = np.flatnonzero(np.isinf(steps))
        there, back = (0, missed[0]) if missed.size else (None, 0)
        if there is None:
            there = np.flatnonzero(labels != labels[0])[0]
        raise ValueError(
            f"{name} must be irreducible; row {there}: token {names[back]} is never "
            f"reached from token {names[there]}."
        )
    rows, columns = graph.nonzero()
    period = int(np.gcd.reduce(np.abs(steps[rows] + 1 - steps[columns]).astype(int)))
    if period != 1:
        raise ValueError(
            f"{name} must be aperiodic; token {names[0]} returns only after multiples "
            f"of {period} steps."
        )


def _probability_vector(value: Any, name: str = "pi") -> Float[Array, " d"]:
    """Check that every mass is positive and that they sum to one."""
    if np.ndim(value) != 1 or np.size(value) == 0:
        raise ValueError(f"{name} must be a vector (d,); got shape {np.shape(value)}.")
    array = _floating(value)
    tolerance = _tolerance(array.dtype)
    if _trees.is_traced(array):
        valid = jnp.all(array > 0) & (jnp.abs(array.sum() - 1) <= tolerance)
        rule = f"{name} must be positive and sum to one."
        return eqx.error_if(array, ~valid, rule)
    bad = np.flatnonzero(~(array > 0))
    if bad.size:
        raise ValueError(
            f"every mass of {name} must be positive; "
            f"{name}[{bad[0]}] = {array[bad[0]]}."
        )
    if not abs(array.sum() - 1) <= tolerance:
        raise ValueError(f"{name} must sum to one; it sums to {array.sum()}.")
    return jnp.asarray(array)


def _floating(value: Any) -> Any:
    """A floating-point array: of NumPy while concrete, in its own precision, else JAX.

    Checks then see a double-precision input in full even where JAX would round it.
    """
    array = jnp.asarray(value) if _trees.is_traced(value) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(float)


def _tolerance(dtype: Any) -> float:
    """How far sums of probabilities may be from one."""
    return 1e-8 if jnp.finfo(dtype).bits == 64 else 1e-5


def _gth_numpy(P: np.ndarray) -> np.ndarray:
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


@jax.custom_jvp
def _gth(P: Float[Array, "d d"]) -> Float[Array, " d"]:
    # `_gth_numpy` with masks in place of slices, whose sizes must not change.
    num_states = P.shape[-1]
    index = jnp.arange(num_states)

    def eliminate(step, A):
        n = num_states - 1 - step
        row = jnp.where(index < n, A[n], 0.0)
        column = jnp.where(index < n, A[:, n] / jnp.sum(row), 0.0)
        A = A.at[:, n].set(jnp.where(index < n, column, A[:, n]))
        return A + column[:, None] * row[None, :]

    def substitute(n, pi):
        return pi.at[n].set(jnp.sum(jnp.where(index < n, pi * A[:, n], 0.0)))

    A = jax.lax.fori_loop(0, num_states - 1, eliminate, P)
    pi = jax.lax.fori_loop(1, num_states, substitute, jnp.ones_like(P[0]))
    return pi / jnp.sum(pi)


@_gth.defjvp
def _gth_jvp(primals, tangents):
    (P,), (dP,) = primals, tangents
    pi = _gth(P)
    # The elimination reads off-diagonals alone: the diagonal balances each row.
    dP = dP - jnp.diag(jnp.sum(dP, axis=-1))
    resolvent = jnp.eye(pi.size, dtype=P.dtype) - P + pi[None, :]
    return pi, jnp.linalg.solve(resolvent.T, pi @ dP)


def _minus_p_log_p(p: Float[Array, "..."]) -> Float[Array, "..."]:
    # The inner `where` keeps log away from zero, so that the gradient is finite too.
    positive = p > 0
    return jnp.where(positive, -p * jnp.log(jnp.where(positive, p, 1.0)), 0.0)


def _cumulative_rows(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    # In order, column by column: a parallel prefix sum may round differently on the
    # two sides of a zero entry and so give an impossible transition a chance.
    def add(total, column):
        total = total + column
        return total, total

    _, columns = jax.lax.scan(add, jnp.zeros_like(matrix[0]), matrix.T)
    return columns.T


@eqx.filter_jit
def _sample(chain, key, num_sequences, length):
    pi, num_states = chain.stationary, chain.num_states
    law = jnp.cumsum(pi)
    cumulative = chain.kernel.cumulative(pi)
    last = jnp.full(num_sequences, num_states - 1, jnp.int32)

    def search(uniform, below):
        # The first token whose cumulative probability exceeds the uniform number.
        low, high = jnp.zeros_like(last), last
        for _ in range(math.ceil(math.log2(num_states)) if num_states > 1 else 0):
            middle = (low + high) // 2
            right = below(middle) <= uniform
            low = jnp.where(right, jnp.minimum(middle + 1, high), low)
            high = jnp.where(right, high, middle)
        return low

    def step(state, key):
        total = cumulative(state, last)
        uniform = total * jax.random.uniform(key, (num_sequences,), pi.dtype)
        state = search(uniform, lambda token: cumulative(state, token))
        return state, state

    first_key, key = jax.random.split(key)
    uniform = law[-1] * jax.random.uniform(first_key, (num_sequences,), pi.dtype)
    first = search(uniform, lambda token: law[token])
    _, rest = jax.lax.scan(step, first, jax.random.split(key, length - 1))
    return jnp.concatenate([first[None], rest]).T
