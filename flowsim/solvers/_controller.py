"""The step-size controller that carries out what `SymmetricBDF` decides.

Diffrax keeps the order (solver) and the step length (controller) apart; a
variable-order method chooses them together. The contract here is: the solver decides
whether the step stands and how long the next one should be, and returns both in the
place of the error estimate, as a `StepReport`; the controller obeys, keeps the books,
and knows when to give up. So `diffrax.diffeqsolve` needs no change, and anything that
shortens steps from outside (t1, `diffrax.ClipStepSizeController`) still works, because
the solver accepts whatever step it is given.

The controller also owns what must survive a rejected step, whose solver state Diffrax
drops: the length of the next step and the counters.
"""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int

from ._newton import NewtonCG


class StepReport(eqx.Module):
    """What a step of `SymmetricBDF` says to its controller, in place of an error.

    Numbers are floating point because Diffrax treats this as an error estimate.

    Attributes:
        error: weighted norm of the local error; a step stands if it is at most one.
        accepted: 1 if the step stands, 0 if not.
        next_step: length of the next step, or of the next attempt.
        solved: 1 if the implicit equation was solved, 0 if not.
        indefinite: 1 if a growing mode made the Newton matrix indefinite.
        asymmetric: 1 if the Jacobian was seen not to be symmetric.
        num_evaluations: evaluations of the vector field in this step.
        num_products: products with its Jacobian in this step.
    """

    error: Float[Array, ""]
    accepted: Float[Array, ""]
    next_step: Float[Array, ""]
    solved: Float[Array, ""]
    indefinite: Float[Array, ""]
    asymmetric: Float[Array, ""]
    num_evaluations: Float[Array, ""]
    num_products: Float[Array, ""]


class BDFControllerState(eqx.Module):
    """State of `BDFController`: the next step and the counters of the whole solve.

    Attributes:
        next_step: length of the next step, positive also when time runs backwards. To
            continue a solve exactly, pass it as `dt0` (times the direction of time)
            together with the saved `solver_state`, `controller_state` and `made_jump`.
        num_evaluations: evaluations of the vector field, rejected steps included.
        num_products: Jacobian-vector products, rejected steps included.
        num_error_rejections: steps rejected because their error was too large.
        num_newton_rejections: steps rejected because the implicit equation was not
            solved, `num_indefinite` of them because of a growing mode.
    """

    next_step: Float[Array, ""]
    num_evaluations: Int[Array, ""]
    num_products: Int[Array, ""]
    num_error_rejections: Int[Array, ""]
    num_newton_rejections: Int[Array, ""]
    num_indefinite: Int[Array, ""]
    retrying: Bool[Array, ""]


