"""What a run measures, made into rows and told to the loggers: files, the terminal, the page, wandb, TensorBoard.

A Logger that raises is told no more, and the run goes on.
"""

import json
import logging
import statistics
import time
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from common.errors import first_line
from model.heads import head_statistics
from model.size import cache_bytes_per_token, count_parameters, flops_per_token
from pages.report import Report
from runs.directory import open_log
from runs.metrics import Evaluation, Row, finite, is_number, read_metrics
from runs.summary import NUMBERS, Summary, sentence_of, write_summary
from training.device import peak_memory, reset_peak_memory
from training.evaluation import first_windows
from training.run import Logger, Run
from training.terminal import Terminal

log = logging.getLogger("tinygpt")


class MetricsFile(Logger):
    """Appends rows to a run's metrics.jsonl, readable at once."""

    def __init__(self, run: Run) -> None:
        self.file = open_log(run.directory / "metrics.jsonl", "a" if run.progress.step else "w")

    def on_row(self, row: Row, sample: str) -> None:
        self.file.write(json.dumps(finite(row)) + "\n")
        self.file.flush()

    def on_end(self, error: BaseException | None) -> None:
        self.file.close()


class SummaryFile(Logger):
    """Keeps a run's summary.json up to date; training goes on where it cannot be written."""

    def __init__(self, run: Run, rows: list[Row]) -> None:
        self.run, self.rows = run, rows
        reset_peak_memory(run.device)  # a sweep's job is not charged with those before it
        self.write()

    def on_row(self, row: Row, sample: str) -> None:
        if "val_loss" in row:
            self.write()

    def on_end(self, error: BaseException | None) -> None:
        if error is None:
            self.write("finished")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.write("stopped", f"by a signal after step {self.run.progress.step}")
        else:
            self.write("failed", sentence_of(error))

    def write(self, status: str = "running", reason: str | None = None) -> None:
        run, step = self.run, self.run.progress.step
        speeds = [row["tokens_per_s"] for row in self.rows if is_number(row.get("tokens_per_s"))]
        evaluations = [row for row in self.rows if is_number(row.get("val_loss"))]
        best = next((row for row in evaluations if row["step"] == run.progress.best_step), {})
        tokens = step * run.config.tokens_per_step
        summary = Summary(
            status, reason, run.device.type, run.config.seed, step,
            parameters=count_parameters(run.model).total(),
            parameters_in_blocks=sum(p.numel() for block in run.model.blocks for p in block.parameters()),
            tokens=tokens,
            flops=tokens * flops_per_token(run.model),
            seconds=round(run.seconds, 3),
            tokens_per_s=round(statistics.median(speeds), 1) if speeds else None,
            decode_tokens_per_s=None if run.decode_rate is None else round(run.decode_rate, 1),
            cache_bytes_per_token=None if run.is_sharded else round(cache_bytes_per_token(run.model), 1),
            peak_memory_mb=round(peak_memory(run.device) / 1e6, 1),
            **{name: best.get(name) for name in NUMBERS if name.startswith("val_")},
        )  # fmt: skip
        write_summary(run.directory, summary)


class Loggers:
    """The loggers of a run, on the first rank; use it as a context manager around the training."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows = read_metrics(run.directory / "metrics.jsonl") if run.progress.step else []
        self.loggers: list[Logger] = []
        if run.ranks.is_first:
            self.loggers = [MetricsFile(run), SummaryFile(run, self.rows), Report(run, self.rows)]
            asked = {"Wandb": run.config.wandb.active_mode != "disabled", "TensorBoard": run.config.tensorboard}
            for name in filter(asked.get, asked):  # after the page, which wandb is given
                try:
                    self.loggers.append(getattr(import_module(f"training.{name.lower()}"), name)(run))
                except Exception as error:
                    say_lost(name, error)
            self.loggers.append(Terminal(run))  # last, so that what others log at the end goes above its bar

    def __enter__(self) -> Self:
        self.measured = (self.run.progress.step, time.perf_counter())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tell("on_end", error)

    def on_step(self, **measured: float) -> None:
        """Report the step just taken; `measured`, where it is logged: loss, lr and grad_norm.

        Its speed is that of all steps since the report before.
        """
        if measured:
            step, now = self.run.progress.step, time.perf_counter()
            (since, then), self.measured = self.measured, (step, now)
            measured["tokens_per_s"] = (step - since) * self.run.config.tokens_per_step / (now - then)
            self._tell("on_row", self._row(**measured), "")
        self._tell("on_step")

    def on_evaluation(self, result: Evaluation, sample: str) -> None:
        """Report an evaluation, with what every head attends to."""
        if not self.loggers:
            return
        run, figures = self.run, dict[str, Any]()
        if not run.is_sharded:  # else no process has the whole model
            heads = head_statistics(run.model, *first_windows(run.model, run.data))
            figures = {"attention_entropy": heads.entropy, "attention_relative_entropy": heads.relative_entropy}
            figures |= {"attention_distance": heads.distance, "head_similarity": heads.similarity}
            figures = json.loads(json.dumps(figures), parse_float=lambda digits: round(float(digits), 4))
        self._tell("on_row", self._row(**result.figures, **figures), sample)
        self.measured = (run.progress.step, time.perf_counter())  # an evaluation's time is not the training's

    def _row(self, **values: Any) -> Row:
        step, skipped = self.run.progress.step, self.run.progress.skipped
        row = {"step": step, "tokens": step * self.run.config.tokens_per_step, "seconds": round(self.run.seconds, 3)}
        self.rows.append(row | values | ({"skipped": skipped} if skipped else {}))
        return self.rows[-1]

    def _tell(self, what: str, *arguments: Any) -> None:
        for logger in self.loggers[:]:
            try:
                getattr(logger, what)(*arguments)
            except Exception as error:
                say_lost(type(logger).__name__, error)
                self.loggers.remove(logger)
                if what != "on_end":
                    with suppress(Exception):
                        logger.on_end(error)


def say_lost(name: str, error: Exception) -> None:
    log.error("%s failed (%s); training goes on without it.", name, first_line(error))
