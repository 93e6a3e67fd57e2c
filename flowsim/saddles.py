"""The critical points that a trajectory visits, told apart from slow passages.

A gradient flow that passes a saddle slows down, but slowing down does not make a
saddle. `find_saddles` takes the slow stretches of a run (around the local minima of
|grad L|), polishes rows of each to a critical point, and keeps as visited what the run
came close to. A stretch that leads to no critical point nearby is returned as a slow
passage. A second run from a smaller start settles doubtful cases: the smallest |grad L|
near a saddle falls like eps^(ls / (ls + lu)), with ls the slowest stable and lu the
fastest unstable rate, and beside a slow passage it stays.

Left out: what happens between the visits (`flowsim.stages`).

>>> import jax.numpy as jnp, flowsim as fs
>>> loss = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> run = fs.gradient_flow(loss, jnp.array([1e-4, 1e-4]), t1=30.0)
>>> [point.index for point in fs.find_saddles(run, loss)]
[1, 0]
"""

import itertools
import math
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
import optimistix as optx

from . import _summary, _trees
from ._types import Objective, Params, Scalar
from .critical import CriticalPoint, find_critical_point
from .spectrum import Spectrum, spectrum
from .trajectory import Trajectory


class VisitKind(eqx.Enumeration):
    """What a slow stretch of a run was."""

    saddle = "saddle"
    minimum = "minimum"
    slow_passage = "slow passage, no critical point nearby"


class VisitedPoint(eqx.Module):
    """A slow stretch of a run, and the critical point behind it if there is one.

    Attributes:
        point: result of polishing; for a slow passage, where the attempt ended.
        kind: saddle, minimum, or slow passage.
        index: number of unstable directions; None for a slow passage.
        spectrum: spectrum at the point; None for a slow passage.
        time, distance: when and how closely the run approached the point.
        relative_distance: `distance` over the run's largest distance from the point.
        slow_time, slow_loss, slow_grad_norm: where |grad L| was smallest.
        exponent: measured with a second run: d log(smallest |grad L|) / d log eps.
        expected_exponent: ls / (ls + lu) for a saddle with such rates.
    """

    point: CriticalPoint
    kind: VisitKind
    index: int | None
    spectrum: Spectrum | None
    time: float
    distance: float
    relative_distance: float
    slow_time: float
    slow_loss: float
    slow_grad_norm: float
    exponent: float | None = None
    expected_exponent: float | None = None

    @property
    def model(self) -> Params:
        """Parameters of the critical point."""
        return self.point.model

    @property
    def loss(self) -> Scalar:
        """Objective at the critical point."""
        return self.point.loss

    @property
    def critical(self) -> bool:
        """Whether the run visited a critical point here."""
        return bool(self.kind != VisitKind.slow_passage)

    def __str__(self) -> str:
        share = f"{self.relative_distance:.1%} of the run"
        rows = {
            "kind": VisitKind[self.kind],
            "index": self.index,
            "loss": self.loss,
            "closest at time": self.time,
            "distance": f"{self.distance:.3g}, {share}",
            "slowest at time": self.slow_time,
            "|grad| there": f"{self.slow_grad_norm:.3e}",
            "|grad| polished": self.point.grad_norm,
        }
        if self.exponent is not None:
            expected = self.expected_exponent
            rows["exponent"] = f"{self.exponent:.3g}" + (
                "" if expected is None else f" (a saddle: {expected:.3g})"
            )
        return _summary.aligned("VisitedPoint", rows)


class _Stretch(eqx.Module):
    """Rows `first` to `last` around the slowest row, between two bursts."""

    first: int
    slowest: int
    last: int


