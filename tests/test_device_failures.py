"""A device that fails or has no memory left ends a run in one sentence with the checkpoint."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import some
from test_resume import before_step

from common.errors import DeviceError, SettingsError
from common.mistakes import mistakes_explained, sentence_for
from model.config import GPTConfig
from runs.checkpoint import read_meta
from runs.checkpointer import AsyncCheckpointer
from runs.metrics import read_metrics
from runs.summary import read_summary
from train import train
from training.config import TrainConfig
from training.device import memory_errors
from training.distributed import Ranks
from training.failures import explain_failures
from training.plan import trial_run
from training.run import Run

pytestmark = pytest.mark.usefixtures("no_pictures")
LAUNCH = torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously")
FAILURES = [
    torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"),
    RuntimeError("CUDA driver error: device not ready"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    torch.AcceleratorError("HIP error: unspecified launch failure"),
    RuntimeError("Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system"),
    RuntimeError("MPS: command buffer exited with error status"),
]


def raising(error: Exception):
    def fail(*arguments, **settings):
        raise error

    return fail


def fail_in(monkeypatch, place: str, error: Exception) -> None:
    """Let a run fail in its 14th step, or at what comes after the tenth."""
    if place == "step":
        before_step(monkeypatch, 13, raising(error))
    elif place == "copy of a save":
        original = torch.Tensor.to
        monkeypatch.setattr(
            torch.Tensor, "to", lambda t, *a, copy=False, **k: raising(error)() if copy else original(t, *a, **k)
        )
    else:
        monkeypatch.setattr(place, raising(error))


PLACES = {  # the step said, and that of the checkpoint
    "step": (13, 10),
    "train.evaluate": (10, 10),
    "train.generate_text": (10, 10),
    "training.log.head_statistics": (10, 10),
    "training.run.Run.weights_are_finite": (10, None),  # at the start of a save
    "copy of a save": (10, None),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "error"), some([*((place, LAUNCH) for place in PLACES), *(("step", e) for e in FAILURES)], 6)
)
def test_a_device_that_fails_ends_the_run_in_a_sentence_that_says_what_is_saved(
    train_config, monkeypatch, caplog, place, error
):
    step, saved = PLACES[place]
    with monkeypatch.context() as patch:
        fail_in(patch, place, error)
        with pytest.raises(DeviceError) as raised:
            train(train_config)
    said, first_line = str(raised.value), str(error).splitlines()[0].rstrip(".")
    kept = f"resume={train_config.run_dir} goes on from step_{saved}" if saved else "nothing has been saved yet"
    advice = "look for the cause in nvidia-smi and dmesg, or set device=cpu"
    assert said == f"cpu failed after step {step} ({first_line}): {advice}; {kept}."
    summary = read_summary(Path(train_config.run_dir))
    assert summary is not None and (summary.status, summary.reason) == ("failed", said)
    assert "training goes on" not in caplog.text
    if saved and error is LAUNCH:
        train(replace(train_config, run_dir=None, resume=train_config.run_dir))
        rows = [row["step"] for row in read_metrics(Path(train_config.run_dir) / "metrics.jsonl") if "loss" in row]
        assert rows == list(range(1, 21))


@pytest.mark.parametrize(
    ("device", "hip", "settings", "error", "remedy"),
    [
        ("mps", None, {}, "MPS backend failed", "set device=cpu"),
        ("cuda", "6.4", {}, "HIP error: unspecified", "look for the cause in rocm-smi and dmesg, or set device=cpu"),
        ("cpu", None, {"recompute": "block"}, "bad_alloc", "choose a smaller model or model.block_size"),
        ("cpu", None, {"code": "my forms.py"}, "bad_alloc", "set recompute=block"),
    ],
)
def test_the_remedy_for_a_failure_is_for_this_device_and_goes_on_with_this_code(
    tmp_path, monkeypatch, device, hip, settings, error, remedy
):
    """nvidia-smi was named on a Mac and for AMD's cards, and the way back had no code=."""
    monkeypatch.setattr(torch.version, "hip", hip)
    config = TrainConfig(model=GPTConfig(n_layer=1, n_embd=32, vocab_size=257), micro_batch_size=1, **settings)
    run = trial_run(config, torch.device("cpu"), torch.float32)
    run.device, run.directory = torch.device(device), tmp_path
    monkeypatch.setattr(AsyncCheckpointer, "last", lambda self: tmp_path / "checkpoints/step_4")
    with pytest.raises(DeviceError) as raised, explain_failures(run):
        raise RuntimeError(error)
    code = " 'code=my forms.py'" if config.code else ""
    assert raised.value.remedy == f"{remedy}; resume={tmp_path}{code} goes on from step_4"


@pytest.mark.slow
def test_memory_that_runs_out_in_a_save_names_the_checkpoint_before_it(train_config, monkeypatch):
    def save(run: Run, original=Run.weights_are_finite) -> bool:
        if run.progress.step == 20:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
            )
        return original(run)

    monkeypatch.setattr(Run, "weights_are_finite", save)
    with pytest.raises(DeviceError) as raised:
        train(train_config)
    assert str(raised.value).startswith(
        "a save after step 20 needs more memory than there is (CUDA out of memory. Tried to allocate 2.00"
    )
    again = f"choose a smaller model or model.block_size; resume={train_config.run_dir} goes on from step_10."
    assert str(raised.value).endswith(again)


