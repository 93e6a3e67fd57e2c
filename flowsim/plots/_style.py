"""What the figures share: palette, axes, logarithmic time, shaded stages, tokens.

Colours are those of Okabe and Ito (Color Universal Design, 2008), told apart with every
common kind of colour vision; each line also has its own marker, so that it is told
apart in grey. Dashed is kept for theory. Font sizes are relative, so that axes given by
the caller keep the caller's style.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..markov import MarkovChain
from ..trajectory import Trajectory

# Yellow is left out: it is too light for a line on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
GREY = "#595959"
BAND = "#ECECEC"
THEORY: dict[str, Any] = {
    "color": GREY,
    "linestyle": (0, (5, 3)),
    "linewidth": 1.0,
    "zorder": 1.5,
}

MAX_ALL = 8  # Vocabularies up to this size are shown token by token ...
NUM_SHOWN = 6  # ... of larger ones this many, the most frequent, and the mean.


@runtime_checkable
class Stage(Protocol):
    """A named stretch of time."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


class Token(NamedTuple):
    """How one token is drawn, the same in every panel."""

    number: int
    label: str
    look: dict[str, Any]


def panel(ax: Axes | None, size: tuple[float, float] = (6.0, 3.4)) -> Axes:
    """The axes given, or those of a new figure that belongs to no window."""
    if ax is None:
        ax = Figure(figsize=size, layout="constrained").add_subplot()
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def look(number: int) -> dict[str, Any]:
    """Colour and marker of the n-th line of a panel."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.4,
    }


MEAN: dict[str, Any] = {"color": "black", "linewidth": 2.2, "zorder": 3}
START: dict[str, Any] = {
    "color": "black",
    "marker": "*",
    "markersize": 8,
    "linestyle": "none",
    "zorder": 4,
}


def times(run: Trajectory) -> np.ndarray:
    """The saved times of one concrete run.

    Raises:
        ValueError: if the run is a batch.
    """
    ts = np.asarray(run.ts)
    if ts.ndim != 1:
        raise ValueError(
            f"run must be one run, with ts of shape (t,); got {ts.shape}. "
            "Choose one of a batch."
        )
    return ts


def time_axis(ax: Axes, run: Trajectory, stages: Iterable[Stage] | None) -> None:
    """Logarithmic time from just before the first move, with the stages shaded."""
    ts = times(run)
    ax.set_xlabel(
        "flow time $t$" if run.time_unit == "flow time" else f"time ({run.time_unit})"
    )
    if ts[-1] == ts[0]:
        pass  # One point: Matplotlib's own limits.
    elif ts[0] >= 0:
        left = first_time(ts, np.asarray(run.losses))
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())
        if ts[-1] < 300 * left:  # Powers of ten alone would be too few ticks.
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:g}"))
        ax.set_xlim(left, ts[-1])
    else:
        ax.set_xlim(ts[0], ts[-1])
    if stages is not None:
        shade(ax, stages)


def first_time(ts: np.ndarray, losses: np.ndarray) -> float:
    """Left end of the axis: a fifth of the time at which the loss has moved by 1 %.

    Time zero has no place on the axis; before the first move nothing is seen there.
    """
    positive = ts[ts > 0]
    moved = np.abs(losses - losses[0]) > 0.01 * np.abs(losses[-1] - losses[0])
    moved &= ts > 0
    start = ts[np.argmax(moved)] / 5 if moved.any() else 0.0
    start = max(float(start), float(positive[0]))
    return start if start < ts[-1] else float(ts[-1]) / 10


def shade(ax: Axes, stages: Iterable[Stage], *, names: bool = True) -> None:
    """Shade every other stage, and write the names above the axes, slanted."""
    left, right = ax.get_xlim()
    visible = [stage for stage in stages if stage.start < right and stage.end > left]
    if not visible:
        return
    bounds = np.array([(stage.start, stage.end) for stage in visible], float)
    bounds = np.clip(bounds, left, right)
    for start, end in bounds[::2]:
        ax.axvspan(start, end, facecolor=BAND, edgecolor="none", zorder=0)
    ax.set_xlim(left, right)
    if not names:
        return
    to_axes = ax.transScale + ax.transLimits
    ends = to_axes.transform(np.stack([bounds.ravel(), np.ones(bounds.size)], axis=1))
    middles = ends[:, 0].reshape(-1, 2).mean(axis=1)
    slant, size = 50, FontProperties(size="small").get_size_in_points()
    gap = 1.1 * size / math.sin(math.radians(slant)) / _extent(ax, 0)
    for stage, x in zip(visible, apart(middles, gap), strict=True):
        ax.text(
            x,
            1.02,
            stage.name,
            transform=ax.transAxes,
            rotation=slant,
            rotation_mode="anchor",
            ha="left",
            va="bottom",
            fontsize="small",
            color=GREY,
        )


def apart(positions: np.ndarray, gap: float) -> np.ndarray:
    """Ascending positions, moved up and down where needed to be `gap` apart."""
    steps = gap * np.arange(len(positions))
    free = positions - steps
    up = np.maximum.accumulate(free)
    down = np.minimum.accumulate(free[::-1])[::-1]
    return (up + down) / 2 + steps


def _extent(ax: Axes, axis: int) -> float:
    """Width (axis 0) or height (1) of the axes in points, before any layout."""
    return 72 * _root(ax).get_size_inches()[axis] * ax.get_position().size[axis]


def spread(ax: Axes, ts: np.ndarray, number: int) -> list[int]:
    """Rows that carry a marker: evenly spaced on the axis, shifted by line."""
    left, right = ax.get_xlim()
    fractions = (np.arange(6) + 0.25 + 0.13 * (number % 6)) / 6.5
    if ax.get_xscale() == "log":
        at = left * (right / left) ** fractions
    else:
        at = left + (right - left) * fractions
    return sorted({int(np.argmin(np.abs(ts - t))) for t in at})


def draw_line(ax: Axes, ts: np.ndarray, values: Any, number: int, **options: Any):
    """One line over time, with sparse markers."""
    every = spread(ax, ts, number)
    return ax.plot(ts, np.asarray(values), markevery=every, **options)


def draw_levels(ax: Axes, levels: Mapping[str, float]) -> None:
    """Dashed theory lines over the whole axis, named in the right margin."""
    for value in levels.values():
        ax.axhline(value, **THEORY)
    ax.set_ylim(ax.get_ylim())  # Names stand where the limits of now put them.
    names = sorted(levels, key=lambda name: levels[name])
    points = np.array([(1.0, levels[name]) for name in names]).reshape(-1, 2)
    heights = (ax.transScale + ax.transLimits).transform(points)[:, 1]
    size = FontProperties(size="small").get_size_in_points()
    for name, y in zip(names, apart(heights, 1.4 * size / _extent(ax, 1)), strict=True):
        ax.annotate(
            name,
            (1.0, y),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
            color=GREY,
        )


def shown_tokens(chain: MarkovChain) -> list[Token]:
    """The tokens that a figure shows: all of a few, of many the most frequent ones."""
    pi = np.asarray(chain.stationary)
    order = np.argsort(-pi, kind="stable")
    order = order if len(pi) <= MAX_ALL else order[:NUM_SHOWN]
    return [
        Token(int(i), f"{token_name(chain, int(i))}, $\\pi$ = {pi[i]:.2g}", look(n))
        for n, i in enumerate(order)
    ]


def token_name(chain: MarkovChain, index: int) -> str:
    """The token's name in quotes, or its number, counted from 0."""
    if chain.tokens is None:
        return f"token {index}"
    return "“" + chain.tokens[index].replace("$", r"\$") + "”"


