"""The linear flow at a critical point, held against the true flow near it.

Near a critical point theta* the displacement u = theta - theta* obeys u' = J u with
J = -Hessian, up to terms of second order. `linear_flow` takes the eigenpairs of J and
gives u(t) = exp(J t) u(0) in closed form; `compare`, `error_order` and `compare_exit`
say, on any objective, how far the true flow follows it: the lemma behind each stage of
the paper promises an error O(eps^2 exp(2 mu t)) from distance eps, alignment with the
most unstable eigenspace, and an escape after time log(1/eps) / mu.

The true flow is integrated as a displacement from theta*, so that a start 1e-8 away
keeps all its digits.

Left out: which critical points there are (`flowsim.critical`), and what happens beyond
the neighbourhood (`flowsim.invariant`, `flowsim.lyapunov_schmidt`).

>>> import jax.numpy as jnp
>>> from flowsim.linearised import linear_flow, predict_exit
>>> saddle = lambda y: 0.5 * (y[0] ** 2 - y[1] ** 2) + y[1] ** 3
>>> flow = linear_flow(saddle, jnp.zeros(2))
>>> round(float(predict_exit(flow, jnp.array([0.0, 1e-4]), radius=1e-2).time), 6)
4.60517

References:
    Chen, Lin, Xu and Luo (2026), arXiv:2605.01199, Lemma 3.1.
    Hirsch, Smale and Devaney (2013), "Differential Equations, Dynamical Systems, and an
    Introduction to Chaos", chapters 6 and 8.
"""

from .comparison import (
    Comparison,
    Displaced,
    ErrorOrder,
    ExitComparison,
    compare,
    compare_exit,
    error_order,
)
from .linear import Exit, LinearFlow, linear_flow, predict_exit

__all__ = [
    "Comparison",
    "Displaced",
    "ErrorOrder",
    "Exit",
    "ExitComparison",
    "LinearFlow",
    "compare",
    "compare_exit",
    "error_order",
    "linear_flow",
    "predict_exit",
]
