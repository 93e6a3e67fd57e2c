"""The house: imports go down, files stay short, importing changes nothing."""

import ast
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

import flowsim

PACKAGE = Path(flowsim.__file__).parent

# From the ground up; a module imports only from earlier floors, or from earlier
# entries of its own.
FLOORS = [
    ["_types", "_trees", "_summary", "_curves"],
    ["markov", "corpus", "model"],
    ["width", "conservation", "derivatives"],
    ["loss", "low_rank", "trajectory", "records", "batches"],
    ["symmetry", "lanczos", "newton", "solvers", "flow"],
    ["spectrum", "critical", "theory", "diagnostics"],
    ["stretches", "visits", "copies", "saddles"],
    ["linearised", "invariant", "lyapunov_schmidt"],
    ["stages", "training", "empirical"],
    ["verification", "sweep"],
    ["plots"],
    ["report", "text_report", "commands"],
    ["__main__"],
]
RANK = {name: place for place, name in enumerate(chain.from_iterable(FLOORS))}


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Top-level modules of the package that a file imports."""
    parents = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        base = [
            *parents[: len(parents) - node.level + 1],
            *(node.module or "").split("."),
        ]
        names = [part for part in base if part]
        found |= {names[0]} if names else {alias.name for alias in node.names}
    return found


SOURCES = sorted(
    path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
    own = module_of(path)
    assert own in RANK, f"{own} has no floor"
    for other in imported_modules(path) - {own}:
        assert RANK[other] < RANK[own], f"{own} must not import {other}"


def test_every_floor_exists():
    assert set(RANK) == {module_of(path) for path in SOURCES}


def test_files_stay_below_400_lines():
    long = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in SOURCES
    }
    assert not {name: lines for name, lines in long.items() if lines > 400}


def test_only_drawing_modules_import_matplotlib():
    for path in SOURCES:
        if "import matplotlib" in (text := path.read_text()) or (
            "from matplotlib" in text
        ):
            assert module_of(path) in {"plots", "report"}, path


def test_public_names_are_those_of_all():
    for name in flowsim.__all__:
        assert getattr(flowsim, name) is not None
    assert flowsim.__all__ == sorted(set(flowsim.__all__))
    # Whatever is importable from the top is listed; submodules aside.
    modules = {name.split(".")[1] for name in sys.modules if "flowsim." in name}
    public = {name for name in vars(flowsim) if not name.startswith("_")}
    assert public - modules <= set(flowsim.__all__)


def test_importing_has_no_visible_effect():
    program = (
        "import jax; before = dict(jax.config.values); import flowsim, sys; "
        "assert before == dict(jax.config.values); "
        "late = {'matplotlib', 'optax', 'scipy', 'tqdm', 'tyro', 'xarray'}; "
        "assert not (loaded := late & set(sys.modules)), loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
