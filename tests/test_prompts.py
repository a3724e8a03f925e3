"""python sample.py prompts=FILE results=FILE: many prompts, JSON lines out, and a kill in the middle."""

import csv
import io
import json
import os
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import tiktoken
from conftest import random_gpt, run_here, some

from cli.prompts import read_prompts, read_text, tell_joined, tell_stop, tell_tokens
from common.errors import DataError, SettingsError
from common.files import locked
from common.settings import from_arguments
from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, encode_text, make_tokenizer, train_bpe
from generation.config import SampleConfig
from generation.generate import Decoder
from runs.checkpoint import load_checkpoint, save_checkpoint
from sample import sample
from training.config import TrainConfig

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a model that writes any byte."""
    folder = tmp_path_factory.mktemp("run") / "step_1"
    model = random_gpt(vocab_size=257)
    save_checkpoint(folder, model=model, tokenizer=BYTE, config=TrainConfig(model=model.config))
    return folder


@pytest.fixture
def write(checkpoint, tmp_path):
    """sample() with a file of prompts; the objects of its results."""

    def run(content: str, **settings) -> list[dict]:
        (tmp_path / "prompts").write_text(content, encoding="utf-8")
        files = dict(prompts=str(tmp_path / "prompts"), results=str(tmp_path / "results"))
        sample(SampleConfig(**dict(checkpoint=str(checkpoint), device="cpu", max_new_tokens=9) | files | settings))
        return [json.loads(line) for line in (tmp_path / "results").read_text(encoding="utf-8").split("\n")[:-1]]

    return run


def alone(checkpoint: Path, prompt: str, seed: int, cwd: Path, **settings) -> str:
    """The text that sample.py writes after one prompt."""
    typed = [f"{name}={value}" for name, value in (dict(max_new_tokens=9) | settings).items()]
    done = run_here("sample.py", f"checkpoint={checkpoint}", f"prompt={prompt}", f"seed={seed}", *typed, cwd=cwd)
    assert done.returncode == 0 and done.stdout.startswith(prompt)
    return done.stdout.removeprefix(prompt).removesuffix("\n")


LINES = "ab\n\n  two words \r\nkhmer\u200b\u2028x\nlast"
RECORDS = '{"prompt": "ab", "seed": 7, "id": "x"}\n\n{"prompt": "", "text": "mine"}\r\n{"prompt": "日\\u2028\\ud800本"}'
EXPECTED = {
    LINES: [("ab", 3), ("  two words ", 3), ("khmer\u200b\u2028x", 3), ("last", 3)],
    RECORDS: [("ab", 7), ("", 3), ("日\u2028\ufffd本", 3)],
}


@pytest.mark.slow
@pytest.mark.parametrize("prompts", EXPECTED, ids=["lines", "JSON lines"])
def test_each_prompt_has_the_samples_that_it_has_alone_in_their_order(write, checkpoint, tmp_path, prompts):
    results = write(prompts, seed=3, num_samples=2)
    wanted = [(prompt, seed + number) for prompt, seed in EXPECTED[prompts] for number in range(2)]
    assert [(result["prompt"], result["seed"]) for result in results] == wanted
    for result in results:
        assert result["text"] == alone(checkpoint, result["prompt"], result["seed"], tmp_path)
        assert result["finish"] == "length" and re.fullmatch("[0-9a-f]{8}", result["made_by"])
        assert set(result) - {"id"} == {"prompt", "seed", "text", "finish", "made_by"}
    assert ("id" in results[0]) == (prompts is RECORDS)


def test_results_alone_are_of_one_prompt_and_prompts_alone_go_to_standard_output(checkpoint, tmp_path):
    typed = [f"checkpoint={checkpoint}", "max_new_tokens=9"]
    done = run_here("sample.py", *typed, "prompt=ab", "results=-", "num_samples=3", cwd=tmp_path)
    one = [json.loads(line) for line in done.stdout.split("\n")[:-1]]
    assert [result["seed"] for result in one] == [1, 2, 3] and {result["prompt"] for result in one} == {"ab"}
    done = run_here("sample.py", *typed, "prompts=-", cwd=tmp_path, stdin="ab\n")
    assert json.loads(done.stdout) == one[0]
    done = run_here("sample.py", *typed, "prompts=-", cwd=tmp_path, stdin='{"prompt": "ab", "seed": null}\n')
    assert json.loads(done.stdout) == one[0]  # an empty cell, as in a table


@pytest.mark.slow
@pytest.mark.parametrize("steps", some([3, 30, 31, 40], 2))
@pytest.mark.parametrize("cut", [0, 5])
def test_a_killed_run_goes_on_to_the_same_bytes(write, tmp_path, monkeypatch, steps, cut):
    prompts = "".join(f"prompt {number}\n" for number in range(11))
    settings = dict(num_samples=2, batch_size=4, stop=["\x0f"])
    write(prompts, **settings)
    file = tmp_path / "results"
    whole = file.read_bytes()
    file.unlink()
    calls, step = [], Decoder.step

    def killed(self, tokens):
        calls.append(1)
        if len(calls) > steps:
            raise KeyError("killed")
        return step(self, tokens)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Decoder, "step", killed)
        write(prompts, **settings)
    begun = file.read_bytes()
    file.write_bytes(begun[: len(begun) - cut])  # the kill came while a line was written
    assert whole.startswith(begun) and len(begun) < len(whole)
    write(prompts, **settings)
    assert file.read_bytes() == whole
    with mock.patch.object(Decoder, "step", side_effect=AssertionError("nothing is left to write")):
        write(prompts, **settings)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"seed": 2}, {"num_samples": 1}, {"max_new_tokens": 8}, {"stop": ["x"]}, {"top_k": 3}],
)
def test_results_of_another_command_are_neither_continued_nor_overwritten(write, tmp_path, change):
    write("ab\ncd\n", num_samples=2)
    before = (tmp_path / "results").read_bytes()
    with pytest.raises(
        SettingsError, match=r"results=.* line \d is no result of these prompts and settings: name a new"
    ):
        write("ab\ncd\n", **{"num_samples": 2} | change)
    with pytest.raises(SettingsError, match="line 3 is no result"):
        write("ab\nce\n", num_samples=2)
    assert (tmp_path / "results").read_bytes() == before


@pytest.mark.parametrize("line_end", ["", "\n"])
def test_a_file_that_is_no_results_is_not_overwritten(write, tmp_path, line_end):
    (tmp_path / "results").write_text(f"my only notes{line_end}")
    with pytest.raises(SettingsError, match="results=.* line 1 is no result of these prompts and settings: name a new"):
        write("ab\n")
    assert (tmp_path / "results").read_text() == f"my only notes{line_end}"


@pytest.mark.parametrize(
    "edited",
    [
        '{"prompt": "ab", "id": 1}\n{"prompt": "cd", "id": 22}\n',
        '{"prompt": "ab", "id": 1}\n{"prompt": "cd"}\n',
        '{"prompt": "ab", "id": 1}\n{"prompt": "cd", "id": 2, "label": "x"}\n',
        '{"prompt": "ab", "id": 1}\n{"prompt": "cd", "id": 2.0}\n',
    ],
)
def test_results_whose_prompts_have_other_fields_by_now_are_not_continued(write, tmp_path, edited):
    write('{"prompt": "ab", "id": 1}\n{"prompt": "cd", "id": 2}\n{"prompt": "ef"}\n', batch_size=1)
    with pytest.raises(SettingsError, match="line 2 is no result of these prompts and settings"):
        write(edited + '{"prompt": "ef"}\n', batch_size=1)


def test_results_with_any_fields_are_continued(write, tmp_path):
    # With NaN, half a surrogate, a long integer, names in another order, and those that a sample replaces.
    prompts = (
        '{"id": NaN, "prompt": "ab", "text": "gold"}\n{"l": [{"b": 1, "a": 2.0}], "prompt": "cd", "made_by": "me"}\n'
        f'{{"prompt": "ef", "id": "\\udcb2", "n": {"7" * 5000}, "seed": 3}}\n'
    )
    write(prompts)
    whole = (tmp_path / "results").read_bytes()
    (tmp_path / "results").write_bytes(whole[:-9])
    write(prompts, batch_size=1)
    assert (tmp_path / "results").read_bytes() == whole


def test_results_that_another_process_writes_are_refused(write, tmp_path):
    (tmp_path / "link").symlink_to("results")
    with (
        locked(tmp_path / ".results.lock"),
        pytest.raises(SettingsError, match="another process, or by one that Ctrl-Z halted"),
    ):
        write("ab\n", results=str(tmp_path / "link"))
    assert not (tmp_path / "results").exists()
    write("ab\n")
    assert {file.name for file in tmp_path.iterdir()} == {"prompts", "results", "link"}


REFUSED = {
    "": "prompts={prompts} has no prompts: write one a line",
    " \n\r\n": "prompts={prompts} has no prompts",
    '{"prompt": "a"}\n\n{"prompt": ': "prompts={prompts} line 3 is not JSON",
    '{"prompt": 5}\n': 'prompts={prompts} line 1 has no text in the field prompt: write it as {"prompt"',
    '{"text": "a"}\n': "prompts={prompts} line 1 has no text in the field prompt",
    '{"prompt": "a", "seed": -1}': "prompts={prompts} line 1 has seed=-1: choose a whole number",
    '{"prompt": "a", "seed": 4294967296}': "prompts={prompts} line 1 has seed=4294967296: choose a whole number",
    '{"prompt": "a", "seed": "1"}': 'prompts={prompts} line 1 has seed="1": write it without quotes',
}


@pytest.mark.parametrize("content", REFUSED)
def test_prompts_that_cannot_be_read_are_refused_with_their_line(write, tmp_path, content):
    with pytest.raises(SettingsError) as refused:
        write(content)
    said = REFUSED[content].replace("{prompts}", str(tmp_path / "prompts"))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert not (tmp_path / "results").exists()


def test_seeds_of_samples_that_lead_beyond_the_last_one_are_refused_before_the_first_sample(write, tmp_path):
    with pytest.raises(SettingsError, match=r"num_samples=2 leads a seed of the prompts beyond 2\^32 - 1: lower one"):
        write('{"prompt": "a"}\n{"prompt": "a", "seed": 4294967295}', num_samples=2)
    assert not (tmp_path / "results").exists()
    assert len(write('{"prompt": "a", "seed": 4294967295}')) == 1


ROWS = [{"prompt": 'say "a, b"\nor c', "seed": 7, "id": "x"}, {"prompt": " z", "id": "y"}]


def table(delimiter: str) -> str:
    """ROWS as CSV with a header, quoted by Python's own writer."""
    written = io.StringIO(newline="")
    rows = csv.DictWriter(written, ["id", "prompt", "seed"], delimiter=delimiter)
    rows.writeheader()
    rows.writerows(ROWS)
    return written.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", table(","), ROWS),
        ("a.CSV", table(";"), ROWS),
        ("a.tsv", table("\t"), ROWS),
        ("a.json", json.dumps(ROWS, indent=1), ROWS),
        ("a", json.dumps(ROWS), ROWS),
        ("a.json", json.dumps(["one\ntwo", "three"]), [{"prompt": "one\ntwo"}, {"prompt": "three"}]),
        ("a.txt", "[Verse 1]\n[1] and\n", [{"prompt": "[Verse 1]"}, {"prompt": "[1] and"}]),
        ("a.txt", "prompt,id\nab,1\n", [{"prompt": "prompt,id"}, {"prompt": "ab,1"}]),
    ],
)
def test_prompts_are_read_in_the_format_of_their_file(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert read_prompts(str(tmp_path / name)) == expected


def test_strings_in_json_lines_are_prompts_and_quoted_lines_of_a_text_are_not(tmp_path):
    for name, expected in {"a.jsonl": ["one\ntwo", "three"], "a.txt": ['"one\\ntwo"', '"three"']}.items():
        (tmp_path / name).write_text('"one\\ntwo"\n"three"\n')
        assert [prompt["prompt"] for prompt in read_prompts(str(tmp_path / name))] == expected


def test_seeds_of_a_table_may_have_a_fraction_of_zero_as_pandas_writes_them_beside_an_empty_one(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,seed\nab,3.0\ncd,\n")
    assert read_prompts(str(tmp_path / "a.csv")) == [{"prompt": "ab", "seed": 3}, {"prompt": "cd"}]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "question,id\nab,1\n", "a.csv has no column prompt, but question, id: call a column prompt, or"),
        ("a.csv", "prompt,seed\nab,x\n", 'a.csv line 2 has seed="x": choose a whole number'),
        ("a.csv", "prompt\nab, cd\n", "a.csv line 2 has 2 values, and the first line 1 name: quote"),
        ("a.json", '["a", 3]', "a.json record 2 is not a JSON object"),
        ("a.json", '[{"text": "a"}]', "a.json record 1 has no text in the field prompt"),
        ("a.json", "[]", "a.json has no prompts: add a record"),
        ("a.csv", "prompt,seed\n", "a.csv has no prompts: add a record"),
        ("a.csv", "", "a.csv has no prompts: add a record"),
        ("a.csv", "sep=;\nid;prompt\n1;ab\n", "a.csv begins with a line for Excel, sep=: tail -n +2"),
        ("a.csv", "prompt,prompt\nab,cd\n", "a.csv has 2 columns called prompt: (echo prompt,prompt2;"),
        ("a.jsonl", '{"prompt": "a", "prompt": "b"}\n', "a.jsonl line 1 has prompt twice: leave one out"),
        ("a.jsonl", '{"prompt": "a"},\n{"prompt": "b"}\n', "a.jsonl line 1 is not JSON (it ends in a comma): sed"),
        ("a.jsonl", "{'prompt': 'a'}\n", "a.jsonl line 1 is not JSON (values as Python prints them): write"),
        ("a.jsonl", "Once upon\n", "a.jsonl line 1 is not JSON (Expecting value"),
        pytest.param(
            "a",
            f'{{"prompt": "a", "x": {DEEP}}}\n',
            "a line 1 is not JSON (its brackets are nested too deeply for Python)",
            id="deep",
        ),
        ("a.json", '[\n{"prompt": "a"},\n]\n', "a.json line 2 is not JSON (a comma after the last value): remove"),
        ("a.json", '{\n"prompts": ["a", "b"]\n}\n', "a.json line 1 is not JSON (it ends within a record): jq -c ."),
    ],
)
def test_records_that_are_no_prompts_are_refused_with_their_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(message)):
        read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "a"}, "prompt=a and prompts=.* are given: choose one"),
        ({"interactive": True}, "prompts=.* and interactive=true are given: choose one"),
        ({"prompts": "/no/where"}, "prompts=/no/where cannot be read .No such file"),
        ({"results": "/no/where"}, "results=/no/where cannot be written .No such file.*: name another place"),
        ({"results": "/dev/full"}, "results=/dev/full cannot be written .not a regular file.: name another place"),
    ],
)
def test_files_that_cannot_be_are_refused_by_name(write, settings, message):
    with pytest.raises(SettingsError, match=message):
        write("ab\n", **settings)


