"""The device of a process, its model there, and the messages; torch's answers are replaced."""

import contextlib
import io
import logging
import math
import os
import platform
import random
import select
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import random_gpt
from torch import nn

import train as train_module
import training.distributed
from common.console import progress_bar
from common.errors import SettingsError
from common.mistakes import mistakes_explained
from model.config import GPTConfig
from model.cpu import MATMUL
from model.loss import chunk_loss_and_gradient
from model.size import flops_per_token, without_weights
from train import train, train_step
from training import start
from training.config import OptimizerConfig, TrainConfig
from training.device import (
    AOTRITON,
    OLDER_CUDA,
    choose_device,
    fast_products,
    memory_of,
    multiplies_bf16,
    peak_flops,
    peak_memory,
    processor_name,
    to_device,
    warn_once,
)
from training.distributed import Ranks, parallelize
from training.plan import trial_run
from training.start import choose_compile, choose_compiled_loss


@pytest.fixture
def chosen(monkeypatch) -> list[torch.device]:
    """The devices made current on a machine of four GPUs."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))  # no card computes here
    return found


@pytest.mark.parametrize(
    ("name", "process", "processes", "expected"),
    [
        ("auto", 0, 1, "cuda:0"),  # alone
        ("cuda:1", 0, 1, "cuda:1"),  # a job of a sweep, or typed
        ("auto", 3, 4, "cuda:3"),  # under torchrun
        ("cuda", 2, 4, "cuda:2"),
        ("cpu", 3, 8, "cpu"),
    ],
)
def test_a_gpu_is_made_the_current_one_where_it_is_chosen(chosen, name, process, processes, expected):
    assert choose_device(name, process, processes) == torch.device(expected)
    assert chosen == [torch.device(expected)] * expected.startswith("cuda")


@pytest.mark.parametrize(
    ("name", "processes", "sentence"),
    [
        ("cuda:1", 2, "device=cuda:1 gives the 2 processes on this machine no GPU each: leave device=auto"),
        ("auto", 5, "device=auto gives the 5 processes .* at most --nproc-per-node=4"),
        ("cuda:4", 1, "device=cuda:4 is not on this machine"),
    ],
)
def test_a_gpu_that_is_not_there_or_not_for_all_is_refused_on_every_rank(chosen, name, processes, sentence):
    for process in range(processes):
        with pytest.raises(SettingsError, match=sentence):
            choose_device(name, process, processes)
    assert not chosen


@pytest.mark.parametrize(("gpus", "seen"), [(0, "no GPU"), (1, "cuda:0 alone"), (3, "cuda:0 to cuda:2")])
def test_a_gpu_that_a_variable_hides_is_not_said_to_be_absent(monkeypatch, gpus, seen):
    """device=cuda:7 CUDA_VISIBLE_DEVICES=7 was told that this machine had no such GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(SettingsError, match=f"^device=cuda:7 is not there, for CUDA_VISIBLE_DEVICES=7 shows {seen}: "):
        choose_device("cuda:7")


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver."


