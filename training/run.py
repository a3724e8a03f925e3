"""A run: the data, model, optimizers and directory that a training loop works with."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from data.batches import Batches, check_split
from data.prepare import PreparedData, prepare
from model.gpt import GPT
from training.checkpoint import link_checkpoint, remove_unlinked, save_checkpoint, training_state
from training.config import SettingsError, TrainConfig
from training.device import choose_compile, choose_device, choose_precision
from training.optimizer import make_optimizers, split_parameters

log = logging.getLogger("tinygpt")


@dataclass
class Run:
    """Everything that lives as long as a training run."""

    config: TrainConfig
    directory: Path
    device: torch.device
    autocast: torch.autocast
    data: PreparedData
    batches: Batches
    model: GPT
    forward: nn.Module
    """The model, compiled where that pays."""
    optimizers: list[Optimizer]

    def save(self, step: int, *links: str, **metrics: float) -> None:
        """Write checkpoints/step_N if it is not there yet, and point the links at it."""
        directory = self.directory / "checkpoints" / f"step_{step}"
        if not directory.exists():
            save_checkpoint(
                directory,
                model=self.model,
                tokenizer=self.data.tokenizer,
                config=self.config,
                step=step,
                metrics=metrics,
                state=training_state(self.optimizers),
            )
        for link in links:
            link_checkpoint(directory, link)
        remove_unlinked(directory.parent)

    def description(self) -> str:
        """What is about to happen, in a few lines."""
        config, data = self.config, self.data
        total = sum(parameter.numel() for parameter in self.model.parameters())
        matrices, *_ = split_parameters(self.model)
        tokens = config.max_steps * config.batch_size * config.model.block_size
        precision = str(self.autocast.fast_dtype if self.autocast._enabled else torch.float32)
        return (
            f"text      {data.description}\n"
            f"tokens    {len(data.train):,} for training, {len(data.val):,} for validation, "
            f"{data.tokenizer.name} with {data.tokenizer.n_vocab:,} ids\n"
            f"model     {total:,} parameters, {sum(m.numel() for m in matrices):,} of them in "
            f"{config.model.n_layer} blocks of {config.model.n_head} heads ({config.model.attention}), "
            f"{config.model.n_embd} wide\n"
            f"run       {config.max_steps:,} steps of {config.batch_size} × {config.model.block_size} tokens, "
            f"{tokens / (len(data.train)):.2f} epochs, on {self.device} in {precision.removeprefix('torch.')}\n"
            f"output    {self.directory}"
        )

    def farewell(self, best: float) -> str:
        """What the run reached and what to type next."""
        return (
            f"\nbest validation loss {best:.4f} nats/token\n"
            f"curves    {self.directory / 'loss.png'}\n"
            f"sample    python sample.py checkpoint={self.directory}"
        )


def start_run(config: TrainConfig) -> Run:
    """Check the settings against the machine and the text, then build what the run needs.

    Sets config.model.vocab_size to the tokenizer's where it is null, and seeds torch.
    """
    device = choose_device(config.device)
    precision = choose_precision(config.precision, device)
    compile_model = choose_compile(config.compile, device)

    data = prepare(config.data, config.tokenizer, log=log.info)
    check_split(data.train, config.model.block_size, "training")
    check_split(data.val, config.model.block_size, "validation")
    vocab_size = data.tokenizer.n_vocab
    config.model.vocab_size = config.model.vocab_size or vocab_size
    if config.model.vocab_size < vocab_size:
        raise SettingsError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {vocab_size}: leave it null."
        )

    torch.manual_seed(config.seed)
    model = GPT(config.model).to(device)
    return Run(
        config=config,
        directory=make_run_directory(config.run_dir),
        device=device,
        autocast=torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32),
        data=data,
        batches=Batches(data.train, block_size=config.model.block_size, batch_size=config.batch_size, seed=config.seed),
        model=model,
        forward=torch.compile(model) if compile_model else model,
        optimizers=make_optimizers(model, config.optimizer),
    )


def make_run_directory(where: str | None) -> Path:
    """The run's directory, made; a new one under outputs/ when none is named.

    Raises SettingsError when a run has already left checkpoints there.
    """
    now = datetime.now()
    directory = Path(where or f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S}-{secrets.token_hex(2)}")
    if (directory / "checkpoints").exists():
        raise SettingsError(f"run_dir={directory} already holds a run: choose another, or remove it first.")
    directory.mkdir(parents=True, exist_ok=True)
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
