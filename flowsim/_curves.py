"""Curves through saved points: when they pass a level, and their value between.

Cubic splines, so that an event is located to higher order than the spacing of the
rows. Left out: growth rates and fits, which belong to those who claim them.

>>> import numpy as np
>>> from flowsim._curves import crossings
>>> ts = np.linspace(0.0, 3.0, 31)
>>> crossings(ts, np.cos(ts)).round(5).tolist()
[1.5708]
"""

import numpy as np
from jaxtyping import ArrayLike, Float


def spline(ts: Float[ArrayLike, " t"], values: Float[ArrayLike, " t"]):
    """The cubic spline through saved points (a `scipy.interpolate.CubicSpline`)."""
    # Imported here: it takes longer to load than the whole of flowsim.
    from scipy.interpolate import CubicSpline

    return CubicSpline(np.asarray(ts), np.asarray(values))


def crossings(
    ts: Float[ArrayLike, " t"],
    values: Float[ArrayLike, " t"],
    level: float = 0.0,
    *,
    rising: bool = False,
) -> Float[np.ndarray, " q"]:
    """Times at which a curve crosses a level, one for each change of sign.

    Args:
        rising: only where the curve passes the level upwards.
    """
    ts, values = np.asarray(ts), np.asarray(values) - level
    above = values >= 0
    changed = (~above[:-1] & above[1:]) if rising else (above[:-1] != above[1:])
    rows = np.flatnonzero(changed)
    if rows.size == 0:
        return np.zeros(0)
    roots = spline(ts, values).roots(extrapolate=False)
    inside = [roots[(roots >= ts[row]) & (roots <= ts[row + 1])][:1] for row in rows]
    return np.concatenate(inside)
