"""Where stages begin and end: thresholds on watched curves, in plain NumPy.

Every boundary is the first time at which a *margin*, a curve made from watched
quantities and thresholds, becomes non-negative; between two saved points it is found by
linear interpolation. Nothing is smoothed or fitted here.
"""

import itertools
from typing import NamedTuple

import numpy as np

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")


class Thresholds(NamedTuple):
    """What counts as on a plateau, as a new direction, as a change of attention.

    Attributes:
        plateau: fraction of a fall in loss that still counts as the plateau.
        rank_ratio: sigma_i / sigma_1 of W0 from which on direction i is in use.
        attention: change of attention, averaged over queries with weight pi, that
            counts as a focus or a dilution.
        focus: rise of one token's attention to itself that counts as a later focus.
        onset: fraction of its whole rise by which attention has risen when a later
            focus begins.
        burst: fraction of the fall between two saddles that belongs to each plateau;
            for objectives without attention.
    """

    plateau: float = 0.01
    rank_ratio: float = 0.1
    attention: float = 0.01
    focus: float = 0.1
    onset: float = 0.1
    burst: float = 0.1


class Watched(NamedTuple):
    """Curves along a run of the attention model; first axis: saved times.

    Attributes:
        ts, losses: times and losses.
        ratios: sigma_i / sigma_1 of W0; column 0 is one.
        top: attention on the most frequent token, averaged over queries.
        itself: attention of every token on itself.
        law: the stationary law pi.
        origin, second: losses log d and H(pi) of the first two saddles.
    """

    ts: np.ndarray
    losses: np.ndarray
    ratios: np.ndarray
    top: np.ndarray
    itself: np.ndarray
    law: np.ndarray
    origin: float
    second: float


class Cut(NamedTuple):
    """One stage as times, with the quantities that decided its name."""

    name: str
    start: float
    end: float
    token: int | None
    evidence: dict[str, float]


def ordinal(number: int) -> str:
    """ "second", "third", ... in words while they are short."""
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number}th"


def first_time(
    ts: np.ndarray, margin: np.ndarray, after: float = -np.inf
) -> float | None:
    """First time from `after` on at which `margin` is not negative."""
    candidates = np.flatnonzero((margin >= 0) & (ts >= after))
    if candidates.size == 0:
        return None
    row = candidates[0]
    if row == 0:
        return max(after, float(ts[0]))
    low, high = margin[row - 1], margin[row]
    share = 0.0 if low >= 0 else -low / (high - low)
    return max(after, float(ts[row - 1] + share * (ts[row] - ts[row - 1])))


def largest_rise(values: np.ndarray) -> tuple[int, int, float]:
    """Rows i <= j between which a curve rises most, and by how much."""
    lowest = np.minimum.accumulate(values)
    top = int(np.argmax(values - lowest))
    return int(np.argmin(values[: top + 1])), top, float(values[top] - lowest[top])


def cut_by_attention(
    seen: Watched, limits: Thresholds, floor: float | None
) -> list[Cut]:
    """The paper's stages, in order of time.

    Args:
        floor: loss of the minimum at which the run ends; None when it ends elsewhere.
    """
    condensed = _end_of_condensation(seen, limits)
    start, end = float(seen.ts[0]), float(seen.ts[-1])
    if condensed is None:
        return [_condensation(seen, end)] if end > start else []
    directions = _new_directions(seen, limits, condensed)
    settled = _settled_from(seen, limits, floor, [condensed, *directions][-1])
    cuts = [_condensation(seen, condensed)] if condensed > start else []
    bounds = [condensed, *directions, end]
    for cycle, (begin, until) in enumerate(itertools.pairwise(bounds), 1):
        if cycle == 1:
            cuts += _first_cycle(seen, limits, begin, until)
        else:
            cuts += _later_cycle(seen, limits, cycle, begin, until)
    return _close(cuts, seen, settled)


