"""Quantities to watch along a run: ranks, alignments, attention, entropies, balances.

A run's parameters are tens of thousands of numbers; the theory speaks about a few
dozen. `diagnose` computes these at one point, as arrays, so that it can be handed to a
solver as its observer or mapped over a trajectory. `embedding_path` sees the whole
trajectory at once.

Left out: the names of stages (`flowsim.stages`), and drawing (`flowsim.plots`).

>>> import jax, flowsim as fs
>>> from flowsim.diagnostics import diagnose
>>> chain = fs.lazy_chain([0.7, 0.2, 0.1], lam=0.5)
>>> point = fs.theory.second_critical_point(chain, width=4)
>>> seen = diagnose(chain, point)
>>> round(float(seen.embedding_cosine), 6), float(seen.rank_ratio().W0) < 1e-12
(1.0, True)

Along a trajectory, `jax.vmap` (`jax.lax.map` with a `batch_size` for large
vocabularies, as every point needs a (d, d) matrix while it is looked at)::

    seen = jax.vmap(lambda model: diagnose(chain, model))(run.models)
    seen = fs.gradient_flow(loss, model, t1=1e3, observe=partial(diagnose, loss))
"""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import _summary, _trees
from ._types import Scalar
from .conservation import Conserved, conserved
from .loss import PopulationLoss, weighted_attention
from .markov import MarkovChain
from .model import AttentionModel


class PerMatrix(eqx.Module):
    """One array for each weight matrix of the model."""

    W0: Float[Array, "*batch q0"]
    W1: Float[Array, "*batch q1"]
    WQ: Float[Array, "*batch q2"]
    WK: Float[Array, "*batch q3"]


class Diagnostics(eqx.Module):
    """What `diagnose` sees at one point; mapped over a path, with leading time axes.

    Attributes:
        singular_values: of W0, W1, WQ and WK, descending.
        embedding_cosine: |cos| between the leading left singular vector of W0 and pi.
        readout_cosine: |cos| between the leading right singular vector of W1 and
            pi - 1/d.
        attention_scale: Frobenius norm of the attention logits Phi.
        attention_cosine: cos between Phi and pi pi^T, signed: positive when attention
            moves to frequent tokens.
        top_attention: attention of each query on the most frequent token.
        self_attention: attention of each query on itself.
        attention_entropy: entropy of each query's attention, nats.
        mean_top_attention, mean_self_attention, mean_attention_entropy: their averages
            over queries, weighted by pi.
        embedding_norms: norm of each token's embedding, its row of W0.
        conserved: the three conserved quantities (`flowsim.theory.conserved_drift`).

    Cosines with a zero vector are zero; so are ratios of singular values of a zero
    matrix.
    """

    singular_values: PerMatrix
    embedding_cosine: Float[Array, "*batch"]
    readout_cosine: Float[Array, "*batch"]
    attention_scale: Float[Array, "*batch"]
    attention_cosine: Float[Array, "*batch"]
    top_attention: Float[Array, "*batch d"]
    self_attention: Float[Array, "*batch d"]
    attention_entropy: Float[Array, "*batch d"]
    mean_top_attention: Float[Array, "*batch"]
    mean_self_attention: Float[Array, "*batch"]
    mean_attention_entropy: Float[Array, "*batch"]
    embedding_norms: Float[Array, "*batch d"]
    conserved: Conserved

    axis_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "top_attention": ("token",),
        "self_attention": ("token",),
        "attention_entropy": ("token",),
        "embedding_norms": ("token",),
    }
    units: ClassVar[dict[str, str]] = {
        "top_attention": "probability",
        "self_attention": "probability",
        "attention_entropy": "nats",
        "mean_top_attention": "probability",
        "mean_self_attention": "probability",
        "mean_attention_entropy": "nats",
        "embedding_norms": "parameter",
    }

    def rank_ratio(self, order: int = 2) -> PerMatrix:
        """sigma_order / sigma_1 of each matrix; by default sigma_2 / sigma_1."""
        if order < 2:
            raise ValueError(f"order must be at least 2; got {order}.")

        def ratio(values: Float[Array, "*batch q"]) -> Float[Array, "*batch"]:
            largest = values[..., 0]
            if values.shape[-1] < order:
                return jnp.zeros_like(largest)
            positive = largest > 0
            quotient = values[..., order - 1] / jnp.where(positive, largest, 1.0)
            return jnp.where(positive, quotient, 0.0)

        return jax.tree.map(ratio, self.singular_values)

    def __str__(self) -> str:
        ratios = vars(self.rank_ratio())
        return _summary.aligned(
            "Diagnostics",
            {
                **{f"sigma2/sigma1 {name}": ratio for name, ratio in ratios.items()},
                "|cos(W0, pi)|": self.embedding_cosine,
                "|cos(W1, pi - 1/d)|": self.readout_cosine,
                "|Phi|": self.attention_scale,
                "cos(Phi, pi pi^T)": self.attention_cosine,
                "attention on top token": self.mean_top_attention,
                "attention on itself": self.mean_self_attention,
                "attention entropy (nats)": self.mean_attention_entropy,
                "embedding norms": self.embedding_norms,
            },
        )


