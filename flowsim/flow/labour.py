"""Which flows recycle Ritz vectors, and turning to them mid-way.

Recycling halves the products of a large stiff flow and slows down an easy one, by the
copies that its vectors cost in every step. Which of the two a flow is shows only in the
solve. So a large run starts without, and between two blocks of steps, if conjugate
gradients took many products per step, goes on with.

On a small system the vectors are few and cost next to nothing but two seconds of
compilation: it recycles from the start, unless it is traced (under `jax.vmap` one
flow's renewal would stop all others) or so small that the whole flow takes less.
"""

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp

from ..solvers import NewtonCG, SymmetricBDF
from ..solvers._recycling import SMALL, Recycled

# For large systems: below that many products per step recycling has not paid.
MOST_PRODUCTS, RANK = 15, 64
# For small ones: the fewest parameters, and the rank.
FEWEST_PARAMETERS, RANK_SMALL = 256, 6


def recycling_solver(rank: int) -> SymmetricBDF:
    """The default solver with so many recycled Ritz vectors."""
    inherit: Any = diffrax.with_stepsize_controller_tols
    return SymmetricBDF(root_finder=inherit(NewtonCG)(rank=rank))


def first_solver(num_params: int, traced: bool) -> tuple[SymmetricBDF, str, bool]:
    """The solver to start with, why, and whether it may be changed on the way."""
    why = "default: implicit, matrix-free, any stiffness"
    if num_params >= SMALL:
        return SymmetricBDF(), why, not traced
    if traced or num_params < FEWEST_PARAMETERS:
        return SymmetricBDF(), why, False
    return recycling_solver(RANK_SMALL), f"{why}; recycles Ritz vectors", False


def is_laborious(before: Any, after: Any) -> bool:
    """Whether the steps between two states of a run took many products each."""
    states = [carry.controller_state[0].num_products for carry in (before, after)]
    num_steps = int(after.num_steps) - int(before.num_steps)
    return int(states[1]) - int(states[0]) > MOST_PRODUCTS * num_steps


def turn_to_recycling(problem: Any, carry: Any) -> tuple[Any, Any]:
    """The same problem and state of a run, for the solver that recycles."""
    differences = carry.solver_state.differences
    num = differences.shape[1]
    recycled = Recycled.empty(min(RANK, num), num, jnp.dtype(differences.dtype))
    problem = eqx.tree_at(lambda p: p.solver, problem, recycling_solver(RANK))
    carry = eqx.tree_at(
        lambda c: c.solver_state.recycled, carry, recycled, is_leaf=lambda x: x is None
    )
    return problem, carry


def recycles(carry: Any) -> bool:
    """Whether a run has turned to recycling."""
    return getattr(carry.solver_state, "recycled", None) is not None
