"""The rules of data/prepare.py, split.py, encode.py and shards.py: text on disk as tokens, once and whole."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from data import files, prepare, shards
from data.config import DataConfig, TokenizerConfig
from data.corpus import Corpus, open_corpus
from data.pieces import LONGEST, pieces
from data.prepare import PreparedData
from data.shards import ShardWriter, Tokens, open_tokens, token_dtype
from data.split import LONGEST_SHARE, Split
from data.tokenizer import END_OF_TEXT
from errors import DataError

REPOSITORY = Path(__file__).resolve().parent.parent
SHAKESPEARE = REPOSITORY / ".." / "shared" / "data" / "tinyshakespeare.txt"

NASTY = [
    *(f"a literal {END_OF_TEXT} inside", END_OF_TEXT, " " * 1_000_000 + "a", "\n", "tail without a line end"),
    *("é字🙂\r\n", "\ufffd\ufffd", "x", "\0 a NUL, late", "y" * 300_000),
]


def essays(count: int) -> list[str]:
    """Documents of about 600 characters that have no line in common."""
    return ["".join(f"line {line} of essay {number}, by hand\n" for line in range(20)) for number in range(count)]


def write_jsonl(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def prepared(
    tmp_path: Path, path: Path, *, tokenizer: str = "byte", log: list[str] | None = None, **settings
) -> PreparedData:
    """Prepare the text or JSON lines of `path` with a cache in tmp_path; `log` gets the lines."""
    source = "jsonl" if path.suffix == ".jsonl" else "text"
    data = DataConfig(source=source, path=str(path), cache_dir=str(tmp_path / "cache"), **settings)
    config = TokenizerConfig(name=tokenizer, vocab_size=300)
    return prepare.prepare(data, config, log=(log if log is not None else []).append)


def ids(tokens: Tokens) -> list[int]:
    return tokens[: len(tokens)].tolist()


def documents(data: PreparedData, tokens: Tokens) -> list[str]:
    """The documents of a split, decoded."""
    whole = np.array(ids(tokens))
    starts = np.flatnonzero(whole == data.tokenizer.eot_token)
    assert not len(whole) or starts[0] == 0, "a split begins with <|endoftext|>"
    return [data.tokenizer.decode(part[1:].tolist()) for part in np.split(whole, starts)[1:]]


def cache_names(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "cache" / "tokens").iterdir() if file.suffix != ".lock")


def totals(data: PreparedData, split: str) -> tuple[int, int]:
    """How many documents, and bytes of their text, meta.json says a split has."""
    summary = json.loads((data.directory / "meta.json").read_text())[split]
    return summary["documents"], summary["bytes"]


@pytest.fixture
def text_file(tmp_path) -> Path:
    file = tmp_path / "a.txt"
    file.write_text("a line of some words\n" * 300)
    return file


# What ends up in the shards


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_nasty_documents_come_back_whole_and_in_order(tmp_path, tokenizer):
    texts = [*NASTY, "", *essays(2000)]
    data = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=tokenizer, val_fraction=0.1)
    texts.remove("")
    held_out = set(documents(data, data.val))
    assert 300 < len(held_out) < 500 and not any(len(text) > 10_000 for text in held_out)
    for split, expected in (("val", held_out), ("train", set(texts) - held_out)):
        assert documents(data, getattr(data, split)) == [text for text in texts if text in expected]
        assert totals(data, split) == (len(expected), sum(len(text.encode()) for text in expected))


def test_prepared_tokens_are_those_of_each_document_encoded_whole(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    for number, text in enumerate(essays(700)):
        (folder / f"{number:03}.py").write_text(text)
    data = prepared(tmp_path, folder, tokenizer="bpe", val_fraction=0.1)
    texts, held_out = [file.read_text() for file in sorted(folder.iterdir())], set(documents(data, data.val))
    expected = []
    for text in texts:
        if text not in held_out:
            expected += [data.tokenizer.eot_token, *data.tokenizer.encode_ordinary(text)]
    assert ids(data.train) == expected and data.tokenizer.n_vocab == 300
    assert (totals(data, "train")[0], totals(data, "val")[0]) == (700 - len(held_out), len(held_out))


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="no copy of tiny Shakespeare here")
def test_one_long_text_is_split_at_a_line_near_the_last_tenth_and_encoded_as_whole(tmp_path):
    text = SHAKESPEARE.read_text()
    assert len(text) > 4 * LONGEST
    data = prepared(tmp_path, SHAKESPEARE, tokenizer="bpe")
    (train,), (val,) = documents(data, data.train), documents(data, data.val)
    assert train + val == text and train.endswith("\n")
    assert abs(len(val) - len(text) / 10) < 100 and ids(data.train)[1:] == data.tokenizer.encode_ordinary(train)


def test_invalid_utf8_is_counted_as_it_is_read_and_said(tmp_path):
    file, log = tmp_path / "a.txt", []
    file.write_bytes(b"good \xff\xfe bad\n" * 100)
    data = prepared(tmp_path, file, log=log)
    assert f"{file} is not all UTF-8: 200 characters became U+FFFD." in log
    text = "good \ufffd\ufffd bad\n" * 100
    assert "".join(documents(data, data.train) + documents(data, data.val)) == text
    assert totals(data, "train")[1] + totals(data, "val")[1] == len(text.encode())


def test_bpe_never_learns_from_held_out_text(tmp_path, monkeypatch):
    learnt = []
    original = prepare.make_tokenizer

    def spy(config, training_text):
        learnt.extend(training_text)
        return original(config, learnt)

    monkeypatch.setattr(prepare, "make_tokenizer", spy)
    texts = [f"document {number} " * 20 for number in range(50)]
    data = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), tokenizer="bpe", val_fraction=0.1)
    assert learnt == documents(data, data.train) and not set(learnt) & set(documents(data, data.val))


# The split


def corpus_of(texts: list[str], longest: int = LONGEST) -> Corpus:
    return Corpus("a test", "0", None, lambda: (pieces([text], longest) for text in texts))


def split_texts(texts: list[str], fraction: float, longest: int = LONGEST) -> dict[str, list[str]]:
    """The documents of each split."""
    found: dict[str, list[str]] = {"train": [], "val": []}
    for split, begins, text in Split(corpus_of(texts, longest), fraction):
        assert text
        if begins:
            found[split].append("")
        found[split][-1] += text
    return found


@given(
    texts=st.lists(st.text("ab \n", max_size=60), max_size=30),
    fraction=st.sampled_from([0.02, 0.1, 0.3, 0.5]),
    longest=st.integers(2, 70),
)
@settings(max_examples=200, deadline=None)
def test_every_character_is_in_one_split_and_only_there(texts, fraction, longest):
    found = split_texts(texts, fraction, longest)
    kept = [text for text in texts if text]
    train, val = iter(found["train"]), iter(found["val"])
    rejoined, heads, tails = [], next(train, None), next(val, None)
    for text in kept:
        whole = ""
        if heads is not None and text.startswith(heads):
            whole, heads = heads, next(train, None)
        if tails is not None and whole + tails == text:
            whole, tails = whole + tails, next(val, None)
        rejoined.append(whole)
    assert "".join(rejoined) == "".join(kept) and (heads, tails) == (None, None)


def test_many_documents_are_held_out_whole_whatever_their_order_and_copies_and_long_ones_never():
    copies = [text[:-150] + f"another end, number {i}\n" for i, text in enumerate(essays(50))]
    long = ["".join(f"the {number} lines of {text}" for number in range(50)) for text in essays(5)]
    texts = [*essays(1000), *copies, *long]
    found = split_texts(texts, 0.1)
    size, val = sum(map(len, texts)), sum(map(len, found["val"]))
    assert len(found["val"]) >= 60 and max(map(len, found["val"])) <= LONGEST_SHARE * val
    assert val == pytest.approx(0.1 * size, rel=0.02) and len(found["train"]) + len(found["val"]) == len(texts)
    assert not set(found["val"]) & {*copies, *essays(50), *long}
    again = split_texts(texts[::-1], 0.1)
    assert set(again["val"]) == set(found["val"]) and again["train"] == found["train"][::-1]
    assert len(split_texts([*texts, "one more"], 0.1)["val"]) == pytest.approx(len(found["val"]), abs=2)


def test_documents_that_all_share_a_template_are_held_out_whole_too():
    texts = [
        f"### Below is an instruction, which you answer:\n{number}\n### The answer:\nno\n" for number in range(5000)
    ]
    found = split_texts(texts, 0.02)
    assert len(found["val"]) == pytest.approx(100, abs=3) and not set(found["val"]) - set(texts)


def test_beyond_what_is_looked_at_the_rule_stays(monkeypatch):
    monkeypatch.setattr("data.split.LOOKED_AT", 400_000)
    found = split_texts(essays(3000), 0.1)
    assert len(found["val"]) == pytest.approx(300, rel=0.2) and set(found["val"]) - set(essays(700))


def test_characters_lost_beyond_what_is_looked_at_are_said_too(tmp_path, monkeypatch):
    monkeypatch.setattr("data.split.LOOKED_AT", 400_000)
    (folder := tmp_path / "texts").mkdir()
    for number, essay in enumerate(essays(1500)):
        (folder / f"{number:04}.txt").write_bytes(essay.encode() + b"\xff" * (number == 1499))
    prepared(tmp_path, folder, log=(log := []))
    assert f"{folder / '1499.txt'} is not all UTF-8: 1 character became U+FFFD." in log


def test_few_documents_lose_their_tails_at_a_line_or_else_a_word_or_else_anywhere():
    lines, words, letters = "a line\n" * 1000, "word " * 1000, "x" * 5000
    found = split_texts([lines, words, letters], 0.1)
    assert [len(text) for text in found["train"]] == [6300, 4500, 4500]
    assert found["val"] == ["a line\n" * 100, "word " * 100, "x" * 500]
    (tail,) = split_texts(["Title\n" + "x" * 494], 0.1)["val"]
    assert len(tail) == 50  # never much longer than asked for


def test_a_tail_begins_where_it_should_in_a_document_of_many_pieces():
    text = "".join(f"line {number}\n" for number in range(2000))
    found = split_texts([text], 0.1, longest=50)
    assert found["train"][0] + found["val"][0] == text and abs(len(found["val"][0]) - len(text) / 10) < 50


@pytest.mark.parametrize("looked_at", [10**9, 100_000])
def test_a_sample_is_spread_evenly_over_the_text_to_train_on_and_ends_where_the_split_stops_looking(
    monkeypatch, looked_at
):
    monkeypatch.setattr("data.split.LOOKED_AT", looked_at)
    monkeypatch.setattr("data.split._WINDOW", 1000)
    texts = essays(600)
    split, size = Split(corpus_of(texts, longest=300), 0.1), min(looked_at, sum(map(len, texts)))
    train = "".join(text for kind, _, text in split if kind == "train")
    assert "".join(split.sample(10**9))[:size] == train[:size]
    sample = "".join(split.sample(size // 5))
    assert sample == "".join(train[start : start + 200] for start in range(0, len(train), 1000))[: len(sample)]
    assert 0.85 < len(sample) / (size // 5) < 1.02


def test_a_small_text_is_read_once_and_a_large_one_again(monkeypatch):
    read = []
    for looked_at, times in ((10**6, 1), (1000, 3)):
        monkeypatch.setattr("data.split.LOOKED_AT", looked_at)
        corpus = Corpus("a test", "0", None, lambda: (read.append(text) or [text] for text in essays(10)))
        read.clear()
        split = Split(corpus, 0.1)
        assert list(split) == list(split) and len(read) == times * 10


# Shards


@given(sizes=st.lists(st.integers(1, 5), max_size=6), bounds=st.tuples(st.integers(-3, 35), st.integers(-3, 35)))
def test_shards_read_as_one_long_array(sizes, bounds):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    tokens = Tokens(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    assert len(tokens) == len(whole) and tokens[slice(*bounds)].tolist() == whole[slice(*bounds)].tolist()


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_the_writer_fills_shards_up_to_their_size(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 10)
    dtype = np.dtype(dtype)
    writer = ShardWriter(tmp_path, "train", dtype)
    for start in range(0, 35, 7):
        writer.write(np.arange(start, start + 7, dtype=np.uint32), documents=1, text_bytes=3)
    checksums = [zlib.crc32(np.arange(start, min(start + 10, 35)).astype(dtype)) for start in (0, 10, 20, 30)]
    expected = {"crc32": checksums, "tokens": 35, "documents": 5, "bytes": 15, "shards": [10, 10, 10, 5]}
    assert writer.summary == expected
    assert [file.stat().st_size // dtype.itemsize for file in sorted(tmp_path.iterdir())] == [10, 10, 10, 5]
    tokens = open_tokens(tmp_path, "train", dtype, writer.summary)
    assert ids(tokens) == list(range(35)) and tokens[:35].dtype == dtype


def test_the_largest_id_fits_the_type():
    assert (token_dtype(65_536), token_dtype(65_537)) == (np.dtype("<u2"), np.dtype("<u4"))


def test_many_shards_hold_the_same_tokens_as_one(tmp_path, text_file, monkeypatch):
    one = prepared(tmp_path / "one", text_file)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 600)
    many = prepared(tmp_path / "many", text_file)
    assert len(list(many.directory.glob("train_*.bin"))) == 10 and ids(many.train) == ids(one.train)


# The cache


def test_a_second_run_reads_no_text_and_trains_no_tokenizer(tmp_path, text_file, monkeypatch):
    first = prepared(tmp_path, text_file, tokenizer="bpe")
    monkeypatch.setattr(prepare, "Split", None)
    monkeypatch.setattr(prepare, "make_tokenizer", None)
    log: list[str] = []
    second = prepared(tmp_path, text_file, tokenizer="bpe", log=log)
    assert log == [] and second.directory == first.directory
    assert ids(second.train) == ids(first.train)


def test_changed_text_tokenizer_or_split_is_prepared_anew(tmp_path, text_file):
    changes = ({}, {"tokenizer": "bpe"}, {"val_fraction": 0.2})
    seen = {prepared(tmp_path, text_file, **change).directory for change in changes}
    text_file.write_text("other text\n" * 600)
    other = prepared(tmp_path, text_file)
    assert len(seen | {other.directory}) == 4 and documents(other, other.train)[0].startswith("other text")


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def counted(content: bytes) -> bytes:
    meta = json.loads(content)
    meta["train"]["tokens"] += 1
    return json.dumps(meta).encode()


def bit_in(name: bytes) -> Callable[[bytes], bytes]:
    """Flip the lowest bit of the number after `name` in the second split."""
    return lambda content: re.sub(
        b'(?s)("val": .*?"' + name + rb'": \d*)(\d)', lambda m: m[1] + bytes([m[2][0] ^ 1]), content, count=1
    )


DAMAGE = {  # to each file of the cache: its new content, None for no file
    "train_00000.bin": [lambda content: content[:100], flipped],
    "val_00000.bin": [flipped, lambda _: None],
    "meta.json": [
        lambda _: b"",
        lambda _: b'{"dtype": [1], "train": 3}',
        counted,
        bit_in(b"bytes"),
        bit_in(b"documents"),
        lambda _: None,
    ],
    "tokenizer.json": [lambda _: b"{", lambda content: content + b"\n"],
}


@pytest.mark.parametrize(("name", "damage"), [(name, damage) for name, several in DAMAGE.items() for damage in several])
def test_a_damaged_cache_is_named_and_made_again(tmp_path, text_file, name, damage):
    whole = prepared(tmp_path, text_file)
    expected = ids(whole.train)
    content = damage((whole.directory / name).read_bytes())
    (whole.directory / name).unlink()
    if content is not None:
        (whole.directory / name).write_bytes(content)
    log: list[str] = []
    again = prepared(tmp_path, text_file, log=log)
    assert "damaged" in log[0] and str(whole.directory) in log[0] and ids(again.train) == expected
    assert cache_names(tmp_path) == [whole.directory.name]


def test_large_shards_are_each_compared_once_while_they_are_used(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 600)
    monkeypatch.setattr(shards, "VERIFIED_BYTES", 1000)
    compared, original, crc32 = [], shards._verify, zlib.crc32
    monkeypatch.setattr(shards, "_verify", lambda *arguments: compared.append(arguments))  # in no other thread

    data = prepared(tmp_path, text_file)
    compared.clear()

    def verify() -> str:
        prepared(tmp_path, text_file)
        arguments = compared.pop(0)
        with monkeypatch.context() as patch:
            read = []
            patch.setattr(zlib, "crc32", lambda *a: read.append(a) or crc32(*a))
            original(*arguments)
        compared.clear()
        counts.append(len(read))
        return arguments[0].damage

    counts: list[int] = []
    assert verify() == "" and verify() == "" and counts == [10, 0]
    shard = data.directory / "train_00007.bin"
    shard.write_bytes(flipped(shard.read_bytes()))
    os.utime(shard, ns=(1, 1))
    damage = verify()
    assert "train_00007.bin" in damage and f"remove the folder {data.directory}" in damage and counts[2] == 1
    (tokens := data.train).damage = damage
    with pytest.raises(DataError, match="train_00007"):
        tokens[:5]


def test_what_dead_runs_left_is_removed_and_what_live_runs_write_is_not(tmp_path, text_file):
    root = tmp_path / "cache" / "tokens"
    dead, alive = ".text-byte-dead.1f.unfinished", ".text-byte-alive.2e.unfinished"
    for name in (dead, alive):
        (root / name).mkdir(parents=True)
        (root / name / "train_00000.bin").write_text("x")
    with FileLock(root / "text-byte-alive.lock"):
        data = prepared(tmp_path, text_file)
    assert cache_names(tmp_path) == [alive, data.directory.name]


def start(tmp_path: Path, file: Path, *, before: str = "", after: str = "") -> subprocess.Popen:
    """A process that prepares `file`, runs code before and after encoding, and prints its log."""
    code = f"""
