"""The rules of data/corpus.py, files.py, shakespeare.py and pieces.py: what is read, and what is refused."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data import corpus as module
from data import files
from data.config import SOURCES, TOKENIZERS, DataConfig, TokenizerConfig
from data.corpus import Corpus, open_corpus
from data.pieces import LONGEST, pieces
from errors import DataError, SettingsError

REPOSITORY = Path(__file__).resolve().parent.parent
SHAKESPEARE = REPOSITORY / ".." / "shared" / "data" / "tinyshakespeare.txt"


def texts(corpus: Corpus) -> list[str]:
    """The documents that have text, each as one string."""
    return [text for document in corpus.documents() if (text := "".join(document))]


def text_corpus(path: Path | str) -> Corpus:
    return open_corpus(DataConfig(path=str(path)))


def jsonl_corpus(path: Path, **settings: str) -> Corpus:
    return open_corpus(DataConfig(source="jsonl", path=str(path), **settings))


# Settings


def test_a_path_with_the_default_source_means_text_and_holds_out_a_tenth():
    for source in ("stdlib", "shakespeare"):
        config = DataConfig(source=source, path="notes.txt")
        assert (config.source, config.held_out) == ("text", 0.1)
    assert DataConfig().held_out == 0.04 and DataConfig(val_fraction=0.3).held_out == 0.3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"source": "books"}, "data.source=books"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0"),
        ({"val_fraction": 0.6}, "data.val_fraction=0.6"),
        ({"source": "text"}, "data.path"),
        ({"source": "jsonl"}, "data.path"),
        ({"source": "parquet"}, "data.path"),
        ({"source": "nanogpt"}, "data.path"),
        ({"source": "mix"}, "data.mix"),
        ({"mix": ["a.txt:1"], "path": "b.txt"}, "data.path=b.txt and data.mix"),
        *(({"mix": [f"a.txt:{weight}"]}, "data.mix=a.txt:") for weight in ("0", "-1", "inf", "nan", "x", "")),
        ({"mix": ["a.txt"]}, "data.mix=a.txt must be"),
        ({"mix": ["a.txt:1", "a.txt:2"]}, "data.mix=a.txt:2 names a text again"),
        ({"mix": ["mix:1"]}, "data.mix=mix:1"),
        ({"mix": ["recall:1"]}, "data.mix=recall:1"),
        ({"source": "hf"}, "data.name"),
        ({"cache_dir": ""}, "data.cache_dir"),
        ({"name": "wordpiece"}, "tokenizer.name=wordpiece"),
        ({"vocab_size": 256}, "tokenizer.vocab_size=256"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
    with pytest.raises(SettingsError, match=named):
        (TokenizerConfig if named.startswith("tokenizer") else DataConfig)(**settings)


@pytest.mark.parametrize("group", ["data", "tokenizer"])
def test_every_group_in_conf_fits_its_settings(group):
    schema = {"data": DataConfig, "tokenizer": TokenizerConfig}[group]
    names = {"data": SOURCES, "tokenizer": TOKENIZERS}[group]
    needed = {
        "text": {"path": "a.txt"},
        "jsonl": {"path": "a.jsonl"},
        "parquet": {"path": "a.parquet"},
        "hf": {"name": "someone/stories"},
    }
    needed |= {"mix": {"mix": ["a.txt:1"]}, "nanogpt": {"path": "a"}}
    assert {file.stem for file in (REPOSITORY / "conf" / group).iterdir()} == set(names)
    for name in names:
        given = OmegaConf.load(REPOSITORY / "conf" / group / f"{name}.yaml")
        given = given.get("data", given)  # a task brings a model's and a run's settings too
        merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given, needed.get(name, {})))
        assert name == (merged.source if group == "data" else merged.name)


def test_importing_the_settings_imports_nothing_heavy():
    code = "import sys, data.config; print({'numpy', 'tiktoken', 'rustbpe', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Standard library


def test_stdlib_is_the_library_of_this_interpreter_without_its_tests():
    corpus = open_corpus(DataConfig())
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in corpus.description
    found = texts(corpus)
    assert len(found) > 400 and sum(map(len, found)) > 8_000_000
    assert any(text.startswith('r"""HTTP/1.1 client library') for text in found)
    assert not any("class TestPickle" in text or "import test.support" in text for text in found)


