"""Memory: what a training step needs, predicted with tensors that have no data; what is free, and the peak."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.batches import Batches
from data.config import TokenizerConfig
from data.prepare import PreparedData
from data.shards import Tokens
from data.tokenizer import make_tokenizer
from errors import SettingsError, first_line
from model.gpt import GPT
from runs.saver import Saver
from training.config import TrainConfig
from training.distributed import Ranks
from training.optimizer import make_optimizers, optimizer_state
from training.run import Run
from training.step import take_step

CPU_ALLOCATOR = 1.8
"""Memory of a process on a CPU, as a multiple of its tensors'; at most 1.74 was measured, with glibc and
keep_freed_memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device that holds the whole model."""

    weights: int
    gradients: int
    optimizer: int
    """Between steps."""
    activations: int
    """What the fullest moment of a step adds to these: activations and temporary tensors."""
    evaluation: int
    """What the fullest moment of an evaluation adds to the weights and the optimizer's state."""

    @property
    def peak(self) -> int:
        return self.weights + self.optimizer + max(self.gradients + self.activations, self.evaluation)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made within it that are still alive, and the most there were at once."""

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
    """Return the memory that a run of `config`, whose model.vocab_size is set, will need, without allocating it.

    The tensors have shapes but no data, so the largest model takes seconds on the smallest machine.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second that most runs do not need

    # Two micro-batches show everything: the second one finds the gradients of the first.
    few = replace(config, batch_size=min(config.batch_size, 2 * micro_batch_size), micro_batch_size=micro_batch_size)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        run = trial_run(few, torch.device("cpu"), precision)
        weights = sum(parameter.nbytes for parameter in run.model.parameters())
        take_step(run, 0)  # makes the optimizer's state
        state = sum(tensor.nbytes for tensor in optimizer_state(run.model, run.optimizers).values())
        live.most = before = live.now
        take_step(run, 1)
        step = live.most - before
        live.most = before = live.now
        with torch.no_grad(), run.autocast:
            windows = torch.zeros(config.eval_windows, config.model.block_size, dtype=torch.int64)
            logits = run.model(windows).flatten(0, 1).float()
            torch.nn.functional.cross_entropy(logits, windows.flatten(), reduction="sum")
    return Memory(weights, weights, state, max(0, step - weights), live.most - before)


def trial_run(config: TrainConfig, device: torch.device, precision: torch.dtype) -> Run:
    """Build a run of a single process on made-up text, for taking steps only; it writes nothing."""
    with device:
        model = GPT(config.model)
    block_size = config.model.block_size
    text = Tokens([np.broadcast_to(np.uint16(0), 1025 * block_size)], documents=1, text_bytes=0)
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), ())
    return Run(
        config=config,
        max_steps=None,
        ranks=Ranks(),
        directory=Path(),
        device=device,
        autocast=torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32),
        scaler=GradScaler(device.type, enabled=False),
        data=PreparedData(tokenizer, text, text, Path(), "made up"),
        own_tokenizer=False,
        batches=Batches(text, block_size=block_size, batch_size=config.batch_size, seed=config.seed),
        model=model,
        forward=model,
        optimizers=make_optimizers(model, config.optimizer),
        micro_batch_size=int(config.micro_batch_size or config.batch_size),
        saver=Saver(Path(), keep=0),
        skipped=torch.zeros(2, dtype=torch.int64, device=device),
    )


def choose_micro_batch_size(config: TrainConfig, ranks: Ranks, device: torch.device, precision: torch.dtype) -> int:
    """Return the windows of one forward pass of this rank; SettingsError when not even one fits its memory."""
    share = windows_each(config, ranks.size)
    sharing = ranks.size if device.type == "cpu" else 1  # processes that share this memory
    size = ranks.from_first(windows_a_pass(config, share, free_memory(device) / sharing, precision, device.type))
    if size is None:
        raise SettingsError(
            f"micro_batch_size=auto: not even one window fits the memory free on {device}: choose a smaller model, "
            f"model.block_size or eval_batch_size={config.eval_windows}, or more devices with distributed=fsdp."
        )
    return size


def windows_each(config: TrainConfig, processes: int) -> int:
    """Return the windows of a step that each process has; SettingsError when the batch does not divide evenly."""
    size = config.micro_batch_size if isinstance(config.micro_batch_size, int) else None
    if config.batch_size % (processes * (size or 1)):
        parts = f"the {processes} processes" + (f" × micro_batch_size={size}" if size else "")
        raise SettingsError(f"batch_size={config.batch_size} is not a multiple of {parts}: choose one that is.")
    return config.batch_size // processes


def windows_a_pass(config: TrainConfig, share: int, free: float, precision: torch.dtype, kind: str) -> int | None:
    """Return how many of a process's `share` windows pass through the model at once on a device of type `kind`.

    With micro_batch_size=auto that is the largest divisor of `share` whose step fits into `free` bytes, or None.
    """
    if config.micro_batch_size != "auto":
        return int(config.micro_batch_size or share)
    # The allocator keeps, and kernels take, more than the tensors need.
    room = free / CPU_ALLOCATOR if kind == "cpu" else 0.8 * free
    divisors = (size for size in range(share, 0, -1) if share % size == 0)
    return next((size for size in divisors if predict_memory(config, size, precision).peak <= room), None)


@contextmanager
def memory_named(run: Run) -> Iterator[None]:
    """Turn running out of memory into a SettingsError that names micro_batch_size and a smaller one to try."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        size = run.micro_batch_size
        smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), None)
        remedy = f"set micro_batch_size={smaller}" if smaller else "choose a smaller model or model.block_size"
        raise SettingsError(
            f"micro_batch_size={size} needs more memory than there is ({first_line(error)}): {remedy}; "
            f"the result stays the same, and what is in {run.directory / 'checkpoints'} can be resumed."
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of numpy's or torch's says that an array does not fit the memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory(device: torch.device) -> int:
    """Return the bytes that a run could take on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def reset_peak_memory(device: torch.device) -> None:
    """Let peak_memory count from now; without CUDA and Linux it counts from the process's start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held since reset_peak_memory: on CUDA by tensors, else by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):  # not Linux
        import resource  # which Windows does not have

        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
