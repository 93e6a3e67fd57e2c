"""`train`: check, choose which rows to keep, take the steps, conclude."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from .. import _trees
from .._types import Objective, Params
from ..batches import Batches
from ..trajectory import Outcome, Trajectory
from .checkpoint import Checkpoint, host, joined
from .steps import GradientDescent, Problem, Row, State, all_rows, block_jit, start

if TYPE_CHECKING:
    import optax

_MOST_ROWS = 2000
_BUFFER_NUMBERS = 2**26  # Numbers of the default record, as for a flow.
_BLOCK_STEPS = 256  # Optimiser steps between two looks from outside.
_BLOCK_NUMBERS = 2**24  # Numbers in one block of rows.


def train(
    objective: Objective | Batches,
    model: Params,
    optimiser: "float | optax.GradientTransformation",
    num_steps: int,
    *,
    key: PRNGKeyArray | None = None,
    evaluate: Objective | None = None,
    observe: Callable[[Any], PyTree[Array]] | None = None,
    every: int | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike | None = None,
) -> Trajectory:
    """Take optimiser steps on an objective, or on a fresh batch at every step.

    With a number eta as `optimiser`, theta_{n+1} = theta_n - eta grad L_n(theta_n).

    Args:
        objective: a function from the parameter pytree to a scalar; or batches, whose
            `draw(key)` gives one for every step (`flowsim.TextBatches`).
        model: initial parameters; every leaf a floating-point array. The run keeps
            their precision.
        optimiser: a learning rate for plain gradient descent; or any Optax
            transformation. Make that once and reuse it: another one compiles anew.
        num_steps: number of steps n.
        key: random key of the batches; step n draws with ``fold_in(key, n)``.
        evaluate: objective whose loss and gradient norm are recorded. Default: the
            objective itself. Batches need one: their own losses are noisy estimates.
        observe: function of the parameters evaluated at every saved row.
        every: save a row every so many steps, besides both ends. Default: so that
            there are at most 2,000 rows (fewer beyond 0.5 GB).
        progress: show a progress bar.
        checkpoint: a file to keep state and rows in, written about every 30 seconds and
            at the end. If it exists, the run goes on from it, bit for bit as if never
            interrupted, also to a larger `num_steps` (with the same `every`).

    Returns:
        The trajectory. Its times are flow times eta n for plain gradient descent, and
        steps n otherwise. `not_finite` (row -1 is the last state whose loss and
        gradient are finite) and `interrupted` are outcomes, with the path up to there.
        Under noise the loss may rise: `loss_rise` is the largest rise between
        neighbouring rows, and nothing follows from it.

    Raises:
        ValueError: for arguments that cannot be right, or a checkpoint of another run.

    Works under `jit` and `vmap` (without progress and checkpoint).
    """
    model = jtu.tree_map(_as_array, model)
    _trees.check_params(model)
    observe = _trees.partial_as_tree(observe)
    problem, settings = _prepare(objective, model, optimiser, key, evaluate, observe)
    num_params = _trees.num_params(model)
    if every is None:
        most = max(2, min(_MOST_ROWS, _BUFFER_NUMBERS // num_params))
        every = max(1, -(-num_steps // most))
    for name, value in (("num_steps", num_steps), ("every", every)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} must be an integer; got {value!r}.")
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    settings["every"] = every
    state, first = start(problem, model)
    if _trees.is_traced((state, first)):
        if checkpoint is not None:
            raise ValueError("checkpoint cannot be written under jit; leave it out.")
        rows, count = all_rows(problem, state, first, num_steps, every)
        outcome = outcome_at(rows.step[-1], num_steps)
        return _as_trajectory(problem, rows, count, outcome, settings)
    file = None if checkpoint is None else Checkpoint(checkpoint, settings, key)
    rows, outcome = _drive(problem, state, first, num_steps, every, progress, file)
    count = jnp.asarray(rows.step.shape[0], jnp.int32)
    return _as_trajectory(problem, rows, count, outcome, settings)


def _drive(
    problem: Problem,
    state: State,
    first: Row,
    num_steps: int,
    every: int,
    progress: bool,
    file: Checkpoint | None,
) -> tuple[Row, Outcome]:
    """The loop over blocks outside `jit`: progress, checkpoints, interruption."""
    from tqdm import tqdm  # Not needed to import flowsim.

    num_params = _trees.num_params(state.model)
    num_rows = max(1, min(_BLOCK_STEPS // every, _BLOCK_NUMBERS // num_params))
    limit, spacing = (jnp.asarray(value, jnp.int32) for value in (num_steps, every))
    kept = [host(jtu.tree_map(lambda leaf: leaf[None], first))]
    if file is not None and file.exists:
        state, kept = file.load(state, kept[0], num_steps)
    interrupted = False
    with tqdm(
        total=num_steps, initial=int(state.step), disable=not progress, unit="step"
    ) as bar:
        try:
            while bool(state.finite) and int(state.step) < num_steps:
                before = int(state.step)
                after, rows = block_jit(
                    problem, state, limit, spacing, num_rows, _BLOCK_STEPS
                )
                rows = host(rows)
                wanted = (rows.step % every == 0) | (rows.step == num_steps)
                wanted |= not bool(after.finite)
                wanted &= np.diff(rows.step, prepend=before) > 0
                wanted &= np.isfinite(rows.loss) & np.isfinite(rows.grad_norm)
                new = jtu.tree_map(lambda leaf, keep=wanted: leaf[keep], rows)
                # In one statement: an interruption must not part state and rows.
                state, kept = after, [*kept, new]
                if file is not None:
                    file.save(state, kept)
                if progress:
                    bar.update(int(state.step) - before)
                    bar.set_postfix_str(f"loss {float(rows.loss[-1]):.6f}")
        except KeyboardInterrupt:
            interrupted = True
    if interrupted and int(state.step) > int(_last_step(kept)):
        # Interrupted between rows: no step more, but a row of where the run is.
        _, rows = block_jit(problem, state, state.step, spacing, num_rows, _BLOCK_STEPS)
        kept = [*kept, jtu.tree_map(lambda leaf: leaf[:1], host(rows))]
    if file is not None:
        file.save(state, kept, now=True)
    rows = joined(kept)
    outcome = Outcome.interrupted if interrupted else outcome_at(state.step, num_steps)
    if not bool(state.finite):
        outcome = Outcome.not_finite
    return jax.device_put(rows), outcome


def _last_step(kept: list[Row]) -> Any:
    return max(part.step[-1] for part in kept if part.step.size)


def _as_trajectory(
    problem: Problem,
    rows: Row,
    count: Int[Array, ""],
    outcome: Outcome,
    settings: dict[str, Any],
) -> Trajectory:
    descent = isinstance(problem.optimiser, GradientDescent)
    ts = rows.step.astype(rows.loss.dtype)
    if isinstance(problem.optimiser, GradientDescent):
        ts = problem.optimiser.rate.astype(ts.dtype) * ts
    rises = rows.loss[1:] - rows.loss[:-1]
    return Trajectory(
        ts=ts,
        models=rows.model,
        losses=rows.loss,
        grad_norms=rows.grad_norm,
        observables=rows.observables,
        outcome=outcome,
        num_saved=count,
        loss_rise=jnp.max(rises, initial=-jnp.inf),
        stats={"num_steps": rows.step[-1]},
        settings=settings,
        time_unit="flow time" if descent else "steps",
    )


def outcome_at(last: Int[Array, ""], num_steps: int) -> Outcome:
    return Outcome.where(last == num_steps, Outcome.reached_t1, Outcome.not_finite)


def _prepare(
    objective, model, optimiser, key, evaluate, observe
) -> tuple[Problem, dict[str, Any]]:
    """The problem, checked, and the settings that say what it is."""
    draws = hasattr(objective, "draw")
    if not draws and not callable(objective):
        raise ValueError(
            "objective must be a function of the parameters, or batches with "
            f"draw(key); got {type(objective).__name__}."
        )
    if draws and evaluate is None:
        raise ValueError(
            "evaluate must be given with batches: an objective for the saved rows, "
            "such as the PopulationLoss of the chain."
        )
    if draws and key is None:
        raise ValueError("key must be given with batches; got None.")
    settings: dict[str, Any] = {
        "precision": str(jnp.result_type(*jtu.tree_leaves(model)))
    }
    if hasattr(optimiser, "update") and hasattr(optimiser, "init"):
        rule, settings["optimiser"] = optimiser, "optax"
    elif _trees.is_traced(optimiser) or isinstance(
        optimiser, float | int | np.floating | Array
    ):
        if not _trees.is_traced(optimiser):
            if not 0 < float(optimiser) < float("inf"):
                raise ValueError(
                    f"a learning rate must be positive and finite; got {optimiser}."
                )
            settings["learning rate"] = float(optimiser)
        rule = GradientDescent(jnp.asarray(optimiser, jnp.result_type(float)))
        settings["optimiser"] = "gradient descent"
    else:
        raise ValueError(
            "optimiser must be a learning rate or an optax.GradientTransformation; "
            f"got {type(optimiser).__name__}."
        )
    evaluated: Any = objective if evaluate is None else evaluate
    for function in (evaluated,) if draws else (evaluated, objective):
        value = jax.eval_shape(function, model)
        if getattr(value, "shape", None) != () or not jnp.issubdtype(
            value.dtype, jnp.floating
        ):
            raise ValueError(f"objective must return a real scalar; got {value}.")
    source: Any = objective
    return Problem(source, evaluated, observe, rule, key), settings


def _as_array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
