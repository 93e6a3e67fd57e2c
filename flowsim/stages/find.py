"""`find_stages`: critical points visited, boundaries, rates, and what changed."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._types import Objective
from ..loss import PopulationLoss
from ..model import AttentionModel
from ..saddles import find_saddles
from ..stretches import check_run
from ..trajectory import Trajectory
from ..visits import VisitedPoint, ending
from .cuts import Cut, Thresholds, Watched, cut_by_attention, cut_by_plateaus
from .escape import fit_escape
from .table import Changes, Departure, Stage, Stages

_BATCH = 256  # Rows measured at once; runs of similar length share compiled code.


def find_stages(
    run: Trajectory,
    objective: Objective,
    *,
    visited: Sequence[VisitedPoint] | None = None,
    thresholds: Thresholds | None = None,
    same_rate: float = 0.01,
) -> Stages:
    """Cut a run into stages by the saddles it visits and by what its attention does.

    For an `AttentionModel` under a `PopulationLoss` the stages are the paper's. Their
    boundaries, with the fields of `Thresholds`:

    - *condensation* ends when sigma_2/sigma_1 of W0 is below `rank_ratio` and either
      the loss is within `plateau` of its fall from log d to H(pi), or attention on the
      most frequent token (averaged over queries, weight pi) has moved by `attention`;
    - *focus* ends at the largest value of that attention before sigma_2/sigma_1 passes
      `rank_ratio` again; *dilution* lasts from there until it does. A rise below
      `attention` is no focus: a fall of that size is then called *defocus*, and
      neither a *plateau*; a fall below it after the peak is no dilution;
    - *new direction* begins when sigma_2/sigma_1 passes `rank_ratio`, *third direction*
      with sigma_3/sigma_1, and so on;
    - after a new direction, *second focus* (third, ...) is the rise of one token's
      attention to itself, the token whose rise is largest with weight pi: from where
      `onset` of the rise is made to its peak; *second dilution* lasts from there to the
      next direction. The rise must be at least `focus`, and `attention` with its
      weight;
    - *settling* begins when the loss has made all but `plateau` of its last fall, from
      the last new direction to the minimum where the run ends, if it ends at one.

    For any other objective: *plateau n* at the n-th saddle, *burst n* between it and
    the next, each plateau with the fraction `burst` of the fall; *approach* before the
    first, *settling* at a minimum; *descent* where no critical point is visited.

    Args:
        run: a trajectory with its models; concrete.
        objective: the objective whose flow it is.
        visited: the critical points visited, as `find_saddles` returns them; found
            with its defaults when absent.
        thresholds: what counts as what; see `Thresholds`.
        same_rate: eigenvalues within this fraction of the largest belong to the leading
            eigenspace along which the escape is measured.

    Raises:
        ValueError: if the run is traced, a batch, or was saved without models.
    """
    check_run(run, "run")
    limits = Thresholds() if thresholds is None else thresholds
    found = find_saddles(run, objective) if visited is None else visited
    visits = _departures(
        run, objective, [point for point in found if point.critical], same_rate
    )
    ts, losses = np.asarray(run.ts), np.asarray(run.losses)
    ended = _end(visits, losses, limits)
    if isinstance(run.models, AttentionModel) and isinstance(objective, PopulationLoss):
        seen = watch(run, objective)
        cuts = cut_by_attention(seen, limits, ended)
    else:
        seen = None
        pairs = [(visit.time, visit.loss) for visit in visits]
        cuts = cut_by_plateaus(ts, losses, pairs, ended is not None, limits)
    labels = objective.chain.tokens if isinstance(objective, PopulationLoss) else None
    return Stages(
        stages=tuple(
            _stage(cut, ts, losses, visits, seen, limits, labels) for cut in cuts
        ),
        visited=tuple(visits),
        ending=ending(run, found) if visited is None or visited else None,
        thresholds=limits,
    )


def watch(run: Trajectory, loss: PopulationLoss) -> Watched:
    """The curves along a run by which its stages are cut."""
    chain = loss.chain
    pi = np.asarray(chain.stationary)
    rows = len(run.ts)
    padded = jtu.tree_map(lambda leaf: _pad(leaf), run.models)
    top, itself = (np.asarray(x)[:rows] for x in _attention(loss, padded))
    values = np.linalg.svd(np.asarray(run.models.W0), compute_uv=False)
    largest = np.where(values[:, :1] > 0, values[:, :1], 1.0)
    return Watched(
        ts=np.asarray(run.ts),
        losses=np.asarray(run.losses),
        ratios=values / largest,
        top=top,
        itself=itself,
        law=pi,
        origin=math.log(chain.num_states),
        second=float(chain.unigram_entropy),
    )


def _departures(
    run: Trajectory,
    objective: Objective,
    points: Sequence[VisitedPoint],
    same_rate: float,
) -> list[Departure]:
    """Index, leading eigenvalue and measured escape rate of every visited point."""
    if not points:
        return []
    times = [point.time for point in points]
    legs = zip([-math.inf, *times[:-1]], [*times[1:], math.inf], strict=True)
    departures = []
    for point, (after, until) in zip(points, legs, strict=True):
        assert point.spectrum is not None and point.index is not None
        values = np.asarray(point.spectrum.values)
        leading = float(values[-1])
        escape = None
        if point.index > 0:
            near = np.flatnonzero(values >= (1 - same_rate) * leading)
            directions = jtu.tree_map(
                lambda leaf, near=near: leaf[near], point.spectrum.vectors
            )
            escape = fit_escape(
                run,
                objective,
                point.model,
                directions,
                leading,
                after=after,
                until=until,
            )
        departures.append(
            Departure(
                loss=float(point.loss),
                index=point.index,
                index_exact=point.index_exact,
                eigenvalue=leading,
                time=point.time,
                distance=point.distance,
                on_stable_manifold=point.on_stable_manifold,
                escape=escape,
            )
        )
    return departures


def _end(
    visits: Sequence[Departure], losses: np.ndarray, limits: Thresholds
) -> float | None:
    """Loss of the minimum at which the run ends; None where it ends elsewhere."""
    if not visits or visits[-1].index > 0:
        return None
    above = visits[-2].loss if len(visits) > 1 else float(losses[0])
    floor = visits[-1].loss
    arrived = losses[-1] - floor <= limits.plateau * (above - floor)
    return floor if arrived else None


def _stage(
    cut: Cut,
    ts: np.ndarray,
    losses: np.ndarray,
    visits: Sequence[Departure],
    seen: Watched | None,
    limits: Thresholds,
    labels: Sequence[str] | None,
) -> Stage:
    leaves, share = _leaves(cut, ts, losses, visits)
    at_start, at_end = np.interp([cut.start, cut.end], ts, losses)
    return Stage(
        name=cut.name,
        start=cut.start,
        end=cut.end,
        losses=(float(at_start), float(at_end)),
        leaves=leaves,
        share=share,
        token=cut.token,
        changes=None if seen is None else _changes(cut, seen, limits),
        evidence=cut.evidence,
        label=None if cut.token is None or labels is None else labels[cut.token],
    )


def _leaves(
    cut: Cut, ts: np.ndarray, losses: np.ndarray, visits: Sequence[Departure]
) -> tuple[Departure | None, float]:
    """The critical point visited before the largest part of a stage's fall in loss."""
    if not visits:
        return None, 0.0
    # The first leg begins with the run: closest approach to the first saddle may be a
    # little after the start.
    bounds = [-math.inf, *(visit.time for visit in visits[1:]), math.inf]

    def loss_at(time: float) -> float:
        return float(np.interp(min(max(time, cut.start), cut.end), ts, losses))

    falls = [loss_at(low) - loss_at(high) for low, high in itertools.pairwise(bounds)]
    whole = loss_at(cut.start) - loss_at(cut.end)
    number = int(np.argmax(falls))
    return visits[number], falls[number] / whole if whole > 0 else 0.0


