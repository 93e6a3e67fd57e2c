"""Stages: boundaries, names and rates on toys and on the attention model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs

SIGMA = jnp.array([1.0, 0.1])


def two_products(y):
    """L = sum_i (sigma_i - u_i v_i)^2 / 2: two saddles in turn, then a minimum."""
    return 0.5 * jnp.sum((SIGMA - y[0] * y[1]) ** 2)


@pytest.fixture(scope="module")
def toy():
    run = fs.gradient_flow(two_products, jnp.full((2, 2), 1e-4), t1=250.0)
    return run, fs.find_stages(run, two_products)


def test_without_attention_plateaus_and_bursts_alternate(toy):
    _, stages = toy
    names = [stage.name for stage in stages]
    assert names == ["plateau 1", "burst 1", "plateau 2", "burst 2", "settling"]


def test_stages_follow_each_other_without_gaps(toy):
    run, stages = toy
    assert stages[0].start == float(run.ts[0])
    assert stages[len(stages) - 1].end == float(run.ts[-1])
    for before, after in itertools.pairwise(stages):
        assert before.end == after.start
        assert before.losses[1] == after.losses[0]


def test_the_fitted_escape_rate_is_the_leading_eigenvalue_within_its_error(toy):
    _, stages = toy
    for name, rate in (("burst 1", 1.0), ("burst 2", 0.1)):
        left = stages.named(name).leaves
        assert left is not None and left.escape is not None
        np.testing.assert_allclose(left.eigenvalue, rate, atol=1e-9)
        error = max(5 * left.escape.error, 2e-2 * rate)
        assert abs(left.escape.rate - rate) < error


def test_the_saddles_left_have_the_right_loss_and_index(toy):
    _, stages = toy
    assert [visit.index for visit in stages.visited] == [2, 1, 0]
    np.testing.assert_allclose(
        [visit.loss for visit in stages.visited], [0.505, 0.005, 0.0], atol=1e-9
    )


def test_the_table_has_a_row_for_every_stage(toy):
    _, stages = toy
    assert len(str(stages).splitlines()) == len(stages) + 1
    assert [row["stage"] for row in stages.rows()] == [s.name for s in stages]


def test_without_visited_points_the_run_is_one_descent(toy):
    run, _ = toy
    stages = fs.find_stages(run, two_products, visited=())
    assert [stage.name for stage in stages] == ["descent"]
    assert stages[0].leaves is None and not stages.visited


def test_a_run_without_models_is_refused_in_one_line():
    run = fs.gradient_flow(
        two_products, jnp.full((2, 2), 0.1), t1=5.0, save=fs.Save(models=False)
    )
    with pytest.raises(ValueError, match="models"):
        fs.find_stages(run, two_products)


@pytest.mark.slow
def test_the_default_cycle_has_the_stages_of_the_paper_twice():
    loss = fs.PopulationLoss(fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5))
    model = fs.AttentionModel.init(jax.random.key(0), vocab=4, width=16, scale=1e-3)
    run = fs.gradient_flow(loss, model, t1=2e4)
    stages = fs.find_stages(run, loss)
    assert [stage.name for stage in stages] == [
        "condensation",
        "focus",
        "dilution",
        "new direction",
        "second focus",
        "second dilution",
        "third direction",
        "settling",
    ]
    second = stages.named("second focus")
    assert second is not None and second.token == 1
    first = stages.named("condensation").leaves
    assert first is not None and first.escape is not None
    mu = float(fs.theory.origin_rate(loss.chain))
    np.testing.assert_allclose(first.escape.rate, mu, rtol=1e-2)
