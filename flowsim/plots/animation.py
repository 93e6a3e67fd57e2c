"""A cycle as a moving picture: attention and embeddings side by side."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.figure import Figure

from ..diagnostics import embedding_path
from ..loss import PopulationLoss
from ..trajectory import Trajectory
from . import _style
from ._style import Stage


def cycle_animation(
    run: Trajectory,
    loss: PopulationLoss,
    *,
    stages: Iterable[Stage] | None = None,
    num_frames: int = 120,
) -> FuncAnimation:
    """Attention and embeddings over a run, in even steps of the time axis.

    Every frame is a saved point, the nearest in time; nothing is interpolated. Save it
    with ``.save("cycle.gif", writer="pillow")``; a notebook shows ``.to_jshtml()``.

    Args:
        run: a run of an `AttentionModel` that kept its parameters.
        loss: its loss; its chain names the tokens.
        stages: stretches of time, named in the title.
        num_frames: number of pictures.

    Raises:
        ValueError: if the run did not keep its parameters.
    """
    ts, models, chain = _style.times(run), run.models, loss.chain
    if models.W0.shape[0] != len(ts):
        raise ValueError(
            "run must hold the parameters at every saved time; "
            f"it has {len(ts)} times and {models.W0.shape[0]} models."
        )
    stages = () if stages is None else tuple(stages)
    rows = _frame_rows(ts, np.asarray(run.losses), num_frames)
    chosen = jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], models)
    attention = np.asarray(jax.lax.map(loss.attention, chosen))
    coordinates = np.asarray(embedding_path(models).coordinates)
    tokens = _style.shown_tokens(chain)

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(
        attention[0], vmin=0, vmax=attention.max(), cmap="cividis", aspect="auto"
    )
    figure.colorbar(image, ax=left, label="attention (probability)")
    left.set_xlabel("key token")
    left.set_ylabel("query token")
    if chain.num_states <= _style.MAX_ALL:
        numbers = range(chain.num_states)
        names = [_style.token_name(chain, i).removeprefix("token ") for i in numbers]
        left.set_xticks(numbers, names)
        left.set_yticks(numbers, names)
    right.spines[["top", "right"]].set_visible(False)
    lines = [right.plot([], [], label=token.label, **token.look)[0] for token in tokens]
    shown = coordinates[:, [token.number for token in tokens]].reshape(-1, 2)
    # The first points fix limits that hold for every frame.
    right.update_datalim(shown)
    right.autoscale_view()
    right.set_aspect("equal", adjustable="datalim")
    right.set_xlabel("first component\n(parameter units)")
    right.set_ylabel("second component\n(parameter units)")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    title = figure.suptitle(" ")

    def draw(frame: int):
        row = rows[frame]
        image.set_data(attention[frame])
        for token, line in zip(tokens, lines, strict=True):
            line.set_data(*coordinates[: row + 1, token.number].T)
            line.set_markevery([row])
        named = [s.name for s in stages if s.start <= ts[row] < s.end]
        name = f", {named[0]}" if named else ""
        title.set_text(
            f"{run.time_unit} {ts[row]:.3g}, loss {run.losses[row]:.4f} nats{name}"
        )
        return image, *lines, title

    return FuncAnimation(figure, draw, frames=len(rows), interval=80)


def _frame_rows(ts: np.ndarray, losses: np.ndarray, num_frames: int) -> np.ndarray:
    """Saved rows nearest to even steps of logarithmic time, each once."""
    wanted = np.geomspace(_style.first_time(ts, losses), ts[-1], num_frames)
    return np.unique([np.argmin(np.abs(ts - t)) for t in wanted])
