"""One Diffrax call that keeps given times, by the solver's dense output."""

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from .._types import Params, Scalar
from ..derivatives import value_and_grad_norm
from ..solvers import SymmetricBDF
from ..trajectory import Outcome
from .problem import (
    TERM,
    Path,
    Problem,
    check_objective,
    measure,
    outcome_of,
    solver_statistics,
)


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

    check_objective(problem.objective, y0)

    def row(t, y, args):
        del t, args
        return y if problem.keep_models else measure(problem, y)

    subs = {"end": diffrax.SubSaveAt(t1=True)}
    if ts.shape[0] > 0:
        subs["times"] = diffrax.SubSaveAt(ts=ts, fn=row)
    loss, grad_norm = value_and_grad_norm(problem.objective, y0)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    meter = diffrax.TqdmProgressMeter() if progress else diffrax.NoProgressMeter()
    # Of the explicit solvers alone, reverse mode gives derivatives; it has a price.
    implicit = isinstance(problem.solver, SymmetricBDF)
    adjoint = (
        diffrax.ForwardMode() if implicit else diffrax.RecursiveCheckpointAdjoint()
    )
    sol = diffrax.diffeqsolve(
        TERM,
        problem.solver,
        t0,
        t1,
        None,
        y0,
        problem.objective,
        saveat=diffrax.SaveAt(subs=subs, solver_state=True, controller_state=True),
        stepsize_controller=problem.controller,
        adjoint=adjoint,
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
    outcome = outcome_of(sol.result)
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
        | solver_statistics(sol.controller_state, sol.solver_state),
    )
