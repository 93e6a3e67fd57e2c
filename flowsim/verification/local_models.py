"""Claims about the three local models: linear flow, rank-one manifold, unfolding.

The lemma and the growth on the manifold are measured on any chain. What the paper says
about dilution's end and about stage IV is measured on families of chains around ones
that treat their low-frequency tokens alike (see `flowsim.verification.unfolding`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _trees, theory
from .._curves import crossings
from ..flow import gradient_flow
from ..invariant import (
    DegeneratePoint,
    Dilution,
    RankOneFrame,
    RankOneModel,
    Reduced,
    degenerate_point,
    growth_rate,
    invariance_defect,
    lift_path,
    manifold_start,
    watch_dilution,
)
from ..linearised import (
    compare as compare_flows,
    error_order,
    linear_flow,
    predict_exit,
)
from ..loss import PopulationLoss
from ..lyapunov_schmidt import unfold
from ..model import AttentionModel
from ..trajectory import Outcome, Trajectory
from .claims import Claim, compare
from .flows import dense
from .unfolding import (
    FAMILIES,
    Family,
    degenerate_claims,
    departure_claims,
    unfolding_claims,
)

_LEMMA, _STAGE_III = "Lemma 3.1", "stage III"
_WIDTH = (
    3  # Embedding and key width: all that happens here happens in a few directions.
)
_DELTAS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
_ATTENTION = 1e-4


def local_model_claims(
    loss: PopulationLoss,
    run: Trajectory | None = None,
    families: Mapping[str, Callable[[], Family]] = FAMILIES,
) -> list[Claim]:
    """The lemma and the manifold on one chain; stages III and IV on the families.

    Args:
        loss: population loss of the chain (in dense form, to share compiled code).
        run: a whole cycle of that chain, for the picture of the embeddings.
        families: by name.
    """
    claims = lemma_claims(loss) + manifold_claims(loss)
    if run is not None:
        claims += picture_claims(loss, run)
    for name, make in families.items():
        claims += family_claims(name, make(), flow=make is FAMILIES["lazy, d = 4"])
    return claims


def lemma_claims(loss: PopulationLoss) -> list[Claim]:
    """The lemma on linearising, at theta_c^1 in a generic direction."""
    chain = loss.chain
    point = theory.second_critical_point(chain, width=_WIDTH)
    direction = AttentionModel.init(
        jax.random.key(1), vocab=chain.num_states, width=_WIDTH, scale=1.0
    )
    flow = linear_flow(loss, point)
    rate = float(flow.rate)
    scales = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    order = error_order(flow, loss, direction, scales=scales, t=1 / rate)
    eps, early, late = 1e-7, 7.0 / rate, 11.0 / rate
    seen = [
        compare_flows(flow, loss, direction, scale=eps, ts=jnp.array([t]))
        for t in (early, late)
    ]
    growth = math.log(float(seen[1].errors[-1] / seen[0].errors[-1])) / (late - early)
    radius = 1e-2
    start = _trees.add_scaled(point, eps / float(_trees.norm(direction)), direction)
    exit_ = predict_exit(flow, start, radius)
    there = compare_flows(
        flow, loss, direction, scale=eps, ts=jnp.asarray([float(exit_.time)])
    )
    reached = bool(order.succeeded) and all(
        bool(one.outcome == Outcome.reached_t1) for one in (*seen, there)
    )

    def checked(number: Any) -> float:
        return float(number) if reached else math.nan

    return [
        compare(
            "linearised flow: error = O(eps^2): exponent in eps",
            _LEMMA,
            2.0,
            checked(order.order),
            5e-3,
            f"at t = 1/c over {float(order.decades):.0f} decades of eps, from a random "
            f"direction; error / (eps^2 exp(2 c t)) = {float(order.constant):.4g}",
        ),
        compare(
            "linearised flow: error grows at 2 |c|",
            _LEMMA,
            2 * rate,
            checked(growth),
            2e-2,
            f"between t = 7/|c| and 11/|c| from eps = {eps:.0e}",
        ),
        compare(
            "linearised flow: displacement turns to the unstable eigenspace",
            _LEMMA,
            1.0,
            checked(there.alignment[-1]),
            1e-4,
            f"cosine at distance {radius:g} from eps = {eps:.0e}",
        ),
        compare(
            "linearised flow: predicted exit from a ball, time",
            _LEMMA,
            float(exit_.time),
            checked(exit_.time + jnp.log(radius / there.distances[-1]) / rate),
            1e-3,
            f"ball of radius {radius:g}; the true time from the true distance at the "
            "predicted time",
        ),
        compare(
            "linearised flow: predicted exit from a ball, place",
            _LEMMA,
            0.0,
            checked(there.errors[-1]),
            radius,
            "distance between true and predicted place, which is O(radius^2); scale: "
            "the radius",
            scale=radius,
        ),
    ]


def manifold_claims(loss: PopulationLoss) -> list[Claim]:
    """Invariance of the manifold and growth on it, for any chain."""
    frame = _frame()
    key = jax.random.key(2)
    d = loss.chain.num_states
    numbers = jax.random.normal(key, (2 * d + 2,))
    somewhere = RankOneModel(
        numbers[:d], numbers[d : 2 * d], numbers[2 * d], numbers[2 * d + 1]
    )
    defect, slope = invariance_defect(loss, frame, somewhere)
    start = manifold_start(loss, frame, attention=_ATTENTION)
    rate = abs(float(theory.focus_rate(loss.chain)))
    t1 = (math.log(1 / _ATTENTION) + 2.0) / rate
    run = gradient_flow(Reduced(loss, frame), start, t1=t1, rtol=1e-9, atol=1e-14)
    seen = watch_dilution(loss, frame, lift_path(frame, run.models))
    claims = [
        compare(
            "rank-one manifold: the gradient is tangent",
            _STAGE_III,
            0.0,
            defect,
            1e-13,
            "normal part at a random point of it; scale: |grad L|",
            scale=slope,
        ),
        *_growth_claims("rank-one manifold", run.ts, seen, rate, bool(run.succeeded)),
    ]
    # Tokens are named by frequency where the pictures are about the top one.
    if int(jnp.argmax(loss.chain.stationary)) == 0:
        claims += _spread_claims("rank-one manifold", seen, bool(run.succeeded))
    return claims


def _spread_claims(name: str, seen: Dilution, succeeded: bool) -> list[Claim]:
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


def family_claims(name: str, family: Family, *, flow: bool = False) -> list[Claim]:
    """Stages III and IV on one family.

    Args:
        name: of the family.
        family: its chains.
        flow: also flow from the unfolded point, and from the degenerate one.
    """
    loss = PopulationLoss(dense(family.chain(0.0)))
    frame = _frame()
    start = manifold_start(loss, frame, attention=_ATTENTION)
    end = degenerate_point(loss, frame, start=start, rtol=1e-9)
    claims = dilution_claims(name, loss, end) + degenerate_claims(name, loss, end)
    found = unfold(family.chain, frame, end.reduced, _DELTAS)
    claims += unfolding_claims(name, family, end, found)
    if flow:
        claims += departure_claims(name, family, end, found)
    return claims


def dilution_claims(
    name: str, loss: PopulationLoss, end: DegeneratePoint
) -> list[Claim]:
    """Focus, mass redistribution and dilution along the reduced flow."""
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
    attention = np.asarray(seen.top_attention[:, 1])
    return [
        *_growth_claims(f"{name}: dilution", ts, seen, rate, bool(run.succeeded)),
        *_spread_claims(f"{name}: dilution", seen, bool(run.succeeded)),
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
            f"first at t = {when:.5g} from attention {_ATTENTION:g}",
        ),
        compare(
            f"{name}: attention leaves the top token as gamma_i = 0",
            _STAGE_III,
            0.0,
            np.max(gaps),
            1e-4,
            f"largest difference of the two times; scale: that time, t = {when:.5g}; "
            f"A_21: {top:g}, at most {attention.max():.4f}, finally "
            f"{attention[-1]:.4f}",
            scale=when if when > 0 else 1.0,
        ),
    ]


def _growth_claims(
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


def _frame() -> RankOneFrame:
    keys = jax.random.split(jax.random.key(3))
    return RankOneFrame(*(jax.random.normal(key, (_WIDTH,)) for key in keys))
