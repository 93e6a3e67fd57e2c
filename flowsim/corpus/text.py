"""From text files to a stream of token numbers, and from the stream to windows.

Text is read once, line by line; memory is four bytes a word and the distinct words.

>>> from flowsim.corpus import tinystories_words, wikitext_words
>>> tinystories_words("“Don’t!” said Tim.")
['"', "don't", '!', '"', 'said', 'tim', '.']
>>> wikitext_words("the <unk> of York , 1923 @-@ 24")
['the', 'of', 'York', ',', '1923', '@-@', '24']
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

_MARKERS = ("<unk>", "<|endoftext|>")
_SUFFIXES = (".txt", ".tokens", ".raw")
_STRAIGHT = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"'})
# Letter runs with at most one inner apostrophe, digit runs, any other single character.
_STORY_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[^\w\s]|_")

Tokeniser = Callable[[str], Iterable[str]]


class TokenStream(NamedTuple):
    """A text as one stream of token numbers.

    Attributes:
        ids: token numbers, in the order of the text.
        tokens: the word behind each number.
        num_words: words read, before those outside the vocabulary were deleted.
    """

    ids: Int[np.ndarray, " length"]
    tokens: tuple[str, ...]
    num_words: int


class Windows(NamedTuple):
    """Contexts and the token that follows each; views of the stream, not copies."""

    tokens: Int[np.ndarray, "N s"]
    targets: Int[np.ndarray, " N"]


def wikitext_words(line: str, *, keep_headings: bool = False) -> list[str]:
    """Words of one line of WikiText: split at blanks, case kept.

    A line whose first word is `=` is a heading and gives no words, unless
    `keep_headings`.
    """
    words = line.split()
    if words and words[0] == "=" and not keep_headings:
        return []
    return [word for word in words if word not in _MARKERS]


def tinystories_words(line: str) -> list[str]:
    """Words of one line of TinyStories: lower case, punctuation split off.

    Curly quotes are made straight. A word is a run of letters with at most one inner
    apostrophe, a run of digits, or any other single character that is no blank.
    """
    for marker in _MARKERS:
        line = line.replace(marker, " ")
    return _STORY_WORD.findall(line.translate(_STRAIGHT).lower())


TOKENISERS: Mapping[str, Tokeniser] = MappingProxyType(
    {"wikitext": wikitext_words, "tinystories": tinystories_words}
)


def read_stream(
    path: str | Path,
    *,
    tokeniser: str | Tokeniser,
    vocab: int | Sequence[str],
    keep_headings: bool = False,
) -> TokenStream:
    """Read a text as one stream over its V most frequent words.

    Args:
        path: a text file in UTF-8, or a folder: all files below it that end in .txt,
            .tokens or .raw, in the order of their paths.
        tokeniser: a name in `TOKENISERS`, or a function from a line to its words.
        vocab: V, the most frequent words being numbered by falling count and equal
            counts by word; or the words themselves, for a second text in the
            vocabulary of a first.
        keep_headings: keep WikiText's heading lines.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: no text at `path`, not UTF-8, or fewer than V distinct words.
    """
    return stream_lines(
        _lines(Path(path)),
        source=str(path),
        tokeniser=tokeniser,
        vocab=vocab,
        keep_headings=keep_headings,
    )


def stream_lines(
    lines: Iterable[str],
    *,
    source: str,
    tokeniser: str | Tokeniser,
    vocab: int | Sequence[str],
    keep_headings: bool = False,
) -> TokenStream:
    """`read_stream` of lines that come from anywhere; `source` is for messages."""
    split = _find_tokeniser(tokeniser, keep_headings)
    if isinstance(vocab, int | np.integer) and vocab < 1:
        raise ValueError(f"vocab must be a positive number of words; got {vocab}.")
    # A word met for the first time gets the next number.
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    stream = array("i")
    for line in lines:
        stream.extend(numbers[word] for word in split(line) if word not in _MARKERS)
    ids = np.frombuffer(stream, np.int32) if stream else np.zeros(0, np.int32)
    if not ids.size:
        raise ValueError(f"{source} holds no words.")
    tokens = _vocabulary(source, numbers, ids, vocab)
    # -1 marks the words to delete.
    renumber = np.full(len(numbers), -1, np.int32)
    for new, word in enumerate(tokens):
        if word in numbers:
            renumber[numbers[word]] = new
    kept = renumber[ids]
    return TokenStream(kept[kept >= 0], tokens, ids.size)


def windows(
    stream: TokenStream | Int[np.ndarray, " length"], length: int, *, stride: int = 1
) -> Windows:
    """All contexts of s consecutive tokens and the token after each.

    Args:
        stream: a token stream, or its numbers.
        length: s.
        stride: distance between the beginnings of two windows.

    Returns:
        tokens (N, s) and targets (N,), both read-only views of the stream: a window
        takes no memory until it is copied.

    Raises:
        ValueError: the stream is shorter than one window and its target.
    """
    ids = stream.ids if isinstance(stream, TokenStream) else np.asarray(stream)
    for name, value in (("length", length), ("stride", stride)):
        if value < 1:
            raise ValueError(f"{name} must be a positive integer; got {value}.")
    if ids.ndim != 1 or ids.size < length + 1:
        raise ValueError(
            f"a window of length {length} and its target need a stream of at least "
            f"{length + 1} tokens; got shape {ids.shape}."
        )
    view = np.lib.stride_tricks.sliding_window_view(ids, length + 1)[::stride]
    return Windows(view[:, :-1], view[:, -1])


def _find_tokeniser(tokeniser: str | Tokeniser, keep_headings: bool) -> Tokeniser:
    if keep_headings:
        if tokeniser != "wikitext":
            raise ValueError(
                "keep_headings applies to the tokeniser 'wikitext' alone; "
                f"got tokeniser = {tokeniser!r}."
            )
        return lambda line: wikitext_words(line, keep_headings=True)
    if callable(tokeniser):
        return tokeniser
    if tokeniser not in TOKENISERS:
        raise ValueError(
            f"tokeniser must be a function or one of {sorted(TOKENISERS)}; "
            f"got {tokeniser!r}."
        )
    return TOKENISERS[tokeniser]


def _vocabulary(
    source: str,
    numbers: Mapping[str, int],
    ids: np.ndarray,
    vocab: int | Sequence[str],
) -> tuple[str, ...]:
    if not isinstance(vocab, int | np.integer):
        tokens = tuple(vocab)
        if len(set(tokens)) != len(tokens) or not tokens:
            raise ValueError("vocab must name at least one word, and each word once.")
        return tokens
    if len(numbers) < vocab:
        raise ValueError(
            f"vocab = {vocab} needs as many distinct words; {source} holds "
            f"{len(numbers)}."
        )
    counts = np.bincount(ids, minlength=len(numbers))
    ordered = sorted(numbers, key=lambda word: (-counts[numbers[word]], word))
    return tuple(ordered[:vocab])


def _lines(path: Path) -> Iterator[str]:
    if not path.exists():
        raise FileNotFoundError(f"no text file or folder at {path}.")
    files = [path]
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and file.suffix in _SUFFIXES
        )
        if not files:
            raise ValueError(
                f"{path} holds no text file (ending in {', '.join(_SUFFIXES)})."
            )
    for file in files:
        try:
            # A byte order mark, where there is one, is not part of the text.
            with file.open(encoding="utf-8-sig") as lines:
                for line in lines:
                    if "\0" in line:
                        raise ValueError(f"{file} holds a NUL byte; it is not text.")
                    yield line
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 text: {error.reason} "
                f"(byte 0x{error.object[error.start]:02x})."
            ) from None
