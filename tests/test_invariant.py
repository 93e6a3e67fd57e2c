"""The rank-one manifold: isometry, invariance, dilution, the point where it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import _trees, theory
from flowsim._curves import crossings
from flowsim.derivatives import gradient
from flowsim.flow import gradient_flow
from flowsim.invariant import (
    RankOneFrame,
    RankOneModel,
    Reduced,
    degenerate_point,
    distances,
    growth_rate,
    invariance_defect,
    lift_path,
    manifold_start,
    watch_dilution,
)
from flowsim.loss import PopulationLoss, SampleLoss
from flowsim.markov import lazy_chain, two_level_law
from flowsim.model import AttentionModel
from flowsim.theory import descent_direction

from .problems import named_chain, random_model

TOP, LAM, VOCAB, WIDTH = 0.7, 0.5, 4, 3


def symmetric_chain():
    return lazy_chain(two_level_law(vocab=VOCAB, top=TOP), LAM)


@pytest.fixture(scope="module")
def frame():
    keys = jax.random.split(jax.random.key(3))
    return RankOneFrame(*(jax.random.normal(key, (WIDTH,)) for key in keys))


@pytest.fixture(scope="module")
def loss():
    return PopulationLoss(symmetric_chain())


@pytest.fixture(scope="module")
def end(loss, frame):
    """The reduced flow from theta_c^1 with tiny attention, and where it ends."""
    start = manifold_start(loss, frame, attention=1e-4)
    return degenerate_point(loss, frame, start=start)


@pytest.fixture(scope="module")
def dilution(loss, frame, end):
    return watch_dilution(loss, frame, lift_path(frame, end.run.models))


def coordinates(seed=0):
    numbers = jax.random.normal(jax.random.key(seed), (2 * VOCAB + 2,))
    return RankOneModel(numbers[:4], numbers[4:8], numbers[8], numbers[9])


def test_the_lift_is_isometric_and_the_projection_undoes_it(frame):
    x, y = coordinates(0), coordinates(1)
    lifted = _trees.inner(frame.lift(x), frame.lift(y))
    np.testing.assert_allclose(lifted, _trees.inner(x, y), rtol=1e-13)
    back = frame.project(frame.lift(x))
    assert float(_trees.norm(_trees.subtract(back, x))) < 1e-14


def test_the_projection_is_orthogonal(frame):
    model = random_model(symmetric_chain(), width=WIDTH, key_width=WIDTH)
    along = frame.lift(coordinates(5))
    normal = frame.normal(model)
    assert abs(float(_trees.inner(normal, along))) < 1e-13
    squares = frame.distance(model) ** 2 + _trees.norm(frame.project(model)) ** 2
    np.testing.assert_allclose(squares, _trees.norm(model) ** 2, rtol=1e-13)
    assert float(frame.distance(model)) > 1.0


@pytest.mark.parametrize("name", ["default", "metropolis", "dense, defocus"])
def test_the_manifold_is_invariant_for_every_chain(frame, name):
    defect, slope = invariance_defect(
        PopulationLoss(named_chain(name)), frame, coordinates()
    )
    assert float(slope) > 0.01 and float(defect) < 1e-14 * float(slope)


def test_the_manifold_is_invariant_for_finite_samples(frame):
    tokens = jax.random.randint(jax.random.key(0), (20, 6), 0, VOCAB)
    objective = SampleLoss(tokens, tokens[:, 0])
    defect, slope = invariance_defect(objective, frame, coordinates())
    assert float(slope) > 0.01 and float(defect) < 1e-14 * float(slope)


def test_an_objective_that_sees_more_than_m_and_phi_has_a_defect(frame):
    def tilted(model):
        return jnp.sum(model.W0 * jnp.arange(12.0).reshape(4, 3))

    defect, slope = invariance_defect(tilted, frame, coordinates())
    assert float(defect) > 0.1 * float(slope)


def test_the_reduced_gradient_is_the_full_one(loss, frame):
    at = coordinates(2)
    reduced = gradient(Reduced(loss, frame), at)
    closed_form = descent_direction(frame.lift(at), loss.chain)
    difference = _trees.add_scaled(frame.lift(reduced), 1.0, closed_form)
    assert float(_trees.norm(difference)) < 1e-14


def test_the_frame_nearest_to_a_model_is_its_own(frame):
    model = frame.lift(coordinates())
    found = RankOneFrame.nearest(model)
    assert float(found.distance(model)) < 1e-14
    np.testing.assert_allclose(abs(found.alpha @ frame.alpha), 1.0, rtol=1e-14)
    still = AttentionModel(model.W0, model.W1, 0 * model.WQ, 0 * model.WK)
    assert float(RankOneFrame.nearest(still).distance(still)) < 1e-14


@pytest.mark.slow
def test_reduced_and_full_flow_agree_and_the_full_one_stays(loss, frame, end):
    start = jax.tree.map(lambda leaf: leaf[0], end.run.models)
    t1 = 150.0  # Until after dilution.
    full = gradient_flow(loss, frame.lift(start), t1=t1, rtol=1e-10, atol=1e-14)
    assert float(jnp.max(distances(frame, full.models))) < 1e-9
    reduced = gradient_flow(Reduced(loss, frame), start, t1=t1, rtol=1e-10, atol=1e-14)
    apart = _trees.subtract(frame.project(full.final), reduced.final)
    moved = _trees.subtract(reduced.final, start)
    assert float(_trees.norm(moved)) > 1.0
    assert float(_trees.norm(apart)) < 1e-5


@pytest.mark.slow
def test_attention_and_redistributed_mass_grow_at_twice_the_focus_rate(
    loss, end, dilution
):
    rate = 2 * float(theory.focus_rate(loss.chain))
    assert rate == pytest.approx(0.160199, abs=1e-6)
    ts = end.run.ts
    product = growth_rate(ts, dilution.attention_product, (1e-6, 1e-4))
    assert product == pytest.approx(rate, rel=2e-3)
    # Driven by q kk through a stable direction: later, once that has died out.
    moved = np.asarray(dilution.redistributed)
    mass = growth_rate(ts, moved, (1e-5, 1e-3))
    assert mass == pytest.approx(rate, rel=5e-3)
    assert growth_rate(ts, dilution.off_ray, (1e-5, 1e-3)) == pytest.approx(
        mass, rel=1e-3
    )


@pytest.mark.slow
def test_top_and_low_tokens_move_opposite_ways(loss, end, dilution):
    moved = np.asarray(dilution.gamma[-1] - dilution.gamma[0])
    assert moved[0] > 0 and np.all(moved[1:] < 0)


@pytest.mark.slow
def test_attention_leaves_the_top_token_when_gamma_changes_sign(loss, end, dilution):
    ts, pi = end.run.ts, loss.chain.stationary
    for token in range(1, VOCAB):
        zero = crossings(ts, dilution.gamma[:, token])
        assert zero.size == 1
        left = crossings(ts, dilution.top_attention[:, token], float(pi[0]))
        assert left[-1] == pytest.approx(zero[0], abs=1e-3)
        assert float(dilution.top_attention[-1, token]) < float(pi[0])


@pytest.mark.slow
def test_spread_and_separation_of_embeddings_are_those_of_rows(loss, frame):
    model = random_model(symmetric_chain(), width=WIDTH, key_width=WIDTH)
    seen = watch_dilution(loss, frame, jax.tree.map(lambda leaf: leaf[None], model))
    low = np.asarray(model.W0)[1:]
    assert float(seen.spread[0]) == pytest.approx(
        np.sqrt(np.var(low, axis=0).sum()), rel=1e-12
    )
    assert float(seen.separation[0]) == pytest.approx(
        np.linalg.norm(np.asarray(model.W0)[0] - low.mean(0)), rel=1e-12
    )
    assert float(seen.distance[0]) == pytest.approx(float(frame.distance(model)))


@pytest.mark.slow
def test_the_reduced_flow_ends_where_the_top_token_question_is_answered(
    loss, frame, end
):
    assert bool(end.polished.succeeded) and float(end.grad_norm) < 1e-12
    p, P = loss.predictions(end.model), loss.chain.transition
    np.testing.assert_allclose(p[:, 0], P[:, 0], atol=1e-11)
    slope = jax.grad(lambda M: _loss_of(loss, end.model, M))(end.model.value_logits())
    assert float(jnp.max(jnp.abs(slope))) < 1e-11


def _loss_of(loss, model, M):
    logits = loss.attention(model) @ M
    return -loss.chain.pair_expectation(jax.nn.log_softmax(logits, axis=-1))


@pytest.mark.slow
def test_the_degenerate_point_has_the_check_values(end):
    np.testing.assert_allclose(end.reduced.gamma[0], 1.82932, atol=2e-4)
    np.testing.assert_allclose(end.reduced.gamma[1:], -0.52330, atol=2e-4)
    np.testing.assert_allclose(end.reduced.beta[0], 1.1656, atol=2e-4)
    np.testing.assert_allclose(end.reduced.beta[1:], -0.3885, atol=2e-4)
    np.testing.assert_allclose([end.reduced.q, end.reduced.kk], 1.08546, atol=2e-4)


@pytest.mark.slow
def test_the_hessian_there_has_36_zeros_of_42_some_beyond_symmetry(end):
    spec = end.spectrum
    assert spec.values.size == 42
    assert int(spec.num_unstable) == 0
    assert int(spec.num_center) == 36
    assert int(spec.num_stable) == 6
    assert int(spec.num_symmetry) + int(spec.num_degenerate) == 36
    assert int(spec.num_degenerate) > 0
    assert "kernel" in str(end)


def test_a_curve_that_misses_a_size_has_no_rate():
    ts = np.linspace(0.0, 5.0, 60)
    assert growth_rate(ts, np.exp(0.3 * ts), (1.5, 3.0)) == pytest.approx(0.3)
    assert np.isnan(growth_rate(ts, np.exp(0.3 * ts), (1.5, 1e3)))


def test_wrong_directions_are_refused():
    with pytest.raises(ValueError, match="alpha must not be zero"):
        RankOneFrame(jnp.zeros(3), jnp.ones(3))
    with pytest.raises(ValueError, match="key_direction must be a vector"):
        RankOneFrame(jnp.ones(3), jnp.ones((3, 1)))
