"""The flow near the origin: its linearisation, condensation, times of escape."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from flowsim import _trees, theory
from flowsim.derivatives import gradient
from flowsim.loss import PopulationLoss
from flowsim.markov import lazy_chain
from flowsim.model import AttentionModel

from .comparisons import DEFAULT, close, every_chain, jacobian, largest, trees_close
from .problems import named_chain, random_model


def flows(chain, starts, times, *, steps_per_unit=100):
    """Classical Runge-Kutta with a fixed step: a reference independent of the package.

    `starts` has a leading axis of starts; the paths have that axis and one of `times`,
    which must be multiples of 1 / steps_per_unit.
    """
    loss = PopulationLoss(chain)
    h = 1.0 / steps_per_unit
    rows = np.array([round(steps_per_unit * t) for t in times])

    def path(start):
        flat, unravel = _trees.ravel(start)
        velocity = jax.grad(lambda y: -loss(unravel(y)))

        def step(y, _):
            k1 = velocity(y)
            k2 = velocity(y + 0.5 * h * k1)
            k3 = velocity(y + 0.5 * h * k2)
            k4 = velocity(y + h * k3)
            return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), y

        _, points = jax.lax.scan(step, flat, length=rows[-1] + 1)
        return jax.vmap(unravel)(points[rows])

    return jax.jit(jax.vmap(path))(starts)


def scaled(scales, model):
    """Copies of the model times each of the scales, stacked."""
    return jax.vmap(lambda s: _trees.scale(s, model))(jnp.asarray(scales))


@every_chain
def test_origin_spectrum_is_plus_and_minus_mu_and_zeros(name):
    chain = named_chain(name)
    width = 3
    origin = _trees.scale(0.0, random_model(chain, width=width))
    assert largest(gradient(PopulationLoss(chain), origin)) == 0.0
    values = jnp.linalg.eigvalsh(jacobian(chain, origin))
    mu = theory.origin_rate(chain)
    expected = np.zeros(values.size)
    expected[:width], expected[-width:] = -mu, mu
    close(values, expected, 1e-14)


@every_chain
def test_linearised_origin_flow_is_the_matrix_exponential(name):
    chain = named_chain(name)
    model = random_model(chain, width=3, key_width=2)
    origin = _trees.scale(0.0, model)
    start, unravel = _trees.ravel(model)
    for t in (0.0, 0.3, 4.0):
        propagator = scipy.linalg.expm(t * np.asarray(jacobian(chain, origin)))
        trees_close(
            theory.linearised_origin_flow(model, chain, t),
            unravel(jnp.asarray(propagator @ start)),
        )


@every_chain
def test_linearised_flow_condenses_onto_the_predicted_directions(name):
    chain = named_chain(name)
    model = random_model(chain)
    predicted = theory.condensation_direction(model, chain)
    t = 16.0 / theory.origin_rate(chain)
    late = theory.linearised_origin_flow(model, chain, t)
    size = predicted.amplitude * jnp.exp(16.0)
    close(late.W0 / size, predicted.W0, 1e-5)
    close(late.W1 / size, predicted.W1, 1e-5)
    close(jnp.linalg.norm(predicted.alpha), 1.0)
    close(jnp.linalg.norm(predicted.W0), 1.0)
    close(jnp.linalg.norm(predicted.W1), 1.0)


def test_true_flow_leaves_the_linearised_one_at_second_order_or_better():
    # Lemma 3.1: the difference is O(eps^2 exp(2 mu t)) from distance eps.
    chain = named_chain(DEFAULT)
    unit_start = random_model(chain, width=3, key_width=2, scale=1.0)
    scales = np.array([1e-2, 3e-3, 1e-3])
    starts = scaled(scales, unit_start)
    true = jax.tree.map(lambda leaf: leaf[:, 0], flows(chain, starts, [3.0]))
    linear = jax.vmap(lambda m: theory.linearised_origin_flow(m, chain, 3.0))(starts)
    differences = jax.vmap(_trees.norm)(_trees.subtract(true, linear))
    orders = np.diff(np.log(differences)) / np.diff(np.log(scales))
    assert np.all(orders > 1.95), orders


def test_start_on_the_stable_manifold_has_no_condensation_direction():
    chain = named_chain(DEFAULT)
    model = random_model(chain)
    excess = chain.stationary - 0.25
    row = chain.stationary / jnp.linalg.norm(chain.stationary)
    column = excess / jnp.linalg.norm(excess)
    alpha = jnp.arange(1.0, 6.0)
    model = eqx.tree_at(
        lambda m: (m.W0, m.W1),
        model,
        (jnp.outer(row, alpha), -jnp.outer(alpha, column)),
    )
    assert theory.condensation_direction(model, chain).amplitude < 1e-14


@pytest.mark.slow
def test_escape_times_grow_with_the_logarithm_of_the_scale():
    chain = lazy_chain([0.6, 0.3, 0.1], 0.9)
    unit_start = random_model(chain, width=2, key_width=1, scale=1.0)
    predicted = theory.escape_times(chain)
    levels = theory.plateaus(chain)
    scales = (1e-6, 1e-8)
    end = 1.2 * np.log(1 / scales[1]) * float(predicted.origin + predicted.focus)
    times = np.arange(0.0, np.ceil(end), 0.2)
    paths = flows(chain, scaled(scales, unit_start), times, steps_per_unit=10)
    # Each stage ends when its order parameter passes a fixed level.
    middle = 0.5 * (levels.origin + levels.second)
    losses = jax.vmap(jax.vmap(PopulationLoss(chain)))(paths)
    phi = jax.vmap(jax.vmap(AttentionModel.attention_logits))(paths)
    attention = jnp.linalg.norm(phi, axis=(-2, -1))
    escapes = [
        [np.interp(0.0, level, times) for level in (middle - loss, size - 0.1)]
        for loss, size in zip(
            np.minimum.accumulate(losses, axis=1),
            np.maximum.accumulate(attention, axis=1),
            strict=True,
        )
    ]
    (first, second), (first_late, second_late) = escapes
    spread = np.log(scales[0] / scales[1])
    np.testing.assert_allclose(
        (first_late - first) / spread, predicted.origin, rtol=1e-3
    )
    np.testing.assert_allclose(
        (second_late - second) / spread,
        predicted.origin + predicted.focus,
        rtol=1e-3,
    )
