"""RungeKuttaChebyshev: order, stability, stages, agreement with the implicit method."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import flowsim as fs
from flowsim.solvers import RungeKuttaChebyshev
from flowsim.solvers._chebyshev import (
    chebyshev_step,
    num_stages,
    spectral_radius,
)

RATES = jnp.geomspace(0.1, 1e4, 12)


def valley(y):
    """A stiff quadratic, solved by exponentials."""
    return 0.5 * jnp.sum(RATES * y**2)


VALLEY = diffrax.ODETerm(lambda t, y, args: -jax.grad(valley)(y))


@jax.jit
def fixed_steps(h, num_steps, stages):
    """Solution at t = 2 of y' = -(y - cos t) - (y - cos t)^3 - sin t."""

    def field_at(start):
        def field(c, y):
            t = start + c * h
            return -jnp.sin(t) - (y - jnp.cos(t)) - (y - jnp.cos(t)) ** 3

        return field

    def step(i, y):
        field = field_at(i * h)
        return chebyshev_step(field, y, field(jnp.zeros(()), y), h, stages)

    y = jax.lax.fori_loop(0, num_steps, step, jnp.full(1, 1.2))
    return y


@pytest.mark.parametrize("stages", [2.0, 3.0, 10.0, 60.0])
def test_every_number_of_stages_has_order_two(stages):
    def end(num):
        return fixed_steps(jnp.asarray(2.0 / num), num, jnp.asarray(stages))

    errors = [float(jnp.abs(end(num) - end(4000))[0]) for num in (40, 80)]
    assert 1.8 < np.log2(errors[0] / errors[1]) < 2.3, errors


@pytest.mark.parametrize("stages", [2, 5, 20, 100])
def test_the_stability_interval_is_the_stated_one_and_damped(stages):
    """R(z) is one step on y' = z y."""
    s = jnp.asarray(float(stages))
    end = 0.653 * (stages**2 - 1)
    z = -jnp.linspace(0.0, end, 4001)
    values = chebyshev_step(lambda c, y: z * y, jnp.ones_like(z), z, jnp.ones(()), s)
    assert jnp.max(jnp.abs(values)) <= 1 + 1e-12
    if stages > 2:  # Damped: away from zero it is nowhere near one.
        inner = jnp.where(z < -0.05 * end, values, 0.0)
        assert jnp.max(jnp.abs(inner)) < 0.955
    if stages >= 20:  # The formula for the interval is asymptotic in s.
        far = jnp.full(1, -1.05 * end)
        beyond = chebyshev_step(
            lambda c, y: far * y, far / far, far, far[0] / far[0], s
        )
        assert jnp.abs(beyond[0]) > 1
    assert num_stages(jnp.asarray(end)) == stages
    assert num_stages(jnp.asarray(end * 1.0001)) == stages + 1


def test_a_field_that_depends_on_time_is_solved_to_second_order():
    term = diffrax.ODETerm(lambda t, y, args: -10.0 * (y - jnp.cos(t)) - jnp.sin(t))

    def error(h):
        solution = diffrax.diffeqsolve(
            term, RungeKuttaChebyshev(), 0.0, 1.0, h, jnp.ones(1),
            stepsize_controller=diffrax.ConstantStepSize(),
        )  # fmt: skip
        return float(jnp.asarray(solution.ys)[-1, 0] - jnp.cos(1.0))

    assert np.log2(error(0.02) / error(0.01)) == pytest.approx(2.0, abs=0.2)


def test_it_agrees_with_second_order_consistency_to_third_order():
    """R(z) = 1 + z + z^2/2 + O(z^3)."""
    z = jnp.array([1e-2, 2e-2])
    values = chebyshev_step(
        lambda c, y: -z * y, jnp.ones(2), -z, jnp.ones(()), jnp.asarray(7.0)
    )
    defect = np.abs(np.asarray(values - (1 - z + z**2 / 2)))
    assert 2.8 < np.log2(defect[1] / defect[0]) < 3.2


