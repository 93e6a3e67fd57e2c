"""Tables of bigram counts: made from a text, kept in one small file, turned to a chain.

A file is a NumPy archive without pickles, with the keys `counts` (d, d), `tokens` (d,),
`tokeniser`, `num_words` and `num_tokens`; the same text gives the same bytes.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import equinox as eqx
import numpy as np
from jaxtyping import Int, Integer

from .._summary import aligned
from ..markov import MarkovChain, chain_from_counts
from .text import Tokeniser, TokenStream, read_stream

# What NumPy and the zip reader raise on a file of another kind, or a damaged one.
_UNREADABLE = (
    KeyError,
    ValueError,
    TypeError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


class BigramTable(eqx.Module):
    """How often each word of a vocabulary follows each other in one text.

    Attributes:
        counts: counts[i, j], how often token j follows token i.
        tokens: the words, the most frequent first.
        tokeniser: name of the tokeniser that split the text.
        num_words: words read, before those outside the vocabulary were deleted.
        num_tokens: words that remained.
    """

    counts: Integer[np.ndarray, "d d"]
    tokens: tuple[str, ...] = eqx.field(static=True)
    tokeniser: str = eqx.field(static=True)
    num_words: int = eqx.field(static=True)
    num_tokens: int = eqx.field(static=True)

    def to_chain(self) -> MarkovChain:
        """The chain with P_ij proportional to the counts of row i.

        Raises:
            ValueError: a token never has a successor, or the chain is not ergodic.
        """
        return chain_from_counts(self.counts, tokens=self.tokens)

    def __str__(self) -> str:
        share = self.num_tokens / self.num_words
        rows = {
            "vocabulary": f"{len(self.tokens)} words, {' '.join(self.tokens[:8])} ...",
            "tokeniser": self.tokeniser,
            "words read": f"{self.num_words}",
            "words kept": f"{self.num_tokens} ({share:.1%})",
            "bigrams": f"{self.counts.sum()}",
            "non-zero": f"{np.count_nonzero(self.counts) / self.counts.size:.1%}",
        }
        return aligned("BigramTable", rows)


def count_bigrams(
    path: str | Path,
    *,
    tokeniser: str | Tokeniser,
    vocab: int | Sequence[str],
    keep_headings: bool = False,
) -> BigramTable:
    """Count the pairs of consecutive tokens of a text, after deletion of other words.

    Args:
        path: a text file in UTF-8, or a folder of them (see `read_stream`).
        tokeniser: a name in `TOKENISERS`, or a function from a line to its words.
        vocab: V, how many of the most frequent words to keep; or the words to keep.
        keep_headings: keep WikiText's heading lines.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: no text at `path`, not UTF-8, or fewer than V distinct words.
    """
    stream = read_stream(
        path, tokeniser=tokeniser, vocab=vocab, keep_headings=keep_headings
    )
    name = (
        tokeniser
        if isinstance(tokeniser, str)
        else getattr(tokeniser, "__name__", type(tokeniser).__name__)
    )
    if keep_headings:
        name = f"{name}, headings kept"
    return BigramTable(
        counts=count_pairs(stream),
        tokens=stream.tokens,
        tokeniser=name,
        num_words=stream.num_words,
        num_tokens=stream.ids.size,
    )


def save_table(table: BigramTable, path: str | Path) -> None:
    """Write a table to `path`, compressed."""
    # A handle, since NumPy would add .npz to a name that lacks it.
    with Path(path).open("wb") as file:
        np.savez_compressed(
            file,
            counts=table.counts,
            tokens=np.array(table.tokens),
            tokeniser=np.array(table.tokeniser),
            num_words=np.array(table.num_words),
            num_tokens=np.array(table.num_tokens),
        )


def load_table(path: str | Path) -> BigramTable:
    """Read a table that `save_table` wrote.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: not a bigram table.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no bigram table at {path}.")
    with Path(path).open("rb") as file:
        return read_table(file, str(path))


def read_table(file: IO[bytes], name: str) -> BigramTable:
    """Read a table from an open file; `name` is for messages."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            table = BigramTable(
                counts=archive["counts"],
                tokens=tuple(archive["tokens"].tolist()),
                tokeniser=str(archive["tokeniser"]),
                num_words=int(archive["num_words"]),
                num_tokens=int(archive["num_tokens"]),
            )
    except _UNREADABLE as error:
        raise ValueError(f"{name} is not a table of bigram counts: {error}") from None
    size = len(table.tokens)
    if table.counts.shape != (size, size) or table.counts.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is not a table of bigram counts: counts must be integers of shape "
            f"({size}, {size}) for {size} tokens; got {table.counts.dtype} of shape "
            f"{table.counts.shape}."
        )
    return table


def count_pairs(stream: TokenStream) -> Int[np.ndarray, "d d"]:
    """How often token j follows token i in a stream."""
    size = len(stream.tokens)
    pairs = stream.ids[:-1].astype(np.int64) * size + stream.ids[1:]
    return np.bincount(pairs, minlength=size**2).reshape(size, size)
