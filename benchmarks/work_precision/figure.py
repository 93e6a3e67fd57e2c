"""Error against seconds, one panel for every problem and final time."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from flowsim.plots import _style

from .methods import METHODS


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the work-precision figure of the finished rows."""
    rows = [row for row in rows if row.get("seconds") and row.get("error")]
    rows = [row for row in rows if row["group"] == "flow"]
    panels = sorted({(row["problem"], row["t1"]) for row in rows})
    if not panels:
        return
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines + 0.9), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for ax in grid[len(panels) :]:
        ax.remove()
    handles = {}
    for ax, (problem, t1) in zip(grid, panels, strict=False):
        _style.panel(ax)
        for number, name in enumerate(METHODS):
            points = sorted(
                (row["seconds"], row["error"])
                for row in rows
                if (row["problem"], row["t1"], row["method"]) == (problem, t1, name)
            )
            if not points:
                continue
            look = _style.look(number)
            # Past the end of the palette colours return: then with hollow markers.
            if number >= len(_style.PALETTE):
                look |= {"markerfacecolor": "white", "linestyle": (0, (1, 1))}
            if name == "default":
                look |= {"linewidth": 2.4, "markersize": 7}
            (line,) = ax.plot(*zip(*points, strict=True), **look)
            handles[METHODS[name].label] = line
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        low, high = ax.get_xlim()
        # Within a decade or so the ticks at 2 and 5 are needed to read a number.
        few = high / low < 50
        ax.xaxis.set_minor_locator(LogLocator(subs=(2, 5) if few else "all"))
        ax.xaxis.set_minor_formatter("{x:g}" if few else NullFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title(f"{problem}, $T$ = {t1:g}", fontsize="medium")
        ax.set_xlabel("seconds")
        ax.set_ylabel("error of the final state")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center",
        ncols=min(4, 2 * columns), frameon=False, fontsize="small",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
