"""The flow: what it refuses, in one clear line."""

import functools

import diffrax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs

from .problems import hyperbolic as product


def test_an_observer_with_other_numbers_compiles_nothing_anew():
    traced = []

    def observe(scale, y):
        traced.append(scale)
        return scale * y[0]

    counts = []
    for scale in (1.0, 3.0):
        partial = functools.partial(observe, jnp.asarray(scale))
        run = fs.gradient_flow(product, jnp.ones(2), t1=1.0, observe=partial)
        np.testing.assert_allclose(run.observables, scale * run.models[:, 0])
        counts.append(len(traced))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"t1": -1.0}, "t1 must be finite and after t0"),
        ({"t1": np.inf}, "t1 must be finite"),
        ({"t1": 1.0, "rtol": 0.0}, "rtol must lie between"),
        ({"t1": 1.0, "atol": -1.0}, "atol must be finite"),
        ({"t1": 1.0, "max_steps": 0}, "max_steps must be at least 1"),
        ({"t1": 1.0, "save": [0.5, 0.2]}, "increasing"),
        ({"t1": 1.0, "save": [0.5, 2.0]}, "must lie in"),
        ({"t1": 1.0, "save": 0}, "n >= 1"),
        ({"t1": 1.0, "stop": -1.0}, "must be positive"),
        ({"t1": 1.0, "stop": "soon"}, "stop must be"),
        ({"t1": 1.0, "solver": diffrax.Euler()}, "adaptive"),
    ],
)
def test_wrong_arguments_get_one_clear_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        fs.gradient_flow(product, jnp.ones(2), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "model", "message"),
    [
        (lambda y: y, jnp.ones(2), "real scalar"),
        (product, jnp.ones(2, int), "floating-point"),
        (lambda y: 0.0, {}, "at least one array leaf"),
        (lambda y: 0.0, {"a": "text"}, "floating-point array"),
    ],
)
def test_wrong_objectives_and_models_get_one_clear_line(objective, model, message):
    with pytest.raises(ValueError, match=message):
        fs.gradient_flow(objective, model, t1=1.0)
