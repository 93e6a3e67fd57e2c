"""Runge-Kutta-Chebyshev: explicit, second order, and stable far along the real axis.

Why it exists: a step of s stages is stable for h |J| up to about 0.65 s^2, where a
standard explicit method reaches about s. So a stiff flow costs the square root of its
stiffness, and no linear system is solved. Where those do not pay, at moderate accuracy
or where vectors are so long that nothing but products counts, this is the choice;
`SymmetricBDF` is it everywhere else, and at tight tolerances always, being of higher
order.

The number of stages of a step follows from its length and from the spectral radius of
the Jacobian, which is estimated at its start by power iteration on Jacobian-vector
products, continued from step to step. So any Diffrax step-size controller will do.

What it leaves out: flows with fast oscillations. The stability region is a narrow strip
along the negative real axis, as suits a symmetric Jacobian; a damping of 2/13 gives it
its width.

>>> import diffrax, jax, jax.numpy as jnp
>>> from flowsim.solvers import RungeKuttaChebyshev
>>> valley = lambda y: 0.5 * (y[0] ** 2 + 1e4 * y[1] ** 2)
>>> term = diffrax.ODETerm(lambda t, y, args: -jax.grad(valley)(y))
>>> solution = diffrax.diffeqsolve(
...     term, RungeKuttaChebyshev(), 0.0, 10.0, None, jnp.array([1.0, 1.0]),
...     stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
... )
>>> bool(abs(solution.ys[-1, 0] - jnp.exp(-10.0)) < 1e-4)
True

References:
    P. J. van der Houwen, B. P. Sommeijer, "On the internal stability of explicit,
    m-stage Runge-Kutta methods for large m-values", Z. Angew. Math. Mech. 60 (1980):
    the formulas. B. P. Sommeijer, L. F. Shampine, J. G. Verwer, "RKC: an explicit
    solver for parabolic PDEs", J. Comput. Appl. Math. 88 (1998): damping, error
    estimate, choice of the number of stages.
"""

from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

DAMPING = 2 / 13  # w0 = 1 + DAMPING / s^2; |R| stays below 1 - DAMPING / 3 inside.
_INTERVAL = 0.653  # The damped method is stable to 0.653 (s^2 - 1) at least.
_SAFETY = 1.2  # Power iteration approaches the radius from below.
_POWER_TOLERANCE = 0.02
_POWER_ITERATIONS = 50


class ChebyshevState(eqx.Module):
    """State of `RungeKuttaChebyshev` between steps.

    Attributes:
        slope: the vector field at the present state.
        direction: a unit vector near the dominant eigenvector of the Jacobian.
        num_evaluations: evaluations of the vector field, and
        num_products: Jacobian-vector products, both in accepted steps only.
        num_stages: stages of the last accepted step.
    """

    slope: Float[Array, " n"]
    direction: Float[Array, " n"]
    num_evaluations: Int[Array, ""]
    num_products: Int[Array, ""]
    num_stages: Int[Array, ""]


