"""Sources of documents: the standard library, tales, Shakespeare, files, a dataset.

A document is an iterable of pieces of text of bounded length, so it may be larger than the memory.
"""

import glob
import gzip
import hashlib
import json
import os
import platform
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO
from urllib.request import urlopen

from common.errors import DataError, first_line, naming, os_error_reason
from common.files import reading, replacing, user_path
from common.text import plural, si
from data.config import DIVISIBLE, DataConfig
from data.tales import LISTS, RULES, tales
from data.tokenizer import LONGEST, pieces, replace_surrogates

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Left out of the standard library: tests, near copies and generated tables.
SKIPPED = {"test", "tests", "idle_test", "lib2to3", "encodings", "stringprep.py", "_casefix.py"}
# Endings of the files that a folder is searched for; a text may have any name.
ENDINGS = {"jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"), "hf": (".parquet",)}

Files = dict[str, tuple[int, int]]
"""{path: (size, mtime_ns)}."""


class Source:
    """The documents of a data source.

    The constructor reads only names, sizes and times of files, but downloads shakespeare. It raises DataError if there
    is nothing to read, and so may documents().
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config

        # Find the files, and name the text.
        self.files = Files()
        kind = "file"
        name = config.path
        if config.source == "stdlib":
            name = f"stdlib of {platform.python_implementation()} {sys.version[:4]}"
            self.files = stdlib_files()
        elif config.source == "shakespeare":
            name = "tiny Shakespeare"
            self.files = find_files(str(download_shakespeare(config.cache_dir)))
        elif config.source == "tales":
            name = f"{config.tales.count:,} tales of seed {config.tales.seed}"
        elif config.path:
            endings = ENDINGS.get(config.source, ("",))
            self.files = find_files(config.path, endings)
            kind = f"{endings[0]} file".lstrip()
        else:
            # Do not look for a new revision on the hub: each start would need the network.
            name = f"dataset {config.name}, split {config.split}"
            local = user_path("data.name", str(config.name))
            if local.is_dir():
                self.files = find_files(str(local), setting="data.name")

        self.name = name
        self.kind = kind

        # Hash all that may change its content. Shakespeare is the same in every folder.
        files = {} if config.source == "shakespeare" else self.files
        asked = (config.source, config.text_field, config.name, config.subset, config.split)
        self.separator = config.separator if config.source in DIVISIBLE else None
        added = [name, LISTS, RULES] if config.source == "tales" else [self.separator]
        self.fingerprint = fingerprint(files, *asked, *filter(None, added))
        """A hash that changes if the text may have changed."""
        self.losses: dict[str, tuple[int, list[str]]] = {}
        """{kind of loss: (count, first places)} of the latest reading."""
        self.binary: set[str] = set()
        """The files that it left out."""

    def describe(self) -> str:
        """Return the text in words: "stdlib of CPython 3.11: 532 files, 10.4 MB".

        Before it is read, files that turn out to be binary count.
        """
        if not self.files:
            return f"{self.name}"
        sizes = [size for file, (size, _) in self.files.items() if file not in self.binary]
        return f"{self.name}: {plural(len(sizes), self.kind)}, {si(sum(sizes), 3)}B"

    def documents(self) -> Iterator[Iterable[str]]:
        """Yield all documents; an empty one has no pieces."""
        self.losses.clear()
        if self.config.source == "hf":
            yield from self._texts_of(_dataset_records(self.config, self.files))
        elif self.config.source == "tales":
            yield from ([tale] for tale in tales(self.config.tales))
        elif self.config.source == "jsonl":
            for file in self.files:
                with self._reading(file) as lines:
                    yield from self._texts_of(json_records(lines, file))
        else:
            for file in self.files:
                yield from divided(self._blocks(file), self.separator)

    def _texts_of(self, records: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Iterable[str]]:
        """Yield the documents in (place, record) pairs; a record whose text is null is left out."""
        field = self.config.text_field
        for where, record in records:
            if field not in record:
                raise DataError(f"{where} has no field data.text_field={field}", f"choose one of {', '.join(record)}")
            if record[field] is None:
                self._note(f"Records left out whose {field} is null", 1, where)
            elif isinstance(record[field], str):
                yield from divided([self._in_unicode(record[field], where)], self.separator)
            else:
                problem = f"{where}: data.text_field={field} is not text ({record[field]!r:.40})"
                raise DataError(problem, "choose another field")

    def _blocks(self, file: str) -> Iterator[str]:
        """Yield a file's text in blocks, none if it is binary; DataError if it is the only file."""
        with self._reading(file) as stream:
            block = stream.read(LONGEST)
            # Binary, or in another encoding than UTF-8: it has a NUL, or more than half of it is no UTF-8.
            if "\0" in block or 2 * replace_surrogates(block)[1] > len(block):
                if len(self.files) == 1:
                    problem = f"{file} is not text in UTF-8 (it is binary or of another encoding)"
                    raise DataError(problem, "convert it, e.g. with iconv")
                self.binary.add(file)
                self._note("Files left out that are not text in UTF-8", 1, file)
                return
            # Report JSON lines and line ends of Windows: they are read as they are, but rarely meant to be learned.
            if file.endswith(ENDINGS["jsonl"]):
                self._note("Files of JSON lines read as they are (data=jsonl reads a field, no other files)", 1, file)
            if "\r\n" in block:
                self._note(
                    "Files with \\r\\n at line ends, which the model learns (to convert: sed -i 's/\\r$//')", 1, file
                )
            while block:
                yield self._in_unicode(block, file)
                block = stream.read(LONGEST)

    @contextmanager
    def _reading(self, file: str) -> Iterator[TextIO]:
        """Open a file as text, unpacked if .gz; bytes that are not UTF-8 become lone surrogates."""
        opened: Any = gzip.open if file.endswith(".gz") else open
        path = self.config.path
        with naming(f"data.path={path}" if path else f"data={self.config.source}"):
            try:
                with opened(file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n") as stream:
                    yield stream
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(
                    f"{file} cannot be read ({os_error_reason(error)})", "fix it or leave it out"
                ) from error

    def _in_unicode(self, text: str, where: str) -> str:
        text, lost = replace_surrogates(text)
        if lost:
            self._note(
                "Characters that are not UTF-8 and became U+FFFD (to convert: iconv -f latin1 -t utf8 OLD > NEW)",
                lost,
                where,
            )
        return text

    def _note(self, loss: str, count: int, where: str) -> None:
        before, places = self.losses.get(loss, (0, []))
        self.losses[loss] = before + count, [*places, where][:10]


def divided(blocks: Iterable[str], separator: str | None) -> Iterator[Iterable[str]]:
    """Yield the documents between the separators of a text, each as pieces.

    The text comes in blocks of any size. Read each document to its end before the next. Line ends right after a
    separator belong to it, and white space alone is no document. If `separator` is None the text is one document.
    """
    if separator is None:
        yield pieces(blocks)
        return
    parts = _parts(blocks, separator)
    is_first = True
    for part in parts:
        # The parts up to the next separator, which is None.
        document = pieces(chain([part or ""], iter(parts.__next__, None)))
        begun = list(islice(document, 2))
        if begun and not is_first:
            begun[0] = begun[0].lstrip("\r\n")
        if len(begun) > 1 or "".join(begun).strip():
            yield chain(begun, document)
        is_first = False


def _parts(blocks: Iterable[str], separator: str) -> Iterator[str | None]:
    """Yield a text in parts, and None for each separator.

    Every separator has a part before and after it, which may be "".
    """
    # The last characters of a block may begin a separator that ends in the next block.
    straddling = len(separator) - 1
    pending = ""
    for block in blocks:
        *ended, pending = (pending + block).split(separator)
        for part in ended:
            yield part
            yield None
        certain = max(0, len(pending) - straddling)
        yield pending[:certain]
        pending = pending[certain:]
    yield pending


def json_records(lines: Iterable[str], source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of JSON lines with its place, "SOURCE line 3"; skip empty lines.

    Raises DataError for a line that is no JSON object.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error})", "fix it or leave it out") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object", "write each line as {...}")
        yield where, record


