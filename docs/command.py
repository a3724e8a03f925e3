"""The command line of this folder's scripts, and the tables in CSV that they read."""

import csv
import math
import sys
from pathlib import Path

from common.errors import SettingsError
from common.mistakes import answer_help


def arguments_asked(text: str | None, *names: str) -> list[str]:
    """Return the arguments of a script, after it has run its code=FILE and answered --help.

    text: the script's docstring. names: the arguments' names, in brackets if they may be left out. Raises SettingsError
    for more arguments or fewer.
    """
    answer_help(text)
    given = sys.argv[1:]
    if any(argument.startswith("code=") for argument in given):
        from model.attention.code import run_codes  # which imports torch

        given = run_codes(given)
    needed = sum(not name.startswith("[") for name in names)
    if not needed <= len(given) <= len(names) or any(argument[:1] in ("", "-") for argument in given):
        usage = " ".join(["python", sys.argv[0], *names])
        raise SettingsError(f"{usage} is wanted", "add --help to read more")
    return given


def existing(place: str) -> Path:
    """Return the folder or file that a person names; SettingsError if there is none."""
    if not Path(place).exists():
        raise SettingsError(f"{place} does not exist", "give the folder that -m made under multirun/")
    return Path(place)


def read_table(file: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a table in CSV; SettingsError if it lacks a column, or has no row."""
    if not file.is_file():
        raise SettingsError(f"{file} does not exist", "name the file, or the folder, of one that does")
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        rows = list(csv.DictReader(lines, restkey="", restval=""))
    missing = [name for name in columns if rows and name not in rows[0]]
    if missing or not rows:
        problem = f"{file} has no column {missing[0]}" if missing else f"{file} has no rows"
        raise SettingsError(problem, "give the table as it was written; a spreadsheet may have put semicolons into it")
    return rows


def number_in(row: dict[str, str], column: str) -> float:
    """Return the number in a cell of a table; SettingsError if there is none."""
    try:
        number = float(row[column])
    except ValueError:
        number = math.nan
    if math.isnan(number):
        problem = f"a table has {column}={row[column]}, which is no number"
        raise SettingsError(problem, "give the table as it was written; a spreadsheet may have put commas into it")
    return number
