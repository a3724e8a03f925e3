"""The rules of formats: a file's format is found in its name and content, and its records are read alike."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cli.prompts import read_prompts
from common.errors import DataError
from data import texts
from data.config import DataConfig
from data.opening import unpacking, zstd
from data.texts import Source

STORIES = ["one, two", 'She said "no",\nand left.', "drei; vier\tfünf", "日本語", "five"]


def read(path: Path | str, **settings) -> tuple[list[str], Source]:
    """The documents of data.path=PATH, and their source."""
    source = Source(DataConfig(path=str(path), **settings))
    return ["".join(document) for document in source.documents()], source


@pytest.mark.parametrize(
    ("delimiter", "name"), [(";", "a, b, and c"), (",", "a; b; c; d"), ("\t", "a, b; c|d|e|f"), ("|", "a, b")]
)
def test_a_name_of_a_column_may_have_signs_that_divide_the_columns_of_other_tables(tmp_path, delimiter, name):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        file.write(delimiter.join(["id", "text", name]) + "\n")
        csv.writer(file, delimiter=delimiter).writerows([n, story, "x"] for n, story in enumerate(STORIES))
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file, delimiter=delimiter)]
    documents, source = read(tmp_path / "a.csv")
    assert documents == [row["text"] for row in rows] == STORIES
    assert source.found[str(tmp_path / "a.csv")].fields == tuple(rows[0])


def write_lines(file: Path, stories: list[str] = STORIES, field: str = "text") -> Path:
    file.write_text("".join(json.dumps({"id": n, field: story}) + "\n" for n, story in enumerate(stories)))
    return file


def write_csv(file: Path, stories: list[str] = STORIES, delimiter: str = ",", field: str = "text") -> Path:
    with file.open("w", newline="") as out:
        rows = csv.writer(out, delimiter=delimiter)
        rows.writerow(["id", field])
        rows.writerows(enumerate(stories))
    return file


def write_parquet(file: Path, stories: list[str] = STORIES, kind: str = "string", **others) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = [story.encode() for story in stories] if kind == "binary" else stories
    column = pa.array(values, pa.string() if kind == "dictionary" else getattr(pa, kind)())
    parquet.write_table(
        pa.table({"text": column.dictionary_encode() if kind == "dictionary" else column} | others), file
    )
    return file


# One text, however it is stored


def array(file: Path) -> Path:
    file.write_text(json.dumps([{"text": story} for story in STORIES], indent=1))
    return file


WAYS = {
    "a.jsonl": write_lines,
    "a.ndjson": write_lines,
    "lines.json": write_lines,
    "lines.txt": write_lines,
    "lines": write_lines,
    "A.JSONL": write_lines,
    "array.json": array,
    "a.csv": write_csv,
    "semicolons.csv": lambda file: write_csv(file, delimiter=";"),
    "tabs.csv": lambda file: write_csv(file, delimiter="\t"),
    "a.tsv": lambda file: write_csv(file, delimiter="\t"),
    "a.parquet": write_parquet,
    "shard-00000": write_parquet,
    "parquet.txt": write_parquet,
}


PACKED = {".gz": gzip, ".bz2": bz2, ".xz": lzma, ".zst": zstd}
PARQUETS = {"a.parquet", "shard-00000", "parquet.txt"}  # which packs its own pages


@pytest.mark.parametrize(
    ("name", "packed"),
    [(name, packed) for name in WAYS for packed in ("", *PACKED) if not (packed and name in PARQUETS)],
)
def test_the_same_documents_are_read_from_every_format_and_packing(tmp_path, name, packed):
    file = WAYS[name](tmp_path / name)
    if packed:
        content = file.read_bytes()
        file.unlink()
        file = tmp_path / f"{name}{packed}"
        file.write_bytes(PACKED[packed].compress(content))
    found, source = read(file)
    assert found == STORIES
    # The size is that of the files, which for packed ones is not that of their text.
    size = rf"[\d.]+ k?B{' on disk' * (bool(packed) or file.suffix == '.parquet')}"
    assert re.fullmatch(rf"{re.escape(str(file))}: 1 [\w ]+ file, 5 documents, {size}", source.describe())
    told_by_content = [fact for fact in source.notes if fact.startswith("Files of records by their content alone")]
    assert bool(told_by_content) == (name in {"lines.txt", "lines", "shard-00000", "parquet.txt"})
    assert read(tmp_path)[0] == STORIES, "as a folder"
    assert read(tmp_path / "*")[0] == STORIES, "as a glob"


def test_a_folder_of_several_formats_is_read_file_by_file_in_the_order_of_names(tmp_path):
    write_parquet(tmp_path / "a", ["from Parquet"])
    write_lines(tmp_path / "b.jsonl", ["from lines"])
    write_csv(tmp_path / "c.csv", ["from a table"])
    (tmp_path / "d.md").write_text("from a page")
    found, source = read(tmp_path)
    assert found == ["from Parquet", "from lines", "from a table", "from a page"]
    assert ": 1 Parquet file, 1 JSON lines file, 1 CSV file, 1 file, 4 documents, " in source.describe()


@pytest.mark.parametrize(
    "content", ['{"a": 1}\n{"b": 2}\n', '{\n "text": 3\n}\n', "[1, 2]\n", "{braces} begin it\n", ""]
)
@pytest.mark.parametrize("name", ["a.txt", "a.json", "a"])
def test_text_that_only_looks_like_records_is_read_as_it_is(tmp_path, content, name):
    (tmp_path / name).write_text(content)
    (tmp_path / "z.txt").write_text("a text beside it")
    assert read(tmp_path)[0] == [*[content] * bool(content), "a text beside it"]


def test_data_text_reads_all_files_as_they_are_and_says_so(tmp_path):
    file = write_lines(tmp_path / "a.txt")
    found, source = read(file, source="text")
    assert found == [file.read_text()]
    note = "Files of records read as they are (leave out data=text)"
    assert source.notes == {note: (1, [f"{file} (a JSON lines file with id, text)"])}


def test_records_beside_texts_that_lack_the_field_are_read_as_they_are_and_their_fields_named(tmp_path):
    table = write_csv(tmp_path / "a.csv", field="body")
    (tmp_path / "b.md").write_text("a page")
    found, source = read(tmp_path)
    assert found == [table.read_bytes().decode(), "a page"]
    (note,) = (line for line in source.note_lines() if line.startswith("Files of records"))
    assert note.endswith(f"(data.text_field= names their text): 1, first in {table} (a CSV file with id, body).")
    assert read(tmp_path, text_field="body")[0] == [*STORIES, "a page"]


def test_records_with_another_field_than_those_beside_them_are_told_to_rename_it(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", field="body")
    write_csv(tmp_path / "b.csv")
    (tmp_path / "c.md").write_text("a page")
    found, source = read(tmp_path)
    assert found == [lines.read_text(), *STORIES, "a page"]
    (note,) = (line for line in source.note_lines() if line.startswith("Files of records"))
    assert note.startswith("Files of records read as they are (rename the field of their text to text, as of the other")


@pytest.mark.parametrize("source", ["jsonl", "csv", "hf"])
def test_a_source_of_one_format_takes_of_a_folder_the_files_that_are_named_so_or_else_those_that_are(tmp_path, source):
    write = {"jsonl": write_lines, "csv": write_csv, "hf": write_parquet}[source]
    ending = {"jsonl": "ndjson", "csv": "tsv", "hf": "parquet"}[source]
    options = {"delimiter": "\t"} if source == "csv" else {}
    (tmp_path / "README.md").write_text("a page")
    file = write(tmp_path / f"a.{ending}", **options)
    assert read(tmp_path, source=source)[0] == STORIES
    if source != "csv":  # of which the content alone is no evidence
        file.rename(tmp_path / "a")
        assert read(tmp_path, source=source)[0] == STORIES
    assert read(tmp_path / "a*", source=source)[0] == STORIES if source != "csv" else True


# The fingerprint


def test_a_folder_of_texts_keeps_its_fingerprint_and_another_format_has_another(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a text\n")
    whole = Source(DataConfig(source="text", path=str(file)))
    assert Source(DataConfig(path=str(file))).fingerprint == whole.fingerprint
    write_lines(file)
    records, raw = Source(DataConfig(path=str(file))), Source(DataConfig(source="text", path=str(file)))
    assert records.fingerprint != raw.fingerprint
    with mock.patch.object(texts, "fingerprint", side_effect=texts.fingerprint) as asked:
        Source(DataConfig(source="text", path=str(file)))
    # The settings that versions without formats hashed.
    assert asked.call_args.args[1:] == ("text", "text", None, None, "train", "<|endoftext|>")


# CSV


@pytest.mark.long
@pytest.mark.slow
@given(
    stories=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), min_size=1, max_size=6
    ),
    delimiter=st.sampled_from(",;\t|"),
)
def test_values_of_csv_are_those_that_python_wrote(tmp_path_factory, stories, delimiter):
    # A value with tabs and line ends may look like rows of a table with tabs that has no quotes.
    assume(delimiter != "\t" or not any("\t" in story and {*"\r\n"} & {*story} for story in stories))
    # Values that each begin and end with an apostrophe may be quoted by it.
    assume(sum(story.startswith("'") for story in stories) < 2)
    file = write_csv(tmp_path_factory.mktemp("csv") / "a.csv", stories, delimiter)
    assert read(file, separator=None)[0] == [story for story in stories if story]


def test_a_value_of_csv_may_be_long_and_the_limit_of_the_process_stays(tmp_path):
    before = csv.field_size_limit()
    assert read(write_csv(tmp_path / "a.csv", ["x" * 300_000]))[0] == ["x" * 300_000]
    assert csv.field_size_limit() == before


CSV = {
    "text,id\nfine,1\nno quotes, so two,2\n": "line 3 has 3 values, and the first line 2 names: quote values",
    "id,text\n1,fine\n2\n": "line 3 has 1 value, and the first line 2 names",
    'id,text\n1,"never closed\n2,fine\n': "line 2 is not CSV (unexpected end of data): double the quotes",
    'id,text\n1,fine\n2,"two\nlines"\n3,"no, it\n4,is"nt"\n5,fine\n': "line 5 is not CSV",
    'id,text\n1,"two\nlines",3\n': "line 2 has 3 values",
    'id,text\n1,"closed" and more\n': "line 2 is not CSV",
    "date;message\n1;fine\n": "has no field data.text_field=text: choose one of date, message, or data=text",
    "\n": "has no field data.text_field=text",
}


@pytest.mark.parametrize("content", CSV)
def test_csv_that_would_lose_text_is_refused_with_its_line(tmp_path, content):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=re.escape(f"data.path={tmp_path}/a.csv {CSV[content]}")) as caught:
        read(tmp_path / "a.csv")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("kind", ["plain", "packed", "marked"])
def test_the_step_that_is_named_gives_names_to_a_table_without_any(tmp_path, delimiter, kind):
    rows = [[str(number), story] for number, story in enumerate(STORIES)]
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter, lineterminator="\n").writerows(rows)
    content = written.getvalue().encode()
    file = tmp_path / f"my table.csv{'.gz' * (kind == 'packed')}"
    file.write_bytes(gzip.compress(content) if kind == "packed" else b"\xef\xbb\xbf" * (kind == "marked") + content)
    with pytest.raises(DataError, match="if line 1 is a record and names no columns, ") as caught:
        read(file)
    command = re.search(r"names no columns, (.*) gives them names", caught.value.remedy)[1]
    subprocess.run(["bash", "-c", command], check=True)
    named = next(tmp_path.glob("*.named.*"))
    assert read(named)[0] == STORIES and read(named, text_field="c1")[0] == [number for number, _ in rows]


UNQUOTED = {
    "one opens": ['"So', "it goes", 'a "b" c'],
    "one opens, another closes": ['"So', "it goes", 'he said."', "end"],
    "it closes too early": ['"So," he said', "end"],
    "next to each other": ['"So', 'he said."'],
}


@pytest.mark.parametrize("name", UNQUOTED)
@pytest.mark.parametrize("last", ["", "\tmore"])
def test_quotes_in_a_table_with_tabs_that_was_never_quoted_are_letters(tmp_path, name, last):
    values = UNQUOTED[name] * 2
    table = "".join(f"{number}\t{value}{last}\n" for number, value in enumerate(values))
    (tmp_path / "a.tsv").write_text(f"id\ttext{last}\n{table}\n")
    assert read(tmp_path / "a.tsv")[0] == values
    # Quoted by Python, the same values come back.
    assert read(write_csv(tmp_path / "b.tsv", [*values, "two\nlines", "a\ttab"], "\t"))[0][:-2] == values


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_values_of_several_lines_are_quoted_also_where_each_line_has_as_many_as_the_first(tmp_path, quoting):
    values = ["two\nlines", 'she said "yes"', "one", '\n"', "end\r\n"]
    for name, rows in {
        "one.tsv": [["text"], *([value] for value in values)],
        "two.tsv": [["text", "n"], *([value, "a\nb\tc"] for value in values)],
    }.items():
        if quoting == csv.QUOTE_MINIMAL and name == "two.tsv":
            continue  # nothing tells it from a table that was never quoted
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, delimiter="\t", quoting=quoting).writerows(rows)
        assert read(tmp_path / name)[0] == values, name


@pytest.mark.parametrize("empty", ["[]", "[\n ]\r\n"])
def test_an_array_without_records_is_one_and_no_text(tmp_path, empty):
    array(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(empty, newline="")
    found, source = read(tmp_path)
    assert found == STORIES and source.note_lines() == []
    assert ": 2 JSON files, " in source.describe()
    (tmp_path / "b.json").write_text(f"{empty}\n[] is the list of no items")
    assert read(tmp_path)[0] == [*STORIES, f"{empty}\n[] is the list of no items"]


# Parquet


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "binary", "large_binary"])
def test_text_of_every_type_is_read_from_parquet_alone_whatever_the_other_columns(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "0.parquet", ["one", "two"], kind, size=pa.array([1, 2]))
    write_parquet(tmp_path / "1.parquet", [], kind)
    write_parquet(tmp_path / "2.parquet", ["three"], kind, size=pa.array(["another type"]), more=pa.array([[1]]))
    found, source = read(tmp_path)
    assert found == ["one", "two", "three"] and ": 3 Parquet files, 3 documents, " in source.describe()
    with mock.patch.dict(sys.modules, datasets=None):  # no library but pyarrow
        assert read(tmp_path, source="hf")[0] == found


def test_null_and_broken_letters_of_parquet_are_counted(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array([b"caf\xe9", None, b"fine"], pa.binary())}), file)
    found, source = read(file)
    assert found == ["caf\ufffd", "fine"]
    assert source.note_lines() == [
        f"Bytes that are not UTF-8 and became U+FFFD: 1, first in {file} row 1.",
        f"Records left out whose text is null: 1, first in {file} row 2.",
    ]


@pytest.mark.parametrize("field", ["text", "content.text"])
def test_a_part_without_a_value_in_its_column_may_have_it_in_any_type(tmp_path, field):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    outer, _, inner = field.partition(".")
    values = [f"{word} " * 9 for word in ("one", "two")]
    columns = [pa.array([{inner: value} for value in values] if inner else values)]
    columns += [pa.nulls(count, kind) for kind in (pa.null(), pa.float64(), pa.list_(pa.int8())) for count in (0, 2)]
    if inner:
        columns = [columns[0], pa.nulls(0), pa.nulls(3), pa.array([{inner: None}] * 2), pa.array([{inner: None}, None])]
    for number, column in enumerate(columns):
        parquet.write_table(pa.table({"id": [0] * len(column), outer: column}), tmp_path / f"{number}.parquet")
    found, source = read(tmp_path, text_field=field)
    assert found == values
    left_out = sum(map(len, columns)) - len(values)
    assert f"Records left out whose {field} is null: {left_out}, first in " in source.note_lines()[0]


def test_parquet_that_cannot_be_read_is_refused_with_its_column_and_without_a_network(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    times = pa.array([1] * 5, pa.timestamp("ns"))  # of which Python has no number
    file = write_parquet(tmp_path / "a.parquet", size=pa.array([1] * 5), words=pa.array([["a"]] * 5), time=times)
    whole = file.read_bytes()
    cases = {
        "text_field=body: choose one of text, size, words, time; docs/data.md joins several.": {"text_field": "body"},
        f"data.path={file}: data.text_field=size is not text (int64): choose another column.": {"text_field": "size"},
        "data.text_field=words is not text (list<": {"text_field": "words"},
        "data.text_field=time is not text (timestamp[ns]): choose another column.": {"text_field": "time"},
    }
    for message, settings in cases.items():
        with pytest.raises(DataError, match=re.escape(message)):
            read(file, **settings)
    file.write_bytes(whole[:-20])
    said = rf"^data\.path={file}: the column text cannot be read \(.*\): copy or download it again"
    with pytest.raises(DataError, match=said):
        read(file)
    file.write_bytes(whole[:40] + bytes(each ^ 255 for each in whole[40:70]) + whole[70:])  # a page
    with pytest.raises(DataError, match=said):
        read(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"is Parquet, which needs pyarrow: pip install -e \"\.\[hf\]\""):
        read(file)


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_folder_that_spark_or_dask_writes_has_its_rows_alone(tmp_path):
    """Of _metadata, whose rows are in other files, "cache_dir cannot be used" was said."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parts: list = []
    schema = pa.schema([("text", pa.string())])
    for lang, stories in {"de": STORIES[:3], "en": STORIES[3:]}.items():
        (tmp_path / f"lang={lang}").mkdir()
        write_parquet(tmp_path / f"lang={lang}" / "part-00000.snappy.parquet", stories)
        parquet.write_to_dataset(pa.table({"text": stories}), tmp_path / "other", metadata_collector=parts)
    shutil.rmtree(tmp_path / "other")
    parquet.write_metadata(schema, tmp_path / "_common_metadata")
    parquet.write_metadata(schema, tmp_path / "_metadata", metadata_collector=parts)
    (tmp_path / "_SUCCESS").touch()
    assert read(tmp_path)[0] == read(tmp_path / "**")[0] == STORIES
    with pytest.raises(DataError, match=r"/_metadata: the column text cannot be read \(.*\): copy or download"):
        read(tmp_path / "_metadata")


