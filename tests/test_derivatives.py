"""Derivatives of objectives, and the algebra on parameter trees they rest on."""

from contextlib import contextmanager

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from flowsim import _trees
from flowsim.derivatives import (
    directional_derivatives,
    gradient,
    hessian,
    hessian_vector_product,
    linearise,
    value_and_grad_norm,
)
from flowsim.loss import PopulationLoss

from .problems import named_chain, random_model


class Quadratic(eqx.Module):
    """1/2 y^T H y + b . y over a dictionary of two arrays, H given."""

    H: jax.Array
    b: jax.Array

    def __call__(self, params, /):
        y, _ = _trees.ravel(params)
        return 0.5 * y @ self.H @ y + self.b @ y


@pytest.fixture
def quadratic():
    A = jax.random.normal(jax.random.key(0), (7, 7))
    return Quadratic(A + A.T, jnp.arange(7.0))


@pytest.fixture
def params():
    return {"a": jnp.array([0.3, -1.0, 2.0]), "b": jnp.array([[1.0, 0.5], [-2.0, 4.0]])}


def flat(tree):
    return _trees.ravel(tree)[0]


def test_derivatives_of_a_quadratic_are_exact(quadratic, params):
    y = flat(params)
    slope = quadratic.H @ y + quadratic.b
    np.testing.assert_allclose(flat(gradient(quadratic, params)), slope, rtol=1e-14)
    value, norm = value_and_grad_norm(quadratic, params)
    np.testing.assert_allclose(value, quadratic(params), rtol=1e-14)
    np.testing.assert_allclose(norm, jnp.linalg.norm(slope), rtol=1e-14)
    for batch_size in (None, 1, 3):
        dense = hessian(quadratic, params, batch_size=batch_size)
        np.testing.assert_allclose(dense, quadratic.H, atol=1e-14)


def test_derivatives_have_the_structure_of_the_parameters(quadratic, params):
    shapes = jax.tree.map(jnp.shape, params)
    slope = gradient(quadratic, params)
    assert jax.tree.map(jnp.shape, slope) == shapes
    product = hessian_vector_product(quadratic, params, slope)
    assert jax.tree.map(jnp.shape, product) == shapes


@pytest.fixture
def attention():
    chain = named_chain("default")
    return PopulationLoss(chain), random_model(chain, width=3, key_width=2)


def test_hessian_is_that_of_nested_differentiation(attention):
    loss, model = attention
    y, unravel = _trees.ravel(model)
    expected = jax.jit(jax.hessian(lambda v: loss(unravel(v))))(y)
    dense = hessian(loss, model)
    np.testing.assert_allclose(dense, expected, atol=1e-14)
    np.testing.assert_array_equal(dense, dense.T)


def test_hessian_vector_products_are_products_with_the_hessian(attention):
    loss, model = attention
    dense = hessian(loss, model)
    slope, product = linearise(loss, model)
    np.testing.assert_allclose(flat(slope), flat(gradient(loss, model)), rtol=1e-14)
    for seed in range(3):
        tangent = random_model(named_chain("default"), seed=seed, width=3, key_width=2)
        expected = dense @ flat(tangent)
        for vector in (
            hessian_vector_product(loss, model, tangent),
            product(tangent),
        ):
            np.testing.assert_allclose(flat(vector), expected, atol=1e-14)


def test_directional_derivatives_of_a_polynomial_are_exact():
    def objective(p):
        return p["x"] ** 3 * p["y"] + p["y"] ** 2

    polynomial = np.polynomial.Polynomial
    x, y = polynomial([2.0, 1.0]), polynomial([-1.0, 2.0])
    along = x**3 * y + y**2
    point = {"x": jnp.array(2.0), "y": jnp.array(-1.0)}
    direction = {"x": jnp.array(1.0), "y": jnp.array(2.0)}
    derivatives = jax.jit(lambda p, v: directional_derivatives(objective, p, v, 5))(
        point, direction
    )
    expected = [along.deriv(order)(0.0) for order in range(1, 5)] + [0.0]
    np.testing.assert_allclose(jnp.array(derivatives), expected, atol=1e-13)


