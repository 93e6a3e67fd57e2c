"""The implicit equation of a step, by inexact Newton iteration with one linearisation.

The equation for the correction d = y_{n+1} - p_{n+1} is

    g(d) := c h f(p + d) - psi - d = 0,      c = 1/((1 - kappa_k) gamma_k),

whose Newton systems are (I - c h J) delta = g. The vector field is evaluated and
linearised once, at the first guess; all iterations of the step share that Jacobian.

One iteration usually suffices, and then the residual at the result is not needed: with
an exact Jacobian at the guess the next residual is quadratic in the displacement,
|g(d)| ~ K |delta|^2. So K is measured now and then, carried from step to step, and a
further evaluation is made only if K |delta|^2 would be visible, or K is old.

It differs from a root finder of Optimistix in returning these by-products.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._conjugate_gradient import conjugate_gradient
from ._recycling import Recycled


class NewtonSolve(eqx.Module):
    """What the solve of g(d) = 0 came to.

    Attributes:
        correction: d.
        converged: whether the residual is, or is predicted to be, below the tolerance.
        curvature: K, the size of the residual over the square of the displacement.
        age: number of solves since K was measured.
        num_evaluations: evaluations of the vector field, the linearised one included.
        num_products: products with the Jacobian.
        indefinite: whether conjugate gradients met non-positive curvature.
        asymmetric: whether the Jacobian was seen not to be symmetric.
        recycled: the subspace that preconditions the next solve.
    """

    correction: Float[Array, " n"]
    converged: Bool[Array, ""]
    curvature: Float[Array, ""]
    age: Int[Array, ""]
    num_evaluations: Int[Array, ""]
    num_products: Int[Array, ""]
    indefinite: Bool[Array, ""]
    asymmetric: Bool[Array, ""]
    recycled: Recycled | None


class _Iterate(eqx.Module):
    solve: NewtonSolve
    count: Int[Array, ""]
    displacement: Float[Array, ""]
    failed: Bool[Array, ""]


class NewtonCG(eqx.Module):
    """Inexact Newton iteration; conjugate gradients on Jacobian-vector products.

    All sizes are in units of the integrator's tolerance: a vector of norm one, after
    division by atol + rtol |y|, is an error just acceptable in one step.

    Attributes:
        rtol, atol, norm: as in the step-size controller, from which Diffrax fills them
            in when the solver is made with the default
            `diffrax.with_stepsize_controller_tols(NewtonCG)()`.
        linear_tolerance: size of the residual at which conjugate gradients stop.
        tolerance: size of the nonlinear residual that is accepted.
        max_products: bound on the products in one linear solve. Reaching it shortens
            the step.
        max_age: number of steps after which the nonlinearity is measured again.
        rank: number of approximate eigenvectors of the Jacobian that are recycled as a
            preconditioner; 0 for none. It pays for large stiff problems, costs 2 rank n
            operations per product and rank n numbers of memory, and is not for
            `jax.vmap`, where one lane's renewal stops all others.
    """

    rtol: Any
    atol: Any
    norm: Any
    linear_tolerance: float = 0.05
    tolerance: float = 0.05
    max_products: int = 200
    max_age: int = 50
    rank: int = eqx.field(static=True, default=0)

    def weighted_norm(
        self, unravel: Callable, *ys: Float[Array, " n"]
    ) -> Callable[[Float[Array, " n"]], Float[Array, ""]]:
        """The norm of v / (atol + rtol max |y|), the maximum over the given states."""
        size = jnp.abs(ys[0])
        for y in ys[1:]:
            size = jnp.maximum(size, jnp.abs(y))
        dtype = size.dtype
        scale = jnp.asarray(self.atol, dtype) + jnp.asarray(self.rtol, dtype) * size
        # With atol = 0 a component that is zero has no scale; it must not give 0/0.
        inverse = 1 / jnp.maximum(scale, jnp.finfo(dtype).tiny)
        if self.norm is optx.rms_norm:  # Blind to the tree: spare the unravelling.
            return lambda v: optx.rms_norm(inverse * v)
        return lambda v: self.norm(unravel(inverse * v)).astype(dtype)

    def solve(
        self,
        scaled_field: Callable[[Float[Array, " n"]], Float[Array, " n"]],
        prediction: Float[Array, " n"],
        psi: Float[Array, " n"],
        guess: Float[Array, " n"],
        norm: Callable[[Float[Array, " n"]], Float[Array, ""]],
        curvature: Float[Array, ""],
        age: Int[Array, ""],
        recycled: Recycled | None,
        scale: Float[Array, ""],
        max_iterations: int,
    ) -> NewtonSolve:
        """Find d with c h f(prediction + d) - psi - d = 0, starting from `guess`.

        Args:
            scaled_field: the map y -> c h f(y).
            norm: weighted norm of the integrator.
            curvature: K of earlier steps; `age`: how many steps ago it was measured.
            recycled: approximate eigenpairs of the Jacobian for preconditioning.
            scale: c h, by which `scaled_field` multiplies the vector field.
            max_iterations: bound on the linear solves.
        """
        value, product = jax.linearize(scaled_field, prediction + guess)
        precondition, num_renewing = _identity, jnp.zeros((), jnp.int32)
        if recycled is not None:
            recycled, num_renewing = recycled.renew_if_due(lambda v: product(v) / scale)
            precondition = recycled.preconditioner(scale)

        def residual(d):
            return scaled_field(prediction + d) - psi - d

        def unfinished(state: _Iterate):
            return (
                ~state.solve.converged & ~state.failed & (state.count < max_iterations)
            )

        def iterate(state: _Iterate):
            solve, again = state.solve, state.count > 0
            d = solve.correction
            # The value at the guess came with the linearisation.
            g = lax.cond(again, residual, lambda d: value - psi - d, d)
            size = norm(g)
            done = again & (size <= self.tolerance)
            # What the linear solve left behind is not nonlinearity.
            beyond = jnp.maximum(size - self.linear_tolerance, 0.0)
            moved = jnp.maximum(state.displacement, self.linear_tolerance)
            curvature = jnp.where(again, beyond / moved**2, solve.curvature)
            linear = conjugate_gradient(
                product,
                g,
                norm,
                jnp.where(done, jnp.inf, self.linear_tolerance),
                self.max_products,
                precondition,
            )
            displacement = norm(linear.solution)
            trusted = again | (solve.age < self.max_age)
            predicted = curvature * displacement**2 <= self.tolerance
            return _Iterate(
                solve=NewtonSolve(
                    correction=d + linear.solution,
                    converged=linear.converged & (done | (trusted & predicted)),
                    curvature=curvature,
                    age=jnp.where(again, 0, solve.age + 1),
                    num_evaluations=solve.num_evaluations + again.astype(jnp.int32),
                    num_products=solve.num_products + linear.num_products,
                    indefinite=linear.indefinite,
                    asymmetric=solve.asymmetric | linear.asymmetric,
                    recycled=None,
                ),
                count=state.count + 1,
                displacement=displacement,
                failed=~linear.converged,
            )

        false, zero = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        start = NewtonSolve(
            correction=guess,
            converged=false,
            curvature=curvature,
            age=age,
            num_evaluations=zero + 1,
            num_products=zero,
            indefinite=false,
            asymmetric=false,
            recycled=None,
        )
        start = _Iterate(start, zero, jnp.zeros_like(curvature), false)
        solve = lax.while_loop(unfinished, iterate, start).solve
        if recycled is not None:
            recycled = recycled.charge(solve.num_products)
        return eqx.tree_at(
            lambda s: (s.num_products, s.recycled),
            solve,
            (solve.num_products + num_renewing, recycled),
            is_leaf=lambda leaf: leaf is None,
        )


def _identity(v: Float[Array, " n"]) -> Float[Array, " n"]:
    return v
