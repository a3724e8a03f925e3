"""What is each rung of attention worth?

    python benchmarks/ladder.py [OVERRIDE ...]

Trains every rung with the settings of train.py (further arguments are its overrides), one seed a round, and
prints one table: bits per byte on the validation split, mean and standard deviation over seeds, tokens a
second and peak memory of the process. Rungs take turns, so that a drifting machine drifts for all.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

import paired

RUNGS = ("average", "simple", "single_head", "stacked", "matmul", "sdpa")
# The child prints its own peak: the parent's figure for all children would be the largest of any.
CHILD = """
import resource, runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def main() -> None:
    parser = paired.Parser(__doc__, rounds=3)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings of train.py, key=value")
    arguments = parser.parse_args()
    paired.header()
    with tempfile.TemporaryDirectory() as folder:
        programs = {rung: partial(train, rung, count(1), Path(folder), arguments.overrides) for rung in RUNGS}
        runs = paired.interleave(programs, arguments.rounds, warm_ups=0)
    rows = []
    for rung, of in runs.items():
        bits, speeds, peaks = zip(*of, strict=True)
        deviation = f" ± {statistics.stdev(bits):.3f}" if len(bits) > 1 else ""
        loss = f"{statistics.mean(bits):.3f}{deviation}"
        rows.append([f"`{rung}`", loss, paired.spread(speeds, ",.0f"), f"{statistics.median(peaks):,.0f} MB"])
    paired.table(["attention", "bits per byte", "tokens/s", "peak memory"], rows)


def train(rung: str, seeds: count, folder: Path, overrides: list[str]) -> tuple[float, float, float]:
    """Bits per byte, tokens a second, and the process's peak memory in MB, of a run with the next seed."""
    seed = next(seeds)
    run = folder / f"{rung}-{seed}"
    settings = [f"attention={rung}", f"seed={seed}", f"hydra.run.dir={run}", "sample_tokens=0", *overrides]
    script = f"import sys; sys.argv = ['{paired.ROOT}/train.py', *sys.argv[1:]]; sys.path.insert(0, '{paired.ROOT}')"
    output = paired.run([sys.executable, "-c", script + CHILD, *settings]).stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bits = min(row["val_bpb"] for row in rows if "val_bpb" in row)
    speed = statistics.median(row["tokens_per_s"] for row in rows if "tokens_per_s" in row)
    return bits, speed, float(output.rsplit("peak", 1)[1])


if __name__ == "__main__":
    main()
