"""The rules of data/tokenizer.py: every text becomes tokens and comes back, whatever is in it."""

import json
import random
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from conftest import split_patterns
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import tokenizer as module
from data.config import TokenizerConfig
from data.pieces import LONGEST, safe_cut
from data.tokenizer import (
    END_OF_TEXT,
    encode_documents,
    encode_text,
    make_tokenizer,
    read_tokenizer,
    save_tokenizer,
    token_bytes,
    train_bpe,
)
from errors import DataError

PUBLISHED_CACHE = Path(__file__).resolve().parent.parent / ".." / "shared" / "tiktoken_cache"
NAMES = ["bpe", "byte", "gpt2", "cl100k_base", "o200k_base"]
TEXT = "".join(path.read_text() for path in sorted(Path(__file__).resolve().parent.parent.glob("data/*.py")))

# Texts made of what the split patterns tell apart, in orders that no person would write.
_ODD = " ,  ,\n,\r\n,\t,a,Z,é,字,ß,e\u0301,1,12,٣,²,_,.,'s,'LL,/,(,\u00a0,\u2003,\u0085,\x1c,\u200d,🙂,word, the,don't"
ODD = [*_ODD.split(","), ","]
LINES = random.Random(1).sample([line for line in TEXT.splitlines(keepends=True) if line] * 3, 3000)
ODD_TEXTS = st.lists(st.sampled_from([*ODD, END_OF_TEXT]), max_size=25).map("".join)


@cache
def encoding(name: str) -> tiktoken.Encoding:
    """The tokenizer, or where a published one is not at hand, its pattern with merges learnt from odd texts."""
    if name == "byte":
        return make_tokenizer(TokenizerConfig(name=name), [])
    if name == "bpe":
        return train_bpe([TEXT], 700)
    if PUBLISHED_CACHE.is_dir():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TIKTOKEN_CACHE_DIR", str(PUBLISHED_CACHE))
            return make_tokenizer(TokenizerConfig(name=name), [])
    return odd_encoding(name)


@cache
def odd_encoding(name: str) -> tiktoken.Encoding:
    """Merges across everything that the pattern leaves together: what an unsafe cut takes apart."""
    if name == "byte":
        return encoding(name)
    choice = random.Random(0)
    return train_bpe(("".join(choice.choices(ODD, k=20)) for _ in range(10_000)), 3000, split_patterns()[name])


every_encoding = pytest.mark.parametrize("name", NAMES)


