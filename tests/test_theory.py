"""The closed forms of the theory against automatic differentiation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import _trees, theory
from flowsim.derivatives import gradient, hessian_vector_product
from flowsim.loss import PopulationLoss, SampleLoss
from flowsim.markov import MarkovChain, lazy_chain, two_level_law
from flowsim.model import AttentionModel

from .comparisons import DEFAULT, close, every_chain, jacobian, largest, trees_close
from .problems import CHAINS, named_chain, random_model

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


@pytest.mark.slow
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
