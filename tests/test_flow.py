"""The flow: exact solutions, records, tolerances at saddles, and every way to fail."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

import flowsim as fs
from flowsim.flow import default_atol
from flowsim.trajectory import Thinning


def product(y):
    """L = (1 - u v)^2 / 2: a saddle at the origin, minima on u v = 1."""
    return 0.5 * (1.0 - y[0] * y[1]) ** 2


class Quadratic(eqx.Module):
    """L = offset + sum_i rates_i y_i^2 / 2; its numbers are data: compiled once."""

    rates: Array
    offset: Array

    def __call__(self, y):
        return self.offset + 0.5 * jnp.sum(self.rates * y**2)


def quadratic(*rates, offset=0.0):
    return Quadratic(jnp.array(rates), jnp.asarray(offset))


def towards(target, y):
    return 0.5 * (target - y[0] * y[1]) ** 2


def half_way(t, y):
    return y[0] * y[1] - 0.5


def half_time(scale: float) -> float:
    """Flow time from u = v = `scale` to u v = 1/2 under `product`: w = u v obeys
    w' = 2 w (1 - w), so w/(1 - w) grows like exp(2 t)."""
    start = scale**2
    return 0.5 * np.log((1.0 - start) / start)


@pytest.mark.parametrize("scale", [1e-2, 1e-6, 1e-9])
def test_the_origin_is_escaped_at_the_right_time_whatever_the_initial_scale(scale):
    run = fs.gradient_flow(
        product,
        jnp.full(2, scale),
        t1=60.0,
        rtol=1e-8,
        stop=half_way,
    )
    assert run.outcome == fs.Outcome.stopped
    assert abs(float(run.ts[-1]) - half_time(scale)) < 1e-5


def test_the_handed_escape_time_is_met_to_ten_digits():
    run = fs.gradient_flow(
        product,
        jnp.full(2, 1e-6),
        t1=30.0,
        rtol=1e-11,
        stop=half_way,
    )
    assert abs(float(run.ts[-1]) - 13.8155105580) < 1e-8


def test_a_quadratic_decays_exponentially_at_given_times():
    objective = quadratic(0.3, 1.0, 2.0)
    times = np.linspace(0.5, 3.0, 6)
    start = jnp.array([1.0, -2.0, 0.5])
    run = fs.gradient_flow(objective, start, t1=4.0, rtol=1e-9, save=times)
    np.testing.assert_allclose(run.ts, [0.0, *times, 4.0], rtol=0, atol=0)
    exact = start * jnp.exp(-objective.rates * run.ts[:, None])
    np.testing.assert_allclose(run.models, exact, atol=1e-7)


def test_t0_only_shifts_time():
    early = fs.gradient_flow(product, jnp.full(2, 0.1), t1=5.0)
    late = fs.gradient_flow(product, jnp.full(2, 0.1), t0=100.0, t1=105.0)
    np.testing.assert_allclose(late.final, early.final, rtol=1e-6)
    assert float(late.ts[0]) == 100.0 and float(late.ts[-1]) == 105.0


def test_any_pytree_flows_and_keeps_its_structure():
    def objective(tree):
        return 0.5 * jnp.sum(tree["a"] ** 2) + jnp.sum((tree["b"][0] - 1.0) ** 2)

    start = {"a": jnp.ones((2, 3)), "b": (jnp.zeros(4),)}
    run = fs.gradient_flow(objective, start, t1=20.0)
    assert run.models["a"].shape == (len(run.ts), 2, 3)
    np.testing.assert_allclose(run.final["b"][0], 1.0, atol=1e-5)


def test_default_records_are_dense_in_the_burst():
    run = fs.gradient_flow(product, jnp.full(2, 1e-9), t1=40.0, rtol=1e-9)
    burst = half_time(1e-9)
    gaps = np.diff(run.ts)
    inside = np.abs(run.ts[:-1] - burst) < 2.0
    assert np.median(gaps[inside]) < 0.5 * np.median(gaps[run.ts[:-1] > burst + 8])


def test_at_most_so_many_rows_are_kept_and_both_ends_are_among_them():
    save = fs.Save(at_most=20)
    full = fs.gradient_flow(product, jnp.full(2, 1e-4), t1=30.0, rtol=1e-10)
    thin = fs.gradient_flow(product, jnp.full(2, 1e-4), t1=30.0, rtol=1e-10, save=save)
    assert len(full.ts) > 100 and 10 <= len(thin.ts) <= 22
    assert float(thin.ts[0]) == 0.0 and float(thin.ts[-1]) == 30.0
    assert set(np.asarray(thin.ts)) <= set(np.asarray(full.ts))


