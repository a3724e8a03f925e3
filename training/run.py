"""A run: the data, model, optimizers and directory that a training loop works with."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from data.batches import Batches
from data.prepare import PreparedData
from errors import SettingsError
from model.gpt import GPT, plain_weights
from runs.checkpoint import Meta, Progress, load_state
from runs.directory import log_sizes
from runs.quoting import hydra_quoted
from runs.saver import Saver
from training import __version__
from training.config import TrainConfig
from training.device import choose_compile
from training.distributed import Ranks, is_lost_connection, load_shards, save_shards, whole
from training.optimizer import AdamW, Muon, load_optimizer_state, optimizer_state

log = logging.getLogger("tinygpt")


class RankLostError(SettingsError):
    """Another process of the run is gone."""


class NumbersError(SettingsError):
    """Training no longer gives finite numbers; the message names the step and the likeliest settings."""


@dataclass
class Run:
    """Everything that lives as long as a training run; as a context manager it frees the run's directory at the end."""

    config: TrainConfig
    max_steps: int | None
    """Steps to take; None where only max_minutes ends the run."""
    ranks: Ranks
    directory: Path
    device: torch.device
    autocast: torch.autocast
    scaler: GradScaler
    """Scales the loss where the forward pass is in fp16, and does nothing elsewhere."""
    data: PreparedData
    own_tokenizer: bool
    """Whether the tokenizer came with the weights that the run began with, instead of from config.tokenizer."""
    batches: Batches
    model: GPT
    forward: nn.Module
    """The model, compiled where that pays, and copied to or cut up for the ranks."""
    optimizers: list[Muon | AdamW]
    micro_batch_size: int
    saver: Saver
    skipped: Tensor
    """On the device: how many steps changed nothing, in total and in a row."""
    occupation: ExitStack = field(default_factory=ExitStack)
    """Holds the directory's lock and writes its train.log; empty on every rank but the first."""
    progress: Progress = field(default_factory=Progress)
    saved: tuple[int, int, bool] | None = None
    """What the latest checkpoint holds: its step, the step of the latest evaluation, whether the run was finished."""
    started: float = field(default_factory=time.perf_counter)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.saver.wait()
        self.occupation.close()
        if self.ranks.together and is_lost_connection(error):
            raise RankLostError(
                f"another process ended during step {self.progress.step + 1}, so this one cannot go on: see what it "
                f"says above, if anything, then start all again with {hydra_quoted('resume', self.directory)}."
            ) from None

    @property
    def seconds(self) -> float:
        """Training time so far, including that before a resume."""
        return self.progress.seconds + time.perf_counter() - self.started

    @property
    def precision(self) -> str:
        """The dtype of the forward pass's products."""
        return str(self.autocast.fast_dtype if self.autocast._enabled else torch.float32).removeprefix("torch.")

    @property
    def is_sharded(self) -> bool:
        """Whether every rank holds only a part of each weight (FSDP)."""
        return self.ranks.together and self.config.distributed == "fsdp"

    def share_done(self) -> float:
        """How much of the run is over, from 0 to 1, by steps or by minutes, whichever is further."""
        share = self.progress.step / self.max_steps if self.max_steps else 0.0
        if self.config.max_minutes is not None:
            share = max(share, self.ranks.largest(self.seconds / 60 / self.config.max_minutes))
        return min(share, 1.0)

    def save(self, *, finished: bool = False) -> None:
        """Copy the run's state and write checkpoints/step_N while training goes on, unless that holds it already."""
        progress = self.progress
        now = (progress.step, progress.evaluated, finished)
        if self.saved == now and not self.saver.failure:
            return
        self.check_numbers(finished=finished)
        progress.seconds, progress.finished = self.seconds, finished
        self.started, self.saved = time.perf_counter(), now
        weights, optimizers = plain_weights(self.model), optimizer_state(self.model, self.optimizers)
        if self.is_sharded:
            self._save_sharded(weights, optimizers)
        elif self.ranks.is_first:
            self.saver.save(progress, weights, optimizers, self.describe(), self.data.tokenizer)

    def _save_sharded(self, weights: dict[str, Tensor], optimizers: dict[str, Tensor]) -> None:
        """Write a checkpoint of shards: every rank its part of the optimizers' state, the first one the weights."""
        step = self.progress.step
        try:
            save_shards(optimizers, self.saver.shards(step))
        except OSError as error:
            self.saver.fail(step, [*weights.values(), *optimizers.values()], error)
            return
        for name, tensor in weights.items():
            in_one_piece = whole(tensor)
            weights[name] = in_one_piece.cpu() if self.ranks.is_first else in_one_piece[:0]
        if self.ranks.is_first:
            self.saver.save(self.progress, weights, None, self.describe(), self.data.tokenizer)
            self.saver.wait()
        self.saver.failure = self.ranks.from_first(self.saver.failure)  # which decides whether all save again

    def count_skipped(self, skip: Tensor) -> None:
        """Count, on the device, a step that changed nothing."""
        self.skipped = torch.stack([self.skipped[0] + skip, (self.skipped[1] + 1) * skip])

    def check_numbers(self, *, finished: bool = False) -> None:
        """Read the count of skipped steps; NumbersError after too many in a row, or at an end that is not finite."""
        progress, config = self.progress, self.config
        progress.skipped, in_a_row = map(int, self.skipped.tolist())
        progress.skipped_in_a_row = in_a_row
        if in_a_row >= config.max_skipped_steps:
            first = progress.step - in_a_row + 1
            what = f"loss or gradient was not finite in {in_a_row} steps in a row, first in step {first}"
        elif finished and not math.isfinite(loss := progress.metrics["val_loss"]):
            what = f"the validation loss is {loss} at the end"
        else:
            return
        raise NumbersError(
            f"{what}: lower optimizer.lr={config.optimizer.lr}, set grad_clip=1.0 (it is {config.grad_clip}) or "
            f"precision=fp32 (it is {config.precision}); the weights of the steps before are in "
            f"{self.directory / 'checkpoints'}."
        )

    def describe(self) -> Meta:
        """What meta.json says of this moment."""
        progress = self.progress
        return {
            "step": progress.step,
            "metrics": progress.metrics if progress.evaluated == progress.step else {},
            "progress": asdict(progress),
            "data": self.data.directory.name,
            "own_tokenizer": self.own_tokenizer,
            "computed_on": self._computed_on(),
            "logs": log_sizes(self.directory),
            "scaler": self.scaler.state_dict(),
            "config": asdict(self.config),
        }

    def _computed_on(self) -> dict[str, Any]:
        """What the last bits of the result depend on besides the settings."""
        return {
            "device": self.device.type,
            "precision": self.precision,
            "processes": self.ranks.size,
            "micro_batch_size": self.micro_batch_size,
            "threads": torch.get_num_threads(),
            "compiled": choose_compile(self.config.compile, self.device),
            "torch": torch.__version__,
            "tinygpt": __version__,
        }

    def restore(self, checkpoint: Path, meta: Meta) -> None:
        """Go back to the moment at which a checkpoint was written; the model has its weights already."""
        if (checkpoint / "state").is_dir():
            state = load_shards(checkpoint / "state", dict(self.model.named_parameters()))
        else:
            state = load_state(checkpoint)["optimizers"]
        load_optimizer_state(self.model, self.optimizers, state)
        self.scaler.load_state_dict(meta["scaler"])
        self.progress = replace(Progress(**meta["progress"]), finished=False)  # max_steps may have grown
        self.skipped = torch.tensor([self.progress.skipped, self.progress.skipped_in_a_row], device=self.device)
        self.saved = (self.progress.step, self.progress.evaluated, meta["progress"]["finished"])
        if self.ranks.is_first:
            self.saver.link(self.progress.step, self.progress.best_step)
        log.info("resuming at step %d of %s", self.progress.step, self.directory)
        if (before := meta["computed_on"]) != (now := self._computed_on()):
            changes = [f"{name} {now[name]} (was {before.get(name)})" for name in now if now[name] != before.get(name)]
            log.info("with %s: the same text in the same order, though not to the last bit", ", ".join(changes))
