"""How many tokens per second does training take, compared with nanoGPT?

    python benchmarks/throughput.py [PATH_OF_A_NANOGPT_CHECKOUT] [--shape N] [--corpus] [--compiled]

One process, the same batch for all, programs in turns. "GPT-2's shape" is nanoGPT's (learned positions,
LayerNorm, GELU, tied head, no biases) with AdamW, "default" the same sizes with our default settings
(rope, swiglu, rmsnorm, QK-norm, Muon). A step is train.py's own, or nanoGPT's, in float32 on a CPU, in bf16 too where
that is fast, on random tokens or on those of the default corpus; the loss is of the last round. "÷ its products" is a
step's time divided by the time that its products would take at the machine's peak in float32, which a product of two
2,048 × 2,048 matrices has in the same rounds; 1 is the limit. --compiled has a second row of each program, compiled as
its own train.py does; the compiler's time is in the rounds that warm up.
With a GPU everything is compiled, in bf16, and GPT-2 124M is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import nanogpt
import numpy as np
import paired
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from data.batches import TokenDataset
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.tokenizer import make_tokenizer
from model.config import GPTConfig
from train import train_step
from training.config import OptimizerConfig, TrainConfig
from training.device import choose_precision, fast_products, multiplies_bf16, to_device
from training.distributed import parallelize
from training.plan import trial_run
from training.run import Run

GPT2_SHAPE = dict(
    position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu", qk_norm=False, tie_embeddings=True,
    zero_init=False,
)  # fmt: skip
ADAMW = dict(name="adamw", lr=1e-3, beta2=0.99, weight_decay=0.1, embedding_lr=None, lm_head_lr=None)


class Shape(NamedTuple):
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    vocab_size: int
    steps: int
    """Of one measurement."""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}

    def __str__(self) -> str:
        return f"{self.n_layer} × {self.n_embd}, T = {self.block_size}, B = {self.batch_size}, V = {self.vocab_size:,}"


ON_A_CPU = [
    Shape(4, 4, 128, 64, 12, 65, 40),
    Shape(6, 6, 384, 256, 4, 65, 3),
    Shape(12, 12, 768, 256, 1, 65, 2),
    Shape(4, 4, 128, 128, 16, 2049, 8),  # the default run's
    Shape(2, 4, 128, 256, 4, 1024, 12),  # of data=tales
]
GPT2_124M = Shape(12, 12, 768, 1024, 32, 50304, steps=10)
PEAK = "a product"


class Measured(NamedTuple):
    seconds: float
    """Of a step."""
    loss: float
    """The mean of all these steps in nats a token."""
    flops: int
    """Of a step's products in float32; 0 if they are in another type or compiled."""


def main() -> None:
    parser = paired.parser(__doc__)
    parser.add_argument("nanogpt", nargs="?", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--shape", type=int, choices=range(len(ON_A_CPU)), help="only this one of the shapes")
    parser.add_argument("--corpus", action="store_true", help="batches of the default corpus, not of random tokens")
    parser.add_argument("--compiled", action="store_true", help="also what torch.compile makes of each")
    arguments = parser.parse_args()
    paired.header()
    on_gpu = paired.device().type == "cuda"
    for number, shape in enumerate([GPT2_124M] if on_gpu else ON_A_CPU):
        if arguments.shape in (None, number):
            compiled = (True,) if on_gpu else (False, True) if arguments.compiled else (False,)
            throughput(
                shape, arguments.nanogpt, arguments.rounds, corpus(shape) if arguments.corpus else None, compiled
            )


def corpus(shape: Shape) -> np.ndarray:
    """The tokens of the default corpus, with as many ids as the shape has."""
    return prepare(DataConfig(), TokenizerConfig(vocab_size=shape.vocab_size)).train


def throughput(
    shape: Shape,
    checkout: Path | None,
    rounds: int,
    tokens: np.ndarray | None = None,
    compiled: Sequence[bool] = (False,),
) -> None:
    """Measure one shape and print its table.

    compiled: whether torch.compile takes the programs; both for a row of each."""
    device = paired.device()
    fast = ["bf16"] if multiplies_bf16(device) else []
    precisions = fast if device.type == "cuda" else ["fp32", *fast]
    gpt2 = make_config(shape, GPT2_SHAPE, ADAMW)
    drawn = dataset(gpt2, tokens)
    programs: dict[str, Callable[[], Measured]] = {}
    for is_compiled in compiled:
        note = ", compiled" if is_compiled and device.type == "cpu" else ""
        if checkout:
            programs[f"nanoGPT{note}"] = theirs(shape, nanogpt.load(checkout), drawn, device, is_compiled)
        for precision in precisions:
            name = f"ours, GPT-2's shape, {precision}{note}"
            programs[name] = ours(gpt2, precision, drawn, shape.steps, device, is_compiled)
        default = make_config(shape, {}, {})
        programs[f"ours, default{note}"] = ours(default, "auto", drawn, shape.steps, device, is_compiled)
    first = next(iter(programs))
    programs[PEAK] = product(device)
    measured = paired.interleave(programs, rounds, warm_ups=2)
    peak = statistics.median(one.flops / one.seconds for one in measured.pop(PEAK))  # FLOP/s
    seconds = {name: [one.seconds for one in of] for name, of in measured.items()}
    size = shape.batch_size * shape.block_size
    print(f"{shape}\n")
    rows = []
    for name, taken in seconds.items():
        step, last = statistics.median(taken), measured[name][-1]
        rate = paired.spread([size / one for one in taken], ",.0f")
        times = f"{step * peak / last.flops:.2f}" if last.flops else "–"
        rows.append([name, rate, paired.ratio(seconds[first], taken), f"{1e3 * step:.1f}", times, f"{last.loss:.3f}"])
    paired.table(["", "tokens/s", f"of {first}", "a step, ms", "÷ its products", "loss"], rows)


def make_config(shape: Shape, model: dict, optimizer: dict) -> TrainConfig:
    return TrainConfig(
        model=GPTConfig(**shape.sizes, **model), optimizer=OptimizerConfig(**optimizer), batch_size=shape.batch_size
    )


def dataset(config: TrainConfig, tokens: np.ndarray | None = None) -> TokenDataset:
    """Batches as a run draws them, of these tokens or of random ones."""
    if tokens is None:
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 2_000_000, dtype=np.uint16)
    byte = make_tokenizer(TokenizerConfig(name="byte"), ())
    sizes = dict(block_size=config.model.block_size, batch_size=config.batch_size)
    return TokenDataset(byte, tokens, tokens[:1000], "tokens", "tokens", **sizes)