def _changes(cut: Cut, seen: Watched, limits: Thresholds) -> Changes:
    def at(time: float, curve: np.ndarray) -> np.ndarray:
        columns = curve.reshape(len(curve), -1).T
        return np.asarray([np.interp(time, seen.ts, column) for column in columns])

    moved = at(cut.end, seen.itself) - at(cut.start, seen.itself)
    up, down = int(np.argmax(moved)), int(np.argmin(moved))
    # A direction that comes into use at a boundary is in use on both of its sides.
    ranks = [
        int(np.sum(at(time, seen.ratios) >= limits.rank_ratio * (1 - 1e-9)))
        for time in (cut.start, cut.end)
    ]
    tops = [float(at(time, seen.top)[0]) for time in (cut.start, cut.end)]
    return Changes(
        rank=(ranks[0], ranks[1]),
        top_attention=(tops[0], tops[1]),
        risen=up if moved[up] > 0 else None,
        rise=max(0.0, float(moved[up])),
        fallen=down if moved[down] < 0 else None,
        fall=min(0.0, float(moved[down])),
    )


def _pad(leaf: Any) -> np.ndarray:
    """Repeat the last row up to a multiple of the batch size."""
    rows = np.asarray(leaf)
    missing = -len(rows) % _BATCH
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


@jax.jit
def _attention(loss: PopulationLoss, models: AttentionModel):
    """Mean attention on the most frequent token, and of every token on itself."""
    pi = loss.chain.stationary.astype(models.W0.dtype)
    top = jnp.argmax(pi)

    def one(model: AttentionModel):
        attention = loss.attention(model)
        return pi @ jnp.take(attention, top, axis=1), jnp.diagonal(attention)

    return jax.lax.map(one, models)
