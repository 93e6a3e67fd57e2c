"""The algebra of backward differences, on polynomials, where it is exact."""

import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.solvers._differences import (
    MAX_ORDER,
    REAL_AXIS_KAPPA,
    Formulas,
    basis,
    correction,
    rescaling,
)

SIZE = MAX_ORDER + 2


def polynomial(degree, t):
    """A fixed polynomial of exactly that degree."""
    coefficients = np.cos(1.0 + np.arange(degree + 1.0))
    return np.polynomial.polynomial.polyval(t, coefficients)


def differences(function, t, h, size=SIZE):
    """nabla^1 ... nabla^size of the function at t, from its values."""
    values = np.array([function(t - i * h) for i in range(size + 1)])
    rows = []
    for _ in range(size):
        values = values[:-1] - values[1:]
        rows.append(values[0])
    return np.array(rows)


@pytest.mark.parametrize("degree", range(1, MAX_ORDER + 1))
def test_the_basis_continues_a_polynomial(degree):
    def f(t):
        return polynomial(degree, t)

    rows = differences(f, 0.4, 0.1)
    for s in (-2.5, -0.3, 1.0):
        value = f(0.4) + np.asarray(basis(jnp.asarray(s), SIZE)) @ rows
        assert value == pytest.approx(f(0.4 + s * 0.1), abs=1e-12)


@pytest.mark.parametrize("degree", range(1, MAX_ORDER + 1))
@pytest.mark.parametrize("ratio", [0.2, 0.9, 1.0, 1.7, 10.0])
def test_rescaling_is_exact_up_to_its_degree(degree, ratio):
    def f(t):
        return polynomial(degree, t)

    old, new = differences(f, 0.4, 0.1), differences(f, 0.4, 0.1 * ratio)
    matrix = np.asarray(rescaling(jnp.asarray(ratio), jnp.asarray(degree), SIZE))
    np.testing.assert_allclose((matrix @ old)[:degree], new[:degree], atol=1e-9)


def test_rescaling_by_one_changes_nothing():
    matrix = rescaling(jnp.asarray(1.0), jnp.asarray(MAX_ORDER), SIZE)
    np.testing.assert_allclose(matrix, np.eye(SIZE), atol=1e-12)


@pytest.mark.parametrize("order", range(1, MAX_ORDER + 1))
def test_the_correction_gives_the_differences_one_step_later(order):
    f, t, h = np.exp, 0.4, 0.1
    old, new = differences(f, t, h), differences(f, t + h, h)
    d = new[order]  # nabla^{k+1} at the new time.
    matrix, vector = correction(jnp.asarray(order), SIZE, old.dtype)
    result = np.asarray(matrix) @ old + np.asarray(vector) * d
    np.testing.assert_allclose(result[: order + 2], new[: order + 2], atol=1e-14)
    assert not result[order + 2 :].any()


def roots(order, kappa, z):
    """Growth factors of the formula on y' = lambda y with z = lambda h."""
    gamma = sum(1 / j for j in range(1, order + 1))
    total = np.zeros(order + 2)
    power = np.array([1.0])
    for j in range(1, order + 2):
        power = np.polynomial.polynomial.polymul(power, [1.0, -1.0])
        factor = 1 / j if j <= order else -kappa * gamma
        total[: j + 1] += factor * power
    total[0] -= z
    return np.roots(total)  # Ascending in the shift, so descending in the growth.


@pytest.mark.parametrize("order", range(1, MAX_ORDER + 1))
def test_the_formulas_are_stable_on_the_whole_negative_real_axis(order):
    kappa = REAL_AXIS_KAPPA[order - 1]
    growth = [np.abs(roots(order, kappa, -z)) for z in np.logspace(-8, 8, 800)]
    assert max(g.max() for g in growth) < 1
    parasitic = max(np.sort(g)[-2] for g in growth)
    assert parasitic < (0.90 if order <= 5 else 0.95)
    at_zero = np.sort(np.abs(roots(order, kappa, 0.0)))
    assert at_zero[-1] == pytest.approx(1, abs=1e-9) and at_zero[-2] < 0.9


def test_the_half_way_formula_would_not_do_at_order_six():
    gamma = sum(1 / j for j in range(1, 7))
    half_way = -0.5 / (7 * gamma)
    growth = [np.abs(roots(6, half_way, -z)).max() for z in np.logspace(-3, 3, 200)]
    assert max(growth) > 1


@pytest.mark.parametrize("order", range(1, 6))
def test_the_error_constant_is_half_that_of_the_classical_formula(order):
    ours, classical = Formulas(REAL_AXIS_KAPPA), Formulas((0.0,) * MAX_ORDER)
    assert ours.error[order] == pytest.approx(classical.error[order] / 2)
    assert classical.error[order] == pytest.approx(1 / (order + 1))


@pytest.mark.parametrize("order", range(1, MAX_ORDER + 1))
def test_the_residual_of_a_formula_is_its_error_constant(order):
    """On t^{k+1} the formula misses by the constant times nabla^{k+1}, exactly."""
    formulas = Formulas(REAL_AXIS_KAPPA)
    h, t = 0.1, 0.7

    def f(s):
        return s ** (order + 1)

    rows = differences(f, t, h)
    gamma = formulas.gamma[order]
    left = sum(rows[j - 1] / j for j in range(1, order + 1))
    left -= REAL_AXIS_KAPPA[order - 1] * gamma * rows[order]
    slope = (order + 1) * t**order
    missed = h * slope - left
    assert missed == pytest.approx(formulas.error[order] * rows[order], rel=1e-6)


@pytest.mark.parametrize("order", range(1, MAX_ORDER + 1))
def test_the_formula_solved_for_the_correction_is_the_same_formula(order):
    """leading d + sum gamma_j nabla^j y_n is the left side, d = nabla^{k+1} y_{n+1}."""
    formulas, h, t = Formulas(REAL_AXIS_KAPPA), 0.1, 0.7
    old, new = differences(np.exp, t - h, h), differences(np.exp, t, h)
    left = sum(new[j - 1] / j for j in range(1, order + 1))
    left -= REAL_AXIS_KAPPA[order - 1] * formulas.gamma[order] * new[order]
    solved = formulas.leading[order] * new[order]
    solved += sum(formulas.gamma[j] * old[j - 1] for j in range(1, order + 1))
    assert solved == pytest.approx(left, abs=1e-14)
