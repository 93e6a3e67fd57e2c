"""What a run leaves behind: saved points along a path, and how the run ended.

`Trajectory` is the record that the exact flow and the optimiser loops both return.
`Thinning` is the buffer that decides, while a run goes on, which accepted steps to
keep: many in a burst, few on a plateau, never more than a fixed number. Files are not
written here (see `flowsim.records`), and nothing is integrated here (see
`flowsim.flow`).

>>> import jax.numpy as jnp, flowsim as fs
>>> run = fs.gradient_flow(lambda y: 0.5 * jnp.sum(y**2), jnp.ones(2), t1=1.0)
>>> bool(run.outcome == fs.Outcome.reached_t1), run.models.shape[1:]
(True, (2,))
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from . import _summary, _trees
from ._types import Params


class Outcome(eqx.Enumeration):
    """How a run ended. Everything but the first three is a failure."""

    reached_t1 = "reached t1"
    stationary = "gradient norm fell to the requested tolerance"
    stopped = "the stop condition was met"
    max_steps_reached = "max_steps reached before t1"
    step_too_small = "the step size underflowed"
    not_finite = "the loss or its gradient is not finite"
    loss_increased = "the loss rose by more than the error tolerance"
    solver_failed = "the solver gave up"
    interrupted = "interrupted from the keyboard"


def ended_as_asked(outcome: Outcome) -> Bool[Array, "*batch"]:
    """Whether a run ended at t1 or by its stop condition."""
    return (
        (outcome == Outcome.reached_t1)
        | (outcome == Outcome.stationary)
        | (outcome == Outcome.stopped)
    )


class Trajectory(eqx.Module):
    """Saved points of a run, in order of time.

    Row 0 is the start; row -1 is the last state reached, whatever the outcome. Under
    `jax.jit` arrays have a fixed length: rows from `num_saved` on repeat the last one.

    Attributes:
        ts: times: flow time, or optimiser steps (see `time_unit`).
        models: parameters in their own structure, every leaf with a leading time axis;
            two rows only (first and last) when the run was asked not to keep models.
        losses: objective at the saved points (nats for the losses of this package).
        grad_norms: Euclidean norm of the gradient at the saved points.
        observables: what `observe` returned, leading time axis; None without it.
        outcome: how the run ended.
        num_saved: number of rows that are saved points.
        loss_rise: largest rise of the loss between neighbouring rows beyond what the
            error tolerance allows there; not positive in a healthy run.
        stats: counts of solver work.
        settings: names and numbers that reproduce the run.
        time_unit: "flow time" or "steps".
    """

    ts: Float[Array, "*batch t"]
    models: Params
    losses: Float[Array, "*batch t"]
    grad_norms: Float[Array, "*batch t"]
    observables: PyTree
    outcome: Outcome
    num_saved: Int[Array, "*batch"]
    loss_rise: Float[Array, "*batch"]
    stats: dict[str, Any]
    settings: dict[str, Any] = eqx.field(static=True)
    time_unit: str = eqx.field(static=True, default="flow time")

    @property
    def succeeded(self) -> Bool[Array, "*batch"]:
        """Whether the run ended as asked: at t1, or by its stop condition."""
        return ended_as_asked(self.outcome)

    @property
    def final(self) -> Params:
        """The last state reached, in the parameters' own structure."""
        return self.model_at(-1)

    def model_at(self, row: int | np.integer | Int[Array, ""]) -> Params:
        """The saved parameters of one row."""
        return jtu.tree_map(lambda leaf: leaf[row], self.models)

    def nearest(self, time: float) -> int:
        """Row whose time is nearest to `time` (concrete runs only)."""
        return int(np.argmin(np.abs(np.asarray(self.ts) - time)))

    def to_xarray(self) -> Any:
        """The run as an `xarray.Dataset` over time (needs the extra `xarray`).

        Variables: `loss`, `grad_norm`, every parameter under its own name, and every
        observable as `observables.<name>`. Dimensions and units are those that models
        and observables declare (`axis_names`, `units`: from a leaf's dotted name), and
        otherwise the leaf's name with the number of the axis. Outcome, counts and
        settings are attributes of the dataset.

        Raises:
            ValueError: if the run is traced, or a batch of runs.
        """
        import xarray

        if _trees.is_traced(self) or self.ts.ndim != 1:
            raise ValueError(
                "to_xarray takes one concrete run; got ts of shape "
                f"{self.ts.shape}{', traced' if _trees.is_traced(self) else ''}."
            )
        time = self.time_unit.replace(" ", "_")
        rows = self.ts.shape[0]
        loss_unit = getattr(self.models, "units", {}).get("loss", "objective")
        variables = {
            "loss": (time, np.asarray(self.losses), {"units": loss_unit}),
            "grad_norm": (
                time,
                np.asarray(self.grad_norms),
                {"units": f"{loss_unit} / parameter"},
            ),
        }
        for tree, prefix in ((self.models, ""), (self.observables, "observables")):
            axes, units = getattr(tree, "axis_names", {}), getattr(tree, "units", {})
            for name, leaf in _trees.named_leaves(tree).items():
                own = name or "parameters"
                # Without its models a run keeps the first and the last alone.
                first = time if leaf.shape[0] == rows else "ends"
                rest = [f"{own}_{axis}" for axis in range(leaf.ndim - 1)]
                full = ".".join(part for part in (prefix, own) if part)
                variables[full] = (
                    (first, *axes.get(name, rest)),
                    np.asarray(leaf),
                    {"units": units.get(name, "parameter" if not prefix else "1")},
                )
        described = {"outcome": str(Outcome[self.outcome]), **self.settings}
        counts = {name: int(value) for name, value in self.stats.items()}
        return xarray.Dataset(
            variables,
            coords={time: (time, np.asarray(self.ts), {"units": self.time_unit})},
            attrs={key: str(value) for key, value in described.items()} | counts,
        )

    def __str__(self) -> str:
        if _trees.is_traced((self.ts, self.losses)) or self.ts.ndim != 1:
            return f"Trajectory(batch or traced, ts {self.ts.shape})"
        last = int(self.num_saved) - 1

        def ends(values: Array, form: str) -> str:
            return f"{float(values[0]):{form}} ... {float(values[last]):{form}}"

        rows = {
            "outcome": Outcome[self.outcome],
            self.time_unit: ends(self.ts, "g"),
            "loss": ends(self.losses, ".8g"),
            "|grad|": ends(self.grad_norms, ".3e"),
            "saved": f"{last + 1} points",
            **self.stats,
            **self.settings,
        }
        return _summary.aligned("Trajectory", rows)


