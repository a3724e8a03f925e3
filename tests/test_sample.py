"""python sample.py: streamed text, many prompts at once, a conversation, and refusals."""

import io
import os
import re
import signal
import subprocess
import sys
from math import inf, nan
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import first_of, random_gpt, run_here, started

from cli.sample import run_line
from common.errors import SettingsError, format_value
from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, make_tokenizer
from generation.config import SampleConfig
from generation.generate import Chunk, Decoder
from runs.checkpoint import Progress, save_checkpoint
from sample import sample
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A run with one checkpoint, of a model that writes any byte."""
    directory = tmp_path_factory.mktemp("runs") / "outputs" / "day" / "run"
    model = random_gpt(vocab_size=257)
    config = TrainConfig(model=model.config)
    save_checkpoint(directory / "checkpoints/step_1", model=model, tokenizer=BYTE, config=config, progress=Progress(1))
    for name in ("last", "best"):
        (directory / "checkpoints" / name).symlink_to("step_1")
    return directory


@pytest.fixture
def say(run_directory, capsys):
    """sample() with these settings; what it printed."""

    def run(**settings) -> str:
        sample(SampleConfig(checkpoint=str(run_directory), device="cpu", **{"max_new_tokens": 12} | settings))
        return capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_samples_come_in_their_order_each_as_if_it_were_the_only_one_and_the_seed_decides(say, batch_size):
    together = say(prompt="ab", num_samples=4, seed=5, batch_size=batch_size, stop=["\x0f"])
    alone = [say(prompt="ab", seed=5 + number, stop=["\x0f"]) for number in range(4)]
    assert together == "".join(f"--- sample {n + 1} of 4, seed={5 + n}\n{text}" for n, text in enumerate(alone))
    assert len(set(alone)) == 4 and all(text.startswith("ab") for text in alone)
    assert say(prompt="ab", temperature=1e-6) == say(prompt="ab", temperature=0.0) != alone[0]


def test_the_newest_run_is_named_beside_the_text(run_directory, monkeypatch, capsys):
    monkeypatch.chdir(run_directory.parents[2])
    sample(SampleConfig(device="cpu", max_new_tokens=1))
    said = capsys.readouterr()
    assert said.err == f"{Path('outputs/day/run/checkpoints/step_1')}, step 1\n" and "step_1" not in said.out


@pytest.mark.slow
def test_a_prompt_of_any_kind_is_continued_and_of_a_long_one_the_tail_saying_so(say, monkeypatch):
    assert say(prompt="x" * 30 + "the last sixteen").startswith("x" * 30 + "the last sixteen")
    for prompt in ("\ud800", "\x00", " " * 5000 + "a", "👩‍🚀" * 50, END_OF_TEXT * 3, "\ufeff"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), errors="replace"))
        say(prompt=prompt, max_new_tokens=3)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    say(prompt="x" * 46)
    assert "has 47 tokens, but the model sees 16: only its end is read" in errors.getvalue()


def test_a_model_that_keeps_a_state_reads_a_prompt_of_any_length_to_its_end(tmp_path, capsys):
    model = random_gpt(attention="delta", vocab_size=257)
    config = TrainConfig(model=model.config)
    save_checkpoint(tmp_path / "step_1", model=model, tokenizer=BYTE, config=config, progress=Progress(1))
    prompt = "the cat sat on the mat and the dog ran far away"  # 47 letters; texts in training had 16
    tokens = [256, *prompt.encode()]
    for _ in range(4):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    settings = dict(checkpoint=str(tmp_path / "step_1"), device="cpu", temperature=0, max_new_tokens=4)
    sample(SampleConfig(**settings, prompt=prompt))
    said = capsys.readouterr()
    assert "only its end" not in said.err
    assert said.out == f"{prompt}{bytes(tokens[48:]).decode(errors='replace')}\n"


def test_weights_are_cast_once_to_the_precision_asked_for(say, monkeypatch):
    seen, hidden = [], Decoder._forward
    note = lambda self, *given: seen.append(self.model.lm_head.weight.dtype) or hidden(self, *given)  # noqa: E731
    monkeypatch.setattr(Decoder, "_forward", note)
    for precision in ("auto", "bf16", "fp16", "fp32"):
        say(precision=precision, max_new_tokens=1)
    assert seen == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


# A process of its own: pipes, terminals, signals.


def command(run_directory: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "sample.py"), f"checkpoint={run_directory}", "device=cpu", *overrides]


# Words in twelve scripts with the letters of their writing that have no width, join, or order a line.
SCRIPTS = [
    "ខ្មែរ\u200bសរសេរ\u200bដោយ\u200bគ្មាន",  # Khmer, a zero-width space between words
    "می\u200cنویسم",  # Persian, a non-joiner
    "\u202bעברית (abc)\u202c\u200f!",  # Hebrew, embedded
    "العربية\u061c 12\u2066x\u2069",
    "क्\u200dष नमस्ते",  # Devanagari, a joiner
    "\ufeff日本語、ｶﾅ",
    "ไทยไม่มีวรรค",
    "한국어 \u1112\u1161\u11ab",  # also by its parts
    "Việt: e\u0302\u0301, naïve\u2060x",
    "👩\u200d🔬🏽 \U000e0067",
    "мир\u00ad-\u2028мир",
    "tab\t, return\r, bell\a, \x9b31m, \x7f",
]
ACTS = {"\u202b": "<U+202B>", "\u202c": "<U+202C>", "\u200f": "<U+200F>", "\u061c": "<U+061C>", "\u2066": "<U+2066>"}
ACTS |= {"\u2069": "<U+2069>", "\u2028": "<U+2028>", "\r": "␍", "\a": "␇", "\x9b": "<U+009B>", "\x7f": "␡"}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_the_model_wrote_reaches_a_pipe_byte_for_byte_and_a_terminal_with_signs(
    is_terminal, run_directory, tmp_path, monkeypatch
):
    def wrote(model, tokenizer, prompts, seeds, params):
        for number in range(len(prompts)):
            yield from (Chunk(number, text) for text in [*SCRIPTS, "\ufffd"])

    monkeypatch.setattr("cli.sample.generate", wrote)
    text = "".join(SCRIPTS) + "\ufffd"
    (tmp_path / "prompt").write_text(text, encoding="utf-8", newline="")
    shown = "".join(ACTS.get(letter, letter) for letter in text) if is_terminal else text
    for typed in (f"prompt={text}", "prompt_file=prompt"):
        read = shown if typed[6] == "=" else shown.removeprefix("\ufeff")
        done = run_here("sample.py", f"checkpoint={run_directory}", typed, cwd=tmp_path, is_terminal=is_terminal)
        assert (done.returncode, done.stdout) == (0, f"{read}{shown}\n")
    done = run_here("sample.py", f"checkpoint={run_directory}", "num_samples=2", cwd=tmp_path, is_terminal=is_terminal)
    assert done.stdout == "".join(f"--- sample {n} of 2, seed={n}\n{shown}\n" for n in (1, 2))


@pytest.mark.long
@pytest.mark.parametrize("locale", first_of("C.UTF-8", "C", "en_US.ISO-8859-1"))
def test_a_pipe_gets_nothing_but_prompt_and_text_and_nothing_is_said_when_its_reader_leaves(run_directory, say, locale):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    pipes["env"] = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    process = subprocess.Popen(command(run_directory, "prompt_file=-", "max_new_tokens=99"), **pipes)
    written, complaints = process.communicate("a\x1bé\r\n".encode(), timeout=60)
    # The one note is of the prompt's line end, and on the other stream.
    assert process.returncode == 0 and complaints.startswith(b"prompt_file=-") and complaints.count(b"\n") == 1
    assert b"\\r" in complaints and b"\x1b" not in complaints
    assert written.decode() == say(prompt="a\x1bé\r\n", max_new_tokens=99) and written.startswith("a\x1bé\r\n".encode())
    process = subprocess.Popen(command(run_directory, "max_new_tokens=5000"), **pipes)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


@pytest.mark.slow
def test_ctrl_c_ends_a_text_in_one_line(run_directory):
    # Greedily it never ends.
    with started(command(run_directory, "max_new_tokens=1000000", "temperature=0")) as process:
        process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints.decode()) == (130, "stopped by Ctrl-C\n")


@pytest.mark.slow
def test_a_prompt_that_is_no_text_is_refused_and_broken_letters_are_told(run_directory, say, tmp_path, capsys):
    (tmp_path / "broken").write_bytes(b"line 1\nab\xff\xfe")
    sample(SampleConfig(checkpoint=str(run_directory), prompt_file=str(tmp_path / "broken"), max_new_tokens=3))
    said = capsys.readouterr()
    assert said.out.startswith("line 1\nab\ufffd\ufffd")
    lost = "2 bytes outside UTF-8, first in line 2, byte offset 9"
    assert f"prompt_file={tmp_path}/broken: U+FFFD stands for {lost}.\n" == said.err
    for content, problem in {
        "Once upon a time".encode("utf-16"): "is not text in UTF-8, but in UTF-16: “Once upon a time”: iconv",
        b"%PDF-1.7\n\xe2\xe3\xcf\xd3": "is a PDF: pdftotext",
        b"one line\n" * 99 + b"\0": "is not text: it has a NUL, first in line 100, byte offset 891: tr -d",
    }.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(SettingsError, match=re.escape(f"prompt_file={tmp_path}/file {problem}")):
            say(prompt_file=str(tmp_path / "file"))
        done = run_here("sample.py", f"checkpoint={run_directory}", "prompt_file=-", cwd=tmp_path)
        assert done.returncode == 0, "an empty prompt"


# A conversation.


@pytest.mark.slow
def test_settings_can_be_changed_on_the_fly_and_a_bad_value_changes_nothing(say, monkeypatch):
    lines = "ab|/seed 9|ab||/top_p 3|/temprature 1|//x|/stop [q]|/stop [[q]]|/top_k many|/help"
    lines += "|/stop []|/seed=1|ab"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines.replace("|", "\n")))
    shown = say(interactive=True, prompt="")
    texts = {seed: say(prompt="ab", seed=seed, stop=[]) for seed in (1, 9)}
    assert shown.count(texts[1]) == 2 and shown.index(texts[1]) < shown.index(texts[9])
    assert say(prompt="/x", seed=9) in shown and "\n/stop [q]\n" in shown and "Ctrl-D or /quit ends the" in shown
    for said in ("top_p=3 must be above 0", "\n/temperature 0.8\n", "is not a list of texts"):
        assert said in shown
    assert "top_k=many is not a whole number, or null" in shown and shown.count("\n/top_k null\n") == 2


def test_a_line_of_a_session_is_the_setting_that_was_typed_and_its_remedy_a_line_too():
    config = SampleConfig(num_samples=3)
    for line, stop in {"stop a=b": ["a=b"], "stop=a b": ["a b"], "stop = a": ["a"], "stop null": []}.items():
        assert run_line(line, config).stop == stop
    assert run_line("temperature = 0.5", config).temperature == 0.5
    for line, remedy in {"num_samples 0": "/num_samples 1", "seed -1": "/seed 1", "top_k 0": "/top_k null"}.items():
        with pytest.raises(SettingsError, match=f": the default is {remedy}\\.$"):
            run_line(line, config)


def test_ctrl_c_ends_a_text_but_not_the_session_and_the_next_line_may_continue_it(say, monkeypatch):
    calls, step = [], Decoder.step

    def interrupted(self, tokens):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(self, tokens)

    monkeypatch.setattr(Decoder, "step", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n/temperature\n\n"))
    begun, _, continued = say(interactive=True, temperature=0).split("> ")[1:4]
    assert begun == say(prompt="ab", temperature=0, max_new_tokens=5) and continued.startswith(begun.rstrip("\n"))


@pytest.mark.slow
def test_an_empty_line_continues_the_first_sample_a_prompt_may_have_lines_and_quit_ends_the_session(say, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\\\n  c\\\n\n\n/quit\nnever read"))
    shown, first = say(interactive=True, num_samples=2, stop=["\x0f"]), say(prompt="ab\n  c\n", stop=["\x0f"])
    again = say(prompt=first.removesuffix("\n"), stop=["\x0f"])
    assert "--- sample 1 of 2, seed=1\n" + again in shown and shown.count(first[:-1]) == 3
    assert shown.endswith("> ") and sys.stdin.read() == "never read"


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([Chunk(0, "", "end")], "1 empty sample: the model ends the document after this prompt.\n"),
        (
            [Chunk(0, "", "stop"), Chunk(1, "", "stop"), Chunk(2, "a", "end")],
            "2 empty samples: a text of stop comes first.\n",
        ),
        ([Chunk(0, ""), Chunk(0, "a"), Chunk(0, "", "end")], ""),
    ],
)
def test_an_empty_sample_is_told_with_its_reason(chunks, told, run_directory, monkeypatch, capsys):
    """As the continuation of a text that the model has ended, by an empty line of a session."""
    monkeypatch.setattr("cli.sample.generate", lambda *_, **__: chunks)
    sample(SampleConfig(checkpoint=str(run_directory), device="cpu", num_samples=1 + chunks[-1].sample))
    assert capsys.readouterr().err == told


def test_any_number_of_samples_takes_the_memory_of_one_batch(run_directory, monkeypatch):
    monkeypatch.setattr("cli.sample.generate", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # it had begun
        sample(SampleConfig(checkpoint=str(run_directory), num_samples=10**9))


# What is refused.

OUT_OF_RANGE = dict(temperature=(-0.1, 1e-45, 1e-7, nan, inf), top_k=(0,), top_p=(0.0, 2.0, nan), min_p=(1.5, -0.1))
OUT_OF_RANGE |= dict(seed=(-1, 2**32, 2**63 - 1), num_samples=(0,), max_new_tokens=(0,))
OUT_OF_RANGE |= dict(batch_size=(0,))
REFUSED = [
    *(
        ({name: value}, f"{name}={format_value(value)} must be")
        for name, values in OUT_OF_RANGE.items()
        for value in values
    ),
    ({"stop": [""]}, "stop has an empty string, which every text contains: remove it"),
    ({"prompt": "a", "prompt_file": "b"}, "prompt=a and prompt_file=b are given: choose one"),
    ({"interactive": True, "prompt": "a"}, "prompt=a and interactive=true are given: choose one"),
    ({"precision": "bf17"}, "precision=bf17 is not known: choose one of auto, fp32, bf16, fp16"),
    ({"prompt_file": "/dev/zero"}, "cannot be read (not a regular file): give one that"),
    ({"prompt_file": "{tmp}/no"}, "cannot be read (No such file"),
    ({"prompt_file": "~nobody-here/a"}, "prompt_file=~nobody-here/a names no user of this machine"),
    ({"device": "gpu"}, "device=gpu is not a device"),
    ({"checkpoint": "{tmp}/no"}, "does not exist"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[str(wrong)[1:-1] for wrong, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(wrong, message, run_directory, tmp_path):
    wrong = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in wrong.items()}
    with pytest.raises(SettingsError, match=re.escape(message)) as refused:
        sample(SampleConfig(**{"checkpoint": str(run_directory), "device": "cpu"} | wrong))
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_whose_logits_are_not_finite_is_refused_and_so_is_a_batch_that_does_not_fit(
    run_directory, tmp_path, monkeypatch
):
    model = random_gpt(vocab_size=257)
    model.blocks[0].mlp.down_proj.weight.data.fill_(1e38)
    save_checkpoint(tmp_path / "step_2", model=model, tokenizer=BYTE, config=TrainConfig(model=model.config))
    for precision, remedy in (("auto", "take another one"), ("fp16", "set precision=bf16")):
        with pytest.raises(SettingsError, match=rf"step_2 is unusable \(its logits are not finite\): {remedy}"):
            sample(SampleConfig(checkpoint=str(tmp_path / "step_2"), precision=precision))
    done = run_here("sample.py", f"checkpoint={run_directory}", "num_samples=0", cwd=tmp_path)
    said = "error: num_samples=0 must be at least 1: correct it, or leave it out for num_samples=1.\n"
    assert (done.returncode, done.stderr) == (1, said)

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(Decoder, "_forward", out_of_memory)
    with pytest.raises(SettingsError, match=r"batch_size=16 needs more memory than there is \(too much\): lower it"):
        sample(SampleConfig(checkpoint=str(run_directory), num_samples=17))
    with pytest.raises(SettingsError, match=r"the model needs more memory .*\): end other programs\.$"):
        sample(SampleConfig(checkpoint=str(run_directory), device="cpu"))
