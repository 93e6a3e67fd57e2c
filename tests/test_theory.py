"""The closed forms of the theory against automatic differentiation and integration."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from flowsim import _trees, theory
from flowsim.derivatives import gradient, hessian, hessian_vector_product
from flowsim.loss import PopulationLoss, SampleLoss
from flowsim.markov import MarkovChain, lazy_chain, two_level_law
from flowsim.model import AttentionModel

from .problems import CHAINS, named_chain, random_model

every_chain = pytest.mark.parametrize("name", CHAINS)
DEFAULT = "default"


def close(x, y, tolerance=1e-12):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def trees_close(x, y, tolerance=1e-12):
    jax.tree.map(lambda a, b: close(a, b, tolerance), x, y)


def jacobian(chain, model):
    return -hessian(PopulationLoss(chain), model)


def flows(chain, starts, times, *, steps_per_unit=100):
    """Classical Runge-Kutta with a fixed step: a reference independent of the package.

    `starts` has a leading axis of starts; the paths have that axis and one of `times`,
    which must be multiples of 1 / steps_per_unit.
    """
    loss = PopulationLoss(chain)
    h = 1.0 / steps_per_unit
    rows = np.array([round(steps_per_unit * t) for t in times])

    def path(start):
        flat, unravel = _trees.ravel(start)
        velocity = jax.grad(lambda y: -loss(unravel(y)))

        def step(y, _):
            k1 = velocity(y)
            k2 = velocity(y + 0.5 * h * k1)
            k3 = velocity(y + 0.5 * h * k2)
            k4 = velocity(y + h * k3)
            return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), y

        _, points = jax.lax.scan(step, flat, length=rows[-1] + 1)
        return jax.vmap(unravel)(points[rows])

    return jax.jit(jax.vmap(path))(starts)


def scaled(scales, model):
    """Copies of the model times each of the scales, stacked."""
    return jax.vmap(lambda s: _trees.scale(s, model))(jnp.asarray(scales))


# Section 1: gradients.


@every_chain
@pytest.mark.parametrize("scale_attention", [False, True])
def test_descent_direction_is_minus_the_gradient(name, scale_attention):
    chain = named_chain(name)
    model = random_model(chain, scale_attention=scale_attention)
    gradient_ = gradient(PopulationLoss(chain), model)
    assert all(jnp.max(jnp.abs(leaf)) > 1e-4 for leaf in jax.tree.leaves(gradient_))
    trees_close(
        theory.descent_direction(model, chain), _trees.scale(-1.0, gradient_), 1e-14
    )


@every_chain
def test_loss_falls_at_the_rate_of_the_squared_gradient_norm(name):
    chain = named_chain(name)
    model = random_model(chain)
    velocity = theory.descent_direction(model, chain)
    _, rate = jax.jvp(PopulationLoss(chain), (model,), (velocity,))
    close(rate, -_trees.inner(velocity, velocity))


# Section 2: conserved quantities.


def largest(tree):
    return max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(tree))


@every_chain
@pytest.mark.parametrize("scale_attention", [False, True])
def test_conserved_quantities_do_not_change_along_the_gradient(name, scale_attention):
    chain = named_chain(name)
    model = random_model(chain, scale_attention=scale_attention)
    velocity = gradient(PopulationLoss(chain), model)
    _, change = jax.jvp(theory.conserved, (model,), (velocity,))
    assert largest(change) < 1e-15
    # Each of the three does change along other directions.
    elsewhere = random_model(chain, seed=9, scale_attention=scale_attention)
    _, change = jax.jvp(theory.conserved, (model,), (elsewhere,))
    assert all(largest(value) > 0.1 for value in vars(change).values())


def test_conserved_quantities_do_not_change_on_finite_samples():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    windows = chain.sample(jax.random.key(3), 20, 7)
    velocity = gradient(SampleLoss(windows[:, :-1], windows[:, -1]), model)
    _, change = jax.jvp(theory.conserved, (model,), (velocity,))
    assert largest(change) < 1e-15


def test_drift_is_the_largest_change_from_the_first_row():
    model = random_model(named_chain(DEFAULT))
    path = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), model)
    assert largest(theory.conserved_drift(path)) == 0.0
    # From the last row the largest change would be 0.35.
    changed = path.W1.at[1, 2, 0].add(-0.25).at[2, 2, 0].add(0.1)
    path = eqx.tree_at(lambda p: p.W1, path, changed)
    drift = theory.conserved_drift(path)
    assert list(drift) == ["embedding_balance", "key_balance", "readout_sum"]
    close(drift["readout_sum"], 0.25)
    assert drift["key_balance"] == 0.0
    assert drift["embedding_balance"] > 0.0
    trees_close(theory.conserved_drift(jax.vmap(theory.conserved)(path)), drift)


def test_drift_needs_a_time_axis():
    with pytest.raises(ValueError, match=r"time axis.*\(5,\)"):
        theory.conserved_drift(random_model(named_chain(DEFAULT)))


# Section 3: the origin.


@every_chain
def test_origin_spectrum_is_plus_and_minus_mu_and_zeros(name):
    chain = named_chain(name)
    width = 3
    origin = _trees.scale(0.0, random_model(chain, width=width))
    assert largest(gradient(PopulationLoss(chain), origin)) == 0.0
    values = jnp.linalg.eigvalsh(jacobian(chain, origin))
    mu = theory.origin_rate(chain)
    expected = np.zeros(values.size)
    expected[:width], expected[-width:] = -mu, mu
    close(values, expected, 1e-14)


@every_chain
def test_linearised_origin_flow_is_the_matrix_exponential(name):
    chain = named_chain(name)
    model = random_model(chain, width=3, key_width=2)
    origin = _trees.scale(0.0, model)
    start, unravel = _trees.ravel(model)
    for t in (0.0, 0.3, 4.0):
        propagator = scipy.linalg.expm(t * np.asarray(jacobian(chain, origin)))
        trees_close(
            theory.linearised_origin_flow(model, chain, t),
            unravel(jnp.asarray(propagator @ start)),
        )


@every_chain
def test_linearised_flow_condenses_onto_the_predicted_directions(name):
    chain = named_chain(name)
    model = random_model(chain)
    predicted = theory.condensation_direction(model, chain)
    t = 16.0 / theory.origin_rate(chain)
    late = theory.linearised_origin_flow(model, chain, t)
    size = predicted.amplitude * jnp.exp(16.0)
    close(late.W0 / size, predicted.W0, 1e-5)
    close(late.W1 / size, predicted.W1, 1e-5)
    close(jnp.linalg.norm(predicted.alpha), 1.0)
    close(jnp.linalg.norm(predicted.W0), 1.0)
    close(jnp.linalg.norm(predicted.W1), 1.0)


def test_true_flow_leaves_the_linearised_one_at_second_order_or_better():
    # Lemma 3.1: the difference is O(eps^2 exp(2 mu t)) from distance eps.
    chain = named_chain(DEFAULT)
    unit_start = random_model(chain, width=3, key_width=2, scale=1.0)
    scales = np.array([1e-2, 3e-3, 1e-3])
    starts = scaled(scales, unit_start)
    true = jax.tree.map(lambda leaf: leaf[:, 0], flows(chain, starts, [3.0]))
    linear = jax.vmap(lambda m: theory.linearised_origin_flow(m, chain, 3.0))(starts)
    differences = jax.vmap(_trees.norm)(_trees.subtract(true, linear))
    orders = np.diff(np.log(differences)) / np.diff(np.log(scales))
    assert np.all(orders > 1.95), orders


def test_start_on_the_stable_manifold_has_no_condensation_direction():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    excess = chain.stationary - 0.25
    row = chain.stationary / jnp.linalg.norm(chain.stationary)
    column = excess / jnp.linalg.norm(excess)
    alpha = jnp.arange(1.0, 6.0)
    model = eqx.tree_at(
        lambda m: (m.W0, m.W1),
        model,
        (jnp.outer(row, alpha), -jnp.outer(alpha, column)),
    )
    assert theory.condensation_direction(model, chain).amplitude < 1e-14


# Section 4: the second critical point.


@every_chain
def test_second_critical_point_is_critical_and_predicts_the_stationary_law(name):
    chain = named_chain(name)
    loss = PopulationLoss(chain)
    alpha = jnp.array([1.0, -2.0, 0.5, 3.0, 0.1])
    point = theory.second_critical_point(chain, width=5, key_width=2, alpha=alpha)
    assert point.WQ.shape == (5, 2)
    assert _trees.norm(gradient(loss, point)) < 1e-15
    close(loss(point), chain.unigram_entropy)
    close(loss.predictions(point), jnp.tile(chain.stationary, (chain.num_states, 1)))
    # Balanced, and rank one along alpha.
    assert largest(theory.conserved(point)) < 1e-14
    orthogonal = jnp.eye(5) - jnp.outer(alpha, alpha) / (alpha @ alpha)
    assert largest((point.W0 @ orthogonal, orthogonal @ point.W1)) < 1e-15


@every_chain
def test_jacobian_at_second_critical_point_is_block_diagonal(name):
    chain = named_chain(name)
    point = theory.second_critical_point(chain, width=3, key_width=2)
    J = jacobian(chain, point)
    split = 2 * chain.num_states * 3
    assert jnp.max(jnp.abs(J[:split, split:])) == 0.0

    outer = jnp.linalg.eigvalsh(J[:split, :split])
    predicted = theory.outer_eigenvalues(chain)
    num_outer = chain.num_states - 1
    assert predicted.shape == (num_outer,)
    assert jnp.all(predicted < 0)
    close(outer[:num_outer], predicted)
    close(outer[num_outer:], 0.0)

    c = jnp.abs(theory.focus_rate(chain))
    attention = jnp.linalg.eigvalsh(J[split:, split:])
    expected = np.zeros(attention.size)
    expected[:2], expected[-2:] = -c, c
    close(attention, expected)


def test_scaled_attention_divides_the_focus_rate_by_root_k():
    chain = named_chain(DEFAULT)
    point = theory.second_critical_point(
        chain, width=2, key_width=3, scale_attention=True
    )
    fastest = jnp.linalg.eigvalsh(jacobian(chain, point))[-1]
    close(fastest, theory.focus_rate(chain) / jnp.sqrt(3.0))


@every_chain
def test_focus_directions_span_the_unstable_eigenspace(name):
    chain = named_chain(name)
    loss = PopulationLoss(chain)
    alpha = jnp.array([0.3, -1.0, 2.0])
    sizes = {"width": 3, "key_width": 2, "alpha": alpha}
    point = theory.second_critical_point(chain, **sizes)
    directions = theory.focus_directions(chain, **sizes)
    flat = jax.vmap(lambda direction: _trees.ravel(direction)[0])(directions)
    close(flat @ flat.T, jnp.eye(2))
    products = jax.jit(jax.vmap(lambda v: hessian_vector_product(loss, point, v)))(
        directions
    )
    trees_close(products, _trees.scale(-jnp.abs(theory.focus_rate(chain)), directions))


@every_chain
def test_sign_of_focus_rate_is_the_sign_of_attention_to_frequent_tokens(name):
    chain = named_chain(name)
    sizes: dict[str, Any] = {"width": 3, "key_width": 1}
    direction = jax.tree.map(
        lambda leaf: leaf[0], theory.focus_directions(chain, **sizes)
    )
    point = _trees.add_scaled(
        theory.second_critical_point(chain, **sizes), 0.1, direction
    )
    # Phi is along +- pi pi^T, and so is the attention paid to the most frequent token.
    Phi = point.attention_logits()
    target = jnp.outer(chain.stationary, chain.stationary)
    sign = jnp.sign(theory.focus_rate(chain))
    close(jnp.sum(Phi * target) / jnp.linalg.norm(Phi) / jnp.linalg.norm(target), sign)
    top = jnp.argmax(chain.stationary)
    moved = PopulationLoss(chain).attention(point)[:, top] - chain.stationary[top]
    assert jnp.all(sign * moved > 0)
    assert jnp.all(jnp.sign(moved) == sign)


def test_zoo_holds_both_signs_of_the_focus_rate():
    rates = {name: float(theory.focus_rate(named_chain(name))) for name in CHAINS}
    assert rates["dense, focus"] > 1e-3
    assert rates["dense, defocus"] < -1e-4
    assert rates["lazy with negative lam"] < -1e-4


def test_focus_rate_of_lazy_chains_is_linear_in_lam():
    pi = jnp.array([0.6, 0.25, 0.15])
    rates = jax.jit(jax.vmap(lambda lam: theory.focus_rate(lazy_chain(pi, lam))))(
        jnp.array([-0.15, 0.0, 0.3, 0.9])
    )
    unit = theory.focus_rate(lazy_chain(pi, 0.5)) / 0.5
    assert unit > 0
    close(rates, unit * jnp.array([-0.15, 0.0, 0.3, 0.9]))


def test_predictions_are_differentiable_in_the_law():
    def perturbed(s):
        logits = jnp.log(jnp.array([0.6, 0.25, 0.15])) + s * jnp.array([0.3, -1.0, 0.5])
        return lazy_chain(jax.nn.softmax(logits), 0.4)

    for prediction in (
        theory.origin_rate,
        theory.focus_rate,
        lambda chain: theory.outer_eigenvalues(chain)[0],
        lambda chain: jnp.sum(theory.second_critical_point(chain, width=2).W1 ** 2),
    ):
        along = jax.jit(lambda s, f=prediction: f(perturbed(s)))
        derivative = jax.jit(jax.grad(along))(0.0)
        h = 1e-5
        difference = (along(h) - along(-h)) / (2 * h)
        close(derivative, difference, 1e-8)


def test_check_values_of_the_default_chain():
    chain = named_chain(DEFAULT)
    close(theory.origin_rate(chain), 0.4595012949, 1e-10)
    close(theory.focus_rate(chain), 0.0797847014, 1e-10)
    close(theory.outer_eigenvalues(chain), [-0.9009527, -0.2176767, -0.0443008], 5e-8)
    point = theory.second_critical_point(chain, width=4)
    close(jnp.linalg.norm(point.W0), 2.0307932534, 1e-10)
    close(jnp.linalg.norm(point.W1), 2.0307932534, 1e-10)
    levels = theory.plateaus(chain)
    close(levels.origin, 1.386294, 5e-7)
    close(levels.second, 0.727139, 5e-7)
    close(levels.floor, 0.553611, 5e-7)


@every_chain
def test_plateaus_are_the_losses_of_the_two_saddles_and_the_floor(name):
    chain = named_chain(name)
    loss = PopulationLoss(chain)
    levels = theory.plateaus(chain)
    close(loss(_trees.scale(0.0, random_model(chain))), levels.origin)
    close(loss(theory.second_critical_point(chain, width=2)), levels.second)
    log_P = jnp.log(chain.transition)
    close(-chain.pair_expectation(log_P), levels.floor)


def test_uniform_law_merges_the_first_two_saddles_without_nan():
    chain = lazy_chain(jnp.full(4, 0.25), 0.3)
    point = theory.second_critical_point(chain, width=2)
    assert largest(point) < 1e-15
    assert theory.origin_rate(chain) == 0.0
    assert jnp.abs(theory.focus_rate(chain)) < 1e-15
    assert largest(theory.outer_eigenvalues(chain)) < 1e-15
    assert theory.escape_times(chain).origin == jnp.inf
    predicted = theory.condensation_direction(random_model(chain), chain)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(predicted))


@pytest.mark.slow
def test_escape_times_grow_with_the_logarithm_of_the_scale():
    chain = lazy_chain([0.6, 0.3, 0.1], 0.9)
    unit_start = random_model(chain, width=2, key_width=1, scale=1.0)
    predicted = theory.escape_times(chain)
    levels = theory.plateaus(chain)
    scales = (1e-6, 1e-8)
    end = 1.2 * np.log(1 / scales[1]) * float(predicted.origin + predicted.focus)
    times = np.arange(0.0, np.ceil(end), 0.2)
    paths = flows(chain, scaled(scales, unit_start), times, steps_per_unit=10)
    # Each stage ends when its order parameter passes a fixed level.
    middle = 0.5 * (levels.origin + levels.second)
    losses = jax.vmap(jax.vmap(PopulationLoss(chain)))(paths)
    phi = jax.vmap(jax.vmap(AttentionModel.attention_logits))(paths)
    attention = jnp.linalg.norm(phi, axis=(-2, -1))
    escapes = [
        [np.interp(0.0, level, times) for level in (middle - loss, size - 0.1)]
        for loss, size in zip(
            np.minimum.accumulate(losses, axis=1),
            np.maximum.accumulate(attention, axis=1),
            strict=True,
        )
    ]
    (first, second), (first_late, second_late) = escapes
    spread = np.log(scales[0] / scales[1])
    np.testing.assert_allclose(
        (first_late - first) / spread, predicted.origin, rtol=1e-3
    )
    np.testing.assert_allclose(
        (second_late - second) / spread,
        predicted.origin + predicted.focus,
        rtol=1e-3,
    )


# Section 7: the best logits of bounded rank.


def test_best_rank_loss_reproduces_the_later_plateaus_of_the_default_chain():
    chain = named_chain(DEFAULT)
    for rank, level in ((1, 0.63335989), (2, 0.56265472)):
        best = theory.best_rank_loss(chain, rank)
        assert best.outcome == theory.RankOutcome.converged
        close(best.loss, level, 1e-8)
        assert best.grad_norm < 1e-7
        assert best.spread < 1e-12


@every_chain
def test_best_rank_loss_falls_with_the_rank_down_to_the_floor(name):
    chain = named_chain(name)
    losses = [theory.best_rank_loss(chain, rank).loss for rank in (1, 2, 3)]
    assert losses[0] < chain.unigram_entropy
    assert losses[1] < losses[0] - 1e-6
    assert losses[2] < losses[1] - 1e-6
    # Rank d - 1 suffices: a shift of a row of logits changes no prediction.
    close(losses[2], chain.entropy_rate)


@pytest.mark.slow
@every_chain
def test_best_logits_have_the_rank_and_are_stationary_on_its_manifold(name):
    chain = named_chain(name)
    best = theory.best_rank_loss(chain, 2)
    values = jnp.linalg.svd(best.logits, compute_uv=False)
    assert jnp.all(values[2:] < 1e-13 * values[0])

    def loss(logits):
        return -chain.pair_expectation(jax.nn.log_softmax(logits, axis=-1))

    close(loss(best.logits), best.loss)
    slope = jax.grad(loss)(best.logits)
    left, _, right = jnp.linalg.svd(best.logits)
    # The gradient lies in the normal space of the rank-two matrices.
    assert jnp.max(jnp.abs(left[:, :2].T @ slope)) < 1e-7
    assert jnp.max(jnp.abs(slope @ right[:2].T)) < 1e-7
    # No sampled competitor of that rank is better.
    U, V = jax.random.normal(jax.random.key(7), (2, 5000, 4, 2))
    competitors = jax.vmap(loss)(jnp.einsum("nir,njr->nij", U, V))
    assert jnp.min(competitors) > best.loss


@pytest.mark.slow
def test_unfinished_and_unconfirmed_searches_say_so():
    chain = named_chain(DEFAULT)
    short = theory.best_rank_loss(chain, 2, max_steps=5)
    assert short.outcome == theory.RankOutcome.not_converged
    assert short.grad_norm > short.tolerance
    assert short.loss > theory.best_rank_loss(chain, 2).loss
    alone = theory.best_rank_loss(chain, 2, num_starts=1)
    assert alone.outcome == theory.RankOutcome.one_start
    assert "no other start" in str(alone)


@pytest.mark.slow
def test_best_rank_loss_works_under_jit_and_vmap():
    pi = jnp.array([0.75, 0.19, 0.05, 0.01])

    @jax.jit
    @jax.vmap
    def batched(lam):
        return theory.best_rank_loss(lazy_chain(pi, lam), 1)

    lams = jnp.array([0.3, 0.5])
    best = batched(lams)
    assert jnp.all(best.outcome == theory.RankOutcome.converged)
    for lam, loss in zip(lams, best.loss, strict=True):
        close(theory.best_rank_loss(lazy_chain(pi, lam), 1).loss, loss)


# Checks of arguments, results.


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: theory.best_rank_loss(c, 0), "rank must lie between 1 and d = 4"),
        (lambda c: theory.best_rank_loss(c, 5), "rank must lie between 1 and d = 4"),
        (lambda c: theory.best_rank_loss(c, 1, num_starts=0), "num_starts .* got 0"),
        (lambda c: theory.second_critical_point(c, width=0), "width .* got 0"),
        (
            lambda c: theory.second_critical_point(c, width=2, key_width=-1),
            "key_width .* got -1",
        ),
        (
            lambda c: theory.second_critical_point(c, width=2, alpha=jnp.ones(3)),
            r"alpha must have shape \(2,\); got \(3,\)",
        ),
        (
            lambda c: theory.focus_directions(c, width=2, alpha=jnp.zeros(2)),
            "alpha must not be zero",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(named_chain(DEFAULT))


@pytest.mark.parametrize(
    "call",
    [
        theory.descent_direction,
        theory.condensation_direction,
        lambda model, chain: theory.linearised_origin_flow(model, chain, 1.0),
    ],
)
def test_model_and_chain_must_have_the_same_vocabulary(call):
    model = random_model(named_chain(DEFAULT))
    with pytest.raises(ValueError, match=r"vocab 4 .* 3 states"):
        call(model, lazy_chain([0.5, 0.3, 0.2], 0.1))


def test_single_precision_models_meet_double_precision_chains():
    chain = named_chain(DEFAULT)
    double = random_model(chain)
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), double)
    for call in (
        theory.descent_direction,
        theory.condensation_direction,
        lambda model, chain: theory.linearised_origin_flow(model, chain, 1.0),
    ):
        low, high = call(single, chain), call(double, chain)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(low))
        trees_close(low, high, 1e-5)


def test_results_print_as_aligned_summaries():
    chain = named_chain(DEFAULT)
    text = str(theory.plateaus(chain))
    assert text.splitlines()[1].split() == ["origin", "1.386294361"]
    assert "2.176272431" in str(theory.escape_times(chain))
    model = random_model(chain)
    assert "5x5" in str(theory.conserved(model))
    assert "amplitude" in str(theory.condensation_direction(model, chain))
    assert "nats" in str(theory.best_rank_loss(chain, 1))
    shapes = []
    jax.jit(lambda m: shapes.append(str(theory.conserved(m))))(model)
    assert "traced" in shapes[0]


def test_a_model_trained_on_a_two_level_law_sees_equal_low_tokens():
    # Symmetric low-frequency tokens have equal rows in every prediction.
    chain = lazy_chain(two_level_law(vocab=4, top=0.7), 0.5)
    point = theory.second_critical_point(chain, width=2)
    close(point.W0[1:], jnp.tile(point.W0[1], (3, 1)))
    close(point.W1[:, 1:], jnp.tile(point.W1[:, 1:2], (1, 3)))


def test_closed_forms_see_the_chain_and_not_its_representation():
    lazy = named_chain(DEFAULT)
    dense = MarkovChain(lazy.transition)
    model: AttentionModel = random_model(lazy)
    close(theory.focus_rate(dense), theory.focus_rate(lazy))
    close(theory.outer_eigenvalues(dense), theory.outer_eigenvalues(lazy))
    trees_close(
        theory.descent_direction(model, dense), theory.descent_direction(model, lazy)
    )
