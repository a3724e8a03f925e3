"""How many tokens per second does training take, compared with nanoGPT, and where does a step's time go?

    python benchmarks/throughput.py [PATH_OF_A_NANOGPT_CHECKOUT]

One process, the same batch for all, programs in turns. "GPT-2's shape" is nanoGPT's (learned positions,
LayerNorm, GELU, tied head, no biases) with AdamW, "default" the same sizes with our default settings
(rope, swiglu, rmsnorm, QK-norm, Muon). A step is train.py's own, or nanoGPT's, in float32 on a CPU. Each round
measures whole steps for tokens/s, then steps with a clock between the parts for the split; clipping belongs to
the optimizer. Utilisation is model FLOPs (6 per multiplied weight and token, plus attention's) over the peak:
on a CPU the fastest product of two 2048² matrices just now, on a known GPU its data sheet's dense bf16.
With a GPU everything is compiled, and GPT-2 124M is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import nanogpt
import numpy as np
import paired
import torch
from torch import Tensor

from data.batches import Batch, Batches
from model.config import GPTConfig
from model.size import flops_per_token, without_weights
from training.config import OptimizerConfig, TrainConfig
from training.device import choose_precision, fast_products, multiplies_bf16, to_device
from training.distributed import spread
from training.plan import DEVICES, trial_run
from training.step import take_step

PARTS = ("data", "forward", "backward", "optimizer")
GPT2_SHAPE = dict(
    position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu", bias=False, qkv_bias=False, qk_norm=False,
    tie_embeddings=True, zero_init=False,
)  # fmt: skip
ADAMW = dict(name="adamw", lr=1e-3, weight_decay=0.1)
MUON = dict(name="muon", embedding_lr=0.1, lm_head_lr=0.008)


@dataclass(frozen=True)
class Shape:
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    vocab_size: int
    steps: int
    """Steps of one measurement."""

    @property
    def sizes(self) -> dict[str, int]:
        names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return f"{self.n_layer} × {self.n_embd}, T = {self.block_size}, B = {self.batch_size}, V = {self.vocab_size:,}"


SMALL = [Shape(4, 4, 128, 64, 12, 65, steps=40), Shape(6, 6, 384, 256, 4, 65, steps=3)]
GPT2_124M = Shape(12, 12, 768, 1024, 32, 50304, steps=10)


@dataclass
class Measured:
    seconds: float
    """Of one step."""
    parts: dict[str, float]
    """Seconds of each of PARTS, in a step with a clock between them."""


class Clock:
    """Seconds of each part of a step, from marks between them; without marks nothing waits for the GPU."""

    def __init__(self) -> None:
        self.ticking, self.last, self.parts = False, 0.0, dict.fromkeys(PARTS, 0.0)

    def start(self) -> None:
        paired.synchronize()
        self.ticking, self.last, self.parts = True, time.perf_counter(), dict.fromkeys(PARTS, 0.0)

    def mark(self, part: str) -> None:
        if self.ticking:
            paired.synchronize()
            now = time.perf_counter()
            self.parts[part] += now - self.last
            self.last = now


class Scaler:
    """Stands in for the run's GradScaler, switched off, and marks where take_step turns back."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def scale(self, loss: Tensor) -> Scaler:
        self.loss = loss
        self.clock.mark("forward")
        return self

    def backward(self) -> None:
        self.loss.backward()
        self.clock.mark("backward")

    def unscale_(self, optimizer: object) -> None: ...

    def update(self) -> None: ...


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("nanogpt", nargs="?", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    arguments = parser.parse_args()
    paired.header()
    for shape in [*SMALL, GPT2_124M] if paired.device().type == "cuda" else SMALL:
        throughput(shape, arguments.nanogpt, arguments.rounds, fast_precisions(paired.device()))


def throughput(shape: Shape, checkout: Path | None, rounds: int, precisions: Sequence[str]) -> None:
    """Measure one shape and print its table, GPT-2's shape with each of the precisions."""
    device = paired.device()
    flops, source = peak(device)
    gpt2 = make_config(shape, GPT2_SHAPE, ADAMW)
    configs = {f"ours, GPT-2's shape, {precision}": (gpt2, precision) for precision in precisions}
    configs["ours, default"] = (make_config(shape, {}, MUON), "auto")
    programs = {"nanoGPT": theirs(shape, nanogpt.load(checkout), device)} if checkout else {}
    for name, (config, precision) in configs.items():
        programs[name] = ours(config, choose_precision(precision, device), shape.steps, device)
    configs["nanoGPT"] = (gpt2, "")

    measured = paired.interleave(programs, rounds, warm_ups=2)
    seconds = {name: [one.seconds for one in of] for name, of in measured.items()}
    tokens, first = shape.batch_size * shape.block_size, next(iter(programs))
    print(f"{shape}; peak {flops / 1e12:.3g} TFLOP/s ({source})\n")
    heads = ["", "tokens/s", f"of {first}", "a step, ms", *PARTS, "utilisation"]
    rows = []
    for name, taken in seconds.items():
        rate = [tokens / one for one in taken]
        parts = ({part: statistics.median(one.parts[part] for one in measured[name]) for part in PARTS}).values()
        used = statistics.median(rate) * flops_per_token(without_weights(configs[name][0].model)) / flops
        ratio = paired.ratio(seconds[first], taken)
        step = f"{1e3 * statistics.median(taken):.1f}"
        rows.append(
            [name, paired.spread(rate, ",.0f"), ratio, step, *(f"{1e3 * part:.1f}" for part in parts), f"{used:.0%}"]
        )
    paired.table(heads, rows)


def fast_precisions(device: torch.device) -> tuple[str, ...]:
    """Emulated bf16 products would take minutes."""
    return ("fp32", "bf16") if multiplies_bf16(device) else ("fp32",)


def make_config(shape: Shape, model: dict, optimizer: dict) -> TrainConfig:
    return TrainConfig(
        model=GPTConfig(**shape.sizes, **model), optimizer=OptimizerConfig(**optimizer), batch_size=shape.batch_size
    )


def random_batches(config: TrainConfig) -> Batches:
    """Batches as a run draws them, of random tokens."""
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 2_000_000, dtype=np.uint16)
    return Batches(tokens, block_size=config.model.block_size, batch_size=config.batch_size, seed=1)


