"""Work and precision of flow solvers: flowsim's, Diffrax's, SciPy's and CVODE.

    python benchmarks/solvers.py [--quick] [--problem NAME ...] [--method NAME ...]
        [--rtol R ...] [--group flow sweep cycle] [--cap SECONDS] [--cache FOLDER]
        [--json FILE] [--table FILE] [--figure FILE] [--resume]

Every row is one process, pinned to one core, with one BLAS thread, in double precision.
Seconds are those of a warm call, with half the range of the calls behind it: the median
of seven where one takes less than 5 s (after one that does not count), of two below
90 s. A short call to the same compiled code comes first, and its time is the column of
compilation (a whole call where flowsim may change its solver on the way, for
n > 1,000). flowsim's rows are whole `gradient_flow` calls with default saving and
records; the other methods return the final state only. CVODE (package scikit-sundae,
optional) and SciPy call compiled derivatives from Python. All methods get the same
atol, flowsim's default (1e-4 rtol for these starts), and dense ones run up to
n = 1,000.

Error: Euclidean norm of the deviation of the final state from a reference, over the
norm of the reference. References come from Diffrax's Dopri8 at rtol 1e-11. No explicit
method gets through Z64 to T = 20000, and Dopri8 needs hours for W256; there the
reference is flowsim's own at rtol 1e-10, and its deviation from 1e-9 is printed beside
it as self-convergence.

Ratio: seconds over those of the fastest row of `flowsim, default` on the same problem
whose error is not larger. A row that takes over --cap seconds reads "not finished".
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Before JAX starts: one core, one thread, whatever the machine has.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

BOTH, TIGHT = (1e-6, 1e-8), (1e-8,)
EXPLICIT = {"tsit5": BOTH, "dopri8": BOTH}
DENSE = {"lsoda": BOTH, "scipy-bdf": TIGHT, "cvode-dense": TIGHT}
COMMON = {
    "default": (1e-4, 1e-6, 1e-8, 1e-9, 1e-10),
    "rkc": (1e-4, 1e-6),
    "cvode-gmres": BOTH,
}
# Explicit methods need 1e8 steps on Z64 to T = 20000 (spectral radius 6e4), and minutes
# on W256. --method asks for others than these.
ROWS: dict[tuple[str, float], dict[str, tuple[float, ...]]] = {
    ("C1", 2000.0): COMMON | EXPLICIT | DENSE,
    ("C1", 20000.0): COMMON | {"tsit5": BOTH} | DENSE,
    ("Z64", 2000.0): COMMON | EXPLICIT | {"recycling": TIGHT},
    ("Z64", 20000.0): {
        "default": (1e-6, 1e-8, 1e-9),
        "bdf": TIGHT,
        "cvode-gmres": BOTH,
    },
    ("W64", 1000.0): COMMON | {"tsit5": BOTH, "recycling": TIGHT},
    ("W256", 1000.0): {
        "default": (1e-6, 1e-8, 1e-9),
        "bdf": TIGHT,
        "rkc": (1e-6,),
        "cvode-gmres": BOTH,
        "tsit5": (1e-6,),
    },
}
QUICK: dict[tuple[str, float], dict[str, tuple[float, ...]]] = {
    ("C1", 200.0): {
        "default": (1e-6,),
        "rkc": (1e-4,),
        "tsit5": (1e-6,),
        "lsoda": (1e-6,),
        "cvode-gmres": (1e-6,),
    }
}
SELF_REFERENCED = {("Z64", 20000.0), ("W256", 1000.0)}
ALLOWANCE = 90.0  # Seconds for imports and compilation, beyond the cap.
SHORT, LONG = 5.0, 90.0  # Seconds of calls that are timed seven times; twice.
NUM_FLOWS = 64


def pin() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def processor() -> str:
    """The name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def timed(call: Any, warm_up: Any) -> tuple[Any, dict[str, Any]]:
    """What a call gives, and seconds: of the first short call, of the warm ones."""
    began = time.perf_counter()
    warm_up()
    compiling, seconds = time.perf_counter() - began, []
    wanted = 1
    while len(seconds) < wanted:
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
        if wanted == 1 and seconds[0] < LONG:
            short = seconds[0] < SHORT
            wanted, seconds = (7, []) if short else (2, seconds)
    spread = 0.5 * (max(seconds) - min(seconds)) if len(seconds) > 1 else None
    return result, {
        "compile_s": compiling,
        "seconds": statistics.median(seconds),
        "spread_s": spread,
        "calls": len(seconds),
    }


