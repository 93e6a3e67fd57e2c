"""Which flows recycle Ritz vectors: large laborious ones, small ones, none traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim.flow import compilation, labour
from flowsim.solvers import SymmetricBDF, _recycling


@pytest.mark.slow
def test_large_stiff_flows_turn_to_recycling_and_say_so(monkeypatch):
    for module in (labour, _recycling):  # A hundred parameters shall count as many.
        monkeypatch.setattr(module, "SMALL", 100)
    rates = jnp.concatenate([jnp.geomspace(3e2, 3e5, 40), jnp.geomspace(1e-2, 10, 80)])
    basis, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (120, 120)))
    hessian = (basis * rates) @ basis.T

    def objective(y):
        return 0.5 * y @ hessian @ y + 0.25 * jnp.sum((y - 1) ** 4)

    runs = [
        fs.gradient_flow(objective, jnp.ones(120), t1=200.0, rtol=1e-8, solver=solver)
        for solver in (None, SymmetricBDF())
    ]
    np.testing.assert_allclose(runs[0].final, runs[1].final, atol=1e-6)
    assert "recycles" in runs[0].settings["chosen because"]
    assert "given" in runs[1].settings["chosen because"]
    products = [int(run.stats["num_products"]) for run in runs]
    assert products[0] < 0.8 * products[1], products
    easy = fs.gradient_flow(lambda y: 0.5 * y @ y, jnp.full(2, 1e-3), t1=5.0)
    assert "recycles" not in easy.settings["chosen because"]


@pytest.mark.slow
def test_small_flows_recycle_from_the_start_unless_traced():
    rates = jnp.concatenate([jnp.geomspace(3e2, 3e5, 6), jnp.geomspace(1e-2, 10, 294)])
    basis, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (300, 300)))
    hessian = (basis * rates) @ basis.T

    def objective(y):
        return 0.5 * y @ hessian @ y + 0.25 * jnp.sum((y - 1) ** 4)

    start = jnp.ones(300)
    run = fs.gradient_flow(objective, start, t1=50.0)
    plain = fs.gradient_flow(objective, start, t1=50.0, solver=SymmetricBDF())
    traced = jax.jit(lambda y: fs.gradient_flow(objective, y, t1=50.0))(start)
    assert "recycles" in run.settings["chosen because"]
    for other in (plain, traced):
        assert "recycles" not in other.settings["chosen because"]
        np.testing.assert_allclose(run.final, other.final, atol=1e-6)
    products = [int(one.stats["num_products"]) for one in (run, plain)]
    assert products[0] < 0.8 * products[1], products


def test_a_compiler_option_that_xla_does_not_know_is_left_out(monkeypatch):
    assert compilation._options("cpu") and compilation._options("gpu") is None
    with monkeypatch.context() as patch:
        patch.setattr(compilation, "_CPU_OPTIONS", {"xla_cpu_no_such_option": False})
        compilation._options.cache_clear()
        assert compilation._options("cpu") is None
        double = compilation.compiled(lambda x: 2 * x)
        assert double(jnp.asarray(3)) == 6
    compilation._options.cache_clear()
