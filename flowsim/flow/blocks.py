"""The block loop: Diffrax in blocks of steps, thinned rows out.

A run is a sequence of `diffrax.diffeqsolve` calls of at most a few hundred steps each,
every one continuing from the solver and controller state of the last. Between blocks
the rows are thinned, the loss is watched, and an interruption keeps what was computed.
Inside `jax.jit` the same block is the body of one `lax.while_loop`.
"""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _trees
from .._types import Params, Scalar
from ..derivatives import value_and_grad_norm
from ..trajectory import Outcome, Thinning
from . import labour
from .compilation import compiled
from .problem import (
    TERM,
    Problem,
    allowed_rise,
    check_objective,
    measure,
    outcome_of,
)
from .rows import HostRows
from .store import Steps, grown, store_numbers, with_rows

_BLOCK_STEPS = 512  # Solver steps between two looks from outside.
_WATCHED_STEPS = 256  # The same where the solver may have to be changed.
_BLOCK_NUMBERS = 2**24  # Numbers in one block of rows: bounds memory for large models.


class _Resumable(diffrax.AbstractAdaptiveStepSizeController[Any, Any]):
    """A step-size controller that also remembers the next step it chose.

    Diffrax returns the controller's state but not the next step, without which a
    continued solve would have to guess its first step anew.
    """

    controller: Any
    rtol: Any
    atol: Any
    norm: Any

    def wrap(self, direction):
        return _Resumable(
            self.controller.wrap(direction), self.rtol, self.atol, self.norm
        )

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        t_next, state = self.controller.init(
            terms, t0, t1, y0, dt0, args, func, error_order
        )
        return t_next, (state, _next_step(state, t_next - t0))

    def adapt_step_size(
        self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state
    ):
        keep, next_t0, next_t1, jump, state, result = self.controller.adapt_step_size(
            t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state[0]
        )
        step = _next_step(state, next_t1 - next_t0)
        return keep, next_t0, next_t1, jump, (state, step), result


def _next_step(state: Any, difference: Scalar) -> Scalar:
    """The step a controller chose, exactly where it says so itself."""
    return getattr(state, "next_step", difference)


def _resumable(problem: Problem) -> _Resumable:
    norm: Any = getattr(problem.controller, "norm", None)
    return _Resumable(problem.controller, problem.rtol, problem.atol, norm)


class Blocks(eqx.Module):
    """A run between two blocks."""

    t0: Scalar
    t: Scalar
    y: Params
    dt: Scalar
    solver_state: PyTree
    controller_state: PyTree
    loss: Scalar
    grad_norm: Scalar
    outcome: Outcome
    done: Bool[Array, ""]
    num_steps: Int[Array, ""]
    num_accepted: Int[Array, ""]


@eqx.filter_jit
def _start(
    problem: Problem, y0: Params, t0: Scalar, t1: Scalar
) -> tuple[Blocks, PyTree[Array]]:
    """The state before the first block, still without a store, and row 0."""
    check_objective(problem.objective, y0)
    solver, controller = problem.solver, _resumable(problem)
    order = solver.error_order(TERM)
    t_next, controller_state = controller.init(
        TERM, t0, t1, y0, None, problem.objective, solver.func, order
    )
    loss, grad_norm = value_and_grad_norm(problem.objective, y0)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    t_next = jnp.where(finite, jnp.minimum(t_next, t1), t1)
    solver_state = solver.init(TERM, t0, t_next, y0, problem.objective)
    row = y0 if problem.keep_models else measure(problem, y0)
    carry = Blocks(
        t0=t0,
        t=t0,
        y=y0,
        dt=t_next - t0,
        solver_state=solver_state,
        controller_state=controller_state,
        loss=loss,
        grad_norm=grad_norm,
        outcome=Outcome.where(finite, Outcome.max_steps_reached, Outcome.not_finite),
        done=~finite,
        num_steps=jnp.zeros((), jnp.int32),
        num_accepted=jnp.zeros((), jnp.int32),
    )
    return _strongly_typed(carry), row


def _strongly_typed(carry: Blocks) -> Blocks:
    """Turn Python scalars and weak types into arrays.

    Diffrax leaves some in its initial states; the second block would compile anew.
    """

    def strong(leaf):
        if eqx.is_array_like(leaf):
            array = jnp.asarray(leaf)
            return jax.lax.convert_element_type(array, array.dtype)
        return leaf

    return jtu.tree_map(strong, carry)


