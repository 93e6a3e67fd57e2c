"""What the commands share: reading of options, and the end of wrong input.

Wrong input is one line on standard error and exit status 2.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any, NoReturn


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


def lazy_chain_of(options: Any) -> Any:
    """The lazy chain of --pi and --lam, or None without them."""
    from ..markov import lazy_chain

    if (options.pi is None) != (options.lam is None):
        raise ValueError("--pi and --lam go together: a lazy chain needs both.")
    if options.pi is None or options.lam is None:
        return None
    return lazy_chain(options.pi, options.lam)


def default_chain() -> Any:
    """The chain of four tokens that the commands start from."""
    from ..markov import lazy_chain

    return lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)


def given(options: Any) -> dict[str, Any]:
    """The options as plain data, for a record of the run."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
