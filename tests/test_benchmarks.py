"""The benchmarks start, say in a sentence what they lack, and print tables that can be pasted."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from test_export import save

import train as trainer
from generation.decoder import Decoder
from runs.checkpoint import load_checkpoint
from schema import to_settings
from settings import CONF
from training.config import TrainConfig
from training.plan import predict_memory

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
COMMANDS = [name for name in SCRIPTS if name not in ("paired", "nanogpt", "stale")]


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("paired.busy_cores", lambda: 0.0)  # which takes seconds, and minutes where it is not so


def started(name: str, *arguments: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *arguments])
    importlib.import_module(name).main()


def tables(output: str) -> list[list[list[str]]]:
    """The cells of every Markdown table, which must have as many in every row."""
    found, lines = [], iter(output.splitlines())
    for line in lines:
        if line.startswith("|"):
            rows = [line]
            while (line := next(lines, "")).startswith("|"):
                rows.append(line)
            cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
            assert len({len(row) for row in cells}) == 1, rows
            assert set("".join(cells[1])) <= {"-", ":"}
            found.append([cells[0], *cells[2:]])
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_is_answered_and_has_rounds(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert left.value.code == 0
    assert f"python benchmarks/{name}.py" in output and ("--rounds" in output) == (name != "engines")


def test_every_command_is_in_the_readme():
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`python benchmarks/{name}.py" in readme


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("time_to_loss", ["nowhere", "nowhere"], "argument nanogpt: nowhere is not a checkout"),
        ("throughput", ["tests"], "argument nanogpt: tests is not a checkout"),
        ("startup", ["nowhere"], "argument nanogpt: nowhere is not a checkout"),
        ("generate", ["nowhere"], "argument nanogpt: nowhere is not a checkout"),
        ("generate", [], "the following arguments are required: nanogpt"),
        ("generate", ["--gguf", "nowhere.gguf"], "argument --gguf: nowhere.gguf is not a file that can be read"),
        ("tokenization", ["nowhere.txt"], "argument text: nowhere.txt is not a file that can be read"),
        ("tokenization", ["tests"], "argument text: tests is not a file that can be read"),
        ("scaling", ["--rounds", "0"], "argument --rounds: 0 is not a whole number from 1 on"),
        ("memory", ["--rounds", "many"], "argument --rounds: many is not a whole number from 1 on"),
        ("memory", ["more"], "unrecognized arguments: more"),
        ("engines", [], "the following arguments are required: url"),
        ("engines", ["http://localhost:1", "nowhere"], "checkpoint=nowhere does not exist"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(name, arguments, sentence, monkeypatch):
    with pytest.raises(SystemExit) as left:
        started(name, *arguments, monkeypatch=monkeypatch)
    assert str(left.value.code).startswith(f"error: {sentence}")
    assert "\n" not in left.value.code


def test_rounds_begin_with_another_program_each_time_and_warm_ups_are_not_returned():
    import paired

    order = []
    programs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    results = paired.interleave(programs, 3, warm_ups=1)
    assert order == [*"cab", *"abc", *"bca", *"cab"]
    assert results == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}


@pytest.mark.parametrize(
    ("first", "second", "printed"),
    [
        ([2.0, 40.0, 6.0], [1.0, 10.0, 6.0], "**1.00×**, 2.00× (1.00 to 4.00)"),  # 6 / 6; 2, 4 and 1
        ([10.0, 20.0, 30.0], [10.0, 5.0, 20.0], "2.00×, **1.50×** (1.00 to 4.00)"),  # 20 / 10; 1, 4 and 1.5
        ([3.0], [2.0], "**1.50×**, 1.50×"),
    ],
)
def test_a_ratio_is_both_statistics_and_the_smaller_one_may_be_claimed(first, second, printed):
    import paired

    assert paired.ratio(first, second) == printed
    assert paired.ratio(first, first) == "1"


@pytest.mark.parametrize(
    ("load", "values", "line"),
    [
        (0.1, {"a": [10.0, 10.0, 10.0, 10.0, 12.5], "b": [1.0] * 5}, ""),
        (0.2, {"a": [1.0] * 5}, "Not a quiet machine: load 0.2 at the start."),
        (
            0.0,
            {"a": [10.0, 10.0, 10.0, 10.0, 12.6], "b": [1.0] * 5, "c": [2.0, 3.0, 3.0, 3.0, 3.0]},
            "Not a quiet machine: brackets wider than a quarter in rows: a; c.",
        ),
        (
            1.4,
            {"a": [1.0, 3.0, 3.0, 3.0]},
            "Not a quiet machine: load 1.4 at the start; brackets wider than a quarter in rows: a. "
            "Fewer rounds than 5: 4.",
        ),
    ],
)
def test_a_table_that_breaks_the_method_says_so(load, values, line, monkeypatch, capsys):
    import paired

    monkeypatch.setattr(paired, "busy_cores", lambda: load)
    monkeypatch.setattr(paired, "PATIENCE", 0)
    paired.header()
    paired.table(["", "s"], [[name, paired.spread(of)] for name, of in values.items()])
    output = capsys.readouterr().out
    assert f", load {load} at the start\n" in output
    assert output.partition("|---|---:|\n")[2].partition("\n\n")[2].strip() == line


def test_a_busy_machine_is_waited_for_but_not_for_ever(monkeypatch):
    import paired

    loads, now = [1.5, 0.9, 0.1], iter(range(0, 1000, 20))
    monkeypatch.setattr(paired.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(paired, "busy_cores", lambda: loads.pop(0))
    assert paired.settled_load() == 0.1
    loads[:] = [2.0] * 100
    assert paired.settled_load() == 2.0 and len(loads) > 90


@pytest.mark.skipif(sys.platform != "linux", reason="the load is read from /proc")
def test_the_load_counts_a_core_that_works(monkeypatch):
    import paired

    monkeypatch.undo()
    end = time.monotonic() + 2
    worker = threading.Thread(target=lambda: [None for _ in iter(lambda: time.monotonic() < end, False)])
    worker.start()
    load = paired.busy_cores(1.0)
    worker.join()
    assert 0.5 < load < 1.1 * os.cpu_count()


def test_changes_that_are_not_committed_are_beside_the_commit(monkeypatch, tmp_path):
    import paired

    monkeypatch.setattr(paired, "ROOT", tmp_path)
    assert "commit" not in paired.machine()
    paired.git("init", "-q")
    (tmp_path / "a").write_text("1")
    paired.git("add", "a")
    paired.git("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "one")
    commit = paired.git("rev-parse", "--short", "HEAD").stdout.strip()
    (tmp_path / "tables.md").touch()  # not tracked
    assert paired.machine().endswith(f", commit {commit}")
    (tmp_path / "a").write_text("2")
    assert paired.machine().endswith(f", commit {commit} + changes")


def test_a_command_that_fails_ends_in_a_sentence_with_its_last_words():
    import paired

    with pytest.raises(SystemExit, match=r"-c ended with status 1: ValueError: no such thing") as left:
        paired.run([sys.executable, "-c", "x = 1\nraise ValueError('no such thing')"])
    assert "\n" not in left.value.code


def test_nanogpts_iterations_are_added_up_without_its_evaluations():
    from time_to_loss import iterations_seconds

    log = """