def _advance(
    problem: Problem,
    carry: Blocks,
    t1: Scalar,
    block: int,
    every: int | None,
) -> tuple[Blocks, Steps, PyTree[Array]]:
    """One more block of solver steps, and its rows."""

    def row(t, y, args):
        del t, args
        return y if problem.keep_models else measure(problem, y)

    subs = {
        "path": diffrax.SubSaveAt(steps=1, fn=row),
        "end": diffrax.SubSaveAt(t1=True),
    }
    sol = diffrax.diffeqsolve(
        TERM,
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
    controller_state: Any = sol.controller_state
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
    outcome = outcome_of(sol.result)
    outcome = Outcome.where(ran_out & (accepted == 0), Outcome.step_too_small, outcome)
    outcome = Outcome.where(loss > carry.loss + rise, Outcome.loss_increased, outcome)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    outcome = Outcome.where(finite, outcome, Outcome.not_finite)
    steps = Steps(ts, increments, wanted, accepted)
    carry = Blocks(
        t0=carry.t0,
        t=t,
        y=y,
        dt=controller_state[1],
        solver_state=sol.solver_state,
        controller_state=controller_state,
        loss=loss,
        grad_norm=grad_norm,
        outcome=outcome,
        done=outcome != Outcome.max_steps_reached,
        num_steps=num_steps,
        num_accepted=carry.num_accepted + accepted,
    )
    return _strongly_typed(carry), steps, rows


_advance_jit = compiled(_advance)


def _path_increments(
    problem: Problem,
    carry: Blocks,
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
    start = carry.t0
    elapsed = jnp.where(before > start, (ts - before) / (ts - start), 1.0)
    increments = moved + 0.01 * elapsed
    return jnp.where(
        jnp.arange(ts.shape[0], dtype=jnp.int32) < accepted, increments, 0.0
    )


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
) -> tuple[Blocks, Thinning, HostRows | None]:
    """Integrate and keep accepted steps: every n-th, or at most so many by path.

    Returns:
        The state at the end; the record, which holds the rows if traced, and otherwise
        their numbers; and then the rows.
    """
    carry, first = _start(problem, y0, t0, t1)
    # Asked of the result: the objective may close over a traced value.
    traced = _trees.is_traced(carry)
    num = _trees.num_params(y0)
    longest = _WATCHED_STEPS if problem.may_recycle else _BLOCK_STEPS
    block = max(1, min(longest, _BLOCK_NUMBERS // num, max_steps))
    num_blocks = -(-max_steps // block)
    block = -(-max_steps // num_blocks)
    if every is None:
        capacity = at_most + 1
    else:
        capacity = max_steps // every + 2 if traced else 2 * block + 1
    limit = num_blocks * block
    stored = first if traced else jnp.zeros((), jnp.int32)
    store = Thinning.empty(carry.t, stored, capacity)
    if not traced:
        rows = HostRows(first)
        carry, store = _drive(
            problem, carry, store, rows, t1, block, limit, every, progress
        )
        return carry, store, rows

    def unfinished(state: tuple[Blocks, Thinning]) -> Bool[Array, ""]:
        return ~state[0].done & (state[0].num_steps < limit)

    def advance(state: tuple[Blocks, Thinning]) -> tuple[Blocks, Thinning]:
        carry, steps, rows = _advance(problem, state[0], t1, block, every)
        return carry, with_rows(state[1], steps, rows)

    return *jax.lax.while_loop(unfinished, advance, (carry, store)), None


def _drive(
    problem: Problem,
    carry: Blocks,
    store: Thinning,
    rows: HostRows,
    t1: Scalar,
    block: int,
    limit: int,
    every: int | None,
    progress: bool,
) -> tuple[Blocks, Thinning]:
    """The loop over blocks outside `jit`: progress, growth, interruption."""
    from tqdm import tqdm  # Not needed to import flowsim.

    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=1.0, disable=not progress, bar_format=layout) as bar:
        try:
            while not bool(carry.done) and int(carry.num_steps) < limit:
                if every is not None:
                    store = grown(store, block)
                before = carry
                after, steps, new = _advance_jit(problem, carry, t1, block, every)
                rows.append(new, int(steps.count))
                numbered = store_numbers(store, steps, before.num_accepted)
                carry, store = after, numbered
                if rows.num_held > 2 * store.ts.shape[0]:
                    rows.keep(np.asarray(store.rows))
                if problem.may_recycle and not labour.recycles(carry):
                    if labour.is_laborious(before, carry):
                        problem, carry = labour.turn_to_recycling(problem, carry)
                        carry = _strongly_typed(carry)
                if progress:
                    bar.n = float((carry.t - carry.t0) / (t1 - carry.t0))
                    bar.set_postfix_str(
                        f"t {float(carry.t):.4g}, loss {float(carry.loss):.6f}, "
                        f"{int(carry.num_steps)} steps"
                    )
        except KeyboardInterrupt:
            carry = eqx.tree_at(lambda c: c.outcome, carry, Outcome.interrupted)
    return carry, store
