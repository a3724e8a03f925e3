"""The rules of data/prepare.py: text on disk as tokens, once and whole."""

import hashlib
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
from conftest import first_of, some, split_patterns
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import DataError, SettingsError
from data import prepare
from data.config import DataConfig, TokenizerConfig
from data.prepare import LONGEST_SHARE, Split, TokenDataset
from data.texts import LEFT_OUT, Source
from data.tokenizer import END_OF_TEXT, LONGEST, encode_text, make_tokenizer, save_tokenizer, train_bpe

REPOSITORY = Path(__file__).resolve().parent.parent

NASTY = [
    *(f"a literal {END_OF_TEXT} inside", END_OF_TEXT, " " * 300_000 + "a", "\n", "tail without a line end"),
    *("é字🙂\r\n", "\ufffd\ufffd", "x", "\0 a NUL, late", "y" * 300_000, f"{'z ' * 200_000}{END_OF_TEXT}"),
]


def essays(count: int) -> list[str]:
    """Documents of about 600 characters that have no line in common."""
    return ["".join(f"line {line} of essay {number}, by hand\n" for line in range(20)) for number in range(count)]


def write_jsonl(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def prepared(tmp_path: Path, path: Path, *, name="byte", vocab_size=300, encoding=None, log=None, **settings):
    """Prepare the text or JSON lines of `path`, cached in tmp_path; `log` gets the log's lines."""
    source = "jsonl" if path.suffix == ".jsonl" else "text"
    data = DataConfig(source=source, path=str(path), cache_dir=str(tmp_path / "cache"), **settings)
    config = TokenizerConfig(name=name, vocab_size=vocab_size)
    return prepare.prepare(data, config, encoding=encoding, log=([] if log is None else log).append)


def documents(data: TokenDataset, tokens: np.ndarray) -> list[str]:
    """The documents of a split, decoded."""
    doc_starts = np.flatnonzero(tokens == data.tokenizer.eot_token)
    assert doc_starts[0] == 0, "a split begins with <|endoftext|>"
    return [data.tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, doc_starts)[1:]]


def cache_names(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "cache" / "tokens").iterdir() if file.name != ".lock")


@pytest.fixture
def text_file(tmp_path) -> Path:
    file = tmp_path / "a.txt"
    file.write_text("a line of some words\n" * 300)
    return file


# What ends up in the files


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", first_of("bpe", "byte"))
def test_nasty_documents_become_the_tokens_of_each_after_its_mark_in_order(tmp_path, tokenizer):
    texts = [*NASTY, *essays(2000)]
    path = write_jsonl(tmp_path / "a.jsonl", [*texts[:5], "", *texts[5:]])
    data = prepared(tmp_path, path, name=tokenizer, val_fraction=0.1, separator=None)
    validation = set(documents(data, data.val))
    assert 300 < len(validation) < 500 and not any(len(text) > 10_000 for text in validation)
    mark = [data.tokenizer.eot_token]
    for tokens, kept in ((data.val, validation), (data.train, set(texts) - validation)):
        expected = [[*mark, *encode_text(data.tokenizer, text)] for text in texts if text in kept]
        assert tokens.tolist() == [*itertools.chain(*expected)]


