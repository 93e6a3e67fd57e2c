"""The whole of a run on one page."""

from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..diagnostics import embedding_path
from ..markov import MarkovChain
from ..trajectory import Trajectory
from . import _style
from ._style import Stage
from .runs import (
    attention_figure,
    entropy_figure,
    loss_figure,
    norm_figure,
    path_figure,
    rank_figure,
)

_PAGE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "lines.solid_capstyle": "round",
}


def cycle_figure(
    run: Trajectory, chain: MarkovChain, stages: Iterable[Stage] | None = None
) -> Figure:
    """A focus-dilution cycle in six panels, over logarithmic time.

    Loss, rank ratios, attention of each query on the most frequent token, entropy of
    attention, embedding norms, and the embedding path in two principal components.

    Args:
        run: a run whose observables are `Diagnostics`.
        chain: the chain of its loss; names the tokens.
        stages: stretches of time to shade; their names stand above the first row.
    """
    stages = None if stages is None else tuple(stages)
    with matplotlib.rc_context(_PAGE):
        figure = Figure(figsize=(7.2, 8.2), layout="constrained")
        axes = figure.subplots(3, 2)
        loss_figure(run, chain, ax=axes[0, 0])
        rank_figure(run, ax=axes[0, 1])
        _legend_in_one_row(axes[0, 1])
        attention_figure(run, chain, ax=axes[1, 0])
        entropy_figure(run, chain, ax=axes[2, 0])
        norm_figure(run, chain, ax=axes[1, 1])
        _path_panel(run, chain, axes[2, 1])
        for ax in axes.flat[:5]:
            if stages is not None:
                _style.shade(ax, stages, names=ax in axes[0])
        for ax, letter in zip(axes.flat, "abcdef", strict=True):
            ax.set_title(letter, loc="left", fontweight="bold", fontsize="large")
        for ax in axes.flat[:3]:
            ax.set_xlabel("")  # The lowest panel of each column says it.
        # One legend for the tokens, which look the same in every panel.
        entries = dict[str, Any]()
        for ax in axes.flat[2:]:
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        figure.legend(
            entries.values(),
            entries.keys(),
            loc="outside lower center",
            ncols=-(-len(entries) // 2),
            frameon=False,
        )
    return figure


def _legend_in_one_row(ax: Axes) -> None:
    """Below the curves, in a strip made for it."""
    low, high = ax.get_ylim()
    ax.set_ylim(low * (low / high) ** 0.2, high)
    ax.legend(
        loc="lower center",
        ncols=5,
        handlelength=1.3,
        columnspacing=0.8,
        fontsize="small",
        frameon=False,
    )


def _path_panel(run: Trajectory, chain: MarkovChain, ax: Axes) -> None:
    if run.models.W0.shape[0] == len(_style.times(run)):
        path_figure(embedding_path(run.models), chain, ax=ax)
        return
    # A run that kept its ends alone: a path between them would be an invention.
    ax.set_axis_off()
    ax.text(0.5, 0.5, "no path: the run\nkept no parameters", ha="center", va="center")