class BDFController(diffrax.AbstractAdaptiveStepSizeController):
    """Step-size controller for `SymmetricBDF`, and for nothing else.

    Attributes:
        rtol, atol: the local error of one step is kept below atol + rtol |y|.
        norm: norm in which that is meant; the default is the root mean square over all
            components.
        dtmax: longest step allowed.
    """

    rtol: Any
    atol: Any
    norm: Callable[[Any], Any] = optx.rms_norm
    dtmax: Any = None

    def wrap(self, direction: Any) -> "BDFController":
        del direction
        return self

    def init(
        self,
        terms: Any,
        t0: Any,
        t1: Any,
        y0: Any,
        dt0: Any,
        args: Any,
        func: Any,
        error_order: Any,
    ) -> tuple[Any, BDFControllerState]:
        del func, error_order
        num_evaluations = 1  # By the solver's own initialisation.
        if dt0 is None:
            dt0 = self._first_step(terms, t0, y0, args)
            num_evaluations += 2
        dt0 = jnp.minimum(dt0, t1 - t0)
        if self.dtmax is not None:
            dt0 = jnp.minimum(dt0, jnp.asarray(self.dtmax, dt0.dtype))
        zero = jnp.zeros((), int)
        state = BDFControllerState(
            dt0, zero + num_evaluations, zero, zero, zero, zero, jnp.zeros((), bool)
        )
        return t0 + dt0, state

    def _first_step(self, terms: Any, t0: Any, y0: Any, args: Any) -> Float[Array, ""]:
        """Length at which explicit Euler has an error of about 0.01 tolerances.

        The algorithm of E. Hairer, S. P. Norsett, G. Wanner, "Solving Ordinary
        Differential Equations I" (1993), section II.4, for a method of order one.
        """
        one = jnp.ones_like(t0)
        y, unravel = ravel_pytree(y0)
        size = NewtonCG(self.rtol, self.atol, self.norm).weighted_norm(unravel, y)

        def field(t, v):
            unit = terms.contr(jnp.zeros_like(t0), one)
            return ravel_pytree(terms.vf_prod(t, unravel(v), args, unit))[0]

        f0 = field(t0, y)
        d0, d1 = size(y), size(f0)
        tiny = (d0 < 1e-5) | (d1 < 1e-5)
        h0 = jnp.where(tiny, 1e-6, 0.01 * d0 / jnp.where(tiny, 1.0, d1))
        f1 = field(t0 + h0.astype(t0.dtype), y + h0 * f0)
        steepest = jnp.maximum(d1, size(f1 - f0) / h0)
        flat = steepest <= 1e-15
        h1 = jnp.where(
            flat,
            jnp.maximum(1e-6, 1e-3 * h0),
            jnp.sqrt(0.01 / jnp.where(flat, 1.0, steepest)),
        )
        return jnp.minimum(100 * h0, h1).astype(t0.dtype)

    def adapt_step_size(
        self,
        t0: Any,
        t1: Any,
        y0: Any,
        y1_candidate: Any,
        args: Any,
        y_error: Any,
        error_order: Any,
        controller_state: BDFControllerState,
    ) -> tuple[Any, Any, Any, bool, BDFControllerState, diffrax.RESULTS]:
        del y0, y1_candidate, args, error_order
        if not isinstance(y_error, StepReport):
            raise ValueError(
                "BDFController works with the solver SymmetricBDF only, whose steps "
                f"carry a StepReport; got an error estimate of {type(y_error)}."
            )
        report, state = y_error, controller_state
        asymmetric = report.asymmetric > 0
        keep = (report.accepted > 0) & ~asymmetric
        proposal = report.next_step.astype(t0.dtype)
        # A step shortened from outside says nothing against the length proposed before.
        clipped = keep & ~state.retrying & (t1 - t0 < 0.99 * state.next_step)
        length = jnp.where(clipped, jnp.maximum(proposal, state.next_step), proposal)
        if self.dtmax is not None:
            length = jnp.minimum(length, jnp.asarray(self.dtmax, length.dtype))
        start = jnp.where(keep, t1, t0)
        end = start + length

        solved = report.solved > 0
        new_state = BDFControllerState(
            next_step=length,
            num_evaluations=_add(state.num_evaluations, report.num_evaluations),
            num_products=_add(state.num_products, report.num_products),
            num_error_rejections=_add(state.num_error_rejections, solved & ~keep),
            num_newton_rejections=_add(state.num_newton_rejections, ~solved),
            num_indefinite=_add(state.num_indefinite, report.indefinite),
            retrying=~keep,
        )
        results: Any = diffrax.RESULTS
        # Below that the solver could not tell a shortened step from a rounded one.
        # Written so that a length that is not a number is stuck, too.
        resolution = 16 * jnp.finfo(t0.dtype).eps * jnp.abs(start)
        stuck = ~((length > resolution) & (end > start))
        result = results.where(stuck, results.dt_min_reached, results.successful)
        result = results.where(asymmetric, results.breakdown, result)
        return keep, start, end, False, new_state, result


def _add(count: Int[Array, ""], more: Array) -> Int[Array, ""]:
    return count + more.astype(count.dtype)
