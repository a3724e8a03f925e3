"""Measure speed, memory, extrapolation and recall of the variants of a sweep.

    python docs/measured.py FOLDER [RECALL] [code=FILE]

Writes FOLDER/measured.csv, whose columns `python docs/compare.py FOLDER` adds to its table, and FOLDER/rounds.csv,
the seconds of each round. FOLDER is a sweep that compares variants, or a comparison by hydra/sweeper=decide; one run
of each suffices. RECALL is a sweep of data=recall with the same variants. Speed is the median, over ROUNDS interleaved
rounds, of the baseline's time per training step divided by the variant's; the machine must be otherwise idle. Memory
is predicted as by dry_run=true.
"""

import math
import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.paired import interleave, timed
from cli.eval import scoring_params
from common.errors import SettingsError
from common.files import replace_text
from common.mistakes import mistakes_explained
from common.text import visible
from docs.command import arguments_asked, existing
from docs.compare import ROUNDS, SIZE, SPEED, SPEED_ERROR, Comparison, variants
from docs.probes import Probes
from docs.recorded import recorded_jobs
from generation.config import EvalConfig, TextConfig
from generation.score import load_text
from runs.checkpoint import Checkpoint, open_checkpoint
from sweeps.leaderboard import csv_text
from train import train_step
from training.config import TrainConfig
from training.device import choose_precision, fast_products
from training.plan import predict_memory, trial_run

T = 4096
FARTHER = 4  # the tested length as a multiple of the trained one
WARM_UP = 3


def main(folder: Path, recall: Path | None = None) -> None:
    comparison, rows, rounds = Comparison(folder, of_losses=False), [], []
    for note in comparison.left_out:
        print(visible(note))
    answered = {} if recall is None else accuracies(recall)
    for size in comparison.sizes:
        by_variant = {variant: picks for (at, variant), picks in comparison.picks.items() if at == size and picks}
        one_each = {variant: next(iter(picks.values())).job for variant, picks in by_variant.items()}
        checkpoints = {variant: open_checkpoint(str(job.directory)) for variant, job in one_each.items()}
        seconds = times(checkpoints)
        for variant, checkpoint in checkpoints.items():
            rounds += [[variant, size, number, f"{took:.5f}"] for number, took in enumerate(seconds[variant])]
            ratios = [its / mine for its, mine in zip(seconds[comparison.baseline], seconds[variant], strict=True)]
            error = 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))  # the median's, for normal values
            row = {"variant": variant, SIZE: size}
            row |= {SPEED: f"{statistics.median(ratios):.4f}", SPEED_ERROR: f"{error:.4f}"}
            ends = checkpoint.model.config.position == "learned"  # learned positions end at block_size
            row[f"nats/token at {FARTHER} × T"] = "–" if ends else f"{extrapolated(checkpoint):+.3f}"
            row[f"MB at T = {T:,}"] = f"{memory(checkpoint) / 1e6:,.0f}"
            if recall is not None:
                row["recall accuracy"] = answered.get(variant, "–")
            rows.append(row)
            print(row, flush=True)
    replace_text(folder / "measured.csv", csv_text([[*rows[0]], *(row.values() for row in rows)]))
    replace_text(folder / "rounds.csv", csv_text([["variant", SIZE, "round", "seconds a step"], *rounds]))


def times(checkpoints: dict[str, Checkpoint]) -> dict[str, list[float]]:
    """Return each model's seconds per training step, one figure for every round."""
    device, programs = torch.device("cpu"), {}
    for name, checkpoint in checkpoints.items():
        batch_size = checkpoint.meta.config["batch_size"]
        config = TrainConfig(model=checkpoint.model.config, batch_size=batch_size, max_steps=1)
        run = trial_run(config, device, choose_precision("auto", device))
        programs[name] = timed(partial(train_step, run, 0))
    with fast_products(device):
        return interleave(programs, ROUNDS, warm_ups=WARM_UP)


@torch.inference_mode()
def extrapolated(checkpoint: Checkpoint) -> float:
    """Return the rise of the loss in nats per token at FARTHER times the trained length.

    The loss at the end of a long window minus the loss in the second half of its first trained length.
    """
    (tokens,) = load_text(TextConfig(), [checkpoint]).tokens
    model, length = checkpoint.model, checkpoint.model.config.block_size
    probes, windows = (
        Probes(model, scoring_params(checkpoint, EvalConfig(precision="fp32"))),
        (len(tokens) - 1) // (FARTHER * length),
    )
    places = np.linspace(0, windows - 1, min(windows, 32)).astype(int) * FARTHER * length
    nats = np.mean([probes.nats(tokens[None, place : place + FARTHER * length + 1])[0] for place in places], axis=0)
    return float(nats[-length:].mean() - nats[length // 2 : length].mean())


def memory(checkpoint: Checkpoint) -> int:
    """Return the predicted peak bytes of a step on one window of T tokens, in float32 on a CPU."""
    model = replace(checkpoint.model.config, block_size=T)
    return predict_memory(train_step, TrainConfig(model=model, batch_size=1, micro_batch_size=1, max_steps=1), 1).peak


def accuracies(folder: Path) -> dict[str, str]:
    """Return each variant's best accuracy in a sweep of data=recall."""
    jobs, found = recorded_jobs(folder), dict[str, float]()
    for name, job in zip(variants(jobs), jobs, strict=True):
        if job.status == "finished" and (accuracy := job.summary.val_accuracy) is not None:
            found[name] = max(accuracy, found.get(name, 0.0))
    if not found:
        raise SettingsError(f"{folder} has no finished run of data=recall", "give the folder that -m made")
    return {name: f"{accuracy:.3f}" for name, accuracy in found.items()}


if __name__ == "__main__":
    with mistakes_explained():
        main(*map(existing, arguments_asked(__doc__, "FOLDER", "[RECALL]")))
