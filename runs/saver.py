"""Saving while training goes on: another thread copies the state and writes the copy.

The next forward and backward passes only read the weights, so the copy is made meanwhile; the next update
waits for it.
"""

import logging
import math
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tiktoken import Encoding
from torch import Tensor
from torch.cuda import Event

from data.files import UNFINISHED, remove
from errors import CheckpointError, first_line
from runs.checkpoint import Meta, link_checkpoint, remove_checkpoints, write_checkpoint
from runs.formatting import hydra_quoted

log = logging.getLogger("tinygpt")
Tensors = dict[str, Tensor]


class Saver:
    """Writes a run's checkpoints one at a time, points last and best at them, and deletes the old ones."""

    def __init__(self, checkpoints: Path, keep: int, tokenizer: Encoding | None, timeout: float) -> None:
        self.checkpoints, self.keep, self.tokenizer = checkpoints, keep, tokenizer
        self.timeout = timeout  # seconds that a step and a save may take; the first that take longer are reported
        self.failure: str | None = None
        """Why the latest checkpoint could not be written."""
        self._copies: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None

    def shards(self, step: int) -> Path:
        """Where the ranks of a sharded run put the optimizers' state of a checkpoint before it is written."""
        return self.checkpoints / f".step_{step}.shards{UNFINISHED}"

    def save(self, weights: Tensors, optimizers: Tensors | None, meta: Meta, began: float) -> None:
        """Write checkpoints/step_N from the tensors as they are now, while training goes on.

        optimizers: None where the ranks have written `shards` already. Waits for the write before this one.
        began: when the save did, by perf_counter().
        """
        self.wait()
        self._copied.clear()
        device = next(iter(weights.values())).device
        # What the device has yet to compute before the tensors are what they are now.
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        content = (weights, optimizers, ready, meta, began)
        self._thread = threading.Thread(target=self._run, args=content, name="saver")
        self._thread.start()

    def wait_for_copy(self) -> None:
        """Wait until the tensors last given to save() may change."""
        self._copied.wait()

    def _copy(self, tensors: Tensors, ready: Event | None) -> Tensors:
        """Copy tensors to memory that is kept for the next copy: allocating it takes longer than copying."""
        stream = torch.cuda.Stream(next(iter(tensors.values())).device) if ready else None
        with torch.cuda.stream(stream):  # beside what the device computes meanwhile
            if stream and ready:
                stream.wait_event(ready)
            for name, tensor in tensors.items():
                if name not in self._copies:  # a device copies into pinned memory without the processor
                    self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if stream:
                stream.synchronize()
        return {name: self._copies[name] for name in tensors}

    def _run(self, weights: Tensors, optimizers: Tensors | None, ready: Event | None, meta: Meta, began: float) -> None:
        step, tensors = meta["step"], weights | (optimizers or {})
        self.failure = f"the checkpoint of step {step} was not written"  # until `last` points at it
        try:
            try:
                copies = self._copy(tensors, ready)
            finally:
                self._copied.set()
            saved = {name: copies[name] for name in weights}
            state: dict[str, Any] | Path = {"optimizers": {name: copies[name] for name in optimizers or {}}}
            if optimizers is None:
                state = self.shards(step)
            write_checkpoint(self.checkpoints / f"step_{step}", saved, state, meta, self.tokenizer)
            self.link(step, meta["progress"]["best_step"])
            self.failure = None
            remove_checkpoints(self.checkpoints, keep=self.keep)
            left = self.timeout - meta["progress"]["seconds"] / max(1, step)  # when a step has been finished
            if (took := time.perf_counter() - began) > left:
                self.timeout = math.inf
                switch = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(2 * (took + 30))}"
                what = f"saving took {took:.1f} s, but torchrun leaves {left:.1f} s for it between SIGTERM and SIGKILL"
                log.warning("%s: start torchrun with %s in its environment (see docs/scaling.md).", what, switch)
        except Exception as error:
            if self.failure:
                self.fail(step, list(tensors.values()), error)
            else:
                log.warning("old checkpoints are left in %s (%s).", self.checkpoints, first_line(error))

    def fail(self, step: int, tensors: list[Tensor], error: BaseException) -> None:
        """Report that the checkpoint of `step` could not be written, and delete what the ranks wrote of it."""
        what, why = self.checkpoints / f"step_{step}", getattr(error, "strerror", None) or first_line(error)
        room = f"it needs {sum(tensor.nbytes for tensor in tensors):,} bytes"
        with suppress(OSError):
            room += f" and {shutil.disk_usage(self.checkpoints).free:,} are free there"
        self.failure = f"the checkpoint of step {step} could not be written to {what} ({why}): {room}"
        log.error("%s; training goes on, and the last good checkpoint is %s.", self.failure, self._last())
        remove(self.shards(step))

    def link(self, step: int, best_step: int) -> None:
        """Point last at a step's checkpoint, and best at the best one's if it is there."""
        link_checkpoint(self.checkpoints / f"step_{step}", "last")
        if (self.checkpoints / f"step_{best_step}").exists():
            link_checkpoint(self.checkpoints / f"step_{best_step}", "best")

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait for the run's final checkpoint; CheckpointError when it could not be written."""
        self.wait()
        if self.failure:
            again = f"go on from {self._last()} with {hydra_quoted('resume', self.checkpoints.parent)}"
            remedy = again if (self.checkpoints / "last").is_symlink() else "start the run anew, for it has no other"
            raise CheckpointError(f"{self.failure}; make room, then {remedy}.")

    def _last(self) -> str:
        last = self.checkpoints / "last"
        return str(self.checkpoints / last.readlink()) if last.is_symlink() else "none yet"
