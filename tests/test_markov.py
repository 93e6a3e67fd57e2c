"""Chains: what they promise about P, averages, entropies and samples."""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.stats

from flowsim.markov import (
    DenseKernel,
    LazyKernel,
    MarkovChain,
    SparseKernel,
    chain_from_counts,
    lazy_chain,
    metropolis_chain,
    stationary_law,
    two_level_law,
)

from .chains import DEFAULT, every_chain, random_counts, random_matrix
from .precision import single_precision

# Kernels


@every_chain
def test_transition_is_stochastic_and_keeps_the_stationary_law(make):
    chain = make()
    P, pi = chain.transition, chain.stationary
    assert P.shape == (chain.num_states, chain.num_states)
    assert np.all(P >= 0) and np.all(pi > 0)
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(pi @ P, pi, rtol=1e-13)


@every_chain
def test_structure_gives_the_averages_of_the_dense_matrix(make):
    chain = make()
    P, pi = np.asarray(chain.transition), np.asarray(chain.stationary)
    values = np.random.default_rng(5).normal(size=P.shape)
    mean = chain.pair_expectation(jnp.asarray(values))
    np.testing.assert_allclose(mean, np.sum(pi[:, None] * P * values), rtol=1e-12)
    rows = scipy.stats.entropy(P, axis=1)
    np.testing.assert_allclose(chain.entropy_rate, pi @ rows, rtol=1e-12)
    np.testing.assert_allclose(chain.unigram_entropy, scipy.stats.entropy(pi))


@every_chain
def test_structure_gives_the_gradient_of_the_dense_average(make):
    chain = make()
    pair_law = chain.stationary[:, None] * chain.transition
    gradient = jax.grad(chain.pair_expectation)(jnp.ones_like(pair_law))
    np.testing.assert_allclose(gradient, pair_law, rtol=1e-12, atol=1e-16)


@every_chain
def test_a_chain_is_a_pytree_of_arrays(make):
    leaves = jax.tree.leaves(make())
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_chains_store_no_more_than_their_structure():
    assert isinstance(MarkovChain(random_matrix(0, 3)).kernel, DenseKernel)
    lazy = lazy_chain(DEFAULT, 0.5)
    assert isinstance(lazy.kernel, LazyKernel)
    assert sum(leaf.size for leaf in jax.tree.leaves(lazy)) == len(DEFAULT) + 1
    counts = random_counts(1, 50)
    sparse = chain_from_counts(counts).kernel
    assert isinstance(sparse, SparseKernel)
    assert sparse.probabilities.size == np.count_nonzero(counts)


def test_pair_expectation_follows_the_precision_of_its_argument():
    chain = lazy_chain(DEFAULT, 0.5)
    single = jnp.ones((4, 4), jnp.float32)
    assert chain.pair_expectation(single).dtype == jnp.float32


def test_single_precision_input_stays_single():
    chain = MarkovChain(random_matrix(0, 5).astype(np.float32))
    assert chain.stationary.dtype == chain.transition.dtype == jnp.float32
    assert lazy_chain(DEFAULT.astype(np.float32), 0.5).entropy_rate.dtype == jnp.float32


def test_without_double_precision_a_chain_is_single_and_pi_correctly_rounded():
    P = random_matrix(2, 6)
    exact = np.asarray(stationary_law(P))
    with single_precision():
        chain = MarkovChain(P)
        assert chain.stationary.dtype == chain.transition.dtype == jnp.float32
        np.testing.assert_array_equal(chain.stationary, exact.astype(np.float32))


# Entropies


def test_entropies_of_the_default_chain():
    chain = lazy_chain(DEFAULT, 0.5)
    np.testing.assert_allclose(chain.entropy_rate, 0.553611, atol=5e-7)
    np.testing.assert_allclose(chain.unigram_entropy, 0.727139, atol=5e-7)


