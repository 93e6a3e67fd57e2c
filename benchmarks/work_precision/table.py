"""The rows of the benchmark as a Markdown table, with what they rest on."""

import os
from typing import Any

HEADER = (
    "problem", "T", "method", "rtol", "error", "steps", "gradients", "Hvps",
    "Jacobians", "compile s", "seconds", "ratio",
)  # fmt: skip


def cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    def show(value: Any, form: str) -> str:
        return "" if value is None else format(value, form)

    seconds = row.get("seconds")
    label = row["label"]
    if row.get("share") is not None:
        label += f" ({row['share']:.2f} of one alone, {row['alone_s']:.3g} s)"
    finished = show(seconds, ".3g") or row["note"]
    if seconds is not None and row.get("spread_s") is not None:
        finished += f" ± {row['spread_s']:.1g}"
    if seconds is not None and row.get("note"):
        finished += f" ({row['note']})"
    error = row.get("error")
    fair = [
        other["seconds"]
        for other in rows
        if other["group"] == "flow" and other["method"] == "default"
        and (other["problem"], other["t1"]) == (row["problem"], row["t1"])
        and other.get("seconds") and (error is not None and other["error"] <= error)
    ]  # fmt: skip
    ratio = seconds / min(fair) if seconds and fair and row["group"] == "flow" else None
    return [
        row["problem"], f"{row['t1']:g}", label, show(row.get("rtol"), ".0e"),
        show(error, ".1e"), *(show(row.get(key), ",") for key in
        ("steps", "gradients", "products", "jacobians")),
        show(row.get("compile_s"), ".1f"), finished, show(ratio, ".3g"),
    ]  # fmt: skip


def table(rows: list[dict[str, Any]], lines: list[str]) -> str:
    """Markdown: the rows, then what they rest on."""
    text = [HEADER, ["---"] * len(HEADER), *(cells(row, rows) for row in rows)]
    device = next((row for row in rows if "device" in row), None)
    foot = [f"Reference: {line}." for line in lines]
    if device is not None:
        versions = ", ".join(f"{k} {v}" for k, v in device["versions"].items())
        foot.append(
            f"One core of {device['device']} ({os.cpu_count()} cores), double "
            f"precision, {versions}."
        )
    body = "\n".join("| " + " | ".join(line) + " |" for line in text)
    return body + "\n\n" + "\n".join(foot) + "\n"
