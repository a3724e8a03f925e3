"""The rules of data/config.py and data/texts.py: what is read, how, and what is refused."""

import bz2
import email.message
import glob
import gzip
import hashlib
import html
import io
import json
import mailbox
import os
import re
import shlex
import shutil
import subprocess
import sys
import tracemalloc
import types
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from unittest import mock
from xml.sax.saxutils import escape

import pytest
from conftest import some
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, SettingsError
from data import texts
from data.config import WITH_PATH, DataConfig, TaskConfig, TokenizerConfig
from data.texts import LEFT_OUT, Source, are_files, divided, find_files, refuse_list, splits_apart
from data.tokenizer import END_OF_TEXT, LONGEST
from sweeps.leaderboard import write_leaderboard
from train import train


def read(source: Source) -> list[str]:
    """The documents that have text, each as one string."""
    return [text for document in source.documents() if (text := "".join(document))]


def of_path(path: Path | str, source: str = "text", **settings: str | None) -> Source:
    return Source(DataConfig(source=source, path=str(path), **settings))


# Sentences that are true on each road


@pytest.mark.parametrize(
    ("source", "name", "content", "said"),
    [
        ("jsonl", "a.csv", "id,text\n1,one\n", "looks like a CSV file, and data=jsonl reads another format"),
        ("csv", "a.jsonl", '{"text": "one"}\n', "looks like a JSON lines file, and data=csv reads another format"),
        ("hf", "a.jsonl", '{"text": "one"}\n', "looks like a JSON lines file, and data=hf reads another format"),
        ("hf", "a.txt", "one", "is no Parquet file, and data=hf reads another format"),
        ("csv", "a.parquet", "PAR1\0PAR1", "looks like a Parquet file, and data=csv reads another format"),
        ("text", "a.parquet", "PAR1\0PAR1", "looks like a Parquet file, and data=text reads another format"),
    ],
)
def test_a_file_of_another_format_than_its_source_is_named_with_the_source_that_reads_it(
    source, name, content, said, tmp_path
):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} {said}: data=files reads each file in its own"):
        read(of_path(tmp_path / name, source))
    if source == "csv":
        with pytest.raises(DataError, match="names no CSV file .*: data=files reads each file in its format"):
            of_path(tmp_path, source)


def test_a_text_of_data_val_path_has_remedies_of_its_own_and_is_not_learned(tmp_path):
    (tmp_path / "a.csv").write_text("id,body\n1,one\n")
    for setting, more in (("data.path", ", or data=text; docs"), ("data.val_path", "; docs")):
        with pytest.raises(DataError) as caught:
            read(Source(DataConfig(path=str(tmp_path / "a.csv")), setting))
        assert f"choose one of id, body{more}/data.md" in caught.value.remedy
        assert ("data.path and data.val_path have the same field" in caught.value.remedy) == (more == "; docs")
    (tmp_path / "b").write_bytes(b"one\r\ntwo\r\n")
    source = of_path(tmp_path / "b")
    read(source)
    assert ", which are scored (to convert" in source.note_lines(is_learned=False)[0]


@pytest.mark.skipif(sys.platform == "win32", reason="a command of the shell")
def test_the_command_that_converts_a_packed_file_unpacks_it(tmp_path):
    """sed -i would write into the packed bytes."""
    (tmp_path / "FILE").write_bytes(gzip.compress(b"one\r\ntwo\r\n"))
    source = of_path(tmp_path / "FILE")
    read(source)
    command = re.search(r"\(to convert: (.*)\)", source.note_lines()[0])[1]
    assert subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True).stdout == b"one\ntwo\n"


# Settings


def test_a_path_alone_chooses_files_and_each_source_has_its_own_share():
    assert {DataConfig(source=default, path="a").source for default in ("stdlib", "tales", "shakespeare")} == {"files"}
    assert DataConfig(source="jsonl", path="a").source == "jsonl"
    with_path = {DataConfig(source=source, path="a").validation_fraction for source in (*WITH_PATH, "hf")}
    assert with_path == {DataConfig(source="shakespeare").validation_fraction} == {0.1}
    assert DataConfig().validation_fraction == 0.04 and DataConfig(source="hf", name="a").validation_fraction == 0.01
    for settings, share in (({}, 0), ({"val_fraction": 0.3}, 0.3)):
        assert DataConfig(path="a", val_path="b", **settings).validation_fraction == share


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"source": "books"}, "data.source=books"),
        ({"val_fraction": 0.0}, "data.val_fraction=0 "),
        ({"val_fraction": 0.6}, "data.val_fraction=0.6"),
        ({"path": ""}, "data=files has nothing to read: give data.path"),
        *(
            ({"source": name}, f"data={name} has nothing to read: give data")
            for name in ("text", "jsonl", "nanogpt", "hf")
        ),
        ({"name": "wordpiece"}, "tokenizer.name=wordpiece"),
        ({"vocab_size": 256}, "tokenizer.vocab_size=256 .* 257"),
        ({"vocab_size": 1_000_001}, "tokenizer.vocab_size=1000001 .* 1,000,000"),
        ({"items": 0}, "data.task.items=0"),
        ({"vocab_size": 2}, "data.task.vocab_size=2"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
    schema = TokenizerConfig if named[:9] == "tokenizer" else TaskConfig if named[:9] == "data.task" else DataConfig
    with pytest.raises(SettingsError, match=named):
        schema(**settings)


# Which files


@pytest.mark.slow
def test_stdlib_is_the_library_of_this_interpreter_without_its_tests_and_what_is_installed():
    source = Source(DataConfig())
    assert re.fullmatch(rf"stdlib of \w+ 3\.{sys.version_info.minor}: \d+ files, [\d.]+ MB", source.describe())
    assert not any(re.search(r"/(site-packages|tests?|idle_test|__pycache__)/", file) for file in source.files)
    found = read(source)
    assert len(found) > 400 and sum(map(len, found)) > 8_000_000
    assert any(text.startswith('r"""HTTP/1.1 client library') for text in found)


def test_a_folder_is_read_deeply_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    found = {"b.txt": b"second", "a/z.md": b"first", "c.bin": b"PNG\0\1\2", "d.txt": b""}
    for name, content in (found | {".hidden": b"no", ".git/config": b"no", "e.bin": b"\0"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "e.jsonl").write_text('{"text": "third"}\n')
    source = of_path(tmp_path)
    assert read(source) == ["first", "second", '{"text": "third"}\n']
    assert source.describe() == f"{tmp_path}: 4 files, 3 documents, 29 B; 2 files left out"
    raw = "Files of records read as they are (leave out data=text)"
    assert source.notes.pop(raw) == (1, [f"{tmp_path}/e.jsonl (a JSON lines file with text)"])
    left_out = [f"{tmp_path}/{name} (not text but binary)" for name in ("c.bin", "e.bin")]
    assert source.notes == {LEFT_OUT: (2, left_out), "Files without text": (1, [f"{tmp_path}/d.txt"])}


def test_a_glob_a_file_a_packed_file_and_one_at_home_are_read(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "two.md").write_text("2")
    (tmp_path / "three.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "four.rst").write_text("4")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, expected in (
        ("*.txt", ["one"]),
        ("**/*.rst", ["4"]),
        ("three.txt.gz", ["three"]),
        ("*", ["one", "three", "2"]),
        ("one.txt", ["one"]),
    ):
        assert read(of_path(tmp_path / name)) == read(of_path(f"~/{name}")) == expected
    source = of_path(tmp_path / "one.txt")
    assert source.describe() == f"{tmp_path}/one.txt: 1 file, 3 B" and read(source)
    assert source.describe() == f"{tmp_path}/one.txt: 1 file, 1 document, 3 B"
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    source = of_path(tmp_path, "jsonl")
    assert read(source) == ["a"] and source.describe() == f"{tmp_path}: 1 JSON lines file, 1 document, 14 B"


def test_the_fingerprint_changes_with_the_files_and_settings_and_only_with_them(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, ns=(0, 1_000))
    first = of_path(tmp_path).fingerprint
    monkeypatch.chdir(tmp_path)
    assert of_path(tmp_path).fingerprint == of_path("a.txt").fingerprint == first
    changes = [
        lambda: os.utime(file, ns=(0, 1_001)),
        lambda: file.write_text("more") and os.utime(file, ns=(0, 1_001)),
        lambda: file.rename(tmp_path / "b.txt"),
        lambda: (tmp_path / "c.txt").write_text(""),
    ]
    seen = {first}
    for change in changes:
        change()
        seen.add(of_path(tmp_path).fingerprint)
    seen.add(of_path(tmp_path / "b.txt", "jsonl").fingerprint)
    seen.add(of_path(tmp_path / "b.txt", "jsonl", text_field="body").fingerprint)
    assert len(seen) == 7 and Source(DataConfig(source="hf", name=str(tmp_path))).files, "a local dataset is known too"


def test_a_text_is_the_same_one_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "texts/inner").mkdir(parents=True)
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "texts/a.txt").write_text("one")
    (tmp_path / "texts/inner/b.txt").write_text("two")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/deep")
    for name in ("texts/a.txt", "texts", "texts/*.txt", "texts/**/*.txt"):
        monkeypatch.chdir(tmp_path)
        found = of_path(name)
        for folder, typed in (
            ("texts/inner", f"../../{name}"),
            ("texts", f"inner/../../{name}"),
            ("texts", f"../texts/../{name}"),
            (".", f"link/../../{name}"),  # .. is above the folder that a link names
            (".", str(tmp_path / "texts" / ".." / name)),
        ):
            monkeypatch.chdir(tmp_path / folder)
            same = of_path(typed)
            assert (same.files, same.fingerprint) == (found.files, found.fingerprint), (folder, typed)
            assert read(same) == read(found)
    with pytest.raises(SettingsError, match=r"data.path=\.\./none.txt names no regular file"):
        of_path("../none.txt")


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_text_is_the_same_one_by_a_link_to_its_folder(tmp_path, monkeypatch):
    """A home folder that is a link had two texts, each prepared, and a run of one was refused with the other."""
    (tmp_path / "usr/home/texts/inner").mkdir(parents=True)
    (tmp_path / "home").symlink_to("usr/home")
    real, linked = tmp_path / "usr/home/texts", tmp_path / "home/texts"
    (real / "a.txt").write_text("one")
    (real / "b.json").write_text('["two", "three"]')
    (real / "inner/c.txt").write_text("four")
    (real / "other.txt").symlink_to("a.txt")
    for name in ("a.txt", "b.json", ".", "*.txt", "**/*.txt", "inner"):
        found, same = of_path(real / name), of_path(linked / name)
        assert same.fingerprint == found.fingerprint and read(same) == read(found), name
        monkeypatch.chdir(linked)
        assert of_path(name).fingerprint == found.fingerprint, name
    # A file of another name is another text, and one that is read twice is no text that is read once.
    (real / "again").symlink_to("inner")
    names = ("a.txt", "other.txt", "inner/*.txt", "*/c.txt", ".")
    assert len({of_path(linked / name).fingerprint for name in names}) == len(names)


