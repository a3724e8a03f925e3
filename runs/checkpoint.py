"""What a checkpoint is, and how it is written and read.

A checkpoint is a directory, complete or absent:

    model.safetensors   the weights, under plain names
    state.pt            the optimizers' state, for resuming; in a sharded run the folder state/ instead
    meta.json           format version, settings, step, metrics, and a checksum of every file
    tokenizer.json      all that is needed to encode and decode; absent where a synthetic task was learned

Reading one runs no code from it: safetensors and JSON hold data only, state.pt is read with
`weights_only=True`. A run keeps `checkpoints/step_N` and the links `last` and `best` to them.
"""

import hashlib
import itertools
import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tiktoken import Encoding
from torch import Tensor

from data.files import UNFINISHED, remove, replacing
from data.tokenizer import read_tokenizer, save_tokenizer
from errors import CheckpointError, FormatError, at_least, first_line
from model.config import GPTConfig
from model.gpt import GPT, load_weights, plain_weights, save_file
from model.size import count_weights
from runs.formatting import literal

T = TypeVar("T")
log = logging.getLogger("tinygpt")  # without a handler its warnings go to stderr
Meta = dict[str, Any]  # what meta.json says, as MetaTypes has it

FORMAT_VERSION = 3
OUTPUTS = (Path("outputs"), Path("multirun"))
REPLACED = ".replaced"  # how a checkpoint's name ends while another of the same step takes its place
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # what a full disk raises, depending on who writes


@dataclass
class Checkpoint:
    """A checkpoint read for use: the model on its device, in eval mode, and its tokenizer."""

    path: Path
    model: GPT
    encoding: Encoding | None
    meta: Meta

    @property
    def tokenizer(self) -> Encoding:
        """What makes text of the model's ids; CheckpointError where a synthetic task was learned."""
        if self.encoding is None:
            task = self.meta["config"]["data"]["source"]
            raise CheckpointError(
                f"checkpoint={self.path} has learned data={task} and has no tokenizer: "
                f"python evaluate.py checkpoint={self.path} scores it, without other settings for text."
            )
        return self.encoding


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides the weights, the optimizers' state and the settings."""

    step: int = 0
    """Updates made."""
    seconds: float = 0.0
    """Training time up to the last checkpoint."""
    evaluated: int = 0
    """The step of the latest evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What that evaluation found."""
    best_loss: float | None = None
    best_step: int = 0
    skipped: int = 0
    """Steps that changed nothing, because loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    finished: bool = False
    wandb_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("step", "seconds", "evaluated", "best_loss", "best_step", "skipped", "skipped_in_a_row"):
            at_least(name, getattr(self, name), 0)


@dataclass
class MetaTypes:
    """The types of what meta.json says and somebody reads; what only a run says has defaults."""

    step: int
    config: dict[str, Any]
    files: dict[str, Any]
    metrics: dict[str, float]
    progress: Progress = field(default_factory=Progress)
    logs: dict[str, int] = field(default_factory=dict)
    data: str = ""
    own_tokenizer: bool = False
    computed_on: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    directory: Path, *, model: GPT, tokenizer: Encoding | None, config: Any, state: Meta | None = None, **meta: Any
) -> None:
    """Write a checkpoint of a model that is not being trained here; `config` is a dataclass with the field model."""
    meta = {"step": 0, "metrics": {}, **meta, "config": asdict(config)}
    write_checkpoint(directory, plain_weights(model), state or {}, meta, tokenizer)


def write_checkpoint(
    directory: Path, weights: dict[str, Tensor], state: dict[str, Any] | Path, meta: Meta, tokenizer: Encoding | None
) -> None:
    """Write `directory` from tensors on the CPU; it is there afterwards whole, or as it was and one of WRITE_ERRORS.

    state: what a resumed run needs besides the weights, tensors and plain types; or a folder that holds it, which is
    moved into the checkpoint. A checkpoint that was there already is set aside until the new one has its place.
    """
    aside = directory.with_name(f".{directory.name}{REPLACED}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(directory) as unfinished:
            unfinished.mkdir()
            save_file(weights, unfinished / "model.safetensors")
            if isinstance(state, Path):
                state.rename(unfinished / "state")
            else:
                torch.save(state, unfinished / "state.pt")
            if tokenizer is not None:
                save_tokenizer(tokenizer, unfinished / "tokenizer.json")
            written = sorted(path for path in unfinished.rglob("*") if path.is_file())
            files = {file.relative_to(unfinished).as_posix(): describe_file(file) for file in written}
            meta = {"format_version": FORMAT_VERSION, **meta, "files": files}
            meta["checksum"] = meta_checksum(meta)
            (unfinished / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            if directory.exists():
                directory.rename(aside)
    finally:
        put_back(directory.parent)


def put_back(checkpoints: Path) -> None:
    """Move checkpoints that were set aside to their places again where these are empty; delete the others."""
    for aside in list(checkpoints.glob(f".step_*{REPLACED}")):
        place = aside.with_name(aside.name[1:].removesuffix(REPLACED))
        if place.exists():
            remove(aside)
        else:
            with suppress(OSError):
                aside.rename(place)


def describe_file(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def meta_checksum(meta: Meta) -> str:
    """The SHA-256 of meta.json's content without the checksum itself."""
    content = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def link_checkpoint(directory: Path, name: str) -> None:
    """Point the link `name` (last, best) beside a checkpoint at it, in one step."""
    unfinished, link = directory.with_name(f".{name}{UNFINISHED}"), directory.with_name(name)
    remove(unfinished)
    unfinished.symlink_to(directory.name)
    if not link.is_symlink():  # a tool that follows links has copied the run
        remove(link)
    unfinished.replace(link)


