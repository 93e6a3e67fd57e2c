"""Many flows at once: each as it would be alone, failures apart, nobody waits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim.sweep import sweep

TIMES = np.array([2.0, 7.5, 30.0])


STARTS = jnp.array(
    [
        [1e-3, 1e-3],
        [1e-6, 2e-6],
        [jnp.nan, 1.0],  # Not a number from the start.
        [1.0, 0.2],
        [2.9, 0.1],  # Runs into the end.
        [1e-2, 0.3],
        [0.9, 1.0],
    ]
)
HEALTHY, BROKEN, RUNAWAY = [0, 1, 3, 5, 6], 2, 4


def smooth(y):
    """The same saddle without an end, and with a stiff direction."""
    valley = 0.5 * 300.0 * (y[0] - y[1]) ** 2
    return 0.5 * (1.0 - y[0] * y[1]) ** 2 + valley


def singular(y):
    """Smooth, and an end at y0 = 3 for flows that start close to it."""
    near = y[0] > 2.0
    distance = jnp.where(near, 3.0 - y[0], 1.0)
    return jnp.where(near, jnp.sqrt(distance), smooth(y))


def ended(runs, lane, outcome):
    return bool((runs.outcome == outcome)[lane])


@pytest.fixture(scope="module")
def runs():
    """Seven flows in two slots, so that most of them have to wait for one."""
    return sweep(singular, STARTS, t1=40.0, rtol=1e-8, ts=TIMES, num_slots=2)


@pytest.fixture(scope="module")
def singles():
    return [
        fs.gradient_flow(singular, start, t1=40.0, rtol=1e-8, save=TIMES)
        for start in STARTS
    ]


def test_every_flow_is_the_one_it_would_be_alone(runs, singles):
    assert runs.models.shape == (7, 5, 2)
    for lane in HEALTHY:
        np.testing.assert_array_equal(runs.ts[lane], [0.0, *TIMES, 40.0])
        np.testing.assert_allclose(runs.models[lane], singles[lane].models, atol=2e-6)
        np.testing.assert_allclose(runs.losses[lane], singles[lane].losses, atol=1e-6)
        assert ended(runs, lane, fs.Outcome.reached_t1)
    np.testing.assert_array_equal(runs.models[HEALTHY, 0], STARTS[jnp.array(HEALTHY)])


def test_every_flow_takes_the_steps_it_would_take_alone(runs, singles):
    steps = [int(singles[lane].stats["num_steps"]) for lane in HEALTHY]
    together = [int(runs.stats["num_steps"][lane]) for lane in HEALTHY]
    assert len(set(together)) == len(HEALTHY)  # Each its own.
    np.testing.assert_allclose(together, steps, rtol=0.05)
    for name in ("num_products", "num_evaluations"):
        alone = [int(singles[lane].stats[name]) for lane in HEALTHY]
        np.testing.assert_allclose(
            runs.stats[name][jnp.array(HEALTHY)], alone, rtol=0.1
        )


def test_flows_that_fail_keep_their_path_and_spoil_no_other(runs, singles):
    assert ended(runs, BROKEN, fs.Outcome.not_finite)
    assert ended(runs, RUNAWAY, fs.Outcome.step_too_small)
    assert bool(runs.succeeded[0]) and not bool(runs.succeeded[RUNAWAY])
    # y' = 1/(2 sqrt(3 - y)): (3 - y)^(3/2) reaches zero at t = (4/3) 0.1^(3/2).
    end = 4 / 3 * 0.1**1.5
    np.testing.assert_allclose(runs.ts[RUNAWAY, -1], end, atol=1e-4)
    assert int(runs.num_saved[RUNAWAY]) == 2
    assert jnp.all(jnp.isfinite(runs.models[RUNAWAY]))
    assert jnp.all(runs.models[RUNAWAY, 1:] == runs.models[RUNAWAY, -1])


def test_too_few_steps_are_an_outcome_of_each_flow(runs):
    few = sweep(
        singular, STARTS, t1=40.0, rtol=1e-8, ts=TIMES, num_slots=2, max_steps=60
    )
    for lane in HEALTHY:
        assert ended(few, lane, fs.Outcome.max_steps_reached)
        assert int(few.stats["num_steps"][lane]) == 60
        count = int(few.num_saved[lane])
        assert 0 < few.ts[lane, count - 1] < 40.0
        shared = few.models[lane, : count - 1]
        np.testing.assert_array_equal(shared, runs.models[lane, : count - 1])


def test_a_second_call_does_not_compile_again(runs):
    compiled, starts = [], 0.5 * STARTS

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    sweep(singular, starts, t1=35.0, rtol=1e-7, ts=TIMES / 2, num_slots=2)
    assert not [name for name in compiled if "backend_compile" in name]
    jax.jit(lambda x: x + 1.5)(1.0)
    assert [name for name in compiled if "backend_compile" in name]  # It does listen.


def test_each_flow_may_have_its_own_objective():
    rates = jnp.array([[0.5, 1.0], [2.0, 100.0], [5.0, 0.1], [1e3, 1.0]])
    objectives = jax.tree_util.Partial(
        lambda r, y: 0.5 * jnp.sum(r * y["a"] ** 2), rates
    )
    starts = {"a": jnp.array([[1.0, 2.0], [3.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])}
    runs = sweep(
        objectives, starts, t1=2.0, rtol=1e-9, stacked_objective=True, num_slots=3
    )
    exact = starts["a"] * jnp.exp(-2.0 * rates)
    np.testing.assert_allclose(runs.models["a"][:, -1], exact, atol=1e-7)
    losses = 0.5 * jnp.sum(rates * starts["a"] ** 2, axis=1)
    np.testing.assert_allclose(runs.losses[:, 0], losses, rtol=1e-12)
    assert bool(jnp.all(runs.succeeded)) and bool(jnp.all(runs.loss_rise <= 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"t1": -1.0}, "after t0"),
        ({"t1": 1.0, "rtol": 2.0}, "rtol must lie"),
        ({"t1": 1.0, "ts": [0.5, 0.2]}, "increasing"),
        ({"t1": 1.0, "ts": [0.5, 2.0]}, "strictly between"),
        ({"t1": 1.0, "num_slots": 0}, "at least 1"),
        ({"t1": 1.0, "max_steps": 0}, "at least 1"),
    ],
)
def test_wrong_arguments_get_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        sweep(smooth, jnp.ones((3, 2)), **arguments)
    assert "\n" not in str(caught.value)


def test_starts_must_share_their_leading_axis():
    with pytest.raises(ValueError, match="same length"):
        sweep(smooth, {"a": jnp.ones((3, 2)), "b": jnp.ones((2, 2))}, t1=1.0)
    with pytest.raises(ValueError, match="same length"):
        sweep(smooth, jnp.ones(()), t1=1.0)
