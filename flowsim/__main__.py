"""The command line: `flowsim cycle`, `verify`, `counts`, `train`.

Arguments in, one table out, files in a run folder. Wrong input ends with one line on
standard error and exit status 2; a run that did not end as asked, or a claim that
fails, with status 1.
"""

import contextlib
import dataclasses
import functools as ft
import io
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .commands.reading import check_positive, reading_input, refuse
from .commands.train import Train, run_train

_SHIPPED_VOCAB = 64
_MOST_SEARCHED = 2000  # Parameters up to which saddles are searched unasked.


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
    """Search the saddles visited; auto: up to 2,000 parameters, beyond which it can
    take many minutes. Without them stages are cut by attention and rank alone."""
    output: Path = Path("runs/cycle")
    """Run folder to write."""
    force: bool = False
    """Replace an existing run folder."""
    quiet: bool = False
    """No progress bar."""


@dataclasses.dataclass(frozen=True)
class Verify:
    """Hold every claim of the theory against measurement: one table, a row per claim.

    By default on the chain of four tokens with pi = (.75, .19, .05, .01) and lam = .5.
    """

    pi: tuple[float, ...] | None = None
    """Stationary law of another lazy chain (probabilities)."""
    lam: float | None = None
    """Laziness of another lazy chain (dimensionless)."""
    width: int = 16
    """Embedding and key width."""
    seed: int = 0
    """Random seed of all directions."""
    output: Path = Path("runs/verify")
    """Folder for the table as JSON and Markdown."""
    force: bool = False
    """Replace an existing folder."""
    quiet: bool = False
    """Do not say what is being measured."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Count the bigrams of a text into a table that `flowsim` can load as a chain."""

    text: tyro.conf.Positional[Path]
    """A UTF-8 text file, or a folder of them."""
    tokeniser: Literal["wikitext", "tinystories"] = "wikitext"
    """How a line is split into words."""
    vocab: int = 64
    """Number of most frequent words to keep (tokens)."""
    output: Path = Path("counts.npz")
    """File to write."""
    keep_headings: bool = False
    """Keep WikiText's heading lines."""
    force: bool = False
    """Replace an existing file."""


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, and turn wrong input into one line and exit status 2."""
    command = _parse(sys.argv[1:] if arguments is None else arguments)
    import jax

    # The command line's own default; the library never switches it.
    jax.config.update("jax_enable_x64", True)
    sys.exit(_COMMANDS[type(command)](command))


def _parse(arguments: list[str]) -> Any:
    """tyro's parser, with its multi-line complaint folded into one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.extras.subcommand_cli_from_dict(
                {"cycle": Cycle, "verify": Verify, "counts": Counts, "train": Train},
                prog="flowsim",
                description="Exact gradient flow from saddle to saddle.",
                args=arguments,
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise
        frame = re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─]", " ", said.getvalue())
        refuse(re.sub(r"^\s*\w+ (error|options)\s+", "", " ".join(frame.split())))


def _cycle(options: Cycle) -> int:
    import jax

    from . import _trees, diagnostics, records, report
    from .flow import gradient_flow
    from .loss import PopulationLoss
    from .model import AttentionModel
    from .stages import find_stages

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
    given = {key: _readable(value) for key, value in vars(options).items()}
    report.write_cycle(folder, run, loss, stages, given | {"seconds": seconds})
    print(report.cycle_text(run, loss, stages))
    if not search:
        print("saddles     not searched (large model); --saddles yes does")
    print(f"written: {folder}/summary.json, trajectory.npz, cycle.png")
    return 0 if bool(run.succeeded) else 1


def _verify(options: Verify) -> int:
    import jax

    from . import records
    from .verification import verify

    with reading_input():
        check_positive(width=options.width)
        chain = _lazy(options) or _default_chain()
        records.check_folder(options.output, force=options.force)
    say = None if options.quiet else ft.partial(print, file=sys.stderr, flush=True)
    table = verify(
        chain, width=options.width, key=jax.random.key(options.seed), announce=say
    )
    folder = records.prepare_folder(options.output, force=options.force)
    records.write_json(folder / "summary.json", {"claims": table.rows()})
    records.write_text(folder / "claims.md", records.markdown_table(table.rows()))
    print(table)
    print(f"written: {folder}/summary.json, claims.md")
    return 0 if table.succeeded else 1


def _lazy(options: Cycle | Verify) -> Any:
    """The lazy chain of --pi and --lam, or None without them."""
    from .markov import lazy_chain

    if (options.pi is None) != (options.lam is None):
        raise ValueError("--pi and --lam go together: a lazy chain needs both.")
    if options.pi is None or options.lam is None:
        return None
    return lazy_chain(options.pi, options.lam)


def _default_chain() -> Any:
    from .markov import lazy_chain

    return lazy_chain([0.75, 0.19, 0.05, 0.01], 0.5)


def _chain(options: Cycle) -> Any:
    from . import corpus, records

    name, lazy = options.chain, _lazy(options)
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
        return _default_chain()
    if name in corpus.CORPORA:
        return corpus.load_chain(name, vocab=options.vocab or _SHIPPED_VOCAB)
    if name.endswith(".npz"):
        return records.load_chain_file(name)
    known = ", ".join(["default", *corpus.CORPORA])
    raise ValueError(
        f"--chain must be one of {known}, or an .npz file; got {name}. "
        "For a lazy chain give --pi and --lam."
    )


def _readable(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _counts(options: Counts) -> int:
    from . import corpus

    with reading_input():
        if options.output.exists() and not options.force:
            raise ValueError(f"{options.output} exists; give --force to replace it.")
        table = corpus.count_bigrams(
            options.text,
            tokeniser=options.tokeniser,
            vocab=options.vocab,
            keep_headings=options.keep_headings,
        )
        corpus.save_table(table, options.output)
    print(table)
    print(f"written: {options.output}")
    return 0


_COMMANDS = {Cycle: _cycle, Verify: _verify, Counts: _counts, Train: run_train}


if __name__ == "__main__":
    main()
