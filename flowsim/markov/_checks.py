"""Checks on probabilities, shared by the chain and its constructions.

Concrete values are checked in NumPy and in their own precision, so that a double
precision input is judged in full even where JAX would round it; traced values by
`equinox.error_if`.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import _trees


def floating(value: Any) -> Any:
    """A floating-point array: of NumPy while concrete, of JAX when traced."""
    array = jnp.asarray(value) if _trees.is_traced(value) else np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(float)


def tolerance(dtype: Any) -> float:
    """How far a sum of probabilities may be from one."""
    return 1e-8 if jnp.finfo(dtype).bits == 64 else 1e-5


def probability_vector(value: Any, name: str = "pi") -> Float[Array, " d"]:
    """Check that every mass is positive and that they sum to one."""
    array = floating(value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a vector (d,); got shape {array.shape}.")
    allowed = tolerance(array.dtype)
    if _trees.is_traced(array):
        valid = jnp.all(array > 0) & (jnp.abs(array.sum() - 1) <= allowed)
        rule = f"{name} must be positive and sum to one."
        return eqx.error_if(array, ~valid, rule)
    bad = np.flatnonzero(~(array > 0))
    if bad.size:
        i = bad[0]
        raise ValueError(
            f"every mass of {name} must be positive; {name}[{i}] = {array[i]}."
        )
    if not abs(array.sum() - 1) <= allowed:
        raise ValueError(f"{name} must sum to one; it sums to {array.sum()}.")
    return jnp.asarray(array)


def check_transition(matrix: np.ndarray, name: str = "P") -> None:
    """Check that a concrete matrix is non-negative with rows that sum to one."""
    bad = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if bad.size:
        i, j = bad[0]
        raise ValueError(
            f"{name} must be finite and non-negative; row {i} has {name}[{i}, {j}] = "
            f"{matrix[i, j]}."
        )
    sums, allowed = matrix.sum(axis=1), tolerance(matrix.dtype)
    bad = np.flatnonzero(~(np.abs(sums - 1) <= allowed))
    if bad.size:
        raise ValueError(
            f"each row of {name} must sum to one within {allowed:.0e}; "
            f"row {bad[0]} sums to {sums[bad[0]]}."
        )