def find_saddles(
    run: Trajectory,
    objective: Objective,
    *,
    near: float = 0.15,
    prominence: float = 1.1,
    num_guesses: int = 5,
    same_loss: float = 1e-8,
    tol: float = 1e-12,
    max_steps: int = 50,
    center_tol: float = 1e-7,
    solver: optx.AbstractLeastSquaresSolver | None = None,
    second_run: Trajectory | None = None,
) -> list[VisitedPoint]:
    """Critical points and slow passages along a run, in order of visit.

    A slow stretch surrounds a local minimum of |grad L|. Its slowest row is polished,
    and if that leads to a critical point, further rows of the stretch as well, spread
    in logarithmic time: a flow can pass two saddles without a burst between. The start
    and the end of the run count as slowest rows where |grad L| is smallest there, but
    are reported only if they are near a critical point.

    Duplicates: along a gradient flow the loss falls strictly, so critical points with
    equal loss are copies of each other (by a symmetry, or along a degenerate manifold);
    the one approached most closely is kept.

    Args:
        run: a concrete trajectory with its models.
        objective: the objective whose flow it is.
        near: a critical point counts as visited when the closest approach, divided by
            the run's largest distance from the point, is at most this.
        prominence: factor by which |grad L| must rise on both sides of a minimum.
        num_guesses: rows polished per stretch.
        same_loss: losses within this fraction of the run's whole fall are equal.
        tol, max_steps, solver: see `find_critical_point`.
        center_tol: see `spectrum`.
        second_run: a run whose start is a scaled-down copy of this one's (the same
            draw). A saddle whose measured exponent is below half the expected one is
            then reported as a slow passage.

    Raises:
        ValueError: if the run is traced, a batch, or was saved without its models.
    """
    _check_run(run, "run")
    stretches = _slow_stretches(run, prominence, tol)
    visits: list[VisitedPoint] = []
    rows = len(run.ts)
    fall = abs(float(run.losses[0] - run.losses[-1]))

    def polish(row: int) -> CriticalPoint:
        return find_critical_point(
            objective, run.model_at(row), tol=tol, max_steps=max_steps, solver=solver
        )

    for stretch in stretches:
        point = polish(stretch.slowest)
        found = [_visit(run, stretch, point, near)]
        if found[0].critical:
            for row in _guesses(run, stretch, num_guesses):
                found.append(_visit(run, stretch, polish(row), near))
            found = [visit for visit in found if visit.critical]
        elif stretch.slowest in (0, rows - 1):
            continue
        for visit in sorted(found, key=lambda visit: visit.distance):
            twins = [
                place
                for place, other in enumerate(visits)
                if other.critical
                and visit.critical
                and abs(float(other.loss - visit.loss)) <= same_loss * fall
            ]
            if not twins:
                visits.append(visit)
            elif visit.distance < visits[twins[0]].distance:
                visits[twins[0]] = visit
    visits = [_classify(objective, visit, center_tol) for visit in visits]
    if second_run is not None:
        _check_run(second_run, "second_run")
        slow = [s.slowest for s in _slow_stretches(second_run, prominence, tol)]
        visits = [_compare(visit, run, second_run, slow) for visit in visits]
    return sorted(visits, key=lambda visit: visit.time)


def _check_run(run: Any, name: str) -> None:
    if _trees.is_traced((run.ts, run.losses)) or run.ts.ndim != 1:
        raise ValueError(
            f"{name} must be one concrete trajectory; got a batch or tracers."
        )
    saved = jtu.tree_leaves(run.models)[0].shape[0]
    if saved != run.ts.shape[0]:
        raise ValueError(
            f"{name} must have been saved with its models; it holds {saved} of them "
            f"for {run.ts.shape[0]} times."
        )


def _slow_stretches(run: Trajectory, prominence: float, floor: float) -> list[_Stretch]:
    """Stretches around the prominent local minima of |grad L|, ends included."""
    # Below the tolerance differences are round-off.
    level = np.log(np.maximum(np.asarray(run.grad_norms), floor))
    top = np.max(level) + 2 * math.log(prominence)
    padded = -np.concatenate([[top], level, [top]])
    # Imported here: it takes longer to load than the rest of the package.
    from scipy.signal import find_peaks

    slowest = find_peaks(padded, prominence=math.log(prominence))[0] - 1
    bursts = [
        a + int(np.argmax(level[a : b + 1])) for a, b in itertools.pairwise(slowest)
    ]
    first, last = [0, *bursts], [*bursts, len(level) - 1]
    return [
        _Stretch(a, int(s), b) for a, s, b in zip(first, slowest, last, strict=True)
    ]


