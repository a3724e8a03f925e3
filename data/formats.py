"""Files of a person's text: packing and format, found in the first bytes, and records.

A format is a name of FORMATS. data/encoding.py tells whether the text of a file is UTF-8.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain, count, islice
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
PARQUET = b"PAR1"  # the first bytes of a Parquet file
FAILURES = (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)
"""The errors of reading a file and of unpacking it."""
MARK = "\ufeff"
"""The byte order mark, with which some editors begin a file; opened_text() leaves out that of the first byte."""
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""The characters that may divide the values of a table, with their names."""
DOUBLED = (
    r'import re, sys; double = lambda pair: pair[1].replace(b"\"", b"\"\""); '
    r'sys.stdout.buffer.writelines(re.sub(rb"\\([\"\\\n])", double, line) for line in sys.stdin.buffer)'
)
"""A program that doubles quotes after backslashes; a backslash before another letter stays, as R and Spark have it."""
COMMAS = "sed 's/,[[:space:]]*$//'"  # the command that leaves out commas at line ends
FIRST_LINE = 1 << 24  # bytes in which the first line of JSON lines must end
MOST_JOINED = 3  # fields with text of a record for which a command joins them
MOST_BEFORE = 50  # lines of a table in which that of the names is looked for
ASSIGNMENT = re.compile(r"\s*(?:(?:var|let|const)\s+)?[\w.$]+\s*=\s*(?=[\[{])")
MOST_NAMES = 50  # fields that a sentence lists
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


def beside(file: str, word: str) -> str:
    """Return the path of a new file beside a file, quoted: notes.utf8.csv for notes.csv.gz.

    It keeps an ending that tells its format; a text ends in .txt.
    """
    ending = ending_of(file)
    is_known = any(ending in kind.endings for kind in FORMATS.values())
    return f"{stem_of(file)}.{word}{ending if is_known else '.txt'}"


def jq(file: str, program: str) -> str:
    """Return the command that makes JSON lines of a file by a program of jq."""
    return into_lines(file, f"jq -c {shlex.quote(program)}")


def into_lines(file: str, command: str) -> str:
    """Return the command that runs `command` on a file and writes JSON lines beside it."""
    unpack = unpacking(file)
    quoted = shlex.quote(file)
    return f"{f'{unpack} {quoted} | {command}' if unpack else f'{command} {quoted}'} > {stem_of(file)}.lines.jsonl"


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
            if named == "json" and re.match(r'\[\s*[{"]', start):
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
            yield from (json_array if format == "json" else json_records)(lines, file, field)


def json_records(lines: Iterable[str], source: str, field: str) -> Iterator[Record]:
    """Yield each object of JSON lines; a string is a record whose `field` it is.

    Skips empty lines and byte order marks at line begins. Raises DataError for a line that is neither.
    """
    parsed = record_parser(field)
    for number, line in enumerate(lines, start=1):
        line = line.lstrip(MARK)
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            record = parsed(line)
        except DataError as error:
            raise DataError(f"{place} has {error.fault}", error.remedy, value=source) from None
        except (ValueError, RecursionError) as error:
            position, reason, remedy = json_mistake(line, error)
            rest = line[position:].strip()
            # Of a file, name the command that makes lines of its records.
            if Path(source).is_file():
                if line.strip() in ("{", "["):
                    remedy = f"{jq(source, '.[]' if '[' in line else '.')} writes each record as a line"
                elif rest == ",":
                    reason = "it ends in a comma"
                    remedy = f"{into_lines(source, COMMAS)} leaves those at line ends out"
                elif rest.startswith("{") and error.args[0].startswith("Extra data"):
                    reason = "it has several records"
                    remedy = f"{jq(source, '.')} writes each as a line"
            raise DataError(f"{place} is not JSON ({reason})", remedy, value=source) from error
        if isinstance(record, str):
            record = {field: record}
        elif not isinstance(record, dict):
            remedy = into_records(source, record, field) if Path(source).is_file() else "write each line as {...}"
            raise DataError(f"{place} is not a JSON object", remedy, value=source)
        yield Record(source, place, record)


