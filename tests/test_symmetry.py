"""Symmetries: their directions and rank, and the zero eigenvalues they explain."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from flowsim import _trees, theory
from flowsim.copies import invariants_of
from flowsim.loss import PopulationLoss
from flowsim.model import AttentionModel
from flowsim.spectrum import spectrum
from flowsim.symmetry import (
    explained_shares,
    symmetry_basis,
    symmetry_directions,
    symmetry_rank,
)

from .problems import named_chain, random_model


@pytest.mark.parametrize("scale_attention", [False, True])
def test_symmetry_directions_leave_every_loss_unchanged_to_first_order(scale_attention):
    chain = named_chain("dense, focus")
    model = random_model(chain, scale_attention=scale_attention)
    gradient = jax.grad(PopulationLoss(chain))(model)
    directions = symmetry_directions(model)
    slopes = jax.vmap(lambda direction: _trees.inner(gradient, direction))(directions)
    assert float(_trees.norm(gradient)) > 0.1
    assert slopes.shape == (5**2 + 3**2 + 5,)
    np.testing.assert_allclose(slopes, np.zeros(slopes.size), atol=1e-14)
    assert float(jnp.min(jax.vmap(_trees.norm)(directions))) > 0.1


@pytest.mark.slow
def test_symmetry_rank_counts_independent_directions():
    chain = named_chain("default")
    generic = AttentionModel.init(
        jax.random.key(1), vocab=9, width=3, key_width=2, scale=1.0
    )
    assert int(symmetry_rank(generic)) == 9 + 4 + 3
    point = theory.second_critical_point(chain, width=4, key_width=3)
    # W0, W1 of rank one, WQ = WK = 0: B acts through B^T alpha and B alpha, which share
    # the component along alpha, and v adds four: 4 + 4 - 1 + 4 directions.
    assert int(symmetry_rank(point)) == 11


def test_zeros_at_a_critical_point_are_split_into_symmetry_and_degeneracy():
    chain = named_chain("default")
    point = theory.second_critical_point(chain, width=4, key_width=3)
    spec = spectrum(PopulationLoss(chain), point)
    assert spec.num_symmetry == 11
    assert spec.num_degenerate == int(spec.num_center) - 11
    assert int(spec.num_center) > 11


@pytest.mark.slow
def test_zeros_at_the_end_of_a_spectrum_are_explained_by_symmetry():
    # A bowl around a point: the zeros are the directions the loss does not see.
    chain = named_chain("default")
    model = random_model(chain, width=3, key_width=2)
    target = invariants_of(model)

    def bowl(y):
        off = _trees.subtract(invariants_of(y), target)
        return 0.5 * _trees.inner(off, off)

    whole = spectrum(bowl, model)
    ends = spectrum(bowl, model, num=6, method="matrix-free", basis_size=24)
    assert int(whole.num_center) == whole.num_symmetry == int(symmetry_rank(model))
    assert not ends.complete and bool(jnp.all(ends.converged))
    assert int(ends.num_center) == ends.num_symmetry == 6
    # The same zeros, if only the logit shift is known.
    shift = spectrum(
        bowl,
        model,
        num=6,
        method="matrix-free",
        basis_size=24,
        symmetries=lambda y: jtu.tree_map(
            lambda leaf: leaf[-3:], symmetry_directions(y)
        ),
    )
    assert shift.num_symmetry == 0 and shift.num_degenerate == 6


def test_shares_in_the_symmetry_span_are_those_of_an_orthonormal_basis():
    model = random_model(named_chain("default"), width=5, key_width=3)
    basis, _ = symmetry_basis(model)
    vectors = jax.random.normal(jax.random.key(3), (4, basis.shape[1]))
    expected = jnp.sum((vectors @ basis.T) ** 2, axis=1) / jnp.sum(vectors**2, axis=1)
    shares = explained_shares(model, symmetry_directions, vectors)
    np.testing.assert_allclose(shares, expected, rtol=1e-8)
    assert 0.1 < float(jnp.min(shares)) and float(jnp.max(shares)) < 0.9


def test_a_users_symmetry_explains_a_users_zero():
    def ring(y):
        return (jnp.sum(y**2) - 1.0) ** 2

    def rotation(y):
        return jnp.stack([-y[1], y[0]])[None]

    point = jnp.array([0.6, 0.8])
    assert spectrum(ring, point).num_symmetry is None
    spec = spectrum(ring, point, symmetries=rotation)
    assert (int(spec.num_center), spec.num_symmetry) == (1, 1)
    # A penalty that breaks the symmetry: the zero is gone, and nothing is explained.
    broken = spectrum(
        lambda y: ring(y) + 0.1 * (y[0] - 0.6) ** 2, point, symmetries=rotation
    )
    assert (int(broken.num_center), broken.num_symmetry) == (0, 0)
