"""The true flow beside the linear one: errors, their order, exits."""

import math
from collections.abc import Sequence
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from .. import _summary, _trees
from .._types import Objective, Params, RealLike, Scalar
from ..flow import gradient_flow
from ..trajectory import Outcome, Trajectory
from .linear import Exit, LinearFlow, predict_exit


class Comparison(eqx.Module):
    """True and linear flow from one start, over time.

    Attributes:
        ts: times.
        scale: eps, the distance of the start from the critical point.
        rate: mu, the largest eigenvalue.
        distances: |u(t)| along the true flow.
        errors: |u(t) - exp(J t) u(0)|.
        alignment, linear_alignment: cosine of the true and of the linear displacement
            with the most unstable eigenspace.
        outcome: how the true run ended.
    """

    ts: Float[Array, " t"]
    scale: Scalar
    rate: Scalar
    distances: Float[Array, " t"]
    errors: Float[Array, " t"]
    alignment: Float[Array, " t"]
    linear_alignment: Float[Array, " t"]
    outcome: Outcome

    @property
    def bound(self) -> Float[Array, " t"]:
        """eps^2 exp(2 mu t), the lemma's bound without its constant."""
        return self.scale**2 * jnp.exp(2 * self.rate * self.ts)

    @property
    def constants(self) -> Float[Array, " t"]:
        """errors / bound: bounded in time where the lemma holds."""
        return self.errors / self.bound

    def __str__(self) -> str:
        rows = {
            "scale": self.scale,
            "rate": self.rate,
            "times": self.ts,
            "distance": self.distances,
            "error": self.errors,
            "error / (scale^2 exp(2 rate t))": self.constants,
            "alignment": self.alignment,
            "linear alignment": self.linear_alignment,
        }
        return _summary.aligned("Comparison", rows)


class ErrorOrder(eqx.Module):
    """How the error of linearising, at one time, falls with the distance eps.

    Attributes:
        t: the time.
        scales: the distances eps of the starts.
        errors: |u(t) - exp(J t) u(0)| from each.
        order: least-squares slope of log error in log eps; 2 by the lemma, more where
            the second derivative vanishes along the path.
        constant: geometric mean of error / (eps^2 exp(2 mu t)).
        succeeded: whether every true run reached `t`.
    """

    t: Scalar
    scales: Float[Array, " s"]
    errors: Float[Array, " s"]
    order: Scalar
    constant: Scalar
    succeeded: Bool[Array, ""]

    @property
    def decades(self) -> Scalar:
        """Decades of eps covered."""
        return jnp.log10(jnp.max(self.scales) / jnp.min(self.scales))

    def __str__(self) -> str:
        return _summary.aligned("ErrorOrder", vars(self) | {"decades": self.decades})


class ExitComparison(eqx.Module):
    """A predicted exit beside that of the true flow.

    Attributes:
        predicted: by the linear flow.
        true: of the true flow; `leaves` false if it was still inside at the end.
        time_error: true minus predicted time.
        place_error: distance of the two places over the radius.
        outcome: how the true run ended.
    """

    predicted: Exit
    true: Exit
    time_error: Scalar
    place_error: Scalar
    outcome: Outcome

    def __str__(self) -> str:
        rows = {
            "predicted time": self.predicted.time,
            "true time": self.true.time,
            "place error / radius": self.place_error,
            "alignment": self.true.alignment,
        }
        return _summary.aligned("ExitComparison", rows)


def compare(
    flow: LinearFlow,
    objective: Objective,
    direction: Params,
    *,
    scale: RealLike,
    ts: Float[ArrayLike, " t"],
    solver: diffrax.AbstractSolver | None = None,
    rtol: float = 1e-11,
) -> Comparison:
    """True flow against linear flow from theta* + eps direction / |direction|.

    Args:
        flow: from `linear_flow`.
        objective: the loss it belongs to.
        direction: where the start lies from the critical point; not zero.
        scale: eps.
        ts: increasing positive times.
        solver: for the true flow; Dopri8, made for tight tolerances, when absent. Give
            an implicit one where the problem is stiff.
        rtol: its relative tolerance. Errors of linearising are resolved down to `rtol`
            times eps, or to round-off of the point.

    Raises:
        ValueError: if times are not increasing and positive, or the scale not positive.

    References:
        The paper, Lemma 3.1.
    """
    scale, ts = jnp.asarray(scale, float), jnp.asarray(ts, float)
    if not _trees.is_traced((scale, ts)):
        if not np.asarray(scale) > 0:
            raise ValueError(f"scale must be positive; got {scale}.")
        if ts.ndim != 1 or ts.size == 0 or not float(ts[0]) > 0:
            raise ValueError(f"ts must be positive times, shape (t,); got {ts}.")
    start = _trees.scale(scale / _trees.norm(direction), direction)
    run = _true_flow(
        flow, objective, start, t1=ts[-1], save=ts, solver=solver, rtol=rtol
    )
    return _measure(flow, start, run, scale)


