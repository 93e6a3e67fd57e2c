"""The flow of the linearisation, and where it leaves a ball."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike, Bool, Float

from .. import _summary, _trees
from .._types import Objective, Params, RealLike, Scalar
from ..derivatives import gradient
from ..spectrum import Spectrum, spectrum


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


def _coefficients(vectors: Params, displacement: Params) -> Float[Array, " k"]:
    """Inner products of a displacement with stacked unit vectors."""
    return jax.vmap(lambda vector: _trees.inner(vector, displacement))(vectors)


def _combine(weights: Float[Array, " k"], vectors: Params) -> Params:
    """The stacked vectors' combination with these weights."""
    return jtu.tree_map(lambda leaf: jnp.tensordot(weights, leaf, 1), vectors)
