"""Figures: they show the result, say what it is, and leave the world as it was."""

import dataclasses
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from flowsim import plots
from flowsim.conservation import Conserved
from flowsim.diagnostics import Diagnostics, EmbeddingPath, PerMatrix
from flowsim.loss import PopulationLoss
from flowsim.markov import MarkovChain, lazy_chain
from flowsim.model import AttentionModel
from flowsim.plots import _style
from flowsim.spectrum import Spectrum
from flowsim.trajectory import Outcome, Trajectory

NUM_TIMES = 25


class Stage(NamedTuple):
    name: str
    start: float
    end: float


STAGES = (
    Stage("condensation", 0.0, 20.0),
    Stage("focus", 20.0, 100.0),
    Stage("dilution", 100.0, 110.0),
    Stage("new direction", 110.0, 1e4),
)


def synthetic_chain(vocab):
    """The most frequent token is not the first; some names are hard to typeset."""
    weights = np.roll(1.0 / np.arange(1, vocab + 1), 2)
    names = ["_x", "cost in $", "$a_b$", *(f"word{i}" for i in range(3, vocab))]
    chain = lazy_chain(weights / weights.sum(), 0.3)
    return MarkovChain(chain.kernel, chain.stationary, tokens=names[:vocab])


def synthetic_run(chain, width=3, *, models=True):
    """Numbers that are different everywhere, so that mixing two up shows."""
    rng = np.random.default_rng(0)
    d, t = chain.num_states, NUM_TIMES
    ts = np.concatenate([[0.0], np.geomspace(1e-2, 1e4, t - 1)])

    def draws(*shape):
        return jnp.asarray(rng.random((t, *shape)) + 0.1)

    def singular(q):
        return -jnp.sort(-draws(q), axis=-1)

    shapes = {"W0": (d, width), "W1": (width, d), "WQ": (width, 2), "WK": (width, 2)}
    kept = t if models else 2
    matrices: Any = {
        name: jnp.asarray(rng.normal(size=(kept, *shape)))
        for name, shape in shapes.items()
    }
    return Trajectory(
        ts=jnp.asarray(ts),
        models=AttentionModel(**matrices),
        losses=jnp.asarray(1.5 - 0.9 * ts / (ts + 50.0)),
        grad_norms=draws(),
        observables=Diagnostics(
            singular_values=PerMatrix(*(singular(width) for _ in range(4))),
            embedding_cosine=draws(),
            readout_cosine=draws(),
            attention_scale=draws(),
            attention_cosine=draws(),
            top_attention=draws(d),
            self_attention=draws(d),
            attention_entropy=draws(d),
            mean_top_attention=draws(),
            mean_self_attention=draws(),
            mean_attention_entropy=draws(),
            embedding_norms=draws(d),
            conserved=Conserved(draws(width, width), draws(width, width), draws(width)),
        ),
        outcome=Outcome.reached_t1,
        num_saved=jnp.asarray(t),
        loss_rise=jnp.zeros(()),
        stats={},
        settings={},
    )


CHAIN = synthetic_chain(4)
RUN = synthetic_run(CHAIN)
SEEN = RUN.observables
RATIOS = SEEN.rank_ratio()
PATH = EmbeddingPath(
    coordinates=jnp.asarray(np.random.default_rng(1).normal(size=(NUM_TIMES, 4, 2))),
    explained=jnp.asarray([0.75, 0.2]),
    basis=jnp.eye(2, 3),
    center=jnp.zeros(3),
)


def spectrum_of(values, tolerance=1e-8):
    values = jnp.asarray(values, float)
    count = jnp.zeros((), jnp.int32)
    return Spectrum(
        values=values,
        vectors=jnp.zeros((*values.shape, 2)),
        residuals=jnp.zeros_like(values),
        converged=jnp.ones_like(values, bool),
        radius=jnp.ones(()),
        tolerance=jnp.asarray(tolerance),
        num_symmetry=None,
        num_products=count,
        complete=True,
        method="dense",
        which="both",
    )


def drifts():
    for value in vars(SEEN.conserved).values():
        value = np.asarray(value).reshape(NUM_TIMES, -1)
        yield np.abs(value - value[0]).max(axis=1)


