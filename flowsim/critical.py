"""Find critical points of any objective: polish a guess until the gradient vanishes.

Critical points of a gradient flow are saddles as often as minima, and with symmetries
they are never isolated. So nothing is minimised here but the error of the gradient's
root: the iteration goes to the critical point near the guess, whatever its index, and
moves nothing along exact null directions (see `flowsim.newton` for the method).

Left out: which critical points a trajectory visits (`flowsim.saddles`), and their
stability (`flowsim.spectrum`).

>>> import jax.numpy as jnp, flowsim as fs
>>> saddle = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> point = fs.find_critical_point(saddle, jnp.array([0.1, -0.2]))
>>> bool(point.succeeded), bool(jnp.max(jnp.abs(point.model)) < 1e-12)
(True, True)
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int

from . import _summary, _trees
from ._types import Objective, Params
from .lanczos import check_double
from .newton import RegularisedNewton


class CriticalOutcome(eqx.Enumeration):
    """How the search for a critical point ended."""

    converged = "the gradient norm fell to the tolerance"
    started_there = "the guess already met the tolerance and is returned unchanged"
    stalled = "no further progress, or max_steps, before the tolerance"
    diverged = "not finite, or left for infinity"


class CriticalPoint(eqx.Module):
    """A critical point, or how far the search for it got.

    Attributes:
        model: the parameters found, in the guess's own structure.
        loss: objective there.
        grad_norm: Euclidean norm of the gradient, evaluated at `model`.
        outcome: how the search ended.
        num_steps: accepted steps.
        displacement: Euclidean distance from the guess.
        tol: the tolerance that `outcome` refers to.
        stats: counts of the solver's work.
    """

    model: Params
    loss: Float[Array, "*batch"]
    grad_norm: Float[Array, "*batch"]
    outcome: CriticalOutcome
    num_steps: Int[Array, "*batch"]
    displacement: Float[Array, "*batch"]
    tol: Float[Array, "*batch"]
    stats: dict[str, Any]

    @property
    def succeeded(self):
        """Whether the gradient norm at `model` meets the tolerance."""
        return (self.outcome == CriticalOutcome.converged) | (
            self.outcome == CriticalOutcome.started_there
        )

    def __str__(self) -> str:
        concrete = self.loss.ndim == 0 and not _trees.is_traced(self.loss)
        rows = {
            "outcome": CriticalOutcome[self.outcome] if concrete else "batch or traced",
            "loss": self.loss,
            "|grad|": self.grad_norm,
            "tolerance": self.tol,
            "distance from guess": self.displacement,
            "steps": self.num_steps,
            **self.stats,
        }
        return _summary.aligned("CriticalPoint", rows)


def find_critical_point(
    objective: Objective,
    guess: Params,
    *,
    tol: float = 1e-12,
    max_steps: int = 100,
    solver: optx.AbstractLeastSquaresSolver | None = None,
) -> CriticalPoint:
    """Critical point of `objective` near `guess`: |grad L| <= tol, any index.

    Where critical points form a manifold, the one returned is the end of a path of
    minimum-norm steps, hence close to the guess; it depends on the guess.

    Args:
        objective: the loss.
        guess: where to start, in double precision.
        tol: absolute tolerance on the gradient norm at the returned point. Where
            round-off keeps the gradient above it the outcome is "stalled", beside the
            norm that was achieved.
        max_steps: bound on the accepted steps of the solver.
        solver: any Optimistix least-squares solver, applied to the gradient; it stops
            by its own tolerances, but the outcome goes by `tol`. By default
            `flowsim.newton.RegularisedNewton`, which diagonalises the Hessian up to
            300 parameters and uses Hessian-vector products only above.

    Raises:
        ValueError: on single precision.
    """
    check_double(guess, "guess")
    tolerance = jnp.asarray(tol, float)
    if solver is None:
        solver = RegularisedNewton(atol=tolerance)
    return _find(objective, guess, tolerance, solver, max_steps)


@eqx.filter_jit
def _find(
    objective: Objective,
    guess: Params,
    tol: Float[Array, ""],
    solver: optx.AbstractLeastSquaresSolver,
    max_steps: int,
) -> CriticalPoint:
    start, unravel = _trees.ravel(guess)
    value_and_grad = jax.value_and_grad(lambda v: objective(unravel(v)))
    solution = optx.least_squares(
        lambda v, _: value_and_grad(v)[1],
        solver,
        start,
        max_steps=max_steps,
        throw=False,
    )
    at_guess = jnp.linalg.norm(value_and_grad(start)[1])
    started_there = at_guess <= tol
    end = jnp.where(started_there, start, solution.value)
    loss, gradient = value_and_grad(end)
    grad_norm = jnp.linalg.norm(gradient)
    displacement = jnp.linalg.norm(end - start)
    bounded = displacement <= 1e8 * (1 + jnp.linalg.norm(start))
    outcome = CriticalOutcome.where(
        grad_norm <= tol, CriticalOutcome.converged, CriticalOutcome.stalled
    )
    outcome = CriticalOutcome.where(
        bounded & jnp.isfinite(grad_norm), outcome, CriticalOutcome.diverged
    )
    outcome = CriticalOutcome.where(
        started_there, CriticalOutcome.started_there, outcome
    )
    num_steps = jnp.asarray(solution.stats["num_steps"], jnp.int32)
    counted = {
        name: jnp.asarray(count, jnp.int32)
        for name, count in solution.stats.items()
        if name.startswith("num_") and name != "num_steps"
    }
    return CriticalPoint(
        model=unravel(end),
        loss=loss,
        grad_norm=grad_norm,
        outcome=outcome,
        num_steps=jnp.where(started_there, 0, num_steps),
        displacement=displacement,
        tol=tol,
        stats=counted,
    )
