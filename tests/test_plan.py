"""dry_run's predictions hold; a run that does not fit names the setting to lower."""

import math
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PRESETS, attention_maps, first_of, preset_settings, run_here, some
from test_resume import ROOT, before_step
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import train as train_module
import training.start
from common.errors import SettingsError
from common.settings import from_arguments
from data.config import DataConfig, TalesConfig
from model.attention import FORMS, MODIFIERS
from model.config import GPTConfig
from model.gpt import GPT
from model.size import count_parameters, flops_per_token, without_weights
from runs.checkpoint import Meta, Progress, as_json
from runs.resume import check_settings
from train import train, train_step
from training import plan
from training.config import OptimizerConfig, PlanConfig, TrainConfig
from training.distributed import Ranks
from training.plan import plan_run, predict_memory, trial_run
from training.start import refuse_too_large
from training.terminal import describe

CPU = torch.device("cpu")


@pytest.mark.parametrize("preset", some(PRESETS, 3))
def test_the_parameters_predicted_for_a_preset_are_those_it_has(preset):
    model = without_weights(GPTConfig(**preset_settings(preset) | {"vocab_size": 50257}))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model).total() == expected
    known = {"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}
    assert expected == known.get(preset, expected)


@pytest.mark.parametrize(("head_size", "width"), [(None, 64), (64, 256)])
def test_the_operations_predicted_are_those_counted(head_size, width):
    sizes = dict(n_layer=2, n_embd=64, n_head=4, head_size=head_size, block_size=32, vocab_size=100)
    config = GPTConfig(**sizes, attention="matmul")
    model = GPT(config)
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(3, 32, dtype=torch.long)).sum().backward()
    # The counter takes the whole square of scores, of which causal attention needs half.
    whole_square = 6 * config.n_layer * width * config.block_size
    assert counter.get_total_flops() / (3 * 32) == pytest.approx(flops_per_token(model) + whole_square, rel=0.01)


@pytest.mark.parametrize("window", [None, 1, 8, 100])
def test_the_operations_of_attention_are_those_of_the_positions_seen(window):
    config = GPTConfig(n_layer=2, n_embd=64, block_size=32, vocab_size=100, attention_window=window)
    parts = count_parameters(model := without_weights(config))
    seen = np.mean([min(position + 1, window or 32) for position in range(32)])
    attention = flops_per_token(model) - 6 * (parts["attention"] + parts["mlp"] + 100 * 64)
    assert attention == pytest.approx(12 * 2 * 64 * seen, rel=0.04)


