"""What README.md prints runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
