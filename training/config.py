"""TrainConfig: the settings of a training run, typed, and checked when made."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter

from common.errors import (
    ANY_SEED,
    SettingsError,
    at_least,
    check_types,
    format_value,
    fraction,
    in_utf8,
    one_of,
    positive,
)
from common.settings import WANDB_SWEEP
from data.config import DIVISIBLE, RECORDS, VAL_FRACTIONS, VOCABULARIES, DataConfig, TokenizerConfig
from model.config import GPTConfig

OPTIMIZERS = ("muon", "adamw")
SCHEDULES = ("warmup_stable_decay", "cosine", "constant")
WANDB_MODES = ("disabled", "offline", "online")
TEXTS = " ".join(VAL_FRACTIONS)
# How to have what other trainers mean by 0 or -1, where leaving the setting out does not give it.
NEVER = {
    "max_steps": "max_steps=1000000 schedule=constant leaves the end to patience=5, null to max_minutes",
    "log_interval": "log_interval=1000000 writes lines of the first step and of evaluations alone",
    "eval_interval": "eval_interval=1000000 evaluates the last step alone",
    "checkpoint_interval": "checkpoint_interval=1000000 saves no steps but those evaluated and the last",
    "eval_tokens": "eval_tokens=1000000000 scores all of what is held out",
    "keep_checkpoints": "keep_checkpoints=1 keeps the best and the latest, to continue from, and 1000000 keeps all",
}
STRETCHED = "model.rope_scaling_factor model.rope_trained_length"
# (settings, another setting with the values that give them an effect).
NEEDS = (
    ("plan.device", "dry_run=true"),
    ("data.val_fraction data.val_path", f"data.source={TEXTS}"),
    ("data.path data.document_mask", f"data.source={TEXTS} nanogpt"),
    ("tokenizer tokenizer.name tokenizer.vocab_size", f"data.source={TEXTS} nanogpt"),
    ("data.separator", f"data.source={' '.join(DIVISIBLE)}"),
    ("data.tales.count data.tales.seed", "data.source=tales"),
    ("data.text_field", f"data.source={' '.join(RECORDS)}"),
    ("data.name data.subset data.split", "data.path=null"),
    ("data.name data.subset data.split", "data.source=hf"),
    ("data.task.random_non_queries", "data.source=recall"),
    ("tokenizer.vocab_size", "tokenizer.name=bpe"),
    (STRETCHED, "model.rope_scaling=linear yarn llama3"),
    (STRETCHED, "model.position=rope"),
    ("model.rope_theta", "model.position=rope pope"),
    ("model.rope_fraction model.rope_proportional model.rope_scaling", "model.position=rope"),
)
# The same for settings that a search varies beside that one: a run tells of them, and is not refused.
SEARCHED = (
    ("optimizer.momentum", "optimizer.name=muon"),
    ("schedule.decay_fraction", "schedule.name=warmup_stable_decay"),
    ("schedule.final_factor", "schedule.name=warmup_stable_decay cosine"),
)


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimizers of the weights, and their rates."""

    name: str = "muon"
    """muon (Jordan et al. 2024; AdamW for everything but the blocks' matrices) or adamw, for which
    optimizer=adamw also sets rates and decay."""
    lr: float = 0.02
    """Peak learning rate of the blocks' matrices."""
    embedding_lr: float | None = 0.1
    """Peak learning rate of the embeddings, norms and biases; lr when null."""
    lm_head_lr: float | None = 0.008
    """Peak learning rate of an untied lm_head, and of the blocks' other matrices, such as a gate's with a row
    for each head; lr when null."""
    momentum: float = 0.9
    """Muon's Nesterov momentum."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay, per unit of learning rate, on matrices and embeddings."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        one_of("optimizer.name", self.name, OPTIMIZERS)
        for name, rate in self.rates.items():
            positive(f"optimizer.{name}", rate)
        for name in ("momentum", "beta1", "beta2"):
            fraction(f"optimizer.{name}", getattr(self, name), below=1)
        at_least("optimizer.weight_decay", self.weight_decay, 0.0)

    @property
    def rates(self) -> dict[str, float]:
        """The rates that are set, by name."""
        rates = {"lr": self.lr, "embedding_lr": self.embedding_lr, "lm_head_lr": self.lm_head_lr}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def suspects(self) -> str:
        """Return the rates above their defaults as they are typed, or lr if none is."""
        usual = OptimizerConfig().rates
        high = [name for name, rate in self.rates.items() if rate > usual[name]]
        return " and ".join(f"optimizer.{name}={self.rates[name]:g}" for name in high or ["lr"])


@dataclass(kw_only=True)
class ScheduleConfig:
    """The learning rate over the run, as a factor on every peak rate."""

    name: str = "warmup_stable_decay"
    """warmup_stable_decay (constant, then linear to the end), cosine (Loshchilov & Hutter 2017)
    or constant, each after a warm-up."""
    warmup_steps: int | None = None
    """Steps w of the linear warm-up, 1/(w+1) to w/(w+1) of the peak; when null 10, or 100 for cosine
    and constant, and at most a tenth of the run, rounded up."""
    decay_fraction: float = 0.7
    """For warmup_stable_decay: share of the run, at its end, in which the rate falls; at most all steps after the
    warm-up."""
    final_factor: float = 0.0
    """For all but constant: factor at the end of the run, after the last step; schedule=cosine sets 0.1."""

    def __post_init__(self) -> None:
        check_types(self, "schedule.")
        one_of("schedule.name", self.name, SCHEDULES)
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        fraction("schedule.decay_fraction", self.decay_fraction)
        fraction("schedule.final_factor", self.final_factor)


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases; metrics.jsonl and report.html are written with or without it."""

    mode: str | None = None
    """disabled, offline (written to the run's directory, to be synced by hand) or online; when
    null WANDB_MODE, otherwise online in a sweep by wandb and disabled elsewhere."""
    project: str | None = None
    """Project of the runs; when null WANDB_PROJECT, otherwise the wandb sweep's or tinygpt."""
    entity: str | None = None
    """User or team that owns the project; when null WANDB_ENTITY, otherwise your default."""
    name: str | None = None
    """Name of the run; when null WANDB_NAME, otherwise its directory's, or in a sweep the job's
    number and its varied settings."""
    group: str | None = None
    """Group of a sweep's runs; the sweep's folder when null."""
    tags: list[str] | None = None
    """Tags of the run, as in '[baseline,byte]'; when null WANDB_TAGS, separated by commas."""
    notes: str | None = None
    """Notes of the run, such as why it was made, also on its page; when null WANDB_NOTES."""

    def __post_init__(self) -> None:
        check_types(self, "wandb.")
        one_of("wandb.mode", self.mode or "disabled", WANDB_MODES)
        check_wandb_names("wandb.project", self.project, "wandb.tags", self.tags)

    def check_environment(self) -> None:
        """Raise SettingsError for a project or tags of the environment that wandb refuses.

        Its empty variables, as docker compose has for values that are not set, are unset: wandb refuses some.
        """
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            if not unquoted(name):
                del os.environ[name]
        tags = os.environ.get("WANDB_TAGS")
        check_wandb_names(
            "WANDB_PROJECT", os.environ.get("WANDB_PROJECT"), "WANDB_TAGS", tags.split(",") if tags else None
        )

    @property
    def active_mode(self) -> str:
        """Mode of wandb, with the default resolved."""
        asked = unquoted("WANDB_MODE") or ("online" if WANDB_SWEEP else "disabled")
        asked = {"dryrun": "offline", "run": "online"}.get(asked, asked)  # wandb's earlier names
        if unquoted("WANDB_DISABLED").lower() in ("1", "on", "true", "yes"):  # as for transformers
            asked = "disabled"
        one_of("WANDB_MODE", asked, WANDB_MODES)
        return self.mode or asked