def test_every_second_step_is_every_second_step():
    # With fewer steps than rows, the default keeps every step.
    every = fs.gradient_flow(product, jnp.full(2, 1e-3), t1=20.0)
    second = fs.gradient_flow(product, jnp.full(2, 1e-3), t1=20.0, save=2)
    expected = np.asarray(every.ts)[::2]
    assert int(every.stats["num_accepted_steps"]) == len(every.ts) - 1
    np.testing.assert_array_equal(np.asarray(second.ts)[: len(expected)], expected)
    assert len(second.ts) <= len(expected) + 1


@pytest.mark.slow
def test_saving_beyond_the_first_buffer_keeps_every_step():
    run = fs.gradient_flow(
        product, jnp.full(2, 1e-3), t1=20.0, save=1, solver=diffrax.Tsit5(), rtol=1e-14
    )
    assert len(run.ts) == int(run.stats["num_accepted_steps"]) + 1 > 1100
    assert np.all(np.diff(run.ts) > 0)


def test_observables_alone_are_kept_without_the_parameters():
    run = fs.gradient_flow(
        product,
        jnp.full(2, 1e-3),
        t1=20.0,
        save=fs.Save(models=False),
        observe=lambda y: {"product": y[0] * y[1]},
    )
    assert run.models.shape == (2, 2)
    assert run.observables["product"].shape == run.ts.shape
    losses = 0.5 * (1.0 - run.observables["product"]) ** 2
    np.testing.assert_allclose(run.losses, losses, rtol=1e-9, atol=1e-15)


def test_losses_and_norms_belong_to_the_saved_models():
    run = fs.gradient_flow(product, jnp.full(2, 1e-3), t1=20.0)
    losses = jax.vmap(product)(run.models)
    norms = jnp.linalg.norm(jax.vmap(jax.grad(product))(run.models), axis=1)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(run.grad_norms, norms, rtol=1e-9, atol=1e-15)


def test_a_gradient_tolerance_stops_and_is_off_by_default():
    # The case on which a norm-scaled steady-state test stops at once.
    objective, start = quadratic(0.0, 1.0, 1.0), jnp.array([1e5, 5.0, 0.0])
    free = fs.gradient_flow(objective, start, t1=8.0, rtol=1e-3)
    assert free.outcome == fs.Outcome.reached_t1
    np.testing.assert_allclose(free.final[1], 5.0 * np.exp(-8.0), atol=1e-3)
    stopped = fs.gradient_flow(objective, start, t1=80.0, rtol=1e-6, stop=1e-3)
    assert stopped.outcome == fs.Outcome.stationary
    assert float(stopped.grad_norms[-1]) < 1e-3 < float(stopped.grad_norms[-2])


def test_a_boolean_stop_ends_after_the_step_where_it_turns_true():
    run = fs.gradient_flow(
        product, jnp.full(2, 1e-3), t1=30.0, stop=lambda t, y: y[0] > 0.5
    )
    assert run.outcome == fs.Outcome.stopped
    assert run.models[-2, 0] <= 0.5 < run.models[-1, 0]


def test_too_few_steps_are_an_outcome_with_the_partial_path():
    run = fs.gradient_flow(product, jnp.full(2, 1e-3), t1=200.0, max_steps=20)
    assert run.outcome == fs.Outcome.max_steps_reached
    assert not bool(run.succeeded)
    assert 2 < len(run.ts) <= 22 and 0 < float(run.ts[-1]) < 200.0
    again = fs.gradient_flow(
        product, jnp.full(2, 1e-3), t1=200.0, max_steps=20, save=np.array([1.0, 150.0])
    )
    assert again.outcome == fs.Outcome.max_steps_reached
    np.testing.assert_allclose(again.final, run.final, rtol=1e-12)
    assert np.all(np.isfinite(again.models)) and np.all(np.diff(again.ts) > 0)


