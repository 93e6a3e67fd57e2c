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

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import _trees
from ._types import Params, Scalar
from .model import AttentionModel

Symmetries = Callable[[Any], Params]


@jax.jit
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
    no_B, no_C, no_v = _still(model)
    families = (
        jax.vmap(lambda B: _velocity(model, B, no_C, no_v))(
            jnp.eye(m * m, dtype=dtype).reshape(-1, m, m)
        ),
        jax.vmap(lambda C: _velocity(model, no_B, C, no_v))(
            jnp.eye(k * k, dtype=dtype).reshape(-1, k, k)
        ),
        jax.vmap(lambda v: _velocity(model, no_B, no_C, v))(jnp.eye(m, dtype=dtype)),
    )
    return jax.tree_util.tree_map(lambda *leaves: jnp.concatenate(leaves), *families)


def _velocity(
    model: AttentionModel,
    B: Float[Array, "m m"],
    C: Float[Array, "k k"],
    v: Float[Array, " m"],
) -> AttentionModel:
    """One direction, linear in B, C and v."""
    return AttentionModel(
        model.W0 @ B,
        v[:, None] - B @ model.W1,
        model.WQ @ C - B @ model.WQ,
        -model.WK @ C.T - B @ model.WK,
        scale_attention=model.scale_attention,
    )


def _still(model: AttentionModel) -> tuple[Array, Array, Array]:
    """The B, C and v that move nothing."""
    m, k, dtype = model.width, model.key_width, model.W0.dtype
    return jnp.zeros((m, m), dtype), jnp.zeros((k, k), dtype), jnp.zeros((m,), dtype)


@eqx.filter_jit
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


@eqx.filter_jit
def explained_shares(
    params: Params, symmetries: Symmetries, vectors: Float[Array, "k n"]
) -> Float[Array, " k"]:
    """Share of each vector's squared norm that lies in the span of the symmetries.

    The span is never formed: conjugate gradients on its normal equations, whose
    iterates approach the share from below.
    """
    span, still = _span(params, symmetries)
    transpose = jax.linear_transpose(span, still)

    def share(vector: Float[Array, " n"]) -> Scalar:
        (target,) = transpose(vector)
        solution, _ = jax.scipy.sparse.linalg.cg(
            lambda c: transpose(span(c))[0], target, tol=1e-6, maxiter=500
        )
        return _trees.inner(solution, target) / jnp.sum(vector**2)

    return jax.lax.map(share, vectors)


def _span(params: Params, symmetries: Symmetries) -> tuple[Callable[..., Array], Any]:
    """The linear map from coefficients to flat directions, and zero coefficients."""
    if symmetries is symmetry_directions:
        return lambda c: _trees.ravel(_velocity(params, *c))[0], _still(params)
    stack = jax.vmap(lambda direction: _trees.ravel(direction)[0])(symmetries(params))
    return lambda c: c @ stack, jnp.zeros(stack.shape[0], stack.dtype)