def cut_by_plateaus(
    ts: np.ndarray,
    losses: np.ndarray,
    visits: list[tuple[float, float]],
    ends_at_minimum: bool,
    limits: Thresholds,
) -> list[Cut]:
    """Plateaus at the critical points visited, and the bursts between them.

    Args:
        visits: time of closest approach and loss of every critical point.
        ends_at_minimum: whether the last of them is a minimum.
    """
    if not visits:
        return [Cut("descent", float(ts[0]), float(ts[-1]), None, {})]
    reached, last = float(losses[-1]), visits[-1][1]
    spread = abs(float(losses[0]) - min(reached, last))
    levels = [float(losses[0])] + [loss for _, loss in visits] + [reached]
    cuts: list[Cut] = []
    begin = float(ts[0])
    for number, (upper, lower) in enumerate(itertools.pairwise(levels)):
        fall = upper - lower
        final = number == len(levels) - 2
        if (number == 0 or final) and not fall > limits.plateau * spread:
            continue
        leaves = first_time(ts, upper - limits.burst * fall - losses, begin)
        arrives = first_time(ts, lower + limits.burst * fall - losses, begin)
        if leaves is None:
            break
        if final:  # Under way to a point that is not known.
            arrives = None
        evidence = {"loss above": upper, "loss below": lower}
        if number > 0:
            cuts.append(Cut(f"plateau {number}", begin, leaves, None, evidence))
        name = "approach" if number == 0 else f"burst {number}"
        begin = float(ts[-1]) if arrives is None else arrives
        start = float(ts[0]) if number == 0 else leaves
        cuts.append(Cut(name, start, begin, None, evidence))
    if begin < ts[-1]:
        name = "settling" if ends_at_minimum else f"plateau {len(visits)}"
        cuts.append(Cut(name, begin, float(ts[-1]), None, {"loss below": last}))
    return [cut for cut in cuts if cut.end > cut.start]


def _end_of_condensation(seen: Watched, limits: Thresholds) -> float | None:
    """W0 has rank one, and the loss is at H(pi) or attention has begun to move."""
    level = seen.second + limits.plateau * (seen.origin - seen.second)
    moved = np.abs(seen.top - seen.top[0]) - limits.attention
    rank_one = limits.rank_ratio - seen.ratios[:, 1]
    margin = np.minimum(rank_one, np.maximum(level - seen.losses, moved))
    return first_time(seen.ts, margin)


def _new_directions(seen: Watched, limits: Thresholds, after: float) -> list[float]:
    """Times at which sigma_2, sigma_3, ... of W0 come into use, until one does not."""
    times: list[float] = []
    for ratio in seen.ratios.T[1:]:
        time = first_time(seen.ts, ratio - limits.rank_ratio, after)
        if time is None:
            break
        times.append(time)
        after = time
    return times


def _settled_from(
    seen: Watched, limits: Thresholds, floor: float | None, after: float
) -> float | None:
    """When the loss has made all but a small part of its last fall, to the minimum."""
    if floor is None:
        return None
    level = floor + limits.plateau * (_at(seen, seen.losses, after) - floor)
    return first_time(seen.ts, level - seen.losses, after)


def _condensation(seen: Watched, end: float) -> Cut:
    evidence = {
        "sigma2/sigma1 at end": _at(seen, seen.ratios[:, 1], end),
        "loss above H(pi) at end": _at(seen, seen.losses, end) - seen.second,
    }
    return Cut("condensation", float(seen.ts[0]), end, None, evidence)


