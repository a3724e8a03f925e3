"""A run: the data, model, optimizers and directory that a training loop works with."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.amp import GradScaler

from data.batches import Batches
from data.prepare import PreparedData
from errors import SettingsError
from model.gpt import GPT
from runs.checkpoint import Progress, load_state, plain_weights, unfinished_path
from runs.directory import log_sizes
from runs.quoting import override
from runs.saver import Saver
from training import __version__
from training.config import TrainConfig
from training.distributed import Ranks, is_lost_connection, load_shards, save_shards, whole
from training.optimizer import AdamW, Muon, load_optimizer_state, optimizer_state, split_parameters

log = logging.getLogger("tinygpt")


class RankLostError(SettingsError):
    """Another process of the run is gone."""


class NumbersError(SettingsError):
    """Training that produces no finite numbers any more; the message names the step and the likeliest settings."""


@dataclass
class Run:
    """Everything that lives as long as a training run."""

    config: TrainConfig
    max_steps: int | None
    """Steps to take; None where only max_minutes ends the run."""
    ranks: Ranks
    directory: Path
    lock: FileLock | None
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
    compiled: bool
    optimizers: list[Muon | AdamW]
    micro_batch_size: int
    progress: Progress
    saver: Saver
    skipped: Tensor
    """On the device: how many steps changed nothing, in all and in a row."""
    saved: tuple[int, int, bool] | None = None
    """What the latest checkpoint says: its step, the step of the latest evaluation, whether the run was finished."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Training time so far, that before a resume counted in."""
        return self.progress.seconds + time.perf_counter() - self.started

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.saver.wait()
        if self.lock:
            self.lock.release()
        if self.ranks.together and is_lost_connection(exception[1]):
            raise RankLostError(
                f"another process ended during step {self.progress.step + 1}, so this one cannot go on: see what it "
                f"says above, if anything, then start all again with {override('resume', self.directory)}."
            ) from None

    @property
    def precision(self) -> str:
        """The dtype of the forward pass's products."""
        return str(self.autocast.fast_dtype if self.autocast._enabled else torch.float32).removeprefix("torch.")

    @property
    def is_sharded(self) -> bool:
        """Whether every rank holds a part of each weight only (FSDP)."""
        return self.ranks.together and self.config.distributed == "fsdp"

    def share_done(self) -> float:
        """How much of the run is over, from 0 to 1, by steps or by minutes, whichever is further."""
        share = self.progress.step / self.max_steps if self.max_steps else 0.0
        if self.config.max_minutes is not None:
            share = max(share, self.ranks.largest(self.seconds / 60 / self.config.max_minutes))
        return min(share, 1.0)

    def save(self, *, finished: bool = False) -> None:
        """Copy the run's state, and write checkpoints/step_N while training goes on, unless it says so already."""
        progress = self.progress
        now = (progress.step, progress.evaluated, finished)
        if self.saved == now and not self.saver.failure:
            return
        self.check_numbers(finished=finished)
        self.started, progress.seconds, progress.finished = time.perf_counter(), self.seconds, finished
        self.saved = now
        if self.is_sharded:
            self.save_sharded()
        elif self.ranks.is_first:
            weights, optimizers = plain_weights(self.model), optimizer_state(self.model, self.optimizers)
            self.saver.save(progress, weights, optimizers, self.describe(), self.data.tokenizer)

    def save_sharded(self) -> None:
        """Write a checkpoint of shards: every rank its part of the optimizers' state, the first one the weights."""
        weights, optimizers = plain_weights(self.model), optimizer_state(self.model, self.optimizers)
        directory = self.directory / "checkpoints" / f"step_{self.progress.step}"
        needed = sum(tensor.nbytes for tensor in [*weights.values(), *optimizers.values()])
        if self.ranks.from_first(self.saver.written_step) != self.progress.step:
            try:
                save_shards(optimizers, unfinished_path(directory) / "state")
            except OSError as error:
                self.saver.fail(self.progress.step, needed, error)
                return
        for name, tensor in weights.items():
            in_one_piece = whole(tensor)
            weights[name] = in_one_piece.cpu() if self.ranks.is_first else in_one_piece[:0]
        if self.ranks.is_first:
            self.saver.save(self.progress, weights, None, self.describe(), self.data.tokenizer)
            self.saver.wait()
        self.saver.failure = self.ranks.from_first(self.saver.failure)  # which decides whether all save again

    def stop(self, signal_number: int) -> None:
        """Save, say how to go on, and raise SystemExit with the status of a process that a signal ended."""
        self.save()
        self.saver.finish()
        again = f"python train.py {override('resume', self.directory)}"
        log.info("stopped after step %d; to go on:  %s", self.progress.step, again)
        raise SystemExit(128 + signal_number)

    def count_skipped(self, skip: Tensor) -> None:
        """Count, on the device, a step that changed nothing."""
        self.skipped = torch.stack([self.skipped[0] + skip, (self.skipped[1] + 1) * skip])

    def check_numbers(self, *, finished: bool = False) -> None:
        """Read the count of skipped steps; NumbersError when there were too many in a row, or the end is no number."""
        progress, config = self.progress, self.config
        progress.skipped, progress.skipped_in_a_row = self.skipped.tolist()
        in_a_row = progress.skipped_in_a_row
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

    def describe(self) -> dict[str, Any]:
        """What meta.json says of this moment."""
        progress = self.progress
        return {
            "step": progress.step,
            "metrics": progress.metrics if progress.evaluated == progress.step else {},
            "progress": asdict(progress),
            "data": self.data.directory.name,
            "own_tokenizer": self.own_tokenizer,
            "computed_on": self.computed_on(),
            "logs": log_sizes(self.directory),
            "scaler": self.scaler.state_dict(),
            "config": asdict(self.config),
        }

    def computed_on(self) -> dict[str, Any]:
        """What the last bits of the result depend on beside the settings."""
        return {
            "device": self.device.type,
            "precision": self.precision,
            "processes": self.ranks.size,
            "micro_batch_size": self.micro_batch_size,
            "threads": torch.get_num_threads(),
            "compiled": self.compiled,
            "torch": torch.__version__,
            "tinygpt": __version__,
        }

    def restore(self, checkpoint: Path, meta: dict[str, Any]) -> None:
        """Go back to the moment that a checkpoint was written; the model has its weights already."""
        if (checkpoint / "state").is_dir():
            state = load_shards(checkpoint / "state", dict(self.model.named_parameters()))
        else:
            state = load_state(checkpoint)["optimizers"]
        load_optimizer_state(self.model, self.optimizers, state)
        self.scaler.load_state_dict(meta["scaler"])
        self.progress = replace(Progress(**meta["progress"]), finished=False)  # max_steps may have grown
        self.skipped = torch.tensor([self.progress.skipped, self.progress.skipped_in_a_row], device=self.device)
        self.saved = (self.progress.step, self.progress.evaluated, meta["progress"]["finished"])
        self.saver.written_step = self.progress.step
        if self.ranks.is_first:
            self.saver.link(self.progress.step, self.progress.best_step)
        log.info("resuming at step %d of %s", self.progress.step, self.directory)
        if (before := meta["computed_on"]) != (now := self.computed_on()):
            changes = [f"{name} {now[name]} (was {before.get(name)})" for name in now if now[name] != before.get(name)]
            log.info("with %s: the same text in the same order, though not to the last bit", ", ".join(changes))

    def description(self) -> str:
        """What is about to happen, in a few lines."""
        config, data = self.config, self.data
        total = sum(parameter.numel() for parameter in self.model.parameters())
        matrices, *_ = split_parameters(self.model)
        epochs = f", {self.max_steps * config.tokens_per_step / len(data.train):.2f} epochs" if self.max_steps else ""
        length = f"{self.max_steps:,} steps" if self.max_steps else f"{config.max_minutes:g} minutes in steps"
        heads = self.model.blocks[0].attention.n_head  # which a form with one head has whatever config.model says
        processes = f" × {self.ranks.size} ({config.distributed})" if self.ranks.size > 1 else ""
        return (
            f"text      {data.description}\n"
            f"tokens    {len(data.train):,} for training, {len(data.val):,} for validation, "
            f"{data.tokenizer.name} with {data.tokenizer.n_vocab:,} ids\n"
            f"model     {total:,} parameters, {sum(m.numel() for m in matrices):,} of them in "
            f"{config.model.n_layer} blocks of {heads} head{'s' * (heads > 1)} ({config.model.attention}), "
            f"{config.model.n_embd} wide\n"
            f"run       {length} of {config.batch_size} × {config.model.block_size} tokens{epochs}, "
            f"on {self.device}{processes} in {self.precision}\n"
            f"output    {self.directory}"
        )

    def farewell(self) -> str:
        """What the run reached and what to type next."""
        return (
            f"\nbest validation loss {self.progress.best_loss or float('nan'):.4f} nats/token\n"
            f"curves    {self.directory / 'loss.png'}\n"
            f"sample    python sample.py {override('checkpoint', self.directory)}"
        )