def into_records(file: str, line: Any, field: str) -> str:
    """Return the step that makes JSON lines of a file with a line that is no record."""
    if isinstance(line, list) and line and all(isinstance(each, dict) for each in line):
        return f"{jq(file, '.[]')} writes its records as lines"
    if isinstance(line, list) and any(isinstance(each, str) for each in line):
        joined = f'{{{json.dumps(field)}: [.. | strings] | join("\\n")}}'
        program = f'if type == "array" then {joined} else . end'
        return f"{jq(file, program)} joins the strings of each list"
    return f"{jq(file, 'objects, strings')} leaves out lines that are neither objects nor strings"


def json_array(lines: TextIO, source: str, field: str) -> Iterator[Record]:
    """Yield each object of a JSON array; a string is a record whose `field` it is."""
    # Read the whole array, for Python's parser reads no part of one.
    content = lines.read(LARGEST_ARRAY + 1)
    if len(content) > LARGEST_ARRAY:
        program = f'.[] | if type == "string" then {{{json.dumps(field)}: .}} else . end'
        remedy = f"write its records as JSON lines: {jq(source, program)}"
        raise DataError(f"is a JSON array of more than {LARGEST_ARRAY >> 20} MB", remedy, value=source)

    # Parse it; an error names its place and its remedy.
    try:
        records = record_parser(field)(content)
    except DataError as error:
        raise DataError(f"has a record with {error.fault}", error.remedy, value=source) from None
    except (ValueError, RecursionError) as error:
        position, reason, remedy = json_mistake(content, error)
        if content[position:].startswith("[") and error.args[0].startswith("Extra data"):
            reason = "another array begins"
            remedy = f"{jq(source, '.[]')} makes lines of the records of all"
        place = f"line {content.count(chr(10), 0, position) + 1}"
        raise DataError(f"{place} is not JSON ({reason})", remedy, value=source) from error

    # Make records of its strings and objects.
    for number, record in enumerate(records, start=1):
        place = f"record {number}"
        if isinstance(record, str):
            yield Record(source, place, {field: record})
        elif isinstance(record, dict):
            yield Record(source, place, record)
        else:
            raise DataError(f"{place} is not a JSON object", "write each record as {...}", value=source)


def records_within(file: str, field: str) -> str:
    """Return jq's program that makes records of a file with a JSON object; "" for others.

    They are its table, or else its longest list of objects.
    """
    with opened_text(file) as stream, suppress(ValueError, RecursionError):
        whole = json.loads(stream.read(LARGEST_ARRAY), parse_int=whole_number)
        if not isinstance(whole, dict):
            return ""
        table = rows_within(whole, field)
        if table:
            return table
        lists = {
            name: len(value)
            for name, value in whole.items()
            if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
        }
        if lists:
            return f"{path_of(whole, max(lists, key=lambda name: lists[name]))}[]"
    return ""


def has_one_line(file: str) -> bool:
    """Return whether a file has a single line with text."""
    with opened_text(file) as lines:
        return len([*islice(filter(str.strip, lines), 2)]) == 1


def is_assigned(file: str) -> bool:
    """Return whether a file is JSON after JavaScript's assignment, as Twitter's tweets.js is."""
    with opened_text(file) as stream:
        content = stream.read(1 << 12)
        begun = ASSIGNMENT.match(content)
        if begun:
            content += stream.read(LARGEST_ARRAY)
            with suppress(ValueError, RecursionError):
                json.loads(content[begun.end() :].rstrip().removesuffix(";"), parse_int=whole_number)
                return True
    return False


def rows_within(whole: dict[str, Any], field: str) -> str:
    """Return jq's program that makes records of a table in an object; "" if it is none.

    So is what pandas writes: {"text": {"0": …}} by columns, {"0": {"text": …}} by rows, or rows beside names.
    """
    texts = whole.get(field)
    names = whole.get("columns")
    rows = whole.get("data")
    each = f"{{{json.dumps(field)}: .}}"
    same = [name for name, value in whole.items() if isinstance(texts, list) and isinstance(value, list)]
    if isinstance(texts, dict) and len(texts) > 1 and all(map(str.isdecimal, texts)):
        return f".{json.dumps(field)}[] | {each}"
    if len(same) > 1 and len({len(whole[name]) for name in same}) == 1:  # lists of one length
        return f".{json.dumps(field)}[] | {each}"
    if isinstance(names, list) and field in names and isinstance(rows, list):
        return f".data[] | {{{json.dumps(field)}: .[{names.index(field)}]}}"
    if len(whole) > 1 and all(isinstance(row, dict) and field in row for row in whole.values()):
        return ".[]"
    if len(whole) > 1 and all(name.isdecimal() and isinstance(text, str) for name, text in whole.items()):
        return f".[] | {each}"
    for name, value in whole.items():
        is_rows = isinstance(value, list) and all(isinstance(row, dict) and field in row for row in value)
        if is_rows and value and name != field:  # else it is a text in parts
            return f"{path_of(whole, name)}[]"
    return ""