def flow_row(task: dict[str, Any]) -> dict[str, Any]:
    """One method on one problem at one tolerance."""
    import numpy as np
    from work_precision import methods, problems

    import flowsim as fs

    loss = fs.PopulationLoss(problems.chain(task["problem"]))
    model = problems.start(task["problem"])
    call = methods.METHODS[task["method"]].prepare(loss, model, task["rtol"])
    if task.get("save"):  # A reference: nothing is timed.
        done = call(task["t1"])
        np.savez(task["save"], y=done.y)
        return {"seconds": 0.0, "note": done.note}
    # Where flowsim may change its solver on the way, a short call compiles but half.
    large = problems.PROBLEMS[task["problem"]].num_params > methods.MAX_DENSE
    whole = task["method"] == "default" and large
    warm_up = task["t1"] * (1.0 if whole else 1e-4)
    done, seconds = timed(lambda: call(task["t1"]), lambda: call(warm_up))
    error = None
    if Path(task["reference"]).exists():
        reference = np.load(task["reference"])["y"]
        error = float(np.linalg.norm(done.y - reference) / np.linalg.norm(reference))
    counts = done._asdict()
    del counts["y"]
    return {**seconds, "error": error, **counts}


def sweep_row(task: dict[str, Any]) -> dict[str, Any]:
    """Flows at once against flows one by one: from other seeds, same chain."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from work_precision import problems

    import flowsim as fs
    from flowsim.sweep import sweep

    loss = fs.PopulationLoss(problems.chain(task["problem"]))
    models = [problems.start(task["problem"], seed) for seed in range(NUM_FLOWS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    rtol, t1 = task["rtol"], task["t1"]

    def together(t1: float) -> Any:
        return jax.block_until_ready(sweep(loss, stacked, t1=t1, rtol=rtol))

    def alone(t1: float, number: int) -> Any:
        run = fs.gradient_flow(loss, models[number], t1=t1, rtol=rtol)
        return jax.block_until_ready(run.models), run

    runs, seconds = timed(lambda: together(t1), lambda: together(t1 * 1e-4))
    alone(t1 * 1e-4, 0)
    singles, errors = [], []
    for number in range(0, NUM_FLOWS, NUM_FLOWS // 8):
        began = time.perf_counter()
        _, run = alone(t1, number)
        singles.append(time.perf_counter() - began)
        lane = jax.tree.map(lambda leaf, i=number: leaf[i, -1], runs.models)
        y, expected = problems.flat(lane), problems.flat(run.final)
        errors.append(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    for name in ("seconds", "spread_s"):
        seconds[name] = seconds[name] and seconds[name] / NUM_FLOWS
    per_flow, single = seconds["seconds"], statistics.mean(singles)
    return {
        **seconds, "alone_s": single,
        "share": per_flow / single, "error": float(max(errors)),
        "steps": int(jnp.sum(runs.stats["num_steps"])) // NUM_FLOWS,
        "gradients": int(jnp.sum(runs.stats["num_evaluations"])) // NUM_FLOWS,
        "products": int(jnp.sum(runs.stats["num_products"])) // NUM_FLOWS,
        "note": "" if bool(jnp.all(runs.succeeded)) else "some lanes failed",
    }  # fmt: skip


def cycle_row(task: dict[str, Any]) -> dict[str, Any]:
    """The flow of `flowsim cycle` on the default chain, diagnostics included."""
    import functools

    import jax
    from work_precision import problems

    import flowsim as fs

    loss = fs.PopulationLoss(problems.chain(task["problem"]))
    model = problems.start(task["problem"])
    observe = functools.partial(fs.diagnose, loss)

    def call(t1: float) -> Any:
        run = fs.gradient_flow(loss, model, t1=t1, observe=observe)
        return jax.block_until_ready(run.observables) and run

    run, seconds = timed(lambda: call(task["t1"]), lambda: call(2.0))
    return {
        **seconds, "error": None,
        "steps": int(run.stats["num_steps"]),
        "gradients": int(run.stats["num_evaluations"]),
        "products": int(run.stats["num_products"]), "note": "",
    }  # fmt: skip


WORKERS = {"flow": flow_row, "sweep": sweep_row, "cycle": cycle_row}


def worker(task: dict[str, Any]) -> dict[str, Any]:
    pin()
    import diffrax
    import jax
    import jaxlib

    jax.config.update("jax_enable_x64", True)
    row = WORKERS[task["group"]](task)
    versions = {module.__name__: module.__version__ for module in (jax, jaxlib)}
    versions["diffrax"] = diffrax.__version__
    if importlib.util.find_spec("sksundae") is not None:
        versions["scikit-sundae"] = metadata.version("scikit-sundae")
    versions["scipy"] = metadata.version("scipy")
    device = jax.devices()[0].device_kind
    device = processor() if device == "cpu" else device
    return {**task, **row, "versions": versions, "device": device}


def run(task: dict[str, Any], cap: float) -> dict[str, Any]:
    """The row of a task, from a process of its own."""
    command = [sys.executable, __file__, "--worker", json.dumps(task)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=cap + ALLOWANCE
        )
    except subprocess.TimeoutExpired:
        return task | {"seconds": None, "note": f"not finished in {cap:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return task | {"seconds": None, "note": f"failed: {last[:200]}"}
    row = json.loads(done.stdout.splitlines()[-1])
    if row["seconds"] > cap:
        row |= {"seconds": None, "note": f"not finished in {cap:g} s"}
    return row


def reference(problem: str, t1: float, folder: Path) -> tuple[Path, str]:
    """The file with the final state for comparison, and a line on its origin."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    own = (problem, t1) in SELF_REFERENCED
    method, rtols = ("default", (1e-10, 1e-9)) if own else ("dopri8", (1e-11,))
    task = {"group": "flow", "problem": problem, "t1": t1, "method": method}
    paths = [folder / f"{problem}-{t1:g}-{method}-{rtol:g}.npz" for rtol in rtols]
    for path, rtol in zip(paths, rtols, strict=True):
        if not path.exists():
            row = run(task | {"rtol": rtol, "save": str(path)}, 1800.0)
            if row["note"]:
                path.unlink(missing_ok=True)
                return path, f"no reference: {row['note']}"
    line = f"{problem}, T = {t1:g}: {method}, rtol {rtols[0]:g}"
    if own:
        first, second = (np.load(path)["y"] for path in paths)
        gap = np.linalg.norm(first - second) / np.linalg.norm(first)
        line += f"; self-convergence, deviation from rtol {rtols[1]:g}: {gap:.1e}"
    return paths[0], line