import os, signal, sys, time
from data import prepare
from data.config import DataConfig, TokenizerConfig
original = prepare.encode_splits
def instead(*args, **settings):
    {before}
    summaries = original(*args, **settings)
    {after}
    return summaries
prepare.encode_splits = instead
data = DataConfig(path={str(file)!r}, cache_dir={str(tmp_path / "cache")!r})
ready = prepare.prepare(data, TokenizerConfig(name='byte'), log=lambda line: print(line, flush=True))
print('TOKENS', len(ready.train), flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def test_a_run_killed_half_way_leaves_nothing_that_is_taken_for_whole(tmp_path, text_file):
    process = start(tmp_path, text_file, after="os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=30)
    assert process.returncode < 0
    (left,) = cache_names(tmp_path)
    assert left.endswith(".unfinished")
    data = prepared(tmp_path, text_file)
    lines = "a line of some words\n"
    assert documents(data, data.train) + documents(data, data.val) == [lines * 270, lines * 30]
    assert cache_names(tmp_path) == [data.directory.name]


@pytest.mark.slow
def test_ctrl_c_while_the_bpe_is_trained_ends_at_once(tmp_path):
    file = tmp_path / "long.txt"
    rng = np.random.default_rng(0)
    file.write_bytes(rng.choice(np.frombuffer(b"abcdefghijklmnop   \n", np.uint8), 20_000_000).tobytes())
    settings = [f"data.path={file}", f"data.cache_dir={tmp_path}", "tokenizer.vocab_size=30000"]
    script = Path(sys.executable), "train.py", *settings, f"run_dir={tmp_path / 'run'}"
    process = subprocess.Popen(script, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "Preparing" in process.stdout.readline()
    time.sleep(6)
    assert process.poll() is None
    started = time.perf_counter()
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and len(rest.splitlines()) <= 1 and "Traceback" not in rest
    assert time.perf_counter() - started < 4  # about 0.3 s on a quiet machine
    assert not list((tmp_path / "tokens").glob("*.unfinished"))


def test_two_runs_that_start_at_once_prepare_once(tmp_path, text_file):
    processes = [start(tmp_path, text_file, before="time.sleep(1.5)") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("Preparing" in output for output in outputs) == sum("waiting" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_all_is_on_the_disk_before_it_is_taken_for_whole(tmp_path, text_file, monkeypatch):
    flushed, original = [], files.flush_to_disk

    def flush(path: Path) -> None:
        flushed.append(path)
        original(path)

    monkeypatch.setattr(files, "flush_to_disk", flush)
    directory = prepared(tmp_path, text_file).directory
    before, after = flushed[:-1], flushed[-1]
    assert after == directory.parent  # the renaming
    assert all(directory.name in str(path) and ".unfinished" in str(path) for path in before)
    assert {path.name for path in before[:-1]} == {file.name for file in directory.iterdir()}
    assert before[-1].parent == directory.parent


def test_a_cache_folder_that_cannot_be_written_is_refused_by_name(tmp_path, text_file):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache_dir=.*cannot be written"):
        prepared(tmp_path, text_file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_is_refused_by_name_unless_all_is_there(tmp_path, text_file):
    ready = prepared(tmp_path, text_file)
    root = ready.directory.parent
    root.chmod(0o555)
    try:
        assert len(prepared(tmp_path, text_file).train) == len(ready.train)
        with pytest.raises(DataError, match=r"data\.cache_dir"):
            prepared(tmp_path, text_file, tokenizer="bpe")
    finally:
        root.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("binary.bin", b"\0\1", r"gave no text.*another data\.path"),
        ("empty.txt", b"", r"gave no text.*another data\.path"),
        ("blank.txt.gz", gzip.compress(b""), r"gave no text.*another data\.path"),
        ("a.jsonl", b'{"text": "fine"}\n' * 3000 + b"broken\n", "line 3001 is not JSON"),
        ("full.txt", b"text", r"data\.cache_dir=.*No space left"),
    ],
    ids=["binary", "empty", "blank", "broken", "full"],
)
def test_text_that_cannot_be_prepared_is_refused_and_leaves_nothing(tmp_path, monkeypatch, name, content, message):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if name == "full.txt":
        monkeypatch.setattr(shards.ShardWriter, "write", full)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, folder / name if name.endswith("jsonl") else folder, tokenizer="bpe")
    assert cache_names(tmp_path) == []


def test_memory_stays_bounded_for_a_large_text(tmp_path):
    pytest.importorskip("resource")
    file = tmp_path / "big.txt"
    file.write_bytes(b"some words in a line of text, and more\n" * 2_500_000)  # 98 MB
    code = (
        "import resource\n"
        "from data.config import DataConfig, TokenizerConfig\n"
        "from data.prepare import prepare\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = used()\n"
        f"data = DataConfig(path={str(file)!r}, cache_dir={str(tmp_path)!r})\n"
        "prepare(data, TokenizerConfig(name='byte'), log=lambda line: None)\n"
        "print(used() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60_000  # kilobytes; the text has 98,000, its tokens 196,000


def test_the_standard_library_is_ready_in_seconds_and_then_at_once(tmp_path):
    data = DataConfig(cache_dir=str(tmp_path))
    first = prepare.prepare(data, TokenizerConfig(), log=print)
    start = time.perf_counter()
    second = prepare.prepare(data, TokenizerConfig(), log=print)
    assert time.perf_counter() - start < 1  # about 0.04 s on a quiet machine
    assert second.directory == first.directory and second.tokenizer.n_vocab == 2048 and len(second.train) > 2_000_000
    assert open_corpus(data).description == second.description
    train, val = (totals(second, split)[1] for split in ("train", "val"))
    share = val / (train + val)
    sizes = [len(text.encode()) for text in documents(second, second.val)]
    assert 0.03 < share < 0.05 and len(sizes) >= 60 and max(sizes) < 0.05 * sum(sizes)


def words(text: str) -> set[tuple[str, ...]]:
    """Its runs of 8 words."""
    found = re.findall(r"\w+", text)
    return {tuple(found[place : place + 8]) for place in range(len(found) - 7)}


def test_no_near_copy_of_the_standard_librarys_validation_text_is_trained_on():
    documents: dict[str, list[str]] = {"train": [], "val": []}
    for split, begins, text in Split(open_corpus(DataConfig()), DataConfig().held_out):
        documents[split] += [""] if begins else []
        documents[split][-1] += text
    learnt = set().union(*map(words, documents["train"]))
    for text in documents["val"]:
        if len(own := words(text)) > 50:
            assert len(own & learnt) < 0.3 * len(own), text[:200]