@pytest.mark.parametrize("position", ["rope", "pope"])
@pytest.mark.parametrize("window", [None, 3, 12, 30, 40])
def test_the_operations_of_sparse_attention_are_those_of_the_weights_above_zero(window, position):
    """8 channels a head; PoPE makes 16 of them for a score."""
    sizes = dict(n_layer=1, n_head=4, n_embd=32, block_size=64, vocab_size=100)
    D = 16 if position == "pope" else 8
    for attention in ("moba", "index", "parallax"):
        gpt = GPT(GPTConfig(**sizes, attention=attention, attention_window=window, position=position))
        weights = attention_maps(gpt, torch.randint(100, (1, 64)))
        products = (D + 8) * 4 * (weights != 0)[0, 0].sum()  # of four heads
        visible = [min(t + 1, window or 64) for t in range(64)]
        if attention == "moba":
            products += D * 4 * sum((keys - 1) // 8 for keys in visible)  # the means of earlier blocks of 8
        elif attention == "index":
            products += D * 2 * sum(visible)  # two heads of an indexer
        else:
            products = products * (2 * D + 8) / (D + 8)  # a second product with the keys
        assert gpt.attentions[0].flops(64) == pytest.approx(2 * products.item() / 64, rel=0.05)


MEASURE = """
import torch
from model.config import GPTConfig
from train import train_step
from training.config import OptimizerConfig, TrainConfig
from training.device import peak_memory, reset_peak_memory
from training.plan import predict_memory, trial_run
cpu = torch.device("cpu")
other_parts = dict(position="learned", mlp="gelu", norm="layernorm", tie_embeddings=True, dropout=0.1)
scores = dict(n_layer=3, attention="matmul", attention_dropout=0.1)
for optimizer, recompute, settings in (
    ("adamw", "none", dict(vocab_size=10_000, n_layer=2, n_embd=256, block_size=128) | other_parts),
    ("muon", "none", dict(vocab_size=512, n_embd=192, block_size=256) | scores),
    ("adamw", "block", dict(vocab_size=512, n_layer=8, n_embd=192, block_size=256)),
):
    kinds = dict(optimizer=OptimizerConfig(name=optimizer), recompute=recompute)
    config = TrainConfig(model=GPTConfig(**settings), batch_size=4, **kinds)
    for turn in range(2):  # the first one loads kernels and what they keep, which is not the model's memory
        reset_peak_memory(cpu)
        before = peak_memory(cpu)
        run = trial_run(config, cpu, torch.float32)
        for step in range(2):
            train_step(run, step)
        measured = peak_memory(cpu) - before
        del run
    print(predict_memory(train_step, config, 4).peak, measured)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
def test_peak_memory_is_within_a_tenth_of_the_measured():
    # The allocator is told to give freed blocks back, so that what is measured is what tensors hold.
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120, check=True)
    for line in done.stdout.splitlines():
        predicted, measured = map(int, line.split())
        assert predicted == pytest.approx(measured, rel=0.1)


def recorded_peak(config: TrainConfig) -> int:
    """The most bytes of a run's second step, by torch's record of its allocator."""
    run = trial_run(config, torch.device("cpu"), torch.float32)
    train_step(run, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train_step(run, 1)
    assert recorded.profiler is not None
    events = [*recorded.profiler.kineto_results.experimental_event_tree()]
    sizes = []
    for event in events:
        events += event.children
        if event.tag == _EventType.Allocation:
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(accumulate(size for _, size in sorted(sizes)))


@pytest.mark.long
@pytest.mark.parametrize(
    "attention",
    first_of("softcap+forget+sink", "sdpa", "sdpa+window", "sigmoid", "sparsemax", "stick", "moba", "index"),
)
def test_the_memory_inside_of_chunks_is_predicted_as_torchs_allocator_records_it(attention):
    window = {"attention_window": 64} if "window" in attention else {}
    sizes = dict(n_layer=1, n_head=4, n_embd=16, block_size=512, vocab_size=257)
    config = TrainConfig(model=GPTConfig(attention=attention, **sizes, **window), batch_size=4)
    memory = predict_memory(train_step, config, 4)
    # An index is predicted as a GPU has it, which sorts all rows and not those with equals alone.
    tolerance = 0.2 if attention == "index" else 0.02
    assert memory.gradients + memory.activations == pytest.approx(recorded_peak(config), rel=tolerance)


@pytest.mark.long
@pytest.mark.slow
def test_on_a_gpu_chunks_hold_more_than_fused_attention_does():
    sizes = dict(n_layer=2, n_head=12, n_embd=768, block_size=1024, vocab_size=257)
    held = {}
    for attention in ("sdpa", "sigmoid", "stick"):
        config = TrainConfig(model=GPTConfig(attention=attention, **sizes), batch_size=8)
        held[attention] = predict_memory(train_step, config, 8, torch.bfloat16, on_gpu=True).activations
    chunk = 4 * 8 * 12 * 512 * 1025  # bytes of the scores of 512 queries
    assert held["sdpa"] + 2 * chunk < held["sigmoid"] < held["sdpa"] + 4 * chunk
    assert held["sigmoid"] + chunk < held["stick"] < held["sigmoid"] + 3 * chunk


@pytest.mark.long
def test_muon_holds_no_more_where_it_moves_all_matrices_at_once_as_on_a_gpu(monkeypatch):
    """A dry run takes a CPU's steps, one matrix after the other."""
    config = TrainConfig(model=GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=8, vocab_size=257), batch_size=1)
    predicted = predict_memory(train_step, config, 1, on_gpu=True)
    monkeypatch.setattr("training.optimizer.has_launches", lambda tensor: True)
    at_once = predict_memory(train_step, config, 1, on_gpu=True)
    assert at_once.activations <= predicted.activations
    assert predicted.activations > 2 * 4 * 4 * 384 * 128  # the optimizer's step is the peak: up_proj of four layers


