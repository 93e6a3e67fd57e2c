"""Other transition matrices with the same stationary law: the order of the stages.

Condensation sees pi alone, so it takes the same time for all of them; what follows is
set by the chain's own c, in sign and speed.
"""

import functools as ft
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from .. import theory
from .._types import Scalar
from ..flow import gradient_flow
from ..loss import PopulationLoss
from ..markov import MarkovChain, lazy_chain, metropolis_chain
from ..model import AttentionModel
from .events import crossing


class StageTimes(eqx.Module):
    """When a chain's flow passes the stages, and the growth of the times with eps.

    Attributes:
        name: the transition matrix.
        origin_rate, focus_rate: mu and c.
        condensation: T_I, loss half-way from log d to H(pi), at the smallest eps.
        focus: T_II, |Phi| = 1/2, at the smallest eps; None if it does not happen.
        condensation_slope: d T_I / d log(1/eps), predicted 1/mu.
        focus_slope: d (T_II - T_I) / d log(1/eps), predicted 1/|c|.
        attention: change of the mean attention on the most frequent token at T_II.
    """

    name: str
    origin_rate: float
    focus_rate: float
    condensation: float
    focus: float | None
    condensation_slope: float
    focus_slope: float | None
    attention: float | None

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        return {
            "matrix": self.name,
            "mu": self.origin_rate,
            "c": self.focus_rate,
            "T_I": self.condensation,
            "T_II": self.focus,
            "mu dT_I/dlog(1/eps)": self.origin_rate * self.condensation_slope,
            "|c| d(T_II - T_I)/dlog(1/eps)": (
                None
                if self.focus_slope is None
                else abs(self.focus_rate) * self.focus_slope
            ),
            "change of attention": self.attention,
        }


def same_law_chains(
    pi: Any, *, seeds: tuple[int, ...] = (0, 2)
) -> dict[str, MarkovChain]:
    """Chains with one stationary law: lazy ones, Metropolis, and shuffled rows.

    With pi = (.75, .19, .05, .01) the second default shuffle has c < 0.
    """
    return {
        "lazy, lam = 0.25": lazy_chain(pi, 0.25),
        "lazy, lam = 0.5": lazy_chain(pi, 0.5),
        "lazy, lam = 0.75": lazy_chain(pi, 0.75),
        "Metropolis": metropolis_chain(pi),
        **{
            f"shuffled rows, seed {seed}": shuffled_rows(lazy_chain(pi, 0.5), seed=seed)
            for seed in seeds
        },
    }


def shuffled_rows(chain: MarkovChain, *, seed: int = 0) -> MarkovChain:
    """Another chain with the same pi: every row of P in random order, then rescaled.

    Shuffling moves the stationary law; scaling the rows and columns of pi_i P_ij in
    turn brings both of its marginals back to pi.

    References:
        Sinkhorn (1964), Ann. Math. Statist. 35, 876-879: the scaling converges.
    """
    pi = np.asarray(chain.stationary, float)
    joint = np.random.default_rng(seed).permuted(np.asarray(chain.transition), axis=1)
    joint = pi[:, None] * joint
    for _ in range(10_000):
        joint *= pi / joint.sum(axis=0)
        joint *= (pi / joint.sum(axis=1))[:, None]
        if np.abs(joint.sum(axis=0) - pi).max() < 1e-15:
            break
    transition = joint / joint.sum(axis=1, keepdims=True)
    return MarkovChain(transition, tokens=chain.tokens)


def stage_times(
    chains: Mapping[str, MarkovChain],
    *,
    width: int = 16,
    scales: tuple[float, float] = (1e-5, 1e-6),
    key: PRNGKeyArray,
) -> list[StageTimes]:
    """Follow every chain's flow from one direction at two scales.

    The flow is followed for twice the time at which theory expects the end of focus,
    log(1/eps) (1/mu + 1/|c|).

    Raises:
        ValueError: scales that do not fall.
    """
    if not 0 < scales[1] < scales[0]:
        raise ValueError(
            f"scales must be two positive numbers that fall; got {scales}."
        )
    found = []
    for name, chain in chains.items():
        loss = PopulationLoss(chain.to_dense())
        mu, c = float(theory.origin_rate(chain)), float(theory.focus_rate(chain))
        runs = [_times(loss, width, scale, key, mu, c) for scale in scales]
        (early, focus_early, _), (late, focus, change) = runs
        stretch = float(np.log(scales[0] / scales[1]))
        slope = None
        if focus is not None and focus_early is not None:
            slope = ((focus - late) - (focus_early - early)) / stretch
        found.append(
            StageTimes(
                name=name,
                origin_rate=mu,
                focus_rate=c,
                condensation=late,
                focus=focus,
                condensation_slope=(late - early) / stretch,
                focus_slope=slope,
                attention=change,
            )
        )
    return found


def _times(
    loss: PopulationLoss, width: int, scale: float, key: Any, mu: float, c: float
) -> tuple[float, float | None, float | None]:
    chain = loss.chain
    model = AttentionModel.init(key, vocab=chain.num_states, width=width, scale=scale)
    run = gradient_flow(
        loss,
        model,
        t1=2 * float(np.log(1 / scale)) * (1 / mu + 1 / abs(c)),
        rtol=1e-6,
        observe=ft.partial(_watch, loss),
        stop=StrengthPast(jnp.asarray(0.6)),
    )
    ts, losses = np.asarray(run.ts), np.asarray(run.losses)
    half = 0.5 * (np.log(chain.num_states) + float(chain.unigram_entropy))
    condensation = crossing(ts, losses, half, 0, falling=True)
    focus = crossing(ts, np.asarray(run.observables["strength"]), 0.5, 0, falling=False)
    change = None
    if focus is not None:
        attention = np.asarray(run.observables["attention on top token"])
        change = float(np.interp(focus, ts, attention) - attention[0])
    return (np.nan if condensation is None else condensation), focus, change


def _watch(loss: PopulationLoss, model: AttentionModel) -> dict[str, Scalar]:
    pi = loss.chain.stationary
    attention = pi @ loss.attention(model)[:, jnp.argmax(pi)]
    return {"strength": strength(model), "attention on top token": attention}


def strength(model: AttentionModel) -> Scalar:
    """|Phi|, the Frobenius norm of the attention logits."""
    return jnp.sqrt(jnp.sum(model.attention_logits() ** 2))


class StrengthPast(eqx.Module):
    """Whether |Phi| is past a level: what follows takes long, and is not asked for."""

    level: Scalar

    def __call__(self, t: Scalar, model: AttentionModel) -> Bool[Array, ""]:
        del t
        return strength(model) > self.level
