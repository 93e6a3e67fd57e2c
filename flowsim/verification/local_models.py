"""Claims about the three local models: linear flow, rank-one manifold, unfolding.

The lemma and the growth on the manifold are measured on any chain. What the paper says
about dilution's end and about stage IV is measured on families of chains around ones
that treat their low-frequency tokens alike (see `flowsim.verification.unfolding`).
Stages I and II need no such symmetry: `member_claims` holds them, by the functions that
serve the default chain, on a member of a family whose low tokens are well apart.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import _trees, theory
from ..flow import gradient_flow
from ..invariant import (
    RankOneFrame,
    RankOneModel,
    Reduced,
    degenerate_point,
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
from ..lyapunov_schmidt import ChainFamily, unfold
from ..model import AttentionModel
from ..trajectory import Outcome, Trajectory
from .claims import Claim, compare, named
from .dilution import dilution_claims, growth_claims, picture_claims, spread_claims
from .early_stages import (
    early_claims,
    follow,
    further_claims,
    random_direction,
)
from .flows import observed_flow
from .unfolding import (
    FAMILIES,
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
# Stages I and II on a member: delta is half of a low token's mass and more, so that
# all tokens are well apart; the two largest eps are for what is small in eps^2, the
# two smallest for limits. The end lies beyond the first new direction.
_APART, _SCALES, _END = 0.05, (1e-2, 1e-3, 1e-6, 1e-8), 1500.0


def local_model_claims(
    loss: PopulationLoss,
    run: Trajectory | None = None,
    families: Mapping[str, Callable[[], ChainFamily]] = FAMILIES,
    *,
    announce: Callable[[str], None] = lambda _: None,
) -> list[Claim]:
    """The lemma and the manifold on one chain; everything else on the families.

    Chains with as many tokens share compiled code and are measured one after another;
    those with different numbers at once, each in a thread, since nearly all of the time
    is compilation, which takes one core.

    Args:
        loss: population loss of the chain (in dense form, to share compiled code).
        run: a whole cycle of that chain, for the picture of the embeddings.
        families: by name; stages I and II are held on members of all but the first,
            which is of the kind of the default chain.
        announce: called with a few words before each group of claims.
    """

    def default() -> list[Claim]:
        announce("the chain itself")
        claims = lemma_claims(loss) + manifold_claims(loss)
        return claims if run is None else claims + picture_claims(loss, run)

    def measure(name: str, family: ChainFamily, first: bool) -> list[Claim]:
        announce(name)
        early = [] if first else named(name, member_claims(family))
        return early + family_claims(name, family)

    tasks = [(loss.chain.num_states, default)]
    for number, (name, make) in enumerate(families.items()):
        family = make()
        task = partial(measure, name, family, number == 0)
        tasks.append((family.chain(0.0).num_states, task))
    sizes = sorted({size for size, _ in tasks})

    def all_of(size: int) -> list[list[Claim]]:
        return [task() for other, task in tasks if other == size]

    with ThreadPoolExecutor(len(sizes)) as threads:
        done = dict(zip(sizes, map(iter, threads.map(all_of, sizes)), strict=True))
        return [claim for size, _ in tasks for claim in next(done[size])]


def member_claims(family: ChainFamily) -> list[Claim]:
    """Stages I and II, the lemma, the manifold and the embeddings' picture."""
    loss = PopulationLoss(family.chain(_APART).to_dense())
    start_key, attention_key = jax.random.split(jax.random.key(0))
    direction = random_direction(loss, start_key, width=loss.chain.num_states)
    escapes = follow(loss, direction, _SCALES, rtol=1e-8)
    run = observed_flow(loss, _trees.scale(_SCALES[1], direction), t1=_END, rtol=1e-8)
    return [
        *early_claims(loss, direction, escapes, attention_key),
        *further_claims(loss, direction, escapes),
        *lemma_claims(loss),
        *manifold_claims(loss),
        *picture_claims(loss, run),
    ]


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
        *growth_claims("rank-one manifold", run.ts, seen, rate, bool(run.succeeded)),
    ]
    # Tokens are named by frequency where the pictures are about the top one.
    if int(jnp.argmax(loss.chain.stationary)) == 0:
        claims += spread_claims("rank-one manifold", seen, bool(run.succeeded))
    return claims


def family_claims(name: str, family: ChainFamily) -> list[Claim]:
    """Stages III and IV on one family."""
    loss = PopulationLoss(family.chain(0.0).to_dense())
    frame = _frame()
    start = manifold_start(loss, frame, attention=_ATTENTION)
    end = degenerate_point(loss, frame, start=start, rtol=1e-9)
    found = unfold(family.chain, frame, end.reduced, _DELTAS)
    return [
        *dilution_claims(name, loss, end, attention=_ATTENTION),
        *degenerate_claims(name, loss, end),
        *unfolding_claims(name, family, end, found),
        *departure_claims(name, family, end, found),
    ]


def _frame() -> RankOneFrame:
    keys = jax.random.split(jax.random.key(3))
    return RankOneFrame(*(jax.random.normal(key, (_WIDTH,)) for key in keys))