class RungeKuttaChebyshev(diffrax.AbstractAdaptiveSolver):
    """Stabilised explicit Runge-Kutta-Chebyshev method of second order.

    For `diffrax.diffeqsolve` with any step-size controller, any pytree of real arrays
    and any vector field whose Jacobian has a spectrum near the real axis. Dense output
    is the cubic Hermite interpolant.

    A step costs s evaluations of the vector field, s being about sqrt(1.54 h |J|), and
    one or two Jacobian-vector products. Its error estimate is

        0.8 (y_n - y_{n+1}) + 0.4 h (f_n + f_{n+1}),

    h^3 y^(3) / 15 for the exact solution. With the numerical y_{n+1}, whose own error
    enters, it is 1.8 times the local error for many stages: on the safe side.

    Attributes:
        max_stages: bound on the stages of one step, at least 2. A step that needs more
            is not made: it reports an infinite error, which makes the controller
            shorten it.
    """

    max_stages: int = eqx.field(static=True, default=1000)

    term_structure: ClassVar = diffrax.ODETerm
    interpolation_cls: ClassVar = diffrax.ThirdOrderHermitePolynomialInterpolation

    def __check_init__(self):
        if self.max_stages < 2:
            raise ValueError(f"max_stages must be at least 2; got {self.max_stages}.")

    def order(self, terms: Any) -> int:
        del terms
        return 2

    def error_order(self, terms: Any) -> int:
        """Power of the step length in the error estimate."""
        del terms
        return 3

    def func(self, terms: Any, t0: Any, y0: Any, args: Any) -> Any:
        return terms.vf(t0, y0, args)

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any) -> ChebyshevState:
        del t1
        y, _ = ravel_pytree(y0)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            raise ValueError(f"y0 must be real floating point; got {y.dtype}.")
        zero = jnp.zeros((), jnp.int32)
        return ChebyshevState(
            slope=_field(terms, t0, y0, args)(y),
            direction=_unit(jax.random.normal(jax.random.key(0), y.shape, y.dtype)),
            num_evaluations=zero + 1,
            num_products=zero,
            num_stages=zero,
        )

    def step(
        self,
        terms: Any,
        t0: Any,
        t1: Any,
        y0: Any,
        args: Any,
        solver_state: ChebyshevState,
        made_jump: Any,
    ) -> tuple[Any, Any, dict[str, Any], ChebyshevState, diffrax.RESULTS]:
        y, unravel = ravel_pytree(y0)
        state, dtype = solver_state, y.dtype
        step = (t1 - t0).astype(dtype)
        slope, renewed = state.slope, jnp.zeros((), jnp.int32)
        if made_jump is not False:
            field = _field(terms, t0, y0, args)
            slope = lax.cond(made_jump, field, lambda _: state.slope, y)
            renewed = jnp.asarray(made_jump).astype(jnp.int32)
        radius, direction, num_products = spectral_radius(
            _field(terms, t0, y0, args), y, state.direction
        )
        needed = num_stages(jnp.abs(step) * _SAFETY * radius)
        feasible = needed <= self.max_stages
        stages = jnp.where(feasible, jnp.minimum(needed, self.max_stages), 2.0)

        def field_at(fraction, v):
            t = t0 + fraction.astype(t0.dtype) * (t1 - t0)
            return _field(terms, t, y0, args)(v)

        y1 = chebyshev_step(field_at, y, slope, step, stages)
        last = _field(terms, t1, y0, args)(y1)
        error = 0.8 * (y - y1) + 0.4 * step * (slope + last)
        error = jnp.where(feasible, error, jnp.inf)
        new_state = ChebyshevState(
            slope=last,
            direction=direction,
            # One for each stage but the first, and one for the end of the step.
            num_evaluations=state.num_evaluations + stages.astype(jnp.int32) + renewed,
            num_products=state.num_products + num_products,
            num_stages=stages.astype(jnp.int32),
        )
        y1 = unravel(y1)
        dense_info = dict(
            y0=y0, y1=y1, k0=unravel(step * slope), k1=unravel(step * last)
        )
        return y1, unravel(error), dense_info, new_state, diffrax.RESULTS.successful


def num_stages(stiffness: Float[Array, ""]) -> Float[Array, ""]:
    """Fewest stages, at least 2, that are stable for h |J| = `stiffness`."""
    # Not a number: let it pass as hopeless.
    stages = jnp.ceil(jnp.sqrt(1 + stiffness / _INTERVAL))
    return jnp.where(jnp.isfinite(stages), jnp.maximum(stages, 2.0), jnp.inf)


