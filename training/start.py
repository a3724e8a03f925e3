"""How a run begins: settings checked against the machine and the text, then data, model, optimizers and directory."""

from __future__ import annotations

import logging
import random
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tiktoken
import torch
import yaml
from safetensors.torch import load_file
from torch.amp import GradScaler

from data.batches import Batches, check_split
from data.files import replacing
from data.prepare import PreparedData, prepare
from data.tokenizer import read_tokenizer
from errors import SettingsError, first_line
from model.config import ONE_HEAD, GPTConfig
from model.gpt import GPT, load_weights
from model.size import flops_per_token
from runs.checkpoint import OUTPUTS, Meta, remove_unfinished
from runs.directory import check_settings, find_run, make_run_directory, newest_intact, occupy, refuse_used, tidy
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
    check_machine(config, device, ranks)
    checkpoint, meta = ranks.from_first(find_checkpoint_to_resume(config) if ranks.is_first else (None, None))
    pretrained, encoding = load_origin(config)
    if checkpoint and meta and meta["own_tokenizer"]:
        encoding = read_tokenizer(checkpoint / "tokenizer.json")
    data = prepare_data(config, encoding)
    micro_batch_size = choose_micro_batch_size(config, ranks, device, precision)
    if checkpoint and meta:
        check_settings(asdict(config), meta, data=data.directory.name)

    model = make_model(config, device, pretrained, checkpoint)
    forward = spread(model, config.distributed, device, compiled=choose_compile(config.compile, device))
    directory, occupation = enter_directory(config, ranks, checkpoint, meta)
    run = Run(
        config=config,
        max_steps=steps_to_take(config, model),
        ranks=ranks,
        directory=directory,
        occupation=occupation,
        device=device,
        autocast=torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32),
        scaler=GradScaler(device.type, enabled=precision == torch.float16),
        data=data,
        own_tokenizer=encoding is not None,
        batches=Batches(data.train, block_size=config.model.block_size, batch_size=config.batch_size, seed=config.seed),
        model=model,
        forward=forward,
        optimizers=make_optimizers(model, config.optimizer),
        micro_batch_size=micro_batch_size,
        saver=Saver(directory / "checkpoints", config.keep_checkpoints),
        skipped=torch.zeros(2, dtype=torch.int64, device=device),
    )
    if checkpoint and meta:
        run.restore(checkpoint, meta)
    return run


def check_machine(config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Raise SettingsError for what cannot train on this machine, and say which settings of the heads are ignored."""
    model, idle = config.model, []
    if model.attention == "flex" and device.type != "cuda":
        raise SettingsError(f"attention=flex trains on CUDA only, not on {device.type}: choose attention=sdpa.")
    if model.attention in ONE_HEAD:
        given = {name: getattr(model, name) for name in ("n_head", "n_kv_head", "head_size")}
        idle = [f"model.{name}={value}" for name, value in given.items() if value != getattr(GPTConfig, name)]
    if idle:
        log.warning("attention=%s has one head, of width n_embd: %s is ignored.", model.attention, ", ".join(idle))
    windows_each(config, ranks.size)
    make_deterministic(config.deterministic)
    if config.wandb.mode == "online" and ranks.is_first:
        check_wandb_key()


def find_checkpoint_to_resume(config: TrainConfig) -> tuple[Path, Meta] | tuple[None, None]:
    """Return the checkpoint that config.resume goes on from, and its meta.json; None and None for a new run.

    Raises SettingsError when another run is at work there, or a run has left checkpoints in a new run's directory.
    """
    folders = [Path(config.run_dir)] if config.run_dir else OUTPUTS
    if run := find_run(config.resume, folders) if config.resume else None:
        return newest_intact(run)
    if config.run_dir:
        refuse_used(Path(config.run_dir))
    return None, None


def enter_directory(
    config: TrainConfig, ranks: Ranks, checkpoint: Path | None, meta: Meta | None
) -> tuple[Path, ExitStack]:
    """Return the run's directory, the same on all ranks, new or its checkpoint's; the first rank occupies it."""
    directory, occupation = Path(), ExitStack()
    if ranks.is_first:
        directory = checkpoint.parent.parent if checkpoint else make_run_directory(config.run_dir)
        try:
            occupation = occupy(directory)
            remove_unfinished(directory / "checkpoints")
            if meta:
                tidy(directory, meta)
            with replacing(directory / "config.yaml") as unfinished:
                unfinished.write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True), "utf-8")
        except OSError as error:
            occupation.close()
            raise SettingsError(
                f"run_dir={directory} cannot be written ({error.strerror}): choose a folder on a disk with room that "
                "you may write to."
            ) from error
    return ranks.from_first(directory), occupation


def make_model(config: TrainConfig, device: torch.device, pretrained: GPT | None, checkpoint: Path | None) -> GPT:
    """Return the model on its device: with fresh weights, all generators seeded, or those of another or a checkpoint.

    Raises SettingsError where its memory is not enough for them.
    """
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)
    torch.manual_seed(config.seed)
    try:
        model = GPT(config.model).to(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise SettingsError(
            f"the model's weights are more than the memory of {device} holds ({first_line(error)}): lower "
            f"model.n_embd={config.model.n_embd} or model.n_layer={config.model.n_layer}."
        ) from None
    if pretrained:
        copy_weights(pretrained, model)
    if checkpoint:
        load_weights(model, load_file(checkpoint / "model.safetensors"))
    return model


def prepare_data(config: TrainConfig, encoding: tiktoken.Encoding | None) -> PreparedData:
    """Return the tokens of the run's text, enough of them, and make config.model.vocab_size fit.

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
