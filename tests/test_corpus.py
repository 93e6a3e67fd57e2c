"""Text to chains: the rules of the counting, and the shipped tables."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest

from flowsim.corpus import (
    CORPORA,
    BigramTable,
    count_bigrams,
    load_chain,
    load_table,
    read_stream,
    save_table,
    shipped_table,
    tinystories_words,
    wikitext_words,
    windows,
)

from .precision import single_precision

DATA = Path(__file__).parents[1] / "shared" / "data"
if not DATA.exists():
    DATA = Path(__file__).parents[2] / "shared" / "data"
TEXTS = {
    "wikitext2": DATA / "wikitext-2" / "train-subset.txt",
    "tinystories": DATA / "tinystories" / "v2-gpt4-train-head.txt",
}
SHIPPED = [(name, size) for name in CORPORA for size in CORPORA[name].vocab_sizes]
needs_texts = pytest.mark.skipif(
    not all(text.exists() for text in TEXTS.values()),
    reason="the corpora's texts are not part of the repository",
)


def focus_rate(pi, P):
    """c = a^2 (pihat . r)(q . pihat), THEORY section 4."""
    size = np.linalg.norm(pi)
    logits = np.log(pi) - np.log(pi).mean()
    r = pi * ((P - pi) @ logits)
    q = pi * (pi / size**2 - 1)
    return np.linalg.norm(logits) / size * (pi @ r / size) * (q @ pi / size)


def chain_focus_rate(chain):
    return focus_rate(np.asarray(chain.stationary), np.asarray(chain.transition))


@pytest.fixture
def write(tmp_path):
    def write(text, name="text.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def split(path, vocab, **options):
    stream = read_stream(path, tokeniser="wikitext", vocab=vocab, **options)
    return [stream.tokens[number] for number in stream.ids]


# Tokenisers


def test_wikitext_is_split_at_blanks_with_case_kept():
    assert wikitext_words(" The cat 's @-@ <unk> hat , The \n") == (
        ["The", "cat", "'s", "@-@", "hat", ",", "The"]
    )


def test_wikitext_headings_give_no_words_unless_kept():
    assert wikitext_words(" = = Early life = = \n") == []
    assert wikitext_words(" = Title = ", keep_headings=True) == ["=", "Title", "="]
    assert wikitext_words("x = 2") == ["x", "=", "2"]
    assert wikitext_words("=x") == ["=x"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("“Wow!” he SAID.", ['"', "wow", "!", '"', "he", "said", "."]),
        ("It’s Tim's", ["it's", "tim's"]),
        ("rock'n'roll", ["rock'n", "'", "roll"]),
        ("'tis dogs'", ["'", "tis", "dogs", "'"]),
        ("3rd 42", ["3", "rd", "42"]),
        ("a_b", ["a", "_", "b"]),
        ("yes...—no", ["yes", ".", ".", ".", "—", "no"]),
        ("Été", ["été"]),
        ("end<|endoftext|>Once <unk> x", ["end", "once", "x"]),
        ("  \n", []),
    ],
)
def test_tinystories_words(line, words):
    assert tinystories_words(line) == words


# Stream and counts


def test_vocabulary_is_ordered_by_count_and_ties_by_word(write):
    stream = read_stream(write("b c a b c d b a"), tokeniser="wikitext", vocab=3)
    assert stream.tokens == ("b", "a", "c")
    assert stream.ids.tolist() == [0, 2, 1, 0, 2, 0, 1]
    assert stream.num_words == 8


def test_other_words_and_markers_are_deleted_and_pairs_cross_them(write):
    text = write("a x b\n<unk> a\n = skipped = \n\nb y <|endoftext|> a")
    assert split(text, 2) == ["a", "b", "a", "b", "a"]
    table = count_bigrams(text, tokeniser="wikitext", vocab=2)
    assert table.tokens == ("a", "b")
    assert table.counts.tolist() == [[0, 2], [2, 0]]
    assert (table.num_words, table.num_tokens) == (7, 5)


def test_markers_are_deleted_before_the_vocabulary_is_chosen(write):
    text = write("<unk> <unk> <unk> a a b")
    assert read_stream(text, tokeniser="wikitext", vocab=2).tokens == ("a", "b")


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(write, tmp_path):
    write("c d", "text/two/1.tokens")
    write("a b", "text/one.txt")
    write("not text", "text/README.md")
    assert split(tmp_path / "text", 4) == ["a", "b", "c", "d"]


def test_line_ends_and_a_byte_order_mark_make_no_difference(write):
    unix = split(write("a b\nc a\n"), 3)
    dos = split(write(b"\xef\xbb\xbfa b\r\nc a\r\n", "dos.txt"), 3)
    assert unix == dos == ["a", "b", "c", "a"]


def test_a_second_text_can_be_read_in_the_vocabulary_of_a_first(write):
    stream = read_stream(write("z b a b"), tokeniser="wikitext", vocab=("a", "b", "c"))
    assert stream.tokens == ("a", "b", "c")
    assert stream.ids.tolist() == [1, 0, 1]


def test_a_tokeniser_can_be_a_function(write):
    table = count_bigrams(write("abba"), tokeniser=list, vocab=2)
    assert table.counts.tolist() == [[0, 1], [1, 1]]
    assert table.tokeniser == "list"
    stream = read_stream(write("<unk> a <unk> b"), tokeniser=str.split, vocab=2)
    assert stream.tokens == ("a", "b")


def test_counts_of_a_random_stream_match_a_loop(write):
    words = np.random.default_rng(0).choice(list("abcdefgh"), size=500)
    table = count_bigrams(write(" ".join(words)), tokeniser="wikitext", vocab=5)
    kept = [word for word in words if word in table.tokens]
    expected = np.zeros((5, 5), int)
    for first, second in itertools.pairwise(kept):
        expected[table.tokens.index(first), table.tokens.index(second)] += 1
    np.testing.assert_array_equal(table.counts, expected)


def test_a_table_survives_its_file(write, tmp_path):
    text = write("the cat saw the dog . the dog ran .")
    table = count_bigrams(text, tokeniser="tinystories", vocab=4)
    save_table(table, tmp_path / "table")
    again = load_table(tmp_path / "table")
    np.testing.assert_array_equal(again.counts, table.counts)
    assert again.tokens == table.tokens
    assert str(again) == str(table)
    assert "tinystories" in str(table)


# Windows


def test_windows_are_each_context_with_the_token_after_it():
    ids = np.arange(10, dtype=np.int32)
    tokens, targets = windows(ids, 3)
    assert tokens.shape == (7, 3) and targets.shape == (7,)
    np.testing.assert_array_equal(tokens[2], [2, 3, 4])
    np.testing.assert_array_equal(targets, ids[3:])
    assert windows(ids, 3, stride=4).tokens.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert windows(ids, 9).targets.tolist() == [9]


def test_windows_are_views_that_cannot_change_the_stream():
    ids = np.arange(1000, dtype=np.int32)
    tokens, targets = windows(ids, 100)
    assert np.shares_memory(tokens, ids) and np.shares_memory(targets, ids)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0, 0] = 1


# Shipped tables


@pytest.mark.parametrize(("name", "vocab"), SHIPPED)
def test_shipped_chains_are_ordered_by_frequency_and_named(name, vocab):
    table, chain = shipped_table(name, vocab=vocab), load_chain(name, vocab=vocab)
    assert chain.num_states == vocab
    assert chain.tokens == table.tokens
    assert len(set(table.tokens)) == vocab
    assert table.counts.sum() == table.num_tokens - 1
    # Each kept word is the first of one pair and the second of one, but for the ends.
    seen = np.maximum(table.counts.sum(axis=0), table.counts.sum(axis=1))
    assert np.all(np.diff(seen) <= 0)
    assert not {"<unk>", "<|endoftext|>", "=", "endoftext"} & set(table.tokens)
    assert chain.entropy_rate < chain.unigram_entropy < np.log(vocab)


@pytest.mark.parametrize(("name", "vocab"), SHIPPED)
def test_stationary_law_agrees_with_the_frequencies_of_first_tokens(name, vocab):
    counts = shipped_table(name, vocab=vocab).counts
    first = counts.sum(axis=1) / counts.sum()
    chain = load_chain(name, vocab=vocab)
    np.testing.assert_allclose(chain.stationary, first, atol=1e-5)


def test_focus_rates_of_the_shipped_chains():
    wikitext = load_chain("wikitext2", vocab=64)
    np.testing.assert_allclose(chain_focus_rate(wikitext), 6.884e-3, atol=5e-7)
    # The reference value +6.89e-3 is that of the frequencies of first tokens.
    counts = shipped_table("wikitext2", vocab=64).counts
    first = counts.sum(axis=1) / counts.sum()
    rate = focus_rate(first, np.asarray(wikitext.transition))
    np.testing.assert_allclose(rate, 6.89e-3, atol=5e-6)
    tinystories = load_chain("tinystories", vocab=64)
    np.testing.assert_allclose(chain_focus_rate(tinystories), -0.1157, atol=5e-5)


def test_shipped_tables_keep_wikitext_case_and_lower_tinystories():
    assert {"the", "The"} <= set(shipped_table("wikitext2", vocab=64).tokens)
    tokens = shipped_table("tinystories", vocab=256).tokens
    assert all(token == token.lower() for token in tokens)
    assert "don't" in tokens and "’" not in tokens


def test_load_chain_is_sparse_and_works_in_single_precision():
    chain = load_chain("wikitext2", vocab=256)
    nonzero = np.count_nonzero(shipped_table("wikitext2", vocab=256).counts)
    assert max(leaf.size for leaf in jax.tree.leaves(chain)) == nonzero
    with single_precision():
        single = load_chain("wikitext2", vocab=256)
        assert single.stationary.dtype == np.float32
        np.testing.assert_allclose(single.stationary, chain.stationary, rtol=1e-7)


@pytest.mark.parametrize("name", CORPORA)
def test_source_and_licence_of_each_corpus_are_stated_in_code_and_beside_the_data(name):
    corpus = CORPORA[name]
    readme = Path(__file__).parents[1].joinpath("flowsim", "data", "README.md")
    text = readme.read_text(encoding="utf-8")
    for licence in corpus.licence.split(" and "):
        assert licence in text
    assert corpus.source.split("arXiv:")[1].split(" ")[0] in text
    for vocab in corpus.vocab_sizes:
        command = (
            f"--tokeniser {corpus.tokeniser} --vocab {vocab} "
            f"--output {name}-{vocab}.npz"
        )
        assert command in text


@needs_texts
@pytest.mark.parametrize(("name", "vocab"), SHIPPED)
def test_shipped_tables_are_the_counts_of_their_texts(name, vocab):
    made = count_bigrams(TEXTS[name], tokeniser=CORPORA[name].tokeniser, vocab=vocab)
    shipped = shipped_table(name, vocab=vocab)
    np.testing.assert_array_equal(made.counts, shipped.counts)
    assert made.tokens == shipped.tokens
    assert (made.num_words, made.num_tokens) == (shipped.num_words, shipped.num_tokens)


@needs_texts
def test_keeping_headings_moves_the_focus_rate_of_wikitext():
    kept = count_bigrams(
        TEXTS["wikitext2"], tokeniser="wikitext", vocab=256, keep_headings=True
    )
    dropped = load_chain("wikitext2", vocab=256)
    np.testing.assert_allclose(chain_focus_rate(kept.to_chain()), -7.88e-2, atol=5e-5)
    np.testing.assert_allclose(chain_focus_rate(dropped), -8.47e-2, atol=5e-5)


# Wrong input


def count(path, **options):
    return count_bigrams(path, **{"tokeniser": "wikitext", "vocab": 2} | options)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, r"text\.txt holds no words"),
        (" = heading = \n\n", {}, r"holds no words"),
        ("a b", {"vocab": 3}, r"vocab = 3 .* 2\."),
        ("a b", {"vocab": 0}, r"vocab must be a positive"),
        ("a b", {"vocab": ()}, r"at least one word"),
        ("a b", {"vocab": ("a", "a")}, r"each word once"),
        (b"\x80abc", {}, r"text\.txt is not UTF-8.*0x80"),
        (b"PK\x03\x04\x00\x00", {}, r"NUL"),
        ("a b", {"tokeniser": "bytes"}, r"tinystories.*wikitext.*'bytes'"),
        ("a", {"tokeniser": "tinystories", "keep_headings": True}, r"keep_headings"),
    ],
)
def test_wrong_text_is_named(write, text, options, message):
    with pytest.raises(ValueError, match=message):
        count(write(text), **options)


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text file or folder at .*absent"):
        count(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        load_table(tmp_path / "absent")


def test_a_folder_without_text_is_named(write):
    with pytest.raises(ValueError, match="holds no text file"):
        count(write("text", "folder/table.csv").parent)


def test_a_token_without_successor_is_named(write):
    table = count(write("a b a b a b c"), vocab=3)
    with pytest.raises(ValueError, match=r"successor; row 2 \(token 'c'\)"):
        table.to_chain()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 not a zip"])
def test_a_file_that_is_no_table_is_named(write, content):
    with pytest.raises(ValueError, match=r"table\.npz is not a table"):
        load_table(write(content, "table.npz"))


def test_an_archive_of_something_else_or_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, P=np.eye(2))
    with pytest.raises(ValueError, match=r"other\.npz is not a table.*counts"):
        load_table(path)
    np.save(tmp_path / "array.npy", np.eye(2))
    with pytest.raises(ValueError, match=r"is not a table"):
        load_table(tmp_path / "array.npy")
    wrong = BigramTable(np.zeros((2, 3), int), ("a", "b"), "wikitext", 2, 2)
    save_table(wrong, path)
    with pytest.raises(ValueError, match=r"counts must be integers .*\(2, 3\)"):
        load_table(path)


@pytest.mark.parametrize(("name", "vocab"), [("wikitext", 64), ("wikitext2", 65)])
def test_an_unknown_shipped_table_is_answered_with_those_there_are(name, vocab):
    with pytest.raises(ValueError, match=r"'wikitext2' with vocab 64 or 256; 'tiny"):
        load_chain(name, vocab=vocab)


@pytest.mark.parametrize(
    ("stream", "length", "options", "message"),
    [
        (np.arange(3), 3, {}, r"at least 4 tokens; got shape \(3,\)"),
        (np.arange(3), 0, {}, r"length must be a positive"),
        (np.arange(3), 1, {"stride": 0}, r"stride must be a positive"),
        (np.zeros((2, 3), int), 1, {}, r"shape \(2, 3\)"),
    ],
)
def test_impossible_windows_are_named(stream, length, options, message):
    with pytest.raises(ValueError, match=message):
        windows(stream, length, **options)
