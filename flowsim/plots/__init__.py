"""Figures: each a function from a result to axes.

Every `..._figure` draws one panel into `ax`, or into a figure of its own, and returns
the axes; `cycle_figure` puts six of them on a page and returns that. Axes given by the
caller get no legend: the lines have labels, so that ``ax.legend()`` makes one. Nothing
here computes what a table would need, and nothing belongs to a window: a notebook shows
``ax.figure``, a program saves it with `save`, and the backend stays as it was.

Colours and markers tell lines apart for the colour-blind and in grey print; dashed
lines are theory. Time is logarithmic from just before the loss first moves.

Left out: the numbers themselves (`flowsim.diagnostics`, `flowsim.stages`), and tables.

>>> import jax.numpy as jnp, flowsim as fs
>>> from flowsim.plots import loss_figure
>>> run = fs.gradient_flow(lambda y: 0.5 * jnp.sum(y**2), jnp.ones(2), t1=1.0)
>>> loss_figure(run).get_ylabel()
'loss (nats)'
"""

from ._style import save
from .animation import cycle_animation
from .comparison import comparison_figure
from .cycle import cycle_figure
from .runs import (
    attention_figure,
    drift_figure,
    entropy_figure,
    gradient_figure,
    loss_figure,
    norm_figure,
    path_figure,
    rank_figure,
)
from .spectra import spectrum_figure
from .unfolding import branches_figure, study_figure, unfolding_figure

__all__ = [
    "attention_figure",
    "branches_figure",
    "comparison_figure",
    "cycle_animation",
    "cycle_figure",
    "drift_figure",
    "entropy_figure",
    "gradient_figure",
    "loss_figure",
    "norm_figure",
    "path_figure",
    "rank_figure",
    "save",
    "spectrum_figure",
    "study_figure",
    "unfolding_figure",
]
