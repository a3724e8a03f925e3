"""What a run would take, predicted before it starts: parameters, arithmetic, memory, time, here or on a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from data.prepare import prepare
from errors import SettingsError
from model.gpt import GPT
from model.size import count_parameters, flops_per_token, without_weights
from runs.formatting import duration, si
from training.config import TrainConfig
from training.device import choose_device, choose_precision, fast_products, keep_freed_memory
from training.distributed import Ranks
from training.memory import (
    CPU_ALLOCATOR,
    Memory,
    choose_micro_batch_size,
    free_memory,
    predict_memory,
    trial_run,
    windows_a_pass,
    windows_each,
)
from training.pretrained import load_origin
from training.start import steps_to_take
from training.step import take_step

# The share of its peak arithmetic that a well-fed GPU reaches in training; published GPT-2 runs report 40%.
UTILISATION = 0.4
DEVICES_A_MACHINE = 8


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: dense bf16 (V100: fp16) FLOP/s, bytes of memory, and bytes/s each way."""

    flops: float
    memory: float
    link: float
    """To the other GPUs of its machine."""
    network: float
    """Its share of the machine's network."""


DEVICES = {
    "v100": Device(125e12, 32e9, 150e9, 12.5e9),
    "a100": Device(312e12, 80e9, 300e9, 25e9),
    "h100": Device(989e12, 80e9, 450e9, 50e9),
    "h200": Device(989e12, 141e9, 450e9, 50e9),
    "b200": Device(2250e12, 180e9, 900e9, 50e9),
}


def plan_run(config: TrainConfig) -> str:
    """Return the report of dry_run=true.

    Raises SettingsError for an unknown plan.device, a batch that does not divide, and text that cannot be had.
    """
    name, devices = config.plan.device, config.plan.devices if config.plan.device else 1
    if name is not None and name not in DEVICES:
        raise SettingsError(f"plan.device={name} is not known: choose one of {', '.join(DEVICES)}.")
    windows_each(config, devices)
    _, encoding = load_origin(config)
    data = prepare(config.data, config.tokenizer, encoding=encoding, log=lambda _: None)
    config.model.vocab_size = config.model.vocab_size or data.tokenizer.n_vocab
    model = without_weights(config.model)
    flops = flops_per_token(model)
    config = replace(config, max_steps=steps_to_take(config, model))
    lines = _size_lines(config, model, flops, len(data.train))
    return "\n".join(lines + (_cluster(config, flops, DEVICES[name]) if name else _this_machine(config, flops)))


def _size_lines(config: TrainConfig, model: GPT, flops: float, epoch: int) -> list[str]:
    parts, steps, size = count_parameters(model), config.max_steps, config.tokens_per_step
    kinds = ("embedding", "attention", "mlp", "norms", "lm_head")
    listed = ", ".join(f"{kind} {parts[kind]:,}" for kind in kinds if parts[kind])
    tied = ", which is lm_head too" if model.config.tie_embeddings else ""
    epochs = f"; {steps:,} steps of {size:,} tokens are {steps * size / epoch:.2f} epochs" if steps else ""
    return [
        f"parameters  {parts.total():,} with {model.config.vocab_size:,} ids: {listed}{tied}",
        f"arithmetic  {si(flops)}FLOP a token, {si(flops * size)}FLOP a step (forward and backward)",
        f"text        {epoch:,} tokens an epoch{epochs}",
    ]


def _memory_line(memory: Memory) -> str:
    kinds = f"weights {si(memory.weights)}B, gradients {si(memory.gradients)}B, optimizer {si(memory.optimizer)}B"
    return f"memory      {si(memory.peak)}B at the most: {kinds}, activations {si(memory.activations)}B"


