"""The rows of a concrete run, on the host: kept as they come, measured at the end.

A block of saved steps is megabytes for a large model, and every copy of the whole
record costs as much as many steps. So outside `jit` the record of a run
(`flowsim.trajectory.Thinning`) holds the numbers of its rows, and the rows themselves
stay where the solver put them until the run is over.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from .problem import Measurement, Problem, examine_rows

_CHUNK = 256  # Rows measured by one call: a fixed number, so that one program serves.


class HostRows:
    """Numbered rows in blocks; row 0 is the start, row i the i-th accepted step."""

    def __init__(self, first: PyTree):
        start = jtu.tree_map(lambda leaf: np.asarray(leaf)[None], first)
        self._blocks: list[tuple[np.ndarray, PyTree]] = [(np.zeros(1, int), start)]

    @property
    def num_held(self) -> int:
        return sum(len(numbers) for numbers, _ in self._blocks)

    def append(self, rows: PyTree, count: int) -> None:
        """Add the first `count` rows of a block."""
        if count > 0:
            first = 1 + int(self._blocks[-1][0][-1])
            # A view: the memory stays the solver's.
            block = jtu.tree_map(lambda leaf: np.asarray(leaf)[:count], rows)
            self._blocks.append((np.arange(first, first + count), block))

    def keep(self, numbers: Int[np.ndarray, " kept"]) -> None:
        """Drop all rows but these and the last one, which carries the numbering."""
        last = self._blocks[-1][0][-1]
        wanted = np.append(numbers, last)
        self._blocks = [
            (held[chosen], jtu.tree_map(lambda leaf, c=chosen: leaf[c], rows))
            for held, rows in self._blocks
            if (chosen := np.isin(held, wanted)).any()
        ]

    def gather(self, numbers: Int[np.ndarray, " kept"]) -> PyTree:
        """These rows, ascending, in one array for each leaf."""
        chosen = [(np.isin(held, numbers), rows) for held, rows in self._blocks]
        parts = [
            jtu.tree_map(lambda leaf, mask=mask: leaf[mask], rows)
            for mask, rows in chosen
        ]
        return jtu.tree_map(lambda *leaves: np.concatenate(leaves), *parts)


def examine(problem: Problem, rows: PyTree) -> tuple[Measurement, PyTree]:
    """Measure rows and restore the caller's parameters, in chunks of one size."""
    total = jtu.tree_leaves(rows)[0].shape[0]
    parts = []
    for start in range(0, total, _CHUNK):
        chunk = jtu.tree_map(lambda leaf, a=start: leaf[a : a + _CHUNK], rows)
        count = min(_CHUNK, total - start)
        seen = examine_rows(problem, _filled(chunk), jnp.asarray(count, jnp.int32))
        parts.append(jtu.tree_map(lambda leaf, n=count: np.asarray(leaf)[:n], seen))
    measured, restored = jtu.tree_map(lambda *leaves: np.concatenate(leaves), *parts)
    restored = rows if problem.reduction is None else restored
    return measured, restored


def padded(values: Float[ArrayLike, " rows"]) -> Float[Array, " more"]:
    """Repeat the last value up to whole chunks, so that one program serves."""
    values = np.asarray(values)
    return jnp.asarray(np.pad(values, (0, -len(values) % _CHUNK), mode="edge"))


def _filled(chunk: PyTree) -> PyTree:
    def fill(leaf: np.ndarray) -> Any:
        missing = _CHUNK - leaf.shape[0]
        if missing:
            leaf = np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)])
        return jax.device_put(leaf)

    return jtu.tree_map(fill, chunk)
