"""Test configuration: double precision, strict dtype promotion."""

import os

# Several BLAS threads make jaxlib's dense eigensolvers up to 100 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