@pytest.mark.parametrize("make", [MarkovChain, chain_from_counts])
def test_entropy_rate_is_finite_in_value_and_gradient_at_zero_probability(make):
    chain = make(np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]))
    value, gradient = eqx.filter_value_and_grad(lambda c: c.entropy_rate)(chain)
    np.testing.assert_allclose(value, 0.8 * np.log(2), rtol=1e-14)
    for leaf in jax.tree.leaves(eqx.filter(gradient, eqx.is_inexact_array)):
        assert np.all(np.isfinite(leaf))


def test_iid_chain_has_equal_entropies():
    chain = lazy_chain(DEFAULT, 0.0)
    np.testing.assert_allclose(chain.entropy_rate, chain.unigram_entropy, rtol=1e-14)


# Constructions


def test_lazy_chain_is_its_formula():
    P = 0.3 * np.eye(4) + 0.7 * np.outer(np.ones(4), DEFAULT)
    np.testing.assert_allclose(lazy_chain(DEFAULT, 0.3).transition, P, rtol=1e-15)


def test_metropolis_chain_is_reversible_with_its_stated_flow():
    chain = metropolis_chain(DEFAULT)
    flow = np.asarray(chain.stationary[:, None] * chain.transition)
    expected = np.minimum.outer(DEFAULT, DEFAULT) / 4
    off_diagonal = ~np.eye(4, dtype=bool)
    np.testing.assert_allclose(flow[off_diagonal], expected[off_diagonal], rtol=1e-14)
    np.testing.assert_allclose(
        MarkovChain(chain.transition).stationary, DEFAULT, rtol=1e-13
    )


def test_two_level_law_is_its_formula():
    np.testing.assert_allclose(
        two_level_law(vocab=4, top=0.7, delta=0.01, pattern=[1, 0, -1]),
        [0.7, 0.11, 0.1, 0.09],
        rtol=1e-14,
    )
    np.testing.assert_allclose(
        two_level_law(vocab=3, top=0.7, delta=-0.01, pattern=[1, -1]),
        [0.7, 0.14, 0.16],
        rtol=1e-14,
    )
    np.testing.assert_allclose(two_level_law(vocab=5, top=0.6), [0.6] + 4 * [0.1])


def test_two_level_law_is_differentiable_along_delta():
    law = eqx.filter_jit(
        lambda delta: two_level_law(
            vocab=4, top=0.7, delta=delta, pattern=[1.0, 0.0, -1.0]
        )
    )
    np.testing.assert_allclose(jax.jacfwd(law)(0.0), [0, 1, 0, -1], atol=1e-15)


@pytest.mark.parametrize("convert", [np.asarray, scipy.sparse.coo_array])
def test_chain_from_counts_normalises_rows_of_dense_and_sparse_tables(convert):
    counts = random_counts(1, 9)
    chain = chain_from_counts(convert(counts))
    np.testing.assert_allclose(
        chain.transition, counts / counts.sum(axis=1, keepdims=True), rtol=1e-15
    )


def test_constructions_keep_the_names_of_the_tokens():
    names = ["a", "b", "c", "d"]
    chains = (
        lazy_chain(DEFAULT, 0.5, tokens=names),
        metropolis_chain(DEFAULT, tokens=names),
        chain_from_counts(np.ones((4, 4)), tokens=names),
        MarkovChain(np.full((4, 4), 0.25), tokens=names),
    )
    assert all(chain.tokens == tuple(names) for chain in chains)


def test_a_given_stationary_law_is_used_as_it_is():
    P = random_matrix(0, 4)
    # Good to ten digits, so that it can be told from the law that would be found.
    pi = np.asarray(stationary_law(P)) * (1 + 1e-10 * np.array([1, -1, 1, -1]))
    np.testing.assert_array_equal(MarkovChain(P, stationary=pi).stationary, pi)


# Under jit, vmap and grad


