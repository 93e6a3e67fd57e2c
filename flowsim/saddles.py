"""The critical points that a trajectory visits, told apart from slow passages.

A gradient flow that passes a saddle slows down, but slowing down does not make a
saddle. `find_saddles` takes the slow stretches of a run (around the local minima of
|grad L|), polishes rows of each to a critical point, and keeps as visited what the run
came close to. A stretch that leads to no critical point nearby is returned as a slow
passage. A second run from a smaller start settles doubtful cases: the smallest |grad L|
near a saddle falls like eps^(ls / (ls + lu)), with ls the slowest stable and lu the
fastest unstable rate, and beside a slow passage it stays.

Left out: the records that come back (`flowsim.visits`), which of two critical points
are one (`flowsim.copies`), and what happens between visits (`flowsim.stages`).

>>> import jax.numpy as jnp, flowsim as fs
>>> loss = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> run = fs.gradient_flow(loss, jnp.array([1e-4, 1e-4]), t1=30.0)
>>> [point.index for point in fs.find_saddles(run, loss)]
[1, 0]
"""

import dataclasses
import math
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optimistix as optx

from . import _trees
from ._types import Objective, Params
from .copies import (
    Invariants,
    are_close,
    are_connected,
    have_equal_spectra,
    invariants_of,
)
from .critical import CriticalPoint, find_critical_point
from .model import AttentionModel
from .newton import RegularisedNewton
from .spectrum import DENSE_UP_TO, Spectrum, spectrum
from .stretches import (
    Stretch,
    check_run,
    rows_to_try,
    slow_stretches,
    without_small_parts,
)
from .trajectory import Trajectory
from .visits import VisitedPoint, VisitKind, components, distances_from

# Pairs sought at either end, and restarts allowed, until no unstable one is missing.
_SPECTRA = ((40, 10), (160, 2))
_WORK = 25_000_000  # Default bound on products of a stretch times parameters.
_SAME = 1e-5  # Relative difference up to which points, invariants, spectra are equal.
_ROUND_OFF = 100 * np.finfo(float).eps


