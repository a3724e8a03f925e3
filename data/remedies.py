"""Remedies for records without text: programs of jq that make it of other fields."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from common.errors import DataError
from data.fields import MOST_NAMES, Record, listed, path_of, text_fields, value_of
from data.json_records import LARGEST_ARRAY, whole_number
from data.opening import is_named, jq, opened_text

MOST_JOINED = 3  # fields with text of a record for which a command joins them
AN_ID = re.compile(r"(.*[._])?(uu)?id", re.IGNORECASE)  # the name of a field that no text needs: id, _id, page_id
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
    numbers = ""
    is_there = True
    try:
        value = value_of(fields, field)
        fault = f"{place}: data.text_field={field} is not text ({value!r:.40})"
        # Such as a title that is a year. Other records may have NaN, which stands for no text.
        if format and isinstance(value, (int, float)) and not isinstance(value, bool):
            program = f"{each(format)}({path_of(fields, field)} | numbers | select(isnan | not)) |= tostring"
            numbers = f"; {jq(source, program)} writes numbers as text"
    except KeyError:
        fault = f"{place} has no field data.text_field={field}"
        is_there = False
    step = step_to_texts(record, field, format, is_there) if format else ""
    if step:
        return DataError(fault, step, value=source)
    names = text_fields(fields)
    remedy = f"choose one of {listed(names)}" if names else "choose another field"
    # Earlier records have the field: this one may be empty, or damaged.
    if format in ("json", "jsonl") and not is_there and place not in ("line 1", "record 1"):
        program = f"{each(format)}select({path_of(fields, field)} | strings)"
        rest = f"{jq(source, program)} leaves out records without it"
        remedy = f"{remedy}, or {rest}" if names else rest
    remedy += ", or data=text" * bool(format) + numbers
    # Such as a question and its answer: one alone would lose half of the text. Other records may have one that is null.
    pair = [name for name in text_fields(fields, or_null=True) if not AN_ID.fullmatch(name)]
    if format in ("json", "jsonl") and len({*pair} & {*names}) > 1 and len(pair) <= MOST_JOINED:
        paths = ", ".join(path_of(fields, name) for name in pair)
        program = f'{each(format)}{{{json.dumps(field)}: [{paths}] | join("\\n")}}'
        remedy += f"; {jq(source, program)} joins {listed(pair)}"
    return DataError(fault, remedy, value=source)


def each(format: str) -> str:
    """Return the beginning of jq's program that goes through the records of a file."""
    return ".[] | " if format == "json" else ""


def step_to_texts(record: Record, field: str, format: str, is_there: bool) -> str:
    """Return the command that makes texts of lists and objects in records; "" if there are none.

    is_there: whether the record has `field`.
    """
    source, _, fields = record
    names = text_fields(fields)

    # 1) ChatGPT's conversations are trees of messages.
    if not is_there and isinstance(fields.get("mapping"), dict) and "current_node" in fields:
        program = f"{each(format)}{OF_CHATGPT} | {{{json.dumps(field)}: .}}"
        return f"{jq(source, program)} makes a text of each conversation"

    # 2) A single object may be a table, or a chat's export: its title beside all messages.
    if format == "jsonl" and has_one_line(source):
        is_export = bool(names) and is_named(source, "json")
        table = records_within(source, field) if is_export else rows_within(fields, field)
        if not table and is_named(source, "json"):
            table = lists_within(fields, field)
        if table:
            return f"{jq(source, table)} makes a line of each row"

    # 3) A conversation is a list of objects, perhaps beside its id or its title: jq joins its strings.
    if is_there:
        others = {field: value_of(fields, field)}
    elif names:
        others = {name: value for name, value in fields.items() if isinstance(value, list) and dict in map(type, value)}
    else:
        others = fields
    for name, value in others.items():
        if isinstance(value, (list, dict)) and '"' in json.dumps(value):
            path = path_of(fields, name)
            is_list = isinstance(value, list)
            if name != field and is_list and all(isinstance(item, dict) and field in item for item in value):
                step = f"{jq(source, f'{each(format)}{path}[]')} makes lines of its records"
            else:
                step = f"{jq(source, each(format) + joined(path, value, name, field))} joins the strings in {name}"
            if name == field and "from" in fields:  # null for a deleted account
                step += "; docs/data.md makes days of Telegram's messages, with who said them"
            return step + f", or choose one of {listed(names)}" * bool(names and name != field)
    return ""


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
    return joined_strings(field, f"{path} | {strings}", separator)