# Figure function, the curves that it must show, what its vertical label must say.
FIGURES = {
    "loss": (
        lambda **kw: plots.loss_figure(RUN, CHAIN, **kw),
        [RUN.losses],
        ["loss", "nats"],
    ),
    "gradient": (
        lambda **kw: plots.gradient_figure(RUN, **kw),
        [RUN.grad_norms],
        ["gradient norm", "nats"],
    ),
    "rank": (
        lambda **kw: plots.rank_figure(RUN, **kw),
        [*vars(RATIOS).values(), SEEN.rank_ratio(3).W0],
        ["sigma_2", "ratio"],
    ),
    "attention on top": (
        lambda **kw: plots.attention_figure(RUN, CHAIN, **kw),
        [*SEEN.top_attention.T],
        ["attention on “\\$a_b\\$”", "probability"],
    ),
    "attention on itself": (
        lambda **kw: plots.attention_figure(RUN, CHAIN, on="self", **kw),
        [*SEEN.self_attention.T],
        ["attention on itself", "probability"],
    ),
    "entropy": (
        lambda **kw: plots.entropy_figure(RUN, CHAIN, **kw),
        [*SEEN.attention_entropy.T],
        ["entropy", "nats"],
    ),
    "norm": (
        lambda **kw: plots.norm_figure(RUN, CHAIN, **kw),
        [*SEEN.embedding_norms.T],
        ["embedding norm", "parameter units"],
    ),
    "drift": (
        lambda **kw: plots.drift_figure(RUN, **kw),
        list(drifts()),
        ["change", "parameter units"],
    ),
}
every_figure = pytest.mark.parametrize("name", FIGURES)


def data_lines(ax: Any) -> list[Any]:
    """The lines that follow the run: not the theory lines over the whole axis."""
    return [line for line in ax.get_lines() if len(line.get_xdata()) == NUM_TIMES]


def legend_texts(ax: Any):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def assert_same_curves(shown, expected):
    """The same curves, in any order."""
    assert len(shown) == len(expected)
    shown, expected = (
        sorted(tuple(np.asarray(curve).tolist()) for curve in curves)
        for curves in (shown, expected)
    )
    np.testing.assert_array_equal(shown, expected)


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


def test_a_cycle_is_six_panels_over_logarithmic_time():
    figure: Any = plots.cycle_figure(RUN, CHAIN, STAGES)
    assert isinstance(figure, Figure) and len(figure.axes) == 6
    *over_time, path = figure.axes
    assert all(ax.get_xscale() == "log" for ax in over_time)
    assert path.get_xscale() == "linear" and len(path.get_lines()) == 5
    shown = [line.get_ydata() for ax in over_time for line in data_lines(ax)]
    expected = [
        curve
        for name in ("loss", "rank", "attention on top", "entropy", "norm")
        for curve in FIGURES[name][1]
    ]
    assert_same_curves(shown, expected)
    assert all(len(ax.patches) == 2 for ax in over_time)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(texts) == len(set(texts)) == 5
    assert texts[-1] == "start"


@pytest.mark.parametrize("vocab", [4, 64])
def test_nothing_on_the_page_of_a_cycle_is_cut_off_or_covered_by_the_legend(vocab):
    chain = synthetic_chain(vocab)
    figure: Any = plots.cycle_figure(synthetic_run(chain), chain, STAGES)
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert box.x0 >= 0 and box.y0 >= 0
    assert box.x1 <= width and box.y1 <= height
    legend = figure.legends[0].get_window_extent()
    panels = [ax.get_tightbbox() for ax in figure.axes]
    assert not any(legend.overlaps(panel) for panel in panels)


def test_a_cycle_needs_no_stages_and_invents_no_path():
    without_models = synthetic_run(CHAIN, models=False)
    figure: Any = plots.cycle_figure(without_models, CHAIN)
    assert not figure.axes[0].patches
    assert not figure.axes[5].get_lines()
    assert "kept no parameters" in figure.axes[5].texts[0].get_text()


@pytest.mark.parametrize("scale", ["linear", "symlog"])
def test_a_spectrum_shows_every_eigenvalue_by_its_sign(scale):
    small = 0.3 if scale == "linear" else 1e-5
    values = [-2.0, -small, -1e-9, 0.0, 1e-10, 2e-9, 0.5, 1.5]
    ax: Any = plots.spectrum_figure(spectrum_of(values))
    unstable, centre, stable = ax.get_lines()[:3]
    assert unstable.get_ydata().tolist() == [1.5, 0.5]
    assert centre.get_ydata().tolist() == [2e-9, 1e-10, 0.0, -1e-9]
    assert stable.get_ydata().tolist() == [-small, -2.0]
    positions = np.concatenate([line.get_xdata() for line in ax.get_lines()[:3]])
    assert np.all(np.diff(positions) > 0)
    assert legend_texts(ax) == ["unstable (2)", "centre (4)", "stable (2)"]
    assert ax.get_yscale() == scale
    assert "eigenvalue" in ax.get_ylabel() and "1 / flow time" in ax.get_ylabel()
    markers = {line.get_marker() for line in (unstable, centre, stable)}
    assert len(markers) == 3


