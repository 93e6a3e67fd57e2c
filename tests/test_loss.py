"""The two losses: their definitions, their limits, and the floor below them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flowsim.derivatives import gradient
from flowsim.loss import PopulationLoss, SampleLoss, weighted_attention
from flowsim.markov import lazy_chain
from flowsim.model import AttentionModel

from .problems import CHAINS, named_chain, random_model

every_chain = pytest.mark.parametrize("name", CHAINS)
DEFAULT = "default"


def perfect_model(chain, contrast=3.0):
    """A model of width d that predicts every row of P exactly: A M = log P."""
    identity = jnp.eye(chain.num_states)
    weights = chain.stationary * jnp.exp(contrast * identity)
    attention = weights / jnp.sum(weights, axis=1, keepdims=True)
    W1 = jnp.linalg.solve(attention, jnp.log(chain.transition))
    return AttentionModel(identity, W1, contrast * identity, identity)


# The population loss.


@every_chain
@pytest.mark.parametrize("scale_attention", [False, True])
def test_population_loss_is_its_defining_sum(name, scale_attention):
    chain = named_chain(name)
    model = random_model(chain, scale_attention=scale_attention)
    pi, P = np.asarray(chain.stationary), np.asarray(chain.transition)
    Phi = np.asarray(model.W0 @ model.WQ @ model.WK.T @ model.W0.T)
    Phi = Phi / np.sqrt(3.0) if scale_attention else Phi
    A = pi * np.exp(Phi)
    A = A / A.sum(axis=1, keepdims=True)
    p = np.exp(A @ np.asarray(model.W0) @ np.asarray(model.W1))
    p = p / p.sum(axis=1, keepdims=True)
    loss = PopulationLoss(chain)
    np.testing.assert_allclose(loss.attention(model), A, rtol=1e-13)
    np.testing.assert_allclose(loss.predictions(model), p, rtol=1e-13)
    np.testing.assert_allclose(loss(model), -np.sum(pi[:, None] * P * np.log(p)))


@every_chain
def test_no_model_is_below_the_entropy_rate(name):
    chain = named_chain(name)
    loss = PopulationLoss(chain)
    scales = jnp.repeat(jnp.array([0.1, 0.5, 1.0, 2.0]), 50)
    models = jax.vmap(
        lambda key, scale: AttentionModel.init(
            key, vocab=4, width=3, key_width=2, scale=scale
        )
    )(jax.random.split(jax.random.key(0), 200), scales)
    losses = jax.vmap(loss)(models)
    assert jnp.all(losses > chain.entropy_rate)
    # It is attained, where the gradient vanishes.
    perfect = perfect_model(chain)
    np.testing.assert_allclose(loss(perfect), chain.entropy_rate, rtol=1e-14)
    slope = gradient(loss, perfect)
    assert all(jnp.max(jnp.abs(leaf)) < 1e-14 for leaf in jax.tree.leaves(slope))


@every_chain
def test_population_gradient_agrees_with_finite_differences(name):
    chain = named_chain(name)
    check_grads(
        PopulationLoss(chain),
        (random_model(chain),),
        order=1,
        modes=("fwd", "rev"),
        atol=1e-7,
        rtol=1e-7,
    )


def test_logits_of_a_thousand_do_not_overflow():
    chain = named_chain(DEFAULT)
    model = random_model(chain, scale=20.0)
    loss = PopulationLoss(chain)
    assert jnp.max(jnp.abs(model.attention_logits())) > 1e3
    value, slope = jax.value_and_grad(loss)(model)
    assert jnp.isfinite(value)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(slope))


def test_population_loss_runs_in_the_precision_of_the_model():
    chain = named_chain(DEFAULT)
    single = random_model(chain, dtype=jnp.float32)
    loss = PopulationLoss(chain)
    assert loss(single).dtype == jnp.float32
    double = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), single)
    np.testing.assert_allclose(loss(single), loss(double), rtol=1e-6)


def test_population_loss_needs_a_chain_and_its_vocabulary():
    with pytest.raises(ValueError, match=r"chain must be a MarkovChain.*ndarray"):
        PopulationLoss(np.eye(3))  # pyright: ignore[reportArgumentType]
    loss = PopulationLoss(lazy_chain([0.5, 0.3, 0.2], 0.1))
    model = random_model(named_chain(DEFAULT))
    for call in (loss, loss.attention, loss.logits, loss.predictions):
        with pytest.raises(ValueError, match=r"vocab 4 .* 3 states"):
            call(model)


# The loss of a finite sample.


@pytest.fixture
def windows():
    return named_chain(DEFAULT).sample(jax.random.key(5), 30, 9)


def literal_loss(model, windows):
    """Mean cross-entropy of the last row of the masked softmax forward pass."""
    logits = jax.vmap(model)(windows[:, :-1])[:, -1]
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(log_p[jnp.arange(windows.shape[0]), windows[:, -1]])


@pytest.mark.parametrize("scale_attention", [False, True])
def test_counts_form_is_the_literal_forward_pass(windows, scale_attention):
    model = random_model(named_chain(DEFAULT), scale_attention=scale_attention)
    loss = SampleLoss(windows[:, :-1], windows[:, -1])
    np.testing.assert_allclose(loss(model), literal_loss(model, windows), rtol=1e-14)
    np.testing.assert_allclose(
        loss.logits(model), jax.vmap(model)(windows[:, :-1])[:, -1], atol=1e-14
    )
    slope = jax.grad(literal_loss)(model, windows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-15),
        gradient(loss, model),
        slope,
    )


def test_sample_loss_tends_to_the_population_loss():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    num, length = 2000, 1000
    windows = chain.sample(jax.random.key(1), num, length + 1)
    loss = SampleLoss(windows[:, :-1], windows[:, -1])
    log_p = jax.nn.log_softmax(loss.logits(model), axis=-1)
    terms = -jnp.take_along_axis(log_p, windows[:, -1:], axis=-1)
    standard_error = jnp.std(terms) / np.sqrt(num)
    assert standard_error < 0.025
    # The bias of a finite context is O(1 / length), far below the sampling error.
    assert abs(loss(model) - PopulationLoss(chain)(model)) < 4 * standard_error


def test_token_absent_from_a_window_has_no_influence_there():
    model = random_model(named_chain(DEFAULT))
    loss = SampleLoss(jnp.array([[0, 2, 2], [1, 0, 2]]), jnp.array([0, 1]))

    def logits(row):
        return loss.logits(eqx.tree_at(lambda m: m.W0, model, model.W0.at[3].set(row)))

    jacobian = jax.jacobian(logits)(model.W0[3])
    assert jnp.max(jnp.abs(jacobian)) == 0.0


def test_sample_loss_works_compiled_whether_closed_over_or_passed(windows):
    model = random_model(named_chain(DEFAULT))
    loss = SampleLoss(windows[:, :-1], windows[:, -1])
    eager = loss(model)
    np.testing.assert_allclose(jax.jit(lambda m: loss(m))(model), eager, rtol=1e-14)
    passed = eqx.filter_jit(lambda objective, m: objective(m))
    np.testing.assert_allclose(passed(loss, model), eager, rtol=1e-14)


@pytest.mark.parametrize(
    "tokens, targets, message",
    [
        (jnp.zeros(3, int), jnp.zeros(3, int), r"tokens .*\(N, s\); got int64"),
        (jnp.zeros((3, 2)), jnp.zeros(3, int), r"tokens must be integers.*float64"),
        (jnp.zeros((3, 2), int), jnp.zeros((3, 1), int), r"targets .*\(N,\)"),
        (jnp.zeros((3, 2), int), jnp.zeros(2, int), r"agree in N.*\(3, 2\).*\(2,\)"),
        (jnp.zeros((3, 0), int), jnp.zeros(3, int), r"at least 1.*\(3, 0\)"),
        (jnp.array([[0, -2]]), jnp.zeros(1, int), "not be negative; got -2"),
    ],
)
def test_windows_that_do_not_fit_are_named(tokens, targets, message):
    with pytest.raises(ValueError, match=message):
        SampleLoss(tokens, targets)


@pytest.mark.parametrize("tokens, targets", [([[0, 4]], [1]), ([[0, 1]], [4])])
def test_windows_with_tokens_unknown_to_the_model_are_refused(tokens, targets):
    model = random_model(named_chain(DEFAULT))
    loss = SampleLoss(jnp.array(tokens), jnp.array(targets))
    for call in (loss, jax.jit(lambda m: loss(m))):
        with pytest.raises(ValueError, match=r"hold token 4 .* vocab 4"):
            call(model)


# Attention with weights.


def test_weighted_attention_is_a_law_that_ignores_zero_weights():
    scores = jnp.array([0.3, -1.0, 700.0, 2.0])
    weights = jnp.array([3.0, 1.0, 0.0, 2.0])
    attention = weighted_attention(scores, weights)
    expected = np.array([3.0, 1.0, 0.0, 2.0]) * np.exp([0.3, -1.0, 0.0, 2.0])
    np.testing.assert_allclose(attention, expected / expected.sum(), rtol=1e-14)
    assert attention[2] == 0.0
    jacobian = jax.jacobian(weighted_attention)(scores, weights)
    assert jnp.all(jnp.isfinite(jacobian))
    assert jnp.all(jacobian[:, 2] == 0.0)
