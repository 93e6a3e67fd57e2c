"""What README.md prints runs as printed."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flowsim
from flowsim.__main__ import _parse
from flowsim.commands import COMMANDS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@pytest.mark.slow
def test_the_program_of_the_readme_finds_two_saddles_and_a_minimum(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(compile(program, str(README), "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    assert "reached t1" in out
    assert re.findall(r"index (\d)", out) == ["2", "1", "0"]
    assert out.count("leaves along") == 3


def test_the_two_commands_stand_in_the_readme_once():
    lines = README.read_text().splitlines()
    commands = [line for line in lines if line.startswith("python3 -m venv ")]
    assert len(commands) == 2
    assert "flowsim cycle" in commands[0] and "pytest" in commands[1]


def table_of_commands() -> list[str]:
    return re.findall(r"^\| `(flowsim [^`]*)` \|", README.read_text(), re.M)


@pytest.mark.parametrize("command", table_of_commands())
def test_every_command_of_the_table_is_one_with_these_options(command):
    _, name, *rest = shlex.split(command)
    options = _parse([name, *rest])
    assert type(options) is COMMANDS[name][0]
    for flag in re.findall(r"--([a-z0-9-]+)", command):
        assert getattr(options, flag.replace("-", "_")) is not None


def test_the_table_has_every_command_and_options_named_in_passing_exist():
    assert {command.split()[1] for command in table_of_commands()} == set(COMMANDS)
    fields = {
        field.name.replace("_", "-")
        for options, _ in COMMANDS.values()
        for field in dataclasses.fields(options)
    }
    named = re.findall(r"`--([a-z0-9-]+)`", README.read_text())
    assert named and set(named) - {"help", "quick"} <= fields


def test_files_that_are_linked_or_called_exist():
    text = README.read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    linked = re.findall(r"\]\((?!http)([^)]+)\)", text)
    called = re.findall(r"(?:benchmarks|tests|flowsim)/[\w/]+\.(?:py|md)", text)
    assert linked and called
    assert not [name for name in linked + called if not (ROOT / name).exists()]


def test_dependencies_extras_and_version_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = README.read_text()
    section = text[text.index("## Dependencies") :].split("\n## ")[0]
    runtime, extras = section.split("Extras:")
    named = set(re.findall(r"[\w-]+", runtime))
    needed = {re.split(r"[>=<]", line)[0] for line in project["dependencies"]}
    assert needed <= named
    assert set(re.findall(r"`([a-z]+)`", extras)) == set(
        project["optional-dependencies"]
    )
    assert project["version"] == flowsim.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {flowsim.__version__}\n" in citation


@pytest.mark.slow
def test_the_api_reference_builds_without_a_warning(tmp_path):
    pytest.importorskip("pdoc")
    (line,) = re.findall(
        r"^PYTHONWARNINGS='(.*)' pdoc (.*) -o docs flowsim$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.M,
    )
    hidden, options = line
    command = [
        sys.executable,
        "-m",
        "pdoc",
        *options.split(),
        "-o",
        tmp_path,
        "flowsim",
    ]
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"PYTHONWARNINGS": hidden},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    page = (tmp_path / "flowsim.html").read_text()
    assert "gradient_flow" in page and "find_saddles" in page