number of parameters: 0.80M
step 0: train loss 4.2, val loss 4.2
iter 0: loss 4.1, time 9000.00ms, mfu -100.00%
iter 1: loss 4.0, time 20.00ms, mfu -100.00%
iter 2: loss 4.0, time 30.00ms, mfu -100.00%
step 3: train loss 3.9, val loss 3.9
saving checkpoint to out
iter 3: loss 3.9, time 8000.00ms, mfu 0.10%
iter 4: loss 3.9, time 40.00ms, mfu 0.10%
"""
    assert iterations_seconds(log) == pytest.approx(0.020 + 0.030 + 0.040 + 2 * 0.030)


def test_our_training_is_counted_without_its_evaluations():
    from time_to_loss import training_seconds

    rows = [
        {"step": 1, "seconds": 1.0, "loss": 4.0},
        {"step": 10, "seconds": 3.0, "loss": 3.0},
        {"step": 10, "seconds": 5.0, "val_loss": 3.0},
        {"step": 20, "seconds": 7.0, "loss": 2.0},
        {"step": 20, "seconds": 9.5, "val_loss": 2.0},
    ]
    assert training_seconds(rows) == 5.0


class Uniform(torch.nn.Module):
    """In nanoGPT's place: every character is as likely, but the last one of V half as likely as the others."""

    def __init__(self, config):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([0.0] * (config.vocab_size - 1) + [-math.log(2)]))

    def forward(self, inputs, targets):
        return self.logits.expand(*inputs.shape, -1), None


