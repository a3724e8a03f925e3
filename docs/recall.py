"""Tabulate the recall of a sweep's variants:  python docs/recall.py FOLDER [code=FILE]

FOLDER is a sweep of data=recall over variants, seeds and learning rates. Its runs are also measured on fewer pairs, and
the results written to FOLDER/recall.csv. If that file exists, it is read and the runs are not needed. The table has
each variant's share of right answers, mean ± standard error over the seeds, and the bytes that it keeps of a window.
The learning rate is the best of the rates with the most seeds.
"""

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.errors import SettingsError
from common.files import replace_text
from common.mistakes import mistakes_explained
from data.tasks import NO_TARGET, TaskData
from docs.command import arguments_asked, existing, number_in, read_table
from docs.compare import RATE, SIZE, refuse_several, variants
from docs.estimates import Estimate
from generation.score import learned_task
from model.gpt import GPT
from model.size import cache_bytes_per_token
from runs.checkpoint import Checkpoint, open_checkpoint
from sweeps.leaderboard import csv_text, markdown_lines, read_jobs

PAIRS = (4, 8, 16, 32)
HEAD = ("variant", RATE, "seed", "state bytes")


def main(folder: Path) -> None:
    file = folder / "recall.csv"
    if not file.exists():
        # A task has no bits per byte.
        jobs = [job for job in read_jobs(folder) if job.status == "finished" and job.summary.val_bpb is None]
        if not jobs:
            raise SettingsError(f"{folder} has no finished run of data=recall", "give the folder that -m made")
        refuse_several(folder, jobs, SIZE, "max_steps", "model.block_size")
        checkpoints = [open_checkpoint(str(job.directory)) for job in jobs]
        most = min(learned_task(checkpoint).task.items for checkpoint in checkpoints)
        pairs = [*(each for each in PAIRS if each < most), most]
        rows = [[name, *measured(each, pairs)] for name, each in zip(variants(jobs), checkpoints, strict=True)]
        replace_text(file, csv_text([[*HEAD, *(f"{each} pairs" for each in pairs)], *rows]))
    print("\n".join(markdown_lines(table(read_table(file, *HEAD)))))


def measured(checkpoint: Checkpoint, pairs: list[int]) -> list[object]:
    """Return a run's rate, seed, state bytes and shares of right answers, of sequences with so many pairs."""
    model, task, settings = checkpoint.model, learned_task(checkpoint), checkpoint.meta.config
    right = [share_right(model, replace(task, task=replace(task.task, items=each))) for each in pairs]
    kept = cache_bytes_per_token(model) * model.config.block_size
    return [settings["optimizer"]["lr"], settings["seed"], kept, *right]


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
    columns = [name for name in runs[0] if name.endswith(" pairs")]
    for run in runs:
        by_rate[run["variant"]][run[RATE]].append(run)
    lines = []
    for variant, rates in by_rate.items():
        # The best of the rates with the most seeds.
        right = {name: fmean(number_in(run, columns[-1]) for run in seeds) for name, seeds in rates.items()}
        rate = max(rates, key=lambda name: (len(rates[name]), right[name]))
        best = rates[rate]
        cells = [variant, rate, f"{number_in(best[0], 'state bytes'):,.0f}"]
        for name in columns:
            shares = [number_in(run, name) for run in best]
            error = f" ± {Estimate.of(shares).error:.3f}" if len(shares) > 1 else ""
            cells.append(f"{fmean(shares):.3f}{error}")
        lines.append(cells)
    return [["variant", RATE, HEAD[3], *columns], *sorted(lines, key=lambda cells: cells[-1], reverse=True)]


if __name__ == "__main__":
    with mistakes_explained():
        (folder,) = arguments_asked(__doc__, "FOLDER")
        main(existing(folder))
