"""Conjugate gradients and the recycled preconditioner, against dense matrices."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.solvers import BDFController, NewtonCG, SymmetricBDF
from flowsim.solvers._conjugate_gradient import conjugate_gradient
from flowsim.solvers._recycling import SMALL, Recycled

NUM, RANK = 120, 12


def stiff_matrix(seed=0, stiff=RANK):
    """Negative definite: `stiff` eigenvalues in the thousands, the rest below one."""
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(NUM, NUM)))[0]
    values = -np.concatenate([np.geomspace(1e5, 1e3, stiff), np.linspace(0.1, 1, 108)])
    return jnp.asarray((basis * values) @ basis.T), jnp.asarray(basis[:, :stiff])


def due(rank=RANK):
    state = Recycled.empty(rank, NUM, jnp.float64)
    return state.charge(jnp.asarray(10 + rank, jnp.int32))


def solve(matrix, rhs, tolerance=1e-10, most=500, **options):
    return conjugate_gradient(
        lambda v: matrix @ v, rhs, jnp.linalg.norm, tolerance, most, **options
    )


def test_the_solution_solves_the_system():
    matrix, _ = stiff_matrix()
    rhs = jnp.sin(jnp.arange(120.0))
    result = solve(matrix, rhs, 1e-8)
    assert result.converged and not result.asymmetric and not result.indefinite
    assert jnp.linalg.norm(rhs - result.solution + matrix @ result.solution) < 2e-8


def test_growing_modes_and_rotations_are_told_apart():
    growing = solve(jnp.diag(jnp.array([-1.0, 3.0])), jnp.ones(2))
    assert growing.indefinite and not growing.converged and not growing.asymmetric
    turning = solve(jnp.array([[-1.0, 2.0], [-2.0, -3.0]]), jnp.array([1.0, 0.5]))
    assert turning.asymmetric


def test_too_few_iterations_are_not_convergence():
    matrix, _ = stiff_matrix()
    assert not solve(matrix, jnp.ones(NUM), most=3).converged
    assert not solve(matrix, jnp.full(NUM, jnp.nan)).converged


def test_a_renewal_finds_the_stiff_directions():
    matrix, stiff = stiff_matrix()
    state, num_products = due().renew_if_due(lambda v: matrix @ v)
    assert int(num_products) == 3 * RANK
    vectors = state.vectors.astype(stiff.dtype)
    outside = vectors - (vectors @ stiff) @ stiff.T
    assert jnp.max(jnp.abs(outside)) < 1e-4
    expected = -np.geomspace(1e5, 1e3, RANK)
    np.testing.assert_allclose(state.values, expected, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_the_preconditioner_removes_them_whatever_the_step(scale):
    matrix, _ = stiff_matrix()
    state, _ = due().renew_if_due(lambda v: matrix @ v)
    scale, rhs = jnp.asarray(scale), jnp.sin(jnp.arange(120.0))
    plain = solve(scale * matrix, rhs, 1e-6)
    helped = solve(scale * matrix, rhs, 1e-6, precondition=state.preconditioner(scale))
    assert helped.converged and plain.converged
    assert int(helped.num_products) < 0.6 * int(plain.num_products)
    np.testing.assert_allclose(helped.solution, plain.solution, atol=1e-5)


def test_a_wrong_subspace_is_still_positive_definite():
    other, _ = stiff_matrix(seed=1)
    state, _ = due().renew_if_due(lambda v: other @ v)
    apply = state.preconditioner(jnp.asarray(100.0))
    dense = jax.vmap(apply)(jnp.eye(NUM))
    np.testing.assert_allclose(dense, dense.T, atol=1e-6)
    assert jnp.linalg.eigvalsh(0.5 * (dense + dense.T))[0] > 0
    matrix, _ = stiff_matrix()
    result = solve(matrix, jnp.ones(NUM), 1e-6, most=2000, precondition=apply)
    residual = jnp.ones(NUM) - result.solution + matrix @ result.solution
    assert result.converged and jnp.linalg.norm(residual) < 1e-5


@pytest.mark.parametrize(("num", "fair"), [(NUM, 1), (SMALL, 10)])
def test_short_solves_never_pay_for_a_renewal(num, fair):
    state = Recycled.empty(RANK, num, jnp.float64)
    for _ in range(100):
        state = state.charge(jnp.asarray(fair, jnp.int32))
    same, num_products = state.renew_if_due(lambda v: -v)
    assert int(num_products) == 0 and not same.values.any()
    rhs = jnp.arange(float(num))
    np.testing.assert_array_equal(state.preconditioner(jnp.asarray(5.0))(rhs), rhs)
    for _ in range(100):
        state = state.charge(jnp.asarray(fair + 1, jnp.int32))
    assert int(state.renew_if_due(lambda v: -v)[1]) == 3 * RANK


def test_vectors_of_large_systems_are_in_single_precision():
    assert Recycled.empty(2, SMALL, jnp.float64).vectors.dtype == jnp.float32
    assert Recycled.empty(2, SMALL - 1, jnp.float64).vectors.dtype == jnp.float64


def test_renewal_has_no_derivative():
    matrix, _ = stiff_matrix()

    def value(factor):
        state, _ = due().renew_if_due(lambda v: factor * (matrix @ v))
        return jnp.sum(state.values)

    assert float(jax.jvp(value, (1.0,), (1.0,))[1]) == 0.0


@pytest.mark.slow
def test_recycling_saves_products_in_a_solve_and_changes_nothing_else():
    matrix, _ = stiff_matrix()

    def loss(y):
        return -0.5 * y @ matrix @ y + 0.25 * jnp.sum((y - 1) ** 4)

    term = diffrax.ODETerm(lambda t, y, args: -jax.grad(loss)(y) + 30 * jnp.sin(3 * t))

    def run(rank):
        inherit: Any = diffrax.with_stepsize_controller_tols
        newton = inherit(NewtonCG)(rank=rank)
        return diffrax.diffeqsolve(
            term, SymmetricBDF(root_finder=newton), 0.0, 20.0, None, jnp.ones(NUM),
            stepsize_controller=BDFController(1e-6, 1e-8), max_steps=20_000,
            saveat=diffrax.SaveAt(t1=True, controller_state=True),
        )  # fmt: skip

    plain, recycled = run(0), run(RANK)
    np.testing.assert_allclose(np.asarray(recycled.ys), np.asarray(plain.ys), atol=1e-5)
    products = [int(s.controller_state.num_products) for s in (plain, recycled)]
    assert products[1] < 0.7 * products[0], products
