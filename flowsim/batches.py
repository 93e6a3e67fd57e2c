"""Mini-batches: windows drawn at random from a text, or sampled from a chain.

A batch is a `SampleLoss`; `draw(key)` makes one, inside `jit` as well, so that a
training step draws its own and nothing is stored. Windows overlap and are drawn with
replacement: a batch is an unbiased sample of all windows of the text, or of the chain's
stationary sequences.

Left out: epochs without replacement, and reading text (`flowsim.corpus`).

>>> import jax, flowsim as fs
>>> chain = fs.lazy_chain([0.7, 0.2, 0.1], lam=0.5)
>>> batch = fs.ChainBatches(chain, length=8, size=5).draw(jax.random.key(0))
>>> batch.tokens.shape, batch.targets.shape
((5, 8), (5,))
"""

from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray, UInt16

from .loss import SampleLoss
from .markov import MarkovChain

_TABLE_BYTES = 2**28  # A quarter of a gigabyte.
_LONGEST = 2**16 - 1  # Counts are differences of 16-bit numbers, exact modulo 2^16.


@runtime_checkable
class Batches(Protocol):
    """Anything that draws objectives."""

    def draw(self, key: PRNGKeyArray, /) -> SampleLoss: ...


class TextBatches(eqx.Module):
    """Windows of s consecutive tokens at random places of a text, and what follows.

    The counts of a window are the difference of two rows of a table of running counts,
    kept modulo 2^16 at every `spacing`-th position, so that a batch costs the same
    whatever s is. The spacing is the smallest power of two at which the table fits a
    quarter of a gigabyte; beyond 1, up to that many tokens are counted one by one at
    either end of a window.

    Attributes:
        ids: the text, one or several streams after each other.
        table: running counts before every `spacing`-th position.
        length: s.
        size: number of windows in a batch.
        vocab: number of tokens d.
        num_streams: number of streams.
        stream_length: length of one stream; no window crosses from one to the next.
        spacing: distance of the rows of the table.
    """

    ids: Int[Array, " tokens"]
    table: UInt16[Array, "rows d"]
    length: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    vocab: int = eqx.field(static=True)
    num_streams: int = eqx.field(static=True)
    stream_length: int = eqx.field(static=True)
    spacing: int = eqx.field(static=True)

    def __init__(
        self,
        ids: Int[np.ndarray, " tokens"] | Int[np.ndarray, "streams tokens"],
        *,
        length: int,
        size: int,
        vocab: int,
        table_bytes: int = _TABLE_BYTES,
    ):
        """Count the text.

        Args:
            ids: token numbers of one text, or of several of the same length.
            length: s, tokens in a window, at most 65,535.
            size: windows in a batch.
            vocab: number of tokens d.
            table_bytes: bound on the memory of the table.

        Raises:
            ValueError: a text shorter than one window and its target, or a token
                number outside 0 ... d - 1.
        """
        for name, value in (("length", length), ("size", size), ("vocab", vocab)):
            if value < 1:
                raise ValueError(f"{name} must be a positive integer; got {value}.")
        if length > _LONGEST:
            raise ValueError(f"length must be at most {_LONGEST}; got {length}.")
        text = np.atleast_2d(np.asarray(ids))
        if text.ndim != 2 or text.dtype.kind not in "iu":
            raise ValueError(
                "ids must be integers of shape (tokens,) or (streams, tokens); "
                f"got {text.dtype} of shape {np.shape(ids)}."
            )
        if text.shape[1] < length + 1:
            raise ValueError(
                f"a window of length {length} and its target need a text of at least "
                f"{length + 1} tokens; got {text.shape[1]}."
            )
        if text.size and not (0 <= text.min() and text.max() < vocab):
            raise ValueError(
                f"token numbers must lie in 0 ... {vocab - 1}; "
                f"got {text.min()} ... {text.max()}."
            )
        flat = text.ravel()
        spacing = 1
        while (flat.size // spacing + 2) * vocab * 2 > table_bytes:
            spacing *= 2
        # Whole blocks, so that a block can be read at any position.
        padded = np.zeros((flat.size // spacing + 1) * spacing, np.int32)
        padded[: flat.size] = flat
        self.ids = jnp.asarray(padded)
        self.table = jnp.asarray(_running_counts(flat, vocab, spacing))
        self.length, self.size, self.vocab = length, size, vocab
        self.num_streams, self.stream_length = text.shape
        self.spacing = spacing

    @property
    def num_windows(self) -> int:
        """Number of different windows."""
        return self.num_streams * (self.stream_length - self.length)

    def draw(self, key: PRNGKeyArray) -> SampleLoss:
        """A batch of windows at independent, uniform places."""
        places = jax.random.randint(
            key, (self.size,), 0, self.num_windows, dtype=jnp.int32
        )
        return _as_loss(jax.vmap(self._window)(places), None)

    def whole(self, *, stride: int = 1, chunk_size: int = 4096) -> SampleLoss:
        """Every window, or every `stride`-th, as one objective evaluated in chunks.

        Memory is the table of counts, 2 d bytes a window.
        """
        if stride < 1:
            raise ValueError(f"stride must be a positive integer; got {stride}.")
        return _as_loss(_all_windows(self, stride, chunk_size), chunk_size)

    def _window(
        self, place: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Int[Array, ""], UInt16[Array, " d"]]:
        """Last token, target and counts of one window."""
        stream, offset = jnp.divmod(place, self.stream_length - self.length)
        start = stream * self.stream_length + offset
        end = start + self.length
        counts = self._counts_before(end) - self._counts_before(start)
        return self.ids[end - 1], self.ids[end], counts

    def _counts_before(self, position: Int[Array, ""]) -> UInt16[Array, " d"]:
        row = position // self.spacing
        counts = self.table[row]
        if self.spacing == 1:
            return counts
        first = row * self.spacing
        tokens = jax.lax.dynamic_slice_in_dim(self.ids, first, self.spacing)
        inside = first + jnp.arange(self.spacing, dtype=jnp.int32) < position
        return counts.at[tokens].add(inside.astype(counts.dtype))


class ChainBatches(eqx.Module):
    """Fresh stationary sequences of a chain at every draw: s tokens and the next.

    Attributes:
        chain: the chain.
        length: s.
        size: number of sequences in a batch.
    """

    chain: MarkovChain
    length: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __check_init__(self):
        if not isinstance(self.chain, MarkovChain):
            raise ValueError(
                f"chain must be a MarkovChain; got {type(self.chain).__name__}."
            )
        for name in ("length", "size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be a positive integer; got {getattr(self, name)}."
                )

    def draw(self, key: PRNGKeyArray) -> SampleLoss:
        """A batch of independent sequences."""
        sequences = self.chain.sample(key, self.size, self.length + 1)
        return SampleLoss(sequences[:, :-1], sequences[:, -1])


def sampled_text(
    chain: MarkovChain, key: PRNGKeyArray, num_tokens: int, *, num_streams: int = 256
) -> Int[np.ndarray, "streams tokens"]:
    """About `num_tokens` tokens of a chain, as independent stationary streams.

    For `TextBatches`: windows of one sample, drawn at a fraction of the cost of fresh
    sequences.
    """
    length = -(-num_tokens // num_streams)
    return np.asarray(chain.sample(key, num_streams, length))


def _as_loss(
    windows: tuple[Int[Array, " N"], Int[Array, " N"], UInt16[Array, "N d"]],
    chunk_size: int | None,
) -> SampleLoss:
    last, targets, counts = windows
    return SampleLoss(last[:, None], targets, counts=counts, chunk_size=chunk_size)


@eqx.filter_jit
def _all_windows(batches: TextBatches, stride: int, chunk_size: int):
    places = jnp.arange(0, batches.num_windows, stride, dtype=jnp.int32)
    return jax.lax.map(batches._window, places, batch_size=chunk_size)


def _running_counts(
    ids: Int[np.ndarray, " tokens"], vocab: int, spacing: int
) -> np.ndarray:
    """Row r: how often each token occurs before position r * spacing, modulo 2^16."""
    table = np.zeros((ids.size // spacing + 2, vocab), np.uint16)
    np.add.at(table, (1 + np.arange(ids.size) // spacing, ids), 1)
    return np.cumsum(table, axis=0, dtype=np.uint16, out=table)
