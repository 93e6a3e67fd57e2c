"""Finite contexts and samples against the limit; other chains with the same law."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowsim as fs
from flowsim import empirical
from flowsim.empirical.scaling import relative_distance

from .problems import named_chain, observed_flow, random_model

KEY = jax.random.key(0)


@pytest.mark.slow
def test_finite_contexts_approach_the_limit_like_1_over_s():
    law = empirical.context_law(
        *DEFAULT_START,
        t1=12.5,
        lengths=(16, 64, 256),
        num_windows=2**14,
        key=jax.random.key(1),
    )
    assert law.exponent == pytest.approx(-1.0, abs=0.12)
    # Measured: 1.41, 1.21, 1.25.
    np.testing.assert_allclose(law.errors * np.array(law.sizes), 1.3, rtol=0.2)


@pytest.mark.slow
def test_finite_samples_approach_the_limit_like_1_over_the_root_of_N():
    law = empirical.sample_law(*DEFAULT_START, t1=12.5, key=jax.random.key(2))
    # The root mean square of 12 samples is itself known to a fifth or so.
    assert law.exponent == pytest.approx(-0.5, abs=0.12)


DEFAULT_START = (
    named_chain("default"),
    fs.AttentionModel.init(jax.random.key(0), vocab=4, width=16, scale=1e-3),
)


@pytest.mark.slow
def test_short_contexts_lag_behind_the_burst():
    found = empirical.burst_shifts(
        *DEFAULT_START, lengths=(16, 64, 256), key=jax.random.key(1)
    )
    # Measured with this sample: -26.25, -6.0, -1.65; with another -25.5, -3.9, +1.1:
    # what is left at s = 256 is the noise of 2^14 windows.
    low, high = np.array([-32.0, -12.0, -5.0]), np.array([-20.0, -1.0, 3.0])
    assert ((low < found.shifts) & (found.shifts < high)).all()
    assert (np.diff(found.shifts) > 0).all()
    assert (found.aligned_errors < found.errors).all()
    assert (np.diff(found.errors) < 0).all()


# Other transition matrices.

LAW = np.array([0.75, 0.19, 0.05, 0.01])


@pytest.mark.parametrize("seed", range(4))
def test_shuffled_rows_keep_the_stationary_law(seed):
    chain = named_chain("default")
    mixed = empirical.shuffled_rows(chain, seed=seed)
    np.testing.assert_allclose(LAW @ mixed.transition, LAW, rtol=1e-9)
    assert float(jnp.abs(mixed.transition - chain.transition).max()) > 0.1


def test_chains_of_one_law_include_both_signs_of_c():
    chains = empirical.same_law_chains(LAW)
    for chain in chains.values():
        np.testing.assert_allclose(chain.stationary, LAW, rtol=1e-9)
    rates = [float(fs.theory.focus_rate(chain)) for chain in chains.values()]
    assert min(rates) < -0.01 and max(rates) > 0.1


@pytest.mark.slow
def test_one_law_gives_one_time_of_condensation_and_focus_by_each_c():
    found = empirical.stage_times(empirical.same_law_chains(LAW), key=KEY)
    times = [stages.condensation for stages in found]
    assert max(times) < 1.001 * min(times)
    for stages in found:
        row = stages.row()
        assert row["mu dT_I/dlog(1/eps)"] == pytest.approx(1.0, abs=1e-3)
        slope = row["|c| d(T_II - T_I)/dlog(1/eps)"]
        assert slope == pytest.approx(1.0, abs=0.01)
        assert stages.attention is not None
        assert np.sign(stages.attention) == np.sign(stages.focus_rate)


def test_alignment_removes_a_shift_of_time():
    _, run = observed_flow()
    late = dataclasses.replace(run, ts=run.ts + 3.0)
    row = run.nearest(60.0)
    shift, error = empirical.aligned_error(late, run, float(late.ts[row]))
    assert shift == pytest.approx(-3.0) and error == 0.0


def test_distances_are_relative_to_the_reference():
    reference = jnp.array([3.0, 4.0])
    distance = relative_distance(jnp.array([3.0, 5.0]), reference)
    assert distance == pytest.approx(0.2)


def test_sizes_that_do_not_fit_are_refused():
    chain, model = named_chain("default"), random_model(named_chain("default"))
    with pytest.raises(ValueError, match="must divide the largest"):
        empirical.sample_law(chain, model, t1=1.0, nums=(3, 8), key=KEY)
    with pytest.raises(ValueError, match="two positive numbers that fall"):
        empirical.stage_times({"one": chain}, scales=(1e-6, 1e-5), key=KEY)


# Which way attention goes as eps -> 0.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "dense, defocus"])
def test_beside_the_second_point_attention_leaves_by_the_sign_of_c_at_its_rate(name):
    chain = named_chain(name)
    c = float(fs.theory.focus_rate(chain))
    found = empirical.leave_second_point(chain, scales=(1e-4, 1e-6))
    assert (np.sign(found.changes) == np.sign(c)).all()
    growth = np.diff(found.times) / np.log(1e2)
    np.testing.assert_allclose(abs(c) * growth, 1.0, rtol=0.01)
    np.testing.assert_allclose(found.slopes, abs(c) * growth, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "dense, defocus"])
def test_from_the_origin_attention_goes_by_the_sign_of_c_after_both_escapes(name):
    chain = named_chain(name)
    found = empirical.leave_origin(chain, scales=(1e-5, 1e-7))
    assert (np.sign(found.changes) == np.sign(float(fs.theory.focus_rate(chain)))).all()
    assert found.slopes[0] == pytest.approx(1.0, abs=0.02)


def test_departures_need_bigrams_and_scales_that_fall():
    independent = fs.lazy_chain(LAW, 0.0)
    with pytest.raises(ValueError, match="must have c != 0"):
        empirical.leave_second_point(independent)
    for scales in ((1e-4, 1e-3), (1.5, 1e-3), (1e-3, 0.0)):
        with pytest.raises(ValueError, match="scales must be positive"):
            empirical.leave_origin(named_chain("default"), scales=scales)
