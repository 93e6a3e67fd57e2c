"""What a stage is, and how a list of stages prints."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx

from .. import _summary
from ..visits import Ending
from .cuts import Thresholds
from .escape import EscapeFit


class Departure(eqx.Module):
    """A critical point that a run visits, and how it leaves it.

    Attributes:
        loss: objective at the point.
        index: number of unstable directions found.
        index_exact: whether that is all of them; else the index is a lower bound.
        eigenvalue: leading eigenvalue of the flow's Jacobian there, the predicted
            growth rate (1/flow time); not positive at a minimum.
        time: when the run is closest to it.
        distance: Euclidean distance at that time.
        on_stable_manifold: whether the run, as far as double precision can tell, lies
            on the stable manifold, so that round-off decides when it leaves.
        escape: growth rate measured while the run leaves; None where it does not leave,
            or not through enough of the linear regime to measure a rate. Its error may
            leave it unresolved.
    """

    loss: float
    index: int
    index_exact: bool
    eigenvalue: float
    time: float
    distance: float
    on_stable_manifold: bool
    escape: EscapeFit | None


class Changes(eqx.Module):
    """What a stage changes in the attention model.

    Attributes:
        rank: number of singular values of W0 in use, at start and end.
        top_attention: attention on the most frequent token, averaged over queries with
            weight pi, at start and end.
        risen, fallen: the token whose attention to itself rises (falls) most during the
            stage; None where none does.
        rise, fall: by how much, a negative number for the fall.
    """

    rank: tuple[int, int]
    top_attention: tuple[float, float]
    risen: int | None
    rise: float
    fallen: int | None
    fall: float


class Stage(eqx.Module):
    """One stage of a run.

    Attributes:
        name: "condensation", "focus", "dilution", "new direction", "second focus", ...,
            "settling"; "plateau n" and "burst n" for objectives without attention.
        start, end: flow times.
        losses: objective at start and end.
        leaves: the saddle that the run leaves in this stage: the one visited before the
            largest part of the stage's fall in loss. None if it comes from none.
        share: the part of the stage's fall in loss that lies between that saddle and
            the next.
        token: the token that a focus or dilution is about, counted from 0.
        changes: what changed; None for objectives without attention.
        evidence: the quantities that decided name and boundaries.
        label: the token's name, where tokens have names.
    """

    name: str
    start: float
    end: float
    losses: tuple[float, float]
    leaves: Departure | None
    share: float
    token: int | None
    changes: Changes | None
    evidence: dict[str, float]
    label: str | None = None

    def row(self) -> dict[str, Any]:
        """Plain data; the same keys for every stage."""
        left, changes = self.leaves, self.changes
        escape = None if left is None else left.escape
        return {
            "stage": self.name,
            "start": self.start,
            "end": self.end,
            "loss at start": self.losses[0],
            "loss at end": self.losses[1],
            "leaves saddle with loss": None if left is None else left.loss,
            "index": None if left is None else left.index,
            "index is exact": None if left is None else left.index_exact,
            "on stable manifold": None if left is None else left.on_stable_manifold,
            "leading eigenvalue": None if left is None else left.eigenvalue,
            "fitted rate": None if escape is None else escape.rate,
            "error of fit": None if escape is None else escape.error,
            "fit is resolved": None if escape is None else escape.resolved,
            "fitted from": None if escape is None else escape.start,
            "fitted to": None if escape is None else escape.end,
            "share of fall after saddle": self.share,
            "rank of W0": None if changes is None else list(changes.rank),
            "attention on top token": (
                None if changes is None else list(changes.top_attention)
            ),
            "token": self.token,
            "token name": self.label,
            "risen most": None if changes is None else changes.risen,
            "rise": None if changes is None else changes.rise,
            "fallen most": None if changes is None else changes.fallen,
            "fall": None if changes is None else changes.fall,
            "evidence": dict(self.evidence),
        }


class Stages(eqx.Module):
    """The stages of a run in order of time; they follow each other without gaps.

    Attributes:
        stages: the stages.
        visited: the critical points visited, in order of visit.
        ending: where the run ends; None where critical points were not sought.
        thresholds: the settings behind names and boundaries.
    """

    stages: tuple[Stage, ...]
    visited: tuple[Departure, ...]
    ending: Ending | None
    thresholds: Thresholds

    def rows(self) -> list[dict[str, Any]]:
        """The stages as plain data, for a table or a file."""
        return [stage.row() for stage in self.stages]

    def named(self, name: str) -> Stage | None:
        """The first stage of that name; None if there is none."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, number: int) -> Stage:
        return self.stages[number]

    def __str__(self) -> str:
        header = ["stage", "start", "end", "loss", "->", "leaves", "index"]
        header += ["eigenvalue", "fitted rate"]
        attention = any(stage.changes is not None for stage in self.stages)
        if attention:
            header += ["rank W0", "top attention", "attention to itself"]
        cells = [_cells(stage, attention) for stage in self.stages]
        lines = _summary.columns([header, *cells])
        if self.ending is not None:
            lines.append(f"the run has {Ending[self.ending]}")
        return "\n".join(lines)


def _cells(stage: Stage, attention: bool) -> list[str]:
    left = stage.leaves
    escape = None if left is None else left.escape
    cells = [
        stage.name,
        f"{stage.start:.5g}",
        f"{stage.end:.5g}",
        f"{stage.losses[0]:.6f}",
        f"{stage.losses[1]:.6f}",
        "-" if left is None else f"{left.loss:.6f}",
        "-" if left is None else f"{'' if left.index_exact else '>='}{left.index}",
        "-" if left is None else f"{left.eigenvalue:.5g}",
        _rate(escape),
    ]
    changes = stage.changes
    if attention and changes is not None:
        cells += [
            f"{changes.rank[0]} -> {changes.rank[1]}",
            f"{changes.top_attention[0]:.3f} -> {changes.top_attention[1]:.3f}",
            _tokens(changes),
        ]
    elif attention:
        cells += ["", "", ""]
    return cells


def _rate(escape: EscapeFit | None) -> str:
    if escape is None:
        return "-"
    if not escape.resolved:
        return "unresolved"
    return f"{escape.rate:.4g} ± {escape.error:.1g}"


def _tokens(changes: Changes) -> str:
    """Which token's attention to itself rose most, and which one's fell most."""
    parts = [
        f"token {token} {change:+.3f}"
        for token, change in (
            (changes.risen, changes.rise),
            (changes.fallen, changes.fall),
        )
        if token is not None and abs(change) >= 5e-4
    ]
    return ", ".join(parts)
