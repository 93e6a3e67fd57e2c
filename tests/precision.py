"""Double precision turned off for a while, in every version of JAX supported."""

import contextlib

import jax


@contextlib.contextmanager
def single_precision():
    """What `jax.enable_x64(False)` does, which JAX 0.6 keeps elsewhere."""
    jax.config.update("jax_enable_x64", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", True)
