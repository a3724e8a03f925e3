"""Where documents come from: the standard library, Shakespeare, a person's own text, a dataset.

A document is an iterable of pieces of text, each of bounded length, so that one larger than memory can be read. The
pieces give the same tokens as the whole: see pieces.py.
"""

import hashlib
import platform
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import Any

from data import files
from data.config import ENDINGS, DataConfig
from data.pieces import pieces, replace_surrogates
from errors import DataError, first_line

Document = Iterable[str]

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Tests, what others have installed, near-copies of code (lib2to3), and tables that scripts have written.
_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}) | {
    *("encodings", "stringprep.py", "_casefix.py")
}


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
    losses: files.Losses = field(default_factory=dict)
    """What reading the documents has changed so far."""


def open_corpus(config: DataConfig) -> Corpus:
    """Return the corpus that `config` names. Reads names, sizes and times only; shakespeare is downloaded once.

    Raises DataError when there is nothing to read. Reading the documents can raise it too.
    """
    if config.source == "stdlib":
        root = sysconfig.get_path("stdlib")
        found = [file for file in files.walk(Path(root), _SKIPPED) if file.path.endswith(".py")]
        # Not what a distribution or an administrator has added.
        tops = (file.path.removeprefix(f"{root}/").partition("/")[0].removesuffix(".py") for file in found)
        found = [file for file, top in zip(found, tops, strict=True) if top in sys.stdlib_module_names]
        name = f"stdlib of {platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
        return _of_text_files(name, found, sys.version)
    if config.source == "shakespeare":
        text = _of_text_files("tiny Shakespeare", files.find_files(str(tiny_shakespeare(config.cache_dir))), "")
        return Corpus("tiny Shakespeare: 1.1 MB", SHAKESPEARE_SHA256[:16], text.size, text.documents)
    if config.source == "hf":
        return _open_hf(config)
    assert config.path, "DataConfig requires it"
    found = files.find_files(config.path)
    if config.source in _READERS:
        return _of_records(config, found)
    is_named = Path(config.path).expanduser().is_file()
    return _of_text_files(f"text of {config.path}", found, "text", refuse_binary=is_named)


def _of_text_files(name: str, found: list[files.Source], kind: str, *, refuse_binary: bool = False) -> Corpus:
    losses: files.Losses = {}
    blocks = partial(files.text_blocks, losses=losses, refuse_binary=refuse_binary)
    return Corpus(
        description=f"{name}: {_count(found)}",
        fingerprint=files.fingerprint(found, kind),
        size=None if any(file.path.endswith(".gz") for file in found) else sum(file.size for file in found),
        documents=lambda: (pieces(blocks(file.path)) for file in found),
        losses=losses,
    )


def _count(found: list[files.Source]) -> str:
    size = sum(file.size for file in found)
    amount = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} byte{'s' * (size != 1)}"
    return f"{len(found):,} file{'s' * (len(found) != 1)}, {amount}"


def tiny_shakespeare(cache_dir: str) -> Path:
    """Return the file in the cache, downloaded once and verified. Raises DataError when that fails."""
    path = Path(cache_dir).expanduser() / "tinyshakespeare.txt"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHAKESPEARE_SHA256:
        return path
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=20) as response:  # seconds without an answer
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError("the sha256 of what came is not that of the known file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as unfinished:
            unfinished.write_bytes(content)
    except (OSError, HTTPException, ValueError) as error:
        raise DataError(
            f"data=shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error}): put a copy at {path}, "
            "or give data.path=FILE for one that you have."
        ) from error
    return path


def _of_records(config: DataConfig, found: list[files.Source]) -> Corpus:
    """Return the corpus of files of many documents, each a record with a field of text."""
    path, name = str(config.path), config.text_field
    endings, read = ENDINGS[config.source], _READERS[config.source]
    if Path(path).expanduser().is_dir():
        found = [file for file in found if file.path.endswith(endings)]
        if not found:
            raise DataError(f"data.path={path} holds no {', '.join(endings)} files: give their folder.")
    losses: files.Losses = {}
    return Corpus(
        description=f"field {name} of {path}: {_count(found)}",
        fingerprint=files.fingerprint(found, config.source, name),
        size=None,
        documents=lambda: (pieces([text]) for file in found for text in read(file.path, name, losses)),
        losses=losses,
    )


def _jsonl_texts(file: str, field: str, losses: files.Losses) -> Iterator[str]:
    with files.reading(file) as lines:
        for where, record in files.json_records(lines, file, losses):
            yield _text_of(record, field, where)


def _parquet_texts(file: str, field: str, losses: files.Losses) -> Iterator[str]:
    try:  # optional, and slow to import
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("data=parquet needs the pyarrow library: pip install pyarrow.") from error
    try:
        with parquet.ParquetFile(file) as opened:
            if field not in (names := opened.schema_arrow.names):
                _text_of(dict.fromkeys(names), field, file)  # says so
            batches = opened.iter_batches(_RECORDS, columns=[field])  # of one group of rows after the other
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, record in enumerate(records, start=1):
                yield _text_of(record, field, f"{file} record {number}")
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        why = f"data.path: {file} cannot be read as Parquet ({first_line(error)})"
        raise DataError(f"{why}: mend it or leave it out.") from error


_RECORDS = 256  # of a Parquet file that become text together
_READERS = {"jsonl": _jsonl_texts, "parquet": _parquet_texts}


def _text_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where} has no field data.text_field={field}: choose one of {', '.join(record)}.")
    if not isinstance(record[field], str):
        raise DataError(f"{where}: data.text_field={field} is not text ({record[field]!r:.40}): choose another field.")
    return replace_surrogates(record[field])


def _open_hf(config: DataConfig) -> Corpus:
    assert config.name, "DataConfig requires it"
    local = Path(config.name).expanduser()
    # A new revision on the hub goes unnoticed: asking for it would need the network at every start.
    found = files.walk(local) if local.is_dir() else []
    mark = files.fingerprint(found, "hf", config.name, config.subset or "", config.split, config.text_field)
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
        if Path(name, "dataset_dict.json").is_file():  # of save_to_disk(), which load_dataset() cannot read
            records = datasets.load_from_disk(name)[config.split]
        elif Path(name, "state.json").is_file():
            records = datasets.load_from_disk(name)
        else:
            records = datasets.load_dataset(name, config.subset, split=config.split, streaming=True)
        for number, record in enumerate(records, start=1):
            yield _text_of(record, config.text_field, f"{what}: record {number}")
    except DataError:
        raise
    except Exception as error:  # the library raises errors of every layer below it
        raise DataError(f"{what} cannot be read ({first_line(error)}): check these and the network.") from error
