"""Controls: what is left of the events when their supposed cause is taken away."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .. import theory
from ..loss import PopulationLoss
from ..markov import MarkovChain, lazy_chain
from ..model import AttentionModel
from ..trajectory import Trajectory
from .events import Events, find_events
from .learning import batch_size
from .runs import draw_start, follow_flow, train_on
from .texts import TextSetting, shuffled


class Control(eqx.Module):
    """A run beside the claim.

    Attributes:
        name: what was changed.
        focus_rate: c of its chain.
        events: its events.
        embedding_cosine: |cos| of W0's leading direction with pi when condensed (at the
            end, if it never is).
        highest_attention: largest attention that any query pays to one token, ever.
        run: the run.
    """

    name: str
    focus_rate: float
    events: Events
    embedding_cosine: float
    highest_attention: float
    run: Trajectory

    def row(self) -> dict[str, Any]:
        """Plain data for a table."""
        return {
            "run": self.name,
            "c": self.focus_rate,
            "time unit": self.run.time_unit,
            **self.events.row(),
            "cos(W0, pi) when condensed": self.embedding_cosine,
            "highest attention": self.highest_attention,
        }


def controls(
    setting: TextSetting,
    *,
    width: int = 32,
    scale: float = 1e-2,
    length: int = 256,
    batch: int = 512,
    learning_rate: float = 0.2,
    adam_rate: float = 1e-3,
    num_steps: int = 2250,
    small_scales: tuple[float, ...] = (1e-3, 1e-4),
    dtype: Any = jnp.float32,
    key: PRNGKeyArray | None = None,
    announce: Callable[[str], None] | None = None,
) -> tuple[Control, ...]:
    """Shuffled tokens, independent tokens, Adam, and smaller starts.

    The flow without bigrams (lam = 0, so c = 0) and the flows from smaller starts are
    population flows; the others are trained. The smaller the start, the longer the flow
    is followed: condensation alone takes log(1/eps) / mu.
    """
    import optax  # Here: it takes longer to load than flowsim.

    say = (lambda _: None) if announce is None else announce
    model, batch_key = draw_start(
        setting.chain, width=width, scale=scale, dtype=dtype, key=key
    )
    time = learning_rate * num_steps

    def trained(name: str, setting: TextSetting, optimiser: Any) -> Control:
        say(f"control: {name}")
        run = train_on(
            setting,
            model,
            optimiser,
            num_steps,
            length=length,
            batch=batch,
            key=batch_key,
        )
        return _control(name, setting.chain, run)

    def flowed(name: str, chain: MarkovChain, factor: float) -> Control:
        say(f"control: {name}")
        longer = 1 + np.log(1 / factor) / np.log(1 / scale)
        start = jax.tree.map(lambda leaf: factor * leaf, model)
        return _control(name, chain, follow_flow(chain, start, time * longer))

    pi, tokens = setting.chain.stationary, setting.chain.tokens
    return (
        trained("shuffled tokens", shuffled(setting), learning_rate),
        flowed("flow, lam = 0", lazy_chain(pi, 0.0, tokens=tokens), 1.0),
        trained("Adam", setting, optax.adam(adam_rate)),
        *(
            flowed(f"flow, eps = {small:g}", setting.chain, small / scale)
            for small in small_scales
            if small < scale
        ),
    )


def _control(name: str, chain: MarkovChain, run: Trajectory) -> Control:
    events = find_events(run)
    row = -1 if events.condensed is None else run.nearest(events.condensed)
    return Control(
        name=name,
        focus_rate=float(theory.focus_rate(chain)),
        events=events,
        embedding_cosine=float(run.observables.embedding_cosine[row]),
        highest_attention=float(_highest(chain, run.models)),
        run=run,
    )


@eqx.filter_jit
def _highest(chain: MarkovChain, models: AttentionModel):
    loss = PopulationLoss(chain)
    highest = jax.lax.map(
        lambda m: jnp.max(loss.attention(m)), models, batch_size=batch_size(chain)
    )
    return jnp.max(highest)