def test_conversations_in_parquet_are_joined_by_the_command_that_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a chat.parquet"
    parquet.write_table(pa.Table.from_pylist([{"messages": None, "id": 1}, *CHAT, *CHAT]), file)
    with pytest.raises(DataError, match=r"data\.text_field=messages is not text \(list<.*>\): python ") as caught:
        read(file, text_field="messages")
    command = caught.value.remedy.removesuffix(" joins the strings in messages").replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], check=True)
    found = read(tmp_path / "a chat.lines.jsonl", text_field="messages")[0]
    assert [text for text in found if text] == [*WANTED, *WANTED]


# JSON


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "one"}, 2]', "record 2 is not a JSON object"),
        ("a.json", '[{"text": "one"}', "a.json line 1 is not JSON (it ends within a record): copy"),
        ("a.json", '[{"body": "one"}]', "record 1 has no field data.text_field=text: choose one of body"),
        (
            "a.json",
            '{"body": "one"}\n{"body": "two"}\n',
            "line 1 has no field data.text_field=text: choose one of body",
        ),
        ("a.jsonl", '{"text": "one"}\n[1]\n', "line 2 is not a JSON object"),
        ("a.jsonl", "one\n", "line 1 is not JSON"),
    ],
)
def test_json_that_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read(tmp_path / name)
    assert str(caught.value).startswith(f"data.path={tmp_path}/{name}") and caught.value.remedy


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_number_of_more_digits_than_python_reads_is_no_mistake(tmp_path, name):
    lines = [
        f'{{"n": {number}, "text": "{text}"}}' for number, text in (("7" * 9131, "one"), ("-" + "1" * 4301, "two"))
    ]
    (tmp_path / name).write_text(f"[{', '.join(lines)}]" if name == "a.json" else "\n".join(lines))
    assert read(tmp_path / name)[0] == ["one", "two"]
    (tmp_path / name).write_text("\n".join(lines).replace("text", "prompt"))
    first, second = read_prompts(str(tmp_path / name))
    assert (first["prompt"], second["prompt"]) == ("one", "two") and first["n"] == "7" * 9131


