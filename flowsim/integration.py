"""The integration behind `flowsim.flow`: Diffrax in blocks, rows out.

A run is a sequence of `diffrax.diffeqsolve` calls of at most a few hundred steps each,
every one continuing from the solver and controller state of the last. Between blocks
the rows are thinned, the loss is watched, and an interruption keeps what was computed.
Inside `jax.jit` the same block is the body of one `lax.while_loop`.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Float, Int, PyTree
from tqdm import tqdm

from . import _trees
from ._types import Objective, Params, Scalar
from .derivatives import gradient, value_and_grad_norm
from .trajectory import Outcome, Thinning

_BLOCK_STEPS = 512  # Solver steps between two looks from outside.
_BLOCK_NUMBERS = 2**24  # Numbers in one block of rows: bounds memory for large models.


class Problem(eqx.Module):
    """Everything that defines a run, except its start and its times."""

    objective: Objective
    solver: diffrax.AbstractSolver
    controller: diffrax.AbstractStepSizeController
    event: diffrax.Event | None
    observe: Callable[[Any], PyTree[Array]] | None
    rtol: Scalar
    atol: Scalar
    keep_models: bool = eqx.field(static=True)


class Measurement(eqx.Module):
    """What is known at one saved point besides the parameters."""

    loss: Scalar
    grad_norm: Scalar
    observables: PyTree


class Path(eqx.Module):
    """Rows of a run: a fixed number, of which `count` are in use."""

    ts: Float[Array, " rows"]
    rows: PyTree[Array]
    count: Int[Array, ""]
    t_end: Scalar
    y_end: Params
    outcome: Outcome
    stats: dict[str, Any]


def descent(t: Scalar, y: Params, objective: Objective) -> Params:
    """The vector field -grad L of the flow, in Diffrax's argument order."""
    del t
    return _trees.scale(-1.0, gradient(objective, y))


def measure(problem: Problem, y: Params) -> Measurement:
    """Loss, gradient norm and observables at one point."""
    loss, grad_norm = value_and_grad_norm(problem.objective, y)
    observables = None if problem.observe is None else problem.observe(y)
    return Measurement(loss=loss, grad_norm=grad_norm, observables=observables)


def allowed_rise(
    loss: Scalar, grad_norm: Scalar, size: Scalar, num: int, rtol: Scalar, atol: Scalar
) -> Scalar:
    """How far the loss may rise between neighbouring rows by integration error alone.

    First order in the error |d theta| of one step, plus a relative rtol of the loss, a
    quadratic term for minima whose loss is zero, and round-off.

    Args:
        size: Euclidean norm of the parameters.
        num: number of parameters.
    """
    error = rtol * size + atol * num**0.5
    round_off = 16 * jnp.finfo(loss.dtype).eps
    relative = jnp.maximum(rtol.astype(loss.dtype), round_off)
    error = error.astype(loss.dtype)
    return relative * jnp.abs(loss) + grad_norm * error + error**2


class _Resumable(diffrax.AbstractAdaptiveStepSizeController[Any, Any]):
    """A step-size controller that also remembers the next step it chose.

    Diffrax returns the controller's state but not the next step, without which a
    continued solve would have to guess its first step anew.
    """

    controller: Any
    rtol: Any
    atol: Any
    norm: Callable

    def wrap(self, direction):
        return _Resumable(
            self.controller.wrap(direction), self.rtol, self.atol, self.norm
        )

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        t_next, state = self.controller.init(
            terms, t0, t1, y0, dt0, args, func, error_order
        )
        return t_next, (state, t_next - t0)

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        keep, next_t0, next_t1, jump, state, result = self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state[0]
        )
        return keep, next_t0, next_t1, jump, (state, next_t1 - next_t0), result


def _resumable(problem: Problem) -> _Resumable:
    norm = getattr(problem.controller, "norm", diffrax.PIDController(1e-3, 1e-6).norm)
    return _Resumable(problem.controller, problem.rtol, problem.atol, norm)


class _Carry(eqx.Module):
    t: Scalar
    y: Params
    dt: Scalar
    solver_state: PyTree
    controller_state: PyTree
    store: Thinning
    loss: Scalar
    grad_norm: Scalar
    outcome: Outcome
    done: Bool[Array, ""]
    num_steps: Int[Array, ""]
    num_accepted: Int[Array, ""]


