"""Directions along which a symmetry of the objective carries a point.

A continuous symmetry theta -> g(theta) leaves the objective alone, so at a critical
point its velocities are null vectors of the Hessian: exact zeros of the spectrum that
say nothing about the landscape. This module writes them down, so that `spectrum` can
say how many of its zeros are of this kind and how many are degenerate beyond it.

For the attention model, Phi = W0 WQ WK^T W0^T and M = W0 W1 are all the losses see, so
they are invariant under

    GL(m):        W0 -> W0 B,   W1 -> B^-1 W1,   WQ -> B^-1 WQ,   WK -> B^-1 WK
    GL(k):        WQ -> WQ C,   WK -> C^-T WK (from the right: WK C^-T)
    logit shift:  W1 -> W1 + v 1^T

Left out: discrete symmetries, which have no velocity, and symmetries of one particular
objective, which its user may pass to `spectrum` as a function.

>>> import jax, flowsim as fs
>>> from flowsim.symmetry import symmetry_rank
>>> model = fs.AttentionModel.init(jax.random.key(0), vocab=5, width=3, key_width=2)
>>> int(symmetry_rank(model))  # 9 + 4 + 3 directions, independent at a generic point
16
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import _trees
from ._types import Params, Scalar
from .model import AttentionModel

Symmetries = Callable[[Any], Params]


def symmetry_directions(model: AttentionModel) -> AttentionModel:
    """Velocities of the GL(m), GL(k) and logit-shift invariances at `model`.

        (W0 B, -B W1, -B WQ, -B WK),   (0, 0, WQ C, -WK C^T),   (0, v 1^T, 0, 0)

    for B, C, v running through the unit matrices and vectors.

    Returns:
        The m^2 + k^2 + m directions stacked along a leading axis, neither normalised
        nor independent: at special points some coincide or vanish.

    Raises:
        ValueError: if `model` is not an `AttentionModel`.
    """
    if not isinstance(model, AttentionModel):
        raise ValueError(
            "symmetry_directions knows the symmetries of AttentionModel only; got "
            f"{type(model).__name__}. Pass your own function params -> stacked "
            "directions instead."
        )
    dtype = model.W0.dtype
    m, k = model.width, model.key_width

    def embedding(B: Float[Array, "m m"]) -> AttentionModel:
        return _like(model, model.W0 @ B, -B @ model.W1, -B @ model.WQ, -B @ model.WK)

    def keys(C: Float[Array, "k k"]) -> AttentionModel:
        still = jnp.zeros_like(model.W0), jnp.zeros_like(model.W1)
        return _like(model, *still, model.WQ @ C, -model.WK @ C.T)

    def shift(v: Float[Array, " m"]) -> AttentionModel:
        moved = v[:, None] * jnp.ones_like(model.W1)
        still = jnp.zeros_like(model.WQ), jnp.zeros_like(model.WK)
        return _like(model, jnp.zeros_like(model.W0), moved, *still)

    families = (
        jax.vmap(embedding)(jnp.eye(m * m, dtype=dtype).reshape(-1, m, m)),
        jax.vmap(keys)(jnp.eye(k * k, dtype=dtype).reshape(-1, k, k)),
        jax.vmap(shift)(jnp.eye(m, dtype=dtype)),
    )
    return jax.tree_util.tree_map(lambda *leaves: jnp.concatenate(leaves), *families)


def _like(model: AttentionModel, *leaves: Array) -> AttentionModel:
    return AttentionModel(*leaves, scale_attention=model.scale_attention)


def symmetry_basis(
    params: Params,
    symmetries: Symmetries = symmetry_directions,
    tol: float | Scalar = 1e-6,
) -> tuple[Float[Array, "q n"], Int[Array, ""]]:
    """Orthonormal basis of the span of the symmetry directions, and its dimension.

    Args:
        params: the point.
        symmetries: a function from parameters to directions stacked along a leading
            axis; the attention model's by default.
        tol: singular values of the stack below `tol` times the largest count as zero.
            Not below 1e-7: the basis comes from the Gram matrix.

    Returns:
        Rows in the coordinates of `_trees.ravel`, zero beyond the dimension.
    """
    stack = jax.vmap(lambda direction: _trees.ravel(direction)[0])(symmetries(params))
    squares, rotation = jnp.linalg.eigh(stack @ stack.T)
    independent = squares > tol**2 * squares[-1]
    lengths = jnp.sqrt(jnp.where(independent, squares, 1.0))
    rows = (rotation.T @ stack) / lengths[:, None]
    rank = jnp.sum(independent, dtype=jnp.int32)
    return jnp.where(independent[:, None], rows, 0.0)[::-1], rank


def symmetry_rank(
    params: Params,
    symmetries: Symmetries = symmetry_directions,
    tol: float | Scalar = 1e-6,
) -> Int[Array, ""]:
    """Dimension of the orbit of `params`: independent symmetry directions there.

    At a critical point it is a lower bound for the nullity of the Hessian. Arguments as
    for `symmetry_basis`.
    """
    return symmetry_basis(params, symmetries, tol)[1]


def num_explained(
    vectors: Float[Array, "n n"],
    selected: Float[Array, " n"],
    basis: Float[Array, "q n"],
    threshold: float = 0.99,
) -> Int[Array, ""]:
    """Number of selected orthonormal vectors that lie in the symmetry span.

    Counts the principal angles between the two subspaces whose cosine is above
    `threshold`. At a critical point the symmetry span lies in the kernel, and the
    count is its dimension.

    Args:
        vectors: orthonormal rows.
        selected: 1 for the rows that count, 0 for the others.
        basis: rows of `symmetry_basis`.
    """
    cosines = selected[:, None] * (vectors @ basis.T)
    squares = jnp.linalg.eigvalsh(cosines.T @ cosines)
    return jnp.sum(squares > threshold**2, dtype=jnp.int32)