def has_one_line(file: str) -> bool:
    """Return whether a file has a single line with text."""
    with opened_text(file) as lines:
        return len([*islice(filter(str.strip, lines), 2)]) == 1


def records_within(file: str, field: str) -> str:
    """Return jq's program that makes records of a file of JSON; "" if it has none.

    They are an object's table, its longest list of objects or else of lists, or the lists of an array.
    """
    with opened_text(file) as stream, suppress(ValueError, RecursionError):
        whole = json.loads(stream.read(LARGEST_ARRAY), parse_int=whole_number)
        if isinstance(whole, list) and has_lists(whole):
            return f".[] | {joined_strings(field)}"
        if not isinstance(whole, dict):
            return ""
        table = rows_within(whole, field)
        if table:
            return table
        if len(whole) > MOST_NAMES and all(isinstance(text, str) for text in whole.values()):
            return f".[] | {{{json.dumps(field)}: .}}"  # texts by their ids: a record has fewer fields
        lists = {
            name: len(value)
            for name, value in whole.items()
            if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
        }
        if lists:
            return f"{path_of(whole, max(lists, key=lambda name: lists[name]))}[]"
        return lists_within(whole, field)
    return ""


def shared_names(rows: Iterable[Any]) -> set[str]:
    """Return the fields that all records have, but for empty ones; none if a row is no record."""
    shared: set[str] | None = None
    for row in rows:
        if not isinstance(row, dict):
            return set()
        if row:
            shared = {*row} if shared is None else shared & {*row}
    return shared or set()


def lists_within(whole: dict[str, Any], field: str) -> str:
    """Return jq's program that makes records of an object's longest list of lists, or "".

    So are conversations: {"conversations": [["Hello", "Hi"], …]}. A list of strings alone may be a single one.
    Or the lists of many ids, such as conversations of messages.
    """
    if len(whole) > MOST_NAMES and has_lists([*whole.values()]):
        return f".[] | {joined_strings(field)}"
    sizes = {name: len(value) for name, value in whole.items() if isinstance(value, list) and has_lists(value)}
    if not sizes:
        return ""
    return f"{path_of(whole, max(sizes, key=lambda name: sizes[name]))}[] | {joined_strings(field)}"


def has_lists(value: list[Any]) -> bool:
    """Return whether a list has only lists, with strings in them."""
    return all(isinstance(item, list) for item in value) and '"' in json.dumps(value)


def joined_strings(field: str, strings: str = ".. | strings", separator: str = "\\n") -> str:
    """Return jq's program that makes a record of strings, by default of all in a value."""
    return f'{{{json.dumps(field)}: [{strings}] | join("{separator}")}}'


def rows_within(whole: dict[str, Any], field: str) -> str:
    """Return jq's program that makes records of a table in an object; "" if it is none.

    So is what pandas writes: {"text": {"0": …}} by columns, {"0": {"text": …}} by rows, or rows beside names.
    So are records by their ids, and lists of records of one kind.
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
    if len(whole) > 1 and shared_names(whole.values()):  # records by their ids
        return ".[]"
    if len(whole) > 1 and all(name.isdecimal() and isinstance(text, str) for name, text in whole.items()):
        return f".[] | {each}"
    if len(whole) > 1 and all(isinstance(value, list) for value in whole.values()):  # lists of records, as of splits
        shared = shared_names(chain(*whole.values()))
        if field in shared or (shared and len(whole) <= MOST_NAMES):  # else each of many lists is a text
            return ".[][]"
    for name, value in whole.items():
        is_rows = isinstance(value, list) and all(isinstance(row, dict) and field in row for row in value)
        if is_rows and value and name != field:  # else it is a text in parts
            return f"{path_of(whole, name)}[]"
    return ""
