"""What README.md prints runs as printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


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
