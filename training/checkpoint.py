"""What a checkpoint is, and how it is written and read.

A checkpoint is a directory, complete or absent:

    model.safetensors   the weights, under plain names
    state.pt            optimizer and random-number state, for resuming
    meta.json           format version, settings, step, metrics
    tokenizer.json      all that is needed to encode and decode

Reading one runs no code from it: safetensors and JSON hold data only, state.pt is read with
`weights_only=True`. A run keeps `checkpoints/step_N` and the links `last` and `best` to them.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from data.tokenizer import read_tokenizer, save_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from training.config import SettingsError, TrainConfig

FORMAT_VERSION = 1


class CheckpointError(SettingsError):
    """A checkpoint that is missing, damaged or of another format; the message names it and the remedy."""


@dataclass
class Checkpoint:
    """A checkpoint read for use: the model on its device, in eval mode, and its tokenizer."""

    path: Path
    model: GPT
    tokenizer: tiktoken.Encoding
    meta: dict[str, Any]


def save_checkpoint(
    directory: Path,
    *,
    model: GPT,
    tokenizer: tiktoken.Encoding,
    config: TrainConfig,
    step: int,
    metrics: dict[str, float],
    state: dict[str, Any],
) -> None:
    """Write `directory`, which is there afterwards whole, or not at all.

    state: what `training_state` returned.
    """
    unfinished = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["head.weight"]
    save_file(weights, unfinished / "model.safetensors")
    torch.save(state, unfinished / "state.pt")
    meta = {"format_version": FORMAT_VERSION, "step": step, "metrics": metrics, "config": asdict(config)}
    (unfinished / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, unfinished / "tokenizer.json")
    for file in unfinished.iterdir():
        _flush_to_disk(file)
    _flush_to_disk(unfinished)
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    _flush_to_disk(directory.parent)


def link_checkpoint(directory: Path, name: str) -> None:
    """Point the link `name` (last, best) beside a checkpoint at it, in one atomic step."""
    unfinished = directory.with_name(f".{name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(directory.name)
    unfinished.replace(directory.with_name(name))


def remove_unlinked(checkpoints: Path) -> None:
    """Delete the step_N that neither last nor best points to."""
    linked = {(checkpoints / name).resolve() for name in ("last", "best")}
    for directory in checkpoints.glob("step_*"):
        if directory.resolve() not in linked:
            shutil.rmtree(directory)


def training_state(optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """What a run needs beyond the weights to go on: optimizer and random-number state."""
    return {
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "cpu_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read the checkpoint directory `path`.

    Raises CheckpointError when it is none, is damaged, or was written by a later version.
    """
    if not (path / "meta.json").is_file():
        raise CheckpointError(
            f"checkpoint={path} is not a checkpoint (it has no meta.json): "
            "give a run directory or one of its checkpoints/step_N."
        )
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        version = meta["format_version"]
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint={path} has format {version}, this tinygpt reads up to {FORMAT_VERSION}: update tinygpt."
            )
        model = GPT(GPTConfig(**meta["config"]["model"]))
        weights = load_file(path / "model.safetensors")
        if model.config.tie_embeddings:
            weights["head.weight"] = weights["token_embedding.weight"]
        model.load_state_dict(weights)
        tokenizer = read_tokenizer(path / "tokenizer.json")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint={path} is damaged or incomplete ({reason}): use another of the run's checkpoints."
        ) from error
    return Checkpoint(path, model.to(device).eval(), tokenizer, meta)


def find_checkpoint(where: str | None, outputs: tuple[Path, ...] = (Path("outputs"), Path("multirun"))) -> Path:
    """The checkpoint directory that `where` names: itself one, a run directory (its best), or the newest run."""
    if where is None:
        found = [path for folder in outputs for path in folder.glob("**/checkpoints/last")]
        if not found:
            raise CheckpointError("there is no run under outputs/ yet: train one with `python train.py`.")
        where = str(max(found, key=lambda path: path.lstat().st_mtime).parent.parent)
    path = Path(where)
    if not path.exists():
        raise CheckpointError(f"checkpoint={where} does not exist: give a run directory or a checkpoint in it.")
    for name in ("best", "last"):
        if (path / "checkpoints" / name).exists():
            return (path / "checkpoints" / name).resolve()
    return path.resolve()


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
