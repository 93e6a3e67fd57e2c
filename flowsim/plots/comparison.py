"""A training run drawn over the population flow."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..diagnostics import Diagnostics, EmbeddingPath, embedding_path
from ..markov import MarkovChain
from ..trajectory import Trajectory
from . import _style
from ._style import Token

_PAGE: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
}
_FLOW: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2, "zorder": 4}
_NUM_SHOWN = 4


def comparison_figure(
    training: Trajectory,
    flow: Trajectory | None,
    chain: MarkovChain,
    *,
    tokens: Sequence[int] | None = None,
) -> Figure:
    """A training run (solid) over the population flow (dashed), in six panels.

    Loss, rank ratios, attention on the most frequent token, entropy of attention,
    embedding norms, and the embedding path in the two principal components of the
    training, all over logarithmic time.

    Args:
        training: a run whose observables are `Diagnostics` and that keeps its models.
        flow: the population flow from the same start; None, or a run in another unit
            of time, is left out.
        chain: names the tokens.
        tokens: the tokens shown; by default the four most frequent.
    """
    for run in (training, flow):
        if run is not None and not isinstance(run.observables, Diagnostics):
            raise ValueError("the observables of both runs must be Diagnostics.")
    runs = [training]
    if flow is not None and flow.time_unit == training.time_unit:
        runs.append(flow)
    shown = _shown(chain, tokens)
    with matplotlib.rc_context(_PAGE):
        figure = Figure(figsize=(7.2, 8.2), layout="constrained")
        axes = figure.subplots(3, 2)
        for ax in axes.flat[:5]:
            _style.panel(ax)
            _style.time_axis(ax, training, None)
        _loss(axes[0, 0], runs, chain)
        _ranks(axes[0, 1], runs)
        _attention(axes[1, 0], runs, chain, shown)
        _norms(axes[1, 1], runs, shown)
        _entropy(axes[2, 0], runs, chain, shown)
        _path(_style.panel(axes[2, 1]), runs, shown)
        for ax, letter in zip(axes.flat, "abcdef", strict=True):
            ax.set_title(letter, loc="left", fontweight="bold", fontsize="large")
        for ax in axes.flat[:3]:
            ax.set_xlabel("")  # The lowest panel of each column says it.
        handles: list[Any] = [
            Line2D([], [], label=token.label, **token.look) for token in shown
        ]
        handles.append(Line2D([], [], label=r"mean over queries", **_style.MEAN))
        if len(runs) > 1:
            handles += [
                Line2D([], [], color=_style.GREY, label="training on text"),
                Line2D([], [], color="black", label="population flow", **_FLOW),
            ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=4, frameon=False
        )
    return figure


def _shown(chain: MarkovChain, tokens: Sequence[int] | None) -> list[Token]:
    if tokens is None:
        return _style.shown_tokens(chain)[:_NUM_SHOWN]
    pi = np.asarray(chain.stationary)
    return [
        Token(
            i,
            f"{_style.token_name(chain, i)}, $\\pi$ = {pi[i]:.2g}",
            _style.look(number),
        )
        for number, i in enumerate(tokens)
    ]


def _pair(
    ax: Axes, runs: Sequence[Trajectory], values: Any, number: int, look: dict[str, Any]
) -> None:
    """One quantity of the training, and dashed of the flow."""
    training, *flows = runs
    ts = _style.times(training)
    if "marker" in look:
        thin = look | {"linewidth": 1.0}
        _style.draw_line(ax, ts, values(training), number, **thin)
    else:
        ax.plot(ts, np.asarray(values(training)), **look)
    for flow in flows:
        style: dict[str, Any] = _FLOW | {"color": _darker(look["color"])}
        ax.plot(_style.times(flow), np.asarray(values(flow)), **style)


def _darker(color: str) -> tuple[float, ...]:
    """A shade of the colour that stands out on it, noisy as the training may be."""
    return tuple(0.5 * part for part in to_rgb(color))


def _loss(ax: Axes, runs: Sequence[Trajectory], chain: MarkovChain) -> None:
    look = _style.MEAN | {"linewidth": 1.8}
    _pair(ax, runs[:1], lambda run: run.losses, 0, look)
    for flow in runs[1:]:
        # Grey would vanish on black: the flow is lighter and on top.
        style: dict[str, Any] = _FLOW | {"color": _style.PALETTE[4]}
        ax.plot(_style.times(flow), np.asarray(flow.losses), **style)
    ax.margins(y=0.08)
    _style.draw_levels(
        ax,
        {
            r"$\log d$": float(np.log(chain.num_states)),
            r"$H(\pi)$": float(chain.unigram_entropy),
            r"$H(P)$": float(chain.entropy_rate),
        },
    )
    ax.set_ylabel("population loss (nats)")


def _ranks(ax: Axes, runs: Sequence[Trajectory]) -> None:
    ax.set_yscale("log", nonpositive="mask")
    for number, name in enumerate(("W0", "W1", "WQ", "WK")):
        look = _style.look(number)
        _pair(
            ax,
            runs,
            lambda run, name=name: getattr(run.observables.rank_ratio(), name),
            number,
            look | {"label": rf"${name[0]}_{name[1]}$"},
        )
    low, high = ax.get_ylim()
    ax.set_ylim(low * (low / high) ** 0.2, high)
    ax.legend(
        loc="lower center", ncols=4, handlelength=1.3, fontsize="small", frameon=False
    )
    ax.set_ylabel(r"$\sigma_2/\sigma_1$ (ratio)")


def _tokens(
    ax: Axes,
    runs: Sequence[Trajectory],
    shown: Sequence[Token],
    values: Any,
    mean: Any,
) -> None:
    for number, token in enumerate(shown):
        _pair(
            ax,
            runs,
            lambda run, i=token.number: values(run.observables)[:, i],
            number,
            token.look,
        )
    if mean is not None:
        _pair(ax, runs[:1], lambda run: mean(run.observables), 0, _style.MEAN)
        for flow in runs[1:]:
            style: dict[str, Any] = _FLOW | {"color": "white"}
            ax.plot(_style.times(flow), np.asarray(mean(flow.observables)), **style)


def _attention(
    ax: Axes, runs: Sequence[Trajectory], chain: MarkovChain, shown: Sequence[Token]
) -> None:
    _tokens(
        ax, runs, shown, lambda seen: seen.top_attention, lambda s: s.mean_top_attention
    )
    pi = np.asarray(chain.stationary)
    name = _style.token_name(chain, int(np.argmax(pi)))
    ax.set_ylim(bottom=0)
    _style.draw_levels(ax, {r"$\pi$": float(pi.max())})
    ax.set_ylabel(f"attention on {name}\n(probability)")


def _entropy(
    ax: Axes, runs: Sequence[Trajectory], chain: MarkovChain, shown: Sequence[Token]
) -> None:
    _tokens(
        ax,
        runs,
        shown,
        lambda seen: seen.attention_entropy,
        lambda seen: seen.mean_attention_entropy,
    )
    _style.draw_levels(ax, {r"$H(\pi)$": float(chain.unigram_entropy)})
    ax.set_ylabel("attention entropy (nats)")


def _norms(ax: Axes, runs: Sequence[Trajectory], shown: Sequence[Token]) -> None:
    _tokens(ax, runs, shown, lambda seen: seen.embedding_norms, None)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("embedding norm\n(parameter units)")


def _path(ax: Axes, runs: Sequence[Trajectory], shown: Sequence[Token]) -> None:
    path = embedding_path(runs[0].models)
    coordinates = np.asarray(path.coordinates)
    for token in shown:
        style = token.look | {"markersize": 7, "markevery": [-1]}
        ax.plot(*coordinates[:, token.number].T, **style)
        for flow in runs[1:]:
            other = _in_basis(path, flow)[:, token.number]
            ax.plot(*other.T, color=_darker(token.look["color"]), **_FLOW)
    starts = coordinates[0, [token.number for token in shown]]
    ax.plot(*starts.T, **_style.START)
    percent = 100 * np.asarray(path.explained)
    ax.set_xlabel(f"first component, {percent[0]:.1f} % of variance\n(parameter units)")
    ax.set_ylabel(f"second component, {percent[1]:.1f} %\n(parameter units)")


def _in_basis(path: EmbeddingPath, run: Trajectory) -> np.ndarray:
    """Embeddings of a run in the components of another one's path."""
    centred = np.asarray(run.models.W0) - np.asarray(path.center)
    return centred @ np.asarray(path.basis).T
