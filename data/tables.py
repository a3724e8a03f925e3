"""Records of tables in CSV; a table that cannot be one is refused with a command."""

import codecs
import csv
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TextIO

from common.errors import DataError, first_line
from common.text import plural
from data.fields import Record, missing_field
from data.opening import MARK, beside, ending_of, first_lines, from_line, stem_of, unpacking

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""The characters that may divide the values of a table, with their names."""
MOST_BEFORE = 50  # lines of a table in which that of the names is looked for
DOUBLED = (
    r'import re, sys; double = lambda pair: pair[1].replace(b"\"", b"\"\""); '
    r'sys.stdout.buffer.writelines(re.sub(rb"\\([\"\\\n])", double, line) for line in sys.stdin.buffer)'
)
"""A program that doubles quotes after backslashes; a backslash before another letter stays, as R and Spark have it."""


def csv_records(lines: TextIO, source: str, field: str) -> Iterator[Record]:
    """Yield each row of a CSV file as a record by the names of its first row.

    Raises DataError as refuse_columns() and refuse_row() do, and for quotes that are not CSV's.
    """
    delimiter, names = csv_header(lines, source)
    refuse_columns(lines, source, delimiter, names, field)
    # The limit is the process's: a document may be longer than the 131,072 characters to which Python sets it.
    before = csv.field_size_limit(1 << 30)
    begins = 1
    try:
        is_unquoted = delimiter == "\t" and are_letters(lines, len(names))
        if is_unquoted:
            refuse_backslashes(lines, source, delimiter, len(names))
        lines.seek(0)
        read = LinesRead(lines)
        quoting: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if is_unquoted else {}
        rows = csv.reader(read, delimiter=delimiter, strict=True, **quoting)
        next(rows, None)
        ends_in_lf = read.last.endswith("\n")
        begins = rows.line_num + 1
        for row in rows:
            if ends_in_lf and read.last.endswith("\r"):  # as pandas writes it without quotes
                command = f"{unpacking(source) or 'cat'} {shlex.quote(source)} | sed 's/\\r\\(.\\)/ \\1/g'"
                remedy = f"{command} > {beside(source, 'new')} writes a blank for each such \\r"
                raise DataError(f"line {begins} ends in \\r alone, and line 1 does not", remedy, value=source)
            if row:
                refuse_row(row, begins, lines, source, delimiter, names, field)
                yield Record(source, f"line {begins}", dict(zip(names, row, strict=False)))
            begins = rows.line_num + 1
    except csv.Error as error:
        refuse_backslashes(lines, source, delimiter, len(names))
        remedy = "double the quotes within a value, and put one before and after it"
        raise DataError(f"line {begins} is not CSV ({first_line(error)})", remedy, value=source) from error
    finally:
        csv.field_size_limit(before)


class LinesRead:
    """The lines of a file as they are read, and the last of them."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = lines
        self.last = ""

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.last = line
            yield line


def refuse_columns(lines: TextIO, source: str, delimiter: str, names: list[str], field: str) -> None:
    """Raise DataError for a table that has not one column `field`, or is of another dialect.

    It has the command that makes a table with this column.
    """
    refuse_excels_line(source, names)
    refuse_single_quotes(lines, source)
    for other in DELIMITERS if len(names) == 1 else ():  # a single name tells no delimiter
        command = with_row_numbers(lines, source, names, other)
        if command and other != delimiter:
            fault = "has numbers of rows without a name in its first line"
            raise DataError(fault, f"{command} names them", value=source)
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


def refuse_row(
    row: list[str], begins: int, lines: TextIO, source: str, delimiter: str, names: list[str], field: str
) -> None:
    """Raise DataError for a row that does not fit the names of the columns.

    It has more values, ends before the column `field`, or has the names again in another order. begins: its first line.
    """
    if len(row) > len(names) or len(row) <= names.index(field):
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
        rest = f"{from_line(source, begins)} > {table_beside(source, 'rest', delimiter)}"
        first = f"{first_lines(source, begins)} > {table_beside(source, 'first', delimiter)}"
        remedy = f"{rest} writes those from there, and {first} the others"
        raise DataError(f"line {begins} has the names in another order", remedy, value=source)


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
    if sum(len(names) > 1 for names in rows.values()) > 1:  # a name has a sign that divides others: the rows tell
        fitting = [each for each in rows if len(rows[each]) > 1 and are_even(lines, each)]
        if fitting and delimiter not in fitting:
            delimiter = fitting[0]
    return delimiter, [name.strip() for name in rows[delimiter]]


def are_even(lines: TextIO, delimiter: str) -> bool:
    """Return whether the first rows of a table have as many values as its first line.

    `lines` stay where they are.
    """
    place = lines.tell()
    try:
        return len({len(row) for row in first_rows(lines, delimiter)}) == 1
    except csv.Error:  # as for a value that is too long
        return False
    finally:
        lines.seek(place)


def first_rows(lines: TextIO, delimiter: str) -> list[list[str]]:
    """Return the first rows of a table, that of its names too, without a row that is cut."""
    lines.seek(0)
    sample = lines.read(1 << 16)
    rows = [row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if row]
    return rows[:-1] if len(sample) == 1 << 16 else rows


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


def has_quotes(row: list[str], text: str, delimiter: str) -> bool:
    """Return whether a value of a row stands in single quotes in its text."""
    text = f"{delimiter}{text.rstrip()}\n"
    quoted = ("'" + value.replace("'", "''") + "'" for value in row if value)
    return any(f"{delimiter}{value}{end}" in text for value in quoted for end in (delimiter, "\n"))


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


def with_header(source: str, names: Sequence[str], delimiter: str) -> str:
    """Return the command that writes a table with other names in its first line."""
    header = io.StringIO()
    csv.writer(header, delimiter=delimiter, lineterminator="").writerow(names)
    command = f"(echo {shlex.quote(header.getvalue())}; {from_line(source, 2)})"
    return f"{command} > {table_beside(source, 'named', delimiter)}"


def table_beside(source: str, word: str, delimiter: str) -> str:
    """Return the path of a new table beside a file, quoted: a.named.tsv for a.csv with tabs."""
    ending = ".tsv" if delimiter == "\t" else ".csv"
    return f"{stem_of(source)}.{word}{ending}"