def test_directional_derivatives_agree_with_gradient_and_hessian(attention):
    loss, model = attention
    direction = random_model(named_chain("default"), seed=4, width=3, key_width=2)
    first, second, third = jax.jit(lambda m, v: directional_derivatives(loss, m, v, 3))(
        model, direction
    )
    slope = gradient(loss, model)
    np.testing.assert_allclose(first, _trees.inner(slope, direction), atol=1e-14)

    @jax.jit
    def curvature(s):
        point = _trees.add_scaled(model, s, direction)
        return _trees.inner(hessian_vector_product(loss, point, direction), direction)

    np.testing.assert_allclose(second, curvature(0.0), atol=1e-14)
    h = 1e-4
    difference = (curvature(h) - curvature(-h)) / (2 * h)
    np.testing.assert_allclose(third, difference, rtol=1e-6)


@contextmanager
def counted_compilations():
    """A list that grows by one entry per compilation."""
    compilations, active = [], [True]

    def listener(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            compilations.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listener)
    try:
        yield compilations
    finally:
        active.clear()


def test_second_call_does_not_compile(attention):
    loss, _ = attention
    # Sizes that no other test has compiled anything for.
    model = random_model(named_chain("default"), width=2, key_width=1)
    other = _trees.scale(0.5, model)
    calls = (value_and_grad_norm, hessian)
    with counted_compilations() as compilations:
        for call in calls:
            call(loss, model)
        assert compilations
        compilations.clear()
        for call in calls:
            call(loss, other)
        assert compilations == []


def test_hessian_works_inside_other_transformations(attention):
    loss, model = attention
    trace = jax.jit(lambda m: jnp.trace(hessian(loss, m)))
    models = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), model)
    traces = jax.vmap(trace)(models)
    np.testing.assert_allclose(traces[0], jnp.trace(hessian(loss, model)), rtol=1e-13)
    # The objective may hold traced values itself.
    scaled = jax.grad(lambda s: jnp.trace(hessian(lambda m: s * loss(m), model)))(2.0)
    np.testing.assert_allclose(scaled, traces[0], rtol=1e-13)


def test_orders_and_batches_below_one_are_refused(quadratic, params):
    with pytest.raises(ValueError, match="order must be at least 1; got 0"):
        directional_derivatives(quadratic, params, params, 0)
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        hessian(quadratic, params, batch_size=0)


# Parameter trees.


def test_tree_algebra_is_that_of_the_flat_vector(params):
    other = jax.tree.map(lambda leaf: jnp.cos(leaf), params)
    x, y = flat(params), flat(other)
    assert _trees.num_params(params) == x.size == 7
    np.testing.assert_allclose(_trees.inner(params, other), x @ y, rtol=1e-14)
    np.testing.assert_allclose(_trees.norm(params), jnp.linalg.norm(x), rtol=1e-14)
    np.testing.assert_allclose(
        flat(_trees.add_scaled(params, -0.3, other)), x - 0.3 * y, rtol=1e-14
    )
    np.testing.assert_array_equal(flat(_trees.subtract(params, other)), x - y)
    np.testing.assert_array_equal(flat(_trees.scale(3.0, params)), 3.0 * x)
    rebuilt = _trees.ravel(params)[1](x)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, rebuilt, params))


def test_norm_has_derivative_zero_at_zero(params):
    zero = _trees.scale(0.0, params)
    value, slope = jax.value_and_grad(_trees.norm)(zero)
    assert value == 0.0
    assert jnp.all(flat(slope) == 0.0)
    slope = jax.grad(_trees.norm)(params)
    np.testing.assert_allclose(
        flat(slope), flat(params) / _trees.norm(params), rtol=1e-14
    )


@pytest.mark.parametrize(
    "tree, message",
    [
        ({}, "model must have at least one array leaf"),
        ({"a": 1.0}, r"model\['a'\] must be a floating-point array; got float"),
        ({"a": jnp.arange(3)}, r"model\['a'\] must be .*; got int64"),
        ([jnp.ones(2), jnp.tanh], r"model\[1\] must be .*; got"),
    ],
)
def test_parameters_must_be_floating_point_arrays(tree, message):
    _trees.check_params({"a": jnp.ones(3)})
    with pytest.raises(ValueError, match=message):
        _trees.check_params(tree)


def test_tracers_are_told_from_values():
    assert not _trees.is_traced({"a": jnp.ones(2), "b": 1.0})
    seen = []
    jax.jit(lambda x: seen.append(_trees.is_traced({"a": 1.0, "b": x})))(1.0)
    assert seen == [True]
