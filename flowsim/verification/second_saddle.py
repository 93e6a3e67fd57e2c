"""Claims about theta_c^1: critical, block diagonal, its spectrum, and focus."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import PRNGKeyArray

from .. import _trees, theory
from ..derivatives import gradient, hessian
from ..loss import PopulationLoss
from ..markov import MarkovChain, lazy_chain
from ..model import AttentionModel
from ..spectrum import spectrum
from .claims import Claim, compare, depart
from .flows import Escape, avoiding_chain, grow_attention

_STAGE_II = "stage II"
_ROUND_OFF = 1e-10


def critical_point_claims(loss: PopulationLoss, like: AttentionModel) -> list[Claim]:
    """theta_c^1 is critical, with a block-diagonal Jacobian and known eigenvalues."""
    chain = loss.chain
    point = theory.second_critical_point(
        chain, width=like.width, key_width=like.key_width
    )
    jacobian = -np.asarray(hessian(loss, point))
    radius = float(np.max(np.abs(jacobian)))
    outer_size = point.W0.size + point.W1.size  # W0 and W1 come first when flattened.
    outer, attention = slice(outer_size), slice(outer_size, None)
    rate = float(theory.focus_rate(chain))
    claims = [
        compare(
            "theta_c^1: |grad L| = 0",
            _STAGE_II,
            0.0,
            _trees.norm(gradient(loss, point)),
            _ROUND_OFF,
            "scale 1",
            scale=1.0,
        ),
        compare(
            "theta_c^1: (W0, W1) and (WQ, WK) do not couple",
            _STAGE_II,
            0.0,
            np.max(np.abs(jacobian[outer, attention])),
            _ROUND_OFF,
            "largest entry of J between the blocks; scale: largest entry of J",
            scale=radius,
        ),
    ]
    values = np.linalg.eigvalsh(jacobian[outer, outer])
    predicted = np.asarray(theory.outer_eigenvalues(chain))
    for number, value in enumerate(predicted):
        claims.append(
            compare(
                f"theta_c^1: (W0, W1) eigenvalue {number + 1} of d - 1",
                _STAGE_II,
                value,
                values[number],
                _ROUND_OFF,
            )
        )
    claims.append(
        compare(
            "theta_c^1: all others of (W0, W1) are zero",
            _STAGE_II,
            0.0,
            np.max(np.abs(values[predicted.size :])),
            _ROUND_OFF,
            "scale: largest entry of J",
            scale=radius,
        )
    )
    values, k = np.linalg.eigvalsh(jacobian[attention, attention]), like.key_width
    expected = np.zeros_like(values)
    expected[:k], expected[-k:] = -abs(rate), abs(rate)
    whole = spectrum(loss, point)
    return [
        *claims,
        compare(
            "theta_c^1: largest eigenvalue of (WQ, WK) is |c|",
            _STAGE_II,
            abs(rate),
            values[-1],
            _ROUND_OFF,
        ),
        compare(
            "theta_c^1: (WQ, WK) has +-c, each k-fold, and zeros",
            _STAGE_II,
            0.0,
            np.max(np.abs(values - expected)),
            _ROUND_OFF,
            "largest deviation of any eigenvalue; scale |c|",
            scale=abs(rate),
        ),
        compare(
            "theta_c^1: index is k",
            _STAGE_II,
            k,
            whole.num_unstable,
            0.0,
            f"stable: {int(whole.num_stable)}, zero: {int(whole.num_center)} of "
            f"{whole.values.size}",
        ),
    ]


def prediction_claims(loss: PopulationLoss, like: AttentionModel) -> list[Claim]:
    """At theta_c^1 every token predicts pi."""
    chain = loss.chain
    point = theory.second_critical_point(
        chain, width=like.width, key_width=like.key_width
    )
    return [
        compare(
            "theta_c^1: every token predicts pi",
            _STAGE_II,
            0.0,
            np.max(np.abs(np.asarray(loss.predictions(point) - chain.stationary))),
            _ROUND_OFF,
            "largest difference of p_i and pi; scale 1",
            scale=1.0,
        ),
    ]


def focus_claims(
    loss: PopulationLoss,
    like: AttentionModel,
    escapes: Sequence[Escape],
    key: PRNGKeyArray,
) -> list[Claim]:
    """Attention grows at |c|, towards frequent tokens or away by the sign of c.

    The chain itself, and two controls with the same law pi, hence the same first stage:
    independent tokens, where c = 0, and a chain whose top token avoids itself.
    """
    chain = loss.chain
    sizes = {"width": like.width, "key_width": like.key_width, "key": key}
    rate = float(theory.focus_rate(chain))
    growth = grow_attention(chain, **sizes)
    still = grow_attention(
        lazy_chain(chain.stationary, 0.0).to_dense(), rate=abs(rate), **sizes
    )
    away_chain = avoiding_chain(chain.stationary)
    away = grow_attention(away_chain, **sizes)
    away_rate = float(theory.focus_rate(away_chain))
    last = escapes[-1]
    return [
        compare(
            "focus: attention grows at the rate |c|",
            _STAGE_II,
            abs(rate),
            growth.rate if growth.succeeded else np.nan,
            1e-4,
            "half the rate of |Phi|, from theta_c^1 with random attention of 1e-7",
        ),
        compare(
            "focus: Phi aligns with pi pi^T, sign of c",
            _STAGE_II,
            np.sign(rate),
            last.alignment,
            1e-4,
            f"cosine when |Phi| = sqrt(eps), flow from scratch, eps = {last.scale:.0e}",
        ),
        compare(
            "control: no growth for independent tokens, c = 0",
            _STAGE_II,
            0.0,
            still.rate if still.succeeded else np.nan,
            1e-6,
            "lam = 0, same law, same start and duration; scale |c| of the chain",
            scale=abs(rate),
        ),
        compare(
            "c < 0: attention grows at the rate |c|",
            _STAGE_II,
            abs(away_rate),
            away.rate if away.succeeded else np.nan,
            1e-4,
            f"same law, top token avoids itself: c = {away_rate:.6g}",
        ),
        compare(
            "c < 0: attention leaves the frequent tokens",
            _STAGE_II,
            np.sign(away_rate),
            np.sign(away.change),
            0.0,
            "sign of the change of the attended tokens' mean frequency: "
            f"{away.change:.3e}; for the chain itself {growth.change:.3e}",
        ),
        compare(
            "c < 0: WQ = -WK along alpha",
            _STAGE_II,
            -1.0,
            away.same_sign,
            1e-6,
            f"cosine at the end; for the chain itself {growth.same_sign:.6f}",
        ),
    ]


def sign_claims(
    chains: Mapping[str, MarkovChain], key: PRNGKeyArray, *, width: int = 4
) -> list[Claim]:
    """Rate and direction of attention at theta_c^1, measured on each chain.

    The paper proves the direction for lazy chains: towards frequent tokens. For other
    chains it is the sign of c that decides.
    """
    claims = []
    for name, chain in chains.items():
        rate = float(theory.focus_rate(chain))
        growth = grow_attention(chain.to_dense(), width=width, key_width=width, key=key)
        moved = np.sign(growth.change) if growth.succeeded else np.nan
        note = (
            f"c = {rate:.6g}; flow from theta_c^1 with random attention of 1e-7, "
            f"width {width}; change of the attended tokens' mean frequency "
            f"{growth.change:.3e}."
        )
        towards = compare(
            f"{name}: attention moves to frequent tokens",
            f"{_STAGE_II}, lazy chains",
            1.0,
            moved,
            0.0,
            note,
        )
        by_sign = compare(
            "attention moves by the sign of c", _STAGE_II, np.sign(rate), moved, 0.0
        )
        claims += [
            compare(
                f"{name}: attention grows at the rate |c|",
                _STAGE_II,
                abs(rate),
                growth.rate if growth.succeeded else np.nan,
                1e-3,
                note,
            ),
            depart(towards, by_sign),
        ]
    return claims