@every_encoding
@given(text=ODD_TEXTS | st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_text_comes_back_from_its_tokens(name, text):
    assert encoding(name).decode(encode_text(encoding(name), text).tolist()) == text


@every_encoding
@given(text=ODD_TEXTS | st.text(max_size=60))
@example(text="a.\n/b")  # o200k keeps a slash with the line end before it
@example(text="a_\nb")  # all but gpt2 keep a line end with the sign before it
@example(text=".\r\n\n  b")
@settings(max_examples=400, deadline=None)
def test_a_safe_cut_changes_no_token(name, text):
    for one in (encoding(name), odd_encoding(name)):
        whole = one.encode_ordinary(text)
        for limit in range(1, len(text)):
            cut = safe_cut(text, limit)
            if cut is not None:
                assert 0 < cut <= limit
                assert one.encode_ordinary(text[:cut]) + one.encode_ordinary(text[cut:]) == whole, (text, cut)


def test_most_text_has_a_safe_cut_close_by_and_no_piece_is_near_the_limit_of_the_regex_engine():
    assert LONGEST < 500_000
    for text in (TEXT, TEXT.replace(" ", "\t"), "天地玄黄。\n宇宙洪荒。\n" * 500):
        for limit in range(1000, len(text), 997):
            assert safe_cut(text, limit) > limit - 1000


@every_encoding
@given(texts=st.lists(ODD_TEXTS.filter(bool), max_size=6), continued=st.booleans())
@example(texts=LINES, continued=False)
@settings(max_examples=150, deadline=None)
def test_documents_encoded_together_have_the_tokens_of_each(name, texts, continued):
    expected = []
    for number, text in enumerate(texts):
        begins = number > 0 or not continued
        expected += [encoding(name).eot_token] * begins + encoding(name).encode_ordinary(text)
    assert encode_documents(encoding(name), texts, continued=continued and bool(texts)).tolist() == expected


@pytest.mark.slow
@every_encoding
@pytest.mark.parametrize(
    "text",
    [" " * 1_000_000 + "a", "\n" * 1_000_000 + "a", " \t" * 500_000 + "a", "a" * 1_000_000, "字" * 1_000_000],
    ids=["spaces", "line ends", "spaces and tabs", "letters", "signs"],
)
def test_a_million_of_one_character_neither_fails_nor_loses_any(name, text):
    start = time.process_time()
    assert encoding(name).decode(encode_text(encoding(name), text).tolist()) == text
    assert time.process_time() - start < 20  # seconds; a quadratic way would take minutes


def test_a_literal_end_of_text_is_ordinary_text():
    for name in ("bpe", "byte"):
        ids = encode_documents(encoding(name), ["before", f"a{END_OF_TEXT}b", END_OF_TEXT, "after"]).tolist()
        assert ids.count(encoding(name).eot_token) == 4 and encoding(name).decode(ids).count(END_OF_TEXT) == 6


def test_lone_surrogates_become_replacement_characters():
    assert encoding("byte").decode(encode_text(encoding("byte"), "a\ud800b").tolist()) == "a\ufffdb"


def test_the_byte_tokenizer_has_the_bytes_as_ids():
    text = "héllo 字\0 \r\n"
    assert encode_text(encoding("byte"), text).tolist() == list(text.encode())
    assert (encoding("byte").n_vocab, encoding("byte").eot_token) == (257, 256)


@pytest.mark.parametrize("vocab_size", [257, 258, 300, 1000])
def test_bpe_has_the_vocabulary_size_asked_for_and_says_nothing_to_the_log(vocab_size, caplog):
    with caplog.at_level("INFO"):
        trained = make_tokenizer(TokenizerConfig(vocab_size=vocab_size), [TEXT])
    assert not caplog.records
    assert vocab_size < 1000 or len(TEXT.encode()) > 2 * len(trained.encode_ordinary(TEXT))
    assert trained.n_vocab == vocab_size and trained.eot_token == vocab_size - 1
    assert (token_bytes(trained) > 0).sum() == vocab_size - 1


@pytest.mark.parametrize(("texts", "largest"), [([], 257), (["a"], 257), (["abab abab"], 262)])
def test_bpe_of_a_text_with_few_pairs_is_smaller_and_works(texts, largest):
    trained = make_tokenizer(TokenizerConfig(vocab_size=2048), texts)
    assert 257 <= trained.n_vocab <= largest
    assert trained.decode(trained.encode_ordinary("any text, 字")) == "any text, 字"


@every_encoding
def test_token_bytes_are_the_lengths_of_what_ids_decode_to(name):
    lengths = token_bytes(encoding(name))
    assert lengths.shape == (encoding(name).n_vocab,)
    ids = encode_text(encoding(name), TEXT)
    assert lengths[ids].sum() == len(TEXT.encode()) and lengths[encoding(name).eot_token] == 0
    for unused in np.flatnonzero(lengths == 0):
        if not encoding(name).is_special_token(int(unused)):
            with pytest.raises(KeyError):
                encoding(name).decode_single_token_bytes(int(unused))


@every_encoding
def test_a_saved_tokenizer_is_the_same_and_needs_no_download(name, tmp_path, monkeypatch):
    original = encoding(name)
    save_tokenizer(original, tmp_path / "tokenizer.json")
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    restored = read_tokenizer(tmp_path / "tokenizer.json")
    assert (restored.name, restored.n_vocab) == (original.name, original.n_vocab)
    assert restored._special_tokens == original._special_tokens
    assert restored._mergeable_ranks == original._mergeable_ranks
    odd = TEXT + " \n\n 字 1234567 🙂 <|fim_prefix|>"
    assert restored.encode_ordinary(odd) == original.encode_ordinary(odd)


def changed(**parts: object):
    def change(text: str) -> str:
        return json.dumps({**json.loads(text), **parts})

    return change


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "[" * 100_000),
        *(lambda text: text.replace('"AA=="', '"A"'), lambda text: text.replace('"AA=="', '"AQ=="')),
        lambda text: text.replace('"AA=="', '"A?A=="'),
        *(lambda text: text.replace('"AA==",', ""), changed(format=99), changed(pat_str="("), changed(pat_str=None)),
        *(changed(name=3, special_tokens=[]), changed(mergeable_ranks=[]), changed(mergeable_ranks=5)),
        *(changed(special_tokens=end) for end in ({}, {END_OF_TEXT: 7}, {END_OF_TEXT: -1}, {END_OF_TEXT: 2**40})),
    ],
)
def test_a_damaged_tokenizer_file_is_refused_by_name(tmp_path, damage):
    file = tmp_path / "tokenizer.json"
    save_tokenizer(encoding("bpe"), file)
    file.write_text(damage(file.read_text()))
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        read_tokenizer(file)
    file.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_tokenizer(file)


@pytest.mark.parametrize("name", NAMES[2:])
def test_without_network_a_published_encoding_says_which_file_goes_where(name, tmp_path, monkeypatch):
    asked = []

    def no_network(url):
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"TIKTOKEN_CACHE_DIR.*tokenizer=bpe") as caught:
        make_tokenizer(TokenizerConfig(name=name), [])
    assert asked[0] in str(caught.value)
    if PUBLISHED_CACHE.is_dir():  # the names that the message gives are those that tiktoken looks for
        named = [file.name for file in PUBLISHED_CACHE.iterdir() if file.name in str(caught.value)]
        assert len(named) == len(module._FILES[name])
