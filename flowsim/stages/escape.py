"""How fast a run leaves a saddle: growth along its leading unstable directions.

Near a saddle the part of theta - theta* along the leading eigenspace grows like
exp(lambda t) once the flow is linear there (the paper, Lemma 3.1). The fit looks at
that part alone, so it does not wait for the other directions to decay. Where the flow
is linear is decided by the Jacobian and not by the rate that comes out: along the
growing direction v, v . J v at the run's own points is compared with its value at the
saddle. That difference is also the part of the error that no steady slope can show.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .. import _trees
from .._types import Objective, Params
from ..derivatives import hessian_vector_product
from ..trajectory import Trajectory
from ..visits import components, distances_from

_SAMPLES = 48
_QUARTERS = 4


class EscapeFit(eqx.Module):
    """Growth rate during the escape from a saddle, measured and predicted.

    Attributes:
        rate: slope of log |part of theta - theta* along the leading eigenspace|.
        error: the larger of `spread` and `nonlinearity`.
        spread: half the difference between the largest and the smallest slope of the
            four quarters of the fitted stretch.
        nonlinearity: largest difference over the stretch between v . J v at the run's
            points and `eigenvalue`, v the direction in which the part points.
        eigenvalue: the leading eigenvalue of J at the saddle, the predicted rate.
        multiplicity: dimension of the leading eigenspace used.
        start, end: the times between which the line was fitted.
        e_folds: growth over that time, as a natural logarithm.
    """

    rate: float
    error: float
    spread: float
    nonlinearity: float
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
    objective: Objective,
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

    Candidates are stretches near the saddle: no further than the fraction `reach` of
    the largest distance the run gets to on its way to the next, or `times_closest`
    times the smallest distance, whichever is more; and from the smallest value of the
    part along `directions` on. Of all stretches over which that part grows by an
    e-fold, the one with the smallest error is fitted. Where it grows by less, but by
    half an e-fold, all of it is; None below that.

    Args:
        point: the saddle theta*.
        directions: orthonormal directions of its leading eigenspace, stacked.
        eigenvalue: the predicted rate.
        after, until: closest approaches to the saddle before, and to the next.
    """
    parts = components(run.models, point, directions)
    part, distance = np.linalg.norm(parts, axis=1), distances_from(run.models, point)
    ts = np.asarray(run.ts)
    rows = _rows_near(ts, part, distance, after, until, reach, times_closest)
    if rows.size < _QUARTERS + 1 or not part[rows[0]] > 0:
        return None
    times, logs = ts[rows], np.log(part[rows])
    weights = jnp.asarray(parts[rows] / part[rows, None])
    nearby = jtu.tree_map(lambda leaf: leaf[rows], run.models)
    rates = np.asarray(_rates(objective, nearby, directions, weights))
    departure = np.abs(rates - eigenvalue)
    growth = np.max(logs) - logs[0]
    if growth < 0.5:
        return None
    best: tuple[float, float, float, slice] | None = None
    for first, last in itertools.combinations(range(rows.size), 2):
        enough = logs[last] - logs[first] >= min(1.0, growth)
        if last - first < _QUARTERS or not enough:
            continue
        cuts = first + (last - first) * np.arange(_QUARTERS + 1) // _QUARTERS
        slopes = np.diff(logs[cuts]) / np.diff(times[cuts])
        spread = 0.5 * float(np.max(slopes) - np.min(slopes))
        nonlinearity = float(np.max(departure[first : last + 1]))
        error = max(spread, nonlinearity)
        if best is None or error < best[0]:
            best = error, spread, nonlinearity, slice(first, last + 1)
    if best is None:
        return None
    error, spread, nonlinearity, inside = best
    times, logs = times[inside], logs[inside]
    return EscapeFit(
        rate=float(np.polyfit(times, logs, 1)[0]),
        error=error,
        spread=spread,
        nonlinearity=nonlinearity,
        eigenvalue=eigenvalue,
        multiplicity=parts.shape[1],
        start=float(times[0]),
        end=float(times[-1]),
        e_folds=float(logs[-1] - logs[0]),
    )


def _rows_near(
    ts: np.ndarray,
    part: np.ndarray,
    distance: np.ndarray,
    after: float,
    until: float,
    reach: float,
    times_closest: float,
) -> np.ndarray:
    """At most `_SAMPLES` rows near the saddle, evenly spread in time."""
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
    even = np.linspace(ts[first], ts[last - 1], _SAMPLES)
    return first + np.unique(
        [int(np.argmin(np.abs(ts[first:last] - time))) for time in even]
    )


@eqx.filter_jit
def _rates(
    objective: Objective,
    models: Params,
    directions: Params,
    weights: Float[Array, "t k"],
) -> Float[Array, " t"]:
    """v . J v at every model, for v the weighted sum of the directions."""

    def rate(row):
        model, weight = row
        v = jtu.tree_map(lambda leaf: jnp.tensordot(weight, leaf, 1), directions)
        return -_trees.inner(v, hessian_vector_product(objective, model, v))

    return jax.lax.map(rate, (models, weights))