def chebyshev_step(
    field: Any,
    y: Float[Array, " n"],
    slope: Float[Array, " n"],
    step: Float[Array, ""],
    stages: Float[Array, ""],
) -> Float[Array, " n"]:
    """One step of s stages, s being data: equations (2.1) and (2.2) of RKC (1998).

    Args:
        field: f(c, y), c being the fraction of the step.
        slope: f(0, y).
        stages: s, a whole number of at least 2, as a float.
    """
    dtype = y.dtype
    excess = DAMPING / stages**2
    w0 = 1 + excess
    # T_s(w0) = cosh(s arcosh w0), and w1 = T_s'/T_s''; in terms of w0 - 1, to keep
    # its digits in single precision.
    squared = excess * (2 + excess)
    root = jnp.sqrt(squared)
    angle = stages * 2 * jnp.arcsinh(jnp.sqrt(excess / 2))
    w1 = (jnp.sinh(angle) * squared) / (
        jnp.cosh(angle) * stages * root - w0 * jnp.sinh(angle)
    )
    # T, T', T'' of degree j by recurrence, starting from degrees 0 and 1.
    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    b2 = 1 / (4 * w0**2)  # b_j = T_j'' / T_j'^2, and b_0 = b_1 = b_2.
    # c_j = w1 T_j'' / T_j', and c_1 = c_2 / T_2', which is b_1 w1.
    c1 = b2 * w1
    y1 = y + c1 * step * slope
    a1 = 1 - b2 * w0

    def unfinished(carry):
        return carry[0] <= stages

    def stage(carry):
        j, (y_old, y_now), (b_old, b_now), a_now, c_now, polynomials = carry
        (p, p_old), (dp, dp_old), (ddp, ddp_old) = polynomials
        p, p_old = 2 * w0 * p - p_old, p
        dp, dp_old = 2 * w0 * dp - dp_old + 2 * p_old, dp
        ddp, ddp_old = 2 * w0 * ddp - ddp_old + 4 * dp_old, ddp
        b = ddp / dp**2
        mu, nu = 2 * b * w0 / b_now, -b / b_old
        mu_tilde = 2 * b * w1 / b_now
        gamma_tilde = -a_now * mu_tilde
        y_new = (
            (1 - mu - nu) * y
            + mu * y_now
            + nu * y_old
            + step * (mu_tilde * field(c_now, y_now) + gamma_tilde * slope)
        )
        a, c = 1 - b * p, w1 * ddp / dp
        polynomials = ((p, p_old), (dp, dp_old), (ddp, ddp_old))
        return j + 1, (y_now, y_new), (b_now, b), a, c, polynomials

    polynomials = ((w0, one), (one, zero), (zero, zero))
    start = (2 * one, (y, y1), (b2, b2), a1, c1, polynomials)
    return lax.while_loop(unfinished, stage, start)[1][1]


def spectral_radius(
    field: Any, y: Float[Array, " n"], direction: Float[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, " n"], Int[Array, ""]]:
    """Size of the Jacobian by power iteration: (radius, unit vector, products).

    It is approached from below: for a symmetric Jacobian |J v| never exceeds the
    radius. A little of a fixed random vector is mixed in, so that a direction that has
    become dominant since the last call is found.
    """
    _, product = jax.linearize(field, y)
    noise = _unit(jax.random.normal(jax.random.key(1), y.shape, y.dtype))

    def unfinished(carry):
        radius, before, _, count = carry
        moving = ~(jnp.abs(radius - before) <= _POWER_TOLERANCE * radius)
        return (count < 2) | (moving & (count < _POWER_ITERATIONS))

    def iterate(carry):
        radius, _, v, count = carry
        image = product(v)
        return jnp.linalg.norm(image), radius, _unit(image), count + 1

    zero = jnp.zeros((), y.dtype)
    start = (zero, zero, _unit(direction + 1e-3 * noise), jnp.zeros((), jnp.int32))
    radius, _, direction, count = lax.while_loop(unfinished, iterate, start)
    # At a critical point of a flat loss there is no direction: keep the noise.
    direction = jnp.where(radius > 0, direction, noise)
    return radius, direction, count


def _unit(v: Float[Array, " n"]) -> Float[Array, " n"]:
    size = jnp.linalg.norm(v)
    return v / jnp.where(size > 0, size, 1.0)


def _field(terms: Any, t: Any, y0: Any, args: Any) -> Any:
    """f(t, .) on flat vectors."""
    _, unravel = ravel_pytree(y0)
    return lambda v: ravel_pytree(terms.vf(t, unravel(v), args))[0]
