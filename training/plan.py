"""What a run would take, predicted before it starts: parameters, arithmetic, memory, time, here or on a cluster."""

import math
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.config import TokenizerConfig
from data.prepared import PreparedData
from data.shards import Tokens
from data.tasks import TaskData
from data.tokenizer import make_tokenizer
from errors import one_of
from model.attention.functional import flex, fused, sdpa
from model.gpt import GPT
from model.loss import LARGEST_CHUNK_ON_GPU
from model.size import cache_bytes_per_token, count_parameters, flops_per_token, memory_of, without_weights
from runs.formatting import duration, si
from training.config import TrainConfig
from training.device import choose_device, choose_precision, fast_products, free_memory, keep_freed_memory
from training.distributed import Ranks, float_stream
from training.evaluation import SCORED_TOKENS
from training.optimizer import optimizer_state
from training.pretrained import load_origin
from training.run import Run, steps_to_take, windows_each
from training.size import model_sizes, refuse_too_large
from training.start import check_machine, open_data
from training.step import take_step

# The share of its peak arithmetic that a well-fed GPU reaches in training; published GPT-2 runs report 40%.
UTILISATION = 0.4
DEVICES_A_MACHINE = 8


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: dense bf16 (V100: fp16) FLOP/s, bytes of memory, and bytes/s each way: over the link to
    the other GPUs of its machine, and as its share of the machine's network."""

    flops: float
    memory: float
    link: float
    network: float


DEVICES = {
    "v100": Device(125e12, 32e9, 150e9, 12.5e9),
    "a100": Device(312e12, 80e9, 300e9, 25e9),
    "h100": Device(989e12, 80e9, 450e9, 50e9),
    "h200": Device(989e12, 141e9, 450e9, 50e9),
    "b200": Device(2250e12, 180e9, 900e9, 50e9),
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device that holds the whole model."""

    weights: int
    gradients: int
    optimizer: int  # between steps
    activations: int
    """What the fullest moment of a step adds to these: activations and temporary tensors."""

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        kinds = f"weights {si(self.weights)}B, gradients {si(self.gradients)}B, optimizer {si(self.optimizer)}B"
        return f"memory      {si(self.peak)}B in a training step: {kinds}, activations {si(self.activations)}B"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made within it that are still alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, key, size)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def predict_memory(
    config: TrainConfig, micro: int, dtype: torch.dtype = torch.float32, *, on_gpu: bool = False, gathered: bool = False
) -> Memory:
    """Return the memory that a run of `config`, whose model.vocab_size is set, will need, without allocating it.

    The tensors have shapes but no data, so the largest model takes seconds on the smallest machine. They are those of
    a CPU; with on_gpu the loss and sdpa and flex are counted as they are there, where no kernel keeps scores.
    gathered: measure activations beside weights that FSDP has gathered in `dtype`; autocast keeps a copy of others.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second that most runs do not need

    # Two micro-batches show everything: the second one finds the gradients of the first.
    few = replace(config, batch_size=min(config.batch_size, 2 * micro), micro_batch_size=micro)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        run = trial_run(few, torch.device("cpu"), dtype)
        run.model.largest_chunk = LARGEST_CHUNK_ON_GPU if on_gpu else None
        for attention in (block.attention for block in run.model.blocks if on_gpu):
            if attention.attend in (sdpa, flex):  # a CPU's `fused` writes the scores where there is dropout
                attention.attend, attention.dropout = fused, 0.0
        weights = sum(parameter.nbytes for parameter in run.model.parameters())
        if gathered:
            float_stream(run.model)
            for parameter in run.model.parameters():
                parameter.data = parameter.data.to(dtype)
        gradients = sum(parameter.nbytes for parameter in run.model.parameters())
        take_step(run, 0)  # makes the optimizer's state
        state = sum(tensor.nbytes for tensor in optimizer_state(run.model, run.optimizers).values())
        live.most = before = live.now
        take_step(run, 1)
    return Memory(weights, weights, state, max(0, live.most - before - gradients))


def trial_run(config: TrainConfig, device: torch.device, precision: torch.dtype) -> Run:
    """Build a run of a single process on made-up text, for taking steps only; it writes nothing."""
    with device:
        model = GPT(config.model)
    text = Tokens([np.broadcast_to(np.uint16(0), 1025 * config.model.block_size)])
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), ())
    data = PreparedData(tokenizer, text, text, Path(), "made up", config.data.document_mask)
    return Run(config, device, precision, data, model, forward=model)