# What is in them


CRLF = "Files with \\r\\n at line ends, which the model learns (to convert: sed -i 's/\\r$//')"
FILLER = "x" * (LONGEST - 1)  # a character begins in the first block and ends in the second


@pytest.mark.parametrize(
    ("content", "text", "lost"),
    [
        (b"\xef\xbb\xbfone\r\ntwo\rthree\n\n \t", "one\r\ntwo\rthree\n\n \t", 0),
        (FILLER.encode() + "é".encode() + b"\xff\xfe end\xc3", FILLER + "é\ufffd\ufffd end\ufffd", 3),
        ("é \ufffd, an original".encode(), "é \ufffd, an original", 0),
    ],
    ids=["white space", "invalid", "replaced before"],
)
def test_text_is_read_as_it_is_and_what_is_not_utf8_becomes_u_fffd_and_is_counted(tmp_path, content, text, lost):
    (tmp_path / "a.txt").write_bytes(content)
    source = of_path(tmp_path / "a.txt")
    place = f"{tmp_path}/a.txt line 1, byte offset {len(FILLER) + 2:,}"
    for _ in range(2):
        assert read(source) == [text]
        assert source.notes.pop(CRLF, None) == ((1, [f"{tmp_path}/a.txt"]) if "\r\n" in text else None)
        before = [source.notes.pop(fact) for fact in [*source.notes] if "another program lost" in fact]
        assert len(before) == ("\ufffd" in text and not lost)
        assert [*source.notes.values()] == [(lost, [place])] * bool(lost) and source.replaced == lost


@pytest.mark.slow
@pytest.mark.parametrize("name", ["big.txt", "big.txt.gz", "big.jsonl"])
def test_a_document_larger_than_its_memory_is_read_in_bounded_pieces(tmp_path, name):
    file, lines = tmp_path / name, "a line of text, then another\n" * 40_000
    content = (json.dumps({"text": lines}) + "\n" if "jsonl" in name else lines).encode() * 25
    file.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    tracemalloc.start()
    try:
        source = of_path(file, "jsonl" if "jsonl" in name else "text")
        lengths = [len(piece) for document in source.documents() for piece in document]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(lengths) == 29_000_000 and max(lengths) <= LONGEST and peak < 12_000_000


def test_jsonl_gives_one_document_a_line_and_passes_over_null(tmp_path):
    lines = [json.dumps({"body": text, "id": 1}) for text in ("one", "two\nlines\u2028", "<|endoftext|>", None, None)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "packed \\ud800 half \xff"}'))
    (tmp_path / "README.md").write_text("not JSON")
    source = of_path(tmp_path, "jsonl", text_field="body", separator=None)
    assert read(source) == ["one", "two\nlines\u2028", "<|endoftext|>", "packed \ufffd half \ufffd"]
    assert source.notes == {
        "Records left out whose body is null": (2, [f"{tmp_path}/a.jsonl line {line}" for line in (7, 9)]),
        "Bytes that are not UTF-8 and became U+FFFD": (2, [f"{tmp_path}/b.jsonl.gz line 1"]),
    }


@pytest.mark.parametrize("source", ["text", "jsonl"])
@pytest.mark.parametrize("separator", [END_OF_TEXT, "---", "\n\n\n"])
def test_a_separator_ends_a_document_and_takes_the_line_ends_after_it(tmp_path, source, separator):
    end = "" if separator[0] == "\n" else "\n"  # which is the separator's there
    stories = [f"\n one{end}", f"two\n\nwith a gap {end}", " three, the last"]
    text = separator.join([stories[0], "\r\n" + stories[1], " \t" + end, "", "\n\n" + stories[2], "\n"])
    content = json.dumps({"text": text}) if source == "jsonl" else text
    (tmp_path / "a").write_bytes(content.encode())
    file = (tmp_path / "a").rename(tmp_path / f"a.{source}")
    assert read(of_path(file, source, separator=separator)) == stories
    assert read(of_path(file, source, separator=None)) == [text]


@given(
    text=st.text("ab- \n", max_size=60),
    separator=st.sampled_from(["-", "--", "-a-", "---", "\n\n"]),
    size=st.integers(1, 8),
)
def test_a_separator_is_found_wherever_the_blocks_end(text, separator, size):
    first, *others = text.split(separator)
    expected = [one for one in (first, *(other.lstrip("\r\n") for other in others)) if one.strip()]
    blocks = (text[start : start + size] for start in range(0, len(text), size))
    assert ["".join(document) for document in divided(blocks, separator)] == expected


def test_a_document_between_separators_is_read_in_bounded_pieces_whatever_its_size():
    block = "a line of text, then another\n" * 1000
    text = (part for part in [*[block] * 50, END_OF_TEXT, *[block] * 50])
    assert [[len(piece) <= LONGEST for piece in document] for document in divided(text, END_OF_TEXT)] == [
        [True] * 6
    ] * 2


def test_the_library_and_shakespeare_are_not_divided_and_keep_their_fingerprints(monkeypatch, tmp_path):
    assert DataConfig().separator == END_OF_TEXT and Source(DataConfig()).separator is None
    plain, file = DataConfig(separator=None), tmp_path / "a.txt"
    assert Source(DataConfig()).fingerprint == Source(plain).fingerprint
    file.write_text("one")
    assert len({of_path(file, separator=separator).fingerprint for separator in (END_OF_TEXT, "---", None)}) == 3


FINE = b'{"text": "fine"}\n\n'
REFUSED = {
    "missing.txt": (None, "names no regular file (seen from"),
    "empty/": (None, "names no regular file (seen from"),
    "utf16.txt": ("\ufeffsome words".encode("utf-16-le"), "is not text in UTF-8"),
    "cyrillic.txt": (("чтение, письмо\n" * 9).encode("cp1251"), "is not text in UTF-8"),
    "cut.gz": (gzip.compress(bytes(range(256)))[:200], "cannot be read"),
    "others.jsonl/": (b"x", "names no JSON lines file (seen from"),
    "cut.jsonl": (FINE + b'{"text": "cut', "line 3 is not JSON"),
    "deep.jsonl": (FINE + b"[" * 100_000, "line 3 is not JSON"),
    "list.jsonl": (FINE + b"[1, 2]", "line 3 is not a JSON object"),
    "number.jsonl": (FINE + b'{"text": 7}', "line 3: data.text_field=text is not text (7)"),
    "other.jsonl": (FINE + b'{"body": "x"}', "line 3 has no field data.text_field=text: choose one of body"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_text_that_cannot_be_read_is_refused_by_name_in_one_sentence(tmp_path, name):
    content, message = REFUSED[name]
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    if content is not None:
        (path / "a.txt" if path.is_dir() else path).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read(of_path(path, "jsonl" if "jsonl" in name else "text"))
    assert str(caught.value).startswith(f"data.path={path}") and "\n" not in str(caught.value) and caught.value.remedy


def test_places_that_cannot_be_read_are_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match="^data.path=~nobody-here/a names no user of this machine: write"):
        of_path("~nobody-here/a")
    with pytest.raises(DataError, match=f"^data.name={tmp_path} names no regular file"):
        Source(DataConfig(source="hf", name=str(tmp_path)))
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(13, "Permission denied", "a/secret")))
    with pytest.raises(SettingsError, match=f"data.path={tmp_path} cannot be read .Permission denied: a/secret.: give"):
        of_path(tmp_path)


# Shakespeare


def shakespeare(tmp_path: Path, monkeypatch, answer: mock.Mock) -> Source:
    """The source where the network gives `answer`, and where "To be" is all that is his."""
    monkeypatch.setattr(texts, "urlopen", answer)
    monkeypatch.setattr(texts, "SHAKESPEARE_SHA256", hashlib.sha256(b"To be").hexdigest())
    return Source(DataConfig(source="shakespeare", cache_dir=str(tmp_path)))


def test_shakespeare_is_downloaded_once_and_the_same_wherever_it_lies(tmp_path, monkeypatch):
    answer = mock.Mock(side_effect=lambda *_, **__: io.BytesIO(b"To be"))
    first = shakespeare(tmp_path / "a", monkeypatch, answer)
    assert first.fingerprint == shakespeare(tmp_path / "b", monkeypatch, answer).fingerprint and answer.call_count == 2
    assert read(first) == read(shakespeare(tmp_path / "a", monkeypatch, mock.Mock())) == ["To be"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(urllib.error.URLError("no network"), "{url}.*put a copy at {file}.*data.path=FILE"), ([b"<html>"], "sha256")],
)
def test_what_is_not_shakespeare_is_refused_and_not_kept(tmp_path, monkeypatch, answer, problem):
    answer = map(io.BytesIO, answer) if isinstance(answer, list) else answer
    problem = problem.format(url=texts.SHAKESPEARE_URL, file=tmp_path / "tinyshakespeare.txt")
    with pytest.raises(DataError, match=problem):
        shakespeare(tmp_path, monkeypatch, mock.Mock(side_effect=answer))
    assert not any(tmp_path.iterdir())


def test_a_copy_that_is_not_shakespeare_is_refused_before_its_tokens_take_his_name(tmp_path, monkeypatch):
    copy = tmp_path / "tinyshakespeare.txt"
    for content in (b"<html>To be</html>", b"To be\r\n", b""):
        copy.write_bytes(content)
        with pytest.raises(
            DataError, match=rf"{copy} has another sha256 than https.*: remove it, or .*data.path={copy}"
        ):
            shakespeare(tmp_path, monkeypatch, mock.Mock(side_effect=AssertionError))
    copy.write_bytes(b"To be")
    assert read(shakespeare(tmp_path, monkeypatch, mock.Mock(side_effect=AssertionError))) == ["To be"]


# Datasets


def datasets_of(monkeypatch, load_dataset) -> None:
    """Put a function in the place of the library's; None: it is not installed."""
    library = load_dataset and types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_records_stream_from_the_library_and_null_is_passed_over(monkeypatch):
    asked = []

    def load_dataset(path, **settings):
        asked.append((path, settings))
        return ({"body": text} for text in ("one", "", None, "two"))

    datasets_of(monkeypatch, load_dataset)
    hub = Source(DataConfig(source="hf", name="a/b", subset="en", split="test", text_field="body"))
    assert hub.describe() == "dataset a/b, split test" and read(hub) == ["one", "two"]
    assert hub.describe() == "dataset a/b, split test: 2 documents"
    assert hub.notes["Records left out whose body is null"][0] == 1
    assert asked == [("a/b", {"name": "en", "split": "test", "streaming": True})]