@pytest.mark.parametrize("length", [2, 8, 9, 10, 17, 30])
def test_nanogpts_checkpoint_is_scored_on_every_character_once(tmp_path, length):
    from time_to_loss import score

    module = SimpleNamespace(GPT=Uniform, GPTConfig=SimpleNamespace)
    shape = {"block_size": 8, "vocab_size": 5}
    (tmp_path / "out").mkdir()
    model = Uniform(SimpleNamespace(**shape)).state_dict()
    torch.save({"model": model, "model_args": shape}, tmp_path / "out" / "ckpt.pt")
    data = tmp_path / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(0).integers(0, 5, length, dtype=np.uint16)
    tokens.tofile(data / "val.bin")
    rare = np.count_nonzero(tokens[1:] == 4) / (length - 1)  # the first one has nothing before it
    assert score(tmp_path, module) == pytest.approx(math.log(4.5) + rare * math.log(2))


def test_time_to_loss_sets_every_run_against_that_of_nanogpt_in_its_round(capsys):
    from time_to_loss import Run, report

    nanogpt = [Run(100, 80, 2001, 1_536_768, 1.9), Run(200, 90, 2001, 1_536_768, 1.9)]
    report({"nanoGPT": nanogpt, "ours": [Run(10, 5, 124, 253_952, 1.8), Run(10, 9, 124, 253_952, 1.85)]})
    (table,) = tables(capsys.readouterr().out)
    assert table[1][1:3] == ["2,001", "1,536,768"] and table[1][-2:] == ["1", "1"]
    assert table[2] == [
        "ours", "124", "253,952", "1.8250 (1.8000 to 1.8500)", "10.0 (10.0 to 10.0)", "7.0 (5.0 to 9.0)",
        "**15.00×**, 15.00× (10.00 to 20.00)", "**12.14×**, 13.00× (10.00 to 16.00)",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["ADAMW", "TUNED_ADAMW"])
def test_the_same_recipe_is_given_to_both_codes(name):
    import nanogpt
    from throughput import GPT2_SHAPE
    from time_to_loss import EXPERIMENT, in_nanogpts_shape

    recipe = getattr(nanogpt, name)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_settings(compose("train", [*EXPERIMENT, *in_nanogpts_shape(recipe), "run_dir=null"]), TrainConfig)
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    assert (config.batch_size, config.max_steps) == (recipe["batch_size"], recipe["max_iters"])
    assert (optimizer.name, optimizer.lr, optimizer.beta2, optimizer.weight_decay) == (
        "adamw", recipe["learning_rate"], recipe["beta2"], 0.1,
    )  # fmt: skip
    assert optimizer.embedding_lr is optimizer.lm_head_lr is None
    assert (schedule.name, schedule.warmup_steps) == ("cosine", recipe["warmup_iters"])
    assert schedule.final_factor * optimizer.lr == pytest.approx(recipe["min_lr"])
    shape = [flag for flag in nanogpt.RECIPE if flag.startswith(("--n_", "--block"))]
    assert shape == [f"--{key}={getattr(model, key)}" for key in ("block_size", "n_layer", "n_head", "n_embd")]
    assert replace(model, **GPT2_SHAPE, attention="sdpa") == model and model.dropout == 0