def remove_checkpoints(checkpoints: Path, *, keep: int) -> None:
    """Delete all checkpoints but the latest `keep`, those that were the best when one of these was written,
    and those that `last` and `best` point to."""
    by_step = checkpoints_by_step(checkpoints)
    kept = {(checkpoints / name).resolve() for name in ("last", "best")}
    for directory in by_step[:keep]:
        kept.add(directory.resolve())
        with suppress(CheckpointError):
            kept.add((checkpoints / f"step_{read_meta(directory)['progress']['best_step']}").resolve())
    for directory in by_step:
        if directory.resolve() not in kept:
            remove(directory)


def remove_unfinished(checkpoints: Path) -> None:
    """Delete what a save that was killed has left behind."""
    put_back(checkpoints)
    for leftover in checkpoints.glob(f".*{UNFINISHED}"):
        remove(leftover)


def checkpoints_by_step(checkpoints: Path) -> list[Path]:
    """The step_N in a run's folder of checkpoints, the latest first, then those that were set aside.

    One of these is all there is where a run was killed while replacing its only one.
    """
    numbered = [path for path in checkpoints.glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    by_step = sorted(numbered, key=lambda path: int(path.name[5:]), reverse=True)
    return [*by_step, *checkpoints.glob(f".step_*{REPLACED}")]


def runs_by_age(folders: Sequence[Path] = OUTPUTS) -> list[Path]:
    """The runs below some folders, the one that wrote a checkpoint last first."""
    found = [path for folder in folders for path in folder.glob("**/checkpoints")]
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def read_meta(path: Path) -> Meta:
    """Return a checkpoint's meta.json; CheckpointError when it is missing, damaged or of another format."""
    if not (path / "meta.json").is_file():
        remedy = "give a run directory or one of its checkpoints/step_N"
        raise CheckpointError(f"checkpoint={path} is not a checkpoint (it has no meta.json): {remedy}.")
    with readable(path):
        meta = json.loads((path / "meta.json").read_bytes())
        version = meta["format_version"]
        if version != FORMAT_VERSION:
            newer = version > FORMAT_VERSION
            age, remedy = ("a newer", "update tinygpt") if newer else ("an older", "use the tinygpt that wrote it")
            sentence = f"checkpoint={path} has format {version}, of {age} tinygpt (this one reads {FORMAT_VERSION})"
            raise FormatError(f"{sentence}: {remedy}.")
        if meta["checksum"] != meta_checksum(meta):
            raise ValueError("meta.json is not what was written")
        meta |= as_typed(MetaTypes, {kind.name: meta[kind.name] for kind in fields(MetaTypes) if kind.name in meta})
        meta["config"]["model"] = as_typed(GPTConfig, meta["config"]["model"])
    return meta


def as_typed(schema: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return values as the fields of a dataclass, which checks them, with their types."""
    checked: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), literal(values)))
    return asdict(checked)


def verify_checkpoint(path: Path, names: set[str] | None = None) -> Meta:
    """Return a checkpoint's meta.json; CheckpointError unless the named files, or all, match their checksums."""
    meta = read_meta(path)
    with readable(path):
        for name in meta["files"] if names is None else names & meta["files"].keys():
            if path.resolve() not in (path / name).resolve().parents:
                raise ValueError(f"{name} is outside the checkpoint")
            if not (path / name).is_file() or describe_file(path / name) != meta["files"][name]:
                raise ValueError(f"{name} is not what was written")
    return meta


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint, but for what only resuming needs; CheckpointError when it is unusable."""
    config, weights, tokenizer, meta = read_parts(path)
    with readable(path):
        load_weights(model := GPT(config), weights)
    return Checkpoint(path, model.to(device).eval(), tokenizer, meta)


def read_parts(path: Path) -> tuple[GPTConfig, dict[str, Tensor], Encoding | None, Meta]:
    """Return a checkpoint's settings, weights, tokenizer and meta.json; CheckpointError when it is unusable."""
    meta = verify_checkpoint(path, {"model.safetensors", "tokenizer.json"})
    with readable(path):
        weights = read_weights(path, config := GPTConfig(**meta["config"]["model"]))
        tokenizer = read_tokenizer(path / "tokenizer.json") if "tokenizer.json" in meta["files"] else None
        if tokenizer and tokenizer.n_vocab > len(weights["token_embedding.weight"]):
            raise ValueError(f"tokenizer.json has {tokenizer.n_vocab:,} ids, more than the model")
    return config, weights, tokenizer, meta


def read_weights(path: Path, config: GPTConfig) -> dict[str, Tensor]:
    """Return a checkpoint's weights; CheckpointError, before they are read, when they are not those of `config`."""
    with readable(path):
        with safe_open(path / "model.safetensors", "pt") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118  (it is no dict)
        found = len(tensors), sum(math.prod(tensor.get_shape()) for tensor in tensors)
        if found != (asked := count_weights(config)):
            has, wants = (f"{count:,} tensors of {numbers:,} numbers" for count, numbers in (found, asked))
            raise ValueError(f"model.safetensors has {has}, where its settings ask for {wants}")
        if others := {tensor.get_dtype() for tensor in tensors} - {"F32"}:
            raise ValueError(f"model.safetensors has weights of type {min(others)}, not F32")
        return load_file(path / "model.safetensors")


def load_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's state.pt onto the CPU; CheckpointError when it is damaged or more than data."""
    with readable(path):
        try:
            return torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # whose message advises to run what is in the file
            raise ValueError("state.pt is cut, or holds more than data") from None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file of the checkpoint `path` raises within into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        problem = f"checkpoint={path} is damaged or incomplete ({first_line(error)})"
        raise CheckpointError(f"{problem}: use another checkpoint.") from error


def open_checkpoint(where: str | None, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the first intact checkpoint that `where` can mean (see find_checkpoints); CheckpointError if none is."""
    return first_intact(find_checkpoints(where), lambda path: load_checkpoint(path, device))


def first_intact(checkpoints: Sequence[Path], read: Callable[[Path], T], say: Callable[[str], None] = log.warning) -> T:
    """Return what `read` gives for the first of a run's checkpoints that it can read; CheckpointError if none.

    say: told of each damaged one why it is passed over, and which one is tried instead.
    """
    for path, following in itertools.zip_longest(checkpoints, checkpoints[1:]):
        try:
            return read(path)
        except CheckpointError as error:
            if isinstance(error, FormatError) or not following:  # the others are of the same format
                raise
            say(f"{str(error).rpartition(': ')[0]}; trying {following.name}.")  # without the remedy
    raise CheckpointError("there is no checkpoint.")


def find_checkpoints(where: str | None) -> list[Path]:
    """The checkpoint directories that `where` can mean, at least one, the likeliest first.

    where: a checkpoint; a run's directory, which means its best, then the last, then the others by step;
    None for the newest run.
    """
    if where is None:
        where = next((str(run) for run in runs_by_age() if checkpoints_by_step(run / "checkpoints")), None)
        if where is None:
            raise CheckpointError("there is no run under outputs/ yet: train one with `python train.py`.")
    path = Path(where)
    if not path.exists():
        raise CheckpointError(f"checkpoint={where} does not exist: give a run directory or a checkpoint in it.")
    folder = path / "checkpoints"
    linked = [folder / name for name in ("best", "last") if (folder / name).exists()]
    found = [checkpoint.resolve() for checkpoint in (*linked, *checkpoints_by_step(folder))]
    return list(dict.fromkeys(found)) or [path.resolve()]
