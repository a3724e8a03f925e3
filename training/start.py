"""How a run begins: settings checked against the machine and the text, then data, model, optimizers and directory."""

from __future__ import annotations

import logging
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch.amp import GradScaler

from data.batches import Batches, check_split
from data.prepare import PreparedData, prepare
from data.tokenizer import read_tokenizer
from errors import SettingsError
from model.config import ONE_HEAD, GPTConfig
from model.gpt import GPT, load_weights
from model.size import flops_per_token
from runs.checkpoint import Progress, remove_unfinished
from runs.directory import (
    OF_THIS_INVOCATION,
    find_run,
    lock_run,
    make_run_directory,
    newest_intact,
    refuse_locked,
    refuse_used,
    tidy,
)
from runs.saver import Saver
from training.config import TrainConfig
from training.device import choose_compile, choose_device, choose_precision, keep_freed_memory, make_deterministic
from training.distributed import Ranks, join_ranks, spread
from training.memory import choose_micro_batch_size, is_out_of_memory, windows_each
from training.optimizer import make_optimizers
from training.pretrained import copy_weights, load_origin
from training.run import Run
from training.watch.wandb import check_wandb_key

log = logging.getLogger("tinygpt")

DEFAULT_STEPS = 600


def start_run(config: TrainConfig) -> Run:
    """Check the settings against the machine and the text, then build what the run needs, or go on with one.

    Sets config.model.vocab_size to the tokenizer's where it is null, and seeds all generators.
    """
    ranks = join_ranks()
    log.disabled = not ranks.is_first
    device = choose_device(config.device, ranks.local_rank if ranks.together else None)
    if device.type == "cpu":
        keep_freed_memory()
    precision = choose_precision(config.precision, device)
    compile_model = choose_compile(config.compile, device)
    if config.model.attention == "flex" and device.type != "cuda":
        raise SettingsError(f"attention=flex trains on CUDA only, not on {device.type}: choose attention=sdpa.")
    warn_of_one_head(config.model)
    windows_each(config, ranks.size)
    make_deterministic(config.deterministic)
    if config.wandb.mode == "online" and ranks.is_first:
        check_wandb_key()

    checkpoint, meta = ranks.from_first(find_checkpoint_to_resume(config) if ranks.is_first else None)
    pretrained, encoding = load_origin(config)
    if checkpoint and meta["own_tokenizer"]:
        encoding = read_tokenizer(checkpoint / "tokenizer.json")
    data = prepare_data(config, encoding)
    micro_batch_size = choose_micro_batch_size(config, ranks, device, precision)
    if checkpoint:
        check_settings(config, meta, data=data.directory.name)

    model = make_model(config, device, pretrained, checkpoint)
    forward = spread(model, config.distributed, device, compiled=compile_model)
    directory, lock = enter_directory(config, ranks, checkpoint)
    run = Run(
        config=config,
        max_steps=steps_to_take(config, model),
        ranks=ranks,
        directory=directory,
        lock=lock,
        device=device,
        autocast=torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32),
        scaler=GradScaler(device.type, enabled=precision == torch.float16),
        data=data,
        own_tokenizer=encoding is not None,
        batches=Batches(data.train, block_size=config.model.block_size, batch_size=config.batch_size, seed=config.seed),
        model=model,
        forward=forward,
        compiled=compile_model,
        optimizers=make_optimizers(model, config.optimizer),
        micro_batch_size=micro_batch_size,
        progress=Progress(),
        saver=Saver(directory / "checkpoints", config.keep_checkpoints),
        skipped=torch.zeros(2, dtype=torch.int64, device=device),
    )
    if checkpoint:
        if ranks.is_first:
            tidy(directory, meta)
        run.restore(checkpoint, meta)
    else:
        log.info("%s", run.description())
    return run


def warn_of_one_head(config: GPTConfig) -> None:
    """Say so where heads are asked for of a form of attention that has one head whatever is set."""
    given = {name: getattr(config, name) for name in ("n_head", "n_kv_head", "head_size")}
    idle = [f"model.{name}={value}" for name, value in given.items() if value != getattr(GPTConfig, name)]
    if config.attention in ONE_HEAD and idle:
        log.warning("attention=%s has one head, of width n_embd: %s is ignored.", config.attention, ", ".join(idle))