def plan_run(config: TrainConfig) -> str:
    """Return the report of dry_run=true.

    Raises SettingsError for an unknown plan.device, what the run would refuse, and text that cannot be had.
    """
    if (name := config.plan.device) is None:
        device = choose_device(config.device)
        check_machine(config, device, Ranks())
        room = device.type, memory_of(device), 1
    else:
        one_of("plan.device", name, DEVICES)
        room = name, int(DEVICES[name].memory), config.plan.devices
    windows = windows_each(config, room[2])
    refuse_too_large(config, *room, windows)  # and again when the text has told how many ids there are
    _, encoding = load_origin(config)
    data = open_data(config, encoding)
    refuse_too_large(config, *room, windows)
    model = without_weights(config.model)
    flops, parts, size = flops_per_token(model), count_parameters(model), config.tokens_per_step
    config = replace(config, max_steps=(steps := steps_to_take(config, model)))
    kinds = ("embedding", "attention", "mlp", "norms", "lm_head")
    listed = ", ".join(f"{kind} {parts[kind]:,}" for kind in kinds if parts[kind])
    tied = ", which is lm_head too" if model.config.tie_embeddings else ""
    if isinstance(data, TaskData):
        text = f"task        {data.name}, {data.targets(config.model.block_size):,} of a window's tokens are scored"
    else:
        read = f"; {steps:,} steps of {size:,} tokens are {data.epochs(steps * size)}" if steps else ""
        text = f"text        {len(data.train):,} tokens an epoch{read}"
    lines = [
        f"parameters  {parts.total():,} with {model.config.vocab_size:,} ids: {listed}{tied}",
        f"arithmetic  {si(flops)}FLOP a token, {si(flops * size)}FLOP a step (forward and backward)",
        f"cache       {si(cache_bytes_per_token(model))}B a token in generation, of block_size tokens",
        text,
    ]
    scored = data.held_out_tokens(config.model.block_size, SCORED_TOKENS)
    more = _cluster(config, model, flops, DEVICES[name], scored) if name else _this_machine(config, flops, scored)
    return "\n".join(lines + more)


def _this_machine(config: TrainConfig, flops: float, scored: int) -> list[str]:
    device = choose_device(config.device)
    keep_freed_memory(device)
    precision = choose_precision(config.precision, device)
    micro = config.micro_batch_size or config.batch_size
    memory, free = predict_memory(config, micro, precision, on_gpu=device.type == "cuda"), free_memory(device)
    copy = memory.weights + memory.optimizer
    lines = [str(memory), f"            and {si(copy)}B in main memory while a checkpoint is written"]
    if device.type == "cpu":
        # At most 1.74 times was measured, with glibc and keep_freed_memory.
        lines.append("            counted is what tensors hold; the allocator may keep 1.8 times as much")
    if memory.peak > free:
        fits = memory.peak - memory.activations <= free
        remedy = f"micro_batch_size={micro}" if fits else model_sizes(config)
        return [*lines, f"            too much for the {si(free)}B free on {device}: lower {remedy}"]
    with fast_products(device):
        seconds, windows = seconds_per_step(config, micro, device, precision)
    rate = config.tokens_per_step / seconds
    pause = scored / rate / 3  # a forward pass is a third of the arithmetic
    step = f"a step took {seconds:.3g} s on {device}"
    if windows < config.batch_size:
        step = f"a step would take {seconds:.3g} s on {device} (measured on {windows} of {config.batch_size} windows)"
    rates = f"{si(rate)}tokens/s, {si(rate * flops)}FLOP/s"
    return [*lines, f"time        {_length(config, seconds, pause)}: {step}, {rates}"]