def sequences(drawn: TokenDataset, step: int) -> np.ndarray:
    """A step's inputs and last targets, (B, T + 1)."""
    batch = drawn.train_batch(step, 0, drawn.batch_size)
    return np.hstack([batch.inputs, batch.targets[:, -1:]])


def make_run(
    config: TrainConfig, dtype: torch.dtype, device: torch.device, *, compiled: bool, drawn: TokenDataset | None = None
) -> Run:
    """Return what train_step needs of a run."""
    # Many models of many shapes share one GPT.forward here, where a run has one of each.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch.manual_seed(1)
    run = trial_run(config, device, dtype)
    run.data = drawn or dataset(config)
    run.training_loss = parallelize(run.model, run.ranks, device, compiled)
    return run


def ours(
    config: TrainConfig, precision: str, drawn: TokenDataset, steps: int, device: torch.device, compiled: bool
) -> Callable[[], Measured]:
    """Some steps of train.py."""
    dtype = choose_precision(precision, device)
    run = make_run(config, dtype, device, compiled=compiled, drawn=drawn)
    counts = not compiled and dtype == torch.float32
    return measure(lambda step: train_step(run, step)[0], steps, lambda: fast_products(device, dtype), counts)


def theirs(
    shape: Shape, module: Any, drawn: TokenDataset, device: torch.device, compiled: bool
) -> Callable[[], Measured]:
    """Some steps of nanoGPT's train.py, with its defaults."""
    torch.manual_seed(1)
    gpt = module.GPT(module.GPTConfig(**shape.sizes, dropout=0.0, bias=False)).to(device)
    optimizer = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    on_gpu = device.type == "cuda"
    forward = torch.compile(gpt) if compiled else gpt
    autocast = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()

    def step(number: int) -> Tensor:
        windows = to_device(sequences(drawn, number), device)  # as its train.py does
        with autocast:
            _, loss = forward(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return measure(step, shape.steps, nullcontext, not compiled)


def product(device: torch.device) -> Callable[[], Measured]:
    """Return a program that multiplies two large matrices: the machine's peak."""
    a, b = torch.randn(2, 2048, 2048, device=device)
    return measure(lambda step: a @ b, 1, lambda: fast_products(device), True)


def added_flops(summand: torch.Size, a: torch.Size, b: torch.Size, **options: object) -> int:
    """Return the FLOPs of addmm_ from its shapes; torch's counter knows addmm alone."""
    return 2 * a.numel() * b[1]


def measure(
    step: Callable[[int], Tensor], steps: int, products: Callable[[], AbstractContextManager], counts: bool
) -> Callable[[], Measured]:
    """Return a program that takes the next `steps` steps within `products()`; counts: the first one's FLOPs too."""
    done = 0
    flops = 0

    def program() -> Measured:
        nonlocal done, flops
        losses: list[Tensor] = []
        if counts and not flops:
            with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_flops}) as counter:
                step(done)
            flops = counter.get_total_flops()
            done += 1
        with products():
            seconds = paired.timed(lambda: losses.extend(map(step, range(done, done + steps))))() / steps
        done += steps
        return Measured(seconds, torch.stack(losses).mean().item(), flops)

    return program


if __name__ == "__main__":
    main()
