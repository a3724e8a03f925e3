"""Memory: what a training step takes, found with tensors that have shapes but no data; what is free, and the peak."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from errors import SettingsError
from model.gpt import GPT
from runs.saver import Saver
from training.config import TrainConfig
from training.distributed import Ranks
from training.optimizer import make_optimizers, optimizer_state

CPU_ALLOCATOR = 1.8
"""Memory that a process holds on a CPU, in units of what its tensors do: the most that was measured is 1.74, with glibc
and keep_freed_memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device that holds the whole model."""

    weights: int
    gradients: int
    optimizer: int
    """Between steps."""
    activations: int
    """What the fullest moment of a step has beside these: activations, and what is only there for a moment."""
    evaluation: int
    """What the fullest moment of an evaluation has beside the weights and the optimizer's state."""

    @property
    def peak(self) -> int:
        training = self.gradients + self.activations
        return self.weights + self.optimizer + max(training, self.evaluation)

    @property
    def copy_for_saving(self) -> int:
        """In the main memory, for checkpoints written in the background."""
        return self.weights + self.optimizer


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made within it that are still alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def predict_memory(config: TrainConfig, micro_batch_size: int, precision: torch.dtype = torch.float32) -> Memory:
    """The memory of a run of `config`, whose model.vocab_size is known, without taking that memory.

    The tensors carry shapes and no data, so the largest model takes seconds on the smallest machine.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second that most runs do not need

    from training.step import take_step

    # Two micro-batches show all there is: the second one finds the gradients of the first.
    few = replace(config, batch_size=min(config.batch_size, 2 * micro_batch_size), micro_batch_size=micro_batch_size)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        run = trial_run(few, torch.device("cpu"), precision)
        weights = live.now
        take_step(run, 0)  # makes the optimizer's state
        state = sum(tensor.nbytes for tensor in optimizer_state(run.model, run.optimizers).values())
        live.most = before = live.now
        take_step(run, 1)
        step = live.most - before
        evaluation = _evaluation_bytes(run, live)
    return Memory(weights, weights, state, max(0, step - weights), evaluation)


def trial_run(config: TrainConfig, device: torch.device, precision: torch.dtype) -> Any:
    """What take_step needs of a run, on made-up text, alone, and leaving nothing behind."""
    with device:
        model = GPT(config.model)
    block_size = config.model.block_size
    return SimpleNamespace(
        config=config,
        ranks=Ranks(),
        device=device,
        micro_batch_size=config.micro_batch_size or config.batch_size,
        batches=SimpleNamespace(batch=lambda step, first, stop: np.zeros((stop - first, block_size + 1), np.int64)),
        model=model,
        forward=model,
        autocast=torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32),
        scaler=GradScaler(device.type, enabled=False),
        optimizers=make_optimizers(model, config.optimizer),
        saver=Saver(Path(), keep=0),
        count_skipped=lambda skip: None,
    )


def choose_micro_batch_size(config: TrainConfig, ranks: Ranks, device: torch.device, precision: torch.dtype) -> int:
    """Windows in one forward pass of this rank; SettingsError when not even one fits its memory."""
    share = windows_each(config, ranks.size)
    if config.micro_batch_size == "auto":
        beside = ranks.size if device.type == "cpu" else 1  # processes that share this memory
        size = ranks.from_first(largest_that_fits(config, share, free_memory(device) // beside, precision, device))
        if size is None:
            raise SettingsError(
                f"micro_batch_size=auto: not even one window fits the memory free on {device}: choose a smaller model, "
                f"model.block_size or eval_batch_size={config.eval_batch_size}, or more devices with distributed=fsdp."
            )
        return size
    return config.micro_batch_size or share


def windows_each(config: TrainConfig, processes: int) -> int:
    """Windows of a step that each process has; SettingsError when the batch cannot be shared or passed evenly."""
    if config.batch_size % processes:
        raise SettingsError(
            f"batch_size={config.batch_size} is not a multiple of the {processes} processes: choose one that is."
        )
    share, size = config.batch_size // processes, config.micro_batch_size
    if isinstance(size, int) and share % size:
        raise SettingsError(
            f"micro_batch_size={size} does not divide the {share} windows of batch_size={config.batch_size} that each "
            f"of {processes} processes has: choose a divisor, or null."
        )
    return share


def largest_that_fits(
    config: TrainConfig, share: int, free: int, precision: torch.dtype, device: torch.device
) -> int | None:
    """The largest divisor of `share` windows whose step fits into `free` bytes of the device, if any does.

    Beside the tensors there must be room for what the allocator keeps and kernels take for themselves.
    """
    room = free / CPU_ALLOCATOR if device.type == "cpu" else 0.8 * free
    for size in (size for size in range(share, 0, -1) if share % size == 0):
        if predict_memory(config, size, precision).peak <= room:
            return size
    return None


@contextmanager
def memory_named(run: Any) -> Iterator[None]:
    """Within it running out of memory ends in a SettingsError that names micro_batch_size and one that would fit."""
    try:
        yield
    except MemoryError as error:  # numpy's
        raise SettingsError(
            f"micro_batch_size={run.micro_batch_size} windows of text are more than the main memory holds ({error}): "
            "lower it, or batch_size where it is null."
        ) from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        size, precision = run.micro_batch_size, getattr(torch, run.precision)
        reason = str(error).splitlines()[0]
    # Outside of the handler, whose traceback would keep the step's tensors alive.
    else:
        return
    free = free_memory(run.device) + _held(run.device)
    largest = largest_that_fits(run.config, size, free, precision, run.device)
    remedy = f"set micro_batch_size={largest}" if largest and largest < size else "choose a smaller model or block_size"
    raise SettingsError(
        f"micro_batch_size={size} is more than the memory of {run.device} holds ({reason}): {remedy}; "
        f"the result stays the same, and what is in {run.directory / 'checkpoints'} can be resumed."
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch's says that a tensor does not fit the memory of its device."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _held(device: torch.device) -> int:
    """What this process could give back to a step that takes less."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _evaluation_bytes(run: Any, live: LiveBytes) -> int:
    block_size, batch_size = run.config.model.block_size, run.config.eval_batch_size
    live.most = before = live.now
    with torch.no_grad(), run.autocast:
        windows = torch.from_numpy(np.zeros((batch_size, block_size), np.int64))
        logits = run.model(windows).flatten(0, 1).float()
        torch.nn.functional.cross_entropy(logits, windows.flatten(), reduction="sum")
    return live.most - before


def free_memory(device: torch.device) -> int:
    """Bytes that a run could take on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def reset_peak_memory(device: torch.device) -> None:
    """Let peak_memory count from what is held now; without CUDA and Linux it counts from the process's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def peak_memory(device: torch.device) -> int:
    """The most bytes held since reset_peak_memory: on CUDA by tensors, else by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):  # not Linux
        import resource

        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
