"""Pages, spectra, animations, files; and that drawing leaves the world as it was."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from flowsim import plots
from flowsim.loss import PopulationLoss

from .figures import (
    CHAIN,
    FIGURES,
    NUM_TIMES,
    PATH,
    RUN,
    STAGES,
    assert_same_curves,
    data_lines,
    legend_texts,
    spectrum_of,
    synthetic_chain,
    synthetic_run,
)


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
    plots.save(figure, tmp_path / "a.png", dpi=40)
    image = plt.imread(tmp_path / "a.png")
    width, height = figure.get_size_inches() * 40  # Whole numbers of pixels.
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
