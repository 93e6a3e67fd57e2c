"""Which way attention goes first, from smaller and smaller eps.

The theory speaks about eps -> 0, where a run comes as close to theta_c^1 as one likes
and leaves it by the sign of c. From the initial scales of experiments it does not.
Starting beside the point shows the limit; starting beside the origin shows how small
eps has to be.
"""

import functools as ft
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .. import _summary, theory
from ..flow import gradient_flow
from ..loss import PopulationLoss
from ..markov import MarkovChain
from ..model import AttentionModel
from .events import crossing
from .matrices import StrengthPast, strength

# |Phi| at which the direction of attention is read: still linear next to the point,
# past the first transient from the origin.
_LEVELS = {"theta_c^1": 0.01, "origin": 0.1}


class Departure(eqx.Module):
    """Flows from a critical point plus noise of standard deviation eps, eps falling.

    Attributes:
        start: "theta_c^1" or "origin".
        focus_rate: c, whose sign is the predicted direction.
        growth: predicted dT/dlog(1/eps) as eps -> 0: 1/|c| from theta_c^1,
            1/mu + 1/|c| from the origin.
        level: of |Phi|, which is reached at T.
        scales: eps.
        times: T (flow time); NaN if never.
        changes: relative change of the mean attention on the most frequent token at T.
    """

    start: str
    focus_rate: float
    growth: float
    level: float
    scales: tuple[float, ...]
    times: Float[np.ndarray, " scales"]
    changes: Float[np.ndarray, " scales"]

    @property
    def slopes(self) -> Float[np.ndarray, " pairs"]:
        """dT/dlog(1/eps) between neighbouring scales over its prediction."""
        stretch = np.diff(-np.log(np.asarray(self.scales)))
        return np.diff(self.times) / stretch / self.growth

    def rows(self) -> list[dict[str, Any]]:
        """Plain data for a table, one row a scale."""
        slopes = [None, *map(float, self.slopes)]
        return [
            {
                "from": self.start,
                "eps": scale,
                "|Phi|": self.level,
                "reached at": float(time),
                "dT/dlog(1/eps) over prediction": slope,
                "attention on top token / pi - 1": float(change),
                "sign of c": int(np.sign(self.focus_rate)),
            }
            for scale, time, slope, change in zip(
                self.scales, self.times, slopes, self.changes, strict=True
            )
        ]

    def __str__(self) -> str:
        return _summary.aligned(
            f"Departure from {self.start}, c = {self.focus_rate:.4g} (T, attention)",
            {
                f"eps = {scale:g}": f"{time:8.4g}   {change:+.4e}"
                for scale, time, change in zip(
                    self.scales, self.times, self.changes, strict=True
                )
            },
        )


def leave_second_point(
    chain: MarkovChain,
    *,
    width: int = 4,
    scales: tuple[float, ...] = (1e-3, 1e-4, 1e-5),
    key: PRNGKeyArray | None = None,
) -> Departure:
    """Start beside theta_c^1 and look which way attention goes, for each scale.

    The rate c does not depend on the width; a small one serves.

    Raises:
        ValueError: c = 0, where attention does not grow, or scales that do not fall.
    """
    point = theory.second_critical_point(chain, width=width, key_width=width)
    return _leave("theta_c^1", chain, point, scales, key)


def leave_origin(
    chain: MarkovChain,
    *,
    width: int = 4,
    scales: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5),
    key: PRNGKeyArray | None = None,
) -> Departure:
    """Start beside the origin and look which way attention goes first, for each scale.

    Large scales show a transient on the way to theta_c^1, which needs no bigrams; in
    the limit the sign of c decides.

    Raises:
        ValueError: as `leave_second_point`.
    """
    like = theory.second_critical_point(chain, width=width, key_width=width)
    return _leave("origin", chain, jax.tree.map(jnp.zeros_like, like), scales, key)


def _leave(
    name: str,
    chain: MarkovChain,
    point: AttentionModel,
    scales: tuple[float, ...],
    key: PRNGKeyArray | None,
) -> Departure:
    rate = float(theory.focus_rate(chain))
    # The terms of c cancel to round-off for independent tokens.
    if abs(rate) < 1e-10:
        raise ValueError(f"the chain must have c != 0; got {rate:g}.")
    if not all(0 < b < a for a, b in itertools.pairwise((1.0, *scales))):
        raise ValueError(f"scales must be positive, below 1, and fall; got {scales}.")
    growth = 1 / abs(rate)
    if name == "origin":
        growth += 1 / float(theory.origin_rate(chain))
    loss, top = PopulationLoss(chain.to_dense()), float(jnp.max(chain.stationary))
    noise = AttentionModel.init(
        jax.random.key(0) if key is None else key,
        vocab=chain.num_states,
        width=point.width,
        scale=1.0,
    )
    level = _LEVELS[name]
    times, changes = [], []
    for scale in scales:
        run = gradient_flow(
            loss,
            jax.tree.map(lambda x, y, scale=scale: x + scale * y, point, noise),
            t1=(np.log(1 / scale) + 3.0) * growth,
            rtol=1e-6,
            # Far below the noise, whose growth is what matters.
            atol=1e-9 * scale,
            observe=ft.partial(_watch, loss),
            stop=StrengthPast(jnp.asarray(1.5 * level)),
        )
        ts = np.asarray(run.ts)
        logs, attention = (np.asarray(x) for x in run.observables)
        time = crossing(ts, logs, float(np.log(level)), 0, falling=False)
        time = np.nan if time is None else time
        times.append(time)
        changes.append(float(np.interp(time, ts, attention)) / top - 1)
    return Departure(
        start=name,
        focus_rate=rate,
        growth=growth,
        level=level,
        scales=tuple(scales),
        times=np.array(times),
        changes=np.array(changes),
    )


def _watch(loss: PopulationLoss, model: AttentionModel) -> tuple[Array, Array]:
    pi = loss.chain.stationary
    attention = pi @ loss.attention(model)[:, jnp.argmax(pi)]
    return jnp.log(strength(model)), attention
