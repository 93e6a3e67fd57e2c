"""What is wrong input: one line on standard error and exit status 2."""

import contextlib
import sys
from typing import NoReturn


@contextlib.contextmanager
def reading_input():
    """Around the reading of input alone: an error elsewhere is not the user's."""
    try:
        yield
    except (ValueError, OSError) as error:
        refuse(str(error))


def check_positive(**options: float) -> None:
    """Refuse options that are not positive and finite."""
    for name, value in options.items():
        if not 0 < value < float("inf"):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be positive; got {value}.")


def refuse(message: str) -> NoReturn:
    """Say why in one line, and end."""
    print(f"flowsim: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