def draw_tokens(
    ax: Axes,
    ts: np.ndarray,
    values: Any,
    tokens: Sequence[Token],
    mean: Any,
) -> None:
    """One line for each shown token and, if given, a thick one for the mean."""
    values = np.asarray(values)
    for place, token in enumerate(tokens):
        draw_line(
            ax, ts, values[:, token.number], place, label=token.label, **token.look
        )
    if mean is not None:
        ax.plot(ts, np.asarray(mean), label=r"mean, weighted by $\pi$", **MEAN)


def legend(ax: Axes, given: Axes | None, title: str | None = None) -> None:
    """Beside the axes of a figure of our own; axes of the caller get none.

    Whoever arranges panels knows where there is room: the lines carry their labels.
    """
    if given is not None:
        return
    ax.legend(
        title=title,
        alignment="left",
        fontsize="small",
        title_fontsize="small",
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.08, 1.0),  # Further out than the names of levels.
    )


def save(
    figure: Figure | SubFigure | Axes, path: str | os.PathLike[str], *, dpi: int = 200
) -> None:
    """Write a figure, or the figure of some axes, in the format its name ends with.

    Args:
        figure: what a figure function returned.
        path: an existing file is overwritten.
        dpi: dots per inch, where the format has dots.
    """
    _root(figure).savefig(path, dpi=dpi)


def _root(artist: Figure | SubFigure | Axes) -> Figure:
    figure = artist.get_figure(root=True)
    if figure is None:
        raise ValueError("the axes must belong to a figure; they were removed from it.")
    return figure
