"""Batches are unbiased windows of their text or chain, counted exactly."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flowsim.batches import ChainBatches, TextBatches, sampled_text
from flowsim.corpus import windows
from flowsim.derivatives import gradient
from flowsim.loss import SampleLoss

from .problems import named_chain, random_model

KEY = jax.random.key(3)


def text(num_tokens=500, vocab=4, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, num_tokens).astype(np.int32)


def every_window(ids, length):
    """Last token, target and counts of all windows, by definition."""
    tokens, targets = windows(ids, length)
    counts = (tokens[:, :, None] == np.arange(4)).sum(axis=1)
    return tokens[:, -1], targets, counts


@pytest.mark.parametrize("table_bytes", [2**20, 1200, 200])
def test_counts_from_the_running_table_are_those_of_the_windows(table_bytes):
    ids = text()
    batches = TextBatches(ids, length=37, size=1, vocab=4, table_bytes=table_bytes)
    assert (batches.spacing == 1) == (table_bytes == 2**20)
    assert batches.table.nbytes <= table_bytes
    loss = batches.whole(chunk_size=64)
    last, targets, counts = every_window(ids, 37)
    np.testing.assert_array_equal(loss.tokens[:, 0], last)
    np.testing.assert_array_equal(loss.targets, targets)
    np.testing.assert_array_equal(loss.counts, counts)


def test_running_counts_are_exact_past_the_range_of_16_bits():
    ids = np.zeros(70_000, np.int32)
    ids[-1] = 1
    batches = TextBatches(ids, length=20, size=1, vocab=2)
    counts = np.asarray(batches.whole(stride=1000).counts)
    assert (counts[:, 0] == 20).all() and (counts[:, 1] == 0).all()


def test_no_window_crosses_from_one_stream_to_the_next():
    streams = np.repeat(np.arange(3, dtype=np.int32)[:, None], 10, axis=1)
    batches = TextBatches(streams, length=4, size=1, vocab=3)
    loss = batches.whole()
    assert loss.targets.shape == (3 * 6,) and loss.counts is not None
    np.testing.assert_array_equal(loss.tokens[:, 0], loss.targets)
    np.testing.assert_array_equal(loss.counts[jnp.arange(18), loss.targets], 4)


def test_draws_are_windows_of_the_text_drawn_uniformly():
    ids = text(60)
    batches = TextBatches(ids, length=5, size=20_000, vocab=4)
    drawn = eqx.filter_jit(batches.draw)(KEY)
    known = {}
    for last, target, counts in zip(*every_window(ids, 5), strict=True):
        kind = (last, target, *counts)
        known[kind] = known.get(kind, 0) + 1 / 55
    columns = (drawn.tokens[:, 0], drawn.targets, drawn.counts)
    rows = np.column_stack([np.asarray(column) for column in columns])
    seen, number = np.unique(rows, axis=0, return_counts=True)
    assert {tuple(row) for row in seen} == set(known)
    expected = np.array([known[tuple(row)] for row in seen])
    error = (number / 20_000 - expected) / np.sqrt(expected / 20_000)
    assert np.abs(error).max() < 5


def test_a_batch_equals_the_loss_of_its_windows():
    ids = text(3000)
    chain = named_chain("dense, focus")
    model = random_model(chain)
    tokens, targets = windows(ids, 16)
    whole = TextBatches(ids, length=16, size=1, vocab=4).whole()
    literal = SampleLoss(np.array(tokens), np.array(targets))
    np.testing.assert_allclose(whole(model), literal(model), rtol=1e-14)
    np.testing.assert_allclose(whole.logits(model), literal.logits(model), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 7, 100, 2000])
def test_chunks_change_neither_value_nor_gradient(chunk_size):
    ids = text(400)
    model = random_model(named_chain("default"))
    tokens, targets = (np.array(x) for x in windows(ids, 16))
    full = SampleLoss(tokens, targets)
    parts = SampleLoss(tokens, targets, chunk_size=chunk_size)
    np.testing.assert_allclose(parts(model), full(model), rtol=1e-14)
    for one, other in zip(
        jax.tree.leaves(gradient(parts, model)),
        jax.tree.leaves(gradient(full, model)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-14)


def test_chunks_bound_the_memory_of_a_gradient():
    model = random_model(named_chain("default"))
    ids = text(2**16)

    def temporary(chunk_size):
        loss = TextBatches(ids, length=16, size=1, vocab=4).whole(chunk_size=chunk_size)
        compiled = jax.jit(jax.grad(lambda m, loss: loss(m))).lower(model, loss)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert temporary(2**10) < temporary(2**16) / 8


@pytest.mark.slow
def test_batches_of_a_chain_are_stationary_pairs_with_fresh_windows():
    chain = named_chain("metropolis")
    batches = ChainBatches(chain, length=6, size=20_000)
    loss = eqx.filter_jit(batches.draw)(KEY)
    assert loss.tokens.shape == (20_000, 6)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (np.asarray(loss.tokens[:, -1]), np.asarray(loss.targets)), 1)
    expected = chain.stationary[:, None] * chain.transition
    np.testing.assert_allclose(pairs / 20_000, expected, atol=0.02)
    other = batches.draw(jax.random.key(4))
    assert not np.array_equal(loss.tokens, other.tokens)


def test_a_sampled_text_has_the_pairs_of_its_chain():
    chain = named_chain("dense, focus")
    ids = sampled_text(chain, KEY, 40_000, num_streams=16)
    assert ids.shape == (16, 2500)
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (ids[:, :-1].ravel(), ids[:, 1:].ravel()), 1)
    rows = pairs / pairs.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rows, chain.transition, atol=0.03)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (text(10), {"length": 10}, "at least 11 tokens; got 10"),
        (text(10), {"length": 0}, "length must be a positive"),
        (text(10), {"length": 2**16}, "at most 65535"),
        (text(10), {"size": 0}, "size must be a positive"),
        (text(10) + 2, {}, r"0 \.\.\. 3; got"),
        (text(10) - 2, {}, r"0 \.\.\. 3; got -"),
        (text(10) * 1.0, {}, "ids must be integers"),
    ],
)
def test_wrong_texts_are_refused(ids, options, message):
    with pytest.raises(ValueError, match=message):
        TextBatches(ids, **({"length": 3, "size": 2, "vocab": 4} | options))


def test_wrong_counts_are_refused():
    tokens, targets = np.zeros((5, 1), int), np.zeros(5, int)
    with pytest.raises(ValueError, match="one row for each of the 5"):
        SampleLoss(tokens, targets, counts=np.zeros((4, 4), int))
    with pytest.raises(ValueError, match="counts must be integers"):
        SampleLoss(tokens, targets, counts=np.zeros((5, 4)))
    with pytest.raises(ValueError, match="chunk_size must be at least 1; got 0"):
        SampleLoss(tokens, targets, chunk_size=0)
    loss = SampleLoss(tokens, targets, counts=np.ones((5, 3), int))
    with pytest.raises(ValueError, match="3 columns but the model has vocab 4"):
        loss(random_model(named_chain("default")))
