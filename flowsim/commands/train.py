"""`flowsim train`: training on text over the population flow of its bigrams."""

import dataclasses
import functools as ft
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .reading import check_positive, given, reading_input, refuse

_STEPS = {"wikitext2": 2250, "tinystories": 4500}
_RATES = {"sgd": 0.2, "adam": 1e-3}
# The tokens that the paper follows.
_FOLLOWED = ("the", ",", ".", "a", "full", "been", "continue")


@dataclasses.dataclass(frozen=True)
class Train:
    """Train on text, and hold it against the population flow of the same bigrams.

    One figure, a table of events, which tokens attract attention when, and in which
    order tokens are learnt.
    """

    corpus: Annotated[str, tyro.conf.arg(metavar="NAME|TEXT")] = "wikitext2"
    """"wikitext2" or "tinystories", whose text is looked for below --text (without it,
    sequences are sampled from the shipped bigram chain); or a UTF-8 text file or a
    folder of them."""
    text: Path | None = None
    """File or folder with the text of a named corpus."""
    download: bool = False
    """Load the text of a named corpus from its public dataset (extra `corpora`)."""
    tokeniser: Literal["wikitext", "tinystories"] | None = None
    """How a line is split into words. Default: that of the corpus, or wikitext."""
    vocab: int = 64
    """Number of most frequent words kept (tokens)."""
    width: int = 32
    """Embedding and key width."""
    scale: float = 1e-2
    """Standard deviation of the initial parameters (dimensionless)."""
    length: int = 256
    """Context length (tokens)."""
    batch: int = 512
    """Windows in a training step."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Plain gradient descent, whose time is flow time; or Adam, another flow."""
    learning_rate: float | None = None
    """Flow time of a step. Default 0.2; for Adam its rate, default 0.001."""
    steps: int | None = None
    """Training steps. Default 2,250; for tinystories 4,500."""
    precision: Literal["single", "double"] = "single"
    """Precision of the training; the population flow is in double."""
    seed: int = 0
    """Random seed of the initial parameters and the batches."""
    tokens: tuple[str, ...] = ()
    """Query tokens to draw. Default: the four most frequent."""
    controls: bool = False
    """Also train on shuffled text and by Adam, and follow the flow without bigrams,
    from smaller initial parameters, and from theta_c^1."""
    checkpoint: Path | None = None
    """File to keep the training in; if it exists, the training goes on from it."""
    output: Path = Path("runs/train")
    """Run folder to write."""
    force: bool = False
    """Replace an existing run folder."""
    quiet: bool = False
    """No progress bars."""


def run_train(options: Train) -> int:
    """Read, train, integrate, compare, write."""
    import jax
    import jax.numpy as jnp
    import optax

    from .. import empirical, records, text_report

    with reading_input():
        rate, steps = options.learning_rate, options.steps
        rate = _RATES[options.optimiser] if rate is None else rate
        steps = _STEPS.get(options.corpus, 2250) if steps is None else steps
        _check(options, rate, steps)
        setting = read_corpus(options)
        tokens = _numbers(setting.chain.tokens or (), options.tokens)
    say: Any = None if options.quiet else ft.partial(print, file=sys.stderr, flush=True)
    sgd = options.optimiser == "sgd"
    began = time.perf_counter()
    settings: dict[str, Any] = {
        "width": options.width,
        "scale": options.scale,
        "length": options.length,
        "batch": options.batch,
        "num_steps": steps,
        "dtype": jnp.float32 if options.precision == "single" else jnp.float64,
        "key": jax.random.key(options.seed),
    }
    try:
        study = empirical.study_text(
            setting,
            **settings,
            optimiser=rate if sgd else optax.adam(rate),
            flow_time=None if sgd else _RATES["sgd"] * steps,
            progress=not options.quiet,
            checkpoint=options.checkpoint,
            announce=say,
        )
    except records.CheckpointError as error:
        refuse(str(error))
    controls, departures = (), ()
    if options.controls:
        controls = empirical.controls(
            setting,
            **settings,
            learning_rate=rate if sgd else _RATES["sgd"],
            adam_rate=_RATES["adam"] if sgd else rate,
            announce=say,
        )
        if say is not None:
            say("control: eps -> 0")
        departures = (
            empirical.leave_second_point(setting.chain),
            empirical.leave_origin(setting.chain),
        )
    seconds = time.perf_counter() - began
    folder = records.prepare_folder(options.output, force=options.force)
    text = text_report.train_text(
        study, controls, _FOLLOWED + options.tokens, departures
    )
    text_report.write_train(
        folder,
        study,
        controls,
        given(options) | {"seconds": seconds},
        text,
        tokens,
        departures,
    )
    print(text)
    print(
        f"written: {folder}/summary.json, training.npz, flow.npz, train.md, train.png"
    )
    return 0 if bool(study.training.succeeded & study.flow.succeeded) else 1


def read_corpus(options: Train) -> Any:
    """The text of the options, or a sample of the shipped chain."""
    from .. import corpus, empirical

    name = options.corpus
    shipped = corpus.CORPORA.get(name)
    if shipped is None and options.text is not None:
        known = ", ".join(corpus.CORPORA)
        raise ValueError(
            f"--text is for the named corpora ({known}); give the file as --corpus."
        )
    if options.download:
        if shipped is None or options.text is not None:
            raise ValueError("--download is for a named corpus without --text.")
        try:
            return empirical.download_setting(name, vocab=options.vocab)
        except ImportError as error:
            raise ValueError(str(error)) from error
    if shipped is not None and options.text is None:
        chain = corpus.load_chain(name, vocab=options.vocab)
        return empirical.sampled_setting(
            chain, source=f"no --text: sampled from the shipped chain of {name}"
        )
    if shipped is not None:
        assert options.text is not None
        place = empirical.find_text(name, options.text)
        tokeniser = options.tokeniser or shipped.tokeniser
    else:
        place, tokeniser = Path(name), options.tokeniser or "wikitext"
        if not place.exists():
            known = ", ".join(corpus.CORPORA)
            raise ValueError(
                f"--corpus must be one of {known}, or a text file; there is no {name}."
            )
    setting = empirical.read_setting(place, tokeniser=tokeniser, vocab=options.vocab)
    corpus.windows(setting.ids[0], options.length)  # Refuses a text that is too short.
    return setting


def _check(options: Train, rate: float, steps: int) -> None:
    from .. import records

    check_positive(
        vocab=options.vocab,
        width=options.width,
        scale=options.scale,
        length=options.length,
        batch=options.batch,
        learning_rate=rate,
        steps=steps,
    )
    if options.vocab < 2:
        raise ValueError(f"--vocab must be at least 2; got {options.vocab}.")
    records.check_folder(options.output, force=options.force)


def _numbers(names: tuple[str, ...], wanted: tuple[str, ...]) -> list[int] | None:
    unknown = [token for token in wanted if token not in names]
    if unknown:
        raise ValueError(
            f"--tokens must be words of the vocabulary; {unknown[0]!r} is not in it."
        )
    return [names.index(token) for token in wanted] or None