def error_order(
    flow: LinearFlow,
    objective: Objective,
    direction: Params,
    *,
    scales: Sequence[float] | Float[np.ndarray, " s"],
    t: RealLike,
    **options: Any,
) -> ErrorOrder:
    """Fit the order in eps, and the constant, of the error of linearising at time t.

    Args:
        flow, objective, direction, **options: as for `compare`.
        scales: distances eps, at least two.
        t: the time at which errors are taken; mu t of about one keeps the whole range
            of eps in the asymptotic regime.

    Raises:
        ValueError: for fewer than two scales.
    """
    if len(scales) < 2:
        raise ValueError(f"scales must be at least two; got {len(scales)}.")
    seen = [
        compare(flow, objective, direction, scale=eps, ts=jnp.asarray([t]), **options)
        for eps in scales
    ]
    eps = jnp.stack([one.scale for one in seen])
    errors = jnp.stack([one.errors[-1] for one in seen])
    constants = jnp.stack([one.constants[-1] for one in seen])
    reached = jnp.stack([one.outcome == Outcome.reached_t1 for one in seen])
    x, y = jnp.log(eps), jnp.log(errors)
    x = x - jnp.mean(x)
    return ErrorOrder(
        t=jnp.asarray(t, float),
        scales=eps,
        errors=errors,
        order=jnp.sum(x * y) / jnp.sum(x * x),
        constant=jnp.exp(jnp.mean(jnp.log(constants))),
        succeeded=jnp.all(reached),
    )


def compare_exit(
    flow: LinearFlow,
    objective: Objective,
    start: Params,
    radius: RealLike,
    *,
    t1: RealLike | None = None,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float = 1e-10,
) -> ExitComparison:
    """Predicted exit from a ball around the critical point, and that of the true flow.

    Args:
        flow, objective: the linear flow and the loss it belongs to.
        start: parameters inside the ball.
        radius: of the ball.
        t1: how long to wait for the true exit; by default twice the predicted time and
            ten time constants more, which needs a predicted exit.
        solver, rtol: as for `compare`.

    Raises:
        ValueError: if the start lies outside the ball, or no exit is predicted and `t1`
            is absent.
    """
    predicted = predict_exit(flow, start, radius)
    if t1 is None:
        if not _trees.is_traced(predicted) and not bool(predicted.leaves):
            raise ValueError("t1 must be given: the linear flow never leaves the ball.")
        t1 = 2 * predicted.time + 10 / flow.rate
    displacement = _trees.subtract(start, flow.point)
    run = _true_flow(
        flow,
        objective,
        displacement,
        t1=t1,
        save=None,
        solver=solver,
        rtol=rtol,
        stop=_Outside(jnp.asarray(radius, float)),
    )
    stopped = run.outcome == Outcome.stopped
    # Under jit unused rows repeat the last one.
    place = _trees.add_scaled(flow.point, 1.0, run.final)
    true = Exit(
        leaves=stopped,
        time=jnp.where(stopped, run.ts[-1], jnp.inf),
        place=place,
        alignment=flow.alignment(run.final),
    )
    apart = _trees.norm(_trees.subtract(place, predicted.place))
    return ExitComparison(
        predicted=predicted,
        true=true,
        time_error=true.time - predicted.time,
        place_error=apart / jnp.asarray(radius, float),
        outcome=run.outcome,
    )


class Displaced(eqx.Module):
    """The objective as a function of the displacement from a point."""

    objective: Objective
    point: Params

    def __call__(self, displacement: Params) -> Scalar:
        return self.objective(_trees.add_scaled(self.point, 1.0, displacement))


class _Outside(eqx.Module):
    radius: Scalar

    def __call__(self, t: Scalar, displacement: Params) -> Scalar:
        del t
        return _trees.norm(displacement) - self.radius


def _true_flow(
    flow: LinearFlow, objective, displacement, *, t1, save, solver, rtol, **options
) -> Trajectory:
    solver = diffrax.Dopri8() if solver is None else solver
    num = _trees.num_params(displacement)
    # Round-off in gradients at the point itself is not an error of the step.
    round_off = jnp.finfo(float).eps * _trees.norm(flow.point)
    size = (1e-2 * rtol * _trees.norm(displacement) + round_off) / math.sqrt(num)
    return gradient_flow(
        Displaced(objective, flow.point),
        displacement,
        t1=t1,
        save=save,
        solver=solver,
        rtol=rtol,
        atol=size,
        **options,
    )


@eqx.filter_jit
def _measure(
    flow: LinearFlow, start: Params, run: Trajectory, scale: Scalar
) -> Comparison:
    linear = jax.vmap(lambda t: flow.displaced(start, t))(run.ts)
    return Comparison(
        ts=run.ts,
        scale=scale,
        rate=flow.rate,
        distances=jax.vmap(_trees.norm)(run.models),
        errors=jax.vmap(_trees.norm)(_trees.subtract(run.models, linear)),
        alignment=jax.vmap(flow.alignment)(run.models),
        linear_alignment=jax.vmap(flow.alignment)(linear),
        outcome=run.outcome,
    )
