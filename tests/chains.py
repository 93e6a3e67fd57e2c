"""Chains of every kind of kernel, small."""

import numpy as np
import pytest

from flowsim.markov import (
    MarkovChain,
    chain_from_counts,
    lazy_chain,
    metropolis_chain,
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
