"""A run: the data, model, optimizers and directory that a training loop works with."""

import logging
import math
import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.amp import GradScaler

from console import ending_signals, say
from data.tasks import Data
from errors import SettingsError
from model.gpt import GPT, plain_weights
from model.size import flops_per_token
from runs.checkpoint import Meta, Progress, load_state
from runs.directory import log_sizes
from runs.formatting import hydra_quoted
from runs.metrics import Row
from runs.saver import Saver
from training import __version__
from training.config import ScheduleConfig, TrainConfig
from training.distributed import Ranks, load_shards, local, save_shards, shutdown_timeout, whole
from training.optimizer import load_optimizer_state, make_optimizers, optimizer_state

log = logging.getLogger("tinygpt")

DEFAULT_STEPS = 600


@dataclass
class Run:
    """Everything that lives as long as a training run.

    As a context manager it remembers the signals that end it until the loop asks, frees the run's directory, and
    raises SystemExit for a signal that came after the last step.
    """

    config: TrainConfig
    device: torch.device
    dtype: torch.dtype  # of the forward pass's products
    data: Data
    model: GPT
    forward: nn.Module
    """The model, copied to or cut up for the ranks."""
    ranks: Ranks = field(default_factory=Ranks)
    directory: Path = Path()
    occupation: ExitStack = field(default_factory=ExitStack)
    """What ends with the run: the directory's lock and train.log, on the first rank; the signals' handlers."""
    compiled: bool = False
    own_tokenizer: bool = False
    """Whether the tokenizer came with the weights that the run began with, instead of from config.tokenizer."""
    progress: Progress = field(default_factory=Progress)
    rows: list[Row] = field(default_factory=list)  # the lines of metrics.jsonl, on the first rank
    saved: tuple[int, int, bool] | None = None
    """What the latest checkpoint holds: its step, the step of the latest evaluation, whether the run was finished."""
    stop: int = 0
    """The signal by which a person or the system has asked this process to end; 0 for none."""
    decode_rate: float | None = None
    """Tokens a second at which the finished model generates one text."""
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        config, kind = self.config, self.device.type
        self.max_steps = steps_to_take(config, self.model)
        self.micro_batch_size = config.micro_batch_size or windows_each(config, self.ranks.size)
        self.batch = self.data.training(config.model.block_size, config.batch_size, config.seed)
        self.targets_per_step = config.batch_size * self.data.targets(config.model.block_size)
        self.autocast = torch.autocast(kind, dtype=self.dtype, enabled=self.dtype != torch.float32)
        self.scaler = GradScaler(kind, enabled=self.dtype == torch.float16)  # elsewhere it does nothing
        for block in self.model.blocks:
            block.recompute = config.recompute == "block"
        self.optimizers = make_optimizers(self.model, config.optimizer)
        timeout = shutdown_timeout() if self.ranks.together else math.inf
        self.saver = Saver(self.directory / "checkpoints", config.keep_checkpoints, self.data.tokenizer, timeout)
        # On the device: how many steps changed nothing, in total and in a row.
        self.skipped = torch.zeros(2, dtype=torch.int64, device=self.device)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
            for number in ending_signals():
                self.occupation.callback(signal.signal, number, signal.signal(number, self._remember))
        return self

    def _remember(self, number: int, frame: object) -> None:
        if self.stop and self.ranks.together:
            return  # torchrun and Slurm both pass a signal on; SIGKILL is torchrun's to send
        # A shell and the system each send a SIGHUP when a terminal is closed, and may add a SIGTERM.
        if self.stop > signal.SIGHUP != number:
            os._exit(128 + number)  # a checkpoint that is being written then counts as absent
        self.stop = max(self.stop, number)
        if number == signal.SIGINT:
            say("\nfinishing this step, then saving; Ctrl-C again leaves at once")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.saver.wait()
        self.occupation.close()
        # gloo and NCCL have no exception type for a rank that is gone.
        words = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "gloo")
        lost = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
        if self.ranks.together and lost:
            problem = f"another process ended during step {self.progress.step + 1}, so this one cannot go on"
            again = f"then start all again with {hydra_quoted('resume', self.directory)}"
            raise SettingsError(f"{problem}: see what it says above, if anything, {again}.") from None
        if self.stop and not error:  # too late for this run, but a sweep ends here
            raise SystemExit(128 + self.stop)

    @property
    def seconds(self) -> float:
        """Training time so far, including that before a resume."""
        return self.progress.seconds + time.perf_counter() - self.started

    @property
    def precision(self) -> str:
        """The name of the forward pass's dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_sharded(self) -> bool:
        """Whether every rank holds only rows of each weight (FSDP)."""
        return self.ranks.together and self.config.distributed != "ddp"

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
        if (progress.skipped_in_a_row and not finished) or not self.weights_are_finite():
            what = "is skipped" if progress.skipped_in_a_row else "has weights that are not finite"
            log.warning("step %d %s, so it is not saved: the checkpoints stay as they are.", progress.step, what)
            return
        progress.seconds, progress.finished = self.seconds, finished
        self.started, self.saved = time.perf_counter(), now
        weights, optimizers = plain_weights(self.model), optimizer_state(self.model, self.optimizers)
        if self.is_sharded:  # every rank writes its part of the optimizers' state, the first one the weights
            try:
                save_shards(optimizers, self.saver.shards(progress.step))
            except OSError as error:
                return self.saver.fail(progress.step, [*weights.values(), *optimizers.values()], error)
            for name, tensor in weights.items():
                in_one_piece = whole(tensor)
                weights[name] = in_one_piece.cpu() if self.ranks.is_first else in_one_piece[:0]
        if self.ranks.is_first:
            meta: Meta = {
                "step": progress.step,
                "metrics": progress.metrics if progress.evaluated == progress.step else {},
                "progress": asdict(progress),
                "data": self.data.name,
                "own_tokenizer": self.own_tokenizer,
                "computed_on": self.computed_on(),
                "logs": log_sizes(self.directory),
                "scaler": self.scaler.state_dict(),
                "config": asdict(self.config),
            }
            self.saver.save(weights, None if self.is_sharded else optimizers, meta, self.started)
        if self.is_sharded:
            self.saver.wait()
            self.saver.failure = self.ranks.from_first(self.saver.failure)  # which decides whether all save again

    def check_numbers(self, *, finished: bool = False) -> None:
        """Read the count of skipped steps; SettingsError after too many in a row, or at an end that is not finite."""
        progress, config = self.progress, self.config
        progress.skipped, progress.skipped_in_a_row = self.skipped.tolist()
        if (in_a_row := progress.skipped_in_a_row) >= config.max_skipped_steps:
            first = progress.step - in_a_row + 1
            what = f"loss or gradient was not finite in {in_a_row} steps in a row, first in step {first}"
        elif finished and not math.isfinite(loss := progress.metrics["val_loss"]):
            what = f"the validation loss is {loss} at the end"
        elif finished and not self.weights_are_finite():
            what = "a weight is not finite at the end"
        else:
            return
        others = f"set grad_clip=1.0 (it is {config.grad_clip}) or precision=fp32 (it is {config.precision})"
        kept = f"the weights of the steps before are in {self.directory / 'checkpoints'}"
        raise SettingsError(f"{what}: lower optimizer.lr={config.optimizer.lr}, {others}; {kept}.")

    def weights_are_finite(self) -> bool:
        """Return whether no rank has a weight that is infinite or not a number; all ranks must call."""
        finite = torch.stack([local(weight.detach()).isfinite().all() for weight in self.model.parameters()]).all()
        return not self.ranks.largest(float(not finite))

    def computed_on(self) -> dict[str, Any]:
        """What the last bits of the result depend on besides the settings."""
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

    def restore(self, checkpoint: Path, meta: Meta) -> None:
        """Go back to the moment at which a checkpoint was written; the model has its weights already."""
        if meta["step"] != meta["progress"]["step"]:
            raise ValueError(f"meta.json has the steps {meta['step']} and {meta['progress']['step']}")
        if (checkpoint / "state").is_dir():
            state = load_shards(checkpoint / "state", dict(self.model.named_parameters()))
        else:
            state = load_state(checkpoint)["optimizers"]
        load_optimizer_state(self.model, self.optimizers, state)
        if (fresh := self.scaler.state_dict()) and (scaler := meta["scaler"]):  # a scaler without fp16 has no state
            if {name: type(value) for name, value in scaler.items()} != {name: type(fresh[name]) for name in fresh}:
                raise ValueError("meta.json has another scaler's state")
            self.scaler.load_state_dict(scaler)
        self.progress = replace(Progress(**meta["progress"]), finished=False)  # max_steps may have grown
        self.skipped = torch.tensor([self.progress.skipped, self.progress.skipped_in_a_row], device=self.device)
        self.saved = (self.progress.step, self.progress.evaluated, meta["progress"]["finished"])

    def say_resumed(self, meta: Meta) -> None:
        """Log where the run goes on, and what has changed that its last bits depend on."""
        log.info("resuming at step %d of %s", self.progress.step, self.directory)
        if (before := meta["computed_on"]) != (now := self.computed_on()):
            changes = [f"{name} {now[name]} (was {before.get(name)})" for name in now if now[name] != before.get(name)]
            log.info("with %s: the same text in the same order, though not to the last bit", ", ".join(changes))


def steps_to_take(config: TrainConfig, model: GPT) -> int | None:
    """max_steps, or fewer where max_flops would be passed; None where only max_minutes ends the run."""
    steps = config.max_steps or (DEFAULT_STEPS if config.max_minutes is None else None)
    if config.max_flops is not None:
        most = max(1, round(config.max_flops / (flops_per_token(model) * config.tokens_per_step)))
        steps = min(most, config.max_steps or most)
    warmup = config.schedule.warmup_steps
    if steps and steps < warmup != ScheduleConfig.warmup_steps:  # a first try may be shorter than the default
        longer = f"schedule.warmup_steps={warmup} is longer than the run of {steps} steps"
        raise SettingsError(f"{longer}: lower it, or take more steps.")
    return steps


def windows_each(config: TrainConfig, processes: int) -> int:
    """Return the windows of a step that each process has; SettingsError when the batch does not divide evenly."""
    size = config.micro_batch_size
    if config.batch_size % (processes * (size or 1)):
        parts = [f"the {processes} processes"] * (processes > 1) + [f"micro_batch_size={size}"] * bool(size)
        problem = f"batch_size={config.batch_size} is not a multiple of {' × '.join(parts)}"
        raise SettingsError(f"{problem}: choose one that is.")
    return config.batch_size // processes