_TERM = diffrax.ODETerm(descent)


@eqx.filter_jit
def _start(problem: Problem, y0: Params, t0: Scalar, t1: Scalar) -> _Carry:
    solver, controller = problem.solver, _resumable(problem)
    order = solver.error_order(_TERM)
    t_next, controller_state = controller.init(
        _TERM, t0, t1, y0, None, problem.objective, solver.func, order
    )
    loss, grad_norm = value_and_grad_norm(problem.objective, y0)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    t_next = jnp.where(finite, jnp.minimum(t_next, t1), t1)
    solver_state = solver.init(_TERM, t0, t_next, y0, problem.objective)
    row = y0 if problem.keep_models else measure(problem, y0)
    return _Carry(
        t=t0,
        y=y0,
        dt=t_next - t0,
        solver_state=solver_state,
        controller_state=controller_state,
        store=Thinning.empty(t0, row, 1),
        loss=loss,
        grad_norm=grad_norm,
        outcome=Outcome.where(finite, Outcome.max_steps_reached, Outcome.not_finite),
        done=~finite,
        num_steps=jnp.zeros((), jnp.int32),
        num_accepted=jnp.zeros((), jnp.int32),
    )


def _advance(
    problem: Problem, carry: _Carry, t1: Scalar, block: int, every: int | None
) -> _Carry:
    """One more block of solver steps."""

    def row(t, y, args):
        del t, args
        return y if problem.keep_models else measure(problem, y)

    subs = {
        "path": diffrax.SubSaveAt(steps=1, fn=row),
        "end": diffrax.SubSaveAt(t1=True),
    }
    sol = diffrax.diffeqsolve(
        _TERM,
        problem.solver,
        carry.t,
        t1,
        carry.dt,
        carry.y,
        problem.objective,
        saveat=diffrax.SaveAt(subs=subs, solver_state=True, controller_state=True),
        stepsize_controller=_resumable(problem),
        adjoint=diffrax.ForwardMode(),
        event=problem.event,
        max_steps=block,
        throw=False,
        solver_state=carry.solver_state,
        controller_state=carry.controller_state,
    )
    assert sol.ts is not None and sol.ys is not None
    t, y = sol.ts["end"][0], jtu.tree_map(lambda leaf: leaf[0], sol.ys["end"])
    ts, rows = sol.ts["path"], sol.ys["path"]
    accepted = jnp.minimum(sol.stats["num_accepted_steps"], block).astype(jnp.int32)
    index = jnp.arange(block, dtype=jnp.int32)
    wanted = index < accepted
    if every is not None:
        wanted &= (carry.num_accepted + index + 1) % every == 0
    increments = _path_increments(problem, carry, ts, rows, accepted)
    loss, grad_norm = value_and_grad_norm(problem.objective, y)
    num_steps = carry.num_steps + sol.stats["num_steps"].astype(jnp.int32)
    num = _trees.num_params(y)
    rise = allowed_rise(
        carry.loss, carry.grad_norm, _trees.norm(y), num, problem.rtol, problem.atol
    )
    ran_out = sol.result == diffrax.RESULTS.max_steps_reached
    outcome = _outcome_of(sol.result)
    outcome = Outcome.where(
        ran_out & (accepted == 0), Outcome.step_too_small, outcome
    )
    outcome = Outcome.where(loss > carry.loss + rise, Outcome.loss_increased, outcome)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    outcome = Outcome.where(finite, outcome, Outcome.not_finite)
    return _Carry(
        t=t,
        y=y,
        dt=sol.controller_state[1],
        solver_state=sol.solver_state,
        controller_state=sol.controller_state,
        store=carry.store.extend(ts, rows, increments, wanted),
        loss=loss,
        grad_norm=grad_norm,
        outcome=outcome,
        done=outcome != Outcome.max_steps_reached,
        num_steps=num_steps,
        num_accepted=carry.num_accepted + accepted,
    )


_advance_jit = eqx.filter_jit(_advance)


def _outcome_of(result: diffrax.RESULTS) -> Outcome:
    outcome = Outcome.where(
        result == diffrax.RESULTS.successful, Outcome.reached_t1, Outcome.solver_failed
    )
    for theirs, ours in (
        (diffrax.RESULTS.max_steps_reached, Outcome.max_steps_reached),
        (diffrax.RESULTS.event_occurred, Outcome.stopped),
        (diffrax.RESULTS.dt_min_reached, Outcome.step_too_small),
    ):
        outcome = Outcome.where(result == theirs, ours, outcome)
    return outcome


