"""Training and population flow from the same start, over the same flow time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from .. import _summary, theory
from ..trajectory import Trajectory
from .events import Events, find_events
from .runs import draw_start, follow_flow, train_on
from .texts import TextSetting

if TYPE_CHECKING:
    import optax


class TextStudy(eqx.Module):
    """A training run and the population flow beside it.

    Attributes:
        setting: the text and its chain.
        training: the run on windows of the text; rows are evaluated under the
            population loss of the chain, at the same parameters.
        flow: the population flow from the same start, in double precision where that
            is turned on.
        events: of the training, and of the flow.
        focus_rate: c at the second critical point of the chain; its sign is the
            theory's prediction of focus (positive) or its opposite as the scale falls
            to zero.
    """

    setting: TextSetting
    training: Trajectory
    flow: Trajectory
    events: tuple[Events, Events]
    focus_rate: float

    def table(self) -> list[dict[str, Any]]:
        """One row an event: in the training, in the flow."""
        training, flow = (events.row() for events in self.events)
        return [
            {"event": name, "training": training[name], "population flow": flow[name]}
            for name in training
        ]

    def __str__(self) -> str:
        rows = {
            row[
                "event"
            ]: f"{_number(row['training'])}   {_number(row['population flow'])}"
            for row in self.table()
        }
        return _summary.aligned("TextStudy (training, population flow)", rows)


def study_text(
    setting: TextSetting,
    *,
    width: int = 32,
    key_width: int | None = None,
    scale: float = 1e-2,
    length: int = 256,
    batch: int = 512,
    optimiser: "float | optax.GradientTransformation" = 0.2,
    num_steps: int = 2250,
    flow_time: float | None = None,
    dtype: Any = jnp.float32,
    key: PRNGKeyArray | None = None,
    progress: bool = False,
    checkpoint: Any = None,
    announce: Callable[[str], None] | None = None,
) -> TextStudy:
    """Train on windows of a text; integrate the population flow from the same start.

    Args:
        setting: text and chain.
        width, key_width: embedding width m and key width k (m when absent).
        scale: eps, standard deviation of the initial parameters.
        length: s, tokens in a window.
        batch: windows in a step.
        optimiser: learning rate of plain gradient descent, or an Optax transformation.
        num_steps: training steps.
        flow_time: end of the population flow; by default learning rate times steps,
            which an Optax transformation does not say.
        dtype: precision of the training.
        key: of the start and the batches; ``jax.random.key(0)`` when absent.
        progress: show progress bars.
        checkpoint: file of the training (`flowsim.train`).
        announce: called with a few words before each part.
    """
    say = (lambda _: None) if announce is None else announce
    if flow_time is None:
        if not isinstance(optimiser, float | int):
            raise ValueError("flow_time must be given with an Optax transformation.")
        flow_time = float(optimiser) * num_steps
    model, batch_key = draw_start(
        setting.chain,
        width=width,
        key_width=key_width,
        scale=scale,
        dtype=dtype,
        key=key,
    )
    say("training")
    training = train_on(
        setting,
        model,
        optimiser,
        num_steps,
        length=length,
        batch=batch,
        key=batch_key,
        progress=progress,
        checkpoint=checkpoint,
    )
    say("population flow under the same bigrams")
    flow = follow_flow(setting.chain, model, flow_time, progress=progress)
    return TextStudy(
        setting=setting,
        training=training,
        flow=flow,
        events=(find_events(training), find_events(flow)),
        focus_rate=float(theory.focus_rate(setting.chain)),
    )


def agreement(
    study: TextStudy, until: float | None = None
) -> dict[str, tuple[float, float]]:
    """Largest relative difference of training and flow, and when, up to a time.

    The flow is interpolated to the rows of the training, whose time must be flow time.

    Returns:
        For the loss and for the mean attention on the most frequent token: the largest
        |training / flow - 1|, and its time.
    """
    if study.training.time_unit != "flow time":
        raise ValueError(
            "training and flow share no time: the optimiser is not plain gradient "
            "descent."
        )
    ts = np.asarray(study.training.ts, float)
    end = min(float(ts[-1]), float(study.flow.ts[-1]))
    rows = ts <= (end if until is None else min(end, until))

    def largest(quantity: Callable[[Trajectory], Any]) -> tuple[float, float]:
        flow = np.interp(
            ts[rows],
            np.asarray(study.flow.ts, float),
            np.asarray(quantity(study.flow), float),
        )
        training = np.asarray(quantity(study.training), float)[rows]
        error = np.abs(training / flow - 1)
        return float(error.max()), float(ts[rows][np.argmax(error)])

    return {
        "loss": largest(lambda run: run.losses),
        "attention on top token": largest(
            lambda run: run.observables.mean_top_attention
        ),
    }


def _number(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.4g}"
