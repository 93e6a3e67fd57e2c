"""A flow inside the caller's own jit, vmap and derivatives: exact where the solution is
known, and against central differences of two widths where it is not."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs

PI = jnp.array([0.6, 0.3, 0.1])
DIRECTION = jnp.array([1.0, -0.5, -0.5])  # Masses keep their sum.
WIDTH = 1e-3
CHAINS = PI + WIDTH * jnp.array([0.0, 1.0, -1.0, 0.5, -0.5])[:, None] * DIRECTION
MODEL = fs.AttentionModel.init(
    jax.random.key(0), vocab=3, width=4, key_width=2, scale=0.1
)


def loss_of(pi):
    return fs.PopulationLoss(fs.lazy_chain(pi, 0.5))


def final_loss(pi, **options):
    run = fs.gradient_flow(loss_of(pi), MODEL, t1=20.0, rtol=1e-9, **options)
    return run.losses[-1]


def time_of_escape(pi):
    """When the flow has left the origin: its loss has fallen to 0.95 < log 3."""
    loss = loss_of(pi)
    run = fs.gradient_flow(
        loss, MODEL, t1=40.0, rtol=1e-9, stop=lambda t, model: loss(model) - 0.95
    )
    return run.ts[-1]


def check_by_differences(values, slope, rtol):
    """Compare the slope at x with values at x, x +- h, x +- h/2.

    The difference quotients of both widths miss it by terms of order h^2, in the ratio
    of four to one; eliminating these leaves the quotient of fourth order.
    """
    wide = (values[1] - values[2]) / (2 * WIDTH)
    narrow = (values[3] - values[4]) / WIDTH
    assert abs(wide - slope) < 1e-2 * abs(slope)
    np.testing.assert_allclose((wide - slope) / (narrow - slope), 4.0, rtol=0.05)
    np.testing.assert_allclose((4 * narrow - wide) / 3, slope, rtol=rtol)


@pytest.mark.slow
def test_the_final_loss_has_the_derivative_in_pi_that_differences_show():
    """All five chains are lanes of one vmap, values and derivatives, under one jit."""
    lanes = jax.jit(jax.vmap(lambda pi: jax.jvp(final_loss, (pi,), (DIRECTION,))))
    values, slopes = lanes(CHAINS)
    check_by_differences(values, slopes[0], 1e-8)


@pytest.mark.slow
def test_the_time_of_a_stage_has_the_derivative_in_pi_that_differences_show():
    along = jax.jit(lambda pi: jax.jvp(time_of_escape, (pi,), (DIRECTION,)))
    values, slopes = zip(*(along(pi) for pi in CHAINS), strict=True)
    check_by_differences(values, slopes[0], 1e-6)


@pytest.mark.slow
def test_reverse_mode_through_an_explicit_solver_gives_the_gradient_in_pi():
    options = {"solver": diffrax.Tsit5(), "save": jnp.array([10.0])}
    both = jax.jit(jax.value_and_grad(lambda pi: final_loss(pi, **options)))
    values, gradients = zip(*(both(pi) for pi in CHAINS), strict=True)
    check_by_differences(values, gradients[0] @ DIRECTION, 1e-8)


@pytest.mark.slow
def test_derivatives_of_a_flow_with_a_known_solution_are_exact():
    """Of u' = v (c - u v), v' = u (c - u v) from u = v = s: w = u v obeys
    w' = 2 w (c - w), and is c/2 at the time log(c/s^2 - 1) / (2 c)."""
    start = 1e-4

    def exact(c):
        time = jnp.log(c / start**2 - 1) / (2 * c)
        return jnp.stack([time, c**2 / 8, jnp.sqrt(c / 2)])

    def measured(c):
        run = fs.gradient_flow(
            lambda y: 0.5 * (c - y[0] * y[1]) ** 2,
            jnp.full(2, start),
            t1=60.0,
            solver=diffrax.Tsit5(),
            stop=lambda t, y: y[0] * y[1] - 0.5 * c,
        )
        return jnp.stack([run.ts[-1], run.losses[-1], run.final[0]])

    values, slopes = jax.jit(lambda c: jax.jvp(measured, (c,), (1.0,)))(1.4)
    known = jax.jvp(exact, (1.4,), (1.0,))
    np.testing.assert_allclose(values, known[0], rtol=1e-6)
    np.testing.assert_allclose(slopes, known[1], rtol=1e-6)
