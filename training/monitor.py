"""Watching a run: the progress bar, metrics.jsonl, loss.png and, when asked for, wandb."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from training.config import TrainConfig
from training.evaluation import Evaluation

log = logging.getLogger("tinygpt")


class Monitor:
    """Reports a run as it goes; use it as a context manager.

    run_dir: gets metrics.jsonl, one JSON object a line, and loss.png.
    """

    def __init__(self, config: TrainConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir
        self.tokens_per_step = config.batch_size * config.model.block_size
        self.metrics = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self.wandb = _start_wandb(config, run_dir) if config.wandb.mode != "disabled" else None
        self.bar = tqdm(
            total=config.max_steps,
            unit="step",
            disable=None,  # no bar where the output is not a terminal
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]",
        )
        self.redirect = logging_redirect_tqdm()  # log lines go above the bar instead of through it
        self.started = self.last_time = time.perf_counter()
        self.last_step = 0

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
        self.metrics.flush()
        picture = plot_losses(self.run_dir / "metrics.jsonl")
        if self.wandb:
            import wandb

            self.wandb.log({"loss.png": wandb.Image(str(picture)), "step": self.bar.total})
        return picture

    def _write(self, step: int, **values: float) -> None:
        seconds = round(time.perf_counter() - self.started, 3)
        row = {"step": step, "tokens": step * self.tokens_per_step, "seconds": seconds, **values}
        self.metrics.write(json.dumps(row) + "\n")
        self.metrics.flush()
        if self.wandb:
            self.wandb.log(row)


def plot_losses(metrics: Path) -> Path:
    """Draw the training and validation loss of a metrics.jsonl as loss.png beside it; returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    val = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
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


def _start_wandb(config: TrainConfig, run_dir: Path):
    """A wandb run; its own x-axis is our step, so that lines written late are not dropped."""
    import wandb

    run = wandb.init(
        project=config.wandb.project,
        name=config.wandb.name or run_dir.name,
        group=config.wandb.group,
        dir=str(run_dir),
        mode=config.wandb.mode,
        config=asdict(config),
    )
    run.define_metric("*", step_metric="step")
    return run
