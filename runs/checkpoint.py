"""Checkpoints: their files, written atomically and verified by checksums.

A checkpoint is a directory, complete or absent:

    model.safetensors       the weights, under plain names.
    optimizer.safetensors   the optimizers' state, for resuming.
    meta.json               format version, settings, progress, and a checksum of every file.
    tokenizer.json          the tokenizer; absent if a synthetic task was learned.

Safetensors and JSON hold only data, so reading a checkpoint runs no code from it. A run keeps `checkpoints/step_N`, and
`last` and `best`: links to two of them, or small files with their names on systems without links.
"""

import hashlib
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from tiktoken import Encoding
from torch import Tensor

from common.errors import PICKLED, CheckpointError, SettingsError, damage_named
from common.files import is_locked, pointed, reading, replace_text, replacing, user_path
from common.settings import build
from common.text import command, hydra_quoted
from data.tokenizer import check_kept, read_tokenizer, save_tokenizer
from model.attention import check_names
from model.attention.code import RAN
from model.config import GPTConfig
from model.gpt import GPT
from model.surgery import uncompiled
from model.weights import check_choices, check_weights, load_weights, plain_weights, save_file
from runs.directory import TABLE
from runs.plugins import find_code, other_code

T = TypeVar("T")
log = logging.getLogger("tinygpt")  # without a handler its warnings go to stderr

FORMAT_VERSION = 4
OUTPUTS = (Path("outputs"), Path("multirun"))
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
TOKENIZER = "tokenizer.json"
NO_CHECKPOINT = "has no checkpoint, for it ended before its first one or they were removed"
ANOTHER = "use another one"
"""The remedy for a damaged checkpoint."""


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    """Optimizer steps taken."""
    ahead: int = 0
    """Sequences read beyond step · batch_size, after a change of batch_size; less than 0 if they were fewer."""
    seconds: float = 0.0
    """Training time up to the last checkpoint."""
    evaluated: int = 0
    """The step of the latest evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The figures of the latest evaluation."""
    best_loss: float | None = None
    """The lowest finite loss on the targets that all evaluations score; None if there is none."""
    best_result: float | None = None
    """The loss that this evaluation reported, perhaps on more targets; None in older checkpoints."""
    best_step: int = 0
    best_tokens: int = 0
    """The number of targets that all evaluations score."""
    without_gain: int = 0
    """The number of evaluations in a row that were not the best so far."""
    skipped: int = 0
    """Steps skipped because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    finished: bool = False
    wandb_id: str | None = None
    begun_with: str | None = None
    """The hash of the weights that init_from brought."""
    learned: list[str] = field(default_factory=list)
    """The fingerprints of texts that the weights learned before the run's own, also by runs that init_from named."""
    earlier_settings: str | None = None
    """Settings and code that earlier steps had and later ones have not, after resumes."""

    @property
    def is_evaluated(self) -> bool:
        """Whether the latest evaluation was of this step."""
        return bool(self.metrics) and self.evaluated == self.step

    @property
    def is_outdated(self) -> bool:
        """Whether this step was evaluated on another text, or other targets, before a resume."""
        return self.step > 0 and self.evaluated == self.step and not self.metrics

    @property
    def result(self) -> float:
        """The loss that the best evaluation reported; infinite if none was finite."""
        if self.best_loss is None:
            return math.inf
        # If the latest evaluation is the best, metrics has its figure, also in an older checkpoint.
        if self.best_step == self.evaluated:
            return self.metrics["val_loss"]
        return self.best_loss if self.best_result is None else self.best_result

    def compare(self, loss: float, tokens: int) -> None:
        """Make this step the best if its loss is the lowest on this number of targets.

        `metrics` has the figures of its evaluation.
        """
        # With another eval_interval a resumed run scores other targets. Earlier losses cannot be compared with theirs.
        best = math.inf if self.best_loss is None or tokens != self.best_tokens else self.best_loss
        self.without_gain += 1
        if loss < best:
            self.best_loss = loss
            self.best_result = self.metrics.get("val_loss", loss)
            self.best_step = self.step
            self.best_tokens = tokens
            self.without_gain = 0


