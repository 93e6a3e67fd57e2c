"""Training: the updates are the optimiser's, the record is that of a flow."""

import functools
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flowsim as fs
from flowsim.batches import ChainBatches, TextBatches
from flowsim.derivatives import gradient
from flowsim.training import train

from .problems import named_chain, random_model, two_modes

KEY = jax.random.key(7)
START = {"u": jnp.array([0.3, 0.2]), "v": jnp.array([0.1, 0.4])}


def literal(objective, model, optimiser, num_steps):
    """The textbook loop, one step after the other."""
    state, path = optimiser.init(model), [model]
    differentiate = jax.jit(lambda model, n: gradient(objective(n), model))
    for n in range(num_steps):
        grads = differentiate(model, n)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimiser.update(grads, state, model)
        model = optax.apply_updates(model, updates)
        path.append(model)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *path)


def assert_same(one, other, **tolerances: Any):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for x, y in leaves:
        close: dict[str, Any] = {"rtol": 0, "atol": 0} | tolerances
        np.testing.assert_allclose(x, y, **close)


def small_text(num_tokens=2000):
    ids = np.random.default_rng(1).integers(0, 4, num_tokens).astype(np.int32)
    return TextBatches(ids, length=12, size=8, vocab=4)


@pytest.mark.parametrize("rule", [0.1, optax.sgd(0.1, momentum=0.5), optax.adam(0.05)])
def test_steps_are_those_of_the_optimiser(rule):
    run = train(two_modes, START, rule, 20, every=1)
    known = optax.sgd(rule) if isinstance(rule, float) else rule
    path = literal(lambda n: two_modes, START, known, 20)
    assert_same(run.models, path, rtol=1e-13)
    assert bool(run.outcome == fs.Outcome.reached_t1)
    assert int(run.stats["num_steps"]) == 20
    np.testing.assert_allclose(run.losses, jax.vmap(two_modes)(path), rtol=1e-12)


def test_time_is_flow_time_for_plain_gradient_descent_and_steps_otherwise():
    plain = train(two_modes, START, 0.1, 20, every=5)
    np.testing.assert_allclose(plain.ts, [0.0, 0.5, 1.0, 1.5, 2.0], rtol=1e-14)
    assert plain.time_unit == "flow time"
    other = train(two_modes, START, optax.adam(0.1), 20, every=5)
    np.testing.assert_array_equal(other.ts, [0, 5, 10, 15, 20])
    assert other.time_unit == "steps"


def test_gradient_descent_meets_the_flow_to_first_order_in_the_learning_rate():
    exact = fs.gradient_flow(two_modes, START, t1=2.0, rtol=1e-11, atol=1e-12).final
    errors = []
    for steps in (50, 100, 200):
        final = train(two_modes, START, 2.0 / steps, steps).final
        leaves = zip(jax.tree.leaves(final), jax.tree.leaves(exact), strict=True)
        errors.append(max(float(jnp.abs(x - y).max()) for x, y in leaves))
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, 1.0, atol=0.05)


@pytest.mark.slow
def test_every_step_draws_its_own_batch_by_its_number():
    model, batches = random_model(named_chain("default")), small_text()
    objective = fs.PopulationLoss(named_chain("default"))
    run = train(batches, model, 0.3, 6, key=KEY, evaluate=objective, every=2)
    path = literal(
        lambda n: batches.draw(jax.random.fold_in(KEY, n)), model, optax.sgd(0.3), 6
    )
    rows = jax.tree.map(lambda leaf: leaf[::2], path)
    assert_same(run.models, rows, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(run.losses, jax.vmap(objective)(rows), rtol=1e-12)


@pytest.mark.parametrize(("steps", "every"), [(7, 3), (1000, 300), (300, 300), (5, 9)])
def test_rows_are_kept_at_multiples_and_at_both_ends(steps, every):
    run = train(two_modes, START, 1.0, steps, every=every)
    expected = sorted({*range(0, steps + 1, every), steps})
    np.testing.assert_array_equal(run.ts, np.array(expected, float))
    assert int(run.num_saved) == len(expected)


def test_by_default_at_most_2000_rows_and_the_first_are_kept():
    run = train(two_modes, START, 1e-3, 4001)
    assert run.ts.shape[0] == 1335 and float(run.ts[1]) == pytest.approx(3e-3)


def test_observables_are_those_of_the_saved_rows():
    run = train(
        two_modes, START, 0.1, 10, every=2, observe=lambda m: {"uv": m["u"] * m["v"]}
    )
    assert_same(run.observables["uv"], run.models["u"] * run.models["v"], rtol=1e-14)


def test_single_precision_stays_single():
    start = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), START)
    # An objective that follows its argument's precision.
    run = train(lambda m: jnp.sum((m["u"] * m["v"] - 1) ** 2), start, 0.1, 10)
    kinds = {leaf.dtype for leaf in jax.tree.leaves((run.ts, run.models, run.losses))}
    assert kinds == {jnp.dtype(jnp.float32)}
    assert run.settings["precision"] == "float32"