def _dataset_records(config: DataConfig, files: Files) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a dataset, or of data.path's Parquet files, with their places."""
    # Imported here because it is optional, and slow.
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError("data=hf needs the datasets library", 'pip install -e ".[hf]"') from error
    # Stream the records: a dataset may be larger than the disk.
    if config.path:
        settings = f"data.path={config.path}"
        asked: dict[str, Any] = {"path": "parquet", "data_files": list(files), "split": "train"}
    else:
        settings = f"data.name={config.name}, data.subset={config.subset}, data.split={config.split}"
        asked = {"path": str(user_path("data.name", str(config.name))), "name": config.subset, "split": config.split}
    try:
        for number, record in enumerate(datasets.load_dataset(**asked, streaming=True), start=1):
            yield f"{settings}: record {number}", record
    except Exception as error:  # the library raises errors of all layers below it
        raise DataError(f"{settings} cannot be read ({first_line(error)})", "check it and the network") from error


def find_files(path: str, endings: tuple[str, ...] = ("",), setting: str = "data.path") -> Files:
    """Return the regular files that a setting names: a file, a folder's or a glob's.

    Leaves out a folder's hidden files, and those with other endings. Raises SettingsError if they cannot be found.
    """

    def fail(error: OSError) -> None:  # os.walk() would pass over a closed folder
        raise OSError(error.errno, f"{error.strerror}: {error.filename}")

    root = user_path(setting, path)
    found = [root]
    with reading(setting, path):
        if root.is_dir():
            walked = [Path(folder, name) for folder, _, names in os.walk(root, onerror=fail) for name in names]
            shown = [file for file in walked if not any(part[0] == "." for part in file.relative_to(root).parts)]
            found = [file for file in shown if file.name.endswith(endings)]
        elif not root.exists():
            found = [*map(Path, glob.glob(str(root), recursive=True))]  # noqa: PTH207 (Path.glob wants a relative one)
        files = sizes_of(found)
    if not files:
        problem = f"{setting}={path} names no {' or '.join(endings) or 'regular'} file (seen from {Path.cwd()})"
        raise DataError(problem, "give a file, a folder or a quoted glob that holds text")
    return files


