"""How much memory does a training step take, and does dry_run=true predict it?

    python benchmarks/memory.py

Each figure is a process's peak (Linux's VmHWM; on a GPU what torch allocated, in one process) above what it held
before the model was built, over two of train.py's steps in float32. Beside it is what training/plan.py
predicts without allocating anything. Every row differs from the first of its form in one number.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial

import paired
import throughput
import torch

from model.config import GPTConfig
from training.config import OptimizerConfig, TrainConfig
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory
from training.plan import predict_memory, trial_run
from training.step import take_step

FORMS = ("sdpa", "matmul")


@dataclass(frozen=True)
class Shape:
    T: int = 256
    B: int = 8
    C: int = 128


GPU_BASE = Shape(512, 8, 512)


def shapes(base: Shape, form: str) -> list[Shape]:
    """The base, and its numbers doubled twice; for `matmul` the length alone, with which it differs from `sdpa`."""
    names = "T" if form == "matmul" else "TBC"
    doubled = [replace(base, **{name: factor * getattr(base, name)}) for name in names for factor in (2, 4)]
    return [base, *doubled]


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        form, *numbers = arguments.child
        print(in_this_process(form, Shape(*map(int, numbers))))
        return
    paired.need_memory_status()
    paired.header()
    compare(GPU_BASE if paired.device().type == "cuda" else Shape(), arguments.rounds)


def compare(base: Shape, rounds: int) -> None:
    """Print measured and predicted memory of every shape and form."""
    one = in_this_process if paired.device().type == "cuda" else child
    programs = {(form, shape): partial(one, form, shape) for form in FORMS for shape in shapes(base, form)}
    measured = paired.interleave(programs, rounds, warm_ups=0)
    rows = []
    for (form, shape), megabytes in measured.items():
        memory = predict_memory(make_config(form, shape), shape.B, on_gpu=paired.device().type == "cuda")
        predicted = (memory.weights + memory.gradients + memory.optimizer + memory.activations) / 1e6
        ratio = f"{statistics.median(megabytes) / predicted:.2f}"
        figures = [*map(str, astuple(shape)), paired.spread(megabytes, ",.0f"), f"{predicted:,.0f}", ratio]
        rows.append([f"`{form}`", *figures])
    paired.table(["attention", "T", "B", "C", "measured, MB", "predicted, MB", "measured / predicted"], rows)


def compare_steps(configs: dict[str, TrainConfig], ways: tuple[bool, ...]) -> None:
    """Print the peak of a third step, which finds all of the optimizer's state, eager and compiled."""
    above = "above weights and optimizer, GB"
    name = str(choose_precision("auto", paired.device())).removeprefix("torch.")
    heads = [name, "peak, GB", "predicted, GB", above, f"predicted {above}", "measured / predicted"]
    paired.table(heads, steps(configs, ways))


def steps(configs: dict[str, TrainConfig], ways: tuple[bool, ...]) -> Iterator[list[str]]:
    device = paired.device()
    precision = choose_precision("auto", device)
    for name, config in configs.items():
        predicted = predict_memory(config, config.batch_size, precision, on_gpu=device.type == "cuda")
        state = predicted.weights + predicted.optimizer
        for compiled in ways:
            torch.compiler.reset()
            found = added(device, partial(third_step, config, precision, device, compiled))
            cells = [f"{one / 1e9:.2f}" for one in (found, predicted.peak, found - state, predicted.peak - state)]
            yield [f"{name}, {'compiled' if compiled else 'eager'}", *cells, f"{found / predicted.peak:.2f}"]


def third_step(config: TrainConfig, precision: torch.dtype, device: torch.device, compiled: bool) -> None:
    run = throughput.make_run(config, precision, device, compiled=compiled)
    with fast_products(device):
        for step in range(2):
            take_step(run, step)
        paired.synchronize()
        reset_peak_memory(device)
        take_step(run, 2)
        paired.synchronize()


def added(device: torch.device, program: Callable[[], object]) -> int:
    """The most bytes that a program, which may count anew, holds above what was held before it."""
    if device.type == "cuda":  # on a CPU what is freed stays the process's
        gc.collect()
    reset_peak_memory(device)
    before = peak_memory(device)
    program()
    return peak_memory(device) - before


def make_config(form: str, shape: Shape) -> TrainConfig:
    model = GPTConfig(
        attention=form, n_layer=4, n_head=max(4, shape.C // 64), n_embd=shape.C, block_size=shape.T, vocab_size=2048
    )
    return TrainConfig(model=model, optimizer=OptimizerConfig(), batch_size=shape.B)


def child(form: str, shape: Shape) -> float:
    output = paired.run([sys.executable, __file__, "--child", form, *map(str, astuple(shape))]).stdout
    return float(output.splitlines()[-1])


def in_this_process(form: str, shape: Shape) -> float:
    """Peak MB of two steps above what this process held before it made the model."""
    config, device = make_config(form, shape), paired.device()
    small = replace(config, model=replace(config.model, n_embd=64, n_head=4, block_size=16), batch_size=2)
    with fast_products(device):
        take_step(trial_run(small, device, torch.float32), 0)  # threads and code pages
        reset_peak_memory(device)
        before = peak_memory(device)
        run = trial_run(config, device, torch.float32)
        for step in range(2):
            take_step(run, step)
        return (peak_memory(device) - before) / 1e6


if __name__ == "__main__":
    main()
