"""Exact reduction of the width: the same flow with fewer numbers.

The columns of W0^T, W1, WQ and WK span a subspace of R^m of dimension at most
r = 2 d + 2 k, and every term of the gradient lies in it, at the start and hence for
ever. If m > r, the flow in an orthonormal basis of that subspace is the gradient flow
of a model of width r, started at the same point; nothing is approximated.

>>> import jax, flowsim as fs
>>> from flowsim.width import reduce_width
>>> wide = fs.AttentionModel.init(jax.random.key(0), vocab=3, width=50, key_width=2)
>>> reduction = reduce_width(wide)
>>> reduction.model.width, reduction.restore(reduction.model).width
(10, 50)
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .model import AttentionModel


class WidthReduction(eqx.Module):
    """A narrow model and the basis that leads back to the wide one.

    Attributes:
        model: the model of width r, in coordinates of `basis`.
        basis: orthonormal columns that span the columns of W0^T, W1, WQ, WK.
    """

    model: AttentionModel
    basis: Float[Array, "m r"]

    def restore(self, narrow: AttentionModel) -> AttentionModel:
        """The wide model of a narrow one; exact for every point of the flow."""
        return AttentionModel(
            narrow.W0 @ self.basis.T,
            self.basis @ narrow.W1,
            self.basis @ narrow.WQ,
            self.basis @ narrow.WK,
            scale_attention=narrow.scale_attention,
        )


def reduce_width(model: AttentionModel) -> WidthReduction:
    """Express a model in an orthonormal basis of the subspace that its flow stays in.

    Args:
        model: one point, of any width; the result has width min(m, 2 d + 2 k).

    Any objective that depends on the model through Phi and W0 W1 alone keeps the
    subspace: all losses of this package do. Norms, distances and gradients are those of
    the wide model. The spectrum is not: the wide Hessian has further eigenvalues, of
    directions out of the subspace, which this reduction leaves out.
    """
    columns = jnp.concatenate([model.W0.T, model.W1, model.WQ, model.WK], axis=1)
    basis, _ = jnp.linalg.qr(columns)
    narrow = AttentionModel(
        model.W0 @ basis,
        basis.T @ model.W1,
        basis.T @ model.WQ,
        basis.T @ model.WK,
        scale_attention=model.scale_attention,
    )
    return WidthReduction(model=narrow, basis=basis)


def worthwhile_reduction(model: AttentionModel) -> WidthReduction | None:
    """The reduction of a model a fifth wider than its flow needs or more; else None."""
    needed = 2 * model.vocab + 2 * model.key_width
    return reduce_width(model) if model.width >= 1.2 * needed else None
