"""What dry_run predicts is what the run then takes; a run that does not fit names the setting to lower."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PRESETS, run_here
from hydra import compose, initialize_config_dir
from test_resume import ROOT, rows
from torch.utils.flop_counter import FlopCounterMode

from errors import SettingsError
from model.config import GPTConfig
from model.gpt import GPT
from model.size import count_parameters, flops_per_token, without_weights
from runs.formatting import si
from settings import CONF, to_settings
from train import train
from training import plan
from training.config import PlanConfig, ScheduleConfig, TrainConfig
from training.plan import Memory, plan_run, predict_memory
from training.run import steps_to_take
from training.size import refuse_too_large

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_parameters_predicted_for_a_preset_are_those_it_has(preset):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = to_settings(compose("train", [f"model={preset}", "run_dir=null"]), TrainConfig).model
    config.vocab_size = 50257
    model = without_weights(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model).total() == expected
    known = {"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}
    assert expected == known.get(preset, expected)


@pytest.mark.parametrize(("head_size", "width"), [(None, 64), (64, 256)])
def test_the_operations_predicted_are_those_counted(head_size, width):
    config = GPTConfig(
        n_layer=2, n_embd=64, n_head=4, head_size=head_size, block_size=32, vocab_size=100, attention="matmul"
    )
    model = GPT(config)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(3, 32, dtype=torch.long)).sum().backward()
    # The counter takes the whole square of scores, of which causal attention needs half.
    whole_square = 6 * config.n_layer * width * config.block_size
    assert counter.get_total_flops() / (3 * 32) == pytest.approx(flops_per_token(model) + whole_square, rel=0.01)


@pytest.mark.parametrize("window", [None, 1, 8, 32, 100])
def test_the_operations_of_attention_are_those_of_the_positions_seen(window):
    config = GPTConfig(n_layer=2, n_embd=64, block_size=32, vocab_size=100, attention_window=window)
    parts = count_parameters(model := without_weights(config))
    seen = np.mean([min(position + 1, window or 32) for position in range(32)])
    attention = flops_per_token(model) - 6 * (parts["attention"] + parts["mlp"] + 100 * 64)
    assert attention == pytest.approx(12 * 2 * 64 * seen, rel=0.04)


MEASURED = {  # a model; batch_size, micro_batch_size, optimizer, recompute
    "the default": ("vocab_size=2048, n_layer=4, n_embd=128, block_size=128", 8, 8, "muon"),
    "accumulating": ("vocab_size=2048, n_layer=4, n_embd=256, block_size=128", 8, 4, "muon"),
    "large vocabulary": (
        "vocab_size=10000, n_layer=2, n_embd=256, block_size=128, position='learned', mlp='gelu', norm='layernorm', "
        "tie_embeddings=True, dropout=0.1",
        *(4, 4, "adamw"),
    ),
    "explicit attention with dropout": (
        "vocab_size=512, n_layer=3, n_embd=192, block_size=256, attention='matmul', attention_dropout=0.1",
        *(4, 4, "muon"),
    ),
    "recomputed": ("vocab_size=512, n_layer=8, n_embd=192, block_size=256", 4, 4, "adamw", "block"),
}

MEASURE = """
import json, sys
import torch
from model.config import GPTConfig
from training.step import take_step
from training.config import OptimizerConfig, TrainConfig
from training.device import peak_memory, reset_peak_memory
from training.plan import predict_memory, trial_run
cpu = torch.device("cpu")
# A smaller run first loads the kernels, whose code is not the model's memory.
small = TrainConfig(model=GPTConfig(n_layer=1, n_embd=32, n_head=2, block_size=8, vocab_size=10), batch_size=1)
take_step(trial_run(small, cpu, torch.float32), 0)
for model, batch, micro, name, *recompute in json.loads(sys.argv[1]):
    sizes = dict(eval_batch_size=1, batch_size=batch, micro_batch_size=micro, recompute=(recompute or ['none'])[0])
    config = TrainConfig(model=eval(f"GPTConfig({model})"), optimizer=OptimizerConfig(name=name), **sizes)
    predicted = predict_memory(config, micro).peak
    reset_peak_memory(cpu)
    before = peak_memory(cpu)
    run = trial_run(config, cpu, torch.float32)
    for step in range(2):
        take_step(run, step)
    print(predicted, peak_memory(cpu) - before)
    del run
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
def test_peak_memory_is_within_15_percent_of_the_measured():
    # The allocator is told to give freed blocks back, so that what is measured is what tensors hold.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", MEASURE, json.dumps(list(MEASURED.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120, check=True)
    for name, line in zip(MEASURED, done.stdout.splitlines(), strict=True):
        predicted, measured = map(int, line.split())
        assert predicted == pytest.approx(measured, rel=0.15), name


