"""The loop: flows in slots, one step of each in a round, the next one when one ends."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optimistix as optx
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._types import Objective, Params, Scalar
from ..derivatives import value_and_grad_norm
from ..flow.problem import TERM
from ..solvers import BDFController, NewtonCG, SymmetricBDF
from ..trajectory import Outcome


class Settings(eqx.Module):
    """What all flows share, or have one each of (`atols`, stacked objectives)."""

    objective: Objective
    models: Params
    rtol: Scalar
    atols: Float[Array, " N"]
    ts: Float[Array, " times"]
    t0: Scalar
    t1: Scalar
    max_steps: Int[Array, ""]
    stacked: bool = eqx.field(static=True)

    @property
    def num_flows(self) -> int:
        return self.atols.shape[0]

    def objective_of(self, number: Int[Array, ""]) -> Objective:
        return lane_of(self.objective, number) if self.stacked else self.objective

    def methods_of(self, number: Int[Array, ""]) -> tuple[SymmetricBDF, BDFController]:
        rtol, atol = self.rtol, self.atols[number]
        root_finder = NewtonCG(rtol, atol, optx.rms_norm)
        return SymmetricBDF(root_finder=root_finder), BDFController(rtol, atol)


class _Flow(eqx.Module):
    """The state of one flow between two steps."""

    number: Int[Array, ""]
    t: Scalar
    end: Scalar
    y: Params
    solver_state: PyTree
    controller_state: PyTree
    row: Int[Array, ""]
    num_steps: Int[Array, ""]
    num_accepted: Int[Array, ""]
    outcome: Outcome
    done: Bool[Array, ""]


class Results(eqx.Module):
    """What the flows that have ended left behind, leading axis N."""

    rows: Params
    ts: Float[Array, "N rows"]
    count: Int[Array, " N"]
    final: Params
    t_end: Float[Array, " N"]
    outcome: Outcome
    stats: dict[str, Int[Array, " N"]]


@eqx.filter_jit
def solve_in_slots(settings: Settings, num_slots: int) -> Results:
    """All flows, through the slots."""
    num = settings.num_flows

    def unfinished(carry):
        return jnp.any(carry[0].number < num)

    def turn(carry):
        flows, results, waiting = carry
        # A loop within the loop, and no branch: a branch would copy the results.
        flows, results = jax.lax.while_loop(
            lambda carry: ~jnp.any(_ended(settings, carry[0])),
            lambda carry: _round(settings, *carry),
            (flows, results),
        )
        return _replace(settings, results, flows, waiting)

    numbers = jnp.arange(num_slots, dtype=jnp.int32)
    flows = jax.vmap(lambda number: _begin(settings, number))(numbers)
    waiting = jnp.asarray(num_slots, jnp.int32)
    carry = flows, _no_results(settings), waiting
    return jax.lax.while_loop(unfinished, turn, carry)[1]


def _ended(settings: Settings, flows: _Flow) -> Bool[Array, " slots"]:
    """Which slots hold a flow that has ended."""
    return flows.done & (flows.number < settings.num_flows)


def _round(settings: Settings, flows: _Flow, results: Results) -> tuple[_Flow, Results]:
    """One step in every slot."""
    flows, pieces = jax.vmap(lambda flow: _step(settings, flow))(flows)
    return _keep_rows(settings, results, flows, pieces)


def _begin(settings: Settings, number: Int[Array, ""]) -> _Flow:
    """The flow of that number at its start; beyond the last, one that is done."""
    exists = number < settings.num_flows
    chosen = jnp.minimum(number, settings.num_flows - 1)
    objective, y = settings.objective_of(chosen), lane_of(settings.models, chosen)
    solver, controller = settings.methods_of(chosen)
    t0, t1 = settings.t0, settings.t1
    end, controller_state = controller.init(
        TERM, t0, t1, y, None, objective, solver.func, None
    )
    loss, grad_norm = value_and_grad_norm(objective, y)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    end = jnp.where(finite, jnp.minimum(end, t1), t1)
    zero = jnp.zeros((), jnp.int32)
    flow = _Flow(
        number=number,
        t=t0,
        end=end,
        y=y,
        solver_state=solver.init(TERM, t0, end, y, objective),
        controller_state=controller_state,
        row=zero,
        num_steps=zero,
        num_accepted=zero,
        outcome=Outcome.where(finite, Outcome.max_steps_reached, Outcome.not_finite),
        done=~(exists & finite),
    )
    strong = jax.lax.convert_element_type
    return jtu.tree_map(lambda x: strong(x, x.dtype) if eqx.is_array(x) else x, flow)


def _step(settings: Settings, flow: _Flow) -> tuple[_Flow, tuple[Any, Any]]:
    """One step, and the piece of the solution: the interpolation, and whether it is."""
    chosen = jnp.minimum(flow.number, settings.num_flows - 1)
    objective = settings.objective_of(chosen)
    solver, controller = settings.methods_of(chosen)
    y1, report, dense, solver_state, result = solver.step(
        TERM, flow.t, flow.end, flow.y, objective, flow.solver_state, False
    )
    # As Diffrax does: what is not a number is too large an error.
    report = jtu.tree_map(lambda x: jnp.where(jnp.isnan(x), jnp.inf, x), report)
    keep, t, end, _, controller_state, verdict = controller.adapt_step_size(
        flow.t, flow.end, flow.y, y1, objective, report, None, flow.controller_state
    )
    results: Any = diffrax.RESULTS
    keep = keep & ~flow.done
    num_steps = flow.num_steps + 1
    arrived = keep & (t >= settings.t1)
    stuck = (verdict == results.dt_min_reached) & ~arrived
    failed = (verdict == results.breakdown) | (result == results.breakdown)
    outcome = Outcome.where(arrived, Outcome.reached_t1, Outcome.max_steps_reached)
    outcome = Outcome.where(stuck, Outcome.step_too_small, outcome)
    outcome = Outcome.where(failed, Outcome.solver_failed, outcome)
    over = arrived | stuck | failed | (num_steps >= settings.max_steps)
    # A last step that would be a crumb is joined to the one before.
    crumb = settings.t1 - end < 0.01 * (end - t)
    end = jnp.where((end > settings.t1) | crumb, settings.t1, end)
    after = _Flow(
        number=flow.number,
        t=t,
        end=end,
        # A rejected step leaves the state and the differences as they were.
        y=_choose(keep, y1, flow.y),
        solver_state=_choose(keep, solver_state, flow.solver_state),
        controller_state=controller_state,
        row=flow.row,
        num_steps=num_steps,
        num_accepted=flow.num_accepted + keep.astype(jnp.int32),
        outcome=outcome,
        done=over,
    )
    # A flow that is done is left alone; its arrays have been already.
    after = _choose_small(~flow.done, after, flow)
    piece = solver.interpolation_cls(t0=flow.t, t1=flow.end, **dense)
    return after, (piece, keep)


def _keep_rows(
    settings: Settings, results: Results, flows: _Flow, pieces: tuple[Any, Any]
) -> tuple[_Flow, Results]:
    """Write the times that the last steps passed, of every slot one at a time."""
    times = settings.ts.shape[0]
    if times == 0:
        return flows, results
    piece, kept = pieces

    def due(row):
        return kept & (row < times) & (settings.ts[row] <= flows.t)

    def write(carry):
        results, row = carry
        now = due(row)
        t = settings.ts[row]
        values = jax.vmap(lambda piece, t: piece.evaluate(t))(piece, t)
        # Rows of the slots that have none fall outside and are dropped.
        place = jnp.where(now, flows.number, settings.num_flows), row + 1
        rows, all_ts = jtu.tree_map(
            lambda old, new: old.at[place].set(new, mode="drop"),
            (results.rows, results.ts),
            (values, t),
        )
        results = eqx.tree_at(lambda r: (r.rows, r.ts), results, (rows, all_ts))
        return results, row + now.astype(row.dtype)

    results, row = jax.lax.while_loop(
        lambda carry: jnp.any(due(carry[1])), write, (results, flows.row)
    )
    return eqx.tree_at(lambda f: f.row, flows, row), results


def _replace(
    settings: Settings,
    results: Results,
    flows: _Flow,
    waiting: Int[Array, ""],
) -> tuple[_Flow, Results, Int[Array, ""]]:
    """Put away the flows that have ended, and begin others in their slots."""
    ended = _ended(settings, flows)
    place = jnp.where(ended, flows.number, settings.num_flows)
    counters = flows.controller_state
    stats = {
        "num_steps": flows.num_steps,
        "num_accepted_steps": flows.num_accepted,
        "num_evaluations": counters.num_evaluations,
        "num_products": counters.num_products,
    }
    old = results.final, results.t_end, results.count, results.outcome, results.stats
    new = flows.y, flows.t, flows.row, flows.outcome, stats
    final, t_end, count, outcome, stats = jtu.tree_map(
        lambda a, b: a.at[place].set(b.astype(a.dtype), mode="drop"), old, new
    )
    results = Results(
        rows=results.rows,
        ts=results.ts,
        count=count,
        final=final,
        t_end=t_end,
        outcome=outcome,
        stats=stats,
    )
    next_numbers = waiting + jnp.cumsum(ended, dtype=jnp.int32) - 1
    fresh = jax.vmap(lambda number: _begin(settings, number))(next_numbers)
    flows = jax.vmap(_choose)(ended, fresh, flows)
    return flows, results, waiting + jnp.sum(ended, dtype=jnp.int32)


def _no_results(settings: Settings) -> Results:
    num, num_rows = settings.num_flows, settings.ts.shape[0] + 2
    zeros = jnp.zeros(num, jnp.int32)
    names = ("num_steps", "num_accepted_steps", "num_evaluations", "num_products")
    return Results(
        rows=jtu.tree_map(
            lambda leaf: jnp.repeat(leaf[:, None], num_rows, 1), settings.models
        ),
        ts=jnp.full((num, num_rows), settings.t0),
        count=zeros,
        final=settings.models,
        t_end=jnp.full(num, settings.t0),
        outcome=jax.vmap(lambda _: Outcome.max_steps_reached)(zeros),
        stats={name: zeros for name in names},
    )


def lane_of(tree: PyTree, number: Int[Array, ""]) -> PyTree:
    """One entry of every array with a leading axis."""
    return jtu.tree_map(lambda x: x[number] if eqx.is_array(x) else x, tree)


def _choose(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jtu.tree_map(lambda a, b: jnp.where(condition, a, b), new, old)


def _choose_small(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """The same for scalars; arrays stay those of `new`."""
    return jtu.tree_map(
        lambda a, b: jnp.where(condition, a, b) if a.ndim == 0 else a, new, old
    )
