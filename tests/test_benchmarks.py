"""The benchmarks start, name their missing parts in a sentence, and print Markdown tables."""

from __future__ import annotations

import importlib
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import compose

import training.device
from cli.composition import composing, to_settings
from train import train_step
from training.plan import predict_memory

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COMMANDS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"paired", "nanogpt"})


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def started(name: str, *arguments: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *arguments])
    importlib.import_module(name).main()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_is_answered_and_the_readme_has_the_command(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert f"python benchmarks/{name}.py" in output and "--rounds" in output
    assert f"`python benchmarks/{name}.py" in (BENCHMARKS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("time_to_loss", ["nowhere", "nowhere"], "argument nanogpt: nowhere is not a checkout"),
        ("throughput", ["tests"], "argument nanogpt: tests is not a checkout"),
        ("generate", [], "name a checkout: either nanoGPT's, or llama.cpp's with --llama-cpp FOLDER"),
        ("generate", ["--llama-cpp", "tests"], "--llama-cpp tests: there is no convert_hf_to_gguf.py"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(name, arguments, sentence, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        started(name, *arguments, monkeypatch=monkeypatch)
    assert f"error: {sentence}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"), [("é" * 10_000, "is not ASCII"), ("short", "has 5 bytes: give a text of at least 10,000")]
)
def test_time_to_loss_takes_an_ascii_text_of_some_length(content, sentence, monkeypatch, tmp_path, capsys):
    for name in ("model.py", "train.py", "data/shakespeare_char/prepare.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "text.txt").write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        started("time_to_loss", str(tmp_path), str(tmp_path / "text.txt"), monkeypatch=monkeypatch)
    assert sentence in capsys.readouterr().err


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
        ([2.0, 40.0, 6.0], [1.0, 10.0, 6.0], "**1.00 ×**, 2.00 × (1.00 to 4.00)"),  # 6 / 6; 2, 4 and 1
        ([10.0, 20.0, 30.0], [10.0, 5.0, 20.0], "2.00 ×, **1.50 ×** (1.00 to 4.00)"),  # 20 / 10; 1, 4 and 1.5
    ],
)
def test_a_ratio_is_both_statistics_and_the_smaller_one_may_be_claimed(first, second, printed):
    import paired

    assert paired.ratio(first, second) == printed
    assert paired.ratio(first, first) == "1"


def test_a_table_that_breaks_the_method_says_so(capsys):
    import paired

    paired.table(["", "s"], [["steady", paired.spread([10.0, 10.0, 12.5])]])
    assert "‡" not in capsys.readouterr().out
    paired.table(["", "s"], [["wide", paired.spread([10.0, 10.0, 12.6])]])
    assert capsys.readouterr().out.count("‡") == 2


def test_a_command_that_fails_ends_in_a_sentence_with_its_last_words():
    import paired

    with pytest.raises(SystemExit, match="ended with status 1: ValueError: no such thing") as left:
        paired.run([sys.executable, "-c", "raise ValueError('no such thing')"])
    assert "\n" not in left.value.code


def test_seconds_of_training_are_added_up_without_the_evaluations_between_them():
    from time_to_loss import training_seconds

    rows = [
        {"seconds": 1.0, "loss": 4.0},
        {"seconds": 3.0, "loss": 3.0},
        {"seconds": 5.0, "val_loss": 3.0},
        {"seconds": 7.0, "loss": 2.0},
        {"seconds": 9.5, "val_loss": 2.0},
    ]
    assert training_seconds(rows) == 5.0


class Uniform(torch.nn.Module):
    """In nanoGPT's place: all characters are equally likely, but the last one of V half as much."""

    def __init__(self, config):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([0.0] * (config.vocab_size - 1) + [-math.log(2)]))

    def forward(self, inputs, targets):
        return self.logits.expand(*inputs.shape, -1), None