EQUAL = {
    "lines": ("ab\nab\nc\nab\n", {}, "2 samples of 4 repeat another of the same prompt and seed: num_samples=N"),
    "seeds that meet": (
        '{"prompt": "ab", "seed": 1}\n{"prompt": "ab", "seed": 2}\n',
        {"num_samples": 2},
        "1 sample of 4 repeats another",
    ),
    "greedy": ("ab\n", {"num_samples": 3, "temperature": 0.0}, "2 samples of 3 repeat .* raise temperature"),
    "the likeliest": ("ab\nc\n", {"num_samples": 2, "top_k": 1}, "2 samples of 4 repeat .* leave out top_k=1"),
    "records that meet": (
        '{"prompt": "ab", "seed": 1}\n{"prompt": "ab", "seed": 2}\n',
        {"num_samples": 2},
        "of the same prompt and seed: write each prompt once, or records whose seeds are at least num_samples=2 apart",
    ),
    "greedy twice": ("ab\nab\n", {"temperature": 0.0, "top_k": 1}, "own; and raise temperature; and leave out top_k=1"),
    "other seeds": ('{"prompt": "ab", "seed": 1}\n{"prompt": "ab", "seed": 2}\n', {}, ""),
    "other prompts": ("ab\nabc\n", {"num_samples": 2}, ""),
}


