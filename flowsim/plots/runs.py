"""One panel each: what a run did over time."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from ..diagnostics import Diagnostics, EmbeddingPath
from ..markov import MarkovChain
from ..trajectory import Trajectory
from . import _style
from ._style import Stage


def loss_figure(
    run: Trajectory,
    chain: MarkovChain | None = None,
    *,
    levels: Mapping[str, float] | None = None,
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The loss over time, with the plateaus that theory predicts dashed.

    Args:
        run: any run.
        chain: adds the losses log d of uniform predictions, H(pi) of the second
            critical point, and the floor H(P).
        levels: further losses to mark, by name (nats).
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    ax = _over_time(run, stages, ax)
    losses = np.asarray(run.losses)
    ax.plot(_style.times(run), losses, color="black", linewidth=1.8)
    marked = {} if levels is None else dict(levels)
    if chain is not None:
        marked = {
            r"$\log d$": float(np.log(chain.num_states)),
            r"$H(\pi)$": float(chain.unigram_entropy),
            r"$H(P)$": float(chain.entropy_rate),
        } | marked
    ax.margins(y=0.08)
    _style.draw_levels(ax, marked)
    ax.set_ylabel("loss (nats)")
    return ax


def gradient_figure(
    run: Trajectory,
    *,
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The gradient norm over time: small on a plateau, large in a burst.

    Args:
        run: any run.
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    ax = _over_time(run, stages, ax, log=True)
    norms = np.asarray(run.grad_norms)
    ax.plot(_style.times(run), norms, color="black", linewidth=1.8)
    ax.set_ylabel("gradient norm $|\\nabla L|$\n(nats / parameter unit)")
    return ax


def rank_figure(
    run: Trajectory,
    *,
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Ratios of singular values over time: how far each matrix is from rank one.

    sigma_2/sigma_1 of W0, W1, WQ and WK, and sigma_3/sigma_1 of W0 dotted.

    Args:
        run: a run whose observables are `Diagnostics`.
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    given, seen = ax, _diagnostics(run)
    ax = _over_time(run, stages, ax, log=True)
    ts = _style.times(run)
    for number, (name, ratio) in enumerate(vars(seen.rank_ratio()).items()):
        label = rf"${name[0]}_{name[1]}$"
        _style.draw_line(ax, ts, ratio, number, label=label, **_style.look(number))
    if seen.singular_values.W0.shape[-1] > 2:
        label, style = r"$W_0$, $\sigma_3/\sigma_1$", _style.look(0)
        style |= {"marker": None, "linestyle": ":"}
        ax.plot(ts, np.asarray(seen.rank_ratio(3).W0), label=label, **style)
    ax.set_ylabel(r"$\sigma_2/\sigma_1$ (ratio)")
    _style.legend(ax, given)
    return ax


def attention_figure(
    run: Trajectory,
    chain: MarkovChain,
    *,
    on: Literal["top", "self"] = "top",
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Attention of each query token on the most frequent token, or on itself.

    Args:
        run: a run whose observables are `Diagnostics`.
        chain: names the tokens; of more than eight, the six most frequent are shown and
            the mean with weight pi.
        on: "top": attention on the most frequent token, with that token's frequency,
            where attention starts, dashed; "self": on the query itself.
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    if on not in ("top", "self"):
        raise ValueError(f"on must be 'top' or 'self'; got {on!r}.")
    seen, pi = _diagnostics(run, chain), np.asarray(chain.stationary)
    if on == "self":
        values, mean, target = seen.self_attention, seen.mean_self_attention, "itself"
    else:
        values, mean = seen.top_attention, seen.mean_top_attention
        target = _style.token_name(chain, int(np.argmax(pi)))
    given, ax = ax, _tokens_over_time(run, chain, values, mean, stages, ax)
    ax.set_ylim(bottom=0)
    if on == "top":
        _style.draw_levels(ax, {r"$\pi$": float(pi.max())})
    ax.set_ylabel(f"attention on {target}\n(probability)")
    _style.legend(ax, given, "query")
    return ax


def entropy_figure(
    run: Trajectory,
    chain: MarkovChain,
    *,
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Entropy of each query's attention, with that of attention by frequency dashed.

    Args:
        run: a run whose observables are `Diagnostics`.
        chain: names the tokens; of more than eight, the six most frequent are shown and
            the mean with weight pi.
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    seen = _diagnostics(run, chain)
    values, mean = seen.attention_entropy, seen.mean_attention_entropy
    given, ax = ax, _tokens_over_time(run, chain, values, mean, stages, ax)
    _style.draw_levels(ax, {r"$H(\pi)$": float(chain.unigram_entropy)})
    ax.set_ylabel("attention entropy (nats)")
    _style.legend(ax, given, "query")
    return ax


def norm_figure(
    run: Trajectory,
    chain: MarkovChain,
    *,
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Norm of each token's embedding, its row of W0.

    Args:
        run: a run whose observables are `Diagnostics`.
        chain: names the tokens; of more than eight, the six most frequent are shown and
            the mean with weight pi.
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    norms = np.asarray(_diagnostics(run, chain).embedding_norms)
    mean = norms @ np.asarray(chain.stationary)
    given, ax = ax, _tokens_over_time(run, chain, norms, mean, stages, ax)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("embedding norm\n(parameter units)")
    _style.legend(ax, given, "token")
    return ax


def drift_figure(
    run: Trajectory,
    *,
    stages: Iterable[Stage] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """How far the conserved quantities have moved: the integration error.

    The largest change of any entry since the first saved point, of each of the three
    quantities of `flowsim.theory.conserved`.

    Args:
        run: a run whose observables are `Diagnostics`.
        stages: stretches of time to shade and name.
        ax: where to draw; a new figure when absent.
    """
    given, seen = ax, _diagnostics(run)
    ax = _over_time(run, stages, ax, log=True)
    ts = _style.times(run)
    for number, (name, value) in enumerate(vars(seen.conserved).items()):
        change = np.abs(np.asarray(value) - np.asarray(value)[0])
        change = change.reshape(len(ts), -1).max(axis=1)
        style = _style.look(number)
        _style.draw_line(ax, ts, change, number, label=name.replace("_", " "), **style)
    ax.set_ylabel("largest change since start\n(parameter units)")
    _style.legend(ax, given, "conserved quantity")
    return ax


def path_figure(
    path: EmbeddingPath, chain: MarkovChain, *, ax: Axes | None = None
) -> Axes:
    """The paths of the tokens' embeddings in their first two principal components.

    Args:
        path: from `flowsim.diagnostics.embedding_path(run.models)`.
        chain: names the tokens; of more than eight, the six most frequent are shown.
        ax: where to draw; a new figure when absent.
    """
    given = ax
    ax = _style.panel(ax, size=(5.2, 3.6))
    coordinates = np.asarray(path.coordinates)
    if coordinates.ndim != 3 or coordinates.shape[1] != chain.num_states:
        raise ValueError(
            f"path must have one curve for each of the chain's {chain.num_states} "
            f"tokens; its coordinates have shape {coordinates.shape}."
        )
    tokens = _style.shown_tokens(chain)
    last = coordinates.shape[0] - 1
    for token in tokens:
        style = token.look | {"markersize": 7, "markevery": [last]}
        ax.plot(*coordinates[:, token.number].T, label=token.label, **style)
    starts = coordinates[0, [token.number for token in tokens]]
    ax.plot(*starts.T, label="start", **_style.START)
    percent = 100 * np.asarray(path.explained)
    ax.set_xlabel(f"first component, {percent[0]:.1f} % of variance\n(parameter units)")
    ax.set_ylabel(f"second component, {percent[1]:.1f} %\n(parameter units)")
    ax.set_aspect("equal", adjustable="datalim")
    _style.legend(ax, given, "token")
    return ax


def _over_time(
    run: Trajectory,
    stages: Iterable[Stage] | None,
    ax: Axes | None,
    *,
    log: bool = False,
) -> Axes:
    """An empty panel over the time of a run; with `log`, for values over decades."""
    ax = _style.panel(ax)
    _style.time_axis(ax, run, stages)
    if log:
        ax.set_yscale("log", nonpositive="mask")
    return ax


def _tokens_over_time(
    run: Trajectory,
    chain: MarkovChain,
    values: Any,
    mean: Any,
    stages: Iterable[Stage] | None,
    ax: Axes | None,
) -> Axes:
    """A panel with one curve for each token, or of the frequent ones and the mean."""
    ax = _over_time(run, stages, ax)
    tokens = _style.shown_tokens(chain)
    all_shown = len(tokens) == chain.num_states
    _style.draw_tokens(
        ax, _style.times(run), values, tokens, None if all_shown else mean
    )
    return ax


def _diagnostics(run: Trajectory, chain: MarkovChain | None = None) -> Diagnostics:
    seen = run.observables
    if not isinstance(seen, Diagnostics):
        raise ValueError(
            "run.observables must be Diagnostics, by gradient_flow(..., observe="
            f"functools.partial(diagnose, loss)); got {type(seen).__name__}."
        )
    if chain is not None and seen.embedding_norms.shape[-1] != chain.num_states:
        raise ValueError(
            f"chain must have the {seen.embedding_norms.shape[-1]} tokens of the run; "
            f"it has {chain.num_states}."
        )
    return seen