def test_nothing_recompiles_for_another_length_or_learning_rate():
    traces = []

    def objective(y):
        traces.append(1)
        return 0.5 * jnp.sum(y**2)

    train(objective, jnp.ones(3), 0.1, 1000, every=10)
    first = len(traces)
    train(objective, jnp.ones(3), 0.2, 1037, every=10)
    # One more look at the shape of its value, without compiling.
    assert len(traces) <= first + 2


def test_an_observer_with_other_numbers_does_not_recompile():
    traces = []

    def observe(scale, y):
        traces.append(1)
        return scale * y

    def traced(scale):
        partial = functools.partial(observe, jnp.asarray(scale))
        run = train(two_modes_of_vector, jnp.ones(2), 0.1, 4, observe=partial)
        assert_same(run.observables, scale * run.models)
        return len(traces)

    assert traced(1.0) == traced(2.0) > 0


def two_modes_of_vector(y):
    return two_modes({"u": y, "v": y})


def test_a_run_that_blows_up_is_an_outcome_with_the_finite_part_of_the_path():
    run = train(lambda y: jnp.sum(y**4), jnp.array([2.0]), 0.2, 100, every=1)
    assert bool(run.outcome == fs.Outcome.not_finite) and not bool(run.succeeded)
    leaves = jax.tree.leaves((run.ts, run.models, run.losses, run.grad_norms))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert 1 < run.ts.shape[0] < 20


def test_after_a_step_that_is_not_finite_the_state_before_it_is_the_last_row():
    rule = optax.sgd(lambda n: jnp.where(jnp.asarray(n) < 3, 0.1, jnp.inf))
    run = train(lambda y: 0.5 * jnp.sum(y**2), jnp.array([2.0]), rule, 10, every=5)
    assert bool(run.outcome == fs.Outcome.not_finite)
    np.testing.assert_array_equal(run.ts, [0.0, 3.0])
    np.testing.assert_allclose(run.models[:, 0], [2.0, 2.0 * 0.9**3], rtol=1e-15)


def test_a_loss_that_is_not_finite_ends_the_run_though_parameters_are():
    def loss(y):
        return jnp.where(y[0] < 1.0, jnp.inf, y[0])

    for num_steps in (10, 4):  # Also if that step is the last one.
        run = train(loss, jnp.array([2.0]), 0.3, num_steps, every=1)
        assert bool(run.outcome == fs.Outcome.not_finite)
        np.testing.assert_allclose(run.losses, [2.0, 1.7, 1.4, 1.1], rtol=1e-15)


def test_a_start_that_is_not_finite_takes_no_step():
    run = train(lambda y: jnp.log(y[0]), jnp.array([-1.0]), 0.1, 10)
    assert bool(run.outcome == fs.Outcome.not_finite) and run.ts.shape == (1,)


@pytest.mark.parametrize(("every", "rows"), [(1, 513), (1000, 2), (300, 2)])
def test_an_interruption_keeps_the_path(monkeypatch, every, rows):
    module = sys.modules["flowsim.training.train"]
    block, calls = module.block_jit, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return block(*args)

    monkeypatch.setattr(module, "block_jit", interrupt)
    run = train(two_modes, START, 0.01, 5000, every=every)
    assert bool(run.outcome == fs.Outcome.interrupted)
    whole = train(two_modes, START, 0.01, int(run.stats["num_steps"]), every=every)
    assert_same(run.final, whole.final)
    assert run.ts.shape[0] == rows
    assert float(run.ts[-1]) == pytest.approx(0.01 * int(run.stats["num_steps"]))