def test_a_gradient_that_stops_being_finite_is_an_outcome_with_the_path_up_to_there():
    def objective(y):
        return jnp.sqrt(1.0 - y[0]) + 0.0 * y[0]

    run = fs.gradient_flow(objective, jnp.array([0.5]), t1=30.0)
    # y' = 1/(2 sqrt(1 - y)): (1 - y)^(3/2) reaches zero at t = (4/3) 0.5^(3/2).
    assert not bool(run.succeeded)
    assert abs(float(run.ts[-1]) - 4 / 3 * 0.5**1.5) < 1e-4
    assert np.all(np.isfinite(run.models))


def test_a_start_without_a_finite_loss_is_an_outcome():
    for save in (None, np.linspace(0.1, 0.9, 5)):
        run = fs.gradient_flow(product, jnp.array([jnp.nan, 1.0]), t1=1.0, save=save)
        assert run.outcome == fs.Outcome.not_finite


def test_a_rising_loss_is_never_a_silent_success():
    @jax.custom_jvp
    def wrong(y):
        return 0.5 * jnp.sum(y**2)

    @wrong.defjvp
    def _(primals, tangents):  # The gradient's sign is wrong: the flow ascends.
        return wrong(primals[0]), -jnp.sum(primals[0] * tangents[0])

    run = fs.gradient_flow(wrong, jnp.ones(2), t1=2.0)
    assert run.outcome == fs.Outcome.loss_increased
    assert float(run.loss_rise) > 0 and len(run.ts) > 2


def test_a_converged_run_does_not_count_round_off_as_a_rise():
    def objective(y):
        # One, up to a round-off that differs from point to point.
        one = jnp.sin(1e3 * y) ** 2 + jnp.cos(1e3 * y) ** 2
        return 0.5 * y @ y + jax.lax.stop_gradient(1e3 * jnp.sum(one))

    run = fs.gradient_flow(objective, jnp.ones(3), t1=1e3, rtol=1e-10)
    assert np.max(np.diff(run.losses)) > 0
    assert run.outcome == fs.Outcome.reached_t1


def test_a_start_at_a_critical_point_stays_there():
    run = fs.gradient_flow(product, jnp.zeros(2), t1=10.0)
    assert run.outcome == fs.Outcome.reached_t1
    assert float(jnp.max(jnp.abs(run.models))) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("save", [None, 2, np.linspace(1.0, 9.0, 5)])
def test_jit_gives_the_same_rows_and_pads_with_the_last_state(save):
    plain = fs.gradient_flow(product, jnp.full(2, 1e-2), t1=10.0, save=save)
    jitted = jax.jit(
        lambda y: fs.gradient_flow(product, y, t1=10.0, save=save, max_steps=512)
    )(jnp.full(2, 1e-2))
    count = int(jitted.num_saved)
    assert count == len(plain.ts)
    np.testing.assert_allclose(jitted.ts[:count], plain.ts, rtol=1e-13)
    np.testing.assert_allclose(jitted.models[:count], plain.models, rtol=1e-10)
    assert np.all(np.asarray(jitted.models[count:]) == np.asarray(plain.final))
    assert np.all(np.isfinite(jitted.losses))


@pytest.mark.slow
def test_lanes_of_a_vmap_are_the_single_runs_and_fail_alone():
    starts = jnp.array([[1e-3, 1e-3], [1e-2, 0.2], [jnp.nan, 1.0]])
    runs = jax.vmap(lambda y: fs.gradient_flow(product, y, t1=15.0))(starts)
    for lane in (0, 1):
        single = fs.gradient_flow(product, starts[lane], t1=15.0)
        np.testing.assert_allclose(runs.models[lane, -1], single.final, rtol=1e-8)
    reached = np.asarray(runs.outcome == fs.Outcome.reached_t1)
    assert reached.tolist() == [True, True, False]


def test_a_second_call_does_not_compile_again():
    fs.gradient_flow(product, jnp.full(2, 1e-3), t1=5.0)
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    fs.gradient_flow(product, jnp.full(2, 2e-3), t1=7.0, rtol=1e-5)
    assert not [name for name in compiled if "backend_compile" in name]
    jax.jit(lambda x: x + 1.0)(1.0)
    assert [name for name in compiled if "backend_compile" in name]  # It does listen.


