"""`flowsim unfold`: the degenerate critical point of stage IV, and how it unfolds."""

import dataclasses
import functools as ft
import sys
from pathlib import Path
from typing import Any

from .reading import check_positive, given, reading_input


@dataclasses.dataclass(frozen=True)
class Unfold:
    """Continue the degenerate critical point of a two-level chain; find its branches.

    Eigenvalues along delta, lam and the top mass, the reduced (Lyapunov-Schmidt) field
    and its equilibria: one table, one figure.
    """

    top: float = 0.7
    """Mass of the most frequent token (probability)."""
    lam: float = 0.5
    """Laziness of the chain (dimensionless)."""
    pattern: tuple[float, ...] = (1.0, 0.0, -1.0)
    """c_2 ... c_d, of sum zero; token i has mass (1 - top) / (d - 1) + c_i delta."""
    delta: float = 1e-3
    """Fixed delta of the continuations in lam and in the top mass (probability)."""
    width: int = 3
    """Embedding and key width."""
    output: Path = Path("runs/unfold")
    """Run folder to write."""
    force: bool = False
    """Replace an existing run folder."""
    quiet: bool = False
    """Do not say what is being computed."""


def run_unfold(options: Unfold) -> int:
    """Continue, reduce, print, write."""
    from .. import plots, records
    from ..lyapunov_schmidt import study_unfolding
    from ..markov import lazy_chain, two_level_law

    with reading_input():
        check_positive(delta=options.delta)
        if options.width < 2:
            raise ValueError(f"--width must be at least 2; got {options.width}.")
        law = two_level_law(
            vocab=len(options.pattern) + 1,
            top=options.top,
            delta=options.delta,
            pattern=options.pattern,
        )
        lazy_chain(law, options.lam)
        records.check_folder(options.output, force=options.force)
    say = None if options.quiet else ft.partial(print, file=sys.stderr, flush=True)
    study = study_unfolding(
        options.top,
        options.lam,
        options.pattern,
        lams=_around(options.lam, 0.1),
        tops=_around(options.top, 0.05),
        delta=options.delta,
        width=options.width,
        key_width=options.width,
        announce=say,
    )
    folder = records.prepare_folder(options.output, force=options.force)
    plots.save(plots.study_figure(study), folder / "unfold.png")
    records.write_json(
        folder / "summary.json",
        {
            "command": given(options),
            "point": vars(study.point.reduced),
            "point gradient norm": study.point.grad_norm,
            "first order": vars(study.first),
            "along delta": _plain(study.along_delta),
            "along lam": _plain(study.along_lam),
            "along top": _plain(study.along_top),
        },
    )
    print(study)
    print(f"written: {folder}/summary.json, unfold.png")
    converged = (
        study.along_delta.converged.all()
        & study.along_lam.converged.all()
        & study.along_top.converged.all()
    )
    return 0 if bool(converged) else 1


def _plain(found: Any) -> dict[str, Any]:
    return vars(found) | {"reduced": vars(found.reduced)}


def _around(centre: float, step: float) -> tuple[float, ...]:
    """The centre and two steps to either side, as far as they are probabilities."""
    values = (round(centre + number * step, 12) for number in (-2, -1, 0, 1, 2))
    return tuple(value for value in values if 0 < value < 1)
