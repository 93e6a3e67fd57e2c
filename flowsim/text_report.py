"""What `flowsim train` leaves behind: the text it prints and its run folder.

The folder holds `summary.json`, both runs (`training.npz`, `flow.npz`), the printed
tables as `train.md`, and the figure.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import plots, records
from .empirical import (
    Control,
    Departure,
    TextStudy,
    agreement,
    attraction,
    excess_by_band,
)
from .report import describe_chain, environment
from .trajectory import Outcome

_UNTIL = 200.0  # Flow time up to which training and flow are compared.


def train_text(
    study: TextStudy,
    controls: Sequence[Control],
    tokens: Sequence[str] = (),
    departures: Sequence[Departure] = (),
) -> str:
    """All tables of a study, as Markdown."""
    chain, training = study.setting.chain, study.training
    settings = training.settings
    unit = training.time_unit
    sign = "to" if study.focus_rate > 0 else "away from"
    parts = [
        str(study.setting),
        "",
        (
            f"training    {settings['optimiser']}, {settings['precision']}, "
            f"{int(training.stats['num_steps'])} steps, {Outcome[training.outcome]}, "
            f"{unit} {float(training.ts[-1]):g}; flow: {Outcome[study.flow.outcome]}"
        ),
        *_agreement_lines(study),
        (
            f"theory      c = {study.focus_rate:.4g} at the second critical point: as "
            f"eps -> 0 attention moves {sign} frequent tokens"
        ),
        "",
        f"Events ({unit}; flow: flow time)",
        "",
        records.markdown_table(study.table()),
        f"Attention received over frequency ({unit} of the training)",
        "",
        records.markdown_table(
            attraction(training, chain, tokens=tuple(dict.fromkeys(tokens)))
        ),
        f"Loss above the floor by frequency band (nats; {unit} of the training)",
        "",
        records.markdown_table(band.row() for band in excess_by_band(training, chain)),
    ]
    if controls:
        parts += [
            "Controls",
            "",
            records.markdown_table(control.row() for control in controls),
        ]
    if departures:
        parts += [
            "Control eps -> 0: which way attention goes first, population flow",
            "",
            records.markdown_table(
                row for departure in departures for row in departure.rows()
            ),
            *map(_verdict, departures),
        ]
    return "\n".join(parts).rstrip() + "\n"


def _verdict(departure: Departure) -> str:
    """What c predicts for eps -> 0, and what is seen."""
    seen = ", ".join(
        f"{'rises' if change > 0 else 'falls'} from {scale:g}"
        for scale, change in zip(departure.scales, departure.changes, strict=True)
    )
    predicted = "rises" if departure.focus_rate > 0 else "falls"
    return (
        f"eps -> 0 beside {departure.start}: c = {departure.focus_rate:.4g} predicts "
        f"that attention on the top token {predicted}; it {seen}."
    )


def _agreement_lines(study: TextStudy) -> list[str]:
    if study.training.time_unit != "flow time":
        return ["agreement   none sought: another optimiser follows another flow"]
    lines = []
    for until in (_UNTIL, None):
        ends = ", ".join(
            f"{name} within {error:.2%} (worst at {time:.0f})"
            for name, (error, time) in agreement(study, until).items()
        )
        span = "to the end" if until is None else f"to flow time {until:g}"
        lines.append(f"agreement   {span}: {ends}")
    return lines


def write_train(
    folder: Path,
    study: TextStudy,
    controls: Iterable[Control],
    command: Mapping[str, Any],
    text: str,
    tokens: Sequence[int] | None,
    departures: Sequence[Departure] = (),
) -> None:
    """Write summary, both runs, tables and figure into a run folder."""
    chain, training, flow = study.setting.chain, study.training, study.flow
    records.save_trajectory(training, folder / "training.npz")
    records.save_trajectory(flow, folder / "flow.npz")
    records.write_text(folder / "train.md", text)
    figure = plots.comparison_figure(training, flow, chain, tokens=tokens)
    plots.save(figure, folder / "train.png")
    same_time = training.time_unit == "flow time"
    summary = {
        "command": command,
        "source": study.setting.source,
        "tokens of text": study.setting.ids.size,
        "chain": describe_chain(chain),
        "outcome of training": records.outcome_name(training.outcome),
        "outcome of flow": records.outcome_name(flow.outcome),
        "time unit of training": training.time_unit,
        "time reached": float(training.ts[-1]),
        "final population loss (nats)": float(training.losses[-1]),
        "focus rate c": study.focus_rate,
        "events": study.table(),
        "largest relative difference": agreement(study) if same_time else None,
        "largest relative difference to flow time 200": (
            agreement(study, _UNTIL) if same_time else None
        ),
        "attraction": attraction(training, chain),
        "bands": [
            band.row() | {"members": np.asarray(band.tokens)}
            for band in excess_by_band(training, chain)
        ],
        "controls": [control.row() for control in controls],
        "eps to zero": [row for departure in departures for row in departure.rows()],
        "settings": training.settings,
        "environment": environment(),
    }
    records.write_json(folder / "summary.json", summary)