def large_encoding(size: int) -> tiktoken.Encoding:
    """An encoding of `size` ids, in place of one to download."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {rank.to_bytes(4): rank for rank in range(256, size - 1)}
    special = {END_OF_TEXT: size - 1}
    pattern = split_patterns()["gpt2"]
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@pytest.mark.parametrize(("tokenizer", "dtype"), [("bpe", "<u2"), ("large", "<u4")])
def test_a_folder_of_the_cache_is_nanogpts_train_bin_and_val_bin(tmp_path, text_file, tokenizer, dtype):
    encoding = large_encoding(70_000) if tokenizer == "large" else None
    data = prepared(tmp_path, text_file, name="bpe", encoding=encoding)
    folder = tmp_path / "cache" / "tokens" / data.fingerprint
    assert {file.name for file in folder.iterdir()} == {"train.bin", "val.bin", "tokenizer.json", "meta.json"}
    for name in ("train", "val"):
        raw = np.fromfile(folder / f"{name}.bin", dtype)
        assert np.array_equal(raw, getattr(data, name)) and data.tokenizer.eot_token == raw[0]
    again = prepare.prepare(DataConfig(source="nanogpt", path=str(folder)), TokenizerConfig(name="gpt2"))
    assert np.array_equal(again.train, data.train) and again.tokenizer.n_vocab == data.tokenizer.n_vocab
    assert (prepare.token_dtype(65_536), prepare.token_dtype(65_537)) == (np.dtype("<u2"), np.dtype("<u4"))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_the_names_of_a_models_special_tokens_in_its_next_text_are_told_to_be_letters(tmp_path, suffix):
    turns = [f"<|user|>What is {number}?<|bot|>" + f"It is {number}." * (number % 2) for number in range(40)]
    turns[7] = "<|bot|> alone"
    file = tmp_path / f"chat{suffix}"
    if suffix == ".txt":
        file.write_text(END_OF_TEXT.join(turns))
    else:
        write_jsonl(file, turns)
    held = tmp_path / f"held{suffix}"
    held.write_text(json.dumps({"text": "<|bot|>"}) if suffix == ".jsonl" else "<|bot|>")
    special = {END_OF_TEXT: 256, "<|user|>": 257, "<|bot|>": 258, "<|tool|>": 259}
    ranks = {bytes([byte]): byte for byte in range(256)}
    named = tiktoken.Encoding("named", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special)
    data = prepared(tmp_path, file, encoding=named, log=(log := []), val_path=str(held))
    remedy = "docs/library.md writes the id of this special token in their place"
    assert log[1:] == [
        f"Documents with <|user|>, whose letters the model learns ({remedy}): 39, first in {file}.",
        f"Documents with <|bot|>, whose letters the model learns ({remedy}): 40, first in {file}.",
        f"Documents with <|bot|>, whose letters are scored ({remedy}): 1, first in {held}.",
    ]
    assert len(data.train) == sum(len(turn) + 1 for turn in turns) and data.train.max() == 256
    prepared(tmp_path, file, log=(log := []))
    assert len(log) == 1, "a tokenizer without the names says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("head", [100_000, 10**9])
def test_what_was_replaced_or_left_out_is_said_in_a_sentence_each(tmp_path, monkeypatch, head):
    monkeypatch.setattr(prepare, "HEAD", head)  # the last file is beyond the first
    (folder := tmp_path / "texts").mkdir()
    (folder / "0.png").write_bytes(b"\0\1")
    for number, essay in enumerate(essays(300)):
        (folder / f"{number:04}.txt").write_bytes(essay.encode() + b"\xff" * (number in (200, 299)))
    read = prepared(tmp_path, folder, log=(log := [])).description
    assert "301 files" in log[0] and read.startswith(f"{folder}: 300 files, 300 documents, ")
    assert prepared(tmp_path, folder).description == read, "from the cache"
    places = [f"{folder / f'{number:04}.txt'} line 21, byte offset {len(essays(300)[number])}" for number in (200, 299)]
    assert log[1:] == [
        f"{LEFT_OUT}: 1, first in {folder / '0.png'} (not text but binary).",
        f"Bytes that are not UTF-8 and became U+FFFD: 2, first in {', '.join(places)}.",
    ]
    assert read.endswith("; 1 file left out, 2 bytes replaced by U+FFFD")


def test_bpe_never_learns_from_held_out_text(tmp_path, monkeypatch):
    texts, learnt = [f"document {number} " * 400 for number in range(50)], []
    monkeypatch.setattr(prepare, "make_tokenizer", lambda _, text: learnt.extend(text) or train_bpe(learnt, 300))
    data = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), name="bpe", val_fraction=0.1)
    assert "".join(learnt) == "".join(documents(data, data.train)) and len(documents(data, data.val)) == 50


LINES_WITHOUT_SPACES = {
    "DNA": "".join("ACGT"[n * n % 7 % 4] for n in range(400_000)),
    "Han": "".join(chr(0x4E00 + n * n % 997) for n in range(300_000)),
    "equal signs": "=" * 1_000_000,
    "digits": "".join(str(n * n) for n in range(100_000)),
    "one letter a line": "x\n" * 300_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(LINES_WITHOUT_SPACES, 3))
def test_a_text_without_a_space_becomes_tokens_and_comes_back(tmp_path, name):
    text = LINES_WITHOUT_SPACES[name]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = prepared(tmp_path, tmp_path / "a.txt", name="bpe")
    assert "".join(documents(data, data.train) + documents(data, data.val)) == text


# The split


class Texts:
    """A source of these texts, in pieces of `longest` characters."""

    def __init__(self, texts: list[str], longest: int = LONGEST) -> None:
        self.texts, self.longest, self.read = texts, longest, 0

    def documents(self):
        for text in self.texts:
            self.read += 1
            yield (text[start : start + self.longest] for start in range(0, len(text), self.longest))


def split_texts(texts: list[str], fraction: float, longest: int = LONGEST) -> dict[str, list[str]]:
    """The documents of each split."""
    found: dict[str, list[str]] = {"train": [], "val": []}
    chosen = Split(Texts(texts, longest), fraction)
    for name, begins, text in chosen.pieces(chosen.documents()):
        assert text
        if begins:
            found[name].append("")
        found[name][-1] += text
    return found


# Copies, each the beginning of the next.
PREFIXES = ["a", "aa", "aa", "aa", "aa", "a ", "aaaa", "aaaa", "aaa ", "aaa ", "aaaaa", "aaaa\n", "aaa a"]


@pytest.mark.slow
@example(texts=[*PREFIXES, "a" * 6, "a" * 7, "a" * 8, "a"], fraction=0.5, longest=8, head=1)
@given(
    texts=st.lists(st.text("ab \n", max_size=60), max_size=30),
    fraction=st.sampled_from([0.02, 0.1, 0.3, 0.5]),
    longest=st.integers(2, 70),
    head=st.integers(1, 2000),
)
@settings(max_examples=60)
def test_every_character_is_in_one_split_and_only_there(texts, fraction, longest, head):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "HEAD", head)
        found = split_texts(texts, fraction, longest)
    train, val = iter(found["train"]), iter(found["val"])
    heads, tails = next(train, None), next(val, None)
    for text in filter(None, texts):
        if heads == text:
            heads = next(train, None)
        elif tails == text:
            tails = next(val, None)
        else:
            assert heads + tails == text
            heads, tails = next(train, None), next(val, None)
    assert (heads, tails) == (None, None)


def test_short_documents_are_held_out_whole_where_their_ends_would_be_a_few_words():
    """A document of these is more than 1/30 of the validation text, 10% of the text."""
    tales = [f"{number} tells of a girl with a kite. " * 15 for number in range(50)]  # 500 characters
    found = split_texts(tales, 0.1)
    assert set(found["val"]) <= set(tales) and set(found["train"]) == set(tales) - set(found["val"])
    assert 5 <= len(found["val"]) <= 6  # the last one may reach beyond the share
    for texts in (tales[:30], [tale * 8 for tale in tales]):  # too few, or longer than 3,000 characters
        assert [len(text) for text in split_texts(texts, 0.1)["val"]] == [int(len(text) * 0.1) for text in texts]


def test_many_documents_are_held_out_whole_whatever_their_order_and_long_and_frequent_ones_never():
    long = ["".join(f"the {number} lines of {text}" for number in range(50)) for text in essays(5)]
    often = "no answer\n" * 20
    texts = [*essays(1000), *essays(100), *long, *[often] * 100]
    found = split_texts(texts, 0.1)
    size, val = sum(map(len, texts)), sum(map(len, found["val"]))
    assert len(found["val"]) >= 60 and max(map(len, found["val"])) <= LONGEST_SHARE * val
    assert val == pytest.approx(0.1 * size, rel=0.02) and len(found["train"]) + len(found["val"]) == len(texts)
    assert not set(found["val"]) & {often, *long, *found["train"]}, "copies are on one side"
    again = split_texts(texts[::-1], 0.1)
    assert set(again["val"]) == set(found["val"]) and again["train"] == found["train"][::-1]
    assert len(split_texts([*texts, "one more"], 0.1)["val"]) == pytest.approx(len(found["val"]), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("copies", [0, 1000, 20_000])
def test_beyond_the_head_the_rule_stays_and_copies_are_counted_there(copies, monkeypatch):
    monkeypatch.setattr(prepare, "HEAD", 400_000)
    often = [f"answer {number}\n" * 20 for number in range(20)]
    long = ["".join(f"the {number} lines of {text}" for number in range(150)) for text in essays(40)]
    texts = [*essays(3000), *essays(3000), *long, *often * (copies // len(often))]
    found = split_texts(texts, 0.1)
    limit = LONGEST_SHARE * 0.1 * sum(map(len, texts))
    sizes = Counter[str]()
    for text in found["val"]:
        sizes[text] += len(text)
    assert sum(sizes.values()) == pytest.approx(0.1 * sum(map(len, texts)), rel=0.03)
    assert set(found["val"]) - set(essays(700)), "documents beyond the head too"
    assert not set(found["val"]) & set(found["train"]) and max(sizes.values()) <= limit
    assert bool(set(often) & set(found["val"])) == (copies == 1000), "those few copies are no share of the text"


def test_where_short_documents_are_too_little_all_lose_their_tails():
    lines, letters, short = "a line\n" * 1000, "x" * 5005, [f"no. {number}" for number in range(250)]
    found = split_texts([lines, letters, *short], 0.1, longest=400)
    assert found == {"train": [lines[:6300], "x" * 4505, *short], "val": [lines[6300:], "x" * 500]}


@pytest.mark.parametrize("head", [10**9, 200_000])
def test_a_sample_is_spread_evenly_over_the_text_that_is_trained_on(head, monkeypatch):
    monkeypatch.setattr(prepare, "HEAD", head)
    chosen = Split(Texts(essays(600), longest=300), 0.1)
    train = "".join(text for name, _, text in chosen.pieces(chosen.head) if name == "train")
    assert "".join(chosen.sample(10**9)) == train
    sample = [train.index(text) for text in chosen.sample(chosen.size // 10)]
    assert 0.08 * len(train) < 300 * len(sample) < 0.12 * len(train)
    assert max(np.diff([*sample, len(train)])) < 5_000 and max(np.diff([*sample])) < 5_000


def test_a_small_text_is_read_once_and_a_large_one_again(monkeypatch):
    for head, again in ((10**6, 0), (300, 3)):
        monkeypatch.setattr(prepare, "HEAD", head)
        source = Texts(["a line\n" * 100] * 3)
        chosen, before = Split(source, 0.1), source.read
        assert len(list(chosen.pieces(chosen.documents()))) == 6 and source.read == before + again


# A validation text of one's own


VARIANTS = {
    "copy with empty lines": lambda text: text.replace("\n", "\n\n") + "\n",
    "other line width": lambda text: "\n".join(text.split()),
    "tabs and Windows' line ends": lambda text: text.replace(" ", "\t").replace("\n", "\r\n"),
    "case": str.upper,
}


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", some(["byte", "bpe"], 2))
@pytest.mark.parametrize("name", VARIANTS)
def test_held_out_text_that_the_training_text_has_in_another_layout_is_told(tmp_path, name, tokenizer):
    texts = essays(150)
    file = write_jsonl(tmp_path / "a.jsonl", texts + [VARIANTS[name](text) for text in texts])
    data = prepared(tmp_path, file, name=tokenizer, val_fraction=0.1)
    # The share by hand: the held-out documents that are in the training text but for white space and case.
    known = {" ".join(text.lower().split()) for text in documents(data, data.train)}
    held_out = [" ".join(text.lower().split()) for text in documents(data, data.val)]
    words = [len(text.split()) for text in held_out]
    share = sum(count for text, count in zip(held_out, words, strict=True) if text in known) / sum(words)
    told = re.search(r"; (\d+)% of what is held out also in the training text$", data.description)
    assert told and share > 0.5 and abs(int(told[1]) / 100 - share) < 0.02
    # Beside a validation text of one's own likewise.
    write_jsonl(tmp_path / "b.jsonl", texts)
    (tmp_path / "c.txt").write_text(END_OF_TEXT.join(map(VARIANTS[name], texts[:20])))
    data = prepared(tmp_path, tmp_path / "b.jsonl", name=tokenizer, val_path=str(tmp_path / "c.txt"))
    assert data.description.endswith(", 100.0% of it also in the training text")


def test_of_held_out_text_that_is_new_nothing_is_told(tmp_path):
    assert "held out" not in prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", essays(300))).description


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [None, 0.0, 0.2])
def test_a_validation_text_is_whole_beside_or_in_place_of_the_share_held_out(tmp_path, fraction):
    train = write_jsonl(tmp_path / "train.jsonl", essays(300))
    own = [text[::-1].strip() for text in essays(20)] + essays(5)  # the last five are in the training text too
    (tmp_path / "val.txt").write_text(END_OF_TEXT.join(own))
    data = prepared(tmp_path, train, val_path=str(tmp_path / "val.txt"), val_fraction=fraction)
    held_out = documents(data, data.val)
    assert held_out[-25:] == own and sorted(documents(data, data.train) + held_out[:-25]) == sorted(essays(300))
    assert (len(held_out) == 25) == (not fraction)
    described = f"{train}: 1 JSON lines file, 300 documents, "
    assert data.description.startswith(described)
    assert f"; validation {tmp_path}/val.txt: 1 file, 25 documents, " in data.description
    share = float(re.search(r", ([\d.]+)% of it also in the training text$", data.description)[1])
    trained = {*documents(data, data.train)}
    expected = sum(len(text) for text in own if text in trained) / sum(map(len, own))
    assert share == pytest.approx(100 * expected, abs=0.5) and share > 1  # a few passages reach into a neighbour


@pytest.mark.slow
def test_the_tokens_depend_on_the_validation_text_and_on_nothing_new_without_one(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", essays(100))
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name} text to validate with\n" * 50)
    plain = prepared(tmp_path, train)
    key = [6, Source(DataConfig(source="jsonl", path=str(train))).fingerprint, 0.1, {"name": "byte", "vocab_size": 300}]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    assert plain.fingerprint == f"jsonl-{digest}", "the name that versions without val_path gave it"
    seen = [prepared(tmp_path, train, val_path=str(tmp_path / name)).fingerprint for name in ("a", "b", "a")]
    assert len({plain.fingerprint, *seen}) == 3 and seen[0] == seen[2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "data.val_path=.*val.txt names no regular file"),
        ("", r"data\.val_path=.*val\.txt has no text"),
        ("чтение, письмо\n", r"data\.val_path=.*val\.txt is not text in UTF-8, but in "),
    ],
)
def test_a_validation_text_that_cannot_be_read_is_refused_by_its_own_name(tmp_path, text_file, content, message):
    if content is not None:
        (tmp_path / "val.txt").write_bytes((content * 50).encode("cp1251"))
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, text_file, val_path=str(tmp_path / "val.txt"))
    assert cache_names(tmp_path) == [] if (tmp_path / "cache/tokens").exists() else True


# Separators


@pytest.mark.slow
def test_a_separator_is_typed_with_escapes_and_one_that_is_nowhere_is_refused_with_the_one_that_is(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("\n\n\n".join(essays(300)))
    data = prepared(tmp_path, file, separator=r"\n\n\n")
    assert (
        ", 300 documents, " in data.description
        and data.fingerprint == prepared(tmp_path, file, separator="\n\n\n").fingerprint
    )
    cases = [
        (lambda text: text.replace("\n", "\r\n"), r"\n\n\n", r"'data.separator=\r\n\r\n\r\n' occurs 299 times."),
        (lambda text: text, r"\r\n\r\n\r\n", r"'data.separator=\n\n\n' occurs 299 times."),
        (lambda text: text, r"'\n\n\n'", r"'data.separator=\n\n\n' occurs 299 times."),
        (
            lambda text: text.replace("\n\n\n", r"\newpage"),
            r"\newpage",
            r"'data.separator=\\newpage' occurs 299 times.",
        ),
        (lambda text: text.replace("\n\n\n", "---"), r"\n---\n", "data.separator=--- occurs 299 times."),
        (lambda text: text, "***", "correct it; with data.separator=null each file or record is a document."),
    ]
    for change, separator, remedy in cases:
        file.write_bytes(change("\n\n\n".join(essays(300))).encode())
        with pytest.raises(DataError, match="occurs nowhere in the text .*1 file, 1 document") as caught:
            prepared(tmp_path, file, separator=separator)
        assert str(caught.value).endswith(remedy)
        if "occurs" in remedy:  # the remedy works as it is typed
            (typed,) = shlex.split(remedy.partition(" occurs")[0])
            assert "300 documents" in prepared(tmp_path, file, separator=typed.partition("=")[2]).description


# The cache


def test_a_second_run_reads_no_text_and_trains_no_tokenizer(tmp_path, text_file, monkeypatch):
    first = prepared(tmp_path, text_file, name="bpe")
    monkeypatch.setattr(prepare, "Split", None)
    monkeypatch.setattr(prepare, "make_tokenizer", None)
    second = prepared(tmp_path, text_file, name="bpe", log=(log := []))
    assert log == [] and second.fingerprint == first.fingerprint
    assert second.train.tolist() == first.train.tolist() and isinstance(second.train.base, np.memmap)


@pytest.mark.slow
def test_changed_text_tokenizer_or_split_is_prepared_anew(tmp_path, text_file):
    changes = [{}, {"name": "bpe"}, {"name": "bpe", "vocab_size": 301}, {"val_fraction": 0.2}]
    changes += [{"encoding": train_bpe([text_file.read_text()], size)} for size in (258, 259)]
    seen = {prepared(tmp_path, text_file, **change).fingerprint for change in changes}
    text_file.write_text("other text\n" * 600)
    other = prepared(tmp_path, text_file)
    assert len(seen | {other.fingerprint}) == 7 and documents(other, other.train)[0].startswith("other text")


@pytest.mark.parametrize(
    ("name", "content"),
    some(
        [
            *(("train.bin", None), ("val.bin", b"00"), ("tokenizer.json", b"")),
            *(("meta.json", content) for content in (None, b"", b"[]", b'{"sizes": {}}')),
            *(("meta.json", b'{"text": "a", "sizes": ' + sizes + b"}") for sizes in (b"7", b'{"train.bin": "7"}')),
        ],
        2,
    ),
)
def test_a_file_of_another_size_or_an_unreadable_meta_prepares_again(tmp_path, text_file, name, content):
    whole = prepared(tmp_path, text_file)
    file, expected = tmp_path / "cache" / "tokens" / whole.fingerprint / name, whole.train.tolist()
    file.unlink() if content is None else file.write_bytes(content)
    log: list[str] = []
    assert prepared(tmp_path, text_file, log=log).train.tolist() == expected and log[0].startswith("Preparing")
    assert cache_names(tmp_path) == [whole.fingerprint] and prepared(tmp_path, text_file, log=log) and len(log) == 1


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(prepare, "write_tokens", lambda *_: text_file.write_text("the new text\n" * 600))
    with pytest.raises(DataError, match=r"data\.path=.*a\.txt changes while it is read .*a\.txt.*: wait"):
        prepared(tmp_path, text_file)
    assert cache_names(tmp_path) == []


def test_ids_of_the_cache_beyond_the_vocabulary_are_refused_with_their_folder(tmp_path, text_file):
    folder = tmp_path / "cache" / "tokens" / prepared(tmp_path, text_file).fingerprint
    tokens = np.fromfile(folder / "train.bin", "<u2")
    tokens[-1] = 257
    tokens.tofile(folder / "train.bin")
    with pytest.raises(DataError, match=r"has the id 257, and tokenizer=byte ids below 257\): delete"):
        prepared(tmp_path, text_file)


def test_one_that_does_not_prepare_waits_for_the_tokens_of_another(tmp_path, text_file, monkeypatch):
    data = DataConfig(source="text", path=str(text_file), cache_dir=str(tmp_path / "cache"))
    waited = []
    waiting = mock.Mock(wraps=time, sleep=lambda _: waited.append(prepared(tmp_path, text_file)))
    monkeypatch.setattr(prepare, "time", waiting)  # not time itself, in which threads of other tests sleep
    log: list[str] = []
    found = prepare.prepare(data, TokenizerConfig(name="byte", vocab_size=300), log=log.append, prepares=False)
    assert log == [] and [found.fingerprint] == [one.fingerprint for one in waited]


@pytest.mark.slow
def test_stories_of_one_file_are_documents_held_out_whole_and_null_makes_it_one(tmp_path):
    (tmp_path / "a.txt").write_text(f"{END_OF_TEXT}\n".join(essays(1000)))
    data = prepared(tmp_path, tmp_path / "a.txt")
    found = documents(data, data.train), documents(data, data.val)
    assert sorted(found[0] + found[1]) == sorted(essays(1000)) and 80 < len(found[1]) < 130
    whole = prepared(tmp_path, tmp_path / "a.txt", separator=None)
    assert (
        whole.fingerprint != data.fingerprint
        and len(documents(whole, whole.train)) == len(documents(whole, whole.val)) == 1
    )


def start(tmp_path: Path, file: Path, *, before: str = "") -> subprocess.Popen:
    """A process that prepares `file`, runs code before encoding, and prints its log."""
    code = f"""