# Text


def test_a_folder_is_read_deeply_in_sorted_order_without_hidden_and_binary_files(tmp_path):
    found = {"b.txt": b"second", "a/z.md": b"first", "c.bin": b"PNG\0\1\2", "d.txt": b""}
    for name, content in (found | {".hidden": b"no", ".git/config": b"no"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert texts(text_corpus(tmp_path)) == ["first", "second"]


def test_a_glob_a_file_and_a_packed_file_are_read(tmp_path):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "two.md").write_text("2")
    (tmp_path / "three.txt.gz").write_bytes(gzip.compress(b"three"))
    assert texts(text_corpus(tmp_path / "*.txt")) == ["one"]
    assert texts(text_corpus(tmp_path / "three.txt.gz")) == ["three"]
    assert sorted(texts(text_corpus(tmp_path / "*"))) == ["2", "one", "three"]
    assert text_corpus(tmp_path / "one.txt").description.endswith(": 1 file, 3 bytes")
    assert text_corpus(tmp_path / "two.md").description.endswith(": 1 file, 1 byte")


FILLER = "x" * (files._BLOCK - 1)  # a character begins in the first block and ends in the second


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xef\xbb\xbfone\r\ntwo\rthree\n\n \t", "one\r\ntwo\rthree\n\n \t"),
        (FILLER.encode() + "é".encode() + b"\xff\xfe end\xc3", FILLER + "é\ufffd\ufffd end\ufffd"),
    ],
    ids=["white space", "invalid UTF-8"],
)
def test_text_is_read_as_it_is_and_anew_at_each_call_with_u_fffd_for_invalid_utf8(tmp_path, content, text):
    (tmp_path / "a.txt").write_bytes(content)
    corpus = text_corpus(tmp_path / "a.txt")
    assert texts(corpus) == texts(corpus) == [text]


@pytest.mark.parametrize("name", ["big.txt", "big.txt.gz"])
def test_a_document_larger_than_its_memory_is_read_in_bounded_pieces(tmp_path, name):
    file = tmp_path / name
    content = b"a line of text, then another\n" * 1_000_000
    file.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    tracemalloc.start()
    try:
        lengths = [len(piece) for document in text_corpus(file).documents() for piece in document]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(lengths) == len(content) and max(lengths) <= LONGEST and peak < 8_000_000


@pytest.mark.parametrize(
    ("name", "content", "lost"),
    [
        ("utf8.txt", "é \ufffd, an original".encode(), {}),
        ("border.txt", FILLER.encode() + b"\xef\xbf\xbd and \xff", {"border.txt": 1}),
        ("latin.txt", "café à la crème".encode("latin-1"), {"latin.txt": 3}),
        ("cut.txt", "a word, then half an é".encode()[:-1], {"cut.txt": 1}),
        ("bom.txt", b"\xef\xbb\xbftext", {}),
        ("picture.png", b"PNG\0\1\2", {"picture.png": 0}),
        ("a.jsonl", b'{"text": "fine \xe9\xff"}\n{"text": "\xef\xbf\xbd \xff"}\n', {"a.jsonl": 3}),
    ],
)
def test_what_is_not_utf8_is_counted_by_file(tmp_path, name, content, lost):
    (tmp_path / name).write_bytes(content)
    source = "jsonl" if name.endswith("jsonl") else "text"
    corpus = open_corpus(DataConfig(source=source, path=str(tmp_path)))
    for _ in range(2):
        texts(corpus)
        assert {Path(file).name: count for file, count in corpus.losses.items()} == lost