ONE = '{"text": "one, [two,]"}'
# {content: (the line that must be changed, the reason)}.
MISTAKES = {
    f"[\n{ONE},\n{ONE},\n]\n": ("line 3", "a comma after the last value"),
    f'[{ONE},\n{{"text": "a", "n": [1, 2,\n]}}]': ("line 2", "a comma after the last value"),
    f"[{ONE},\n{{'text': 'a'}}]": ("line 2", "values as Python prints them"),
    '[{"text": None}]': ("line 1", "values as Python prints them"),
    f"[\n{ONE}, // the first\n{ONE}]": ("line 2", "a comment"),
    f"[\n{ONE},\n": ("line 3", "it ends within a record"),
    f'[\n{ONE},\n{{"text": "tw': ("line 3", "it ends within a record"),
    '[\n{"text": "one\ntwo"}]': ("line 2", "a line end or tab within a string"),
    '[\n{"text": "she said "go" and left"}]': ("line 2", "a quote within a string"),
    '[{"a": "b", "text": "{ "country": 1 }"}]': ("line 1", "a quote within a string"),
    '[{"text": "a 5" disk"}]': ("line 1", "a quote within a string"),
    '[{"text": "she said ""go"""}]': ("line 1", "a quote within a string"),
    '[{"a": "b" "text": "c"}]': ("line 1", "Expecting ',' delimiter, column 12"),
    f"[\n{ONE}\n{ONE}]": ("line 3", "Expecting ',' delimiter, column 1"),
}


