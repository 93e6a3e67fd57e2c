"""SymmetricBDF on problems with known solutions: order, accuracy, cost."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
import scipy.integrate

from flowsim.solvers import BDFController, NewtonCG, SymmetricBDF

from .problems import DeepLinearNetwork, allen_cahn
from .test_solvers_differences import differences


def gradient_flow(loss):
    return diffrax.ODETerm(
        lambda t, y, args: jax.tree.map(jnp.negative, jax.grad(loss)(y))
    )


def solve(term, y0, t1, rtol, atol=None, *, solver=None, t0=0.0, **options):
    atol = 1e-3 * rtol if atol is None else atol
    # Nothing is differentiated here, and this adjoint is the fastest to compile.
    options = {"max_steps": 20_000, "adjoint": diffrax.ForwardMode(), **options}
    save = options.pop("saveat", diffrax.SaveAt(t1=True, controller_state=True))
    return diffrax.diffeqsolve(
        term, SymmetricBDF() if solver is None else solver, t0, t1,
        options.pop("dt0", None), y0, saveat=save,
        stepsize_controller=options.pop("controller", BDFController(rtol, atol)),
        **options,
    )  # fmt: skip


def last(solution):
    return jax.tree.map(lambda leaf: leaf[-1], solution.ys)


def distance(x, y):
    return float(optx.max_norm(jax.tree.map(jnp.subtract, x, y)))


# --- Order ----------------------------------------------------------------------------

# A stiff, nonlinear, non-autonomous flow: y = (cos t, sin t) exactly. The stiffness
# makes classical order reduction visible if there is any; multistep methods have none.
STIFF = diffrax.ODETerm(
    lambda t, y, args: {
        "a": -jnp.sin(t) - 50 * (y["a"] - jnp.cos(t)) - (y["a"] ** 3 - jnp.cos(t) ** 3),
        "b": jnp.cos(t) - (y["b"] - jnp.sin(t)),
    }
)


def exact(t):
    return {"a": jnp.cos(t), "b": jnp.sin(t)}


@jax.jit
def fixed_order(order, num_steps, h, rows):
    """Errors of the steps and of the dense output; the order is data, compiled once."""
    newton = NewtonCG(1e-13, 1e-13, optx.rms_norm, linear_tolerance=0.01)
    solver = SymmetricBDF(root_finder=newton)
    y, zero = exact(jnp.zeros(())), jnp.zeros(())
    state = solver.init(STIFF, zero, h, y, None)
    state = eqx.tree_at(lambda s: s.differences, state, rows)

    def step(i, carry):
        y, state, worst, worst_dense = carry
        state = eqx.tree_at(lambda s: s.order, state, order)
        t0, t1 = i * h, (i + 1) * h
        y, _, dense, state, _ = solver.step(STIFF, t0, t1, y, None, state, False)
        piece = solver.interpolation_cls(t0=t0, t1=t1, **dense)
        ts = t0 + h * jnp.linspace(0.1, 0.9, 5)
        gaps = jax.tree.map(jnp.subtract, jax.vmap(piece.evaluate)(ts), exact(ts))
        gap = jax.tree.map(jnp.subtract, y, exact(t1))
        worst = jnp.maximum(worst, optx.max_norm(gap))
        return y, state, worst, jnp.maximum(worst_dense, optx.max_norm(gaps))

    start = (y, state, zero, zero)
    return jax.lax.fori_loop(0, num_steps, step, start)[2:]


@pytest.mark.parametrize("order", range(1, 7))
def test_each_order_and_its_dense_output_converge_at_the_order(order):
    errors = []
    for num in (40, 80):
        h = 2.0 / num
        rows = [differences(f, 0.0, h) for f in (np.cos, np.sin)]
        rows = jnp.asarray(np.stack(rows, axis=-1))
        number = jnp.asarray(order, jnp.int32)
        errors.append(fixed_order(number, num, jnp.asarray(h), rows))
    slope, slope_dense = np.log2(np.array(errors[0]) / np.array(errors[1]))
    assert order - 0.25 < slope < order + 0.6, errors
    assert order - 0.25 < slope_dense < order + 1.1, errors


# --- Accuracy -------------------------------------------------------------------------


@pytest.mark.slow
def test_tolerances_converge_through_two_saddles():
    network = DeepLinearNetwork([3.0, 2.0, 1.0])
    ts = jnp.linspace(0.5, 12.0, 24)
    term = gradient_flow(network.loss)
    rtols = [1e-4, 1e-6, 1e-8, 1e-10]
    errors = []
    for rtol in rtols:
        solution = solve(
            term, network.at(0.0), 12.0, jnp.asarray(rtol), jnp.asarray(1e-4 * rtol),
            saveat=diffrax.SaveAt(ts=ts),
        )  # fmt: skip
        errors.append(distance(solution.ys, jax.vmap(network.at)(ts)))
    # Saddles amplify: the error is a fixed multiple of the tolerance, above one.
    assert np.all(np.array(errors) < 300 * np.array(rtols)), errors
    assert np.all(np.diff(np.log10(errors)) < -1.4), errors


@pytest.mark.slow
def test_a_chain_of_double_wells_agrees_with_another_method():
    t1 = 400.0
    x = (jnp.arange(60.0) + 0.5) / 60.0
    u0 = jnp.cos(7 * x**2) + 0.1 * x
    term = gradient_flow(allen_cahn)
    ts = jnp.geomspace(1.0, t1, 20)
    solution = solve(
        term, u0, t1, 1e-8, saveat=diffrax.SaveAt(ts=ts, controller_state=True)
    )

    slope, curvature = jax.jit(jax.grad(allen_cahn)), jax.jit(jax.hessian(allen_cahn))
    reference = scipy.integrate.solve_ivp(
        lambda t, u: -np.asarray(slope(u)), (0.0, t1), np.asarray(u0), method="Radau",
        jac=lambda t, u: -np.asarray(curvature(u)), rtol=1e-10, atol=1e-12, t_eval=ts,
    )  # fmt: skip
    assert distance(solution.ys, jnp.asarray(reference.y.T)) < 1e-6

    energies = jax.vmap(allen_cahn)(solution.ys)
    assert jnp.all(jnp.diff(energies) < 1e-9 * energies[:-1])
    # Layers met: fewer sign changes than at the start, after a long quiet stretch.
    changes = jnp.sum(jnp.sign(solution.ys[:, 1:]) != jnp.sign(solution.ys[:, :-1]), 1)
    assert changes[-1] < changes[0]
    # An explicit method would need t1 |J| / 3.3 steps at least (Tsit5's real axis).
    stiffness = float(jnp.linalg.norm(curvature(solution.ys[-1]), 2))
    assert int(solution.stats["num_steps"]) < 0.25 * t1 * stiffness / 3.3


@pytest.mark.parametrize("rtol", [1e-4, 1e-7, 1e-10])
def test_the_error_is_near_the_tolerance_without_saddles(rtol):
    y0 = exact(jnp.asarray(0.0))
    solution = solve(STIFF, y0, 10.0, jnp.asarray(rtol), jnp.asarray(rtol))
    assert distance(last(solution), exact(10.0)) < 20 * rtol


def test_time_may_run_backwards():
    term = diffrax.ODETerm(lambda t, y, args: -y * (1 + 0.5 * jnp.sin(t)))
    solution = solve(term, jnp.ones(2), 0.0, 1e-8, t0=2.0)
    expected = jnp.exp(2 + 0.5 * (1 - jnp.cos(2.0)))
    np.testing.assert_allclose(last(solution), expected, rtol=1e-6)


def test_single_precision_stays_single_and_accurate():
    def f(t, y, args):
        return {"a": -50 * (y["a"] - jnp.cos(t)), "b": (-(y["b"][0] ** 3),)}

    y0 = {"a": jnp.ones(3, jnp.float32), "b": (jnp.float32(1.0),)}
    t0, t1 = jnp.float32(0.0), jnp.float32(5.0)
    rtol, atol = jnp.float32(1e-4), jnp.float32(1e-6)
    solution = solve(diffrax.ODETerm(f), y0, t1, rtol, atol, t0=t0)
    end = last(solution)
    assert {leaf.dtype for leaf in jax.tree.leaves(end)} == {jnp.dtype("float32")}
    lam, t = 50.0, 5.0
    a = (lam**2 * np.cos(t) + lam * np.sin(t)) / (lam**2 + 1)
    np.testing.assert_allclose(end["a"], a, atol=2e-3)
    np.testing.assert_allclose(end["b"][0], 11**-0.5, atol=2e-3)


# --- Cost -----------------------------------------------------------------------------


def test_one_evaluation_per_step_is_the_rule():
    network = DeepLinearNetwork([3.0, 2.0, 1.0])
    solution = solve(gradient_flow(network.loss), network.at(0.0), 12.0, 1e-8)
    counts = solution.controller_state
    steps = int(solution.stats["num_steps"])
    assert steps <= int(counts.num_evaluations) < 1.1 * steps
    assert int(counts.num_error_rejections) + int(counts.num_newton_rejections) == int(
        solution.stats["num_rejected_steps"]
    )


def test_the_counters_count():
    """Against a count of the calls themselves."""
    calls = {"f": 0, "Jv": 0}

    def count(name):
        def add(x):
            calls[name] += 1
            return x

        return add

    shape = jax.ShapeDtypeStruct((2,), jnp.dtype("float64"))

    @jax.custom_jvp
    def field(y):
        return jax.pure_callback(count("f"), shape, -(y**3))

    @field.defjvp
    def product(primals, tangents):
        (y,), (v,) = primals, tangents
        image = -3 * y**2 * v
        image = jax.custom_derivatives.linear_call(
            lambda _, v: jax.pure_callback(count("Jv"), shape, v),
            lambda _, v: v, (), image,
        )  # fmt: skip
        return field(y), image

    term = diffrax.ODETerm(lambda t, y, args: field(y))
    solution = solve(term, jnp.array([1.0, 30.0]), 3.0, 1e-6)
    counts = jax.block_until_ready(solution.controller_state)
    assert int(counts.num_evaluations) == calls["f"]
    assert int(counts.num_products) == calls["Jv"]
