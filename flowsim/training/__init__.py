"""Training by an Optax optimiser, with the record of a flow.

The discrete companion of `flowsim.flow`: the same objectives (or batches of them), the
same `Trajectory`. Plain gradient descent with a learning rate eta is the explicit Euler
method for the flow, so its times are flow times, eta times step; any other optimiser
follows a different flow, and its times are steps.

Left out: learning-rate schedules and clipping, which Optax has, and parallel devices.

>>> import jax.numpy as jnp, flowsim as fs
>>> run = fs.train(lambda y: 0.5 * jnp.sum(y**2), jnp.ones(2), 0.1, num_steps=100)
>>> round(float(run.ts[-1]), 6), bool(run.losses[-1] < 1e-8)
(10.0, True)
"""

from .train import train

__all__ = ["train"]