@pytest.mark.parametrize("beside", [True, False])
def test_startup_sets_only_the_same_text_against_nanogpt(beside, monkeypatch, capsys, tmp_path):
    import startup

    measured = {"`train.py --help`": [0.4, 0.4], startup.SAME_TEXT: [1.0, 2.0]} | (
        {startup.PEER: [3.0, 3.0]} if beside else {}
    )
    monkeypatch.setattr(startup.paired, "run", lambda *_, **settings: None)
    monkeypatch.setattr(startup.paired, "interleave", lambda programs, rounds: measured)
    monkeypatch.setattr(startup, "imports", lambda settings: None)
    started("startup", "--rounds", "2", monkeypatch=monkeypatch)
    (table,) = tables(capsys.readouterr().out)
    assert table[1] == ["`train.py --help`", "0.40 (0.40 to 0.40)", ""]
    assert table[2][2] == ("**2.00×**, 2.25× (1.50 to 3.00)" if beside else "")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_throughput_prints_a_row_for_each_program_whose_parts_make_the_step(has_bf16, monkeypatch, capsys):
    import throughput

    small = replace(throughput.SMALL[0], n_layer=1, n_embd=32, block_size=16, steps=2)
    monkeypatch.setattr(throughput, "SMALL", [small])
    monkeypatch.setattr(throughput, "peak", lambda device: (1e12, "made up"))
    monkeypatch.setattr(throughput, "multiplies_bf16", lambda device: has_bf16)
    started("throughput", "--rounds", "2", monkeypatch=monkeypatch)
    (table,) = tables(capsys.readouterr().out)
    assert table[0][3:8] == ["a step, ms", "data", "forward", "backward", "optimizer"]
    rows = ["ours, GPT-2's shape, fp32", *["ours, GPT-2's shape, bf16"] * has_bf16, "ours, default"]
    assert [row[0] for row in table[1:]] == rows
    for row in table[1:]:
        assert all(float(part) >= 0 for part in row[4:8]) and sum(map(float, row[4:8])) > 0


@pytest.fixture
def rehearsal(monkeypatch, no_pictures):
    """benchmarks/gpu.py with tiny shapes, on the CPU, in this process and without compiling."""
    import gpu

    def train(*settings):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            trainer.train(to_settings(compose("train", list(settings)), TrainConfig))
        return 1e3

    monkeypatch.setattr(gpu.paired, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu.throughput, "peak", lambda device: (1e12, "made up"))
    monkeypatch.setattr(gpu.time_to_loss, "train", train)
    monkeypatch.setattr(gpu.paired, "_end", float("inf"))
    monkeypatch.setattr(gpu.generate, "SHAPES", {gpu.TINY.decoded: (1, 2, 16, 16, 65)})
    monkeypatch.setattr(gpu.generate, "TOKENS", 12)
    # What it calls for each way of running is in the settings and counted; the compiler has tests of its own.
    with torch.compiler.set_stance("force_eager"):
        yield lambda name, **given: gpu.measured(
            name, SimpleNamespace(**{"sizes": gpu.TINY, "nanogpt": None, "text": None, "rounds": 1} | given), 60
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "rows"),
    [
        ("default", [4]),
        ("compiling", [2, 4]),
        ("training", [2]),
        ("memory", [6]),
        ("decode", [4, 4, 4, 4]),
        ("attention", [5, 6]),
        ("tests", [1]),
        ("shakespeare", [1]),
    ],
)
def test_every_section_for_a_gpu_runs_on_a_cpu(section, rows, rehearsal, capsys, text_file):
    assert rehearsal(section, text=text_file), capsys.readouterr().out
    found = tables(capsys.readouterr().out)
    assert [len(table) - 1 for table in found] == rows
    assert all(cell for table in found for row in table[1:] for cell in row)


def test_shakespeare_is_left_out_without_its_text_and_nanogpt_without_its_checkout(rehearsal, capsys, text_file):
    assert rehearsal("shakespeare") and "Left out: give the path" in capsys.readouterr().out


