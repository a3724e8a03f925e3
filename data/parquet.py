"""Records of Parquet files."""

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from common.errors import DataError, first_line, library_fault
from common.text import plural
from data.fields import Record, missing_field, path_of, value_of
from data.opening import stem_of
from data.remedies import joined


def parquet_records(file: str, field: str) -> Iterator[Record]:
    """Yield each row of a Parquet file.

    It has the column `field` alone: no other is read.
    """
    # Imported here because it is optional, and slow.
    try:
        import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
        from pyarrow import parquet
    except Exception as error:  # an import may fail by any
        fault, remedy = library_fault("is Parquet, which needs pyarrow", "pyarrow", 'pip install -e ".[hf]"', error)
        raise DataError(fault, remedy, value=file) from error
    try:
        with parquet.ParquetFile(file) as content:
            columns = _columns(pa, content.schema_arrow)
            kinds = dict(columns)
            # A struct that is null in all rows may have no fields: its writer knew of none.
            outer = [name for name, kind in columns if pa.types.is_null(kind) and field.startswith(f"{name}.")]
            same = [name for name, _ in columns if name == field] or outer
            if not same:
                raise missing_field(file, field, [*kinds], is_text=False)
            if len(same) > 1:
                fault = f"has {plural(len(same), 'column')} called {field}"
                raise DataError(fault, "give them names of their own", value=file)
            kind = kinds[same[0]]
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            # A column without a value may have any type: that of pandas is null, or that of numbers.
            if not any(is_text(kind) for is_text in _text_types(pa)) and _has_value(pa, content, same):
                fault = f": data.text_field={field} is not text ({kind})"
                rows = _rows(content, same) if pa.types.is_nested(kind) else ()
                remedies = (joining_parquet(file, row, field) for row in rows)
                raise DataError(fault, next(filter(None, remedies), "choose another column"), value=file)
            for number, row in enumerate(_rows(content, same), start=1):
                value = value_of(row, field)
                text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
                yield Record(file, f"row {number}", {field: text})
    except (pa.ArrowException, OSError) as error:  # OSError: damaged pages, or metadata of other files alone
        fault = f": the column {field} cannot be read ({first_line(error)})"
        raise DataError(fault, "copy or download it again, or leave it out", value=file) from error


def _rows(content: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, of some of its columns."""
    for batch in content.iter_batches(batch_size=1024, columns=columns):
        yield from batch.to_pylist()


def _has_value(pa: Any, content: Any, column: list[str]) -> bool:
    """Return whether a column of a Parquet file has a value in some row."""
    for batch in content.iter_batches(columns=column):
        (values,) = batch.columns
        while pa.types.is_struct(values.type):  # of the one field that is read
            (values,) = values.flatten()
        if values.null_count < len(values):
            return True
    return False


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
