"""The command line, run within the test's own process."""

import pytest

from flowsim.__main__ import main


def run_command(arguments, capsys) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `flowsim ARGUMENTS`."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err
