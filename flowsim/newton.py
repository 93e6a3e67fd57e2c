"""Newton's method for gradients whose Hessian is singular and badly scaled.

A critical point of a symmetric objective is never isolated, and the Hessians met along
a flow span many orders of magnitude (412 against 8e-4 at a late saddle of the default
cycle). Plain Newton divides by zero there. Levenberg-Marquardt does not, but judges a
step by the size of the gradient, which the stiff directions dominate: in a narrow
curved valley it accepts only tiny steps (on that saddle it stalls at 3e-5 after 100).

`RegularisedNewton` takes the same steps,

    d = -(H^2 + mu^2)^-1 H g     (minimum norm as mu -> 0: null directions stay)

and judges them in the norm in which they were computed: with R = (H^2 + mu^2)^-1 H a
step is accepted when |R (g(y + d) - g - H d)| is less than half of |d|, that is when
the part of the gradient that linearisation failed to predict would cause only a short
further step ("error-oriented" in Deuflhard's terms). Nothing has to descend, so it goes
to saddles as readily as to minima; that late saddle takes 10 steps. The price: where
the soft direction itself turns fast, as in Rosenbrock's valley, steps are short.

It is an Optimistix least-squares solver, so `optimistix.least_squares` runs it, and
`find_critical_point` can run Optimistix's own solvers in its place.

References:
    Deuflhard (2004), "Newton Methods for Nonlinear Problems", sections 3.3 and 4.3.
    Fan and Yuan (2005), "On the quadratic convergence of the Levenberg-Marquardt
    method without nonsingularity assumption", Computing 74.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree

from ._types import Scalar

Vector = Float[Array, " n"]
LinearMap = Callable[[Vector], Vector]
# (mu, r) -> (H^2 + mu^2)^-1 H r, whether that is accurate, products with H it took.
Regularised = Callable[[Scalar, Vector], tuple[Vector, Bool[Array, ""], Int[Array, ""]]]


class _State(eqx.Module):
    start: Vector
    damping: Scalar  # mu
    done: Bool[Array, ""]
    num_gradients: Int[Array, ""]
    num_products: Int[Array, ""]


class RegularisedNewton(optx.AbstractLeastSquaresSolver):
    """Regularised Newton iteration with an error-oriented acceptance rule.

    The function must be the gradient of something: its Jacobian is taken as symmetric.
    One step is one accepted move; trial moves are counted in the statistics. The
    iteration ends at |g| <= atol, or when no regularisation makes a step acceptable,
    or beyond one of the two bounds.

    Attributes:
        atol: absolute tolerance on the Euclidean norm of the gradient.
        basis_size: Krylov vectors, at most; n or more means that H is diagonalised
            instead (n products, n^2 memory) at every step.
        max_trials: trial steps before giving up, each with four times the mu.
        max_products: no further trial once this many products with the Hessian are
            made; the trial under way may add 2 `basis_size` + 1 to them.
        max_distance: the iteration gives up once it is further from its start.
    """

    atol: float | Scalar  # pyright: ignore[reportIncompatibleVariableOverride]
    basis_size: int = eqx.field(static=True, default=300)
    max_trials: int = eqx.field(static=True, default=40)
    max_products: int | Int[Array, ""] = 2**30
    max_distance: float | Scalar = jnp.inf
    rtol: float = eqx.field(static=True, default=0.0)
    norm: Callable[[PyTree], Scalar] = eqx.field(static=True, default=optx.two_norm)

    def init(self, fn, y, args, options, f_struct, aux_struct, tags) -> _State:
        gradient, _ = fn(y, args)
        size = jnp.linalg.norm(gradient)
        one = jnp.ones((), jnp.int32)
        return _State(y, size, ~(size > self.atol), one, 0 * one)

    def step(self, fn, y, args, options, state: _State, tags):
        gradient, hessian, aux = jax.linearize(lambda v: fn(v, args), y, has_aux=True)
        if self.basis_size < y.size:
            solve, least, num_products = _krylov(hessian, gradient, self.basis_size)
        else:
            solve, least, num_products = _diagonalised(hessian, gradient)

        def trial(carry):
            _, _, mu, _, trials, products = carry
            step, accurate, used = solve(mu, -gradient)
            following = fn(y + step, args)[0]
            surprise, judged, used_again = solve(
                mu, following - gradient - hessian(step)
            )
            length = jnp.linalg.norm(step)
            ratio = jnp.linalg.norm(surprise) / jnp.where(length > 0, length, 1.0)
            resolved = length > jnp.finfo(y.dtype).eps * jnp.linalg.norm(y)
            # A NaN fails the comparison.
            acceptable = resolved & accurate & judged & (ratio < 0.5)
            spent = products + used + used_again + 1
            hopeless = ~resolved | (trials + 1 >= self.max_trials)
            hopeless = hopeless | (state.num_products + spent >= self.max_products)
            return (
                jnp.where(acceptable, y + step, y),
                jnp.where(acceptable, ratio, jnp.inf),
                jnp.where(acceptable, mu, 4 * mu),
                acceptable | hopeless,
                trials + 1,
                spent,
            )

        moved, ratio, mu, _, trials, products = jax.lax.while_loop(
            lambda carry: ~carry[3],
            trial,
            (
                y,
                jnp.full((), jnp.inf, y.dtype),
                jnp.maximum(state.damping, least),
                jnp.zeros((), bool),
                jnp.zeros((), jnp.int32),
                num_products,
            ),
        )
        shrink = jnp.where(ratio < 0.1, 0.1, jnp.where(ratio < 0.25, 0.3, 1.0))
        small = ~(jnp.linalg.norm(fn(moved, args)[0]) > self.atol)
        strayed = jnp.linalg.norm(moved - state.start) > self.max_distance
        exhausted = state.num_products + products >= self.max_products
        state = _State(
            start=state.start,
            damping=mu * shrink,
            done=small | jnp.isinf(ratio) | strayed | exhausted,
            num_gradients=state.num_gradients + trials + 2,
            num_products=state.num_products + products,
        )
        return moved, state, aux

    def terminate(self, fn, y, args, options, state: _State, tags):
        return state.done, optx.RESULTS.successful

    def postprocess(self, fn, y, aux, args, options, state: _State, tags, result):
        counts = {
            "num_gradients": state.num_gradients,
            "num_hessian_products": state.num_products,
        }
        return y, aux, counts


def _diagonalised(hessian: LinearMap, gradient: Vector):
    n = gradient.size
    columns = jax.lax.map(
        hessian, jnp.eye(n, dtype=gradient.dtype), batch_size=max(1, min(n, 2**22 // n))
    )
    values, vectors = jnp.linalg.eigh(0.5 * (columns + columns.T))

    def solve(mu: Scalar, residual: Vector):
        factors = values / (values**2 + mu**2)
        solution = vectors @ (factors * (vectors.T @ residual))
        return solution, jnp.ones((), bool), jnp.zeros((), jnp.int32)

    # Null directions carry eigenvalues and gradients of round-off size; their quotient
    # must not move the point.
    least = jnp.maximum(
        1e-10 * jnp.max(jnp.abs(values)), jnp.finfo(gradient.dtype).tiny ** 0.25
    )
    return solve, least, jnp.asarray(n, jnp.int32)


def _krylov(hessian: LinearMap, gradient: Vector, basis_size: int):
    """The same from products: (H^2 + mu^2)^-1 H r is the real part of (H + i mu)^-1 r.

    The shifted system is solved in the Krylov space of (H, r), with a Lanczos basis
    that is kept orthogonal, in one pass of at most `basis_size` products. Its error is
    at most the residual over mu, since no eigenvalue of H + i mu is smaller than mu.
    """
    chunk = 10
    rows = chunk * -(-basis_size // chunk)
    dtype = gradient.dtype

    def solve(mu: Scalar, residual: Vector):
        size = jnp.linalg.norm(residual)
        safe = jnp.where(size > 0, size, 1.0)

        def shifted(diagonal, off):
            """(T + i mu)^-1 |r| e1 for tridiagonal T with `off` beside the diagonal."""
            still = jnp.zeros_like(diagonal)
            upper = jax.lax.complex(off.at[-1].set(0.0), still)
            return jax.lax.linalg.tridiagonal_solve(
                jnp.roll(upper, 1),
                jax.lax.complex(diagonal, still + mu),
                upper,
                jax.lax.complex(still.at[0].set(size), still)[:, None],
            )[:, 0]

        def extend(j, carry):
            basis, diagonal, off = carry
            image = hessian(basis[j])
            remainder, components = image, jnp.zeros((rows + 1,), dtype)
            for _ in range(2):
                parts = basis @ remainder
                remainder = remainder - parts @ basis
                components = components + parts
            length = jnp.linalg.norm(remainder)
            # The space is exhausted: zero vectors from here on decouple.
            length = jnp.where(length > 1e-14 * jnp.linalg.norm(image), length, 0.0)
            following = remainder / jnp.where(length > 0, length, 1.0)
            following = jnp.where(length > 0, following, 0.0)
            return (
                basis.at[j + 1].set(following),
                diagonal.at[j].set(components[j]),
                off.at[j].set(length),
            )

        def advance(carry):
            basis, diagonal, off, count, _, _ = carry
            basis, diagonal, off = jax.lax.fori_loop(
                count, count + chunk, extend, (basis, diagonal, off)
            )
            count = count + chunk
            # Off-diagonal entry count - 1 couples to vectors that are not there yet.
            last = off[count - 1]
            coefficients = shifted(diagonal, off.at[count - 1].set(0.0))
            error = last * jnp.abs(coefficients[count - 1]) / mu
            accurate = ~(error > 0.1 * jnp.linalg.norm(coefficients.real))
            return basis, diagonal, off, count, coefficients.real, accurate

        basis, _, _, count, coefficients, accurate = jax.lax.while_loop(
            lambda carry: ~carry[5] & (carry[3] < rows),
            advance,
            (
                jnp.zeros((rows + 1, residual.size), dtype).at[0].set(residual / safe),
                jnp.zeros((rows,), dtype),
                jnp.zeros((rows,), dtype),
                jnp.zeros((), jnp.int32),
                jnp.zeros((rows,), dtype),
                jnp.zeros((), bool),
            ),
        )
        return coefficients @ basis[:rows], accurate, count

    size = jnp.linalg.norm(gradient)
    stretch = jnp.linalg.norm(hessian(gradient)) / jnp.where(size > 0, size, 1.0)
    return solve, 1e-10 * stretch, jnp.ones((), jnp.int32)
