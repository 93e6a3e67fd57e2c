"""The two losses of the attention model: population limit and finite sample.

Both are objectives (a model in, a scalar in nats out), so flow, spectrum and training
treat them alike. They differ in what is averaged: `PopulationLoss` is the limit of
infinitely many infinitely long contexts, where a context's token frequencies are the
stationary law; `SampleLoss` averages over N given windows of length s.

>>> import jax, flowsim as fs
>>> chain = fs.lazy_chain([0.7, 0.2, 0.1], lam=0.5)
>>> model = fs.AttentionModel.init(jax.random.key(0), vocab=3, width=2, scale=1e-3)
>>> round(float(fs.PopulationLoss(chain)(model)), 4)  # log 3: uniform predictions
1.0986
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Integer

from . import _trees
from ._types import Scalar
from .markov import MarkovChain
from .model import AttentionModel
from .width import WidthReduction, worthwhile_reduction


def weighted_attention(
    scores: Float[Array, "... d"], weights: Float[Array, "... d"]
) -> Float[Array, "... d"]:
    """softmax(scores + log weights), with zero weight giving exactly zero attention.

    The attention of one query when key token j occurs with frequency (or count)
    `weights`_j: scores of zero-weight tokens take no part, in value and in gradient.
    """
    present = weights > 0
    log_weights = jnp.log(jnp.where(present, weights, 1.0)).astype(scores.dtype)
    return jax.nn.softmax(jnp.where(present, scores + log_weights, -jnp.inf), axis=-1)


class PopulationLoss(eqx.Module):
    """Cross-entropy of the last-position prediction under a chain, in nats.

        L(theta) = - sum_i pi_i sum_j P_ij log softmax(Z_i)_j,   Z = A W0 W1,
        A_ij = pi_j exp(Phi_ij) / sum_l pi_l exp(Phi_il)

    the limit N, s -> infinity of the training loss (arXiv:2605.01199, section 2). Its
    infimum over all models is the chain's entropy rate.
    """

    chain: MarkovChain

    def __check_init__(self):
        if not isinstance(self.chain, MarkovChain):
            raise ValueError(
                "chain must be a MarkovChain (see flowsim.lazy_chain, "
                f"flowsim.load_chain); got {type(self.chain).__name__}."
            )

    def attention(self, model: AttentionModel) -> Float[Array, "d d"]:
        """A_ij, the attention that query token i pays to key token j; rows sum to 1."""
        self._check_vocab(model)
        scores = model.attention_logits()
        # Every stationary mass of a chain is positive: nothing to mask.
        log_pi = jnp.log(self.chain.stationary).astype(scores.dtype)
        return jax.nn.softmax(scores + log_pi, axis=-1)

    def logits(self, model: AttentionModel) -> Float[Array, "d d"]:
        """Z_i, the next-token logits after token i."""
        return (self.attention(model) @ model.W0) @ model.W1

    def predictions(self, model: AttentionModel) -> Float[Array, "d d"]:
        """p_i, the predicted next-token law after token i; rows sum to 1."""
        return jax.nn.softmax(self.logits(model), axis=-1)

    def __call__(self, model: AttentionModel) -> Scalar:
        return -self.chain.pair_expectation(
            jax.nn.log_softmax(self.logits(model), axis=-1)
        )

    def reduce(self, model: AttentionModel) -> WidthReduction | None:
        """An exactly equivalent narrower start for the flow, where one pays."""
        return worthwhile_reduction(model)

    def _check_vocab(self, model: AttentionModel) -> None:
        if model.vocab != self.chain.num_states:
            raise ValueError(
                f"the model has vocab {model.vocab} but the chain has "
                f"{self.chain.num_states} states; they must be equal."
            )


class SampleLoss(eqx.Module):
    """Cross-entropy of the last-position prediction over N finite windows, in nats.

    The last-position prediction sees a window only through its last token and its
    token counts, exactly: A = softmax(Phi[last] + log counts). That form costs nothing
    per position; it equals the literal masked softmax to round-off.

    Memory is the (N, d) table of counts for the vocabulary of the model, or with
    `chunk_size` that of so many windows at a time, in value and gradient. Token numbers
    are checked where their values are known; traced, a target outside the vocabulary
    makes the loss NaN, and a context token outside it is left out.

    Attributes:
        tokens: the windows; where `counts` are given, any last part of them.
        targets: the token that follows each window.
        counts: how often each token occurs in each window; None counts `tokens`.
        chunk_size: number of windows evaluated at once; all of them when None.
    """

    tokens: Int[Array, "N s"]
    targets: Int[Array, " N"]
    counts: Integer[Array, "N d"] | None
    chunk_size: int | None = eqx.field(static=True)

    def __init__(
        self,
        tokens: Int[ArrayLike, "N s"],
        targets: Int[ArrayLike, " N"],
        *,
        counts: Integer[ArrayLike, "N d"] | None = None,
        chunk_size: int | None = None,
    ):
        given = {"tokens": (tokens, "(N, s)"), "targets": (targets, "(N,)")}
        if counts is not None:
            given["counts"] = (counts, "(N, d)")
        for name, (value, expected) in given.items():
            shape, dtype = np.shape(value), jnp.asarray(value).dtype
            ndim = 1 if name == "targets" else 2
            if len(shape) != ndim or not jnp.issubdtype(dtype, jnp.integer):
                raise ValueError(
                    f"{name} must be integers of shape {expected}; "
                    f"got {dtype} of shape {shape}."
                )
        if np.shape(tokens)[0] != np.shape(targets)[0] or 0 in np.shape(tokens):
            raise ValueError(
                "tokens (N, s) and targets (N,) must agree in N, both N and s at least "
                f"1; got {np.shape(tokens)} and {np.shape(targets)}."
            )
        if counts is not None and np.shape(counts)[0] != np.shape(targets)[0]:
            raise ValueError(
                "counts (N, d) must have one row for each of the "
                f"{np.shape(targets)[0]} windows; got shape {np.shape(counts)}."
            )
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
        self.tokens = jnp.asarray(tokens)
        self.targets = jnp.asarray(targets)
        self.counts = None if counts is None else jnp.asarray(counts)
        self.chunk_size = chunk_size
        if not _trees.is_traced((self.tokens, self.targets)):
            # NumPy, because under `jit` JAX would trace the minimum of a constant.
            lowest = min(np.asarray(x).min() for x in (self.tokens, self.targets))
            if lowest < 0:
                raise ValueError(f"token numbers must not be negative; got {lowest}.")

    def logits(self, model: AttentionModel) -> Float[Array, "N d"]:
        """Next-token logits of every window."""
        self._check_vocab(model)
        return _window_logits(model, self.tokens, self.counts)

    def __call__(self, model: AttentionModel) -> Scalar:
        self._check_vocab(model)
        num = self.targets.shape[0]
        if self.chunk_size is None or self.chunk_size >= num:
            logits = _window_logits(model, self.tokens, self.counts)
            return jnp.mean(_cross_entropies(logits, self.targets))
        return self._sum_in_chunks(model, self.chunk_size) / num

    def _sum_in_chunks(self, model: AttentionModel, size: int) -> Scalar:
        num = self.targets.shape[0]

        # Recomputed in the backward pass: only the running sum is kept between chunks.
        @jax.checkpoint
        def of_chunk(model: AttentionModel, first: Array) -> Scalar:
            # The last chunk starts early enough to be full; what was seen is left out.
            start = jnp.minimum(first, num - size)

            def chunk(leaf: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(leaf, start, size)

            tokens, targets, counts = jax.tree.map(
                chunk, (self.tokens, self.targets, self.counts)
            )
            losses = _cross_entropies(_window_logits(model, tokens, counts), targets)
            new = start + jnp.arange(size, dtype=first.dtype) >= first
            return jnp.sum(jnp.where(new, losses, 0.0))

        def add(total: Scalar, first: Array) -> tuple[Scalar, None]:
            return total + of_chunk(model, first), None

        firsts = jnp.arange(0, num, size, dtype=jnp.int32)
        return jax.lax.scan(add, jnp.zeros((), model.W0.dtype), firsts)[0]

    def reduce(self, model: AttentionModel) -> WidthReduction | None:
        """An exactly equivalent narrower start for the flow, where one pays."""
        return worthwhile_reduction(model)

    def _check_vocab(self, model: AttentionModel) -> None:
        if self.counts is not None and self.counts.shape[1] != model.vocab:
            raise ValueError(
                f"counts have {self.counts.shape[1]} columns but the model has vocab "
                f"{model.vocab}; they must be equal."
            )
        if _trees.is_traced((self.tokens, self.targets)):
            return
        largest = max(np.asarray(x).max() for x in (self.tokens, self.targets))
        if largest >= model.vocab:
            raise ValueError(
                f"the windows hold token {largest} but the model has vocab "
                f"{model.vocab}; every token must be below it."
            )


def _window_logits(
    model: AttentionModel,
    tokens: Int[Array, "N s"],
    counts: Integer[Array, "N d"] | None,
) -> Float[Array, "N d"]:
    dtype = model.W0.dtype
    if counts is None:
        rows = jnp.arange(tokens.shape[0])[:, None]
        occurrences = jnp.zeros((tokens.shape[0], model.vocab), dtype)
        occurrences = occurrences.at[rows, tokens].add(1.0)
    else:
        occurrences = counts.astype(dtype)
    scores = model.attention_logits()[tokens[:, -1]]
    return (weighted_attention(scores, occurrences) @ model.W0) @ model.W1


def _cross_entropies(
    logits: Float[Array, "N d"], targets: Int[Array, " N"]
) -> Float[Array, " N"]:
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