def test_opening_a_folder_asks_the_system_once_for_each_file(tmp_path, monkeypatch):
    for number in range(300):
        (tmp_path / f"{number}.txt").write_text("x")
    calls = []
    for name in ("stat", "lstat", "access", "readlink"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _call=original, **k: calls.append(a) or _call(*a, **k))
    assert text_corpus(tmp_path).description.endswith(": 300 files, 300 bytes")
    assert len(calls) < 30  # DirEntry.stat() is the one call, and is not counted


FINE = b'{"text": "fine"}\n\n'
REFUSED = {
    "missing.txt": (None, "does not exist"),
    "*.none": (None, "does not exist"),
    "empty/": (None, "is a folder without files"),
    "binary.txt": (b"\x7fELF\0\0", "is a binary file"),
    "utf16.txt": ("\ufeffsome words".encode("utf-16-le"), "is UTF-16"),
    "chinese.txt": ("\ufeff汉语没有零字节".encode("utf-16-le"), "is UTF-16"),
    "cyrillic.txt": (("чтение, письмо\n" * 9).encode("cp1251"), "is not UTF-8 (108 of its 135 characters"),
    "broken.gz": (b"not packed at all", "cannot be read"),
    "cut.gz": (gzip.compress(bytes(range(256)))[:200], "cannot be read"),
    "others/": (b"x", "holds no .jsonl"),
    "cut.jsonl": (FINE + b'{"text": "cut', "line 3 is not JSON"),
    "deep.jsonl": (FINE + b"[" * 100_000, "line 3 is not JSON"),
    "bytes.jsonl": (FINE + b"\xff\xfe\x00", "line 3 is not JSON"),
    "list.jsonl": (FINE + b"[1, 2]", "line 3 is not a JSON object"),
    "null.jsonl": (FINE + b'{"text": null}', "line 3: data.text_field=text is not text"),
    "other.jsonl": (FINE + b'{"body": "x"}', "line 3 has no field data.text_field=text: choose one of body"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_text_that_cannot_be_read_is_refused_by_name(tmp_path, name):
    content, message = REFUSED[name]
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    if content is not None:
        (path / "a.txt" if path.is_dir() else path).write_bytes(content)
    source = "jsonl" if name.endswith("jsonl") or name == "others/" else "text"
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        texts(open_corpus(DataConfig(source=source, path=str(path))))
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


def test_a_device_is_not_read_as_text():
    with pytest.raises(DataError, match="/dev/zero is not a readable file"):
        text_corpus("/dev/zero")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused_by_name(tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(DataError, match=r"secret\.txt"):
        texts(text_corpus(tmp_path))


def test_the_fingerprint_changes_with_the_files_and_only_with_them(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("one")
    os.utime(file, ns=(0, 1_000))
    first = text_corpus(tmp_path).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(files, "reading", None)  # a fingerprint reads no text
        assert text_corpus(tmp_path).fingerprint == first
    changes = [
        lambda: os.utime(file, ns=(0, 1_001)),
        lambda: file.write_text("more") and os.utime(file, ns=(0, 1_001)),
        lambda: file.rename(tmp_path / "b.txt"),
        lambda: (tmp_path / "c.txt").write_text(""),
    ]
    seen = {first}
    for change in changes:
        change()
        seen.add(text_corpus(tmp_path).fingerprint)
    assert len(seen) == 5


# JSON lines


def test_jsonl_gives_one_document_a_line(tmp_path):
    lines = [json.dumps({"body": text, "id": 1}) for text in ("one", "two\nlines", "<|endoftext|>")]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(lines) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(rb'{"body": "packed \ud800 half"}'))
    (tmp_path / "README.md").write_text("not JSON")
    corpus = jsonl_corpus(tmp_path, text_field="body")
    assert texts(corpus) == ["one", "two\nlines", "<|endoftext|>", "packed \ufffd half"]


# Shakespeare


def shakespeare_corpus(cache_dir: Path) -> Corpus:
    return open_corpus(DataConfig(source="shakespeare", cache_dir=str(cache_dir)))


def answer_with(monkeypatch, content: bytes | None) -> None:
    """Have downloads give `content`, or no network."""

    def urlopen(url, timeout):
        if content is None:
            raise urllib.error.URLError("Temporary failure in name resolution")
        response = io.BytesIO(content)
        response.headers = {"Content-Length": str(len(content))}
        return response

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "{url}.*put a copy at {file}.*data.path=FILE"), (b"<html>please log in</html>", "sha256")],
)
def test_a_download_that_fails_or_is_something_else_is_refused_and_not_kept(tmp_path, monkeypatch, content, message):
    answer_with(monkeypatch, content)
    with pytest.raises(
        DataError, match=message.format(url=module.SHAKESPEARE_URL, file=tmp_path / "tinyshakespeare.txt")
    ):
        shakespeare_corpus(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="no copy of tiny Shakespeare here")
