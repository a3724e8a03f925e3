"""Where and in which precision a run computes: `auto` resolved, and what is not there refused."""

from __future__ import annotations

import os
import sys

import torch

from training.config import SettingsError


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device called `name`; auto prefers CUDA, then MPS, then the CPU.

    local_rank: this process's number among those on its machine, each of which has a CUDA device of its own.
    """
    if local_rank is not None and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{local_rank}"
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"device={name} is not a device: choose auto, cpu, cuda, cuda:1 or mps.") from None
    there = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= there.get(device.type, 0):
        raise SettingsError(f"device={name} is not on this machine: choose device=auto to use what is there.")
    return device


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass's matrix products; weights and optimizer stay float32."""
    if name == "auto" and device.type == "cuda":
        name = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


def make_deterministic(wanted: bool) -> None:
    """Let CUDA use only kernels that give the same bits every time, or any again; on a CPU they do anyway."""
    if wanted:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)


def choose_compile(name: str, device: torch.device) -> bool:
    """Whether to torch.compile; auto says yes on CUDA under Linux, where Triton is."""
    return name == "on" or (name == "auto" and device.type == "cuda" and sys.platform == "linux")