def record_parser(field: str) -> Callable[[str], Any]:
    """Return json.loads(), but for an object that has `field` twice, or a part of its name.

    Of these json.loads() would keep the last. The DataError has neither the file nor the place.
    """
    names = {field, *field.split(".")}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            for name in names & record.keys():
                if [other for other, _ in pairs].count(name) > 1:
                    raise DataError(f"{name} twice", "leave one out, or give it another name")
        return record

    return json.JSONDecoder(object_pairs_hook=once, parse_int=whole_number).decode


def whole_number(digits: str) -> int | str:
    """Return the number that digits are; the digits of one that is too long for Python."""
    try:
        return int(digits)
    except ValueError:
        return digits


def json_mistake(text: str, error: ValueError | RecursionError) -> tuple[int, str, str]:
    """Return where a text is not JSON, the reason, and what to do.

    The text around the place decides: the messages of Python differ between its versions.
    """
    if not isinstance(error, json.JSONDecodeError):  # a RecursionError
        return 0, "its brackets are nested too deeply for Python", "fix it or leave it out"
    before = text[: error.pos].rstrip()
    rest = text[error.pos :].lstrip()
    if before.endswith(",") and rest[:1] in ("]", "}"):  # to Python 3.12
        return len(before) - 1, "a comma after the last value", "remove the comma"
    if re.match(r",\s*[\]}]", rest):
        return error.pos, "a comma after the last value", "remove the comma"
    if re.match("'|None|True|False", rest):
        return error.pos, "values as Python prints them", "write the records by json.dumps()"
    if re.match("//|/[*]|#", rest):
        return error.pos, "a comment", "remove the comment"
    if not rest or error.msg.startswith("Unterminated string"):
        return (
            error.pos,
            "it ends within a record",
            "copy or download the file again, or write line ends in strings as \\n",
        )
    if error.msg.startswith("Invalid control character"):
        return error.pos, "a line end or tab within a string", "write it as \\n or \\t"
    # A string has ended, and no sign of JSON follows, or a quote at once: its last quote was a letter of the text.
    if before.endswith('"') and (re.match(r'[^",:{}\[\]]', rest) or text[error.pos - 1 : error.pos + 1] == '""'):
        return error.pos, "a quote within a string", 'write it as \\"'
    return error.pos, f"{error.msg}, column {error.colno}", "fix it or leave it out"


