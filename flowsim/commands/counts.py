"""`flowsim counts`: the bigrams of a text as a chain."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from .reading import reading_input


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


def run_counts(options: Counts) -> int:
    """Count, print, write."""
    from .. import corpus

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
