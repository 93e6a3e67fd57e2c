"""The runs that the claims share, arranged so that little has to be compiled.

Compiling a flow takes longer than most flows take. All runs on one vocabulary size
therefore use the same objective type (a dense chain) and the same shapes, and none a
stop condition: times of events are read off cubic splines through the saved points,
which are all accepted steps of a high-order method at a small tolerance.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .. import theory
from .._curves import crossings, spline
from .._types import Scalar
from ..flow import default_atol, gradient_flow
from ..loss import PopulationLoss
from ..markov import DenseKernel, MarkovChain
from ..model import AttentionModel
from ..trajectory import Trajectory


class Escape(eqx.Module):
    """One start of size eps, followed through the first two escapes.

    Attributes:
        scale: eps.
        time_origin: T_I, when the loss has fallen half of the way from log d to H(pi).
        time_focus: T_II, when |Phi| = 1/2, attention no longer small.
        condensed: distance of (W0/|W0|, W1/|W1|) from the predicted directions when
            |W0| = sqrt(eps), in the linear regime.
        embedding: distance of W0/|W0| from its predicted direction at T_I.
        bent: distance of W1/|W1| from its predicted direction at T_I.
        attention: norm of (WQ, WK) at T_I.
        imbalance: | |W0| - |W1| | at T_I.
        alignment: cosine between Phi and pi pi^T when |Phi| = sqrt(eps).
        succeeded: whether the run reached its end.
    """

    scale: float
    time_origin: float
    time_focus: float
    condensed: tuple[float, float]
    embedding: float
    bent: float
    attention: float
    imbalance: float
    alignment: float
    succeeded: bool


class AttentionGrowth(eqx.Module):
    """What attention does next to theta_c^1.

    Attributes:
        rate: half the growth rate of |Phi|, so that of WQ and WK (1/flow time).
        change: of the attended tokens' mean frequency, sum_ij pi_i A_ij pi_j, by the
            end of the run; positive when attention moves to frequent tokens.
        same_sign: cosine between alpha^T WQ and alpha^T WK at the end; 1 where they
            grow equal, -1 where they grow opposite.
        succeeded: whether the run reached its end.
    """

    rate: float
    change: float
    same_sign: float
    succeeded: bool


class Curves(eqx.Module):
    """What is watched along every run; leading time axis in a trajectory.

    Attributes:
        log_embedding, log_attention: log |W0| and log |Phi|.
        distances: of W0/|W0| and W1/|W1| from their directions of condensation.
        attention: norm of (WQ, WK).
        imbalance: |W0| - |W1|.
        alignment: cosine between Phi and pi pi^T.
    """

    log_embedding: Float[Array, "*t"]
    log_attention: Float[Array, "*t"]
    distances: Float[Array, "*t 2"]
    attention: Float[Array, "*t"]
    imbalance: Float[Array, "*t"]
    alignment: Float[Array, "*t"]


class Watch(eqx.Module):
    """Observer of all runs: one type, so that they share their compiled code."""

    condensation: theory.Condensation
    law: Float[Array, " d"]

    def __call__(self, model: AttentionModel) -> Curves:
        scores = model.attention_logits()
        pairs = ((model.W0, self.condensation.W0), (model.W1, self.condensation.W1))
        return Curves(
            log_embedding=_log_norm(model.W0),
            log_attention=_log_norm(scores),
            distances=jnp.stack([jnp.linalg.norm(_unit(x) - u) for x, u in pairs]),
            attention=jnp.sqrt(jnp.sum(model.WQ**2) + jnp.sum(model.WK**2)),
            imbalance=jnp.linalg.norm(model.W0) - jnp.linalg.norm(model.W1),
            alignment=jnp.sum(_unit(scores) * _unit(jnp.outer(self.law, self.law))),
        )


def observed_flow(
    loss: PopulationLoss,
    start: AttentionModel,
    *,
    t1: float,
    rtol: float,
    atol: float | None = None,
) -> Trajectory:
    """A gradient flow with `Curves` as observables."""
    chain = loss.chain
    watch = Watch(theory.condensation_direction(start, chain), chain.stationary)
    atol = float(default_atol(start, jnp.asarray(rtol))) if atol is None else atol
    return gradient_flow(loss, start, t1=t1, rtol=rtol, atol=atol, observe=watch)


def follow_escapes(
    loss: PopulationLoss, direction: AttentionModel, scale: float, rtol: float
) -> Escape:
    """Flow from `scale` times a fixed start through the first two escapes."""
    chain = loss.chain
    levels, times = theory.plateaus(chain), theory.escape_times(chain)
    start = jax.tree.map(lambda leaf: scale * leaf, direction)
    # Long enough for events at the predicted times plus a few time constants.
    t1 = float(times.origin + times.focus) * (math.log(1 / scale) + 4.0)
    run = observed_flow(loss, start, t1=t1, rtol=rtol, atol=0.1 * rtol * scale)
    curves = run.observables
    half = 0.5 * float(levels.origin + levels.second)
    early = crossing(run, curves.log_embedding, 0.5 * math.log(scale))
    first = crossing(run, -run.losses, -half)
    aligned = crossing(run, curves.log_attention, 0.5 * math.log(scale))
    second = crossing(run, curves.log_attention, math.log(0.5))
    return Escape(
        scale=scale,
        time_origin=first,
        time_focus=second,
        condensed=(
            read(run, curves.distances[:, 0], early),
            read(run, curves.distances[:, 1], early),
        ),
        embedding=read(run, curves.distances[:, 0], first),
        bent=read(run, curves.distances[:, 1], first),
        attention=read(run, curves.attention, first),
        imbalance=abs(read(run, curves.imbalance, first)),
        alignment=read(run, curves.alignment, aligned),
        succeeded=bool(run.succeeded),
    )


def grow_attention(
    chain: MarkovChain,
    *,
    width: int,
    key_width: int,
    key: PRNGKeyArray,
    rate: float | None = None,
    size: float = 1e-7,
    rtol: float = 1e-8,
) -> AttentionGrowth:
    """Start at theta_c^1 with random attention of size `size`, and let it grow.

    Starting there is cheaper than flowing there from scratch, and keeps the stable
    directions, which for large vocabularies decay no faster than attention grows, out
    of the measurement.

    Args:
        rate: expected size of the growth rate, which sets the length of the run; that
            of the theory when absent.
    """
    loss = PopulationLoss(chain)
    point = theory.second_critical_point(chain, width=width, key_width=key_width)
    noise = AttentionModel.init(
        key, vocab=chain.num_states, width=width, key_width=key_width, scale=size
    )
    start = eqx.tree_at(lambda m: (m.WQ, m.WK), point, (noise.WQ, noise.WK))
    rate = abs(float(theory.focus_rate(chain))) if rate is None else rate
    run = observed_flow(loss, start, t1=8.0 / rate, rtol=rtol, atol=1e-4 * rtol * size)
    scores, end = run.observables.log_attention, run.final
    # The decaying directions are gone in the second half of the run.
    middle, last = 4.0 / rate, float(run.ts[-1])
    growth = read(run, scores, last) - read(run, scores, middle)
    pi = chain.stationary
    mean = pi @ loss.attention(end) @ pi
    alpha = np.linalg.svd(np.asarray(end.W0))[2][0]
    query, key_part = alpha @ np.asarray(end.WQ), alpha @ np.asarray(end.WK)
    cosine = query @ key_part / (np.linalg.norm(query) * np.linalg.norm(key_part))
    return AttentionGrowth(
        rate=0.5 * growth / (last - middle),
        change=float(mean - pi @ pi),
        same_sign=float(cosine),
        succeeded=bool(run.succeeded),
    )


def avoiding_chain(law: Float[Array, " d"]) -> MarkovChain:
    """A reversible chain with the given law in which the top token avoids itself.

        P_ij = pi_j (1 - s u_i u_j),   u = e_top - pi_top,   s u_i u_j <= 0.9

    Same law as the lazy chain, so the same condensation, but c < 0.
    """
    top = jnp.argmax(law)
    u = jnp.zeros_like(law).at[top].set(1.0) - law[top]
    strength = 0.9 / jnp.max(jnp.outer(u, u))
    kernel = DenseKernel(law[None, :] * (1.0 - strength * jnp.outer(u, u)))
    return MarkovChain(kernel, law)


def crossing(run: Trajectory, curve: Any, level: float) -> float:
    """First time at which a curve over the saved points rises through a level.

    NaN where it never does.
    """
    times = crossings(run.ts, np.asarray(curve), level, rising=True)
    return float(times[0]) if times.size else math.nan


def read(run: Trajectory, curve: Any, time: float) -> float:
    """Value at one time of a curve over the saved points."""
    if not math.isfinite(time):
        return math.nan
    return float(spline(run.ts, np.asarray(curve))(time))


def _log_norm(x: Float[Array, "..."]) -> Scalar:
    """log |x|; the square of a product of four small matrices may underflow."""
    largest = jnp.max(jnp.abs(x))
    return jnp.log(largest) + 0.5 * jnp.log(jnp.sum((x / largest) ** 2))


def _unit(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x / |x|."""
    x = x / jnp.max(jnp.abs(x))
    return x / jnp.sqrt(jnp.sum(x**2))