def broken(*_, **__):
    raise RuntimeError("Connection refused\n  a page of details")


def sliced(*_, split, **__):
    raise ValueError(f"Bad split: {split}[:10%]. Available splits: ['train']")  # as of a streamed dataset


def test_the_files_of_a_local_dataset_are_named_by_their_format(monkeypatch, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    datasets_of(monkeypatch, lambda *_, **__: ({"text": text} for text in ("one", "two")))
    source = Source(DataConfig(source="hf", name=str(tmp_path)))
    assert read(source) == ["one", "two"]
    assert source.describe() == f"dataset {tmp_path}, split train: 1 JSON lines file, 2 documents, 32 B"


@pytest.mark.parametrize("pattern", ["", "*", "**"])
def test_a_saved_dataset_is_refused_as_what_it_is_and_its_other_files_are_no_texts(tmp_path, pattern):
    """They were learned: the features of the data set, in JSON."""
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text('{\n "features": {}\n}')
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"\xff\xff\xff\xff" + bytes(60))
    with pytest.raises(DataError, match=f"is an Arrow file: data=hf data.name={tmp_path} trains on the folder"):
        read(Source(DataConfig(path=str(tmp_path / pattern))))
    (tmp_path / "data-00000-of-00001.arrow").unlink()
    assert len(read(Source(DataConfig(path=str(tmp_path))))) == 2, "such names alone say nothing"


