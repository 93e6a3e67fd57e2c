"""Ergodic Markov chains on d tokens: stationary law, entropies, constructions, samples.

A chain is the data distribution of the theory: a transition matrix P, whose rows sum to
one, and its stationary law pi with pi P = pi. Everything above needs only averages
under pi_i P_ij, so a chain keeps its structure (a lazy chain is one number and pi, a
chain from counts is sparse) and builds the dense matrix on demand.

Left out: chains with memory, continuous time, and reading text (`flowsim.corpus`).

>>> import flowsim as fs
>>> chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], lam=0.5)
>>> round(float(chain.unigram_entropy), 6), round(float(chain.entropy_rate), 6)
(0.727139, 0.553611)
"""

from .chain import MarkovChain
from .constructions import (
    chain_from_counts,
    lazy_chain,
    metropolis_chain,
    two_level_law,
)
from .kernels import AbstractKernel, DenseKernel, LazyKernel, SparseKernel
from .stationary import stationary_law

__all__ = [
    "AbstractKernel",
    "DenseKernel",
    "LazyKernel",
    "MarkovChain",
    "SparseKernel",
    "chain_from_counts",
    "lazy_chain",
    "metropolis_chain",
    "stationary_law",
    "two_level_law",
]
