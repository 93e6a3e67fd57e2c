"""`sweep`: check, choose tolerances, integrate all flows, conclude."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from .. import _trees
from .._types import Objective, Params, RealLike
from ..derivatives import value_and_grad_norm
from ..flow import default_atol
from ..flow.problem import allowed_rise
from ..trajectory import Outcome, Trajectory
from .slots import Results, Settings, lane_of, solve_in_slots


def sweep(
    objective: Objective,
    models: Params,
    *,
    t0: RealLike = 0.0,
    t1: RealLike,
    rtol: RealLike | None = None,
    atol: RealLike | Float[Array, " N"] | None = None,
    ts: Sequence[float] | ArrayLike | None = None,
    stacked_objective: bool = False,
    num_slots: int = 16,
    max_steps: int = 2**20,
) -> Trajectory:
    """Integrate theta' = -grad L(theta) from N starts at once.

    Args:
        objective: pure function from one parameter pytree to a scalar.
        models: starts; every leaf has a leading axis of length N.
        t0, t1: flow times, t0 < t1.
        rtol, atol: as in `flowsim.gradient_flow`, with its defaults; the default atol
            follows the size of each start. An array is one atol for each flow.
        ts: times to keep besides t0 and t1, increasing, by the solver's dense output.
        stacked_objective: whether every array in `objective` has a leading axis of
            length N as well, one objective for each flow.
        num_slots: number of flows in hand at once.
        max_steps: bound on the steps of each flow.

    Returns:
        One trajectory with a leading axis N in every field. A flow that fails keeps its
        outcome and the rows up to there; its other rows repeat the last state.

    Raises:
        ValueError: for arguments that cannot be right whatever the numbers are.
    """
    models = jtu.tree_map(jnp.asarray, models)
    _trees.check_params(models, "models")
    shapes = [leaf.shape for leaf in jtu.tree_leaves(models)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) > 1 or None in sizes:
        raise ValueError(
            "models must have one leading axis of the same length in every leaf; got "
            f"shapes {shapes}."
        )
    num = shapes[0][0]
    if num < 1 or num_slots < 1 or max_steps < 1:
        raise ValueError(
            "the number of models, num_slots and max_steps must be at least 1; got "
            f"{num}, {num_slots} and {max_steps}."
        )
    dtype = jnp.result_type(*jtu.tree_leaves(models))
    rtol = (1e-8 if jnp.finfo(dtype).bits >= 64 else 1e-4) if rtol is None else rtol
    _check_times(t0, t1, rtol, ts)
    relative, start, end = (jnp.asarray(x, dtype) for x in (rtol, t0, t1))
    if atol is None:
        atols = jax.vmap(lambda model: default_atol(model, relative))(models)
    else:
        atols = jnp.broadcast_to(jnp.asarray(atol, dtype), (num,))
    inner = np.zeros(0) if ts is None else ts
    settings = Settings(
        objective=objective,
        models=models,
        rtol=relative,
        atols=atols,
        ts=jnp.asarray(inner, dtype),
        t0=start,
        t1=end,
        max_steps=jnp.asarray(max_steps, jnp.int32),
        stacked=stacked_objective,
    )
    runs = _measured(settings, solve_in_slots(settings, min(num_slots, num)))
    names = {"solver": "SymmetricBDF", "flows": num, "num_slots": num_slots}
    return dataclasses.replace(runs, settings=names)


@eqx.filter_jit
def _measured(settings: Settings, results: Results) -> Trajectory:
    """The trajectories, with losses and gradient norms, and whether the loss fell."""
    num_rows = results.ts.shape[1]

    def one(number: Int[Array, ""]) -> Trajectory:
        result, objective = lane_of(results, number), settings.objective_of(number)
        # After the rows that were kept comes the last state, as often as needed.
        index = jnp.arange(num_rows, dtype=jnp.int32)
        over = index > result.count

        def fill(rows, last):
            return jnp.where(over.reshape(-1, *[1] * last.ndim), last, rows)

        models = jtu.tree_map(fill, result.rows, result.final)
        losses, grad_norms = jax.vmap(lambda y: value_and_grad_norm(objective, y))(
            models
        )
        start, num = lane_of(settings.models, number), _trees.num_params(result.final)
        size = jnp.maximum(_trees.norm(start), _trees.norm(result.final))
        atol = settings.atols[number]
        allowed = allowed_rise(
            losses[:-1], grad_norms[:-1], size, num, settings.rtol, atol
        )
        rise = jnp.max(losses[1:] - losses[:-1] - allowed)
        outcome = result.outcome
        unaware = outcome == Outcome.reached_t1
        outcome = Outcome.where(unaware & (rise > 0), Outcome.loss_increased, outcome)
        finite = jnp.isfinite(losses[-1]) & jnp.isfinite(grad_norms[-1])
        outcome = Outcome.where(unaware & ~finite, Outcome.not_finite, outcome)
        return Trajectory(
            ts=fill(result.ts, result.t_end),
            models=models,
            losses=losses,
            grad_norms=grad_norms,
            observables=None,
            outcome=outcome,
            num_saved=result.count + 2,
            loss_rise=rise,
            stats=result.stats,
            settings={},
        )

    numbers = jnp.arange(settings.num_flows, dtype=jnp.int32)
    return jax.lax.map(one, numbers, batch_size=min(16, settings.num_flows))


def _check_times(t0: Any, t1: Any, rtol: Any, ts: Any) -> None:
    if _trees.is_traced((t0, t1, rtol, ts)):
        return
    if not (math.isfinite(t0) and math.isfinite(t1) and t0 < t1):
        raise ValueError(f"t1 must be finite and after t0 = {t0}; got t1 = {t1}.")
    if not 0 < rtol < 1:
        raise ValueError(f"rtol must lie between 0 and 1; got {rtol}.")
    inner = np.asarray([] if ts is None else ts, float)
    if inner.ndim != 1 or np.any(np.diff(inner) <= 0):
        raise ValueError("ts must be one increasing list of times.")
    if inner.size and not (t0 < inner[0] and inner[-1] < t1):
        raise ValueError(
            f"ts must lie strictly between {t0} and {t1}; got {inner[0]} ... "
            f"{inner[-1]}."
        )
