"""Variable-order, variable-step BDF for flows with a symmetric Jacobian, matrix-free.

Why it exists: the Jacobian of a gradient flow is minus a Hessian, so it is symmetric.
Its spectrum is real, so BDF of order five and six are stable where it matters; and the
Newton systems can be solved by conjugate gradients on Jacobian-vector products, without
ever forming a matrix. Diffrax's own implicit methods factorise a dense Jacobian at
every stage; its explicit ones take steps bounded by the stiffness.

What it leaves out: any flow whose Jacobian is not symmetric. Those are recognised in
the linear solves, as soon as the asymmetry matters there, and end with the result
`diffrax.RESULTS.breakdown`. Differentiation through the solve works in forward mode
only.

>>> import diffrax, jax, jax.numpy as jnp
>>> from flowsim.solvers import BDFController, SymmetricBDF
>>> valley = lambda y: 0.5 * (y[0] ** 2 + 1e4 * y[1] ** 2)
>>> term = diffrax.ODETerm(lambda t, y, args: -jax.grad(valley)(y))
>>> solution = diffrax.diffeqsolve(
...     term, SymmetricBDF(), 0.0, 10.0, None, jnp.array([1.0, 1.0]),
...     stepsize_controller=BDFController(rtol=1e-6, atol=1e-9),
... )
>>> bool(abs(solution.ys[-1, 0] - jnp.exp(-10.0)) < 1e-6)
True
"""

from typing import Any, ClassVar, cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from ._controller import StepReport
from ._differences import MAX_ORDER, REAL_AXIS_KAPPA, Formulas, correction, rescaling
from ._interpolation import BackwardDifferenceInterpolation
from ._newton import NewtonCG, NewtonSolve
from ._recycling import Recycled

# Each order bids for the next step with a step length that it expects to be accepted;
# a change of order has to promise more than staying does. Values of Shampine and
# Reichelt's implementation, for orders k - 1, k, k + 1.
_CAUTION = (1.3, 1.2, 1.4)
# Changing the step resamples the history, so small gains are left alone.
_WORTHWHILE_GROWTH, _NECESSARY_SHRINKAGE = 1.2, 0.9
_MOST_GROWTH, _MOST_SHRINKAGE = 10.0, 0.2
_SHRINKAGE_WITHOUT_SOLUTION = 0.5


class BDFState(eqx.Module):
    """State of `SymmetricBDF` between steps.

    Attributes:
        differences: backward differences nabla^j y_n, j = 1 ... max_order + 2, of the
            flattened solution.
        order: order of the next step.
        step: step length to which the differences refer.
        num_equal_steps: steps made with this order and length.
        curvature: measured nonlinearity of the implicit equation, and
        curvature_age: the number of steps since it was measured.
        recycled: approximate eigenpairs of the Jacobian, if any are kept.
    """

    differences: Float[Array, "rows n"]
    order: Int[Array, ""]
    step: Float[Array, ""]
    num_equal_steps: Int[Array, ""]
    curvature: Float[Array, ""]
    curvature_age: Int[Array, ""]
    recycled: Recycled | None