def test_a_large_centre_leaves_room_for_the_other_eigenvalues():
    values = np.concatenate([[-1.0, -0.5], np.zeros(500), [1.0]])
    given: Any = Figure().subplots()
    ax: Any = plots.spectrum_figure(spectrum_of(values), levels={"$c$": 1.0}, ax=given)
    assert ax is given
    _, centre, _, *others = ax.get_lines()
    assert len(centre.get_xdata()) == 500
    assert np.ptp(centre.get_xdata()) < 4
    assert [line.get_ydata()[0] for line in others if line.is_dashed()] == [1.0]


@pytest.mark.parametrize("values", [[], [0.0, 1e-12], [-1.0], [3.0]])
def test_one_sided_and_empty_spectra_are_drawn(values):
    ax: Any = plots.spectrum_figure(spectrum_of(values))
    ax.figure.draw_without_rendering()


def test_an_animation_shows_saved_points_in_order(tmp_path):
    loss = PopulationLoss(CHAIN)
    animation: Any = plots.cycle_animation(RUN, loss, stages=STAGES, num_frames=4)
    figure = animation._fig
    left, right = figure.axes[:2]
    rows = [NUM_TIMES - 1]
    for frame in animation.new_frame_seq():
        animation._func(frame)
        rows.append(len(right.get_lines()[0].get_xdata()) - 1)
        model = RUN.model_at(rows[-1])
        np.testing.assert_allclose(
            left.images[0].get_array(), loss.attention(model), rtol=1e-12
        )
        title = figure.get_suptitle()
        assert f"{RUN.losses[rows[-1]]:.4f} nats" in title
        stage = [s.name for s in STAGES if s.start <= RUN.ts[rows[-1]] < s.end]
        assert all(name in title for name in stage)
    assert np.all(np.diff(rows[1:]) > 0) and rows[-1] == rows[0]
    path = tmp_path / "cycle.gif"
    animation.save(path, writer="pillow", dpi=30)
    assert path.read_bytes().startswith(b"GIF89a")


def test_figures_leave_global_state_alone(tmp_path):
    def state():  # Read without the lookup that would choose a backend.
        rc = matplotlib.rcParams
        return {key: dict.__getitem__(rc, key) for key in rc}

    before, windows = state(), plt.get_fignums()
    for draw, _, _ in FIGURES.values():
        draw(stages=STAGES)
    plots.path_figure(PATH, CHAIN)
    plots.spectrum_figure(spectrum_of([-1.0, 0.0, 1.0]))
    plots.save(plots.cycle_figure(RUN, CHAIN, STAGES), tmp_path / "cycle.png", dpi=40)
    assert state() == before
    assert plt.get_fignums() == windows


@pytest.mark.slow
def test_importing_and_drawing_chooses_no_backend():
    program = (
        "import sys, matplotlib\n"
        "import flowsim\n"
        "from flowsim import plots\n"
        "from types import SimpleNamespace as Result\n"
        "spec = Result(values=[-1.0, 0.0, 1.0], tolerance=1e-8)\n"
        "plots.spectrum_figure(spec).figure.draw_without_rendering()\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot was imported'\n"
        "assert not isinstance(dict.__getitem__(matplotlib.rcParams, 'backend'), str)\n"
    )
    environment = {
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_saving_takes_the_format_from_the_name(tmp_path, name, start):
    plots.save(plots.loss_figure(RUN), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_resolution_is_the_one_asked_for(tmp_path):
    figure: Any = plots.cycle_figure(RUN, CHAIN)
    plots.save(figure, tmp_path / "a.png", dpi=50)
    image = plt.imread(tmp_path / "a.png")
    width, height = figure.get_size_inches() * 50
    assert image.shape[:2] == (round(height), round(width))


def batch_of_runs():
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), RUN)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.loss_figure(batch_of_runs()), r"run must be one run.*\(2, 25\)"),
        (
            lambda: plots.rank_figure(dataclasses.replace(RUN, observables=None)),
            "run.observables must be Diagnostics.*got NoneType",
        ),
        (
            lambda: plots.norm_figure(RUN, synthetic_chain(5)),
            "chain must have the 4 tokens of the run; it has 5",
        ),
        (
            lambda: plots.attention_figure(RUN, CHAIN, on="both"),  # pyright: ignore[reportArgumentType]
            "on must be 'top' or 'self'; got 'both'",
        ),
        (
            lambda: plots.path_figure(PATH, synthetic_chain(5)),
            "path must have one curve for each of the chain's 5 tokens",
        ),
        (
            lambda: plots.spectrum_figure(spectrum_of(np.ones((2, 3)))),
            r"spec must be one spectrum.*\(2, 3\)",
        ),
        (
            lambda: plots.cycle_animation(
                synthetic_run(CHAIN, models=False), PopulationLoss(CHAIN)
            ),
            "run must hold the parameters at every saved time; it has 25 times and 2",
        ),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
