"""The main job on its two inputs: the default cycle, and WikiText-2's bigrams."""

import functools as ft

import jax
import numpy as np
import pytest

import flowsim as fs

pytestmark = pytest.mark.slow


def flow(chain, *, width, scale, t1, seed=0, rtol=None):
    loss = fs.PopulationLoss(chain)
    model = fs.AttentionModel.init(
        jax.random.key(seed), vocab=chain.num_states, width=width, scale=scale
    )
    return fs.gradient_flow(
        loss, model, t1=t1, rtol=rtol, observe=ft.partial(fs.diagnose, loss)
    )


@pytest.fixture(scope="module")
def default_chain():
    return fs.lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)


@pytest.fixture(scope="module")
def cycle(default_chain):
    return flow(default_chain, width=16, scale=1e-3, t1=2e4)


def window(run, values, start, end):
    inside = (np.asarray(run.ts) >= start) & (np.asarray(run.ts) <= end)
    assert inside.sum() >= 2
    return np.asarray(values)[inside]


def first_passage(run, values, level, *, after=0.0):
    """First saved time later than `after` at which the values exceed the level."""
    hits = (np.asarray(values) > level) & (np.asarray(run.ts) > after)
    return float(run.ts[np.argmax(hits)])


def test_the_default_cycle_ends_at_the_floor(cycle, default_chain):
    assert cycle.outcome == fs.Outcome.reached_t1
    assert float(cycle.ts[-1]) == 2e4
    assert abs(float(cycle.losses[-1]) - 0.553611) < 1e-5
    above = float(cycle.losses[-1] - default_chain.entropy_rate)
    assert 0 < above < 1e-5


@pytest.mark.parametrize(
    ("level", "start", "end"),
    [(np.log(4), 0.0, 2.0), (0.727139, 45.0, 60.0), (0.633360, 150.0, 220.0)],
)
def test_the_loss_rests_at_the_predicted_plateaus(cycle, level, start, end):
    losses = window(cycle, cycle.losses, start, end)
    assert np.min(np.abs(losses - level)) < 2e-4
    assert np.ptp(losses) < 5e-2 * level


def test_attention_focuses_and_dilutes(cycle):
    top = cycle.observables.top_attention[:, 0]
    assert np.max(window(cycle, top, 100, 120)) > 0.98
    assert abs(float(cycle.observables.top_attention[0, 0]) - 0.75) < 1e-3
    assert float(top[-1]) < 0.2


def test_the_other_rows_turn_away_from_the_top_token_after_a_small_rise(cycle):
    for row in (1, 2, 3):
        attention = np.asarray(cycle.observables.top_attention[:, row])
        highest = int(np.argmax(attention[np.asarray(cycle.ts) < 150]))
        assert attention[highest] > 0.7505
        below = first_passage(cycle, -attention, -0.75, after=float(cycle.ts[highest]))
        assert 78 < below < 103


def test_a_second_focus_and_dilution_follows_with_token_2(cycle):
    ratio = cycle.observables.rank_ratio().W0
    assert 255 < first_passage(cycle, ratio, 0.1, after=60.0) < 285
    second = cycle.observables.self_attention[:, 1]
    assert 0.18 < window(cycle, second, 98, 102).mean() < 0.26
    peak = int(np.argmax(np.where(np.asarray(cycle.ts) > 500, second, 0.0)))
    assert 0.82 < float(second[peak]) < 0.90
    assert 1500 < float(cycle.ts[peak]) < 2200
    assert np.min(window(cycle, second, 4000, 20000)) < 0.75 * float(second[peak])
    third = cycle.observables.rank_ratio(3).W0
    assert 2500 < first_passage(cycle, third, 0.1, after=500.0) < 4000


def test_conserved_quantities_drift_less_than_a_millionth(cycle):
    drift = fs.theory.conserved_drift(cycle.observables.conserved)
    assert max(float(value) for value in drift.values()) < 1e-6, drift


def test_the_final_state_converges_with_the_tolerance(default_chain, cycle):
    fine = flow(default_chain, width=16, scale=1e-3, t1=2e4, rtol=1e-10)

    def distance(one, other):
        pairs = zip(
            jax.tree.leaves(one.final), jax.tree.leaves(other.final), strict=True
        )
        return np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))

    size = np.sqrt(sum(np.sum(a**2) for a in jax.tree.leaves(fine.final)))
    assert distance(cycle, fine) / size < 1e-7


def test_wikitext_bigrams_show_the_focus_dilution_bump():
    chain = fs.load_chain("wikitext2", vocab=64)
    assert chain.tokens is not None and chain.tokens[0] == "the"
    run = flow(chain, width=32, scale=1e-2, t1=450.0)
    ratio = run.observables.rank_ratio().W0
    attention = run.observables.mean_top_attention
    assert bool(run.succeeded)
    # Seeds move these by about 15%.
    low = first_passage(run, -ratio, -0.05)
    assert 80 < low < 110
    assert abs(float(attention[0]) - 0.126) < 1e-3
    early = np.asarray(run.ts) < 200
    peak = int(np.argmax(np.where(early, attention, 0.0)))
    assert 100 < float(run.ts[peak]) < 140
    assert 0.17 < float(attention[peak]) < 0.21
    valley = window(run, attention, float(run.ts[peak]), 350)
    assert 0.135 < valley.min() < 0.16
    assert 225 < first_passage(run, ratio, 0.1, after=low) < 315
