"""What is trained on: a text over V tokens and the chain of its bigrams."""

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from .. import _summary
from ..batches import TextBatches, sampled_text
from ..corpus import CORPORA, TokenStream, count_pairs, read_stream, stream_lines
from ..corpus.text import Tokeniser
from ..markov import MarkovChain, chain_from_counts


class TextSetting(eqx.Module):
    """A text as token numbers, with the chain of its pairs.

    Attributes:
        ids: one or several streams of token numbers.
        chain: the chain whose population flow the training is held against.
        source: where the text comes from, in words.
    """

    ids: Int[np.ndarray, "streams tokens"]
    chain: MarkovChain
    source: str = eqx.field(static=True)

    def batches(self, *, length: int, size: int) -> TextBatches:
        """Random windows of this text."""
        return TextBatches(
            self.ids, length=length, size=size, vocab=self.chain.num_states
        )

    def __str__(self) -> str:
        names = self.chain.tokens or tuple(map(str, range(self.chain.num_states)))
        return _summary.aligned(
            "TextSetting",
            {
                "source": self.source,
                "tokens": f"{self.ids.size} in {len(self.ids)} stream(s)",
                "vocabulary": f"{len(names)}: {' '.join(names[:8])} ...",
                "H(pi), H(P)": (
                    f"{float(self.chain.unigram_entropy):.6f}, "
                    f"{float(self.chain.entropy_rate):.6f} nats"
                ),
            },
        )


def read_setting(
    path: str | Path, *, tokeniser: str | Tokeniser, vocab: int
) -> TextSetting:
    """A text file or folder over its V most frequent words, with its own bigrams.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: no text, fewer than V distinct words, or a token that never has a
            successor.
    """
    stream = read_stream(path, tokeniser=tokeniser, vocab=vocab)
    return _of_stream(stream, str(path))


def download_setting(corpus: str, *, vocab: int) -> TextSetting:
    """The text of a named corpus from the public datasets of its authors.

    WikiText-2's training split; the validation split of TinyStories, whose training
    split is a hundred times as long. Needs the extra `corpora`, and a network for the
    first time.

    Raises:
        ImportError: the package `datasets` is not installed.
        ValueError: an unknown corpus, or too small a vocabulary.
    """
    if corpus not in _DATASETS:
        raise ValueError(f"corpus must be one of {sorted(_DATASETS)}; got {corpus!r}.")
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "downloading a corpus needs the package datasets: "
            "pip install 'flowsim[corpora]'."
        ) from error
    name, part, split = _DATASETS[corpus]
    rows = datasets.load_dataset(name, part, split=split)
    stream = stream_lines(
        (line for text in rows["text"] for line in text.splitlines()),
        source=name,
        tokeniser=CORPORA[corpus].tokeniser,
        vocab=vocab,
    )
    return _of_stream(stream, f"{name}, {split}")


def _of_stream(stream: TokenStream, source: str) -> TextSetting:
    chain = chain_from_counts(count_pairs(stream), tokens=stream.tokens)
    return TextSetting(stream.ids[None], chain, source)


def sampled_setting(
    chain: MarkovChain,
    *,
    num_tokens: int = 2**20,
    key: PRNGKeyArray | None = None,
    source: str = "sampled from the chain",
) -> TextSetting:
    """Sequences sampled from a chain, held against that chain itself."""
    key = jax.random.key(0) if key is None else key
    ids = sampled_text(chain, key, num_tokens)
    return TextSetting(ids, chain, source)


def shuffled(setting: TextSetting, *, seed: int = 0) -> TextSetting:
    """The same tokens in random order, with the bigrams that are left by chance."""
    order = np.random.default_rng(seed).permutation(setting.ids.size)
    ids = setting.ids.ravel()[order].reshape(setting.ids.shape)
    vocab = setting.chain.num_states
    counts = np.zeros((vocab, vocab), np.int64)
    np.add.at(counts, (ids[:, :-1].ravel(), ids[:, 1:].ravel()), 1)
    chain = chain_from_counts(counts, tokens=setting.chain.tokens)
    return TextSetting(ids, chain, f"{setting.source}, shuffled")


def find_text(corpus: str, folder: str | Path) -> Path:
    """The text of a shipped corpus in a folder: the folder itself, or its usual place.

    Raises:
        FileNotFoundError: neither is there.
    """
    folder = Path(folder)
    for place in _PLACES[corpus]:
        if (folder / place).exists():
            return folder / place
    if not folder.exists():
        raise FileNotFoundError(f"no text file or folder at {folder}.")
    return folder


# Where the texts of the shipped tables lie below a folder of both.
_PLACES = {
    "wikitext2": ("wikitext-2/train-subset.txt", "train-subset.txt"),
    "tinystories": (
        "tinystories/v2-gpt4-train-head.txt",
        "v2-gpt4-train-head.txt",
    ),
}

# Repository, configuration and split of the public datasets.
_DATASETS = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-v1", "train"),
    "tinystories": ("roneneldan/TinyStories", None, "validation"),
}
