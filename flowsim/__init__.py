"""flowsim: exact gradient flow, its saddles and their spectra, theory against both.

theta' = -grad L(theta) for any objective L on any pytree of arrays, with the one-layer
transformer of "Focus and Dilution" (Chen, Lin, Xu and Luo, arXiv:2605.01199) as the
first subject. Importing the package changes no setting of JAX: turn double precision
on yourself, `jax.config.update("jax_enable_x64", True)`.
"""

from . import invariant, linearised, lyapunov_schmidt, theory
from .batches import ChainBatches, TextBatches
from .corpus import load_chain
from .critical import CriticalOutcome, CriticalPoint, find_critical_point
from .diagnostics import Diagnostics, diagnose, embedding_path
from .flow import Save, gradient_flow
from .loss import PopulationLoss, SampleLoss
from .markov import (
    MarkovChain,
    chain_from_counts,
    lazy_chain,
    metropolis_chain,
    two_level_law,
)
from .model import AttentionModel
from .records import load_trajectory, save_trajectory
from .saddles import find_saddles
from .spectrum import Spectrum, block_weights, spectrum
from .stages import Stages, find_stages
from .sweep import sweep
from .training import train
from .trajectory import Outcome, Trajectory
from .verification import Verdict, Verification, verify
from .visits import VisitedPoint, VisitKind

__version__ = "0.1.0"

__all__ = [
    "AttentionModel",
    "ChainBatches",
    "CriticalOutcome",
    "CriticalPoint",
    "Diagnostics",
    "MarkovChain",
    "Outcome",
    "PopulationLoss",
    "SampleLoss",
    "Save",
    "Spectrum",
    "Stages",
    "TextBatches",
    "Trajectory",
    "Verdict",
    "Verification",
    "VisitKind",
    "VisitedPoint",
    "block_weights",
    "chain_from_counts",
    "diagnose",
    "embedding_path",
    "find_critical_point",
    "find_saddles",
    "find_stages",
    "gradient_flow",
    "invariant",
    "lazy_chain",
    "linearised",
    "load_chain",
    "load_trajectory",
    "lyapunov_schmidt",
    "metropolis_chain",
    "save_trajectory",
    "spectrum",
    "sweep",
    "theory",
    "train",
    "two_level_law",
    "verify",
]
