"""Conjugate gradients for the Newton systems of an implicit step, matrix-free.

The systems are (I - C) x = b with C = c h J symmetric. Three things are particular to
them and are the reason for a solver of its own:

- the residual is measured in the weighted norm of the integrator, so that the solve
  stops as soon as its error is invisible beside the tolerance;
- a direction with p . (I - C) p <= 0 says that the step is too long for a growing mode,
  which is information for the step control and not an error;
- the solution x and the last direction p come with C x and C p, and if <x, C p> and
  <C x, p> differ, C is not symmetric. So every solve of two iterations or more also
  tests, for two inner products, the assumption that it rests on.

Convergence is judged by the recursive residual, which is the true residual up to
round-off whether or not C is symmetric.

>>> import jax.numpy as jnp
>>> C = jnp.array([-1.0, -10.0, -100.0])
>>> solve = conjugate_gradient(lambda v: C * v, jnp.ones(3), jnp.linalg.norm, 1e-6, 9)
>>> int(solve.num_products), bool(solve.converged)
(3, True)

References:
    M. R. Hestenes, E. Stiefel, "Methods of conjugate gradients for solving linear
    systems", J. Res. Natl. Bur. Stand. 49 (1952).
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class LinearSolve(eqx.Module):
    """What a solve of (I - C) x = b came to.

    Attributes:
        solution: x.
        num_products: products with C.
        converged: whether the norm of the residual fell below the tolerance.
        indefinite: whether a direction of non-positive curvature was met.
        asymmetric: whether C was seen not to be symmetric.
    """

    solution: Float[Array, " n"]
    num_products: Int[Array, ""]
    converged: Bool[Array, ""]
    indefinite: Bool[Array, ""]
    asymmetric: Bool[Array, ""]


def is_asymmetric(
    u: Float[Array, " n"],
    v: Float[Array, " n"],
    product_u: Float[Array, " n"],
    product_v: Float[Array, " n"],
) -> Bool[Array, ""]:
    """Whether <u, C v> and <C u, v> differ by more than round-off can explain.

    The difference must stand out against the size of the products (relative asymmetry
    above eps^(1/3)) and against |u||v| (above eps^(1/2): a smaller one cannot change a
    solve with I - C).
    """
    eps = float(jnp.finfo(u.dtype).eps)
    # All inner products at once: on a small system it is operations that cost.
    left = jnp.stack([u, v, product_u, product_v, u, product_u])
    right = jnp.stack([u, v, product_u, product_v, product_v, v])
    *squares, first, second = jnp.sum(left * right, axis=1)
    size_u, size_v, size_product_u, size_product_v = map(jnp.sqrt, squares)
    products = size_u * size_product_v + size_product_u * size_v
    difference = jnp.abs(first - second)
    return difference > jnp.maximum(
        eps ** (1 / 3) * products, eps**0.5 * size_u * size_v
    )


class _Iterate(eqx.Module):
    solution: Float[Array, " n"]
    residual: Float[Array, " n"]
    direction: Float[Array, " n"]
    image: Float[Array, " n"]
    alignment: Float[Array, ""]
    size: Float[Array, ""]
    count: Int[Array, ""]
    indefinite: Bool[Array, ""]


def conjugate_gradient(
    product: Callable[[Float[Array, " n"]], Float[Array, " n"]],
    rhs: Float[Array, " n"],
    norm: Callable[[Float[Array, " n"]], Float[Array, ""]],
    tolerance: Float[Array, ""] | float,
    max_iterations: int | Int[Array, ""],
    precondition: Callable[[Float[Array, " n"]], Float[Array, " n"]] = lambda r: r,
) -> LinearSolve:
    """Solve (I - C) x = rhs, starting from x = 0.

    Args:
        product: the map v -> C v.
        norm: the norm in which the residual must not exceed `tolerance`.
        max_iterations: bound on the number of products. Reaching it, a direction of
            non-positive curvature, or a residual that is not a number all end the
            solve with `converged` False.
        precondition: a symmetric positive definite map that resembles (I - C)^-1.
    """

    def unfinished(state: _Iterate):
        return (
            (state.size > tolerance)
            & (state.count < max_iterations)
            & ~state.indefinite
        )

    def iterate(state: _Iterate):
        z = precondition(state.residual)
        alignment = state.residual @ z
        p = z + (alignment / state.alignment) * state.direction
        image = product(p)
        curvature = p @ (p - image)
        indefinite = ~(curvature > 0)
        alpha = jnp.where(indefinite, 0.0, alignment / curvature)
        residual = state.residual - alpha * (p - image)
        return _Iterate(
            solution=state.solution + alpha * p,
            residual=residual,
            direction=p,
            image=image,
            alignment=alignment,
            size=norm(residual),
            count=state.count + 1,
            indefinite=indefinite,
        )

    zero = jnp.zeros_like(rhs)
    start = _Iterate(
        solution=zero,
        residual=rhs,
        direction=zero,
        image=zero,
        alignment=jnp.full((), jnp.inf, rhs.dtype),  # No direction to be conjugate to.
        size=norm(rhs),
        count=jnp.zeros((), jnp.int32),
        indefinite=jnp.zeros((), bool),
    )
    end = lax.while_loop(unfinished, iterate, start)
    # C x is known without a product, from the residual.
    product_solution = end.solution - (rhs - end.residual)
    return LinearSolve(
        solution=end.solution,
        num_products=end.count,
        converged=end.size <= tolerance,
        indefinite=end.indefinite,
        asymmetric=is_asymmetric(
            end.solution, end.direction, product_solution, end.image
        ),
    )