@pytest.mark.slow
def test_predicting_takes_neither_the_memory_nor_the_time():
    config = TrainConfig(model=GPTConfig(n_layer=8, n_head=32, n_embd=4096, block_size=1024, vocab_size=50257))
    predicted = predict_memory(config, 1)
    assert predicted.weights == predicted.gradients == 4 * count_parameters(without_weights(config.model)).total()
    assert predicted.peak > 15e9


def test_dry_run_trains_nothing_and_reports_about_the_time_that_the_run_then_takes(train_config):
    report = plan_run(replace(train_config, max_steps=1000))
    words = "parameters |with 257 ids: embedding |arithmetic |text |epochs|memory |weights|gradients|optimizer"
    for word in f"{words}|activations|what tensors hold|time |for 1,000 steps|a step took".split("|"):
        assert word in report
    assert not Path(train_config.run_dir).exists()
    predicted = float(report.split("a step took ")[1].split()[0])
    train(replace(train_config, max_steps=60, eval_interval=100, checkpoint_interval=100, sample_tokens=0))
    assert len(rows(train_config.run_dir)) == 61
    last = json.loads((Path(train_config.run_dir) / "metrics.jsonl").read_text().splitlines()[59])
    assert 0.2 < predicted * 60 / last["seconds"] < 5  # a shared machine; a wrong unit or batch size is further off


@pytest.mark.parametrize("settings", [{}, {"position": "alibi", "attention_window": 8, "n_kv_head": 1}], ids=str)
@pytest.mark.slow
def test_flex_is_planned_for_a_gpu_as_the_fused_kernel_it_is_there(train_config, settings):
    model = replace(train_config.model, vocab_size=257, block_size=512, **settings)
    flex, fused, matmul = (
        predict_memory(replace(train_config, model=replace(model, attention=form)), 4, on_gpu=True).activations
        for form in ("flex", "sdpa", "matmul")
    )
    assert flex == fused and matmul > fused + 4 * 2 * 512**2  # bytes of one layer's scores


def test_dry_run_plans_flex_for_a_gpu_and_refuses_it_where_the_run_would(train_config):
    train_config.model.attention = "flex"
    with pytest.raises(SettingsError, match="attention=flex trains on CUDA only, not on cpu"):
        plan_run(train_config)
    assert "a GPU, fits" in plan_run(replace(train_config, plan=PlanConfig(device="h100")))


def test_dropout_in_a_gpu_s_kernel_takes_no_memory(train_config):
    model = replace(train_config.model, vocab_size=257, block_size=512)
    dropped = replace(train_config, model=replace(model, attention_dropout=0.1))
    without = predict_memory(replace(train_config, model=model), 4, on_gpu=True)
    assert predict_memory(dropped, 4, on_gpu=True) == without != predict_memory(dropped, 4)


def test_a_budget_of_time_is_said_in_steps(train_config, monkeypatch):
    monkeypatch.setattr(plan, "seconds_per_step", lambda *arguments: (0.5, 8))
    config = replace(train_config, eval_interval=10**6, max_minutes=1.0)
    assert " s for 120 steps and 1 evaluations of 1.67 s" in plan_run(replace(config, max_steps=None))
    assert "5.2 s for 7 steps" in plan_run(replace(config, max_steps=7))


def test_a_number_has_the_prefix_that_fits_it_as_it_is_rounded():
    shown = {0: "0 ", 999.94: "999.9 ", 999.96: "1 k", 1_234_567: "1.235 M", 9.9999e11: "1 T", 1e21: "1000 E"}
    assert {number: si(number) for number in shown} == shown


