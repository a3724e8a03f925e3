"""Asynchronous checkpoints: a thread writes a copy of the state while training goes on."""

import errno
import logging
import threading
from contextlib import suppress
from pathlib import Path

from tiktoken import Encoding
from torch import Tensor

from common.errors import CheckpointError, device_failed, os_error_reason
from common.files import flush_to_disk, point, pointed, remove
from runs.checkpoint import Meta, checkpoints_by_step, write_checkpoint
from runs.resume import again

log = logging.getLogger("tinygpt")
Tensors = dict[str, Tensor]


class AsyncCheckpointer:
    """Writes a run's checkpoints in a thread, links `last` and `best`, and deletes old ones."""

    def __init__(self, checkpoints: Path, keep: int, tokenizer: Encoding | None) -> None:
        self.checkpoints = checkpoints
        self.keep = keep
        self.tokenizer = tokenizer
        self.failure: str | None = None
        """The reason why the latest checkpoint could not be written; None if it was."""
        self.needs_room = False
        self.ends = False
        self._thread: threading.Thread | None = None

    def save(self, weights: Tensors, optimizer: Tensors, meta: Meta, *, ends: bool = False) -> None:
        """Write checkpoints/step_N of the tensors as they are now, while training continues.

        Waits for the previous write. ends: whether the run does not go on.
        """
        self.wait()
        self.ends = ends
        # Copy the tensors, because training changes them.
        try:
            copies = [
                {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
                for tensors in (weights, optimizer)
            ]
        except (MemoryError, RuntimeError) as error:
            if device_failed(error):
                raise  # training cannot continue either
            return self._fail(meta.progress.step, error)
        thread = threading.Thread(target=self._write, args=(*copies, meta), name="saver")
        try:
            thread.start()
        except RuntimeError:  # a limit of threads, as by ulimit -u: training waits
            return self._write(copies[0], copies[1], meta)
        self._thread = thread

    def _write(self, weights: Tensors, optimizer: Tensors, meta: Meta) -> None:
        step = meta.progress.step
        for name in meta.logs:  # a power cut would leave the checkpoint without the rows before it
            with suppress(OSError):
                flush_to_disk(self.checkpoints.parent / name)
        try:
            write_checkpoint(self.checkpoints / f"step_{step}", weights, optimizer, meta, self.tokenizer)
            self.link(step, meta.progress.best_step)
        except Exception as error:
            return self._fail(step, error)
        self.failure = None
        remove_old(self.checkpoints, self.keep)

    def _fail(self, step: int, error: BaseException) -> None:
        problem = f"the checkpoint of step {step} could not be saved in {self.checkpoints}"
        self.failure = f"{problem} ({os_error_reason(error)})"
        self.needs_room = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        last = self.last()
        kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        log.error("%s; %s%s.", self.failure, "" if self.ends else "training goes on, and ", kept)

    def link(self, step: int, best_step: int) -> None:
        """Link `last` and `best` to the checkpoints of these steps, if they exist."""
        for name, number in (("last", step), ("best", best_step)):
            if (self.checkpoints / f"step_{number}").exists():
                point(self.checkpoints / name, f"step_{number}")

    def has(self, step: int) -> bool:
        """Return whether a step's checkpoint exists, after the current write."""
        self.wait()
        return (self.checkpoints / f"step_{step}").exists()

    def wait(self) -> None:
        """Wait for the current write."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait for the final checkpoint; CheckpointError if it could not be written."""
        self.wait()
        if self.failure:
            last = self.last()
            remedy = "start a new run, as this one has no checkpoint"
            if last:
                remedy = f"continue from {last} with {again(self.checkpoints.parent)}"
            raise CheckpointError(self.failure, f"{'make room' if self.needs_room else 'mend that'}, then {remedy}")

    def last(self) -> Path | None:
        """Return the latest checkpoint, or None."""
        last = pointed(self.checkpoints / "last")
        return self.checkpoints / last.name if last.is_dir() else None


def remove_old(checkpoints: Path, keep: int) -> None:
    """Delete all checkpoints except the latest `keep`, `last` and `best`."""
    kept = {pointed(checkpoints / name) for name in ("last", "best")}
    for directory in checkpoints_by_step(checkpoints)[keep:]:
        if directory.resolve() not in kept:
            remove(directory)