@pytest.mark.parametrize("rule", [0.3, optax.adam(0.02)])
@pytest.mark.parametrize("first", [10, 600])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, rule, first):
    model, batches = random_model(named_chain("default")), small_text()
    options = {
        "key": KEY,
        "evaluate": fs.PopulationLoss(named_chain("default")),
        "every": 7,
        "observe": lambda m: m.W0[0],
    }
    whole = train(batches, model, rule, 700, **options)
    file = tmp_path / "run.npz"
    train(batches, model, rule, first, checkpoint=file, **options)
    resumed = train(batches, model, rule, 700, checkpoint=file, **options)
    for name in ("ts", "models", "losses", "grad_norms", "observables"):
        assert_same(getattr(resumed, name), getattr(whole, name))
    again = train(batches, model, rule, 700, checkpoint=file, **options)
    assert_same(again.models, whole.models)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run.npz"
    train(two_modes, START, 0.1, 20, every=2, checkpoint=file)

    def resume(model=START, rate=0.1, steps=30, every=2, **options):
        train(two_modes, model, rate, steps, every=every, checkpoint=file, **options)

    resume()
    change: dict[str, Any]
    for change, message in (
        ({"rate": 0.2}, "another run"),
        ({"every": 3}, "another run"),
        ({"rate": optax.adam(0.1)}, "does not fit this run: it lacks state.state"),
        ({"steps": 10}, "at step 30, beyond num_steps = 10"),
        ({"model": {"u": START["u"], "v": 2 * START["v"]}}, "another start"),
        ({"model": {"u": jnp.ones(1), "v": jnp.ones(1)}}, "does not fit this run"),
        ({"observe": lambda m: m["u"]}, "does not fit this run: it lacks"),
    ):
        with pytest.raises(ValueError, match=message):
            resume(**change)
    file.write_text("not a checkpoint")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        resume()


def test_a_checkpoint_of_other_batches_is_refused(tmp_path):
    file, chain = tmp_path / "run.npz", named_chain("default")
    loss, model = fs.PopulationLoss(chain), random_model(chain)
    batches = ChainBatches(chain, length=4, size=2)
    for key, steps in ((KEY, 2), (KEY, 3)):
        train(batches, model, 0.1, steps, key=key, evaluate=loss, checkpoint=file)
    with pytest.raises(ValueError, match="another run"):
        other = jax.random.key(8)
        train(batches, model, 0.1, 4, key=other, evaluate=loss, checkpoint=file)


def test_training_works_under_jit_and_vmap_and_pads_with_the_last_row():
    def run(rate):
        return train(lambda y: jnp.sum(y**4), jnp.array([2.0]), rate, 10, every=4)

    batch = eqx.filter_jit(eqx.filter_vmap(run))(jnp.array([1e-3, 0.2]))
    assert batch.ts.shape == (2, 4)
    np.testing.assert_array_equal(batch.num_saved[0], 4)
    good, bad = run(1e-3), run(0.2)
    np.testing.assert_allclose(batch.models[0], good.models, rtol=1e-12)
    np.testing.assert_array_equal(batch.outcome == fs.Outcome.not_finite, [False, True])
    kept = int(batch.num_saved[1])
    assert kept == bad.ts.shape[0] or kept == bad.ts.shape[0] - 1
    assert np.isfinite(batch.models[1]).all()
    np.testing.assert_array_equal(batch.models[1, kept - 1], batch.models[1, -1])


def test_a_run_can_be_saved_and_loaded(tmp_path):
    run = train(two_modes, START, 0.1, 10)
    fs.save_trajectory(run, tmp_path / "run.npz")
    loaded = fs.load_trajectory(tmp_path / "run.npz", like=START)
    assert_same(loaded.models, run.models)
    assert loaded.time_unit == "flow time"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": 3}, "objective must be a function"),
        ({"objective": lambda m: m["u"]}, "must return a real scalar"),
        ({"model": {"u": jnp.ones(2, int)}}, "floating-point"),
        ({"optimiser": -0.1}, "positive and finite; got -0.1"),
        ({"optimiser": float("nan")}, "positive and finite"),
        ({"optimiser": float("inf")}, "positive and finite"),
        ({"optimiser": "adam"}, "optimiser must be a learning rate or an optax"),
        ({"num_steps": 0}, "num_steps must be at least 1; got 0"),
        ({"num_steps": 1.5}, "num_steps must be an integer"),
        ({"every": 0}, "every must be at least 1; got 0"),
        ({"objective": small_text()}, "evaluate must be given with batches"),
        ({"objective": small_text(), "evaluate": two_modes}, "key must be given"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {
        "objective": two_modes,
        "model": START,
        "optimiser": 0.1,
        "num_steps": 5,
    } | change
    with pytest.raises(ValueError, match=message):
        train(**arguments)


@pytest.mark.slow
def test_long_sequences_bring_training_to_the_population_flow():
    """The step on a large batch of long windows is nearly that of the population."""
    chain = named_chain("default")
    model, objective = random_model(chain), fs.PopulationLoss(chain)

    def error(length):
        batches = ChainBatches(chain, length=length, size=500)
        run = train(batches, model, 0.2, 20, key=KEY, evaluate=objective)
        exact = train(objective, model, 0.2, 20)
        leaves = zip(
            jax.tree.leaves(run.final), jax.tree.leaves(exact.final), strict=True
        )
        return max(float(jnp.abs(x - y).max()) for x, y in leaves)

    assert error(120) < error(8) / 3
