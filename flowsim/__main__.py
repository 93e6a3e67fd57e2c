"""The command line: `flowsim cycle`, `verify`, `unfold`, `train`, `counts`.

Arguments in, one table out, files in a run folder. Wrong input ends with one line on
standard error and exit status 2; a run that did not end as asked, or a claim that
fails, with status 1.
"""

import contextlib
import io
import re
import sys
from typing import Any

import tyro

from .commands import COMMANDS
from .commands.reading import refuse


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and turn wrong input into one line and exit status 2."""
    command = _parse(sys.argv[1:] if arguments is None else arguments)
    import jax

    # The command line's own default; the library never switches it.
    jax.config.update("jax_enable_x64", True)
    runs = {options: run for options, run in COMMANDS.values()}
    sys.exit(runs[type(command)](command))


def _parse(arguments: list[str]) -> Any:
    """tyro's parser, with its multi-line complaint folded into one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                {name: options for name, (options, _) in COMMANDS.items()},
                prog="flowsim",
                description="Exact gradient flow from saddle to saddle.",
                args=arguments,
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        frame = re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─]", " ", said.getvalue())
        refuse(re.sub(r"^\s*\w+ (error|options)\s+", "", " ".join(frame.split())))


if __name__ == "__main__":
    main()