def _first_cycle(
    seen: Watched, limits: Thresholds, begin: float, until: float
) -> list[Cut]:
    """Attention of all queries on the most frequent token: its rise, then its fall."""
    token = int(np.argmax(seen.law))
    inside = (seen.ts > begin) & (seen.ts < until)
    ts = np.concatenate([[begin], seen.ts[inside], [until]])
    top = np.concatenate(
        [
            [_at(seen, seen.top, begin)],
            seen.top[inside],
            [_at(seen, seen.top, until)],
        ]
    )
    # What attention was before it moved, even where its move ended condensation.
    rested = float(seen.top[0])
    peak = int(np.argmax(top))
    rise, fall = float(top[peak]) - rested, float(top[peak] - np.min(top[peak:]))
    evidence = {"before": rested, "peak": float(top[peak])}
    evidence |= {
        "lowest": float(np.min(top)),
        "lowest after peak": float(top[peak]) - fall,
    }
    evidence |= _valley(seen.ts, seen.top, float(ts[peak]))
    if rise >= limits.attention and peak > 0:
        if fall < limits.attention:
            return [Cut("focus", begin, until, token, evidence)]
        return [
            Cut("focus", begin, float(ts[peak]), token, evidence),
            Cut("dilution", float(ts[peak]), until, token, evidence),
        ]
    if rested - float(np.min(top)) >= limits.attention:
        return [Cut("defocus", begin, until, token, evidence)]
    return [Cut("plateau", begin, until, None, evidence)]


def _later_cycle(
    seen: Watched, limits: Thresholds, cycle: int, begin: float, until: float
) -> list[Cut]:
    """A new direction, then the focus of one token on itself, then its dilution."""
    order = ordinal(cycle)
    new = "new direction" if cycle == 2 else f"{order} direction"
    inside = (seen.ts >= begin) & (seen.ts <= until)
    if np.count_nonzero(inside) < 2:
        return [Cut(new, begin, until, None, {})]
    ts, itself = seen.ts[inside], seen.itself[inside]
    rises = [largest_rise(column) for column in itself.T]
    weighted = seen.law * np.asarray([rise for _, _, rise in rises])
    token = int(np.argmax(weighted))
    low, high, rise = rises[token]
    own = itself[:, token]
    evidence = {"rise": rise, "weighted rise": float(weighted[token])}
    evidence |= {"lowest": float(own[low]), "peak": float(own[high])}
    if rise < limits.focus or weighted[token] < limits.attention:
        return [Cut(new, begin, until, None, evidence)]
    risen = own - own[low] - limits.onset * rise
    onset = first_time(ts[low:], risen[low:])
    assert onset is not None  # The curve rises by all of `rise`.
    lowest_after = float(np.min(own[high:]))
    peak = float(ts[high])
    evidence |= {"lowest after peak": lowest_after}
    evidence |= _valley(seen.ts, seen.itself[:, token], peak)
    cuts = [Cut(new, begin, onset, None, evidence)]
    if seen.law[token] * (own[high] - lowest_after) < limits.attention:
        return [*cuts, Cut(f"{order} focus", onset, until, token, evidence)]
    return [
        *cuts,
        Cut(f"{order} focus", onset, peak, token, evidence),
        Cut(f"{order} dilution", peak, until, token, evidence),
    ]


def _valley(ts: np.ndarray, values: np.ndarray, after: float) -> dict[str, float]:
    """The lowest value in the rest of the run: a dilution may outlast its stage."""
    rows = np.flatnonzero(ts >= after)
    row = rows[np.argmin(values[rows])]
    return {"valley": float(values[row]), "time of valley": float(ts[row])}


def _close(cuts: list[Cut], seen: Watched, settled: float | None) -> list[Cut]:
    """Cut off what comes after the run has settled; drop empty stages."""
    end = float(seen.ts[-1])
    if settled is not None and settled < end:
        cuts = [cut._replace(end=min(cut.end, settled)) for cut in cuts]
        evidence = {"loss at start": _at(seen, seen.losses, settled)}
        cuts.append(Cut("settling", settled, end, None, evidence))
    return [cut for cut in cuts if cut.end > cut.start]


def _at(seen: Watched, values: np.ndarray, time: float) -> float:
    return float(np.interp(time, seen.ts, values))
