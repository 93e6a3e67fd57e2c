"""Critical points: degenerate roots, saddles, honest failures; visits along a run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optimistix as optx
import pytest

from flowsim import _trees, theory
from flowsim.critical import CriticalOutcome, find_critical_point
from flowsim.flow import gradient_flow
from flowsim.loss import PopulationLoss
from flowsim.model import AttentionModel
from flowsim.newton import RegularisedNewton
from flowsim.saddles import VisitKind, find_saddles
from flowsim.spectrum import spectrum

from .problems import named_chain, random_model


def hyperbolic(y):
    """Origin a saddle, the hyperbola y0 y1 = 1 a line of minima."""
    return 0.5 * (1 - y[0] * y[1]) ** 2


def cubic(y):
    """Gradient ((y0 - 1)^2, (y1 - 2)^2): a root where the Hessian is zero."""
    return ((y[0] - 1) ** 3 + (y[1] - 2) ** 3) / 3


def two_modes(y):
    """Saddles at losses .505 and .005, minimum 0."""
    sigma = jnp.array([1.0, 0.1])
    return 0.5 * jnp.sum((sigma - y["u"] * y["v"]) ** 2)


def gradient_norm(objective, params):
    return float(_trees.norm(jax.grad(objective)(params)))


def is_outcome(point, outcome):
    return bool(point.outcome == outcome)


# One critical point.


@pytest.mark.parametrize("basis_size", [300, 1])
def test_a_root_with_zero_hessian_is_found(basis_size):
    solver = RegularisedNewton(atol=1e-12, basis_size=basis_size)
    point = find_critical_point(cubic, jnp.array([2.0, 2.0]), solver=solver)
    assert is_outcome(point, CriticalOutcome.converged)
    np.testing.assert_allclose(point.model, [1.0, 2.0], atol=1e-6)
    assert gradient_norm(cubic, point.model) <= 1e-12


def test_an_exact_root_is_returned_unchanged():
    root = jnp.array([1.0, 2.0])
    point = find_critical_point(cubic, root)
    assert is_outcome(point, CriticalOutcome.started_there)
    assert int(point.num_steps) == 0 and float(point.displacement) == 0.0
    assert bool(jnp.all(point.model == root))


def test_a_saddle_is_reached_and_not_left_for_a_minimum():
    point = find_critical_point(hyperbolic, jnp.array([0.2, 0.3]))
    assert is_outcome(point, CriticalOutcome.converged)
    np.testing.assert_allclose(point.model, [0.0, 0.0], atol=1e-12)
    assert float(point.loss) == pytest.approx(0.5)
    assert float(point.displacement) == pytest.approx(np.hypot(0.2, 0.3))


def test_the_point_found_on_a_manifold_is_near_the_nearest():
    guess = jnp.array([2.0, 0.5]) + 1e-4 * jnp.array([0.3, -0.7])
    point = find_critical_point(hyperbolic, guess)
    assert is_outcome(point, CriticalOutcome.converged)
    # Distance to the hyperbola, to first order in it.
    nearest = float(abs(1 - guess[0] * guess[1]) / _trees.norm(guess))
    assert nearest > 1e-5
    assert float(point.displacement) == pytest.approx(nearest, rel=0.01)


@pytest.mark.parametrize("basis_size", [300, 40])
def test_the_second_critical_point_is_recovered_from_a_perturbed_guess(basis_size):
    chain = named_chain("default")
    objective = PopulationLoss(chain)
    exact = theory.second_critical_point(chain, width=6, key_width=5)
    noise = random_model(chain, width=6, key_width=5, scale=1.0)
    guess = _trees.add_scaled(exact, 1e-3, noise)
    solver = RegularisedNewton(atol=1e-12, basis_size=basis_size)
    point = find_critical_point(objective, guess, solver=solver)
    assert is_outcome(point, CriticalOutcome.converged)
    assert gradient_norm(objective, point.model) <= 1e-12
    assert float(point.loss) == pytest.approx(float(chain.unigram_entropy), abs=1e-13)
    distance = float(_trees.norm(_trees.subtract(guess, point.model)))
    assert float(point.displacement) == pytest.approx(distance)
    assert distance < 2e-3 * float(_trees.norm(noise))
    assert int(point.num_steps) < 10
    assert int(spectrum(objective, point.model).num_unstable) == 5


def test_convergence_is_superlinear_on_a_manifold_of_critical_points():
    guess = jnp.array([2.0, 0.6])
    sizes = [
        float(find_critical_point(hyperbolic, guess, max_steps=steps).grad_norm)
        for steps in (1, 2, 3, 4)
    ]
    # Linear convergence would give equal falls of the logarithm.
    falls = np.diff(np.log(sizes))
    assert falls[0] < 0 and np.all(np.diff(falls) < 0)


def test_without_a_critical_point_the_search_stalls_with_the_norm_it_has():
    def slope(y):
        return jnp.sum(y) + 0.5 * y[0] ** 2

    point = find_critical_point(slope, jnp.array([3.0, 1.0]))
    assert is_outcome(point, CriticalOutcome.stalled)
    assert float(point.grad_norm) == gradient_norm(slope, point.model) >= 1.0


def test_a_search_that_leaves_for_infinity_says_so():
    point = find_critical_point(lambda y: jnp.log1p(y**2), jnp.array(5.0))
    assert is_outcome(point, CriticalOutcome.diverged)
    assert float(point.displacement) > 1e8


def test_a_gradient_that_is_not_finite_is_divergence():
    point = find_critical_point(lambda y: jnp.sum(jnp.sqrt(y)), jnp.array([-1.0]))
    assert is_outcome(point, CriticalOutcome.diverged)


def test_a_tolerance_below_round_off_is_reported_as_not_reached():
    def far(y):
        return 1e6 * jnp.sum(jnp.cos(y + 1000.3))

    point = find_critical_point(far, jnp.array([0.2, 0.1]), tol=1e-18)
    assert is_outcome(point, CriticalOutcome.stalled)
    assert 0 < float(point.grad_norm) < 1e-6
    assert float(point.grad_norm) == pytest.approx(gradient_norm(far, point.model))


def test_optimistix_solvers_can_take_the_place_of_the_default():
    solver = optx.LevenbergMarquardt(rtol=1e-12, atol=1e-14)
    point = find_critical_point(hyperbolic, jnp.array([0.2, 0.3]), solver=solver)
    assert is_outcome(point, CriticalOutcome.converged)
    np.testing.assert_allclose(point.model, [0.0, 0.0], atol=1e-12)


def test_jit_and_vmap_agree_with_single_calls():
    guesses = jnp.array([[0.2, 0.3], [2.0, 0.6], [0.0, 0.0]])
    batch = jax.vmap(lambda y: find_critical_point(hyperbolic, y))(guesses)
    jitted = jax.jit(lambda y: find_critical_point(hyperbolic, y))(guesses[1])
    for row in range(3):
        single = find_critical_point(hyperbolic, guesses[row])
        np.testing.assert_allclose(batch.model[row], single.model, atol=1e-14)
        assert float(batch.grad_norm[row]) <= 1e-12
    np.testing.assert_allclose(jitted.model, batch.model[1], atol=1e-14)
    there = batch.outcome == CriticalOutcome.started_there
    assert there.tolist() == [False, False, True]


def test_a_second_call_does_not_trace_again():
    traces = []

    class Counted(eqx.Module):
        shift: jax.Array

        def __call__(self, y):
            traces.append(1)
            return jnp.sum((y - self.shift) ** 2)

    find_critical_point(Counted(jnp.asarray(1.0)), jnp.zeros(3))
    first = len(traces)
    point = find_critical_point(Counted(jnp.asarray(2.0)), jnp.ones(3), tol=1e-10)
    assert len(traces) == first > 0
    np.testing.assert_allclose(point.model, np.full(3, 2.0), atol=1e-9)


def test_single_precision_is_refused():
    with pytest.raises(ValueError, match=r"guess must be in double precision.*float32"):
        find_critical_point(hyperbolic, jnp.zeros(2, jnp.float32))


def test_results_print_what_was_found():
    text = str(find_critical_point(hyperbolic, jnp.array([0.2, 0.3])))
    assert "tolerance" in text and "|grad|" in text and "steps" in text


# The points a run visits.


def two_mode_run(eps):
    start = {"u": jnp.full(2, eps), "v": jnp.full(2, eps)}
    return gradient_flow(two_modes, start, t1=400.0)


def test_two_modes_visit_two_saddles_then_the_minimum():
    visits = find_saddles(two_mode_run(1e-4), two_modes)
    assert [visit.index for visit in visits] == [2, 1, 0]
    losses = [float(visit.loss) for visit in visits]
    np.testing.assert_allclose(losses, [0.505, 0.005, 0.0], atol=1e-14)
    assert [bool(v.kind == VisitKind.saddle) for v in visits] == [True, True, False]
    times = [visit.time for visit in visits]
    # u_i v_i = sigma_i / 2 at 9.21 and 80.6: the saddles lie before, between and after.
    assert times[0] < 9.21 < times[1] < 80.59 < times[2]
    assert visits[0].distance == pytest.approx(2e-4, rel=1e-3)
    # Closest approach: u_2 = v_2 = 1e-4 e^{t/10} against the decaying rest.
    assert 1e-4 < visits[1].distance < 1e-3
    assert all(float(visit.point.grad_norm) <= 1e-12 for visit in visits)


def test_a_run_on_the_stable_manifold_ends_at_a_saddle():
    run = gradient_flow(hyperbolic, jnp.array([1.0, -1.0]), t1=20.0)
    (visit,) = find_saddles(run, hyperbolic)
    assert bool(visit.kind == VisitKind.saddle) and visit.index == 1
    np.testing.assert_allclose(visit.model, [0.0, 0.0], atol=1e-14)
    assert visit.time == pytest.approx(20.0)
    assert visit.distance == pytest.approx(np.linalg.norm(run.final))


def test_a_run_that_leaves_the_stable_manifold_by_round_off_says_so():
    run = gradient_flow(hyperbolic, jnp.array([1.0, -1.0 + 1e-15]), t1=80.0)
    visits = find_saddles(run, hyperbolic)
    assert [visit.index for visit in visits] == [1, 0]
    assert visits[0].distance < 1e-6 and 5 < visits[0].time < 60


def test_a_start_away_from_critical_points_is_not_reported():
    run = gradient_flow(hyperbolic, jnp.array([0.5, 0.3]), t1=30.0)
    assert [visit.index for visit in find_saddles(run, hyperbolic)] == [0]


def ghost(y):
    """Without critical point at y0 = 0, but slow there, whatever the start."""
    slow = 0.01 * y[0] + y[0] ** 3 / 3
    return -slow + y[0] ** 4 / 8 + 0.5 * y[1] ** 2


def test_a_slow_passage_is_not_a_saddle():
    run = gradient_flow(ghost, jnp.array([-1.0, 0.5]), t1=200.0)
    passage, minimum = find_saddles(run, ghost)
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
    run = gradient_flow(hyperbolic, jnp.array([0.5, 0.3]), t1=5.0)
    bare = eqx.tree_at(lambda r: r.models, run, run.models[:2])
    with pytest.raises(ValueError, match="saved with its models"):
        find_saddles(bare, hyperbolic)
    batch = jtu.tree_map(lambda x: jnp.stack([x, x]), run)
    with pytest.raises(ValueError, match="one concrete trajectory"):
        find_saddles(batch, hyperbolic)


@pytest.fixture(scope="module")
def default_cycle():
    objective = PopulationLoss(named_chain("default"))

    def run(eps):
        model = AttentionModel.init(jax.random.key(0), vocab=4, width=16, scale=eps)
        return gradient_flow(objective, model, t1=2e4)

    return objective, run


@pytest.mark.slow
def test_the_default_cycle_visits_the_saddles_of_bounded_rank(default_cycle):
    objective, run = default_cycle
    first, second = run(1e-3), run(1e-5)
    visits = find_saddles(first, objective, second_run=second)
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
def test_a_smaller_start_passes_closer_to_the_same_saddles(default_cycle):
    objective, run = default_cycle
    visits = {
        eps: [v for v in find_saddles(run(eps), objective) if v.critical]
        for eps in (1e-3, 1e-5)
    }
    for loss in (np.log(4), 0.7271388, 0.6333599, 0.5626547):
        far, near = (
            next(v for v in visits[eps] if abs(float(v.loss) - loss) < 1e-6)
            for eps in (1e-3, 1e-5)
        )
        assert near.distance < 0.3 * far.distance
        assert near.index == far.index
