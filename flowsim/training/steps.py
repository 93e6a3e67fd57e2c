"""Optimiser steps as compiled programs: one step, a block of rows, a whole run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, Int, PRNGKeyArray, PyTree

from .._types import Objective, Params, Scalar
from ..batches import Batches
from ..derivatives import value_and_grad_norm
from ..trajectory import repeat_last

if TYPE_CHECKING:
    import optax  # Named in types alone: it takes longer to load than flowsim.


class GradientDescent(eqx.Module):
    """optax.sgd with the learning rate as an array: another rate compiles nothing."""

    rate: Scalar

    def init(self, model: Params) -> tuple[()]:
        del model
        return ()

    def update(self, grads: Params, state: tuple[()], model: Params) -> Any:
        del model
        return jtu.tree_map(lambda g: -self.rate.astype(g.dtype) * g, grads), state


class Problem(eqx.Module):
    """Everything that defines a run, except its start and its length."""

    source: Objective | Batches
    evaluate: Objective
    observe: Callable[[Any], PyTree[Array]] | None
    optimiser: "GradientDescent | optax.GradientTransformation"
    key: PRNGKeyArray | None


class State(eqx.Module):
    """A run between two steps."""

    step: Int[Array, ""]
    model: Params
    optimiser: PyTree
    finite: Bool[Array, ""]


class Row(eqx.Module):
    """What is kept of one step."""

    step: Int[Array, ""]
    model: Params
    loss: Scalar
    grad_norm: Scalar
    observables: PyTree


@eqx.filter_jit
def start(problem: Problem, model: Params) -> tuple[State, Row]:
    step = jnp.zeros((), jnp.int32)
    row = _measure(problem, step, model)
    finite = jnp.isfinite(row.loss) & jnp.isfinite(row.grad_norm)
    # Weak types of Optax's initial states would compile the second block anew.
    optimiser = jtu.tree_map(
        lambda x: jax.lax.convert_element_type(x, x.dtype) if eqx.is_array(x) else x,
        problem.optimiser.init(model),
    )
    return State(step, model, optimiser, finite), row


def _measure(problem: Problem, step: Int[Array, ""], model: Params) -> Row:
    loss, grad_norm = value_and_grad_norm(problem.evaluate, model)
    observables = None if problem.observe is None else problem.observe(model)
    return Row(step, model, loss, grad_norm, observables)


def _take_step(problem: Problem, state: State) -> State:
    """One step, or none and a note if gradient or new parameters are not finite."""
    objective: Any = problem.source
    if problem.key is not None and hasattr(objective, "draw"):
        objective = objective.draw(jax.random.fold_in(problem.key, state.step))
    grads = jax.grad(objective)(state.model)
    # Optax mixes integers and floats, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimiser = problem.optimiser.update(
            grads, state.optimiser, state.model
        )
        model = jtu.tree_map(
            lambda leaf, update: (leaf + update).astype(leaf.dtype),
            state.model,
            updates,
        )
    finite = jnp.all(
        jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jtu.tree_leaves(model)])
    )

    def keep(new, old):
        return jnp.where(finite, new, old)

    return State(
        step=state.step + finite.astype(state.step.dtype),
        model=jtu.tree_map(keep, model, state.model),
        optimiser=jtu.tree_map(keep, optimiser, state.optimiser),
        finite=finite,
    )


def _advance(problem: Problem, state: State, until: Int[Array, ""]) -> State:
    return jax.lax.while_loop(
        lambda s: s.finite & (s.step < until), lambda s: _take_step(problem, s), state
    )


def _block(
    problem: Problem,
    state: State,
    num_steps: Int[Array, ""],
    every: Int[Array, ""],
    num_rows: int,
    most_steps: int,
) -> tuple[State, Row]:
    """Rows at the next multiples of `every`; each after at most `most_steps` steps."""

    def row(state: State, _: None) -> tuple[State, Row]:
        next_row = jnp.minimum((state.step // every + 1) * every, num_steps)
        state = _advance(problem, state, jnp.minimum(next_row, state.step + most_steps))
        measured = _measure(problem, state.step, state.model)
        finite = jnp.isfinite(measured.loss) & jnp.isfinite(measured.grad_norm)
        state = eqx.tree_at(lambda s: s.finite, state, state.finite & finite)
        return state, measured

    return jax.lax.scan(row, state, None, length=num_rows)


block_jit = eqx.filter_jit(_block)


def all_rows(
    problem: Problem, state: State, first: Row, num_steps: int, every: int
) -> tuple[Row, Int[Array, ""]]:
    """The whole run as one traced program; unused rows repeat the last one."""
    num_rows = -(-num_steps // every)
    last, step = (jnp.asarray(value, jnp.int32) for value in (num_steps, every))
    _, rows = _block(problem, state, last, step, num_rows, num_steps)
    rows = jtu.tree_map(lambda a, b: jnp.concatenate([a[None], b]), first, rows)
    finite = jnp.isfinite(rows.loss) & jnp.isfinite(rows.grad_norm)
    new = jnp.concatenate([jnp.ones(1, bool), rows.step[1:] > rows.step[:-1]])
    count = jnp.maximum(jnp.sum(jnp.cumprod(finite & new)), 1).astype(jnp.int32)
    _, rows = repeat_last(rows.loss, rows, count)
    return rows, count