class SymmetricBDF(diffrax.AbstractImplicitSolver, diffrax.AbstractAdaptiveSolver):
    """Variable-order BDF in backward differences with conjugate-gradient Newton solves.

    For `diffrax.diffeqsolve` with `BDFController` as the step-size controller, for any
    pytree of real arrays and any vector field f(t, y, args) whose Jacobian in y is
    symmetric. Saving, dense output, events and progress meters work as for any other
    solver; dense output is the method's own polynomial, of the method's order.

    A step costs one evaluation of the vector field and, per iteration of conjugate
    gradients, one Jacobian-vector product; memory is max_order + 2 copies of the state.
    Counters are in the controller's state (`BDFControllerState`).

    A solve is continued exactly, bit for bit, by saving `solver_state`,
    `controller_state` and `made_jump` and passing them to the next `diffeqsolve` with
    `dt0=controller_state.next_step`.

    Attributes:
        root_finder: the Newton iteration, with its tolerances.
        root_find_max_steps: most linear solves per step.
        max_order: highest order, 1 to 6.
        min_order: lowest order, at which a solve starts.
        kappa: the kappa_k of the formulas of order 1 ... 6 (module `_differences`).

    Failures: `RESULTS.breakdown` if the Jacobian is not symmetric,
    `RESULTS.dt_min_reached` if the step falls below the resolution of time.

    References:
        L. F. Shampine, M. W. Reichelt, "The MATLAB ODE Suite", SIAM J. Sci. Comput. 18
        (1997): formulas, differences, control. G. D. Byrne, A. C. Hindmarsh, "A
        polyalgorithm for the numerical solution of ordinary differential equations",
        ACM Trans. Math. Softw. 1 (1975): choosing order and step together. P. N. Brown,
        A. C. Hindmarsh, "Matrix-free methods for stiff systems of ODE's", SIAM J.
        Numer. Anal. 23 (1986): inexact Newton iteration within BDF.
    """

    # A root finder to Diffrax in that it has the three tolerances to be filled in.
    root_finder: Any = diffrax.with_stepsize_controller_tols(cast(Any, NewtonCG))()
    root_find_max_steps: Any = 4
    max_order: int = eqx.field(static=True, default=MAX_ORDER)
    min_order: int = eqx.field(static=True, default=1)
    kappa: tuple[float, ...] = eqx.field(static=True, default=REAL_AXIS_KAPPA)

    term_structure: ClassVar = diffrax.ODETerm
    interpolation_cls: ClassVar = BackwardDifferenceInterpolation

    def __check_init__(self):
        if not 1 <= self.min_order <= self.max_order <= MAX_ORDER:
            raise ValueError(
                f"orders must satisfy 1 <= min_order <= max_order <= {MAX_ORDER}; got "
                f"min_order {self.min_order} and max_order {self.max_order}."
            )
        if len(self.kappa) < self.max_order:
            raise ValueError(
                f"kappa must have an entry for each order up to {self.max_order}; got "
                f"{len(self.kappa)}."
            )

    @property
    def num_rows(self) -> int:
        """Number of differences kept: two beyond the highest order, to judge orders."""
        return self.max_order + 2

    def order(self, terms: Any) -> int:
        """The highest order; each step has its own."""
        del terms
        return self.max_order

    def error_order(self, terms: Any) -> None:
        """None: the step length is the solver's own decision (`BDFController`)."""
        del terms

    def func(self, terms: Any, t0: Any, y0: Any, args: Any) -> Any:
        return terms.vf(t0, y0, args)

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any) -> BDFState:
        y, _ = ravel_pytree(y0)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            raise ValueError(f"y0 must be real floating point; got {y.dtype}.")
        first = _increment(terms, t0, t1 - t0, y0, args)(y)
        rank = min(self.root_finder.rank, y.size)
        return BDFState(
            differences=jnp.zeros((self.num_rows, y.size), y.dtype).at[0].set(first),
            order=jnp.asarray(self.min_order, jnp.int32),
            step=(t1 - t0).astype(y.dtype),
            num_equal_steps=jnp.zeros((), jnp.int32),
            curvature=jnp.zeros((), y.dtype),
            curvature_age=jnp.asarray(jnp.iinfo(jnp.int32).max // 2, jnp.int32),
            recycled=Recycled.empty(rank, y.size, y.dtype) if rank else None,
        )

    def step(
        self,
        terms: Any,
        t0: Any,
        t1: Any,
        y0: Any,
        args: Any,
        solver_state: BDFState,
        made_jump: Any,
    ) -> tuple[Any, StepReport, dict[str, Any], BDFState, diffrax.RESULTS]:
        y, unravel = ravel_pytree(y0)
        state = self._restart_after_jump(terms, t0, y0, args, solver_state, made_jump)
        state, resample = self._adopt_step(t0, t1, state)
        order, history = state.order, state.differences

        formulas = Formulas(self.kappa[: self.max_order])
        leading = jnp.asarray(formulas.leading, y.dtype)[order]
        number = jnp.arange(1, self.num_rows + 1, dtype=order.dtype)
        gamma = jnp.pad(formulas.gamma[1:], (0, 1)).astype(y.dtype)
        used = number <= order
        update, weight = correction(order, self.num_rows, y.dtype)
        # One product with the (rows, n) history gives all that the step needs of it.
        rows = jnp.concatenate(
            [
                used.astype(y.dtype)[None],
                jnp.where(used, gamma, 0.0)[None] / leading,
                (number == order + 1).astype(y.dtype)[None],
                update,
            ]
        )
        rows = jnp.dot(rows, resample, precision=lax.Precision.HIGHEST)
        rows = jnp.dot(rows, history, precision=lax.Precision.HIGHEST)
        advance, psi, guess, history = rows[0], rows[1], rows[2], rows[3:]

        prediction = y + advance
        increment = _increment(terms, t1, state.step.astype(t1.dtype), y0, args)
        newton = self.root_finder.solve(
            lambda v: increment(v) / leading,
            prediction,
            psi,
            guess,
            self.root_finder.weighted_norm(unravel, y, prediction),
            state.curvature,
            state.curvature_age,
            state.recycled,
            state.step / leading,
            self.root_find_max_steps,
        )
        d = newton.correction
        y1 = prediction + d
        history = history + weight[:, None] * d
        size = self.root_finder.weighted_norm(unravel, y, y1)
        error, decision = self._decide(state, newton, history, size, formulas)
        accepted, next_order, factor, num_equal_steps = decision

        new_state = BDFState(
            differences=history,
            order=next_order,
            step=state.step,
            num_equal_steps=num_equal_steps,
            curvature=newton.curvature,
            curvature_age=newton.age,
            recycled=newton.recycled,
        )
        asymmetric = newton.asymmetric
        report = StepReport(
            error=error,
            accepted=accepted.astype(y.dtype),
            next_step=factor * state.step,
            solved=newton.converged.astype(y.dtype),
            indefinite=newton.indefinite.astype(y.dtype),
            asymmetric=asymmetric.astype(y.dtype),
            num_evaluations=newton.num_evaluations.astype(y.dtype),
            num_products=newton.num_products.astype(y.dtype),
        )
        y1 = unravel(y1)
        dense = jnp.where(used[: self.max_order, None], history[: self.max_order], 0.0)
        dense_info = dict(y1=y1, differences=jax.vmap(unravel)(dense))
        results: Any = diffrax.RESULTS
        result = results.where(
            newton.converged, results.successful, results.nonlinear_divergence
        )
        result = results.where(asymmetric, results.breakdown, result)
        return y1, report, dense_info, new_state, result

    def _restart_after_jump(
        self,
        terms: Any,
        t0: Any,
        y0: Any,
        args: Any,
        state: BDFState,
        made_jump: Any,
    ) -> BDFState:
        """Forget the history if the vector field has just jumped."""
        if made_jump is False:
            return state

        def forget(state: BDFState) -> BDFState:
            y, _ = ravel_pytree(y0)
            step = state.step.astype(t0.dtype)
            first = _increment(terms, t0, step, y0, args)(y)
            return eqx.tree_at(
                lambda s: (s.differences, s.order, s.num_equal_steps),
                state,
                (
                    jnp.zeros_like(state.differences).at[0].set(first),
                    jnp.full_like(state.order, self.min_order),
                    jnp.zeros_like(state.num_equal_steps),
                ),
            )

        return lax.cond(made_jump, forget, lambda state: state, state)

    def _adopt_step(
        self, t0: Any, t1: Any, state: BDFState
    ) -> tuple[BDFState, Float[Array, "rows rows"]]:
        """Turn to the step [t0, t1]: the state for it, and the resampling matrix.

        The differences are still to be multiplied by that matrix.
        """
        dtype = state.step.dtype
        rounding = jnp.finfo(t0.dtype).eps * jnp.maximum(jnp.abs(t0), jnp.abs(t1))
        length = (t1 - t0).astype(dtype)
        # t1 - t0 differs from the step that was meant by rounding, at large times and
        # short steps by much of it. That is no reason to resample.
        same = jnp.abs(length - state.step) <= 4 * rounding.astype(dtype)
        step = jnp.where(same, state.step, length)
        ratio = step / state.step
        # Growing by r amplifies the round-off in the k-th difference by r^k. After a
        # step that was cut very short, a lower order is all that is left.
        tolerable = -0.4 * jnp.log(jnp.finfo(dtype).eps)
        highest = tolerable / jnp.log(jnp.maximum(ratio, 1.1))
        order = jnp.clip(highest.astype(jnp.int32), self.min_order, state.order)
        matrix = rescaling(ratio, order, self.num_rows)
        matrix = jnp.where(same, jnp.eye(self.num_rows, dtype=dtype), matrix)
        state = eqx.tree_at(
            lambda s: (s.order, s.step, s.num_equal_steps, s.curvature),
            state,
            (
                order,
                step,
                jnp.where(same, state.num_equal_steps, 0),
                state.curvature * ratio,
            ),
        )
        return state, matrix

    def _decide(
        self,
        state: BDFState,
        newton: NewtonSolve,
        history: Float[Array, "rows n"],
        size: Any,
        formulas: Formulas,
    ) -> tuple[Float[Array, ""], tuple[Any, ...]]:
        """Judge the step, choose the next: (error, (accepted, order, factor, count)).

        nabla^k, nabla^{k+1}, nabla^{k+2} estimate the error of orders k - 1, k, k + 1.
        """
        order, dtype = state.order, history.dtype
        candidates = order + jnp.arange(-1, 2, dtype=jnp.int32)
        estimates = lax.dynamic_slice_in_dim(history, order - 1, 3)
        errors = jax.vmap(size)(estimates)
        errors = errors * jnp.asarray(formulas.error, dtype)[candidates]
        error = errors[1]
        accepted = newton.converged & (error <= 1)

        roots = jnp.maximum(errors, 1e-30) ** (1 / (candidates + 1).astype(dtype))
        factors = 1 / (jnp.asarray(_CAUTION, dtype) * roots)
        allowed = (candidates >= self.min_order) & (candidates <= self.max_order)
        bids = jnp.where(allowed, factors, 0.0)
        best = jnp.argmax(bids).astype(jnp.int32)
        growth = jnp.minimum(bids[best], _MOST_GROWTH)
        # The differences are those of a smooth solution only after k + 1 equal steps.
        num_equal_steps = state.num_equal_steps + 1
        change = (num_equal_steps > order) & (
            (growth >= _WORTHWHILE_GROWTH) | (growth < _NECESSARY_SHRINKAGE)
        )
        shrinkage = jnp.where(
            newton.converged,
            jnp.clip(factors[1], _MOST_SHRINKAGE, 0.9),
            _SHRINKAGE_WITHOUT_SOLUTION,
        )
        factor = jnp.where(accepted, jnp.where(change, growth, 1.0), shrinkage)
        return error, (
            accepted,
            jnp.where(change, candidates[best], order),
            factor,
            jnp.where(change, 0, num_equal_steps),
        )


def _increment(terms: Any, t: Any, step: Any, y0: Any, args: Any) -> Any:
    """The map y -> step * f(t, y) on flat vectors; time runs forwards in `step`."""
    _, unravel = ravel_pytree(y0)
    # An ODE's control is the length of the step; from zero it suffers no rounding.
    control = terms.contr(jnp.zeros_like(step), step)

    def increment(v):
        return ravel_pytree(terms.vf_prod(t, unravel(v), args, control))[0]

    return increment