@pytest.mark.parametrize("ended", [False, True])
def test_nanogpts_own_evaluations_say_when_it_was_good_enough(ended, monkeypatch, tmp_path):
    import time_to_loss

    log = "step 250: train loss 1.5, val loss 1.48\niter 250: loss 1.2\nstep 500: train loss 1.1, val loss 1.4697"
    save = "time.sleep(60)" if ended else "open('out/ckpt.pt', 'w').write('1')"
    (tmp_path / "out").mkdir()
    (tmp_path / "train.py").write_text(f"import time; print({log!r}, flush=True); {save}")
    monkeypatch.setattr(time_to_loss.paired, "time_is_up", lambda: ended)
    if ended:  # after its first line, before it has saved
        with pytest.raises(SystemExit, match=r"error: nanoGPT's train.py has saved nothing: step 250"):
            time_to_loss.its_gpu_recipe(tmp_path, [], 1.47)
        return
    whole, step, reached = time_to_loss.its_gpu_recipe(tmp_path, [], 1.47)
    assert step == 500 and len(reached) == 1 and 0 < reached[0] <= whole < 50


def gpu_with(processes: dict[str, str], monkeypatch) -> None:
    """Run gpu.py with these scripts in place of its sections."""
    import gpu

    monkeypatch.setattr(gpu, "SECTIONS", {name: gpu.Section(lambda arguments: None, 2) for name in processes})
    monkeypatch.setattr(gpu, "command", lambda name, seconds: [sys.executable, "-c", processes[name]])
    monkeypatch.setattr(gpu.paired, "machine", lambda *packages: "a GPU")
    started("gpu", "--tiny", monkeypatch=monkeypatch)


def test_a_section_that_fails_or_takes_too_long_on_a_gpu_does_not_lose_the_others(monkeypatch, capfd):
    slow = "import subprocess; print('| early |', flush=True); subprocess.run(['sleep', '60.125'])"
    sections = {
        "slow": slow,
        "crash": "import os; os.abort()",
        "said": "raise SystemExit(1)",
        "last": "print('| fine |')",
    }
    begun = time.monotonic()
    with pytest.raises(SystemExit, match=r"^error: slow, crash, said failed"):
        gpu_with(sections, monkeypatch)
    output = capfd.readouterr().out
    assert time.monotonic() - begun < 30
    assert "| early |" in output and "error: stopped\nit took longer than its 2 s" in output
    assert "error: ended with status -6" in output and output.index("## last") < output.index("| fine |")
    processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x0060.125\x00" not in processes
    gpu_with({"last": "print('| fine |')"}, monkeypatch)


def test_an_error_of_a_section_is_two_lines(monkeypatch, capsys):
    import gpu

    def fails(arguments):
        raise RuntimeError("backend='inductor' raised:\nCalledProcessError: gcc\n" + "a page\n" * 40)

    monkeypatch.setattr(gpu, "SECTIONS", {"one": gpu.Section(fails, 1)})
    monkeypatch.setattr(gpu.paired, "_end", float("inf"))
    assert not gpu.measured("one", SimpleNamespace(), 60)
    first, second = capsys.readouterr().out.strip().split("\n")
    assert (
        first.startswith("error: RuntimeError: backend='inductor' raised: CalledProcessError: gcc") and len(first) < 400
    )
    assert second.startswith("in fails, test_benchmarks.py:")


