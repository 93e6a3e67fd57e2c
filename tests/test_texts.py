"""Texts to train on: found, read, downloaded, sampled, shuffled."""

import sys
import types
from typing import Any

import numpy as np
import pytest

import flowsim as fs
from flowsim import empirical

from .problems import STORY, named_chain


def test_shuffling_keeps_the_words_and_loses_their_order():
    chain = named_chain("default")
    text = empirical.sampled_setting(chain, num_tokens=60_000)
    mixed = empirical.shuffled(text)
    np.testing.assert_array_equal(
        np.bincount(mixed.ids.ravel()), np.bincount(text.ids.ravel())
    )
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (mixed.ids[:, :-1].ravel(), mixed.ids[:, 1:].ravel()), 1)
    counted = pairs / pairs.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(mixed.chain.transition, counted, rtol=1e-12)
    independent = np.broadcast_to(np.asarray(chain.stationary), (4, 4))
    assert np.abs(mixed.chain.transition - independent).max() < 0.05
    assert abs(float(fs.theory.focus_rate(mixed.chain))) < 0.01
    assert float(fs.theory.focus_rate(chain)) > 0.05


def test_the_text_of_a_corpus_is_found_in_its_usual_place_or_as_given(tmp_path):
    file = tmp_path / "wikitext-2" / "train-subset.txt"
    file.parent.mkdir()
    file.write_text(STORY)
    assert empirical.find_text("wikitext2", tmp_path) == file
    assert empirical.find_text("tinystories", tmp_path) == tmp_path
    assert empirical.find_text("wikitext2", file) == file
    with pytest.raises(FileNotFoundError, match="no text file or folder"):
        empirical.find_text("wikitext2", tmp_path / "nowhere")


def fake_datasets(text):
    """Stands in for the package `datasets`: what it is asked for, and what it gives."""
    asked = []

    def load_dataset(name, part, *, split):
        asked.append((name, part, split))
        return {"text": text}

    module: Any = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    return module, asked


def test_a_downloaded_corpus_is_read_like_its_file(tmp_path, monkeypatch):
    module, asked = fake_datasets([STORY * 10, "", STORY * 10])
    monkeypatch.setitem(sys.modules, "datasets", module)
    found = empirical.download_setting("tinystories", vocab=5)
    assert asked == [("roneneldan/TinyStories", None, "validation")]
    (tmp_path / "story.txt").write_text(STORY * 20)
    known = empirical.read_setting(
        tmp_path / "story.txt", tokeniser="tinystories", vocab=5
    )
    np.testing.assert_array_equal(found.ids, known.ids)
    assert found.chain.tokens == known.chain.tokens
    assert "roneneldan/TinyStories" in found.source


def test_downloading_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"flowsim\[corpora\]"):
        empirical.download_setting("wikitext2", vocab=64)
    with pytest.raises(ValueError, match="got 'wikitext3'"):
        empirical.download_setting("wikitext3", vocab=64)
