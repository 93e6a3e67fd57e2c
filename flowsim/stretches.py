"""The slow stretches of a run, between two bursts, and what to polish there.

Left out: what was slow there (`flowsim.saddles`).

>>> import jax.numpy as jnp, flowsim as fs
>>> from flowsim.stretches import slow_stretches
>>> loss = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> run = fs.gradient_flow(loss, jnp.array([1e-4, 1e-4]), t1=30.0)
>>> len(slow_stretches(run, prominence=1.1, floor=1e-12))
2
"""

import itertools
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import _trees
from ._types import Params
from .trajectory import Trajectory


class Stretch(eqx.Module):
    """Rows `first` to `last` around the slowest row, between two bursts."""

    first: int
    slowest: int
    last: int


def check_run(run: Any, name: str) -> None:
    """Check that `run` is one concrete trajectory that was saved with its models.

    Raises:
        ValueError: naming the argument and what arrived.
    """
    if _trees.is_traced(run) or run.ts.ndim != 1:
        raise ValueError(
            f"{name} must be one concrete trajectory; got ts of shape {run.ts.shape}"
            f"{', traced' if _trees.is_traced(run) else ''}."
        )
    rows = jtu.tree_leaves(run.models)[0].shape[0]
    if rows != len(run.ts) or rows < 2:
        raise ValueError(
            f"{name} must have been saved with its models, at two times or more; it "
            f"holds {rows} of them for {len(run.ts)} times."
        )


def slow_stretches(run: Trajectory, prominence: float, floor: float) -> list[Stretch]:
    """Stretches around the prominent local minima of |grad L|, ends included."""
    # Below the tolerance differences are round-off.
    level = np.log(np.maximum(np.asarray(run.grad_norms), floor))
    top = np.max(level) + 2 * math.log(prominence)
    padded = -np.concatenate([[top], level, [top]])
    # Imported here: it takes longer to load than the rest of the package.
    from scipy.signal import find_peaks

    slowest = find_peaks(padded, prominence=math.log(prominence))[0] - 1
    slowest = [int(row) for row in slowest]
    bursts = [
        a + int(np.argmax(level[a : b + 1])) for a, b in itertools.pairwise(slowest)
    ]
    first, last = [0, *bursts], [*bursts, len(level) - 1]
    return [Stretch(*rows) for rows in zip(first, slowest, last, strict=True)]


def rows_to_try(run: Trajectory, stretch: Stretch, number: int) -> list[int]:
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


def without_small_parts(guess: Params, limit: float) -> Params:
    """The guess without its small singular values, of norm `limit` at most in all.

    A leaf that is no matrix counts as one row. The cut is made at the widest gap
    between the singular values of all leaves, or above all of them if they are small
    against `limit`.
    """

    def factors(leaf: Any):
        matrix = np.asarray(leaf)
        matrix = matrix if matrix.ndim == 2 else matrix.reshape(1, -1)
        return np.linalg.svd(matrix, full_matrices=False)

    leaves, structure = jtu.tree_flatten(guess)
    parts = [factors(leaf) for leaf in leaves]
    values = np.sort(np.concatenate([values for _, values, _ in parts]))
    removable = int(np.sum(np.sqrt(np.cumsum(values**2)) <= limit))
    if removable == 0:
        return guess
    # Gap i lies between values i and i + 1; above all of them comes the limit.
    gaps = np.diff(np.append(values, max(limit, values[-1])))[:removable]
    threshold = values[int(np.argmax(gaps))]
    kept = (
        ((u * np.where(s > threshold, s, 0.0)) @ v).reshape(leaf.shape)
        for leaf, (u, s, v) in zip(leaves, parts, strict=True)
    )
    return jtu.tree_unflatten(structure, [jnp.asarray(leaf) for leaf in kept])
