"""The paper's degenerate point unfolded: low-frequency tokens set apart by delta.

At the end of the reduced flow of a chain that treats its low-frequency tokens alike,
dL/dM = 0 and dL/dPhi = 0. As delta sets them apart the critical point persists on the
rank-one manifold, and dL/dM does not vanish any more. For a unit vector n orthogonal to
alpha take W0 += x n^T, W1 += n y^T, WQ += n s^T, WK += n t^T; to second order

    M += x y^T,   Phi += q (a . t) gamma x^T + kk (a . s) x gamma^T

so that the transverse eigenvalues are exactly +-, the singular values of

    [dL/dM,  q (dL/dPhi)^T gamma,  kk (dL/dPhi) gamma]                      (d, d + 2)

The paper keeps the first block. `unfold` measures all of this along a list of deltas,
`first_order` predicts the slope in delta by differentiating the continuation, and
`depart` watches the flow leave, or stay.

The paper's picture needs the point to be stable within the manifold. That is so for the
paper's chain (top mass .7, lam = .5), but a pair of tangential eigenvalues, which sets
the low tokens apart, passes zero near lam = .67: beyond, the point at delta = 0 is
unstable on the manifold already, and towards it the slope in delta diverges.

References:
    Chen, Lin, Xu and Luo (2026), arXiv:2605.01199, stage IV.
"""

import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray

from .. import _summary, _trees
from .._curves import spline
from .._types import RealLike
from ..critical import find_critical_point
from ..derivatives import gradient, hessian
from ..flow import gradient_flow
from ..invariant import RankOneFrame, RankOneModel, Reduced
from ..loss import PopulationLoss, weighted_attention
from ..markov import MarkovChain
from ..model import AttentionModel
from ..trajectory import Outcome
from .families import ChainFamily
from .splitting import At


class Unfolding(eqx.Module):
    """Critical points on the manifold along a family of chains, and their stability.

    Attributes:
        deltas: parameters, in the order of the continuation.
        reduced: the critical points, leading axis: delta.
        grad_norms: |grad L| at each, in the full space.
        converged: whether it is below the tolerance.
        singular_values: of dL/dM, descending.
        coupled_values: of [dL/dM, q (dL/dPhi)^T gamma, kk (dL/dPhi) gamma].
        transverse: eigenvalues of the Jacobian in one direction n orthogonal to alpha,
            by automatic differentiation, ascending.
        tangential: eigenvalues of the Jacobian on the manifold, ascending.
        embedding, readout: x and y of the most unstable transverse direction, each of
            unit length: W0 = x n^T, W1 = n y^T.
        embedding_weight: share of W0 in the squared norm of that direction.
    """

    deltas: Float[Array, " q"]
    reduced: RankOneModel
    grad_norms: Float[Array, " q"]
    converged: Bool[Array, " q"]
    singular_values: Float[Array, "q d"]
    coupled_values: Float[Array, "q d"]
    transverse: Float[Array, "q e"]
    tangential: Float[Array, "q f"]
    embedding: Float[Array, "q d"]
    readout: Float[Array, "q d"]
    embedding_weight: Float[Array, " q"]

    @property
    def rates(self) -> Float[Array, " q"]:
        """The most unstable transverse eigenvalue at each delta (1 / flow time)."""
        return self.transverse[:, -1]

    def exponent(self, values: Float[ArrayLike, " q"]) -> float:
        """Least-squares slope of log |values| in log |delta|, over non-zero deltas."""
        deltas, sizes = np.abs(np.asarray(self.deltas)), np.abs(np.asarray(values))
        used = (deltas > 0) & (sizes > 0)
        if used.sum() < 2:
            return math.nan
        return float(np.polyfit(np.log(deltas[used]), np.log(sizes[used]), 1)[0])

    def __str__(self) -> str:
        rows = {
            "delta": self.deltas,
            "converged": jnp.all(self.converged),
            "largest transverse": self.rates,
            "  exponent": self.exponent(self.rates),
            "largest tangential": self.tangential[:, -1],
            "sigma_1 (dL/dM)": self.singular_values[:, 0],
            "sigma_2 (dL/dM)": self.singular_values[:, 1],
            "embedding part": self.embedding_weight,
        }
        return _summary.aligned("Unfolding", rows)