@pytest.mark.slow
def test_an_operation_without_an_exact_kernel_names_deterministic(train_config, monkeypatch):
    error = RuntimeError(
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
    )
    monkeypatch.setattr("train.evaluate", raising(error))
    with pytest.raises(SettingsError) as raised:
        train(replace(train_config, deterministic=True))
    torch.use_deterministic_algorithms(False)
    assert str(raised.value) == (
        "deterministic=true cannot be kept on cpu (cumsum_cuda_kernel does not have a deterministic implementation): "
        f"set deterministic=false; resume={train_config.run_dir} goes on from step_10."
    )
    assert read_meta(Path(train_config.run_dir) / "checkpoints/last").progress.step == 10
    with pytest.raises(RuntimeError, match="cumsum_cuda_kernel"):  # nobody has asked for it
        train(replace(train_config, run_dir=f"{train_config.run_dir}2"))


def test_a_mistake_of_ours_stays_a_traceback(train_config, monkeypatch):
    message = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    before_step(monkeypatch, 3, raising(RuntimeError(message)))
    with pytest.raises(RuntimeError, match="Expected all tensors"):
        train(train_config)
    assert sentence_for(RuntimeError(message)) is None


TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 7.92 GiB of which 100.00 MiB is free. "
    "Including non-PyTorch memory, this process has 3.00 GiB memory in use."
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (f"{TORCHS} Of the allocated memory 2.70 GiB is allocated by PyTorch", f"the sample needs more ({TORCHS[:-1]}"),
        ("CUDA error: out of memory\nCUDA kernel errors", "(CUDA error: out of memory)"),
        ("DefaultCPUAllocator: can't allocate memory: you tried", "(DefaultCPUAllocator: can't allocate memory: you"),
    ],
)
def test_memory_that_runs_out_is_told_with_what_is_free_and_who_holds_it(message, said):
    with pytest.raises(DeviceError) as raised, memory_errors("the sample needs more", "lower it"):
        raise RuntimeError(message)
    assert said in str(raised.value) and "allocated by" not in str(raised.value)


def test_a_device_that_fails_in_another_command_is_a_sentence_too():
    assert sentence_for(LAUNCH) == (
        "the GPU failed (CUDA error: unspecified launch failure): look for the cause in nvidia-smi and dmesg, "
        "or set device=cpu."
    )


MISSING = NotImplementedError(
    "The operator 'aten::linalg_qr' is not currently implemented for the MPS device. If you want this op to be added "
    "in priority during the prototype phase of this feature, please comment on https://github.com/pytorch/pytorch"
)


@pytest.mark.slow
def test_an_operation_that_apples_gpus_lack_is_no_broken_card(train_config, monkeypatch):
    before_step(monkeypatch, 13, raising(MISSING))
    with pytest.raises(SettingsError) as raised:
        train(train_config)
    lacking = "The operator 'aten::linalg_qr' is not currently implemented for the MPS device"
    remedy = "set the environment variable PYTORCH_ENABLE_MPS_FALLBACK=1, or device=cpu"
    again = f"resume={train_config.run_dir} goes on from step_10."
    assert str(raised.value) == f"device=cpu lacks an operation of this run ({lacking}): {remedy}; {again}"
    assert sentence_for(MISSING) == f"Apple's GPU lacks an operation of this command ({lacking}): {remedy}."
    assert sentence_for(NotImplementedError("a method of ours")) is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SettingsError("max_steps=0 must be at least 1"), False),
        (DeviceError("cuda:1 failed after step 3"), True),
        (LAUNCH, True),
    ],
)
def test_under_torchrun_a_mistake_is_told_once_and_a_failed_device_by_its_process(monkeypatch, capsys, error, told):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # as torchrun does
    monkeypatch.setattr(os, "_exit", raising(SystemExit(1)))
    with pytest.raises(SystemExit), mistakes_explained():
        raise error
    assert ("error: " in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("launched", "message", "kind"),
    [
        (True, "NCCL error: Connection closed by peer", SettingsError),
        (
            True,
            "NCCL error: unhandled cuda error. Last error: Cuda failure 719 'unspecified launch failure'",
            DeviceError,
        ),
        (False, "Connection closed by peer", RuntimeError),
    ],
)
def test_a_rank_that_is_gone_is_told_apart_from_a_device_of_this_one(train_config, tmp_path, launched, message, kind):
    config = replace(train_config, model=replace(train_config.model, vocab_size=257))
    run = trial_run(config, torch.device("cpu"), torch.float32)
    run.ranks, run.directory = Ranks(0, 2, 0, 2, launched=launched), tmp_path
    with pytest.raises(kind) as raised, explain_failures(run):
        raise RuntimeError(message)
    assert type(raised.value) is kind
    assert ("another process ended after step 0" in str(raised.value)) == (kind is SettingsError)
