"""Stages I and II on one chain: all claims about the origin, theta_c^1, both escapes.

The same functions serve every chain; `follow` makes the runs that they share.
"""

from collections.abc import Sequence

from jaxtyping import PRNGKeyArray

from ..loss import PopulationLoss
from ..model import AttentionModel
from .claims import Claim
from .first_saddle import (
    balance_claims,
    condensation_claims,
    escape_claims,
    origin_claims,
)
from .flows import Escape, follow_escapes
from .second_saddle import critical_point_claims, focus_claims, prediction_claims


def random_direction(
    loss: PopulationLoss, key: PRNGKeyArray, *, width: int, key_width: int | None = None
) -> AttentionModel:
    """A random start of scale one."""
    return AttentionModel.init(
        key,
        vocab=loss.chain.num_states,
        width=width,
        key_width=key_width,
        scale=1.0,
    )


def follow(
    loss: PopulationLoss,
    direction: AttentionModel,
    scales: Sequence[float],
    rtol: float,
) -> list[Escape]:
    """One flow through both escapes from each eps times one direction."""
    return [follow_escapes(loss, direction, eps, rtol) for eps in scales]


def early_claims(
    loss: PopulationLoss,
    direction: AttentionModel,
    escapes: Sequence[Escape],
    key: PRNGKeyArray,
) -> list[Claim]:
    """Spectra, condensation, focus and the escape-time law.

    Args:
        loss: population loss of the chain (in dense form, to share compiled code).
        direction: the random start of the escapes; its width and key width are used.
        escapes: from `follow`.
        key: of the random attention at theta_c^1.
    """
    return [
        *origin_claims(loss, direction),
        *condensation_claims(escapes),
        *critical_point_claims(loss, direction),
        *focus_claims(loss, direction, escapes, key),
        *escape_claims(loss, escapes),
    ]


def further_claims(
    loss: PopulationLoss, direction: AttentionModel, escapes: Sequence[Escape]
) -> list[Claim]:
    """What the theory says of these stages in passing."""
    return [*balance_claims(escapes), *prediction_claims(loss, direction)]