class FirstOrder(eqx.Module):
    """d(dL/dM)/d delta along the minimum-norm continuation, by differentiation.

    Attributes:
        slopes: its singular values: predicted transverse eigenvalues over delta.
        embedding, readout: its leading singular vectors x and y.
    """

    slopes: Float[Array, " d"]
    embedding: Float[Array, " d"]
    readout: Float[Array, " d"]

    def __str__(self) -> str:
        return _summary.aligned("FirstOrder", vars(self))


class Departure(eqx.Module):
    """The true flow from a small random displacement of a critical point.

    Attributes:
        ts, distances: distance from the manifold over time.
        rate: exponential rate of the distance over the later part of the run.
        alignment: |cosine| between x and the leading left singular vector of the part
            of W0 orthogonal to alpha, at the end: the embedding direction it opens.
        growth: largest distance over the one at the start.
        rank_ratio: second over first singular value of W0 at the end.
        outcome: how the run ended.
    """

    ts: Float[Array, " t"]
    distances: Float[Array, " t"]
    rate: float
    alignment: float
    growth: float
    rank_ratio: float
    outcome: Outcome

    def __str__(self) -> str:
        rows = {
            "time": self.ts,
            "distance": self.distances,
            "rate": self.rate,
            "alignment of W0": self.alignment,
            "growth": self.growth,
        }
        return _summary.aligned("Departure", rows)


def unfold(
    chain_at: Callable[[float], MarkovChain],
    frame: RankOneFrame,
    start: RankOneModel,
    deltas: Sequence[float] | Float[np.ndarray, " q"],
    *,
    tol: float = 1e-12,
    polish: float = 1e-15,
) -> Unfolding:
    """Continue a critical point on the manifold along a family of chains.

    Each point starts from the one before, by minimum-norm Newton steps; the points form
    curves, so what is found belongs to the path.

    Args:
        chain_at: the family, for instance `TwoLevelFamily(...).chain`.
        frame: the manifold; the embedding width must be at least two.
        start: a critical point at (or near) the first delta.
        deltas: parameters, in the order of the continuation.
        tol: on the full gradient norm, for `converged`.
        polish: tolerance aimed at; small eigenvalues are read from dL/dM at the point.

    Raises:
        ValueError: for a width of one, where no direction is transverse.
    """
    normal = _orthogonal(frame)
    seen, reduced = [], start
    for delta in deltas:
        loss = PopulationLoss(chain_at(delta).to_dense())
        reduced = find_critical_point(Reduced(loss, frame), reduced, tol=polish).model
        seen.append((reduced, *_examine(loss, frame, reduced, normal)))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
    points, grad_norms, *rest = stacked
    return Unfolding(
        jnp.asarray(deltas, float), points, grad_norms, grad_norms <= tol, *rest
    )


@eqx.filter_jit
def first_order(
    family: ChainFamily,
    frame: RankOneFrame,
    at: RankOneModel,
    *,
    delta: RealLike = 0.0,
    center_tol: float = 1e-7,
) -> FirstOrder:
    """Slope in delta of dL/dM along the minimum-norm continuation of a critical point.

        theta' = -H^+ d(grad L)/d delta,     d(dL/dM) = (d/d theta . theta' + d/d delta)

    with the pseudo-inverse of the reduced Hessian, in which eigenvalues below
    `center_tol` times the largest count as zero.
    """
    flat, unravel = _trees.ravel(at)
    delta = jnp.asarray(delta, float)

    def slope(v, parameter):
        reduced = Reduced(At(family, parameter), frame)
        return _trees.ravel(gradient(reduced, unravel(v)))[0]

    def pull(v, parameter):
        loss = PopulationLoss(family.chain(parameter))
        return token_slopes(loss, frame.lift(unravel(v)))[0]

    matrix = jax.jacfwd(slope)(flat, delta)
    inverse = jnp.linalg.pinv(0.5 * (matrix + matrix.T), rtol=center_tol)
    moved = -inverse @ jax.jacfwd(slope, 1)(flat, delta)
    change = jax.jvp(pull, (flat, delta), (moved, jnp.ones_like(delta)))[1]
    left, values, right = jnp.linalg.svd(change)
    return FirstOrder(slopes=values, embedding=left[:, 0], readout=right[0])