@pytest.mark.parametrize("content", MISTAKES)
def test_a_mistake_in_an_array_is_named_with_its_line(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    line, reason = MISTAKES[content]
    with pytest.raises(DataError, match=re.escape(f"a.json {line} is not JSON ({reason}): ")):
        read(tmp_path / "a.json")


COMMANDS = {
    "commas.jsonl": (f"{ONE},\n" * 3, "line 1 is not JSON (it ends in a comma): sed ", 3),
    "commas.json": (f"{ONE},\n" * 2 + ONE, "line 1 is not JSON (it ends in a comma): sed ", 3),
    "several.jsonl": (f"{ONE}\n{ONE}{ONE} {ONE}\n", "line 2 is not JSON (it has several records): jq -c . ", 4),
    "pretty.jsonl": ('{\n"text": "one, [two,]"\n}\n', "line 1 is not JSON (it ends within a record): jq -c . ", 1),
    "arrays.json": (f"[{ONE}]\n[{ONE},{ONE}]", "line 2 is not JSON (another array begins): jq -c ", 3),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_that_is_named_makes_the_records_of_a_file_readable(tmp_path, name):
    content, message, count = COMMANDS[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(f"{name} {message}")) as caught:
        read(tmp_path / name)
    command = re.match(r"(.*\.lines\.jsonl) ", caught.value.remedy)[1]
    if not shutil.which(command.split()[0]):
        pytest.skip("the command is not here")
    subprocess.run(["sh", "-c", command], check=True)
    assert read(next(tmp_path.glob("*.lines.jsonl")))[0] == ["one, [two,]"] * count


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_question_and_its_answer_are_joined_by_the_command_that_is_named(tmp_path, ending):
    if not shutil.which("jq"):
        pytest.skip("jq is not here")
    pairs = [{"n": 1, "q": "2 + 2?", "in": None, "a": "4"}, {"n": 2, "q": 'Say "hi"', "in": "at once", "a": "hi"}]
    file = tmp_path / f"a.{ending}"
    file.write_text(json.dumps(pairs, indent=1) if ending == "json" else "\n".join(map(json.dumps, pairs)))
    with pytest.raises(DataError, match=r": choose one of q, a, or data=text; jq -c ") as caught:
        read(file)
    subprocess.run(["sh", "-c", re.search(r"jq -c .*\.lines\.jsonl", caught.value.remedy)[0]], check=True)
    assert read(tmp_path / "a.lines.jsonl")[0] == ["2 + 2?\n\n4", 'Say "hi"\nat once\nhi']


PAIRS = {  # fields, those that are joined, and their text
    "translation": ({"id": "7", "translation": {"en": "A cat.", "de": "Ein Kater."}}, "translation.en, translation.de"),
    "deep": ({"a": {"b": {"en": "A cat.", "de": "Ein Kater."}}, "n": 7}, "a.b.en, a.b.de"),
    "dots": ({"a": {"b.en": "A cat.", "b.de": "Ein Kater."}}, "a.b.en, a.b.de"),
    "ids": ({"page_id": "x7", "UUID": "y8", "q": "A cat.", "a": "Ein Kater."}, "q, a"),
    "beside": ({"q": "A cat.", "meta": {"id": "7", "a": "Ein Kater."}}, "q, meta.a"),
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_texts_within_an_object_are_joined_by_the_command_that_is_named_and_ids_are_not(tmp_path, name, ending):
    """The advice was to choose the text of one language; an id was joined to a text."""
    record, names = PAIRS[name]
    (tmp_path / f"a.{ending}").write_text(json.dumps([record] if ending == "json" else record))
    with pytest.raises(DataError, match=rf" joins {re.escape(names)}\.$") as caught:
        read(tmp_path / f"a.{ending}")
    command = re.search(r"jq -c .*\.lines\.jsonl", caught.value.remedy)[0]
    subprocess.run(["bash", "-c", command], check=True)
    assert read(tmp_path / "a.lines.jsonl")[0] == ["A cat.\nEin Kater."]


def test_an_id_beside_a_text_is_not_joined_to_it(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "x7", "body": "one"}) + "\n")
    with pytest.raises(DataError, match=r": choose one of id, body, or data=text\.$"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_numbers_become_texts_by_the_command_that_is_named_and_nan_stands_for_none(tmp_path, ending):
    records = [{"in": {"title": title}} for title in ("Emma", float("nan"), None, 1984, 2.5)]
    write = lambda some: json.dumps(some) if ending == "json" else "\n".join(map(json.dumps, some))  # noqa: E731
    file = tmp_path / f"a.{ending}"
    file.write_text(write(records[:3]))
    found, source = read(file, text_field="in.title")
    assert found == ["Emma"] and source.notes["Records left out whose in.title is null"][0] == 2
    file.write_text(write(records))
    with pytest.raises(DataError, match=r"data\.text_field=in\.title is not text \(1984\): .*jq -c ") as caught:
        read(file, text_field="in.title")
    if not shutil.which("jq"):
        pytest.skip("jq is not here")
    subprocess.run(["sh", "-c", re.search(r"jq -c .*\.lines\.jsonl", caught.value.remedy)[0]], check=True)
    assert read(tmp_path / "a.lines.jsonl", text_field="in.title")[0] == ["Emma", "1984", "2.5"]


def test_an_array_that_is_too_large_to_be_read_whole_names_the_command_that_makes_lines_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("data.json_records.LARGEST_ARRAY", 10)
    with pytest.raises(DataError, match=r"jq -c '?\.\[\]'? .*array\.json > .*array\.lines\.jsonl"):
        read(array(tmp_path / "array.json"))


def test_an_array_of_strings_has_a_document_each(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(STORIES))
    found, source = read(file)
    assert found == STORIES and not source.notes
    assert read(file, text_field="body")[0] == STORIES
    (tmp_path / "beside.txt").write_text("a text")
    assert read(tmp_path)[0] == [*STORIES, "a text"]


def test_json_that_holds_no_records_is_read_as_it_is_and_named(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"data": [{"text": "one"}]}, indent=1))
    (tmp_path / "z.txt").write_text("a text")
    source = read(tmp_path)[1]
    assert [fact for fact in source.notes if fact.startswith("JSON files without a list of records")]
    assert source.note_lines()[0].endswith(f": 1, first in {tmp_path}/settings.json.")


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_command_for_an_object_of_json_makes_lines_of_its_longest_list_of_records(tmp_path):
    """So are the exports of chats: participants and messages."""
    whole = {"title": ["a"], "participants": [{"name": "Zoë"}], "my messages": [{"text": text} for text in STORIES]}
    (tmp_path / "chat.json").write_text(json.dumps(whole, indent=1))
    source = read(tmp_path / "chat.json")[1]
    command = re.search(r"\((jq .*) makes JSON lines", source.note_lines()[0])[1]
    subprocess.run(["bash", "-c", command.replace("FILE", "chat.json")], check=True, cwd=tmp_path)
    assert read(tmp_path / "LINES.jsonl")[0] == STORIES


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_conversation_beside_an_id_is_joined_by_the_command_that_is_named(tmp_path, ending):
    """As ShareGPT has it: the advice was to choose the id."""
    records = [
        {"id": f"a{n}", "conversations": [{"from": "human", "value": story}] * 2} for n, story in enumerate(STORIES)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / f"a.{ending}").write_text(json.dumps(records) if ending == "json" else lines)
    with pytest.raises(DataError, match=" joins the strings in conversations, or choose one of id") as caught:
        read(tmp_path / f"a.{ending}")
    subprocess.run(["bash", "-c", caught.value.remedy.partition(" joins ")[0]], check=True)
    assert read(tmp_path / "a.lines.jsonl")[0] == [f"human\n{story}\nhuman\n{story}" for story in STORIES]
    # Tags beside a longer text are none.
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "a text that is longer", "tags": ["a", "b"]}) + "\n")
    with pytest.raises(DataError, match=": choose one of body, or data=text"):
        read(tmp_path / "b.jsonl")


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("indent", [None, 1])
def test_the_export_of_a_chat_has_the_same_command_in_one_line_and_in_many(tmp_path, indent):
    """In one line the advice was to choose its title."""
    whole = {"title": "T", "people": [{"name": "A"}], "messages": [{"content": story} for story in STORIES]}
    (tmp_path / "a.json").write_text(json.dumps(whole, indent=indent))
    try:
        said = read(tmp_path / "a.json")[1].note_lines()[0]
    except DataError as error:
        said = f"({error.remedy}"
    command = re.search(r"\((jq .*?) makes", said)[1].replace("FILE", "a.json").replace("a.lines", "LINES")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(tmp_path / "LINES.jsonl", text_field="content")[0] == STORIES


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["", "conversations"])
def test_lists_within_one_file_of_json_have_the_command_that_makes_a_text_of_each(tmp_path, name, indent):
    """As ChatterBot exports conversations: in one line the command joined all of them to one text."""
    talks = [["Why?", story, "Ah."][: 2 + len(story) % 2] for story in STORIES]
    whole = {"tags": ["a", "b"], "sizes": [[1], [2], [3], [4]], name: talks} if name else talks
    (tmp_path / "a.json").write_text(json.dumps(whole, indent=indent))
    try:
        said = read(tmp_path / "a.json")[1].note_lines()[0]
    except DataError as error:
        said = f"({error.remedy}"
    command = re.search(r"\((jq .*?) makes", said)[1].replace("FILE", "a.json").replace("a.lines", "LINES")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(tmp_path / "LINES.jsonl")[0] == ["\n".join(talk) for talk in talks]
    # A record of JSON lines is a document with all its strings, and strings alone may be one conversation.
    for name, record in (("b.jsonl", {"turns": talks}), ("b.json", {"turns": talks[0]})):
        (tmp_path / name).write_text(json.dumps(record) + "\n")
        with pytest.raises(DataError, match="joins the strings in turns"):
            read(tmp_path / name)


