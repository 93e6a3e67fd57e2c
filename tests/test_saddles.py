"""The points a run visits: saddles, minima, slow passages, copies, endings."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from flowsim import _trees, theory
from flowsim.copies import are_close, invariants_of
from flowsim.flow import gradient_flow
from flowsim.loss import PopulationLoss
from flowsim.markov import lazy_chain
from flowsim.model import AttentionModel
from flowsim.saddles import find_saddles
from flowsim.visits import Ending, VisitKind, ending

from .problems import (
    default_cycle,
    hyperbolic,
    named_chain,
    random_model,
    two_mode_run,
    two_modes,
)


class Plane(eqx.Module):
    """`hyperbolic` and `ghost` in one type, so that their flow is compiled once."""

    share: jax.Array

    def __call__(self, y):
        return (1 - self.share) * hyperbolic(y) + self.share * ghost(y)


def ghost(y):
    """Without critical point at y0 = 0, but slow there, whatever the start."""
    slow = 0.01 * y[0] + y[0] ** 3 / 3
    return -slow + y[0] ** 4 / 8 + 0.5 * y[1] ** 2


SADDLE, GHOST = Plane(jnp.asarray(0.0)), Plane(jnp.asarray(1.0))


def time_of_half(run, products, target):
    """When u v = target / 2: log(uv / (target - uv)) grows linearly from u = v."""
    logit = np.log(products / np.maximum(target - products, 1e-300))
    return np.interp(0.0, logit, run.ts)


@pytest.mark.slow
def test_one_product_is_half_learnt_at_the_exact_time_between_saddle_and_minimum():
    run = gradient_flow(SADDLE, jnp.full(2, 1e-6), t1=60.0, rtol=1e-10)
    products = np.asarray(run.models[:, 0] * run.models[:, 1])
    half = time_of_half(run, products, 1.0)
    assert half == pytest.approx(13.8155105580, abs=1e-8)
    saddle, minimum = find_saddles(run, SADDLE)
    assert (saddle.index, minimum.index) == (1, 0)
    assert saddle.time < half < minimum.time


@pytest.mark.slow
def test_two_modes_visit_two_saddles_then_the_minimum():
    run = two_mode_run(1e-4)
    visits = find_saddles(run, two_modes)
    assert [visit.index for visit in visits] == [2, 1, 0]
    losses = [float(visit.loss) for visit in visits]
    np.testing.assert_allclose(losses, [0.505, 0.005, 0.0], atol=1e-14)
    assert [bool(v.kind == VisitKind.saddle) for v in visits] == [True, True, False]
    times = [visit.time for visit in visits]
    products = np.asarray(run.models["u"] * run.models["v"])
    halves = [time_of_half(run, products[:, i], s) for i, s in enumerate([1.0, 0.1])]
    np.testing.assert_allclose(halves, [9.2103, 80.590], atol=6e-4)
    assert times[0] < halves[0] < times[1] < halves[1] < times[2]
    assert ending(run, visits) == Ending.minimum
    assert visits[0].distance == pytest.approx(2e-4, rel=1e-3)
    # Closest approach: u_2 = v_2 = 1e-4 e^{t/10} against the decaying rest.
    assert 1e-4 < visits[1].distance < 1e-3
    assert all(float(visit.point.grad_norm) <= 1e-12 for visit in visits)


@pytest.mark.slow
def test_a_run_on_the_stable_manifold_ends_at_a_saddle():
    start = jnp.array([1.0, -1.0])
    run = gradient_flow(SADDLE, start, t1=20.0)
    (visit,) = find_saddles(run, SADDLE)
    assert bool(visit.kind == VisitKind.saddle) and visit.index == 1
    np.testing.assert_allclose(visit.model, [0.0, 0.0], atol=1e-14)
    assert visit.time == pytest.approx(20.0)
    assert visit.distance == pytest.approx(np.linalg.norm(run.final))
    assert visit.on_stable_manifold and visit.unstable_distance == 0.0
    assert Ending[ending(run, [visit])] == "converged to a saddle"
    # Round-off keeps u = -v here, so that a longer run does not leave either.
    longer = gradient_flow(SADDLE, start, t1=400.0)
    visits = find_saddles(longer, SADDLE)
    assert [visit.index for visit in visits] == [1]
    assert ending(longer, visits) == Ending.saddle


def test_a_run_that_leaves_the_stable_manifold_by_round_off_says_so():
    run = gradient_flow(SADDLE, jnp.array([1.0, -1.0 + 1e-15]), t1=80.0)
    visits = find_saddles(run, SADDLE)
    assert [visit.index for visit in visits] == [1, 0]
    assert visits[0].distance < 1e-6 and 5 < visits[0].time < 60
    assert [visit.on_stable_manifold for visit in visits] == [True, False]
    assert "round-off" in str(visits[0])
    assert ending(run, visits) == Ending.minimum


def test_a_start_away_from_critical_points_is_not_reported():
    run = gradient_flow(SADDLE, jnp.array([0.5, 0.3]), t1=30.0)
    assert [visit.index for visit in find_saddles(run, SADDLE)] == [0]


def test_a_slow_passage_is_not_a_saddle():
    run = gradient_flow(GHOST, jnp.array([-1.0, 0.5]), t1=200.0)
    passage, minimum = find_saddles(run, GHOST)
    assert bool(passage.kind == VisitKind.slow_passage) and passage.index is None
    assert passage.slow_grad_norm == pytest.approx(0.01, rel=0.05)
    assert not passage.critical and passage.spectrum is None
    assert minimum.index == 0
    assert float(minimum.model[0]) > 1.9


def test_a_far_critical_point_is_not_a_visit():
    run = gradient_flow(
        two_modes, {"u": jnp.full(2, 0.2), "v": jnp.full(2, 0.2)}, t1=200.0
    )
    strict = find_saddles(run, two_modes, near=1e-9)
    assert not any(visit.index == 1 for visit in strict)
    (visit,) = [v for v in find_saddles(run, two_modes) if v.index == 0]
    assert visit.relative_distance < 1e-8


def test_a_second_run_measures_how_the_gradient_scales():
    visits = find_saddles(two_mode_run(1e-3), two_modes, second_run=two_mode_run(1e-5))
    saddle = visits[1]
    assert saddle.expected_exponent == pytest.approx(0.1 / (0.1 + 0.1))
    # Measured, it is larger: the symmetric start has no part on the slowest stable
    # modes (that leaves ls = 2), and mode two has grown to eps^0.9 on arrival.
    assert saddle.exponent == pytest.approx(0.9 * 2 / (2 + 0.1), abs=0.01)
    assert bool(saddle.kind == VisitKind.saddle)


def test_runs_without_models_or_traced_are_refused():
    run = gradient_flow(SADDLE, jnp.array([0.5, 0.3]), t1=5.0)
    bare = eqx.tree_at(lambda r: r.models, run, run.models[:2])
    with pytest.raises(ValueError, match="saved with its models"):
        find_saddles(bare, SADDLE)
    batch = jtu.tree_map(lambda x: jnp.stack([x, x]), run)
    with pytest.raises(ValueError, match="one concrete trajectory"):
        find_saddles(batch, SADDLE)


@pytest.fixture(scope="module")
def cycle_visits():
    """Visits from eps = 1e-3, compared with a second run; visits of that run."""
    (objective, first), (_, second) = default_cycle(1e-3), default_cycle(1e-5)
    return (
        objective,
        find_saddles(first, objective, second_run=second),
        find_saddles(second, objective),
    )


@pytest.mark.slow
def test_the_default_cycle_visits_the_saddles_of_bounded_rank(cycle_visits):
    objective, visits, _ = cycle_visits
    chain = objective.chain
    losses = [float(visit.loss) for visit in visits if visit.kind == VisitKind.saddle]
    assert losses[0] == pytest.approx(np.log(4), abs=1e-12)
    assert losses[1] == pytest.approx(float(chain.unigram_entropy), abs=1e-12)
    for rank in (1, 2):
        best = float(theory.best_rank_loss(chain, rank).loss)
        assert losses[rank + 1] == pytest.approx(best, abs=1e-8)
    assert visits[-1].index == 0
    assert float(visits[-1].loss) == pytest.approx(float(chain.entropy_rate), abs=1e-9)
    passages = [v for v in visits if v.kind == VisitKind.slow_passage]
    (slow,) = [v for v in passages if abs(v.slow_loss - 0.6125) < 1e-3]
    assert slow.slow_grad_norm == pytest.approx(5.0e-3, rel=0.1)
    assert slow.exponent == pytest.approx(0.0, abs=0.05)
    focus = visits[1]
    assert focus.expected_exponent == pytest.approx(
        0.0443 / (0.0443 + 0.0798), abs=5e-3
    )
    assert focus.exponent == pytest.approx(focus.expected_exponent, abs=0.05)
    # Beside L_2 the run at eps = 1e-3 comes near one more saddle, of index 1.
    extra = [v for v in visits if v.kind == VisitKind.saddle][4:]
    assert [v.index for v in extra] == [1]
    assert float(extra[0].loss) == pytest.approx(0.56257674, abs=1e-8)


@pytest.mark.slow
def test_a_smaller_start_passes_closer_to_the_same_saddles(cycle_visits):
    _, *both = cycle_visits
    visits = {
        eps: [v for v in found if v.critical]
        for eps, found in zip((1e-3, 1e-5), both, strict=True)
    }
    for loss in (np.log(4), 0.7271388, 0.6333599, 0.5626547):
        far, near = (
            next(v for v in visits[eps] if abs(float(v.loss) - loss) < 1e-6)
            for eps in (1e-3, 1e-5)
        )
        assert near.distance < 0.3 * far.distance
        assert near.index == far.index


# Copies.


class TwoSaddles(eqx.Module):
    """Saddles at x = 0 and x = 1 with loss 0, copies of each other when tilt = 0."""

    tilt: jax.Array

    def __call__(self, y):
        along = y[0] ** 2 * (1 - y[0]) ** 2
        return along - 0.5 * y[1] ** 2 * (1 + self.tilt * y[0])


def recorded(objective, ts, models):
    """A path as a trajectory; it need not be a flow."""
    losses, gradients = jax.vmap(jax.value_and_grad(objective))(models)
    return dataclasses.replace(
        two_mode_run(1e-4),
        ts=ts,
        models=models,
        losses=losses,
        grad_norms=jax.vmap(_trees.norm)(gradients),
    )


def recorded_path(objective):
    """Past both saddles; no flow, whose loss could not come back."""
    x = jnp.linspace(-0.2, 1.3, 151)
    models = jnp.stack([x, jnp.full_like(x, 0.02)], axis=1)
    return recorded(objective, x + 0.2, models)


@pytest.mark.parametrize(("tilt", "num"), [(0.0, 1), (1.0, 2)])
def test_points_of_equal_loss_are_one_if_a_symmetry_may_relate_them(tilt, num):
    objective = TwoSaddles(jnp.asarray(tilt))
    visits = find_saddles(recorded_path(objective), objective)
    equal = [v for v in visits if v.critical and abs(float(v.loss)) < 1e-12]
    assert len(equal) == num
    # The hill between them has another loss.
    (hill,) = [v for v in visits if v.index == 2]
    assert float(hill.loss) == pytest.approx(1 / 16)


@pytest.mark.slow
def test_given_invariants_decide_which_points_of_equal_loss_are_one():
    objective = TwoSaddles(jnp.asarray(0.0))
    for invariants, num in ((lambda y: y[1], 1), (lambda y: y, 2)):
        visits = find_saddles(
            recorded_path(objective), objective, invariants=invariants
        )
        assert sum(v.critical and abs(float(v.loss)) < 1e-12 for v in visits) == num


@pytest.mark.parametrize("scale_attention", [False, True])
def test_invariants_of_attention_are_those_of_its_symmetries(scale_attention):
    chain = named_chain("default")
    model = random_model(chain, scale_attention=scale_attention)
    rng = np.random.default_rng(0)
    B, C = (jnp.asarray(rng.normal(size=(size, size))) for size in (5, 3))
    v = jnp.asarray(rng.normal(size=(5, 1)))
    copy = eqx.tree_at(
        lambda m: (m.W0, m.W1, m.WQ, m.WK),
        model,
        (
            model.W0 @ B,
            jnp.linalg.solve(B, model.W1 + v),
            jnp.linalg.solve(B, model.WQ @ C),
            jnp.linalg.solve(B, model.WK @ jnp.linalg.inv(C).T),
        ),
    )
    same = invariants_of(model)
    assert are_close(same, invariants_of(copy), 1e-12)
    for leaf in range(4):
        leaves, structure = jtu.tree_flatten(model)
        leaves[leaf] = leaves[leaf].at[0, 0].add(1e-3)
        other = jtu.tree_unflatten(structure, leaves)
        assert not are_close(same, invariants_of(other), 1e-5)


# Bounds on the work.


def test_a_search_without_products_left_is_unresolved():
    visits = find_saddles(two_mode_run(1e-4), two_modes, max_products=1)
    kinds = {VisitKind[visit.kind] for visit in visits}
    # The minimum is one step away; no saddle is taken for a slow passage.
    assert kinds == {VisitKind[VisitKind.unresolved], VisitKind[VisitKind.minimum]}
    assert all(visit.num_products <= 1 + 600 for visit in visits)


def factorised(y):
    """|S - B A|^2 / 2 with S = diag(2, 1, 0, ...): 338 parameters."""
    target = jnp.diag(jnp.zeros(13).at[:2].set(jnp.array([2.0, 1.0])))
    return 0.5 * jnp.sum((target - y["B"] @ y["A"]) ** 2)


@pytest.mark.slow
def test_saddles_of_a_problem_too_large_to_diagonalise_take_few_products():
    # The exact flow from u = 1e-5 of both modes, as in `DeepLinearNetwork`, and beside
    # it what a random start leaves in the other directions.
    ts, strengths = jnp.linspace(0.0, 15.0, 200), jnp.array([2.0, 1.0])
    growth = jnp.exp(-2 * strengths * ts[:, None])
    modes = jnp.sqrt(strengths / (1 + growth * (strengths / 1e-5 - 1)))
    learnt = jax.vmap(lambda mode: jnp.diag(jnp.zeros(13).at[:2].set(mode)))(modes)
    rest = 1e-3 * jax.random.normal(jax.random.key(0), (2, 13, 13))
    models = {"A": learnt + rest[0], "B": learnt + rest[1]}
    visits = find_saddles(recorded(factorised, ts, models), factorised)
    # A mode that is not learnt can grow through any of the hidden units left.
    assert [visit.index for visit in visits] == [2 * 13, 12, 0]
    np.testing.assert_allclose(
        [float(visit.loss) for visit in visits], [2.5, 0.5, 0.0], atol=1e-12
    )
    assert all(visit.index_exact and visit.num_products < 1000 for visit in visits)


@pytest.mark.slow
def test_a_run_that_ends_at_a_minimum_is_found_there_though_minima_are_a_continuum():
    # 360 parameters: rows are polished without their small parts first, and a minimum
    # without them is another one, a tenth of the run away.
    loss = PopulationLoss(lazy_chain([0.6, 0.3, 0.1], 0.3))
    model = AttentionModel.init(jax.random.key(0), vocab=3, width=12, scale=1e-3)
    run = gradient_flow(loss, model, t1=2e4)
    visits = find_saddles(run, loss)
    assert bool(visits[-1].kind == VisitKind.minimum)
    assert visits[-1].relative_distance < 1e-6
    assert bool(ending(run, visits) == Ending.minimum)