def csv_records(lines: TextIO, source: str, field: str) -> Iterator[Record]:
    """Yield each row of a CSV file as a record by the names of its first row.

    Raises DataError for a row that has more values than names, or ends before the column `field`.
    """
    delimiter, names = csv_header(lines, source)
    refuse_excels_line(source, names)
    refuse_single_quotes(lines, source)
    for other in DELIMITERS if len(names) == 1 else ():  # a single name tells no delimiter
        command = with_row_numbers(lines, source, names, other)
        if command and other != delimiter:
            raise DataError(
                "has numbers of rows without a name in its first line", f"{command} names them", value=source
            )
    if field not in names:
        refuse_blanks(lines, source, delimiter, 1)  # quotes after them are letters of a name
        refuse_lines_before(lines, source, field)
        error = missing_field(source, field, names)
        error.remedy += f"; if line 1 is a record and names no columns, {with_names(lines, source, field)}"
        raise error
    if names.count(field) > 1:
        fault = f"has {plural(names.count(field), 'column')} called {field}"
        raise DataError(fault, with_own_names(source, names, delimiter), value=source)
    refuse_blanks(lines, source, delimiter, names.index(field))
    # The limit is the process's: a document may be longer than the 131,072 characters to which Python sets it.
    before = csv.field_size_limit(1 << 30)
    begins = 1
    try:
        is_unquoted = delimiter == "\t" and are_letters(lines, len(names))
        if is_unquoted:
            refuse_backslashes(lines, source, delimiter, len(names))
        lines.seek(0)
        last = ""

        def noted() -> Iterator[str]:
            nonlocal last
            for line in lines:
                last = line
                yield line

        if is_unquoted:
            rows = csv.reader(noted(), delimiter=delimiter, strict=True, quoting=csv.QUOTE_NONE)
        else:
            rows = csv.reader(noted(), delimiter=delimiter, strict=True)
        next(rows, None)
        ends_in_lf = last.endswith("\n")
        begins = rows.line_num + 1
        for row in rows:
            if ends_in_lf and last.endswith("\r"):  # as pandas writes it without quotes
                command = f"{unpacking(source) or 'cat'} {shlex.quote(source)} | sed 's/\\r\\(.\\)/ \\1/g'"
                remedy = f"{command} > {beside(source, 'new')} writes a blank for each such \\r"
                raise DataError(f"line {begins} ends in \\r alone, and line 1 does not", remedy, value=source)
            if len(row) > len(names) or 0 < len(row) <= names.index(field):
                refuse_backslashes(lines, source, delimiter, len(names))
                refuse_blanks(lines, source, delimiter, 1)
                counts = f"{plural(len(row), 'value')}, and the first line {plural(len(names), 'name')}"
                remedy = f"quote values that have {DELIMITERS[delimiter]} or line ends"
                command = with_row_numbers(lines, source, names, delimiter)
                if command:
                    remedy += f"; if each row begins with its number, {command} names it"
                elif len(names) == 1:
                    lines_alone = f"{from_line(source, 2)} > {stem_of(source)}.lines.txt"
                    remedy += f"; if each line is a text, {lines_alone} has those alone: then set data.separator='\\n'"
                raise DataError(f"line {begins} has {counts}", remedy, value=source)
            if len(row) == len(names) > 1 and row != names and sorted(row) == sorted(names):
                remedy = (
                    f"{from_line(source, begins)} > {table_beside(source, 'rest', delimiter)} writes those from there"
                )
                remedy += f", and {first_lines(source, begins)} > {table_beside(source, 'first', delimiter)} the others"
                raise DataError(f"line {begins} has the names in another order", remedy, value=source)
            if row:
                yield Record(source, f"line {begins}", dict(zip(names, row, strict=False)))
            begins = rows.line_num + 1
    except csv.Error as error:
        refuse_backslashes(lines, source, delimiter, len(names))
        remedy = "double the quotes within a value, and put one before and after it"
        raise DataError(f"line {begins} is not CSV ({first_line(error)})", remedy, value=source) from error
    finally:
        csv.field_size_limit(before)


def repeats_names(record: dict[str, Any]) -> bool:
    """Return whether a row has the names of the columns again, as where cat joined tables."""
    return all(name == str(value).lstrip(MARK).strip() for name, value in record.items())


def refuse_excels_line(source: str, names: Sequence[str]) -> None:
    """Raise DataError if a table begins with a line for Excel, such as sep=;."""
    if [name.lower() for name in names] == ["sep=", ""]:
        remedy = f"{from_line(source, 2)} > {beside(source, 'new')} leaves it out"
        raise DataError("begins with a line for Excel, sep=", remedy, value=source)


def refuse_lines_before(lines: TextIO, source: str, field: str) -> None:
    """Raise DataError if comments, a title or empty lines stand before a table's names.

    Call it for a table whose first line does not name `field`. It has the command that leaves them out.
    """
    for delimiter in DELIMITERS:
        lines.seek(0)
        widths = []
        for number, line in enumerate(islice(lines, MOST_BEFORE), start=1):
            with suppress(csv.Error):
                names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
                if number > 1 and field in names and len(names) not in widths:
                    remedy = f"{from_line(source, number)} > {table_beside(source, 'new', delimiter)} leaves them out"
                    raise DataError(f"has {plural(number - 1, 'line')} before the names", remedy, value=source)
                if line.strip() and not line.startswith(("#", "%")):
                    widths.append(len(names))


