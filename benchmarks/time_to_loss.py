"""How long does it take to get from the text file to nanoGPT's loss on tiny Shakespeare, on a CPU?

    python benchmarks/time_to_loss.py PATH_OF_A_NANOGPT_CHECKOUT PATH_OF_TINY_SHAKESPEARE

Whole processes take turns: nanoGPT's train.py with its README's CPU recipe (its prepare.py ran before and does
not count), and our `train.py +experiment=shakespeare_cpu` with an empty cache, so preparing the text counts.
Whole process: from starting Python to its end. Training alone: without evaluations; an iteration before which
nanoGPT evaluates counts as its median one. Loss: nats per byte over the whole validation split, the last 10%
of the text (ours begins at a line), in windows of block_size; nanoGPT's best checkpoint is scored with its own
model. nanoGPT's seed is fixed, ours takes --seeds in turn. "float32" is ours with precision=fp32; "torch's usual
products" disables everything that train.py does on processors with bf16 products: bf16 itself, also in Muon, and
oneDNN for float32.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import nanogpt
import numpy as np
import paired
import torch
import torch.nn.functional as F

ENOUGH = 10_000  # bytes, so that a tenth of them is several windows
EXPERIMENT = ["+experiment=shakespeare_cpu", "device=cpu"]
USUAL_PRODUCTS = f"""
import runpy, sys
sys.path.insert(0, {str(paired.ROOT)!r})
import training.device
assert callable(training.device.multiplies_bf16)
training.device.multiplies_bf16 = lambda device: False
sys.argv[0] = {str(paired.ROOT / "train.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Run:
    whole: float
    """Seconds of the process."""
    training: float
    """Seconds of its iterations alone."""
    loss: float
    """Nats a byte."""


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("nanogpt", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("text", type=paired.text_file, help="tiny Shakespeare, or another ASCII text")
    parser.add_argument("--seeds", type=paired.count, default=3, help="how many seeds ours takes in turn (3)")
    arguments = parser.parse_args()
    content = arguments.text.read_bytes()
    if len(content) < ENOUGH:
        parser.error(f"{arguments.text} has {len(content)} bytes: give a text of at least {ENOUGH:,}")
    if not content.isascii():
        parser.error(f"{arguments.text} is not ASCII, so nanoGPT's characters are not bytes: give tiny Shakespeare")

    paired.header()
    train = [sys.executable, paired.ROOT / "train.py"]
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), arguments.text.resolve()
        copy = nanogpt.copy_with_data(arguments.nanogpt, folder, text)
        programs = {
            "nanoGPT": theirs(copy, nanogpt.load(copy)),
            "ours": ours(train, text, folder / "ours", arguments.seeds),
            "ours, float32": ours([*train, "precision=fp32"], text, folder / "fp32", arguments.seeds),
            "ours, float32, torch's usual products": ours(
                [sys.executable, "-c", USUAL_PRODUCTS], text, folder / "usual", arguments.seeds
            ),
        }
        report(paired.interleave(programs, arguments.rounds, warm_ups=0))


def report(runs: dict[str, list[Run]]) -> None:
    """Print the table of all programs' runs."""
    whole = {name: [run.whole for run in of] for name, of in runs.items()}
    training = {name: [run.training for run in of] for name, of in runs.items()}
    rows = (
        [
            name,
            paired.spread(whole[name], ".1f"),
            paired.spread(training[name], ".1f"),
            paired.spread([run.loss for run in of], ".4f"),
            paired.spread(paired.over(whole["nanoGPT"], whole[name]), ".2f"),
            paired.spread(paired.over(training["nanoGPT"], training[name]), ".2f"),
        ]
        for name, of in runs.items()
    )
    heads = ["", "whole process, s", "training alone, s", "loss, nats a byte"]
    paired.table([*heads, "nanoGPT's whole / this", "nanoGPT's training / this"], rows)


def theirs(copy: Path, module) -> Callable[[], Run]:
    """nanoGPT's whole training; its checkpoint is scored outside of the time."""

    def program() -> Run:
        started = time.perf_counter()
        output = paired.run(nanogpt.command(copy / "out"), cwd=copy, env=nanogpt.environment()).stdout
        whole = time.perf_counter() - started
        return Run(whole, iterations_seconds(output), score(copy, module))

    return program


def iterations_seconds(log: str) -> float:
    """The seconds of all iterations in nanoGPT's log, without the evaluations before some of them."""
    plain, others, evaluated = [], 0, False
    for line in log.splitlines():
        if re.match(r"step \d+: train loss", line):
            evaluated = True
        elif found := re.match(r"iter \d+: loss .*, time ([\d.]+)ms", line):
            if evaluated:
                others += 1
            else:
                plain.append(float(found[1]) / 1000)
            evaluated = False
    return sum(plain) + others * statistics.median(plain)


@torch.no_grad()
def score(copy: Path, module) -> float:
    """Nats a character of nanoGPT's checkpoint over the whole validation split, in windows of block_size."""
    checkpoint = torch.load(copy / "out" / "ckpt.pt", map_location="cpu", weights_only=True)
    model = module.GPT(module.GPTConfig(**checkpoint["model_args"])).eval()
    model.load_state_dict(checkpoint["model"])
    tokens = np.fromfile(copy / "data" / "shakespeare_char" / "val.bin", dtype=np.uint16).astype(np.int64)
    T, nats = checkpoint["model_args"]["block_size"], 0.0
    for start in range(0, len(tokens) - 1, T):
        window = torch.from_numpy(tokens[start : start + T + 1])[None]
        inputs, targets = window[:, :-1], window[:, 1:].contiguous()
        logits, _ = model(inputs, targets)  # with targets it returns the logits of all positions
        nats += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return nats / (len(tokens) - 1)


def ours(command: list, text: Path, folder: Path, seeds: int) -> Callable[[], Run]:
    """Our whole training with the next seed, the text prepared anew."""
    numbers = count()

    def program() -> Run:
        number = next(numbers)
        run = folder / str(number)
        settings = [*EXPERIMENT, f"data.path={text}", f"data.cache_dir={run / 'cache'}", f"run_dir={run}"]
        started = time.perf_counter()
        paired.run([*command, *settings, f"seed={number % seeds + 1}"], cwd=paired.ROOT)
        whole = time.perf_counter() - started
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        bits = min(row["val_bpb"] for row in rows if "val_bpb" in row)
        return Run(whole, training_seconds(rows), bits * math.log(2))

    return program


def training_seconds(rows: list[dict]) -> float:
    """Up to the last step of metrics.jsonl, without the evaluations in between."""
    evaluations = last = total = 0.0
    for row in rows:
        if "val_loss" in row:
            evaluations += row["seconds"] - last
        else:
            total = row["seconds"] - evaluations
        last = row["seconds"]
    return total


if __name__ == "__main__":
    main()