TABLES = {
    "columns": {"id": {"0": 1, "1": 2}, "text": {"0": "one", "1": "two\nlines"}},
    "a column": {"text": {"7": "one", "8": "two\nlines"}},
    "a series": {"0": "one", "1": "two\nlines"},
    "rows": {"x": {"id": 1, "text": "one"}, "y": {"id": 2, "text": "two\nlines"}},
    "apart from names": {"columns": ["id", "text"], "index": [0, 1], "data": [[1, "one"], [2, "two\nlines"]]},
    "a schema": {"schema": {"fields": ["a"], "pandas_version": "1"}, "data": [{"text": "one"}, {"text": "two\nlines"}]},
    "lists": {"id": [1, 2], "text": ["one", "two\nlines"]},
    "splits": {"train": [{"text": "one"}], "test": [{"text": "two\nlines", "id": 2}]},
    "a version": {"version": "1.1", "title": "x", "data": [{"text": "one"}, {"text": "two\nlines"}]},
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_table_in_one_object_of_json_has_the_command_that_makes_a_line_of_each_row(tmp_path, name, indent):
    """pandas writes such; the texts of all rows were joined to one, or the names of the rows were to choose from."""
    (tmp_path / "a.json").write_text(json.dumps(TABLES[name], indent=indent))
    if indent:
        said = read(tmp_path / "a.json")[1].note_lines()[0]
        command = re.search(r"\((jq .*) makes JSON lines", said)[1].replace("FILE", "a.json")
    else:
        with pytest.raises(DataError, match="makes a line of each row") as caught:
            read(tmp_path / "a.json")
        command = caught.value.remedy.removesuffix(" makes a line of each row").replace("a.lines", "LINES")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(tmp_path / "LINES.jsonl")[0] == ["one", "two\nlines"]


RECIPES = {
    "r7": {"title": "soup", "ingredients": ["salt"], "steps": "Stir.", "picture": None},
    "r8": {},
    "r9": {"title": "pie", "ingredients": ["flour", "butter"], "steps": "Bake."},
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("field", ["text", "steps"])
def test_records_by_their_ids_become_lines_whatever_their_field_and_empty_ones_are_left_out(tmp_path, field, indent):
    """The advice was to choose the title of one record, r7.title."""
    (tmp_path / "a.json").write_text(json.dumps(RECIPES, indent=indent))
    try:
        said = read(tmp_path / "a.json", text_field=field)[1].note_lines()[0]
    except DataError as error:
        said = f"({error.remedy}"
    command = re.search(r"\((jq .*?) makes", said)[1].replace("FILE", "a.json").replace("a.lines", "LINES")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    with pytest.raises(DataError, match="line 2 has no field .*: jq .* leaves out records") as caught:
        read(tmp_path / "LINES.jsonl", text_field="steps")
    subprocess.run(["bash", "-c", caught.value.remedy.partition(" leaves out ")[0]], check=True)
    assert read(tmp_path / "LINES.lines.jsonl", text_field="steps")[0] == ["Stir.", "Bake."]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_a_record_without_the_field_of_those_before_it_has_the_command_that_leaves_it_out(tmp_path):
    records = [{"a": {"b": "one"}}, {"a": {"c": "x"}}, {"other": "y"}, {"a": {"b": None}}, {"a": {"b": "two"}}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    with pytest.raises(DataError, match="record 2 .*: choose one of a.c, or jq .* leaves out ") as caught:
        read(tmp_path / "a.json", text_field="a.b")
    command = caught.value.remedy.partition(", or ")[2].partition(" leaves out ")[0]
    subprocess.run(["bash", "-c", command], check=True)
    assert read(tmp_path / "a.lines.jsonl", text_field="a.b")[0] == ["one", "two"]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("is_conversation", [False, True])
def test_a_file_of_many_texts_by_their_names_becomes_lines(tmp_path, is_conversation):
    """As a dictionary: the advice was to choose one of its words, or to join the strings of one conversation."""
    texts = {f"w{number}": f"sense {number}" for number in range(60)}
    whole = {name: [{"content": text}] if is_conversation else text for name, text in texts.items()}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    with pytest.raises(DataError, match="makes a line of each row") as caught:
        read(tmp_path / "a.json")
    subprocess.run(["bash", "-c", caught.value.remedy.removesuffix(" makes a line of each row")], check=True)
    assert read(tmp_path / "a.lines.jsonl")[0] == [*texts.values()]


def test_a_text_in_parts_from_a_person_is_told_where_the_person_stays(tmp_path):
    """As Telegram has it: the command that joins the parts leaves out who said them."""
    record = {"type": "message", "text": ["see ", {"type": "link", "text": "https://a.b"}]}
    file = tmp_path / "a.jsonl"
    deleted = {"from": None}
    for told, fields in (True, record | {"from": "Ann"}), (True, record | deleted), (False, record):
        file.write_text(json.dumps(fields) + "\n")
        with pytest.raises(DataError, match="joins the strings in text") as caught:
            read(file)
        assert (
            caught.value.remedy.endswith("; docs/data.md makes days of Telegram's messages, with who said them") == told
        )


def test_lists_in_several_lines_are_no_table_and_many_names_are_cut(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(TABLES['lists'])}\n" * 2)
    with pytest.raises(DataError, match="joins the strings in text"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps({f"c{number}": "a" for number in range(300)}))
    with pytest.raises(DataError, match="choose one of c0, c1, .*c49, …, or data=text"):
        read(tmp_path / "a.jsonl")


def node(name: str, parent: str | None, role: str = "", *parts: object) -> dict:
    """A message in the tree of an export of ChatGPT."""
    message = {"author": {"role": role}, "content": {"parts": [*parts]}, "create_time": None} if role else None
    return {"id": name, "parent": parent, "message": message, "children": []}


NODES = [
    node("a1", None),
    node("b2", "a1", "system", ""),
    node("c3", "b2", "user", "Why?", {"asset_pointer": "x"}, "Now?"),
    node("d4", "c3", "assistant", "I do not know."),
    node("e5", "c3", "assistant", "Because."),
]
CHATGPT = {"title": "One", "mapping": {each["id"]: each for each in NODES}, "current_node": "e5", "id": "q"}
EXPORTS = {
    "ChatGPT": (CHATGPT, ["user: Why?\nNow?\nassistant: Because."]),
    "ShareGPT": (
        {"id": "x", "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        ["human\nWhy?\ngpt\nBecause."],
    ),
    "Claude": (
        {"uuid": "u", "name": "One", "chat_messages": [{"text": "Why?", "sender": "human"}, {"text": "Because."}]},
        ["Why?", "Because."],
    ),
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_conversation_that_has_an_id_or_a_title_has_the_command_that_makes_texts_of_it(tmp_path, name, ending):
    """It was told to choose one of its id and its title, which are no conversation."""
    record, texts = EXPORTS[name]
    (tmp_path / f"a.{ending}").write_text(json.dumps([record] if ending == "json" else record))
    with pytest.raises(DataError, match="has no field data.text_field=text: ") as caught:
        read(tmp_path / f"a.{ending}")
    (command,) = re.findall(r"jq -c .*\.lines\.jsonl", caught.value.remedy)
    subprocess.run(["bash", "-c", command], check=True)
    assert read(tmp_path / "a.lines.jsonl")[0] == texts


ASSIGNED = [
    "window.YTD.tweets.part0 = {}",
    "var a={}",
    "const data = {};\n",
    "  let $x = {} ;  \n",
    "module.exports = {}",
]


@pytest.mark.parametrize("written", ASSIGNED)
def test_json_after_an_assignment_is_told_with_the_command_that_leaves_it_out(tmp_path, written):
    """Such as tweets.js of Twitter's archives, which was learned with its braces and numbers without a word."""
    rows = [{"tweet": {"id": "1", "full_text": story}} for story in STORIES]
    (tmp_path / "tweets.js").write_text(written.format(json.dumps(rows, indent=1)))
    fact = next(iter(read(tmp_path / "tweets.js")[1].notes))
    command = re.search(r"read as they are \((.*) leaves it out", fact)[1].replace("FILE", "tweets.js")
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read(tmp_path / "tweets.js.json", text_field="tweet.full_text")[0] == STORIES


@pytest.mark.parametrize("written", ["x = [1, 2].map(y => y)", "function f() { a = {b: 1} }", "a == [1]", "// a = [1]"])
def test_a_program_of_javascript_is_a_text(tmp_path, written):
    (tmp_path / "a.js").write_text(written)
    assert not read(tmp_path / "a.js")[1].notes


NESTED = [{"id": 1, "content": {"text": "one", "of": None}}, {"content": None}, {"content": {"text": "two"}}]


def test_a_dotted_name_is_a_field_within_an_object(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(NESTED), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(NESTED))
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in NESTED))
    for name in ("a.parquet", "a.json", "a.jsonl"):
        assert read(tmp_path / name, text_field="content.text")[0] == ["one", "two"]
        with pytest.raises(DataError, match=r"no field data\.text_field=text: choose one of .*content\.text"):
            read(tmp_path / name)
    # A field of exactly this name comes first.
    (tmp_path / "b.jsonl").write_text('{"content.text": "three", "content": {"text": "four"}}\n')
    assert read(tmp_path / "b.jsonl", text_field="content.text")[0] == ["three"]
    (tmp_path / "z.txt").write_text("a text beside it")
    assert "one" in read(tmp_path, text_field="content.text")[0]


CHAT = [{"messages": [{"role": "user", "content": "Hi!"}, {"role": "bot", "content": "Ho"}]}, {"messages": []}]
WANTED = ["user\nHi!\nbot\nHo"]


BOLD = [{"text": ["so ", {"type": "bold", "text": "very"}, " cold"]}, {"text": "as it is"}, {"text": ""}]
LINK = [{"text": [{"type": "text_link", "text": "here", "href": "x.org"}]}, *BOLD]
PARTS = [{"type": "text", "text": "See:"}, {"type": "image", "url": "x.org"}, {"type": "text", "text": "A cat?"}]
ASKED = [{"role": "user", "content": PARTS}, {"role": "bot", "content": "Yes."}]


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize(
    ("name", "content", "settings", "wanted"),
    [
        ("telegram.jsonl", "\n".join(map(json.dumps, BOLD)), {}, ["so very cold", "as it is"]),
        ("telegram.json", json.dumps(LINK), {}, ["here", "so very cold", "as it is"]),
        ("parts.jsonl", "\n".join(map(json.dumps, ASKED)), {"text_field": "content"}, ["See:\nA cat?", "Yes."]),
        ("paragraphs.jsonl", json.dumps({"text": [{"text": "one"}, {"text": "two"}]}), {}, ["one\ntwo"]),
        ("asked.jsonl", json.dumps({"messages": ASKED}), {}, ["user\nSee:\nx.org\nA cat?\nbot\nYes."]),
        ("chat.jsonl", "\n".join(map(json.dumps, CHAT)), {}, WANTED),
        ("chat.json", json.dumps(CHAT), {}, WANTED),
        ("chat.jsonl", "\n".join(map(json.dumps, CHAT)), {"text_field": "messages"}, WANTED),
        ("deep.jsonl", json.dumps({"a": {"b c": ["x", {"y": "z"}]}}), {"text_field": "a.b c"}, ["x\nz"]),
        ("a list.jsonl", json.dumps({"text": ["one", "two"]}), {}, ["one\ntwo"]),
        ("whole.json", json.dumps({"version": 1, "data": [{"text": "one"}, {"text": "two"}]}), {}, ["one", "two"]),
        ("pretty.jsonl", json.dumps({"text": "one"}, indent=2) * 2, {}, ["one", "one"]),
        ("pretty.jsonl", json.dumps([{"text": "one"}], indent=2), {}, ["one"]),
        ("array.jsonl", json.dumps([{"text": "one"}]), {}, ["one"]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_command_that_is_named_makes_records_that_can_be_read(tmp_path, name, content, settings, wanted, packed):
    file = tmp_path / name
    file.write_text(content)
    if packed:
        file = tmp_path / f"{name}.gz"
        file.write_bytes(gzip.compress(content.encode()))
    with pytest.raises(DataError) as caught:
        read(file, **settings)
    command = re.split(" (?:joins|makes|writes) ", caught.value.remedy)[0]
    made = shlex.split(command)[-1]
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert [text for text in read(made, **settings)[0] if text] == wanted


def test_only_a_line_feed_ends_a_line_of_json(tmp_path):
    texts = ["one\u2028two", "three\u2029four\x85five", "six\x0bseven\x0ceight\x1cnine"]
    # The control characters of ASCII must be escaped in JSON; the others stand in a string as they are.
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    assert len("\n".join(lines).splitlines()) > len(texts)
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read(tmp_path / "a.jsonl")[0] == texts


@pytest.mark.parametrize("ending", PACKED)
def test_packed_files_one_after_the_other_are_one_text_and_a_cut_one_is_refused(tmp_path, ending):
    packed = PACKED[ending].compress(b"word " * 1000)
    (tmp_path / f"whole.txt{ending}").write_bytes(packed * 3)
    assert read(tmp_path / f"whole.txt{ending}")[0] == ["word " * 3000]
    (tmp_path / f"cut.txt{ending}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"cut\.txt{ending} cannot be read \(.*\): fix it or leave it out"):
        read(tmp_path / f"cut.txt{ending}")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("ending", PACKED)
def test_a_file_that_was_packed_twice_or_is_called_so_and_is_not(tmp_path, name, ending):
    whole = write_lines(tmp_path / name).read_bytes()
    (tmp_path / f"{name}{ending}").write_bytes(whole)  # a browser may unpack what it saves
    texts = read(tmp_path / name)[0]
    assert read(tmp_path / f"{name}{ending}")[0] == texts == STORIES
    (tmp_path / f"{name}{ending}").write_bytes(PACKED[ending].compress(PACKED[ending].compress(whole)))
    with pytest.raises(DataError, match=f"{name}{ending} is packed twice: ") as caught:
        read(tmp_path / f"{name}{ending}", source="text")
    if shutil.which(caught.value.remedy.split()[0]):
        subprocess.run(["bash", "-c", caught.value.remedy.removesuffix(" unpacks it")], check=True)
        assert next(tmp_path.glob("a.new.*")).read_bytes() == whole


def test_a_window_of_zstandard_of_two_gigabytes_is_read(tmp_path):
    """Dumps of Reddit are packed so: zstd --long=31. The command-line program unpacks them with --long alone."""
    whole = write_lines(tmp_path / "a.jsonl").read_bytes()
    options = {zstd.CompressionParameter.window_log: 31}
    packed = zstd.ZstdCompressor(options=options)
    (tmp_path / "b.jsonl.zst").write_bytes(packed.compress(whole[:9]) + packed.compress(whole[9:]) + packed.flush())
    with pytest.raises(zstd.ZstdError, match="too much memory"):
        zstd.decompress((tmp_path / "b.jsonl.zst").read_bytes())
    assert read(tmp_path / "b.jsonl.zst")[0] == STORIES
    if shutil.which("zstd"):
        command = f"{unpacking(str(tmp_path / 'b.jsonl.zst'))} {tmp_path}/b.jsonl.zst"
        assert subprocess.run(["bash", "-c", command], check=True, capture_output=True).stdout == whole


# Other people's files


def test_a_string_in_a_line_of_json_lines_is_a_document_as_in_an_array(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, STORIES)))
    assert read(file)[0] == STORIES
    file.write_text("".join(f"{json.dumps(line)}\n" for line in ("context", {"text": "an object"}, "", "last")))
    found, source = read(file)
    assert found == ["context", "an object", "last"]
    assert "Records without text in text" in source.notes


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([{"text": "a"}, None, 3, "b"], ["a", "b"]),
        ([[0, "a", ["b"]], {"text": "c"}], ["a\nb", "c"]),
        ([[1, 2], {"text": "c"}], ["c"]),
        ([[], "c"], ["c"]),
        ([[{"text": "a"}, {"text": "b"}]], ["a", "b"]),
    ],
)
@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_lines_that_are_neither_objects_nor_strings_are_refused_with_a_command_that_works(tmp_path, lines, kept):
    file = tmp_path / "my lines.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(DataError, match="is not a JSON object: jq -c ") as caught:
        read(file)
    command = re.search(r"jq -c .*\.lines\.jsonl", caught.value.remedy)[0]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert read(tmp_path / "my lines.lines.jsonl")[0] == kept


def test_records_without_the_field_beside_others_that_have_it_name_the_path_that_reads_those(tmp_path):
    # As ConvoKit unpacks a corpus: one of its files has the texts.
    corpus = tmp_path / "my corpus"
    corpus.mkdir()
    for name in ("conversations", "users", "index"):
        (corpus / f"{name}.json").write_text(json.dumps({"a": {"title": "t"}}))
    write_lines(corpus / "utterances.jsonl")
    for ending in ("/utterances.jsonl", "/**/*.jsonl"):
        with pytest.raises(DataError, match=r"conversations\.json has no field data\.text_field=text: ") as caught:
            read(corpus)
        named = re.search(r"'data\.path=(.*)' reads those that have it", caught.value.remedy)[1]
        assert read(named)[0] == STORIES * len([*corpus.glob("*.jsonl")])
        assert named == f"{corpus}{ending}"
        write_lines(corpus / "more.jsonl")

    # A table of labels beside Parquet, whose columns are not known before it is read.
    (corpus / "labels.csv").write_text("id,label\n1,2\n")
    for file in corpus.glob("*.json*"):
        file.unlink()
    write_parquet(corpus / "a.parquet")
    with pytest.raises(DataError, match=r"labels\.csv has no field data\.text_field=text: 'data\.path=.*a\.parquet' "):
        read(corpus)
    # No ending tells them apart.
    write_csv(corpus / "other.csv")
    with pytest.raises(DataError, match=r"labels\.csv has no field .*: leave it out, for others have it"):
        read(corpus)


@pytest.mark.parametrize("header", [["topic", "text"], []])
@pytest.mark.parametrize("delimiter", [";", ",", "\t"])
def test_a_table_in_single_quotes_is_refused_with_the_command_that_writes_double_ones(tmp_path, delimiter, header):
    stories = [*STORIES, "it's; the cat's, and\tmore", "'", "two\nlines", "win\r\ndows", "long " * 20_000, "last"]
    file = tmp_path / "my articles.csv"
    with file.open("w", newline="") as out:
        rows = csv.writer(out, delimiter=delimiter, quotechar="'", quoting=csv.QUOTE_ALL, lineterminator="\n")
        out.write(delimiter.join(header) + "\n" * bool(header))
        rows.writerows(["Web", story] for story in stories)
    with pytest.raises(DataError, match="has its values in single quotes: ") as caught:
        read(file)
    command = re.search(r"single quotes: (.*) writes double ones", str(caught.value))[1]
    subprocess.run(["bash", "-c", command.replace("python", sys.executable)], check=True)
    made = tmp_path / "my articles.quoted.csv"
    if not header:  # told as of any table without names
        made.write_bytes(b"c1,text\n" + made.read_bytes())
    assert read(made)[0] == stories


def test_words_in_single_quotes_within_a_table_are_letters(tmp_path):
    """A label of each row stands in quotes somewhere else."""
    asked = ["Is it 'yes' or 'no'?", "Is the sky green?", "Is water wet?", "Say 'yes'", "Is fire cold?"]
    file = tmp_path / "qa.csv"
    for quoted in ([], ["'yes',A row of another hand"]):
        rows = [
            "answer,text",
            *(f"{'yes' if number % 2 else 'no'},{text}" for number, text in enumerate(asked)),
            *quoted,
        ]
        file.write_text("\n".join(rows) + "\n")
        assert read(file)[0] == asked + [row.partition(",")[2] for row in quoted]


@pytest.mark.parametrize("delimiter", [",", ";", "|"])
def test_a_table_that_is_called_tsv_and_has_no_tab_in_its_first_line_is_read_by_its_own_delimiter(tmp_path, delimiter):
    """Its first line was one name, and the command that named the columns made a document of it."""
    for values in (STORIES, ["a, b; c|d"]):
        assert read(write_csv(tmp_path / "a.tsv", values, delimiter))[0] == values
    (tmp_path / "b.tsv").write_text("text\na, b; c|d\n")
    assert read(tmp_path / "b.tsv")[0] == ["a, b; c|d"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_carriage_return_without_quotes_within_a_row_is_refused_with_the_command_that_writes_a_blank(
    tmp_path, end, packed
):
    """As pandas writes one; it ended the row there, and the next column's value became a document."""
    rows = ["id,text,title", "0,a\rb,c", '1,"q\rq",d', "2,e\r,f", ""]
    file = tmp_path / f"a.csv{packed}"
    content = end.join(rows).encode()
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=r"line 2 ends in \\r alone, and line 1 does not: ") as caught:
        read(file)
    subprocess.run(["bash", "-c", caught.value.remedy.partition(" writes ")[0]], check=True)
    assert read(tmp_path / "a.new.csv")[0] == ["a b", "q q", "e "]
    # Old Macs end each row so, and a quoted value may have any line end.
    (tmp_path / "mac.csv").write_bytes(b'id,text,title\r0,one,a\r1,"two\nthree",b\r')
    assert read(tmp_path / "mac.csv")[0] == ["one", "two\nthree"]
    (tmp_path / "quoted.csv").write_text(f'text,id{end}"a\rb",0{end}"c\r",1{end}', newline="")
    assert read(tmp_path / "quoted.csv")[0] == ["a\rb", "c\r"]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_lines_below_a_name_that_have_commas_are_read_by_the_command_that_is_named(tmp_path, packed):
    """One column that was never quoted, as pandas writes it with tabs: the advice was to quote each value."""
    values = ["one, two", 'she said "no", and left', "three"]
    content = "\n".join(["text", *values, ""]).encode()
    file = tmp_path / f"a.csv{packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=r"; if each line is a text, .*: then set data.separator='\\n'\.$") as caught:
        read(file)
    command = re.search(r"is a text, (.*) has those alone", caught.value.remedy)[1]
    subprocess.run(["bash", "-c", command], check=True)
    assert read(tmp_path / "a.lines.txt", separator="\\n")[0] == values


def test_apostrophes_in_a_table_are_letters(tmp_path):
    stories = ["'Tis the season", "the cats' tails", "'Yes,' she said", "'quoted'", "it's"]
    for delimiter in (",", ";", "\t"):
        assert read(write_csv(tmp_path / "a.csv", stories, delimiter))[0] == stories
        # Each line has its value, which would join two lines as a quote.
        for letters in (["'"] * 6, ["'", "a", "'"] * 4, ["'quoted'", "plain"]):
            assert read(write_csv(tmp_path / "b.csv", letters, delimiter))[0] == letters
        with pytest.raises(DataError, match="has its values in single quotes"):
            read(write_csv(tmp_path / "c.csv", ["'quoted'", "'Yes'", "'No'"], delimiter))


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_table_with_two_columns_of_one_name_is_refused_with_the_command_that_tells_them_apart(
    tmp_path, delimiter, packed
):
    """Of two columns called text the last was learned."""
    rows = [[n, f"one {story}", f"other {story}"] for n, story in enumerate(STORIES)]
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([["text2", "text", "text"], *rows])
    file = tmp_path / f"joined.csv{packed}"
    content = out.getvalue().encode()
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match="has 2 columns called text") as caught:
        read(file)
    subprocess.run(["bash", "-c", caught.value.remedy.removesuffix(" gives each a name of its own")], check=True)
    (named,) = tmp_path.glob("joined.named.*")
    assert read(named)[0] == [first for _, first, _ in rows]
    assert read(named, text_field="text3")[0] == [second for _, _, second in rows]


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = [pa.array(["one"]), pa.array(["other"]), pa.array([1]), pa.array([2])]
    parquet.write_table(pa.Table.from_arrays(columns, ["text", "text", "id", "id"]), tmp_path / "a.parquet")
    struct = pa.StructArray.from_arrays(columns[:2], ["text", "text"])
    parquet.write_table(pa.table({"in": struct, "text": columns[0]}), tmp_path / "b.parquet")
    for name, field in {"a.parquet": "text", "b.parquet": "in.text"}.items():
        with pytest.raises(DataError, match=f"has 2 columns called {field}: give them names of their own"):
            read(tmp_path / name, text_field=field)
    assert read(tmp_path / "b.parquet")[0] == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "field", "fault"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b", "id": 1, "text": "c"}\n', "text", "line 2 has text twice"),
        ("a.jsonl", '{"content": {"text": "a", "text": null}}\n', "content.text", "line 1 has text twice"),
        ("a.json", '[{"text": "a"}, {"text": "b", "text": "c"}]', "text", "has a record with text twice"),
    ],
)
def test_a_record_that_has_its_text_twice_is_refused_with_its_place(tmp_path, name, content, field, fault):
    """json.loads() keeps the last one."""
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name, text_field=field)
    assert caught.value.fault == fault
    assert json.loads('{"id": 1, "id": 2}') == {"id": 2}
    (tmp_path / name).write_text('{"id": 1, "text": "a", "id": 2}\n')
    assert read(tmp_path / name)[0] == ["a"], "a field of which nothing is learned"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("kind", ["plain", "packed", "marked"])