def tasks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows asked for, in order."""
    from work_precision.methods import MAX_DENSE, METHODS
    from work_precision.problems import PROBLEMS

    has_sundae = importlib.util.find_spec("sksundae") is not None
    if not has_sundae:
        print("scikit-sundae is not installed: rows of CVODE are skipped.", flush=True)
    found = []
    for (problem, t1), plan in (QUICK if options.quick else ROWS).items():
        if options.problem and problem not in options.problem:
            continue
        if options.time and t1 not in options.time:
            continue
        for name in options.method or plan:
            method = METHODS[name]
            if method.sundae and not has_sundae:
                continue
            if method.dense and PROBLEMS[problem].num_params > MAX_DENSE:
                continue
            for rtol in options.rtol or plan.get(name, TIGHT):
                found.append(
                    {"group": "flow", "problem": problem, "t1": t1, "method": name,
                     "label": method.label, "rtol": rtol}
                )  # fmt: skip
    t1, rtol = (200.0, 1e-6) if options.quick else (2000.0, 1e-8)
    sweep = {"group": "sweep", "problem": "C1", "t1": t1, "method": "sweep",
             "label": f"{NUM_FLOWS} flows at once, each", "rtol": rtol}  # fmt: skip
    cycle = {"group": "cycle", "problem": "C1", "t1": 2e4, "method": "cycle",
             "label": "`flowsim cycle`, with diagnostics", "rtol": None}  # fmt: skip
    return [task for task in [*found, sweep, cycle] if task["group"] in options.group]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="C1 to T = 200 only")
    parser.add_argument("--problem", nargs="+", metavar="NAME")
    parser.add_argument("--time", nargs="+", type=float, metavar="T")
    parser.add_argument("--method", nargs="+", metavar="NAME")
    parser.add_argument("--rtol", nargs="+", type=float, metavar="R")
    parser.add_argument("--group", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--cap", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/solvers"), metavar="FOLDER"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep rows of --json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(json.loads(options.worker))))
        return

    from work_precision.table import cells, table

    rows, lines = [], []
    if options.resume and options.json and options.json.exists():
        kept = json.loads(options.json.read_text())
        rows, lines = kept["rows"], kept["references"]

    def key(task):
        return tuple(
            task[name] for name in ("group", "problem", "t1", "method", "rtol")
        )

    had = {key(row) for row in rows}
    began, references = time.perf_counter(), {}
    for task in tasks(options):
        if key(task) in had:
            continue
        if task["group"] == "flow":
            place = task["problem"], task["t1"]
            if place not in references:
                references[place], line = reference(*place, options.cache)
                lines = [*(kept for kept in lines if kept != line), line]
            task["reference"] = str(references[place])
        row = run(task, options.cap)
        rows.append(row)
        shown = "  ".join(filter(None, cells(row, [])))
        print(f"{time.perf_counter() - began:7.1f}  {shown}", flush=True)
        if options.json:
            content = {"rows": rows, "references": lines}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(content, indent=1))
    text = table(rows, lines)
    print("\n" + text)
    if options.table:
        options.table.write_text(text)
    if options.figure:
        from work_precision.figure import draw

        draw(rows, options.figure)


if __name__ == "__main__":
    main()
