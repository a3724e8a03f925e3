"""The same small model with each form of attention:  python benchmarks/ladder.py [OVERRIDE ...]

Trains every rung with the settings of train.py (further arguments are its overrides) and prints one table:
bits per byte on the validation split, mean and standard deviation over seeds, tokens a second and peak
memory of the process. Rungs take turns, so that a drifting machine drifts for all.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RUNGS = ("average", "simple", "single_head", "stacked", "matmul", "sdpa")
SEEDS = (1, 2, 3)
# The child prints its own peak: the parent's figure for all children would be the largest of any.
CHILD = """
import resource, runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def main() -> None:
    overrides = sys.argv[1:]
    bits, speeds, peaks = (defaultdict(list) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for rung in RUNGS:
                run = Path(folder) / f"{rung}-{seed}"
                rows, peak = train(rung, seed, run, overrides)
                bits[rung].append(min(row["val_bpb"] for row in rows if "val_bpb" in row))
                speeds[rung].append(statistics.median(row["tokens_per_s"] for row in rows if "tokens_per_s" in row))
                peaks[rung].append(peak)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads\n")
    print("| attention | bits per byte | tokens/s | peak memory |\n|---|---|---|---|")
    for rung in RUNGS:
        print(
            f"| `{rung}` | {statistics.mean(bits[rung]):.3f} ± {statistics.stdev(bits[rung]):.3f} "
            f"| {statistics.median(speeds[rung]):,.0f} | {statistics.median(peaks[rung]):,.0f} MB |"
        )


def train(rung: str, seed: int, run: Path, overrides: list[str]) -> tuple[list[dict], float]:
    """The rows of metrics.jsonl and the process's peak memory in MB."""
    settings = [f"attention={rung}", f"seed={seed}", f"hydra.run.dir={run}", "sample_tokens=0", *overrides]
    script = f"import sys; sys.argv = ['{ROOT}/train.py', *sys.argv[1:]]; sys.path.insert(0, '{ROOT}')" + CHILD
    output = subprocess.run(
        [sys.executable, "-c", script, *settings], capture_output=True, text=True, check=True
    ).stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows, float(output.rsplit("peak", 1)[1])


if __name__ == "__main__":
    main()
