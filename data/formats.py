"""Files of a person's text: packing and format, found in the first bytes, and records.

A format is a name of FORMATS. data/encoding.py tells whether the text of a file is UTF-8.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from common.errors import DataError, first_line, os_error_reason
from common.text import plural

try:
    from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14 and later
except ImportError:
    from backports import zstd  # type: ignore[import-untyped, no-redef, unused-ignore]


class Record(NamedTuple):
    """A record of a file or a dataset."""

    source: str
    """The file, or the settings of the dataset."""
    place: str
    """Its place there, such as "line 3"."""
    fields: dict[str, Any]


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
PACKINGS: dict[bytes, tuple[str, str, Callable[[str], Any]]] = {
    b"\x1f\x8b": (".gz", "gzip -dc", gzip.open),
    b"BZh": (".bz2", "bzip2 -dc", bz2.open),
    b"\xfd7zXZ\0": (".xz", "xz -dc", lzma.open),
    b"\x28\xb5\x2f\xfd": (".zst", "zstd -dc", zstd.open),
}
"""{first bytes of a packed file: (its ending, the command that unpacks it, the function that opens it)}."""
PARQUET = b"PAR1"  # the first bytes of a Parquet file
FAILURES = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""The errors of reading a file and of unpacking it."""
FIRST_LINE = 1 << 24  # bytes in which the first line of JSON lines must end
LARGEST_ARRAY = 1 << 28  # bytes of a JSON array, which is read whole


class Format(NamedTuple):
    """The format of a file, and the evidence for it."""

    name: str
    """One of FORMATS."""
    is_named: bool
    """Whether the file's ending says so."""
    fields: tuple[str, ...]
    """The fields of the first record; none of text, and of Parquet before it is read."""


# Opening


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


# The format


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


def is_named(file: str, format: str) -> bool:
    """Return whether the ending of a file's name is one of a format; text has no endings."""
    return ending_of(file) in FORMATS[format].endings


@lru_cache(maxsize=1 << 16)
def format_of(file: str, size: int, mtime_ns: int) -> Format:
    """Return the format of a file by its name and its first line.

    size, mtime_ns: the file's, so that a result is remembered until the file changes.
    """
    named = next((format for format in FORMATS if is_named(file, format)), "text")
    with failures_named(file):
        # Parquet packs its own pages, so a packed file of Parquet is none.
        with Path(file).open("rb") as stream:
            if stream.read(len(PARQUET)) == PARQUET:
                return Format("parquet", named == "parquet", ())
        with opened_text(file, newline="") as lines:
            if named == "csv":
                _, header = csv_header(lines, file)
                return Format("csv", True, tuple(header))
            # A line of JSON lines is an object. A JSON file may be an array of objects.
            start = lines.read(1 << 12).lstrip("\ufeff \t\r\n")
            if named == "json" and re.match(r"\[\s*\{", start):
                return Format("json", True, ())
            if not start.startswith("{"):
                return Format("jsonl" if named == "jsonl" else "text", named == "jsonl", ())
        with opened_text(file) as lines:
            line = next(filter(str.strip, iter(lambda: lines.readline(FIRST_LINE), "")))
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return Format("jsonl", named in ("jsonl", "json"), tuple(record))
    return Format("jsonl" if named == "jsonl" else "text", named == "jsonl", ())


# Records


def records_of(file: str, format: str, field: str) -> Iterator[Record]:
    """Yield the records of a file of a format but text.

    field: the one that holds the text; of Parquet no other is read. Raises DataError for a file that has another
    format, is damaged or has no such field.
    """
    if format == "parquet":
        yield from parquet_records(file, field)
    elif format == "csv":
        # newline="": the line ends within a quoted value are its own.
        with opened_text(file, newline="") as lines:
            yield from csv_records(lines, file, field)
    else:
        with opened_text(file) as lines:
            yield from json_array(lines, file) if format == "json" else json_records(lines, file)