import time
from unittest import mock
from data import prepare
from data.config import DataConfig, TokenizerConfig
original = prepare.write_tokens
def instead(*args):
    {before}
    original(*args)
data = DataConfig(path={str(file)!r}, cache_dir={str(tmp_path / "cache")!r})
with mock.patch("data.prepare.write_tokens", instead):
    ready = prepare.prepare(data, TokenizerConfig(name='byte'), log=lambda line: print(line, flush=True))
print('TOKENS', len(ready.train), flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_two_runs_that_start_at_once_prepare_once_also_when_the_first_is_killed(tmp_path, text_file):
    first = start(tmp_path, text_file, before="print('HERE', flush=True); time.sleep(60)")
    while first.stdout.readline() != "HERE\n":
        pass
    second, third = (start(tmp_path, text_file) for _ in range(2))
    assert "waiting" in second.stdout.readline() and "waiting" in third.stdout.readline()
    first.send_signal(signal.SIGKILL)
    first.communicate()  # its folder is left half made until another has the lock
    outputs = [process.communicate(timeout=60)[0] for process in (second, third)]
    assert sum("Preparing" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1 and "TOKENS" in outputs[0]
    assert not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("binary.bin", b"\0\1", "binary.bin is not text"),
        ("empty.txt", b"", r"^data=text has no text \(.*\): add text\.$"),
        (
            "short.txt",
            b"a",
            r"too little text to hold some out.*: add text, raise data\.val_fraction=0\.1, or give data\.val_path",
        ),
        ("a.jsonl", b'{"text": "fine"}\n' * 3000 + b"broken\n", "line 3001 is not JSON"),
        ("full.txt", b"text " * 100, r"data\.cache_dir=.* cannot be used \(No space left on device\)"),
    ],
)
def test_text_that_cannot_be_prepared_is_refused_and_leaves_nothing(tmp_path, monkeypatch, name, content, message):
    if name == "full.txt":
        monkeypatch.setattr(prepare, "save_tokenizer", mock.Mock(side_effect=OSError(28, "No space left on device")))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        prepared(tmp_path, tmp_path / name, name="bpe")
    assert cache_names(tmp_path) == []