def test_a_table_with_excels_first_line_is_refused_with_the_command_that_leaves_it_out(tmp_path, delimiter, kind):
    """The advice was to give names to the columns, by which the texts kept their numbers and delimiters."""
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter).writerows([["id", "text"], *enumerate(STORIES)])
    content = f"sep={delimiter}\r\n{written.getvalue()}".encode()
    file = tmp_path / f"my table.csv{'.gz' * (kind == 'packed')}"
    file.write_bytes(gzip.compress(content) if kind == "packed" else b"\xef\xbb\xbf" * (kind == "marked") + content)
    with pytest.raises(DataError, match="begins with a line for Excel, sep=: ") as caught:
        read(file)
    subprocess.run(["bash", "-c", caught.value.remedy.removesuffix(" leaves it out")], check=True)
    assert read(tmp_path / "my table.new.csv")[0] == STORIES


BEFORE = ["# made by a program, version 3\n", "# made\n# text\n\n", "Stories\n\n", "\n", "% one;two,three\n"]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", ["my table.csv", "my table.tsv", "one.csv", "my table.csv.gz"])
def test_a_table_with_lines_before_its_names_is_refused_with_the_command_that_leaves_them_out(tmp_path, before, name):
    """The advice was to choose a comment as the column, or to give names, with which the real names were a document."""
    if name == "one.csv" and before.startswith("Stories"):
        return  # it may be a text as others
    rows = [["text"], *([story] for story in STORIES)] if name == "one.csv" else [["id", "text"], *enumerate(STORIES)]
    written = io.StringIO(newline="")
    csv.writer(written, delimiter="\t" if "tsv" in name else ",", lineterminator="\n").writerows(rows)
    content = (before + written.getvalue()).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"has {before.count(chr(10))} lines? before the names: ") as caught:
        read(tmp_path / name)
    subprocess.run(["bash", "-c", caught.value.remedy.removesuffix(" leaves them out")], check=True)
    assert read(next(tmp_path.glob("*.new.*")))[0] == STORIES