def unquoted(variable: str) -> str:
    """Return a variable of the environment; SettingsError if it has quotes around it."""
    value = os.environ.get(variable, "")
    if re.fullmatch(r"'[^']*'|\"[^\"]*\"", value):
        problem = f"the quotes around {variable} belong to it, as docker's --env-file keeps them"
        raise SettingsError(problem, "write it without them")  # and without its value, which may be a key
    return value


def check_wandb_names(project_setting: str, project: str | None, tags_setting: str, tags: list[str] | None) -> None:
    """Raise SettingsError for names that wandb refuses, which it does once the run has begun."""
    forbidden = sorted({*(project or "")}.intersection("/\\#?%:"))
    if forbidden:
        raise SettingsError(f"has {' '.join(forbidden)}", "leave that out", setting=project_setting, value=project)
    if len(project or "") > 128:
        raise SettingsError("has more than 128 characters", "shorten it", setting=project_setting, value=project)
    for tag in tags or ():
        if "," in tag:
            raise SettingsError(f"{tags_setting} has the one tag {tag!r}", f"write {tags_setting}='[{tag}]'")
        if not 1 <= len(tag) <= 64:
            raise SettingsError(f"{tags_setting} has {tag!r}", "a tag has 1 to 64 characters: change it")


@dataclass(kw_only=True)
class PlanConfig:
    """The GPU for which dry_run=true predicts a run."""

    device: str | None = None
    """GPU: t4, v100, a100, h100, h200 or b200; this machine when null."""

    def __post_init__(self) -> None:
        check_types(self, "plan.")


