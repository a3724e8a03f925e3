"""docs/command.py: the command lines and the tables of the scripts in docs/."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from common.errors import SettingsError
from docs.command import arguments_asked, existing, number_in, read_table
from model.attention.registry import FORMS

OWN = """
from model.attention.contract import from_weights
from model.attention.registry import form
print("ran")
form("of_a_script")(from_weights(lambda scores: scores.softmax(-1)))
"""


@pytest.mark.parametrize("given", [[], ["a", "b", "c"], ["-x"], [""], ["a", "--figures"]])
def test_arguments_that_a_script_does_not_take_are_answered_with_those_it_takes(given, monkeypatch):
    """docs/scaling_law.py and docs/tales_kept.py printed their docstrings, and docs/where.py read a folder `-x`."""
    monkeypatch.setattr(sys, "argv", ["docs/some.py", *given])
    with pytest.raises(SettingsError) as caught:
        arguments_asked("text", "FOLDER", "[PICTURE]")
    assert str(caught.value) == "python docs/some.py FOLDER [PICTURE] is wanted: add --help to read more."


def test_a_script_runs_its_code_and_prints_its_docstring_for_help(monkeypatch, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr(sys, "argv", ["docs/some.py", "runs", f"code={tmp_path / 'own.py'}"])
    with mock.patch.dict(FORMS):
        assert arguments_asked("text", "FOLDER", "[PICTURE]") == ["runs"]
    assert capsys.readouterr().out == "ran\n"
    monkeypatch.setattr(sys, "argv", ["docs/some.py", "runs", "--help"])
    with pytest.raises(SystemExit, match="0"):
        arguments_asked("text", "FOLDER")
    assert capsys.readouterr().out == "text\n"
    with pytest.raises(SettingsError, match="nowhere does not exist: give the folder that -m made"):
        existing("nowhere")


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "table.csv does not exist"),
        ("", "table.csv has no rows"),
        ("seed,kept\n", "table.csv has no rows"),
        ("seed;kept\n1;3\n", "table.csv has no column seed: .* semicolons"),
        ("seed,tales\n1,3\n", "table.csv has no column kept"),
        ('seed,kept\n1,"3,5"\n', "kept=3,5, which is no number"),
        ("seed,kept\n1\n", "kept=, which is no number"),
        ("seed,kept\n1,nan\n", "kept=nan, which is no number"),
    ],
)
def test_a_table_that_a_script_cannot_read_is_refused(text, said, tmp_path):
    file = tmp_path / "table.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=said):
        [number_in(row, "kept") for row in read_table(file, "seed", "kept")]


def test_a_table_with_a_mark_and_further_columns_is_read(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("\ufeffseed,note,kept\n1,é,3\n2,,4.5\n", encoding="utf-8")
    assert [number_in(row, "kept") for row in read_table(file, "seed", "kept")] == [3, 4.5]
