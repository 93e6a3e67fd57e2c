"""Claims about stage III: growth on the rank-one manifold, dilution, the embeddings.

On the manifold mass moves between top and low tokens until the low ones' embeddings
pass through zero and their attention leaves the top token.
"""

import math
from typing import Any

import numpy as np

from .. import theory
from .._curves import crossings
from ..invariant import (
    DegeneratePoint,
    Dilution,
    RankOneFrame,
    growth_rate,
    lift_path,
    watch_dilution,
)
from ..loss import PopulationLoss
from ..trajectory import Trajectory
from .claims import Claim, compare

_STAGE_III = "stage III"


def dilution_claims(
    name: str, loss: PopulationLoss, end: DegeneratePoint, *, attention: float
) -> list[Claim]:
    """Focus, mass redistribution and dilution along the reduced flow.

    Args:
        attention: q where that flow started.
    """
    run = end.run
    seen = watch_dilution(loss, end.frame, lift_path(end.frame, run.models))
    rate, ts = abs(float(theory.focus_rate(loss.chain))), run.ts
    top = float(loss.chain.stationary[0])
    low = range(1, loss.chain.num_states)
    zeros = [crossings(ts, seen.gamma[:, token]) for token in low]
    leaves = [crossings(ts, seen.top_attention[:, token], top) for token in low]
    crossed = [bool(zero.size) for zero in zeros]
    gaps = [
        abs(zero[0] - leave[-1]) if zero.size and leave.size else math.nan
        for zero, leave in zip(zeros, leaves, strict=True)
    ]
    when = float(zeros[0][0]) if crossed[0] else math.nan
    moved = np.asarray(seen.gamma[-1] - seen.gamma[0])
    seen_21 = np.asarray(seen.top_attention[:, 1])
    return [
        *growth_claims(f"{name}: dilution", ts, seen, rate, bool(run.succeeded)),
        *spread_claims(f"{name}: dilution", seen, bool(run.succeeded)),
        compare(
            f"{name}: top and low tokens move opposite ways",
            _STAGE_III,
            -1.0,
            np.max(np.sign(moved[0]) * np.sign(moved[1:])),
            0.0,
            f"sign of gamma's change, top times low; top {moved[0]:+.4f}, low "
            f"{moved[1]:+.4f}",
        ),
        compare(
            f"{name}: gamma_i of every low token passes through zero",
            _STAGE_III,
            len(low),
            sum(crossed),
            0.0,
            f"first at t = {when:.5g} from attention {attention:g}",
        ),
        compare(
            f"{name}: attention leaves the top token as gamma_i = 0",
            _STAGE_III,
            0.0,
            np.max(gaps),
            1e-4,
            f"largest difference of the two times; scale: that time, t = {when:.5g}; "
            f"A_21: {top:g}, at most {seen_21.max():.4f}, finally "
            f"{seen_21[-1]:.4f}",
            scale=when if when > 0 else 1.0,
        ),
    ]


def growth_claims(
    name: str, ts: Any, seen: Dilution, rate: float, succeeded: bool
) -> list[Claim]:
    product = growth_rate(ts, seen.attention_product, (1e-6, 1e-4))
    # The mass follows q kk once its own transient has died out.
    mass = growth_rate(ts, seen.redistributed, (3e-5, 3e-4))
    how = f"c from the closed form: {rate:.6g}; rates fitted where small"
    return [
        compare(
            f"{name}: q kk grows at 2 |c|",
            _STAGE_III,
            2 * rate,
            product if succeeded else math.nan,
            5e-3,
            how,
        ),
        compare(
            f"{name}: mass moved between top and low grows at 2 |c|",
            _STAGE_III,
            2 * rate,
            mass if succeeded else math.nan,
            1e-2,
            "(1 - pi_1) gamma_1 - pi_1 sum_i gamma_i",
        ),
    ]


def spread_claims(name: str, seen: Dilution, succeeded: bool) -> list[Claim]:
    """The embeddings' picture in numbers: low tokens about their mean, and the top."""
    spread, apart = (np.asarray(x) for x in (seen.spread, seen.separation))
    listed = ", ".join(
        f"{spread[row]:.4f} and {apart[row]:.4f}" for row in (0, len(spread) // 2, -1)
    )
    return [
        compare(
            f"{name}: the top token's embedding moves away from the low ones",
            _STAGE_III,
            1.0,
            np.sign(apart[-1] - apart[0]) if succeeded else math.nan,
            0.0,
            "sign of the change of its distance from their mean; spread of the low "
            f"tokens and distance at the first, middle and last point: {listed}",
        ),
    ]


def picture_claims(loss: PopulationLoss, run: Trajectory) -> list[Claim]:
    """The embeddings of a whole cycle as numbers: contraction, then expansion.

    The spread of the low-frequency tokens' embeddings about their mean, over the
    distance of the top token's from it, whatever directions they lie in.
    """
    seen = watch_dilution(loss, RankOneFrame.nearest(run.model_at(0)), run.models)
    ratio = np.asarray(seen.spread) / np.asarray(seen.separation)
    pi, ts = np.asarray(loss.chain.stationary), np.asarray(run.ts)
    low = pi[1:]
    level = float(loss.chain.unigram_entropy)
    focus = int(np.argmin(np.abs(np.asarray(run.losses) - level)))
    least = focus + int(np.argmin(ratio[focus:]))
    start, smallest, end = (float(ratio[row]) for row in (focus, least, -1))
    good = bool(run.succeeded)
    when = f"{ts[focus]:.4g}, {ts[least]:.4g} and {ts[-1]:.4g}"
    note = (
        "spread of the low tokens' embeddings over their distance from the top one at "
        f"t = {when}: {start:.4f}, {smallest:.4f}, {end:.4f}"
    )
    return [
        compare(
            "embeddings: at theta_c^1 spread over distance is that of pi",
            _STAGE_III,
            np.std(low) / (pi[0] - np.mean(low)),
            start if good else math.nan,
            0.02,
            f"where the loss is H(pi), t = {ts[focus]:.4g}",
        ),
        compare(
            "embeddings: low tokens contract in dilution",
            _STAGE_III,
            -1.0,
            np.sign(smallest - 0.5 * start) if good else math.nan,
            0.0,
            f"sign, against half of the value at theta_c^1; {note}",
        ),
        compare(
            "embeddings: low tokens spread as new directions open",
            "stage IV",
            1.0,
            np.sign(end - 2.0 * smallest) if good else math.nan,
            0.0,
            f"sign, against twice the smallest; {note}",
        ),
    ]
