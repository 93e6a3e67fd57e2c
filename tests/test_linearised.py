"""The linear flow at a critical point, and how far the true flow follows it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from flowsim import _trees, theory
from flowsim.derivatives import hessian
from flowsim.linearised import (
    compare,
    compare_exit,
    error_order,
    linear_flow,
    predict_exit,
)
from flowsim.loss import PopulationLoss
from flowsim.trajectory import Outcome

from .problems import named_chain, random_model

MU, LAM = 0.5, 2.0


class Saddle(eqx.Module):
    """x' = mu x + cubic x^2 + quartic x^3, z' = -lam z: one type, compiled once."""

    cubic: float | jax.Array
    quartic: float | jax.Array

    def __call__(self, y):
        x, z = y["x"], y["z"]
        bent = self.cubic * x**3 / 3 + self.quartic * x**4 / 4
        return jnp.sum(-MU * x**2 / 2 - bent + LAM * z**2 / 2)


saddle = Saddle(jnp.asarray(1.0), jnp.asarray(0.0))
even = Saddle(jnp.asarray(0.0), jnp.asarray(-1.0))


def solution(x0, z0, t):
    growth = jnp.exp(MU * t)
    x = MU * x0 * growth / (MU + x0 * (1 - growth))
    return {"x": x, "z": z0 * jnp.exp(-LAM * t)}


ORIGIN = {"x": jnp.zeros(1), "z": jnp.zeros(1)}
DIAGONAL = {"x": jnp.ones(1), "z": jnp.ones(1)}


@pytest.fixture(scope="module")
def toy():
    return linear_flow(saddle, ORIGIN)


@pytest.fixture(scope="module")
def second():
    """theta_c^1 of the default chain: flow, loss, a generic direction."""
    chain = named_chain("default")
    loss = PopulationLoss(chain)
    point = theory.second_critical_point(chain, width=3, key_width=2)
    direction = random_model(chain, seed=1, width=3, key_width=2, scale=1.0)
    return linear_flow(loss, point), loss, direction


def test_the_linear_flow_is_the_exponential_of_the_jacobian(second):
    flow, loss, direction = second
    flat, _ = _trees.ravel(direction)
    exact = scipy.linalg.expm(-7.0 * np.asarray(hessian(loss, flow.point))) @ flat
    found, _ = _trees.ravel(flow.displaced(direction, 7.0))
    np.testing.assert_allclose(found, exact, atol=1e-12 * float(np.linalg.norm(exact)))
    still, _ = _trees.ravel(flow.displaced(direction, 0.0))
    np.testing.assert_array_equal(still, flat)


def test_the_leading_subspace_alone_moves_what_it_spans_and_leaves_the_rest():
    rates = jnp.linspace(-3.0, 1.0, 40)
    part = linear_flow(lambda y: -0.5 * jnp.sum(rates * y**2), jnp.zeros(40), num=2)
    assert not part.spectrum.complete
    np.testing.assert_allclose(part.rate, 1.0, rtol=1e-10)
    moved = part.displaced(jnp.ones(40), 3.0)
    np.testing.assert_allclose(moved[-2:], np.exp(3.0 * rates[-2:]), rtol=1e-8)
    np.testing.assert_allclose(moved[:-2], 1.0, atol=1e-8)


def test_the_eigenspace_of_the_largest_rate_is_k_dimensional_at_theta_c_1(second):
    flow, loss, _ = second
    chain = loss.chain
    assert int(jnp.sum(flow.leading)) == 2
    np.testing.assert_allclose(flow.rate, theory.focus_rate(chain), rtol=1e-10)
    np.testing.assert_allclose(flow.gap, theory.focus_rate(chain), rtol=1e-6)
    directions = theory.focus_directions(chain, width=3, key_width=2)
    aligned = jax.vmap(flow.alignment)(directions)
    np.testing.assert_allclose(aligned, 1.0, rtol=1e-10)


def test_the_comparison_measures_the_true_solution_of_a_solvable_flow(toy):
    eps = 1e-3
    ts = jnp.array([4.0])
    seen = compare(toy, saddle, DIAGONAL, scale=eps, ts=ts)
    x0 = z0 = eps / np.sqrt(2)
    assert bool(seen.outcome == Outcome.reached_t1)
    np.testing.assert_array_equal(seen.ts, jnp.r_[0.0, ts])
    exact = solution(x0, z0, seen.ts)
    np.testing.assert_allclose(
        seen.distances, jnp.hypot(exact["x"], exact["z"]), rtol=1e-10
    )
    nonlinear = exact["x"] - x0 * jnp.exp(MU * seen.ts)
    np.testing.assert_allclose(seen.errors, nonlinear, rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(
        seen.alignment, exact["x"] / jnp.hypot(exact["x"], exact["z"]), rtol=1e-10
    )
    assert np.all(np.diff(np.asarray(seen.linear_alignment)) > 0)


def test_the_error_is_of_second_order_with_the_known_constant(toy):
    # x - x0 e^{mu t} = x0^2 e^{mu t} (e^{mu t} - 1) / mu + O(x0^3)
    t = 2.0
    found = error_order(toy, saddle, DIAGONAL, scales=np.logspace(-3, -7, 5), t=t)
    assert bool(found.succeeded) and float(found.decades) == pytest.approx(4.0)
    assert float(found.order) == pytest.approx(2.0, abs=2e-3)
    constant = 0.5 * (1 - np.exp(-MU * t)) / MU
    assert float(found.constant) == pytest.approx(constant, rel=2e-3)


def test_where_the_second_derivative_vanishes_the_order_is_three():
    flow = linear_flow(even, ORIGIN)
    found = error_order(flow, even, DIAGONAL, scales=[1e-2, 1e-3, 1e-4], t=2.0)
    assert float(found.order) == pytest.approx(3.0, abs=2e-2)


@pytest.mark.slow
def test_the_lemma_holds_at_theta_c_1_over_four_decades(second):
    flow, loss, direction = second
    t = float(1 / flow.rate)
    scales = np.logspace(-2, -6, 5)
    found = error_order(flow, loss, direction, scales=scales, t=t)
    assert bool(found.succeeded) and float(found.decades) >= 4
    assert float(found.order) == pytest.approx(2.0, abs=0.01)
    # Uniformly in time, up to a distance of order one.
    for share in (0.3, 0.6, 1.0):
        ts = jnp.array([share * jnp.log(1e4) / flow.rate])
        seen = compare(flow, loss, direction, scale=1e-5, ts=ts)
        assert float(jnp.max(seen.constants)) < 2 * float(found.constant)
    assert float(seen.distances[-1]) > 1e-2
    assert float(seen.alignment[-1]) > 0.999
    np.testing.assert_allclose(seen.alignment, seen.linear_alignment, atol=2e-2)


@pytest.mark.slow
def test_the_exit_of_a_solvable_flow_is_predicted_to_first_order(toy):
    radius = 1e-2
    errors = []
    for eps in (1e-4, 1e-6):
        start = {"x": jnp.full(1, eps), "z": jnp.full(1, eps)}
        seen = compare_exit(toy, saddle, start, radius)
        assert bool(seen.true.leaves & seen.predicted.leaves)
        # z is gone at the exit: x0 e^{mu t} = radius up to 1e-7.
        assert float(seen.predicted.time) == pytest.approx(
            np.log(radius / eps) / MU, abs=1e-6
        )
        # x (mu + x0) / (x0 (mu + x)) = e^{mu t}
        true = np.log(radius * (MU + eps) / (eps * (MU + radius))) / MU
        assert float(seen.true.time) == pytest.approx(true, abs=1e-6)
        assert float(seen.true.time) == pytest.approx(
            float(seen.predicted.time + seen.time_error)
        )
        errors.append(abs(float(seen.time_error)))
        assert float(seen.place_error) < 1e-3
    # The error depends on the ball, not on the start.
    np.testing.assert_allclose(errors, radius / MU**2, rtol=0.02)


@pytest.mark.slow
def test_the_exit_from_theta_c_1_is_predicted_better_from_smaller_balls(second):
    flow, loss, direction = second
    start = _trees.add_scaled(flow.point, 1e-7, direction)
    errors = []
    for radius in (1e-1, 1e-2):
        seen = compare_exit(flow, loss, start, radius)
        assert bool(seen.outcome == Outcome.stopped)
        inside = _trees.norm(_trees.subtract(seen.true.place, flow.point))
        assert float(inside) == pytest.approx(radius, rel=1e-6)
        errors.append(float(seen.place_error))
    assert errors[0] < 0.2 and errors[1] < 0.2 * errors[0]
    assert float(seen.true.alignment) > 0.999


def test_a_start_without_unstable_part_never_leaves(toy):
    exit_ = predict_exit(toy, {"x": jnp.zeros(1), "z": jnp.full(1, 0.1)}, 1.0)
    assert not bool(exit_.leaves) and np.isinf(exit_.time)
    np.testing.assert_array_equal(exit_.place["z"], [0.1])
    with pytest.raises(ValueError, match="t1 must be given"):
        compare_exit(toy, saddle, {"x": jnp.zeros(1), "z": jnp.full(1, 0.1)}, 1.0)


def test_exits_can_be_mapped_over_starts(toy):
    starts = {"x": jnp.array([[1e-3], [1e-4]]), "z": jnp.zeros((2, 1))}
    times = jax.vmap(lambda start: predict_exit(toy, start, 1.0).time)(starts)
    np.testing.assert_allclose(times, np.log([1e3, 1e4]) / MU, rtol=1e-10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda flow: compare(
                flow, saddle, DIAGONAL, scale=0.0, ts=jnp.array([1.0])
            ),
            "scale must be positive; got 0",
        ),
        (
            lambda flow: compare(
                flow, saddle, DIAGONAL, scale=0.1, ts=jnp.array([-1.0, 1.0])
            ),
            "ts must be positive times",
        ),
        (
            lambda flow: error_order(flow, saddle, DIAGONAL, scales=[0.1], t=1.0),
            "scales must be at least two; got 1",
        ),
    ],
)
def test_wrong_input_is_refused(toy, call, message):
    with pytest.raises(ValueError, match=message):
        call(toy)


def test_a_start_outside_the_ball_is_refused(toy):
    with pytest.raises(Exception, match="inside the ball"):
        predict_exit(toy, DIAGONAL, 0.5)


def test_results_print_short(toy):
    seen = compare(toy, saddle, DIAGONAL, scale=1e-3, ts=jnp.array([4.0]))
    for result in (toy, seen, predict_exit(toy, seen_start(), 1.0)):
        assert 3 <= len(str(result).splitlines()) < 12


def seen_start():
    return {"x": jnp.full(1, 1e-3), "z": jnp.zeros(1)}
