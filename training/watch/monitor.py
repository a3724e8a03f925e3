"""Watching a run: the progress bar, metrics.jsonl, pictures, the terminal and, when asked for, wandb."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from model.heads import HeadStatistics, attention_maps, head_statistics
from runs.metrics import Evaluation, MetricsLog, read_metrics
from training.evaluation import first_windows
from training.run import Run
from training.watch.terminal_plot import print_losses
from training.watch.wandb import WandbLog

log = logging.getLogger("tinygpt")

LEAST_WORK = 50  # how many times as long as drawing loss.png took is trained before it is drawn again
PICTURED_TOKENS = 64


class Monitor:
    """Reports a run as it goes; use it as a context manager.

    The run's directory gets metrics.jsonl, one JSON object a line, loss.png, and heads.png when it is
    finished. Of several processes only the first reports.
    """

    def __init__(self, run: Run) -> None:
        config, progress = run.config, run.progress
        self.run = run
        self.silent = not run.ranks.is_first
        metrics = None if self.silent else run.directory / "metrics.jsonl"
        self.metrics = MetricsLog(metrics, append=progress.step > 0)
        bar = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm(
            total=run.max_steps,
            initial=progress.step,
            unit="step",
            disable=self.silent or parent_process() is not None or None,  # None: no bar unless on a terminal
            bar_format=bar if run.max_steps else "{n_fmt} steps [{elapsed}{postfix}]",
        )
        self.redirect = logging_redirect_tqdm([log])  # log lines go above the bar instead of through it
        self.measured = (progress.step, time.perf_counter())
        self.reported = (progress.step, progress.skipped)
        self.next_picture = time.perf_counter()
        self.wandb = None if self.silent or config.wandb.mode == "disabled" else WandbLog(run)

    def __enter__(self) -> Monitor:
        self.redirect.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *trace: Any) -> None:
        self.redirect.__exit__(kind, error, *trace)
        self.bar.close()
        self.metrics.close()
        try:
            self.draw_loss()
        finally:
            if self.wandb:
                self.wandb.picture(self.run.directory / "loss.png", self.run.progress.step)
                self.wandb.finish(exit_code=exit_status(error))

    def step(self, step: int, *, loss: float, lr: float, grad_norm: float) -> None:
        """Report the update that made `step` finished updates."""
        skipped = self.run.progress.skipped
        last_step, last_skipped = self.reported
        if skipped > last_skipped:
            log.warning(
                "step %d: %d of the last %d steps changed nothing, because loss or gradient was not finite",
                *(step, skipped - last_skipped, step - last_step),
            )
        self.reported = (step, skipped)
        now = time.perf_counter()
        since, then = self.measured
        speed = (step - since) * self.run.config.tokens_per_step / (now - then)
        self.measured = (step, now)
        self._write(step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=speed)
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed / 1000:.1f}k tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)

    def evaluation(self, step: int, result: Evaluation, sample: str) -> None:
        """Report an evaluation after `step` updates, with a text that the model wrote."""
        heads = self.heads()
        self._write(step, val_loss=result.loss, val_bpb=result.bpb, **head_columns(heads))
        log.info(
            "step %d: validation loss %.4f nats/token, perplexity %s, %.4f bits/byte",
            *(step, result.loss, f"{result.perplexity:.{'1f' if result.perplexity < 1e6 else '2e'}}", result.bpb),
        )
        if sample:
            log.info("%s", "\n".join("  │ " + line for line in sample.splitlines()))
            if self.wandb:
                self.wandb.sample(step, self.run.config.sample_prompt, sample)
        is_last = step == self.run.max_steps  # after which it is drawn anyway
        if time.perf_counter() >= self.next_picture and not is_last:
            self.draw_loss()
        self.measured = (step, time.perf_counter())  # an evaluation's time is not the training's

    def heads(self) -> HeadStatistics | None:
        """Figures of the heads on the same validation windows each time; None where no process has the whole model."""
        if self.silent or self.run.is_sharded:
            return None
        return head_statistics(self.run.model, first_windows(self.run.model, self.run.data.val))

    def finish(self) -> None:
        """Draw the heads of the finished model, and its losses in the terminal."""
        if self.silent:
            return
        self.bar.close()
        self.draw_heads()
        print_losses(read_metrics(self.run.directory / "metrics.jsonl"))

    def draw_loss(self) -> None:
        """Draw loss.png from metrics.jsonl."""
        if self.silent:
            return
        from pages.loss_plot import draw_loss  # matplotlib takes a moment to import

        started = time.perf_counter()
        self._draw(
            "loss.png",
            lambda path: draw_loss(read_metrics(path.with_name("metrics.jsonl")), self.run.directory.name, path),
        )
        self.next_picture = time.perf_counter() + LEAST_WORK * (time.perf_counter() - started)

    def draw_heads(self) -> None:
        """Draw heads.png: every head's weights on the beginning of the validation text."""
        if (statistics := self.heads()) is None:
            return
        from pages.head_plot import draw_heads

        tokens = first_windows(self.run.model, self.run.data.val)[:1, :PICTURED_TOKENS]
        maps = attention_maps(self.run.model, tokens)
        caption = (
            f"{self.run.directory.name}, step {self.run.progress.step:,}: {tokens.size(1)} tokens of validation text"
        )
        self._draw("heads.png", lambda path: draw_heads(maps, path, statistics=statistics, caption=caption))
        if self.wandb:
            self.wandb.picture(self.run.directory / "heads.png", self.run.progress.step)

    def _draw(self, name: str, draw: Callable[[Path], None]) -> None:
        path = self.run.directory / name
        try:
            draw(path)
        except Exception as error:  # whatever it is, no picture is worth a run
            log.error("%s cannot be drawn (%s).", path, error)

    def _write(self, step: int, **values: float | list) -> None:
        tokens, seconds = step * self.run.config.tokens_per_step, round(self.run.seconds, 3)
        row = {"step": step, "tokens": tokens, "seconds": seconds, **values}
        if self.run.progress.skipped:
            row["skipped"] = self.run.progress.skipped
        self.metrics.write(row)
        if self.wandb:
            self.wandb.log(row)


def head_columns(heads: HeadStatistics | None) -> dict[str, list]:
    """The figures of the heads as metrics.jsonl has them."""
    if heads is None:
        return {}
    return {
        "attention_entropy": rounded(heads.entropy),
        "attention_relative_entropy": rounded(heads.relative_entropy),
        "attention_distance": rounded(heads.distance),
        "head_similarity": rounded(heads.similarity),
    }


def rounded(numbers: Any) -> Any:
    """Numbers, or lists of them, with the four digits that are worth reading."""
    if isinstance(numbers, list):
        return [rounded(number) for number in numbers]
    return None if numbers is None else round(numbers, 4)


def exit_status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return int(error is not None)
