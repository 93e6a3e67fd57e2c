"""Many flows of one kind at once: a batch that advances in one compiled loop.

Small flows leave a processor idle between operations; many of them together do not.
Here N flows share a few *slots*. In every round each slot makes one step of its own
flow, of its own length and order, and stands for itself in every decision; a slot whose
flow has ended takes the next one waiting. So nobody waits for the slowest flow, and a
flow that fails spoils no other. Within a round alone there is company: its linear
solves last as long as the longest of them.

`jax.vmap` of `flowsim.gradient_flow` gives the same results, but every lane pays for as
many steps as the slowest needs, and for both branches of every decision.

Left out: records of accepted steps, stop conditions, and any solver but the default
one. Large flows (from some thousand parameters on) gain nothing; run them one by one.

>>> import jax.numpy as jnp
>>> from flowsim.sweep import sweep
>>> saddle = lambda y: 0.5 * (1.0 - y[0] * y[1]) ** 2
>>> starts = jnp.array([[1e-3, 1e-3], [1e-2, 2e-2], [0.5, 0.1]])
>>> runs = sweep(saddle, starts, t1=20.0, rtol=1e-6)
>>> runs.models.shape, bool(runs.succeeded.all())
((3, 2, 2), True)
>>> bool(jnp.all(runs.losses[:, -1] < 1e-6))
True
"""

from .solve import sweep

__all__ = ["sweep"]