@pytest.mark.parametrize("broken", ["set_device", "ones"])  # by an old driver; by a card that torch has no kernels for
def test_a_gpu_that_cannot_compute_is_left_to_auto_and_an_error_where_it_is_asked_for(
    chosen, monkeypatch, caplog, broken
):
    monkeypatch.setattr(
        torch.cuda if broken == "set_device" else torch, broken, mock.Mock(side_effect=RuntimeError(OLD_DRIVER))
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    warn_once.cache_clear()
    for _ in range(2):
        assert choose_device("auto") == torch.device("cpu")
    (said,) = (record.getMessage() for record in caplog.records)
    old = "cuda:0 cannot compute (The NVIDIA driver on your system is too old (found version 11040)), so the CPU does: "
    assert said.startswith(old) and said.endswith(OLDER_CUDA)
    for name, processes in (("cuda", 1), ("cuda:1", 1), ("auto", 2)):  # ranks cannot mix devices
        with pytest.raises(SettingsError, match=f"device={name} cannot compute .* update its driver"):
            choose_device(name, 0, processes)


@pytest.mark.parametrize(("cuda", "build"), [(None, "the CPU build"), ("13.0", "built for CUDA 13.0")])
def test_a_card_that_torch_does_not_see_is_told_once_unless_somebody_has_hidden_it(
    tmp_path, monkeypatch, caplog, cuda, build
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = tmp_path / "nvidia0"
    monkeypatch.setattr("training.device.NVIDIA_CARDS", (card,))
    warn_once.cache_clear()
    assert choose_device("auto") == torch.device("cpu") and not caplog.text
    card.touch()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto") == torch.device("cpu") and not caplog.text
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("cpu", "auto", "auto"):
        assert choose_device(name) == torch.device("cpu")
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        f"This machine has an NVIDIA card that torch, {build}, does not see, so the CPU computes: pip "
    )
    assert said.endswith(OLDER_CUDA)


@pytest.mark.parametrize("shown", [None, "0"])
def test_cuda_with_a_card_beside_the_cpu_build_is_answered_with_another_torch(tmp_path, monkeypatch, shown):
    """The sentence was "is not on this machine", or that the variable hides the card."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("training.device.NVIDIA_CARDS", (tmp_path,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(SettingsError) as refused:
            choose_device(name)
        said = (
            f"device={name} is not there, for this machine has an NVIDIA card that torch, the CPU build, does not see: "
        )
        assert str(refused.value).startswith(f"{said}pip install --force-reinstall torch")
    with pytest.raises(SettingsError, match="device=mps is not on this machine"):
        choose_device("mps")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("gfx90a:sramecc+:xnack-", True), ("gfx942", True), ("gfx1100", True), ("gfx1030", False), ("gfx906", False)],
)
def test_an_amd_card_computes_in_bf16_if_its_architecture_does(monkeypatch, architecture, expected):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(gcnArchName=architecture))
    assert multiplies_bf16(torch.device("cuda")) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float32_products_on_cuda_round_to_tf32_unless_the_run_is_in_float32(dtype):
    # Both of torch's settings, or inductor's autotuning would raise.
    settings = lambda: (torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision())  # noqa: E731
    before = settings()
    on_a_cpu = MATMUL.fp32_precision
    with fast_products(torch.device("cuda"), dtype):
        assert settings() == (before if dtype == torch.float32 else ("tf32", "high")) != ("", "")
        assert torch.backends.cuda.matmul.allow_tf32 == (dtype != torch.float32)
    assert settings() == before and on_a_cpu == MATMUL.fp32_precision
    with pytest.raises(KeyError), fast_products(torch.device("cuda"), dtype):
        raise KeyError
    assert settings() == before and on_a_cpu == MATMUL.fp32_precision


def test_a_caller_who_has_set_the_products_by_the_newer_setting_keeps_it():
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        with fast_products(torch.device("cuda"), torch.bfloat16):
            assert products.fp32_precision == "tf32"
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = before


@pytest.mark.parametrize(
    ("architecture", "own", "expected"),
    [("gfx1100", None, "1"), ("gfx1201", None, "1"), ("gfx1100", "0", "0"), ("gfx942", None, None)],
)
def test_radeons_get_the_fused_attention_that_torch_calls_experimental(
    chosen, monkeypatch, architecture, own, expected
):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(gcnArchName=architecture))
    monkeypatch.setenv(AOTRITON, own or "")
    if own is None:
        monkeypatch.delenv(AOTRITON)
    assert choose_device("auto") == torch.device("cuda:0")
    assert os.environ.get(AOTRITON) == expected
    os.environ.pop(AOTRITON, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("Tesla T4", 65e12),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_a_cards_name_tells_its_arithmetic(monkeypatch, name, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == expected


def test_the_name_of_a_processor_is_that_of_the_system_and_of_a_card_its_own(monkeypatch):
    processor_name.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    assert processor_name(torch.device("cuda:1")) == "card 1"
    name = processor_name(torch.device("cpu"))
    assert name.endswith(f" ({torch.backends.cpu.get_cpu_capability()})")
    if shutil.which("lscpu"):
        known = subprocess.run(["lscpu"], env={"LC_ALL": "C"}, capture_output=True, text=True, check=True).stdout
        assert platform.machine() == "aarch64" or name.rpartition(" (")[0] in known
    processor_name.cache_clear()


def test_a_batch_is_moved_to_any_device_and_pinned_for_cuda_in_one_piece(monkeypatch):
    windows = np.arange(12).reshape(3, 4)
    assert to_device(windows[:, :-1], torch.device("meta")).device.type == "meta"
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: (tensor, device, non_blocking))
    tensor, *how = to_device(windows[:, :-1], torch.device("cuda"))
    assert tensor.tolist() == windows[:, :-1].tolist() and how == [torch.device("cuda"), True]
    assert pinned[0].is_contiguous()


@pytest.mark.parametrize(
    ("device", "backend", "bound"),
    [("cuda:3", "cpu:gloo,cuda:nccl", torch.device("cuda:3")), ("cpu", "cpu:gloo", None)],
)
def test_nccl_is_bound_to_the_device_of_the_rank(monkeypatch, device, backend, bound):
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append((given, named["device_id"])))
    monkeypatch.setattr("training.distributed.torchrun_store", dist.HashStore)
    for name, value in {"RANK": 11, "WORLD_SIZE": 16, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    ranks = Ranks.of_torchrun()
    assert ranks == Ranks(11, 16, 3, 8, launched=True)
    ranks.join(torch.device(device))
    assert calls == [((backend,), bound)]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert Ranks.of_torchrun().local_size == 16


def test_a_rank_that_is_told_of_no_other_names_torchrun(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match=r"^RANK=0 finds no other .*MASTER_ADDR.*: start with torchrun") as refused:
        Ranks(0, 2, 0, 2, launched=True).join(torch.device("cpu"))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_blocks_are_compiled_in_place_before_the_root_is_wrapped(monkeypatch):
    """One compiled block after the other: DDP then exchanges gradients meanwhile, not
    the whole model as one compiled function."""
    happened = []
    model = random_gpt()
    plain_loss = model.runtime.loss_and_gradient

    class Wrapped(nn.Module):
        def __init__(self, module, **_):
            super().__init__()
            self.module = module
            happened.append("wrapped")

    monkeypatch.setattr(type(model.blocks[0]), "compile", lambda block: happened.append("compiled"), raising=False)
    monkeypatch.setattr(training.distributed, "DistributedDataParallel", Wrapped)
    ranks = Ranks(0, 2, 0, 2, launched=True)
    with torch._dynamo.config.patch(optimize_ddp=True):
        loss = parallelize(model, ranks, torch.device("cpu"), compiled=True)
        assert not torch._dynamo.config.optimize_ddp
    assert happened == ["compiled", "compiled", "wrapped"]
    assert model.runtime.loss_and_gradient is not plain_loss
    assert isinstance(loss, Wrapped) and loss.module.model is model


def compiles(device, compile="auto", steps=2000, minutes=None, before=None, **settings):
    model = replace(GPTConfig(), vocab_size=257, **settings)
    config = TrainConfig(compile=compile, max_steps=steps, max_minutes=minutes, model=model)
    return choose_compile(config, torch.device(device), without_weights(model), before)


@pytest.fixture
def compiler(monkeypatch):
    """A Linux on which torch can compile."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("training.start.can_compile", lambda *_, **__: True)


def test_long_runs_compile_others_when_asked(compiler, monkeypatch):
    assert compiles("cuda") and not compiles("cuda", "off")
    assert not compiles("cuda", steps=1999) and compiles("cuda", steps=None, minutes=10)
    assert not compiles("cuda", steps=None, minutes=9) and not compiles("cuda", steps=2000, minutes=9)
    # On a CPU by the arithmetic of the run: 5 minutes at 50 GFLOP/s a thread.
    flops = flops_per_token(without_weights(replace(GPTConfig(), vocab_size=257))) * TrainConfig().tokens_per_step
    steps = math.ceil(300 * 50e9 * torch.get_num_threads() / flops)
    assert compiles("cpu", steps=steps) and not compiles("cpu", steps=steps - 1) and compiles("cpu", "on", steps=1)
    assert compiles("cpu", steps=None, minutes=5) and not compiles("cpu", steps=None, minutes=4.9)
    assert not compiles("cpu", steps=steps, minutes=4.9) and not compiles("mps", steps=steps)
    monkeypatch.setattr("sys.platform", "darwin")
    assert not compiles("cpu", steps=steps) and not compiles("cuda")


def test_a_resumed_run_compiles_if_it_did_before(compiler):
    for before in (True, False):
        assert compiles("cpu", steps=1, before=before) == before == compiles("cpu", steps=10**9, before=before)
    assert compiles("cpu", "on", before=False) and not compiles("cpu", "off", before=True)


def test_where_torch_cannot_compile_it_says_so_once_but_not_of_a_cpu(monkeypatch, caplog):
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr("sys.platform", "linux")
    # The loss alone is compiled in short runs too.
    losses = [("auto", "cuda"), ("auto", "cpu"), ("auto", "mps"), ("off", "cuda")]
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: (x, True))
    found = [choose_compiled_loss(TrainConfig(compile=how), torch.device(device)) for how, device in losses]
    assert found == [True, False, False, False]
    monkeypatch.setattr(torch, "compile", mock.Mock(side_effect=RuntimeError("no C compiler\nin many lines")))
    with caplog.at_level(logging.WARNING):
        assert not compiles("cpu", steps=10**9) and not caplog.messages
        assert not compiles("cuda")
    (said,) = caplog.messages
    assert "no C compiler" in said and "many lines" not in said and said.endswith("install a C compiler and Triton.")
    for device, needed in (("cuda", "a C compiler and Triton"), ("cpu", r"a C\+\+ compiler")):
        with pytest.raises(SettingsError, match=rf"compile=on: torch cannot compile here.*: install {needed}, or set"):
            compiles(device, "on")
    full = OSError(28, "No space left on device")
    wrapped = RuntimeError(str(full))
    wrapped.inner_exception = full
    stance = RuntimeError("Detected recompile when torch.compile stance is 'fail_on_recompile'")
    room = "let TMPDIR or TORCHINDUCTOR_CACHE_DIR name a folder with room"
    for error, needed in {full: room, wrapped: room, stance: "train outside"}.items():
        monkeypatch.setattr(torch, "compile", mock.Mock(side_effect=error))
        with pytest.raises(SettingsError, match=rf"compile=on: torch cannot compile here .*: {needed}.*compile=off"):
            compiles("cpu", "on")