def _path_increments(
    problem: Problem,
    carry: _Carry,
    ts: Float[Array, " block"],
    rows: PyTree[Array],
    accepted: Int[Array, ""],
) -> Float[Array, " block"]:
    """Relative path length of each step, with a weak share of logarithmic time.

    A hundredth of log time keeps some hundred rows on a plateau of any length without
    competing with a burst.
    """
    before = jnp.concatenate([carry.t[None], ts[:-1]])
    if problem.keep_models:
        previous = jtu.tree_map(
            lambda first, leaf: jnp.concatenate([first[None], leaf[:-1]]), carry.y, rows
        )
        moved = jax.vmap(_trees.norm)(_trees.subtract(rows, previous))
        size = jax.vmap(_trees.norm)(rows)
    else:
        speed = jnp.concatenate([carry.grad_norm[None], rows.grad_norm[:-1]])
        moved = (ts - before).astype(speed.dtype) * 0.5 * (speed + rows.grad_norm)
        size = jnp.broadcast_to(_trees.norm(carry.y), moved.shape)
    moved = (moved / jnp.where(size > 0, size, 1.0)).astype(ts.dtype)
    start = carry.store.ts[0]
    elapsed = jnp.where(before > start, (ts - before) / (ts - start), 1.0)
    increments = moved + 0.01 * elapsed
    return jnp.where(jnp.arange(ts.shape[0], dtype=jnp.int32) < accepted, increments, 0.0)