@pytest.mark.parametrize("begin", ["spam,hello\nham,there\n", "# a\n", "one\ntwo\n"])
def test_a_table_without_names_in_which_the_word_stands_later_has_no_lines_before_them(tmp_path, begin):
    (tmp_path / "a.csv").write_text(f"{begin}{'spam,' * (',' in begin)}text\n")
    with pytest.raises(DataError, match="if line 1 is a record and names no columns" if begin[0] != "#" else "before"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize("name", ["all.csv", "all.tsv", "marked.csv", "windows.csv"])
def test_the_names_of_a_table_again_where_cat_has_joined_two_are_no_document(tmp_path, name):
    written = io.StringIO(newline="")
    end = "\r\n" if name == "windows.csv" else "\n"
    rows = csv.writer(written, delimiter="\t" if ".tsv" in name else ",", lineterminator=end)
    rows.writerows([["id", "text"], *enumerate(STORIES), ["id", "once, text"]])
    one = written.getvalue().encode()
    (tmp_path / name).write_bytes((b"\xef\xbb\xbf" * (name == "marked.csv") + one) * 3)
    found, source = read(tmp_path / name)
    assert found == [*STORIES, "once, text"] * 3
    fact = "Rows left out that repeat the names of the columns"
    assert source.notes[fact][0] == 2 and source.notes[fact][1][0].startswith(f"{tmp_path / name} line ")
    # In a table of one column it may be a word.
    (tmp_path / "words.csv").write_text("text\nword\ntext\n")
    found, source = read(tmp_path / "words.csv")
    assert found == ["word", "text"]
    assert [fact for fact in source.notes if fact.startswith("Rows that repeat the name of the only column")]


@pytest.mark.parametrize("packed", [False, True])
def test_a_table_joined_to_one_with_its_columns_in_another_order_is_refused_with_what_divides_them(tmp_path, packed):
    """Of the second one the numbers were learned, without a word."""
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerows([["id", "text"], *enumerate(STORIES), ["text", "id"]])
    csv.writer(written, lineterminator="\n").writerows([story, number] for number, story in enumerate(STORIES))
    file = tmp_path / f"all.csv{'.gz' * packed}"
    file.write_bytes(gzip.compress(written.getvalue().encode()) if packed else written.getvalue().encode())
    with pytest.raises(DataError, match="line 8 has the names in another order: ") as caught:
        read(file)
    for command in re.split(" writes those from there, and | the others", caught.value.remedy)[:2]:
        subprocess.run(["bash", "-c", command], check=True)
    assert read(tmp_path / "all.first.csv")[0] == read(tmp_path / "all.rest.csv")[0] == STORIES


def test_the_names_again_are_no_prompt(tmp_path):
    (tmp_path / "all.csv").write_text("seed,prompt\n1,a\nseed,prompt\n2,b\n")
    assert read_prompts(str(tmp_path / "all.csv")) == [{"prompt": "a", "seed": 1}, {"prompt": "b", "seed": 2}]
    (tmp_path / "made.csv").write_text("# made\nseed,prompt\n1,a\n")
    with pytest.raises(DataError, match=r"has 1 line before the names: tail -n \+2 "):
        read_prompts(str(tmp_path / "made.csv"))


QUOTED = ['"So," he said.', "end", 'a "b" c', 'twelve 5", 6" nails', "C:\\new\\", 'a \\"b\\" c', '"', "two\nlines"]


@pytest.mark.parametrize(("delimiter", "packed"), [(",", ""), (";", ""), ("\t", ""), (",", ".gz")])
@pytest.mark.parametrize(("quoting", "count"), [(csv.QUOTE_ALL, 3), (csv.QUOTE_NONNUMERIC, len(QUOTED))])
def test_quotes_after_backslashes_are_refused_with_the_command_that_doubles_them(
    tmp_path, delimiter, quoting, packed, count
):
    """As Spark and MySQL write them; of a table with tabs they were learned, backslashes and all."""
    written = io.StringIO(newline="")
    style = dict(delimiter=delimiter, quoting=quoting, doublequote=False, escapechar="\\", lineterminator="\n")
    csv.writer(written, **style).writerows([["id", "text"], *enumerate(QUOTED[:count])])
    content = written.getvalue().encode()
    file = tmp_path / f"a.csv{packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match="has quotes after backslashes within its values: ") as caught:
        read(file)
    command = caught.value.remedy.removesuffix(" doubles them")
    subprocess.run(["bash", "-c", command.replace("python", sys.executable)], check=True)
    assert read(tmp_path / "a.quoted.csv")[0] == QUOTED[:count]


@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_quotes_after_backslashes_that_r_writes_beside_row_numbers_are_doubled_and_other_backslashes_stay(
    tmp_path, begin
):
    """R's write.table() by default; csv.reader() would drop the backslash of C:\\new, and the mark was a letter."""
    values = ['a "b" c', r"C:\new", '"', "two\r\nlines", "end"]
    rows = ['"{}"\t"{}"\t0'.format(n, value.replace('"', '\\"')) for n, value in enumerate(values, start=1)]
    (tmp_path / "a.csv").write_text(begin + '"text"\t"id"\n' + "\n".join(rows) + "\n", newline="")
    file = tmp_path / "a.csv"
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            read(file)
        command = re.search(r"(?:values: |number, )(.* > (\S+)) ", str(caught.value))
        subprocess.run(["bash", "-c", command[1].replace("python", sys.executable)], check=True)
        file = Path(command[2])
    assert read(file)[0] == values


def test_backslashes_before_quotes_that_open_no_value_are_letters(tmp_path):
    """Such as TeX's umlauts, also beside a value that begins with a quote."""
    values = [r"Schr\"odinger", '"So," he said', r"na\"ive", "end"]
    (tmp_path / "a.tsv").write_text("id\ttext\n" + "".join(f"{n}\t{value}\n" for n, value in enumerate(values)))
    assert read(tmp_path / "a.tsv")[0] == values


@pytest.mark.parametrize("kind", ["excel", "spark", "joined"])
def test_a_command_for_a_file_of_a_folder_says_that_the_old_one_has_to_go(tmp_path, kind):
    """The command was typed, and the same sentence came again, of the old file."""
    write_csv(tmp_path / "b.csv", ["from a table"])
    contents = {
        "excel": "sep=;\nid;text\n1;one\n",
        "spark": 'id,text\n1,"on \\"e"\n',
        "joined": "id,text,text\n1,one,two\n",
    }
    file = tmp_path / "a.csv"
    file.write_text(contents[kind])
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert str(file) in caught.value.fault and caught.value.remedy.endswith("; then move the old file elsewhere")
    command = re.sub(r" (leaves it out|doubles them|gives each a name of its own); then.*", "", caught.value.remedy)
    subprocess.run(["bash", "-c", command.replace("python", sys.executable)], check=True)
    file.unlink()
    assert read(tmp_path)[0] == ['on "e' if kind == "spark" else "one", "from a table"]


@pytest.mark.parametrize(("delimiter", "packed"), [(",", ""), ("\t", ""), (";", ".gz")])
@pytest.mark.parametrize("names", [["text", "label"], ["text"]])
def test_a_table_whose_rows_begin_with_their_numbers_is_refused_with_the_command_that_names_them(
    tmp_path, delimiter, packed, names
):
    """R's write.table() writes them without a name: beside one name, and with tabs, the whole row was learned."""
    out = io.StringIO()
    rows = [[n + 1, story, n % 2][: len(names) + 1] for n, story in enumerate(STORIES)]
    csv.writer(out, delimiter=delimiter, lineterminator="\n").writerows([names, *rows])
    content = out.getvalue().encode()
    file = tmp_path / f"from R.csv{packed}"
    file.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError) as caught:
        read(file)
    command = re.search(r"(\(echo .*) names (it|them)$", caught.value.remedy)[1]
    subprocess.run(["bash", "-c", command], check=True)
    (named,) = tmp_path.glob("from R.named.*")
    assert read(named)[0] == STORIES


