"""Chains: what they promise about pi, P, entropies and samples."""

import logging
from fractions import Fraction

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

DEFAULT = np.array([0.75, 0.19, 0.05, 0.01])


def random_matrix(seed, size, zeros=0.0):
    """An ergodic matrix: a cycle and a loop keep it so whatever is set to zero."""
    rng = np.random.default_rng(seed)
    P = rng.exponential(size=(size, size)) * (rng.random((size, size)) >= zeros)
    P[np.arange(size), (np.arange(size) + 1) % size] += 0.1
    P[0, 0] += 0.1
    return P / P.sum(axis=1, keepdims=True)


def random_counts(seed, size):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(0.8, (size, size))
    counts[np.arange(size), (np.arange(size) + 1) % size] += 1
    counts[0, 0] += 1
    return counts


CHAINS = {
    "dense": lambda: MarkovChain(random_matrix(0, 7, zeros=0.4)),
    "lazy": lambda: lazy_chain(DEFAULT, 0.5),
    "lazy, negative lam": lambda: lazy_chain([0.5, 0.3, 0.2], -0.2),
    "lazy, zero on the diagonal": lambda: lazy_chain([0.5, 0.25, 0.25], -1 / 3),
    "metropolis": lambda: metropolis_chain(DEFAULT),
    "counts": lambda: chain_from_counts(random_counts(1, 8)),
}
every_chain = pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS.keys())


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


# Stationary law


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
    with jax.enable_x64(False):
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


# Wrong input

IDENTITY = np.eye(3)
TWO_CYCLE = [[0, 1], [1, 0]]
THREE_CYCLE = np.roll(np.eye(3), 1, axis=1)
TWO_BY_TWO = np.full((2, 2), 0.5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MarkovChain(np.ones((2, 3))), r"square.*\(2, 3\)"),
        (lambda: MarkovChain(np.ones(3)), r"square.*\(3,\)"),
        (lambda: MarkovChain([[0.5, 0.6], [0.5, 0.5]]), r"row 0 sums to 1\.1"),
        (lambda: MarkovChain([[0.5, 0.5], [0.0, 0.0]]), r"row 1 sums to 0"),
        (lambda: MarkovChain([[1.5, -0.5], [0.5, 0.5]]), r"row 0 .*P\[0, 1\] = -0\.5"),
        (lambda: MarkovChain([[0.5, 0.5], [np.nan, 0.5]]), r"row 1 .*nan"),
        (lambda: MarkovChain(IDENTITY), r"irreducible; from row 0.* to token 1"),
        (lambda: MarkovChain([[1.0, 0.0], [0.5, 0.5]]), r"irreducible; from row 0"),
        (lambda: MarkovChain([[0.5, 0.5], [0.0, 1.0]]), r"irreducible; from row 1"),
        (lambda: MarkovChain(TWO_CYCLE), r"aperiodic.*multiples of 2"),
        (lambda: MarkovChain(THREE_CYCLE), r"aperiodic.*multiples of 3"),
        (lambda: MarkovChain(TWO_BY_TWO, [0.6, 0.4]), r"where it is 0\.5"),
        (lambda: MarkovChain(TWO_BY_TWO, [1.0, 0.0]), r"stationary\[1\] = 0\.0"),
        (lambda: MarkovChain(TWO_BY_TWO, [0.5, 0.4]), r"stationary must sum to one"),
        (lambda: MarkovChain(TWO_BY_TWO, [1.0]), r"stationary.*\(2,\).*\(1,\)"),
        (lambda: MarkovChain(TWO_BY_TWO, tokens=["a"]), r"name all 2 .*1 names"),
        (lambda: lazy_chain([0.9, 0.2], 0.5), r"pi must sum to one.*1\.1"),
        (lambda: lazy_chain([1.0, 0.0], 0.5), r"pi\[1\] = 0\.0"),
        (lambda: lazy_chain([1.1, -0.1], 0.5), r"pi\[1\] = -0\.1"),
        (lambda: lazy_chain([[1.0]], 0.5), r"vector.*\(1, 1\)"),
        (lambda: lazy_chain([0.9, 0.1], 1), r"lam must be below 1.*1\.0"),
        (lambda: lazy_chain([0.9, 0.1], np.nan), r"lam must be below 1.*nan"),
        (lambda: lazy_chain([0.9, 0.1], -0.5), r"row 1 .*lam = -0\.5"),
        (lambda: lazy_chain([0.5, 0.5], -1.0), r"aperiodic"),
        (lambda: lazy_chain([0.5, 0.5], np.ones(1)), r"lam must be a scalar"),
        (lambda: metropolis_chain([0.5, 0.4]), r"pi must sum to one"),
        (lambda: two_level_law(vocab=4, top=0.7, delta=0.1), r"pattern"),
        (
            lambda: two_level_law(vocab=4, top=0.7, delta=0.1, pattern=[1, 0, 1]),
            r"sum to zero; its sum is 2",
        ),
        (
            lambda: two_level_law(vocab=4, top=0.7, delta=0.1, pattern=[1, -1]),
            r"pattern.*\(3,\).*\(2,\)",
        ),
        (
            lambda: two_level_law(vocab=4, top=0.7, delta=0.2, pattern=[1, 0, -1]),
            r"positive; pi\[3\] = -0\.09",
        ),
        (lambda: two_level_law(vocab=4, top=1.0), r"positive; pi\[1\] = 0"),
        (lambda: two_level_law(vocab=1, top=1.0), r"at least 2"),
        (lambda: chain_from_counts([[1, 2], [0, 0]]), r"successor; row 1"),
        (lambda: chain_from_counts([[1, 2], [1, -1]]), r"counts\[1, 1\] = -1"),
        (lambda: chain_from_counts([1, 2]), r"square"),
        (lambda: chain_from_counts([[1, 2], [0, 3]]), r"irreducible"),
        (
            lambda: chain_from_counts([[1, 2], [0, 0]], tokens=["the", "end"]),
            r"token 'end'",
        ),
        (lambda: lazy_chain(DEFAULT, 0.5).sample(jax.random.key(0), 0, 3), r"num_seq"),
        (lambda: lazy_chain(DEFAULT, 0.5).sample(jax.random.key(0), 3, 0), r"length"),
    ],
)
def test_wrong_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_law_that_solves_the_equation_only_to_round_off_is_refused():
    # Any mixture of the two blocks' laws has a residual of 1e-15: no evidence.
    P = nearly_decomposable()
    pi = np.asarray(stationary_law(P))
    mixture = np.concatenate([pi[:3] / pi[:3].sum(), pi[3:] / pi[3:].sum()]) / 2
    assert np.max(np.abs(mixture @ P - mixture)) < 1e-14
    with pytest.raises(ValueError, match="must be the stationary law"):
        MarkovChain(P, stationary=mixture)


