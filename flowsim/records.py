"""Files: the one module that writes and reads trajectories, tables and run folders.

A trajectory is one compressed `.npz` that plain NumPy reads: `ts`, `losses`,
`grad_norms`, every parameter as `models.<name>`, every observable as
`observables.<name>`, and a JSON text `header` with the outcome, the counts and the
settings. Nothing is pickled.

>>> import tempfile, pathlib, jax.numpy as jnp, flowsim as fs
>>> run = fs.gradient_flow(lambda y: 0.5 * jnp.sum(y**2), jnp.ones(2), t1=1.0)
>>> path = pathlib.Path(tempfile.mkdtemp()) / "run.npz"
>>> fs.save_trajectory(run, path)
>>> fs.load_trajectory(path, like=jnp.ones(2)).models.shape == run.models.shape
True
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from . import _trees
from ._types import AnyArray, Params
from .corpus import load_table
from .markov import MarkovChain
from .model import AttentionModel
from .trajectory import Outcome, Trajectory

_FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint file that is not one, or not that of this run."""


def save_trajectory(run: Trajectory, path: str | os.PathLike) -> None:
    """Write a concrete run to one `.npz` file.

    The file appears under its name only when it is complete.
    """
    if run.ts.ndim != 1:
        raise ValueError(
            f"save one run at a time; got a batch with ts of shape {run.ts.shape}."
        )
    header = {
        "format": _FORMAT,
        "outcome": outcome_name(run.outcome),
        "num_saved": int(run.num_saved),
        "loss_rise": float(run.loss_rise),
        "stats": {key: _plain(value) for key, value in run.stats.items()},
        "settings": run.settings,
        "time_unit": run.time_unit,
        "model": type(run.models).__name__,
    }
    if isinstance(run.models, AttentionModel):
        header["scale_attention"] = run.models.scale_attention
    arrays = {
        "ts": run.ts,
        "losses": run.losses,
        "grad_norms": run.grad_norms,
        **_trees.named_leaves(run.models, "models"),
        **_trees.named_leaves(run.observables, "observables"),
    }
    numbers: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
    numbers["header"] = np.array(json.dumps(header))

    def write(file):
        np.savez_compressed(file, **numbers)

    _write_whole(path, write)


def load_trajectory(path: str | os.PathLike, like: Params | None = None) -> Trajectory:
    """Read a run written by `save_trajectory`.

    Args:
        like: a parameter pytree of the run's structure. Without it the models of an
            `AttentionModel` run come back as such, others as a dictionary from names
            to arrays. Observables always come back as a dictionary.
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        header = json.loads(str(arrays.pop("header")))
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(
            f"{path} is not a trajectory written by flowsim ({error})."
        ) from error
    models = _collect("models", arrays)
    observables = _collect("observables", arrays)
    if like is not None:
        names = list(_trees.named_leaves(like))
        if sorted(names) != sorted(models):
            raise ValueError(
                f"{path} holds the parameters {sorted(models)}; like has "
                f"{sorted(names)}."
            )
        structure = jtu.tree_structure(like)
        tree: Any = jtu.tree_unflatten(structure, [models[name] for name in names])
    elif header["model"] == "AttentionModel":
        tree = AttentionModel(**models, scale_attention=header["scale_attention"])
    else:
        tree = models
    return Trajectory(
        ts=jnp.asarray(arrays["ts"]),
        models=tree,
        losses=jnp.asarray(arrays["losses"]),
        grad_norms=jnp.asarray(arrays["grad_norms"]),
        observables=observables or None,
        outcome=getattr(Outcome, header["outcome"]),
        num_saved=jnp.asarray(header["num_saved"], jnp.int32),
        loss_rise=jnp.asarray(header["loss_rise"]),
        stats=header["stats"],
        settings=header["settings"],
        time_unit=header["time_unit"],
    )


def save_checkpoint(
    path: str | os.PathLike, state: PyTree[AnyArray], header: Mapping[str, Any]
) -> None:
    """Write a pytree of arrays, and what it belongs to, to one `.npz` file."""
    leaves = _trees.named_leaves(state, "state").items()
    numbers: dict[str, Any] = {key: np.asarray(value) for key, value in leaves}
    numbers["header"] = np.array(json.dumps({"checkpoint": _plain(header)}))
    _write_whole(path, lambda file: np.savez(file, **numbers))


def load_checkpoint(
    path: str | os.PathLike, like: PyTree[AnyArray]
) -> tuple[PyTree[AnyArray], dict[str, Any]]:
    """Read what `save_checkpoint` wrote, in the structure of `like`.

    The first axis of an array may have another length than in `like`.

    Returns:
        The pytree, its leaves NumPy arrays, and the header.

    Raises:
        CheckpointError: not a checkpoint, or names, shapes or types differ from `like`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        header = json.loads(str(arrays.pop("header")))["checkpoint"]
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a checkpoint written by flowsim ({error})."
        ) from error
    expected = {
        key: np.asarray(leaf)
        for key, leaf in _trees.named_leaves(like, "state").items()
    }

    def kind(array: np.ndarray) -> tuple[Any, ...]:
        return array.ndim, array.shape[1:], array.dtype

    for name in sorted({*arrays, *expected}):
        if name not in arrays or name not in expected:
            side = "lacks" if name in expected else "has besides"
            raise CheckpointError(f"{path} does not fit this run: it {side} {name}.")
        if kind(arrays[name]) != kind(expected[name]):
            raise CheckpointError(
                f"{path} does not fit this run: {name} is {arrays[name].dtype} of "
                f"shape {arrays[name].shape}, here {expected[name].dtype} of shape "
                f"{expected[name].shape}."
            )
    leaves = [arrays[name] for name in expected]
    return jtu.tree_unflatten(jtu.tree_structure(like), leaves), header


