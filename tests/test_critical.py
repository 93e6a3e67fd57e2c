"""Critical points: degenerate roots, saddles, honest failures."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

from flowsim import _trees, theory
from flowsim.critical import CriticalOutcome, find_critical_point
from flowsim.loss import PopulationLoss
from flowsim.newton import RegularisedNewton
from flowsim.spectrum import spectrum

from .problems import hyperbolic, named_chain, random_model


def cubic(y):
    """Gradient ((y0 - 1)^2, (y1 - 2)^2): a root where the Hessian is zero."""
    return ((y[0] - 1) ** 3 + (y[1] - 2) ** 3) / 3


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("basis_size", [300, 1])
def test_the_search_gives_up_beyond_its_bounds(basis_size):
    guess = jnp.array([0.5, 0.6])  # The origin is 0.78 away.

    def search(max_distance, max_products):
        solver = RegularisedNewton(
            atol=1e-12,
            basis_size=basis_size,
            max_distance=jnp.asarray(max_distance),
            max_products=jnp.asarray(max_products),
        )
        return find_critical_point(hyperbolic, guess, solver=solver)

    free = search(max_distance=1.0, max_products=1000)
    assert is_outcome(free, CriticalOutcome.converged)
    close = search(max_distance=0.3, max_products=1000)
    assert is_outcome(close, CriticalOutcome.stalled)
    assert 0.3 < float(close.displacement) and close.num_steps < free.num_steps
    spent = int(free.stats["num_hessian_products"])
    short = search(max_distance=1.0, max_products=spent // 2)
    assert is_outcome(short, CriticalOutcome.stalled)
    assert spent // 2 <= int(short.stats["num_hessian_products"]) < spent
