"""A made-up run, and every figure over time with the curves that it must show."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from flowsim import plots
from flowsim.conservation import Conserved
from flowsim.diagnostics import Diagnostics, EmbeddingPath, PerMatrix
from flowsim.markov import MarkovChain, lazy_chain
from flowsim.model import AttentionModel
from flowsim.spectrum import Spectrum
from flowsim.trajectory import Outcome, Trajectory

NUM_TIMES = 25


class Stage(NamedTuple):
    name: str
    start: float
    end: float


STAGES = (
    Stage("condensation", 0.0, 20.0),
    Stage("focus", 20.0, 100.0),
    Stage("dilution", 100.0, 110.0),
    Stage("new direction", 110.0, 1e4),
)


def synthetic_chain(vocab):
    """The most frequent token is not the first; some names are hard to typeset."""
    weights = np.roll(1.0 / np.arange(1, vocab + 1), 2)
    names = ["_x", "cost in $", "$a_b$", *(f"word{i}" for i in range(3, vocab))]
    chain = lazy_chain(weights / weights.sum(), 0.3)
    return MarkovChain(chain.kernel, chain.stationary, tokens=names[:vocab])


def synthetic_run(chain, width=3, *, models=True):
    """Numbers that are different everywhere, so that mixing two up shows."""
    rng = np.random.default_rng(0)
    d, t = chain.num_states, NUM_TIMES
    ts = np.concatenate([[0.0], np.geomspace(1e-2, 1e4, t - 1)])

    def draws(*shape):
        return jnp.asarray(rng.random((t, *shape)) + 0.1)

    def singular(q):
        return -jnp.sort(-draws(q), axis=-1)

    shapes = {"W0": (d, width), "W1": (width, d), "WQ": (width, 2), "WK": (width, 2)}
    kept = t if models else 2
    matrices: Any = {
        name: jnp.asarray(rng.normal(size=(kept, *shape)))
        for name, shape in shapes.items()
    }
    return Trajectory(
        ts=jnp.asarray(ts),
        models=AttentionModel(**matrices),
        losses=jnp.asarray(1.5 - 0.9 * ts / (ts + 50.0)),
        grad_norms=draws(),
        observables=Diagnostics(
            singular_values=PerMatrix(*(singular(width) for _ in range(4))),
            embedding_cosine=draws(),
            readout_cosine=draws(),
            attention_scale=draws(),
            attention_cosine=draws(),
            top_attention=draws(d),
            self_attention=draws(d),
            attention_entropy=draws(d),
            mean_top_attention=draws(),
            mean_self_attention=draws(),
            mean_attention_entropy=draws(),
            embedding_norms=draws(d),
            conserved=Conserved(draws(width, width), draws(width, width), draws(width)),
        ),
        outcome=Outcome.reached_t1,
        num_saved=jnp.asarray(t),
        loss_rise=jnp.zeros(()),
        stats={},
        settings={},
    )


CHAIN = synthetic_chain(4)

RUN = synthetic_run(CHAIN)

SEEN = RUN.observables

RATIOS = SEEN.rank_ratio()

PATH = EmbeddingPath(
    coordinates=jnp.asarray(np.random.default_rng(1).normal(size=(NUM_TIMES, 4, 2))),
    explained=jnp.asarray([0.75, 0.2]),
    basis=jnp.eye(2, 3),
    center=jnp.zeros(3),
)


def spectrum_of(values, tolerance=1e-8):
    values = jnp.asarray(values, float)
    count = jnp.zeros((), jnp.int32)
    return Spectrum(
        values=values,
        vectors=jnp.zeros((*values.shape, 2)),
        residuals=jnp.zeros_like(values),
        converged=jnp.ones_like(values, bool),
        radius=jnp.ones(()),
        tolerance=jnp.asarray(tolerance),
        num_symmetry=None,
        num_products=count,
        complete=True,
        method="dense",
        which="both",
    )


def drifts():
    for value in vars(SEEN.conserved).values():
        value = np.asarray(value).reshape(NUM_TIMES, -1)
        yield np.abs(value - value[0]).max(axis=1)


# Figure function, the curves that it must show, what its vertical label must say.
FIGURES = {
    "loss": (
        lambda **kw: plots.loss_figure(RUN, CHAIN, **kw),
        [RUN.losses],
        ["loss", "nats"],
    ),
    "gradient": (
        lambda **kw: plots.gradient_figure(RUN, **kw),
        [RUN.grad_norms],
        ["gradient norm", "nats"],
    ),
    "rank": (
        lambda **kw: plots.rank_figure(RUN, **kw),
        [*vars(RATIOS).values(), SEEN.rank_ratio(3).W0],
        ["sigma_2", "ratio"],
    ),
    "attention on top": (
        lambda **kw: plots.attention_figure(RUN, CHAIN, **kw),
        [*SEEN.top_attention.T],
        ["attention on “\\$a_b\\$”", "probability"],
    ),
    "attention on itself": (
        lambda **kw: plots.attention_figure(RUN, CHAIN, on="self", **kw),
        [*SEEN.self_attention.T],
        ["attention on itself", "probability"],
    ),
    "entropy": (
        lambda **kw: plots.entropy_figure(RUN, CHAIN, **kw),
        [*SEEN.attention_entropy.T],
        ["entropy", "nats"],
    ),
    "norm": (
        lambda **kw: plots.norm_figure(RUN, CHAIN, **kw),
        [*SEEN.embedding_norms.T],
        ["embedding norm", "parameter units"],
    ),
    "drift": (
        lambda **kw: plots.drift_figure(RUN, **kw),
        list(drifts()),
        ["change", "parameter units"],
    ),
}

every_figure = pytest.mark.parametrize("name", FIGURES)


def data_lines(ax: Any) -> list[Any]:
    """The lines that follow the run: not the theory lines over the whole axis."""
    return [line for line in ax.get_lines() if len(line.get_xdata()) == NUM_TIMES]


def legend_texts(ax: Any):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def assert_same_curves(shown, expected):
    """The same curves, in any order."""
    assert len(shown) == len(expected)
    shown, expected = (
        sorted(tuple(np.asarray(curve).tolist()) for curve in curves)
        for curves in (shown, expected)
    )
    np.testing.assert_array_equal(shown, expected)