@pytest.mark.parametrize("length", [2, 9, 30])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ADAMW", "TUNED_ADAMW"])
def test_the_same_recipe_is_given_to_both_codes(name):
    import nanogpt
    from throughput import GPT2_SHAPE
    from time_to_loss import in_nanogpts_shape

    recipe = getattr(nanogpt, name)
    with composing():
        config = to_settings(compose("train", [*in_nanogpts_shape(recipe), "run_dir=null"]))
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("has_bf16", [True, False])
def test_throughput_prints_a_row_for_each_program(has_bf16, monkeypatch, capsys):
    import throughput

    small = throughput.ON_A_CPU[0]._replace(n_layer=1, n_embd=32, block_size=16, steps=2)
    monkeypatch.setattr(throughput, "ON_A_CPU", [small])
    for module in (throughput, training.device):
        monkeypatch.setattr(module, "multiplies_bf16", lambda device: has_bf16)
    started("throughput", "--rounds", "2", monkeypatch=monkeypatch)
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = ["ours, GPT-2's shape, fp32", *["ours, GPT-2's shape, bf16"] * has_bf16, "ours, default"]
    assert [row[0] for row in table[2:]] == rows
    assert all(float(row[3]) > 0 and 3 < float(row[5]) < 5 for row in table[2:])  # ln 65 is 4.2
    in_fp32 = [float(row[4]) for row in table[2:] if row[4] != "–"]  # the default is in bf16 where there is one
    assert len(in_fp32) == (1 if has_bf16 else 2) and min(in_fp32) > 1


@pytest.mark.slow
def test_throughput_counts_all_products_of_a_step():
    import throughput

    shape = throughput.ON_A_CPU[0]._replace(n_layer=1, n_embd=32, n_head=2, block_size=16, batch_size=3)
    config = throughput.make_config(shape, throughput.GPT2_SHAPE, throughput.ADAMW)
    device = torch.device("cpu")
    counted = throughput.ours(config, "fp32", throughput.dataset(config), 1, device, False)().flops
    N, C, V = 3 * 16, 32, 65  # without the hooks of the counter, under which lm_head is called, it pads the ids to 80
    weights = 12 * C * C
    pairs = 3 * 2 * 16 * 16 * 16  # of queries and keys, times the channels of a head
    assert counted == 3 * 2 * (N * weights + N * C * V + 2 * pairs)


@pytest.mark.slow
def test_a_part_for_a_gpu_that_fails_or_takes_too_long_is_told(capfd):
    import gpu

    assert gpu.ended_well("fine", ["-c", "print('| a |', flush=True)"], 60)
    assert not gpu.ended_well("crash", ["-c", "import os; os.abort()"], 60)
    assert not gpu.ended_well("slow", ["-c", "import time; time.sleep(60)"], 1)
    output = capfd.readouterr().out
    assert "| a |" in output and "ended with status -6" in output
    assert "took longer than what was left of the call" in output


def test_cuda_graphs_that_fail_are_a_row_and_losses_are_beside_those_without(monkeypatch, capsys):
    import gpu

    taken = {"eager": (0.5, [5.0, 4.5]), "compiled": (0.25, [5.0, 4.25])}

    def steps_of(config, way):
        if way not in taken:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return taken[way]

    monkeypatch.setattr(gpu, "steps_of", steps_of)
    gpu.graphs()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| eager", "| compiled"))]
    assert rows == [
        "| eager | 4,096 | 500.00 | 4.5000 | 2.5e-01 |",
        "| compiled | 8,192 | 250.00 | 4.2500 | 0.0e+00 |",
        "| compiled, with CUDA graphs | failed | operation not permitted when stream is capturing |  |  |",
    ]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="a process reads its peak memory from /proc")
def test_measured_memory_is_beside_what_is_predicted():
    import memory
    import paired

    config = next(config for name, config in memory.on_a_cpu().items() if name.startswith("`matmul`"))
    predicted = predict_memory(train_step, config, config.batch_size).peak
    assert 0.5 * predicted < paired.alone(memory.peak, config) < 2 * predicted