class Thinning(eqx.Module):
    """A bounded buffer of rows that keeps at most one row per bin of path length.

    Path length is measured relative to the size of the parameters, so an escape that
    multiplies them by a constant factor always gets the same number of rows; time
    enters weakly, so that a plateau is not left without any. Bins start at width zero
    (everything is kept) and are widened by doubling whenever the buffer overflows. The
    rule sees only the path, not the solver's steps, so a stability-limited solver and
    a large-step one leave comparable records.
    """

    ts: Float[Array, " capacity"]
    rows: PyTree[Array]
    lengths: Float[Array, " capacity"]
    total: Float[Array, ""]
    count: Int[Array, ""]
    bin_width: Float[Array, ""]

    @classmethod
    def empty(cls, t0: Float[Array, ""], row: PyTree[Array], capacity: int):
        """A buffer of `capacity` rows that holds the start."""
        return cls(
            ts=jnp.full((capacity,), t0),
            rows=jtu.tree_map(
                lambda leaf: jnp.broadcast_to(leaf, (capacity, *leaf.shape)), row
            ),
            lengths=jnp.zeros((capacity,), t0.dtype),
            total=jnp.zeros((), t0.dtype),
            count=jnp.ones((), jnp.int32),
            bin_width=jnp.zeros((), t0.dtype),
        )

    def enlarged(self, capacity: int) -> "Thinning":
        """The same rows in a larger buffer."""
        index = jnp.minimum(jnp.arange(capacity), self.ts.shape[0] - 1)
        return Thinning(
            ts=self.ts[index],
            rows=jtu.tree_map(lambda leaf: leaf[index], self.rows),
            lengths=self.lengths[index],
            total=self.total,
            count=self.count,
            bin_width=self.bin_width,
        )

    def extend(
        self,
        ts: Float[Array, " block"],
        rows: PyTree[Array],
        increments: Float[Array, " block"],
        wanted: Bool[Array, " block"],
    ) -> "Thinning":
        """Append the wanted rows of a block and thin when over capacity.

        Args:
            increments: relative path length from the row before to each row; zero for
                rows that are not there.
        """
        capacity = self.ts.shape[0]
        new_lengths = self.total + jnp.cumsum(increments)
        lengths = jnp.concatenate([self.lengths, new_lengths])
        valid = jnp.concatenate(
            [jnp.arange(capacity, dtype=jnp.int32) < self.count, wanted]
        )

        def keep(width: Float[Array, ""]) -> Bool[Array, " rows"]:
            safe = jnp.where(width > 0, width, 1.0)
            bins = jnp.floor(lengths / safe)
            # Invalid rows lie between the two valid stretches: compare with the last
            # valid bin before each row.
            seen = jax.lax.cummax(jnp.where(valid, bins, -1.0))
            before = jnp.concatenate([jnp.full((1,), -1.0, seen.dtype), seen[:-1]])
            return valid & ((width == 0) | (bins > before))

        def widen(width: Float[Array, ""]) -> Float[Array, ""]:
            smallest = jnp.maximum(new_lengths[-1] / capacity, tiny)
            return jnp.where(width > 0, 2 * width, smallest)

        tiny = jnp.finfo(lengths.dtype).tiny

        bin_width = jax.lax.while_loop(
            lambda width: jnp.sum(keep(width)) > capacity, widen, self.bin_width
        )
        kept = keep(bin_width)
        count = jnp.sum(kept, dtype=jnp.int32)
        order = jnp.argsort(~kept, stable=True)[:capacity]

        def gather(old: Array, new: Array) -> Array:
            return jnp.concatenate([old, new])[order]

        return Thinning(
            ts=gather(self.ts, ts),
            rows=jtu.tree_map(gather, self.rows, rows),
            lengths=lengths[order],
            total=new_lengths[-1],
            count=count,
            bin_width=bin_width,
        )


