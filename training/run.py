"""A run: the data, model, optimizers and directory that the training loop works with."""

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from common.console import Signals
from common.errors import SettingsError, format_value
from common.text import plural
from model.gpt import GPT
from model.size import flops_per_token
from model.weights import plain_weights
from runs.checkpoint import Meta, Progress
from runs.checkpointer import AsyncCheckpointer
from runs.directory import log_sizes
from training import __version__
from training.config import TrainConfig
from training.distributed import Ranks, local
from training.optimizer import make_optimizers, optimizer_state

if TYPE_CHECKING:
    from data.tasks import Data

log = logging.getLogger("tinygpt")

DEFAULT_STEPS = 450


@dataclass
class Run:
    """What the training loop needs, as open_run() builds it."""

    config: TrainConfig
    device: torch.device
    dtype: torch.dtype  # of the forward pass's products
    data: "Data"
    model: GPT
    forward: nn.Module
    """The model, copied to or cut up for the ranks."""
    ranks: Ranks = field(default_factory=Ranks)
    compiled: bool = False
    own_tokenizer: bool = False
    signals: Signals = field(default_factory=Signals)
    directory: Path = Path()
    progress: Progress = field(default_factory=Progress)
    saved: int | None = None
    """The step that was saved last."""
    decode_rate: float | None = None
    """Tokens a second at which the finished model generates one text."""

    def __post_init__(self) -> None:
        config, kind = self.config, self.device.type
        self.started = time.perf_counter()
        self.has_to_compile = self.compiled
        self.max_steps = steps_to_take(config, self.model)
        self.micro_batch_size = config.micro_batch_size or rank_batch_size(config, self.ranks.size)
        self.batch = self.data.training(config.model.block_size, config.batch_size, config.seed)
        self.targets_per_step = config.batch_size * self.data.targets(config.model.block_size)
        self.autocast = torch.autocast(kind, dtype=self.dtype, enabled=self.dtype != torch.float32)
        self.scaler = GradScaler(kind, enabled=self.dtype == torch.float16)  # elsewhere it does nothing
        for block in self.model.blocks:
            block.activation_checkpointing = config.recompute == "block"
        self.optimizers = make_optimizers(self.model, config.optimizer, self.ranks)
        # On the device: how many steps changed nothing, in total and in a row.
        self.skipped = torch.zeros(2, dtype=torch.int64, device=self.device)

    @cached_property
    def saver(self) -> AsyncCheckpointer:
        return AsyncCheckpointer(self.directory / "checkpoints", self.config.keep_checkpoints, self.data.tokenizer)

    @property
    def seconds(self) -> float:
        """Training time so far, including that before a resume."""
        return self.progress.seconds + time.perf_counter() - self.started

    def start_clock(self) -> None:
        """Count the seconds from now on if the step just taken was the first one and compiled the model.

        Compiling takes about a minute, which max_minutes and the schedule leave out, after a resume too.
        """
        if self.has_to_compile:
            self.skipped.tolist()  # waits for the device
            self.started = time.perf_counter()
            self.has_to_compile = False

    @property
    def precision(self) -> str:
        """The name of the forward pass's dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_sharded(self) -> bool:
        """Whether every rank holds only rows of each weight (FSDP)."""
        return self.ranks.launched and self.config.distributed != "ddp"

    def fraction_done(self) -> float:
        """Return how much of the run is over, from 0 to 1, by steps or by minutes, whichever is further."""
        share = self.progress.step / self.max_steps if self.max_steps else 0.0
        if self.config.max_minutes is not None:
            share = max(share, self.ranks.max(self.seconds / 60 / self.config.max_minutes))
        return min(share, 1.0)

    def save(self, *, finished: bool = False) -> None:
        """Copy the run's state, and write checkpoints/step_N while training goes on; what is new of it, if it is there.

        Nothing is saved while the run diverges, or of weights that are not finite. In fp16 a skipped step is no sign of
        that while the scale of the gradients can still fall; other precisions have a scale of 1.
        """
        progress = self.progress
        self.check_numbers(finished=finished)
        diverges = progress.skipped_in_a_row and self.scaler.get_scale() <= 1
        if (diverges and not finished) or not self.weights_are_finite():
            what = "is skipped" if progress.skipped_in_a_row else "has weights that are not finite"
            log.warning("step %d %s, so it is not saved: the checkpoints stay as they are.", progress.step, what)
            return
        progress.seconds, progress.finished = self.seconds, finished
        self.started = time.perf_counter()
        self.saved = progress.step
        weights, optimizer = dict[str, Tensor](), dict[str, Tensor]()
        if not self.ranks.broadcast(self.ranks.is_first and self.saver.has(progress.step)):
            weights, optimizer = plain_weights(self.model), optimizer_state(self.model, self.optimizers)
        if self.is_sharded:
            from training.sharding import gather

            weights, optimizer = gather(weights), gather(optimizer)
        if self.ranks.is_first:
            self.saver.save(weights, optimizer, self.meta())

    def meta(self) -> Meta:
        """Return what a checkpoint says of the run as it is now."""
        return Meta(
            config=asdict(self.config),
            progress=Progress(**asdict(self.progress)),
            home=str(self.directory.resolve()),
            data=self.data.fingerprint,
            own_tokenizer=self.own_tokenizer,
            computed_on=self.computed_on(),
            scaler=self.scaler.state_dict(),
            logs=log_sizes(self.directory),
        )

    def check_numbers(self, *, finished: bool = False) -> None:
        """Read and tell how many steps were skipped; SettingsError for too many in a row, or an end not finite."""
        progress, config = self.progress, self.config
        before = progress.skipped
        progress.skipped, progress.skipped_in_a_row = self.skipped.tolist()
        if new := progress.skipped - before:
            text = "step %d: %s changed nothing, because loss or gradient was not finite"
            log.warning(text, progress.step, plural(new, "step"))
        if (in_a_row := progress.skipped_in_a_row) >= config.max_skipped_steps:
            first = progress.step - in_a_row + 1
            what = f"loss or gradient was not finite in {plural(in_a_row, 'step')} in a row, first in step {first}"
        elif finished and not math.isfinite(loss := progress.metrics["val_loss"]):
            what = f"the validation loss is {loss} at the end"
        elif finished and not self.weights_are_finite():
            what = "a weight is not finite at the end"
        else:
            return
        remedies = [f"lower optimizer.lr={config.optimizer.lr}"]
        if not 0 < config.grad_clip <= 1:
            remedies.append(f"set grad_clip=1 (it is {format_value(config.grad_clip)})")
        if self.dtype != torch.float32:
            remedies.append(f"set precision=fp32 (it is {self.precision})")
        if last := self.saver.last():
            remedies[-1] += f"; the weights of step {last.name.removeprefix('step_')} are in {last}"
        raise SettingsError(what, " or ".join(remedies))

    def weights_are_finite(self) -> bool:
        """Return whether no rank has a weight that is infinite or not a number; all ranks must call."""
        finite = torch.stack([local(weight.detach()).isfinite().all() for weight in self.model.parameters()]).all()
        return not self.ranks.max(float(not finite))

    def computed_on(self) -> dict[str, Any]:
        """Return what the last bits of the result depend on besides the settings."""
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


def steps_to_take(config: TrainConfig, model: GPT) -> int | None:
    """Return max_steps, or fewer where max_flops would be passed; None where only max_minutes ends the run."""
    steps = config.max_steps or (DEFAULT_STEPS if config.max_minutes is None else None)
    if config.max_flops is not None:
        most = max(1, round(config.max_flops / (flops_per_token(model) * config.tokens_per_step)))
        steps = min(most, config.max_steps or most)
    if steps and (warmup := config.schedule.warmup_steps or 0) > steps:
        longer = f"schedule.warmup_steps={warmup} is longer than the run of {plural(steps, 'step')}"
        raise SettingsError(longer, "lower it, or take more steps")
    return steps


def rank_batch_size(config: TrainConfig, processes: int) -> int:
    """Return the windows of a step that each process has; SettingsError when the batch does not divide evenly."""
    size = config.micro_batch_size
    if config.batch_size % (processes * (size or 1)):
        parts = [f"the {processes} processes"] * (processes > 1) + [f"micro_batch_size={size}"] * bool(size)
        problem = f"batch_size={config.batch_size} is not a multiple of {' × '.join(parts)}"
        raise SettingsError(problem, "choose one that is")
    return config.batch_size // processes
