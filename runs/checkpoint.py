"""What a checkpoint is, and how it is written and read.

A checkpoint is a directory, complete or absent:

    model.safetensors   the weights, under plain names
    state.pt            the optimizers' state, for resuming; of a sharded run the folder state/ instead
    meta.json           format version, settings, step, metrics, and a checksum of every file
    tokenizer.json      all that is needed to encode and decode

Reading one runs no code from it: safetensors and JSON hold data only, state.pt is read with
`weights_only=True`. A run keeps `checkpoints/step_N` and the links `last` and `best` to them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tiktoken
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import flush_to_disk
from data.tokenizer import read_tokenizer, save_tokenizer
from errors import CheckpointError
from model.config import GPTConfig
from model.gpt import GPT, load_weights, plain_weights

T = TypeVar("T")

FORMAT_VERSION = 3
OUTPUTS = (Path("outputs"), Path("multirun"))
UNFINISHED = ".unfinished"
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # what a full disk raises, by who is writing


@dataclass
class Checkpoint:
    """A checkpoint read for use: the model on its device, in eval mode, and its tokenizer."""

    path: Path
    model: GPT
    tokenizer: tiktoken.Encoding
    meta: dict[str, Any]


@dataclass
class Progress:
    """How far a run is; a checkpoint carries it, and with it all that resuming needs beside the weights."""

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


def save_checkpoint(
    directory: Path,
    *,
    model: GPT,
    tokenizer: tiktoken.Encoding,
    config: Any,
    step: int,
    metrics: dict[str, float],
    state: dict[str, Any],
) -> None:
    """Write `directory`, which is there afterwards whole, or not at all.

    state: what a resumed run needs beside the weights: tensors and plain types.
    """
    meta = {"step": step, "metrics": metrics, "config": asdict(config)}
    write_checkpoint(directory, plain_weights(model), state, meta, tokenizer)


def write_checkpoint(
    directory: Path,
    weights: dict[str, Tensor],
    state: dict[str, Any] | None,
    meta: dict[str, Any],
    tokenizer: tiktoken.Encoding,
) -> None:
    """Write `directory` from tensors on the CPU, beside its place first, then moved there in one step.

    With state=None what a sharded run has already put into the unfinished directory is kept.
    Raises one of WRITE_ERRORS, after which the old checkpoints are as they were.
    """
    unfinished = unfinished_path(directory)
    try:
        if state is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file(weights, unfinished / "model.safetensors")
        if state is not None:
            torch.save(state, unfinished / "state.pt")
        save_tokenizer(tokenizer, unfinished / "tokenizer.json")
        files = {file.relative_to(unfinished).as_posix(): describe_file(file) for file in data_files(unfinished)}
        write_meta(unfinished / "meta.json", meta | {"files": files})
        for path in [*(unfinished / name for name in files), unfinished / "meta.json", unfinished]:
            flush_to_disk(path)
        shutil.rmtree(directory, ignore_errors=True)  # a damaged one, which the run has not resumed from
        unfinished.rename(directory)
        flush_to_disk(directory.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def replace_meta(directory: Path, meta: dict[str, Any]) -> None:
    """Let a checkpoint's meta.json say `meta`, in one atomic step; its other files stay as they are.

    Raises one of WRITE_ERRORS, or CheckpointError when there is none, after which it is as it was.
    """
    unfinished = unfinished_path(directory)
    try:
        write_meta(unfinished, meta | {"files": read_meta(directory)["files"]})
        flush_to_disk(unfinished)
        unfinished.replace(directory / "meta.json")
        flush_to_disk(directory)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_meta(file: Path, meta: dict[str, Any]) -> None:
    meta = {"format_version": FORMAT_VERSION, **meta}
    meta["checksum"] = meta_checksum(meta)
    file.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def unfinished_path(directory: Path) -> Path:
    """Where a checkpoint is while it is being written."""
    return directory.with_name(f".{directory.name}{UNFINISHED}")


def data_files(directory: Path) -> list[Path]:
    """The files of a checkpoint but for meta.json, which describes them."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "meta.json")


