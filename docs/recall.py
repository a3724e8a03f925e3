"""Tabulate the recall of a sweep's variants:  python docs/recall.py FOLDER

FOLDER is a sweep of data=recall over variants, seeds and learning rates. Its runs are also measured on fewer pairs, and
the results written to FOLDER/recall.csv. If that file exists, it is read and the runs are not needed. The table has
each variant's share of right answers, mean ± standard error over the seeds, and the bytes that it keeps of a window.
The learning rate is the best of the rates with the most seeds.
"""

import csv
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.files import replace_text
from data.tasks import NO_TARGET, TaskData
from docs.compare import RATE, variants
from docs.estimates import Estimate
from generation.score import learned_task
from model.gpt import GPT
from model.size import cache_bytes_per_token
from runs.checkpoint import open_checkpoint
from sweeps.leaderboard import csv_text, markdown_lines, read_jobs

PAIRS = (4, 8, 16, 32)
HEAD = ("variant", RATE, "seed", "state bytes", *(f"{pairs} pairs" for pairs in PAIRS))


def main(folder: Path) -> None:
    file = folder / "recall.csv"
    if not file.exists():
        jobs = read_jobs(folder)
        named = zip(variants(jobs), jobs, strict=True)
        rows = [[name, *measured(job.directory, job.settings)] for name, job in named if job.status == "finished"]
        replace_text(file, csv_text([HEAD, *rows]))
    print("\n".join(markdown_lines(table(list(csv.DictReader(file.open(encoding="utf-8")))))))


def measured(directory: Path, settings: dict[str, str]) -> list[object]:
    """Return a run's rate, seed, state bytes and shares of right answers."""
    checkpoint = open_checkpoint(str(directory))
    model, task = checkpoint.model, learned_task(checkpoint)
    right = [share_right(model, replace(task, task=replace(task.task, items=pairs))) for pairs in PAIRS]
    seen = max(attention.window or model.config.block_size for attention in model.attentions)
    return [settings[RATE], settings["seed"], cache_bytes_per_token(model) * seen, *right]


@torch.inference_mode()
def share_right(model: GPT, task: TaskData) -> float:
    """Return the share of held-out answers to which the model gives the highest probability."""
    right = []
    for batch in task.validation_batches(64):
        targets = torch.from_numpy(batch.targets)
        scored = targets != NO_TARGET
        likeliest = model.logits(model.hidden(torch.from_numpy(batch.inputs))[scored]).argmax(-1)
        right.append(likeliest == targets[scored])
    return torch.cat(right).double().mean().item()


def table(runs: list[dict[str, str]]) -> list[list[str]]:
    """Return the lines of the table, the variant with the most right answers first."""
    by_rate = defaultdict[str, dict[str, list[dict[str, str]]]](lambda: defaultdict(list))
    for run in runs:
        by_rate[run["variant"]][run[RATE]].append(run)
    lines = []
    for variant, rates in by_rate.items():
        # The best of the rates with the most seeds.
        rate = max(rates, key=lambda rate: (len(rates[rate]), fmean(float(run[HEAD[-1]]) for run in rates[rate])))
        best = rates[rate]
        cells = [variant, rate, f"{float(best[0]['state bytes']):,.0f}"]
        for name in HEAD[4:]:
            shares = [float(run[name]) for run in best]
            error = f" ± {Estimate.of(shares).error:.3f}" if len(shares) > 1 else ""
            cells.append(f"{fmean(shares):.3f}{error}")
        lines.append(cells)
    return [["variant", RATE, *HEAD[3:]], *sorted(lines, key=lambda cells: cells[-1], reverse=True)]


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