def refuse_single_quotes(lines: TextIO, source: str) -> None:
    """Raise DataError if the values of a table stand in single quotes.

    They are letters if less than two rows have them, or if they join the lines of each row, and each line has as many
    values without them. The DataError has the command that writes double ones.
    """
    lines.seek(0)
    content = lines.read(1 << 16)
    sample = [*io.StringIO(content, newline="")]
    for delimiter in DELIMITERS:
        rows = csv.reader(sample, delimiter=delimiter, quotechar="'", strict=True)
        found: list[tuple[list[str], str]] = []  # the values of each row, and its text
        begins = 0
        with suppress(csv.Error):  # the sample may end within a value
            for row in rows:
                text = "".join(sample[begins : rows.line_num])
                begins = rows.line_num
                if row:
                    found.append((row, text))
        found = found[1 : -1 if len(content) == 1 << 16 else None]  # the first may have names, the last may be cut
        widths = {len(row) for row, _ in found}
        joins = all(any("\n" in value for value in row) for row, _ in found)
        if (
            len(found) > 1
            and len(widths) == 1
            and min(widths) > 1
            and all(has_quotes(row, text, delimiter) for row, text in found)
            and not (joins and len({len(row) for row in first_rows(lines, delimiter)}) == 1)
        ):
            remedy = f"{rewriting(source, delimiter, 'quotechar=chr(39)')} writes double ones"
            raise DataError("has its values in single quotes", remedy, value=source)


def first_rows(lines: TextIO, delimiter: str) -> list[list[str]]:
    """Return the first rows of a table, that of its names too, without a row that is cut."""
    lines.seek(0)
    sample = lines.read(1 << 16)
    rows = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if row]
    return rows[:-1] if len(sample) == 1 << 16 else rows


def with_row_numbers(lines: TextIO, source: str, names: Sequence[str], delimiter: str) -> str:
    """Return the command that names the rows' numbers, which R's write.table() leaves unnamed.

    "" if not each of its first rows begins with a number of its own, and has one value more than there are names.
    """
    rows = first_rows(lines, delimiter)[1:]
    numbers = {row[0] for row in rows if row[0].isdecimal() and len(row) == len(names) + 1}
    if not rows or len(numbers) < len(rows):
        return ""
    own = next(name for name in chain(["row"], map("row{}".format, count(2))) if name not in names)
    return with_header(source, [own, *names], delimiter)


def refuse_blanks(lines: TextIO, source: str, delimiter: str, column: int) -> None:
    """Raise DataError if a blank stands before a column's name and each of its values.

    They would be learned, and quotes after them too. It has the command that leaves them out.
    """
    names, *rows = first_rows(lines, delimiter) or [[]]
    values = [row[column] for row in (names, *rows) if len(row) > column > 0]
    if rows and len(names) > column and values and all(value.startswith(" ") for value in values):
        remedy = f"{rewriting(source, delimiter, 'skipinitialspace=True')} leaves them out"
        raise DataError(f"has blanks after its {DELIMITERS[delimiter]}", remedy, value=source)


def refuse_backslashes(lines: TextIO, source: str, delimiter: str, width: int) -> None:
    """Raise DataError if quotes within the values of a table stand after backslashes.

    So write Spark, MySQL and R. Call it for a table that cannot be read otherwise. It has the command that doubles
    them.
    """
    lines.seek(0)
    if not any('\\"' in line for line in lines):
        return
    # Double them and read the table: csv.reader() is not strict with an escapechar.
    lines.seek(0)
    doubled = (re.sub(r'\\(["\\])', lambda pair: pair[1].replace('"', '""'), line) for line in lines)
    with suppress(csv.Error):
        widths = {len(row) for row in csv.reader(doubled, delimiter=delimiter, strict=True)} - {0, width}
        if widths <= {width + 1}:  # R's write.table() leaves the numbers of rows unnamed
            command = f"{unpacking(source) or 'cat'} {shlex.quote(source)} | python -c {shlex.quote(DOUBLED)}"
            remedy = f"{command} > {beside(source, 'quoted')} doubles them"
            raise DataError("has quotes after backslashes within its values", remedy, value=source)


def rewriting(source: str, delimiter: str, quoting: str) -> str:
    """Return the command that writes a table as CSV, read with these arguments of csv.reader()."""
    rows = f"csv.reader(sys.stdin, delimiter={json.dumps(delimiter)}, {quoting})"
    as_is = 'sys.stdin.reconfigure(encoding="utf-8-sig", newline="")'  # line ends of values too
    program = f"import csv, sys; csv.field_size_limit(1 << 30); {as_is}; csv.writer(sys.stdout).writerows({rows})"
    command = f"{unpacking(source) or 'cat'} {shlex.quote(source)} | python -c {shlex.quote(program)}"
    return f"{command} > {stem_of(source)}.quoted.csv"


