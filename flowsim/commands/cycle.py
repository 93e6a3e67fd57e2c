"""`flowsim cycle`: one flow, its stages, a run folder."""

import dataclasses
import functools as ft
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .reading import check_positive, default_chain, given, lazy_chain_of, reading_input

_SHIPPED_VOCAB = 64
_MOST_SEARCHED = 10_000  # Parameters up to which saddles are searched unasked.


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Run the flow through a focus-dilution cycle: table, figure, data.

    By default the chain of four tokens with pi = (.75, .19, .05, .01) and lam = .5.
    """

    chain: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.npz")] = "default"
    """"default", "wikitext2", "tinystories", or an .npz file with the key P (transition
    matrix) and optionally pi and tokens."""
    pi: tuple[float, ...] | None = None
    """Stationary law of a lazy chain, one mass per token (probabilities)."""
    lam: float | None = None
    """Laziness of a lazy chain: P = lam I + (1 - lam) 1 pi^T (dimensionless)."""
    vocab: int | None = None
    """Number of tokens of a shipped chain: 64 or 256. Default 64."""
    width: int | None = None
    """Embedding width m. Default 16 up to 16 tokens, 32 beyond."""
    key_width: int | None = None
    """Key width k. Default: the embedding width."""
    scale: float = 1e-3
    """Standard deviation of the initial parameters (dimensionless)."""
    seed: int = 0
    """Random seed of the initial parameters."""
    t1: float = 2e4
    """Final time (flow time)."""
    rtol: float = 1e-8
    """Relative tolerance of one step (dimensionless)."""
    max_steps: int = 2**20
    """Bound on solver steps."""
    saddles: Literal["auto", "yes", "no"] = "auto"
    """Search the saddles visited; auto: up to 10,000 parameters, beyond which it can
    take minutes. Without them stages are cut by attention and rank alone."""
    output: Path = Path("runs/cycle")
    """Run folder to write."""
    force: bool = False
    """Replace an existing run folder."""
    quiet: bool = False
    """No progress bar."""


def run_cycle(options: Cycle) -> int:
    """Read, integrate, cut into stages, write."""
    import jax

    from .. import _trees, diagnostics, records, report
    from ..flow import gradient_flow
    from ..loss import PopulationLoss
    from ..model import AttentionModel
    from ..stages import find_stages

    with reading_input():
        chain = _chain(options)
        check_positive(scale=options.scale, t1=options.t1, rtol=options.rtol)
        check_positive(max_steps=options.max_steps)
        if options.rtol >= 1:
            raise ValueError(f"--rtol must be below 1; got {options.rtol}.")
        width = 16 if chain.num_states <= 16 else 32
        model = AttentionModel.init(
            jax.random.key(options.seed),
            vocab=chain.num_states,
            width=width if options.width is None else options.width,
            key_width=options.key_width,
            scale=options.scale,
        )
        records.check_folder(options.output, force=options.force)
    loss = PopulationLoss(chain)
    began = time.perf_counter()
    run = gradient_flow(
        loss,
        model,
        t1=options.t1,
        rtol=options.rtol,
        observe=ft.partial(diagnostics.diagnose, loss),
        max_steps=options.max_steps,
        progress=not options.quiet,
    )
    seconds = time.perf_counter() - began
    search = options.saddles == "yes" or (
        options.saddles == "auto" and _trees.num_params(model) <= _MOST_SEARCHED
    )
    stages = find_stages(run, loss, visited=None if search else ())
    folder = records.prepare_folder(options.output, force=options.force)
    report.write_cycle(folder, run, loss, stages, given(options) | {"seconds": seconds})
    print(report.cycle_text(run, loss, stages))
    if not search:
        print("saddles     not searched (large model); --saddles yes does")
    print(f"written: {folder}/summary.json, trajectory.npz, cycle.png")
    return 0 if bool(run.succeeded) else 1


def _chain(options: Cycle) -> Any:
    from .. import corpus, records

    name, lazy = options.chain, lazy_chain_of(options)
    if lazy is not None and name != "default":
        raise ValueError(
            f"--pi and --lam make a chain of their own; drop --chain {name}."
        )
    if options.vocab is not None and name not in corpus.CORPORA:
        known = ", ".join(corpus.CORPORA)
        raise ValueError(f"--vocab is for the shipped chains ({known}) only.")
    if lazy is not None:
        return lazy
    if name == "default":
        return default_chain()
    if name in corpus.CORPORA:
        return corpus.load_chain(name, vocab=options.vocab or _SHIPPED_VOCAB)
    if name.endswith(".npz"):
        return records.load_chain_file(name)
    known = ", ".join(["default", *corpus.CORPORA])
    raise ValueError(
        f"--chain must be one of {known}, or an .npz file; got {name}. "
        "For a lazy chain give --pi and --lam."
    )
