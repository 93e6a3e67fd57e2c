"""The unfolding as a study: along delta, lam and the top mass, with its branches."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import _summary, _trees
from .._types import Params
from ..invariant import (
    DegeneratePoint,
    RankOneFrame,
    RankOneModel,
    degenerate_point,
    manifold_start,
)
from ..loss import PopulationLoss
from ..markov import MarkovChain
from ..model import AttentionModel
from .equilibria import Equilibria, branches
from .families import ChainFamily, TwoLevelFamily
from .reduction import reduced_field
from .splitting import split
from .taylor import TaylorField
from .unfolding import (
    FirstOrder,
    Unfolding,
    _orthogonal,
    first_order,
    unfold,
)


class UnfoldingStudy(eqx.Module):
    """Everything about one two-level family.

    Attributes:
        point: the degenerate point at delta = 0.
        along_delta: its continuation in delta.
        along_lam, along_top: continuation at a fixed delta in lam and in the top mass
            (in their `deltas`), from the family's own values up and down.
        first: predicted slope and directions.
        field: the reduced vector field in the one coordinate u of the most unstable
            transverse direction.
        branches: equilibria of that field, at each delta.
    """

    point: DegeneratePoint
    along_delta: Unfolding
    along_lam: Unfolding
    along_top: Unfolding
    first: FirstOrder
    field: TaylorField
    branches: tuple[Equilibria, ...]

    def __str__(self) -> str:
        rows = {
            "kernel": self.point.spectrum.num_center,
            "  by symmetry": self.point.spectrum.num_symmetry,
            "predicted slope": self.first.slopes[0],
            "measured slope": self.along_delta.rates[0] / self.along_delta.deltas[0],
            "exponent": self.along_delta.exponent(self.along_delta.rates),
            "u delta": self.field.coefficient(0, (1, 1)),
            "u^3": self.field.coefficient(0, (3, 0)),
            "lam": self.along_lam.deltas,
            "  rates": self.along_lam.rates,
            "top": self.along_top.deltas,
            "  rates ": self.along_top.rates,
        }
        return _summary.aligned("UnfoldingStudy", rows)


def transverse_directions(
    frame: RankOneFrame, first: FirstOrder
) -> Float[Array, "2 n"]:
    """The unstable transverse direction for small delta, and its stable partner.

        (W0, W1) = (x n^T, -n y^T) / sqrt(2),   (x n^T, n y^T) / sqrt(2)

    with x, y the leading singular vectors of the slope of dL/dM. Rows in the
    coordinates of `_trees.ravel`; null directions of the Hessian at delta = 0.
    """
    normal = _orthogonal(frame)
    still = jnp.zeros((frame.alpha.size, frame.key_direction.size))

    def row(sign: float) -> Array:
        shift = AttentionModel(
            jnp.outer(first.embedding, normal),
            sign * jnp.outer(normal, first.readout),
            still,
            still,
            scale_attention=frame.scale_attention,
        )
        return _trees.ravel(shift)[0] / jnp.sqrt(2.0)

    return jnp.stack([row(-1.0), row(1.0)])


def reduced_unfolding(
    family: ChainFamily,
    frame: RankOneFrame,
    at: RankOneModel,
    first: FirstOrder,
    *,
    order: int = 3,
) -> TaylorField:
    """Bifurcation function in the unstable transverse coordinate: u' = f(u, delta).

    The other directions of the kernel are held. (With the stable partner as a second
    coordinate equilibria come in hyperbolas, the orbit of a rescaling of x against y.)
    """
    kernel = transverse_directions(frame, first)[:1]
    splitting = split(family, frame.lift(at), kernel=kernel)
    return reduced_field(family, splitting, order=order)


def study_unfolding(
    top: float = 0.7,
    lam: float = 0.5,
    pattern: Sequence[float] = (1.0, 0.0, -1.0),
    *,
    deltas: Sequence[float] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    lams: Sequence[float] = (0.3, 0.4, 0.5, 0.6, 0.7),
    tops: Sequence[float] = (0.6, 0.65, 0.7, 0.75, 0.8),
    delta: float = 1e-3,
    branch_deltas: Sequence[float] = (-1e-3, -5e-4, -1e-4, 1e-4, 5e-4, 1e-3),
    radius: float = 0.5,
    width: int = 3,
    key_width: int = 3,
    announce: Callable[[str], Any] | None = None,
) -> UnfoldingStudy:
    """Continue the degenerate point in delta, lam and the top mass; find its branches.

    Args:
        top, lam, pattern: the two-level family of lazy chains.
        deltas: of the continuation at these.
        lams, tops: values of the continuations at `delta`.
        delta: the fixed one of those.
        branch_deltas: where equilibria of the reduced field are found.
        radius: of the ball in which they are searched.
        width, key_width: of the model; width at least two.
        announce: called with a few words before each part.
    """
    say = (lambda _: None) if announce is None else announce
    family = TwoLevelFamily(top, lam, jnp.asarray(pattern))
    axes = (jnp.eye(size)[0] for size in (width, key_width))
    frame = RankOneFrame(*axes)
    loss = PopulationLoss(family.chain(0.0).to_dense())
    say("the degenerate point")
    point = degenerate_point(
        loss, frame, start=manifold_start(loss, frame, attention=1e-4)
    )
    say("continuation in delta, lam and top")
    along = unfold(family.chain, frame, point.reduced, deltas)
    (base,) = _points(unfold(family.chain, frame, point.reduced, (delta,)))

    def at_lam(value: float) -> MarkovChain:
        return TwoLevelFamily(top, value, family.pattern).chain(delta)

    def at_top(value: float) -> MarkovChain:
        return TwoLevelFamily(value, lam, family.pattern).chain(delta)

    along_lam = _both_ways(at_lam, frame, base, lams, lam)
    along_top = _both_ways(at_top, frame, base, tops, top)
    say("branches")
    first = first_order(family, frame, point.reduced)
    field = reduced_unfolding(family, frame, point.reduced, first)
    return UnfoldingStudy(
        point=point,
        along_delta=along,
        along_lam=along_lam,
        along_top=along_top,
        first=first,
        field=field,
        branches=branches(field, branch_deltas, radius=radius),
    )


def _points(found: Unfolding) -> list[Params]:
    return [
        jax.tree.map(lambda leaf, row=row: leaf[row], found.reduced)
        for row in range(found.deltas.size)
    ]


def _both_ways(chain_at, frame, base, values, centre: float) -> Unfolding:
    """Continuation from the centre upwards and downwards, in rising order.

    By steps of at most a hundredth: the critical points form curves, and long Newton
    steps change from one to another.
    """
    values = np.sort(np.asarray(values, float))
    parts = []
    for side in (values[values < centre][::-1], values[values >= centre]):
        last, kept, path = centre, [], []
        for value in side:
            num = max(1, math.ceil(abs(value - last) / 0.01))
            path += np.linspace(last, value, num + 1)[1:].tolist()
            kept.append(len(path) - 1)
            last = value
        if path:
            found, rows = unfold(chain_at, frame, base, path), np.asarray(kept)
            parts.append(jax.tree.map(lambda leaf, rows=rows: leaf[rows], found))
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    order = jnp.argsort(joined.deltas)
    return jax.tree.map(lambda leaf: leaf[order], joined)