def has_quotes(row: list[str], text: str, delimiter: str) -> bool:
    """Return whether a value of a row stands in single quotes in its text."""
    text = f"{delimiter}{text.rstrip()}\n"
    quoted = ("'" + value.replace("'", "''") + "'" for value in row if value)
    return any(f"{delimiter}{value}{end}" in text for value in quoted for end in (delimiter, "\n"))


def with_names(lines: TextIO, source: str, field: str) -> str:
    """Return the step that names the columns of a table without names.

    The column with the longest values gets the name of the text, `field`.
    """
    # The first rows have the most values, and each as many, if they are divided by the right character.
    tables = {}
    for delimiter in DELIMITERS:
        lines.seek(0)
        with suppress(csv.Error):  # quotes that mean nothing with this delimiter
            tables[delimiter] = [row for row in islice(csv.reader(lines, delimiter=delimiter), 100) if row] or [[""]]
    even = {delimiter: rows for delimiter, rows in tables.items() if len({*map(len, rows)}) == 1} or {",": [[""]]}
    delimiter = max(even, key=lambda each: len(even[each][0]))
    columns = [*zip(*even[delimiter], strict=True)]
    longest = max(columns, key=lambda column: sum(map(len, column)))
    names = [field if column is longest else f"c{number}" for number, column in enumerate(columns, start=1)]
    with Path(source).open("rb") as stream:
        has_mark = stream.read(3) == codecs.BOM_UTF8  # which would stand within the text
    read = unpacking(source) or ("tail -c +4" if has_mark else "cat")
    command = f"(echo {shlex.quote(delimiter.join(names))}; {read} {shlex.quote(source)})"
    return f"{command} > {table_beside(source, 'named', delimiter)} gives them names"


def with_own_names(source: str, names: Sequence[str], delimiter: str) -> str:
    """Return the step that gives each column of a table a name of its own: text, text2."""
    own: list[str] = []
    for name in names:
        numbered = (f"{name}{number}" for number in count(2))
        own.append(name if name not in own else next(other for other in numbered if other not in {*own, *names}))
    return f"{with_header(source, own, delimiter)} gives each a name of its own"


def with_header(source: str, names: Sequence[str], delimiter: str) -> str:
    """Return the command that writes a table with other names in its first line."""
    header = io.StringIO()
    csv.writer(header, delimiter=delimiter, lineterminator="").writerow(names)
    command = f"(echo {shlex.quote(header.getvalue())}; {from_line(source, 2)})"
    return f"{command} > {table_beside(source, 'named', delimiter)}"


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


def table_beside(source: str, word: str, delimiter: str) -> str:
    """Return the path of a new table beside a file, quoted: a.named.tsv for a.csv with tabs."""
    ending = ".tsv" if delimiter == "\t" else ".csv"
    return f"{stem_of(source)}.{word}{ending}"