def describe_file(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def meta_checksum(meta: dict[str, Any]) -> str:
    """The SHA-256 of meta.json's content but for the checksum itself."""
    content = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def link_checkpoint(directory: Path, name: str) -> None:
    """Point the link `name` (last, best) beside a checkpoint at it, in one atomic step."""
    unfinished = directory.with_name(f".{name}{UNFINISHED}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(directory.name)
    link = directory.with_name(name)
    if link.is_dir() and not link.is_symlink():  # a tool that follows links has copied the run
        shutil.rmtree(link)
    unfinished.replace(link)


def remove_checkpoints(checkpoints: Path, *, keep: int) -> None:
    """Delete all but the latest `keep` step_N, those that were the best when one of these was written,
    and what `last` and `best` point to."""
    kept = {(checkpoints / name).resolve() for name in ("last", "best")}
    newest = checkpoints_by_step(checkpoints)[:keep]
    for directory in newest:
        kept.add(directory.resolve())
        best = read_progress(directory).get("best_step")
        kept.add((checkpoints / f"step_{best}").resolve())
    for directory in checkpoints_by_step(checkpoints):
        if directory.resolve() not in kept:
            shutil.rmtree(directory, ignore_errors=True)


def remove_unfinished(checkpoints: Path) -> None:
    """Delete what a save that was killed has left behind."""
    for leftover in checkpoints.glob(f".*{UNFINISHED}"):
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()


def checkpoints_by_step(checkpoints: Path) -> list[Path]:
    """The step_N in a run's folder of checkpoints, the latest first."""
    numbered = [path for path in checkpoints.glob("step_*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(numbered, key=lambda path: int(path.name[5:]), reverse=True)


def read_progress(directory: Path) -> dict[str, Any]:
    """How far the run was when it wrote a checkpoint; empty when its meta.json cannot be read."""
    try:
        return read_meta(directory).get("progress", {})
    except CheckpointError:
        return {}


def read_meta(path: Path) -> dict[str, Any]:
    """A checkpoint's meta.json, which is what was written.

    Raises CheckpointError when there is none, when it is damaged, or was written by a later version.
    """
    if not (path / "meta.json").is_file():
        raise CheckpointError(
            f"checkpoint={path} is not a checkpoint (it has no meta.json): "
            "give a run directory or one of its checkpoints/step_N."
        )
    with readable(path):
        meta = json.loads((path / "meta.json").read_bytes())
        version = meta["format_version"]
        if version != FORMAT_VERSION:
            remedy = "update tinygpt" if version > FORMAT_VERSION else "use the tinygpt that wrote it"
            raise CheckpointError(
                f"checkpoint={path} has format {version}, this tinygpt reads {FORMAT_VERSION}: {remedy}."
            )
        if meta["checksum"] != meta_checksum(meta):
            raise ValueError("meta.json is not what was written")
    return meta


def verify_checkpoint(path: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Compare the named files of a checkpoint, or else all, with their checksums; returns its meta.json.

    Raises CheckpointError when a file is missing, shorter or different by a bit.
    """
    meta = read_meta(path)
    with readable(path):
        for name in names or meta["files"]:
            written = meta["files"][name]
            if path.resolve() not in (path / name).resolve().parents:
                raise ValueError(f"{name} is outside the checkpoint")
            if not (path / name).is_file():
                raise ValueError(f"{name} is missing")
            found = describe_file(path / name)
            if found["bytes"] != written["bytes"]:
                raise ValueError(f"{name} has {found['bytes']:,} bytes instead of {written['bytes']:,}")
            if found != written:
                raise ValueError(f"{name} is not what was written")
    return meta


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the checkpoint directory `path`, but for the state that only resuming needs.

    Raises CheckpointError when it is none, is damaged, or was written by another version.
    """
    meta = verify_checkpoint(path, ("model.safetensors", "tokenizer.json"))
    with readable(path):
        model = GPT(GPTConfig(**meta["config"]["model"]))
        load_weights(model, load_file(path / "model.safetensors"))
        tokenizer = read_tokenizer(path / "tokenizer.json")
    return Checkpoint(path, model.to(device).eval(), tokenizer, meta)


def load_state(path: Path) -> dict[str, Any]:
    """The state.pt of a checkpoint, on the CPU; CheckpointError when it is damaged or more than data."""
    with readable(path):
        return torch.load(path / "state.pt", map_location="cpu", weights_only=True)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within it whatever a damaged file of a checkpoint raises becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"checkpoint={path} is damaged or incomplete ({reason}): use another of the run's checkpoints."
        ) from error


def to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def open_checkpoint(
    where: str | None, device: torch.device | str = "cpu", *, say: Callable[[str], None] = to_stderr
) -> Checkpoint:
    """Read the checkpoint that `where` names, as `find_checkpoints` finds it.

    Of a run it takes the first that is intact, and tells `say` which damaged ones it passes over.
    Raises CheckpointError when there is none.
    """
    found = find_checkpoints(where)
    return first_intact(found, lambda path: load_checkpoint(path, device), say)


def first_intact(checkpoints: list[Path], read: Callable[[Path], T], say: Callable[[str], None]) -> T:
    """What `read` returns for the first of a run's checkpoints that it can read; CheckpointError when it can read none.

    say: is told of each damaged one why it is passed over, and which one is tried instead.
    """
    for path, following in itertools.pairwise(checkpoints):
        try:
            return read(path)
        except CheckpointError as error:
            problem, _, _ = str(error).rpartition(": ")  # what remains is the remedy, which is this:
            say(f"{problem}; trying {following.name}.")
    try:
        return read(checkpoints[-1])
    except CheckpointError as error:
        if len(checkpoints) == 1:
            raise
        problem, _, _ = str(error).rpartition(": ")
        raise CheckpointError(f"{problem}, and so are the run's others: use another run.") from error


def find_checkpoints(where: str | None, outputs: tuple[Path, ...] = OUTPUTS) -> list[Path]:
    """The checkpoint directories that `where` can mean, at least one, the one that is meant first.

    where: a checkpoint; a run's directory, whose best is meant, then the last, then the others by step;
    None for the newest run.
    """
    if where is None:
        found = [path for folder in outputs for path in folder.glob("**/checkpoints/last")]
        if not found:
            raise CheckpointError("there is no run under outputs/ yet: train one with `python train.py`.")
        where = str(max(found, key=lambda path: path.lstat().st_mtime).parent.parent)
    path = Path(where)
    if not path.exists():
        raise CheckpointError(f"checkpoint={where} does not exist: give a run directory or a checkpoint in it.")
    folder = path / "checkpoints"
    linked = [(folder / name).resolve() for name in ("best", "last") if (folder / name).exists()]
    numbered = [checkpoint.resolve() for checkpoint in checkpoints_by_step(folder)]
    return list(dict.fromkeys(linked + numbered)) or [path.resolve()]
