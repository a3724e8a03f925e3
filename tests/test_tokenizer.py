"""data/tokenizer.py: every text becomes tokens and comes back, whatever it has."""

import gzip
import itertools
import json
import random
import re
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from common.errors import DataError
from data.config import TokenizerConfig
from data.tokenizer import (
    BPE_PATTERN,
    END_OF_TEXT,
    LONGEST,
    PUBLISHED,
    encode_text,
    gzip_bits,
    make_tokenizer,
    read_tokenizer,
    same_tokens,
    save_tokenizer,
    token_bytes,
    train_bpe,
)
from interop.tokenizer import LLAMA3_PATTERN

PUBLISHED_CACHE = Path(__file__).resolve().parent.parent / ".." / "shared" / "tiktoken_cache"
NAMES = ["bpe", "byte", *(("gpt2", "cl100k_base", "o200k_base") if PUBLISHED_CACHE.is_dir() else ())]
TEXT = "".join(path.read_text() for path in sorted(Path(__file__).resolve().parent.parent.glob("data/*.py")))

_ODD = " ,  ,\n,\r\n,\t,a,Z,é,字,ß,e\u0301,1,12,٣,²,_,.,'s,'LL,/,(,\u00a0,\u2003,\u0085,\x1c,\u200d,🙂,word, the,don't"
ODD_TEXTS = st.lists(st.sampled_from([*_ODD.split(","), ",", END_OF_TEXT]), max_size=25).map("".join)


@cache
def encoding(name: str) -> tiktoken.Encoding:
    if name == "bpe":
        return train_bpe([TEXT], 700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(PUBLISHED_CACHE))
        return make_tokenizer(TokenizerConfig(name=name), [])


every_encoding = pytest.mark.parametrize("name", NAMES)


WORDS = {
    "Hindi": "हिन्दी भाषा किताब लड़की पढ़ी ज्ञानकोश विद्यालय पेड़ों मछली सूरज",
    "Thai": "ภาษาไทย ประเทศ ผู้หญิง หนังสือ แม่น้ำ อาทิตย์ ร้องเพลง ขึ้น",
    "Arabic": "الكِتَابُ المَدْرَسَةُ ذَهَبَ البَيْتِ القِصَّةَ اللَّيْلِ",
    "accents apart": "cafe\u0301 e\u0301le\u0300ve nai\u0308ve gro\u0308\u00dfer sen\u0303or",
}


@pytest.mark.parametrize("language", WORDS)
def test_a_word_keeps_the_marks_of_its_letters(language):
    """Each word that is frequent enough becomes one token; Llama 3's pattern cuts at each vowel sign."""
    words = WORDS[language].split()
    text = " ".join(random.Random(0).choices(words, k=2000))
    ours = train_bpe([text], 2000)
    assert [ours.decode([token]) for token in encode_text(ours, text)[1:]] == [f" {word}" for word in text.split()[1:]]
    cut = train_bpe([text], 2000, LLAMA3_PATTERN)
    assert len(encode_text(cut, text)) > 2 * 2000


@given(text=st.text(st.sampled_from(" \n1a'sZ字é.,_\u0301\u200d\ufe0f🙂❤"), max_size=30))
def test_a_text_without_marks_after_letters_is_cut_as_by_llama_3(text):
    """Emoji too, whose selectors are marks: so the vocabularies of most texts are what they were."""
    regex = pytest.importorskip("regex")
    plain = regex.sub(r"(?<=\p{L})\p{M}+", "", text)
    assert regex.findall(BPE_PATTERN, plain) == regex.findall(LLAMA3_PATTERN, plain)


@pytest.mark.slow
@every_encoding
@given(text=ODD_TEXTS | st.text(max_size=60))
@settings(max_examples=80)
def test_text_comes_back_from_its_tokens(name, text):
    assert encoding(name).decode(encode_text(encoding(name), text).tolist()) == text


