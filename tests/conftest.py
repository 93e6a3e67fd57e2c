"""Test configuration: double precision, strict dtype promotion, short compilation."""

import os
import subprocess
import sys

# Several BLAS threads make jaxlib's dense eigensolvers up to 100 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Most of the time of the suite goes into compiling small programs, and XLA's older way
# of generating code on the CPU needs 40 percent less of it. Tried in a process of its
# own, because XLA aborts on a flag it does not know. The README's command, notebooks
# and benchmarks run with XLA as it comes.
_FLAGS = "--xla_cpu_use_fusion_emitters=false"
if "XLA_FLAGS" not in os.environ:
    known = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices('cpu')"],
        env=os.environ | {"XLA_FLAGS": _FLAGS, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
    )
    # Set in either case: parallel test processes inherit it and do not try again.
    os.environ["XLA_FLAGS"] = _FLAGS if known.returncode == 0 else ""

import jax  # noqa: E402  (after the environment is set)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
