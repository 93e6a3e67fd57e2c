"""The flows that are integrated, and where their reference solutions come from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import flowsim as fs


class Problem(NamedTuple):
    """A flow: its chain, the width of the model, the times it is integrated to."""

    title: str
    chain: str
    vocab: int
    width: int
    times: tuple[float, ...]

    @property
    def num_params(self) -> int:
        return 2 * self.vocab * self.width + 2 * self.width**2


PROBLEMS = {
    "C1": Problem("default chain", "lazy", 4, 16, (2000.0, 20000.0)),
    "Z64": Problem("Zipf law, 64 tokens", "zipf", 64, 32, (2000.0, 20000.0)),
    "W64": Problem("WikiText-2, 64 tokens", "wikitext2", 64, 32, (1000.0,)),
    "W256": Problem("WikiText-2, 256 tokens", "wikitext2", 256, 32, (1000.0,)),
}
SCALE = 1e-3  # Standard deviation of the initial parameters.


def chain(name: str) -> Any:
    problem = PROBLEMS[name]
    if problem.chain == "lazy":
        return fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)
    if problem.chain == "zipf":
        law = 1.0 / np.arange(1.0, problem.vocab + 1.0)
        return fs.lazy_chain(law / law.sum(), 0.5)
    return fs.load_chain(problem.chain, vocab=problem.vocab)


def start(name: str, seed: int = 0) -> fs.AttentionModel:
    problem = PROBLEMS[name]
    return fs.AttentionModel.init(
        jax.random.key(seed),
        vocab=problem.vocab,
        width=problem.width,
        key_width=problem.width,
        scale=SCALE,
    )


def flat(model: Any) -> np.ndarray:
    """The parameters as one vector of numbers."""
    leaves = jax.tree.leaves(model)
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])


def absolute_tolerance(model: Any, rtol: float) -> float:
    """The one that flowsim chooses by default, given to every method."""
    return float(fs.flow.default_atol(model, jnp.asarray(rtol)))