def test_a_saved_dataset_is_read_by_data_hf(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = datasets.Dataset.from_dict({"text": ["one", "two"], "id": [1, 2]})
    records.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": records, "test": records.select([1])}).save_to_disk(tmp_path / "several")
    for name, split, wanted in (("one", "train", ["one", "two"]), ("several", "test", ["two"])):
        assert read(Source(DataConfig(source="hf", name=str(tmp_path / name), split=split))) == wanted


@pytest.mark.parametrize(
    ("load_dataset", "message"),
    [
        (None, r"needs the datasets library: pip install -e \"\.\[hf\]\""),
        (broken, r"data\.name=a/b, data\.subset=null, data\.split=train cannot be read \(Connection refused\)"),
        (sliced, r"Bad split: train\[:10%\]. Available splits: \['train'\]\): name one of these, without a slice"),
        (lambda _, **__: [{"story": "one"}], r"record 1 has no field data\.text_field=text: choose one of story"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_refused_in_a_sentence(monkeypatch, load_dataset, message):
    datasets_of(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=message) as caught:
        read(Source(DataConfig(source="hf", name="a/b")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["import no_such", "from json import no_such", "import json; json.no_such"])
@pytest.mark.parametrize(
    ("library", "settings"), [("datasets", {"source": "hf", "name": "a/b"}), ("pyarrow", {"path": "a.parquet"})]
)
def test_a_library_whose_import_fails_is_not_told_to_be_absent(tmp_path, monkeypatch, library, settings, fault):
    (tmp_path / f"{library}.py").write_text(fault)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, library, raising=False)
    said = rf"needs (the )?{library}( library)?, whose import fails \(.*no_such.*\): mend .* -U {library}"
    with pytest.raises(DataError, match=said):
        read(Source(DataConfig(**settings)))


def test_a_glob_below_a_folder_whose_name_looks_like_one(tmp_path):
    for folder in ("notes [2024]", "notes 2", "what?/deep [a]/er", "a*b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "n.txt").write_text(folder)

    def read(pattern: str) -> list[str]:
        return ["".join(document) for document in Source(DataConfig(path=str(tmp_path / pattern))).documents()]

    assert read("notes [2024]/*.txt") == ["notes 2"], "a pattern that matches stays one"
    (tmp_path / "notes 2" / "n.txt").unlink()
    assert read("notes [2024]/*.txt") == read("notes [2024]/**/*.txt") == read("notes [2024]/n.*") == ["notes [2024]"]
    assert read("what?/deep [a]/**/*.txt") == ["what?/deep [a]/er"]
    assert read("a*b/*.txt") == ["a*b"]
    with pytest.raises(DataError, match="names no regular file"):
        read("notes [2024]/*.md")


def test_the_folders_that_a_glob_names_are_told_with_the_glob_of_their_files(tmp_path):
    for place in ("5a/ann/essay.txt", "5b/bo/essay.txt", "6 a/cy/essay.txt", "rules.txt"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"{place[0]}.")

    def read(pattern: str) -> tuple[list[str], list[str]]:
        source = Source(DataConfig(path=str(tmp_path / pattern)))
        return ["".join(document) for document in source.documents()], source.note_lines()

    told = "Folders that the glob names, whose files are not read (/** after the glob reads them)"
    folders = ", ".join(str(tmp_path / name) for name in ("5a", "5b", "6 a"))
    assert read("*") == (["r."], [f"{told}: 3, first in {folders}."])
    assert read("*/**") == (["5.", "5.", "6."], [])
    assert read("r*") == (["r."], [])
    typed = shlex.quote(f"data.path={tmp_path}/? a/**")
    with pytest.raises(DataError, match=re.escape(f": it names 1 folder, and {typed} the files in them.")):
        read("? a/")
    assert read(shlex.split(typed)[0].removeprefix(f"data.path={tmp_path}/")) == (["6."], [])
    with pytest.raises(DataError, match=re.escape("names no CSV file (")) as refused:
        Source(DataConfig(source="csv", path=str(tmp_path / "5?")))
    assert f"'data.path={tmp_path}/5?/**/*.csv'" in str(refused.value)


def test_several_paths_and_an_address_are_refused_with_what_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "my b.txt"):
        (tmp_path / name).write_text(name)
    for typed in ("a.txt,my b.txt", "[a.txt, my b.txt]", "['a.txt', 'my b.txt']"):
        with pytest.raises(DataError) as caught:
            Source(DataConfig(path=typed))
        command, setting = re.fullmatch("(.*) makes a folder of them: then set (.*)", caught.value.remedy).groups()
        subprocess.run(["bash", "-c", command], check=True)
        texts = Source(DataConfig(path=setting.removeprefix("data.path="))).documents()
        assert ["".join(text) for text in texts] == ["a.txt", "my b.txt"]
        shutil.rmtree("texts")
    # Files of one name, beside a folder that is there already.
    (tmp_path / "texts").mkdir()
    for folder in ("x", "my y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    with pytest.raises(DataError) as caught:
        Source(DataConfig(path="x/a.txt,my y/a.txt,a.txt"))
    command, setting = re.fullmatch(
        "(.*) makes a folder of them: then set data.path=(.*)", caught.value.remedy
    ).groups()
    subprocess.run(["bash", "-c", command], check=True)
    assert read(Source(DataConfig(path=setting))) == ["x", "my y", "a.txt"] and setting != "texts"
    with pytest.raises(DataError, match=r"curl -LO 'https://a\.b/c\.txt\?d&e' downloads it"):
        Source(DataConfig(path="https://a.b/c.txt?d&e"))
    with pytest.raises(DataError, match="give a file, a folder"):
        Source(DataConfig(path="a.txt,none.txt"))


HUB = "https://huggingface.co/datasets"


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        *((f"{before}a/b-c", "train.py data=hf data.name=a/b-c ") for before in ("hf:", "hf://datasets/", f"{HUB}/")),
        ("a/b-c", "give a file, a folder or a quoted glob that holds text, or train.py data=hf data.name=a/b-c "),
        (f"{HUB}/a/b/tree/main/data", "train.py data=hf data.name=a/b "),
        (f"{HUB}/imdb/viewer/default/train", "train.py data=hf data.name=imdb "),
        (f"{HUB}/a/b/blob/main/c.txt", f"curl -LO {HUB}/a/b/resolve/main/c.txt downloads it"),
        (f"{HUB}/a/b/resolve/main/c.txt", f"curl -LO {HUB}/a/b/resolve/main/c.txt downloads it"),
        ("https://github.com/a/b/blob/main/c.txt", "curl -LO https://github.com/a/b/raw/main/c.txt downloads it"),
        ("https://github.com/a/b/tree/main/c", "git clone https://github.com/a/b downloads it; then give its folder"),
        ("https://gitlab.com/a/b.git", "git clone https://gitlab.com/a/b.git downloads it; then give its folder"),
        ("s3://a/b.txt", "download it first"),
        ("none/a.txt", "give a file, a folder or a quoted glob that holds text"),
        ("here/notes", "give a file, a folder or a quoted glob that holds text"),
    ],
)
def test_a_page_about_a_text_is_not_the_text(tmp_path, monkeypatch, address, remedy):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    for source in ("files", "hf"):
        with pytest.raises(DataError) as caught:
            Source(DataConfig(source=source, path=address))
        said = caught.value.remedy
        assert said.startswith(remedy) and ("data.name" in said) == ("data.name" in remedy)


@pytest.mark.skipif(sys.platform == "win32", reason="a command of the shell")
@pytest.mark.parametrize(
    ("folder", "setting", "end"), [("", "path", "\n"), ("reads", "path", "\r\n"), ("", "val_path", "\n")]
)
def test_a_list_of_files_is_no_text_and_the_command_makes_a_folder_of_them(tmp_path, monkeypatch, folder, setting, end):
    """As a tool reads it that takes several packed files; data=text reads the list."""
    monkeypatch.chdir(tmp_path)
    Path("reads").mkdir()
    for name in "ab":
        Path(f"reads/{name}.gz").write_bytes(gzip.compress(f"text of {name}".encode()))
    names = [str(Path("reads", f"{name}.gz").relative_to(folder)) for name in "ab"]
    listed = Path(folder, "list of files")
    listed.write_bytes(end.join([*names, ""]).encode())
    with pytest.raises(DataError, match="is a list of files: ") as caught:
        read(Source(DataConfig(path=str(listed)), f"data.{setting}"))
    command, typed, more = re.match("(.*) makes a folder of them: then set ([^;]*)(.*)", caught.value.remedy).groups()
    assert bool(more) == (setting == "path"), "data=text changes no text of data.val_path"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert typed == f"data.{setting}=texts"
    assert read(of_path("texts", "files")) == ["text of a", "text of b"]
    assert read(of_path(listed, "text")) == [end.join([*names, ""])]
    for line in ("a word", "a" * 9999, "\0"):
        listed.write_text("\n".join([line, *names]))
        assert not are_files("", listed.read_text().split("\n"))


def test_a_list_of_files_within_a_folder_is_noted(tmp_path):
    """Beside them, or as the folder's own: it is learned with the texts, and no text that names one file of many is."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"text of {name}\n")
    (tmp_path / "list").write_text("a.txt\r\nb.txt\r\n")
    (tmp_path / "no list").write_text("a.txt\nis the first\n")
    source = of_path(tmp_path, "files")
    assert len(read(source)) == 5
    assert f"Lists of files, which the model learns too: 1, first in {tmp_path / 'list'}." in source.note_lines()


def test_the_look_for_a_list_of_files_reads_no_long_line_whole(tmp_path):
    """A corpus in one line, such as text8, was read whole before it was read by blocks."""
    file = tmp_path / "one line.txt"
    file.write_text("a word " * 1_000_000)
    tracemalloc.start()
    try:
        refuse_list(str(file), "data.path")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_500_000


# {the files of a data set: those that data.path and data.val_path name, or none}.
SPLITS = {
    ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"): ("wiki.train.tokens", "wiki.valid.tokens"),
    ("train.csv", "test.csv", "README.md"): ("train.csv", "test.csv"),
    ("ptb/train/a.txt", "ptb/train/b/c.txt", "ptb/dev/d.txt"): ("ptb/train", "ptb/dev"),
    ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl"): (
        "train-*-of-*.jsonl",
        "validation-00000-of-00001.jsonl",
    ),
    ("set1.Training.txt", "set2.Held_out.txt"): ("set1.Training.txt", "set2.Held_out.txt"),
    ("train.txt",): None,
    ("trainer.py", "tests/a.py", "latest.txt", "value.txt", "train.txt"): None,
    ("valid.txt", "test.txt"): None,
    ("train.py", "test.txt"): None,
}


@pytest.mark.parametrize("names", SPLITS)
def test_the_settings_that_keep_the_splits_of_a_data_set_apart_are_named(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    wanted = SPLITS[names]
    apart = splits_apart(Source(DataConfig(path=str(tmp_path))).files)
    if wanted is None:
        assert not apart
    else:
        (typed,) = apart
        settings = dict(each.split("=") for each in shlex.split(typed))
        assert settings == {"data.path": f"{tmp_path}/{wanted[0]}", "data.val_path": f"{tmp_path}/{wanted[1]}"}
        learned, held = (
            read(Source(DataConfig(path=path, text_field="text", source="text"))) for path in settings.values()
        )
        assert learned and held and not {*learned} & {*held} and all("rain" in text for text in learned)


@pytest.mark.parametrize(
    ("train", "held"),
    [
        (("artist-train.txt", "lyrics-train.txt"), ("artist-val.txt", "lyrics-val.txt")),
        (("train.de", "train.en"), ("valid.de", "valid.en")),
        (("src-train.txt", "tgt-train.txt"), ("src-dev.txt", "tgt-dev.txt")),
        (("de/train", "en/train"), ("de/test", "en/test")),
        (tuple(f"{i}_train.txt" for i in "abcd"), tuple(f"{i}_test.txt" for i in "abcd")),
    ],
)
def test_the_splits_of_each_kind_of_files_are_named(tmp_path, train, held):
    """Those of the first alone were, as of names of artists beside their songs."""
    for name in (*train, *held, "all.txt"):
        file = tmp_path / name / "a.txt" if "/" in name else tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name} has rain.\n" * 40)
    pairs = [
        f"data.path={tmp_path}/{one} data.val_path={tmp_path}/{other}" for one, other in zip(train, held, strict=True)
    ]
    config = DataConfig(path=str(tmp_path))
    assert splits_apart(Source(config).files) == pairs


def test_the_metadata_of_a_folder_of_parquet_are_none_of_its_files(tmp_path):
    for name in ("part-0.parquet", "_metadata", "_common_metadata", "lang=en/part-1.parquet", "notes/_metadata.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    names = {str(Path(file).relative_to(tmp_path)) for file in find_files(str(tmp_path))}
    assert names == {"part-0.parquet", "lang=en/part-1.parquet", "notes/_metadata.txt"}
    assert [*find_files(str(tmp_path / "_*"))] == [str(tmp_path / "_common_metadata"), str(tmp_path / "_metadata")]


@pytest.mark.parametrize("count", [LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST])
def test_a_document_after_more_line_ends_than_a_piece_holds_is_read(tmp_path, count):
    content = f"one\n{END_OF_TEXT}{chr(10) * count}two\n{END_OF_TEXT}three\n"
    (tmp_path / "a.txt").write_text(content)
    source = Source(DataConfig(source="text", path=str(tmp_path / "a.txt")))
    assert ["".join(document).strip() for document in source.documents()] == ["one", "two", "three"]
    assert source.count == 3


@pytest.mark.parametrize(
    ("mark", "remedy"),
    [
        ("<|startoftext|>", "sed 's/<|startoftext|>//g' removes it"),
        ("<bos>", "sed 's/<bos>//g' removes it"),
        ("<|begin_of_text|>", "sed 's/<|begin_of_text|>//g' removes it"),
        ("<|end_of_text|>", "'data.separator=<|end_of_text|>' ends documents there"),
        ("<eos>", "'data.separator=<eos>' ends documents there"),
    ],
)
def test_the_marks_of_other_models_in_a_text_are_told_with_what_makes_documents_of_it(tmp_path, mark, remedy):
    file = tmp_path / "a.txt"
    file.write_text(f"one {mark} two<|endoftext|>three<|endoftext|>{mark}four{mark}")
    source = of_path(file)
    assert len(read(source)) == 3
    fact = f"Documents with {mark}, whose letters the model learns ({remedy}): 2, first in {file}."
    assert source.note_lines() == [fact]
    if remedy.startswith("sed"):
        command = f"{remedy.removesuffix(' removes it')} a.txt > b.txt"
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
        source = of_path(tmp_path / "b.txt")
        assert read(source) == ["one  two", "three", "four"]
    else:
        source = of_path(file, separator=mark)
        assert read(source) == ["one ", " two<|endoftext|>three<|endoftext|>", "four"]
    assert not source.note_lines()


def command_of_the_page(begin: str, end: str) -> str:
    """The command of docs/data.md from `begin` to `end`, for this Python."""
    page = (Path(__file__).parent.parent / "docs/data.md").read_text(encoding="utf-8")
    command = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", page, re.DOTALL)[0]
    return command.replace("python", shlex.quote(sys.executable), 1)


MEANT = 'Tom & Jerry said "it\'s <b>late</b>"\nAnd left\ta C:\\nest, été'


def test_what_a_dump_has_for_line_ends_is_told_and_the_command_of_the_page_makes_them(tmp_path):
    dumped = MEANT.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    (tmp_path / "dump.tsv").write_text(f"id\ttext\n1\t{dumped}\n2\tplain\n", encoding="utf-8")
    source = of_path(tmp_path / "dump.tsv", "files")
    assert read(source) == [dumped, "plain"]
    fact = "Records with \\n in two letters in text, which the model learns (docs/data.md has the command)"
    assert source.note_lines() == [f"{fact}: 1, first in {tmp_path}/dump.tsv line 2."]
    command = command_of_the_page("python -c 'import csv, json, re", "> dump.jsonl")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    source = of_path(tmp_path / "dump.jsonl", "files")
    assert read(source) == [MEANT, "plain"] and not source.note_lines()
    long = "word " * 40_000
    (tmp_path / "dump.tsv").write_text(f"text\n\\N\n\\\\N\na\\vb\n{long}\n")  # null, its letters, and a tab
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(of_path(tmp_path / "dump.jsonl", "files")) == ["\\N", "a\vb", long]


def test_the_commands_of_the_page_mask_addresses_and_names_and_make_typed_quotes(tmp_path):
    (tmp_path / "mails.txt").write_text("Ann Lee <ann.lee+x@mail.co.uk>, Joann: b_c@d.org. @ home, a@b\n")
    (tmp_path / "names.txt").write_bytes(b"Ann\r\nMary Lee \r\n\r\nLee")
    (tmp_path / "book.txt").write_text("“It’s time – no,” said ‘é’ — “日”\n", encoding="utf-8")
    commands = {"sed -E 's/[[:alnum:]": "masked", r'sed -E "s/\b($(': "nameless", 'sed -E "s/“': "typed"}
    for begin, made in commands.items():
        subprocess.run(["bash", "-c", command_of_the_page(begin, f"> {made}.txt")], check=True, cwd=tmp_path)
    assert (tmp_path / "nameless.txt").read_text() == "NAME NAME <EMAIL>, Joann: EMAIL. @ home, a@b\n"
    assert (tmp_path / "typed.txt").read_text(encoding="utf-8") == '"It\'s time - no," said \'é\' - "日"\n'


def test_the_commands_of_the_page_make_the_same_lines_whatever_the_ends_of_lines_and_columns(tmp_path):
    (tmp_path / "proteins.fasta").write_bytes(b">a b\r\nMK\r\nVA\r\n>c\nMM\n")
    (tmp_path / "molecules.smi").write_bytes(b"CCO\tethanol\r\nCC ethane\nC\r\n")
    for begin, made, lines in (
        ("awk '{sub(", "proteins", "MKVA MM"),
        ('awk \'{sub(/\\r$/, ""); ', "molecules", "CCO CC C"),
    ):
        subprocess.run(["bash", "-c", command_of_the_page(begin, f"> {made}.txt")], check=True, cwd=tmp_path)
        assert (tmp_path / f"{made}.txt").read_bytes().decode() == lines.replace(" ", "\n") + "\n"


def test_the_command_of_the_page_takes_books_out_of_old_and_new_headers(tmp_path):
    for number, mark in enumerate(("*** ", "***")):
        text = f"Title\r\n{mark}START OF THE BOOK ***\r\nBody\r\n{mark}END OF THE BOOK ***\r\nLicence\r\n"
        (tmp_path / f"pg{number}.txt").write_bytes(text.encode())
    subprocess.run(["bash", "-c", command_of_the_page("mkdir books &&", "done")], check=True, cwd=tmp_path)
    assert [file.read_bytes() for file in (tmp_path / "books").iterdir()] == [b"Body\n"] * 2


def test_the_commands_of_the_page_divide_a_text_into_three_parts(tmp_path):
    lines = [json.dumps({"text": f"{n} {n * n}"}) for n in range(700)]
    (tmp_path / "notes.jsonl").write_text("\n".join([*lines, *lines[:90], ""]))
    command = command_of_the_page("sort -u notes.jsonl", "> rest.jsonl")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    test, rest = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("test", "rest"))
    assert len(test) == 500 and len(rest) == 200 and {*test, *rest} == {*lines}
    assert test != sorted(test)


def test_the_command_of_the_page_leaves_out_heads_and_page_numbers_and_joins_divided_words(tmp_path):
    pages = ["1 A Tale\n\nThe old fa-\nther saw Nord-\nKorea –\nand 3-\n4 cats, a mü-\nßig", "A Tale 2\nday in won-\n"]
    plain = ["No head, and a day\nin 1999\n\n   7", "Nor here\n\n 8\n"]
    (tmp_path / "pdf").mkdir()
    (tmp_path / "pdf" / "a b.txt").write_text("\n\f".join([*pages, "3 A Tale\nderland.\n\f"]), encoding="utf-8")
    (tmp_path / "pdf" / "plain.txt").write_text("\f".join(plain))
    command = command_of_the_page("mkdir plain", "\ndone")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    meant = "The old father saw Nord-\nKorea –\nand 3-\n4 cats, a müßig\nday in wonderland.\n"
    assert (tmp_path / "plain" / "a b.txt").read_text(encoding="utf-8") == meant
    assert (tmp_path / "plain" / "plain.txt").read_text() == "No head, and a day\nin 1999\nNor here\n"


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_commands_of_the_page_keep_what_belongs_together_on_one_side(tmp_path):
    """Only numbers were divided: of a name jq said that it cannot be."""
    cases = [*range(60), "Anna", "Özgür", "P", "", None, 2.5]
    records = [{"case": case, "text": f"version {number}"} for number in range(3) for case in cases]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "versions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    commands = command_of_the_page("jq -c 'select((.case", "> held.jsonl")
    subprocess.run(["bash", "-c", commands], check=True, cwd=tmp_path)
    train, held = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("train", "held")
    )
    sums = [sum(map(ord, "null" if record["case"] is None else str(record["case"]))) for record in records]
    assert held == [record for record, letters in zip(records, sums, strict=True) if letters % 10 == 0]
    assert train == [record for record, letters in zip(records, sums, strict=True) if letters % 10]
    assert {"P", ""} <= {record["case"] for record in held}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_command_of_the_page_makes_days_with_names_of_telegrams_messages(tmp_path):
    def said(date, name, text, kind="message"):
        return {"type": kind, "date": f"2020-01-{date}:00", "from": name, "text": text}

    link = {"type": "link", "text": "https://a.b"}
    messages = [
        said("01T09:00", "Ann", "Hallo\nDu"),
        said("01T23:59", "Bö 🚲", ["see ", link, ""]),
        said("02T00:00", "Ann", ""),
    ]
    messages += [said("02T00:01", "Ann", "", "service"), said("03T00:01", "Ann", [link])]
    photo = {"type": "message", "date": "2020-01-03T00:02", "from": "Ann", "photo": "a.jpg"}
    messages += [photo, said("03T00:03", None, "Bye")]  # null: a deleted account
    chat = {"name": "Bö", "messages": messages}
    command = command_of_the_page("jq -c '.messages |", "> days.jsonl")
    of_all = command.replace("jq -c '.messages", "jq -c '.chats.list[].messages")
    expected = ["Ann: Hallo\nDu\nBö 🚲: see https://a.b", "Ann: https://a.b\nDeleted Account: Bye"]
    for typed, export, chats in (command, chat, 1), (of_all, {"chats": {"about": "", "list": [chat, chat]}}, 2):
        (tmp_path / "result.json").write_text(json.dumps(export))
        subprocess.run(["bash", "-c", typed], check=True, cwd=tmp_path)
        days = [json.loads(line)["text"] for line in (tmp_path / "days.jsonl").read_text(encoding="utf-8").splitlines()]
        assert days == expected * chats


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize(
    "head",
    [
        "01.02.20, 09:1{} - Ann: ",
        "[3/4/21, 10:00:0{}] Ann B: ",
        "09:1{}\tAnn B\t",
        "[Ann] [오후 9:1{}] ",
        "09:1{} <ann> ",
        "[1/2/2024 9:1{} AM] ann\n",
        "Feb 03, 2024  9:1{}:11 AM (Read by you after 7 seconds)\nAnn\n",
    ],
    ids=["android", "ios", "line", "kakao", "irc", "discord", "imessage"],
)
def test_the_commands_of_the_page_count_old_messages_behind_new_dates(tmp_path, head):
    """Of lines with tabs or brackets the times and names were compared too, so that no old message was found.

    A date on a line of its own was counted as a message, which was never found.
    """
    meet = "We meet at the station" + (" nine" if head.endswith("\n") else ": nine")  # without a head no colon
    old = [meet, "Bring the large umbrella, please", "ok"]
    new = f"{head.format(8)}{old[0]}\n{head.format(9)}ok\n"
    chat = "".join(f"{head.format(n)}{text}\n" for n, text in enumerate(old))
    (tmp_path / "chat.txt").write_text(chat + "Ann: see you\n" * 1_997 + new, encoding="utf-8")
    texts = [new, f"Ann: {old[1]}!", f"Bob: {old[0]}"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    count = command_of_the_page("says() {", "known.txt written.txt")
    says = command_of_the_page("says() {", "sort -u; }")
    count_repeated = command_of_the_page("head -n 2000", "rest.txt first.txt")
    for command in (count, f"{says}\n{count_repeated}"):
        done = subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, capture_output=True, text=True)
        assert [int(line) for line in done.stdout.split()] == [2, 1]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_json_that_was_escaped_twice_is_told_and_the_command_of_the_page_mends_it(tmp_path):
    (tmp_path / "twice.jsonl").write_text(json.dumps({"id": 1, "text": json.dumps("One.\nTwo")[1:-1]}) + "\n")
    source = of_path(tmp_path / "twice.jsonl", "files")
    assert read(source) == ["One.\\nTwo"] and "with \\n in two letters in text" in source.note_lines()[0]
    subprocess.run(["bash", "-c", command_of_the_page("jq -c '.text |=", "> once.jsonl")], check=True, cwd=tmp_path)
    source = of_path(tmp_path / "once.jsonl", "files")
    assert read(source) == ["One.\nTwo"] and not source.note_lines()


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_samples_whose_prompts_are_left_out_are_told_with_the_command_that_joins_them(tmp_path):
    file = tmp_path / "a.jsonl"
    made = {"seed": 1, "finish": "end", "made_by": "5c0e3f9a"}
    rows = [{"prompt": "Once", "text": " upon"}, {"prompt": "", "text": "Two"}, {"prompt": "é\n", "text": "\tx"}]
    file.write_text("".join(json.dumps(row | made) + "\n" for row in rows), encoding="utf-8")
    source = of_path(file, "files")
    assert read(source) == [" upon", "Two", "\tx"]
    (note,) = source.note_lines()
    said = rf"Samples of prompts, which are left out \((.*) joins them\): 2, first in {file} .*"
    command = re.fullmatch(said, note)[1]
    subprocess.run(["bash", "-c", command.replace("FILE", "a.jsonl")], check=True, cwd=tmp_path)
    source = of_path(tmp_path / "whole.jsonl", "files")
    assert read(source) == ["Once upon", "Two", "é\n\tx"] and not source.note_lines()
    # The prompts are no texts that go on after them, and records of others have a prompt of their own.
    file.write_text(json.dumps(rows[0] | made) + "\n")
    source = of_path(file, "files", text_field="prompt")
    assert read(source) == ["Once"] and not source.note_lines()
    file.write_text(json.dumps(rows[0]) + "\n")
    source = of_path(file, "files")
    assert read(source) == [" upon"] and not source.note_lines()


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_the_command_of_the_page_joins_two_columns_of_a_table(tmp_path, sign):
    """With semicolons all its texts were a line end."""
    table = '\ufeffquestion;id;answer\r\n"Who is ""Tom, or Jerry""?";1;"One.\nTwo"\r\nété?;2;oui\r\n'
    table = table.replace(";", sign)
    (tmp_path / "faq.csv").write_bytes(table.encode())
    with pytest.raises(DataError, match="choose one of question, id, answer, or data=text; docs/data.md joins several"):
        read(of_path(tmp_path / "faq.csv", "files"))
    command = command_of_the_page("python -c 'import csv, json, sys", "> faq.jsonl")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(of_path(tmp_path / "faq.jsonl", "files")) == ['Who is "Tom, or Jerry"?\nOne.\nTwo', "été?\noui"]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.slow
def test_the_command_of_the_page_joins_two_fields_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pairs = [{"en": "A cat.", "de": "Ein Kater."}, {"en": None, "de": "Grün"}]
    parquet.write_table(pyarrow.table({"id": ["7", "8"], "translation": pairs}), tmp_path / "pairs.parquet")
    command = command_of_the_page("python -c 'import json\nfrom pyarrow", "> pairs.jsonl")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(of_path(tmp_path / "pairs.jsonl", "files")) == ["A cat.\nEin Kater.", "\nGrün"]


@pytest.mark.parametrize(
    "text", ["the angle $\\nu$", 'print("a\\n")\nprint("b")', "AT&T; R&D &c.", "<p>a &amp; b</p>", "&hearts"]
)
def test_tex_code_and_html_are_no_text_that_was_written_otherwise(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "a.txt").write_text(text)
    for name in ("a.jsonl", "a.txt"):
        source = of_path(tmp_path / name, "files")
        assert read(source) == [text] and not source.note_lines()


def test_signs_of_html_are_told_and_the_commands_of_the_page_write_the_text(tmp_path):
    posted = html.escape(MEANT).replace("é", "&#233;")
    (tmp_path / "posts.jsonl").write_text(json.dumps({"id": 1, "text": posted}) + "\n")
    (tmp_path / "posts.txt").write_text(posted)
    begins = {"posts.jsonl": "python -c 'import html, json", "posts.txt": "python -c 'import html, sys"}
    for name, begin in begins.items():
        source = of_path(tmp_path / name, "files")
        assert read(source) == [posted]
        (note,) = source.note_lines()
        assert "with HTML's &amp; or its like" in note and "(docs/data.md has the command): 1, first in" in note
        made = name.replace("posts", "plain")
        subprocess.run(["bash", "-c", command_of_the_page(begin, f"> {made}")], check=True, cwd=tmp_path)
        source = of_path(tmp_path / made, "files")
        assert read(source) == [MEANT] and not source.note_lines()


CUES = ["<i>Hello</i> there.", "3", "2\n1", "{\\an8}up, {\\i1}up{\\i0} {sighs}", "{\\pos(9,9)}<v Ann>end 5"]
SPOKEN = "Hello there.\n3\n2\n1\nup, up {sighs}\nend 5\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "head", ["", "WEBVTT\nKind: captions\nLanguage: en\n\nSTYLE\n::cue { color: red }\n\nNOTE\none\n\nNOTE two\n\n"]
)
def test_the_command_of_the_page_keeps_what_is_said_in_subtitles(tmp_path, head, end):
    cues = [f"{number}\n00:00:0{number},5 --> 00:00:0{number},9\n{cue}\n" for number, cue in enumerate(CUES, start=1)]
    (tmp_path / "film.srt").write_bytes(b"\xef\xbb\xbf" + (head + "\n".join(cues)).replace("\n", end).encode())
    subprocess.run(["bash", "-c", command_of_the_page("sed -nE", "> film.txt")], check=True, cwd=tmp_path)
    assert (tmp_path / "film.txt").read_bytes().decode().replace("\n\n", "\n") == SPOKEN


def test_the_command_of_the_page_takes_each_line_of_automatic_captions_once(tmp_path):
    shown = [" ", "a<00:00:00.5><c> b</c>"], ["a b", " "], ["a b", "c<00:00:03.1><c> d</c>"], ["c d", " "]
    time = "00:00:01.000 --> 00:00:02.000 align:start position:0%"
    text = "WEBVTT\nKind: captions\n\n" + "".join("\n".join([time, *lines, "", ""]) for lines in shown)
    (tmp_path / "film.srt").write_text(text)
    commands = [command_of_the_page("sed -nE", "> film.txt"), command_of_the_page("grep '[^ ]'", "> lines.txt")]
    subprocess.run(["bash", "-c", "\n".join(commands)], check=True, cwd=tmp_path)
    assert (tmp_path / "lines.txt").read_text() == "a b\nc d\n"


IN_PARTS = {
    "e\u0301le\u0300ve": "\u00e9l\u00e8ve",
    "\u1112\u1161\u11ab": "\ud55c",  # a syllable of Korean
    "\u304b\u3099": "\u304c",  # of Japanese
    "Vie\u0323\u0302t": "Vi\u1ec7t",
}
WHOLE = ["élève", "한", "が", "Việt", "ज़रा", "फ़िल्म", "مُحَمَّد", "שָׁלוֹם", "👍🏽", "x\u0301", "Å ﬁ"]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_letters_in_parts_are_told_and_the_commands_of_the_page_write_them_whole(tmp_path):
    parts, whole = (" ".join(words) + "\n" for words in (IN_PARTS, IN_PARTS.values()))
    (tmp_path / "notes.txt").write_text(parts, encoding="utf-8")
    (tmp_path / "posts.jsonl").write_text(json.dumps({"text": parts, "id": 1}) + "\n")  # in escapes
    (tmp_path / "table.csv").write_text(f'id,text\n1,"{parts}"\n', encoding="utf-8")
    facts = {
        "notes.txt": "Files with letters in parts (NFD), e and a mark for é, which",
        "posts.jsonl": "Records with letters in parts (NFD), e and a mark for é in text, which",
        "table.csv": "Records with letters in parts (NFD), e and a mark for é in text, which",
    }
    for name, fact in facts.items():
        source = of_path(tmp_path / name, "files")
        assert read(source) == [parts]
        (note,) = source.note_lines()
        assert note.startswith(fact) and "(docs/data.md has the command): 1, first in" in note
    begins = {"whole.txt": "python -c 'import sys, unicodedata as u", "whole.jsonl": "jq -c . posts.jsonl"}
    for made, begin in begins.items():
        command = command_of_the_page(begin, f"> {made}")
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
        source = of_path(tmp_path / made, "files")
        assert read(source) == [whole] and not source.note_lines()


def test_marks_that_no_whole_letter_has_are_not_told(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(WHOLE), encoding="utf-8")
    source = of_path(tmp_path / "a.txt", "files")
    assert read(source) == [" ".join(WHOLE)] and not source.note_lines()


UNSEEN_SIGNS = "soft hyphens, zero-width spaces, direction marks or no-break spaces"
UNSEEN = [
    "re\u00adser\u00adva\u00adtion is ours",
    "a \u200bweb \u200bpage",
    "a\u2060b c",
    "has\u00a0a\u00a0ball and",
    "a\u00a0b",
    "6:05\u202fPM - she came and saw it, as he had said at eleven, and went",
    "\u200eimage omitted",
]
SEEN = [
    "reservation is ours",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u200b\u0e04\u0e23\u0e31\u0e1a",  # two words of Thai
    "Quoi\u00a0? 10\u00a0000 pas, dit-il, et puis il s'en va chez lui sans se hâter, le soir venu.",
    "Quoi\u202f? 10\u202f000 pas, dit-il, et puis il s'en va chez lui sans se hâter, le soir venu.",
    "\u05e9\u05dc\u05d5\u05dd\u200e (a)",  # Hebrew
    "\U0001f469\u200d\U0001f680 and می\u200cخواهم",  # joined and divided letters
]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_signs_that_nobody_sees_are_told_and_the_commands_of_the_page_remove_them(tmp_path):
    for text in UNSEEN:
        (tmp_path / "web.txt").write_text(text, encoding="utf-8")
        (tmp_path / "web.jsonl").write_text(json.dumps({"text": text}))
        for name, command in {"web.txt": "sed -E 's/\\xC2\\xAD", "web.jsonl": "jq -c '.text |= (gsub(\"["}.items():
            source = of_path(tmp_path / name, "files")
            assert read(source) == [text]
            (note,) = source.note_lines()
            assert f"with {UNSEEN_SIGNS}, which look like nothing or a blank" in note
            made = f"seen{Path(name).suffix}"
            subprocess.run(["bash", "-c", command_of_the_page(command, f"> {made}")], check=True, cwd=tmp_path)
            source = of_path(tmp_path / made, "files")
            blanks = {"\u00a0": " ", "\u202f": " "}
            plain = "".join(blanks.get(sign, sign) for sign in text if sign not in "\u00ad\u200b\u200e\u2060")
            assert [each.strip() for each in read(source)] == [plain] and not source.note_lines()
    for text in SEEN:
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        source = of_path(tmp_path / "a.txt", "files")
        assert read(source) == [text] and not source.note_lines()


def test_installed_packages_in_a_folder_of_texts_are_told(tmp_path):
    for name in ("mine.py", "venv/lib/python3.14/site-packages/theirs/a.py", "web/node_modules/b.js"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a text")
    source = of_path(tmp_path, "files")
    assert len(read(source)) == 3
    theirs = tmp_path / "venv/lib/python3.14/site-packages"
    (note,) = source.note_lines()
    assert note.startswith(f"Files of installed packages, which the model learns too: 2, first in {theirs}/theirs/a.py")
    for asked in (theirs, f"{theirs}/**/*.py"):
        source = of_path(asked, "files")
        assert len(read(source)) == 1 and not source.note_lines()


CHATS = [
    "{month}/{day}/24, {hour}:05 - ",
    "[{day:02}.{month:02}.24, {hour}:05:09] ",
    "\u200e[{day}/{month}/2024, {hour}:05:09\u202fPM] ",
    "2024/{month:02}/{day:02}, {hour}:05 pm - ",
    "[2024-{month:02}-{day:02}, {hour}:05:09] ",
    "2024-{month:02}-{day:02} {hour}:05 - ",
    "{day}.{month}.2024 {hour}.05 - ",
]


@pytest.mark.parametrize("begin", CHATS)
def test_the_commands_of_the_page_divide_a_chat_by_messages_and_by_days(tmp_path, begin):
    """WhatsApp writes dates in the order and with the signs of the phone's language."""
    times = [dict(month=month, day=day, hour=hour) for month in (1, 12) for day in (1, 2, 28) for hour in (9, 10)]
    lines = [f"{begin.format(**time)}Ann: at 1.2.3, 4.5 or so\nsecond line\n" for time in times]
    (tmp_path / "chat.txt").write_text("".join(lines), encoding="utf-8")
    page = command_of_the_page("time='", "days.txt")
    subprocess.run(["bash", "-c", page], check=True, cwd=tmp_path)
    assert [text.strip() for text in read(of_path(tmp_path / "messages.txt"))] == [
        line.strip("\u200e\n") for line in lines
    ]
    days = ["".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    assert read(of_path(tmp_path / "days.txt")) == days


@pytest.mark.parametrize(
    "begin",
    [
        "Jan 0{}, 2024 {:2}:05:11 AM (Read by you after 7 seconds)\nAnn\n",
        "January {}, 2024 at {}:05 AM - Ann: ",
        "Tuesday, January {}, 2024 at {}:05 AM\nAnn\n",
        "[0{}-Jan-24 {:02}:05 AM] ann\n",
        "[1/{}/2024 {}:05 AM] ann\n",
        "{}. März 2024 um {}:05 - Ann: ",
        "{} de enero de 2024, {}:05 - Ann: ",
        "2024년 1월 {}일 오전 {}:05, Ann : ",
    ],
)
def test_the_command_of_the_page_divides_a_chat_by_days_whose_months_are_words(tmp_path, begin):
    """A chat of iMessage, or one of Discord with months in letters, was left as it was."""
    said = "Jan 2024 at 9:30\n2 eggs, 12 apples\nOn 3 May at 10:30\n\n"
    days = ["".join(f"{begin.format(day, hour)}{said}" for hour in (9, 10)) for day in (1, 2, 3)]
    (tmp_path / "chat.txt").write_text("".join(days), encoding="utf-8")
    command = command_of_the_page("awk 'BEGIN {\n    date", "> days.txt")
    for locale in ("C", "C.UTF-8"):
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=os.environ | {"LC_ALL": locale})
        assert read(of_path(tmp_path / "days.txt")) == days


@pytest.mark.parametrize(
    "day",
    [
        "2024/01/0{}(Tue)",
        "2024/01/0{}(火)",
        "Tue, 0{}/01/2024",
        "2024.01.0{} Tuesday",
        "2024-01-0{}\r",
        "--------------- 2024년 1월 {}일 월요일 ---------------",
    ],
)
def test_the_command_of_the_page_divides_a_chat_by_lines_that_have_a_date_alone(tmp_path, day):
    """LINE and KakaoTalk write the date before the messages of a day: nothing was divided, without a word."""
    said = "09:15\tAnn\tat 10:30:15\n3.4.2020 at nine\n10:30:15\n[Ann] [오전 9:15] 1, 2, 3\n2024.01.01 09:15 Ann\n"
    days = [f"{day.format(n)}\n{said}" for n in (1, 2, 3)]
    (tmp_path / "chat.txt").write_bytes("".join(days).encode())
    command = command_of_the_page("sed -E 's#^(-+ )?", "> days.txt")
    for locale in ("C", "C.UTF-8"):
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=os.environ | {"LC_ALL": locale})
        assert read(of_path(tmp_path / "days.txt")) == days


@pytest.mark.parametrize("encoding", ["base64", "quoted-printable"])
def test_mail_that_is_encoded_is_told_and_the_command_of_the_page_writes_its_texts(tmp_path, encoding):
    bodies = ["Café, tonight?\n", "At eight = fine.\n"]
    box = mailbox.mbox(tmp_path / "mail.mbox")
    for body in bodies:
        mail = email.message.EmailMessage()
        mail["Subject"] = "dinner"
        mail.set_content(body, cte=encoding)
        mail.add_attachment(bytes(range(256)), maintype="image", subtype="png")
        box.add(mail)
    box.add("From: a\nContent-Type: text/plain\n\nNaïve.\n".encode())  # as they lie in archives
    box.add(b"From: a\nContent-Type: text/plain; charset=x-unknown\n\nNo such.\n")
    box.close()
    source = of_path(tmp_path / "mail.mbox", "files")
    assert "Café" not in read(source)[0]
    fact = "Files of mail in base64 or quoted-printable, which the model learns (docs/data.md has the command)"
    assert source.note_lines() == [f"{fact}: 1, first in {tmp_path}/mail.mbox."]
    command = command_of_the_page("python -c 'import email,", "> mail.jsonl")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(of_path(tmp_path / "mail.jsonl", "files")) == [*bodies, "Naïve.\n", "No such.\n"]


def test_the_command_of_the_page_copies_notes_without_fields_private_folders_and_other_encodings(tmp_path):
    notes = {
        "Daily/utf8.md": "---\ntags: [a]\n---\n# Café\n\n---\n\nRain.\n".encode(),
        "Daily/utf16.md": "---\r\ntitle: Ü\r\n---\r\n# Über\r\n".encode("utf-16"),
        "mark.md": "\ufeffplain\n".encode(),
        "old.md": "Öl — alt\n".encode("cp1252"),
        "empty.md": b"",
        "none.md": b"---\n---\nRain.\n\n---\n\nSun.\n",
        "Private/secret.md": b"secret",
        "Work/Private/secret.md": b"secret",
        ".obsidian/plugin.md": b"secret",
        "picture.png": b"\x89PNG",
    }
    for name, code in notes.items():
        (tmp_path / "vault" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vault" / name).write_bytes(code)
    command = command_of_the_page("python -c 'import pathlib, re", 'encoding="utf-8")\'')
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    copies = [file for file in (tmp_path / "notes").rglob("*") if file.is_file()]
    found = {file.relative_to(tmp_path / "notes").as_posix(): file.read_text("utf-8") for file in copies}
    assert found == {
        "Daily/utf8.md": "# Café\n\n---\n\nRain.\n",
        "Daily/utf16.md": "# Über\n",
        "mark.md": "plain\n",
        "old.md": "Öl — alt\n",
        "empty.md": "",
        "none.md": "Rain.\n\n---\n\nSun.\n",
    }


@pytest.mark.skipif(shutil.which("bzcat") is None, reason="needs bzip2's command")
def test_the_command_of_the_page_makes_a_record_of_each_text_of_a_dump_in_xml(tmp_path):
    texts = ["A [[river]] &amp; a <town>.\n\n== History ==\n", "", "#REDIRECT [[A]]", "It's <b>1</b> ü ·"]
    pages = [f"<page><title>text {n}</title><text>{escape(text)}</text></page>\n" for n, text in enumerate(texts)]
    marked = "<page><text>one <i>two</i> three</text></page>"
    dump = f"<mediawiki xmlns='http://www.mediawiki.org/xml/export-0.10/'>{''.join(pages)}{marked}</mediawiki>"
    (tmp_path / "simplewiki-pages-articles.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    subprocess.run(["bash", "-c", command_of_the_page("bzcat", "> pages.jsonl")], check=True, cwd=tmp_path)
    found = [json.loads(line)["text"] for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    assert found == [*texts, "one two three"]


POSTS = {
    "From: a@b (A B)\nNewsgroups: rec.autos,\n\trec.misc\nSubject: Re: tyres\nLines: 3\n\n": "> Which?\n\nTwo.\n",
    "From a@b Mon Apr 05\r\nDate: Mon\r\nsubject: more\r\nFROM: a@b\r\n\r\n": "Note: none.\r\n\r\nEnd",
}
NO_POSTS = [
    "From: here to there\nby night\n\nSubject: none\n",
    "Subject: one\nNote: two\n\nFrom: a\n",
    "From: a\nSubject: b\n",
]


def test_headers_of_mail_and_news_are_told_and_the_command_of_the_page_leaves_them_out(tmp_path):
    folder = tmp_path / "20_newsgroups"
    for number, (headers, body) in enumerate(POSTS.items()):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "101").write_bytes((headers + body).encode())
    for number, text in enumerate(NO_POSTS):
        (folder / f"no{number}").write_text(text)
    source = of_path(folder, "files")
    read(source)
    fact = "Files of mail or news with headers, which the model learns (docs/data.md has the command): 2"
    assert any(line.startswith(f"{fact}, first in {folder}{os.sep}0") for line in source.note_lines())
    subprocess.run(["bash", "-c", command_of_the_page("mkdir posts &&", "done")], check=True, cwd=tmp_path)
    source = of_path(tmp_path / "posts", "files")
    assert read(source) == [*POSTS.values()] and "with headers" not in str(source.note_lines())


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_headers_in_records_are_told_and_the_command_of_the_page_leaves_them_out(tmp_path):
    texts = [*(headers.removeprefix("From a@b Mon Apr 05\r\n") + body for headers, body in POSTS.items()), *NO_POSTS]
    (tmp_path / "mails.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    source = of_path(tmp_path / "mails.jsonl", "files")
    assert read(source) == texts
    fact = "Records with headers of mail or news in text, which the model learns (docs/data.md has the command): 2"
    assert any(line.startswith(fact) for line in source.note_lines())
    command = command_of_the_page("jq -c '.text |= sub(", "> bodies.jsonl")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    found = read(of_path(tmp_path / "bodies.jsonl", "files"))
    assert found[:3] == [*POSTS.values(), NO_POSTS[0]]


def test_byte_order_marks_of_joined_files_are_told_and_are_no_part_of_records(tmp_path):
    mark = b"\xef\xbb\xbf"
    contents = {
        "a.txt": mark + b"one\n",  # which the encoding leaves out
        "b.txt": (mark + b"one\n") * 3,
        "c.txt": b"word " * (LONGEST // 4) + mark + b"end",
        "d.csv": (mark + b"text\none\n") * 2,
        "e.jsonl": (mark + b'{"text": "one"}\n') * 2 + mark,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    source = Source(DataConfig(path=str(tmp_path)))
    found = read(source)
    assert found == [
        "one\n",
        contents["b.txt"].decode()[1:],
        contents["c.txt"].decode(),
        *("one", "\ufefftext", "one"),
        *("one", "one"),
    ]
    fact = (
        r"Files with byte order marks within the text, which the model learns (to remove: sed -i 's/\xEF\xBB\xBF//g')"
    )
    assert source.note_lines() == [
        f"{fact}: 2, first in {tmp_path}/b.txt, {tmp_path}/c.txt.",
        "Rows that repeat the name of the only column, text, which the model learns: "
        f"1, first in {tmp_path}/d.csv line 3.",
        f"Records with byte order marks in text, which the model learns: 1, first in {tmp_path}/d.csv line 3.",
    ]
    # The command that is named removes them.
    subprocess.run(["sed", "-i", r"s/\xEF\xBB\xBF//g", str(tmp_path / "b.txt")], check=True)
    assert (tmp_path / "b.txt").read_bytes() == b"one\n" * 3


def test_nuls_that_records_write_as_escapes_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two\\u0000"}\n')
    source = of_path(tmp_path / "a.jsonl", "files")
    assert read(source) == ["one", "two\0"]
    assert source.note_lines() == [
        f"Records with NULs in text, which the model learns: 1, first in {tmp_path}/a.jsonl line 2."
    ]


def test_line_ends_of_windows_and_old_macs_are_told_wherever_they_begin(tmp_path):
    bar = "10%\r20%\r30%\ndone\n"
    contents = {
        "a.txt": "one\ntwo\n",
        "bar.log": bar,
        "late.txt": "word " * (LONGEST // 4) + "\nend\r\n",
        "mac.txt": "one\rtwo\r",
        "r.jsonl": '{"text": "one\\r\\ntwo"}\n{"text": "three\\n"}\n{"text": "four\\r\\n"}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    source = Source(DataConfig(path=str(tmp_path)))
    found = ["".join(document) for document in source.documents()]
    assert found[:4] == [contents[name] for name in ("a.txt", "bar.log", "late.txt", "mac.txt")]
    assert source.note_lines() == [
        f"{CRLF}: 1, first in {tmp_path}/late.txt.",
        f"Files with \\r at line ends, which the model learns (to convert: sed -i 's/\\r/\\n/g'): 1, "
        f"first in {tmp_path}/mac.txt.",
        "Records with \\r\\n at line ends in text, which the model learns: 2, "
        f"first in {tmp_path}/r.jsonl line 1, {tmp_path}/r.jsonl line 3.",
    ]
    # The command that is named makes lines of an old Mac's file.
    subprocess.run(["sed", "-i", r"s/\r/\n/g", str(tmp_path / "mac.txt")], check=True)
    assert (tmp_path / "mac.txt").read_bytes() == b"one\ntwo\n"


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_glob_follows_links_but_not_to_a_folder_that_it_is_in(tmp_path, monkeypatch):
    """A link to the folder itself gave each file 41 times, and two such links gave no answer."""
    for name in ("c/a.txt", "c/sub/b.txt", "c/sub/.hidden/h.txt", "c/x/y/b.md", "elsewhere/o.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c" / "linked").symlink_to("../elsewhere")
    monkeypatch.chdir(tmp_path)

    def found(pattern: str) -> list[str]:
        return [os.path.relpath(file) for file in find_files(pattern)]

    before = {}
    for pattern in ("**", "**/*.txt", "c/**/*.txt", "c/**", "**/**/*.txt", "*/**/sub/**/*", "./c/**/y/*.md"):
        paths = glob.glob(pattern, recursive=True)  # noqa: PTH207
        before[pattern] = found(pattern)
        assert before[pattern] == sorted({os.path.normpath(path) for path in paths if Path(path).is_file()}) != []

    # To itself twice, above, and in a circle of two.
    for link, target in {"c/all": ".", "c/all2": ".", "c/x/up": "..", "c/x/y/sub": "../../sub"}.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "c" / "sub" / "y").symlink_to("../x/y")
    extra = ["c/sub/y/b.md", "c/x/y/sub/b.txt"]  # by links to folders that they are not in
    for pattern in ("**", "**/*.txt", "c/**/*.txt", "c/**"):
        assert {*before[pattern]} <= {*found(pattern)} <= {*before[pattern], *extra}


@pytest.mark.parametrize("pattern", some(["**", "", "**/*"], 3))
def test_runs_and_sweeps_within_a_folder_are_no_part_of_its_text(train_config, tmp_path, monkeypatch, pattern):
    """A run that wrote into the folder of its text could not be resumed, and the next one learned its report."""
    (tmp_path / "notes").mkdir()
    monkeypatch.chdir(tmp_path / "notes")
    Path("a.txt").write_text("one")
    Path("config.yaml").write_text("two: 2")
    wanted = of_path(pattern or ".", "files")
    assert read(wanted) == ["one", "two: 2"]
    run = Path("outputs", "run")
    train(replace(train_config, run_dir=str(run), max_steps=2, sample_tokens=0))
    sweep = Path("multirun", "sweep")
    shutil.copytree(run, sweep / "0")
    write_leaderboard(sweep)
    found = of_path(pattern or ".", "files")
    assert read(found) == read(wanted) and found.fingerprint == wanted.fingerprint

    # They are read where they are asked for.
    assert any("step 2" in text for text in read(of_path(run / "train.log")))
    assert f"{run}/train.log" in {os.path.relpath(file) for file in of_path(run).files}
    assert {os.path.relpath(file) for file in of_path("multirun/*/*.csv").files} == {f"{sweep}/leaderboard.csv"}


TWICE = [
    ("Déjà vu, naïve Straße", "latin-1", "ISO-8859-1"),
    ("日本語のテキスト 😠", "latin-1", "ISO-8859-1"),
    ("“Déjà vu – she said…", "cp1252", "CP1252"),
    ("Привет, мир", "cp1251", "CP1251"),
    ("It’s “Déjà vu” – “日本語”", "cp437", "CP437"),
    ("It’s “Déjà vu” – “日本語”", "cp850", "CP850"),
]


@pytest.mark.parametrize(("text", "codec", "name"), TWICE)
@pytest.mark.parametrize("ending", ["txt", "jsonl", "json", "csv"])
def test_utf8_that_was_read_in_another_encoding_is_told_with_the_command_that_mends_it(
    tmp_path, text, codec, name, ending
):
    """So write Facebook's exports, and programs that take UTF-8 for Latin-1."""
    wrong = text.encode().decode(codec)
    file = tmp_path / f"a.{ending}"
    contents = {
        "txt": wrong + "\n" + "plain words\n" * (LONGEST // 6) + wrong,
        "jsonl": json.dumps({"text": wrong}) + "\n" + json.dumps({"text": "plain"}),
        "json": json.dumps([{"text": wrong}, {"text": "plain"}]),
        "csv": f'text\n"{wrong}"\nplain\n',
    }
    file.write_text(contents[ending], encoding="utf-8")
    source = Source(DataConfig(path=str(file)))
    read(source)
    (note,) = [line for line in source.note_lines() if f"such as {'é'.encode().decode(codec)} for é" in line]
    command = re.search(r"to convert: (.*?)\)", note)[1]
    assert f"was read as {name}" in note and command.endswith(f"iconv -f UTF-8 -t {name}")
    if shutil.which("jq") and shutil.which("iconv"):
        piped = command.replace("FILE", str(file)) if "FILE" in command else f"{command} {file}"
        made = subprocess.run(["bash", "-c", piped], capture_output=True, check=True).stdout
        mended = tmp_path / f"mended.{'jsonl' if ending == 'json' else ending}"
        mended.write_bytes(made)
        assert "".join(read(Source(DataConfig(path=str(mended))))).startswith(text)


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize(
    ("text", "codec", "lacking"), [("“Déjà vu” Ý", "cp1252", "\x9d\x8f"), ("Иван Ильин", "cp1251", "\x98")]
)
def test_what_browsers_made_of_utf8_is_told_and_the_commands_of_the_page_mend_it(tmp_path, text, codec, lacking):
    wrong = "".join(bytes([code]).decode(codec, "ignore") or chr(code) for code in text.encode())
    assert set(lacking) & set(wrong)
    (tmp_path / "wrong.txt").write_text(wrong, encoding="utf-8")
    (tmp_path / "wrong.jsonl").write_text(json.dumps({"text": wrong}))  # in escapes
    begins = {
        "txt": "python -c 'import codecs, sys\n  codecs.register_error(\"kept",
        "jsonl": "jq -c . wrong.jsonl | python",
    }
    for ending, begin in begins.items():
        source = of_path(tmp_path / f"wrong.{ending}", "files")
        assert read(source) == [wrong]
        (note,) = source.note_lines()
        assert f"read as windows-{codec[2:]}, such as" in note and "(docs/data.md has the command): 1, first" in note
        command = command_of_the_page(begin, f"> right.{ending}").replace("\n  ", "\n").replace("cp1252", codec)
        subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
        source = of_path(tmp_path / f"right.{ending}", "files")
        assert read(source) == [text] and not source.note_lines()


def test_a_table_is_told_as_of_one_encoding_that_converts_all_of_it(tmp_path):
    """Most words fit several encodings: those of Ü are CP1252's alone."""
    texts = ["schön, öde, böse, Möwe", "Über Äcker, Öfen, Übel", "fröhlich, nötig, größer"]
    file = tmp_path / "twice.csv"
    file.write_text("text\n" + "".join(f'"{text.encode().decode("cp1252")}"\n' for text in texts), "utf-8")
    source = Source(DataConfig(path=str(file)))
    read(source)
    (note,) = source.note_lines()
    assert "read as CP1252" in note and "iconv -f UTF-8 -t CP1252): 3, first" in note
    # Others may lie in another file.
    (tmp_path / "other.csv").write_text(f"text\n{'日本語のテキスト'.encode().decode('latin-1')}\n", "utf-8")
    source = Source(DataConfig(path=str(tmp_path)))
    read(source)
    assert sorted(re.search("read as (\\S+),", note)[1] for note in source.note_lines() if "read as" in note) == [
        "CP1252",
        "ISO-8859-1",
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("Déjà vu", "SÃO PAULO", "é became Ã©", "Straße", "LE CAFÉ\xa0!", "CAFÉ…", "£5 ± 1", "plain", "São Tomé"),
        *("шаг, том, сон", "Дії — її", "L’Écosse, l’Égypte et l’Éthiopie", "╔═╗\n║a║\n├── b\n└─ é", "αβγ, ∞"),
    ],
)
def test_letters_that_are_meant_are_not_taken_for_such(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    source = Source(DataConfig(path=str(tmp_path)))
    assert read(source) == [text] and not source.note_lines()


def test_letters_that_another_program_lost_are_told_apart_from_bytes_lost_here(tmp_path):
    lost = "caf\ufffd et th\ufffd"
    (tmp_path / "notes.txt").write_text(lost, encoding="utf-8")
    (tmp_path / "posts.jsonl").write_text(json.dumps({"text": lost}))
    (tmp_path / "table.csv").write_text(f"id,text\n1,{lost}\n", encoding="utf-8")
    for name, begin in {"notes.txt": "Files with", "posts.jsonl": "Records with", "table.csv": "Records with"}.items():
        source = of_path(tmp_path / name, "files")
        assert read(source) == [lost]
        (note,) = source.note_lines()
        assert note.startswith(f"{begin} U+FFFD in place of letters that another program lost")
    # Bytes that are not UTF-8, and halves of a letter in an escape, become U+FFFD here.
    (tmp_path / "notes.txt").write_bytes(b"a long text with one letter of another encoding: caf\xe9. " + 900 * b"word ")
    (tmp_path / "posts.jsonl").write_text(r'{"text": "half of an emoji: \ud83d"}')
    for name in ("notes.txt", "posts.jsonl"):
        source = of_path(tmp_path / name, "files")
        assert "\ufffd" in read(source)[0]
        assert [line.partition(":")[0] for line in source.note_lines()] == [
            "Bytes that are not UTF-8 and became U+FFFD"
        ]


@pytest.mark.parametrize("name", ["table.csv", "table.jsonl"])
def test_records_that_end_where_another_program_cuts_a_text_are_told(tmp_path, name):
    """Excel counts an emoji as two letters; MySQL counts bytes, and cuts no letter."""
    excel = [32767 * "a", 32700 * "b" + 33 * "\N{GRINNING FACE}" + "."]
    mysql = [65535 * "a", 32766 * "é" + "aa", "a" + 32767 * "é"]
    others = [32766 * "a", 32768 * "a", 32767 * "é" + "aa", 65532 * "a", 32700 * "b" + 34 * "\N{GRINNING FACE}"]
    texts = excel + mysql + others
    if name == "table.csv":
        rows = "".join(f"{number},{text}\n" for number, text in enumerate(texts))
        (tmp_path / name).write_text("id,text\n" + rows, encoding="utf-8")
    else:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = of_path(tmp_path / name, "files")
    assert read(source) == texts
    assert [line.partition(", first in")[0] for line in source.note_lines()] == [
        "Records of 32,767 characters, the most in a cell of Excel, which may have cut them: 2",
        "Records of 65,535 bytes, the most in a column TEXT of MySQL, which may have cut them: 3",
    ]


COPIES = {
    "a.txt~": "a.txt",
    "a.txt.~3~": "a.txt",
    "#a.txt#": "a.txt",
    "a.txt.bak": "a.txt",
    "a.txt.orig": "a.txt",
    "Copy of a.txt": "a.txt",
    "a - Copy.txt": "a.txt",
    "a - Copy (2).txt": "a.txt",
    "a copy 2.txt": "a.txt",
    "a copy": "a",
    "a (Ann's conflicted copy 2024-05-01).txt": "a.txt",
    "a.sync-conflict-20240501-101010-ABCDEFG.txt": "a.txt",
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_other_files_are_told_by_their_names_where_the_others_are(tmp_path, name):
    (tmp_path / name).write_text("an old text")
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / COPIES[name]).write_text("a text of another folder")
    source = of_path(tmp_path, "files")
    assert len(read(source)) == 2 and not source.note_lines()
    (tmp_path / COPIES[name]).write_text("a text")
    source = of_path(tmp_path, "files")
    assert len(read(source)) == 3
    assert source.note_lines() == [
        f"Files whose names tell copies of others, which the model learns too: 1, first in {tmp_path / name}."
    ]
