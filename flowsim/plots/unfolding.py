"""The unfolding of a degenerate point: eigenvalues along a parameter, and branches."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..lyapunov_schmidt import (
    Equilibria,
    FirstOrder,
    Stability,
    Unfolding,
    UnfoldingStudy,
)
from . import _style

_LABELS = {"delta": r"$\delta$", "lam": r"$\lambda$", "top": r"$\pi_1$"}


def unfolding_figure(
    found: Unfolding,
    *,
    parameter: str = "delta",
    first: FirstOrder | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The transverse eigenvalues along a continuation.

    Logarithmic in delta on both axes; linear in any other parameter.

    Args:
        found: from `flowsim.lyapunov_schmidt.unfold`.
        parameter: what `found.deltas` holds: "delta", "lam" or "top".
        first: prediction of the slope in delta, drawn as a dashed line.
        ax: where to draw; a new figure when absent.
    """
    given = ax
    ax = _style.panel(ax)
    x = np.asarray(found.deltas)
    values = np.asarray(found.singular_values)
    tangential = np.abs(np.asarray(found.tangential[:, -1]))
    ax.plot(x, np.asarray(found.rates), label="largest transverse", **_style.look(0))
    ax.plot(x, values[:, 1], label=r"second, $\sigma_2(dL/dM)$", **_style.look(1))
    ax.plot(x, tangential, label="largest tangential, size", **_style.look(2))
    if first is not None:
        predicted = float(first.slopes[0]) * np.abs(x)
        ax.plot(x, predicted, label="predicted slope", **_style.THEORY)
    if parameter == "delta":
        ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(_LABELS.get(parameter, parameter))
    ax.set_ylabel("eigenvalue of $J$ (1 / flow time)")
    _style.legend(ax, given)
    return ax


def branches_figure(
    branches: Sequence[Equilibria], *, coordinate: int = 0, ax: Axes | None = None
) -> Axes:
    """Equilibria of the reduced field over delta: filled where stable.

    Args:
        branches: from `flowsim.lyapunov_schmidt.branches`.
        coordinate: which kernel coordinate to show.
        ax: where to draw; a new figure when absent.
    """
    given = ax
    ax = _style.panel(ax)
    kinds = {"stable": (True, "o"), "unstable": (False, "s")}
    for number, (label, (wanted, marker)) in enumerate(kinds.items()):
        places = [
            (found.delta, point[coordinate])
            for found in branches
            for point, kind in zip(found.points, found.stability, strict=True)
            if bool(kind == Stability.stable) == wanted
        ]
        x, y = np.array(places, float).reshape(-1, 2).T
        color = _style.PALETTE[number]
        ax.plot(
            x,
            y,
            label=label,
            linestyle="none",
            marker=marker,
            color=color,
            markerfacecolor=color if wanted else "none",
        )
    ax.axvline(0, color=_style.GREY, linewidth=0.8, zorder=1)
    ax.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    ax.set_xlabel(_LABELS["delta"])
    ax.set_ylabel("kernel coordinate $u$")
    _style.legend(ax, given)
    return ax


def study_figure(study: UnfoldingStudy) -> Figure:
    """A whole study: eigenvalues along delta, lam and the top mass, and branches.

    Args:
        study: from `flowsim.lyapunov_schmidt.study_unfolding`.
    """
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    axes = figure.subplots(2, 2)
    unfolding_figure(study.along_delta, first=study.first, ax=axes[0, 0])
    branches_figure(study.branches, ax=axes[0, 1])
    unfolding_figure(study.along_lam, parameter="lam", ax=axes[1, 0])
    unfolding_figure(study.along_top, parameter="top", ax=axes[1, 1])
    for ax, letter in zip(axes.flat, "abcd", strict=True):
        ax.set_title(letter, loc="left", fontweight="bold", fontsize="large")
    # Between the curves and round-off there is room.
    axes[0, 0].legend(loc=(0.36, 0.16), fontsize="small", frameon=False)
    axes[0, 1].legend(fontsize="small", frameon=False)
    return figure
