"""A block of steps, and how its rows get into the record of a run.

In a concrete run the record holds the numbers of rows that stay on the host
(`flowsim.flow.rows`). What it does then depends on no objective, so it is a program of
its own, compiled once for all of them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..trajectory import Thinning


class Steps(eqx.Module):
    """The accepted steps of a block, the first `count` of them filled in; no rows."""

    ts: Float[Array, " block"]
    increments: Float[Array, " block"]
    wanted: Bool[Array, " block"]
    count: Int[Array, ""]


def with_rows(store: Thinning, steps: Steps, rows: PyTree[Array]) -> Thinning:
    """The buffer with a block of rows; without merging while there is room."""
    capacity, block = store.ts.shape[0], steps.ts.shape[0]

    def extend(store: Thinning) -> Thinning:
        return store.extend(steps.ts, rows, steps.increments, steps.wanted)

    if capacity < block:
        return extend(store)

    def append(store: Thinning) -> Thinning:
        def place(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new, store.count, 0)

        lengths = store.total + jnp.cumsum(steps.increments)
        return Thinning(
            ts=place(store.ts, steps.ts),
            rows=jtu.tree_map(place, store.rows, rows),
            lengths=place(store.lengths, lengths),
            total=lengths[-1],
            count=store.count + steps.count,
            bin_width=store.bin_width,
        )

    room = (store.count + block <= capacity) & (store.bin_width == 0)
    room &= jnp.sum(steps.wanted, dtype=steps.count.dtype) == steps.count
    return jax.lax.cond(room, append, extend, store)


@eqx.filter_jit
def store_numbers(store: Thinning, steps: Steps, before: Int[Array, ""]) -> Thinning:
    """The buffer with the numbers of a block's rows.

    A program of its own: it serves every objective, and is compiled once.
    """
    index = jnp.arange(steps.ts.shape[0], dtype=jnp.int32)
    return with_rows(store, steps, 1 + before + index)


def grown(store: Thinning, block: int) -> Thinning:
    """Double the buffer when the next block might not fit."""
    capacity = store.ts.shape[0]
    if int(store.count) + block <= capacity:
        return store
    return _enlarged(store, 2 * capacity)


@eqx.filter_jit
def _enlarged(store: Thinning, capacity: int) -> Thinning:
    return store.enlarged(capacity)
