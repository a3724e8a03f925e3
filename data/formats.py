"""The format of a file, found in its name and first bytes, and its records."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from data.fields import Record
from data.json_records import json_array, json_records, whole_number
from data.opening import FORMATS, failures_named, is_named, opened_text
from data.parquet import parquet_records
from data.tables import csv_header, csv_records

PARQUET = b"PAR1"  # the first bytes of a Parquet file
FIRST_LINE = 1 << 24  # bytes in which the first line of JSON lines must end


class Format(NamedTuple):
    """The format of a file, and the evidence for it."""

    name: str
    """One of FORMATS."""
    is_named: bool
    """Whether the file's ending says so."""
    fields: tuple[str, ...]
    """The fields of the first record; none of text, and of Parquet before it is read."""


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
            if named == "json" and re.match(r'\[\s*([{"]|\]\s*$)', start):  # or of no records
                return Format("json", True, ())
            if not start.startswith("{"):
                return Format("jsonl" if named == "jsonl" else "text", named == "jsonl", ())
        with opened_text(file) as lines:
            line = next(filter(str.strip, iter(lambda: lines.readline(FIRST_LINE), "")))
    if named != "text":  # records that end in commas are named when they are read
        line = line.strip().removesuffix(",")
    try:
        record = json.loads(line, parse_int=whole_number)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return Format("jsonl", named in ("jsonl", "json"), tuple(record))
    return Format("jsonl" if named == "jsonl" else "text", named == "jsonl", ())


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
            yield from (json_array if format == "json" else json_records)(lines, file, field)
