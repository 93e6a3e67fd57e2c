"""The degenerate point unfolded in delta: eigenvalues, directions, departure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.critical import find_critical_point
from flowsim.derivatives import hessian
from flowsim.invariant import RankOneFrame, RankOneModel, Reduced
from flowsim.loss import PopulationLoss
from flowsim.lyapunov_schmidt import (
    Stability,
    TwoLevelFamily,
    branches,
    depart,
    first_order,
    reduced_unfolding,
    solve_range,
    split,
    study_unfolding,
    transverse_directions,
    unfold,
)
from flowsim.markov import lazy_chain, two_level_law
from flowsim.plots.unfolding import branches_figure, unfolding_figure
from flowsim.trajectory import Outcome

TOP, LAM, PATTERN = 0.7, 0.5, [1.0, 0.0, -1.0]
DELTAS = (1e-4, 1e-3, 1e-2)


@pytest.fixture(scope="module")
def frame():
    keys = jax.random.split(jax.random.key(3))
    return RankOneFrame(*(jax.random.normal(key, (3,)) for key in keys))


@pytest.fixture(scope="module")
def family():
    return TwoLevelFamily(TOP, LAM, PATTERN)


@pytest.fixture(scope="module")
def point(family, frame):
    """The degenerate point of THEORY's check values, polished from them.

    The flow that leads to it is tested with the manifold; critical points form a
    curve, and minimum-norm steps stay within the rounding of these digits.
    """
    guess = RankOneModel(
        jnp.array([1.829323, -0.523305, -0.523305, -0.523305]),
        jnp.array([1.165605, -0.388535, -0.388535, -0.388535]),
        jnp.asarray(1.085461),
        jnp.asarray(1.085461),
    )
    loss = PopulationLoss(family.chain(0.0))
    found = find_critical_point(Reduced(loss, frame), guess, tol=1e-14)
    assert float(found.displacement) < 1e-5
    return found.model


@pytest.fixture(scope="module")
def unfolded(family, frame, point):
    return unfold(family.chain, frame, point, DELTAS)


def cosine(x, y):
    x, y = np.asarray(x), np.asarray(y)
    return abs(x @ y) / np.linalg.norm(x) / np.linalg.norm(y)


def test_the_family_is_that_of_the_checked_constructions(family):
    law = two_level_law(vocab=4, top=TOP, delta=0.03, pattern=PATTERN)
    built, chain = lazy_chain(law, LAM), family.chain(0.03)
    np.testing.assert_allclose(chain.transition, built.transition, rtol=1e-14)
    np.testing.assert_allclose(chain.stationary, built.stationary, rtol=1e-14)


def test_a_pattern_that_does_not_sum_to_zero_is_refused():
    with pytest.raises(ValueError, match="pattern must be a vector"):
        TwoLevelFamily(TOP, LAM, [1.0, 0.0])


@pytest.mark.slow
def test_the_continued_points_are_critical_in_full_space(unfolded):
    assert bool(jnp.all(unfolded.converged))
    assert float(jnp.max(unfolded.grad_norms)) < 1e-14


@pytest.mark.slow
def test_the_largest_eigenvalue_over_delta_has_the_check_values(unfolded):
    slopes = np.asarray(unfolded.rates / unfolded.deltas)
    np.testing.assert_allclose(slopes[:2], [0.061467, 0.061542], atol=6e-7)
    np.testing.assert_allclose(unfolded.singular_values[0, 1], 2.56e-11, rtol=5e-3)


@pytest.mark.slow
def test_transverse_eigenvalues_are_the_singular_values(unfolded):
    both = np.sort(np.concatenate([unfolded.singular_values[-1] * s for s in (1, -1)]))
    values = np.asarray(unfolded.transverse[-1])
    np.testing.assert_allclose(values[:4], both[:4], atol=1e-15)
    np.testing.assert_allclose(values[-4:], both[-4:], atol=1e-15)
    # dL/dPhi vanishes too: the attention part of the exact form adds nothing.
    np.testing.assert_allclose(
        unfolded.coupled_values, unfolded.singular_values, atol=1e-15
    )


@pytest.mark.slow
def test_the_transverse_block_belongs_to_the_full_spectrum(family, frame, unfolded):
    at = jax.tree.map(lambda leaf: leaf[-1], unfolded.reduced)
    loss = PopulationLoss(family.chain(DELTAS[-1]))
    values = np.linalg.eigvalsh(-np.asarray(hessian(loss, frame.lift(at))))
    # Width 3: two directions orthogonal to alpha.
    np.testing.assert_allclose(values[-2:], float(unfolded.rates[-1]), rtol=1e-10)


@pytest.mark.slow
def test_exponents_of_both_singular_values(unfolded):
    small = unfolded.singular_values[:, 0] - 0.0614662 * unfolded.deltas
    assert unfolded.exponent(unfolded.rates) == pytest.approx(1.0, abs=0.03)
    assert unfolded.exponent(unfolded.singular_values[:, 1]) == pytest.approx(
        3.0, abs=0.05
    )
    # The pattern is odd, delta -> -delta only renames tokens: the slope is even.
    assert float(small[1] / small[2]) == pytest.approx(1e-3, rel=0.1)
    assert float(jnp.max(unfolded.tangential)) < 1e-14


@pytest.mark.slow
def test_the_slope_is_predicted_by_differentiating_the_continuation(
    family, frame, point, unfolded
):
    predicted = first_order(family, frame, point)
    measured = float(unfolded.rates[0] / unfolded.deltas[0])
    assert float(predicted.slopes[0]) == pytest.approx(measured, rel=2e-5)
    assert float(predicted.slopes[1]) < 1e-12
    assert cosine(predicted.embedding, unfolded.embedding[0]) > 1 - 1e-5
    # Alike on low tokens and orthogonal to gamma; the readout is the pattern.
    x = np.array([3 * point.gamma[1], *[-point.gamma[0]] * 3])
    assert cosine(predicted.embedding, x) == pytest.approx(1.0, abs=1e-9)
    assert cosine(predicted.readout, [0.0, *PATTERN]) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
def test_half_of_the_unstable_direction_is_embedding(unfolded):
    np.testing.assert_allclose(unfolded.embedding_weight, 0.5, atol=1e-9)


@pytest.mark.slow
def test_beyond_a_larger_lam_the_point_is_unstable_within_the_manifold(
    frame, point, unfolded
):
    lams = np.linspace(0.5, 0.7, 11)[1:]
    found = unfold(
        lambda lam: TwoLevelFamily(TOP, lam, PATTERN).chain(0.0), frame, point, lams
    )
    assert bool(jnp.all(found.converged))
    below, beyond = found.tangential[lams < 0.665], found.tangential[lams > 0.675]
    assert float(jnp.max(below)) < 1e-12
    # Two-fold: the ways to set three alike tokens apart.
    assert float(jnp.min(beyond[:, -2:])) > 1e-3
    np.testing.assert_allclose(beyond[:, -1], beyond[:, -2], rtol=1e-9)


@pytest.mark.slow
def test_the_reduced_bifurcation_function_is_a_pitchfork_with_the_same_slope(
    family, frame, point
):
    first = first_order(family, frame, point)
    splitting = split(
        family, frame.lift(point), kernel=transverse_directions(frame, first)[:1]
    )
    assert splitting.nullity == 36 and splitting.symmetry.shape[0] == 13
    field = reduced_unfolding(family, frame, point, first)
    slope, cubic = field.coefficient(0, (1, 1)), field.coefficient(0, (3, 0))
    assert slope == pytest.approx(float(first.slopes[0]), rel=1e-8)
    assert cubic < 0
    for powers in ((1, 0), (2, 0), (0, 1), (0, 2), (2, 1)):
        assert field.coefficient(0, powers) == pytest.approx(0.0, abs=1e-9)
    before, after = branches(field, [-1e-4, 1e-4], radius=0.5)
    assert (len(before), len(after)) == (1, 3)
    assert after.count(Stability.stable) == 2 and before.count(Stability.stable) == 1
    # On the new branch the exact reduced field vanishes to the next order.
    u = float(np.sqrt(slope * 1e-4 / -cubic))
    np.testing.assert_allclose(np.abs(after.points[1:]), u, rtol=1e-3)
    solved = solve_range(family, splitting, jnp.array([u]), 1e-4)
    assert bool(solved.succeeded)
    assert abs(float(solved.field[0])) < 0.02 * slope * 1e-4 * u


@pytest.mark.slow
def test_the_study_continues_in_lam_and_top_through_its_centre():
    study = study_unfolding(
        deltas=(1e-4, 1e-3), lams=(0.45, 0.5, 0.55), tops=(0.7, 0.72)
    )
    middle = float(study.along_lam.rates[1])
    assert middle == pytest.approx(float(study.along_delta.rates[1]), rel=1e-6)
    assert middle == pytest.approx(float(study.along_top.rates[0]), rel=1e-6)
    for found in (study.along_delta, study.along_lam, study.along_top):
        assert bool(jnp.all(found.converged))
        assert np.all(np.diff(np.asarray(found.deltas)) > 0)
        np.testing.assert_allclose(found.rates, found.singular_values[:, 0], rtol=1e-9)
    assert [len(each) for each in study.branches] == [1, 1, 1, 3, 3, 3]
    axes = [unfolding_figure(study.along_delta, first=study.first)]
    axes.append(unfolding_figure(study.along_lam, parameter="lam"))
    axes.append(branches_figure(study.branches))
    for ax in axes:
        assert ax.get_xlabel() and ax.get_ylabel() and ax.lines
    assert "u^3" in str(study)


@pytest.mark.slow
def test_the_flow_leaves_along_the_new_direction_and_stays_without_delta(
    family, frame, point, unfolded
):
    rate, x = float(unfolded.rates[-1]), unfolded.embedding[-1]
    at = jax.tree.map(lambda leaf: leaf[-1], unfolded.reduced)
    t1 = 12 / rate
    loss = PopulationLoss(family.chain(DELTAS[-1]))
    left = depart(loss, frame, at, t1=t1, direction=x)
    assert bool(left.outcome == Outcome.reached_t1)
    assert left.rate == pytest.approx(rate, rel=1e-3)
    assert left.growth > 1e4
    assert left.alignment > 1 - 1e-6
    still = PopulationLoss(family.chain(0.0))
    stayed = depart(still, frame, point, t1=t1, direction=x)
    assert stayed.growth < 1.01 and abs(stayed.rate) < 1e-3 * rate


@pytest.mark.slow
def test_a_width_of_one_has_no_transverse_direction(family, point):
    with pytest.raises(ValueError, match="width must be at least 2"):
        unfold(family.chain, RankOneFrame(jnp.ones(1), jnp.ones(1)), point, [1e-3])


@pytest.mark.slow
def test_results_print_short(unfolded):
    assert 3 <= len(str(unfolded).splitlines()) < 12