@pytest.mark.parametrize("name", ["text", '"text"'])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_with_blanks_after_its_delimiters_is_refused_with_the_command_that_leaves_them_out(
    tmp_path, delimiter, name
):
    """They were learned, with the quotes after them."""
    quoted = ['"' + story.replace('"', '""') + '"' for story in STORIES]
    file = tmp_path / "my table.csv"
    file.write_text("".join(f"{a}{delimiter} {b}\n" for a, b in [("id", name), *enumerate(quoted)]))
    with pytest.raises(DataError, match="has blanks after its (commas|semicolons|tabs): ") as caught:
        read(file)
    command = caught.value.remedy.removesuffix(" leaves them out").replace("python", sys.executable)
    subprocess.run(["bash", "-c", command], check=True)
    assert read(tmp_path / "my table.quoted.csv")[0] == STORIES


@pytest.mark.parametrize(
    ("header", "stories"),
    [
        ("id,text", [" begins with a blank", " so do answers"]),  # as the completions of a prompt
        ("id, text", ["the first line alone", " has one"]),
        ("id, text", []),
    ],
)
def test_blanks_that_are_not_of_the_table_stay(tmp_path, header, stories):
    file = tmp_path / "a.csv"
    file.write_text("\n".join([header, *(f"{n},{story}" for n, story in enumerate(stories))]) + "\n")
    assert read(file)[0] == stories
