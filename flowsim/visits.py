"""What a run was near: the records that the search for saddles returns.

A `VisitedPoint` holds a slow stretch of a run and the critical point behind it, with
the quantities by which it was judged. `ending` says from these where the run ends.

Left out: the search itself (`flowsim.saddles`).

>>> import jax.numpy as jnp, flowsim as fs
>>> from flowsim.visits import Ending, ending
>>> loss = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> run = fs.gradient_flow(loss, jnp.array([1.0, -1.0]), t1=20.0)
>>> Ending[ending(run, fs.find_saddles(run, loss))]
'converged to a saddle'
"""

from collections.abc import Sequence

import equinox as eqx
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Float

from . import _summary
from ._types import Params, Scalar
from .critical import CriticalPoint
from .spectrum import Spectrum
from .trajectory import Trajectory


class VisitKind(eqx.Enumeration):
    """What a slow stretch of a run was."""

    saddle = "saddle"
    minimum = "minimum"
    slow_passage = "slow passage, no critical point nearby"
    unresolved = "not known: the search used up its Hessian-vector products"


class VisitedPoint(eqx.Module):
    """A slow stretch of a run, and the critical point behind it if there is one.

    Attributes:
        point: result of polishing; for a slow passage, where the attempt ended.
        kind: saddle, minimum, slow passage, or unresolved.
        index: number of unstable directions found; None without a critical point.
        spectrum: spectrum at the point; None without a critical point.
        time, distance: when and how closely the run approached the point.
        relative_distance: `distance` over the run's largest distance from the point.
        slow_time, slow_loss, slow_grad_norm: where |grad L| was smallest.
        num_products: Hessian-vector products spent on this stretch; for a problem
            small enough to be diagonalised, n for every diagonalisation.
        unstable_distance: smallest size, over the stretch, of the part of the distance
            along the unstable directions; None without such directions.
        on_stable_manifold: whether that is round-off of the parameters. If the run
            leaves such a saddle, round-off decides when, and to which side.
        exponent: measured with a second run: d log(smallest |grad L|) / d log eps.
        expected_exponent: ls / (ls + lu) for a saddle whose whole spectrum is known.
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
    num_products: int = 0
    unstable_distance: float | None = None
    on_stable_manifold: bool = False
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
        return bool((self.kind == VisitKind.saddle) | (self.kind == VisitKind.minimum))

    @property
    def index_exact(self) -> bool:
        """Whether `index` counts all unstable directions; else it is a lower bound."""
        return self.spectrum is not None and bool(self.spectrum.all_unstable_found)

    def __str__(self) -> str:
        share = f"{self.relative_distance:.1%} of the run"
        bound = "" if self.index is None or self.index_exact else "at least "
        rows = {
            "kind": VisitKind[self.kind],
            "index": f"{bound}{self.index}",
            "loss": self.loss,
            "closest at time": self.time,
            "distance": f"{self.distance:.3g}, {share}",
            "slowest at time": self.slow_time,
            "|grad| there": f"{self.slow_grad_norm:.3e}",
            "|grad| polished": self.point.grad_norm,
        }
        if self.on_stable_manifold:
            rows["unstable part"] = f"{self.unstable_distance:.1e}, round-off"
        if self.exponent is not None:
            expected = self.expected_exponent
            rows["exponent"] = f"{self.exponent:.3g}" + (
                "" if expected is None else f" (a saddle: {expected:.3g})"
            )
        return _summary.aligned("VisitedPoint", rows)


class Ending(eqx.Enumeration):
    """Where a run ends."""

    saddle = "converged to a saddle"
    minimum = "converged to a minimum"
    elsewhere = "not converged to a critical point"


def ending(
    run: Trajectory, visits: Sequence[VisitedPoint], *, arrived: float = 1e-2
) -> Ending:
    """Where a run ends, by the last critical point it visited.

    A run converges to a saddle only on its stable manifold. In double precision a
    longer run may leave by round-off: it then ends elsewhere, and the saddle it left
    is marked `on_stable_manifold`.

    Args:
        visits: the result of `find_saddles` for this run.
        arrived: the run has converged if at its end the distance from the point is at
            most this fraction of the run's largest. At a saddle it must also be the
            least distance so far, to a tenth, or below a millionth of the largest: a
            run that is leaving has not converged.
    """
    critical = [visit for visit in visits if visit.critical]
    if not critical:
        return Ending.elsewhere
    last = critical[-1]
    distances = distances_from(run.models, last.model)
    extent = np.max(distances)
    if distances[-1] > arrived * extent:
        return Ending.elsewhere
    if bool(last.kind == VisitKind.minimum):
        return Ending.minimum
    leaving = distances[-1] > max(1.1 * np.min(distances), 1e-6 * extent)
    return Ending.elsewhere if leaving else Ending.saddle


def distances_from(models: Params, point: Params) -> np.ndarray:
    """Euclidean distance of every saved model from a point."""
    squares = jtu.tree_map(
        lambda leaf, centre: np.sum(
            (np.asarray(leaf) - np.asarray(centre)).reshape(leaf.shape[0], -1) ** 2,
            axis=1,
        ),
        models,
        point,
    )
    return np.sqrt(sum(jtu.tree_leaves(squares)))


def components(
    models: Params, point: Params, directions: Params
) -> Float[np.ndarray, "t k"]:
    """Components of theta(t) - theta* along directions stacked in a leading axis."""
    parts = 0.0
    leaves = (jtu.tree_leaves(tree) for tree in (models, point, directions))
    for rows, center, basis in zip(*leaves, strict=True):
        moved = (np.asarray(rows) - np.asarray(center)).reshape(len(rows), -1)
        parts = parts + moved @ np.asarray(basis).reshape(len(basis), -1).T
    return np.asarray(parts)