@pytest.mark.parametrize(
    ("build", "value", "message"),
    [
        (MarkovChain, np.array([[0.5, 0.6], [0.5, 0.5]]), "sum to one"),
        (MarkovChain, np.array([[1.5, -0.5], [0.5, 0.5]]), "non-negative"),
        (MarkovChain, IDENTITY, "irreducible"),
        (MarkovChain, np.array([[0.5, 0.5], [0.0, 1.0]]), "irreducible"),
        (
            lambda pi: MarkovChain(TWO_BY_TWO, stationary=pi),
            np.array([0.6, 0.4]),
            "pi P = pi",
        ),
        (lambda pi: lazy_chain(pi, 0.5), np.array([0.5, 0.4]), "pi must be positive"),
        (lambda lam: lazy_chain([0.9, 0.1], lam), np.array(-0.5), "lam must be below"),
        (lambda lam: lazy_chain([0.9, 0.1], lam), np.array(1.0), "lam must be below"),
        (metropolis_chain, np.array([1.5, -0.5]), "pi must be positive"),
    ],
)
def test_wrong_traced_values_raise_at_run_time(build, value, message):
    run = eqx.filter_jit(lambda value: build(value).entropy_rate)
    with pytest.raises(RuntimeError, match=message):
        run(jnp.asarray(value)).block_until_ready()


def test_shapes_are_checked_while_tracing():
    with pytest.raises(ValueError, match="square"):
        jax.eval_shape(MarkovChain, jnp.ones((2, 3)))
