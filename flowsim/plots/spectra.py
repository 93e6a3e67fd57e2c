"""The eigenvalues at a critical point, one panel."""

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from ..spectrum import Spectrum
from . import _style


def spectrum_figure(
    spec: Spectrum,
    *,
    levels: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Eigenvalues of the flow's Jacobian, largest first, by the sign they have.

    The centre, often most of them, is squeezed to a quarter of the width. The vertical
    axis is linear where the others are of one size, and otherwise logarithmic on both
    sides of a linear band below the smallest of them.

    Args:
        spec: from `flowsim.spectrum`: `values` (rates, 1 / flow time) and the
            `tolerance` below which they count as zero.
        levels: predicted eigenvalues to mark, by name (1 / flow time).
        ax: where to draw; a new figure when absent.

    Raises:
        ValueError: if `spec` is a batch.
    """
    values = np.asarray(spec.values)
    if values.ndim != 1:
        raise ValueError(
            f"spec must be one spectrum, with values of shape (k,); got {values.shape}."
        )
    given = ax
    ax = _style.panel(ax)
    values, tolerance = np.sort(values)[::-1], float(spec.tolerance)
    unstable = values[values > tolerance]
    center = values[np.abs(values) <= tolerance]
    stable = values[values < -tolerance]
    others = len(unstable) + len(stable)
    width = min(len(center), max(4, others / 3))
    groups = {
        "unstable": (unstable, len(unstable), _style.PALETTE[1], "^"),
        "centre": (center, width, _style.GREY, "o"),
        "stable": (stable, len(stable), _style.PALETTE[0], "v"),
    }
    left = 0.0
    for name, (group, room, color, marker) in groups.items():
        ax.plot(
            left + (np.arange(len(group)) + 0.5) * room / max(len(group), 1),
            group,
            label=f"{name} ({len(group)})",
            linestyle="none",
            color=color,
            marker=marker,
            markersize=5 if others < 60 else 3,
        )
        left += room
    sizes = np.abs(np.concatenate([unstable, stable]))
    if others and sizes.max() > 30 * sizes.min():
        threshold = 10.0 ** math.floor(math.log10(sizes.min()))
        ax.set_yscale("symlog", linthresh=threshold)
    ax.axhline(0, color=_style.GREY, linewidth=0.8, zorder=1)
    ax.margins(y=0.1)
    _style.draw_levels(ax, {} if levels is None else levels)
    ax.set_xticks([])
    ax.set_xlabel("eigenvalues, largest first")
    ax.set_ylabel("eigenvalue of $J$ (1 / flow time)")
    _style.legend(ax, given)
    return ax
