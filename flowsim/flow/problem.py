"""What a run is made of: the problem, what is measured along it, how it ended."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Int, PyTree

from .. import _trees
from .._types import Objective, Params, RealLike, Scalar
from ..derivatives import gradient, value_and_grad_norm
from ..trajectory import Outcome

_BATCHED_UP_TO = 2000  # Parameters up to which saved rows are measured in batches.


class Problem(eqx.Module):
    """Everything that defines a run, except its start and its times."""

    objective: Objective
    solver: diffrax.AbstractSolver
    controller: diffrax.AbstractStepSizeController
    event: diffrax.Event | None
    observe: Callable[[Any], PyTree[Array]] | None
    reduction: Any
    rtol: Scalar
    atol: Scalar
    keep_models: bool = eqx.field(static=True)
    may_recycle: bool = eqx.field(static=True, default=False)


class Measurement(eqx.Module):
    """What is known at one saved point besides the parameters."""

    loss: Scalar
    grad_norm: Scalar
    observables: PyTree


class Path(eqx.Module):
    """Rows of a run: a fixed number, of which `count` are in use.

    NumPy arrays, all in use, where the run is concrete and kept its steps.
    """

    ts: Any
    rows: PyTree
    count: Int[Array, ""]
    t_end: Scalar
    y_end: Params
    outcome: Outcome
    stats: dict[str, Any]


def check_objective(objective: Objective, params: Params) -> None:
    """Check that the objective returns a real scalar.

    Called while tracing, so that a warm call does not evaluate the objective's program.
    """
    value = jax.eval_shape(objective, params)
    real = getattr(value, "shape", None) == () and jnp.issubdtype(
        value.dtype, jnp.floating
    )
    if not real:
        raise ValueError(f"objective must return a real scalar; it returned {value}.")


def descent(t: RealLike, y: Params, objective: Any) -> Params:
    """The vector field -grad L of the flow, in Diffrax's argument order."""
    del t
    return _trees.scale(-1.0, gradient(objective, y))


TERM = diffrax.ODETerm(descent)


def measure(problem: Problem, y: Params) -> Measurement:
    """Loss, gradient norm and observables at one point."""
    loss, grad_norm = value_and_grad_norm(problem.objective, y)
    observe = problem.observe
    observables = None if observe is None else observe(restore(problem, y))
    return Measurement(loss=loss, grad_norm=grad_norm, observables=observables)


measure_one = eqx.filter_jit(measure)


def restore(problem: Problem, y: Params) -> Params:
    """The caller's parameters of a state: the integration may use fewer of them."""
    return y if problem.reduction is None else problem.reduction.restore(y)


def allowed_rise(
    loss: Float[Array, "*batch"],
    grad_norm: Float[Array, "*batch"],
    size: Scalar,
    num: int,
    rtol: Scalar,
    atol: Scalar,
) -> Float[Array, "*batch"]:
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


def outcome_of(result: diffrax.RESULTS) -> Outcome:
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


def solver_statistics(controller_state: PyTree, solver_state: PyTree) -> dict[str, Any]:
    """The counters in the state of the controller, or else of the solver, if any.

    Those of a solver are of accepted steps: Diffrax drops its state on rejection.
    """
    counted = {
        name: value
        for name, value in getattr(controller_state, "__dict__", {}).items()
        if name.startswith("num_")
    }
    for name in ("num_evaluations", "num_products"):
        if name not in counted and hasattr(solver_state, name):
            counted[name] = getattr(solver_state, name)
    return counted


@eqx.filter_jit
def measure_rows(
    problem: Problem, models: Params, count: Int[Array, ""], differentiable: bool
) -> Measurement:
    """Measure the first `count` rows; later rows repeat row `count - 1`.

    In batches, so that memory stays bounded and no time goes into unused rows. Large
    models one by one: a product of two large matrices is quicker than a batch of them.
    """
    rows = jtu.tree_leaves(models)[0].shape[0]
    num = _trees.num_params(models) // rows
    batch = min(rows, 256) if num <= _BATCHED_UP_TO else 1
    index = jnp.minimum(
        jnp.arange(-(-rows // batch) * batch, dtype=jnp.int32), count - 1
    )
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
    flat = jtu.tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batches)
    last = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), count - 1)
    return jtu.tree_map(lambda leaf: leaf[last], flat)


@eqx.filter_jit
def examine_rows(
    problem: Problem, rows: Params, count: Int[Array, ""]
) -> tuple[Measurement, Params]:
    """Measurements of the first `count` rows; the caller's parameters if reduced."""
    measured = measure_rows(problem, rows, count, False)
    reduced = problem.reduction is not None
    restored = jax.vmap(lambda y: restore(problem, y))(rows) if reduced else None
    return measured, restored