def test_shakespeare_is_downloaded_once_and_replaced_when_damaged(tmp_path, monkeypatch):
    content = SHAKESPEARE.read_bytes()
    (tmp_path / "tinyshakespeare.txt").write_bytes(content[:-1])
    answer_with(monkeypatch, content)
    assert texts(shakespeare_corpus(tmp_path)) == [content.decode()]
    answer_with(monkeypatch, None)
    assert texts(shakespeare_corpus(tmp_path)) == [content.decode()]
    assert [file.name for file in tmp_path.iterdir()] == ["tinyshakespeare.txt"]


# Hugging Face datasets


def hf_texts(monkeypatch, load_dataset, **settings: str) -> list[str]:
    library = load_dataset and types.SimpleNamespace(load_dataset=load_dataset)  # None: not installed
    monkeypatch.setitem(sys.modules, "datasets", library)
    return texts(open_corpus(DataConfig(source="hf", name="someone/stories", **settings)))


def test_hf_streams_the_field_of_the_split(monkeypatch):
    asked = []

    def load_dataset(name, subset, *, split, streaming):
        asked.append((name, subset, split, streaming))
        return ({"body": text} for text in ("one", "", "two"))

    found = hf_texts(monkeypatch, load_dataset, subset="en", split="test", text_field="body")
    assert found == ["one", "two"]
    assert asked == [("someone/stories", "en", "test", True)]


@pytest.mark.parametrize("form", ["state.json", "dataset_dict.json"])
def test_a_folder_of_save_to_disk_is_loaded_from_the_disk(tmp_path, monkeypatch, form):
    (tmp_path / form).write_text("{}")
    saved = [{"text": "one"}, {"text": "two"}]
    library = types.SimpleNamespace(load_from_disk=lambda _: saved if form == "state.json" else {"dev": saved})
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert texts(open_corpus(DataConfig(source="hf", name=str(tmp_path), split="dev"))) == ["one", "two"]


def broken(*_, **__):
    raise RuntimeError("Connection refused\n  a page of details")


@pytest.mark.parametrize(
    ("load_dataset", "message"),
    [
        (None, "pip install -e"),
        (broken, r"data\.name=someone/stories.*data\.split=train.*\(Connection refused\)"),
        (lambda *_, **__: [{"story": "one"}], r"record 1 has no field data\.text_field=text: choose one of story"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_refused_in_a_sentence(monkeypatch, load_dataset, message):
    with pytest.raises(DataError, match=message) as caught:
        hf_texts(monkeypatch, load_dataset)
    assert "\n" not in str(caught.value)


# Pieces


@given(st.lists(st.text("ab \n,字", max_size=40)), st.integers(2, 12))
def test_pieces_are_the_text_in_order_and_bounded(blocks, longest):
    cut = list(pieces(blocks, longest))
    assert "".join(cut) == "".join(blocks) and all(0 < len(piece) <= longest for piece in cut)
