"""Run: the data, model, optimizers, directory and progress of a training loop."""

import hashlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from common.console import Signals
from common.errors import SettingsError
from common.text import plural
from data.batches import Dataset, TokenDataset
from data.prepare import tokens_hash
from model.gpt import GPT
from model.size import flops_per_token
from model.weights import plain_weights
from runs.checkpoint import Meta, Progress
from runs.checkpointer import AsyncCheckpointer
from runs.directory import log_sizes
from runs.origin import PROJECT_HASH
from training import __version__
from training.config import TrainConfig
from training.device import memory_errors, processor_name
from training.distributed import Ranks
from training.guest import seed_generators
from training.optimizer import AdamW, Muon, make_optimizers, optimizer_state

log = logging.getLogger("tinygpt")

DEFAULT_STEPS = 450  # without max_steps, max_minutes and max_flops
HALVINGS = 16  # of the first scale of fp16's loss, 65,536, until it is 1


@dataclass
class Run:
    """The objects of a run.

    open_run() builds it for the training loop, trial_run() of plan.py for a measurement.
    """

    config: TrainConfig
    """The settings, with model.vocab_size set."""
    device: torch.device
    dtype: torch.dtype
    """The type of the matrix products in the forward pass."""
    data: Dataset
    model: GPT
    training_loss: Callable[..., Tensor]
    """The loss of a micro-batch: model.loss(), under torchrun wrapped by DDP."""
    ranks: Ranks = field(default_factory=Ranks)
    compiled: bool = False
    """Whether torch compiles the model."""
    own_tokenizer: bool = False
    """Whether the tokenizer came with pretrained weights."""
    signals: Signals = field(default_factory=Signals)
    directory: Path = Path()
    progress: Progress = field(default_factory=Progress)
    begun_from: str | None = None
    """The init_from of the run's first steps; the config of a resumed run has none."""
    learned_share: float | None = None
    """The share of what is held out that the weights had learned in earlier runs, if it is told."""
    threads_note: str = ""
    """Why torch takes fewer threads than it could, for the line `run`."""
    decode_rate: float | None = None
    """Tokens per second at which the finished model generates one text; None until then."""

    max_steps: int | None = field(init=False)
    """Steps to take; None if only max_minutes ends the run."""
    micro_batch_size: int = field(init=False)
    """Sequences in one forward pass."""
    loss_divisor: float = field(init=False)
    """The number of targets in a global batch, divided by the number of ranks."""
    autocast: torch.autocast = field(init=False)
    """Context of the forward pass, in which products have type dtype."""
    scaler: GradScaler = field(init=False)
    """Scales the loss in fp16; does nothing in other precisions."""
    optimizers: list[Muon | AdamW] = field(init=False)
    skipped: Tensor = field(init=False)
    """The numbers of skipped steps, in total and in a row, int64 (2,) on the device."""
    started: float = field(init=False)
    """The time, by time.perf_counter(), up to which progress.seconds counts."""

    def __post_init__(self) -> None:
        config = self.config
        device = self.device.type
        self.max_steps = steps_to_take(config, self.model)
        most = rank_batch_size(config, self.ranks.size)
        self.micro_batch_size = config.micro_batch_size or most
        # DDP averages the gradients over the ranks, where the sum is wanted.
        self.loss_divisor = config.batch_size * self.data.targets_per_sequence / self.ranks.size
        self.autocast = torch.autocast(device, dtype=self.dtype, enabled=self.dtype != torch.float32)
        self.scaler = GradScaler(device, enabled=self.dtype == torch.float16)
        self.optimizers = make_optimizers(self.model, config.optimizer, self.ranks)
        self.skipped = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.started = time.perf_counter()

    @cached_property
    def checkpointer(self) -> AsyncCheckpointer:
        return AsyncCheckpointer(self.directory / "checkpoints", self.config.keep_checkpoints, self.data.tokenizer)

    @cached_property
    def text_hash(self) -> str | None:
        """The hash of the tokens; None for a task."""
        return tokens_hash(self.data.train, self.data.val) if isinstance(self.data, TokenDataset) else None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for the run's files: a resumed one has its init_from in place of resume."""
        beginning = {"resume": None, "init_from": self.begun_from} if self.begun_from else {}
        return asdict(self.config) | beginning

    @property
    def seconds(self) -> float:
        """Training time, that before a resume included."""
        return self.progress.seconds + time.perf_counter() - self.started

    @property
    def tokens(self) -> int:
        """Inputs of all steps so far."""
        return (self.progress.step * self.config.batch_size + self.progress.ahead) * self.config.model.block_size

    def after_step(self) -> None:
        """Count a step, and end a run whose steps are skipped."""
        self.progress.step += 1
        # To read the number of skipped steps waits for the device: do so when the step is logged, and every
        # max_skipped_steps.
        if self.logs_step or is_due(self.progress.step, self.config.max_skipped_steps):
            self.check_skipped_steps()

    @property
    def logs_step(self) -> bool:
        """Whether the step just taken is logged: the first one, and those of log_interval."""
        return self.progress.step == 1 or is_due(self.progress.step, self.config.log_interval)

    @property
    def precision(self) -> str:
        """The name of dtype."""
        return str(self.dtype).removeprefix("torch.")

    def micro_batch_starts(self) -> range:
        """Return the index in the global batch of the first sequence of each micro-batch here."""
        count = self.config.batch_size // self.ranks.size
        start = self.ranks.rank * count
        return range(start, start + count, self.micro_batch_size)

    def seed_dropout(self, step: int, first: int) -> None:
        """Seed the dropout of the micro-batch of `step` that begins with sequence `first`."""
        # Step and sequence alone decide: a resumed run draws the same, and so do other processes with micro-batches of
        # this size.
        digest = hashlib.sha256(f"dropout {self.config.seed} {step} {first}".encode()).digest()
        seed_generators(int.from_bytes(digest[:8], "little"), self.device)

    def count_skipped(self, skip: Tensor) -> None:
        """Count a skipped step if `skip`, a bool on the device, is true."""
        self.skipped = torch.stack([self.skipped[0] + skip, (self.skipped[1] + 1) * skip])

    def exit_on_signal(self) -> None:
        """Save and raise SystemExit if a rank has received a signal; every rank must call."""
        signal = int(self.ranks.max(self.signals.received))
        if signal:
            self.save(leaving=True)
            self.checkpointer.finish()
            self.ranks.broadcast_object(None)  # a barrier: torchrun kills the remaining ranks once one exits
            raise SystemExit(128 + signal)

    def fraction_done(self) -> float:
        """Return the fraction of the run that is done, by steps or minutes, the larger one."""
        done = self.progress.step / self.max_steps if self.max_steps else 0.0
        if self.config.max_minutes is not None:
            done = max(done, self.ranks.max(self.seconds / 60 / self.config.max_minutes))
        return min(done, 1.0)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last evaluations, as many as config.patience, brought no better loss."""
        return self.config.patience is not None and self.progress.without_gain >= self.config.patience

    def save(self, *, finished: bool = False, leaving: bool = False) -> None:
        """Write checkpoints/step_N from a copy of the run's state, while training continues.

        If this checkpoint exists, only its meta.json is written. Every rank must call. First check_skipped_steps() may
        raise SettingsError: for too many skipped steps in a row, and at the end for a validation loss that is not
        finite. Then

            weights     last step  within a run     at a signal      at its end
            finite      taken      written          written          written
            finite      skipped    nothing written  written          written
            not finite  any        nothing written  nothing written  SettingsError

        A run whose steps are skipped may be about to fail, and then goes on from a checkpoint before them. A step that
        lowers the scale of fp16 is no such sign. How a checkpoint replaces another whole: runs/checkpoint.py.
        """
        self.check_skipped_steps(finished=finished)
        with self.memory_errors_of("a save"):
            self._save(finished, leaving)

    def _save(self, finished: bool, leaving: bool) -> None:
        progress = self.progress
        is_skipped = progress.skipped_in_a_row and not self.scale_can_fall
        waits = is_skipped and not finished and not leaving
        if waits or not self.weights_are_finite():
            fault = "was skipped, so it is not saved yet" if waits else "is not finite, so it is not saved"
            log.warning("step %d %s: the checkpoints stay as they are.", progress.step, fault)
            return
        progress.seconds = self.seconds
        progress.finished = finished
        self.started = time.perf_counter()

        # Save the tensors, unless this step's checkpoint has them already.
        if self.ranks.is_first:
            has_tensors = self.checkpointer.has(progress.step)
            weights = {} if has_tensors else plain_weights(self.model)
            optimizer = {} if has_tensors else optimizer_state(self.model, self.optimizers)
            self.checkpointer.save(weights, optimizer, self.meta(), ends=finished or leaving)

    def is_saved(self) -> bool:
        """Return whether this step's checkpoint has been written; every rank must call."""
        return bool(self.ranks.broadcast_object(self.ranks.is_first and self.checkpointer.has(self.progress.step)))

    def memory_errors_of(self, name: str, smaller: str = "") -> AbstractContextManager[None]:
        """Turn a lack of memory inside into an error that names this part of the run and a remedy."""
        remedy = f"set {smaller}" if smaller else "choose a smaller model or model.block_size"
        return memory_errors(f"{name} after step {self.progress.step} needs more memory than there is", remedy)

    def meta(self) -> Meta:
        """Return the meta.json of a checkpoint of the run's current state."""
        return Meta(
            config=self.settings,
            progress=replace(self.progress),
            home=str(self.directory.resolve()),
            data=self.data.fingerprint,
            text_hash=self.text_hash,
            own_tokenizer=self.own_tokenizer,
            computed_on=self.computed_on(),
            scaler=self.scaler.state_dict(),
            logs=log_sizes(self.directory),
        )

    def check_skipped_steps(self, *, finished: bool = False) -> None:
        """Copy the numbers of skipped steps from the device, and warn of new ones.

        Raises SettingsError for too many in a row, of which fp16 allows more while its scale can fall, and, if
        finished, for a loss or a weight that is not finite.
        """
        # Read the numbers.
        config = self.config
        progress = self.progress
        before = progress.skipped
        progress.skipped, progress.skipped_in_a_row = self.skipped.tolist()
        new = progress.skipped - before
        if new:
            message = "step %d: %s changed nothing, because loss or gradient was not finite"
            log.warning(message, progress.step, plural(new, "step"))

        # Find the problem, if there is one.
        in_a_row = progress.skipped_in_a_row
        is_new = 0 < in_a_row == progress.step  # no step has changed a weight
        if in_a_row >= config.max_skipped_steps + (HALVINGS if self.scale_can_fall else 0):
            first = progress.step - in_a_row + 1
            problem = f"loss or gradient was not finite in {plural(in_a_row, 'step')} in a row, first in step {first}"
        elif finished and not math.isfinite(progress.metrics["val_loss"]):
            problem = f"the validation loss is {progress.metrics['val_loss']} at the end"
        elif finished and not self.weights_are_finite():
            problem = "a weight is not finite at the end"
        else:
            return

        # Name the remedies that would change something, and the checkpoints. A run may have been on the way to this
        # when it wrote the latest. Rates and clipping change nothing before the first update.
        safer = {
            "grad_clip=1": not is_new and not 0 < config.grad_clip <= 1,
            "precision=fp32": self.dtype != torch.float32,
        }
        remedy = self.suspects_at_first() if is_new else f"lower {config.optimizer.suspects()}"
        if any(safer.values()):
            remedy += f", or set {' or '.join(filter(safer.get, safer))}"
        self.checkpointer.wait()
        last = self.checkpointer.last()
        if last:
            remedy += f"; the latest weights are in {last}"
            best = f"step_{progress.best_step}"
            if best != last.name and self.checkpointer.has(progress.best_step):
                remedy += f", the best in {best}"
        raise SettingsError(problem, remedy)

    def suspects_at_first(self) -> str:
        """Return the remedy for a run whose first loss or gradient is not finite."""
        config = self.config
        if config.code:
            return f"look at the gradients of code={config.code}"
        if config.init_from:
            return f"begin with other weights than init_from={config.init_from}"
        return f"choose another attention than {config.model.attention}"

    @property
    def scale_can_fall(self) -> bool:
        """Whether an overflow of the gradient lowers the scale of fp16's loss.

        A later step may then be finite.
        """
        return bool(self.scaler.get_scale() > 1)  # 1 in other types

    def weights_are_finite(self) -> bool:
        """Return whether the weights are finite on all ranks; every rank must call."""
        finite = torch.stack([weight.detach().isfinite().all() for weight in self.model.parameters()]).all()
        return not self.ranks.max(float(not finite))

    def computed_on(self) -> dict[str, Any]:
        """Return the facts besides the settings on which the last bits of the result depend."""
        return {
            "device": self.device.type,
            "processor": processor_name(self.device),
            "precision": self.precision,
            "processes": self.ranks.size,
            "micro_batch_size": self.micro_batch_size,
            "threads": torch.get_num_threads(),
            "compiled": self.compiled,
            "torch": torch.__version__,
            "tinygpt": __version__,
            "project_hash": PROJECT_HASH,
        }