def test_a_plan_for_a_cluster_states_all_ways_and_what_it_assumes(train_config):
    report = plan_run(replace(train_config, plan=PlanConfig(devices=8, device="h100")))
    for word in ("8 × h100", "ddp ", "fsdp ", "of compute", "assumed", "40% of 989", "a GPU, fits"):
        assert word in report
    assert "hsdp  " not in report  # a single machine
    report = plan_run(replace(train_config, batch_size=16, plan=PlanConfig(devices=16, device="h100")))
    assert "hsdp  " in report and "B a step over the link and" in report


def sent(report: str, how: str, way: str) -> float:
    """The bytes that a plan lets a GPU send in a step."""
    (number,) = re.findall(rf"^{how} .* (?:sends|and) ([\d.]+ .?)B a step over the {way}", report, re.MULTILINE)
    value, unit = number.split(" ")
    return float(value) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2), ("fp32", 4)])
def test_a_plans_traffic_is_that_of_gathers_in_the_products_type_and_sums_in_float32(
    train_config, precision, width, monkeypatch
):
    config = replace(train_config, precision=precision, batch_size=64, plan=PlanConfig(devices=32, device="h100"))
    parameters = count_parameters(without_weights(replace(config.model, vocab_size=257))).total()
    held = Memory(4 * parameters, 4 * parameters, 8 * parameters, 0)
    monkeypatch.setattr(plan, "predict_memory", lambda *given, **named: held)
    for micro in (1, 2):
        report, passes = plan_run(replace(config, micro_batch_size=micro)), 2 // micro
        gathered = passes * (2 * width + 4) * parameters
        assert sent(report, "ddp", "network") == pytest.approx(2 * 4 * parameters * 31 / 32, rel=1e-3)
        assert sent(report, "fsdp", "network") == pytest.approx(gathered * 31 / 32, rel=1e-3)
        assert sent(report, "hsdp", "link") == pytest.approx(gathered * 7 / 8, rel=1e-3)
        assert sent(report, "hsdp", "network") == pytest.approx(2 * 4 * parameters / 8 * 3 / 4, rel=1e-3)


@pytest.mark.slow
def test_recomputing_blocks_saves_memory_and_costs_a_third_of_their_arithmetic(train_config, monkeypatch):
    model = GPTConfig(n_layer=6, n_embd=64, block_size=64, vocab_size=257)
    config = replace(train_config, model=model, plan=PlanConfig(devices=2, device="h100"))
    kept, again = (replace(config, recompute=recompute) for recompute in ("none", "block"))
    before, after = (predict_memory(one, 4, torch.bfloat16, gathered=True) for one in (kept, again))
    assert after.activations < before.activations / 2
    monkeypatch.setattr(plan, "predict_memory", lambda *given, **named: after)
    seconds = [float(re.findall(r"compute ([\d.e-]+) s", plan_run(one))[0]) for one in (kept, again)]
    assert 1.25 < seconds[1] / seconds[0] < 1.34 and "blocks recomputed" in plan_run(again)