def seconds_per_step(config: TrainConfig, micro: int, device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Return the time of one step and how many windows were measured: `micro`, or as many as 20 s are enough for."""
    windows = 1
    while True:
        run = trial_run(replace(config, batch_size=windows, micro_batch_size=None), device, dtype)
        take_step(run, 0)  # warms up, and makes the optimizer's state
        started = time.perf_counter()
        take_step(run, 1)[0].item()  # waits for the device
        seconds = time.perf_counter() - started
        more = min(4 * windows, micro)
        if more == windows or seconds * more / windows > 20:
            return seconds * config.batch_size / windows, windows
        windows = more


def _cluster(config: TrainConfig, model: GPT, flops: float, device: Device, scored: int) -> list[str]:
    devices, windows = config.plan.devices, config.batch_size // config.plan.devices
    micro = config.micro_batch_size or windows
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    memory = predict_memory(config, micro, dtype, on_gpu=True)
    activations = predict_memory(config, micro, dtype, on_gpu=True, gathered=True).activations
    state, weights = memory.weights + memory.gradients + memory.optimizer, memory.weights // 4
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root = weights - block * len(model.blocks)
    # FSDP: the weights of two blocks and of what is not in a block; of the larger, a gradient on its way to its shards.
    activations += dtype.itemsize * (2 * block + root) + (dtype.itemsize + 4) * max(block, root)
    compute, again = windows * config.model.block_size * flops / (device.flops * UTILISATION), ""
    pause = scored * flops / 3 / (devices * device.flops * UTILISATION)  # a forward pass is a third of the arithmetic
    if config.recompute == "block":
        compute *= 1 + (1 - 6 * model.lm_head.weight.numel() / flops) / 3
        again = ", blocks recomputed"
    # Each micro-batch gathers the weights for its forward and its backward pass, and sums gradients into shards.
    gathers = windows // micro * weights * (2 * dtype.itemsize + 4)
    share, inside = 1 - 1 / devices, DEVICES_A_MACHINE
    way = "link" if devices <= inside else "network"
    ways = {
        "ddp": (state + memory.activations, {way: 2 * share * memory.gradients}),
        "fsdp": (state / devices + activations, {way: share * gathers}),
    }
    if devices > inside and devices % inside == 0:
        between = 2 * (1 - inside / devices) * memory.gradients / inside  # each sums its shard over the machines
        ways["hsdp"] = (state / inside + activations, {"link": (1 - 1 / inside) * gathers, "network": between})
    each = f"{devices} × {config.plan.device}, {windows} windows each, {micro} at a time{again}"
    lines = [str(memory), f"plan        {each}; compute {compute:.3g} s a step"]
    for how, (held, sent) in ways.items():
        fits = "fits" if held < 0.9 * device.memory else f"does NOT fit {si(device.memory)}B"
        seconds = sum(size / getattr(device, way) for way, size in sent.items())
        over = " and ".join(f"{si(size)}B a step over the {way}" for way, size in sent.items())
        sends = f"sends {over}, {seconds:.3g} s ({seconds / compute:.0%} of compute)"
        lines.append(f"{how:12}{si(held)}B a GPU, {fits}; {sends}; {_length(config, max(compute, seconds), pause)}")
    return [
        *lines,
        f"assumed     {UTILISATION:.0%} of {si(device.flops)}FLOP/s, {si(device.link)}B/s to the GPUs of a machine "
        f"of {inside}, {si(device.network)}B/s each over the network, communication behind compute, no failures; "
        "weights, sums of gradients and optimizer in fp32, fsdp and hsdp gather in "
        f"{str(dtype).removeprefix('torch.')}; activations of eager kernels",
    ]


def _length(config: TrainConfig, seconds_a_step: float, seconds_an_evaluation: float) -> str:
    each = seconds_a_step + seconds_an_evaluation / config.eval_interval
    ends = [config.max_steps] if config.max_steps else []
    if config.max_minutes:
        ends.append(max(1, round(60 * config.max_minutes / each)))
    steps = min(ends)
    evaluations = math.ceil(steps / config.eval_interval)
    total = duration(steps * seconds_a_step + evaluations * seconds_an_evaluation)
    return f"{total} for {steps:,} steps and {evaluations:,} evaluations of {seconds_an_evaluation:.3g} s"
