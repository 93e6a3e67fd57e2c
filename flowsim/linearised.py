"""The linear flow at a critical point, held against the true flow near it.

Near a critical point theta* the displacement u = theta - theta* obeys u' = J u with
J = -Hessian, up to terms of second order. `linear_flow` takes the eigenpairs of J and
gives u(t) = exp(J t) u(0) in closed form; `compare`, `error_order` and `compare_exit`
say, on any objective, how far the true flow follows it: the lemma behind each stage of
the paper promises an error O(eps^2 exp(2 mu t)) from distance eps, alignment with the
most unstable eigenspace, and an escape after time log(1/eps) / mu.

The true flow is integrated as a displacement from theta*, so that a start 1e-8 away
keeps all its digits.

Left out: which critical points there are (`flowsim.critical`), and what happens beyond
the neighbourhood (`flowsim.invariant`, `flowsim.lyapunov_schmidt`).

>>> import jax.numpy as jnp
>>> from flowsim.linearised import linear_flow, predict_exit
>>> saddle = lambda y: 0.5 * (y[0] ** 2 - y[1] ** 2) + y[1] ** 3
>>> flow = linear_flow(saddle, jnp.zeros(2))
>>> round(float(predict_exit(flow, jnp.array([0.0, 1e-4]), radius=1e-2).time), 6)
4.60517

References:
    Chen, Lin, Xu and Luo (2026), arXiv:2605.01199, Lemma 3.1.
    Hirsch, Smale and Devaney (2013), "Differential Equations, Dynamical Systems, and an
    Introduction to Chaos", chapters 6 and 8.
"""

import math
from collections.abc import Sequence
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from . import _summary, _trees
from ._types import Objective, Params, RealLike, Scalar
from .derivatives import gradient
from .flow import gradient_flow
from .spectrum import Spectrum, spectrum
from .trajectory import Outcome, Trajectory


class LinearFlow(eqx.Module):
    """The flow u' = J u at a critical point, from eigenpairs of J.

    Attributes:
        point: the critical point theta*.
        spectrum: eigenpairs of J there. Where it is not complete, displacements outside
            the span of its directions stand still.
        grad_norm: |grad L| at the point, which the linear flow takes as zero.
        leading: the eigenvalues that count as the largest one.
    """

    point: Params
    spectrum: Spectrum
    grad_norm: Scalar
    leading: Bool[Array, " k"]

    @property
    def rate(self) -> Scalar:
        """The largest eigenvalue mu (1 / flow time)."""
        return self.spectrum.values[-1]

    @property
    def gap(self) -> Scalar:
        """Distance from mu to the next eigenvalue found below it (inf if none)."""
        below = jnp.where(self.leading, -jnp.inf, self.spectrum.values)
        return self.rate - jnp.max(below)

    def displaced(self, displacement: Params, t: Float[ArrayLike, ""]) -> Params:
        """exp(J t) u for a displacement u from the point and one time t."""
        values, vectors = self.spectrum.values, self.spectrum.vectors
        t = jnp.asarray(t, values.dtype)
        weights = jnp.expm1(values * t) * _coefficients(vectors, displacement)
        return _trees.add_scaled(displacement, 1.0, _combine(weights, vectors))

    def __call__(self, start: Params, t: Float[ArrayLike, ""]) -> Params:
        """Parameters at time t of the linear flow that starts at `start`."""
        displacement = _trees.subtract(start, self.point)
        return _trees.add_scaled(self.point, 1.0, self.displaced(displacement, t))

    def alignment(self, displacement: Params) -> Scalar:
        """Cosine of the angle to the eigenspace of mu, between 0 and 1."""
        weights = _coefficients(self.spectrum.vectors, displacement)
        part = jnp.linalg.norm(jnp.where(self.leading, weights, 0.0))
        size = _trees.norm(displacement)
        return part / jnp.where(size > 0, size, 1.0)

    def __str__(self) -> str:
        rows = {
            "rate": self.rate,
            "directions at that rate": jnp.sum(self.leading),
            "gap below": self.gap,
            "|grad|": self.grad_norm,
            "unstable": self.spectrum.num_unstable,
            "complete": self.spectrum.complete,
        }
        return _summary.aligned("LinearFlow", rows)


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


