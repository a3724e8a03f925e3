"""Where and in which precision a run computes: `auto` resolved, and what is not there refused."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from errors import SettingsError


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
    if name == "auto" and multiplies_bf16(device):
        name = "bf16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products in bf16 are faster than in float32 there; without the instructions they are far slower."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16", False))


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Within it, float32 matrices are multiplied by oneDNN where that is as exact as torch's usual library.

    The usual one (MKL) leaves half the speed of an AMD processor with AVX-512 unused. torch takes oneDNN
    when bf16 is allowed; where the processor has AMX that rounds to bf16, elsewhere it does not.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    if device.type == "cpu" and multiplies_bf16(device) and _onednn_keeps_float32():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _onednn_keeps_float32() -> bool:
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        finer_than_bf16 = torch.full((256, 256), 1 + 2**-20)
        return torch.equal(finer_than_bf16 @ torch.eye(256), finer_than_bf16)
    finally:
        matmul.fp32_precision = before


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones; elsewhere it does nothing.

    By default it hands large blocks back to the system, and their pages come anew, zeroed, one fault each, at
    every use: that took half the time of a training step of small models. The process holds what it held at its peak.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the most it takes
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 64 << 20)


def make_deterministic(wanted: bool) -> None:
    """Let CUDA use only kernels that give the same bits every time, or any again; on a CPU they do anyway."""
    if wanted:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
    if wanted != torch.are_deterministic_algorithms_enabled():  # to ask imports torch's compiler
        torch.use_deterministic_algorithms(wanted)


def choose_compile(name: str, device: torch.device) -> bool:
    """Whether to torch.compile; auto says yes on CUDA under Linux, where Triton is."""
    return name == "on" or (name == "auto" and device.type == "cuda" and sys.platform == "linux")
