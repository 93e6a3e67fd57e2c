"""The attention model: what it computes, what it cannot see, what it refuses."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.loss import PopulationLoss
from flowsim.markov import lazy_chain
from flowsim.model import AttentionModel


def make(*, vocab=4, width=5, key_width=3, scale=0.7, seed=0, **options):
    return AttentionModel.init(
        jax.random.key(seed),
        vocab=vocab,
        width=width,
        key_width=key_width,
        scale=scale,
        **options,
    )


def one_hot_formula(model, tokens):
    """softmax(mask(X Phi X^T)) X W0 W1, word by word, in NumPy."""
    W0, W1, WQ, WK = (np.asarray(w) for w in (model.W0, model.W1, model.WQ, model.WK))
    X = np.eye(model.vocab)[np.asarray(tokens)]
    Phi = W0 @ WQ @ WK.T @ W0.T
    if model.scale_attention:
        Phi = Phi / np.sqrt(model.key_width)
    scores = X @ Phi @ X.T
    scores[np.triu_indices(len(tokens), k=1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ X @ W0 @ W1


@pytest.mark.parametrize("scale_attention", [False, True])
@pytest.mark.parametrize("tokens", [[2], [0, 0, 3], [3, 1, 0, 2, 1, 1, 0]])
def test_forward_pass_is_the_one_hot_formula(tokens, scale_attention):
    model = make(scale_attention=scale_attention)
    np.testing.assert_allclose(
        model(jnp.array(tokens)), one_hot_formula(model, tokens), atol=1e-14
    )


def test_scaled_attention_differs_from_unscaled():
    tokens = jnp.array([3, 1, 0, 2])
    difference = make()(tokens) - make(scale_attention=True)(tokens)
    assert jnp.max(jnp.abs(difference)) > 1e-3
    np.testing.assert_allclose(
        make().attention_logits(),
        jnp.sqrt(3.0) * make(scale_attention=True).attention_logits(),
        rtol=1e-14,
    )


@pytest.mark.parametrize("query", range(3))
def test_context_with_stationary_frequencies_gives_the_population_logits(query):
    # Ten tokens with frequencies (.5, .3, .2); the last one asks, the order of the
    # others is arbitrary.
    chain = lazy_chain([0.5, 0.3, 0.2], 0.4)
    model = make(vocab=3)
    rest = [0] * 5 + [1] * 3 + [2] * 2
    rest.remove(query)
    population = PopulationLoss(chain).logits(model)[query]
    for seed in range(3):
        context = [*np.random.default_rng(seed).permutation(rest), query]
        assert np.bincount(context).tolist() == [5, 3, 2]
        np.testing.assert_allclose(
            model(jnp.array(context))[-1], population, atol=1e-14
        )
    # With other frequencies it does not.
    other = model(jnp.array([*rest, query, query]))[-1]
    assert jnp.max(jnp.abs(other - population)) > 1e-3


def test_no_position_sees_later_tokens():
    model = make()
    tokens = jnp.array([3, 1, 0, 2, 1])
    full = model(tokens)
    for length in range(1, 6):
        np.testing.assert_allclose(model(tokens[:length]), full[:length], atol=1e-14)
    changed = model(tokens.at[3].set(0))
    np.testing.assert_array_equal(changed[:3], full[:3])
    assert jnp.all(jnp.max(jnp.abs(changed[3:] - full[3:]), axis=1) > 1e-3)


def test_derivative_of_early_logits_by_late_tokens_is_zero():
    # Give every position its own token, so that its embedding row is its input.
    model = make()

    def early_logits(row):
        W0 = model.W0.at[3].set(row)
        shifted = AttentionModel(W0, model.W1, model.WQ, model.WK)
        return shifted(jnp.array([0, 1, 2, 3]))

    jacobian = jax.jacobian(early_logits)(model.W0[3])
    assert jnp.max(jnp.abs(jacobian[:3])) == 0.0
    assert jnp.max(jnp.abs(jacobian[3])) > 1e-3


def test_every_leaf_is_an_array_so_a_model_is_its_own_parameter_vector():
    model = make()
    shapes = [leaf.shape for leaf in jax.tree.leaves(model)]
    assert shapes == [(4, 5), (5, 4), (5, 3), (5, 3)]
    assert (model.vocab, model.width, model.key_width) == (4, 5, 3)


def test_model_maps_over_stacked_parameters_and_contexts():
    models = [make(seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    assert (stacked.vocab, stacked.width, stacked.key_width) == (4, 5, 3)
    tokens = jnp.array([[0, 1, 2], [3, 3, 1]])
    batched = jax.jit(jax.vmap(lambda m: jax.vmap(m)(tokens)))(stacked)
    for i, j in itertools.product(range(3), range(2)):
        np.testing.assert_allclose(batched[i, j], models[i](tokens[j]), atol=1e-14)


def test_initial_entries_are_independent_normal_with_the_given_scale():
    model = make(vocab=300, width=200, key_width=200, scale=0.02)
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(model)]
    for leaf in leaves:
        # Five standard errors of mean and variance.
        assert abs(leaf.mean()) < 5 * 0.02 / np.sqrt(leaf.size)
        assert abs(leaf.var() / 0.02**2 - 1) < 5 * np.sqrt(2 / leaf.size)
        assert abs((leaf**4).mean() / 0.02**4 - 3) < 5 * np.sqrt(96 / leaf.size)
    size = leaves[2].size
    assert abs(np.corrcoef(leaves[2], leaves[3])[0, 1]) < 5 / np.sqrt(size)
    again = make(vocab=300, width=200, key_width=200, scale=0.02)
    assert all(
        np.array_equal(a, np.asarray(b).ravel())
        for a, b in zip(leaves, jax.tree.leaves(again), strict=True)
    )


def test_key_width_defaults_to_width_and_dtype_to_the_current_precision():
    model = AttentionModel.init(jax.random.key(0), vocab=3, width=2)
    assert model.WQ.shape == (2, 2)
    assert model.W0.dtype == jnp.float64
    single = AttentionModel.init(jax.random.key(0), vocab=3, width=2, dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(single)} == {np.dtype("float32")}
    assert single(jnp.array([0, 1])).dtype == jnp.float32


def matrices(d=3, m=2, k=2, dtype=float) -> dict[str, Any]:
    return {
        "W0": jnp.ones((d, m), dtype),
        "W1": jnp.ones((m, d), dtype),
        "WQ": jnp.ones((m, k), dtype),
        "WK": jnp.ones((m, k), dtype),
    }


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("W0", jnp.ones((4, 2)), r"agree in d, m and k; got W0 \(4, 2\)"),
        ("W1", jnp.ones((4, 3)), r"agree in d, m and k.*W1 \(4, 3\)"),
        ("WQ", jnp.ones((3, 2)), r"agree in d, m and k.*WQ \(3, 2\)"),
        ("WK", jnp.ones((2, 3)), r"agree in d, m and k.*WK \(2, 3\)"),
        ("WK", jnp.ones(2), r"must be matrices.*\(2,\)"),
        ("WK", jnp.ones((2, 2), int), "WK must be floating point; got int64"),
        ("WK", jnp.ones((7, 2, 2)), r"same leading axes.*\(7, 2, 2\)"),
        ("W0", [[1.0, 1.0]] * 3, "W0 must be an array; got list"),
    ],
)
def test_matrices_that_do_not_fit_are_named(name, value, message):
    AttentionModel(**matrices())
    with pytest.raises(ValueError, match=message):
        AttentionModel(**{**matrices(), name: value})


@pytest.mark.parametrize("name", ["vocab", "width", "key_width"])
@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_sizes_must_be_positive_integers(name, size):
    sizes = {"vocab": 3, "width": 2, "key_width": 2, name: size}
    with pytest.raises(ValueError, match=f"{name} must be a positive integer; got"):
        AttentionModel.init(jax.random.key(0), **sizes)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (jnp.array([[0, 1], [1, 2]]), r"shape \(s,\); got int64 of shape \(2, 2\)"),
        (jnp.array([0.0, 1.0]), "must be integers.*got float64"),
        (jnp.array([0, 4]), r"lie in 0 \.\.\. 3; got 4"),
        (jnp.array([-1, 2]), r"lie in 0 \.\.\. 3; got -1"),
    ],
)
def test_contexts_must_be_vectors_of_known_tokens(tokens, message):
    with pytest.raises(ValueError, match=message):
        make()(tokens)