@pytest.mark.parametrize("nothing", [None, "", " \n"])
def test_records_whose_field_is_empty_are_refused_with_the_field_that_has_text(tmp_path, nothing):
    records = [
        {"text": nothing, "note": "", "a.b": {"c": "No."}, "in": {"the body": f"Story {number}.\n"}}
        for number in range(99)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match=r"type 'data\.text_field=in\.the body'\.$"):
        prepared(tmp_path, path)
    (tmp_path / "val.txt").write_text("A text without fields.")
    with pytest.raises(DataError, match=r": add text\.$"):
        prepared(tmp_path, path, val_path=str(tmp_path / "val.txt"))
    data = prepared(tmp_path, path, text_field="in.the body")
    found = documents(data, data.train[:]) + documents(data, data.val[:])
    assert sorted(found) == sorted(record["in"]["the body"] for record in records)


def test_only_a_share_below_the_largest_is_to_be_raised(tmp_path):
    (tmp_path / "long.txt").write_text("text " * 60)
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(DataError, match=r"add text, raise data\.val_fraction=0\.001, or give data\.val_path"):
        prepared(tmp_path, tmp_path / "long.txt", val_fraction=0.001)
    assert len(prepared(tmp_path, tmp_path / "long.txt", val_fraction=0.5).val) == 151  # bytes and <|endoftext|>
    with pytest.raises(SettingsError, match="at most 0.5"):
        DataConfig(val_fraction=0.51)
    with pytest.raises(DataError, match=r"\): add text, or give data\.val_path\.$"):
        prepared(tmp_path, tmp_path / "short.txt", val_fraction=0.5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("source", "most"), first_of(("text", 71_000_000), ("jsonl", 77_000_000)))
