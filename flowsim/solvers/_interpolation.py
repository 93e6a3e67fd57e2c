"""Dense output of a backward-difference method: its own polynomial."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from ._differences import basis


class BackwardDifferenceInterpolation(diffrax.AbstractLocalInterpolation):
    """The polynomial through y_{n+1}, y_n, ..., y_{n+1-k} that a step of order k used.

    y(t_{n+1} + s h) = y_{n+1} + sum_{j=1}^k basis_j(s) nabla^j y_{n+1},   -1 <= s <= 0

    Its error is of the method's order, and neighbouring pieces join continuously.

    Attributes:
        t0, t1: the step.
        y1: the state at t1.
        differences: nabla^j y_{n+1} with a leading axis j = 1 ... k, zero beyond the
            order of the step.
    """

    t0: Any
    t1: Any
    y1: PyTree[Float[Array, "..."]]
    differences: PyTree[Float[Array, "rows ..."]]

    def evaluate(self, t0: Any, t1: Any | None = None, left: bool = True) -> Any:
        """The state at t0, or the increment from t0 to t1."""
        del left
        if t1 is not None:
            return jax.tree.map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        length = self.t1 - self.t0
        s = jnp.asarray((t0 - self.t1) / jnp.where(length == 0, 1, length))

        def value(y, differences):
            weights = basis(s.astype(y.dtype), differences.shape[0])
            exact = lax.Precision.HIGHEST
            return y + jnp.tensordot(weights, differences, axes=1, precision=exact)

        return jax.tree.map(value, self.y1, self.differences)
