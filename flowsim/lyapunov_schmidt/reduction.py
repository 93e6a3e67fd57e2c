"""Solve the range equation, insert, and expand the reduced vector field."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from .. import _summary, _trees
from .._types import Params, RealLike, Scalar
from ..derivatives import gradient
from .splitting import Family, Splitting
from .taylor import TaylorField


class RangeSolution(eqx.Module):
    """The range part that belongs to kernel coordinates u and a delta.

    Attributes:
        w: range coordinates that solve the range equation.
        residual: norm of the range part of the gradient there.
        num_steps: Newton steps.
        succeeded: whether the residual meets the tolerance.
        params: the point in full space.
        field: the reduced vector field x' = f(u, delta), minus the kernel part of the
            gradient.
        potential: the objective there, the reduced potential: f = -d potential / du.
    """

    w: Float[Array, " p"]
    residual: Scalar
    num_steps: Int[Array, ""]
    succeeded: Bool[Array, ""]
    params: Params
    field: Float[Array, " r"]
    potential: Scalar

    def __str__(self) -> str:
        rows = {
            "range residual": self.residual,
            "steps": self.num_steps,
            "succeeded": self.succeeded,
            "reduced field": self.field,
            "reduced potential": self.potential,
        }
        return _summary.aligned("RangeSolution", rows)


def solve_range(
    family: Family,
    splitting: Splitting,
    u: Float[ArrayLike, " r"],
    delta: RealLike,
    *,
    tol: float = 1e-13,
    max_steps: int = 30,
) -> RangeSolution:
    """Range part w(u, delta) with zero range gradient, by Newton's method.

        R grad L(point + u N + w R, delta) = 0

    Args:
        family: objective(params, delta).
        splitting: from `split`; N and R are its kernel and range rows.
        u: kernel coordinates.
        delta: parameter of the family.
        tol: absolute tolerance on the norm of the range gradient.
        max_steps: bound on Newton steps.

    References:
        Golubitsky and Schaeffer (1985), section VII.1.
    """
    u, delta = jnp.asarray(u, float), jnp.asarray(delta, float)
    limits = jnp.asarray(tol, float), jnp.asarray(max_steps, jnp.int32)
    return _solve_range(family, splitting, u, delta, limits)


@eqx.filter_jit
def _solve_range(family, splitting, u, delta, limits) -> RangeSolution:
    tol, max_steps = limits
    residual = _range_gradient(family, splitting)

    def step(carry):
        w, value, count = carry
        w = w - jnp.linalg.solve(jax.jacfwd(residual)(w, u, delta), value)
        return w, residual(w, u, delta), count + 1

    def unfinished(carry):
        _, value, count = carry
        return (jnp.linalg.norm(value) > tol) & (count < max_steps)

    start = jnp.zeros_like(splitting.range_values)
    w, value, count = jax.lax.while_loop(
        unfinished,
        step,
        (start, residual(start, u, delta), jnp.zeros((), jnp.int32)),
    )
    size = jnp.linalg.norm(value)
    params = splitting.place(u, w)
    return RangeSolution(
        w=w,
        residual=size,
        num_steps=count,
        succeeded=size <= tol,
        params=params,
        field=_field(family, splitting, params, delta),
        potential=family(params, delta),
    )


def reduced_field(
    family: Family,
    splitting: Splitting,
    *,
    order: int = 3,
    delta: RealLike | None = None,
) -> TaylorField:
    """Taylor polynomial of the reduced vector field in (u, delta).

        u' = f(u, delta) = -N grad L(point + u N + w(u, delta) R, delta)

    by forward differentiation. The range part is differentiated through chord
    iterations, each of which makes one more order exact (w(u, delta) is a fixed point
    of a contraction whose derivative in w vanishes at the base point).

    Args:
        family: objective(params, delta), differentiable `order` + 1 times.
        splitting: from `split`.
        order: of the polynomial.
        delta: the centre in delta: that of the splitting, the only one where the range
            equation is solved at u = 0 by construction. Other values solve it first.

    Raises:
        ValueError: if `order` is below one.

    References:
        Golubitsky and Schaeffer (1985), section VII.1, (1.14) for the derivatives.
    """
    if order < 1:
        raise ValueError(f"order must be at least 1; got {order}.")
    delta = splitting.delta if delta is None else jnp.asarray(delta, float)
    r = splitting.kernel.shape[0]
    base = solve_range(family, splitting, jnp.zeros(r), delta)
    return TaylorField(
        tensors=_tensors(family, splitting, base.w, delta, order),
        delta=delta,
        residual=base.residual,
    )


@eqx.filter_jit
def _tensors(family, splitting, w0, delta, order):
    residual = _range_gradient(family, splitting)
    r = splitting.kernel.shape[0]
    inverse = jnp.linalg.inv(jax.jacfwd(residual)(w0, jnp.zeros(r), delta))

    def field(z: Float[Array, " arguments"]) -> Float[Array, " r"]:
        u, parameter = z[:r], z[r]
        w = jax.lax.fori_loop(
            0, order, lambda _, w: w - inverse @ residual(w, u, parameter), w0
        )
        return _field(family, splitting, splitting.place(u, w), parameter)

    centre = jnp.concatenate([jnp.zeros(r), delta[None]])
    function = _with_derivatives(field, order)
    top, lower = function(centre)
    return (*lower, top)


def _with_derivatives(field, order: int):
    """z -> (derivative of that order, all lower ones), all from one nest."""

    def function(z):
        return field(z), ()

    for _ in range(order):
        function = _one_more(function)
    return function


def _one_more(function):
    def collect(z):
        top, lower = function(z)
        return top, (*lower, top)

    return jax.jacfwd(collect, has_aux=True)


def _range_gradient(family: Family, splitting: Splitting):
    def residual(w, u, delta):
        slope = gradient(lambda params: family(params, delta), splitting.place(u, w))
        return splitting.range_ @ _trees.ravel(slope)[0]

    return residual


def _field(family, splitting, params, delta) -> Float[Array, " r"]:
    slope = gradient(lambda y: family(y, delta), params)
    return -splitting.kernel @ _trees.ravel(slope)[0]