def test_chains_can_be_made_and_used_under_jit_and_vmap():
    laws = jnp.asarray([DEFAULT, [0.4, 0.3, 0.2, 0.1]])
    rates = jax.jit(jax.vmap(lambda pi: lazy_chain(pi, 0.5).entropy_rate))(laws)
    expected = [lazy_chain(pi, 0.5).entropy_rate for pi in laws]
    np.testing.assert_allclose(rates, expected, rtol=1e-14)
    family = jax.jit(jax.vmap(lambda lam: lazy_chain(laws[0], lam)))
    mapped = jax.vmap(lambda c: c.transition)(family(jnp.asarray([0.1, 0.6])))
    np.testing.assert_allclose(mapped[1], lazy_chain(laws[0], 0.6).transition)
    P = random_matrix(0, 5)
    np.testing.assert_allclose(
        jax.jit(lambda P: MarkovChain(P).entropy_rate)(P),
        MarkovChain(P).entropy_rate,
        rtol=1e-13,
    )
    np.testing.assert_allclose(
        jax.jit(lambda pi: metropolis_chain(pi).transition)(DEFAULT),
        metropolis_chain(DEFAULT).transition,
        rtol=1e-14,
    )


def test_entropy_rate_of_a_lazy_chain_has_the_derivative_of_its_formula():
    def formula(pi):
        P = 0.5 * jnp.eye(4) + 0.5 * jnp.outer(jnp.ones(4), pi)
        return -jnp.sum(pi[:, None] * P * jnp.log(P))

    pi = jnp.asarray(DEFAULT)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda pi: lazy_chain(pi, 0.5).entropy_rate))(pi),
        jax.jit(jax.grad(formula))(pi),
        rtol=1e-13,
    )


# Samples


def chi_square_probability(pairs, chain):
    """Probability of a worse fit of independent pairs to pi_i P_ij."""
    size = chain.num_states
    law = np.asarray(chain.stationary[:, None] * chain.transition).ravel()
    observed = np.bincount(pairs[:, 0] * size + pairs[:, 1], minlength=size**2)
    possible = law > 1e-15
    assert observed[~possible].sum() == 0, "an impossible transition was drawn"
    expected = law[possible] / law[possible].sum() * observed.sum()
    return scipy.stats.chisquare(observed[possible], expected).pvalue


@every_chain
def test_samples_are_stationary_markov_with_the_law_of_the_chain(make):
    chain = make()
    sample = np.asarray(chain.sample(jax.random.key(1), 40_000, 5))
    assert sample.shape == (40_000, 5)
    assert sample.min() >= 0 and sample.max() < chain.num_states
    assert chi_square_probability(sample[:, :2], chain) > 1e-3
    assert chi_square_probability(sample[:, -2:], chain) > 1e-3
    # Two steps follow P^2 only if the second forgets where the first came from.
    P = np.asarray(chain.transition)
    two_steps = MarkovChain(P @ P, stationary=chain.stationary)
    assert chi_square_probability(sample[:, ::2], two_steps) > 1e-3


def test_samples_of_length_one_follow_the_stationary_law():
    sample = lazy_chain(DEFAULT, 0.5).sample(jax.random.key(0), 50_000, 1)
    counts = np.bincount(sample[:, 0], minlength=4)
    assert scipy.stats.chisquare(counts, 50_000 * DEFAULT).pvalue > 1e-3


def test_sampling_again_with_the_same_sizes_does_not_compile(caplog):
    lazy_chain(DEFAULT, 0.5).sample(jax.random.key(0), 11, 7)
    other, key = lazy_chain(DEFAULT[::-1], 0.1), jax.random.key(1)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        other.sample(key, 11, 7)
        assert "Compiling" not in caplog.text
        other.sample(key, 12, 7)
        assert "Compiling" in caplog.text


def test_sampling_works_inside_jit_and_vmap():
    chain = lazy_chain(DEFAULT, 0.5)
    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.jit(jax.vmap(lambda key: chain.sample(key, 5, 4)))(keys)
    np.testing.assert_array_equal(mapped[1], chain.sample(keys[1], 5, 4))
