"""Lyapunov-Schmidt reduction: a degenerate critical point and how it unfolds.

Where the Hessian of an objective has a kernel, linearising says nothing about what
happens in it. For a family objective(params, delta) with such a point at delta = 0 the
space is split into kernel N, symmetry directions, and range R of the Hessian; the range
equation R grad L = 0 is solved for the range part as a function of the kernel
coordinates u and of delta; what is left is a vector field u' = f(u, delta) in as many
variables as the kernel has dimensions. Its Taylor polynomial shows branches and their
stability, and `equilibria` finds all of them.

`unfold` follows the paper's degenerate point as the low-frequency tokens are set apart.

>>> import jax.numpy as jnp
>>> from flowsim.lyapunov_schmidt import equilibria, reduced_field, split
>>> def family(y, mu):  # A pitchfork in y[0], seen through a stable y[1].
...     return -mu * y[0] ** 2 / 2 + (y[1] - y[0] ** 2) ** 2 + y[0] ** 4 / 4
>>> field = reduced_field(family, split(family, jnp.zeros(2)), order=3)
>>> round(field.coefficient(0, (3, 0)), 9), round(field.coefficient(0, (1, 1)), 9)
(-1.0, 1.0)
>>> len(equilibria(field, radius=1.0, delta=0.1))
3

References:
    Golubitsky and Schaeffer (1985), "Singularities and Groups in Bifurcation Theory" I.
    Chen, Lin, Xu and Luo (2026), arXiv:2605.01199, stage IV.
"""

from .equilibria import Equilibria, Stability, branches, equilibria
from .families import ChainFamily, MetropolisFamily, TwoLevelFamily
from .reduction import RangeSolution, reduced_field, solve_range
from .splitting import At, Splitting, split
from .study import (
    UnfoldingStudy,
    reduced_unfolding,
    study_unfolding,
    transverse_directions,
)
from .taylor import Polynomial, TaylorField
from .unfolding import (
    Departure,
    FirstOrder,
    Unfolding,
    depart,
    first_order,
    token_slopes,
    unfold,
)

__all__ = [
    "At",
    "ChainFamily",
    "Departure",
    "Equilibria",
    "FirstOrder",
    "MetropolisFamily",
    "Polynomial",
    "RangeSolution",
    "Splitting",
    "Stability",
    "TaylorField",
    "TwoLevelFamily",
    "Unfolding",
    "UnfoldingStudy",
    "branches",
    "depart",
    "equilibria",
    "first_order",
    "reduced_field",
    "reduced_unfolding",
    "solve_range",
    "split",
    "study_unfolding",
    "token_slopes",
    "transverse_directions",
    "unfold",
]
