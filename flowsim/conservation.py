"""What the exact gradient flow of the attention model keeps constant.

The loss does not change under W0 -> W0 R, W1 -> R^-1 W1, WQ -> R^-1 WQ, WK -> R^-1 WK
(R in GL(m)), under WQ -> WQ R, WK -> WK R^-T (R in GL(k)), nor when a constant is
added to a row of W1. Each invariance conserves a quantity, for the population loss and
for every sample, with and without `scale_attention`. Their drift along a computed path
is a measure of the integration error that needs no reference solution.

>>> import jax.numpy as jnp, flowsim as fs
>>> model = fs.AttentionModel(*(jnp.ones((2, 2)) for _ in range(4)))
>>> fs.theory.conserved(model).readout_sum.tolist()
[2.0, 2.0]
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import _summary
from ._types import Scalar
from .model import AttentionModel


class Conserved(eqx.Module):
    """The three quantities that the exact gradient flow keeps constant.

    Attributes:
        embedding_balance: W0^T W0 - W1 W1^T - WQ WQ^T - WK WK^T.
        key_balance: WQ^T WQ - WK^T WK.
        readout_sum: W1 1, the row sums of W1.
    """

    embedding_balance: Float[Array, "*batch m m"]
    key_balance: Float[Array, "*batch k k"]
    readout_sum: Float[Array, "*batch m"]

    def __str__(self) -> str:
        return _summary.aligned("Conserved", vars(self))


def conserved(model: AttentionModel) -> Conserved:
    """The three conserved quantities of a model; constant in flow time.

    For a trajectory, map over time: ``jax.vmap(conserved)(run.models)``.

    References:
        Chen, Lin, Xu and Luo (2026), arXiv:2605.01199.
    """
    W0, W1, WQ, WK = model.W0, model.W1, model.WQ, model.WK
    return Conserved(
        embedding_balance=W0.T @ W0 - W1 @ W1.T - WQ @ WQ.T - WK @ WK.T,
        key_balance=WQ.T @ WQ - WK.T @ WK,
        readout_sum=jnp.sum(W1, axis=-1),
    )


def conserved_drift(path: AttentionModel | Conserved) -> dict[str, Scalar]:
    """Largest change of any entry of each conserved quantity from row 0 of a path.

    The change is absolute. It measures the integration error, and is to be compared
    with the squared norms of the weights (with their norms for `readout_sum`).

    Args:
        path: models, or their conserved quantities, with a leading time axis.

    Returns:
        One number per quantity, under the names of `Conserved`.
    """
    sums = (
        jnp.sum(path.W1, -1) if isinstance(path, AttentionModel) else path.readout_sum
    )
    if sums.ndim != 2:
        raise ValueError(
            "path must have one leading time axis, so that W1 1 has shape (t, m); "
            f"it has shape {sums.shape}."
        )
    path = jax.vmap(conserved)(path) if isinstance(path, AttentionModel) else path
    return {
        name: jnp.max(jnp.abs(value - value[0])) for name, value in vars(path).items()
    }
