"""python sample.py: text as it comes, many prompts at once, a conversation, and what is refused."""

import codecs
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from math import inf, nan
from pathlib import Path

import pytest
import tiktoken
import torch
from conftest import random_gpt, run_here
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, make_tokenizer
from errors import SettingsError
from generation.config import SampleConfig
from generation.decoder import Decoder
from generation.sampling import Controls
from generation.terminal import visible
from generation.text import Detokenizer, allowed_ids, complete, complete_text, encode_prompt
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import link_checkpoint, save_checkpoint
from sample import sample
from schema import from_arguments
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A run with one checkpoint, of a model that writes any byte."""
    directory = tmp_path_factory.mktemp("runs") / "outputs" / "day" / "run"
    model = random_gpt(vocab_size=257)
    config = TrainConfig(model=model.config)
    save_checkpoint(directory / "checkpoints" / "step_1", model=model, tokenizer=BYTE, config=config, step=1)
    for name in ("last", "best"):
        link_checkpoint(directory / "checkpoints" / "step_1", name)
    return directory


@pytest.fixture
def say(run_directory, capsys):
    """sample() with these settings; what it printed."""

    def run(**settings) -> str:
        sample(SampleConfig(checkpoint=str(run_directory), device="cpu", **{"max_new_tokens": 12} | settings))
        return capsys.readouterr().out

    return run


class Scripted(GPT):
    """A model that writes the given tokens, whatever it has read."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=100, vocab_size=257))
        self.script = iter(script)

    def logits(self, x):
        return torch.nn.functional.one_hot(torch.tensor([next(self.script)]), 257).float() * 100


def written(script: list[int], **settings) -> list[tuple[str, str | None]]:
    steps = complete(Decoder(Scripted(script)), BYTE, [[256]], seeds=[0], **{"max_new_tokens": 50} | settings)
    return [(piece.text, piece.finish) for piece in steps]


# Text


def test_a_sample_ends_where_the_model_ends_the_document_or_the_limit_is_reached():
    script = [*b"abc", BYTE.eot_token, *b"def"]
    assert written(script) == [("a", None), ("b", None), ("c", None), ("", "end")]
    assert written(script, max_new_tokens=2) == [("a", None), ("b", "length")]


def test_a_sample_ends_before_the_first_stop_string_and_shows_nothing_of_it():
    left = {"d": "abc", "bcd cde": "a", "efg": "abcdef", "\n f": "abcde", "a": "", "abcdef": ""}
    for stop, text in left.items():
        pieces = written([*b"abcdef"], stop=stop.split(" "), max_new_tokens=6)
        ends = "length" if text == "abcdef" else "stop"
        assert ("".join(piece for piece, _ in pieces), pieces[-1][1]) == (text, ends)
    pieces = written([*"né → ok".encode()], stop=["→ "], max_new_tokens=9)  # characters of several bytes
    assert ("".join(piece for piece, _ in pieces), pieces[-1][1]) == ("né ", "stop")


UNICODE = st.text(st.sampled_from("aé漢字😀👩\u200d🚀e\u0301\ufffd🇫🇷ञि") | st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=200, deadline=None)
@given(text=UNICODE, stop=st.lists(st.text("aé漢😀x", min_size=1, max_size=3), max_size=2))
def test_no_chunk_holds_a_replacement_character_that_the_whole_text_does_not(text, stop):
    stream = Detokenizer(BYTE, tuple(stop))
    chunks = []
    for token in BYTE.encode_ordinary(text):
        chunks.append(stream.feed(token))
        if stream.stopped:
            break
    if not stream.stopped:
        chunks.append(stream.close())
    places = [text.find(word) for word in stop if word in text]
    assert text.startswith("".join(chunks))
    if not places:
        assert "".join(chunks) == text
    assert not any(word in "".join(chunks) for word in stop)
    assert sum(chunk.count("\ufffd") for chunk in chunks) == "".join(chunks).count("\ufffd") <= text.count("\ufffd")


