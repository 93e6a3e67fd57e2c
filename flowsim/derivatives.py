"""Derivatives of an objective: gradient, Hessian-vector product, dense Hessian.

All are forward-over-reverse automatic differentiation and work on any parameter
pytree. The sign is that of the *objective* L; the flow's Jacobian is J = -Hessian.

Cost: a gradient is a small multiple of the objective, a Hessian-vector product a small
multiple of a gradient, a dense Hessian n products and n^2 numbers of memory.

>>> import jax.numpy as jnp
>>> from flowsim.derivatives import hessian_vector_product
>>> saddle = lambda y: 0.5 * (y[0] ** 2 - y[1] ** 2)
>>> hessian_vector_product(saddle, jnp.zeros(2), jnp.array([1.0, 1.0])).tolist()
[1.0, -1.0]
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import _trees
from ._types import Objective, Params, Scalar


def gradient(objective: Objective, params: Params) -> Params:
    """Gradient of the objective, in the parameters' own structure."""
    return jax.grad(objective)(params)


def value_and_grad_norm(objective: Objective, params: Params) -> tuple[Scalar, Scalar]:
    """Objective and Euclidean norm of its gradient, from one evaluation."""
    value, grad = jax.value_and_grad(objective)(params)
    return value, _trees.norm(grad)


def hessian_vector_product(
    objective: Objective, params: Params, tangent: Params
) -> Params:
    """Product of the Hessian at `params` with `tangent`."""
    return jax.jvp(jax.grad(objective), (params,), (tangent,))[1]


def linearise(
    objective: Objective, params: Params
) -> tuple[Params, Callable[[Params], Params]]:
    """Gradient at `params`, and the map v -> Hessian v with its linearisation stored.

    Use it where several products at one point are needed: the intermediate values are
    computed once.
    """
    return jax.linearize(jax.grad(objective), params)


def hessian(
    objective: Objective, params: Params, *, batch_size: int | None = None
) -> Float[Array, "n n"]:
    """Dense Hessian in the coordinates of `_trees.ravel`, symmetrised.

    Args:
        batch_size: number of columns computed at once. The default is chosen so that
            the batch holds about 2^22 numbers.

    Returns:
        The (n, n) matrix (H + H^T) / 2; automatic differentiation leaves an asymmetry
        of round-off size.

    Compiled once per objective and shapes.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    return _hessian(objective, params, batch_size)


def directional_derivatives(
    objective: Objective, params: Params, direction: Params, order: int
) -> tuple[Scalar, ...]:
    """Derivatives 1 ... `order` of s -> L(params + s direction) at s = 0.

    The k-th entry is the k-th derivative of the objective contracted k times with
    `direction` (no factorial), by nested forward differentiation.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1; got {order}.")

    def along(s: Scalar) -> Scalar:
        return objective(_trees.add_scaled(params, s, direction))

    zero = jnp.zeros((), jnp.result_type(*jax.tree_util.tree_leaves(params)))
    derivatives = []
    function = along
    for _ in range(order):
        function = jax.jacfwd(function)
        derivatives.append(function(zero))
    return tuple(derivatives)


@eqx.filter_jit
def _hessian(objective, params, batch_size):
    flat, unravel = _trees.ravel(params)
    size = flat.size
    _, product = jax.linearize(jax.grad(lambda v: objective(unravel(v))), flat)
    if batch_size is None:
        batch_size = max(1, min(size, 2**22 // max(size, 1)))
    identity = jnp.eye(size, dtype=flat.dtype)
    dense = jax.lax.map(product, identity, batch_size=batch_size)
    return 0.5 * (dense + dense.T)
