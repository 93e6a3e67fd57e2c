"""A run in a file, to go on from."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from .. import records
from .steps import Row, State

_SECONDS_BETWEEN = 30.0


class Checkpoint:
    """State and rows in a file, and whether they belong to this run."""

    def __init__(
        self,
        path: str | os.PathLike,
        settings: Mapping[str, Any],
        key: PRNGKeyArray | None,
    ):
        self.path = Path(path)
        self.run = {"settings": dict(settings), "key": _key_numbers(key)}
        self.saved_at = time.monotonic()

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def save(self, state: State, kept: list[Row], *, now: bool = False) -> None:
        due = time.monotonic() - self.saved_at > _SECONDS_BETWEEN
        if now or due:
            kept[:] = [joined(kept)]
            records.save_checkpoint(
                self.path, {"state": state, "rows": kept[0]}, self.run
            )
            self.saved_at = time.monotonic()

    def load(self, state: State, first: Row, num_steps: int) -> tuple[State, list[Row]]:
        """State and rows to go on from.

        Raises:
            CheckpointError: the file is that of another run.
        """
        like = {"state": state, "rows": first}
        found, run = records.load_checkpoint(self.path, like)
        if run != self.run:
            raise records.CheckpointError(
                f"{self.path} is the checkpoint of another run: it has {run}, "
                f"this run has {self.run}."
            )
        rows: Row = found["rows"]
        start = jtu.tree_map(lambda leaf: leaf[0], (rows.model, rows.loss))
        here = jtu.tree_map(lambda leaf: leaf[0], (first.model, first.loss))
        pairs = zip(jtu.tree_leaves(start), jtu.tree_leaves(here), strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise records.CheckpointError(
                f"{self.path} is the checkpoint of a run from another start or with "
                "another objective."
            )
        if int(found["state"].step) > num_steps:
            raise records.CheckpointError(
                f"{self.path} is at step {int(found['state'].step)}, beyond num_steps "
                f"= {num_steps}."
            )
        # A former last row need not be one of a longer run.
        every = self.run["settings"]["every"]
        wanted = (rows.step % every == 0) | (rows.step == num_steps)
        rows = jtu.tree_map(lambda leaf: leaf[wanted], rows)
        return jax.device_put(found["state"]), [rows]


def _key_numbers(key: PRNGKeyArray | None) -> list[int] | None:
    if key is None:
        return None
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    numbers = jax.random.key_data(key) if typed else key
    return np.asarray(numbers).ravel().tolist()


def host(tree: Any) -> Any:
    return jtu.tree_map(np.asarray, tree)


def joined(kept: list[Row]) -> Row:
    return jtu.tree_map(lambda *leaves: np.concatenate(leaves), *kept)