@pytest.mark.parametrize("name", EQUAL)
def test_samples_that_repeat_others_are_counted(write, capsys, name):
    content, settings, told = EQUAL[name]
    results = write(content, **settings)
    repeated = len(results) - len({(result["prompt"], result["text"]) for result in results})
    said = capsys.readouterr().err
    assert ("repeat" in said) == bool(told) == bool(repeated)
    assert re.search(told, said) and (not told or f"{repeated} sample" in said)


@pytest.mark.slow
def test_signs_of_a_prompt_that_are_read_as_letters_are_told(write, checkpoint, capsys):
    write(f"{END_OF_TEXT}ab\nab\\n\nc {END_OF_TEXT}\n")
    assert f"2 prompts with {END_OF_TEXT}, which is read as letters: leave it out" in capsys.readouterr().err
    for prompt, told in (("ab\\nc", True), ("ab\nc", False), ("\\d", False)):
        sample(SampleConfig(checkpoint=str(checkpoint), device="cpu", max_new_tokens=1, prompt=prompt))
        said = capsys.readouterr()
        assert ("two letters" in said.err) == told and said.out.startswith(prompt)


GPT2_LIKE = tiktoken.Encoding(
    "two_lines",
    pat_str=r" ?\p{L}+|\s+(?!\S)|\s+",  # GPT-2's, but for digits and signs
    mergeable_ranks={bytes([byte]): byte for byte in range(256)} | {b"\n\n": 256},
    special_tokens={END_OF_TEXT: 257},
)


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (train_bpe(["ab ab\tcd\tcd ж ж ж\n\n" * 50], 270), ending, told)
        for ending, told in {"": False, "ab": False, "ab ": True, "ab  ": True, "ab\t": True, "ab\n": False}.items()
    ]
    + [(BYTE, ending, False) for ending in ("ab ", "ab\n\n", "\u3000")]
    # It divides "\n\n" into two tokens where a word follows.
    + [(GPT2_LIKE, ending, told) for ending, told in {"ab\n\n": True, "ab\n": False, "ab ": False}.items()],
)
def test_white_space_at_a_prompts_end_is_told_if_a_word_after_it_has_other_tokens(tokenizer, text, expected, capsys):
    tell_joined(tokenizer, [text, "ab"])
    told = capsys.readouterr().err
    assert bool(told) == expected and (not told or told.startswith("1 prompt with white space at the end"))
    # The words of the text, in tokens: is the prompt the beginning of any of them?
    tokens = encode_text(tokenizer, text).tolist()
    kept = [encode_text(tokenizer, text + word).tolist()[: len(tokens)] == tokens for word in ("ab", "cd", "ж")]
    assert all(kept) != expected
    if expected:  # the remedy
        shorter = encode_text(tokenizer, text[:-1]).tolist()
        assert any(
            encode_text(tokenizer, text + word).tolist()[: len(shorter)] == shorter for word in ("ab", "cd", "ж")
        )


