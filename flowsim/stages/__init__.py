"""The stages of a run: what the flow does between the saddles it visits.

The paper tells the training of attention as a story in stages: condensation, focus,
dilution, new directions, and again. `find_stages` cuts a computed trajectory into these
stages, by thresholds that are arguments, and puts beside each of them the saddle it
leaves with its index, the predicted escape rate, the rate measured on the trajectory,
and what changed. For objectives that know no attention the stages are plateaus and
bursts.

Left out: finding the saddles (`flowsim.saddles`), and the closed forms of their rates
(`flowsim.theory`).

>>> import jax.numpy as jnp, flowsim as fs
>>> from flowsim.stages import find_stages
>>> loss = lambda y: 0.5 * (1 - y[0] * y[1]) ** 2
>>> run = fs.gradient_flow(loss, jnp.full(2, 1e-6), t1=60.0)
>>> [stage.name for stage in find_stages(run, loss)]
['plateau 1', 'burst 1', 'settling']
"""

from .cuts import Thresholds
from .escape import EscapeFit, fit_escape
from .find import find_stages
from .table import Changes, Departure, Stage, Stages

__all__ = [
    "Changes",
    "Departure",
    "EscapeFit",
    "Stage",
    "Stages",
    "Thresholds",
    "find_stages",
    "fit_escape",
]
