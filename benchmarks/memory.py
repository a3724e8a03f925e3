"""How much memory does a training step take, and does dry_run=true predict it?

    python benchmarks/memory.py

Each figure is a process's peak (Linux's VmHWM; on a GPU what torch allocated, in one process) above what it held
before the model was built, over three of train.py's steps. Beside it is what training/plan.py predicts without
allocating anything. Every row differs from the first of its form in one number.
"""

from __future__ import annotations

import gc
import statistics
import sys
from functools import partial
from pathlib import Path

import paired
import throughput
import torch

from model.config import GPTConfig
from training.config import OptimizerConfig, TrainConfig
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory
from training.plan import predict_memory, trial_run
from training.step import train_step

FORMS = {"sdpa": "TBC", "matmul": "T"}  # what is doubled; `matmul` differs from `sdpa` in the length alone


def main() -> None:
    arguments = paired.parser(__doc__).parse_args()
    if not Path("/proc/self/clear_refs").exists():
        sys.exit("error: peak memory is read from Linux's /proc, which is not here")
    paired.header()
    compare(arguments.rounds)


def compare(rounds: int) -> None:
    """Print measured and predicted memory of every form and size."""
    on_gpu = paired.device().type == "cuda"
    base = dict(T=512, B=8, C=512) if on_gpu else dict(T=256, B=8, C=128)
    sizes = {
        (form, *(base | {name: factor * base[name]}).values()): None
        for form, names in FORMS.items()
        for name in names
        for factor in (1, 2, 4)
    }
    measure = peak if on_gpu else partial(paired.alone, peak)
    programs = {row: partial(measure, make_config(*row)) for row in sizes}
    rows = []
    for (form, *numbers), found in paired.interleave(programs, rounds, warm_ups=0).items():
        predicted = predicted_bytes(make_config(form, *numbers)) / 1e6
        megabytes = [one / 1e6 for one in found]
        ratio = f"{statistics.median(megabytes) / predicted:.2f}"
        rows.append([f"`{form}`", *map(str, numbers), paired.spread(megabytes, ",.0f"), f"{predicted:,.0f}", ratio])
    paired.table(["attention", "T", "B", "C", "measured, MB", "predicted, MB", "measured / predicted"], rows)


def make_config(form: str, T: int, B: int, C: int) -> TrainConfig:
    model = GPTConfig(attention=form, n_layer=4, n_head=max(4, C // 64), n_embd=C, block_size=T, vocab_size=2048)
    return TrainConfig(model=model, optimizer=OptimizerConfig(), batch_size=B)


def predicted_bytes(config: TrainConfig) -> int:
    device = paired.device()
    precision = choose_precision("auto", device)
    return predict_memory(config, config.batch_size, precision, on_gpu=device.type == "cuda").peak


def peak(config: TrainConfig, *, compiled: bool = False) -> float:
    """Bytes of three steps above what this process held before it made the model."""
    device = paired.device()
    precision = choose_precision("auto", device)
    with fast_products(device):
        if device.type == "cpu":
            train_step(trial_run(make_config("sdpa", 16, 2, 64), device, precision), 0)  # threads and code pages
        gc.collect()
        torch.compiler.reset()
        reset_peak_memory(device)
        before = peak_memory(device)
        run = throughput.make_run(config, precision, device, compiled=compiled)
        for step in range(3):
            train_step(run, step)
        return peak_memory(device) - before


if __name__ == "__main__":
    main()
