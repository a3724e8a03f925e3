"""TrainConfig: every setting of a training run, typed and checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig

OPTIMIZERS = ("muon", "adamw")
SCHEDULES = ("warmup_stable_decay", "cosine", "constant")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SWITCHES = ("auto", "on", "off")
DISTRIBUTED = ("ddp", "fsdp")
WANDB_MODES = ("disabled", "offline", "online")


@dataclass(kw_only=True)
class OptimizerConfig:
    """Which optimizer moves which weights how fast."""

    name: str = "muon"
    """muon (Jordan et al. 2024) for the blocks' matrices with AdamW for everything else, or adamw for all."""
    lr: float = 0.02
    """Peak learning rate of the blocks' matrices."""
    embedding_lr: float | None = None
    """Peak learning rate of the embeddings, norms and biases; lr when null."""
    lm_head_lr: float | None = None
    """Peak learning rate of an untied lm_head; lr when null."""
    momentum: float = 0.95
    """Muon's Nesterov momentum."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay, per unit of learning rate, on matrices and embeddings."""

    def __post_init__(self) -> None:
        _one_of("optimizer.name", self.name, OPTIMIZERS)
        for name in ("lr", "embedding_lr", "lm_head_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optimizer.{name}={value} must be a positive number.")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be from 0 up to, not including, 1.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must be a number from 0 on; 0 turns it off.")


@dataclass(kw_only=True)
class ScheduleConfig:
    """How the learning rate moves over the run, as a factor on every peak rate."""

    name: str = "warmup_stable_decay"
    """warmup_stable_decay (constant, then linear down), cosine (Loshchilov & Hutter 2017) or constant."""
    warmup_steps: int = 10
    """Steps over which the rate climbs linearly from 0."""
    decay_fraction: float = 0.7
    """For warmup_stable_decay: share of the run spent decaying, at its end."""
    final_factor: float = 0.0
    """Factor reached at the last step."""

    def __post_init__(self) -> None:
        _one_of("schedule.name", self.name, SCHEDULES)
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps} must not be negative; 0 turns it off.")
        for name in ("decay_fraction", "final_factor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}={getattr(self, name)} must be from 0 to 1.")


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases; metrics.jsonl and loss.png are written with or without it."""

    mode: str = "disabled"
    """disabled, offline (written to the run directory, synced by hand) or online."""
    project: str = "tinygpt"
    name: str | None = None
    """The run's name; its directory's when null, in a sweep its number and overrides."""
    group: str | None = None
    """What the runs of a sweep are shown under; the sweep's folder when null."""

    def __post_init__(self) -> None:
        _one_of("wandb.mode", self.mode, WANDB_MODES)
        if not self.project or len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
            raise ValueError(
                f"wandb.project={self.project} must be 1 to 128 characters, none of them / \\ # ? % or a colon."
            )


@dataclass(kw_only=True)
class PlanConfig:
    """The machines that dry_run predicts for."""

    devices: int = 1
    """How many of them work together."""
    device: str | None = None
    """v100, a100, h100, h200 or b200; this machine when null."""

    def __post_init__(self) -> None:
        _at_least("plan.devices", self.devices, 1)


@dataclass(kw_only=True)
class SweepConfig:
    """Many runs from one command (-m)."""

    resume: str | None = None
    """A sweep's folder, to go on where it was stopped: what is finished is kept, the rest is run."""


