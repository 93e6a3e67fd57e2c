"""Chains: wrong input is named, eagerly or under jit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.markov import (
    MarkovChain,
    chain_from_counts,
    lazy_chain,
    metropolis_chain,
    two_level_law,
)

from .chains import DEFAULT

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