@dataclass
class Meta:
    """The content of meta.json, but for the version of the format and the checksum."""

    config: dict[str, Any]
    """The settings of the run; config["model"] is a GPTConfig's."""
    progress: Progress = field(default_factory=Progress)
    home: str = ""
    """The directory of the run at the time of writing."""
    data: str = ""
    """The fingerprint of the tokens."""
    text_hash: str | None = None
    """The hash of the tokens, see data/prepare.py; None for a task, and in a checkpoint of an earlier version."""
    own_tokenizer: bool = False
    """Whether the tokenizer came with pretrained weights."""
    computed_on: dict[str, Any] = field(default_factory=dict)
    """The versions and facts of the machine on which the last bits of the result depend."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """The state of the gradient scaler of fp16."""
    logs: dict[str, int] = field(default_factory=dict)
    """Sizes of the run's logs, in bytes."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size and checksum of the other files."""

    @property
    def texts(self) -> list[str]:
        """The fingerprints of all texts that the weights have learned, the latest first."""
        return [*dict.fromkeys(filter(None, [self.data, *self.progress.learned]))]


@dataclass
class Checkpoint:
    """A checkpoint read for use: the model on its device, in eval mode, and its tokenizer."""

    path: Path
    model: GPT
    encoding: Encoding | None
    meta: Meta

    @property
    def tokenizer(self) -> Encoding:
        """The tokenizer of the model's text; CheckpointError if it learned a synthetic task."""
        if self.encoding is None:
            with readable(self.path):
                learned = self.meta.config["data"]["source"]
            fault = f"has learned data={learned}, not text"
            remedy = f"{command('eval.py')} {hydra_quoted('checkpoint', self.path)} scores it"
            raise CheckpointError(fault, remedy, setting="checkpoint", value=self.path)
        return self.encoding


def save_checkpoint(directory: Path | str, *, model: GPT, tokenizer: Encoding | None, config: Any, **meta: Any) -> None:
    """Write a new checkpoint without optimizers.

    config: the settings of a run, a TrainConfig or the meta.config of another checkpoint. Those of the model are its
    own, model.config. Raises SettingsError if the model is no longer that of its settings, open_checkpoint() would
    refuse weights or tokenizer, or the directory exists, and ValueError for a config of something else.
    """
    check_weights(model)
    check_choices(model)
    weights = plain_weights(model)
    infinite = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if infinite:
        remedy = "torch.save(model.state_dict(), FILE) keeps it, to look for the cause"
        raise SettingsError(f"the model's {infinite[0]} is not finite, and no text can be written with it", remedy)
    if tokenizer is not None:
        check_kept(tokenizer, uncompiled(model).config.vocab_size)
    directory = Path(directory)
    if directory.exists():
        raise SettingsError(f"the checkpoint {directory} exists already", "choose another name, or remove it first")
    settings = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    if not isinstance(settings, dict) or "model" not in settings:
        problem = f"config is no settings of a run, but {type(config).__name__}"
        raise ValueError(f"{problem}: pass TrainConfig(model=model.config), or a checkpoint's meta.config.")
    settings = settings | {"model": asdict(uncompiled(model).config)}
    write_checkpoint(directory, weights, {}, Meta(settings, **meta), tokenizer)


