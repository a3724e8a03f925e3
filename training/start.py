"""How a run begins: settings checked against the machine and the text, then data, model, optimizers and directory."""

import logging
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from data.batches import check_split
from data.files import replacing
from data.prepare import prepare
from data.tokenizer import read_tokenizer
from errors import SettingsError
from model.config import ONE_HEAD, GPTConfig
from model.gpt import GPT, load_weights
from runs.checkpoint import Meta, remove_unfinished
from runs.directory import check_settings, find_run, make_run_directory, newest_intact, occupy, refuse_used, tidy
from training.compiling import choose_compile
from training.config import TrainConfig
from training.device import choose_device, choose_precision, keep_freed_memory, memory_errors
from training.distributed import Ranks, join_ranks, spread
from training.pretrained import copy_weights, load_origin
from training.run import Run, steps_to_take, windows_each
from training.watch.wandb import check_wandb_key

log = logging.getLogger("tinygpt")


def start_run(config: TrainConfig) -> Run:
    """Check the settings against the machine and the text, then build what the run needs, or go on with one.

    Sets config.model.vocab_size to the tokenizer's where it is null, and seeds torch's generators.
    """
    ranks = join_ranks()
    log.disabled = not ranks.is_first
    device = choose_device(config.device, ranks.local_rank if ranks.together else None)
    keep_freed_memory(device)
    precision = choose_precision(config.precision, device)
    check_machine(config, device, ranks)
    checkpoint, meta = ranks.from_first(find_checkpoint_to_resume(config) if ranks.is_first else (None, None))
    pretrained, encoding = load_origin(config)
    if checkpoint and meta and meta["own_tokenizer"]:
        encoding = read_tokenizer(checkpoint / "tokenizer.json")
    data = prepare(config.data, config.tokenizer, encoding=encoding, log=log.info)
    check_split(data.train, config.model.block_size, "training")
    check_split(data.val, config.model.block_size, "validation")
    asked, known = config.model.vocab_size, data.tokenizer.n_vocab
    if asked and asked < known:
        raise SettingsError(f"model.vocab_size={asked} is less than the tokenizer's {known}: leave it null.")
    config.model.vocab_size = asked or known
    if checkpoint and meta:
        check_settings(asdict(config), meta, data=data.directory.name)

    torch.manual_seed(config.seed)
    remedy = f"lower model.n_embd={config.model.n_embd} or model.n_layer={config.model.n_layer}"
    with memory_errors(f"the model's weights are more than the memory of {device} holds", remedy):
        model = GPT(config.model).to(device)
    if pretrained:
        copy_weights(pretrained, model)
    if checkpoint:
        load_weights(model, load_file(checkpoint / "model.safetensors"))
    compiled = choose_compile(config, device, model, steps_to_take(config, model), ranks.size)
    forward = spread(model, config.distributed, device, compiled=compiled)
    directory, occupation = enter_directory(config, ranks, checkpoint, meta)
    own = encoding is not None
    run = Run(config, device, precision, data, model, forward, ranks, directory, occupation, compiled, own)
    if checkpoint and meta:
        run.restore(checkpoint, meta)
    return run


def check_machine(config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Raise SettingsError for what cannot train on this machine, say what is ignored, and choose exact kernels."""
    model = config.model
    if model.attention == "flex" and device.type != "cuda":
        raise SettingsError(f"attention=flex trains on CUDA only, not on {device.type}: choose attention=sdpa.")
    if model.attention in ONE_HEAD:
        given = {name: getattr(model, name) for name in ("n_head", "n_kv_head", "head_size")}
        if idle := [f"model.{name}={value}" for name, value in given.items() if value != getattr(GPTConfig, name)]:
            log.warning("attention=%s has one head, of width n_embd: %s is ignored.", model.attention, ", ".join(idle))
    windows_each(config, ranks.size)
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(config.deterministic)
    if config.wandb.mode == "online" and ranks.is_first:
        check_wandb_key()


def find_checkpoint_to_resume(config: TrainConfig) -> tuple[Path, Meta] | tuple[None, None]:
    """Return the checkpoint that config.resume goes on from, and its meta.json; None and None for a new run.

    Raises SettingsError when another run is at work there, or a run has left checkpoints in a new run's directory.
    """
    if run := find_run(config.resume, config.run_dir) if config.resume else None:
        return newest_intact(run)
    if config.run_dir:
        refuse_used(Path(config.run_dir))
    return None, None


def enter_directory(
    config: TrainConfig, ranks: Ranks, checkpoint: Path | None, meta: Meta | None
) -> tuple[Path, ExitStack]:
    """Return the run's directory, the same on all ranks, new or its checkpoint's; the first rank occupies it."""
    directory, occupation = Path(config.run_dir or "outputs"), ExitStack()
    if ranks.is_first:
        try:
            directory = checkpoint.parent.parent if checkpoint else make_run_directory(config.run_dir)
            occupation = occupy(directory)
            remove_unfinished(directory / "checkpoints")
            if meta:
                tidy(directory, meta)
            with replacing(directory / "config.yaml") as unfinished:
                unfinished.write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True), "utf-8")
        except OSError as error:
            occupation.close()
            remedy = "choose a folder on a disk with room that you may write to"
            raise SettingsError(f"run_dir={directory} cannot be written ({error.strerror}): {remedy}.") from error
    return ranks.from_first(directory), occupation