@pytest.mark.long
def test_predicting_takes_no_memory_and_less_is_predicted_where_less_is_kept(train_config):
    config = TrainConfig(model=GPTConfig(n_layer=2, n_head=32, n_embd=8192, block_size=256, vocab_size=50257))
    predicted = predict_memory(train_step, config, 1)
    assert predicted.weights == predicted.gradients == 4 * count_parameters(without_weights(config.model)).total()
    assert predicted.peak > 15e9
    model = GPTConfig(n_layer=4, n_embd=64, block_size=64, vocab_size=257)
    config = replace(train_config, model=model, optimizer=OptimizerConfig(name="adamw"))
    kept, again = (
        predict_memory(train_step, replace(config, recompute=recompute), 4) for recompute in ("none", "block")
    )
    assert again.activations < kept.activations / 2
    # A second micro-batch finds the gradients of the first, beside which it makes its own.
    assert kept.activations > predict_memory(train_step, replace(config, batch_size=4), 4).activations * 1.05
    model = replace(train_config.model, vocab_size=257, block_size=512)  # no kernel of a GPU keeps scores for dropout
    dropped = replace(train_config, model=replace(model, attention_dropout=0.1))
    without = predict_memory(train_step, replace(train_config, model=model), 4, on_gpu=True)
    assert predict_memory(train_step, dropped, 4, on_gpu=True) == without != predict_memory(train_step, dropped, 4)


@pytest.mark.long
@pytest.mark.slow
def test_dry_run_trains_nothing_and_reports_what_the_run_then_takes(train_config, monkeypatch):
    monkeypatch.setattr(plan, "seconds_per_step", lambda step, config, micro, **_: (0.5, micro, 0.5))
    config = replace(train_config, eval_interval=10**6, micro_batch_size=2)
    report = plan_run(train_step, config)
    said = "weights   embedding 8,224, |, for 257 ids|compute |cache |run       20 steps of 8 × 16 tokens, "
    said += "|weights|gradients|optimizer|activations|counts tensors alone|11.7 s for 20 steps and 1 ev"
    assert all(words in report for words in said.split("|"))
    assert "0.5 s a step: 256 tokens/s, " in report and "measured uncompiled on 2 sequences on cpu" in report
    assert not Path(config.run_dir).exists()
    # A budget of time is said in steps.
    assert " s for 120 steps and 1 evaluation of 1.67 s" in plan_run(
        train_step, replace(config, max_steps=None, max_minutes=1.0)
    )
    for other in (dict(max_minutes=1.0), dict(max_flops=1e30)):
        assert "5.2 s for 7 steps" in plan_run(train_step, replace(config, max_steps=7, **other))
    monkeypatch.setattr(plan, "memory_of", lambda device: (1000, 10**9))
    report = plan_run(train_step, config)
    assert report.endswith("too much for the 1 kB free on cpu: lower micro_batch_size=2 or the model")


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "interval"), [(20, 10), (20, 6), (20, 20), (20, 40), (9, 4)])
def test_the_evaluations_of_a_plan_score_as_many_targets_as_those_of_the_run(
    train_config, monkeypatch, no_pictures, steps, interval
):
    monkeypatch.setattr("training.evaluation.FEWEST_TOKENS", 1)
    scored = []

    def counted(run, max_tokens, evaluate_run=train_module.evaluate_run):
        scored.append(run.data.validation_tokens(max_tokens))
        return evaluate_run(run, max_tokens)

    monkeypatch.setattr(train_module, "evaluate_run", counted)
    config = replace(train_config, max_steps=steps, eval_interval=interval, sample_tokens=0)
    train(config)
    line = plan.time_line(config, 3.0 * 8 * 16, training.start.open_data(config, None))  # a second for a target
    evaluations, each = re.search(r"(\d+) evaluations? of ([\d.e+]+) s", line).groups()
    assert int(evaluations) == math.ceil(steps / interval)
    assert int(evaluations) * float(each) == pytest.approx(sum(scored), rel=0.01)