@pytest.mark.parametrize(
    ("settings", "devices", "device", "named"),
    [
        ({}, 8, "tpu", r"plan\.device=tpu is not known: choose one of v100, a100"),
        ({}, 3, "h100", "batch_size=8 is not a multiple of the 3 processes"),
        (dict(batch_size=24, micro_batch_size=4), 4, "h100", "batch_size=24 .* the 4 processes × micro_batch_size=4"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused_before_the_text_is_prepared(
    train_config, settings, devices, device, named, monkeypatch
):
    monkeypatch.setattr(plan, "open_data", lambda *arguments, **options: pytest.fail("prepared"))
    with pytest.raises(SettingsError, match=named):
        plan_run(replace(train_config, **settings, plan=PlanConfig(devices=devices, device=device)))


def test_a_plan_passes_as_many_windows_at_once_as_the_run_would(train_config, monkeypatch):
    monkeypatch.setattr(plan, "seconds_per_step", lambda config, micro, *arguments: (2, micro))
    config = replace(train_config, micro_batch_size=2)
    assert "a step would take 2 s on cpu (measured on 2 of 8 windows)" in plan_run(config)
    assert "4 windows each, 2 at a time" in plan_run(replace(config, plan=PlanConfig(devices=2, device="h100")))
    monkeypatch.setattr(plan, "free_memory", lambda device: 1000)
    assert "too much for the 1 kB free on cpu: lower model.n_layer=2 or model.n_embd=32" in plan_run(config)
    monkeypatch.setattr(plan, "free_memory", lambda device: 800_000)
    assert "too much for the 800 kB free on cpu: lower micro_batch_size=2" in plan_run(config)


def test_from_the_command_line_a_dry_run_leaves_nothing(text_file, tmp_path):
    settings = f"""dry_run=true data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 device=cpu"""
    result = run_here("train.py", *settings.split(), cwd=tmp_path)
    assert result.returncode == 0 and "\nparameters" in result.stdout, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "text.txt"]


@pytest.mark.parametrize(
    ("error", "size", "remedy"),
    [
        (torch.OutOfMemoryError, 8, "set micro_batch_size=4;"),
        (RuntimeError, 9, "set micro_batch_size=3;"),
        (MemoryError, 1, "choose a smaller model or model.block_size;"),
    ],
)
def test_running_out_of_memory_names_a_smaller_micro_batch(train_config, monkeypatch, error, size, remedy):
    def full(run, step):
        raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes\nmore")

    monkeypatch.setattr("training.step.take_step", full)
    with pytest.raises(SettingsError, match=rf"micro_batch_size={size} needs .* \(.* allocate 99 bytes\): {remedy}"):
        train(replace(train_config, batch_size=size))


def test_a_model_or_a_batch_beyond_all_memory_is_refused(train_config, tmp_path):
    too_wide = replace(train_config, model=replace(train_config.model, n_embd=10**12))
    with pytest.raises(SettingsError, match=r"more than 2\^63 numbers: lower model\.n_embd=1000000000000"):
        train(too_wide)
    with pytest.raises(SettingsError, match="batch_size=1000000000000 is 1,000,000,000,000 windows"):
        train(replace(train_config, batch_size=10**12))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("model.n_layer=1000000", "lower model.n_layer=1000000 or model.n_embd"),
        ("model.n_embd=10000000", "lower model.n_layer=4 or model.n_embd=10000000"),
        ("model.vocab_size=1000000000", "or model.vocab_size=1000000000"),
        ("batch_size=1000000000", "micro_batch_size="),
        ("model.block_size=1000000000", "lower model.block_size"),
    ],
)
def test_a_size_that_no_memory_holds_is_refused_at_once(text_file, tmp_path, setting, remedy, dry_run):
    settings = f"data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte device=cpu run_dir=run {setting}"
    done = run_here("train.py", *settings.split(), f"dry_run={str(dry_run).lower()}", cwd=tmp_path)
    said = done.stderr or done.stdout.splitlines()[-1]  # a report is the answer where it takes no time
    assert remedy in said and len(said.strip().splitlines()) == 1, said
    assert (dry_run or done.returncode == 1) and not (tmp_path / "run").exists()


def test_what_fits_is_not_refused_and_what_does_not_by_a_byte_is():
    config = TrainConfig(model=GPTConfig(vocab_size=257), batch_size=16)
    state = 12 * count_parameters(without_weights(config.model)).total()
    window = 128 * (8 + 2 * 128 * 4)
    refuse_too_large(config, "cpu", state + 16 * window, 1, 16)
    with pytest.raises(SettingsError, match=r"batch_size=16 is 16 windows .*: set micro_batch_size=8 or less"):
        refuse_too_large(config, "cpu", state + 16 * window - 1, 1, 16)
    with pytest.raises(SettingsError, match=r"parameters needs at least .* lower model\.n_layer=4"):
        refuse_too_large(config, "cpu", state - 1, 1, 16)
    refuse_too_large(config, "cpu", state // 2 + 16 * window, 2, 16)  # in two shards


def test_a_warm_up_longer_than_the_run_is_refused():
    config = TrainConfig(schedule=ScheduleConfig(warmup_steps=21), max_steps=20)
    with pytest.raises(SettingsError, match=r"schedule\.warmup_steps=21 is longer than the run of 20 steps"):
        steps_to_take(config, without_weights(GPTConfig(vocab_size=257)))
    assert steps_to_take(TrainConfig(max_steps=2), without_weights(GPTConfig(vocab_size=257))) == 2  # the default's 10
