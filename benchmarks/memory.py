"""How much memory does a training step take, and does dry_run=true predict it?

    python benchmarks/memory.py

Each figure is a process's peak (Linux's VmHWM; on a GPU what torch allocated, in one process) above what it held
before the model was built, over three of train.py's steps. Beside it is what training/plan.py predicts without
allocating anything. On a CPU every row differs from the first of its form in one number; on a GPU it is GPT-2 124M,
eager and compiled.
"""

from __future__ import annotations

import gc
import statistics
from functools import partial

import paired
import torch
from throughput import ADAMW, GPT2_124M, GPT2_SHAPE, Shape, make_config, make_run

from train import train_step
from training.config import TrainConfig
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory
from training.plan import predict_memory, trial_run

FORMS = {"sdpa": "TBC", "matmul": "T"}  # what is doubled; `matmul` differs from `sdpa` in the length alone


def main() -> None:
    rounds = paired.parser(__doc__).parse_args().rounds
    paired.header()
    on_gpu, precision = paired.device().type == "cuda", choose_precision("auto", paired.device())
    configs = on_a_gpu() if on_gpu else on_a_cpu()
    measure, ways = (peak, (False, True)) if on_gpu else (partial(paired.alone, peak), (False,))
    programs = {(name, way): partial(measure, config, way) for name, config in configs.items() for way in ways}
    rows = []
    for (name, compiled), found in paired.interleave(programs, rounds, warm_ups=0).items():
        config, megabytes = configs[name], [one / 1e6 for one in found]
        predicted = predict_memory(train_step, config, config.batch_size, precision, on_gpu=on_gpu).peak / 1e6
        ratio = f"{statistics.median(megabytes) / predicted:.2f}"
        title = name + (", compiled" if compiled else "")
        rows.append([title, paired.spread(megabytes, ",.0f"), f"{predicted:,.0f}", ratio])
    paired.table(["", "measured, MB", "predicted, MB", "measured / predicted"], rows)


def on_a_cpu() -> dict[str, TrainConfig]:
    """Small models, each form's first one with one of its sizes doubled, twice."""
    base, configs = dict(T=256, B=8, C=128), {}
    for form, names in FORMS.items():
        for changed in (base | {name: factor * base[name]} for name in names for factor in (1, 2, 4)):
            T, B, C = changed.values()
            shape = Shape(4, max(4, C // 64), C, T, B, 2048, steps=3)
            configs[f"`{form}`, {shape}"] = make_config(shape, {"attention": form}, {})
    return configs


def on_a_gpu() -> dict[str, TrainConfig]:
    shape = GPT2_124M._replace(batch_size=16)
    recipes = {"GPT-2's shape": (GPT2_SHAPE, ADAMW), "default": ({}, {})}
    return {f"{name}, {shape}": make_config(shape, *recipe) for name, recipe in recipes.items()}


def peak(config: TrainConfig, compiled: bool = False) -> float:
    """Bytes of three steps above what this process held before it made the model."""
    device = paired.device()
    precision = choose_precision("auto", device)
    with fast_products(device, precision):
        if device.type == "cpu":
            tiny = make_config(Shape(1, 1, 64, 16, 2, 2048, steps=1), {}, {})
            train_step(trial_run(tiny, device, precision), 0)  # threads and code pages
        gc.collect()
        torch.compiler.reset()
        reset_peak_memory(device)
        before = peak_memory(device)
        run = make_run(config, precision, device, compiled=compiled)
        for step in range(3):
            train_step(run, step)
        return peak_memory(device) - before


if __name__ == "__main__":
    main()
