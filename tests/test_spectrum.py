"""Eigenpairs of J = -Hessian: exact spectra, multiplicities, honesty."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg

from flowsim import _trees, theory
from flowsim.derivatives import hessian_vector_product
from flowsim.lanczos import eigenpairs
from flowsim.loss import PopulationLoss
from flowsim.model import AttentionModel
from flowsim.spectrum import block_weights, spectrum
from flowsim.symmetry import (
    symmetry_directions,
)

from .problems import CHAINS, named_chain, random_model


class Matrix(eqx.Module):
    """A symmetric operator with the given spectrum in a random orthonormal basis."""

    entries: jax.Array

    @classmethod
    def with_spectrum(cls, values, seed=0):
        values = np.asarray(values, float)
        draw = np.random.default_rng(seed).normal(size=(values.size, values.size))
        basis = np.linalg.qr(draw)[0]
        return cls(jnp.asarray((basis * values) @ basis.T))

    def __call__(self, x):
        return self.entries @ x


def found(values, seed=0, **options):
    operator = Matrix.with_spectrum(values, seed)
    return eigenpairs(operator, jnp.zeros(len(values)), **options), operator


def quadratic(values, seed=0):
    """An objective whose flow has the Jacobian eigenvalues `values` everywhere."""
    operator = Matrix.with_spectrum(values, seed)
    return Quadratic(operator.entries)


class Quadratic(eqx.Module):
    entries: jax.Array

    def __call__(self, y):
        return -0.5 * y @ (self.entries @ y)


def uniform(low, high, size, seed=0):
    return np.random.default_rng(seed).uniform(low, high, size)


# The eigensolver, on spectra that defeat simpler ones.


def test_repeated_eigenvalues_come_back_with_their_multiplicity():
    pairs, _ = found([0.0] * 5 + [-1.0] * 5, num=5, which="largest")
    np.testing.assert_allclose(pairs.values, np.zeros(5), atol=1e-14)
    large = np.r_[np.full(300, -1.0), np.zeros(9), uniform(-0.9, -0.1, 91)]
    pairs, _ = found(large, num=10, which="largest")
    assert int(pairs.num_products) < 400
    np.testing.assert_allclose(pairs.values[1:], np.zeros(9), atol=1e-13)
    np.testing.assert_allclose(pairs.values[0], np.sort(large)[-10], rtol=1e-12)


def test_a_separated_eigenvalue_is_returned_once():
    values = np.r_[uniform(-7, 7.6, 99), 100.8]
    # A basis of 16 vectors forces many restarts, where ghosts would appear.
    for basis_size in (None, 16):
        pairs, _ = found(values, num=2, which="largest", basis_size=basis_size)
        np.testing.assert_allclose(pairs.values, np.sort(values)[-2:], rtol=1e-12)
        assert bool(jnp.all(pairs.converged))


def test_opposite_pairs_are_told_apart():
    pairs, _ = found([1.0, -1.0], num=1)
    np.testing.assert_allclose(pairs.values, [-1.0, 1.0], atol=1e-15)
    swap = eigenpairs(lambda x: x[::-1], jnp.zeros(2), num=1)
    np.testing.assert_allclose(swap.values, [-1.0, 1.0], atol=1e-15)
    many = np.r_[np.ones(4), -np.ones(4), uniform(-0.5, 0.5, 392)]
    pairs, _ = found(many, num=5)
    np.testing.assert_allclose(pairs.values[:4], -np.ones(4), rtol=1e-13)
    np.testing.assert_allclose(pairs.values[-4:], np.ones(4), rtol=1e-13)


@pytest.mark.slow
def test_a_tight_cluster_is_resolved():
    cluster = 1 + 1e-7 * np.random.default_rng(3).normal(size=32)
    values = np.r_[cluster, uniform(-1, 0.9, 368)]
    pairs, _ = found(values, num=10, which="largest")
    assert bool(jnp.all(pairs.converged))
    np.testing.assert_allclose(pairs.values, np.sort(values)[-10:], atol=1e-12)


@pytest.mark.parametrize("values", [np.zeros(400), np.full(400, 2.5)])
def test_an_exhausted_krylov_space_is_left_for_new_directions(values):
    pairs, _ = found(values, num=5)
    assert int(pairs.num_restarts) == 0 and bool(jnp.all(pairs.converged))
    np.testing.assert_allclose(pairs.values, values[:10], atol=1e-14)
    gram = pairs.vectors @ pairs.vectors.T
    np.testing.assert_allclose(gram, np.eye(10), atol=1e-12)


def test_residuals_are_those_of_the_returned_pairs():
    pairs, operator = found(uniform(-1, 1, 400), num=5)
    assert int(pairs.num_restarts) > 0
    images = pairs.vectors @ operator.entries
    residuals = images - pairs.values[:, None] * pairs.vectors
    np.testing.assert_allclose(
        pairs.residuals, jnp.linalg.norm(residuals, axis=1), atol=1e-13
    )


def test_unconverged_pairs_are_marked():
    pairs, operator = found(uniform(-1, 1, 400), num=5, max_restarts=1)
    assert not bool(jnp.any(pairs.converged))
    images = pairs.vectors @ operator.entries
    residuals = jnp.linalg.norm(images - pairs.values[:, None] * pairs.vectors, axis=1)
    assert float(jnp.min(residuals)) > 1e-10
    np.testing.assert_allclose(pairs.residuals, residuals, rtol=1e-6)


def test_an_operator_that_is_not_finite_gives_no_converged_pair():
    operator = Matrix(jnp.full((400, 400), jnp.nan))
    pairs = eigenpairs(operator, jnp.zeros(400), num=5)
    assert not bool(jnp.any(pairs.converged))
    assert int(pairs.num_restarts) < 5


def test_one_end_agrees_with_scipy():
    values = np.r_[-np.geomspace(1e-3, 300, 380), uniform(0, 0.3, 20)]
    pairs, operator = found(values, num=10, which="largest")
    reference = scipy.sparse.linalg.eigsh(
        np.asarray(operator.entries), k=10, which="LA", return_eigenvectors=False
    )
    assert bool(jnp.all(pairs.converged))
    np.testing.assert_allclose(pairs.values, np.sort(reference), atol=1e-10)


def test_overlapping_ends_give_every_pair_once():
    values = np.arange(7.0)
    pairs, _ = found(values, num=5)
    np.testing.assert_allclose(pairs.values, values, atol=1e-13)


# The spectrum of an objective.


@pytest.mark.parametrize("method", ["dense", "matrix-free"])
def test_spectrum_is_that_of_minus_the_hessian(method):
    values = np.sort(np.r_[uniform(-2, 1, 297), 3.0, 3.0, -4.0])
    objective = quadratic(values)
    spec = spectrum(objective, jnp.zeros(300), num=3, method=method)
    np.testing.assert_allclose(
        spec.values, np.r_[values[:3], values[-3:]], rtol=1e-10, atol=1e-12
    )
    for value, vector, residual in zip(
        spec.values, spec.vectors, spec.residuals, strict=True
    ):
        image = -hessian_vector_product(objective, jnp.zeros(300), vector)
        assert abs(float(_trees.norm(image - value * vector) - residual)) < 1e-12
    assert bool(jnp.all(spec.converged)) and not spec.complete
    # All three at the upper end are unstable: there may be more, and there are.
    assert int(spec.num_unstable) == 3 and not bool(spec.all_unstable_found)


def test_the_split_uses_the_reported_tolerance():
    objective = quadratic([-2.0, -1e-9, 0.0, 1e-9, 1e-3, 1.0])
    spec = spectrum(objective, jnp.zeros(6))
    assert float(spec.tolerance) == pytest.approx(2e-7)
    counts = (spec.num_stable, spec.num_center, spec.num_unstable)
    assert tuple(map(int, counts)) == (1, 3, 2)
    strict = spectrum(objective, jnp.zeros(6), center_tol=1e-10)
    counts = (strict.num_stable, strict.num_center, strict.num_unstable)
    assert tuple(map(int, counts)) == (2, 1, 3)
    assert strict.unstable.shape == (3, 6) and strict.center.shape == (1, 6)
    images = jax.vmap(lambda v: objective.entries @ v)(strict.stable)
    np.testing.assert_allclose(
        images, strict.values[:2, None] * strict.stable, atol=1e-9
    )


@pytest.mark.parametrize("name", CHAINS)
def test_origin_has_the_eigenvalues_of_the_paper(name):
    chain = named_chain(name)
    origin = jax.tree_util.tree_map(jnp.zeros_like, random_model(chain, width=5))
    spec = spectrum(PopulationLoss(chain), origin)
    expected = np.zeros(spec.values.size)
    expected[:5] = -theory.origin_rate(chain)
    expected[-5:] = theory.origin_rate(chain)
    np.testing.assert_allclose(spec.values, expected, atol=1e-13)
    # Only the logit shift moves the origin: five directions, the rest is degenerate.
    assert spec.num_symmetry == 5
    assert spec.num_degenerate == spec.values.size - 15


def test_second_critical_point_has_one_unstable_direction_per_key():
    chain = named_chain("default")
    point = theory.second_critical_point(chain, width=4, key_width=3)
    spec = spectrum(PopulationLoss(chain), point)
    rate = float(theory.focus_rate(chain))
    np.testing.assert_allclose(spec.values[-3:], np.full(3, rate), rtol=1e-10)
    assert (int(spec.num_unstable), int(spec.num_stable)) == (3, 6)
    weights = jax.vmap(block_weights)(spec.unstable)
    assert set(weights) == {"W0", "W1", "WQ", "WK"}
    np.testing.assert_allclose(weights["WQ"], np.full(3, 0.5), atol=1e-10)
    np.testing.assert_allclose(weights["WK"], np.full(3, 0.5), atol=1e-10)
    np.testing.assert_allclose(weights["W0"], np.zeros(3), atol=1e-12)


@pytest.mark.slow
def test_matrix_free_agrees_with_dense_on_an_attention_model():
    chain = named_chain("default")
    objective = PopulationLoss(chain)
    point = theory.second_critical_point(chain, width=20, key_width=4)
    dense = spectrum(objective, point, symmetries=None)
    ends = spectrum(objective, point, num=6, method="matrix-free")
    assert ends.values.size == 12 and bool(jnp.all(ends.converged))
    assert int(ends.num_products) < dense.values.size == 320
    np.testing.assert_allclose(ends.values[:6], dense.values[:6], atol=1e-12)
    np.testing.assert_allclose(ends.values[6:], dense.values[-6:], atol=1e-12)
    assert int(ends.num_unstable) == int(dense.num_unstable) == 4
    assert bool(ends.all_unstable_found)


# Transformations, input, output.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "matrix-free"])
def test_jit_and_vmap_agree_with_single_calls(method):
    chain = named_chain("default")
    objective = PopulationLoss(chain)
    models = eqx.filter_vmap(
        lambda key: AttentionModel.init(key, vocab=4, width=6, key_width=8, scale=0.5)
    )(jax.random.split(jax.random.key(5), 2))

    def solve(model):
        return spectrum(objective, model, num=2, method=method)

    batch = jax.jit(jax.vmap(solve))(models)
    for row in range(2):
        single = solve(jax.tree_util.tree_map(lambda x, row=row: x[row], models))
        np.testing.assert_allclose(batch.values[row], single.values, atol=1e-11)
        assert int(batch.num_unstable[row]) == int(single.num_unstable)
        assert bool(jnp.all(batch.converged[row]))


def test_a_second_call_does_not_trace_again():
    traces = []

    class Counted(eqx.Module):
        scale: jax.Array

        def __call__(self, y):
            traces.append(1)
            return self.scale * jnp.sum(jnp.cos(y))

    spectrum(Counted(jnp.asarray(1.0)), jnp.zeros(3))
    first = len(traces)
    second = spectrum(Counted(jnp.asarray(2.0)), jnp.ones(3), center_tol=1e-3)
    assert len(traces) == first > 0
    np.testing.assert_allclose(second.values, np.full(3, 2 * np.cos(1.0)), rtol=1e-14)


def test_subsets_need_concrete_values():
    with pytest.raises(ValueError, match="is_unstable"):
        jax.jit(lambda y: spectrum(lambda z: jnp.sum(z**2), y).unstable)(jnp.zeros(2))


def test_wrong_input_is_named():
    def bowl(y):
        return jnp.sum(y**2)

    with pytest.raises(
        ValueError, match=r"params must be in double precision.*float32"
    ):
        spectrum(bowl, jnp.zeros(3, jnp.float32))
    with pytest.raises(ValueError, match="like must be in double precision"):
        eigenpairs(lambda x: x, jnp.zeros(3, jnp.float32), num=1)
    with pytest.raises(ValueError, match="method"):
        spectrum(bowl, jnp.zeros(3), method="sparse")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="which"):
        spectrum(bowl, jnp.zeros(3), which="LM")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num must be a positive integer; got 0"):
        spectrum(bowl, jnp.zeros(3), num=0)
    with pytest.raises(ValueError, match="basis_size must be at least 20"):
        eigenpairs(lambda x: x, jnp.zeros(300), num=5, basis_size=15)
    with pytest.raises(ValueError, match="AttentionModel only"):
        symmetry_directions(jnp.zeros(3))  # pyright: ignore[reportArgumentType]


def test_results_print_what_was_found():
    text = str(spectrum(lambda y: 0.5 * (1 - y[0] * y[1]) ** 2, jnp.zeros(2)))
    assert "unstable" in text and "complete" in text and "zero below" in text
    assert "residuals" in str(found([1.0, 2.0], num=1)[0])
