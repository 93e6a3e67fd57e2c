"""From the end of a run to its trajectory: rows measured, the fall of the loss judged.

Twice: for a traced run, whose rows are in a buffer of fixed length, and for a concrete
one, whose rows are on the host.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float

from .. import _trees
from .._types import Params, Scalar
from ..trajectory import Outcome, Thinning, Trajectory, ended_as_asked, repeat_last
from .blocks import Blocks
from .problem import (
    Measurement,
    Path,
    Problem,
    allowed_rise,
    measure,
    measure_one,
    measure_rows,
    restore,
    solver_statistics,
)
from .rows import HostRows, examine, padded


def finish(problem: Problem, carry: Blocks, store: Thinning) -> Path:
    """The rows of a traced run, with the last state reached as the last of them."""
    new = carry.t > store.ts[store.count - 1]
    row = carry.y if problem.keep_models else measure(problem, carry.y)
    index = jnp.where(new, store.count, store.count - 1)

    def pad(rows: Array, value: Array) -> Array:
        return jnp.concatenate([rows, rows[-1:]]).at[index].set(value)

    return Path(
        ts=pad(store.ts, carry.t),
        rows=jtu.tree_map(pad, store.rows, row),
        count=index + 1,
        t_end=carry.t,
        y_end=carry.y,
        outcome=carry.outcome,
        stats=statistics(carry),
    )


def finish_on_host(
    problem: Problem, carry: Blocks, store: Thinning, rows: HostRows
) -> Path:
    """The same for a concrete run: NumPy arrays without unused rows."""
    count = int(store.count)
    ts = np.asarray(store.ts)[:count]
    kept = rows.gather(np.asarray(store.rows)[:count])
    if float(carry.t) > ts[-1]:
        row = carry.y if problem.keep_models else measure_one(problem, carry.y)
        ts = np.append(ts, np.asarray(carry.t))
        kept = jtu.tree_map(
            lambda rows, last: np.concatenate([rows, np.asarray(last)[None]]), kept, row
        )
    return Path(
        ts=ts,
        rows=kept,
        count=jnp.asarray(len(ts), jnp.int32),
        t_end=carry.t,
        y_end=carry.y,
        outcome=carry.outcome,
        stats=statistics(carry),
    )


def statistics(carry: Blocks) -> dict[str, Any]:
    """Counts of solver work."""
    return {
        "num_steps": carry.num_steps,
        "num_accepted_steps": carry.num_accepted,
        "num_rejected_steps": carry.num_steps - carry.num_accepted,
        **solver_statistics(carry.controller_state[0], carry.solver_state),
    }


@eqx.filter_jit
def as_trajectory(
    problem: Problem,
    start: Params,
    path: Path,
    gradient_stop: bool,
    differentiable: bool,
) -> Trajectory:
    """Measure the saved rows and check that the loss fell along them."""
    ts, rows = repeat_last(path.ts, path.rows, path.count)
    if problem.keep_models:
        models = rows
        measured = measure_rows(problem, rows, path.count, differentiable)
    else:
        measured = rows
        models = jtu.tree_map(
            lambda first, last: jnp.stack([first, last]), start, path.y_end
        )
    return _trajectory(
        problem,
        start,
        path,
        gradient_stop,
        ts,
        jax.vmap(lambda y: restore(problem, y))(models),
        measured,
        (measured.loss, measured.grad_norm),
    )


def from_host(
    problem: Problem, start: Params, path: Path, gradient_stop: bool
) -> Trajectory:
    """The same for rows on the host, in programs that do not depend on their number."""
    if problem.keep_models:
        measured, models = examine(problem, path.rows)
    else:
        measured = path.rows
        ends = jtu.tree_map(lambda *rows: jnp.stack(rows), start, path.y_end)
        models = _restored(problem, ends)
    judged = padded(measured.loss), padded(measured.grad_norm)
    ts, models, measured = jax.device_put((path.ts, models, measured))
    return _trajectory(
        problem, start, path, gradient_stop, ts, models, measured, judged
    )


def _trajectory(
    problem: Problem,
    start: Params,
    path: Path,
    gradient_stop: bool,
    ts: Any,
    models: Params,
    measured: Measurement,
    judged: tuple[Float[Array, " rows"], Float[Array, " rows"]],
) -> Trajectory:
    """Judge losses and gradient norms, and put everything into its place."""
    outcome, loss_rise = _judge(
        problem, start, path.y_end, *judged, path.outcome, gradient_stop
    )
    return Trajectory(
        ts=ts,
        models=models,
        losses=measured.loss,
        grad_norms=measured.grad_norm,
        observables=measured.observables,
        outcome=outcome,
        num_saved=path.count,
        loss_rise=loss_rise,
        stats=path.stats,
        settings={},
    )


@eqx.filter_jit
def _restored(problem: Problem, rows: Params) -> Params:
    return jax.vmap(lambda y: restore(problem, y))(rows)


@eqx.filter_jit
def _judge(
    problem: Problem,
    start: Params,
    end: Params,
    losses: Float[Array, " rows"],
    grad_norms: Float[Array, " rows"],
    outcome: Outcome,
    gradient_stop: bool,
) -> tuple[Outcome, Scalar]:
    """The outcome, with what the losses along the rows say about it; largest rise."""
    allowed = allowed_rise(
        losses[:-1],
        grad_norms[:-1],
        jnp.maximum(_trees.norm(start), _trees.norm(end)),
        _trees.num_params(start),
        problem.rtol,
        problem.atol,
    )
    loss_rise = jnp.max(losses[1:] - losses[:-1] - allowed)
    if gradient_stop:
        outcome = Outcome.where(outcome == Outcome.stopped, Outcome.stationary, outcome)
    unaware = ended_as_asked(outcome) | (outcome == Outcome.max_steps_reached)
    outcome = Outcome.where(unaware & (loss_rise > 0), Outcome.loss_increased, outcome)
    return outcome, loss_rise