def write_checkpoint(
    directory: Path, weights: dict[str, Tensor], optimizer: dict[str, Tensor], meta: Meta, tokenizer: Encoding | None
) -> None:
    """Write the checkpoint `directory` from tensors on the CPU, atomically.

    If it exists, only its meta.json is replaced.
    """
    # An evaluated step is saved twice. The tensors are the same; meta.json gets the evaluation.
    if directory.exists():
        before = read_meta(directory)
        if before.progress.step == meta.progress.step:
            meta.files = before.files
            return replace_text(directory / "meta.json", as_json(meta))
        set_aside(directory)  # a copy of another step, by another name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with replacing(directory) as unfinished:
        unfinished.mkdir()
        save_file(weights, unfinished / WEIGHTS)
        if optimizer:  # otherwise its absence says that no run can resume from here
            save_file(optimizer, unfinished / OPTIMIZER)
        if tokenizer is not None:
            save_tokenizer(tokenizer, unfinished / TOKENIZER)
        meta.files = {file.name: describe_file(file) for file in sorted(unfinished.iterdir())}
        (unfinished / "meta.json").write_text(as_json(meta), encoding="utf-8")


def as_json(meta: Meta) -> str:
    content = {"format_version": FORMAT_VERSION, **asdict(meta)}
    return json.dumps(content | {"checksum": meta_checksum(content)}, indent=2) + "\n"