def json_records(lines: Iterable[str], source: str) -> Iterator[Record]:
    """Yield each object of JSON lines; skip empty lines.

    Raises DataError for a line that is no JSON object.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON ({error})", "fix it or leave it out", value=source) from error
        if not isinstance(record, dict):
            raise DataError(f"{place} is not a JSON object", "write each line as {...}", value=source)
        yield Record(source, place, record)


def json_array(lines: TextIO, source: str) -> Iterator[Record]:
    """Yield each object of a JSON array."""
    content = lines.read(LARGEST_ARRAY + 1)
    if len(content) > LARGEST_ARRAY:
        remedy = f"write its records as JSON lines: jq -c '.[]' {shlex.quote(source)} > {stem_of(source)}.jsonl"
        raise DataError(f"is a JSON array of more than {LARGEST_ARRAY >> 20} MB", remedy, value=source)
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})", "fix it or leave it out", value=source) from error
    for number, record in enumerate(records, start=1):
        place = f"record {number}"
        if not isinstance(record, dict):
            raise DataError(f"{place} is not a JSON object", "write each record as {...}", value=source)
        yield Record(source, place, record)


def csv_records(lines: TextIO, source: str, field: str) -> Iterator[Record]:
    """Yield each row of a CSV file as a record by the names of its first row.

    Raises DataError for a row that has more values than names, or ends before the column `field`.
    """
    delimiter, names = csv_header(lines, source)
    if field not in names:
        raise missing_field(source, "", field, names)
    lines.seek(0)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    # The limit is the process's: a document may be longer than the 131,072 characters to which Python sets it.
    before = csv.field_size_limit(1 << 30)
    try:
        next(rows, None)
        for row in rows:
            place = f"line {rows.line_num}"
            if len(row) > len(names) or 0 < len(row) <= names.index(field):
                fault = f"{place} has {plural(len(row), 'value')}, and the first line {plural(len(names), 'name')}"
                raise DataError(fault, "quote values that have commas or line ends", value=source)
            if row:
                yield Record(source, place, dict(zip(names, row, strict=False)))
    except csv.Error as error:
        remedy = "double the quotes within a value, and close it by one"
        raise DataError(f"line {rows.line_num} is not CSV ({first_line(error)})", remedy, value=source) from error
    finally:
        csv.field_size_limit(before)


def csv_header(lines: TextIO, source: str) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV file, and the names in its first row."""
    first = lines.readline(1 << 16)
    delimiters = "\t" if ending_of(source) == ".tsv" else ",;\t|"
    try:
        rows = {delimiter: next(csv.reader([first], delimiter=delimiter), []) for delimiter in delimiters}
    except csv.Error as error:
        fault = f"line 1 is not CSV ({first_line(error)})"
        raise DataError(fault, "begin it with the columns' names", value=source) from error
    delimiter = max(rows, key=lambda each: len(rows[each]))  # a comma, if there is one column
    return delimiter, [name.strip() for name in rows[delimiter]]


def parquet_records(file: str, field: str) -> Iterator[Record]:
    """Yield each row of a Parquet file.

    It has the column `field` alone: no other is read.
    """
    # Imported here because it is optional, and slow.
    try:
        import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("is Parquet, which needs pyarrow", 'pip install -e ".[hf]"', value=file) from error
    try:
        with parquet.ParquetFile(file) as content:
            names = content.schema_arrow.names
            if field not in names:
                raise missing_field(file, "", field, names, is_text=False)
            kind = content.schema_arrow.field(field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not any(is_text(kind) for is_text in _text_types(pa)):
                fault = f": data.text_field={field} is not text ({kind})"
                raise DataError(fault, "choose another column", value=file)
            number = 0
            for batch in content.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
                    yield Record(file, f"row {number}", {field: text})
    except pa.ArrowException as error:
        fault = f": the column {field} cannot be read ({first_line(error)})"
        raise DataError(fault, "copy or download it again, or leave it out", value=file) from error


def _text_types(pa: Any) -> list[Callable[[Any], bool]]:
    """Return pyarrow's predicates of the types that hold text, or text in UTF-8 as bytes."""
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return [getattr(pa.types, f"is_{name}") for name in names if hasattr(pa.types, f"is_{name}")]


def missing_field(
    source: str,
    place: str,
    field: str,
    names: Sequence[str],
    is_text: bool = True,
) -> DataError:
    """Return the error for a record without the field of its text.

    place: that of the record, as in Record, or "" if no record of the file has it.
    is_text: whether data=text can read the record as it is.
    """
    remedy = f"choose one of {', '.join(names)}" if names else "write one"
    fault = f"{place} has no field data.text_field={field}".lstrip()
    return DataError(fault, remedy + ", or data=text" * is_text, value=source)