@pytest.mark.slow
def test_forward_and_reverse_derivatives_agree_with_finite_differences():
    def final_loss(target, save):
        # The target is data of the objective: both of its values share one program.
        objective = jax.tree_util.Partial(towards, target)
        start, solver = jnp.full(2, 1e-2), diffrax.Tsit5()
        run = fs.gradient_flow(
            objective, start, t1=5.0, rtol=1e-9, save=save, solver=solver
        )
        return run.losses[-1]

    h = 1e-4
    up, down = (final_loss(jnp.asarray(1.0 + sign * h), None) for sign in (1, -1))
    central = (up - down) / (2 * h)
    forward = jax.jvp(lambda s: final_loss(s, None), (1.0,), (1.0,))[1]
    reverse = jax.grad(lambda s: final_loss(s, jnp.array([2.0])))(1.0)
    np.testing.assert_allclose(forward, central, rtol=1e-5)
    np.testing.assert_allclose(reverse, central, rtol=1e-5)


CYCLE = fs.PopulationLoss(fs.lazy_chain([0.6, 0.3, 0.1], 0.5))


@pytest.fixture(scope="module")
def cycles():
    """A small chain from saddle to saddle, at several tolerances; compiled once."""
    start = fs.AttentionModel.init(jax.random.key(0), vocab=3, width=4, scale=1e-3)
    return {
        rtol: fs.gradient_flow(CYCLE, start, t1=3000.0, rtol=rtol)
        for rtol in (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-11)
    }


@pytest.mark.slow
def test_the_default_tolerances_converge_through_the_saddles_of_a_cycle(cycles):
    """The error is a multiple of the tolerance, above one: saddles amplify."""
    rtols, errors = [1e-4, 1e-5, 1e-6, 1e-7, 1e-8], []
    reference, _ = ravel_pytree(cycles[1e-11].final)
    # Two saddles on the way: the origin (log 3) and the best constant prediction.
    losses = cycles[1e-11].losses
    entropy = float(CYCLE.chain.unigram_entropy)
    for level in (np.log(3.0), entropy):
        assert np.sum(np.abs(losses - level) < 1e-3) > 10
    assert float(losses[-1]) < entropy - 0.05
    for rtol in rtols:
        end, _ = ravel_pytree(cycles[rtol].final)
        errors.append(float(jnp.linalg.norm(end - reference)))
    errors = np.array(errors) / float(jnp.linalg.norm(reference))
    assert np.all(errors < 100 * np.array(rtols)), errors
    assert errors[-1] < 1e-3 * errors[0], errors


@pytest.mark.slow
def test_the_loss_falls_and_conserved_quantities_stay_as_tolerances_promise(cycles):
    drifts = []
    for rtol in (1e-4, 1e-6, 1e-8):
        run = cycles[rtol]
        assert np.all(np.diff(run.losses) <= rtol * np.asarray(run.losses[1:]))
        assert float(run.loss_rise) <= 0 and bool(run.succeeded)
        first, last = (fs.theory.conserved(run.model_at(row)) for row in (0, -1))
        gap = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), first, last)
        drifts.append(max(float(leaf) for leaf in jax.tree.leaves(gap)))
    assert drifts[0] < 1e-2 and drifts[2] < 1e-6, drifts
    assert drifts[2] < 0.1 * drifts[1] < 0.01 * drifts[0], drifts


def test_single_precision_stays_single():
    start = jnp.full(2, 1e-2, jnp.float32)
    run = fs.gradient_flow(product, start, t1=10.0)
    assert run.models.dtype == jnp.float32 and bool(run.succeeded)
    assert float(run.losses[-1]) < 1e-4


def test_the_default_absolute_tolerance_follows_the_start():
    small = default_atol(jnp.full(3, 1e-9), jnp.asarray(1e-6))
    large = default_atol(jnp.full(3, 1e4), jnp.asarray(1e-6))
    np.testing.assert_allclose([small, large], [1e-16, 1e-7])


def test_thinning_keeps_order_ends_and_capacity():
    buffer = Thinning.empty(jnp.zeros(()), jnp.zeros(()), 1).enlarged(8)
    kept = np.zeros(1)
    for block in range(5):
        ts = 1.0 + 10 * block + jnp.arange(10.0)
        buffer = buffer.extend(ts, ts, jnp.ones(10), jnp.ones(10, bool))
        count = int(buffer.count)
        kept = np.asarray(buffer.ts[:count])
        assert 4 <= count <= 8 and kept[0] == 0.0 and np.all(np.diff(kept) > 0)
        np.testing.assert_array_equal(np.asarray(buffer.rows[:count]), kept)
    assert kept[-1] > 40