class EmbeddingPath(eqx.Module):
    """The path of every token's embedding in two principal components.

    Attributes:
        coordinates: of each token at each saved time, in one basis for all times.
        explained: fraction of the total variance along each of the two components.
        basis: the two components, orthonormal, the largest entry of each positive.
        center: the mean embedding, the origin of the coordinates.
    """

    coordinates: Float[Array, "t d 2"]
    explained: Float[Array, " 2"]
    basis: Float[Array, "2 m"]
    center: Float[Array, " m"]

    def __str__(self) -> str:
        return _summary.aligned("EmbeddingPath", vars(self))


def diagnose(loss: PopulationLoss | MarkovChain, model: AttentionModel) -> Diagnostics:
    """Everything worth watching at one point of a run.

    Args:
        loss: a population loss, or the chain it belongs to.
        model: the parameters at one time. Not meant to be differentiated: singular
            vectors have no derivative where singular values meet.

    Raises:
        ValueError: if model and chain differ in the number of tokens, or `loss` has
            no chain.

    Singular values are those of the matrices themselves, not roots of eigenvalues of a
    Gram matrix, so that ratios are right down to machine precision.
    """
    chain = loss.chain if isinstance(loss, PopulationLoss) else loss
    if not isinstance(chain, MarkovChain):
        raise ValueError(
            "loss must be a PopulationLoss or a MarkovChain; "
            f"got {type(loss).__name__}."
        )
    if model.W0.ndim != 2 or model.vocab != chain.num_states:
        raise ValueError(
            f"model must be one point with {chain.num_states} tokens, like the chain; "
            f"its W0 has shape {model.W0.shape}. Map over a time axis with jax.vmap."
        )
    pi = chain.stationary.astype(model.W0.dtype)
    embedding, W0_values, _ = jnp.linalg.svd(model.W0, full_matrices=False)
    # One after the other: two mapped LAPACK calls that run at the same time wait for
    # each other's threads, for ever on a machine with two cores (jaxlib 0.10.2).
    W1 = _after(model.W1, W0_values)
    _, W1_values, readout = jnp.linalg.svd(W1, full_matrices=False)
    maps = _after(jnp.stack([model.WQ, model.WK]), W1_values)
    WQ_values, WK_values = jnp.linalg.svd(maps, compute_uv=False)
    scores = model.attention_logits()
    attention = weighted_attention(scores, pi)
    top_attention = jnp.take(attention, jnp.argmax(pi), axis=1)
    self_attention = jnp.diagonal(attention)
    attention_entropy = softmax_entropy(scores + jnp.log(pi))
    return Diagnostics(
        singular_values=PerMatrix(
            W0=W0_values,
            W1=W1_values,
            WQ=WQ_values,
            WK=WK_values,
        ),
        # A singular vector of a zero matrix is arbitrary: scaling by the value first
        # makes it, and so the cosine, zero.
        embedding_cosine=jnp.abs(_cosine(W0_values[0] * embedding[:, 0], pi)),
        readout_cosine=jnp.abs(
            _cosine(W1_values[0] * readout[0], pi - 1.0 / chain.num_states)
        ),
        attention_scale=_norm(scores),
        attention_cosine=_cosine(scores, jnp.outer(pi, pi)),
        top_attention=top_attention,
        self_attention=self_attention,
        attention_entropy=attention_entropy,
        mean_top_attention=pi @ top_attention,
        mean_self_attention=pi @ self_attention,
        mean_attention_entropy=pi @ attention_entropy,
        embedding_norms=jnp.linalg.norm(model.W0, axis=-1),
        conserved=conserved(model),
    )


