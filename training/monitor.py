"""Watching a run: the progress bar, metrics.jsonl, loss.png and, when asked for, wandb."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import asdict
from multiprocessing import parent_process
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from training.evaluation import Evaluation
from training.run import Run

log = logging.getLogger("tinygpt")


class Monitor:
    """Reports a run as it goes; use it as a context manager.

    The run's directory gets metrics.jsonl, one JSON object a line, and loss.png. Of several processes
    only the first reports.
    """

    def __init__(self, run: Run) -> None:
        config, progress = run.config, run.progress
        self.run = run
        self.tokens_per_step = config.batch_size * config.model.block_size
        self.silent = not run.ranks.is_first
        mode = "a" if progress.step else "w"
        metrics = os.devnull if self.silent else run.directory / "metrics.jsonl"
        self.metrics = Path(metrics).open(mode, encoding="utf-8")  # noqa: SIM115
        self.wandb = None if self.silent or config.wandb.mode == "disabled" else _start_wandb(run)
        self.bar = tqdm(
            total=config.max_steps,
            initial=progress.step,
            unit="step",
            disable=self.silent or parent_process() is not None or None,  # None: no bar unless on a terminal
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
        )
        self.redirect = logging_redirect_tqdm()  # log lines go above the bar instead of through it
        self.last_time = time.perf_counter()
        self.last_step = progress.step
        self.last_skipped = progress.skipped

    def __enter__(self) -> Monitor:
        self.redirect.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.redirect.__exit__(*exception)
        self.bar.close()
        self.metrics.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(exception[0] is not None))

    def step(self, step: int, *, loss: float, lr: float, grad_norm: float) -> None:
        """Report the update that made `step` finished updates."""
        skipped = self.run.progress.skipped
        if skipped > self.last_skipped:
            log.warning(
                "step %d: %d of the last %d steps changed nothing, because loss or gradient was not finite",
                *(step, skipped - self.last_skipped, step - self.last_step),
            )
        self.last_skipped = skipped
        now = time.perf_counter()
        speed = (step - self.last_step) * self.tokens_per_step / (now - self.last_time)
        self.last_step, self.last_time = step, now
        self._write(step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=speed)
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed / 1000:.1f}k tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)

    def evaluation(self, step: int, result: Evaluation, sample: str) -> None:
        """Report an evaluation after `step` updates, with a text that the model wrote."""
        self._write(step, val_loss=result.loss, val_bpb=result.bpb)
        log.info(
            "step %d: validation loss %.4f nats/token, perplexity %.1f, %.4f bits/byte",
            *(step, result.loss, result.perplexity, result.bpb),
        )
        if sample:
            log.info("%s", "\n".join("  │ " + line for line in sample.splitlines()))
            if self.wandb:
                self.wandb.log({"sample": sample, "step": step})
        self.last_time = time.perf_counter()  # an evaluation's time is not the training's

    def finish(self) -> Path:
        """Draw loss.png from metrics.jsonl; returns its path."""
        picture = self.run.directory / "loss.png"
        if self.silent:
            return picture
        try:
            plot_losses(self.run.directory / "metrics.jsonl")
        except OSError as error:
            log.error("%s cannot be written (%s).", picture, error)
            return picture
        if self.wandb:
            import wandb

            self.wandb.log({"loss.png": wandb.Image(str(picture)), "step": self.bar.total})
        return picture

    def _write(self, step: int, **values: float) -> None:
        row = {"step": step, "tokens": step * self.tokens_per_step, "seconds": round(self.run.seconds, 3), **values}
        if self.run.progress.skipped:
            row["skipped"] = self.run.progress.skipped
        # JSON has no NaN: what is not finite is null.
        row = {name: value if math.isfinite(value) else None for name, value in row.items()}
        try:
            self.metrics.write(json.dumps(row) + "\n")
            self.metrics.flush()
        except OSError as error:
            self._give_up_metrics(error)
        if self.wandb:
            self.wandb.log(row)

    def _give_up_metrics(self, error: OSError) -> None:
        log.error(
            "%s cannot be written (%s); training goes on without it.", self.run.directory / "metrics.jsonl", error
        )
        self.metrics = Path(os.devnull).open("w")  # noqa: SIM115


def plot_losses(metrics: Path) -> Path:
    """Draw the training and validation loss of a metrics.jsonl as loss.png beside it; returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    val = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1)
        axes.plot(steps, _smooth(losses), color="tab:blue", label="training")
    if val:
        axes.plot(*zip(*val, strict=True), "o-", color="tab:orange", label=f"validation, {val[-1][1]:.3f} at the end")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=metrics.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    picture = metrics.with_name("loss.png")
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture


def _smooth(losses: tuple[float, ...], weight: float = 0.9) -> list[float]:
    """An exponential moving average, corrected for its start."""
    smoothed, total, norm = [], 0.0, 0.0
    for loss in losses:
        total, norm = weight * total + (1 - weight) * loss, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def _start_wandb(run: Run):
    """A wandb run, the same after a resume; its own x-axis is our step, so that lines written late are not dropped."""
    import wandb

    config = run.config
    session = wandb.init(
        project=config.wandb.project,
        name=config.wandb.name or run.directory.name,
        group=config.wandb.group,
        dir=str(run.directory),
        mode=config.wandb.mode,
        config=asdict(config),
        id=run.progress.wandb_id,
        resume="allow",
    )
    run.progress.wandb_id = session.id
    session.define_metric("*", step_metric="step")
    return session
