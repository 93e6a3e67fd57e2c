"""Text to chains: words, the most frequent of them, bigram counts, and windows.

The only part of the package that reads text, under rules fixed once so that a count
table can be made again from its text: every line is split by a named tokeniser; words
outside the vocabulary, `<unk>` and `<|endoftext|>` are deleted; what remains is one
stream, whose pairs and windows cross line ends and deleted words. Words outside the
vocabulary are not merged into one token, which would hold half the mass and would be
what the flow studies.

Left out: subword tokenisers, several documents kept apart, and downloading. Tables of
two public corpora are shipped with the package, their texts are not.

>>> import flowsim as fs
>>> chain = fs.load_chain("wikitext2", vocab=64)
>>> chain.tokens[:4], round(float(chain.stationary[0]), 4)
(('the', ',', '.', 'of'), 0.1263)
"""

from .bigrams import (
    BigramTable,
    count_bigrams,
    count_pairs,
    load_table,
    save_table,
)
from .shipped import CORPORA, Corpus, load_chain, shipped_table
from .text import (
    TOKENISERS,
    TokenStream,
    read_stream,
    stream_lines,
    tinystories_words,
    wikitext_words,
    windows,
)

__all__ = [
    "CORPORA",
    "TOKENISERS",
    "BigramTable",
    "Corpus",
    "TokenStream",
    "count_bigrams",
    "count_pairs",
    "load_chain",
    "load_table",
    "read_stream",
    "save_table",
    "shipped_table",
    "stream_lines",
    "tinystories_words",
    "wikitext_words",
    "windows",
]