@pytest.mark.parametrize(
    ("typed", "told"),
    {
        "stop=[\\n]": "stop= has \\n as two letters: in a list '[\"\\n\"]' has a line end.\n",
        **dict.fromkeys(("stop=\\n", 'stop=["\\n"]', 'stop=["[S2]"]', "stop=[a,b]", "stop=[]", "stop=[S2]"), ""),
    }.items(),
)
def test_a_stop_that_is_read_as_another_text_than_it_looks_is_told(typed, told, capsys):
    tell_stop(from_arguments(SampleConfig, [typed]).stop)
    assert capsys.readouterr().err == told


def test_names_of_an_imported_tokenizers_special_tokens_are_told_to_be_letters(capsys):
    special = {END_OF_TEXT: 256, "<|turn|>": 257, "<|system|>": 258}
    ranks = {bytes([byte]): byte for byte in range(256)}
    tokenizer = tiktoken.Encoding("theirs", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special)
    tell_tokens(tokenizer, ["a <|turn|> b<|system|>", "<|system|>", END_OF_TEXT, "turn"])
    told = "2 prompts with <|turn|>, which is read as letters: docs/interop.md makes tokens of such names in Python.\n"
    assert capsys.readouterr().err == told
    tell_tokens(BYTE, [END_OF_TEXT])  # which has a note of its own
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    {
        "ab\ncd": "",
        "ab\ncd\n": "ends in a line end, so the sample begins a line",
        "ab\r\ncd": r"has \r at line ends",
        "ab\r\ncd\r\n": r"has \r at line ends",
        "ab\rcd\r": r"has \r at line ends",
    }.items(),
)
def test_the_command_that_removes_a_files_line_ends_gives_the_prompt_meant(checkpoint, tmp_path, content, said):
    file = tmp_path / "my prompt.txt"
    file.write_bytes(content.encode())
    settings = [f"checkpoint={checkpoint}", "device=cpu", "max_new_tokens=1"]
    done = run_here("sample.py", *settings, f"prompt_file={file}", cwd=tmp_path)
    assert said in done.stderr and bool(said) == bool(done.stderr)
    assert done.stdout.encode().startswith(content.encode())  # it is read as it is
    if said:
        typed = re.search(r'prompt=("\$\(.*\)") ', done.stderr)[1]
        meant = subprocess.run(["bash", "-c", f"printf %s {typed}"], capture_output=True, check=True).stdout
        assert meant == b"ab\ncd"