def solve_in_blocks(
    problem: Problem,
    y0: Params,
    t0: Scalar,
    t1: Scalar,
    *,
    at_most: int,
    every: int | None,
    max_steps: int,
    progress: bool,
) -> Path:
    """Integrate and keep accepted steps: every n-th, or at most so many by path."""
    carry = _start(problem, y0, t0, t1)
    # Asked of the result: the objective may close over a traced value.
    traced = _trees.is_traced(carry)
    num = _trees.num_params(y0)
    block = max(1, min(_BLOCK_STEPS, _BLOCK_NUMBERS // num, max_steps))
    num_blocks = -(-max_steps // block)
    block = -(-max_steps // num_blocks)
    if every is None:
        capacity = at_most + 1
    else:
        capacity = max_steps // every + 2 if traced else 2 * block + 1
    carry = eqx.tree_at(lambda c: c.store, carry, carry.store.enlarged(capacity))
    limit = num_blocks * block
    if traced:
        carry = jax.lax.while_loop(
            lambda c: ~c.done & (c.num_steps < limit),
            lambda c: _advance(problem, c, t1, block, every),
            carry,
        )
    else:
        carry = _drive(problem, carry, t0, t1, block, limit, every, progress)
    store = carry.store
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
        stats={
            "num_steps": carry.num_steps,
            "num_accepted_steps": carry.num_accepted,
            "num_rejected_steps": carry.num_steps - carry.num_accepted,
            **solver_statistics(carry.solver_state),
        },
    )


def _drive(
    problem: Problem,
    carry: _Carry,
    t0: Scalar,
    t1: Scalar,
    block: int,
    limit: int,
    every: int | None,
    progress: bool,
) -> _Carry:
    """The loop over blocks outside `jit`: progress, growth, interruption."""
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=1.0, disable=not progress, bar_format=layout) as bar:
        try:
            while not bool(carry.done) and int(carry.num_steps) < limit:
                if every is not None:
                    carry = _grow(carry, block)
                carry = _advance_jit(problem, carry, t1, block, every)
                if progress:
                    bar.n = float((carry.t - t0) / (t1 - t0))
                    bar.set_postfix_str(
                        f"t {float(carry.t):.4g}, loss {float(carry.loss):.6f}, "
                        f"{int(carry.num_steps)} steps"
                    )
        except KeyboardInterrupt:
            carry = eqx.tree_at(lambda c: c.outcome, carry, Outcome.interrupted)
    return carry


def _grow(carry: _Carry, block: int) -> _Carry:
    """Double the buffer when the next block might not fit."""
    capacity = carry.store.ts.shape[0]
    if int(carry.store.count) + block <= capacity:
        return carry
    return eqx.tree_at(lambda c: c.store, carry, carry.store.enlarged(2 * capacity))


@eqx.filter_jit
def solve_at_times(
    problem: Problem,
    y0: Params,
    t0: Scalar,
    t1: Scalar,
    ts: Float[Array, " times"],
    *,
    max_steps: int,
    progress: bool,
) -> Path:
    """Integrate in one call and keep t0, the given times and the end."""

    def row(t, y, args):
        del t, args
        return y if problem.keep_models else measure(problem, y)

    subs = {"end": diffrax.SubSaveAt(t1=True)}
    if ts.shape[0] > 0:
        subs["times"] = diffrax.SubSaveAt(ts=ts, fn=row)
    loss, grad_norm = value_and_grad_norm(problem.objective, y0)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    meter = diffrax.TqdmProgressMeter() if progress else diffrax.NoProgressMeter()
    sol = diffrax.diffeqsolve(
        _TERM,
        problem.solver,
        t0,
        t1,
        None,
        y0,
        problem.objective,
        saveat=diffrax.SaveAt(subs=subs, solver_state=True),
        stepsize_controller=problem.controller,
        event=problem.event,
        max_steps=max_steps,
        throw=False,
        progress_meter=meter,
    )
    assert sol.ts is not None and sol.ys is not None
    t_end, y_end = sol.ts["end"][0], jtu.tree_map(lambda x: x[0], sol.ys["end"])
    first = y0 if problem.keep_models else measure(problem, y0)
    last = y_end if problem.keep_models else measure(problem, y_end)
    times, rows = sol.ts.get("times", ts), sol.ys.get("times")
    count = 1 + jnp.sum(times < t_end, dtype=jnp.int32)
    all_ts = jnp.concatenate([t0[None], times, t_end[None]]).at[count].set(t_end)

    def join(start: Array, middle: Array | None, end: Array) -> Array:
        parts = [start[None]] + ([] if middle is None else [middle]) + [end[None]]
        return jnp.concatenate(parts).at[count].set(end)

    if rows is None:
        all_rows = jtu.tree_map(lambda a, b: join(a, None, b), first, last)
    else:
        all_rows = jtu.tree_map(join, first, rows, last)
    outcome = _outcome_of(sol.result)
    outcome = Outcome.where(finite, outcome, Outcome.not_finite)
    return Path(
        ts=all_ts,
        rows=all_rows,
        count=count + 1,
        t_end=t_end,
        y_end=y_end,
        outcome=outcome,
        stats={
            key: sol.stats[key]
            for key in ("num_steps", "num_accepted_steps", "num_rejected_steps")
        }
        | solver_statistics(sol.solver_state),
    )


def solver_statistics(solver_state: PyTree) -> dict[str, Any]:
    """Counters that a solver keeps in its state, if it keeps any."""
    statistics = getattr(solver_state, "statistics", None)
    return {} if statistics is None else dict(statistics)


@eqx.filter_jit
def measure_rows(
    problem: Problem, models: Params, count: Int[Array, ""], differentiable: bool
) -> Measurement:
    """Measure the first `count` rows; later rows repeat row `count - 1`.

    In batches, so that memory stays bounded and no time goes into unused rows.
    """
    rows = jtu.tree_leaves(models)[0].shape[0]
    num = _trees.num_params(models) // rows
    batch = max(1, min(rows, 256, 2**20 // num))
    index = jnp.minimum(jnp.arange(-(-rows // batch) * batch, dtype=jnp.int32), count - 1)
    index = index.reshape(-1, batch)

    def one_batch(which: Int[Array, " batch"]) -> Measurement:
        chosen = jtu.tree_map(lambda leaf: leaf[which], models)
        return jax.vmap(lambda y: measure(problem, y))(chosen)

    if differentiable:
        batches = jax.lax.map(one_batch, index)
    else:
        struct = jax.eval_shape(one_batch, index[0])
        empty = jtu.tree_map(
            lambda s: jnp.zeros((index.shape[0], *s.shape), s.dtype), struct
        )

        def body(i, batches):
            return jtu.tree_map(
                lambda all_, new: all_.at[i].set(new), batches, one_batch(index[i])
            )

        batches = jax.lax.fori_loop(0, (count - 1) // batch + 1, body, empty)
    flat = jtu.tree_map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batches
    )
    last = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), count - 1)
    return jtu.tree_map(lambda leaf: leaf[last], flat)