@given(tokens=st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_are_streamed_as_the_whole_would_be_decoded(tokens):
    stream = Detokenizer(BYTE)
    streamed = "".join(stream.feed(token) for token in tokens) + stream.close()
    assert streamed == codecs.decode(bytes(tokens), "utf-8", "replace")


def test_text_streamed_is_text_at_once_and_the_model_is_left_as_it_was():
    model = random_gpt(vocab_size=257).train()
    pieces = list(complete_text(model, BYTE, "hi", max_new_tokens=40, seed=3))
    assert "".join(pieces) == "".join(complete_text(model, BYTE, "hi", max_new_tokens=40, seed=3))
    assert model.training and len(pieces) > 1


def test_a_prompt_begins_a_document_and_its_special_tokens_are_text_unless_allowed():
    end = BYTE.eot_token
    assert encode_prompt(BYTE, "") == [end]
    assert encode_prompt(BYTE, END_OF_TEXT) == [end, *END_OF_TEXT.encode()]
    assert encode_prompt(BYTE, f"a{END_OF_TEXT}b", special_tokens=True) == [end, *b"a", end, *b"b"]


def test_padding_and_unused_ids_are_not_sampled():
    ranks = {bytes([byte]): byte for byte in range(256)}
    gaps = tiktoken.Encoding("gaps", pat_str=".", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 260})
    allowed = allowed_ids(gaps, random_gpt(vocab_size=300))
    assert allowed.nonzero().flatten().tolist() == [*range(256), 260]
    assert allowed_ids(BYTE, random_gpt(vocab_size=257)) is None
    drawn = complete(
        Decoder(random_gpt(vocab_size=300)), gaps, [[260]] * 8, max_new_tokens=40, seeds=list(range(8)),
        controls=Controls(temperature=5.0), logprobs=True,
    )  # fmt: skip
    assert {token for piece in drawn for token, _ in piece.logprobs} <= {*range(256), 260}


# The command


def test_samples_come_in_their_order_each_as_if_it_were_the_only_one(say):
    together = say(prompt="ab", num_samples=3, seed=5)
    alone = [say(prompt="ab", seed=5 + number) for number in range(3)]
    assert together == "".join(f"--- sample {n + 1} of 3\n{text}" for n, text in enumerate(alone))
    assert len(set(alone)) == 3