def test_a_plan_says_of_a_tied_model_which_of_its_weights_are_the_head(train_config, monkeypatch):
    """Not the last of them, and not the positions, which are counted with the embedding."""
    monkeypatch.setattr(plan, "predict_memory", lambda *given, **named: plan.Memory(1, 1, 1, 1, 1))
    for tied, ending in ((True, "; lm_head is the embedding of the ids"), (False, "")):
        model = replace(train_config.model, position="learned", tie_embeddings=tied)
        report = plan_run(train_step, replace(train_config, model=model, plan=PlanConfig(device="h100")))
        line = next(line for line in report.splitlines() if line.startswith("weights"))
        assert f"embedding {257 * 32 + 16 * 32:,}, norms" in line and line.endswith(f", for 257 ids{ending}")
        assert ("lm_head 8,224" in line) != tied


def test_a_plan_for_a_gpu_says_if_its_evaluations_do_not_fit(train_config, monkeypatch):
    for evaluation, said in ((10**9, "fits"), (10**11, "does NOT fit 80 GB")):
        memory = plan.Memory(1, 1, 1, 1, evaluation)
        monkeypatch.setattr(plan, "predict_memory", lambda *given, memory=memory, **named: memory)
        report = plan_run(train_step, replace(train_config, plan=PlanConfig(device="h100")))
        assert f"plan      h100, 8 sequences at a time: {said}\n" in report


