"""Device and precision of a run, copies to the device, and its memory."""

import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import FunctionType

import numpy as np
import psutil
import torch
from torch import Tensor

from common import machine
from common.errors import DeviceError, SettingsError, first_line, lacks_memory
from common.threads import thread_limit, threads_asked
from data.batches import Batch
from model import cpu

log = logging.getLogger("tinygpt")

# GPUs by their data sheets: dense bf16 (T4, V100: fp16) FLOP/s, those in float32, and bytes of memory.
DEVICES = {
    "t4": (65e12, 8.1e12, 16e9),
    "v100": (125e12, 15.7e12, 32e9),
    "a100": (312e12, 19.5e12, 80e9),
    "h100": (989e12, 67e12, 80e9),
    "h200": (989e12, 67e12, 141e9),
    "b200": (2250e12, 75e12, 180e9),
    "l4": (121e12, 30.3e12, 24e9),
    "l40s": (362e12, 91.6e12, 48e9),
    "a10": (125e12, 31.2e12, 24e9),
    "rtx3060": (25e12, 12.7e12, 12e9),  # GeForce adds up in float32 at half its rate
    "rtx3090": (71e12, 35.6e12, 24e9),
    "rtx4090": (165e12, 82.6e12, 24e9),
    "rtx5090": (209e12, 104.8e12, 32e9),
}
# A torch for the drivers and cards that the newest one leaves out: CUDA 12 drivers, and cards from Pascal on.
OLDER_CUDA = 'pip install "torch>=2.11,<2.15" --index-url https://download.pytorch.org/whl/cu126'
SEEN_AGAIN = f"pip install --force-reinstall torch needs a driver from 580 on; for older ones {OLDER_CUDA}"
# Files that the driver of an NVIDIA card makes, on Linux and under WSL.
NVIDIA_CARDS = (Path("/dev/nvidia0"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
# AMD's architectures with matrix instructions for bf16: MI100 to MI355, and Radeons from RDNA 3 on.
RADEON_WITHOUT_FLASH = ("gfx11", "gfx12")
"""AMD's cards whose fused attention torch calls experimental, and leaves out unless AOTRITON says otherwise."""
AOTRITON = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def choose_device(name: str, process: int = 0, processes: int = 1) -> torch.device:
    """Return the device called `name`; auto prefers CUDA, then MPS, then the CPU.

    A GPU becomes CUDA's current device. process: the number of this process among torchrun's `processes` on this
    machine, which get one GPU each. Raises SettingsError if the machine lacks the device, or it cannot compute.
    """
    # Find the device that the name means.
    gpus = torch.cuda.device_count()
    counts = {"cuda": gpus, "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    try:
        device = torch.device(next(kind for kind, count in counts.items() if count) if name == "auto" else name)
    except RuntimeError:
        remedy = "choose auto, cpu, cuda, cuda:1 or mps"
        if any(letter.isdigit() for letter in name):
            remedy += "; docs/hardware.md chooses several GPUs"
        raise SettingsError("is not a device", remedy, setting="device", value=name) from None

    # Refuse a device that this machine lacks, or a GPU that processes would share.
    if device.type == "cuda" and gpus and processes > 1 and (device.index is not None or processes > gpus):
        problem = f"device={name} gives the {processes} processes on this machine no GPU each"
        raise SettingsError(problem, f"leave device=auto, and start at most --nproc-per-node={gpus}")
    if (device.index or 0) >= counts.get(device.type, 0):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        may_hide = shown is not None and torch.version.cuda  # a torch without CUDA sees no card in any case
        if device.type == "cuda" and not gpus and not may_hide and has_unused_card():
            problem = f"device={name} is not there, for this machine has {unseen_card()}"
            raise SettingsError(problem, f"{SEEN_AGAIN}; or set device=cpu")
        if device.type == "cuda" and shown is not None:  # which also numbers them anew, from 0
            seen = f"cuda:0 to cuda:{gpus - 1}" if gpus > 1 else "cuda:0 alone" if gpus else "no GPU"
            problem = f"device={name} is not there, for CUDA_VISIBLE_DEVICES={shown} shows {seen}"
            raise SettingsError(problem, "change that variable, or choose device=auto to use the best there is")
        raise SettingsError(f"device={name} is not on this machine", "choose device=auto to use the best there is")
    if device.type == "cuda":
        device = torch.device("cuda", process if device.index is None else device.index)

    # Refuse a device that cannot compute; auto without torchrun falls back to the CPU.
    failure = start_problem(device)
    if failure:
        remedy = "update its driver, or install a torch that supports it"
        if device.type == "cuda" and torch.version.cuda:
            remedy = f"update its driver, or install a torch for older drivers and cards: {OLDER_CUDA}"
        if name != "auto" or processes > 1:
            raise SettingsError(f"device={name} cannot compute ({failure})", f"{remedy}; or set device=cpu")
        warn_once(f"{device} cannot compute ({failure}), so the CPU does: {remedy}")
        return torch.device("cpu")
    if name == "auto" and device.type == "cpu" and has_unused_card():
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        is_shown = torch.version.cuda and variable
        shown = f"correct CUDA_VISIBLE_DEVICES={variable} if that hides it; " if is_shown else ""
        warn_once(f"This machine has {unseen_card()}, so the CPU computes: {shown}{SEEN_AGAIN}")
    return device


@cache
def warn_once(message: str) -> None:
    """Log a warning unless this process has done so, as an earlier job of a sweep may have."""
    log.warning(message)


def has_unused_card() -> bool:
    """Return whether there is an NVIDIA card that nobody has hidden; ask if torch sees none."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(map(Path.exists, NVIDIA_CARDS))


def unseen_card() -> str:
    """Return what has_unused_card() has found, and which torch misses it."""
    build = "the build for AMD's cards" if torch.version.hip else "the CPU build"
    if torch.version.cuda:
        build = f"built for CUDA {torch.version.cuda}"
    return f"an NVIDIA card that torch, {build}, does not see"


def start_problem(device: torch.device) -> str | None:
    """Try to add two numbers on a device; return the first line of the error, or None.

    Makes a GPU CUDA's current device. A GPU is listed even if its driver is too old for this torch, or torch has no
    kernels for its architecture.
    """
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # CUDA graphs use the current device
            if torch.version.hip and architecture(device).startswith(RADEON_WITHOUT_FLASH):
                # torch asks once, at the first attention, which would otherwise write all its weights.
                os.environ.setdefault(AOTRITON, "1")
        if device.type != "cpu":
            torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        return first_line(error)
    return None


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the matrix products in a forward pass; weights stay float32."""
    if name == "auto" and multiplies_bf16(device):
        name = "bf16"
    if name == "auto" and device.type == "cuda":
        name = "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


def decoding_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights for decoding: auto is bf16 on a GPU that has it, else float32."""
    # Decoding takes as long as memory takes to deliver the weights. auto is never fp16, which overflows in a model
    # trained without it.
    if name == "auto" and not (device.type == "cuda" and multiplies_bf16(device)):
        name = "fp32"
    return choose_precision(name, device)


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether bf16 products are faster than float32 ones; emulated ones are far slower."""
    if device.type == "cuda" and torch.version.hip:
        # torch's is_bf16_supported() is true for every AMD card.
        return architecture(device).startswith(AMD_WITH_BF16)
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and cpu.multiplies_bf16()


def architecture(device: torch.device) -> str:
    """Return the architecture of an AMD card, such as gfx1100."""
    return torch.cuda.get_device_properties(device).gcnArchName


@contextmanager
def fast_products(device: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Allow, inside, the fastest float32 products that suit a forward pass of `dtype`.

    On CUDA that is TF32 for products that autocast leaves in float32; it is finer than bf16. With precision=fp32 they
    are exact. On a CPU see model/cpu.py.
    """
    if device.type == "cpu":
        with cpu.fast_products():
            yield
    elif device.type == "cuda" and dtype != torch.float32:
        with tf32_products():
            yield
    else:
        yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Round the factors of float32 products to TF32 on CUDA.

    torch has two settings for it. Inductor's autotuning reads the older one, which raises if only the newer one is set;
    set_float32_matmul_precision() sets both.
    """
    new_settings = torch.backends.cuda.matmul, cpu.MATMUL
    before = [setting.fp32_precision for setting in new_settings]
    try:
        old_setting = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set the newer one alone: keep to it
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(old_setting)
        for setting, value in zip(new_settings, before, strict=True):
            setting.fp32_precision = value


def can_compile(device: torch.device, *, is_required: bool, warns: bool = True) -> bool:
    """Return whether torch can compile for the device, and warn if it cannot.

    warns: whether to do so. Raises SettingsError instead if it `is_required`, by compile=on. torch then computes
    uncompiled without a word where a variable of the environment or torch.compiler.set_stance() turns its compiler off.
    """
    outside = "train outside torch.compiler.set_stance()"
    # Some stances use functions that an earlier run has compiled: ask with a copy that torch does not know.
    unknown = FunctionType(negated.__code__.replace(), negated.__globals__)
    try:
        _, is_compiled = torch.compile(unknown)(torch.zeros(8, device=device))
    except Exception as error:  # Triton, the C compiler and torch document no types
        problem = f"torch cannot compile here ({first_line(error)})"
        needed = "install a C++ compiler" if device.type == "cpu" else "install a C compiler and Triton"
        if isinstance(getattr(error, "inner_exception", error), OSError):  # of its cache, perhaps in torch's own error
            needed = "let TMPDIR or TORCHINDUCTOR_CACHE_DIR name a folder with room that you may write to"
        if "torch.compile stance is" in problem:
            needed = outside
        if is_required:
            raise SettingsError(f"compile=on: {problem}", f"{needed}, or set compile=off") from None
        if warns:
            log.warning("%s: training goes on uncompiled, which is slower; %s.", problem, needed)
        return False
    if is_required and not is_compiled:
        remedy = f"unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, {outside}, or set compile=off"
        raise SettingsError("compile=on: torch's compiler is turned off", remedy)
    return is_compiled


def negated(x: Tensor) -> tuple[Tensor, bool]:
    """Return -x, and whether torch has compiled this function."""
    return -x, torch.compiler.is_compiling()


def run_eagerly(compiled: bool) -> AbstractContextManager[object]:
    """Return a context in which a compiled model runs eagerly."""
    # Evaluations and samples have many shapes, and each would compile.
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def batch_to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return inputs, targets and doc_starts (or None) on a device, (B, T) each."""
    doc_starts = None if batch.doc_starts is None else to_device(batch.doc_starts, device)
    return to_device(batch.inputs, device), to_device(batch.targets, device), doc_starts


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # Copy asynchronously: the CPU prepares the next batch while the GPU computes. That needs pinned memory, and only a
    # contiguous tensor can be pinned.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@contextmanager
def memory_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn numpy's and torch's errors of memory into a DeviceError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        shortage = memory_shortage(error)
        if shortage:
            raise DeviceError(f"{problem} ({shortage})", remedy) from None
        raise


def memory_shortage(error: BaseException) -> str | None:
    """Return the message of an error of memory, or None for another error.

    Of a GPU torch says how much is free and how much this process holds: other programs may hold the rest.
    """
    if not lacks_memory(error):
        return None
    return first_line(error).partition(" Of the allocated memory")[0]  # the rest are the allocator's figures


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of a device in bytes; for a CPU of the RAM."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else machine.memory()


def limit_threads() -> None:
    """Let torch take no more threads than OMP_THREAD_LIMIT and than a container keeps busy.

    OMP_NUM_THREADS goes before the container.
    """
    threads = torch.get_num_threads()
    most = thread_limit() or threads
    if threads_asked() is None:
        most = min(most, machine.processors())
    if most < threads:
        torch.set_num_threads(most)


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Return a GPU's FLOP/s by its data sheet, dense in 16 bits; None if unknown."""
    if device.type != "cuda":
        return None
    words = re.split(r"\W+", torch.cuda.get_device_name(device).lower().replace("rtx ", "rtx"))
    column = 1 if dtype == torch.float32 else 0
    known = [figures[column] for kind, figures in DEVICES.items() if kind in words]
    # DEVICES has the boards for SXM sockets and desktops; those for PCIe, NVL and laptops are slower, others faster.
    return known[0] if known and not {"pcie", "nvl", "laptop", "ti", "super", "d"} & {*words} else None


@cache
def processor_name(device: torch.device) -> str:
    """Return the name of a GPU, or that of the CPU with the instructions that torch takes of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = []
    with suppress(OSError):  # a file of Linux, which has no name on ARM
        names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.MULTILINE)
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def reset_peak_memory(device: torch.device) -> None:
    """Let peak_memory() count from now; it cannot without CUDA or Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held since reset_peak_memory(), on CUDA by tensors alone."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        return int(Path("/proc/self/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]) * 1024
    try:
        import resource
    except ImportError:  # on Windows
        return psutil.Process().memory_info().peak_wset  # type: ignore[attr-defined]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes
