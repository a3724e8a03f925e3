"""How a run begins: settings checked against the machine and the text, then data, model, optimizers and directory."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import yaml
from tiktoken import Encoding

from data.files import replace_text
from data.prepare import prepare
from data.tasks import Data, TaskData
from data.tokenizer import read_tokenizer
from errors import SettingsError
from model.attention import ignored
from model.config import GPTConfig
from model.size import memory_of
from runs.checkpoint import Meta, read_weights, readable, remove_unfinished
from runs.directory import (
    check_settings,
    find_run,
    lock_run,
    log_to,
    make_run_directory,
    newest_intact,
    refuse_used,
    tidy,
)
from training.compiling import choose_compile
from training.config import TrainConfig
from training.device import choose_device, choose_precision, keep_freed_memory, memory_errors
from training.distributed import Ranks, join_ranks, load_whole, new_model, ranks_of_torchrun, spread
from training.pretrained import copy_weights, load_origin
from training.run import Run, steps_to_take, windows_each
from training.size import refuse_too_large
from training.watch.wandb import check_wandb_key

log = logging.getLogger("tinygpt")


def start_run(config: TrainConfig) -> Run:
    """Check the settings against the machine and the text, then build what the run needs, or go on with one.

    Sets config.model.vocab_size to the tokenizer's where it is null, and seeds torch's generators.
    """
    with ExitStack() as held:  # the directory's lock, freed where the run cannot begin
        run = build_run(config, held)
        run.occupation = held.pop_all()
    return run


def build_run(config: TrainConfig, held: ExitStack) -> Run:
    """start_run(), with the lock and what else ends with the run in `held`."""
    ranks = ranks_of_torchrun()
    log.disabled = not ranks.is_first
    device = choose_device(config.device, ranks.local_rank, ranks.local_size)
    join_ranks(ranks, device)
    keep_freed_memory(device)
    precision = choose_precision(config.precision, device)
    check_machine(config, device, ranks)
    windows = windows_each(config, ranks.size)
    checkpoint, meta = ranks.from_first(find_checkpoint_to_resume(config, held) if ranks.is_first else (None, None))
    shards = {"fsdp": ranks.size, "hsdp": ranks.local_size}.get(config.distributed, 1)
    room = device.type, memory_of(device), shards, windows
    refuse_too_large(config, *room)
    pretrained, encoding = load_origin(config)
    if checkpoint and meta and meta["own_tokenizer"]:
        encoding = read_tokenizer(checkpoint / "tokenizer.json")
    data = open_data(config, encoding)
    refuse_too_large(config, *room)
    if checkpoint and meta:
        check_settings(asdict(config), meta, data=data.name)

    weights = read_weights(checkpoint, config.model) if checkpoint else None
    torch.manual_seed(config.seed)
    remedy = f"lower model.n_embd={config.model.n_embd} or model.n_layer={config.model.n_layer}"
    with memory_errors(f"the model's weights are more than the memory of {device} holds", remedy):
        model = new_model(config.model, ranks, config.distributed, device)
        compiled = choose_compile(config, device, model, steps_to_take(config, model), ranks.size)
        forward = spread(model, ranks, config.distributed, device, precision, compiled)
    if pretrained:
        copy_weights(pretrained, model)
    if checkpoint and weights:
        with readable(checkpoint):
            load_whole(model, weights.__getitem__)
    directory = checkpoint.parent.parent if checkpoint else claim_directory(config, ranks, held)
    own = encoding is not None and not config.data.is_task
    run = Run(config, device, precision, data, model, forward, ranks, directory, compiled=compiled, own_tokenizer=own)
    if checkpoint and meta:
        with readable(checkpoint):
            run.restore(checkpoint, meta)
    if ranks.is_first:
        enter_directory(run, meta, held)
    if meta:
        run.say_resumed(meta)
    return run


def open_data(config: TrainConfig, encoding: Encoding | None) -> Data:
    """Return the text, in tokens, or the task; sets config.model.vocab_size where it is null.

    encoding: that of the model to begin with. Raises SettingsError when the model does not fit the data.
    """
    data: Data
    if config.data.is_task:
        data = TaskData(config.data.source, config.data.task, config.seed)
    elif config.init_from and encoding is None:
        remedy = "choose the data of a synthetic task, or another init_from"
        raise SettingsError(f"init_from={config.init_from} has no tokenizer for data={config.data.source}: {remedy}.")
    else:
        data = prepare(config.data, config.tokenizer, encoding=encoding, log=log.info)
    data.check(config.model.block_size)
    asked, known = config.model.vocab_size, data.vocab_size
    if asked and asked < known:
        whose = "task" if config.data.is_task else "tokenizer"
        raise SettingsError(f"model.vocab_size={asked} is less than the {whose}'s {known}: leave it null.")
    config.model.vocab_size = asked or known
    return data


def check_machine(config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Raise SettingsError for what cannot train on this machine, say what is ignored, and choose exact kernels."""
    model = config.model
    if "flex" in model.forms and device.type != "cuda":
        raise SettingsError(f"attention=flex trains on CUDA only, not on {device.type}: choose attention=sdpa.")
    if "n_head" in ignored(model):
        given = {name: getattr(model, name) for name in ("n_head", "n_kv_head", "head_size")}
        if idle := [f"model.{name}={value}" for name, value in given.items() if value != getattr(GPTConfig, name)]:
            log.warning("attention=%s has one head, of width n_embd: %s is ignored.", model.attention, ", ".join(idle))
    if config.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
    if config.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(config.deterministic)
    if config.wandb.active_mode == "online" and ranks.is_first:
        check_wandb_key()


def find_checkpoint_to_resume(config: TrainConfig, held: ExitStack) -> tuple[Path, Meta] | tuple[None, None]:
    """Return the checkpoint that config.resume goes on from, and its meta.json; None and None for a new run.

    The run is locked first, in `held`, so that no other process writes a later checkpoint meanwhile. Raises
    SettingsError when another run is at work there, or a run has left checkpoints in a new run's directory.
    """
    if run := find_run(config.resume, config.run_dir) if config.resume else None:
        with writable(run):
            held.callback(lock_run(run).release)
            return newest_intact(run)
    if config.run_dir:
        refuse_used(Path(config.run_dir))
    return None, None


def claim_directory(config: TrainConfig, ranks: Ranks, held: ExitStack) -> Path:
    """Return a new run's directory, the same on all ranks, made and locked by the first."""
    directory = Path(config.run_dir or "outputs")
    if ranks.is_first:
        with writable(directory):
            directory = make_run_directory(config.run_dir)
            held.callback(lock_run(directory).release)
        refuse_used(directory, locked=True)  # another run may have begun and ended here since it was asked
    return ranks.from_first(directory)


def enter_directory(run: Run, meta: Meta | None, held: ExitStack) -> None:
    """Make the run's locked directory ready: without what came after its checkpoint, with its settings and log."""
    directory = run.directory
    with writable(directory):
        remove_unfinished(directory / "checkpoints")
        if meta:
            tidy(directory, meta)
            run.saver.link(run.progress.step, run.progress.best_step)
        written = yaml.safe_dump(asdict(run.config), sort_keys=False, allow_unicode=True)
        replace_text(directory / "config.yaml", written)
        log_to(directory, held)


@contextmanager
def writable(directory: Path) -> Iterator[None]:
    """Turn what the system refuses in a run's directory into a SettingsError."""
    try:
        yield
    except OSError as error:
        remedy = "choose a folder on a disk with room that you may write to"
        raise SettingsError(f"run_dir={directory} cannot be written ({error.strerror}): {remedy}.") from error
