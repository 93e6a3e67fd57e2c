"""`gradient_flow`: check, choose tolerances and solver, integrate, conclude."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optimistix as optx
from jaxtyping import Array, ArrayLike, Float, PyTree

from .. import _trees
from .._types import Objective, Params, RealLike, Scalar
from ..derivatives import gradient
from ..solvers import BDFController, SymmetricBDF
from ..trajectory import Trajectory, trim
from . import labour
from .blocks import solve_in_blocks
from .conclude import as_trajectory, finish, finish_on_host, from_host
from .problem import Problem
from .times import solve_at_times

_BUFFER_NUMBERS = 2**26  # Numbers of the record, 0.5 GB in double precision.


class Save(eqx.Module):
    """Which points of a run to keep.

    Args:
        ts: keep exactly these times, by the solver's dense output, and both ends.
        every: keep every n-th accepted step.
        at_most: without `ts` and `every`: keep both ends and at most this many accepted
            steps between, chosen by path length (dense in bursts).
        models: keep the parameters; False keeps losses, norms and observables alone.
    """

    ts: Float[Array, " times"] | None
    every: int | None = eqx.field(static=True)
    at_most: int = eqx.field(static=True)
    models: bool = eqx.field(static=True)

    def __init__(
        self,
        ts: Sequence[float] | ArrayLike | None = None,
        *,
        every: int | None = None,
        at_most: int = 2000,
        models: bool = True,
    ):
        if ts is not None and every is not None:
            raise ValueError("save takes either times or every=n, not both.")
        if every is not None and every < 1:
            raise ValueError(f"save every n-th step needs n >= 1; got {every}.")
        if at_most < 2:
            raise ValueError(f"save at_most must be at least 2; got {at_most}.")
        self.ts = None if ts is None else jnp.asarray(ts, jnp.result_type(float))
        self.every, self.at_most, self.models = every, at_most, models


def gradient_flow(
    objective: Objective,
    model: Params,
    *,
    t0: RealLike = 0.0,
    t1: RealLike,
    solver: diffrax.AbstractSolver | None = None,
    rtol: RealLike | None = None,
    atol: RealLike | None = None,
    save: Save | Sequence[float] | ArrayLike | int | None = None,
    observe: Callable[[Any], PyTree[Array]] | None = None,
    stop: float | Callable[[Scalar, Any], Any] | diffrax.Event | None = None,
    max_steps: int = 2**20,
    progress: bool = False,
) -> Trajectory:
    """Integrate theta' = -grad L(theta) from `model` at t0 to t1.

    Args:
        objective: pure function from the parameter pytree to a scalar.
        model: initial parameters; every leaf a floating-point array.
        t0, t1: flow times, t0 < t1.
        solver: any adaptive Diffrax ODE solver; by default one is chosen, and the
            result's `settings` say which and why.
        rtol: relative tolerance of one step, per component. Default: 1e-8 in double
            precision, at which a whole focus-dilution cycle keeps its conserved
            quantities to 1e-7; 1e-4 in single precision, which bears no less.
        atol: absolute tolerance of one step. Default: rtol / 10 times the root mean
            square of the initial parameters (at most 1), because the saddles amplify
            what starts at that size. It must lie well below every perturbation whose
            growth matters.
        save: times; or an integer n for every n-th accepted step; or a `Save`. Default:
            both ends and at most 2,000 accepted steps, dense in bursts.
        observe: function of the parameters evaluated at every saved point.
        stop: a gradient-norm tolerance (outcome `stationary`), or a function (t, model)
            that returns a boolean (stops after the step where it turns true) or a real
            number (stops where it crosses zero, to the solver's tolerance), or a
            `diffrax.Event`. Off by default: a plateau has a small gradient too.
        max_steps: bound on solver steps, accepted or not, rounded up to whole blocks of
            at most 512.
        progress: show a progress bar.

    Returns:
        The trajectory. Failures are outcomes in it, with the path up to there:
        `max_steps_reached`, `step_too_small`, `not_finite`, `loss_increased`,
        `solver_failed`, `interrupted`.

    Raises:
        ValueError: for arguments that cannot be right whatever the numbers are.

    Memory: the saved rows (at most 2,000 times n numbers by default, fewer rows beyond
    0.5 GB), up to three times, and one block of at most 512 rows.

    Differentiation: in forward mode (`jax.jvp`, `jax.jacfwd`), with respect to the
    start and to whatever the objective is made of; a time found by `stop` has
    derivatives too. Explicit solvers with `save` given as times have reverse mode
    (`jax.grad`) instead. The derivative of the final loss in the law of the tokens:

    >>> import jax, flowsim as fs
    >>> model = fs.AttentionModel.init(jax.random.key(0), vocab=3, width=4, scale=0.1)
    >>> def final_loss(pi):
    ...     loss = fs.PopulationLoss(fs.lazy_chain(pi, 0.5))
    ...     return fs.gradient_flow(loss, model, t1=20.0).losses[-1]
    >>> jax.jacfwd(final_loss)(jax.numpy.array([0.6, 0.3, 0.1])).shape
    (3,)

    And that of the time at which it has fallen to 0.95: with ``t1=40.0`` and
    ``stop=lambda t, model: loss(model) - 0.95``, the same of ``run.ts[-1]``.
    """
    model = jtu.tree_map(_as_array, model)
    _trees.check_params(model)
    save = _as_save(save)
    _check_numbers(t0, t1, rtol, atol, save, max_steps)
    # Time has the model's own precision: Diffrax mixes the two in every step.
    dtype = jnp.result_type(*jtu.tree_leaves(model))
    rtol = (1e-8 if jnp.finfo(dtype).bits >= 64 else 1e-4) if rtol is None else rtol
    start, end, relative = (jnp.asarray(x, dtype) for x in (t0, t1, rtol))
    if atol is None:
        absolute = default_atol(model, relative)
    else:
        absolute = jnp.asarray(atol, dtype)
    # An objective may know an exactly equivalent smaller start (`WidthReduction`).
    reduce = getattr(objective, "reduce", None)
    reduction = None if reduce is None else reduce(model)
    state = model if reduction is None else reduction.model
    why, may_recycle = "given by the caller", False
    if solver is None:
        solver, why, may_recycle = labour.first_solver(
            _trees.num_params(state),
            _trees.is_traced((objective, state, start, end, relative)),
        )
    controller = _controller_for(solver, relative, absolute, start, end)
    problem = Problem(
        objective=objective,
        solver=solver,
        controller=controller,
        event=_as_event(stop, reduction),
        observe=_trees.partial_as_tree(observe),
        reduction=reduction,
        rtol=relative,
        atol=absolute,
        keep_models=save.models,
        may_recycle=may_recycle,
    )
    gradient_stop = isinstance(stop, float | int) and not isinstance(stop, bool)
    if save.ts is None:
        end_state, store, rows = solve_in_blocks(
            problem,
            state,
            start,
            end,
            at_most=min(save.at_most, _BUFFER_NUMBERS // _trees.num_params(model)),
            every=save.every,
            max_steps=max_steps,
            progress=progress,
        )
        if may_recycle and labour.recycles(end_state):
            why += "; its linear systems grew laborious: recycles Ritz vectors"
        if rows is None:
            path = finish(problem, end_state, store)
            run = as_trajectory(problem, state, path, gradient_stop, True)
        else:
            path = finish_on_host(problem, end_state, store, rows)
            run = from_host(problem, state, path, gradient_stop)
    else:
        path = solve_at_times(
            problem,
            state,
            start,
            end,
            _interior(save.ts.astype(dtype), start, end),
            max_steps=max_steps,
            progress=progress,
        )
        run = as_trajectory(problem, state, path, gradient_stop, _trees.is_traced(path))
    settings = {"solver": type(solver).__name__, "chosen because": why}
    if reduction is not None:
        settings["reduced to"] = f"{_trees.num_params(state)} parameters, exactly"
    if not _trees.is_traced((relative, absolute)):
        settings |= {"rtol": float(relative), "atol": float(absolute)}
    return trim(dataclasses.replace(run, settings=settings))


@eqx.filter_jit
def default_atol(model: Params, rtol: Scalar) -> Scalar:
    """Default absolute tolerance: rtol / 10 times the size of the initial parameters.

    Size is their root mean square, at most 1. A start at exactly zero has no size; it
    is at rest if zero is critical, and otherwise moves at once, and gets 1e-3.
    """
    num = _trees.num_params(model)
    size = (_trees.norm(model) / num**0.5).astype(rtol.dtype)
    return 0.1 * rtol * jnp.where(size > 0, jnp.minimum(size, 1.0), 1e-3)


def _controller_for(
    solver: diffrax.AbstractSolver, rtol: Scalar, atol: Scalar, t0: Scalar, t1: Scalar
) -> diffrax.AbstractStepSizeController:
    if not isinstance(solver, diffrax.AbstractAdaptiveSolver):
        raise ValueError(
            "solver must be an adaptive Diffrax solver (it needs an error estimate); "
            f"got {type(solver).__name__}."
        )
    if isinstance(solver, SymmetricBDF):
        return BDFController(rtol, atol)
    # Below this step the solver stands still: the gradient is not finite ahead.
    return diffrax.PIDController(rtol, atol, dtmin=2.0**-50 * (t1 - t0))


def _as_array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _as_save(save: Save | Sequence[float] | ArrayLike | int | None) -> Save:
    if save is None:
        return Save()
    if isinstance(save, Save):
        return save
    if isinstance(save, bool):
        raise ValueError("save must be times, an integer n or a Save; got a boolean.")
    if isinstance(save, int):
        return Save(every=save)
    return Save(save)


def _as_event(stop: Any, reduction: Any) -> diffrax.Event | None:
    if stop is None:
        return None
    if isinstance(stop, diffrax.Event):
        if reduction is not None:
            raise ValueError(
                "a diffrax.Event sees the reduced state; pass its condition as a "
                "function (t, model) instead."
            )
        return stop
    if isinstance(stop, float | int) and not isinstance(stop, bool):
        if not stop > 0:
            raise ValueError(f"stop, a gradient norm, must be positive; got {stop}.")
        return diffrax.Event(_GradientBelow(jnp.asarray(float(stop))))
    if not callable(stop):
        raise ValueError(
            "stop must be a gradient norm, a function (t, model), or a diffrax.Event; "
            f"got {type(stop).__name__}."
        )
    return diffrax.Event(_UserStop(stop, reduction), optx.Newton(1e-10, 1e-10))


class _GradientBelow(eqx.Module):
    tolerance: Scalar

    def __call__(self, t, y, args, **kwargs):
        del t, kwargs
        norm = _trees.norm(gradient(args, y))
        return norm < self.tolerance.astype(norm.dtype)


class _UserStop(eqx.Module):
    function: Callable
    reduction: Any

    def __call__(self, t, y, args, **kwargs):
        del args, kwargs
        model = y if self.reduction is None else self.reduction.restore(y)
        return self.function(t, model)


def _interior(ts: Array, t0: Scalar, t1: Scalar) -> Array:
    """Times strictly between t0 and t1; both ends are always kept besides."""
    if _trees.is_traced((ts, t0, t1)):
        return ts
    inside = np.asarray(ts)
    return jnp.asarray(inside[(inside > float(t0)) & (inside < float(t1))])


def _check_numbers(t0, t1, rtol, atol, save: Save, max_steps: int) -> None:
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1; got {max_steps}.")
    if _trees.is_traced((t0, t1, rtol, atol, save.ts)):
        return
    if not (math.isfinite(t0) and math.isfinite(t1) and t0 < t1):
        raise ValueError(f"t1 must be finite and after t0 = {t0}; got t1 = {t1}.")
    if rtol is not None and not 0 < rtol < 1:
        raise ValueError(f"rtol must lie between 0 and 1; got {rtol}.")
    if atol is not None and not (atol >= 0 and math.isfinite(atol)):
        raise ValueError(f"atol must be finite and not negative; got {atol}.")
    if save.ts is not None:
        ts = np.asarray(save.ts)
        if ts.ndim != 1 or np.any(np.diff(ts) <= 0) or not np.all(np.isfinite(ts)):
            raise ValueError("save times must be finite and increasing.")
        if ts.size and not (t0 <= ts[0] and ts[-1] <= t1):
            raise ValueError(
                f"save times must lie in [{t0}, {t1}]; got {ts[0]} ... {ts[-1]}."
            )