def test_a_large_text_is_prepared_in_bounded_memory(tmp_path, source, most):
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the memory of a process from Linux")
    file, lines = tmp_path / "large", "".join(f"{n * n} words in a line of text, and more\n" for n in range(5_000))
    block = lines
    if source == "jsonl":
        parts = (lines[start : start + 1000] for start in range(0, len(lines), 1000))
        block = "".join(json.dumps({"text": part}) + "\n" for part in parts)
    with file.open("w") as out:
        for _ in range(30_000_000 // len(block) + 1):
            out.write(block)
    # resource.getrusage() would begin with the peak of this process.
    code = f"""
from pathlib import Path
import torch
from data.config import DataConfig, TokenizerConfig
from data.prepare import make_folder
from data.texts import LEFT_OUT, Source
from training.device import peak_memory, reset_peak_memory
source, cpu = Source(DataConfig(source={source!r}, path={str(file)!r})), torch.device("cpu")
reset_peak_memory(cpu)
before = peak_memory(cpu)
make_folder(Path({str(tmp_path / "made")!r}), source, TokenizerConfig(), print)
print(peak_memory(cpu) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < most  # the text alone would add 30 MB to some 56, and to some 62


# What training and evaluation read of it


def test_a_split_shorter_than_a_window_is_refused_with_the_remedy(tmp_path, text_file):
    data = prepared(tmp_path, text_file)
    assert len(data.val) == 631
    replace(data, block_size=630).check()
    message = (
        r"validation split has 631 tokens, too few for model\.block_size=631: set model\.block_size=630 or less, or "
    )
    with pytest.raises(DataError, match=message):
        replace(data, block_size=631).check()
    with pytest.raises(DataError, match="training split has 5,671 tokens"):
        replace(data, block_size=10_000).check()


def test_the_remedy_for_a_short_split_names_what_makes_it_longer_than_a_window(tmp_path):
    """The bytes are counted by a run with tokenizer=byte."""
    path = write_jsonl(tmp_path / "a.jsonl", [f"{number}{' again' * 9}" for number in range(10)])

    def split(name: str) -> TokenDataset:
        config = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"))
        return prepare.prepare(config, TokenizerConfig(name=name, vocab_size=300))

    def remedy(name: str, block_size: int) -> str:
        with pytest.raises(DataError) as caught:
            replace(split(name), block_size=block_size).check()
        return caught.value.remedy.partition("choose ")[2]

    in_bytes = [len(split("byte").train), len(split("byte").val)]
    assert remedy("bpe", min(in_bytes) - 1) == "more text or tokenizer=byte or another data.val_fraction"
    assert remedy("bpe", min(in_bytes)) == "more text or another data.val_fraction"
    assert remedy("byte", sum(in_bytes) // 2 - 1) == "more text or another data.val_fraction"
    assert remedy("byte", (sum(in_bytes) + 1) // 2) == remedy("bpe", 10_000) == "more text"


@pytest.mark.slow
def test_the_remedy_for_a_short_split_names_settings_that_the_text_has_and_that_make_it_longer(tmp_path, text_file):
    def remedy(**settings) -> str:
        """The remedy for a window that is longer than the text."""
        name, encoding = settings.pop("name", "byte"), settings.pop("encoding", None)
        config = DataConfig(**dict(path=str(text_file), cache_dir=str(tmp_path / "cache")) | settings)
        data = prepare.prepare(config, TokenizerConfig(name=name, vocab_size=300), encoding=encoding)
        with pytest.raises(DataError) as caught:
            replace(data, block_size=min(len(data.train), len(data.val))).check()
        longest = int(re.match(r"set model\.block_size=(\d+) or less, or choose ", caught.value.remedy)[1])
        replace(data, block_size=longest).check()
        with pytest.raises(DataError):
            replace(data, block_size=longest + 1).check()
        return caught.value.remedy.partition("choose ")[2]

    byte = make_tokenizer(TokenizerConfig(name="byte"), ())
    assert remedy(name="bpe") == "more text or tokenizer=byte or another data.val_fraction"
    assert remedy() == remedy(name="bpe", encoding=byte) == "more text or another data.val_fraction"
    held_out = write_jsonl(tmp_path / "held.jsonl", ["a validation text"])
    assert remedy(val_path=str(held_out)) == "a longer data.val_path"
    long = write_jsonl(tmp_path / "long.jsonl", ["a validation text"] * 999)
    assert remedy(val_path=str(long)) == "more text"
    for split in ("train", "val"):
        np.arange(100).astype("<u2").tofile(tmp_path / f"{split}.bin")
    assert remedy(source="nanogpt", path=str(tmp_path)) == "more text"


@pytest.mark.parametrize("mask", [False, True])
def test_batches_are_windows_of_the_training_text_and_evaluations_cover_the_rest(tmp_path, mask):
    path = write_jsonl(tmp_path / "a.jsonl", essays(300))
    data = prepared(tmp_path, path, document_mask=mask)
    data = replace(data, block_size=64, batch_size=4)
    batch = data.train_batch(7, 0, 4)
    assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1]) and batch.inputs.shape == (4, 64)
    places = [bytes(row.astype("<u2")) in data.train.tobytes() for row in batch.inputs]
    assert all(places) and (batch.doc_starts is not None) == mask
    validation = list(data.validation_batches(4))
    assert sum(batch.targets.size for batch in validation) == len(data.val) - 1
    if mask:
        first = validation[0]
        assert np.array_equal(first.doc_starts[0][first.inputs[0] == 256], np.flatnonzero(first.inputs[0] == 256))
    for most in (1, 100, 128, len(data.val) - 2, len(data.val) - 1, 10**9):
        scored = sum(batch.targets.size for batch in data.validation_batches(4, most))
        assert data.validation_tokens(most) == scored
    assert (data.targets_per_sequence, data.vocab_size, data.token_bytes().sum()) == (64, 257, 256)


# nanoGPT


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """train.bin and val.bin of made-up ids of GPT-2's encoding."""
    fake = large_encoding(50_257)
    monkeypatch.setattr(prepare, "make_tokenizer", lambda config, texts: fake if config.name == "gpt2" else None)
    for name, count in (("train", 1000), ("val", 100)):
        (np.arange(count) * 50 % 50_257).astype("<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def opened(folder: Path, name: str = "gpt2", **settings) -> TokenDataset:
    return prepare.prepare(DataConfig(source="nanogpt", path=str(folder)), TokenizerConfig(name=name), **settings)


def test_nanogpts_tokens_are_mapped_where_they_lie(folder):
    before, data = sorted(folder.iterdir()), opened(folder)
    assert (len(data.train), len(data.val)) == (1000, 100) and data.train[2:4].tolist() == [100, 150]
    assert data.vocab_size == 50_257
    assert replace(data, block_size=8, batch_size=4).train_batch(0, 0, 4).inputs.shape == (4, 8)
    assert sorted(folder.iterdir()) == before and opened(folder).fingerprint == data.fingerprint
    np.arange(200).astype("<u2").tofile(folder / "val.bin")
    assert opened(folder).fingerprint != data.fingerprint


@pytest.mark.parametrize("stored", ["<u2", "<u4", "<i4", "<i8", "<u8"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_that_were_stored_wider_than_they_need_are_read_as_they_were_written(folder, stored, split):
    ids = np.random.default_rng(1).integers(0, 50_257, 1000)
    ids.astype(stored).tofile(folder / f"{split}.bin")
    data = opened(folder)
    assert np.array_equal(getattr(data, split), ids)
    assert replace(data, block_size=8, batch_size=4).train_batch(0, 0, 4).inputs.dtype == np.int64


@pytest.mark.parametrize(("magic", "stored"), [(20240520, "<u2"), (20240801, "<u4")])
def test_ids_after_the_header_of_llm_c_are_refused_with_the_commands_that_leave_it_out(folder, magic, stored):
    ids = np.arange(40_000, 41_000).astype(stored)
    for split in ("train", "val"):
        header = np.zeros(256, "<i4")
        header[:3] = magic, 1, len(ids)
        (folder / f"{split}.bin").write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(DataError, match=r"train\.bin is ids after the header of llm\.c") as caught:
        opened(folder)
    command, _, place = re.match(r"(.*?) (leaves it out: then set data\.path=)(.*)", caught.value.remedy).groups()
    subprocess.run(["bash", "-c", command], check=True, cwd=folder)
    assert np.array_equal(opened(folder / place).train, ids)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("val.bin", b"odd", r"cannot be used \(.*multiple"),
        ("train.bin", b"", r"cannot be used \(.*empty"),
        ("train.bin", np.array([1, 50_257], "<u2").tobytes(), "has the id 50257, and tokenizer=gpt2 ids below 50257"),
        ("val.bin", np.array([0] * (1 << 24) + [50_257], "<u2").tobytes(), "has the id 50257, and tokenizer=gpt2"),
        ("val.bin", None, r"cannot be used \(No such file.*: give a folder with train\.bin"),
        (
            "val.bin",
            b"\x93NUMPY\1\0" + bytes(120),
            r"val\.bin is an array saved by numpy\.save.*: write the ids by .*tofile",
        ),
        (
            "train.bin",
            b"version https://git-lfs.github.com/spec/v1\n",
            "is a pointer of Git LFS .*: git -C .* lfs pull",
        ),
        ("meta.pkl", b"", r"meta\.pkl explains.*data=text data\.path=FILE"),
    ],
)
def test_what_are_no_tokens_of_gpt2_is_refused(folder, file, content, problem, monkeypatch):
    if content is None:  # before a tokenizer is fetched for them
        (folder / file).unlink()
        monkeypatch.setattr(prepare, "make_tokenizer", lambda *_: pytest.fail("fetched"))
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        opened(folder)


def test_the_folders_own_tokenizer_counts_and_must_be_that_of_the_model_to_begin_with(folder):
    own = make_tokenizer(TokenizerConfig(name="byte"), ())
    np.arange(200).astype("<u2").tofile(folder / "train.bin")
    np.arange(200).astype("<u2").tofile(folder / "val.bin")
    save_tokenizer(own, folder / "tokenizer.json")
    assert opened(folder).vocab_size == opened(folder, encoding=own).vocab_size == 257
    with pytest.raises(DataError, match="another tokenizer than the model's: give the text"):
        opened(folder, encoding=train_bpe(["abab"], 258))


def test_the_field_of_records_may_be_that_of_the_validation_text_alone(tmp_path):
    (tmp_path / "a.txt").write_text("a word " * 50)
    (tmp_path / "b.csv").write_text("id,body\n1," + "a word " * 50)
    places = {"path": str(tmp_path / "a.txt"), "val_path": str(tmp_path / "b.csv"), "cache_dir": str(tmp_path)}
    config = DataConfig(text_field="body", **places)
    assert len(prepare.prepare(config, TokenizerConfig(name="byte"), log=[].append).val) > 300


def test_the_remedy_for_foreign_ids_names_a_tokenizer_only_if_it_can_be_chosen(folder, monkeypatch):
    own = make_tokenizer(TokenizerConfig(name="byte"), ())
    for split in ("train", "val"):
        np.full(200, 999).astype("<u2").tofile(folder / f"{split}.bin")
    monkeypatch.setattr(prepare, "make_tokenizer", lambda *_: own)
    with pytest.raises(DataError, match="prepare.py writes, and tokenizer=, which made it"):
        opened(folder)
    with pytest.raises(DataError, match="prepare.py writes[.]$"):  # as with init_from
        opened(folder, encoding=own)
    save_tokenizer(own, folder / "tokenizer.json")
    with pytest.raises(DataError, match="prepare.py writes[.]$"):
        opened(folder)
    (folder / "meta.pkl").touch()
    (folder / "input.txt").touch()
    with pytest.raises(DataError, match=r"as in data=text \S*data\.path=.*input\.txt"):
        opened(folder)


@pytest.mark.slow
@pytest.mark.parametrize("size, told", [(40_000, True), (2_000, False)])
def test_a_document_that_is_most_of_the_text_and_never_held_out_is_told(size, told, tmp_path):
    """A chat beside notes: the notes alone are held out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "chat.txt").write_text("".join(f"message {number}\n" for number in range(size // 12)))
    for number in range(200):
        (folder / f"{number}.txt").write_text(f"note {number}: " + "word " * 30)
    config = DataConfig(source="files", path=str(folder))
    text = prepare.make_folder(tmp_path / "made", Source(config), TokenizerConfig(name="byte"), lambda line: None)
    chat = (folder / "chat.txt").stat().st_size
    share = chat / (chat + sum((folder / f"{number}.txt").stat().st_size for number in range(200)))
    said = f"; {share:.0%} of it is one document, of which nothing is held out: divide it, or set data.val_path"
    assert (said in text) == told == (share > 0.5)
    held = prepare.open_folder(tmp_path / "made", make_tokenizer(TokenizerConfig(name="byte"), []), "", "")[1]
    assert b"message" not in bytes(held[held < 256].astype(np.uint8))


@pytest.mark.parametrize(
    ("length", "number", "settings", "told"),
    [(200, 24, {}, True), (9_000, 5, {}, False), (200, 1, {}, False), (200, 24, {"val_fraction": 0.0}, False)],
)
def test_ends_that_are_held_out_of_short_documents_are_told(length, number, settings, told, tmp_path):
    """Each document has copies, so that whole ones would be too much."""
    texts = [f"{n:04}" * (length // 4) for n in range(number)]
    write_jsonl(tmp_path / "a.jsonl", texts * (6 if number > 1 else 1))
    if settings:
        settings["val_path"] = str(write_jsonl(tmp_path / "b.jsonl", texts))
    source = Source(DataConfig(source="files", path=str(tmp_path / "a.jsonl"), **settings))
    text = prepare.make_folder(
        tmp_path / "made",
        source,
        TokenizerConfig(name="byte"),
        lambda line: None,
        prepare.validation_source(source.config),
    )
    assert ("held out, 20 characters on average, and scored without its beginning" in text) == told
    _, held = prepare.open_folder(tmp_path / "made", make_tokenizer(TokenizerConfig(name="byte"), []), "", "")
    ends = np.diff(np.flatnonzero(np.append(held, 256) == 256)) - 1
    assert not told or (ends.mean() == 20 and len(ends) == 6 * number)


@pytest.mark.parametrize(("notes", "told"), [(30, True), (4, False)])
def test_a_document_that_is_most_of_the_text_is_told_where_the_end_of_each_is_held_out(notes, told, tmp_path):
    """A log beside notes that are less than a fifth of the text: the model learned the log, without a word."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/server.log").write_text("".join(f"line {number}\n" for number in range(2_000)))
    for number in range(notes):
        (tmp_path / f"texts/{number}.txt").write_text(f"note {number}: " + "word " * 15)
    source = Source(DataConfig(source="files", path=str(tmp_path / "texts")))
    text = prepare.make_folder(tmp_path / "made", source, TokenizerConfig(name="byte"), lambda line: None)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "texts").iterdir()}
    share = f"{sizes['server.log'] / sum(sizes.values()):.0%}"
    said = f"; {share} of it is one document, and as much of what is held out is its end: divide it, "
    assert (said in text) == ("one document" in text) == told
    held = prepare.open_folder(tmp_path / "made", make_tokenizer(TokenizerConfig(name="byte"), []), "", "")[1]
    assert b"line 1999" in bytes(held[held < 256].astype(np.uint8))


