"""The events of a run: condensation, focus and dilution, entropy, second direction."""

from typing import Any

import equinox as eqx
import numpy as np

from .. import _summary
from ..diagnostics import Diagnostics
from ..trajectory import Trajectory

CONDENSED = 0.05  # sigma2/sigma1 of W0 below this: one direction.
SECOND = 0.1  # sigma2/sigma1 of W0 back above this: a second one.


class Events(eqx.Module):
    """What happens when, in the time of the run; None for what does not happen.

    Attributes:
        condensed: sigma2/sigma1 of W0 first falls below .05.
        attention_start: mean attention on the most frequent token at the start.
        attention_peak: (time, value) of its highest point up to the second direction.
        attention_valley: (time, value) of its lowest point after the peak.
        entropy_start: mean entropy of attention at the start, nats.
        entropy_minimum: (time, value) of its lowest point up to the valley.
        second_direction: sigma2/sigma1 of W0 is back above .1.
    """

    condensed: float | None
    attention_start: float
    attention_peak: tuple[float, float] | None
    attention_valley: tuple[float, float] | None
    entropy_start: float
    entropy_minimum: tuple[float, float] | None
    second_direction: float | None

    def row(self) -> dict[str, Any]:
        """Plain data, in the order of a table."""

        def part(pair: tuple[float, float] | None, place: int) -> float | None:
            return None if pair is None else pair[place]

        return {
            "sigma2/sigma1 below .05 at": self.condensed,
            "attention on top token, start": self.attention_start,
            "attention peak": part(self.attention_peak, 1),
            "attention peak at": part(self.attention_peak, 0),
            "attention valley": part(self.attention_valley, 1),
            "attention valley at": part(self.attention_valley, 0),
            "entropy, start": self.entropy_start,
            "entropy minimum": part(self.entropy_minimum, 1),
            "entropy minimum at": part(self.entropy_minimum, 0),
            "second direction at": self.second_direction,
        }

    def __str__(self) -> str:
        return _summary.aligned("Events", self.row())


def find_events(run: Trajectory) -> Events:
    """Read the events off a run whose observables are `Diagnostics`.

    Crossings are interpolated between saved rows; extrema are those of the rows, and
    count only inside the run: a minimum at its last row is not one yet.
    """
    seen = run.observables
    if not isinstance(seen, Diagnostics):
        raise ValueError(
            "run.observables must be Diagnostics, by observe=functools.partial("
            f"diagnose, loss); got {type(seen).__name__}."
        )
    ts = np.asarray(run.ts, float)
    ratio = np.asarray(seen.rank_ratio().W0, float)
    attention = np.asarray(seen.mean_top_attention, float)
    entropy = np.asarray(seen.mean_attention_entropy, float)
    condensed = crossing(ts, ratio, CONDENSED, 0, falling=True)
    after = len(ts) if condensed is None else int(np.searchsorted(ts, condensed))
    second = crossing(ts, ratio, SECOND, after, falling=False)
    # The first focus is over when a second direction appears, or at the end.
    bound = len(ts) if second is None else int(np.searchsorted(ts, second)) + 1
    top = int(np.argmax(attention[:bound]))
    peak = None
    if 0 < top < len(ts) - 1:
        peak = (float(ts[top]), float(attention[top]))
    valley = _minimum(ts, attention, top, len(ts))
    end = bound if valley is None else int(np.searchsorted(ts, valley[0])) + 1
    return Events(
        condensed=condensed,
        attention_start=float(attention[0]),
        attention_peak=peak,
        attention_valley=valley,
        entropy_start=float(entropy[0]),
        entropy_minimum=_minimum(ts, entropy, 0, end),
        second_direction=second,
    )


def crossing(
    ts: np.ndarray, values: np.ndarray, level: float, start: int, *, falling: bool
) -> float | None:
    """First time from row `start` on at which the values are past a level."""
    past = values < level if falling else values > level
    rows = np.flatnonzero(past[start:]) + start
    if not rows.size:
        return None
    row = int(rows[0])
    if row == 0 or past[row - 1]:
        return float(ts[row])
    before, after = values[row - 1], values[row]
    share = (level - before) / (after - before)
    return float(ts[row - 1] + share * (ts[row] - ts[row - 1]))


def _minimum(
    ts: np.ndarray, values: np.ndarray, start: int, end: int
) -> tuple[float, float] | None:
    row = start + int(np.argmin(values[start:end]))
    inside = start < row < len(ts) - 1
    return (float(ts[row]), float(values[row])) if inside else None