@pytest.mark.parametrize(
    "arguments", [["--only", "decoding"], ["--minutes", "0"], ["nowhere"], ["--tiny", "--rounds", "x"]]
)
def test_gpu_refuses_what_it_does_not_know(arguments, monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: argument .*(invalid choice|not a )") as left:
        started("gpu", *arguments, monkeypatch=monkeypatch)
    assert "\n" not in left.value.code


def test_gpu_names_the_packages_that_are_missing_before_it_imports_ours(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    gone = ("hydra", "rustbpe")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else find(name, *a))
    with pytest.raises(SystemExit, match=r"^error: rustbpe, hydra-core not installed: run  pip install -e \.$"):
        runpy.run_path(str(BENCHMARKS / "gpu.py"), run_name="__main__")


def test_no_further_round_begins_after_the_time(monkeypatch):
    import paired

    monkeypatch.setattr(paired, "_end", float("inf"))
    paired.stop_after(-1)
    assert paired.interleave({"a": lambda: 1, "b": lambda: 2}, 5) == {"a": [1], "b": [2]}


def test_growth_is_beside_the_work(monkeypatch, capsys):
    import scaling

    base = replace(scaling.BASE, n_layer=1, n_embd=32, block_size=16, batch_size=2, vocab_size=64, steps=1)
    scaling.growth(base, 1)
    (table,) = tables(capsys.readouterr().out)
    work = {row[0]: row[2] for row in table[1:]}
    assert work["base"] == "1.00×" and work["2 × batch"] == "2.00×" and work["4 × batch"] == "4.00×"
    assert len(table) == 10


def test_tokenization_of_a_small_text_prints_both_tables(monkeypatch, capsys, text_file):
    import tokenization

    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setattr(tokenization, "DOCUMENTS", 50)
    started("tokenization", str(text_file), "--rounds", "1", monkeypatch=monkeypatch)
    files, documents = tables(capsys.readouterr().out)
    assert len(files) == len(documents) == 4
    assert all(float(row[1]) > 0 for row in files[1:] + documents[1:])


@pytest.mark.parametrize(
    ("content", "sentence"), [("é" * 10_000, "is not ASCII"), ("short", "has 5 bytes: give a text of at least 10,000")]
)
def test_time_to_loss_takes_an_ascii_text_of_some_length(content, sentence, monkeypatch, tmp_path):
    for name in ("model.py", "train.py", "data/shakespeare_char/prepare.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "text.txt").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"error: .*{sentence}"):
        started("time_to_loss", str(tmp_path), str(tmp_path / "text.txt"), monkeypatch=monkeypatch)


def test_an_empty_text_has_no_speed(monkeypatch, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(SystemExit, match=r"error: .*empty\.txt has no text"):
        started("tokenization", str(tmp_path / "empty.txt"), monkeypatch=monkeypatch)


def test_small_documents_lose_no_text():
    import tokenization

    text = "a line of text\n" * 100 + "the end"
    documents = list(tokenization.cut(text))
    assert "".join(documents) == text
    assert all(len(document) >= tokenization.CHARACTERS for document in documents[:-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process reads its peak memory from /proc")
def test_measured_memory_is_beside_what_is_predicted(capsys, monkeypatch):
    import memory

    shape = memory.Shape(T=256, B=16, C=128)
    measured = memory.child("matmul", shape)
    predicted = predict_memory(memory.make_config("matmul", shape), shape.B).peak / 1e6
    assert 0.5 * predicted < measured < 2 * predicted
    monkeypatch.setattr(memory, "child", lambda form, shape: 12.0)
    monkeypatch.setattr(memory, "shapes", lambda base, form: [base])
    memory.compare(memory.Shape(T=16, B=2, C=32), 1)
    (table,) = tables(capsys.readouterr().out)
    assert [row[0] for row in table] == ["attention", "`sdpa`", "`matmul`"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("right", [True, False])
def test_an_engine_is_held_to_the_checkpoint_it_serves(engine, right, monkeypatch, capsys, tmp_path):
    import engines

    where = save(tmp_path / "step_1", block_size=64)
    served = load_checkpoint(where)
    if not right:
        with torch.no_grad():
            served.model.lm_head.weight.mul_(1.5)

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                answer = {"tokens": served.tokenizer.encode_ordinary(asked["prompt"])[: None if right else 5]}
            else:
                tokens, nats = engines.ours(Decoder(served.model), asked["prompt"], asked["max_tokens"])
                choice = {"token_ids": tokens, "logprobs": {"token_logprobs": nats}}
                if engine == "llama.cpp":
                    pairs = zip(tokens, nats, strict=True)
                    choice = {"logprobs": {"content": [{"id": token, "logprob": nat} for token, nat in pairs]}}
                answer = {"choices": [choice]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started("engines", f"http://127.0.0.1:{server.server_port}/", str(where), monkeypatch=monkeypatch)
        server.shutdown()
    [[heads, [_, ids, same, apart]]] = tables(capsys.readouterr().out)
    assert (ids == "4 of 4 texts", same == "4 of 4 prompts", float(apart) == 0) == (right, True, right)
    assert heads[2].startswith("same")

    with pytest.raises(SystemExit, match=r"error: http://127\.0\.0\.1:.* gave no answer"):
        started("engines", f"http://127.0.0.1:{server.server_port}", str(where), monkeypatch=monkeypatch)
