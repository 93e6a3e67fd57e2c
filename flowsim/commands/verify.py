"""`flowsim verify`: every claim of the theory against measurement."""

import dataclasses
import functools as ft
import sys
from pathlib import Path
from typing import Any

from .reading import check_positive, default_chain, lazy_chain_of, reading_input


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
    local_models: bool = False
    """Also measure the linearised flow, the rank-one manifold and the unfolding of its
    degenerate point, on three families of chains."""
    empirical: bool = False
    """Add training on text against the population flow, scaling laws and controls."""
    text: Path | None = None
    """Folder with the texts of both named corpora, for --empirical; without it
    sequences are sampled from the shipped chains."""
    seed: int = 0
    """Random seed of all directions."""
    output: Path = Path("runs/verify")
    """Folder for the table as JSON and Markdown."""
    force: bool = False
    """Replace an existing folder."""
    quiet: bool = False
    """Do not say what is being measured."""


def run_verify(options: Verify) -> int:
    """Measure, print the table, write it."""
    import jax

    from .. import records
    from ..verification import Verification, verify, verify_empirical

    with reading_input():
        check_positive(width=options.width)
        chain = lazy_chain_of(options) or default_chain()
        texts = _texts(options)
        records.check_folder(options.output, force=options.force)
    say = None if options.quiet else ft.partial(print, file=sys.stderr, flush=True)
    table = verify(
        chain,
        width=options.width,
        key=jax.random.key(options.seed),
        local_models=options.local_models,
        announce=say,
    )
    if options.empirical:
        key = jax.random.key(options.seed)
        more = verify_empirical(settings=texts, key=key, announce=say)
        table = Verification((*table, *more))
    folder = records.prepare_folder(options.output, force=options.force)
    records.write_json(folder / "summary.json", {"claims": table.rows()})
    records.write_text(folder / "claims.md", records.markdown_table(table.rows()))
    print(table)
    print(f"written: {folder}/summary.json, claims.md")
    return 0 if table.succeeded else 1


def _texts(options: Verify) -> Any:
    """The texts of the named corpora below --text, or None without it."""
    if options.text is None:
        return None
    if not options.empirical:
        raise ValueError("--text is for --empirical; give both or neither.")
    from .. import corpus, empirical

    return {
        name: empirical.read_setting(
            empirical.find_text(name, options.text),
            tokeniser=shipped.tokeniser,
            vocab=64,
        )
        for name, shipped in corpus.CORPORA.items()
    }