def _guesses(run: Trajectory, stretch: _Stretch, number: int) -> list[int]:
    """Rows of a stretch, spread in logarithmic time, where |grad L| is still small."""
    rows = np.arange(stretch.first, stretch.last + 1)
    sizes = np.asarray(run.grad_norms)
    rows = rows[sizes[rows] <= 4 * sizes[stretch.slowest]]
    if rows.size < 2:
        return []
    # Logarithmic time starts at the first positive time after the start.
    elapsed = np.maximum(
        np.asarray(run.ts)[rows] - float(run.ts[0]), float(run.ts[1] - run.ts[0])
    )
    wanted = np.geomspace(elapsed[0], elapsed[-1], number)
    nearest = {int(rows[np.argmin(np.abs(elapsed - time))]) for time in wanted}
    return sorted(nearest - {stretch.slowest})


def _visit(
    run: Trajectory, stretch: _Stretch, point: CriticalPoint, near: float
) -> VisitedPoint:
    distances = _distances(run.models, point.model)
    inside = distances[stretch.first : stretch.last + 1]
    closest = stretch.first + int(np.argmin(inside))
    distance, extent = float(distances[closest]), float(np.max(distances))
    relative = distance / extent if extent > 0 else 0.0
    visited = bool(point.succeeded) and relative <= near
    return VisitedPoint(
        point=point,
        kind=VisitKind.saddle if visited else VisitKind.slow_passage,
        index=None,
        spectrum=None,
        time=float(run.ts[closest]),
        distance=distance,
        relative_distance=relative,
        slow_time=float(run.ts[stretch.slowest]),
        slow_loss=float(run.losses[stretch.slowest]),
        slow_grad_norm=float(run.grad_norms[stretch.slowest]),
    )


def _distances(models: Params, point: Params) -> np.ndarray:
    squares = jtu.tree_map(
        lambda leaf, centre: np.sum(
            (np.asarray(leaf) - np.asarray(centre)).reshape(leaf.shape[0], -1) ** 2,
            axis=1,
        ),
        models,
        point,
    )
    return np.sqrt(sum(jtu.tree_leaves(squares)))


def _classify(
    objective: Objective, visit: VisitedPoint, center_tol: float
) -> VisitedPoint:
    """Complete a visit by the spectrum at its point: index, saddle or minimum."""
    if not visit.critical:
        return visit
    found = spectrum(objective, visit.model, center_tol=center_tol)
    num = 20
    while not found.complete and not found.all_unstable_found and num <= 320:
        found = spectrum(objective, visit.model, num=num, center_tol=center_tol)
        num *= 2
    index = int(found.num_unstable)
    kind = VisitKind.saddle if index > 0 else VisitKind.minimum
    return eqx.tree_at(
        lambda v: (v.kind, v.index, v.spectrum),
        visit,
        (kind, index, found),
        is_leaf=lambda x: x is None,
    )


def _compare(
    visit: VisitedPoint, run: Trajectory, second: Trajectory, slow: list[int]
) -> VisitedPoint:
    """Measure how the smallest |grad L| scales from one run to the other."""
    losses = np.asarray(second.losses)[slow]
    twin = slow[int(np.argmin(np.abs(losses - visit.slow_loss)))]
    sizes = [float(_trees.norm(r.model_at(0))) for r in (run, second)]
    scale = math.log(sizes[0] / sizes[1])
    exponent = math.log(visit.slow_grad_norm / float(second.grad_norms[twin])) / scale
    expected, kind = None, visit.kind
    if visit.spectrum is not None and visit.index:
        values = np.asarray(visit.spectrum.values)
        tolerance = float(visit.spectrum.tolerance)
        stable, unstable = -values[values < -tolerance], values[values > tolerance]
        if stable.size:
            expected = float(np.min(stable) / (np.min(stable) + np.max(unstable)))
            kind = kind if exponent >= 0.5 * expected else VisitKind.slow_passage
    return eqx.tree_at(
        lambda v: (v.kind, v.exponent, v.expected_exponent),
        visit,
        (kind, exponent, expected),
        is_leaf=lambda x: x is None,
    )
