"""Claims about stage IV: the degenerate critical point and its unfolding in delta.

They hold for chains that treat their low-frequency tokens alike, and for families
around them; `FAMILIES` holds one of each kind: the paper's, a Metropolis chain, and six
tokens with an uneven pattern.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..invariant import DegeneratePoint
from ..loss import PopulationLoss
from ..lyapunov_schmidt import (
    ChainFamily,
    MetropolisFamily,
    TwoLevelFamily,
    Unfolding,
    depart,
    first_order,
    token_slopes,
)
from ..trajectory import Outcome
from .claims import Claim, compare, depart as depart_from_paper

_STAGE_IV = "stage IV"


FAMILIES: Mapping[str, Callable[[], ChainFamily]] = {
    "lazy, d = 4": lambda: TwoLevelFamily(0.7, 0.5, (1.0, 0.0, -1.0)),
    "Metropolis, d = 4": lambda: MetropolisFamily(0.7, (1.0, 0.0, -1.0)),
    "lazy, d = 6, uneven": lambda: TwoLevelFamily(
        0.6, 0.5, (1.0, 0.5, 0.25, -0.75, -1.0)
    ),
}


def degenerate_claims(
    name: str, loss: PopulationLoss, end: DegeneratePoint
) -> list[Claim]:
    """The end of the reduced flow is a degenerate critical point of the full loss."""
    p, P = loss.predictions(end.model), loss.chain.transition
    spec, gamma = end.spectrum, end.reduced.gamma
    values, d = np.asarray(spec.values), loss.chain.num_states
    stable = 2 * (d - 1)
    slopes = token_slopes(loss, end.model)
    return [
        compare(
            f"{name}: degenerate point: |grad L| = 0 in full space",
            _STAGE_IV,
            0.0,
            end.grad_norm,
            1e-11,
            f"polished on the manifold to {float(end.polished.grad_norm):.1e}; scale 1",
            scale=1.0,
        ),
        compare(
            f"{name}: degenerate point: dL/dM = 0 and dL/dPhi = 0",
            _STAGE_IV,
            0.0,
            max(float(jnp.max(jnp.abs(slope))) for slope in slopes),
            1e-11,
            "largest entry; scale 1",
            scale=1.0,
        ),
        compare(
            f"{name}: degenerate point: p_11 = P_11, p_i1 = P_i1",
            _STAGE_IV,
            0.0,
            jnp.max(jnp.abs(p[:, 0] - P[:, 0])),
            1e-10,
            "largest difference; scale 1",
            scale=1.0,
        ),
        compare(
            f"{name}: degenerate point: no unstable direction",
            _STAGE_IV,
            0.0,
            spec.num_unstable,
            0.0,
            f"largest eigenvalue {values[-1]:.1e}",
            scale=1.0,
        ),
        compare(
            f"{name}: degenerate point: kernel dimension",
            _STAGE_IV,
            values.size - stable,
            spec.num_center,
            0.0,
            f"all of {values.size} but 2 (d - 1) = {stable}; "
            f"{spec.num_symmetry} by symmetry; gamma_1 = {float(gamma[0]):.5f}, "
            f"gamma_2 = {float(gamma[1]):.5f}, "
            f"q kk = {float(end.reduced.q * end.reduced.kk):.5f}",
        ),
    ]


def unfolding_claims(
    name: str, family: ChainFamily, end: DegeneratePoint, found: Unfolding
) -> list[Claim]:
    """Eigenvalues, exponents and directions at the continued points."""
    deltas, rates = np.asarray(found.deltas), np.asarray(found.rates)
    converged = bool(jnp.all(found.converged))
    slopes = rates / deltas
    second = np.asarray(found.singular_values[:, 1])
    tangent = float(np.max(np.asarray(found.tangential[:, -1])))
    span = f"delta = {deltas[0]:g} ... {deltas[-1]:g}"

    def checked(number: Any) -> float:
        return float(number) if converged else math.nan

    largest = np.asarray(found.singular_values[:, 0])
    return [
        compare(
            f"{name}: unfolding: the point persists on the manifold",
            _STAGE_IV,
            0.0,
            checked(jnp.max(found.grad_norms)),
            1e-12,
            f"largest |grad L| in full space, {span}; scale 1",
            scale=1.0,
        ),
        compare(
            f"{name}: unfolding: transverse eigenvalue = sigma_1(dL/dM)",
            _STAGE_IV,
            0.0,
            checked(np.max(np.abs(rates - largest) / largest)),
            1e-9,
            f"largest relative difference, {span}",
            scale=1.0,
        ),
        compare(
            f"{name}: unfolding: largest eigenvalue = Theta(delta): exponent",
            _STAGE_IV,
            1.0,
            checked(np.log(rates[1] / rates[0]) / np.log(deltas[1] / deltas[0])),
            0.01,
            f"at the two smallest of {span}; over all {found.exponent(rates):.4f}; "
            f"eigenvalue over delta: {slopes[0]:.6f} ... {slopes[-1]:.6f}",
        ),
        *_second_value(name, deltas, second, checked),
        compare(
            f"{name}: unfolding: tangential eigenvalues at most O(delta^2)",
            _STAGE_IV,
            0.0,
            checked(max(tangent, 0.0)),
            1e-12,
            "largest on the manifold: zero to round-off; scale 1",
            scale=1.0,
        ),
        compare(
            f"{name}: unfolding: unstable direction's share in W0",
            _STAGE_IV,
            0.5,
            checked(found.embedding_weight[0]),
            1e-6,
            "the rest is in W1: attention takes no part",
        ),
        *_first_order_claims(name, family, end, found, checked),
    ]


def _second_value(name, deltas, second, checked) -> list[Claim]:
    """The second singular value is O(delta^3); on some chains it is smaller."""
    # Read where it is well above round-off.
    used = np.flatnonzero(second > 1e-13)[:2]
    if used.size < 2:
        used = np.array([len(second) - 2, len(second) - 1])
    i, j = used
    exponent = np.log(second[j] / second[i]) / np.log(deltas[j] / deltas[i])
    note = f"between delta = {deltas[i]:g} and {deltas[j]:g}: {second[i]:.3e}, "
    statement = f"{name}: unfolding: second eigenvalue = O(delta^3): exponent"
    claim = compare(
        statement,
        _STAGE_IV,
        3.0,
        checked(exponent),
        0.03,
        note + f"{second[j]:.3e}.",
    )
    higher = compare(
        "exponent 5: delta^3 is an upper bound here",
        _STAGE_IV,
        5.0,
        checked(exponent),
        0.03,
    )
    return [depart_from_paper(claim, higher)]


def _first_order_claims(name, family, end, found, checked) -> list[Claim]:
    predicted = first_order(family, end.frame, end.reduced)
    slope = float(predicted.slopes[0])
    deltas = np.asarray(found.deltas)
    excess = np.asarray(found.rates) / deltas - slope
    pattern = np.asarray(family.pattern)
    # delta -> -delta only renames tokens: even in delta, where it is smooth.
    odd = np.allclose(np.sort(pattern), np.sort(-pattern))
    order = 2.0 if odd else 1.0
    gamma, d = np.asarray(end.reduced.gamma), len(pattern) + 1
    x = np.array([(d - 1) * gamma[1], *[-gamma[0]] * (d - 1)])
    cosine = abs(x @ np.asarray(found.embedding[0])) / np.linalg.norm(x)
    y = np.array([0.0, *pattern]) / np.linalg.norm(pattern)
    i, j = (1, 2) if odd else (0, 1)
    measured = np.log(excess[j] / excess[i]) / np.log(deltas[j] / deltas[i])
    return [
        compare(
            f"{name}: unfolding: slope of the largest eigenvalue in delta",
            _STAGE_IV,
            slope,
            checked(found.rates[0] / deltas[0]),
            1e-2,
            "predicted by differentiating the minimum-norm continuation; measured at "
            f"delta = {deltas[0]:g}",
        ),
        compare(
            f"{name}: unfolding: next order of eigenvalue / delta: exponent",
            _STAGE_IV,
            order,
            checked(measured),
            0.1,
            ("the pattern is odd, so the slope is even in delta" if odd else "uneven")
            + f"; between delta = {deltas[i]:g} and {deltas[j]:g}",
        ),
        compare(
            f"{name}: unfolding: embedding part of the unstable direction",
            _STAGE_IV,
            1.0,
            checked(cosine),
            1e-4,
            "cosine with ((d - 1) gamma_2, -gamma_1, ..., -gamma_1) at the smallest "
            "delta: alike on low tokens, orthogonal to gamma",
        ),
        compare(
            f"{name}: unfolding: readout part is the pattern c",
            _STAGE_IV,
            1.0,
            checked(abs(y @ np.asarray(found.readout[0]))),
            1e-4,
            "cosine at the smallest delta",
        ),
    ]


def departure_claims(
    name: str, family: ChainFamily, end: DegeneratePoint, found: Unfolding
) -> list[Claim]:
    """The flow leaves the manifold at the predicted rate; with delta = 0 it stays."""
    rate, delta = float(found.rates[-1]), float(found.deltas[-1])
    at = jax.tree.map(lambda leaf: leaf[-1], found.reduced)
    x, t1 = found.embedding[-1], 12 / rate
    moving = PopulationLoss(family.chain(delta))
    left = depart(moving, end.frame, at, t1=t1, direction=x)
    still = PopulationLoss(family.chain(0.0))
    stayed = depart(still, end.frame, end.reduced, t1=t1, direction=x)
    done = [bool(one.outcome == Outcome.reached_t1) for one in (left, stayed)]
    return [
        compare(
            f"{name}: new direction: the flow leaves at the predicted rate",
            _STAGE_IV,
            rate,
            left.rate if done[0] else math.nan,
            1e-3,
            f"delta = {delta:g}, random displacement of 1e-7, t = {t1:.4g}; distance "
            f"from the manifold grows {left.growth:.3g} times",
        ),
        compare(
            f"{name}: new direction: W0 opens along the embedding part",
            _STAGE_IV,
            1.0,
            left.alignment if done[0] else math.nan,
            1e-6,
            "cosine of W0's part orthogonal to alpha with x; sigma_2 / sigma_1 of W0 "
            f"is {left.rank_ratio:.2g} by then",
        ),
        compare(
            f"{name}: control: with delta = 0 the flow stays",
            _STAGE_IV,
            1.0,
            stayed.growth if done[1] else math.nan,
            1e-3,
            "largest distance from the manifold over that at the start, same "
            "displacement and duration",
        ),
    ]
