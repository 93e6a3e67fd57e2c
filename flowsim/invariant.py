"""The rank-one invariant manifold: a reduced model of 2 d + 2 numbers inside the flow.

    W0 = gamma alpha^T,  W1 = alpha beta^T,  WQ = q alpha a^T,  WK = kk alpha a^T
    Phi = q kk gamma gamma^T,   M = gamma beta^T,    alpha, a fixed unit vectors

The set of such models is a linear subspace, the map (gamma, beta, q, kk) -> model is an
isometry onto it, and the gradient of every loss that sees the model through M and Phi
alone is tangent to it. So the exact flow stays there and is, in these coordinates, the
gradient flow of the reduced objective: stages II and III of the paper happen on it.

`RankOneFrame` holds alpha and a, and lifts and projects; `Reduced` is the objective on
the manifold, which flow, spectrum and critical-point search take like any other;
`invariance_defect` measures tangency. `watch_dilution` computes what stage III is about
along any path of models, and `degenerate_point` finds where the reduced flow ends.

Left out: how the manifold is left (`flowsim.lyapunov_schmidt`).

>>> import jax, jax.numpy as jnp, flowsim as fs
>>> from flowsim.invariant import RankOneFrame, Reduced, RankOneModel
>>> frame = RankOneFrame(jnp.array([1.0, 0.0]), jnp.array([0.6, 0.8]))
>>> low = RankOneModel(jnp.array([1.0, -1.0, 2.0]), jnp.arange(3.0), *jnp.ones((2,)))
>>> model = frame.lift(low)
>>> model.W0.shape, bool(jnp.allclose(frame.project(model).gamma, low.gamma))
((3, 2), True)
>>> loss = Reduced(fs.PopulationLoss(fs.lazy_chain([0.7, 0.2, 0.1], 0.5)), frame)
>>> bool(loss(low) == loss.objective(model))
True

References:
    Chen, Lin, Xu and Luo (2026), arXiv:2605.01199, stages III and IV.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from . import _summary, _trees, theory
from ._curves import crossings
from ._types import Objective, RealLike, Scalar
from .critical import CriticalPoint, find_critical_point
from .derivatives import gradient, value_and_grad_norm
from .flow import gradient_flow
from .loss import PopulationLoss
from .model import AttentionModel
from .spectrum import Spectrum, spectrum
from .trajectory import Trajectory


class RankOneModel(eqx.Module):
    """Coordinates (gamma, beta, q, kk) on the manifold; orthonormal coordinates there.

    Attributes:
        gamma: embedding of each token along alpha.
        beta: logit of each token per unit of output along alpha.
        q, kk: strengths of query and key.
    """

    gamma: Float[Array, "*t d"]
    beta: Float[Array, "*t d"]
    q: Float[Array, "*t"]
    kk: Float[Array, "*t"]


class RankOneFrame(eqx.Module):
    """The two unit vectors of a rank-one manifold, with its lift and projection.

    Args:
        alpha: direction in embedding space (m,); normalised here.
        key_direction: direction a in key space (k,); normalised here.
        scale_attention: option of the models.

    Raises:
        ValueError: if a direction is not a vector, or is zero.
    """

    alpha: Float[Array, " m"]
    key_direction: Float[Array, " k"]
    scale_attention: bool = eqx.field(static=True)

    def __init__(
        self,
        alpha: Float[ArrayLike, " m"],
        key_direction: Float[ArrayLike, " k"],
        *,
        scale_attention: bool = False,
    ):
        self.alpha = _direction(alpha, "alpha")
        self.key_direction = _direction(key_direction, "key_direction")
        self.scale_attention = scale_attention

    @classmethod
    def nearest(cls, model: AttentionModel) -> "RankOneFrame":
        """The frame of the manifold that a model is close to.

        alpha is the leading eigenvector of W0^T W0 + W1 W1^T, and a that of b b^T +
        c c^T with b = WQ^T alpha, c = WK^T alpha (any vector where attention is zero).
        """
        alpha = _leading(model.W0.T @ model.W0 + model.W1 @ model.W1.T)
        b, c = model.WQ.T @ alpha, model.WK.T @ alpha
        size = jnp.maximum(jnp.linalg.norm(b), jnp.linalg.norm(c))
        b, c = (x / jnp.where(size > 0, size, 1.0) for x in (b, c))
        return cls(
            alpha,
            _leading(jnp.outer(b, b) + jnp.outer(c, c)),
            scale_attention=model.scale_attention,
        )

    def lift(self, reduced: RankOneModel) -> AttentionModel:
        """The full model with these coordinates."""
        pair = jnp.outer(self.alpha, self.key_direction)
        return AttentionModel(
            W0=jnp.outer(reduced.gamma, self.alpha),
            W1=jnp.outer(self.alpha, reduced.beta),
            WQ=reduced.q * pair,
            WK=reduced.kk * pair,
            scale_attention=self.scale_attention,
        )

    def project(self, model: AttentionModel) -> RankOneModel:
        """Coordinates of the nearest model on the manifold (orthogonal projection)."""
        return RankOneModel(
            gamma=model.W0 @ self.alpha,
            beta=self.alpha @ model.W1,
            q=self.alpha @ model.WQ @ self.key_direction,
            kk=self.alpha @ model.WK @ self.key_direction,
        )

    def normal(self, model: AttentionModel) -> AttentionModel:
        """The part of a model, or of a direction, orthogonal to the manifold."""
        return _trees.subtract(model, self.lift(self.project(model)))

    def distance(self, model: AttentionModel) -> Scalar:
        """Euclidean distance of a model from the manifold."""
        return _trees.norm(self.normal(model))


class Reduced(eqx.Module):
    """An objective of the attention model, restricted to a rank-one manifold."""

    objective: Objective
    frame: RankOneFrame

    def __call__(self, reduced: RankOneModel) -> Scalar:
        return self.objective(self.frame.lift(reduced))


class Dilution(eqx.Module):
    """What stages II to IV do to attention and embeddings, along a path of models.

    Attributes:
        attention_product: q kk.
        redistributed: (1 - pi_1) gamma_1 - pi_1 sum_{i>=2} gamma_i, the mass moved
            between top and low tokens; for a symmetric two-level law this is
            (1 - pi_1) gamma_1 - (d - 1) pi_1 gamma_i.
        off_ray: norm of the part of gamma orthogonal to pi.
        gamma: embedding along alpha.
        top_attention: attention of every query on the top token.
        spread: root mean square distance of the low-frequency embeddings (rows of W0
            but the top one) from their mean.
        separation: distance of the top token's embedding from that mean.
        distance: of the model from the manifold.
    """

    attention_product: Float[Array, "*t"]
    redistributed: Float[Array, "*t"]
    off_ray: Float[Array, "*t"]
    gamma: Float[Array, "*t d"]
    top_attention: Float[Array, "*t d"]
    spread: Float[Array, "*t"]
    separation: Float[Array, "*t"]
    distance: Float[Array, "*t"]

    def __str__(self) -> str:
        return _summary.aligned("Dilution", vars(self))


class DegeneratePoint(eqx.Module):
    """The critical point at the end of the reduced flow, certified in the full space.

    Attributes:
        frame, reduced: the manifold and the coordinates on it.
        model: the same point in the full space.
        polished: result of the search on the manifold.
        grad_norm: |grad L| in the full space.
        spectrum: of the full Jacobian; its centre is the kernel, of which
            `num_symmetry` directions are explained by symmetry.
        run: the reduced flow that led there.
    """

    frame: RankOneFrame
    reduced: RankOneModel
    model: AttentionModel
    polished: CriticalPoint
    grad_norm: Scalar
    spectrum: Spectrum
    run: Trajectory

    def __str__(self) -> str:
        rows = {
            "gamma": self.reduced.gamma,
            "beta": self.reduced.beta,
            "q": self.reduced.q,
            "kk": self.reduced.kk,
            "|grad| on the manifold": self.polished.grad_norm,
            "|grad| in full space": self.grad_norm,
            "unstable": self.spectrum.num_unstable,
            "kernel": self.spectrum.num_center,
            "  by symmetry": self.spectrum.num_symmetry,
            "stable": self.spectrum.num_stable,
        }
        return _summary.aligned("DegeneratePoint", rows)


@eqx.filter_jit
def invariance_defect(
    objective: Objective, frame: RankOneFrame, at: RankOneModel
) -> tuple[Scalar, Scalar]:
    """Norm of the normal part of the gradient on the manifold, and of the gradient.

    Zero to round-off where the manifold is invariant under the gradient flow.

    Args:
        objective: of the attention model.
        frame: the manifold.
        at: coordinates of the point.
    """
    slope = gradient(objective, frame.lift(at))
    return _trees.norm(frame.normal(slope)), _trees.norm(slope)


@eqx.filter_jit
def watch_dilution(
    loss: PopulationLoss, frame: RankOneFrame, models: AttentionModel
) -> Dilution:
    """The quantities of stage III at every model of a path (leading axis: time).

    Token 0 is the top token.

    Args:
        loss: population loss of the chain.
        frame: the manifold that the path starts near.
        models: a trajectory's models.
    """
    pi = loss.chain.stationary
    ray = pi / _trees.norm(pi)

    def look(model: AttentionModel) -> Dilution:
        low, gamma = frame.project(model), model.W0 @ frame.alpha
        others = model.W0[1:]
        centre = jnp.mean(others, axis=0)
        return Dilution(
            attention_product=low.q * low.kk,
            redistributed=(1 - pi[0]) * gamma[0] - pi[0] * jnp.sum(gamma[1:]),
            off_ray=_trees.norm(gamma - ray * (ray @ gamma)),
            gamma=gamma,
            top_attention=loss.attention(model)[:, 0],
            spread=jnp.sqrt(jnp.mean(jnp.sum((others - centre) ** 2, axis=1))),
            separation=_trees.norm(model.W0[0] - centre),
            distance=frame.distance(model),
        )

    return jax.lax.map(look, models)


@eqx.filter_jit
def lift_path(frame: RankOneFrame, path: RankOneModel) -> AttentionModel:
    """Full models along a path of reduced ones (leading axis: time)."""
    return jax.vmap(frame.lift)(path)


@eqx.filter_jit
def distances(frame: RankOneFrame, models: AttentionModel) -> Float[Array, " t"]:
    """Distance from the manifold at every model of a path (leading axis: time)."""
    return jax.vmap(frame.distance)(models)


def growth_rate(
    ts: Float[ArrayLike, " t"],
    values: Float[ArrayLike, " t"],
    between: tuple[float, float],
) -> float:
    """Exponential rate of |values| while it grows from one size to another.

    The slope of log |values| in time between the two crossings. NaN where the curve
    does not pass both sizes.

    Args:
        between: the two sizes, rising.
    """
    sizes = np.log(np.abs(np.asarray(values)))
    times = [crossings(ts, sizes, math.log(size)) for size in between]
    if any(found.size == 0 for found in times):
        return math.nan
    return float(math.log(between[1] / between[0]) / (times[1][0] - times[0][0]))


def manifold_start(
    loss: PopulationLoss, frame: RankOneFrame, *, attention: RealLike = 1e-3
) -> RankOneModel:
    """theta_c^1 in coordinates of the manifold, with a little attention added.

    q = `attention`, kk = +-q by the sign of the focus rate c: the unstable direction.
    """
    chain = loss.chain
    point = theory.second_critical_point(
        chain, width=frame.alpha.size, key_width=1, alpha=frame.alpha
    )
    q = jnp.asarray(attention, point.W0.dtype)
    sign = jnp.where(theory.focus_rate(chain) < 0, -1.0, 1.0).astype(q.dtype)
    return RankOneModel(
        gamma=point.W0 @ frame.alpha, beta=frame.alpha @ point.W1, q=q, kk=sign * q
    )


def degenerate_point(
    loss: PopulationLoss,
    frame: RankOneFrame,
    *,
    start: RankOneModel | None = None,
    t1: RealLike = 1e4,
    tol: float = 1e-13,
    rtol: float = 1e-9,
    **options: Any,
) -> DegeneratePoint:
    """Flow on the manifold to where it ends, polish there, and certify in full space.

    For a chain that treats the low-frequency tokens alike, p_11 = P_11 and p_i1 = P_i1
    at the point found, dL/dM and dL/dPhi vanish, and the kernel of the Hessian is large
    (the paper, stage IV). Critical points form a manifold; the one reached depends
    weakly on the start.

    Args:
        loss: population loss of the chain.
        frame: the manifold.
        start: where the reduced flow starts; `manifold_start` when absent.
        t1: how long it flows before the polish.
        tol: tolerance on the reduced gradient norm of the polish.
        rtol: relative tolerance of the flow.
        **options: of `flowsim.spectrum`.

    References:
        The paper, stage IV.
    """
    reduced = Reduced(loss, frame)
    start = manifold_start(loss, frame) if start is None else start
    atol = 1e-2 * rtol * 1e-3
    run = gradient_flow(reduced, start, t1=t1, rtol=rtol, atol=atol)
    polished = find_critical_point(reduced, run.final, tol=tol)
    model = frame.lift(polished.model)
    _, grad_norm = value_and_grad_norm(loss, model)
    return DegeneratePoint(
        frame=frame,
        reduced=polished.model,
        model=model,
        polished=polished,
        grad_norm=grad_norm,
        spectrum=spectrum(loss, model, **options),
        run=run,
    )


def _direction(x: Any, name: str) -> Array:
    x = jnp.asarray(x)
    x = x.astype(jnp.result_type(float, x))
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"{name} must be a vector; got shape {x.shape}.")
    if not _trees.is_traced(x) and not np.linalg.norm(np.asarray(x)) > 0:
        raise ValueError(f"{name} must not be zero; its direction is what counts.")
    return x / _trees.norm(x)


def _leading(matrix: Float[Array, "n n"]) -> Float[Array, " n"]:
    """Unit eigenvector of the largest eigenvalue, its largest entry positive."""
    vector = jnp.linalg.eigh(matrix)[1][:, -1]
    return vector * jnp.sign(vector[jnp.argmax(jnp.abs(vector))])
