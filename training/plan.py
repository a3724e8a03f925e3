"""What a run would take, said before it starts: parameters, memory, arithmetic, tokens, time; here or on a cluster."""

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
    largest_that_fits,
    predict_memory,
    trial_run,
    windows_each,
)
from training.pretrained import load_origin
from training.start import steps_to_take
from training.step import take_step

# The share of its peak arithmetic that a well-fed GPU reaches in training: 40% is what published GPT-2 runs report.
UTILISATION = 0.4
DEVICES_A_MACHINE = 8


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: dense bf16 (V100: fp16) operations, memory, and bytes each way a second."""

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


def preflight(config: TrainConfig) -> str:
    """The report of dry_run=true.

    Raises SettingsError for a plan.device that is not known, and what preparing the text raises.
    """
    if config.plan.device is not None and config.plan.device not in DEVICES:
        raise SettingsError(f"plan.device={config.plan.device} is not known: choose one of {', '.join(DEVICES)}.")
    if config.plan.device and config.batch_size % config.plan.devices:
        raise SettingsError(
            f"plan.devices={config.plan.devices} does not divide batch_size={config.batch_size}: change one."
        )
    windows_each(config, config.plan.devices if config.plan.device else 1)
    _, encoding = load_origin(config)
    data = prepare(config.data, config.tokenizer, encoding=encoding, log=lambda _: None)
    config.model.vocab_size = config.model.vocab_size or data.tokenizer.n_vocab
    model = without_weights(config.model)
    flops = flops_per_token(model)
    config = replace(config, max_steps=steps_to_take(config, model))
    lines = [
        _parameters_line(model),
        f"arithmetic  {si(flops)}FLOP a token, {si(flops * config.tokens_per_step)}FLOP a step (forward and backward)",
        _text_line(config, len(data.train)),
    ]
    if config.plan.device is None:
        return "\n".join(lines + _this_machine(config, flops))
    return "\n".join(lines + _cluster(config, flops))


def _parameters_line(model: GPT) -> str:
    parts = count_parameters(model)
    tied = ", which is lm_head too" if model.config.tie_embeddings else ""
    listed = ", ".join(
        f"{part} {parts[part]:,}" for part in ("embedding", "attention", "mlp", "norms", "lm_head") if parts[part]
    )
    return f"parameters  {parts.total():,} with {model.config.vocab_size:,} ids: {listed}{tied}"


def _text_line(config: TrainConfig, tokens: int) -> str:
    line, steps, size = f"text        {tokens:,} tokens an epoch", config.max_steps, config.tokens_per_step
    if steps is None:
        return line
    return f"{line}; {steps:,} steps of {size:,} tokens are {steps * size / tokens:.2f} epochs"


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
    lines = [_memory_line(memory)]
    lines.append(f"            and {si(memory.copy_for_saving)}B in main memory while a checkpoint is written")
    if device.type == "cpu":
        lines.append(
            f"            counted is what tensors hold; the allocator may keep up to {CPU_ALLOCATOR} times as much"
        )
    if memory.peak > free:
        lines.append(f"            too much for the {si(free)}B free on {device}: lower micro_batch_size={micro}")
        return lines
    with fast_products(device):
        seconds, windows = seconds_per_step(replace(config, micro_batch_size=micro), device, precision)
    rate = config.tokens_per_step / seconds
    step = f"a step took {seconds:.3g} s on {device}"
    if windows < config.batch_size:
        step = (
            f"a step would take {seconds:.3g} s on {device} (measured on {windows} of its {config.batch_size} windows)"
        )
    lines.append(
        f"time        {_length(config, seconds)}, evaluations apart: "
        f"{step}, {si(rate)}tokens/s, {si(rate * flops)}FLOP/s"
    )
    return lines


def seconds_per_step(config: TrainConfig, device: torch.device, precision: torch.dtype) -> tuple[float, int]:
    """The time of one step, and how many of its windows were measured.

    They are those of one forward pass, or fewer where that would take over 20 s.
    """
    windows = 1
    while True:
        run = trial_run(replace(config, batch_size=windows, micro_batch_size=None), device, precision)
        take_step(run, 0)  # warms up, and makes the optimizer's state
        started = time.perf_counter()
        loss, _ = take_step(run, 1)
        loss.item()  # waits for the device
        seconds = time.perf_counter() - started
        bigger = min(4 * windows, config.micro_batch_size)
        if bigger == windows or seconds * bigger / windows > 20:
            return seconds * config.batch_size / windows, windows
        windows = bigger


def _cluster(config: TrainConfig, flops: float) -> list[str]:
    name, devices = config.plan.device, config.plan.devices
    device = DEVICES[name]
    windows, micro = windows_each(config, devices), config.micro_batch_size
    precision = torch.float32 if config.precision == "fp32" else torch.bfloat16
    if micro == "auto":  # where not even one fits, the lines below say so
        micro = largest_that_fits(config, windows, device.memory, precision, torch.device("cuda")) or 1
    micro = micro or windows
    memory = predict_memory(config, micro, precision)
    state = memory.weights + memory.gradients + memory.optimizer
    block = memory.weights // config.model.n_layer
    compute = windows * config.model.block_size * flops / (device.flops * UTILISATION)
    way, speed = ("link", device.link) if devices <= DEVICES_A_MACHINE else ("network", device.network)
    share = (devices - 1) / devices
    passes = windows // micro  # FSDP gathers the weights anew for each forward and backward pass
    lines = [_memory_line(memory)]
    lines.append(
        f"plan        {devices} × {name}, {windows} windows each, {micro} at a time; compute {compute:.3g} s a step"
    )
    ways = {
        "ddp": (state + memory.activations, 2 * share * memory.gradients),
        "fsdp": (state / devices + memory.activations + 2 * block, (2 * passes + 1) * share * memory.weights),
    }
    for how, (held, sent) in ways.items():
        fits = "fits" if held < 0.9 * device.memory else f"does NOT fit {si(device.memory)}B"
        step = max(compute, sent / speed)
        lines.append(
            f"{how:12}{si(held)}B a GPU, {fits}; sends {si(sent)}B a step, {sent / speed:.3g} s over the {way} "
            f"({sent / speed / compute:.0%} of compute); {_length(config, step)}"
        )
    lines.append(
        f"assumed     {UTILISATION:.0%} of {si(device.flops)}FLOP/s, {si(device.link)}B/s to the GPUs of a machine "
        f"of {DEVICES_A_MACHINE}, {si(device.network)}B/s each over the network, communication behind compute, "
        "no failures; weights, gradients and optimizer in fp32; activations of eager kernels"
    )
    return lines


def _length(config: TrainConfig, seconds_a_step: float) -> str:
    """How long the run takes, and how many steps."""
    steps, minutes = config.max_steps, config.max_minutes
    in_time = max(1, round(60 * minutes / seconds_a_step)) if minutes else steps
    steps = min(steps or in_time, in_time)
    return f"{duration(steps * seconds_a_step)} for {steps:,} steps"