def _this_machine(config: TrainConfig, flops: float) -> list[str]:
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    precision = choose_precision(config.precision, device)
    micro = choose_micro_batch_size(config, Ranks(), device, precision)
    memory = predict_memory(config, micro, precision)
    free = free_memory(device)
    copy = memory.weights + memory.optimizer
    lines = [_memory_line(memory), f"            and {si(copy)}B in main memory while a checkpoint is written"]
    if device.type == "cpu":
        lines.append(f"            counted is what tensors hold; the allocator may keep {CPU_ALLOCATOR} times as much")
    if memory.peak > free:
        lines.append(f"            too much for the {si(free)}B free on {device}: lower micro_batch_size={micro}")
        return lines
    with fast_products(device):
        seconds, windows = seconds_per_step(config, micro, device, precision)
    rate = config.tokens_per_step / seconds
    step = f"a step took {seconds:.3g} s on {device}"
    if windows < config.batch_size:
        step = f"a step would take {seconds:.3g} s on {device} (measured on {windows} of {config.batch_size} windows)"
    rates = f"{si(rate)}tokens/s, {si(rate * flops)}FLOP/s"
    return [*lines, f"time        {_length(config, seconds)}, evaluations apart: {step}, {rates}"]


def seconds_per_step(config: TrainConfig, micro: int, device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Return the time of one step and how many windows were measured: `micro`, or as many as 20 s are enough for."""
    windows = 1
    while True:
        run = trial_run(replace(config, batch_size=windows, micro_batch_size=None), device, dtype)
        take_step(run, 0)  # warms up, and makes the optimizer's state
        started = time.perf_counter()
        loss, _ = take_step(run, 1)
        loss.item()  # waits for the device
        seconds = time.perf_counter() - started
        more = min(4 * windows, micro)
        if more == windows or seconds * more / windows > 20:
            return seconds * config.batch_size / windows, windows
        windows = more


def _cluster(config: TrainConfig, flops: float, device: Device) -> list[str]:
    devices = config.plan.devices
    windows = windows_each(config, devices)
    precision = torch.float32 if config.precision == "fp32" else torch.bfloat16
    micro = windows_a_pass(config, windows, device.memory, precision, "cuda") or 1  # the lines below say if none fits
    memory = predict_memory(config, micro, precision)
    state = memory.weights + memory.gradients + memory.optimizer
    block = memory.weights // config.model.n_layer
    compute = windows * config.model.block_size * flops / (device.flops * UTILISATION)
    way, speed = ("link", device.link) if devices <= DEVICES_A_MACHINE else ("network", device.network)
    share = (devices - 1) / devices
    passes = windows // micro  # FSDP gathers the weights again for each forward and backward pass
    ways = {
        "ddp": (state + memory.activations, 2 * share * memory.gradients),
        "fsdp": (state / devices + memory.activations + 2 * block, (2 * passes + 1) * share * memory.weights),
    }
    each = f"{devices} × {config.plan.device}, {windows} windows each, {micro} at a time"
    lines = [_memory_line(memory), f"plan        {each}; compute {compute:.3g} s a step"]
    for how, (held, sent) in ways.items():
        fits = "fits" if held < 0.9 * device.memory else f"does NOT fit {si(device.memory)}B"
        lines.append(
            f"{how:12}{si(held)}B a GPU, {fits}; sends {si(sent)}B a step, {sent / speed:.3g} s over the {way} "
            f"({sent / speed / compute:.0%} of compute); {_length(config, max(compute, sent / speed))}"
        )
    lines.append(
        f"assumed     {UTILISATION:.0%} of {si(device.flops)}FLOP/s, {si(device.link)}B/s to the GPUs of a machine "
        f"of {DEVICES_A_MACHINE}, {si(device.network)}B/s each over the network, communication behind compute, "
        "no failures; weights, gradients and optimizer in fp32; activations of eager kernels"
    )
    return lines


def _length(config: TrainConfig, seconds_a_step: float) -> str:
    ends = [config.max_steps] if config.max_steps else []
    if config.max_minutes:
        ends.append(max(1, round(60 * config.max_minutes / seconds_a_step)))
    return f"{duration(min(ends) * seconds_a_step)} for {min(ends):,} steps"