@eqx.filter_jit
def solve_valley(rtol, t1, max_stages=1000):
    return diffrax.diffeqsolve(
        VALLEY, RungeKuttaChebyshev(max_stages), 0.0, t1, None, jnp.ones(12),
        stepsize_controller=diffrax.PIDController(rtol, 1e-2 * rtol),
        saveat=diffrax.SaveAt(ts=t1 * jnp.linspace(0.0, 1.0, 6), solver_state=True),
        max_steps=20_000, throw=False, adjoint=diffrax.ForwardMode(),
    )  # fmt: skip


FIVE, TWENTY = jnp.asarray(5.0), jnp.asarray(20.0)


def test_the_error_estimate_is_the_stated_multiple_of_the_local_error():
    """On exponential decay, with the many stages that a fast zero mode asks for."""
    solver, zero = RungeKuttaChebyshev(), jnp.zeros(())
    rates, start = jnp.array([1.0, 1e5]), jnp.array([1.0, 0.0])
    term = diffrax.ODETerm(lambda t, y, args: -rates * y)
    estimates, errors = [], []
    for h in jnp.array([0.05, 0.025]):
        state = solver.init(term, zero, h, start, None)
        y, estimate, _, _, _ = solver.step(term, zero, h, start, None, state, False)
        estimates.append(float(jnp.asarray(estimate)[0]))
        errors.append(float(jnp.exp(-h) - y[0]))
    np.testing.assert_allclose(estimates, 1.8 * np.array(errors), rtol=0.03)
    order = np.log2(estimates[0] / estimates[1])
    assert order == pytest.approx(solver.error_order(term), abs=0.1)


def test_after_a_jump_the_slope_is_evaluated_anew():
    solver, zero, end = RungeKuttaChebyshev(), jnp.zeros(()), jnp.asarray(1e-3)
    before, after = jnp.ones(12), jnp.full(12, 0.3)
    stale, fresh = (solver.init(VALLEY, zero, end, y, None) for y in (before, after))
    jumped = solver.step(VALLEY, zero, end, after, None, stale, jnp.asarray(True))
    clean = solver.step(VALLEY, zero, end, after, None, fresh, False)
    np.testing.assert_array_equal(jumped[0], clean[0])
    more = int(jumped[3].num_evaluations) - int(clean[3].num_evaluations)
    assert more == 1


def test_a_stiff_flow_is_solved_in_few_evaluations():
    solution = solve_valley(jnp.asarray(1e-6), FIVE)
    exact = jnp.exp(-RATES * solution.ts[:, None])
    assert jnp.max(jnp.abs(jnp.asarray(solution.ys) - exact)) < 1e-5
    # Tsit5 needs about t1 |J| / 3.3 steps of six evaluations.
    num = int(solution.solver_state.num_evaluations)
    assert num < 0.2 * 6 * 5.0 * 1e4 / 3.3, num
    assert (
        int(solution.solver_state.num_products)
        < 3 * int(solution.stats["num_accepted_steps"]) + 50
    )


def test_the_error_follows_the_tolerance():
    errors = []
    for rtol in (1e-3, 1e-5, 1e-7):
        solution = solve_valley(jnp.asarray(rtol), FIVE)
        exact = jnp.exp(-RATES * solution.ts[:, None])
        errors.append(float(jnp.max(jnp.abs(jnp.asarray(solution.ys) - exact))))
    assert np.all(np.array(errors) < 30 * np.array([1e-3, 1e-5, 1e-7])), errors
    # Local errors are h^3 and there are 1/h steps: error ~ rtol^(2/3) at the least.
    assert np.all(np.diff(np.log10(errors)) < -1.2), errors


def test_a_bound_on_the_stages_is_kept_and_shortens_the_steps():
    free = solve_valley(jnp.asarray(1e-3), TWENTY)
    bound = solve_valley(jnp.asarray(1e-3), TWENTY, 20)
    assert int(free.solver_state.num_stages) > 40
    assert bound.result == diffrax.RESULTS.successful
    assert int(bound.solver_state.num_stages) <= 20
    steps = int(bound.stats["num_accepted_steps"])
    assert int(bound.solver_state.num_evaluations) <= 20 * steps + 1
    assert steps > 1.5 * int(free.stats["num_accepted_steps"])
    exact = jnp.exp(-RATES * 20.0)
    np.testing.assert_allclose(bound.ys[-1], exact, atol=1e-2)