def describe_file(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def meta_checksum(content: dict[str, Any]) -> str:
    """Return the SHA-256 of meta.json's content without the checksum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_meta(path: Path) -> Meta:
    """Return a checkpoint's meta.json; CheckpointError if it is missing, damaged or too old."""
    if not (path / "meta.json").is_file():
        fault = "is not a checkpoint (it has no meta.json)"
        remedy = "give a run directory or a checkpoint; export.py import_from= makes one"
        if (path / TABLE).is_file():
            fault = "is a folder of several runs"
            remedy = f"give one of them: the column job of {path / TABLE} names them, the best row first"
        if path.is_file():
            fault = "is a file"
            remedy = f"give a run directory or a checkpoint; {PICKLED}"
            if (path.parent / "meta.json").is_file():
                remedy = f"give its folder, {path.parent}"
        raise CheckpointError(fault, remedy, setting="checkpoint", value=path)
    with readable(path):
        content = json.loads((path / "meta.json").read_bytes())
        version = content["format_version"]
        if version != FORMAT_VERSION:
            remedy = "use tinygpt 0.1, tag v0.1.0, or train anew" if version < FORMAT_VERSION else "update tinygpt"
            fault = f"has format {version}; this one reads {FORMAT_VERSION}"
            raise CheckpointError(fault, remedy, setting="checkpoint", value=path)
        if content.pop("checksum") != meta_checksum(content):
            raise ValueError("meta.json does not match its checksum")
        del content["format_version"]
        progress = content.pop("progress")
        meta = Meta(**content)
        unknown = [f"progress.{name}" for name in progress if name not in Progress.__dataclass_fields__]
        refuse_unknown("checkpoint", path, unknown, meta)
        meta.progress = Progress(**progress)
        # Older runs had no separator, and settings that are gone.
        data = meta.config.get("data")
        if isinstance(data, dict):
            data.setdefault("separator", None)
            # They held out 1% of Parquet files too.
            if "val_path" not in data and data.get("source") == "hf" and data.get("path"):
                data["val_fraction"] = data.get("val_fraction") or 0.01
        for gone in ("tensorboard", "distributed", "plan"):  # no run depends on a plan
            meta.config.pop(gone, None)
        return meta


def read_settings(path: Path, meta: Meta | None = None) -> GPTConfig:
    """Return the settings of a checkpoint's model; CheckpointError if one is unknown or damaged.

    SettingsError if its attention is not registered here.
    meta: the checkpoint's meta.json, if the caller has read it.
    """
    meta = meta or read_meta(path)
    with readable(path):
        settings = meta.config["model"]
        unknown = [f"model.{name}" for name in settings if name not in GPTConfig.__dataclass_fields__]
        refuse_unknown("checkpoint", path, unknown, meta)
        try:
            config = build(GPTConfig, settings)
        except SettingsError as error:  # the checksum is right, so another version has other values
            if error.setting:
                refuse_unknown("checkpoint", path, [error.subject], meta)
            # Each value is known, but not all of them together.
            raise of_other_version("checkpoint", path, f": {error.problem}", meta) from None
    with code_wanted(path, meta):
        check_names(config.attention)
    return config


@contextmanager
def code_wanted(path: Path, meta: Meta) -> Iterator[None]:
    """Ask for the file that registers an unknown name; opening a checkpoint never runs one."""
    try:
        yield
    except SettingsError as error:
        # No CheckpointError, after which an earlier checkpoint of the run would be tried: they all have this name.
        file = find_code(meta.config.get("code") or "FILE", path.parent.parent)
        remedy = f"give the file that registers it, as in code={file}"
        if RAN:
            remedy += ", or for checkpoints of two files one beside both that imports them, as by `from . import a, b`"
        raise SettingsError(f": {error.problem}", remedy, setting="checkpoint", value=path) from None


def code_to_type(meta: Meta, run: Path) -> str:
    """Return the code=FILE that a run needs beside resume=, or "".

    A blank is before it.
    """
    name = meta.config.get("code")
    return f" {hydra_quoted('code', find_code(name, run))}" if name else ""


def refuse_unknown(setting: str, path: Path, unknown: list[str], meta: Meta) -> None:
    """Raise CheckpointError if SETTING=PATH has unknown settings or values."""
    if unknown:
        raise of_other_version(setting, path, f"has {', '.join(unknown)}, unknown here", meta)


def of_other_version(setting: str, path: Path, fault: str, meta: Meta) -> CheckpointError:
    """Return the error for SETTING=PATH of a version whose settings are unknown here."""
    version = meta.computed_on.get("tinygpt", "?")
    remedy = "read it with that version, or update tinygpt"
    return CheckpointError(f"{fault}; tinygpt {version} wrote it", remedy, setting=setting, value=path)


def verify_checkpoint(path: Path, *names: str) -> Meta:
    """Return meta.json; CheckpointError unless the named files, or all, match their checksums."""
    meta = read_meta(path)
    checked = meta.files.keys() & names if names else meta.files
    with readable(path):
        for name in checked:
            if not (path / name).is_file() or describe_file(path / name) != meta.files[name]:
                raise ValueError(f"{name} is missing, or does not match its checksum")
    return meta


def load_checkpoint(path: Path | str, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint without its optimizer's state; CheckpointError if it is unusable."""
    path = Path(path)
    meta = verify_checkpoint(path, WEIGHTS, TOKENIZER)
    config = read_settings(path, meta)
    with readable(path):
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers do not depend on it
            model = GPT(config)
        weights = load_file(path / WEIGHTS)
        load_weights(model, weights)
        for name, tensor in weights.items():
            if not tensor.isfinite().all():
                raise ValueError(f"its {name} is not finite")
        tokenizer = read_tokenizer(path / TOKENIZER) if TOKENIZER in meta.files else None
    note = other_code(meta.config, path.parent.parent)
    if note:
        log.warning("%s %s.", path, note)
    return Checkpoint(path, model.to(device).eval(), tokenizer, meta)


def readable(path: Path) -> AbstractContextManager[None]:
    """Turn the errors of a damaged checkpoint into a CheckpointError."""
    return damage_named(CheckpointError, "is damaged or incomplete", ANOTHER, setting="checkpoint", value=path)


def open_checkpoint(where: str | None, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the first intact one of find_checkpoints(where); CheckpointError if none is."""
    return first_intact(find_checkpoints(where), lambda path: load_checkpoint(path, device))


def first_intact(checkpoints: Sequence[Path], read: Callable[[Path], T], say: Callable[[str], None] = log.warning) -> T:
    """Return read(path) of the first readable checkpoint; CheckpointError if there is none.

    say: logs the problem of a damaged one, and the name of the next.
    """
    if not checkpoints:
        raise CheckpointError(NO_CHECKPOINT, "start a new run")
    for path, following in pairwise(checkpoints):
        try:
            return read(path)
        except CheckpointError as error:
            say(f"{error.problem}; trying {following.name}.")
    try:
        return read(checkpoints[-1])
    except CheckpointError as error:
        tried = {path.resolve() for path in checkpoints}
        of_run = {path.resolve() for path in checkpoints_by_step(checkpoints[-1].parent)}
        if error.remedy == ANOTHER and of_run and of_run <= tried:
            error.remedy = "no checkpoint of its run is whole, so remove or rename that run, and train it anew"
        raise


def find_checkpoints(where: str | None) -> list[Path]:
    """Return the checkpoints that `where` can mean, at least one, in the order to try them.

    where: a checkpoint; or a run's directory, for its best checkpoint, then the last, then the others by step; or None,
    for the newest run. The link `best` names the best one or, where a copy has lost it, meta.json of the latest step_N.
    """
    if where is None:
        where = next((str(run) for run in runs_by_age() if checkpoints_by_step(run / "checkpoints")), None)
        if where is None:
            remedy = f"train one with `{command('train.py')}`, or give checkpoint=RUN_DIR"
            raise CheckpointError("there is no run with a checkpoint under outputs/ or multirun/", remedy)
    path = user_path("checkpoint", where)
    if not where or not path.exists():
        remedy = "give a run directory or a checkpoint in it"
        if where.startswith("hf:") or not path.parent.exists():  # perhaps a name on the hub, such as OWNER/MODEL
            remedy += "; export.py import_from= makes one of a model of Hugging Face's"
        raise CheckpointError("does not exist", remedy, setting="checkpoint", value=where)
    folder = path / "checkpoints"
    with reading("checkpoint", where):
        saved = checkpoints_to_try(folder)
        best, last = ([pointed(folder / name)] if (folder / name).exists() else [] for name in ("best", "last"))
        found = [*best, *best_as_saved(saved), *last, *(checkpoint.resolve() for checkpoint in saved)]
        if folder.is_dir() and not found:
            fault = "has saved no checkpoint yet"
            remedy = "wait for one, or give another run"
            if is_locked(path / ".lock") is False:
                fault = NO_CHECKPOINT
                remedy = "give another run"
            raise CheckpointError(fault, remedy, setting="checkpoint", value=where)
    return list(dict.fromkeys(found)) or [pointed(path)]


def checkpoints_by_step(checkpoints: Path) -> list[Path]:
    """Return the step_N in a folder of checkpoints, the latest first."""
    numbered = [path for path in checkpoints.glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(numbered, key=step_in_name, reverse=True)


def step_in_name(checkpoint: Path) -> int:
    """Return N of a folder step_N; ValueError for another name."""
    return int(checkpoint.name.removeprefix("step_"))


def best_as_saved(checkpoints: Sequence[Path]) -> list[Path]:
    """Return the best of checkpoints_to_try(), as the first readable of them tells, or [].

    It may have been removed.
    """
    for latest in checkpoints:
        with suppress(CheckpointError):
            best = f"step_{read_meta(latest).progress.best_step}"
            return [checkpoint.resolve() for checkpoint in checkpoints if checkpoint.name == best]
    return []


def checkpoints_to_try(checkpoints: Path) -> list[Path]:
    """Return the step_N in a folder of checkpoints, the latest first, misnamed ones last."""
    return sorted(checkpoints_by_step(checkpoints), key=is_misnamed)


def is_misnamed(checkpoint: Path) -> bool:
    """Return whether a folder step_N has the checkpoint of another step, as a copy by hand may."""
    with suppress(CheckpointError, ValueError):
        return step_in_name(checkpoint) != read_meta(checkpoint).progress.step
    return False


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint, damaged or misnamed, that stands where a run will write."""
    kind = "misnamed" if is_misnamed(checkpoint) else "damaged"
    checkpoint.replace(checkpoint.with_name(f"{kind}_{checkpoint.name}_{secrets.token_hex(2)}"))


def runs_by_age(folders: Sequence[Path] = OUTPUTS) -> list[Path]:
    """Return the runs below `folders`, those with the newest checkpoints first."""
    found = [path for folder in folders for path in folder.glob("**/checkpoints")]
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