def test_many_prompts_give_many_results_in_their_order(say, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab", "id": 7}\n\n{"prompt": ""}\n{"prompt": "日本"}\n')
    say(
        prompts=str(tmp_path / "in.jsonl"), results=str(tmp_path / "out.jsonl"), num_samples=2, batch_size=4,
        logprobs=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [(p, n) for p in ("ab", "", "日本") for n in (0, 1)]
    assert rows[0]["id"] == 7 and all(row["finish"] == "length" for row in rows)
    for row in rows:
        assert say(prompt=row["prompt"], seed=1 + row["sample"]) == row["prompt"] + row["text"] + "\n"
        assert len(row["logprobs"]) == 12 and all(token["logprob"] < 0 for token in row["logprobs"])


def test_one_prompt_can_be_answered_as_json(say):
    result = json.loads(say(prompt="ab", results="-", logprobs=True, stop=["\u0000"]))
    assert result["prompt"] == "ab" and result["finish"] in ("length", "stop")


def test_a_prompt_longer_than_the_context_keeps_its_tail_and_says_so(say, run_directory, capsys):
    out = say(prompt="x" * 30 + "the last sixteen")
    assert out.startswith("x" * 30 + "the last sixteen")
    sample(SampleConfig(checkpoint=str(run_directory), prompt="x" * 30 + "the last sixteen", max_new_tokens=12))
    captured = capsys.readouterr()
    assert captured.out == out
    assert "has 47 tokens, but the model sees 16: only its end is read" in captured.err


def test_stdout_has_nothing_but_the_prompt_and_the_text_when_it_is_piped(run_directory, say):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = popen(run_directory, "prompt_file=-", "max_new_tokens=12", **pipes)
    written, complaints = process.communicate(b"ab", timeout=60)
    assert process.returncode == 0 and complaints == b""
    assert written.decode("utf-8", "replace") == say(prompt="ab")


def test_nothing_is_said_when_the_reader_leaves(run_directory):
    process = popen(run_directory, "max_new_tokens=5000", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(30) == 0


def test_on_a_terminal_the_prompt_is_dimmed_and_control_characters_cannot_act(run_directory):
    main, terminal = pty.openpty()
    popen(run_directory, "prompt=ab", "max_new_tokens=200", stdout=terminal, stderr=subprocess.DEVNULL)
    os.close(terminal)
    shown = b""
    while chunk := read_terminal(main):
        shown += chunk
    assert shown.startswith(b"\x1b[2mab\x1b[0m")
    assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", shown[10:])
    assert re.search("[␀-␟]", shown.decode())  # a model of random bytes has tried
    assert visible("a\x1b[31m\x9bb\r\n\tc\x7f") == "a␛[31m\ufffdb␍\n\tc␡"


@pytest.mark.slow
def test_ctrl_c_ends_a_text_but_not_the_session(run_directory):
    main, terminal = pty.openpty()
    process = popen(
        run_directory, "interactive=true", "max_new_tokens=1000000", "temperature=0",  # greedily it never ends
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, env=os.environ | {"HOME": "/nowhere"},
    )  # fmt: skip
    os.close(terminal)
    wait_for(main, b"> ")
    os.write(main, b"hello\n")
    time.sleep(1)
    os.kill(process.pid, signal.SIGINT)
    wait_for(main, b"\n> ")
    os.write(main, b"/temperature 0.5\n")
    wait_for(main, b"/temperature 0.5\r\n> ")
    os.write(main, b"/temperature\n")
    shown = wait_for(main, b"/temperature\r\ntemperature 0.5\r\n> ")
    os.write(main, b"\x04")
    assert process.wait(30) == 0
    assert b"Traceback" not in shown


def test_settings_can_be_changed_on_the_fly_and_a_bad_value_changes_nothing(say, monkeypatch):
    lines = "ab|/seed 9|ab||/top_p 3|/temprature 1|/page x.html|//x|/stop [q]|/settings|/help|/stop []|/seed=1|ab"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines.replace("|", "\n")))
    shown = say(interactive=True)
    texts = {seed: say(prompt="ab", seed=seed) for seed in (1, 9)}
    assert shown.count(texts[1]) == 2 and shown.index(texts[1]) < shown.index(texts[9])
    assert say(prompt=texts[9].removesuffix("\n"), seed=9) in shown  # the empty line went on with it
    assert "top_p=3.0 must be above 0" in shown and "there is no /temprature" in shown
    assert "there is no /page" in shown and "page None" not in shown
    assert say(prompt="/x", seed=9) in shown and "stop ['q']" in shown and "Ctrl-D or /quit ends the session" in shown


def test_a_prompt_may_have_several_lines_and_quit_ends_the_session(say, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\\\n  c\\\n\n/quit\nnever read"))
    assert say(interactive=True).endswith(say(prompt="ab\n  c\n") + "> ")
    assert sys.stdin.read() == "never read"


def test_a_change_is_read_as_on_the_command_line():
    assert from_arguments(SampleConfig, ["top_k=null"], SampleConfig(top_k=5, seed=3)) == SampleConfig(seed=3)
    with pytest.raises(SettingsError, match="top_k: Value 'many' of type 'str' could not be"):
        from_arguments(SampleConfig, ["top_k=many"], SampleConfig())


def test_the_lowest_temperature_is_that_of_the_likeliest_token(say):
    assert say(prompt="ab", temperature=1e-6) == say(prompt="ab", temperature=0.0)


# What is refused


FILES = {"empty": "\n", "broken": '{"prompt": "a"}\n{"prompt": ', "number": '{"prompt": 5}\n', "list": '["a"]\n'}
FILES |= {"taken": '{"prompt": "a", "text": "b"}\n', "good": '{"prompt": "a"}\n'}
OUT_OF_RANGE = dict(temperature=(-0.1, 1e-45, nan, inf), top_k=(0,), top_p=(0.0, 2.0, nan), min_p=(1.5,))
OUT_OF_RANGE |= dict(repetition_penalty=(0.0, inf), seed=(-1, 2**63 - 1), num_samples=(0,), max_new_tokens=(0,))
REFUSED = [
    *(({name: value}, f"{name}={value}") for name, values in OUT_OF_RANGE.items() for value in values),
    ({"temperature": 1e-7}, "temperature=1e-07 must be finite and at least 1e-06, or 0 for always the likeliest token"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"stop": [""]}, "stop has an empty string"),
    ({"prompt": "a", "prompt_file": "b"}, "are given: choose one"),
    ({"prompts": "a", "prompt_file": "b"}, "are given: choose one"),
    ({"interactive": True, "results": "-"}, "interactive=true"),
    ({"logprobs": True}, "add results=FILE"),
    ({"page": "map.png"}, "page=map.png is a page"),
    ({"prompt_file": "{tmp}/no"}, "cannot be read (No such file"),
    ({"prompt_file": "{tmp}"}, "cannot be read (Is a directory)"),
    ({"prompts": "{tmp}/no"}, "cannot be read (No such file"),
    ({"prompts": "{tmp}/empty"}, "has no prompts"),
    ({"prompts": "{tmp}/broken"}, "line 2 is not JSON"),
    ({"prompts": "{tmp}/number"}, "line 1 must look like"),
    ({"prompts": "{tmp}/list"}, "line 1 is not a JSON object"),
    ({"prompts": "{tmp}/taken"}, "has a field text"),
    ({"prompts": "{tmp}/good", "results": "{tmp}/list"}, "cannot be written (File exists): give another"),
    ({"results": "{tmp}/no/out"}, "cannot be written (No such file"),
    ({"device": "gpu"}, "device=gpu is not a device"),
    ({"checkpoint": "{tmp}/no"}, "does not exist"),
    ({"checkpoint": "{tmp}"}, "not a checkpoint"),
    ({"checkpoint": "{tmp}/good"}, "not a checkpoint"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[str(wrong)[1:-1] for wrong, _ in REFUSED])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(wrong, message, run_directory, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    wrong = {k: v.replace("{tmp}", str(tmp_path)) if isinstance(v, str) else v for k, v in wrong.items()}
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        sample(SampleConfig(**{"checkpoint": str(run_directory)} | wrong))
    assert "\n" not in str(refused.value)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize("damage", ["half of the weights", "no tokenizer", "a later format", "weights not finite"])
def test_a_checkpoint_that_cannot_be_used_is_refused_in_a_sentence(damage, run_directory, tmp_path):
    broken = tmp_path / "step_1"
    shutil.copytree(run_directory / "checkpoints" / "step_1", broken)
    if damage == "half of the weights":
        (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:5000])
    elif damage == "no tokenizer":
        (broken / "tokenizer.json").unlink()
    elif damage == "a later format":
        meta = json.loads((broken / "meta.json").read_text())
        (broken / "meta.json").write_text(json.dumps(meta | {"format_version": 99}))
    else:
        model = random_gpt(vocab_size=257)
        with torch.no_grad():
            model.blocks[0].mlp.up_proj.weight.fill_(torch.nan)
        save_checkpoint(broken, model=model, tokenizer=BYTE, config=TrainConfig(model=model.config))
    with pytest.raises(SettingsError, match=r"step_1.*(damaged|incomplete|format 99|not finite)") as refused:
        sample(SampleConfig(checkpoint=str(broken)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("more", [(), ("batch_size=1000000000", "results=r.jsonl")], ids=["screen", "file"])
def test_more_samples_than_memory_holds_are_refused_at_once(run_directory, tmp_path, more):
    done = run_here("sample.py", f"checkpoint={run_directory}", "num_samples=1000000000", *more, cwd=tmp_path)
    name = "batch_size" if more else "num_samples"
    assert done.returncode == 1 and re.fullmatch(rf"error: {name}=1000000000 is more than .* or less\.\n", done.stderr)
    assert not (tmp_path / "r.jsonl").exists()


def test_of_a_run_whose_best_checkpoint_is_damaged_the_newest_intact_speaks(run_directory, tmp_path, capsys, caplog):
    run = tmp_path / "run"
    for step in (1, 2, 3, 4):
        shutil.copytree(run_directory / "checkpoints" / "step_1", run / "checkpoints" / f"step_{step}")
    link_checkpoint(run / "checkpoints" / "step_1", "best")
    link_checkpoint(run / "checkpoints" / "step_4", "last")
    settings = SampleConfig(checkpoint=str(run), device="cpu", max_new_tokens=5)
    sample(settings)
    expected = capsys.readouterr()
    assert not expected.err

    for step, instead in ((1, "step_4"), (4, "step_3"), (3, "step_2")):
        weights = run / "checkpoints" / f"step_{step}" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
        sample(settings)
        assert capsys.readouterr().out == expected.out
        said = caplog.messages[-1]
        assert f"step_{step} is damaged" in said and "model.safetensors" in said and said.endswith(f"trying {instead}.")
    assert len(caplog.messages) == 3 + 2 + 1

    # One that is asked for by its name is not replaced by another, and one must be left.
    with pytest.raises(SettingsError, match="step_1 is damaged"):
        sample(SampleConfig(checkpoint=str(run / "checkpoints" / "step_1")))
    shutil.rmtree(run / "checkpoints" / "step_2")
    with pytest.raises(SettingsError, match=r"step_3 is damaged .*: use another checkpoint"):
        sample(settings)


@pytest.mark.parametrize(
    "prompt", ["\ud800", "\x00", " " * 5000 + "a", "👩‍🚀" * 50, END_OF_TEXT * 3, "\ufeff"], ids=ascii
)
@pytest.mark.parametrize("special_tokens", [False, True])
def test_a_prompt_of_any_kind_is_continued(prompt, special_tokens, say, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), errors="replace"))
    say(prompt=prompt, special_tokens=special_tokens, max_new_tokens=3)


def popen(run_directory: Path, *overrides: str, **options) -> subprocess.Popen:
    arguments = [sys.executable, str(ROOT / "sample.py"), f"checkpoint={run_directory}", "device=cpu", *overrides]
    return subprocess.Popen(arguments, **options)


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the other end is closed
        return b""


def wait_for(terminal: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        assert select.select([terminal], [], [], 30)[0], shown  # nothing more comes
        chunk = read_terminal(terminal)
        assert chunk, shown
        shown += chunk
    return shown


def test_weights_are_cast_once_to_the_precision_asked_for(say, tmp_path, monkeypatch):
    def weights(layer):
        return (tensor for name, tensor in layer.state_dict().items() if name != "scale")

    seen = []
    read = Decoder.read
    monkeypatch.setattr(
        Decoder,
        "read",
        lambda self, *a, **k: seen.append(next(weights(self.model.lm_head)).dtype) or read(self, *a, **k),
    )
    for precision in ("auto", "bf16", "fp16", "fp32", "int8"):
        say(precision=precision)
    assert seen == [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.int8]
    drawn = {"prompt": "ab", "page": str(tmp_path / "map.html"), "max_new_tokens": SampleConfig.max_new_tokens}
    say(precision="bf16", **drawn)
    with pytest.raises(SettingsError, match="precision=bf17"):
        SampleConfig(precision="bf17")
