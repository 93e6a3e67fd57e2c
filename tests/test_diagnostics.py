"""Diagnostics: each number is what its name says, and finite where it matters."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import _trees, theory
from flowsim.diagnostics import (
    diagnose,
    embedding_path,
    entropy,
    softmax_entropy,
)
from flowsim.flow import gradient_flow
from flowsim.loss import PopulationLoss, SampleLoss
from flowsim.markov import MarkovChain, lazy_chain

from .problems import CHAINS, named_chain, random_model

every_chain = pytest.mark.parametrize("name", CHAINS)
DEFAULT = "default"
NAMES = ("W0", "W1", "WQ", "WK")


def close(x, y, tolerance=1e-13):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def all_finite(tree):
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(tree))


# Ranks.


def test_singular_values_are_those_of_the_matrices():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    seen = diagnose(chain, model)
    for name in NAMES:
        expected = np.linalg.svd(np.asarray(getattr(model, name)), compute_uv=False)
        close(getattr(seen.singular_values, name), expected)
        close(getattr(seen.rank_ratio(), name), expected[1] / expected[0])
        close(getattr(seen.rank_ratio(3), name), expected[2] / expected[0])


def test_rank_ratios_are_resolved_down_to_machine_precision():
    chain = named_chain(DEFAULT)
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (6, 6)))[0]
    left = jnp.linalg.qr(basis[:4, :4])[0]
    W0 = left @ jnp.diag(jnp.array([2.0, 2e-9, 0.0, 0.0])) @ basis[:, :4].T
    model = eqx.tree_at(lambda m: m.W0, random_model(chain, width=6), W0)
    np.testing.assert_allclose(diagnose(chain, model).rank_ratio().W0, 1e-9, rtol=1e-5)


def test_zero_matrices_and_single_columns_have_ratio_zero():
    chain = named_chain(DEFAULT)
    origin = _trees.scale(0.0, random_model(chain))
    seen = diagnose(chain, origin)
    assert all_finite(seen)
    assert [float(r) for r in vars(seen.rank_ratio()).values()] == [0.0] * 4
    assert seen.embedding_cosine == seen.readout_cosine == seen.attention_cosine == 0.0
    narrow = diagnose(chain, random_model(chain, width=1, key_width=1))
    assert float(narrow.rank_ratio().W0) == 0.0


def test_rank_ratio_starts_at_the_second_singular_value():
    seen = diagnose(named_chain(DEFAULT), random_model(named_chain(DEFAULT)))
    with pytest.raises(ValueError, match="order must be at least 2; got 1"):
        seen.rank_ratio(1)


# Alignments.


@every_chain
def test_condensed_weights_are_aligned_with_the_stationary_law(name):
    chain = named_chain(name)
    model = random_model(chain)
    directions = theory.condensation_direction(model, chain)
    for sign in (1.0, -1.0):
        condensed = eqx.tree_at(
            lambda m: (m.W0, m.W1), model, (sign * directions.W0, directions.W1)
        )
        seen = diagnose(chain, condensed)
        close(seen.embedding_cosine, 1.0)
        close(seen.readout_cosine, 1.0)


def test_cosines_are_those_of_the_leading_singular_vectors():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    seen = diagnose(PopulationLoss(chain), model)
    pi = np.asarray(chain.stationary)
    left = np.linalg.svd(np.asarray(model.W0))[0][:, 0]
    right = np.linalg.svd(np.asarray(model.W1))[2][0]
    excess = pi - 0.25
    close(seen.embedding_cosine, abs(left @ pi) / np.linalg.norm(pi))
    close(seen.readout_cosine, abs(right @ excess) / np.linalg.norm(excess))
    assert 0.01 < seen.embedding_cosine < 0.99
    assert 0.01 < seen.readout_cosine < 0.99


@every_chain
def test_attention_cosine_has_the_sign_of_the_focus_rate(name):
    chain = named_chain(name)
    point = theory.second_critical_point(chain, width=3, key_width=2)
    directions = theory.focus_directions(chain, width=3, key_width=2)
    direction = jax.tree.map(lambda leaf: leaf[1], directions)
    for size in (1.0, 1e-80):  # Phi is of the order size^2.
        seen = diagnose(chain, _trees.add_scaled(point, size, direction))
        close(seen.attention_cosine, jnp.sign(theory.focus_rate(chain)))
        scale = 0.5 * size**2 * jnp.sum(point.W0**2)
        np.testing.assert_allclose(seen.attention_scale, scale, rtol=1e-12)


# Attention.


@every_chain
def test_attention_quantities_are_read_off_the_attention_matrix(name):
    chain = named_chain(name)
    model = random_model(chain)
    seen = diagnose(chain, model)
    A = np.asarray(PopulationLoss(chain).attention(model))
    pi = np.asarray(chain.stationary)
    top = int(np.argmax(pi))
    entropies = -np.sum(A * np.log(A), axis=1)
    close(seen.top_attention, A[:, top])
    close(seen.self_attention, np.diag(A))
    close(seen.attention_entropy, entropies)
    close(seen.mean_top_attention, np.sum(pi * A[:, top]))
    close(seen.mean_self_attention, np.sum(pi * np.diag(A)))
    close(seen.mean_attention_entropy, np.sum(pi * entropies))
    close(seen.embedding_norms, np.sqrt(np.sum(np.asarray(model.W0) ** 2, axis=1)))


def test_renaming_tokens_renames_the_diagnostics():
    chain = named_chain("dense, focus")
    model = random_model(chain)
    order = jnp.array([2, 0, 3, 1])
    renamed_chain = MarkovChain(chain.transition[order][:, order])
    renamed = eqx.tree_at(
        lambda m: (m.W0, m.W1), model, (model.W0[order], model.W1[:, order])
    )
    before, after = diagnose(chain, model), diagnose(renamed_chain, renamed)
    for name, value in vars(before).items():
        per_token = name in ("top_attention", "self_attention", "attention_entropy")
        per_token = per_token or name == "embedding_norms"
        expected = value[order] if per_token else value
        jax.tree.map(partial(close, tolerance=1e-12), vars(after)[name], expected)


def test_saturated_attention_has_entropy_zero_and_finite_diagnostics():
    chain = named_chain(DEFAULT)
    model = random_model(chain, scale=30.0)
    seen = diagnose(chain, model)
    attention = PopulationLoss(chain).attention(model)
    assert jnp.any(attention == 0.0)
    assert all_finite(seen)
    assert jnp.all(seen.attention_entropy >= 0.0)
    assert jnp.min(seen.attention_entropy) < 1e-10


# Entropies.


def test_entropy_of_a_masked_softmax_is_finite_with_its_derivatives():
    logits = jnp.array([1.0, 2.0, -jnp.inf])
    value, slope = jax.value_and_grad(softmax_entropy)(logits)
    close(value, 0.5822031089, 1e-10)
    # dH/dz_j = -p_j (log p_j + H)
    p = jnp.array([1.0, jnp.e]) / (1.0 + jnp.e)
    close(slope[:2], -p * (jnp.log(p) + value))
    assert slope[2] == 0.0
    assert all_finite(jax.jit(jax.hessian(softmax_entropy))(logits))


def test_softmax_entropy_is_the_entropy_of_the_softmax():
    logits = 3.0 * jax.random.normal(jax.random.key(0), (6, 5))
    expected = entropy(jax.nn.softmax(logits, axis=-1))
    close(softmax_entropy(logits), expected)
    close(softmax_entropy(jnp.zeros(7)), jnp.log(7.0))
    h = 1e-6
    direction = jnp.ones((6, 5)) * jnp.arange(5.0)
    difference = softmax_entropy(logits + h * direction) - softmax_entropy(
        logits - h * direction
    )
    _, slope = jax.jvp(softmax_entropy, (logits,), (direction,))
    np.testing.assert_allclose(slope, difference / (2 * h), rtol=1e-7, atol=1e-8)


def test_underflowing_probabilities_do_no_harm():
    value, slope = jax.value_and_grad(softmax_entropy)(jnp.array([0.0, -1e4, 0.0]))
    close(value, jnp.log(2.0))
    assert all_finite(slope)


def test_entropy_of_probabilities_takes_zero_log_zero_as_zero():
    p = jnp.array([0.5, 0.0, 0.5])
    value, slope = jax.value_and_grad(entropy)(p)
    close(value, jnp.log(2.0))
    close(slope, jnp.array([jnp.log(2.0) - 1.0, 0.0, jnp.log(2.0) - 1.0]))


# Along a trajectory.


def test_conserved_quantities_are_carried_along():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    jax.tree.map(close, diagnose(chain, model).conserved, theory.conserved(model))


@pytest.mark.slow
def test_diagnostics_map_over_a_path_and_observe_a_flow():
    chain = named_chain(DEFAULT)
    loss = PopulationLoss(chain)
    run = gradient_flow(
        loss,
        random_model(chain),
        t1=1.0,
        save=jnp.linspace(0.0, 1.0, 5),
        observe=partial(diagnose, loss),
    )
    mapped = jax.jit(jax.vmap(partial(diagnose, loss)))(run.models)
    jax.tree.map(partial(close, tolerance=1e-10), run.observables, mapped)
    third = diagnose(loss, run.model_at(2))
    jax.tree.map(
        partial(close, tolerance=1e-10),
        jax.tree.map(lambda leaf: leaf[2], mapped),
        third,
    )
    assert mapped.rank_ratio().WQ.shape == (5,)
    drift = theory.conserved_drift(mapped.conserved)
    assert max(float(change) for change in drift.values()) < 1e-5
    text = str(mapped)
    assert f"{float(mapped.embedding_cosine[-1]):.6g}" in text
    assert "sigma2/sigma1 WK" in text


def test_single_precision_models_stay_single():
    chain = named_chain(DEFAULT)
    seen = diagnose(chain, random_model(chain, dtype=jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(seen)} == {np.dtype("float32")}


@pytest.mark.parametrize(
    "subject, model, message",
    [
        (
            SampleLoss(jnp.array([[0, 1]]), jnp.array([1])),
            random_model(named_chain(DEFAULT)),
            "PopulationLoss or a MarkovChain; got SampleLoss",
        ),
        (
            lazy_chain([0.5, 0.3, 0.2], 0.1),
            random_model(named_chain(DEFAULT)),
            r"3 tokens.*\(4, 5\)",
        ),
        (
            named_chain(DEFAULT),
            jax.tree.map(lambda x: x[None], random_model(named_chain(DEFAULT))),
            r"\(1, 4, 5\). Map over a time axis",
        ),
    ],
)
def test_subjects_that_do_not_fit_are_named(subject, model, message):
    with pytest.raises(ValueError, match=message):
        diagnose(subject, model)


# The embedding path.


def stacked(W0):
    """A path of models with the given embeddings (t, d, m)."""
    t, d, m = W0.shape
    model = random_model(lazy_chain(jnp.full(d, 1 / d), 0.0), width=m)
    path = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (t, *leaf.shape)), model)
    return eqx.tree_at(lambda p: p.W0, path, W0)


def test_planar_embedding_path_is_reproduced_exactly():
    plane = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (6, 2)))[0]
    inside = jnp.array([3.0, 1.0]) * jax.random.normal(jax.random.key(1), (9, 4, 2))
    offset = 0.2 * jnp.arange(6.0)
    W0 = inside @ plane.T + offset
    path = embedding_path(stacked(W0))
    close(path.coordinates @ path.basis + path.center, W0)
    close(path.basis @ path.basis.T, jnp.eye(2))
    close(jnp.sum(path.explained), 1.0)
    assert path.explained[0] > path.explained[1] > 0.01


def test_embedding_components_are_the_eigenvectors_of_the_covariance():
    W0 = jax.random.normal(jax.random.key(2), (7, 4, 3)) * jnp.array([1.0, 4.0, 2.0])
    path = embedding_path(stacked(W0))
    rows = np.asarray(W0).reshape(-1, 3)
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    close(path.explained, values[:0:-1] / values.sum())
    close(jnp.abs(path.basis @ vectors[:, :0:-1]), jnp.eye(2), 1e-12)
    close(path.center, rows.mean(axis=0))
    assert jnp.all(jnp.max(path.basis, axis=1) == jnp.max(jnp.abs(path.basis), axis=1))


@pytest.mark.slow
def test_embedding_path_has_no_nan_when_standing_still_or_one_dimensional():
    still = embedding_path(stacked(jnp.ones((3, 4, 5))))
    assert all_finite(still)
    close(still.coordinates, 0.0)
    close(still.explained, 0.0)
    line = embedding_path(stacked(jnp.arange(12.0).reshape(3, 4, 1)))
    assert all_finite(line)
    assert line.coordinates.shape == (3, 4, 2)
    close(line.coordinates[..., 1], 0.0)
    close(line.explained, [1.0, 0.0])
    assert "explained" in str(line)
    # Fewer rows than dimensions.
    short = embedding_path(stacked(jnp.eye(4)[None, :2, :]))
    close(short.coordinates @ short.basis + short.center, jnp.eye(4)[None, :2])
    close(short.explained, [1.0, 0.0])


def test_embedding_path_needs_a_time_axis():
    with pytest.raises(ValueError, match=r"\(t, d, m\); got \(4, 5\)"):
        embedding_path(random_model(named_chain(DEFAULT)))
