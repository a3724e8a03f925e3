"""Opening a file, packed or plain, and the commands that write another one beside it.

A format is a name of FORMATS. data/encoding.py tells whether the text of a file is UTF-8.
"""

import bz2
import gzip
import io
import lzma
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from common.errors import DataError, os_error_reason

try:
    from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14 and later
except ImportError:
    from backports import zstd  # type: ignore[import-untyped, no-redef, unused-ignore]


FAILURES = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""The errors of reading a file and of unpacking it."""
MARK = "\ufeff"
"""The byte order mark, with which some editors begin a file; opened_text() leaves out that of the first byte."""
LONGEST_WINDOW = zstd.DecompressionParameter.window_log_max
WIDEST = {LONGEST_WINDOW: LONGEST_WINDOW.bounds()[1]}
"""The option of Zstandard that reads every file; without it those of `zstd --long=28` and above are refused."""
PACKINGS: dict[bytes, tuple[str, str, Callable[[str], Any]]] = {
    b"\x1f\x8b": (".gz", "gzip -dc", gzip.open),
    b"BZh": (".bz2", "bzip2 -dc", bz2.open),
    b"\xfd7zXZ\0": (".xz", "xz -dc", lzma.open),
    b"\x28\xb5\x2f\xfd": (".zst", "zstd -dc --long=31", partial(zstd.open, options=WIDEST)),
}
"""{first bytes of a packed file: (its ending, the command that unpacks it, the function that opens it)}."""


class Kind(NamedTuple):
    """A format of files."""

    noun: str
    endings: tuple[str, ...] = ()
    """The endings of a name that tell it, before that of a packing."""


FORMATS = {
    "text": Kind("file"),
    "jsonl": Kind("JSON lines file", (".jsonl", ".ndjson")),
    "json": Kind("JSON file", (".json",)),
    "csv": Kind("CSV file", (".csv", ".tsv")),
    "parquet": Kind("Parquet file", (".parquet",)),
}


def open_bytes(file: str) -> BinaryIO:
    """Open a file's bytes, unpacked if it is packed by gzip, bzip2, xz or Zstandard."""
    with Path(file).open("rb") as stream:
        start = stream.read(max(map(len, PACKINGS)))
    opened = next((packing[2] for magic, packing in PACKINGS.items() if start.startswith(magic)), None)
    return opened(file) if opened else Path(file).open("rb")


@contextmanager
def opened_text(file: str, newline: str = "\n") -> Iterator[TextIO]:
    """Open a file as text; bytes that are not UTF-8 become lone surrogates.

    newline: as in open(). Raises DataError if the file cannot be opened, read or unpacked.
    """
    with failures_named(file), open_bytes(file) as stream:
        yield io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline=newline)


@contextmanager
def failures_named(file: str) -> Iterator[None]:
    """Turn an error of reading or unpacking a file into a DataError."""
    try:
        yield
    except FAILURES as error:
        fault = f"cannot be read ({os_error_reason(error)})"
        raise DataError(fault, "fix it or leave it out", value=file) from error


def unpacking(file: str) -> str:
    """Return the command that unpacks a file; "" if it is not packed."""
    with Path(file).open("rb") as stream:
        return unpacking_of(stream.read(max(map(len, PACKINGS))))


def unpacking_of(start: bytes) -> str:
    """Return the command that unpacks a file with these first bytes; "" if it is not packed."""
    return next((packing[1] for magic, packing in PACKINGS.items() if start.startswith(magic)), "")


def is_named(file: str, format: str) -> bool:
    """Return whether the ending of a file's name is one of a format; text has no endings."""
    return ending_of(file) in FORMATS[format].endings


def ending_of(file: str) -> str:
    """Return the ending of a file's name but for its packing: .jsonl for a.JSONL.gz."""
    name = file.lower()
    for ending, _, _ in PACKINGS.values():
        name = name.removesuffix(ending)
    return Path(name).suffix


def stem_of(file: str) -> str:
    """Return a file's path without its endings, for a new file beside it, quoted."""
    name = Path(file).name
    for ending, _, _ in PACKINGS.values():
        name = name.removesuffix(ending)
    return shlex.quote(str(Path(file).with_name(Path(name).stem)))


def beside(file: str, word: str) -> str:
    """Return the path of a new file beside a file, quoted: notes.utf8.csv for notes.csv.gz.

    It keeps an ending that tells its format; a text ends in .txt.
    """
    ending = ending_of(file)
    is_known = any(ending in kind.endings for kind in FORMATS.values())
    return f"{stem_of(file)}.{word}{ending if is_known else '.txt'}"


def into_lines(file: str, command: str) -> str:
    """Return the command that runs `command` on a file and writes JSON lines beside it."""
    unpack = unpacking(file)
    quoted = shlex.quote(file)
    return f"{f'{unpack} {quoted} | {command}' if unpack else f'{command} {quoted}'} > {stem_of(file)}.lines.jsonl"


def jq(file: str, program: str) -> str:
    """Return the command that makes JSON lines of a file by a program of jq."""
    return into_lines(file, f"jq -c {shlex.quote(program)}")


def from_line(source: str, number: int) -> str:
    """Return the command that prints a file, unpacked, from a line on."""
    unpack = unpacking(source)
    quoted = shlex.quote(source)
    return f"{unpack} {quoted} | tail -n +{number}" if unpack else f"tail -n +{number} {quoted}"


def first_lines(source: str, number: int) -> str:
    """Return the command that prints a file, unpacked, before a line."""
    unpack = unpacking(source)
    quoted = shlex.quote(source)
    return f"{unpack} {quoted} | head -n {number - 1}" if unpack else f"head -n {number - 1} {quoted}"
