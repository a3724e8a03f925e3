"""What a run measures, made into rows of metrics.jsonl and told to its watchers."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from errors import first_line
from model.heads import HeadStatistics, head_statistics
from runs.metrics import Evaluation, Row, read_metrics
from training.evaluation import first_windows
from training.run import Run
from training.watch import Watcher
from training.watch.files import MetricsFile, Summary
from training.watch.plots import Plots
from training.watch.terminal import Terminal
from training.watch.wandb import Wandb

log = logging.getLogger("tinygpt")


class Watchers:
    """The watchers of a run, on the first rank; use it as a context manager around the training."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows = read_metrics(run.directory / "metrics.jsonl") if run.progress.step else []
        # The terminal comes last, so that what the others log at the end goes above its bar.
        kinds: list[type[Watcher]] = [MetricsFile, Plots, Wandb, Summary, Terminal]
        if run.config.wandb.mode == "disabled":
            kinds.remove(Wandb)
        self.watchers = [kind(self.rows) for kind in kinds] if run.ranks.is_first else []

    def __enter__(self) -> Watchers:
        self._tell("began")
        self.measured = (self.run.progress.step, time.perf_counter())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tell("ended", error)

    def stepped(self, **measured: float) -> None:
        """Report the step just taken: its loss, lr and grad_norm; its speed is that of all since the report before."""
        step, now = self.run.progress.step, time.perf_counter()
        since, then = self.measured
        self.measured = (step, now)
        measured["tokens_per_s"] = (step - since) * self.run.config.tokens_per_step / (now - then)
        self._tell("stepped", self._row(**measured))

    def evaluated(self, result: Evaluation, sample: str) -> None:
        """Report an evaluation, with a text that the model wrote."""
        if not self.watchers:
            return
        heads = {}
        if not self.run.is_sharded:  # else no process has the whole model
            model = self.run.model
            heads = head_columns(head_statistics(model, first_windows(model, self.run.data.val)))
        self._tell("evaluated", self._row(val_loss=result.loss, val_bpb=result.bpb, **heads), result, sample)
        self.measured = (self.run.progress.step, time.perf_counter())  # an evaluation's time is not the training's

    def saved(self) -> None:
        """Report that the run has saved its state."""
        self._tell("saved")

    def _row(self, **values: Any) -> Row:
        step, skipped = self.run.progress.step, self.run.progress.skipped
        row = {"step": step, "tokens": step * self.run.config.tokens_per_step, "seconds": round(self.run.seconds, 3)}
        self.rows.append(row | values | ({"skipped": skipped} if skipped else {}))
        return self.rows[-1]

    def _tell(self, what: str, *arguments: Any) -> None:
        for watcher in self.watchers[:]:
            try:
                getattr(watcher, what)(self.run, *arguments)
            except Exception as error:
                log.error("%s failed (%s); training goes on without it.", watcher.name, first_line(error))
                self.watchers.remove(watcher)
                if what != "ended":
                    with suppress(Exception):
                        watcher.ended(self.run, error)


def head_columns(heads: HeadStatistics) -> dict[str, list]:
    """Return the figures of the heads as metrics.jsonl has them."""
    return {
        "attention_entropy": _rounded(heads.entropy),
        "attention_relative_entropy": _rounded(heads.relative_entropy),
        "attention_distance": _rounded(heads.distance),
        "head_similarity": _rounded(heads.similarity),
    }


def _rounded(numbers: Any) -> Any:
    if isinstance(numbers, list):
        return [_rounded(number) for number in numbers]
    return None if numbers is None else round(numbers, 4)
