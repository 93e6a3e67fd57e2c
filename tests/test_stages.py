"""Stages: boundaries, names and rates on toys and on the attention model."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim.stages import fit_escape
from flowsim.visits import Ending, ending

from .problems import default_cycle, two_mode_run, two_modes


@pytest.fixture(scope="module")
def toy():
    run = two_mode_run(1e-4)
    return run, fs.find_stages(run, two_modes)


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
        assert left.escape.e_folds >= 1
        assert abs(left.escape.rate - rate) < left.escape.error < 0.01 * rate
        assert left.escape.resolved


def test_the_saddles_left_have_the_right_loss_and_index(toy):
    _, stages = toy
    assert [visit.index for visit in stages.visited] == [2, 1, 0]
    np.testing.assert_allclose(
        [visit.loss for visit in stages.visited], [0.505, 0.005, 0.0], atol=1e-9
    )


def test_the_table_has_a_row_for_every_stage(toy):
    _, stages = toy
    lines = str(stages).splitlines()
    assert len(lines) == len(stages) + 2
    assert lines[-1] == "the run has converged to a minimum"
    assert [row["stage"] for row in stages.rows()] == [s.name for s in stages]


def test_without_visited_points_the_run_is_one_descent(toy):
    run, _ = toy
    stages = fs.find_stages(run, two_modes, visited=())
    assert [stage.name for stage in stages] == ["descent"]
    assert stages[0].leaves is None and not stages.visited
    assert stages.ending is None


def shortened(run, end):
    """The run up to a time, as if it had been stopped there."""
    last = int(run.nearest(end)) + 1
    names = ("ts", "models", "losses", "grad_norms")
    cut = {
        name: jax.tree.map(lambda leaf: leaf[:last], getattr(run, name))
        for name in names
    }
    return dataclasses.replace(run, **cut)


def test_a_run_stopped_on_a_plateau_has_not_converged(toy):
    run, _ = toy
    stages = fs.find_stages(shortened(run, 60.0), two_modes)
    assert [stage.name for stage in stages] == ["plateau 1", "burst 1", "plateau 2"]
    assert stages.ending == Ending.elsewhere
    assert [visit.index for visit in stages.visited] == [2, 1]


def test_a_run_stopped_on_its_way_to_a_minimum_has_not_converged(toy):
    run = shortened(toy[0], 85.0)
    visits = fs.find_saddles(run, two_modes)
    assert visits[-1].index == 0 and visits[-1].relative_distance > 0.02
    assert ending(run, visits) == Ending.elsewhere
    assert ending(run, visits, arrived=0.15) == Ending.minimum


def test_growth_far_from_the_saddle_is_unresolved(toy):
    run, stages = toy
    saddle = stages.visited[0]
    late = jax.tree.map(lambda leaf: leaf[run.nearest(8.0) :], run.models)
    fit = fit_escape(
        dataclasses.replace(run, ts=run.ts[run.nearest(8.0) :], models=late),
        two_modes,
        {"u": jnp.zeros(2), "v": jnp.zeros(2)},
        {name: jnp.array([[0.5**0.5, 0.0]]) for name in "uv"},
        1.0,
        after=-math.inf,
        until=12.0,
        reach=1.0,
    )
    assert saddle.escape is not None and saddle.escape.resolved
    assert fit is not None and not fit.resolved
    assert fit.nonlinearity == pytest.approx(fit.error)


def test_a_run_without_models_is_refused_in_one_line():
    run = shortened(two_mode_run(1e-4), 1.0)
    bare = dataclasses.replace(run, models=jax.tree.map(lambda x: x[:2], run.models))
    for visited in (None, ()):
        with pytest.raises(ValueError, match="models"):
            fs.find_stages(bare, two_modes, visited=visited)


@pytest.mark.slow
def test_the_default_cycle_has_the_stages_of_the_paper_twice():
    loss, run = default_cycle(1e-3)
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
    np.testing.assert_allclose(first.escape.rate, mu, rtol=1e-4)
    for visit in stages.visited:
        if visit.escape is not None:
            off = abs(visit.escape.rate - visit.eigenvalue)
            assert off < visit.escape.error
    # The last saddle is passed too far away to see growth at its own rate.
    resolved = [v.escape.resolved for v in stages.visited if v.escape is not None]
    assert resolved == [True, True, True, False, False]
    assert "unresolved" in str(stages)


@pytest.mark.slow
def test_stages_on_the_wikitext_chain_have_saddles_within_the_bound_on_products():
    loss = fs.PopulationLoss(fs.load_chain("wikitext2", vocab=64))
    model = fs.AttentionModel.init(jax.random.key(0), vocab=64, width=16, scale=1e-2)
    run = fs.gradient_flow(loss, model, t1=300.0)
    visits = fs.find_saddles(run, loss, max_products=2000)
    assert all(visit.num_products <= 2000 + 601 for visit in visits)
    origin, second = visits[:2]
    assert (origin.index, origin.index_exact) == (16, True)
    np.testing.assert_allclose(origin.loss, np.log(64), rtol=1e-12)
    # Polished to theta_c^1, whether the run comes near enough to count as a visit.
    assert float(second.point.grad_norm) <= 1e-12
    entropy = float(loss.chain.unigram_entropy)
    np.testing.assert_allclose(second.loss, entropy, rtol=1e-10)
    stages = fs.find_stages(run, loss, visited=visits)
    condensation = stages.named("condensation")
    assert condensation is not None and condensation.leaves is not None
    escape = condensation.leaves.escape
    assert escape is not None and escape.resolved
    mu = float(fs.theory.origin_rate(loss.chain))
    assert abs(escape.rate - mu) < escape.error
    assert stages.ending == Ending.elsewhere