@pytest.mark.slow
@every_encoding
def test_a_text_of_several_pieces_has_the_tokens_of_the_whole(name):
    lines = TEXT * (LONGEST // len(TEXT) + 1)
    for first in range(5):  # so that the cut would fall within an indentation too
        text = "    " * 500 + "  x"[first % 3 :] + lines[first * 7 :]
        assert encode_text(encoding(name), text).tolist() == encoding(name).encode_ordinary(text)


@pytest.mark.slow
@every_encoding
@pytest.mark.parametrize("text", [" ", "\n", " \t", "a", "字"])
def test_a_million_of_one_character_neither_fails_nor_loses_any(name, text):
    text = text * 1_000_000 + "a"
    assert encoding(name).decode(encode_text(encoding(name), text).tolist()) == text


def test_what_is_special_or_no_text_is_encoded_as_text():
    byte = encoding("byte")
    assert encode_text(byte, END_OF_TEXT).tolist() == list(END_OF_TEXT.encode())
    assert encode_text(byte, "a\ud800b\0\udfff").tolist() == list("a\ufffdb\0\ufffd".encode())
    assert encode_text(byte, "").tolist() == [] and encode_text(byte, "").dtype == np.uint32
    assert (byte.n_vocab, byte.eot_token) == (257, 256)


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


@pytest.mark.slow
@every_encoding
def test_a_saved_tokenizer_is_the_same_and_needs_no_download(name, tmp_path, monkeypatch):
    original = encoding(name)
    save_tokenizer(original, tmp_path / "tokenizer.json")
    monkeypatch.setattr(tiktoken, "get_encoding", None)
    restored = read_tokenizer(tmp_path / "tokenizer.json")
    assert (restored.name, restored.n_vocab) == (original.name, original.n_vocab)
    assert restored._special_tokens == original._special_tokens
    assert restored._mergeable_ranks == original._mergeable_ranks
    odd = TEXT + " \n\n 字 1234567 🙂 <|fim_prefix|>"
    assert restored.encode_ordinary(odd) == original.encode_ordinary(odd)
    assert same_tokens(restored, original) and not same_tokens(original, train_bpe(["aa"], 258))


def changed(**parts: object):
    return lambda text: json.dumps({**json.loads(text), **parts})


DAMAGES = [
    *(lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "[" * 100_000),
    *(lambda text: text.replace('"AA=="', '"A"'), lambda text: text.replace('"AA=="', '"AQ=="')),
    *(lambda text: text.replace('"AA=="', '"A?A=="'), lambda text: text.replace('"AA==",', "")),
    *(changed(pat_str=pattern) for pattern in ("(", None, "", "x", "a|", r"\w+")),
    *(changed(mergeable_ranks=5), changed(mergeable_ranks=[]), changed(special_tokens=[])),
    *(changed(special_tokens=end) for end in ({}, {END_OF_TEXT: 7}, {END_OF_TEXT: -1}, {END_OF_TEXT: 2**40})),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tokenizer_file_that_is_damaged_or_loses_text_is_refused_by_name(tmp_path, damage):
    file = tmp_path / "tokenizer.json"
    save_tokenizer(encoding("bpe"), file)
    file.write_text(damage(file.read_text()))
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer"):
        read_tokenizer(file)
    file.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        read_tokenizer(file)


def test_without_network_a_published_encoding_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", mock.Mock(side_effect=OSError("no network for https")))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"tokenizer=gpt2 could.*https.*TIKTOKEN_CACHE_DIR.*tokenizer=bpe"):
        make_tokenizer(TokenizerConfig(name="gpt2"), [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_remedy_fetches_the_files_that_tiktoken_asks_for_under_the_names_that_it_reads(tmp_path, monkeypatch, name):
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", mock.Mock(side_effect=OSError("no network")))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError) as caught:
        make_tokenizer(TokenizerConfig(name=name), [])
    fetched = re.findall(r"-o FOLDER/(\w+) (https:\S+)", str(caught.value))
    constants = getattr(openai_public, name).__code__.co_consts
    assert [address for _, address in fetched] == [text for text in constants if str(text).startswith("https:")]
    for file, address in fetched:
        (tmp_path / file).write_text(address)
        assert tiktoken.load.read_file_cached(address) == address.encode()


def test_gzips_bits_are_those_of_the_documents_in_lines_for_each_byte_of_them():
    encoding = make_tokenizer(TokenizerConfig(name="byte"), ())
    text = random.Random(1).choices(range(32, 128), k=5000)
    marked = np.array([encoding.eot_token, *text[:2500], encoding.eot_token, *text[2500:]])
    lines = bytes(text[:2500]) + b"\n" + bytes(text[2500:])
    assert gzip_bits(encoding, marked) == 8 * len(gzip.compress(lines, 9)) / 5000 > 6
    # A model pays for the end of each name, so gzip does.
    names = random.Random(2).sample(["".join(name) for name in itertools.product("aeiou", "bcdfg", "aeiou")], k=100)
    ids = [id for name in names for id in (encoding.eot_token, *name.encode())]
    packed = gzip.compress("\n".join(names).encode(), 9)
    assert gzip_bits(encoding, np.array(ids)) == 8 * len(packed) / 300
    assert gzip_bits(encoding, np.array(ids[1:])) == 8 * len(packed) / 300, "a text that begins within a document"
    assert gzip_bits(encoding, marked[:1]) > 0, "a validation text of a mark alone"
    noise = np.random.default_rng(0).integers(0, 256, 1_500_000).astype(np.uint16)
    assert 3.9 < gzip_bits(encoding, np.concatenate((np.zeros_like(noise), noise))) < 4.1, "half of it is noise"


def test_bpe_is_the_remedy_for_a_tokenizer_that_is_not_downloaded_unless_the_ids_are_there(monkeypatch):
    """nanoGPT's ids are gpt2's: bpe would have none of them."""
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    for text, is_free in ((iter(["a text"]), True), ((), False)):
        with pytest.raises(DataError, match="tokenizer=gpt2 could not be downloaded") as caught:
            make_tokenizer(TokenizerConfig(name="gpt2"), text)
        assert ("tokenizer=bpe" in caught.value.remedy) == is_free