def stdlib_files() -> Files:
    """Return the modules of the standard library, without tests, tables and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in sys.stdlib_module_names]
    files += [file for name in sys.stdlib_module_names for file in (root / name).rglob("*.py")]
    return sizes_of(file for file in files if not SKIPPED & {*file.relative_to(root).parts})


def sizes_of(files: Iterable[Path]) -> Files:
    """Return the regular files among `files`, sorted by name."""
    status = {str(file.absolute()): file.stat() for file in files if file.is_file()}
    return {name: (status[name].st_size, status[name].st_mtime_ns) for name in sorted(status)}


def fingerprint(files: Files, *settings: str | None) -> str:
    """Return a hash of settings and of files' paths, sizes and mtimes, without reading them."""
    return hashlib.sha256(repr((settings, files)).encode()).hexdigest()[:16]


def download_shakespeare(cache_dir: str) -> Path:
    """Return the cached file; download and verify it first if it is missing.

    Raises DataError if that fails.
    """
    path = user_path("data.cache_dir", cache_dir) / "tinyshakespeare.txt"
    if path.is_file():
        return path
    # Verify the content before it takes its name: the cache has the whole file or none.
    try:
        with urlopen(SHAKESPEARE_URL, timeout=20) as response:  # fails after 20 s without an answer
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError("the downloaded file has another sha256 than the known one")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_bytes(content)
    except Exception as error:  # of the network or the disk
        problem = f"data=shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error})"
        raise DataError(problem, f"put a copy at {path}, or give data.path=FILE for one that you have") from error
    return path