def are_letters(lines: TextIO, width: int) -> bool:
    """Return whether quotes are letters of the values in a table with tabs.

    They are, for such tables often were never quoted, if no name of its first line is quoted, each line has `width`
    values, and a value that began with a quote would end in another line, or nowhere. Of one column each line has its
    value: there a quoted value may have lines.
    """
    lines.seek(0)
    if lines.readline().startswith('"'):
        return False
    lines.seek(0)
    is_quoted = csv.reader(lines, delimiter="\t", strict=True)
    try:
        if all(number == is_quoted.line_num or width == 1 for number, _ in enumerate(is_quoted, start=1)):
            return False
    except csv.Error:
        pass
    lines.seek(0)
    try:
        return all(len(row) in (0, width) for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    except csv.Error:
        return False


def csv_header(lines: TextIO, source: str) -> tuple[str, list[str]]:
    """Return the delimiter of a CSV file, and the names in its first row."""
    first = lines.readline(1 << 16)
    delimiters = "".join(DELIMITERS)
    if ending_of(source) == ".tsv":  # its name may err
        delimiters = "\t" if "\t" in first else "\t,;|"
    try:
        rows = {delimiter: next(csv.reader([first], delimiter=delimiter), []) for delimiter in delimiters}
    except csv.Error as error:
        fault = f"line 1 is not CSV ({first_line(error)})"
        raise DataError(fault, "begin it with the columns' names", value=source) from error
    delimiter = max(rows, key=lambda each: len(rows[each]))  # the first of them, if there is one column
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
            columns = _columns(pa, content.schema_arrow)
            kinds = dict(columns)
            if field not in kinds:
                raise missing_field(file, field, [*kinds], is_text=False)
            same = [name for name, _ in columns if name == field]
            if len(same) > 1:
                fault = f"has {plural(len(same), 'column')} called {field}"
                raise DataError(fault, "give them names of their own", value=file)
            kind = kinds[field]
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not any(is_text(kind) for is_text in _text_types(pa)):
                fault = f": data.text_field={field} is not text ({kind})"
                rows = content.iter_batches(batch_size=1, columns=[field]) if pa.types.is_nested(kind) else ()
                remedies = (joining_parquet(file, row, field) for batch in rows for row in batch.to_pylist())
                raise DataError(fault, next(filter(None, remedies), "choose another column"), value=file)
            number = 0
            for batch in content.iter_batches(batch_size=1024, columns=[field]):
                for row in batch.to_pylist():
                    number += 1
                    value = value_of(row, field)
                    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
                    yield Record(file, f"row {number}", {field: text})
    except (pa.ArrowException, OSError) as error:  # OSError: damaged pages, or metadata of other files alone
        fault = f": the column {field} cannot be read ({first_line(error)})"
        raise DataError(fault, "copy or download it again, or leave it out", value=file) from error


def joining_parquet(file: str, row: dict[str, Any], field: str) -> str:
    """Return the step that makes JSON lines of the strings in a column; "" if a row has none."""
    value = value_of(row, field)
    if '"' not in json.dumps(value, default=str):
        return ""
    batches = f"parquet.ParquetFile(sys.argv[1]).iter_batches(columns=[{json.dumps(field)}])"
    lines = 'json.dumps(row, default=str) + "\\n" for batch in batches for row in batch.to_pylist()'
    program = f"import json, sys; from pyarrow import parquet; batches = {batches}; sys.stdout.writelines({lines})"
    joins = shlex.quote(joined(path_of(row, field), value, field, field))
    command = f"python -c {shlex.quote(program)} {shlex.quote(file)} | jq -c {joins}"
    return f"{command} > {stem_of(file)}.lines.jsonl joins the strings in {field}"


def _columns(pa: Any, schema: Any, outer: str = "") -> list[tuple[str, Any]]:
    """Return the names of all columns with their types, within a struct struct.column."""
    columns: list[tuple[str, Any]] = []
    for column in schema:
        name = f"{outer}{column.name}"
        if pa.types.is_struct(column.type):
            columns += _columns(pa, column.type, f"{name}.")
        else:
            columns.append((name, column.type))
    return columns


def _text_types(pa: Any) -> list[Callable[[Any], bool]]:
    """Return pyarrow's predicates of the types that hold text, or text in UTF-8 as bytes."""
    names = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return [getattr(pa.types, f"is_{name}") for name in names if hasattr(pa.types, f"is_{name}")]


# Fields


def value_of(record: dict[str, Any], field: str) -> Any:
    """Return the value of a field, KeyError if there is none.

    A dotted name, such as content.text, means a field of the object in a field, if no field is called so.
    """
    if field in record:
        return record[field]
    outer, dot, inner = field.partition(".")
    value = record[outer]
    if dot and isinstance(value, dict):
        return value_of(value, inner)
    if dot and value is None:
        return None
    raise KeyError(field)


def has_field(names: Sequence[str], field: str) -> bool:
    """Return whether a record with these fields may have `field`, perhaps within an object."""
    return field in names or field.partition(".")[0] in names


def text_fields(record: dict[str, Any]) -> list[str]:
    """Return the names of the fields that hold text, those within objects with dots."""
    names = []
    for name, value in record.items():
        if isinstance(value, str):
            names.append(name)
        elif isinstance(value, dict):
            names += [f"{name}.{inner}" for inner in text_fields(value)]
    return names


OF_CHATGPT = (
    ".mapping as $all | [.current_node | recurse($all[.].parent // empty) | $all[.].message"
    ' | select([.content.parts[]? | strings] | add + "" != "")'
    ' | .author.role + ": " + ([.content.parts[] | strings] | join("\\n"))] | reverse | join("\\n")'
)
"""jq's program for the export of ChatGPT: the last version of a conversation, of its nodes by their ids."""


def without_text(record: Record, field: str, format: str) -> DataError:
    """Return the error for a record without text in a field, with a step that gives it some.

    format: that of the record's file, "" for a record of a dataset.
    """
    source, place, fields = record
    names = text_fields(fields)
    each_record = ".[] | " if format == "json" else ""
    others: dict[str, Any]
    numbers = ""
    try:
        value = value_of(fields, field)
        fault = f"{place}: data.text_field={field} is not text ({value!r:.40})"
        others = {field: value}
        # Such as a title that is a year. Other records may have NaN, which stands for no text.
        if format and isinstance(value, (int, float)) and not isinstance(value, bool):
            program = f"{each_record}({path_of(fields, field)} | numbers | select(isnan | not)) |= tostring"
            numbers = f"; {jq(source, program)} writes numbers as text"
    except KeyError:
        fault = f"{place} has no field data.text_field={field}"
        # Beside names and numbers, such as that of a conversation, the text may be in a list of objects.
        lists = {name: value for name, value in fields.items() if isinstance(value, list) and dict in map(type, value)}
        others = lists if names else fields
        if isinstance(fields.get("mapping"), dict) and "current_node" in fields and format:
            program = f"{each_record}{OF_CHATGPT} | {{{json.dumps(field)}: .}}"
            step = f"{jq(source, program)} makes a text of each conversation"
            return DataError(fault, step, value=source)
    table = ""
    if format == "jsonl" and has_one_line(source):
        is_export = bool(names) and is_named(source, "json")  # such as a chat's: its title beside all messages
        table = records_within(source, field) if is_export else rows_within(fields, field)
    if table:
        return DataError(fault, f"{jq(source, table)} makes a line of each row", value=source)
    # A conversation is a list of objects: jq joins its strings.
    for name, value in others.items():
        if format and isinstance(value, (list, dict)) and '"' in json.dumps(value):
            path = path_of(fields, name)
            if (
                name != field
                and isinstance(value, list)
                and all(isinstance(each, dict) and field in each for each in value)
            ):
                step = f"{jq(source, f'{each_record}{path}[]')} makes lines of its records"
            else:
                step = f"{jq(source, each_record + joined(path, value, name, field))} joins the strings in {name}"
            step += f", or choose one of {listed(names)}" * bool(names and name != field)
            return DataError(fault, step, value=source)
    remedy = f"choose one of {listed(names)}" if names else "choose another field"
    remedy += ", or data=text" * bool(format) + numbers
    # Such as a question and its answer: one alone would lose half of the text. Other records may have one that is null.
    pair = [name for name, value in fields.items() if isinstance(value, str) or value is None]
    if format in ("json", "jsonl") and len(names) > 1 and {*names} <= {*pair} and len(pair) <= MOST_JOINED:
        paths = ", ".join(f".{json.dumps(name)}" for name in pair)
        program = f'{each_record}{{{json.dumps(field)}: [{paths}] | join("\\n")}}'
        remedy += f"; {jq(source, program)} joins them"
    return DataError(fault, remedy, value=source)


def joined(path: str, value: Any, name: str, field: str) -> str:
    """Return jq's program that joins the strings in a record's value, called `name`."""
    parts = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    separator = "\\n"
    strings = ".. | strings"
    if name == field and any(isinstance(part.get("text"), str) for part in parts):
        # Words of another type within a text, such as Telegram's bold ones, or parts of a message, such as OpenAI's.
        strings = "arrays[], strings | objects.text, strings | strings"
        types = {part.get("type") for part in parts}
        is_one_sentence = len(parts) < len(value) or types - {None}
        separator = "" if is_one_sentence and "text" not in types else separator
    elif '"type":' in json.dumps(value):  # such as that of each part
        strings = f"del(.. | objects | .type) | {strings}"
    return f'{{{json.dumps(field)}: [{path} | {strings}] | join("{separator}")}}'


def path_of(record: dict[str, Any], field: str) -> str:
    """Return the path of a record's field in jq: ."content"."text" for content.text."""
    parts = [field] if field in record else field.split(".")
    return "".join(f".{json.dumps(part)}" for part in parts)


def listed(names: Sequence[str]) -> str:
    """Return names in a row, the first ones if they are many."""
    return ", ".join([*names[:MOST_NAMES], *["…"] * (len(names) > MOST_NAMES)])


def missing_field(source: str, field: str, names: Sequence[str], is_text: bool = True) -> DataError:
    """Return the error for a file of which no record has the field of its text.

    is_text: whether data=text can read the file as it is.
    """
    remedy = f"choose one of {listed(names)}" if names else "write one"
    return DataError(f"has no field data.text_field={field}", remedy + ", or data=text" * is_text, value=source)
