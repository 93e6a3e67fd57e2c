"""The two runs of every study: training on a text, and the population flow.

Compiling a run takes longer than most runs take, so chains are made dense: all of one
vocabulary share the compiled code. Attention needs matrices of this size anyway.
"""

import functools as ft
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..diagnostics import diagnose
from ..flow import gradient_flow
from ..loss import PopulationLoss
from ..markov import MarkovChain
from ..model import AttentionModel
from ..training import train
from ..trajectory import Trajectory
from .texts import TextSetting

if TYPE_CHECKING:
    import optax

_ROWS = 500


def draw_start(
    chain: MarkovChain,
    *,
    width: int,
    key_width: int | None = None,
    scale: float,
    dtype: Any,
    key: PRNGKeyArray | None,
) -> tuple[AttentionModel, PRNGKeyArray]:
    """Initial parameters of standard deviation `scale`, and the key of the batches."""
    start_key, batch_key = jax.random.split(jax.random.key(0) if key is None else key)
    model = AttentionModel.init(
        start_key,
        vocab=chain.num_states,
        width=width,
        key_width=key_width,
        scale=scale,
        dtype=dtype,
    )
    return model, batch_key


def train_on(
    setting: TextSetting,
    model: AttentionModel,
    optimiser: "float | optax.GradientTransformation",
    num_steps: int,
    *,
    length: int,
    batch: int,
    key: PRNGKeyArray,
    **options: Any,
) -> Trajectory:
    """Training on windows of a text, watched under the population loss of its chain."""
    loss = PopulationLoss(setting.chain.to_dense())
    return train(
        setting.batches(length=length, size=batch),
        model,
        optimiser,
        num_steps,
        key=key,
        evaluate=loss,
        observe=ft.partial(diagnose, loss),
        every=max(1, num_steps // _ROWS),
        **options,
    )


def follow_flow(
    chain: MarkovChain, model: AttentionModel, t1: float, **options: Any
) -> Trajectory:
    """The population flow of a chain, in double precision where that is turned on."""
    loss = PopulationLoss(chain.to_dense())
    return gradient_flow(
        loss,
        jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), model),
        t1=t1,
        rtol=1e-6,
        observe=ft.partial(diagnose, loss),
        **options,
    )