def test_line_ends_of_windows_in_records_are_counted(write, capsys):
    write('{"prompt": "a\\r\\nb"}\r\n{"prompt": "a\\nb"}\r\n')
    assert r"1 prompt with \r at line ends, which few texts have: write \n alone." in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_a_pipe_is_answered_with_the_name_of_standard_input(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match="not a regular file.*, or - for standard input"):
        read_text("prompt_file", str(tmp_path / "pipe"))


def test_prompts_with_letters_in_parts_are_counted_and_kept(write, capsys):
    (result, _) = write("e\u0301t\u00e9\n\u00e9t\u00e9\n")
    assert "1 prompt with letters in parts (NFD), e and a mark for é, which few texts have" in capsys.readouterr().err
    assert result["prompt"] == "e\u0301t\u00e9"


def test_prompts_with_signs_that_nobody_sees_are_counted_and_kept(write, capsys):
    (result, _) = write("she has\u00a0a\u00a0ball\nshe has a ball\n")
    assert "1 prompt with soft hyphens, zero-width spaces, direction marks or no-break " in capsys.readouterr().err
    assert result["prompt"] == "she has\u00a0a\u00a0ball"


def test_prompts_longer_than_the_context_are_counted(write, checkpoint, capsys):
    limit = load_checkpoint(checkpoint).model.longest_context
    write(f"{'a' * (limit - 1)}\n{'b' * limit}\n")  # beside <|endoftext|>
    told = f"1 prompt with more tokens than the {limit} that the model sees: only the end of each is read.\n"
    assert capsys.readouterr().err == told


