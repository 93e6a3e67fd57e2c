"""The one-layer transformer of the paper, as an Equinox module.

No residual path, no normalisation, no biases (arXiv:2605.01199, section 2):

    f(X) = softmax(mask(X Phi X^T)) X W0 W1,     Phi = W0 WQ WK^T W0^T

for a context X of one-hot rows. Every leaf is a floating-point array, so a model is
its own parameter vector. The long-context population form of the same model lives in
`flowsim.loss`.

>>> import jax
>>> from flowsim.model import AttentionModel
>>> model = AttentionModel.init(jax.random.key(0), vocab=4, width=3, key_width=2)
>>> model(jax.numpy.array([0, 3, 1])).shape
(3, 4)
"""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from . import _trees
from ._types import Scalar


class AttentionModel(eqx.Module):
    """Parameters theta = (W0, W1, WQ, WK) of one attention layer with a linear readout.

    Attributes:
        W0: embedding, one row per token.
        W1: readout to logits.
        WQ: query map.
        WK: key map.
        scale_attention: divide Phi by sqrt(k). The paper does not; off by default.
    """

    W0: Float[Array, "*batch d m"]
    W1: Float[Array, "*batch m d"]
    WQ: Float[Array, "*batch m k"]
    WK: Float[Array, "*batch m k"]
    scale_attention: bool = eqx.field(static=True, default=False)

    # How a trajectory of models labels its axes; see `Trajectory.to_xarray`.
    axis_names: ClassVar[dict[str, tuple[str, ...]]] = {
        "W0": ("token", "width"),
        "W1": ("width", "token"),
        "WQ": ("width", "key_width"),
        "WK": ("width", "key_width"),
    }
    units: ClassVar[dict[str, str]] = {"loss": "nats"}

    def __check_init__(self):
        leaves = (self.W0, self.W1, self.WQ, self.WK)
        for name, leaf in zip(("W0", "W1", "WQ", "WK"), leaves, strict=True):
            if isinstance(leaf, list | tuple | int | float):
                raise ValueError(f"{name} must be an array; got {type(leaf).__name__}.")
        if not all(hasattr(leaf, "shape") for leaf in leaves):
            return  # A tree of specifications or gradients' None: nothing to check.
        shapes = [tuple(leaf.shape) for leaf in leaves]
        # A trajectory of models has a leading time axis: check the trailing two.
        if any(len(shape) < 2 for shape in shapes):
            raise ValueError(f"W0, W1, WQ, WK must be matrices; got shapes {shapes}.")
        (d, m), (m1, d1), (mq, kq), (mk, kk) = (shape[-2:] for shape in shapes)
        if not (m == m1 == mq == mk and d == d1 and kq == kk):
            raise ValueError(
                "W0 (d, m), W1 (m, d), WQ (m, k), WK (m, k) must agree in d, m and k; "
                f"got W0 {shapes[0]}, W1 {shapes[1]}, WQ {shapes[2]}, WK {shapes[3]}."
            )
        if len({shape[:-2] for shape in shapes}) > 1:
            raise ValueError(
                f"W0, W1, WQ, WK must have the same leading axes; got shapes {shapes}."
            )
        for name, leaf in zip(("W0", "W1", "WQ", "WK"), leaves, strict=True):
            if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"{name} must be floating point; got {leaf.dtype}.")

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray,
        *,
        vocab: int,
        width: int,
        key_width: int | None = None,
        scale: float | Scalar = 1e-3,
        scale_attention: bool = False,
        dtype: jnp.dtype | type | None = None,
    ) -> "AttentionModel":
        """Draw every entry from N(0, scale^2), independently.

        Args:
            key: a JAX random key. One key gives different numbers in 32 and 64 bit.
            vocab: number of tokens d.
            width: embedding width m.
            key_width: key width k; `width` when absent.
            scale: standard deviation epsilon of every entry.
            scale_attention: divide Phi by sqrt(k).
            dtype: floating-point type; JAX's current default when absent.
        """
        key_width = width if key_width is None else key_width
        for name, size in (
            ("vocab", vocab),
            ("width", width),
            ("key_width", key_width),
        ):
            if not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"{name} must be a positive integer; got {size}.")
        shapes = (
            (vocab, width),
            (width, vocab),
            (width, key_width),
            (width, key_width),
        )
        dtype = jnp.result_type(float) if dtype is None else dtype
        matrices = (
            scale * jax.random.normal(subkey, shape, dtype)
            for subkey, shape in zip(jax.random.split(key, 4), shapes, strict=True)
        )
        return cls(*matrices, scale_attention=scale_attention)

    @property
    def vocab(self) -> int:
        return self.W0.shape[-2]

    @property
    def width(self) -> int:
        return self.W0.shape[-1]

    @property
    def key_width(self) -> int:
        return self.WQ.shape[-1]

    def attention_logits(self) -> Float[Array, "d d"]:
        """Phi_ij, the attention logit that query token i gives to key token j."""
        factor = 1 / math.sqrt(self.key_width) if self.scale_attention else 1.0
        # One product instead of two: half as many operations in every derivative.
        both = self.W0 @ jnp.concatenate([self.WQ, self.WK], axis=-1)
        queries, keys = jnp.split(both, 2, axis=-1)
        return factor * queries @ keys.T

    def value_logits(self) -> Float[Array, "d d"]:
        """M = W0 W1: row j is what attending to token j adds to the logits."""
        return self.W0 @ self.W1

    def __call__(self, tokens: Int[Array, " s"]) -> Float[Array, "s d"]:
        """Next-token logits at every position of one finite context.

        Causal: position t attends to positions 0 ... t. The last row is the
        prediction that the losses use.

        Raises:
            ValueError: if `tokens` is not a vector of integers, or, where its values
                are known, holds a number outside 0 ... d - 1.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                "tokens must be integers of shape (s,); "
                f"got {tokens.dtype} of shape {tokens.shape}."
            )
        if not _trees.is_traced(tokens):
            values = np.asarray(tokens)
            outside = values[(values < 0) | (values >= self.vocab)]
            if outside.size:
                raise ValueError(
                    f"tokens must lie in 0 ... {self.vocab - 1}; got {outside[0]}."
                )
        scores = self.attention_logits()[tokens[:, None], tokens[None, :]]
        causal = jnp.tril(jnp.ones(scores.shape, bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return weights @ self.value_logits()[tokens]
