"""Where documents come from: the standard library, Shakespeare, a person's own text, a dataset.

A document is an iterable of pieces of text, each of bounded length, so that one larger than memory
can be read; see pieces.py for why the pieces give the same tokens as the whole.
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

from data import files
from data.config import DataConfig
from data.pieces import pieces, replace_surrogates
from data.shakespeare import SHA256, tiny_shakespeare
from errors import DataError

Document = Iterable[str]

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
_JSONL_NAMES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


@dataclass(frozen=True)
class Corpus:
    """Documents, how to describe them, and how to tell when they changed."""

    description: str
    """What a person reads: "stdlib of CPython 3.11: 661 files, 11.8 MB"."""
    fingerprint: str
    """Short hex string that changes when the text may have changed; found without reading the text."""
    size: int | None
    """Bytes of text, where known before reading."""
    documents: Callable[[], Iterator[Document]]
    """Starts anew from the first document at each call; a document without pieces is empty."""


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config` names. Reads names, sizes and times only (shakespeare: downloads once).

    Raises DataError when there is nothing to read; reading the documents can raise it too.
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
        raise DataError(f"data=stdlib: there are no .py files in {root}, so choose data.path=... with text of yours.")
    name = f"stdlib of {platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    return _of_files(name, found, sys.version, name_binary=False)


def _open_shakespeare(config: DataConfig) -> Corpus:
    file = tiny_shakespeare(config.cache_dir)
    return Corpus("tiny Shakespeare: 1.1 MB", SHA256[:16], files.total_size([file]), lambda: iter([_read(file, True)]))


def _open_text(config: DataConfig) -> Corpus:
    found = files.find_files(config.path)
    named = Path(config.path).expanduser().is_file()
    return _of_files(f"text of {config.path}", found, "text", name_binary=named)


def _of_files(name: str, found: list[Path], kind: str, *, name_binary: bool) -> Corpus:
    return Corpus(
        description=f"{name}: {_count(found)}",
        fingerprint=files.fingerprint(found, kind),
        size=files.total_size(found),
        documents=lambda: (_read(file, name_binary) for file in found),
    )


def _count(found: list[Path]) -> str:
    size = sum(file.stat().st_size for file in found)
    amount = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} byte{'s' * (size != 1)}"
    return f"{len(found):,} file{'s' * (len(found) != 1)}, {amount}"


def _read(file: Path, name_binary: bool) -> Document:
    return pieces(files.text_blocks(file, name_binary=name_binary))


def _open_jsonl(config: DataConfig) -> Corpus:
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
            text = line.decode("utf-8", "replace").removeprefix("\ufeff").strip()
            if text:
                yield _json_text(text, field, f"{file} line {number}")


def _json_text(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): mend the line, or read the file with data=text.") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is not a JSON object: write each document as {{{json.dumps(field)}: ...}}.")
    return _field(record, field, where)


def _field(record: dict, field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where} has no field data.text_field={field}: choose one of {', '.join(record)}.")
    if not isinstance(record[field], str):
        raise DataError(f"{where}: data.text_field={field} is no text ({record[field]!r:.40}): choose another field.")
    return replace_surrogates(record[field])


def _open_hf(config: DataConfig) -> Corpus:
    local = Path(config.name).expanduser()
    settings = (config.name, config.subset or "", config.split, config.text_field)
    if local.is_dir():
        mark = files.fingerprint(files.walk(local), "hf", *settings)
    else:
        # A new revision on the hub goes unseen: asking for it would need the network at every start.
        mark = hashlib.sha256("\0".join(("hf", *settings)).encode()).hexdigest()[:16]
    description = f"field {config.text_field} of dataset {config.name}, split {config.split}"
    return Corpus(description, mark, None, lambda: (pieces([text]) for text in _dataset_texts(config)))


def _dataset_texts(config: DataConfig) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise DataError('data=hf needs the datasets library: pip install -e ".[hf]".') from error
    what = f"data.name={config.name}, data.subset={config.subset}, data.split={config.split}"
    try:
        name = str(Path(config.name).expanduser()) if config.name.startswith("~") else config.name
        records = enumerate(datasets.load_dataset(name, config.subset, split=config.split, streaming=True), start=1)
        while (numbered := next(records, None)) is not None:
            number, record = numbered
            yield _field(record, config.text_field, f"{what}: record {number}")
    except DataError:
        raise
    except Exception as error:  # the library lets through errors of every layer below it
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{what} could not be read ({reason}): check the three settings and the network.") from error
