"""Saving while training goes on: another thread copies the state and writes the copy.

The next forward and backward passes only read the weights, so the copy is made meanwhile; the next update
waits for it.
"""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import Tensor

from errors import CheckpointError
from runs.checkpoint import (
    WRITE_ERRORS,
    Progress,
    link_checkpoint,
    remove_checkpoints,
    replace_meta,
    unfinished_path,
    write_checkpoint,
)
from runs.quoting import override

log = logging.getLogger("tinygpt")


class Saver:
    """Writes a run's checkpoints one at a time, points last and best at them, and deletes the old ones."""

    def __init__(self, checkpoints: Path, keep: int) -> None:
        self.checkpoints, self.keep = checkpoints, keep
        self.failure: str | None = None
        """Why the latest checkpoint could not be written."""
        self.written_step: int | None = None
        """The step of the checkpoint written last."""
        self._copies: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None

    def save(
        self,
        progress: Progress,
        weights: dict[str, Tensor],
        optimizers: dict[str, Tensor] | None,
        meta: dict[str, Any],
        tokenizer: tiktoken.Encoding,
    ) -> None:
        """Write checkpoints/step_N from the tensors as they are now, while training goes on.

        Where that step was written already only its meta.json is replaced. optimizers: None where a sharded
        run has written them already. Waits for the write before this one.
        """
        self.wait()
        if self.written_step == progress.step:
            self._update(progress, meta)
            return
        self._copied.clear()
        device = next(iter(weights.values())).device
        # What the device has yet to compute before the tensors are what they are now.
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        content = (progress.step, progress.best_step, weights, optimizers, ready, meta, tokenizer)
        self._thread = threading.Thread(target=self._write, args=content, name="saver")
        self._thread.start()

    def _update(self, progress: Progress, meta: dict[str, Any]) -> None:
        try:
            replace_meta(self.checkpoints / f"step_{progress.step}", meta)
            self.link(progress.step, progress.best_step)
            self.failure = None
        except (*WRITE_ERRORS, CheckpointError) as error:
            self.fail(progress.step, len(str(meta)), error)

    def wait_for_copy(self) -> None:
        """Until the tensors last given to save() may change."""
        self._copied.wait()

    def _copy(self, tensors: dict[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Tensor]:
        """The tensors in memory that is kept for the next copy: making room costs more than copying."""
        stream = torch.cuda.Stream(next(iter(tensors.values())).device) if ready else None
        with torch.cuda.stream(stream):  # beside what the device computes meanwhile
            if stream:
                stream.wait_event(ready)
            for name, tensor in tensors.items():
                if name not in self._copies:  # into pinned memory the device copies by itself
                    self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if stream:
                stream.synchronize()
        return {name: self._copies[name] for name in tensors}

    def _write(
        self,
        step: int,
        best_step: int,
        weights: dict[str, Tensor],
        optimizers: dict[str, Tensor] | None,
        ready: torch.cuda.Event | None,
        meta: dict[str, Any],
        tokenizer: tiktoken.Encoding,
    ) -> None:
        directory = self.checkpoints / f"step_{step}"
        needed = sum(tensor.nbytes for tensor in [*weights.values(), *(optimizers or {}).values()])
        try:
            try:
                copies = self._copy(weights | (optimizers or {}), ready)
            finally:
                self._copied.set()
            state = None if optimizers is None else {"optimizers": {name: copies[name] for name in optimizers}}
            write_checkpoint(directory, {name: copies[name] for name in weights}, state, meta, tokenizer)
            self.written_step = step
            self.link(step, best_step)
            remove_checkpoints(self.checkpoints, keep=self.keep)
            self.failure = None
        except WRITE_ERRORS as error:
            self.fail(step, needed, error)

    def fail(self, step: int, needed: int, error: BaseException) -> None:
        """Say that a checkpoint of `needed` bytes could not be written, and leave nothing of it."""
        directory = self.checkpoints / f"step_{step}"
        shutil.rmtree(unfinished_path(directory), ignore_errors=True)
        self.failure = (
            f"the checkpoint of step {step} could not be written to {directory} ({_reason(error)}): it needs "
            f"{needed:,} bytes and {_free_bytes(self.checkpoints)} are free there"
        )
        log.error("%s; training goes on, and the last good checkpoint is %s.", self.failure, self._last())

    def link(self, step: int, best_step: int) -> None:
        """Point last at a step's checkpoint, and best at the best one's if it is there."""
        link_checkpoint(self.checkpoints / f"step_{step}", "last")
        if (self.checkpoints / f"step_{best_step}").exists():
            link_checkpoint(self.checkpoints / f"step_{best_step}", "best")

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait for the run's final checkpoint; CheckpointError when it could not be written."""
        self.wait()
        if self.failure:
            raise CheckpointError(
                f"{self.failure}; make room, then go on from {self._last()} with "
                f"{override('resume', self.checkpoints.parent)}."
            )

    def _last(self) -> str:
        last = self.checkpoints / "last"
        return str(self.checkpoints / last.readlink()) if last.is_symlink() else "none yet"


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def _free_bytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "an unknown number"
