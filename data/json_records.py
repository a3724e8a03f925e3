"""Records of JSON: lines of it, and arrays."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from common.errors import DataError
from data.fields import Record
from data.opening import MARK, into_lines, jq, opened_text

ASSIGNMENT = re.compile(r"\s*(?:(?:var|let|const)\s+)?[\w.$]+\s*=\s*(?=[\[{])")
COMMAS = "sed 's/,[[:space:]]*$//'"  # the command that leaves out commas at line ends
LARGEST_ARRAY = 1 << 28  # bytes of a JSON array, which is read whole


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
    """Return where a text is not JSON, the reason, and the remedy.

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