def softmax_entropy(logits: Float[Array, "*batch d"]) -> Float[Array, "*batch"]:
    """Entropy of softmax(logits) along the last axis, in nats.

    Value and derivatives stay finite where a probability is exactly zero, by a logit
    of minus infinity or by underflow. At least one logit must be finite.
    """
    log_p = jax.nn.log_softmax(logits, axis=-1)
    # The product 0 * (-inf) must not be formed, in the value or in the derivative.
    finite_log_p = jnp.where(jnp.isneginf(log_p), 0.0, log_p)
    return -jnp.sum(jnp.exp(log_p) * finite_log_p, axis=-1)


def entropy(probabilities: Float[Array, "*batch d"]) -> Float[Array, "*batch"]:
    """- sum_j p_j log p_j along the last axis, in nats, with 0 log 0 = 0.

    The derivative with respect to a zero probability is infinite; it is given as zero,
    so that gradients through a zero that stays zero are right. Where logits are at
    hand, `softmax_entropy` is accurate throughout.
    """
    positive = probabilities > 0
    log_p = jnp.log(jnp.where(positive, probabilities, 1.0))
    return -jnp.sum(jnp.where(positive, probabilities * log_p, 0.0), axis=-1)


def embedding_path(models: AttentionModel) -> EmbeddingPath:
    """Principal components of the embeddings of all tokens at all saved times.

    Every saved time has the same weight, so bursts, which are saved densely, weigh more
    than plateaus. With a width of one the second component is zero.

    Args:
        models: a trajectory of models, every leaf with a leading time axis.

    Raises:
        ValueError: if there is no time axis.
    """
    if models.W0.ndim != 3:
        raise ValueError(
            "models must be a trajectory, with W0 of shape (t, d, m); "
            f"got {models.W0.shape}."
        )
    width = models.width
    rows = models.W0.reshape(-1, width)
    center = jnp.mean(rows, axis=0)
    # The small triangular factor has the singular values and right singular vectors of
    # the tall matrix, without squaring its condition number.
    triangular = jnp.linalg.qr(rows - center, mode="r")
    _, values, components = jnp.linalg.svd(triangular, full_matrices=True)
    count = min(2, width)
    basis = jnp.zeros((2, width), rows.dtype).at[:count].set(components[:count])
    largest = jnp.argmax(jnp.abs(basis), axis=-1, keepdims=True)
    basis = jnp.where(jnp.take_along_axis(basis, largest, axis=-1) < 0, -basis, basis)
    variances = (values / jnp.where(values[0] > 0, values[0], 1.0)) ** 2
    variances = variances / jnp.where(values[0] > 0, jnp.sum(variances), 1.0)
    count = min(count, values.size)
    return EmbeddingPath(
        coordinates=(models.W0 - center) @ basis.T,
        explained=jnp.zeros(2, rows.dtype).at[:count].set(variances[:count]),
        basis=basis,
        center=center,
    )


def _after(x: Float[Array, "..."], done: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, available to the compiled program only once `done` is computed.

    A barrier would not do: XLA removes it before it schedules. NaN in `done` spreads.
    """
    return x + jnp.where(jnp.isnan(jnp.sum(done)), jnp.nan, 0.0).astype(x.dtype)


def _norm(x: Float[Array, "..."]) -> Scalar:
    """Euclidean norm; squares do not underflow where attention starts near 1e-200."""
    largest = jnp.max(jnp.abs(x))
    return largest * _trees.norm(x / jnp.where(largest > 0, largest, 1.0))


def _cosine(x: Float[Array, "..."], y: Float[Array, "..."]) -> Scalar:
    """Cosine of the angle between two arrays; zero if one of them is zero."""
    lengths = _norm(x), _norm(y)
    x, y = (
        z / jnp.where(length > 0, length, 1.0)
        for z, length in zip((x, y), lengths, strict=True)
    )
    return jnp.sum(x * y)
