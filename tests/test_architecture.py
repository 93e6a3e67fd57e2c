"""The house: imports go down, files stay short, importing changes nothing."""

import ast
import builtins
import dis
import importlib
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import CodeType

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


def undefined_names(path: Path) -> set[str]:
    """Global names that the code of a module reads and that the module lacks."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    module = importlib.import_module(".".join(["flowsim", *parts]))
    found, codes = set(), [compile(path.read_text(), str(path), "exec")]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        found |= {
            step.argval
            for step in dis.get_instructions(code)
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
    return found - set(vars(module)) - set(dir(builtins)) - set(_local_names(path))


def _local_names(path: Path) -> set[str]:
    """Names bound in class bodies, which read like global ones there."""
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {"__module__", "__qualname__", "__name__", "__annotations__"}
    for node in chain.from_iterable(bodies):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                names.add(name.id)
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_name_is_undefined(path):
    # Linters cannot look: jaxtyping's shapes read like undefined names to them.
    if path.name != "__main__.py":
        assert not undefined_names(path)


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
