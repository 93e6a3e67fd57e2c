"""Claims: a prediction beside a measurement, and the verdict that follows from both."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx

from .. import _summary


class Verdict(eqx.Enumeration):
    """What a claim comes to. Only `fails` means that something is wrong."""

    agrees = "agrees"
    differs = "differs"
    fails = "fails"


class Claim(eqx.Module):
    """One statement of the theory, held against a measurement.

    Attributes:
        statement: what is claimed, in words.
        theorem: where the claim comes from.
        predicted: the predicted number.
        measured: the same number, measured.
        relative_error: |measured - predicted| / scale, where the scale is |predicted|
            unless the note names another one.
        tolerance: on the relative error.
        verdict: a `Verdict`: `differs` is a documented departure from the paper, for
            which the note gives the corrected claim, itself measured to hold.
        note: how it was measured; conditions; the corrected claim.
    """

    statement: str
    theorem: str
    predicted: float
    measured: float
    relative_error: float
    tolerance: float
    verdict: Verdict
    note: str = ""

    def row(self) -> dict[str, Any]:
        """Plain data, in the order of a table's columns."""
        return vars(self) | {"verdict": Verdict[self.verdict]}

    def __str__(self) -> str:
        return _summary.aligned("Claim", self.row())


class Verification(eqx.Module):
    """All claims, in the order in which the paper meets them."""

    claims: tuple[Claim, ...]

    @property
    def succeeded(self) -> bool:
        """Whether no claim fails."""
        return not any(claim.verdict == Verdict.fails for claim in self.claims)

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain data: one dictionary per claim, the same keys in each."""
        return [claim.row() for claim in self.claims]

    def count(self, verdict: Verdict) -> int:
        """Number of claims with this verdict."""
        return sum(bool(claim.verdict == verdict) for claim in self.claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self.claims)

    def __len__(self) -> int:
        return len(self.claims)

    def __str__(self) -> str:
        return "\n".join([*_table(self.claims), "", _totals(self)])


def compare(
    statement: str,
    theorem: str,
    predicted: Any,
    measured: Any,
    tolerance: float,
    note: str = "",
    *,
    scale: Any = None,
) -> Claim:
    """A claim that agrees within its tolerance or fails; NaN fails.

    Args:
        scale: what the error is divided by, instead of |predicted|; needed where the
            prediction is zero.
    """
    predicted, measured = float(predicted), float(measured)
    scale = abs(predicted) if scale is None else float(scale)
    if not scale > 0:
        raise ValueError(f"scale must be positive; got {scale} for: {statement}.")
    error = abs(measured - predicted) / scale
    if not math.isfinite(error):
        error = math.inf
    verdict = Verdict.agrees if error <= tolerance else Verdict.fails
    return Claim(
        statement=statement,
        theorem=theorem,
        predicted=predicted,
        measured=measured,
        relative_error=error,
        tolerance=tolerance,
        verdict=verdict,
        note=note,
    )


def depart(claim: Claim, corrected: Claim) -> Claim:
    """A claim that may depart from the paper, judged by the corrected claim beside it.

    It agrees where the paper's own number is met, differs where only the corrected
    claim holds, and fails where neither does.
    """
    if claim.verdict == Verdict.agrees:
        return claim
    holds = corrected.verdict == Verdict.agrees
    note = (
        f"{claim.note} Corrected: {corrected.statement}; predicted "
        f"{corrected.predicted:.6g}, measured {corrected.measured:.6g}."
    )
    verdict = Verdict.differs if holds else Verdict.fails
    return dataclasses.replace(claim, verdict=verdict, note=note.strip())


def named(name: str, claims: Iterable[Claim]) -> list[Claim]:
    """The same claims with the name of what they are about before each statement."""
    return [
        dataclasses.replace(claim, statement=f"{name}: {claim.statement}")
        for claim in claims
    ]


def _table(claims: tuple[Claim, ...]) -> list[str]:
    """Aligned columns; a rule between groups is not needed, statements carry them."""
    header = ("statement", "theorem", "predicted", "measured", "rel. error", "verdict")
    cells = [
        (
            claim.statement,
            claim.theorem,
            f"{claim.predicted:.7g}",
            f"{claim.measured:.7g}",
            f"{claim.relative_error:.1e}",
            Verdict[claim.verdict],
        )
        for claim in claims
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = (False, False, True, True, True, False)

    def line(row: tuple[str, ...]) -> str:
        texts = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(texts).rstrip()

    return [line(header), *map(line, cells)]


def _totals(verification: Verification) -> str:
    counts = {
        name: verification.count(getattr(Verdict, name))
        for name in ("agrees", "differs", "fails")
    }
    return f"{len(verification)} claims: " + ", ".join(
        f"{number} {name}" if name != "agrees" else f"{number} agree"
        for name, number in counts.items()
    )
