"""Records, and their fields by name."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.errors import DataError

MOST_NAMES = 50  # fields that a sentence lists


class Record(NamedTuple):
    """A record of a file or a dataset."""

    source: str
    """The file, or the settings of the dataset."""
    place: str
    """Its place there, such as "line 3"."""
    fields: dict[str, Any]


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


def text_fields(record: dict[str, Any], or_null: bool = False) -> list[str]:
    """Return the names of the fields that hold text, those within objects with dots.

    or_null: also those that are null, as a text of other records may be.
    """
    names = []
    for name, value in record.items():
        if isinstance(value, str) or (or_null and value is None):
            names.append(name)
        elif isinstance(value, dict):
            names += [f"{name}.{inner}" for inner in text_fields(value, or_null)]
    return names


def path_of(record: dict[str, Any], field: str) -> str:
    """Return the path of a record's field in jq: ."content"."text" for content.text."""
    outer, dot, inner = (field, "", "") if field in record else field.partition(".")
    value = record.get(outer)
    return f".{json.dumps(outer)}" + (path_of(value if isinstance(value, dict) else {}, inner) if dot else "")


def listed(names: Sequence[str]) -> str:
    """Return names in a row, the first ones if they are many."""
    return ", ".join([*names[:MOST_NAMES], *["…"] * (len(names) > MOST_NAMES)])


def missing_field(source: str, field: str, names: Sequence[str], is_text: bool = True) -> DataError:
    """Return the error for a file of which no record has the field of its text.

    is_text: whether data=text can read the file as it is.
    """
    remedy = f"choose one of {listed(names)}" if names else "write one"
    remedy += ", or data=text" * is_text + "; docs/data.md joins several" * (len(names) > 1)
    return DataError(f"has no field data.text_field={field}", remedy, value=source)