def test_a_field_that_is_asked_of_texts_alone_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("id;note\n1;hello\n" * 50)
    source = Source(DataConfig(source="files", path=str(tmp_path / "a.txt"), text_field="note"))
    with pytest.raises(DataError, match=r"data.text_field=note names a field of records, and there are none"):
        prepare.make_folder(tmp_path / "made", source, TokenizerConfig(name="byte"), lambda line: None)


def test_notes_of_a_text_are_in_the_log_of_every_run(tmp_path):
    """The first may be a dry run, which keeps no log."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"some words\r\n" * 100)
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    config = DataConfig(source="files", path=str(folder), cache_dir=str(tmp_path / "cache"))
    logs: list[list[str]] = [[], [], []]
    for number, log in enumerate(logs):
        prepare.prepare(config, TokenizerConfig(name="byte"), log=log.append, prepares=number < 2)
    first, again, other_rank = logs
    assert "Preparing" in first[0] and len(first) == 3 and any("b.png" in line for line in first)
    assert again == first[1:] and other_rank == []


@pytest.mark.parametrize("asked", ["notes", "Note"])
def test_a_field_that_no_table_of_a_mixed_folder_has_is_refused_with_those_it_has(asked, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("a text of its own\n" * 50)
    (tmp_path / "texts/notes.csv").write_text("date,note\n" + "".join(f"{n},note {n}\n" for n in range(50)))
    source = Source(DataConfig(source="files", path=str(tmp_path / "texts"), text_field=asked))
    with pytest.raises(DataError, match=rf"notes.csv has no field data.text_field={asked}: choose one of date, note"):
        prepare.make_folder(tmp_path / "made", source, TokenizerConfig(name="byte"), lambda line: None)


@pytest.mark.long
@pytest.mark.parametrize(("length", "told"), [(14_000, True), (2_000, False)])
def test_long_documents_beside_many_short_ones_are_told_as_never_held_out(length, told, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / f"texts/paper{number}.txt").write_text(f"paper {number} " * (length // 9))
    for number in range(1_500):
        (tmp_path / f"texts/{number}.txt").write_text(f"message {number} " * 40)
    source = Source(DataConfig(source="files", path=str(tmp_path / "texts")))
    text = prepare.make_folder(tmp_path / "made", source, TokenizerConfig(name="byte"), lambda line: None)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "texts").iterdir()}
    papers = sum(size for name, size in sizes.items() if name.startswith("paper"))
    share = f"{papers / sum(sizes.values()):.0%}"
    barred = f"{share} of it is in documents too long to be held out beside the short ones"
    said = f"; {barred}: divide them, or set data.val_path"
    assert (said in text) == told
    held = prepare.open_folder(tmp_path / "made", make_tokenizer(TokenizerConfig(name="byte"), []), "", "")[1]
    assert not told or b"paper" not in bytes(held[held < 256].astype(np.uint8))


def test_files_and_records_without_text_are_told(tmp_path):
    (tmp_path / "texts").mkdir()
    for name, content in {"a.txt": "some text\n" * 90, "b.txt": "", "c.txt": "\f\f \n\f"}.items():
        (tmp_path / "texts" / name).write_text(content)
    (tmp_path / "texts/d.jsonl").write_text(
        '{"text": "some more"}\n{"text": ""}\n{"text": " "}\n' + '{"text": "x y"}\n' * 50
    )
    source = Source(DataConfig(source="files", path=str(tmp_path / "texts"), separator=r"\f"))
    assert len([document for document in source.documents() if "".join(document).strip()]) == 52
    lines = source.note_lines()
    assert any(
        line.startswith("Files without text: 2, first in ") and "b.txt" in line and "c.txt" in line for line in lines
    )
    assert any(line.startswith("Records without text in text: 2, first in ") for line in lines)


def test_a_text_and_its_sentences_as_records_are_the_same_text(tmp_path):
    """Beside it as data.val_path, and for a run that has learned one of them before, in another layout too."""
    sentences = [f"{number}. It is {number * number} steps to the river." for number in range(300)]
    (tmp_path / "book.txt").write_text("\n".join(sentences[100:200]))
    (tmp_path / "book.crlf.txt").write_text("\r\n".join(sentences[100:200]).upper())
    records = write_jsonl(tmp_path / "sentences.jsonl", sentences)
    learned = prepared(tmp_path, records, val_path=str(tmp_path / "book.txt"))
    assert learned.description.endswith(", 100.0% of it also in the training text")
    other = prepared(tmp_path, tmp_path / "book.crlf.txt", val_fraction=0.1)
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    assert prepare.learned_share(data, [learned.fingerprint], np.asarray(other.train[:]), other.tokenizer) == 1


@pytest.mark.slow
def test_the_share_of_a_grown_text_that_was_learned_before_is_that_of_its_documents(tmp_path):
    """A text that grows holds out other documents: longer ones may be held out of a longer text."""
    texts = ["".join(f"{number}.{word} " for word in range(3 + number * 7 % 20)) for number in range(400)]
    first = prepared(tmp_path, write_jsonl(tmp_path / "text.jsonl", texts[:300]))
    grown = prepared(tmp_path, write_jsonl(tmp_path / "grown.jsonl", texts))
    held_out = documents(grown, grown.val)
    learned = {*documents(first, first.train)} & {*held_out}
    wanted = sum(map(len, learned)) / sum(map(len, held_out))
    assert wanted > 0.1, "the case"
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    share = prepare.learned_share(data, [first.fingerprint], np.asarray(grown.val[:]), grown.tokenizer)
    assert share == pytest.approx(wanted, abs=1e-9)
    # What is not known is nothing.
    assert prepare.learned_share(data, ["text-0123456789abcdef"], np.asarray(grown.val[:]), grown.tokenizer) == 0
    with mock.patch.object(prepare, "MOST_LEARNED", 100):
        assert prepare.learned_share(data, [first.fingerprint], np.asarray(grown.val[:]), grown.tokenizer) == 0
