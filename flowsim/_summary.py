"""How a result prints: a title and aligned rows, short whatever its size."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np

from . import _trees


def aligned(title: str, rows: Mapping[str, Any]) -> str:
    """A title and one indented row per entry, the values in one column."""
    width = max(map(len, rows), default=0)
    lines = (f"  {name:<{width}}  {describe(value)}" for name, value in rows.items())
    return "\n".join([title, *lines])


def describe(value: Any) -> str:
    """One line about a value.

    A number in full; a vector of up to four entries; first and last entry of a longer
    one; of any other array its shape and largest magnitude. Traced arrays show shapes.
    """
    if _trees.is_traced(value):
        return f"traced {value.dtype}{list(value.shape)}"
    if isinstance(value, eqx.Enumeration | str) or not hasattr(value, "shape"):
        return str(value)
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array:.10g}"
    if array.ndim == 1 and array.size <= 4:
        return ", ".join(f"{entry:.6g}" for entry in array)
    if array.ndim == 1:
        return f"{array[0]:.6g} ... {array[-1]:.6g}  ({array.size})"
    size = np.max(np.abs(array), initial=0.0)
    return f"{'x'.join(map(str, array.shape))}, at most {size:.3g}"


def columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width; numbers to the right, the first and last to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    last = len(widths) - 1

    def cell(text: str, position: int) -> str:
        left = position in (0, last) and not text[:1].isdigit()
        return text.ljust(widths[position]) if left else text.rjust(widths[position])

    return [
        "  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in table
    ]
