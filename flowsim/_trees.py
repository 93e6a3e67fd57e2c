"""Linear algebra on parameter pytrees: the few operations the higher floors share.

A parameter pytree is treated as one vector of R^n with the Euclidean inner product.
Leaves keep their own shapes; nothing here copies them into a flat vector except
`ravel`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ._types import Params, Scalar


def check_params(params: Any, name: str = "model") -> None:
    """Check that `params` is a non-empty pytree of floating-point arrays.

    Raises:
        ValueError: naming the first offending leaf and what it is.
    """
    leaves = jtu.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(f"{name} must have at least one array leaf; it has none.")
    for path, leaf in leaves:
        where = f"{name}{jtu.keystr(path)}"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise ValueError(
                f"{where} must be a floating-point array; got {type(leaf).__name__}. "
                "Partition a model with equinox.partition(model, "
                "equinox.is_inexact_array) and close over the static half."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{where} must be a floating-point array; got {dtype}.")


def num_params(params: Params) -> int:
    """Total number n of scalar parameters."""
    return sum(leaf.size for leaf in jtu.tree_leaves(params))


def inner(x: Params, y: Params) -> Scalar:
    """Euclidean inner product of two pytrees of the same structure."""
    products = jtu.tree_map(lambda a, b: jnp.sum(a * b), x, y)
    return jtu.tree_reduce(jnp.add, products)


def norm(x: Params) -> Scalar:
    """Euclidean norm of a pytree; its derivative at zero is zero, not NaN."""
    squared = inner(x, x)
    zero = squared == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, squared)))


def add_scaled(x: Params, scale: Any, y: Params) -> Params:
    """x + scale * y, leaf by leaf."""
    return jtu.tree_map(lambda a, b: a + scale * b, x, y)


def subtract(x: Params, y: Params) -> Params:
    """x - y, leaf by leaf."""
    return jtu.tree_map(jnp.subtract, x, y)


def scale(factor: Any, x: Params) -> Params:
    """factor * x, leaf by leaf."""
    return jtu.tree_map(lambda a: factor * a, x)


def ravel(
    params: Params,
) -> tuple[Float[Array, " n"], Callable[[Float[Array, " n"]], Params]]:
    """Flatten to one vector; the second return value undoes it."""
    return ravel_pytree(params)


def partial_as_tree(function: Any) -> Any:
    """A `functools.partial` as JAX's own, which is a pytree; others as they are.

    Other arrays in it then compile nothing anew.
    """
    if isinstance(function, functools.partial):
        return jtu.Partial(function.func, *function.args, **function.keywords)
    return function


def is_traced(tree: Any) -> bool:
    """Whether any leaf is a JAX tracer (a value known only at run time)."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jtu.tree_leaves(tree))


def named_leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves by their dotted path, such as "models.W0"."""
    leaves = jtu.tree_leaves_with_path(tree)
    names = (jtu.keystr(path, simple=True, separator=".") for path, _ in leaves)
    dotted = (".".join(part for part in (prefix, name) if part) for name in names)
    return dict(zip(dotted, (leaf for _, leaf in leaves), strict=True))