@dataclass(kw_only=True)
class TrainConfig:
    """The settings of one training run."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    attention: str | None = None
    """How the layers attend, as in attention=sdpa+gate; short for model.attention."""
    code: str | None = None
    """Your own Python file, run first, which registers forms, modifiers or tasks."""
    code_hash: str | None = None
    """Hash of that file and of the neighbours that it imports; the run sets it."""
    run_dir: str | None = None
    """Directory for all files of the run; a new one under outputs/ when null."""
    resume: str | None = None
    """Continue the run in this directory; auto continues the newest unfinished run (of run_dir,
    if given) or begins a new one."""
    allow_changes: bool = False
    """Resume with other settings than before, even if they change the result."""
    init_from: str | None = None
    """Start from the weights of this checkpoint or run directory, or of hf:NAME_OR_FOLDER."""
    freeze: list[str] | None = None
    """Parts of the model that training leaves as they are, as in '[token_embedding,blocks.0]'."""
    dry_run: bool = False
    """Print the memory and time that the run would take, and do not train."""
    seed: int = 1
    """Seed of the initial weights, the order of the text and the dropout."""
    device: str = "auto"
    """Device: auto, cpu, cuda, cuda:N or mps. The variable OMP_NUM_THREADS sets the threads of a CPU."""
    precision: str = "auto"
    """Precision of the forward pass: auto, fp32, bf16 or fp16. auto is bf16 on CUDA devices and
    processors that have it, fp16 on other CUDA devices, and fp32 elsewhere. bf16 and fp16 run under autocast, fp16 with
    a scaled loss. Weights and updates are float32; Muon's orthogonalisation, an approximation anyway, is bf16 wherever
    that is fast."""
    compile: str = "auto"
    """torch.compile: auto, on or off. auto is on for long runs on Linux: with CUDA of ten minutes, on a CPU of five."""
    deterministic: bool = False
    """On CUDA, use only kernels that repeat their results to the bit; slower."""
    recompute: str = "none"
    """Activations that the backward pass recomputes: none, or block for all within each block.
    block saves most of their memory for a third more arithmetic; the result is the same."""

    batch_size: int = 16
    """Sequences in one optimizer step."""
    micro_batch_size: int | None = None
    """Sequences in one forward pass of one process; its share of the batch when null. Fewer
    save memory. The result differs by rounding, which Muon amplifies, and by the draws of dropout."""
    max_steps: int | None = None
    """Optimizer steps to take; when null all that max_minutes or max_flops allow, otherwise 450."""
    max_minutes: float | None = None
    """Stop after this much training time, with the schedule at its end, unless the steps end
    first. Compiling, which comes before the first step, does not count."""
    max_flops: float | None = None
    """Limit the steps to this much arithmetic, such as 1e13. 6 operations are
    counted per weight and token, plus attention's. So models of different sizes get the same budget."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    max_skipped_steps: int = 10
    """Stop if the loss or gradient was not finite in so many last steps in a row, or more: looked at
    when a step is logged, and once in so many steps. In fp16 such a step halves the scale of the
    loss: while the scale is above 1, 16 more are allowed."""

    log_interval: int = 10
    """Steps between lines of metrics.jsonl. A terminal shows a progress bar besides; TQDM_DISABLE=1 before the command
    leaves it out."""
    eval_interval: int = 150
    """Steps between evaluations. Each scores a fifth as many targets as these steps train on,
    16,384 to 524,288, spread over the validation text. The last one scores a fifth of all steps' targets."""
    patience: int | None = None
    """End the run, as finished, after this many evaluations in a row without a better loss. The best
    checkpoint stays; the last evaluation scores no more than the others."""
    eval_tokens: int | None = None
    """Targets that every evaluation scores at most, so that runs of different lengths score the same."""
    eval_batch_size: int | None = None
    """Sequences in one forward pass of an evaluation; the number of training when null."""
    checkpoint_interval: int = 150
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints to keep, besides the best."""
    sample_tokens: int = 96
    """Tokens of the sample that an evaluation writes; 0 writes none."""
    sample_prompt: str = ""
    """Prompt of that sample; the start of a document when empty."""

    def __post_init__(self) -> None:
        if isinstance(self.compile, bool):  # as YAML reads on, off, yes, no
            self.compile = "on" if self.compile else "off"
        check_types(self)
        # attention= is a short name of model.attention: the model's settings keep the value.
        if self.attention is not None:
            if self.model.attention not in (GPTConfig.attention, self.attention):
                given = f"attention={self.attention} and model.attention={self.model.attention}"
                raise SettingsError(f"{given} are both given", "choose one")
            self.model = replace(self.model, attention=self.attention)
            self.attention = None
        self.compile = {"true": "on", "false": "off"}.get(self.compile.lower(), self.compile)
        # Check each setting alone, then pairs that exclude each other.
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        one_of("compile", self.compile, ("auto", "on", "off"))
        one_of("recompute", self.recompute, ("none", "block"))
        intervals = ("log_interval", "eval_interval", "checkpoint_interval")
        sizes = ("batch_size", "micro_batch_size", "eval_batch_size", "eval_tokens", "patience")
        for name in (*intervals, *sizes, "max_steps", "max_skipped_steps", "keep_checkpoints"):
            at_least(name, getattr(self, name), 1, NEVER.get(name, ""))
        at_least("sample_tokens", self.sample_tokens, 0)
        in_utf8("sample_prompt", self.sample_prompt)
        at_least("grad_clip", self.grad_clip, 0.0, "grad_clip=0 clips no gradient")
        positive("max_minutes", self.max_minutes)
        positive("max_flops", self.max_flops)
        if not 0 <= self.seed < 2**63:
            raise SettingsError("must be from 0 to 2^63 - 1", ANY_SEED, setting="seed", value=self.seed)
        if self.resume and self.init_from:
            raise SettingsError(f"resume={self.resume} and init_from={self.init_from} are both given", "choose one")

    def idle(self) -> dict[str, tuple[str, str]]:
        """Return the settings without effect, each with the setting and the value that cause it.

        model.attention.unused_settings() gives those that a form of attention ignores.
        """
        tasks = VOCABULARIES.keys()
        needs = (
            *NEEDS,
            ("data.task.vocab_size", f"data.source={' '.join(tasks)}"),
            ("data.task.items", f"data.source={' '.join(tasks - {'copy', 'induction'})}"),
        )
        return self.lacking(needs)

    def lacking(self, needs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """Return the settings of NEEDS or SEARCHED without the value that they need, as idle() does."""
        found: dict[str, tuple[str, str]] = {}
        # A group of settings is idle unless the setting that it needs has one of some values.
        for names, needed in needs:
            setting, _, values = needed.partition("=")
            value = format_value(attrgetter(setting)(self))
            if value not in values.split():
                short = setting.removesuffix(".source").removesuffix(".name")
                found |= dict.fromkeys(names.split(), (short, value))
        return found

    @property
    def tokens_per_step(self) -> int:
        """Number of inputs, and of targets, in one optimizer step."""
        return self.batch_size * self.model.block_size