def load_chain_file(path: str | os.PathLike) -> MarkovChain:
    """Read a chain from an `.npz` file.

    Either a transition matrix under the key `P`, optionally with the stationary law
    `pi` and the names `tokens`; or a table of bigram counts as `flowsim counts` makes
    it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no chain file {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:
        raise ValueError(f"{path} is not an .npz file of plain arrays.") from error
    if "counts" in arrays:
        return load_table(path).to_chain()
    unknown = sorted(set(arrays) - {"P", "pi", "tokens"})
    if "P" not in arrays or unknown:
        raise ValueError(
            f"{path} must hold the key P and may hold pi and tokens; "
            f"it holds {sorted(arrays)}."
        )
    tokens = arrays.get("tokens")
    names = None if tokens is None else tuple(str(name) for name in tokens)
    return MarkovChain(arrays["P"], stationary=arrays.get("pi"), tokens=names)


def outcome_name(outcome: Outcome) -> str:
    """The member's own name, such as "reached_t1"."""
    for name in Outcome._name_to_item:  # pyright: ignore[reportAttributeAccessIssue]
        if bool(outcome == getattr(Outcome, name)):
            return name
    raise ValueError("outcome must be a concrete member of flowsim.Outcome.")


def check_folder(path: str | os.PathLike, *, force: bool = False) -> Path:
    """Check that a run may be written to a folder, before it is computed.

    Raises:
        ValueError: the folder holds something and `force` is not given, or the path
            cannot be a run folder (a file, a folder that holds something else, or a
            place that cannot be written).
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a run folder was expected.")
    if folder.exists() and any(folder.iterdir()):
        if not force:
            raise ValueError(f"{folder} exists; give --force to replace it.")
        if not (folder / "summary.json").exists():
            raise ValueError(
                f"{folder} does not look like a run folder (no summary.json); it is "
                "not replaced."
            )
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise ValueError(f"{folder} cannot be written: {nearest} does not allow it.")
    return folder


def prepare_folder(path: str | os.PathLike, *, force: bool = False) -> Path:
    """Make an empty run folder, under the conditions of `check_folder`."""
    folder = check_folder(path, force=force)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def write_json(path: str | os.PathLike, data: Mapping[str, Any]) -> None:
    """Write plain data as indented JSON; arrays become lists, NaN and inf null."""
    text = json.dumps(_plain(data), indent=2, allow_nan=False) + "\n"
    _write_whole(path, lambda file: file.write(text.encode()))


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file, whole or not at all."""
    _write_whole(path, lambda file: file.write(text.encode()))


def markdown_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table; the columns are the keys of the first row."""
    rows = [{key: _cell(value) for key, value in row.items()} for row in rows]
    if not rows:
        return ""
    columns = list(rows[0])
    widths = {c: max(len(c), *(len(row.get(c, "")) for row in rows)) for c in columns}

    def line(cells: Mapping[str, str]) -> str:
        return (
            "| " + " | ".join(cells.get(c, "").ljust(widths[c]) for c in columns) + " |"
        )

    rule = "|" + "|".join("-" * (widths[c] + 2) for c in columns) + "|"
    return "\n".join([line({c: c for c in columns}), rule, *map(line, rows)]) + "\n"


def _cell(value: Any) -> str:
    value = _plain(value)
    text = (
        ""
        if value is None
        else f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
    )
    return text.replace("|", "\\|").replace("\n", " ")


def _collect(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        key[len(prefix) + 1 :]: jnp.asarray(value)
        for key, value in arrays.items()
        if key == prefix or key.startswith(prefix + ".")
    }


def _plain(value: Any) -> Any:
    """Plain Python data for JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _write_whole(path: str | os.PathLike, write: Any) -> None:
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            write(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
