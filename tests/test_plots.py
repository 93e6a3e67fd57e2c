"""Figures over time: they show the result and say what it is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from flowsim import plots
from flowsim.markov import MarkovChain
from flowsim.plots import _style

from .figures import (
    CHAIN,
    FIGURES,
    NUM_TIMES,
    PATH,
    RUN,
    STAGES,
    Stage,
    assert_same_curves,
    data_lines,
    every_figure,
    legend_texts,
    synthetic_chain,
    synthetic_run,
)


@every_figure
def test_a_figure_shows_the_numbers_of_the_result_over_its_times(name):
    draw, expected, _ = FIGURES[name]
    lines = data_lines(draw())
    assert_same_curves([line.get_ydata() for line in lines], expected)
    for line in lines:
        np.testing.assert_array_equal(line.get_xdata(), RUN.ts)


@every_figure
def test_labels_name_quantity_and_unit(name):
    draw, _, words = FIGURES[name]
    ax: Any = draw()
    assert "flow time" in ax.get_xlabel()
    assert all(word in ax.get_ylabel() for word in words)


@every_figure
def test_a_figure_is_drawn_into_the_axes_given_and_else_into_its_own(name):
    draw, expected, _ = FIGURES[name]
    axes: Any = Figure().subplots(1, 2)
    left, right = axes
    assert draw(ax=left) is left
    assert len(data_lines(left)) == len(expected) and not data_lines(right)
    assert left.get_legend() is None
    own = draw()
    assert isinstance(own, Axes) and own.figure is not left.figure
    assert own.figure.axes == [own]


@every_figure
def test_lines_are_told_apart_without_colour_and_dashes_are_theory(name):
    lines = data_lines(FIGURES[name][0]())
    looks = {(line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(lines)
    assert "--" not in {line.get_linestyle() for line in lines}


def test_colours_are_told_apart():
    assert len(set(_style.PALETTE)) == len(_style.PALETTE) >= _style.NUM_SHOWN
    lines = data_lines(plots.rank_figure(RUN))
    assert len({line.get_color() for line in lines[:4]}) == 4
    # sigma_3/sigma_1 of W0 goes with W0.
    assert same_color(lines[4].get_color(), lines[0].get_color())


def test_theory_lines_are_dashed_at_the_predicted_values():
    def levels(ax):
        flat = [line for line in ax.get_lines() if line not in data_lines(ax)]
        assert all(line.is_dashed() for line in flat)
        return [float(line.get_ydata()[0]) for line in flat]

    predicted = [np.log(4), float(CHAIN.unigram_entropy), float(CHAIN.entropy_rate)]
    assert levels(plots.loss_figure(RUN, CHAIN)) == pytest.approx(predicted)
    assert levels(plots.loss_figure(RUN)) == []
    assert levels(plots.loss_figure(RUN, levels={"saddle": 0.7})) == [0.7]
    assert levels(plots.attention_figure(RUN, CHAIN)) == [CHAIN.stationary[2]]
    assert levels(plots.attention_figure(RUN, CHAIN, on="self")) == []
    assert levels(plots.entropy_figure(RUN, CHAIN)) == [CHAIN.unigram_entropy]


def test_names_of_levels_stand_at_their_lines_and_apart():
    levels = {"low": 0.61, "close": 0.612, "high": 1.4}
    ax: Any = plots.loss_figure(RUN, levels=levels)
    names: dict[str, Any] = {text.get_text(): text for text in ax.texts}
    height = {name: text.xy[1] for name, text in names.items()}
    to_axes = ax.transScale + ax.transLimits
    assert height["high"] == pytest.approx(to_axes.transform((1, 1.4))[1])
    assert height["low"] < to_axes.transform((1, 0.61))[1] < height["close"]
    ax.figure.draw_without_rendering()
    low, close = (names[name].get_window_extent() for name in ("low", "close"))
    assert not low.overlaps(close)


def test_positions_are_moved_apart_no_more_than_needed():
    far = np.array([0.0, 1.0, 3.0])
    np.testing.assert_array_equal(_style.apart(far, 0.5), far)
    close = np.array([0.0, 1.0, 1.1, 1.2, 4.0])
    moved = _style.apart(close, 0.5)
    assert np.all(np.diff(moved) >= 0.5 - 1e-12)
    # Half the way that the last of the three would go if moved up alone.
    assert np.abs(moved - close).max() <= 0.4 + 1e-12


@every_figure
def test_time_is_logarithmic_from_before_the_first_move(name):
    ax = FIGURES[name][0]()
    left, right = ax.get_xlim()
    assert ax.get_xscale() == "log" and right == RUN.ts[-1]
    fallen = np.asarray(RUN.losses[0] - RUN.losses)
    first_move = RUN.ts[np.argmax(fallen > 0.01 * fallen[-1])]
    assert 0.1 * first_move < left < first_move


def test_time_axis_of_runs_that_do_not_start_at_zero_or_do_not_move():
    replace = dataclasses.replace
    late: Any = plots.gradient_figure(replace(RUN, ts=RUN.ts + 2e3))
    assert late.get_xscale() == "log" and late.get_xlim() == (2e3, 1.2e4)
    negative: Any = plots.gradient_figure(replace(RUN, ts=RUN.ts - 5.0))
    assert negative.get_xscale() == "linear" and negative.get_xlim()[0] == -5.0
    flat = replace(RUN, losses=jnp.ones(NUM_TIMES))
    assert plots.gradient_figure(flat).get_xlim()[0] == pytest.approx(1e-2)
    steps: Any = plots.gradient_figure(replace(RUN, time_unit="steps"))
    assert "steps" in steps.get_xlabel()
    one = jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim else leaf, RUN)
    plots.cycle_figure(one, CHAIN).draw_without_rendering()


def test_few_ticks_get_plain_numbers():
    short = dataclasses.replace(RUN, ts=jnp.linspace(0.0, 400.0, NUM_TIMES))
    ax: Any = plots.gradient_figure(short)
    ax.figure.draw_without_rendering()
    shown = {text.get_text() for text in ax.get_xticklabels()}
    assert {"50", "100", "200"} <= shown


@pytest.mark.parametrize(
    ("draw", "values", "mean"),
    [
        (plots.attention_figure, "top_attention", "mean_top_attention"),
        (
            lambda run, chain: plots.attention_figure(run, chain, on="self"),
            "self_attention",
            "mean_self_attention",
        ),
        (plots.entropy_figure, "attention_entropy", "mean_attention_entropy"),
        (plots.norm_figure, "embedding_norms", None),
    ],
)
def test_large_vocabularies_are_shown_by_frequent_tokens_and_mean(draw, values, mean):
    chain = synthetic_chain(64)
    run = synthetic_run(chain)
    ax: Any = draw(run, chain)
    seen = run.observables
    values = np.asarray(getattr(seen, values))
    frequent = np.argsort(-np.asarray(chain.stationary))[: _style.NUM_SHOWN]
    if mean is None:
        average = values @ np.asarray(chain.stationary)
    else:
        average = getattr(seen, mean)
    expected = [*values[:, frequent].T, average]
    assert_same_curves([line.get_ydata() for line in data_lines(ax)], expected)
    texts = legend_texts(ax)
    for index, text in zip(frequent, texts, strict=False):
        assert chain.tokens is not None
        assert chain.tokens[index].replace("$", "\\$") in text
    assert "mean" in texts[-1]


def test_all_tokens_of_small_vocabularies_are_shown_by_name():
    texts = legend_texts(plots.norm_figure(RUN, CHAIN))
    assert len(texts) == 4
    # Most frequent first; a name that starts with an underscore is not hidden.
    assert texts[0].startswith("“\\$a_b\\$”") and any("_x" in text for text in texts)
    nameless = MarkovChain(CHAIN.kernel, CHAIN.stationary)
    texts = legend_texts(plots.norm_figure(RUN, nameless))
    assert texts[0].startswith("token 2")


def test_paths_begin_and_end_where_the_embeddings_do():
    ax: Any = plots.path_figure(PATH, CHAIN)
    lines: list[Any] = ax.get_lines()
    starts = lines.pop()
    assert_same_curves(
        [line.get_xydata().ravel() for line in lines],
        [PATH.coordinates[:, token].ravel() for token in range(4)],
    )
    assert all(list(line.get_markevery()) == [NUM_TIMES - 1] for line in lines)
    assert_same_curves(starts.get_xydata(), PATH.coordinates[0])
    assert "75.0 %" in ax.get_xlabel() and "20.0 %" in ax.get_ylabel()
    assert "parameter units" in ax.get_xlabel() and ax.get_aspect() == 1.0
    given: Any = Figure().subplots()
    assert plots.path_figure(PATH, CHAIN, ax=given) is given


def test_stages_are_shaded_in_turn_and_named_in_order():
    ax: Any = plots.loss_figure(RUN, stages=STAGES)
    left, _ = ax.get_xlim()
    spans = [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches]
    np.testing.assert_allclose(spans, [(left, 20.0), (100.0, 110.0)])
    assert [text.get_text() for text in ax.texts] == [s.name for s in STAGES]
    assert ax.get_xlim() == (left, float(RUN.ts[-1]))
    # Also where bands are narrower than letters, names do not run into each other.
    at = [text.get_position()[0] for text in ax.texts]
    assert np.all(np.diff(at) > 0.03)
    assert all(text.get_position()[1] > 1 for text in ax.texts)


def test_stages_outside_the_axis_are_left_out():
    early, late = Stage("early", 0.0, 1e-4), Stage("late", 2e4, 3e4)
    ax: Any = plots.loss_figure(RUN, stages=[early, late])
    assert not ax.patches and not ax.texts
