"""Events of a run, attention received, and in which order tokens are learnt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim import empirical

from .problems import observed_flow


def drawn_run(ts, ratios, attention, entropy):
    """A run with the given curves, all else as of a real one."""
    _, run = observed_flow()
    seen = jax.tree.map(lambda leaf: leaf[: len(ts)], run.observables)
    values = seen.singular_values.W0.at[:, 1].set(
        jnp.asarray(ratios) * seen.singular_values.W0[:, 0]
    )
    replace = {
        "mean_top_attention": jnp.asarray(attention),
        "mean_attention_entropy": jnp.asarray(entropy),
    }
    singular = dataclasses.replace(seen.singular_values, W0=values)
    seen = dataclasses.replace(seen, singular_values=singular, **replace)
    return dataclasses.replace(run, ts=jnp.asarray(ts), observables=seen)


@pytest.mark.slow
def test_events_are_the_crossings_and_extrema_of_the_curves():
    run = drawn_run(
        ts=[0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0],
        ratios=[0.9, 0.15, 0.01, 0.02, 0.18, 0.3, 0.3],
        # Lower before the peak than after it, higher after the second direction.
        attention=[0.1, 0.04, 0.2, 0.15, 0.05, 0.3, 0.25],
        entropy=[3.0, 3.0, 2.5, 2.8, 3.1, 2.0, 2.2],
    )
    events = empirical.find_events(run)
    assert events.condensed == pytest.approx(10 + 10 * (0.15 - 0.05) / 0.14)
    assert events.second_direction == pytest.approx(30 + 10 * 0.08 / 0.16)
    assert events.attention_start == pytest.approx(0.1)
    assert events.attention_peak == pytest.approx((20.0, 0.2))
    assert events.attention_valley == pytest.approx((40.0, 0.05))
    assert events.entropy_minimum == pytest.approx((20.0, 2.5))
    assert "second direction at" in str(events)


@pytest.mark.slow
def test_what_does_not_happen_is_none():
    flat = [0.1] * 4
    run = drawn_run([0.0, 1.0, 2.0, 3.0], [0.9] * 4, flat, [3.0] * 4)
    events = empirical.find_events(run)
    assert events.condensed is None and events.second_direction is None
    assert events.attention_peak is None and events.attention_valley is None
    assert events.entropy_minimum is None
    # What is extreme in the last row may go on: it is no extremum yet.
    falling = drawn_run(
        [0.0, 1.0, 2.0, 3.0], [0.9] * 4, [0.1, 0.09, 0.08, 0.07], [3.0] * 4
    )
    assert empirical.find_events(falling).attention_valley is None
    rising = drawn_run([0.0, 1.0, 2.0, 3.0], [0.9] * 4, [0.1, 0.2, 0.3, 0.4], [3.0] * 4)
    assert empirical.find_events(rising).attention_peak is None


# Learning.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "dense, focus"])
def test_excess_losses_sum_to_the_loss_above_the_floor(name):
    chain, run = observed_flow(name)
    query, target = empirical.excess_loss(chain, run.models)
    above = run.losses - chain.entropy_rate
    np.testing.assert_allclose(query @ chain.stationary, above, atol=1e-12)
    np.testing.assert_allclose(target @ chain.stationary, above, atol=1e-12)
    assert (np.asarray(query) >= -1e-12).all()


def test_attention_received_starts_at_pi_and_sums_to_one():
    chain, run = observed_flow()
    received = empirical.attention_received(chain, run.models)
    np.testing.assert_allclose(received[0], chain.stationary, rtol=1e-3)
    np.testing.assert_allclose(received.sum(axis=1), 1.0, rtol=1e-12)
    assert float(jnp.abs(received - chain.stationary).max()) > 0.01
    seen = run.observables.mean_top_attention
    np.testing.assert_allclose(received[:, 0], seen, rtol=1e-12)


def test_bands_part_the_tokens_by_mass_and_average_the_excess():
    chain, run = observed_flow("dense, focus")
    bands = empirical.excess_by_band(run, chain)
    assert sorted(i for band in bands for i in band.tokens) == [0, 1, 2, 3]
    pi = np.asarray(chain.stationary)
    names = ("most frequent", "middle", "rare")
    for token in range(4):
        before = pi[pi > pi[token]].sum()
        (band,) = (band for band in bands if token in band.tokens)
        assert band.name == names[min(int(3 * before), 2)]
    lowest = [min(float(chain.stationary[i]) for i in band.tokens) for band in bands]
    highest = [max(float(chain.stationary[i]) for i in band.tokens) for band in bands]
    assert all(a >= b for a, b in zip(lowest[:-1], highest[1:], strict=True))
    total = sum(band.mass * band.as_query for band in bands)
    np.testing.assert_allclose(total, run.losses - chain.entropy_rate, atol=1e-12)
    for band in bands:
        if band.half_as_query is not None:
            at = run.nearest(band.half_as_query)
            assert band.as_query[at] <= 0.5 * band.as_query[0] < band.as_query[at - 1]


def test_attraction_lists_tokens_by_the_time_of_their_largest_factor():
    chain = fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5, tokens="abcd")
    _, run = observed_flow()
    rows = empirical.attraction(run, chain, tokens=("d", "zebra"), num_most=2)
    assert {"a", "d"} <= {row["token"] for row in rows} and len(rows) <= 3
    times = [row["at"] for row in rows]
    assert times == sorted(times)
    top = next(row for row in rows if row["token"] == "a")
    received = empirical.attention_received(chain, run.models)[:, 0]
    for name, extreme in (("largest", received.max()), ("smallest", received.min())):
        assert top[f"{name} factor"] == pytest.approx(float(extreme) / 0.75)