def depart(
    loss: PopulationLoss,
    frame: RankOneFrame,
    at: RankOneModel,
    *,
    t1: float,
    direction: Float[Array, " d"],
    size: float = 1e-7,
    key: PRNGKeyArray | None = None,
    rtol: float = 1e-8,
) -> Departure:
    """Flow from a critical point on the manifold, displaced at random in full space.

    Args:
        loss: of the chain at this delta.
        frame, at: the critical point.
        t1: duration of the flow.
        direction: x, the embedding direction expected to open.
        size: root mean square of the displacement.
        key: of the displacement; `jax.random.key(0)` when absent.
        rtol: relative tolerance of the flow.
    """
    loss = PopulationLoss(loss.chain.to_dense())
    point = frame.lift(at)
    noise = AttentionModel.init(
        jax.random.key(0) if key is None else key,
        vocab=point.vocab,
        width=point.width,
        key_width=point.key_width,
        scale=size,
        scale_attention=frame.scale_attention,
    )
    start = _trees.add_scaled(point, 1.0, noise)
    run = gradient_flow(loss, start, t1=t1, rtol=rtol, atol=1e-4 * size)
    apart, part, ratio = _leave(frame, run.models)
    ts, sizes = np.asarray(run.ts), np.log(np.asarray(apart))
    curve = spline(ts, sizes)
    early, late = 0.6 * t1, 0.9 * t1
    cosine = abs(np.dot(np.asarray(part), np.asarray(direction)))
    return Departure(
        ts=run.ts,
        distances=apart,
        rate=float((curve(late) - curve(early)) / (late - early)),
        alignment=float(cosine / np.linalg.norm(np.asarray(direction))),
        growth=float(jnp.max(apart) / apart[0]),
        rank_ratio=float(ratio),
        outcome=run.outcome,
    )


@eqx.filter_jit
def _leave(frame: RankOneFrame, models: AttentionModel):
    apart = jax.vmap(frame.distance)(models)
    last = models.W0[-1]
    outside = last - jnp.outer(last @ frame.alpha, frame.alpha)
    values = jnp.linalg.svd(last, compute_uv=False)
    return apart, jnp.linalg.svd(outside)[0][:, 0], values[1] / values[0]


@eqx.filter_jit
def _examine(loss, frame: RankOneFrame, at: RankOneModel, normal):
    """Gradient norm, singular values, eigenvalues, and the most unstable direction."""
    point = frame.lift(at)
    pull, turn = token_slopes(loss, point)
    extra = jnp.stack([at.q * turn.T @ at.gamma, at.kk * turn @ at.gamma], axis=1)
    d, k = at.gamma.size, frame.key_direction.size

    def displaced(v):
        x, y, s, t = jnp.split(v, (d, 2 * d, 2 * d + k))
        shift = AttentionModel(
            jnp.outer(x, normal),
            jnp.outer(normal, y),
            jnp.outer(normal, s),
            jnp.outer(normal, t),
            scale_attention=frame.scale_attention,
        )
        return loss(_trees.add_scaled(point, 1.0, shift))

    values, vectors = jnp.linalg.eigh(-hessian(displaced, jnp.zeros(2 * d + 2 * k)))
    x, y = vectors[:d, -1], vectors[d : 2 * d, -1]
    return (
        _trees.norm(gradient(loss, point)),
        jnp.linalg.svd(pull, compute_uv=False),
        jnp.linalg.svd(jnp.concatenate([pull, extra], axis=1), compute_uv=False),
        values,
        jnp.linalg.eigvalsh(-hessian(Reduced(loss, frame), at)),
        x / _trees.norm(x),
        y / _trees.norm(y),
        x @ x,
    )


def token_slopes(loss: PopulationLoss, model: AttentionModel):
    """dL/dM and dL/dPhi, each (d, d), at a model."""
    law = loss.chain.stationary

    def of(M, Phi):
        logits = weighted_attention(Phi, law) @ M
        return -loss.chain.pair_expectation(jax.nn.log_softmax(logits, axis=-1))

    return jax.grad(of, (0, 1))(model.value_logits(), model.attention_logits())


def _orthogonal(frame: RankOneFrame) -> Float[Array, " m"]:
    """A unit vector orthogonal to alpha."""
    if frame.alpha.size < 2:
        raise ValueError("the embedding width must be at least 2; got 1.")
    return jnp.linalg.svd(frame.alpha[None])[2][-1]