def is_due(step: int, interval: int) -> bool:
    """Return whether `step` is a positive multiple of `interval`."""
    return step > 0 and step % interval == 0


def steps_to_take(config: TrainConfig, model: GPT, ahead: int = 0) -> int | None:
    """Return max_steps, or fewer for max_flops; None if only max_minutes ends the run.

    ahead: that of Progress.
    """
    # max_minutes alone ends a run by time; without any limit it takes DEFAULT_STEPS.
    steps = config.max_steps or (DEFAULT_STEPS if config.max_minutes is None else None)
    # max_flops takes the place of the default, but not of a max_steps that comes first.
    if config.max_flops is not None:
        steps_of_flops = config.max_flops / (flops_per_token(model) * config.tokens_per_step)
        most = max(1, round(steps_of_flops - ahead / config.batch_size))
        steps = min(most, config.max_steps or most)
    warmup = config.schedule.warmup_steps or 0
    if steps and warmup > steps:
        problem = f"schedule.warmup_steps={warmup} is longer than the run of {plural(steps, 'step')}"
        raise SettingsError(problem, "lower it, or take more steps")
    return steps


def rank_batch_size(config: TrainConfig, processes: int) -> int:
    """Return the sequences of a step for each process; SettingsError for an uneven division."""
    size = config.micro_batch_size or 1
    if config.batch_size % processes:
        next_size = -(-config.batch_size // (processes * size)) * processes * size
        fault = f"is no multiple of {processes}, the number of processes"
        raise SettingsError(fault, f"choose one, such as {next_size}", setting="batch_size", value=config.batch_size)
    if config.batch_size % (processes * size):
        fault = f"× {processes}, the number of processes, does not divide batch_size={config.batch_size}"
        raise SettingsError(fault, "choose one that does", setting="micro_batch_size", value=size)
    return config.batch_size // processes