def test_a_step_is_measured_on_the_windows_of_a_micro_batch_unless_one_takes_too_long(train_config, monkeypatch):
    train_config.model.vocab_size, now, taken, queued = 257, [0.0], [], []

    def train_step(run, step):
        """As on a GPU, which works when the program waits."""
        taken.append(run.config.batch_size)
        queued.append(took * run.config.batch_size * (3 if step == 2 else 1))  # another program slows a step down
        return [SimpleNamespace(item=wait)]

    def wait():
        now[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(plan.time, "perf_counter", lambda: now[0])
    for took, windows in ((4.9, 4), (5.1, 1)):
        found = plan.seconds_per_step(
            train_step, train_config, compiled=False, micro=4, device=CPU, dtype=torch.float32
        )
        assert found == (pytest.approx(took * 8), windows, pytest.approx(took * windows))
        assert taken == [1, 1, 1, 1, 4, 4, 4, 4][: len(taken)]
        taken.clear()


@pytest.mark.slow
def test_a_plan_of_a_run_that_compiles_measures_both_ways(train_config, monkeypatch):
    def seconds(train_step, config, *, compiled, micro, **_):
        """Compiled, twice as fast, after 20 s."""
        share = flops_per_token(without_weights(config.model)) * config.tokens_per_step / 1e9
        return (share / 2, micro, 20.0) if compiled else (share, 1, share)

    monkeypatch.setattr(plan, "seconds_per_step", seconds)
    monkeypatch.setattr(plan, "choose_compile", lambda config, *_: config.compile == "on")
    sizes = []
    for way in ("off", "on"):
        report = plan_run(train_step, replace(train_config, max_steps=None, max_minutes=1.0, compile=way))
        measured = "uncompiled on 1 sequence" if way == "off" else "compiled, which took 20.0 s, on 8 sequences"
        assert f"measured {measured} on cpu" in report
        rate = float(re.search(r"tokens/s, ([\d.]+) GFLOP/s", report)[1])
        assert rate == pytest.approx(1 if way == "off" else 2, rel=0.01)
        sizes.append(int(re.search(r"text: ([\d,]+) parameters", report)[1].replace(",", "")))
    assert sizes[1] >= sizes[0]


@pytest.mark.long
@pytest.mark.slow
def test_memory_is_predicted_of_every_form_and_modifier(train_config):
    layers = [*FORMS, "sdpa+" + "+".join(MODIFIERS), "delta+conv+gate_silu"]
    model = replace(train_config.model, attention="/".join(layers), n_layer=len(layers), vocab_size=257)
    adamw = OptimizerConfig(name="adamw")  # which takes fewer operations than muon
    predicted = predict_memory(train_step, replace(train_config, model=model, optimizer=adamw, batch_size=1), 1)
    assert predicted.activations > 0
    assert predicted.weights == 4 * count_parameters(without_weights(model)).total()


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_for_a_gpu_says_whether_it_fits_and_its_time(train_config):
    config = replace(train_config, precision="auto", batch_size=16, max_steps=10**14, plan=PlanConfig(device="h100"))
    lines = {line.split()[0]: line for line in plan_run(train_step, config).splitlines()}
    assert lines["plan"].endswith("h100, 16 sequences at a time: fits")
    seconds = 256 * flops_per_token(without_weights(replace(config.model, vocab_size=257))) / (0.4 * 989e12)
    days = float(lines["time"].split()[1])
    pauses = 1 + 1_200 / 256 / 3 / 10  # 1,200 tokens at every tenth step, in forward passes
    assert days == pytest.approx(1e14 * seconds * pauses / 86_400, rel=0.02) and "at 40% of 989 T" in lines["time"]
    again = plan_run(train_step, replace(config, recompute="block"))
    assert float(again.split("\ntime ")[1].split(" days")[0]) == pytest.approx(days * 4 / 3, rel=0.01)
    large = replace(config, micro_batch_size=1, model=GPTConfig(n_layer=4, n_head=16, n_embd=12_288))
    assert "h100, 1 sequence at a time: does NOT fit 80 GB" in plan_run(train_step, large)


@pytest.mark.parametrize(
    ("settings", "device", "named"),
    [
        ({}, "tpu", r"plan\.device=tpu is not known: choose one of t4, v100, a100"),
        (dict(batch_size=24, micro_batch_size=7), "h100", "micro_batch_size=7 × 1, .* does not divide batch_size=24"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_is_refused_before_the_text_is_prepared(
    train_config, settings, device, named, monkeypatch
):
    monkeypatch.setattr(plan, "open_data", lambda *arguments, **options: pytest.fail("prepared"))
    with pytest.raises(SettingsError, match=named):
        plan_run(train_step, replace(train_config, **settings, plan=PlanConfig(device=device)))


@pytest.mark.slow
def test_from_the_command_line_a_dry_run_leaves_nothing(text_file, tmp_path):
    settings = f"""dry_run=true data.path={text_file} data.cache_dir={tmp_path}/cache tokenizer=byte model.n_layer=1
        model.n_embd=32 model.block_size=16 device=cpu"""
    result = run_here("train.py", *settings.split(), cwd=tmp_path)
    assert result.returncode == 0 and "\nweights " in result.stdout, result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "text.txt"]


@pytest.mark.parametrize(
    ("error", "size", "remedy"),
    [
        (torch.OutOfMemoryError, 8, "set micro_batch_size=4; nothing has been saved yet."),
        (RuntimeError, 9, "set micro_batch_size=3; nothing has been saved yet."),
        (MemoryError, 1, "set recompute=block; nothing"),
    ],
)
def test_running_out_of_memory_names_a_smaller_micro_batch(train_config, monkeypatch, error, size, remedy):
    def full(run, step):
        raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes\nmore")

    monkeypatch.setattr("train.train_step", full)
    with pytest.raises(
        SettingsError, match=rf"micro_batch_size={size} after step 0 needs .* \(.* allocate 99 bytes\): {remedy}"
    ):
        train(replace(train_config, batch_size=size))


@pytest.mark.slow
def test_memory_that_runs_out_later_names_the_checkpoint_to_go_on_from(train_config, monkeypatch):
    def full(run):
        raise MemoryError

    before_step(monkeypatch, 11, lambda run: run.checkpointer.wait())
    before_step(monkeypatch, 12, full)
    goes_on = f"set micro_batch_size=4; resume={train_config.run_dir} goes on from step_10"
    with pytest.raises(SettingsError, match=goes_on):
        train(train_config)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (dict(n_layer=1_000_000), "lower model.n_layer=1000000 or model.n_embd=32.$"),
        (dict(n_layer=1, n_embd=10**7), ": lower model.n_embd=10000000.$"),
        (dict(n_embd=10**12), r"more than 2\^63 numbers: lower model\.n_embd=1000000000000"),
        (dict(vocab_size=10**9), "or the 1,000,000,000 ids of the vocabulary"),
        (dict(block_size=10**9), "or model.block_size=1000000000"),
        (10**9, "lower micro_batch_size="),
    ],
    ids=str,
)
def test_a_size_that_no_memory_holds_is_refused_at_once(train_config, monkeypatch, settings, remedy, dry_run):
    monkeypatch.setattr(training.start, "memory_of", lambda device: (0, 8 * 10**9))
    monkeypatch.setattr(training.start, "prepare", lambda *given, **named: pytest.fail("prepared"))
    sizes = {"batch_size": settings} if settings == 10**9 else {"model": replace(train_config.model, **settings)}
    with pytest.raises(SettingsError, match=remedy):
        (partial(plan_run, train_step) if dry_run else train)(replace(train_config, **sizes))
    assert not Path(train_config.run_dir).exists()


def test_what_fits_is_not_refused_and_what_does_not_by_a_byte_is(monkeypatch):
    config = TrainConfig(model=GPTConfig(vocab_size=257), batch_size=16)
    state = 12 * count_parameters(without_weights(config.model)).total()
    window = 128 * (8 + 2 * 128 * 4)
    for memory, size, refused in [
        (state + 16 * window, 1, None),
        (state + 16 * window - 1, 1, r"and 16 sequences of 128 tokens .*: lower micro_batch_size=16"),
        (state + window - 1, 1, r"at least 0\.0 GB .* cpu has 0\.0 GB: lower .* or model\.block_size=128"),
        (state - 1, 1, r"parameters .* need at least .* lower model\.n_layer=4 or model\.n_embd=128"),
        (state // 2 + 8 * window, 2, "micro_batch_size|n_layer"),
    ]:
        monkeypatch.setattr(training.start, "memory_of", lambda device, memory=memory: (0, memory))
        ranks, asked = Ranks(size=size), config
        if refused is None:
            refuse_too_large(asked, CPU, ranks)
            continue
        with pytest.raises(SettingsError, match=refused):
            refuse_too_large(asked, CPU, ranks)


def sized(train_config, monkeypatch, minutes, count):
    """Return the lines about size for a machine of 1e11 FLOP/s, and the settings that they name."""

    def seconds(train_step, config, **others):
        return config.tokens_per_step * flops_per_token(without_weights(config.model)) / 1e11, 1, 0.0

    monkeypatch.setattr(plan, "seconds_per_step", seconds)
    monkeypatch.setattr(plan, "predict_memory", lambda *given, **named: plan.Memory(1, 1, 1, 1, 1))
    monkeypatch.setattr(sys, "argv", ["train.py", "data=tales", "dry_run=true", "model.n_embd=7", "model=small"])
    data = DataConfig(source="tales", tales=TalesConfig(count=count), cache_dir=train_config.data.cache_dir)
    report = plan_run(train_step, replace(train_config, data=data, max_steps=None, max_minutes=minutes))
    lines = report[report.index("\nsize ") + 1 :].splitlines()
    named = re.fullmatch(r" +python \S*train.py data=tales (.*)", lines[1])
    return lines, from_arguments(TrainConfig, named[1].split())


@pytest.mark.slow
def test_the_size_for_a_time_is_the_laws_rounded_up(train_config, monkeypatch):
    lines, named = sized(train_config, monkeypatch, 0.5, count=4000)
    assert len(lines) == 2  # no warning of too little text
    assert (named.batch_size, named.model.block_size) == (8, 16)
    compute = 30 * 1e11  # of a token of one byte

    def weights(width):
        config = plan.with_width(replace(train_config, model=replace(train_config.model, vocab_size=257)), width).model
        parts = count_parameters(without_weights(config))
        return parts.total() - parts["embedding"] - parts["lm_head"]

    assert weights(named.model.n_embd - 32) < 0.00691 * compute**0.59 < weights(named.model.n_embd)
    bits = re.search(r"([\d,]+) parameters, about ([\d,]+) steps, ([\d.]+) epochs$", lines[0])
    model = without_weights(replace(named.model, vocab_size=257))
    assert int(bits[1].replace(",", "")) == count_parameters(model).total()
    steps = int(bits[2].replace(",", ""))
    evaluated = (
        16_384 / 3 / 10
    )  # tokens of forward passes, as many of training, beside each step of the ten between two
    assert steps == pytest.approx(compute / flops_per_token(model) / (8 * 16 + evaluated), rel=1e-2)
    assert float(bits[3]) == pytest.approx(steps * 8 * 16 / (0.96 * 4000 * 581), abs=0.1)


@pytest.mark.parametrize(
    ("argv", "begin", "end"),
    [
        (["train.py", "dry_run=true", "+freeze=[blocks.0]", "seed=2"], "python ", ""),
        (["train.py", "-m", "dry_run=true", "seed=1,2"], "max_minutes=1 ", ", beside the other settings of this run"),
        (["ipykernel_launcher.py", "-f", "kernel.json"], "max_minutes=1 ", ", beside the other settings of this run"),
    ],
)
def test_the_command_for_a_time_has_no_setting_of_the_model_or_the_end_before(monkeypatch, argv, begin, end):
    """Typed, it had n_kv_head=2 for one head, a block to freeze that is not there, and an experiment's max_steps."""
    monkeypatch.setattr(sys, "argv", argv)
    model = GPTConfig(n_layer=6, n_embd=32, n_head=4, n_kv_head=2, head_size=8, n_inner=40, vocab_size=257)
    config = TrainConfig(model=model, freeze=["blocks.5"], max_minutes=1.0, max_steps=5, max_flops=1e9)
    data = plan.trial_run(config, CPU, torch.float32).data
    line = plan.size_lines(config, data, 1e6, lambda other: 1.0)[1].strip()
    assert line.startswith(begin) and line.endswith(end)
    words = [word.strip(",") for word in shlex.split(line) if "=" in word]
    named = from_arguments(TrainConfig, words, config)  # as an experiment has them
    assert (named.max_steps, named.max_flops, named.freeze) == (None, None, None)
    assert named.model.n_kv_head is named.model.head_size is named.model.n_inner is None
    assert argv[-1] != "seed=2" or named.seed == 2


@pytest.mark.parametrize(("steps", "is_told"), [(80, False), (81, True)])
def test_a_text_that_is_read_more_than_forty_times_is_told_with_dropout_too(steps, is_told, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "dry_run=true"])
    model = GPTConfig(n_layer=1, n_embd=32, n_head=1, block_size=16, dropout=0.2, vocab_size=257)
    config = TrainConfig(model=model, batch_size=8, eval_interval=10**9, max_minutes=steps / 60)
    data = replace(plan.trial_run(config, CPU, torch.float32).data, train=np.zeros(256, np.uint16))  # two steps
    length = next(line for line in describe(replace(config, max_steps=steps), data, GPT(model)) if "epochs" in line)
    line = plan.size_lines(config, data, 1e6, lambda other: 1.0)[0]
    assert f" {steps / 2:.1f} epochs" in line and f" {steps / 2:.2f} epochs" in length
    assert ("(beyond 40 it may learn" in line) == ("(beyond 40 a model may learn" in length) == is_told


@pytest.mark.long
def test_a_text_that_is_read_more_than_four_times_gets_dropout(train_config, monkeypatch):
    models = []
    for count, typed, given in ((400, 0.0, 0.2), (400, 0.1, 0.0), (4000, 0.0, 0.0)):
        config = replace(train_config, model=replace(train_config.model, dropout=typed))
        lines, named = sized(config, monkeypatch, 5, count)
        passes = float(lines[0].rpartition(", ")[2].removesuffix(" epochs"))
        assert "for 5 min and" in lines[0] and (passes > 4) == (count == 400)
        assert (named.model.dropout, named.max_minutes, named.max_steps) == (given, 5, None)
        steps = int(re.search(r"about ([\d,]+) steps", lines[0])[1].replace(",", ""))
        assert passes == pytest.approx(steps * 8 * 16 / (0.96 * count * 581), rel=0.02, abs=0.05) and len(lines) == 2
        models.append(replace(named.model, dropout=0.0))
    assert models[0] == models[1] == models[2]


@pytest.mark.long
def test_a_plan_without_a_time_says_how_to_learn_the_size_of_new_weights(train_config):
    config = replace(train_config, run_dir=None, resume=train_config.run_dir)
    assert "\nsize " not in plan_run(train_step, config)
    last = plan_run(train_step, train_config).splitlines()[-1]
    assert last == "size      set max_minutes=30, or another time, to learn which size the time and the text deserve"


@pytest.mark.slow
def test_the_time_of_a_gpu_is_that_of_the_runs_type(train_config):
    def time_of(precision):
        config = replace(train_config, plan=PlanConfig(device="t4"), precision=precision)
        return next(line for line in plan_run(train_step, config).splitlines() if line.startswith("time"))

    assert time_of("auto").endswith("at 40% of 65 TFLOP/s")
    assert time_of("fp32").endswith("at 40% of 8.1 TFLOP/s")  # its data sheet


@pytest.mark.long
def test_the_pages_memory_of_a_cloud_gpu_is_the_predicted_one(tmp_path):
    page = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
    ((command, told),) = re.findall(r"^\| T4, 16 GB .*?`python (train.py .*?)` \| .*: ([\d.]+ GB), ", page, re.M)
    text = [
        "data.path=" + str(ROOT / "README.md"),
        "tokenizer=byte",
        "model.vocab_size=2048",
    ]
    done = run_here(*command.split(), "dry_run=true", "plan.device=t4", *text, cwd=tmp_path)
    assert f"memory    {told} in a training step: " in done.stdout, done


@pytest.mark.slow
def test_a_plan_knows_the_parts_that_a_run_freezes(train_config):
    train_config.model.vocab_size = 257
    config = replace(train_config, freeze=["token_embedding", "blocks.0"], dry_run=True)
    whole = predict_memory(train_step, replace(config, freeze=None), 2)
    frozen = predict_memory(train_step, config, 2)
    model = trial_run(config, torch.device("cpu"), torch.float32).model
    nbytes = {name: weight.nbytes for name, weight in model.named_parameters()}
    kept = sum(size for name, size in nbytes.items() if not name.startswith(("token_embedding.", "blocks.0.")))
    assert whole.gradients == whole.weights == frozen.weights == sum(nbytes.values())
    assert frozen.gradients == kept < frozen.weights and frozen.peak < whole.peak
    with pytest.raises(SettingsError, match="freeze=.nothing. has nothing, which the model does not have"):
        plan_run(train_step, replace(config, freeze=["nothing"]))


def test_the_plan_of_a_resumed_run_says_that_it_is_of_all_steps(tmp_path):
    (tmp_path / "checkpoints/step_40").mkdir(parents=True)
    (tmp_path / "checkpoints/step_40/meta.json").write_text(as_json(Meta({}, Progress(step=40))))
    config = TrainConfig(resume=str(tmp_path), max_steps=60)
    for steps in (None, 40, 50):
        (line,) = plan.resumed_line(config, plan.saved_before(config), steps)
        assert line == "resume    goes on at step 40; time and steps here are those of the whole run"
    for config in (TrainConfig(), TrainConfig(resume=f"{tmp_path}/none")):
        assert plan.resumed_line(config, plan.saved_before(config), 9) == []


def test_a_plan_refuses_an_end_before_the_step_where_a_run_is_resumed(tmp_path):
    """It had a price for 10 steps of a run that is at step 40, which resume= refuses."""
    (tmp_path / "checkpoints/step_40").mkdir(parents=True)
    (tmp_path / "checkpoints/step_40/meta.json").write_text(as_json(Meta({}, Progress(step=40))))
    for name, value in (("max_steps", 39), ("max_flops", 1000)):
        said = f"{name}={value} ends before step 40, where resume={tmp_path} is: raise it, or leave it out."
        config = TrainConfig(resume=str(tmp_path), **{name: value})
        with pytest.raises(SettingsError, match=re.escape(said)):
            plan.resumed_line(config, plan.saved_before(config), 39)


def test_a_plan_refuses_the_settings_that_the_resumed_run_would_refuse(tmp_path):
    """It said that a run of one block goes on with three."""
    (tmp_path / "checkpoints/step_40").mkdir(parents=True)
    begun = TrainConfig(model=GPTConfig(n_layer=1, vocab_size=257), resume=str(tmp_path))
    (tmp_path / "checkpoints/step_40/meta.json").write_text(as_json(Meta(asdict(begun), Progress(step=40))))
    deeper = replace(begun.model, n_layer=3)
    for change in (dict(model=deeper), dict(model=deeper, allow_changes=True), dict(seed=2), dict(batch_size=8)):
        with pytest.raises(SettingsError, match=f"^resume={tmp_path} would not be the same run: ") as refused:
            plan_run(train_step, replace(begun, **change))
        with pytest.raises(SettingsError, match=f"^{re.escape(str(refused.value))}$"):
            check_settings(asdict(replace(begun, **change)), Meta(asdict(begun)), asdict(TrainConfig()))
    for change in ({}, dict(max_steps=60, micro_batch_size=4), dict(seed=2, allow_changes=True)):
        config = replace(begun, **change)
        plan.check_resumed(config, plan.saved_before(config))
