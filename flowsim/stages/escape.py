"""How fast a run leaves a saddle: growth along its leading unstable directions.

Near a saddle the part of theta - theta* along the leading eigenspace grows like
exp(lambda t) once the flow is linear there (the paper, Lemma 3.1). The fit looks at
that part alone, so it does not wait for the other directions to decay; and it stops
where the part is still small, so that it sees the linear regime. Plain NumPy.
"""

import equinox as eqx
import numpy as np
from jax.tree_util import tree_leaves

from .._types import Params
from ..trajectory import Trajectory
from ..visits import components, distances_from

_SAMPLES = 64
_LEAST_E_FOLDS = 0.5


class EscapeFit(eqx.Module):
    """Growth rate during the escape from a saddle, measured and predicted.

    Attributes:
        rate: slope of log |part of theta - theta* along the leading eigenspace|.
        error: uncertainty of the fit: the larger of its standard error and half the
            difference between the slopes of its two halves.
        eigenvalue: the leading eigenvalue of J at the saddle, the predicted rate.
        multiplicity: dimension of the leading eigenspace used.
        start, end: the times between which the line was fitted.
        e_folds: growth over that time, as a natural logarithm.
    """

    rate: float
    error: float
    eigenvalue: float
    multiplicity: int
    start: float
    end: float
    e_folds: float

    @property
    def resolved(self) -> bool:
        """Whether the error is at most a quarter of the rate.

        It is not where the run passes the saddle too far away, or too briefly, for
        growth at one rate.
        """
        return self.error <= 0.25 * abs(self.rate)


def fit_escape(
    run: Trajectory,
    point: Params,
    directions: Params,
    eigenvalue: float,
    *,
    after: float,
    until: float,
    reach: float = 0.05,
    times_closest: float = 3.0,
) -> EscapeFit | None:
    """Fit the growth along `directions` while the run passes `point`.

    The line is fitted while the run is near the saddle: no further than the fraction
    `reach` of the largest distance it gets to on its way to the next, or
    `times_closest` times the smallest distance, whichever is more; and from the
    smallest value of the part along `directions` on. None where that part grows by less
    than half an e-fold there.

    Args:
        point: the saddle theta*.
        directions: orthonormal directions of its leading eigenspace, stacked.
        eigenvalue: the predicted rate.
        after, until: closest approaches to the saddle before, and to the next.
    """
    part = np.linalg.norm(components(run.models, point, directions), axis=-1)
    distance = distances_from(run.models, point)
    ts = np.asarray(run.ts)
    leg = (ts >= after) & (ts <= until)
    closest = int(np.argmin(np.where(leg, distance, np.inf)))
    furthest = np.max(distance[leg & (ts >= ts[closest])])
    radius = max(reach * furthest, times_closest * distance[closest])
    outside = leg & (distance > radius)
    # The stretch of rows around the closest one that stays within the radius.
    before = np.flatnonzero(outside[:closest])
    beyond = np.flatnonzero(outside[closest:])
    first = int(before[-1]) + 1 if before.size else int(np.argmax(leg))
    last = closest + int(beyond[0]) if beyond.size else int(np.flatnonzero(leg)[-1]) + 1
    first += int(np.argmin(part[first:last]))
    ts, part = ts[first:last], part[first:last]
    if ts.size < 3 or not part[-1] > np.exp(_LEAST_E_FOLDS) * part[0] > 0:
        return None
    even = np.linspace(ts[0], ts[-1], _SAMPLES)
    values = np.interp(even, ts, np.log(part))
    half = _SAMPLES // 2
    (slope, _), covariance = np.polyfit(even, values, 1, cov=True)
    early, late = (
        np.polyfit(even[part], values[part], 1)[0]
        for part in (slice(half), slice(half, None))
    )
    error = max(float(np.sqrt(covariance[0, 0])), 0.5 * abs(float(late - early)))
    return EscapeFit(
        rate=float(slope),
        error=error,
        eigenvalue=eigenvalue,
        multiplicity=int(tree_leaves(directions)[0].shape[0]),
        start=float(even[0]),
        end=float(even[-1]),
        e_folds=float(values[-1] - values[0]),
    )
