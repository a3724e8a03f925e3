"""How does the time of a training step grow with the work, and with the processes that share it?

    python benchmarks/scaling.py

First table: layers, width, length and batch, each doubled twice from a base, in turns, with AdamW. The work is
model FLOPs: 6 per multiplied weight and token, plus attention's. "work / time" is the growth of the work over the
growth of the time: 1 is ideal, above 1 the larger step uses the machine better. Second table: train.py under
torchrun with one and two processes (DDP) and the same global batch, whole processes in turns.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import paired
import throughput
import torch

from model.size import flops_per_token, without_weights
from training.device import choose_precision, fast_products
from training.step import take_step

BASE = throughput.Shape(n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=8, vocab_size=2048, steps=4)
GROWN = {"n_layer": "layers", "n_embd": "width", "block_size": "T", "batch_size": "batch"}
STEPS = 120


def main() -> None:
    arguments = paired.Parser(__doc__).parse_args()
    paired.header()
    growth(BASE, arguments.rounds)
    processes(arguments.rounds)


def growth(base: throughput.Shape, rounds: int) -> None:
    """Print the time of a step against layers, width, length and batch."""
    shapes = {"base": base}
    for field, name in GROWN.items():
        for factor in (2, 4):
            shapes[f"{factor} × {name}"] = replace(base, **{field: factor * getattr(base, field)})
    configs = {n: throughput.make_config(shape, {}, throughput.ADAMW) for n, shape in shapes.items()}
    work = {
        n: flops_per_token(without_weights(config.model)) * config.batch_size * config.model.block_size
        for n, config in configs.items()
    }
    seconds = paired.interleave({n: steps(config, base.steps) for n, config in configs.items()}, rounds, warm_ups=2)
    print(f"base: {base}\n")
    rows = []
    for name, taken in seconds.items():
        share = work[name] / work["base"]
        grown = statistics.median(taken) / statistics.median(seconds["base"])
        ratio = paired.ratio([share * one for one in seconds["base"]], taken)
        step = paired.spread([1e3 * one for one in taken], ".1f")
        rows.append([name, step, f"{share:.2f}×", f"{grown:.2f}×", ratio])
    paired.table(["", "a step, ms", "work", "time", "work / time"], rows)


def steps(config, number: int) -> Callable[[], float]:
    device = paired.device()
    run = throughput.make_run(config, choose_precision("auto", device), device, compiled=device.type == "cuda")
    done = count()

    def program() -> float:
        with fast_products(device):
            return paired.timed(lambda: take_step(run, next(done)), number)()

    return program


def processes(rounds: int) -> None:
    """Print tokens a second of one and two processes with the same global batch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = torch.cuda.device_count() >= 2
    half = max(1, cores // 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(random.Random(0).choices("abcdefgh \n", k=300_000)))
        programs = {
            f"1 process, threads: {cores}": trained(folder, 1, cores, gpus),
            f"1 process, threads: {half}": trained(folder, 1, half, gpus),
            f"2 processes, threads of each: {half}": trained(folder, 2, half, gpus),
        }
        speeds = paired.interleave(programs, rounds)
    alone = list(speeds.values())[1]
    print(f"4 × 128, T = 128, global batch 16, {'GPUs' if gpus else 'CPU, gloo'}\n")
    rows = [[name, paired.spread(speed, ",.0f"), paired.ratio(speed, alone)] for name, speed in speeds.items()]
    paired.table(["", "tokens/s", f"of 1 process, threads: {half}"], rows)


def trained(folder: Path, ranks: int, threads: int, gpus: bool) -> Callable[[], float]:
    """A run of train.py; returns its median tokens a second."""
    numbers = count()

    def program() -> float:
        run = folder / f"{ranks}-{threads}-{next(numbers)}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        settings = [
            f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", f"run_dir={run}",
            "tokenizer=byte", f"max_steps={STEPS}", f"eval_interval={STEPS}", f"checkpoint_interval={STEPS}",
            "sample_tokens=0", f"device={'auto' if gpus else 'cpu'}",
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        paired.run([*torchrun, paired.ROOT / "train.py", *settings], cwd=paired.ROOT, env=environment)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return statistics.median(row["tokens_per_s"] for row in rows if "tokens_per_s" in row)

    return program


if __name__ == "__main__":
    main()
