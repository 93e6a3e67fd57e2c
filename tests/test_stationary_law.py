"""The stationary law: every digit, under transformations, and refused when wrong."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.markov import (
    MarkovChain,
    stationary_law,
)

from .chains import random_matrix


def nearly_decomposable():
    """Two blocks of three tokens that hardly communicate."""
    rng = np.random.default_rng(6)
    P = rng.uniform(0.1, 0.3, (6, 6))
    P[:3, 3:] *= 1e-14
    P[3:, :3] *= 1e-15
    np.fill_diagonal(P, 0)
    return P + np.diag(1 - P.sum(axis=1))


def exact_stationary_law(P):
    """Without rounding, from the off-diagonal entries; the diagonal balances them."""
    size = len(P)
    Q = [[Fraction(P[i, j]) * (i != j) for j in range(size)] for i in range(size)]
    A = [[Q[j][i] - (i == j) * sum(Q[i]) for j in range(size)] for i in range(size)]
    A = [[*row, Fraction(0)] for row in A[:-1]] + [[Fraction(1)] * (size + 1)]
    for n in range(size):
        pivot = next(i for i in range(n, size) if A[i][n] != 0)
        A[n], A[pivot] = A[pivot], A[n]
        A[n] = [a / A[n][n] for a in A[n]]
        for i in set(range(size)) - {n}:
            A[i] = [a - A[i][n] * b for a, b in zip(A[i], A[n], strict=True)]
    return np.array([float(row[-1]) for row in A])


def test_stationary_law_of_a_nearly_decomposable_chain_has_every_digit():
    P = nearly_decomposable()
    exact = exact_stationary_law(P)
    for pi in (MarkovChain(P).stationary, jax.jit(stationary_law)(P)):
        np.testing.assert_allclose(pi, exact, rtol=1e-14)
    # What the elimination is for: the eigenvector of the same matrix is off by far.
    values, vectors = np.linalg.eig(P.T)
    vector = np.real(vectors[:, np.argmax(np.real(values))])
    assert np.max(np.abs(vector / vector.sum() - exact) / exact) > 1e-3


def test_small_masses_are_accurate_relative_to_themselves():
    # A ladder with detailed balance: pi_i is proportional to 2^(-40 i), exactly.
    up, down = 2.0**-42, 0.25
    P = np.diag([up] * 4, 1) + np.diag([down] * 4, -1)
    P += np.diag(1 - P.sum(axis=1))
    expected = (up / down) ** np.arange(5)
    expected /= expected.sum()
    np.testing.assert_allclose(stationary_law(P), expected, rtol=1e-15)
    np.testing.assert_allclose(jax.jit(stationary_law)(P), expected, rtol=1e-15)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_stationary_law_satisfies_its_equation_concrete_and_traced(size):
    P = random_matrix(size, size, zeros=0.5)
    pi = stationary_law(P)
    np.testing.assert_allclose(pi @ P, pi, rtol=1e-13)
    np.testing.assert_allclose(pi.sum(), 1, rtol=1e-14)
    np.testing.assert_allclose(jax.jit(stationary_law)(P), pi, rtol=1e-13)


def test_stationary_law_can_be_mapped_over():
    batch = jnp.stack([jnp.asarray(random_matrix(seed, 5)) for seed in range(3)])
    laws = jax.jit(jax.vmap(stationary_law))(batch)
    np.testing.assert_allclose(jnp.einsum("bi,bij->bj", laws, batch), laws, rtol=1e-13)


def test_derivative_of_the_stationary_law_solves_the_differentiated_equation():
    P = jnp.asarray(random_matrix(3, 6))
    change = np.random.default_rng(4).normal(size=(6, 6))
    change = jnp.asarray(change - change.mean(axis=1, keepdims=True))
    pi, d_pi = jax.jit(lambda *args: jax.jvp(stationary_law, *args))((P,), (change,))
    # pi P = pi and sum pi = 1, differentiated.
    np.testing.assert_allclose(d_pi @ P + pi @ change, d_pi, atol=1e-14)
    np.testing.assert_allclose(d_pi.sum(), 0, atol=1e-15)
    reverse = jnp.vdot(jax.jit(jax.jacrev(stationary_law))(P)[2], change)
    np.testing.assert_allclose(reverse, d_pi[2], rtol=1e-12)


def test_a_law_that_solves_the_equation_only_to_round_off_is_refused():
    # Any mixture of the two blocks' laws has a residual of 1e-15: no evidence.
    P = nearly_decomposable()
    pi = np.asarray(stationary_law(P))
    mixture = np.concatenate([pi[:3] / pi[:3].sum(), pi[3:] / pi[3:].sum()]) / 2
    assert np.max(np.abs(mixture @ P - mixture)) < 1e-14
    with pytest.raises(ValueError, match="must be the stationary law"):
        MarkovChain(P, stationary=mixture)