def test_fields_that_a_sample_replaces_are_told_and_others_kept(write, capsys):
    rows = [{"prompt": "a", "text": "the true ending", "id": 1}, {"prompt": "b", "finish": "good", "made_by": "me"}]
    results = write("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "c", "note": "mine"}]))
    said = "2 prompts with text, finish, made_by, in whose place a result has its sample's: "
    assert said in capsys.readouterr().err
    assert (results[0]["id"], results[2]["note"]) == (1, "mine") and results[0]["text"] != "the true ending"
    write('{"prompt": "d", "id": 2}', results="-")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"prompt": "a", "temperature": 0.1}\n{"prompt": "b", "stop": ["x"], "top_k": 1}',
            "2 prompts with temperature, top_k, stop of",
        ),
        ('[{"prompt": "a", "max_tokens": 3, "min_p": 0.5}, {"prompt": "b"}]', "1 prompt with min_p, max_tokens of"),
        ('{"prompt": "a", "max_tokens": 9, "temperature": 0.8, "top_k": null, "num_samples": 1}', ""),
        ('{"prompt": "a", "temp": "mild", "seed": 3}', ""),
    ],
)
def test_settings_of_sampling_in_a_record_are_told_to_be_the_commands(write, tmp_path, content, said, capsys):
    results = write(content)
    told = capsys.readouterr().err
    assert told.startswith(said) and bool(told) == bool(said)
    (tmp_path / "results").unlink()
    assert results[0]["text"] == write(json.dumps({"prompt": "a", "seed": results[0]["seed"]}))[0]["text"]


def test_what_is_not_utf8_in_prompts_is_told_and_other_fields_stay(write, checkpoint, capsys):
    results = write('{"prompt": "caf\\udce9", "id": "x\\udcb2"}\n{"prompt": "b\\ud83d", "id": 2}')
    assert [(each["prompt"], each["id"]) for each in results] == [("caf\ufffd", "x\udcb2"), ("b\ufffd", 2)]
    assert "2 bytes of prompts outside UTF-8, read as U+FFFD." in capsys.readouterr().err
    # Typed: Python has a shell's byte \xe9 as U+DCE9.
    typed = dict(checkpoint=str(checkpoint), device="cpu", max_new_tokens=1)
    sample(SampleConfig(prompt="caf\udce9", results="-", **typed))
    said = capsys.readouterr()
    assert json.loads(said.out)["prompt"] == "caf\ufffd" and said.err.startswith("1 byte of prompts outside UTF-8")
    # An ASCII locale has the bytes of letters apart.
    letters = "it’s 日本"
    sample(SampleConfig(prompt=letters.encode().decode("ascii", "surrogateescape"), results="-", **typed))
    said = capsys.readouterr()
    assert json.loads(said.out)["prompt"] == letters and "UTF-8" not in said.err
    with mock.patch("builtins.input", side_effect=["caf\udce9", "/quit"]):
        sample(SampleConfig(interactive=True, **typed))
    said = capsys.readouterr()
    assert "caf\ufffd" in said.out and said.err.startswith("1 byte of prompts outside UTF-8")
    # No text of a model has such a byte.
    for settings, make in ((dict(stop="\udce9"), SampleConfig), (dict(sample_prompt="\udce9"), TrainConfig)):
        with pytest.raises(SettingsError, match="is not text in UTF-8"):
            make(**settings)