def make_run(config: TrainConfig, precision: torch.dtype, device: torch.device, *, compiled: bool) -> Any:
    """What train.take_step needs of a run, with batches as a run draws them."""
    # Many models of many shapes share one GPT.forward here, where a run has one of each.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch.manual_seed(1)
    run = trial_run(config, device, precision)
    windows = random_batches(config)
    run.batch = lambda *place: run.data.batch(windows.batch(*place))
    run.forward = spread(run.model, run.ranks, "ddp", device, precision, compiled=compiled)
    return run


def ours(config: TrainConfig, precision: torch.dtype, steps: int, device: torch.device) -> Callable[[], Measured]:
    """Some steps of train.py."""
    run, clock = make_run(config, precision, device, compiled=device.type == "cuda"), Clock()
    run.scaler = Scaler(clock)
    draw = run.batch

    def batch(*place: int) -> Batch:
        drawn = draw(*place)
        clock.mark("data")
        return drawn

    run.batch = batch
    return measure(lambda step: take_step(run, step), clock, steps, lambda: fast_products(device))


def theirs(shape: Shape, module: Any, device: torch.device) -> Callable[[], Measured]:
    """Some steps of nanoGPT's train.py, with its defaults."""
    torch.manual_seed(1)
    gpt = module.GPT(module.GPTConfig(**shape.sizes, dropout=0.0, bias=False)).to(device)
    optimizer = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    on_gpu, clock = device.type == "cuda", Clock()
    forward = torch.compile(gpt) if on_gpu else gpt
    autocast = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
    batches = random_batches(make_config(shape, GPT2_SHAPE, ADAMW))

    def step(number: int) -> None:
        windows = to_device(batches.batch(number, 0, shape.batch_size), device)  # as its train.py does
        clock.mark("data")
        with autocast:
            _, loss = forward(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        clock.mark("forward")
        loss.backward()
        clock.mark("backward")
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measure(step, clock, shape.steps, nullcontext)


def measure(
    step: Callable[[int], object], clock: Clock, steps: int, products: Callable[[], AbstractContextManager]
) -> Callable[[], Measured]:
    """A program that takes `steps` steps for their time and as many again for its parts, within `products()`."""
    done = 0

    def program() -> Measured:
        nonlocal done
        with products():
            paired.synchronize()
            started = time.perf_counter()
            for number in range(done, done + steps):
                step(number)
            paired.synchronize()
            seconds = (time.perf_counter() - started) / steps
            clock.start()
            for number in range(done + steps, done + 2 * steps):
                step(number)
                clock.mark("optimizer")
            clock.ticking = False
        done += 2 * steps
        return Measured(seconds, {part: taken / steps for part, taken in clock.parts.items()})

    return program


@cache
def peak(device: torch.device) -> tuple[float, str]:
    """Operations a second that utilisation is a share of, and where the figure is from."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name().lower()
        for known, sheet in DEVICES.items():
            if known in name:
                return sheet.flops, f"{known}'s data sheet, dense bf16"
    size = 8192 if device.type == "cuda" else 2048
    rates = {}
    for precision in fast_precisions(device):
        for products in (nullcontext(), fast_products(device)):
            a, b = (torch.randn(size, size, device=device, dtype=choose_precision(precision, device)) for _ in range(2))
            program = paired.timed(lambda a=a, b=b: a @ b)
            with products:
                rate = 2 * size**3 / min(program() for _ in range(5))
            rates[rate] = f"measured, {precision}"
    return max(rates), rates[max(rates)]


if __name__ == "__main__":
    main()