@dataclass(kw_only=True)
class TrainConfig:
    """One training run."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    resume: str | None = None
    """A run's directory, to go on where it was stopped; auto: the newest unfinished run, or else a new one."""
    allow_changes: bool = False
    """Resume even though settings that change the result are not those the run began with."""
    init_from: str | None = None
    """A checkpoint or run directory, or hf:NAME_OR_FOLDER, whose weights a new run begins with."""
    dry_run: bool = False
    """Print what the run would need and how long it would take, and do not train."""
    run_dir: str | None = None
    """Where everything the run writes goes; a new folder under outputs/ when null."""
    seed: int = 1
    """Fixes the initial weights, the order of the text and the dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """bf16 and fp16 run the forward pass under autocast, fp16 with a scaled loss; auto is bf16 on CUDA devices
    and processors that have it, fp16 on CUDA devices that do not, and fp32 elsewhere. Weights and updates are float32;
    muon's orthogonalisation, which is rough in itself, is bf16 wherever that is fast, whatever this says."""
    compile: str = "auto"
    """torch.compile: auto is on for CUDA on Linux, where it pays for its compilation."""
    deterministic: bool = False
    """On CUDA, use only kernels that give the same bits every time; slower."""
    distributed: str = "ddp"
    """Under torchrun: ddp copies the model to every process, fsdp cuts it into shards."""

    batch_size: int = 16
    """Windows in one optimizer step."""
    micro_batch_size: int | str | None = None
    """Windows in one forward pass of one process; all of its batch when null, as many as memory holds
    when auto. Less memory, the same result but for rounding (which muon makes visible) and what dropout draws."""
    max_steps: int | None = None
    """Optimizer steps to take; when null as many as max_minutes or max_flops allow, and 600 without them."""
    max_minutes: float | None = None
    """Stop, and end the schedule, after this much training time, if the steps have not come to an end first."""
    max_flops: float | None = None
    """Take only as many steps as make this much arithmetic (6 operations for each weight and token, and
    attention's), which is how models of different sizes are given the same budget."""
    grad_clip: float = 1.0
    """Longest allowed norm of the gradient; 0 turns clipping off."""
    max_skipped_steps: int = 10
    """Stop after this many steps in a row that were skipped because loss or gradient was not finite."""

    log_interval: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_interval: int = 200
    """Steps between evaluations on the whole validation split."""
    eval_batch_size: int | None = None
    """Windows in one forward pass of an evaluation; when null, as many as make 4,096 tokens."""
    checkpoint_interval: int = 200
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints are kept, beside the best."""
    sample_tokens: int = 96
    """Tokens of the sample shown at evaluations; 0 shows none."""
    sample_prompt: str = ""
    """What that sample continues; the start of a document when empty."""

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("compile", self.compile, SWITCHES)
        _one_of("distributed", self.distributed, DISTRIBUTED)
        for name in ("batch_size", "log_interval", "eval_interval", "checkpoint_interval"):
            _at_least(name, getattr(self, name), 1)
        if self.max_steps is not None:
            _at_least("max_steps", self.max_steps, 1)
        for name in ("max_skipped_steps", "keep_checkpoints"):
            _at_least(name, getattr(self, name), 1)
        _at_least("sample_tokens", self.sample_tokens, 0)
        if not 0 <= self.grad_clip < math.inf:
            raise ValueError(f"grad_clip={self.grad_clip} must be a number from 0 on; 0 turns clipping off.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be from 0 to 2^63 - 1.")
        if self.resume and self.init_from:
            raise ValueError(f"resume={self.resume} and init_from={self.init_from} are both given: choose one.")
        if self.eval_batch_size is None:
            self.eval_batch_size = max(1, 4_096 // self.model.block_size)
        _at_least("eval_batch_size", self.eval_batch_size, 1)
        self._check_micro_batch_size()
        for name in ("max_minutes", "max_flops"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a positive number, or null for no limit.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step learns from."""
        return self.batch_size * self.model.block_size

    def _check_micro_batch_size(self) -> None:
        size = self.micro_batch_size
        if size is None or size == "auto":
            return
        if isinstance(size, str):
            raise ValueError(f"micro_batch_size={size} must be a whole number, auto, or null for the whole batch.")
        _at_least("micro_batch_size", size, 1)
        if self.batch_size % size:
            raise ValueError(
                f"micro_batch_size={size} does not divide batch_size={self.batch_size}: "
                "every forward pass of a step takes the same number of windows."
            )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value} is not known: choose one of {', '.join(known)}.")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