def test_a_compiler_that_is_turned_off_is_told_to_those_who_ask_for_it(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # as with TORCH_COMPILE_DISABLE=1
    with pytest.raises(
        SettingsError, match=r"compiler is turned off: unset TORCH_COMPILE_DISABLE .*set_stance\(\), or set compile=off"
    ):
        compiles("cpu", "on")
    assert not compiles("cpu", steps=10**9) and not compiles("cpu", "off")


@pytest.mark.long
@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_torch_obeys_the_variables_that_turn_its_compiler_off(name):
    code = "import torch; from training.device import negated; print(torch.compile(negated)(torch.ones(1)))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {name: "1"}, capture_output=True, text=True)
    assert "False" in done.stdout, done


@pytest.mark.long
def test_a_stance_that_compiles_nothing_more_is_seen_in_a_later_run_of_a_process():
    code = """
import torch
from functools import partial
from training.device import can_compile
torch.compile = partial(torch.compile, backend="eager")
for stance in ("default", "eager_on_recompile", "default", "force_eager"):
    with torch.compiler.set_stance(stance):
        print(can_compile(torch.device("cpu"), is_required=False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "True", "False"], done


@pytest.mark.parametrize(
    ("precision", "dropping"),
    [(torch.float32, {}), (torch.bfloat16, {"dropout": 0.2, "attention_dropout": 0.1, "attention": "matmul"})],
    ids=str,
)
def test_recomputing_blocks_changes_no_bit_of_steps_dropout_included(precision, dropping):
    found = []
    for recompute in ("none", "block"):
        model = GPTConfig(n_layer=3, n_embd=32, block_size=16, vocab_size=61, zero_init=False, **dropping)
        torch.manual_seed(0)
        run = trial_run(TrainConfig(model=model, batch_size=2, recompute=recompute), torch.device("cpu"), precision)
        found.append([figure.item() for step in range(2) for figure in train_step(run, step)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("compiled", [True, False])
def test_the_minutes_of_a_run_leave_out_the_pass_that_compiles_after_a_resume_too(train_config, monkeypatch, compiled):
    """The first pass of each process takes ten minutes if it compiles, a step takes one."""
    now, passes, taken, shares = 0.0, [], [], []

    def first_pass(run, first_pass=start.first_pass):
        nonlocal now
        now += 600
        passes.append(run)
        first_pass(run)

    def step(run, number, step=train_module.train_step):
        nonlocal now
        now += 60
        taken.append((number, shares[-1]))
        return step(run, number)

    def compile_loss(model, *_):
        if compiled:
            model.runtime.loss_and_gradient = partial(chunk_loss_and_gradient)
        return model.loss

    monkeypatch.setattr("training.run.time", mock.Mock(perf_counter=lambda: now))
    monkeypatch.setattr("training.start.time", mock.Mock(perf_counter=lambda: now))
    monkeypatch.setattr("training.start.first_pass", first_pass)
    monkeypatch.setattr("training.start.choose_compile", lambda *_: compiled)
    monkeypatch.setattr("training.start.parallelize", compile_loss)
    monkeypatch.setattr("train.train_step", step)
    monkeypatch.setattr("train.schedule_factor", lambda s, n, done, m: shares.append(done) or 1.0)
    config = replace(train_config, max_steps=None, max_minutes=4, sample_tokens=0, eval_interval=100, log_interval=100)
    train(replace(config, checkpoint_interval=2))
    assert taken == [(0, 0), (1, 0.25), (2, 0.5), (3, 0.75)]
    taken.clear()
    train(replace(config, run_dir=None, resume=train_config.run_dir, max_minutes=20))
    assert len(taken) == 16 and len(passes) == 2 * compiled


# What a terminal, a pipe and a notebook show


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_notebook_shows_the_bar_and_the_lines(train_config, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", mock.Mock())
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "argv", ["/x/ipykernel_launcher.py", "-f", "/x/runtime/kernel-1.json"])
    train(replace(train_config, max_steps=2))
    out, err = capsys.readouterr()
    assert "2/2 [" in err and '"train() in a notebook"' in Path(train_config.run_dir, "report.jsonl").read_text()
    assert "best validation loss" in out and "text      " in out


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "told"), [(1e-12, True), (0.01, False)])
def test_a_loss_that_stays_at_chance_is_told(train_config, caplog, lr, told):
    caplog.set_level(logging.WARNING)
    rates = OptimizerConfig(lr=lr, embedding_lr=None, lm_head_lr=None)
    train(replace(train_config, optimizer=rates, sample_tokens=0))
    remedy = f"raise optimizer.lr={lr:g}, or train longer"
    sentence = f"no better than chance, ln 257 = 5.5491: {remedy}"
    assert (sentence in caplog.messages) == told


@pytest.mark.slow
def test_a_short_text_of_which_nothing_was_learned_is_not_said_to_be_known_by_heart(train_config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "small.txt").write_bytes(bytes(random.Random(1).choices(range(97, 123), k=700)))
    data = replace(train_config.data, path=str(tmp_path / "small.txt"))
    rates = OptimizerConfig(lr=1e-12, embedding_lr=None, lm_head_lr=None)
    train(replace(train_config, data=data, max_steps=40, optimizer=rates, sample_tokens=0))
    assert "beyond 4 a model may learn the text by heart" in caplog.text
    assert "no better than chance, ln 257 = 5.5491: raise optimizer.lr=1e-12, or train longer" in caplog.text


@pytest.mark.parametrize(
    ("terminal", "term", "kernel", "shown"),
    [
        (True, "xterm", False, True),
        (True, "dumb", False, False),
        (False, "xterm", False, False),
        (False, "dumb", True, True),
    ],
)
def test_bars_are_for_terminals_that_can_go_back_and_for_notebooks(monkeypatch, terminal, term, kernel, shown):
    monkeypatch.setitem(sys.modules, "ipykernel", mock.Mock()) if kernel else None
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar(total=2) as bar:
        assert bar.disable is not shown
    for asked in ("0", "1"):  # tqdm's own variable
        monkeypatch.setenv("TQDM_DISABLE", asked)
        with progress_bar(total=2) as bar:
            assert bar.disable is not (shown and asked == "0")
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr("common.console.parent_process", lambda: "a sweep")
    with progress_bar(total=2) as bar:
        assert bar.disable


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudoterminal")
@pytest.mark.parametrize("columns", [0, 80])
def test_a_terminal_of_no_width_gets_lines_in_place_of_an_empty_bar(monkeypatch, columns):
    import fcntl
    import termios

    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(parent), os.fdopen(child, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_bar(total=2) as bar:
            assert bool(bar.disable) == (columns == 0)
        monkeypatch.undo()


def test_a_notebook_keeps_a_drawing_of_the_bar_a_second(monkeypatch):
    """A run of 40 s at 25 steps a second has its first drawing, one a second, and those of its end."""
    now = [0.0]
    drawn = io.StringIO()
    monkeypatch.setattr("common.console.in_notebook", lambda: True)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar(total=1000, file=drawn) as bar:
        for _ in range(1000):
            now[0] += 1 / 25
            bar.update()
    assert 40 <= drawn.getvalue().count("\r") <= 45


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no pseudo-terminals of this kind")
def test_a_bar_follows_the_width_of_the_terminal(monkeypatch):
    import fcntl
    import termios

    ours, theirs = os.openpty()
    with open(ours, "rb", 0) as seen, open(theirs, "w") as terminal, contextlib.ExitStack() as stack:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", terminal)
        for width in (90, 30, 60):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            if width == 90:
                bar = stack.enter_context(progress_bar(total=9, desc="evaluating"))
            for _ in range(2):  # the first erases what was wider
                bar.refresh()
            shown = b""
            while select.select([seen], [], [], 0.3)[0]:  # what is written arrives in pieces
                shown += seen.read(4096)
            drawn = shown.decode().split("\r")[-1]
            assert width - 2 <= len(drawn) <= width


def test_the_memory_of_a_machine_is_its_ram_and_without_resource_psutil_knows_its_peak(monkeypatch):
    cpu = torch.device("cpu")
    free, total = memory_of(cpu)
    assert 0.9 < total / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) <= 1 and 0 < free < total
    process = mock.Mock()
    process().memory_info().peak_wset = 700_000_000
    monkeypatch.setattr("psutil.Process", process)  # as on Windows
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=FileNotFoundError))
    assert peak_memory(cpu) == 700_000_000


@pytest.mark.parametrize("variables", [{}, {"TORCHELASTIC_RUN_ID": "1"}])
def test_a_later_rank_is_silent_only_under_torchrun_whose_first_rank_speaks(monkeypatch, capsys, variables):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match="1"), mistakes_explained():
        Ranks.of_torchrun().join(torch.device("cpu"))
    said = capsys.readouterr().err
    assert said.startswith("error: RANK=1 finds no other (") == (not variables) and bool(said) == (not variables)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "number"), [("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("PMI_SIZE", "PMI_RANK")])
def test_processes_that_another_launcher_started_are_told_that_each_trains_alone(
    train_config, monkeypatch, caplog, size, number
):
    monkeypatch.setenv(size, "1")  # as of a job with one task
    assert not Ranks.warning()
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(number, "2")
    train(replace(train_config, max_steps=1))
    said = [record.getMessage() for record in caplog.records if "has started" in record.getMessage()]
    (line,) = said
    assert "has started 4 processes, and each trains a model of its own" in line and f"{number}=2 is this one" in line
