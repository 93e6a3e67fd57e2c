"""SymmetricBDF inside Diffrax: steps, restarts, events, failures."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

from flowsim.solvers import BDFController, NewtonCG, SymmetricBDF

from .problems import DeepLinearNetwork
from .test_solvers_bdf import STIFF, distance, exact, gradient_flow, last, solve

NETWORK = DeepLinearNetwork([3.0, 1.0], start=1e-4)
FLOW = gradient_flow(NETWORK.loss)
RESULTS = diffrax.RESULTS


def finite_rows(solution):
    num = int(jnp.sum(jnp.isfinite(solution.ts)))
    return solution.ts[:num], jax.tree.map(lambda leaf: leaf[:num], solution.ys)


@pytest.mark.slow
def test_a_continued_solve_is_the_same_solve_bit_for_bit():
    saveat = diffrax.SaveAt(
        steps=True, solver_state=True, controller_state=True, made_jump=True
    )
    whole = solve(FLOW, NETWORK.at(0.0), 12.0, 1e-7, saveat=saveat, max_steps=512)
    whole_ts, whole_ys = finite_rows(whole)

    t, y, dt, states, ts = 0.0, NETWORK.at(0.0), None, {}, []
    part = whole
    for _ in range(40):
        part = solve(
            FLOW, y, 12.0, 1e-7, saveat=saveat, max_steps=17, throw=False, t0=t, dt0=dt,
            **states,
        )  # fmt: skip
        part_ts, part_ys = finite_rows(part)
        ts.append(part_ts)
        t, y = part_ts[-1], jax.tree.map(lambda leaf: leaf[-1], part_ys)
        dt = part.controller_state.next_step
        states = {
            "solver_state": part.solver_state,
            "controller_state": part.controller_state,
            "made_jump": part.made_jump,
        }
        if part.result == RESULTS.successful:
            break
    assert len(ts) > 4  # It was interrupted, also between rejections.
    assert np.array_equal(np.concatenate(ts), whole_ts)
    assert all(
        np.array_equal(a[-1], b)
        for a, b in zip(jax.tree.leaves(whole_ys), jax.tree.leaves(y), strict=True)
    )
    for name in ("num_evaluations", "num_products", "num_error_rejections"):
        assert getattr(part.controller_state, name) == getattr(
            whole.controller_state, name
        )
    assert int(whole.controller_state.num_error_rejections) > 0


@pytest.mark.slow
def test_saved_times_and_dense_output_agree_and_join():
    ts = jnp.linspace(0.0, 12.0, 50)
    saveat = diffrax.SaveAt(ts=ts, dense=True)
    solution = solve(FLOW, NETWORK.at(0.0), 12.0, 1e-7, saveat=saveat, max_steps=512)
    dense = jax.vmap(solution.evaluate)(ts)
    assert distance(dense, solution.ys) < 1e-14
    assert distance(dense, jax.vmap(NETWORK.at)(ts)) < 1e-4
    knots = solution.interpolation.ts
    knots = knots[jnp.isfinite(knots)][1:-1]
    left = jax.vmap(lambda t: solution.evaluate(t, left=True))(knots)
    right = jax.vmap(lambda t: solution.evaluate(t, left=False))(knots)
    assert distance(left, right) < 1e-13
    slopes = jax.vmap(solution.derivative)(ts[1:-1])
    fields = jax.vmap(lambda y: FLOW.vf(0.0, y, None))(jax.vmap(NETWORK.at)(ts[1:-1]))
    assert distance(slopes, fields) < 1e-3


def test_a_step_too_long_is_rejected_and_does_no_harm():
    """A sudden pulse that no history announces."""
    width = 1e-3

    def f(t, y, args):
        pulse = jnp.exp(-0.5 * ((t - 5.0) / width) ** 2) / (width * (2 * jnp.pi) ** 0.5)
        return -y + pulse

    ts = jnp.array([4.99, 5.0, 5.01])
    controller = diffrax.ClipStepSizeController(BDFController(1e-7, 1e-10), step_ts=ts)
    solution = solve(
        diffrax.ODETerm(f), jnp.ones(()), 8.0, 1e-7, controller=controller,
        saveat=diffrax.SaveAt(t1=True, controller_state=True),
    )  # fmt: skip
    assert int(solution.stats["num_rejected_steps"]) > 5
    expected = jnp.exp(-8.0) + jnp.exp(-3.0 + 0.5 * width**2)
    np.testing.assert_allclose(last(solution), expected, rtol=1e-5)


def test_a_known_jump_restarts_the_history():
    def f(t, y, args):
        return jnp.where(t < 1.0, -y, 10.0 - 100.0 * y)

    def run(**clip):
        controller = BDFController(1e-8, 1e-10)
        if clip:
            controller = diffrax.ClipStepSizeController(controller, **clip)
        return solve(
            diffrax.ODETerm(f), jnp.ones(3), 1.2, 1e-8, controller=controller,
            saveat=diffrax.SaveAt(t1=True),
        )  # fmt: skip

    aware, unaware = run(jump_ts=jnp.array([1.0])), run()
    expected = 0.1 + (jnp.exp(-1.0) - 0.1) * jnp.exp(-20.0)
    np.testing.assert_allclose(last(aware), expected, rtol=1e-6)
    np.testing.assert_allclose(last(unaware), expected, rtol=1e-6)
    rejected = "num_rejected_steps"
    assert int(aware.stats[rejected]) + 5 < int(unaware.stats[rejected])


@pytest.mark.slow
def test_steps_cut_short_from_outside_cost_little():
    ts = jnp.linspace(0.5, 9.5, 10)
    clip = diffrax.ClipStepSizeController(BDFController(1e-7, 1e-7), step_ts=ts)
    y0 = exact(jnp.zeros(()))
    save = diffrax.SaveAt(steps=True)
    cut = solve(STIFF, y0, 10.0, 1e-7, controller=clip, saveat=save, max_steps=1000)
    free = solve(STIFF, y0, 10.0, 1e-7, 1e-7, saveat=save, max_steps=1000)
    assert np.all(np.isin(ts, np.asarray(cut.ts)))
    assert distance(finite_rows(cut)[1], jax.vmap(exact)(finite_rows(cut)[0])) < 2e-6
    extra = int(cut.stats["num_steps"]) - int(free.stats["num_steps"])
    assert extra < 12 * len(ts)


def test_an_event_is_located_to_the_tolerance():
    def half_way(t, y, args, **kwargs):
        return y["A"][0] @ y["A"][0] - 1.5  # The strong mode at half its strength.

    event = diffrax.Event(half_way, optx.Newton(1e-10, 1e-10))
    solution = solve(FLOW, NETWORK.at(0.0), 12.0, 1e-8, event=event)
    assert solution.result == RESULTS.event_occurred
    expected = jnp.log(3.0 / 1e-4 - 1) / 6.0
    np.testing.assert_allclose(solution.ts[-1], expected, atol=1e-5)
    assert abs(half_way(0.0, last(solution), None)) < 1e-7


@pytest.mark.slow
def test_lanes_of_a_batch_do_as_each_would_alone():
    starts = jnp.array([1e-6, 1e-4, 1e-2])

    def end(start):
        network = DeepLinearNetwork([3.0, 1.0], start=start)
        solution = solve(FLOW, network.at(jnp.zeros(())), 8.0, 1e-7)
        return last(solution), solution.stats["num_steps"]

    together, steps = jax.vmap(end)(starts)
    assert len(set(steps.tolist())) == 3
    for i, start in enumerate(starts):
        alone, num = end(start)
        assert distance(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone) < 1e-6
        assert abs(int(num) - int(steps[i])) < 0.1 * int(num)


def test_a_rotation_is_refused():
    term = diffrax.ODETerm(lambda t, y, args: (-y[1], y[0]))
    y0 = (jnp.ones(()), jnp.zeros(()))
    solution = solve(term, y0, 10.0, 1e-6, throw=False)
    assert solution.result == RESULTS.breakdown
    # What was reached before is right.
    t = solution.ts[-1]
    assert distance(last(solution), (jnp.cos(t), jnp.sin(t))) < 1e-5
    with pytest.raises(Exception, match="linear solve"):
        solve(term, y0, 10.0, 1e-6)


def test_a_rotation_that_comes_late_and_mixed_is_refused():
    def f(t, y, args):
        turn = jnp.stack([-y[1], y[0], jnp.zeros(())])
        return -jnp.array([1.0, 2.0, 30.0]) * y + jnp.where(t > 1.0, 0.5, 0.0) * turn

    y0 = jnp.array([1.0, 0.5, 0.2])
    solution = solve(diffrax.ODETerm(f), y0, 10.0, 1e-6, throw=False)
    assert solution.result == RESULTS.breakdown
    assert 0.9 < solution.ts[-1] < 2.0


@pytest.mark.slow
def test_a_symmetric_jacobian_is_not_mistaken():
    matrix = jax.random.normal(jax.random.key(1), (40, 40))
    matrix = -(matrix @ matrix.T) * jnp.geomspace(1e-3, 1e3, 40)[:, None] ** 0.5
    matrix = 0.5 * (matrix + matrix.T) - 500 * jnp.eye(40)
    term = diffrax.ODETerm(lambda t, y, args: matrix @ y + jnp.sin(t))
    for rtol in (jnp.asarray(1e-4), jnp.asarray(1e-9)):
        solution = solve(term, jnp.ones(40), 3.0, rtol, rtol, throw=False)
        assert solution.result == RESULTS.successful


def test_a_growing_mode_below_the_tolerance_shortens_the_step():
    """Growth that the error test cannot see still bounds the step (p . A p > 0)."""
    term = diffrax.ODETerm(lambda t, y, args: jnp.array([5.0, -1.0]) * y)
    solution = solve(
        term, jnp.array([1e-9, 1.0]), 4.0, 1e-3, 1e-2,
        saveat=diffrax.SaveAt(steps=True, controller_state=True), max_steps=512,
    )  # fmt: skip
    _, ys = finite_rows(solution)
    assert int(solution.controller_state.num_indefinite) > 0
    assert jnp.all(ys[:, 0] > 0)
    assert jnp.all(jnp.diff(jnp.abs(ys[:, 0])) >= 0)


def test_a_field_that_is_not_a_number_ends_the_solve():
    term = diffrax.ODETerm(lambda t, y, args: jnp.where(t > 1.0, jnp.nan, -y))
    solution = solve(term, jnp.ones(2), 2.0, 1e-6, throw=False, max_steps=None)
    assert solution.result == RESULTS.dt_min_reached
    assert 0.9 < solution.ts[-1] <= 1.0
    np.testing.assert_allclose(last(solution), jnp.exp(-solution.ts[-1]), rtol=1e-4)


def test_blowing_up_is_reported_where_it_happens():
    term = diffrax.ODETerm(lambda t, y, args: y**3)
    solution = solve(term, jnp.ones(2), 1.0, 1e-7, throw=False, max_steps=None)
    assert solution.result == RESULTS.dt_min_reached
    np.testing.assert_allclose(solution.ts[-1], 0.5, atol=1e-4)


def test_an_unused_tolerance_may_be_zero():
    term = diffrax.ODETerm(lambda t, y, args: jnp.array([-1.0, 0.0]) * y)
    solution = solve(term, jnp.array([1.0, 0.0]), 1.0, 1e-6, 0.0)
    np.testing.assert_allclose(last(solution), [np.exp(-1.0), 0.0], rtol=1e-5)


def test_the_longest_step_is_kept():
    controller = BDFController(1e-4, 1e-6, dtmax=0.25)
    saveat = diffrax.SaveAt(steps=True)
    term = diffrax.ODETerm(lambda t, y, args: -y)
    solution = solve(
        term, jnp.ones(2), 10.0, 1e-4, controller=controller, saveat=saveat,
        max_steps=512,
    )  # fmt: skip
    steps = jnp.diff(finite_rows(solution)[0])
    assert 0.249 < jnp.max(steps) < 0.2500001


def test_the_norm_sees_the_state_as_it_was_given():
    def only_a(y):
        return jnp.abs(y["a"])

    controller = BDFController(1e-10, 1e-10, norm=only_a)
    y0 = exact(jnp.zeros(()))
    tight = solve(STIFF, y0, 2.0, 1e-10, controller=controller)
    assert abs(last(tight)["a"] - jnp.cos(2.0)) < 1e-8


def test_a_meter_runs_along(capfd):
    meter = diffrax.TextProgressMeter(minimum_increase=0.2)
    solve(STIFF, exact(jnp.zeros(())), 2.0, 1e-5, progress_meter=meter)
    jax.effects_barrier()
    assert "100.00%" in capfd.readouterr().out


def test_the_pair_belongs_together():
    term, y0 = diffrax.ODETerm(lambda t, y, args: -y), jnp.ones(2)
    with pytest.raises(ValueError, match="SymmetricBDF only"):
        solve(term, y0, 1.0, 1e-6, solver=diffrax.Tsit5())
    with pytest.raises(ValueError, match="order of convergence"):
        solve(term, y0, 1.0, 1e-6, controller=diffrax.PIDController(1e-6, 1e-9))
    with pytest.raises(ValueError, match="tolerances"):
        solve(term, y0, 1.0, 1e-6, controller=diffrax.ConstantStepSize(), dt0=0.1)


def test_impossible_options_say_what_is_wrong():
    with pytest.raises(ValueError, match="min_order 3 and max_order 2"):
        SymmetricBDF(min_order=3, max_order=2)
    with pytest.raises(ValueError, match="max_order 7"):
        SymmetricBDF(max_order=7)
    with pytest.raises(ValueError, match="kappa"):
        SymmetricBDF(kappa=(0.0, 0.0))
    assert NewtonCG(1e-3, 1e-3, optx.rms_norm).max_products > 0
