"""What signatures say of shapes, dtypes and types is true."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_annotation_holds_on_a_tour_of_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "tests.annotated"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_annotation_that_does_not_hold_is_found():
    program = (
        "from jaxtyping import install_import_hook\n"
        "with install_import_hook('flowsim', 'beartype.beartype'):\n"
        "    from flowsim.derivatives import directional_derivatives\n"
        "directional_derivatives(lambda y: y @ y, 'no parameters', 1.0, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.returncode != 0 and "TypeCheckError" in done.stderr
