"""How long does it take from a text file to nanoGPT's loss on tiny Shakespeare, on a CPU?

    python benchmarks/time_to_loss.py PATH_OF_A_NANOGPT_CHECKOUT PATH_OF_TINY_SHAKESPEARE

Whole processes take turns. Three rows are a whole recipe: nanoGPT's train.py as its README runs it on a CPU, and our
experiments `shakespeare_cpu`, with nanoGPT's four layers, and `shakespeare_fast`. The rows between tell recipe and code
apart: nanoGPT's code with an AdamW tuned for a short run (benchmarks/README.md has the trials), and our code in
nanoGPT's shape and float32 with either AdamW (of bytes, where nanoGPT has the text's 65 characters).
Whole process: from starting Python to its end; nanoGPT's prepare.py ran before and does not count, ours prepares the
text anew. Training alone: without evaluations; nanoGPT's is its median iteration, times their number.
Loss: nats per byte over the whole validation split, the last 10% of the text (ours begins at a line), in windows of
block_size, of the best checkpoint; nanoGPT's is scored with its own model. nanoGPT's seed is fixed, ours takes --seeds
in turn.
"""

from __future__ import annotations

import math
import os
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

from runs.metrics import read_metrics

ENOUGH = 10_000  # bytes, so that a tenth of them is several windows
NANOGPT_SHAPE = [
    "experiment=shakespeare_cpu", "model=gpt2", "model.ngrams=null", "model.mlp=gelu", "model.bias=false",
    "model.qkv_bias=false", "model.attention=sdpa",
    "optimizer=adamw", "optimizer.embedding_lr=null", "optimizer.lm_head_lr=null", "schedule=cosine", "precision=fp32",
]  # fmt: skip


@dataclass
class Run:
    whole: float
    """Seconds of the process."""
    training: float
    """Seconds of its iterations alone."""
    steps: int
    tokens: int
    """Of all steps."""
    loss: float
    """Nats a byte."""


def main() -> None:
    parser = paired.parser(__doc__)
    parser.add_argument("nanogpt", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("text", type=Path, help="tiny Shakespeare, or another ASCII text")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds ours takes in turn (3)")
    arguments = parser.parse_args()
    content = arguments.text.read_bytes()
    if len(content) < ENOUGH:
        parser.error(f"{arguments.text} has {len(content)} bytes: give a text of at least {ENOUGH:,}")
    if not content.isascii():
        parser.error(f"{arguments.text} is not ASCII, so nanoGPT's characters are not bytes: give tiny Shakespeare")

    paired.header()
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), arguments.text.resolve()
        copy = nanogpt.copy_with_data(arguments.nanogpt, folder, text)
        module, seeds = nanogpt.load(copy), arguments.seeds
        as_theirs, tuned = in_nanogpts_shape(nanogpt.ADAMW), in_nanogpts_shape(nanogpt.TUNED_ADAMW)
        programs = {
            "nanoGPT, its README's recipe": theirs(copy, module, {}),
            "nanoGPT, tuned AdamW": theirs(copy, module, nanogpt.TUNED_ADAMW),
            "ours, nanoGPT's shape and recipe": ours(as_theirs, text, folder / "as_theirs", seeds),
            "ours, nanoGPT's shape, tuned AdamW": ours(tuned, text, folder / "tuned", seeds),
            "ours, `shakespeare_cpu`": ours(["experiment=shakespeare_cpu"], text, folder / "ours", seeds),
            "ours, `shakespeare_fast`": ours(["experiment=shakespeare_fast"], text, folder / "fast", seeds),
        }
        report(paired.interleave(programs, arguments.rounds, warm_ups=0))


def in_nanogpts_shape(adamw: dict[str, float]) -> list[str]:
    """Our settings for its model and for a recipe in its own settings."""
    steps, lr = adamw["max_iters"], adamw["learning_rate"]
    return [
        *NANOGPT_SHAPE, f"batch_size={adamw['batch_size']}", f"max_steps={steps}", f"checkpoint_interval={steps}",
        f"eval_interval={adamw['eval_interval']}", f"optimizer.lr={lr}", f"optimizer.beta2={adamw['beta2']}",
        f"schedule.warmup_steps={adamw['warmup_iters']}", f"schedule.final_factor={adamw['min_lr'] / lr}",
    ]  # fmt: skip


def report(runs: dict[str, list[Run]]) -> None:
    """Print the table of all programs' runs."""
    seconds = {name: [[run.whole for run in of], [run.training for run in of]] for name, of in runs.items()}
    rows, first = [], next(iter(seconds.values()))
    for name, of in runs.items():
        cells = [name, f"{of[-1].steps:,}", f"{of[-1].tokens:,}", paired.spread([run.loss for run in of], ".4f")]
        cells += [paired.spread(taken, ".1f") for taken in seconds[name]]
        rows.append(cells + [paired.ratio(*both) for both in zip(first, seconds[name], strict=True)])
    heads = ["", "steps", "tokens", "loss, nats a byte", "whole process, s", "training alone, s"]
    paired.table([*heads, "first row's whole / this", "first row's training / this"], rows)


def theirs(copy: Path, module, adamw: dict[str, float]) -> Callable[[], Run]:
    """nanoGPT's whole training with some settings changed; scoring it is not timed."""
    overrides = [f"--{name}={value}" for name, value in adamw.items()]
    if adamw:
        overrides.append(f"--lr_decay_iters={adamw['max_iters']}")

    def program() -> Run:
        started = time.perf_counter()
        command = [sys.executable, "train.py", *nanogpt.RECIPE, f"--out_dir={copy / 'out'}", *overrides]
        output = paired.run(command, cwd=copy, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        whole = time.perf_counter() - started
        times = [float(one) / 1000 for one in re.findall(r"^iter \d+: loss .*, time ([\d.]+)ms", output, re.M)]
        steps = len(times)
        each = re.search(r"tokens per iteration will be: ([\d,]+)", output)[1].replace(",", "")
        return Run(whole, steps * statistics.median(times), steps, steps * int(each), score(copy, module))

    return program


@torch.no_grad()
def score(copy: Path, module) -> float:
    """Nats a character of nanoGPT's checkpoint on the validation split, in block_size windows."""
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


def ours(changes: list[str], text: Path, folder: Path, seeds: int) -> Callable[[], Run]:
    """Our whole training with the next seed, the text prepared anew."""
    numbers = count()

    def program() -> Run:
        number = next(numbers)
        run = folder / str(number)
        settings = [f"data.path={text}", f"data.cache_dir={run / 'cache'}", f"run_dir={run}"]
        started = time.perf_counter()
        command = [sys.executable, paired.ROOT / "train.py", "device=cpu", *changes, *settings]
        paired.run([*command, f"seed={number % seeds + 1}"], cwd=paired.ROOT)
        whole = time.perf_counter() - started
        rows = read_metrics(run / "metrics.jsonl")
        bits = min(row["val_bpb"] for row in rows if "val_bpb" in row)
        return Run(whole, training_seconds(rows), rows[-1]["step"], rows[-1]["tokens"], bits * math.log(2))

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
