"""The exact width reduction: the same flow in fewer numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim.width import reduce_width


def wide_start():
    return fs.AttentionModel.init(
        jax.random.key(1), vocab=3, width=40, key_width=2, scale=0.1
    )


def test_the_reduction_is_an_isometry_onto_the_span_of_the_start():
    wide = wide_start()
    reduction = reduce_width(wide)
    assert reduction.model.width == 10
    identity = reduction.basis.T @ reduction.basis
    np.testing.assert_allclose(identity, jnp.eye(10), atol=1e-14)
    for old, new in zip(
        jax.tree.leaves(wide),
        jax.tree.leaves(reduction.restore(reduction.model)),
        strict=True,
    ):
        np.testing.assert_allclose(new, old, atol=1e-15)


@pytest.mark.slow
def test_the_gradient_of_the_wide_model_lies_in_the_reduced_subspace():
    chain = fs.metropolis_chain([0.6, 0.3, 0.1])
    reduction = reduce_width(wide_start())
    loss = fs.PopulationLoss(chain)
    wide = jax.grad(loss)(reduction.restore(reduction.model))
    narrow = reduction.restore(jax.grad(loss)(reduction.model))
    for one, other in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-15)


@pytest.mark.slow
def test_the_flow_uses_it_unasked_and_the_solution_is_the_wide_one():
    loss = fs.PopulationLoss(fs.lazy_chain([0.7, 0.2, 0.1], 0.5))
    wide = wide_start()
    run = fs.gradient_flow(loss, wide, t1=30.0, rtol=1e-9, observe=lambda m: m.W0)
    assert "reduced to" in run.settings
    assert run.models.W0.shape[1:] == run.observables.shape[1:] == (3, 40)
    np.testing.assert_array_equal(run.observables, run.models.W0)
    full = fs.gradient_flow(lambda model: loss(model), wide, t1=30.0, rtol=1e-9)
    assert "reduced to" not in full.settings
    for one, other in zip(
        jax.tree.leaves(run.final), jax.tree.leaves(full.final), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-7)
    np.testing.assert_allclose(run.losses[-1], full.losses[-1], atol=1e-10)


def test_a_narrow_model_is_left_alone():
    loss = fs.PopulationLoss(fs.lazy_chain([0.7, 0.2, 0.1], 0.5))
    narrow = fs.AttentionModel.init(jax.random.key(1), vocab=3, width=8, scale=0.1)
    assert loss.reduce(narrow) is None
