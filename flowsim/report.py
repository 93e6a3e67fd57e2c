"""What a command leaves behind: the text it prints and the run folder it writes.

A run folder holds `summary.json` (chain, settings, stages, end state, integration
error), `trajectory.npz` (see `flowsim.records`) and one figure.
"""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffrax
import equinox as eqx
import jax
import numpy as np

from . import _summary, plots, records
from .conservation import conserved_drift
from .diagnostics import Diagnostics
from .loss import PopulationLoss
from .markov import MarkovChain
from .stages import Stages
from .trajectory import Outcome, Trajectory


def cycle_text(run: Trajectory, loss: PopulationLoss, stages: Stages) -> str:
    """The stages, the state at the end of each, and what both can be trusted for."""
    chain = loss.chain
    seen: Diagnostics = run.observables
    end = float(run.losses[-1])
    drift = conserved_drift(seen.conserved)
    chosen = run.settings.get("chosen because", "")
    lines = {
        "outcome": f"{Outcome[run.outcome]}, t = {float(run.ts[-1]):g}",
        "final loss": (
            f"{end:.8f} nats; floor H(P) = {float(chain.entropy_rate):.8f}, "
            f"above it by {end - float(chain.entropy_rate):.2e}"
        ),
        "conserved": "drift "
        + ", ".join(f"{float(value):.1e} ({name})" for name, value in drift.items()),
        "solver": (
            f"{run.settings['solver']} ({chosen}), rtol {run.settings['rtol']:g}, "
            f"{int(run.stats['num_steps'])} steps, {len(run.ts)} points saved"
        ),
    }
    width = max(map(len, lines))
    footer = "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
    return f"{stages}\n\n{_states(run, stages)}\n\n{footer}"


def _states(run: Trajectory, stages: Stages) -> str:
    """Loss, attention, rank ratio and entropy at the end of every stage."""
    seen: Diagnostics = run.observables
    columns = {
        "loss": run.losses,
        "attention on top token": seen.mean_top_attention,
        "sigma2/sigma1 of W0": seen.rank_ratio().W0,
        "attention entropy": seen.mean_attention_entropy,
    }
    rows = [("at the end of", "t", *columns)]
    for stage in stages:
        at = run.nearest(stage.end)
        numbers = (f"{float(values[at]):.4g}" for values in columns.values())
        rows.append((stage.name, f"{float(run.ts[at]):.5g}", *numbers))
    return "\n".join(_summary.columns(rows))


def write_cycle(
    folder: Path,
    run: Trajectory,
    loss: PopulationLoss,
    stages: Stages,
    command: Mapping[str, Any],
) -> None:
    """Write `summary.json`, `trajectory.npz` and `cycle.png` into a run folder."""
    chain = loss.chain
    seen: Diagnostics = run.observables
    records.save_trajectory(run, folder / "trajectory.npz")
    plots.save(plots.cycle_figure(run, chain, stages), folder / "cycle.png")
    summary = {
        "command": command,
        "chain": describe_chain(chain),
        "outcome": records.outcome_name(run.outcome),
        "flow time reached": float(run.ts[-1]),
        "final loss (nats)": float(run.losses[-1]),
        "final gradient norm": float(run.grad_norms[-1]),
        "stages": stages.rows(),
        "conserved drift": conserved_drift(seen.conserved),
        "stats": run.stats,
        "settings": run.settings,
        "environment": environment(),
    }
    records.write_json(folder / "summary.json", summary)


def describe_chain(chain: MarkovChain) -> dict[str, Any]:
    """A chain's names, law and entropies, for a summary."""
    return {
        "tokens": chain.tokens or list(range(chain.num_states)),
        "stationary law": np.asarray(chain.stationary),
        "entropy rate (nats)": float(chain.entropy_rate),
        "unigram entropy (nats)": float(chain.unigram_entropy),
    }


def environment() -> dict[str, str]:
    """Versions and device, for a summary."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "diffrax": diffrax.__version__,
        "equinox": eqx.__version__,
        "device": jax.devices()[0].device_kind,
    }
