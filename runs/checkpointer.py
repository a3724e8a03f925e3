"""Asynchronous checkpoints: a thread writes a copy of the state while training goes on."""

import logging
import threading
from pathlib import Path

from tiktoken import Encoding
from torch import Tensor

from common.errors import CheckpointError, device_failed, os_error_reason
from common.files import point, pointed, remove
from common.text import hydra_quoted
from runs.checkpoint import Meta, checkpoints_by_step, write_checkpoint

log = logging.getLogger("tinygpt")
Tensors = dict[str, Tensor]


class AsyncCheckpointer:
    """Writes a run's checkpoints in a thread, links last and best, and deletes old ones."""

    def __init__(self, checkpoints: Path, keep: int, tokenizer: Encoding | None) -> None:
        self.checkpoints = checkpoints
        self.keep = keep
        self.tokenizer = tokenizer
        self.failure: str | None = None
        """Why the latest checkpoint could not be written."""
        self._thread: threading.Thread | None = None

    def save(self, weights: Tensors, optimizer: Tensors, meta: Meta) -> None:
        """Write checkpoints/step_N of the tensors as they are now, while training goes on.

        Waits for the write before this one.
        """
        self.wait()
        try:
            copies = [
                {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
                for tensors in (weights, optimizer)
            ]
        except (MemoryError, RuntimeError) as error:
            if device_failed(error):
                raise  # training cannot go on either
            return self._fail(meta.progress.step, error)
        self._thread = threading.Thread(target=self._write, args=(*copies, meta), name="saver")
        self._thread.start()

    def _write(self, weights: Tensors, optimizer: Tensors, meta: Meta) -> None:
        step = meta.progress.step
        try:
            write_checkpoint(self.checkpoints / f"step_{step}", weights, optimizer, meta, self.tokenizer)
            self.link(step, meta.progress.best_step)
        except Exception as error:
            return self._fail(step, error)
        self.failure = None
        remove_old(self.checkpoints, self.keep)

    def _fail(self, step: int, error: BaseException) -> None:
        self.failure = (
            f"the checkpoint of step {step} could not be saved in {self.checkpoints} ({os_error_reason(error)})"
        )
        last = self.last()
        kept = f"the last good checkpoint is {last}" if last else "there is no good checkpoint yet"
        log.error("%s; training goes on, and %s.", self.failure, kept)

    def link(self, step: int, best_step: int) -> None:
        """Point last at a step's checkpoint, and best at the best one's if it is there."""
        for name, number in (("last", step), ("best", best_step)):
            if (self.checkpoints / f"step_{number}").exists():
                point(self.checkpoints / name, f"step_{number}")

    def has(self, step: int) -> bool:
        """Return whether a step's checkpoint is there; waits until nothing is being written."""
        self.wait()
        return (self.checkpoints / f"step_{step}").exists()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait for the run's final checkpoint; CheckpointError when it could not be written."""
        self.wait()
        if self.failure:
            last = self.last()
            again = hydra_quoted("resume", self.checkpoints.parent)
            remedy = f"go on from {last} with {again}" if last else "start a new run, for this one has no other"
            raise CheckpointError(self.failure, f"make room, then {remedy}")

    def last(self) -> Path | None:
        """Return the latest checkpoint; None before there is one."""
        last = pointed(self.checkpoints / "last")
        return self.checkpoints / last.name if last.is_dir() else None


def remove_old(checkpoints: Path, keep: int) -> None:
    """Delete all checkpoints but the latest `keep`, and those that `last` and `best` point to."""
    kept = {pointed(checkpoints / name) for name in ("last", "best")}
    for directory in checkpoints_by_step(checkpoints)[keep:]:
        if directory.resolve() not in kept:
            remove(directory)