class _Search(eqx.Module):
    """The settings of one search."""

    run: Trajectory
    objective: Objective
    near: float
    tol: float
    max_steps: int
    max_products: int
    center_tol: float
    same_loss: float
    solver: optx.AbstractLeastSquaresSolver | None
    invariants: Invariants | None


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
    max_products: int | None = None,
    center_tol: float = 1e-7,
    invariants: Literal["auto"] | Invariants | None = "auto",
    solver: optx.AbstractLeastSquaresSolver | None = None,
    second_run: Trajectory | None = None,
) -> list[VisitedPoint]:
    """Critical points and slow passages along a run, in order of visit.

    A slow stretch surrounds a local minimum of |grad L|. Its slowest row is polished,
    and if that leads to a critical point, further rows of the stretch as well, spread
    in logarithmic time: a flow can pass two saddles without a burst between. The start
    and the end of the run count as slowest rows where |grad L| is smallest there, but
    are reported only if they are near a critical point.

    A polish gives up at a distance from its guess from which the point could no longer
    count as visited. Where the problem is too large to be diagonalised (more than 300
    parameters) it starts from the guess with its small singular values removed, leaf by
    leaf: directions that have not grown yet are zero at the saddle that a flow from a
    small start visits, and slow to find with products alone. If that leads to no point
    nearby, the guess itself is polished.

    Cost: at most `max_products` Hessian-vector products for each stretch, and the 600
    of the trial under way when they run out; a stretch left undecided by that is
    reported as unresolved. A tenth of it for each pair of points of equal loss whose
    invariants differ. Then a spectrum for each critical point: complete up to 2,000
    parameters; above, at most 13,000 products, usually 800. If these do not suffice to
    find all unstable directions, the index is a lower bound (`index_exact`).

    Duplicates are removed, up to symmetries and along manifolds of critical points:
    see `flowsim.copies`. The one approached most closely is kept.

    Args:
        run: a concrete trajectory with its models.
        objective: the objective whose flow it is.
        near: a critical point counts as visited when the closest approach, divided by
            the run's largest distance from the point, is at most this.
        prominence: factor by which |grad L| must rise on both sides of a minimum.
        num_guesses: rows polished per stretch.
        same_loss: losses within this fraction of the run's whole fall are equal.
        tol, max_steps, solver: see `find_critical_point`. The bounds on distance and
            products hold for the default solver only.
        max_products: bound on the Hessian-vector products of a stretch; when absent,
            10,000 up to 2,500 parameters and 2.5e7 / n for n parameters above.
        center_tol: see `spectrum`.
        invariants: a function of the parameters that the objective's symmetries leave
            unchanged, dimensionless; "auto" knows those of `AttentionModel`.
        second_run: a run whose start is a scaled-down copy of this one's (the same
            draw). A saddle whose measured exponent is below half the expected one is
            then reported as a slow passage.

    Raises:
        ValueError: if the run is traced, a batch, or was saved without its models; for
            `max_products` below one.
    """
    check_run(run, "run")
    if max_products is not None and max_products < 1:
        raise ValueError(f"max_products must be at least 1; got {max_products}.")
    if invariants == "auto":
        known = isinstance(run.models, AttentionModel)
        invariants = invariants_of if known else None
    size = _trees.num_params(run.model_at(0))
    search = _Search(
        run=run,
        objective=objective,
        near=near,
        tol=tol,
        max_steps=max_steps,
        max_products=max_products or min(10_000, _WORK // size),
        center_tol=center_tol,
        same_loss=same_loss * abs(float(run.losses[0] - run.losses[-1])),
        solver=solver,
        invariants=invariants,
    )
    visits: list[VisitedPoint] = []
    stretches = slow_stretches(run, prominence, tol)
    for stretch in stretches:
        found = _visits(search, stretch, num_guesses)
        for visit in sorted(found, key=lambda visit: visit.distance):
            twin = next(
                (i for i, v in enumerate(visits) if _is_copy(search, v, visit)), None
            )
            if twin is None:
                visits.append(visit)
            elif visit.distance < visits[twin].distance:
                visits[twin] = visit
    visits = [_classify(search, stretches, visit) for visit in visits]
    if second_run is not None:
        check_run(second_run, "second_run")
        slow = [s.slowest for s in slow_stretches(second_run, prominence, tol)]
        visits = [_compare(visit, run, second_run, slow) for visit in visits]
    return sorted(visits, key=lambda visit: visit.time)


def _visits(search: _Search, stretch: Stretch, num_guesses: int) -> list[VisitedPoint]:
    """Critical points near one stretch, classified; or the one failed attempt."""
    run, left = search.run, search.max_products
    point, left = _polish(search, stretch.slowest, left)
    first = _visit(search, stretch, point, search.max_products - left)
    if not first.critical:
        inner = stretch.slowest not in (0, len(run.ts) - 1)
        return [first] if inner or bool(first.kind == VisitKind.unresolved) else []
    found = [first]
    # A row that takes many times the products of the slowest is not worth them.
    share = _share(first.num_products)
    for row in rows_to_try(run, stretch, num_guesses):
        budget = min(share, left)
        if budget <= 0:
            break
        point, rest = _polish(search, row, budget)
        left -= budget - rest
        found.append(_visit(search, stretch, point, budget - rest))
    return [visit for visit in found if visit.critical]


def _polish(search: _Search, row: int, left: int) -> tuple[CriticalPoint, int]:
    """Polish one row within a budget of products; returns what is left of it."""
    guess = search.run.model_at(row)
    extent = float(np.max(distances_from(search.run.models, guess)))
    # Of a visited point the guess is no further than near / (1 - near) extents if it
    # is the row of closest approach; twice that for the other rows.
    reach = 2 * search.near / (1 - min(search.near, 0.5)) * extent

    def polish(start: Params, budget: int) -> CriticalPoint:
        return find_critical_point(
            search.objective,
            start,
            tol=search.tol,
            max_steps=search.max_steps,
            solver=search.solver or _newton(search.tol, budget, reach),
        )

    # A row that is critical itself must stay where it is, small parts and all.
    met = float(search.run.grad_norms[row]) <= search.tol
    if met or _trees.num_params(guess) <= RegularisedNewton(atol=0.0).basis_size:
        point = polish(guess, left)
        return point, left - _num_products(point)
    simple = polish(without_small_parts(guess, search.near * extent), left)
    spent = _num_products(simple)
    if spent >= left or (bool(simple.succeeded) and _is_near(search, simple)):
        return simple, left - spent
    # Next to a point that is known already the guess may not cost many times as much.
    budget = left - spent
    if bool(simple.succeeded):
        budget = min(budget, _share(spent))
    point = polish(guess, budget)
    better = point if bool(point.succeeded) or not bool(simple.succeeded) else simple
    return better, left - spent - _num_products(point)


def _num_products(point: CriticalPoint) -> int:
    return int(point.stats.get("num_hessian_products", 0))


def _share(spent: int) -> int:
    """Products allowed where a neighbouring search took `spent`."""
    return max(1000, 5 * spent)


def _is_near(search: _Search, point: CriticalPoint) -> bool:
    distances = distances_from(search.run.models, point.model)
    return bool(np.min(distances) <= search.near * np.max(distances))


def _newton(tol: float, max_products: int, max_distance: float) -> RegularisedNewton:
    """The default solver with its bounds as arrays, so that it is compiled once."""
    return RegularisedNewton(
        atol=jnp.asarray(tol, float),
        max_products=jnp.asarray(max_products, jnp.int32),
        max_distance=jnp.asarray(max_distance, float),
    )


def _visit(
    search: _Search, stretch: Stretch, point: CriticalPoint, num_products: int
) -> VisitedPoint:
    """How closely the stretch approached a point."""
    run = search.run
    distances = distances_from(run.models, point.model)
    inside = distances[stretch.first : stretch.last + 1]
    closest = stretch.first + int(np.argmin(inside))
    distance, extent = float(distances[closest]), float(np.max(distances))
    relative = distance / extent if extent > 0 else 0.0
    kind = VisitKind.slow_passage
    if bool(point.succeeded) and relative <= search.near:
        kind = VisitKind.saddle  # Or a minimum: see `_classify`.
    elif not bool(point.succeeded) and num_products >= search.max_products:
        kind = VisitKind.unresolved
    return VisitedPoint(
        point=point,
        kind=kind,
        index=None,
        spectrum=None,
        time=float(run.ts[closest]),
        distance=distance,
        relative_distance=relative,
        slow_time=float(run.ts[stretch.slowest]),
        slow_loss=float(run.losses[stretch.slowest]),
        slow_grad_norm=float(run.grad_norms[stretch.slowest]),
        num_products=num_products,
    )


def _is_copy(search: _Search, other: VisitedPoint, visit: VisitedPoint) -> bool:
    """Whether two visits are to one critical point: see `flowsim.copies`."""
    if not (other.critical and visit.critical):
        return False
    if abs(float(other.loss - visit.loss)) > search.same_loss:
        return False
    here, there, invariants = other.model, visit.model, search.invariants
    if are_close(here, there, _SAME):
        return True
    if invariants and are_close(invariants(here), invariants(there), _SAME):
        return True
    length = float(_trees.norm(_trees.subtract(here, there)))
    middle = find_critical_point(
        search.objective,
        _trees.scale(0.5, _trees.add_scaled(here, 1.0, there)),
        tol=search.tol,
        max_steps=search.max_steps,
        solver=_newton(search.tol, search.max_products // 10, 0.25 * length),
    )
    if (
        bool(middle.succeeded)
        and abs(float(middle.loss - visit.loss)) <= search.same_loss
        and are_connected(here, there, middle.model)
    ):
        return True
    if invariants:
        return False
    return have_equal_spectra(_spectrum(search, here), _spectrum(search, there), _SAME)


def _spectrum(search: _Search, point: Params) -> Spectrum:
    """Spectrum with all unstable pairs, unless that takes too many products."""
    if _trees.num_params(point) <= DENSE_UP_TO:
        return spectrum(search.objective, point, center_tol=search.center_tol)
    found = None
    for num, max_restarts in _SPECTRA:
        found = spectrum(
            search.objective,
            point,
            num=num,
            max_restarts=max_restarts,
            center_tol=search.center_tol,
        )
        if bool(found.all_unstable_found):
            break
    assert found is not None
    return found


def _classify(
    search: _Search, stretches: list[Stretch], visit: VisitedPoint
) -> VisitedPoint:
    """Complete a visit by the spectrum at its point: index, saddle or minimum."""
    if not visit.critical:
        return visit
    run, found = search.run, _spectrum(search, visit.model)
    index = int(found.num_unstable)
    kind, part, on_manifold = VisitKind.minimum, None, False
    if index > 0:
        ts = np.asarray(run.ts)
        inside = [s for s in stretches if ts[s.first] <= visit.time <= ts[s.last]]
        rows = slice(inside[0].first, inside[-1].last + 1)
        models = jtu.tree_map(lambda leaf: leaf[rows], run.models)
        parts = components(models, visit.model, found.unstable)
        kind, part = VisitKind.saddle, float(np.min(np.linalg.norm(parts, axis=1)))
        size = float(_trees.norm(run.model_at(rows.start)))
        on_manifold = bool(part <= _ROUND_OFF * size)
    return dataclasses.replace(
        visit,
        kind=kind,
        index=index,
        spectrum=found,
        unstable_distance=part,
        on_stable_manifold=on_manifold,
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
    # The slowest stable rate is known from a complete spectrum only.
    if visit.spectrum is not None and visit.index and visit.spectrum.complete:
        values = np.asarray(visit.spectrum.values)
        tolerance = float(visit.spectrum.tolerance)
        stable, unstable = -values[values < -tolerance], values[values > tolerance]
        if stable.size:
            expected = float(np.min(stable) / (np.min(stable) + np.max(unstable)))
            kind = kind if exponent >= 0.5 * expected else VisitKind.slow_passage
    return dataclasses.replace(
        visit, kind=kind, exponent=exponent, expected_exponent=expected
    )