def find_checkpoint_to_resume(config: TrainConfig) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """The checkpoint that config.resume goes on from, and its meta.json; None and None for a new run.

    Raises SettingsError when another run is at work in its directory, or has left checkpoints in the new one's.
    """
    if run := find_run(config.resume) if config.resume else None:
        refuse_locked(run)
        return newest_intact(run)
    if config.run_dir:
        refuse_used(Path(config.run_dir))
    return None, None


def make_model(config: TrainConfig, device: torch.device, pretrained: GPT | None, checkpoint: Path | None) -> GPT:
    """The model on its device: with fresh weights, all generators seeded, or those of another or of a checkpoint.

    Raises SettingsError where its memory is not enough for them.
    """
    seed_everything(config.seed)
    try:
        model = GPT(config.model).to(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError(
            f"the model's weights are more than the memory of {device} holds ({str(error).splitlines()[0]}): lower "
            f"model.n_embd={config.model.n_embd} or model.n_layer={config.model.n_layer}."
        ) from None
    if pretrained:
        copy_weights(pretrained, model)
    if checkpoint:
        load_weights(model, load_file(checkpoint / "model.safetensors"))
    return model


def enter_directory(config: TrainConfig, ranks: Ranks, checkpoint: Path | None) -> tuple[Path, FileLock | None]:
    """The run's directory, the same on all ranks, new or its checkpoint's; the first rank holds its lock."""
    directory, lock = None, None
    if ranks.is_first:
        directory = checkpoint.parent.parent if checkpoint else make_run_directory(config.run_dir)
        lock = lock_run(directory)
        remove_unfinished(directory / "checkpoints")
    return ranks.from_first(directory), lock


def prepare_data(config: TrainConfig, encoding: tiktoken.Encoding | None) -> PreparedData:
    """The tokens of the run's text, enough of them, and config.model.vocab_size made to fit.

    encoding: the tokenizer of the model to go on with, if there is one.
    """
    data = prepare(config.data, config.tokenizer, encoding=encoding, log=log.info)
    check_split(data.train, config.model.block_size, "training")
    check_split(data.val, config.model.block_size, "validation")
    vocab_size = data.tokenizer.n_vocab
    config.model.vocab_size = config.model.vocab_size or vocab_size
    if config.model.vocab_size < vocab_size:
        raise SettingsError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {vocab_size}: leave it null."
        )
    return data


def steps_to_take(config: TrainConfig, model: GPT) -> int | None:
    """max_steps, or fewer where max_flops would be passed; None where only max_minutes ends the run."""
    if config.max_flops is None:
        return config.max_steps or (DEFAULT_STEPS if config.max_minutes is None else None)
    steps = max(1, round(config.max_flops / (flops_per_token(model) * config.tokens_per_step)))
    return min(steps, config.max_steps or steps)


def seed_everything(seed: int) -> None:
    """Seed the generators of python, numpy and torch from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# What may change while the run goes on: when it ends, what it shows and keeps, where it computes.
FREE = (
    *OF_THIS_INVOCATION,
    *("max_steps", "max_minutes", "max_flops", "max_skipped_steps"),
    *("log_interval", "eval_interval", "eval_batch_size", "checkpoint_interval", "keep_checkpoints"),
    *("sample_tokens", "sample_prompt", "wandb", "data.cache_dir"),
    *("device", "compile", "deterministic", "distributed", "micro_batch_size"),
)


def check_settings(config: TrainConfig, saved: dict[str, Any], *, data: str) -> None:
    """Raise SettingsError, naming every setting that differs from the saved run's and would change its result.

    data: a name for the tokens that changes with the text, compared with the one that was saved.
    """
    now, before = _flat(asdict(config)), _flat(saved["config"])
    changed = [
        f"{name}={now.get(name)} (was {before.get(name)})"
        for name in sorted(now.keys() | before.keys())
        if now.get(name) != before.get(name) and not _is_free(name)
    ]
    if data != saved["data"]:
        changed.append("the text has changed")
    if not changed:
        return
    sentence = f"resume={config.resume} would not be the same run: {', '.join(changed)}"
    if not config.allow_changes:
        raise SettingsError(f"{sentence}: leave these out, or set allow_changes=true to go on from there all the same.")
    log.warning("%s.", sentence)


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(free + ".") for free in FREE)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
