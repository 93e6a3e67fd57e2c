"""Which tokens attract attention when, and in which order tokens are learnt."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..loss import PopulationLoss
from ..markov import MarkovChain
from ..model import AttentionModel
from ..trajectory import Trajectory

_BATCH_NUMBERS = 2**22  # Each row looked at needs a few (d, d) matrices.


def batch_size(chain: MarkovChain) -> int:
    """How many rows of a run to look at together, so that memory stays bounded."""
    return min(64, max(1, _BATCH_NUMBERS // chain.num_states**2))


@eqx.filter_jit
def attention_received(
    chain: MarkovChain, models: AttentionModel
) -> Float[Array, "t d"]:
    """sum_i pi_i A_ij, the attention that token j gets from all queries, over time.

    At zero parameters it is pi_j.
    """
    loss = PopulationLoss(chain)

    def at(model: AttentionModel) -> Float[Array, " d"]:
        attention = loss.attention(model)
        return chain.stationary.astype(attention.dtype) @ attention

    return jax.lax.map(at, models, batch_size=batch_size(chain))


@eqx.filter_jit
def excess_loss(
    chain: MarkovChain, models: AttentionModel
) -> tuple[Float[Array, "t d"], Float[Array, "t d"]]:
    """Loss above the floor by query token and by target token, over time, in nats.

        by query i:   sum_j P_ij log(P_ij / p_ij)
        by target j:  sum_i pi_i P_ij log(P_ij / p_ij) / pi_j

    Weighted by pi, each sums to the loss above H(P). The first is not negative; the
    second can be, where a token is predicted too often.
    """
    loss = PopulationLoss(chain)

    def at(model: AttentionModel) -> tuple[Array, Array]:
        log_p = jax.nn.log_softmax(loss.logits(model), axis=-1)
        P = chain.transition.astype(log_p.dtype)
        pi = chain.stationary.astype(log_p.dtype)
        log_P = jnp.log(jnp.where(P > 0, P, 1.0))
        terms = jnp.where(P > 0, P * (log_P - log_p), 0.0)
        return jnp.sum(terms, axis=1), (pi @ terms) / pi

    return jax.lax.map(at, models, batch_size=batch_size(chain))


class Band(eqx.Module):
    """One frequency band of tokens, and how its loss above the floor falls.

    Attributes:
        name: "most frequent", "middle" or "rare".
        tokens: the numbers of its tokens.
        mass: their stationary mass.
        as_query, as_target: mean loss above the floor over time (nats), weighted by pi.
        half_as_query, half_as_target: time at which it has fallen to half of its start;
            None if it does not.
    """

    name: str
    tokens: tuple[int, ...]
    mass: float
    as_query: Float[np.ndarray, " t"]
    as_target: Float[np.ndarray, " t"]
    half_as_query: float | None
    half_as_target: float | None

    def row(self) -> dict[str, Any]:
        """Plain data for a table; losses at start and end."""
        return {
            "band": self.name,
            "tokens": len(self.tokens),
            "mass": self.mass,
            "as query, start": float(self.as_query[0]),
            "as query, end": float(self.as_query[-1]),
            "halved at": self.half_as_query,
            "as target, start": float(self.as_target[0]),
            "as target, end": float(self.as_target[-1]),
            "as target, halved at": self.half_as_target,
        }


def excess_by_band(run: Trajectory, chain: MarkovChain) -> tuple[Band, ...]:
    """Loss above the floor of the most frequent, the middle and the rare tokens.

    The bands are the tokens, in order of frequency, that hold the first third of the
    stationary mass, the second, and the rest.
    """
    pi = np.asarray(chain.stationary, float)
    query, target = (np.asarray(x, float) for x in excess_loss(chain, run.models))
    order = np.argsort(-pi, kind="stable")
    # Mass before each token: the first band always holds the most frequent one.
    before = np.cumsum(pi[order]) - pi[order]
    third = np.minimum((3 * before).astype(int), 2)
    ts = np.asarray(run.ts, float)
    bands = []
    for number, name in enumerate(("most frequent", "middle", "rare")):
        tokens = order[third == number]
        if not tokens.size:
            continue
        weights = pi[tokens] / pi[tokens].sum()
        as_query, as_target = query[:, tokens] @ weights, target[:, tokens] @ weights
        bands.append(
            Band(
                name=name,
                tokens=tuple(map(int, tokens)),
                mass=float(pi[tokens].sum()),
                as_query=as_query,
                as_target=as_target,
                half_as_query=_halved(ts, as_query),
                half_as_target=_halved(ts, as_target),
            )
        )
    return tuple(bands)


def _halved(ts: np.ndarray, values: np.ndarray) -> float | None:
    below = np.flatnonzero(values <= 0.5 * values[0])
    return float(ts[below[0]]) if below.size and values[0] > 0 else None


def attraction(
    run: Trajectory,
    chain: MarkovChain,
    *,
    tokens: tuple[str, ...] = (),
    num_most: int = 8,
) -> list[dict[str, Any]]:
    """Which tokens attract attention, when, and by which factor over their frequency.

    Args:
        run: a run that keeps its models.
        chain: names the tokens.
        tokens: tokens to list in any case, where the chain knows them.
        num_most: how many of the tokens that gain or lose most attention to list.

    Returns:
        One row a token, by the time of its largest factor: attention received over pi
        at its largest and smallest, with their times, and at the end.
    """
    pi = np.asarray(chain.stationary, float)
    factors = np.asarray(attention_received(chain, run.models), float) / pi
    ts = np.asarray(run.ts, float)
    names = chain.tokens or tuple(map(str, range(len(pi))))
    chosen = {names.index(name) for name in tokens if name in names}
    moved = (np.abs(factors - 1) * pi).max(axis=0)
    chosen |= set(np.argsort(-moved)[:num_most].tolist())
    rows = []
    for token in chosen:
        path = factors[:, token]
        high, low = int(np.argmax(path)), int(np.argmin(path))
        rows.append(
            {
                "token": names[token],
                "pi": float(pi[token]),
                "largest factor": float(path[high]),
                "at": float(ts[high]),
                "smallest factor": float(path[low]),
                "smallest at": float(ts[low]),
                "factor at end": float(path[-1]),
            }
        )
    return sorted(rows, key=lambda row: (row["at"], -row["largest factor"]))
