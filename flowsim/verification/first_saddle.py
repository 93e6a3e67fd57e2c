"""Claims about the origin: spectrum, condensation, and the times of both escapes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import theory
from ..loss import PopulationLoss
from ..model import AttentionModel
from ..spectrum import block_weights, spectrum
from .claims import Claim, compare
from .flows import Escape

_STAGE_I, _ESCAPE = "stage I", "Lemma 3.1, stages I and II"
_ROUND_OFF = 1e-10


def origin_claims(loss: PopulationLoss, like: AttentionModel) -> list[Claim]:
    """The whole spectrum of J at theta = 0: +-mu, each m-fold, and zeros.

    Args:
        like: a model of the width and key width wanted; its numbers are not used.
    """
    mu, width = float(theory.origin_rate(loss.chain)), like.width
    zero = jax.tree.map(jnp.zeros_like, like)
    found = spectrum(loss, zero)
    values = np.asarray(found.values)
    predicted = np.zeros_like(values)
    predicted[:width], predicted[-width:] = -mu, mu
    weights = jax.vmap(block_weights)(found.vectors)
    attention = np.asarray(weights["WQ"] + weights["WK"])
    active = np.r_[attention[:width], attention[-width:]]
    how = f"dense spectrum of {values.size} directions; scale mu"
    return [
        compare(
            "origin: escape rate is mu = |pi| |pi - 1/d|",
            _STAGE_I,
            mu,
            values[-1],
            _ROUND_OFF,
        ),
        compare(
            "origin: unstable directions are m",
            _STAGE_I,
            width,
            found.num_unstable,
            0.0,
        ),
        compare(
            "origin: stable directions are m",
            _STAGE_I,
            width,
            found.num_stable,
            0.0,
        ),
        compare(
            "origin: eigenvalues are +-mu and zeros",
            _STAGE_I,
            0.0,
            np.max(np.abs(values - predicted)),
            _ROUND_OFF,
            how,
            scale=mu,
        ),
        compare(
            "origin: +-mu directions hold no attention",
            _STAGE_I,
            0.0,
            np.max(active),
            _ROUND_OFF,
            "largest share of (WQ, WK) in the squared norm of such a direction",
            scale=1.0,
        ),
    ]


def condensation_claims(escapes: Sequence[Escape]) -> list[Claim]:
    """Rates of convergence, as eps -> 0, to what stage I predicts.

    Each is an exponent: the slope of log(quantity) against log(eps) between the two
    smallest eps, so a positive one says that the quantity vanishes.
    """
    when, smallest = "when |W0| = sqrt(eps)", escapes[-2:]
    return [
        _exponent(
            "condensation: W0/|W0| - pi alpha^T/|pi|",
            0.5,
            smallest,
            lambda e: e.condensed[0],
            f"{when}, where the rest of W0, of size eps, is sqrt(eps) of it",
        ),
        _exponent(
            "condensation: W1/|W1| - alpha (pi - 1/d)^T/|pi - 1/d|",
            0.5,
            smallest,
            lambda e: e.condensed[1],
            when,
        ),
        _exponent(
            "condensation: W0/|W0| - pi alpha^T/|pi| at T_I",
            1.0,
            smallest,
            lambda e: e.embedding,
            "W0 keeps to the ray of pi beyond the linear regime",
        ),
        _exponent(
            "condensation: |(WQ, WK)| at T_I",
            1.0,
            smallest,
            lambda e: e.attention,
            "attention is frozen at its initial size",
        ),
    ]


def balance_claims(escapes: Sequence[Escape]) -> list[Claim]:
    """What else is known at T_I: W1 has bent, and |W0| = |W1| up to O(eps^2)."""
    return [
        _exponent(
            "condensation: W1/|W1| leaves its direction by T_I",
            0.0,
            escapes[-2:],
            lambda e: e.bent,
            "W1 bends, by as much for every eps, on the way to the ray of log pi",
            scale=1.0,
        ),
        _exponent(
            "balance: |W0| - |W1| at T_I",
            2.0,
            escapes[:2],
            lambda e: e.imbalance,
            "between the two largest eps, where it is far above the error of the flow",
        ),
    ]


def escape_claims(loss: PopulationLoss, escapes: Sequence[Escape]) -> list[Claim]:
    """Slopes of T_I and T_II - T_I in log(1/eps), between the two smallest eps."""
    predicted = theory.escape_times(loss.chain)
    scales = np.log([1 / escape.scale for escape in escapes])
    origin = np.asarray([escape.time_origin for escape in escapes])
    focus = np.asarray([escape.time_focus for escape in escapes]) - origin
    reached = _reached(escapes)

    def slope(statement: str, limit: Any, times: np.ndarray, how: str) -> Claim:
        local = np.diff(times) / np.diff(scales)
        listed = ", ".join(f"{value:.5g}" for value in local)
        return compare(
            statement,
            _ESCAPE,
            limit,
            local[-1] if reached else math.nan,
            0.01,
            f"{how}; eps = {escapes[0].scale:.0e} ... {escapes[-1].scale:.0e}, one "
            f"direction scaled; slopes between neighbours: {listed}",
        )

    return [
        slope(
            "escape law: T_I / log(1/eps) -> 1/mu",
            predicted.origin,
            origin,
            "T_I: loss half-way from log d to H(pi)",
        ),
        slope(
            "escape law: (T_II - T_I) / log(1/eps) -> 1/|c|",
            predicted.focus,
            focus,
            "T_II: |Phi| = 1/2",
        ),
    ]


def _exponent(
    statement: str,
    order: float,
    pair: Sequence[Escape],
    values: Callable[[Escape], float],
    note: str,
    scale: float | None = None,
) -> Claim:
    """Slope of log(quantity) against log(eps) between two runs."""
    large, small = (values(escape) for escape in pair)
    ratio = math.log(pair[1].scale / pair[0].scale)
    measured = math.log(small / large) / ratio
    return compare(
        f"{statement} = O(eps^{order:g}): exponent",
        _STAGE_I,
        order,
        measured if _reached(pair) else math.nan,
        0.01,
        f"{note}; at eps = {pair[1].scale:.0e}: {small:.3e}",
        scale=scale,
    )


def _reached(escapes: Sequence[Escape]) -> bool:
    return all(escape.succeeded for escape in escapes)
