"""`MarkovChain`: a checked transition kernel with its stationary law.

The one type that the loss and the theory see, whatever the form of the probabilities.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Real

from .. import _trees
from .._types import Scalar
from ._checks import check_transition, floating, probability_vector, tolerance
from .kernels import AbstractKernel, DenseKernel, entropy_terms
from .stationary import check_ergodic, eliminate, stationary_law


class MarkovChain(eqx.Module):
    """An ergodic chain: transition matrix P, stationary law pi.

    Every leaf is an array, so a chain can be mapped over and differentiated; the names
    of the tokens are static.

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
        P: Real[ArrayLike, "d d"] | Sequence[Any] | AbstractKernel,
        stationary: Real[ArrayLike, " d"] | Sequence[Any] | None = None,
        *,
        tokens: Sequence[str] | None = None,
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
        elif _trees.is_traced((P, stationary)):
            self.kernel, self.stationary = _traced_chain(P, stationary)
        else:
            self.kernel, self.stationary = _concrete_chain(P, stationary, tokens)
        if tokens is not None and len(tokens) != self.num_states:
            raise ValueError(
                f"tokens must name all {self.num_states} states; "
                f"got {len(tokens)} names."
            )
        self.tokens = None if tokens is None else tuple(tokens)

    @property
    def num_states(self) -> int:
        """Vocabulary size d."""
        return self.stationary.shape[-1]

    @property
    def transition(self) -> Float[Array, "d d"]:
        """The dense transition matrix P; rows sum to one."""
        return self.kernel.dense(self.stationary)

    def to_dense(self) -> "MarkovChain":
        """The same law with the matrix stored whole, and without names of tokens.

        Chains of one size then share compiled code, whatever they were made of.
        """
        return MarkovChain(DenseKernel(self.transition), self.stationary)

    @property
    def entropy_rate(self) -> Scalar:
        """H(P) = - sum_i pi_i sum_j P_ij log P_ij in nats: the floor of the loss."""
        return jnp.sum(self.stationary * self.kernel.row_entropies(self.stationary))

    @property
    def unigram_entropy(self) -> Scalar:
        """H(pi) = - sum_i pi_i log pi_i in nats: the best loss without context."""
        return jnp.sum(entropy_terms(self.stationary))

    def pair_expectation(self, values: Float[Array, "d d"]) -> Scalar:
        """sum_ij pi_i P_ij values_ij, the mean over pairs of consecutive tokens.

        The chain is brought to the precision of `values`.
        """
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

        Inverse transform sampling: one uniform number and one binary search a step.
        Memory is the output, one step's O(N), and for a chain that is not lazy one
        (d, d) table. Compiled once per size and kind of chain.

        Args:
            key: a JAX random key. One key gives different draws in 32 and 64 bit.
            num_sequences: N.
            length: s, the first token included.
        """
        for name, size in (("num_sequences", num_sequences), ("length", length)):
            if size < 1:
                raise ValueError(f"{name} must be a positive integer; got {size}.")
        return _sample(self, key, num_sequences, length)


def _concrete_chain(
    P: Any, stationary: Any, tokens: Sequence[str] | None
) -> tuple[DenseKernel, Float[Array, " d"]]:
    matrix = floating(P)
    _check_shapes(matrix, stationary)
    check_transition(matrix)
    names = range(len(matrix)) if tokens is None else [repr(name) for name in tokens]
    check_ergodic(matrix, "P", names)
    pi = eliminate(matrix)
    if stationary is not None:
        probability_vector(stationary, "stationary")
        given = floating(stationary)
        # The residual of pi P = pi would be a weak test: it is small for any mixture
        # of the laws of two blocks that hardly communicate.
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


def _traced_chain(P: Any, stationary: Any) -> tuple[DenseKernel, Float[Array, " d"]]:
    matrix = jnp.asarray(floating(P))
    _check_shapes(matrix, stationary)
    allowed = tolerance(matrix.dtype)
    sums = jnp.sum(matrix, axis=-1)
    valid = jnp.all(matrix >= 0) & jnp.all(jnp.abs(sums - 1) <= allowed)
    rule = "P must be non-negative with rows that sum to one."
    matrix = eqx.error_if(matrix, ~valid, rule)
    if stationary is None:
        pi = stationary_law(matrix)
        rule = "P must be irreducible, so that every stationary mass is positive."
        return DenseKernel(matrix), eqx.error_if(pi, ~jnp.all(pi > 0), rule)
    pi = jnp.asarray(stationary, matrix.dtype)
    defect = jnp.abs(pi @ matrix - pi)
    valid = (
        jnp.all(pi > 0)
        & (jnp.abs(jnp.sum(pi) - 1) <= allowed)
        & jnp.all(defect <= math.sqrt(jnp.finfo(pi.dtype).eps) * pi)
    )
    rule = "stationary must be positive, sum to one and satisfy pi P = pi."
    return DenseKernel(matrix), eqx.error_if(pi, ~valid, rule)


def _check_shapes(matrix: Any, stationary: Any) -> None:
    shape = matrix.shape
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"P must be a square matrix (d, d); got shape {shape}.")
    if stationary is not None and np.shape(stationary) != shape[:1]:
        raise ValueError(
            f"stationary must have shape {shape[:1]} like the rows of P; "
            f"got {np.shape(stationary)}."
        )


@eqx.filter_jit
def _sample(
    chain: MarkovChain, key: PRNGKeyArray, num_sequences: int, length: int
) -> Int[Array, "N s"]:
    pi = chain.stationary
    law = jnp.cumsum(pi)
    cumulative = chain.kernel.cumulative(pi)
    last = jnp.full(num_sequences, chain.num_states - 1, jnp.int32)

    def draw(key: PRNGKeyArray, below: Callable[[Array], Array]) -> Array:
        # The first token whose cumulative probability exceeds a uniform number. The
        # total, which round-off moves from one, bounds the number.
        uniform = below(last) * jax.random.uniform(key, (num_sequences,), pi.dtype)
        low, high = jnp.zeros_like(last), last
        for _ in range((chain.num_states - 1).bit_length()):
            middle = (low + high) // 2
            right = (below(middle) <= uniform) & (middle < high)
            low, high = (
                jnp.where(right, middle + 1, low),
                jnp.where(right, high, middle),
            )
        return low

    def step(state: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
        state = draw(key, lambda token: cumulative(state, token))
        return state, state

    first_key, key = jax.random.split(key)
    first = draw(first_key, lambda token: law[token])
    _, rest = jax.lax.scan(step, first, jax.random.split(key, length - 1))
    return jnp.concatenate([first[None], rest]).T