class Exit(eqx.Module):
    """Where and when a flow leaves a ball around the critical point.

    Attributes:
        leaves: whether it does.
        time: when; inf if it never does.
        place: where; the start if it never does.
        alignment: cosine of the displacement there with the most unstable eigenspace.
    """

    leaves: Bool[Array, ""]
    time: Scalar
    place: Params
    alignment: Scalar

    def __str__(self) -> str:
        rows = {name: vars(self)[name] for name in ("leaves", "time", "alignment")}
        return _summary.aligned("Exit", rows)


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


def linear_flow(
    objective: Objective,
    point: Params,
    *,
    num: int | None = None,
    cluster_tol: float = 1e-6,
    **options: Any,
) -> LinearFlow:
    """The linear flow at `point`, from all of its spectrum or the leading subspace.

    Args:
        objective: the loss.
        point: a critical point, in double precision.
        num: eigenpairs at the unstable end only; all of them when absent, where the
            spectrum is dense by default, and 10 at each end beyond 2,000 parameters.
        cluster_tol: eigenvalues within `cluster_tol` times the spectral radius of the
            largest belong to its eigenspace.
        **options: of `flowsim.spectrum`.

    Raises:
        ValueError: on single precision, or an impossible option.
    """
    if num is not None:
        options = {"which": "largest", "method": "matrix-free", **options, "num": num}
    found = spectrum(objective, point, **options)
    return LinearFlow(
        point=point,
        spectrum=found,
        grad_norm=_trees.norm(gradient(objective, point)),
        leading=found.values >= found.values[-1] - cluster_tol * found.radius,
    )


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


@eqx.filter_jit
def predict_exit(flow: LinearFlow, start: Params, radius: RealLike) -> Exit:
    """Where and when the linear flow from `start` leaves a ball around the point.

        |exp(J t) u(0)| = radius

    The square of the left side is a sum of exponentials in t, hence convex: from inside
    the ball there is one exit or none. It is bracketed and bisected.

    Args:
        start: parameters inside the ball.
        radius: of the ball.

    Raises:
        ValueError: if the start lies outside the ball (raised at run time under jit).
    """
    displacement = _trees.subtract(start, flow.point)
    values = flow.spectrum.values
    radius = jnp.asarray(radius, values.dtype)
    radius = eqx.error_if(
        radius,
        ~(_trees.norm(displacement) < radius),
        "start must lie inside the ball around the critical point.",
    )
    sizes = jnp.abs(_coefficients(flow.spectrum.vectors, displacement))
    # Each growing component alone reaches the radius at a time that bounds the exit.
    grows = (values > 0) & (sizes > 0)
    latest = jnp.log(radius / jnp.where(grows, sizes, 1.0))
    latest = jnp.min(jnp.where(grows, latest / jnp.where(grows, values, 1.0), jnp.inf))
    leaves = jnp.isfinite(latest)

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        outside = _trees.norm(flow.displaced(displacement, middle)) >= radius
        return jnp.where(outside, low, middle), jnp.where(outside, middle, high)

    bracket = jnp.zeros_like(radius), jnp.where(leaves, latest, 0.0)
    _, time = jax.lax.fori_loop(0, 60, halve, bracket)
    at_exit = flow.displaced(displacement, time)
    return Exit(
        leaves=leaves,
        time=jnp.where(leaves, time, jnp.inf),
        place=_trees.add_scaled(flow.point, 1.0, at_exit),
        alignment=flow.alignment(at_exit),
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


def _coefficients(vectors: Params, displacement: Params) -> Float[Array, " k"]:
    """Inner products of a displacement with stacked unit vectors."""
    return jax.vmap(lambda vector: _trees.inner(vector, displacement))(vectors)


def _combine(weights: Float[Array, " k"], vectors: Params) -> Params:
    """The stacked vectors' combination with these weights."""
    return jtu.tree_map(lambda leaf: jnp.tensordot(weights, leaf, 1), vectors)
