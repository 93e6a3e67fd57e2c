"""The methods compared: each a function that integrates once and says what it took.

A method is made once for a problem and tolerance (`prepare`), and is then called with
the final time, so that a short call compiles everything and the next one is timed.
flowsim's rows are whole `flowsim.gradient_flow` calls with the default records. The
others get less to do: they return the final state only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import flowsim as fs
from flowsim.solvers import NewtonCG, RungeKuttaChebyshev, SymmetricBDF

from .problems import absolute_tolerance, flat

MAX_DENSE = 1000  # Largest n for methods that form a dense Jacobian.
KRYLOV_DIMENSION = 60  # Of GMRES, before it restarts.
RANK = 64  # Of the recycled subspace.


class Done(NamedTuple):
    """Final state, and counts: None where a method does not count."""

    y: np.ndarray
    steps: int | None
    gradients: int | None
    products: int | None = None
    jacobians: int | None = None
    note: str = ""


class Method(NamedTuple):
    label: str
    prepare: Callable[[Any, Any, float], Callable[[float], Done]]
    dense: bool = False
    sundae: bool = False


def _flow(solver: Any) -> Any:
    def prepare(loss, model, rtol):
        def call(t1: float) -> Done:
            run = fs.gradient_flow(loss, model, t1=t1, rtol=rtol, solver=solver)
            jax.block_until_ready(run.models)
            stats = run.stats
            products = stats.get("num_products")
            return Done(
                flat(run.final),
                int(stats["num_steps"]),
                int(stats["num_evaluations"]),
                None if products is None else int(products),
                note="" if bool(run.succeeded) else fs.Outcome[run.outcome],
            )

        return call

    return prepare


def _bdf(rank: int) -> SymmetricBDF:
    inherit: Any = diffrax.with_stepsize_controller_tols
    return SymmetricBDF(root_finder=inherit(NewtonCG)(rank=rank))


def _diffrax(solver: Any) -> Any:
    def prepare(loss, model, rtol):
        term = diffrax.ODETerm(
            lambda t, y, args: jax.tree.map(jnp.negative, jax.grad(loss)(y))
        )

        @jax.jit
        def solve(t1, rtol, atol):
            return diffrax.diffeqsolve(
                term, solver, 0.0, t1, None, model, max_steps=None, throw=False,
                saveat=diffrax.SaveAt(t1=True),
                stepsize_controller=diffrax.PIDController(rtol, atol),
            )  # fmt: skip

        table = solver.tableau
        per_step = len(table.c) + 1 - int(table.fsal)  # FSAL reuses the last stage.
        tolerances = jnp.asarray(rtol), jnp.asarray(absolute_tolerance(model, rtol))

        def call(t1: float) -> Done:
            solution = jax.block_until_ready(solve(jnp.asarray(t1), *tolerances))
            steps = int(solution.stats["num_steps"])
            end = jax.tree.map(lambda leaf: leaf[-1], solution.ys)
            good = solution.result == diffrax.RESULTS.successful
            note = "" if bool(good) else "failed"
            return Done(flat(end), steps, 1 + per_step * steps, note=note)

        return call

    return prepare


class _Callbacks:
    """Compiled derivatives as functions of NumPy vectors, with counters."""

    def __init__(self, loss: Any, model: Any):
        self.start, unravel = ravel_pytree(model)
        slope = jax.grad(lambda v: loss(unravel(v)))
        self._gradient = jax.jit(lambda v: -slope(v))
        self._product = jax.jit(lambda v, u: -jax.jvp(slope, (v,), (u,))[1])
        self._jacobian = jax.jit(lambda v: -jax.jacfwd(slope)(v))
        self.counts = {"gradients": 0, "products": 0, "jacobians": 0}

    def field(self, t, y):
        self.counts["gradients"] += 1
        return np.asarray(self._gradient(y))

    def product(self, y, v):
        self.counts["products"] += 1
        return np.asarray(self._product(y, v))

    def jacobian(self, t, y):
        self.counts["jacobians"] += 1
        return np.asarray(self._jacobian(y))


def _scipy(name: str) -> Any:
    def prepare(loss, model, rtol):
        import scipy.integrate

        calls, atol = _Callbacks(loss, model), absolute_tolerance(model, rtol)

        def call(t1: float) -> Done:
            calls.counts.update(gradients=0, jacobians=0)
            solution = scipy.integrate.solve_ivp(
                calls.field, (0.0, t1), np.asarray(calls.start), method=name,
                jac=calls.jacobian, rtol=rtol, atol=atol, t_eval=[t1],
            )  # fmt: skip
            counts = calls.counts
            note = "" if solution.success else str(solution.message)
            return Done(
                solution.y[:, -1], None, counts["gradients"], None,
                counts["jacobians"], note,
            )  # fmt: skip

        return call

    return prepare


def _cvode(dense: bool) -> Any:
    def prepare(loss, model, rtol):
        from sksundae.cvode import CVODE, CVODEJacTimes

        calls = _Callbacks(loss, model)

        def field(t, y, out):
            out[:] = calls.field(t, y)

        def jacobian(t, y, f, out):
            out[:, :] = calls.jacobian(t, y)

        def product(t, y, f, v, out):
            out[:] = calls.product(y, v)

        if dense:
            options: Any = {"linsolver": "dense", "jacfn": jacobian}
        else:
            options = {
                "linsolver": "gmres",
                "krylov_dim": KRYLOV_DIMENSION,
                "jactimes": CVODEJacTimes(None, product),
            }
        options |= {"rtol": rtol, "atol": absolute_tolerance(model, rtol)}
        solver = CVODE(field, method="BDF", max_num_steps=10**7, **options)

        def call(t1: float) -> Done:
            calls.counts.update(gradients=0, products=0, jacobians=0)
            # Three times: with two, every step would be kept.
            times = np.array([0.0, 0.5 * t1, t1])
            solution = solver.solve(times, np.asarray(calls.start))
            counts = calls.counts
            return Done(
                np.asarray(solution.y)[-1], None, counts["gradients"],
                None if dense else counts["products"],
                counts["jacobians"] if dense else None,
                "" if solution.success else str(solution.message),
            )  # fmt: skip

        return call

    return prepare


METHODS = {
    "default": Method("flowsim, default", _flow(None)),
    "bdf": Method("SymmetricBDF", _flow(_bdf(0))),
    "recycling": Method("SymmetricBDF, recycling", _flow(_bdf(RANK))),
    "rkc": Method("RungeKuttaChebyshev", _flow(RungeKuttaChebyshev())),
    "tsit5": Method("Diffrax Tsit5", _diffrax(diffrax.Tsit5())),
    "dopri8": Method("Diffrax Dopri8", _diffrax(diffrax.Dopri8())),
    "lsoda": Method("SciPy LSODA", _scipy("LSODA"), dense=True),
    "scipy-bdf": Method("SciPy BDF", _scipy("BDF"), dense=True),
    "cvode-dense": Method("CVODE BDF, dense", _cvode(True), dense=True, sundae=True),
    "cvode-gmres": Method(
        f"CVODE BDF, GMRES({KRYLOV_DIMENSION})", _cvode(False), sundae=True
    ),
}
