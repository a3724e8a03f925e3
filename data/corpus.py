"""Where documents come from: the standard library, Shakespeare, a person's own text, a dataset.

A document is an iterable of pieces of text, each of bounded length, so that one larger than memory can be read. The
pieces give the same tokens as the whole: see pieces.py.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import files
from data.config import DataConfig
from data.pieces import pieces, replace_surrogates
from data.shakespeare import SHA256, tiny_shakespeare
from errors import DataError, first_line

Document = Iterable[str]

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
_JSONL_NAMES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


@dataclass(frozen=True)
class Corpus:
    """Documents, and what is known of them before they are read."""

    description: str
    """For people: "stdlib of CPython 3.11: 661 files, 11.8 MB"."""
    fingerprint: str
    """Short hex string that changes when the text may have changed."""
    size: int | None
    """Bytes of text, where known without reading."""
    documents: Callable[[], Iterator[Document]]
    """Starts again from the first document at each call. An empty document has no pieces."""


def open_corpus(config: DataConfig) -> Corpus:
    """Return the corpus that `config` names. Reads names, sizes and times only; shakespeare is downloaded once.

    Raises DataError when there is nothing to read. Reading the documents can raise it too.
    """
    return {
        "stdlib": _open_stdlib,
        "shakespeare": _open_shakespeare,
        "text": _open_text,
        "jsonl": _open_jsonl,
        "hf": _open_hf,
    }[config.source](config)


def _open_stdlib(config: DataConfig) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    found = [file for file in files.walk(root, _TEST_FOLDERS) if file.suffix == ".py"]
    if not found:
        raise DataError(f"data=stdlib: {root} has no .py files: choose data.path=... with your own text.")
    name = f"stdlib of {platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    return _of_text_files(name, found, sys.version)


def _open_shakespeare(config: DataConfig) -> Corpus:
    file = tiny_shakespeare(config.cache_dir)
    text = _of_text_files("tiny Shakespeare", [file], "")
    return Corpus("tiny Shakespeare: 1.1 MB", SHA256[:16], text.size, text.documents)


def _open_text(config: DataConfig) -> Corpus:
    assert config.path, "DataConfig requires it"
    is_named = Path(config.path).expanduser().is_file()
    return _of_text_files(f"text of {config.path}", files.find_files(config.path), "text", refuse_binary=is_named)


def _of_text_files(name: str, found: list[Path], kind: str, *, refuse_binary: bool = False) -> Corpus:
    packed = any(file.suffix == ".gz" for file in found)
    return Corpus(
        description=f"{name}: {_count(found)}",
        fingerprint=files.fingerprint(found, kind),
        size=None if packed else sum(file.stat().st_size for file in found),
        documents=lambda: (pieces(files.text_blocks(file, refuse_binary=refuse_binary)) for file in found),
    )


def _count(found: list[Path]) -> str:
    size = sum(file.stat().st_size for file in found)
    amount = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} byte{'s' * (size != 1)}"
    return f"{len(found):,} file{'s' * (len(found) != 1)}, {amount}"


def _open_jsonl(config: DataConfig) -> Corpus:
    assert config.path, "DataConfig requires it"
    found = files.find_files(config.path)
    if Path(config.path).expanduser().is_dir():
        found = [file for file in found if file.name.endswith(_JSONL_NAMES)]
        if not found:
            raise DataError(f"data.path={config.path} holds no {', '.join(_JSONL_NAMES)} files: give their folder.")
    return Corpus(
        description=f"field {config.text_field} of {config.path}: {_count(found)}",
        fingerprint=files.fingerprint(found, "jsonl", config.text_field),
        size=None,
        documents=lambda: (pieces([text]) for file in found for text in _json_texts(file, config.text_field)),
    )


def _json_texts(file: Path, field: str) -> Iterator[str]:
    with files.reading(file) as stream:
        for number, line in enumerate(stream, start=1):
            where, text = f"{file} line {number}", line.decode("utf-8", "replace").removeprefix("\ufeff").strip()
            if not text:
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON ({error}): fix it, or read the file as data=text.") from error
            if not isinstance(record, dict):
                raise DataError(f"{where} is not a JSON object: write each document as {{{json.dumps(field)}: ...}}.")
            yield _text_of(record, field, where)


def _text_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where} has no field data.text_field={field}: choose one of {', '.join(record)}.")
    if not isinstance(record[field], str):
        raise DataError(f"{where}: data.text_field={field} is not text ({record[field]!r:.40}): choose another field.")
    return replace_surrogates(record[field])


def _open_hf(config: DataConfig) -> Corpus:
    assert config.name, "DataConfig requires it"
    local = Path(config.name).expanduser()
    settings = ("hf", config.name, config.subset or "", config.split, config.text_field)
    if local.is_dir():
        mark = files.fingerprint(files.walk(local), *settings)
    else:  # a new revision on the hub goes unnoticed: asking for it would need the network at every start
        mark = hashlib.sha256("\0".join(settings).encode()).hexdigest()[:16]
    name = str(local) if config.name.startswith("~") else config.name
    description = f"field {config.text_field} of dataset {config.name}, split {config.split}"
    return Corpus(description, mark, None, lambda: (pieces([text]) for text in _dataset_texts(config, name)))


def _dataset_texts(config: DataConfig, name: str) -> Iterator[str]:
    try:  # optional, and slow to import
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError('data=hf needs the datasets library: pip install -e ".[hf]".') from error
    what = f"data.name={config.name}, data.subset={config.subset}, data.split={config.split}"
    try:
        records = datasets.load_dataset(name, config.subset, split=config.split, streaming=True)
        for number, record in enumerate(records, start=1):
            yield _text_of(record, config.text_field, f"{what}: record {number}")
    except DataError:
        raise
    except Exception as error:  # the library raises errors of every layer below it
        raise DataError(f"{what} cannot be read ({first_line(error)}): check these and the network.") from error
