"""Exact gradient flow: theta'(t) = -grad L(theta), for any objective and any pytree.

The integration is Diffrax's. What is added is what a flow from saddle to saddle needs:
tolerances that follow the size of the start, records that are dense in bursts and
sparse on plateaus, a loss that is watched (it must never rise), and an outcome for
everything that can go wrong, with the path up to there.

Left out: optimisers with momentum or noise (see `flowsim.training`), and the search for
the critical points a run passes (see `flowsim.critical`).

>>> import jax.numpy as jnp, flowsim as fs
>>> saddle = lambda y: 0.5 * (1.0 - y[0] * y[1]) ** 2
>>> run = fs.gradient_flow(saddle, jnp.full(2, 1e-3), t1=20.0, rtol=1e-6)
>>> bool(run.succeeded), bool(run.losses[-1] < 1e-6)
(True, True)
"""

from .solve import Save, default_atol, gradient_flow

__all__ = ["Save", "default_atol", "gradient_flow"]
