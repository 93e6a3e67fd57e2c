"""The bigram tables that come with the package, and where they come from."""

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from ..markov import MarkovChain
from .bigrams import BigramTable, read_table


class Corpus(NamedTuple):
    """A text whose bigram tables are shipped.

    Attributes:
        vocab_sizes: the vocabulary sizes V of the tables.
        tokeniser: the tokeniser that the tables were made with.
        source: which text, and who made it.
        licence: the terms under which the tables may be passed on.
    """

    vocab_sizes: tuple[int, ...]
    tokeniser: str
    source: str
    licence: str


CORPORA: Mapping[str, Corpus] = MappingProxyType(
    {
        "wikitext2": Corpus(
            vocab_sizes=(64, 256),
            tokeniser="wikitext",
            source=(
                "WikiText-2, 86 % of the training split: articles of English Wikipedia "
                "by its contributors, selected by S. Merity, C. Xiong, J. Bradbury, "
                "R. Socher, Pointer Sentinel Mixture Models, arXiv:1609.07843 (2016)"
            ),
            licence="CC BY-SA 3.0 and GFDL",
        ),
        "tinystories": Corpus(
            vocab_sizes=(64, 256),
            tokeniser="tinystories",
            source=(
                "TinyStories version 2 (GPT-4), the first 10,000 lines of the training "
                "split: R. Eldan, Y. Li, TinyStories: How Small Can Language Models Be "
                "and Still Speak Coherent English?, arXiv:2305.07759 (2023)"
            ),
            licence="CDLA-Sharing-1.0",
        ),
    }
)


def load_chain(name: str, *, vocab: int) -> MarkovChain:
    """The chain of a shipped bigram table; needs no network and no text.

    Args:
        name: a key of `CORPORA`: "wikitext2" or "tinystories".
        vocab: vocabulary size V, 64 or 256.

    Returns:
        A sparse chain with the words as `tokens`, token 0 the most frequent.

    Raises:
        ValueError: no such table; the message lists those there are.
    """
    return shipped_table(name, vocab=vocab).to_chain()


def shipped_table(name: str, *, vocab: int) -> BigramTable:
    """The bigram counts behind `load_chain`.

    Raises:
        ValueError: no such table; the message lists those there are.
    """
    if name not in CORPORA or vocab not in CORPORA[name].vocab_sizes:
        known = "; ".join(
            f"{known!r} with vocab {' or '.join(map(str, corpus.vocab_sizes))}"
            for known, corpus in CORPORA.items()
        )
        raise ValueError(
            f"no shipped table {name!r} with vocab {vocab}; there are {known}."
        )
    file = resources.files("flowsim").joinpath("data", f"{name}-{vocab}.npz")
    with file.open("rb") as table:
        return read_table(table, file.name)