def test_a_step_of_too_many_stages_is_never_accepted():
    """Not even where the stiff part of the state is too small to be seen."""
    solver, end = RungeKuttaChebyshev(max_stages=10), jnp.asarray(1.0)
    start, zero = jnp.zeros(12).at[0].set(1.0), jnp.zeros(())
    state = solver.init(VALLEY, zero, end, start, None)
    _, error, _, _, _ = solver.step(VALLEY, zero, end, start, None, state, False)
    assert not jnp.any(jnp.isfinite(jnp.asarray(error)))
    middle = jnp.asarray(1.2e-2)  # 15 stages, of which ten would not be stable.
    _, error, _, _, _ = solver.step(VALLEY, zero, middle, start, None, state, False)
    assert not jnp.any(jnp.isfinite(jnp.asarray(error)))
    short = jnp.asarray(1e-3)  # h |J| = 10: five stages.
    _, error, _, state, _ = solver.step(VALLEY, zero, short, start, None, state, False)
    assert jnp.all(jnp.isfinite(jnp.asarray(error))) and int(state.num_stages) == 5
    assert int(state.num_evaluations) == 1 + 5 and int(state.num_products) >= 2


def test_the_spectral_radius_is_found_and_followed():
    @jax.jit
    def radius_of(matrix, direction):
        return spectral_radius(lambda y: matrix @ y, jnp.zeros(30), direction)

    matrix = jax.random.normal(jax.random.key(0), (30, 30))
    matrix = -(matrix @ matrix.T)
    radius, direction, _ = radius_of(matrix, jnp.ones(30))
    exact = float(jnp.linalg.norm(matrix, 2))
    assert exact / 1.2 < float(radius) <= exact * (1 + 1e-12)
    # Another direction becomes dominant, exactly orthogonal to the one that was.
    turned = -jnp.diag(jnp.array([50.0, 1.0] + [0.1] * 28))
    num, direction = 0, jnp.eye(30)[1]
    for _ in range(3):
        radius, direction, num = radius_of(turned, direction)
    assert float(radius) > float(jnp.linalg.norm(turned, 2)) / 1.2
    assert int(num) == 2  # Once found, it is kept at the least possible price.


def test_single_precision_and_any_tree_are_kept():
    term = diffrax.ODETerm(
        lambda t, y, args: {"a": -300 * y["a"], "b": (-(y["b"][0] ** 3),)}
    )
    y0 = {"a": jnp.ones(3, jnp.float32), "b": (jnp.float32(1.0),)}
    solution = diffrax.diffeqsolve(
        term, RungeKuttaChebyshev(), jnp.float32(0.0), jnp.float32(5.0), None, y0,
        stepsize_controller=diffrax.PIDController(jnp.float32(1e-4), jnp.float32(1e-5)),
    )  # fmt: skip
    end = solution.ys
    assert {leaf.dtype for leaf in jax.tree.leaves(end)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(end["b"][0][-1], 11**-0.5, atol=2e-3)


def test_too_few_stages_are_refused():
    with pytest.raises(ValueError, match="at least 2; got 1"):
        RungeKuttaChebyshev(max_stages=1)


@pytest.mark.slow
def test_it_agrees_with_the_implicit_method_on_a_cycle_to_t_2000():
    chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)
    loss = fs.PopulationLoss(chain)
    model = fs.AttentionModel.init(jax.random.key(0), vocab=4, width=16, scale=1e-3)
    implicit = fs.gradient_flow(loss, model, t1=2000.0, rtol=1e-8)
    explicit = fs.gradient_flow(
        loss, model, t1=2000.0, rtol=1e-6, solver=RungeKuttaChebyshev()
    )
    assert bool(explicit.succeeded)
    gap = jax.tree.map(jnp.subtract, explicit.final, implicit.final)
    size = optx.two_norm(implicit.final)
    assert float(optx.two_norm(gap) / size) < 1e-4
    stats = explicit.stats
    # The square root of the stiffness: far fewer evaluations than explicit steps.
    assert int(stats["num_evaluations"]) < 60_000
    assert "num_products" in stats