def repeat_last(
    ts: Float[Array, " rows"], rows: PyTree[Array], count: Int[Array, ""]
) -> tuple[Float[Array, " rows"], PyTree[Array]]:
    """Overwrite the rows from `count` on by row `count - 1`."""
    index = jnp.minimum(jnp.arange(ts.shape[0], dtype=jnp.int32), count - 1)
    return ts[index], jtu.tree_map(lambda leaf: leaf[index], rows)


def trim(run: Trajectory) -> Trajectory:
    """Drop the unused rows of a concrete run; a traced run is returned as it is."""
    if _trees.is_traced(run):
        return run
    count = int(run.num_saved)

    def cut(leaf: Array) -> Array:
        # Through NumPy: slicing a JAX array would compile anew for every length.
        return jax.device_put(np.asarray(leaf)[:count])

    keeps_models = jtu.tree_leaves(run.models)[0].shape[0] == run.ts.shape[0]
    return eqx.tree_at(
        lambda r: (r.ts, r.models, r.losses, r.grad_norms, r.observables),
        run,
        (
            cut(run.ts),
            jtu.tree_map(cut, run.models) if keeps_models else run.models,
            cut(run.losses),
            cut(run.grad_norms),
            jtu.tree_map(cut, run.observables),
        ),
        is_leaf=lambda x: x is None,
    )
