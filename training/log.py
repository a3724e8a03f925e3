"""The loggers of a run, which get its measurements in rows.

A failing logger is dropped; training continues.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from common.errors import CheckpointError, first_line
from model.heads import head_statistics
from model.size import cache_bytes_per_token, count_parameters, flops_per_token
from runs.checkpoint import read_meta
from runs.directory import RowFile
from runs.metrics import Evaluation, Row, finite, is_number, read_metrics
from runs.origin import PROJECT_HASH, commit
from runs.summary import NUMBERS, Summary, sentence_of, write_summary
from training.device import peak_memory, reset_peak_memory, run_eagerly
from training.evaluation import first_sequences
from training.logger import Logger
from training.run import Run
from training.terminal import Terminal
from training.wandb import Wandb

log = logging.getLogger("tinygpt")
GONE = (
    "%s was moved or removed while the run trains: measurements and log stay with it, "
    "checkpoints, page and summary are written to %s anew."
)


class MetricsFile(Logger):
    """Appends rows to a run's metrics.jsonl."""

    writes = "metrics.jsonl"

    def __init__(self, run: Run) -> None:
        self.path = run.directory / "metrics.jsonl"
        self.file = RowFile(self.path, "a" if run.progress.step else "w")
        self.is_gone = False

    def on_row(self, row: Row, sample: str) -> None:
        self.file.write(finite(row))
        if not self.is_gone and not self.path.exists():
            self.is_gone = True
            log.warning(GONE, self.path, self.path.parent)

    def on_end(self, error: BaseException | None) -> None:
        self.file.close()


class SummaryFile(Logger):
    """Keeps a run's summary.json up to date."""

    writes = "summary.json"

    def __init__(self, run: Run, rows: list[Row]) -> None:
        self.run = run
        self.rows = rows
        reset_peak_memory(run.device)  # earlier jobs of a sweep in this process do not count
        with run_eagerly(run.compiled):  # one token has another shape, which would compile
            self.cache_bytes = round(cache_bytes_per_token(run.model), 1)
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
        run = self.run
        step = run.progress.step
        speeds = [row["tokens_per_s"] for row in self.rows if is_number(row.get("tokens_per_s"))]
        best = self.best_evaluation()
        # The outcome so far, in the order of Summary.
        summary = Summary(
            status=status,
            reason=reason,
            device=run.device.type,
            commit=commit(),
            project_hash=PROJECT_HASH,
            code_hash=run.config.code_hash,
            text_hash=run.text_hash,
            weights_hash=run.progress.begun_with,
            computed_in=run.precision,
            earlier_settings=run.progress.earlier_settings,
            seed=run.config.seed,
            threads=torch.get_num_threads() if run.device.type == "cpu" else None,
            step=step,
            parameters=count_parameters(run.model).total(),
            parameters_in_blocks=sum(p.numel() for p in run.model.blocks.parameters()),
            tokens=run.tokens,
            flops=run.tokens * flops_per_token(run.model),
            seconds=round(run.seconds, 3),
            tokens_per_s=round(statistics.median(speeds), 1) if speeds else None,
            decode_tokens_per_s=None if run.decode_rate is None else round(run.decode_rate, 1),
            cache_bytes_per_token=self.cache_bytes,
            peak_memory_mb=round(peak_memory(run.device) / 1e6, 1),
            best_step=best.get("step"),
            **{name: best.get(name) for name in NUMBERS if name.startswith("val_")},
            learned=run.learned_share,
        )
        write_summary(run.directory, summary)

    def best_evaluation(self) -> Row:
        """Return the figures of the best evaluation; {} if there is none.

        Its checkpoint has them too, if metrics.jsonl has lost its row.
        """
        progress = self.run.progress
        # The latest row of its step: the one before may be of another text, from which a run went on.
        for row in reversed(self.rows):
            if row["step"] == progress.best_step and is_number(row.get("val_loss")):
                return row
        with suppress(CheckpointError):
            saved = read_meta(self.run.directory / "checkpoints" / f"step_{progress.best_step}").progress
            if saved.is_evaluated and saved.best_loss == progress.best_loss:
                return {"step": saved.step, **saved.metrics}
        return {}


class Loggers:
    """The loggers of a run, on the first rank; a context manager around the training."""

    def __init__(self, run: Run, *more: Callable[[Run, list[Row]], Logger]) -> None:
        """more: functions of the run and its earlier rows that return loggers from other packages."""
        self.run = run
        self.rows = read_metrics(run.directory / "metrics.jsonl") if run.progress.step else []
        self.flops_per_token = flops_per_token(run.model)
        self.loggers: list[Logger] = []
        if run.ranks.is_first:
            self.loggers = [MetricsFile(run), SummaryFile(run, self.rows), *(logger(run, self.rows) for logger in more)]
            # wandb comes after the page, which it uploads at the end. The terminal comes last: messages of the others
            # then stand above its bar.
            if run.config.wandb.active_mode != "disabled":
                # The run trains without wandb if that cannot be made.
                try:
                    self.loggers.append(Wandb(run))
                except Exception as error:
                    log_failure(Wandb, error)
            self.loggers.append(Terminal(run))

    def __enter__(self) -> Self:
        self.last_report = (self.run.progress.step, time.perf_counter())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *trace: object) -> None:
        self._call("on_end", error)

    def on_step(self, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Report the step just taken; its numbers are read from the device if it is logged."""
        if self.run.logs_step:
            # The speed is the mean since the last report.
            numbers = {"loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
            step = self.run.progress.step
            now = time.perf_counter()
            last_step, then = self.last_report
            self.last_report = (step, now)
            speed = (step - last_step) * self.run.config.tokens_per_step / (now - then)
            self._call("on_row", self._row(**numbers, tokens_per_s=speed), "")
        self._call("on_step")

    def on_evaluation(self, result: Evaluation, sample: str) -> None:
        """Report an evaluation, with statistics of the attention of every head."""
        if not self.loggers:
            return
        run = self.run
        heads = head_statistics(run.model, *first_sequences(run.model, run.data))
        figures: dict[str, Any] = {
            "attention_entropy": heads.entropy,
            "attention_relative_entropy": heads.relative_entropy,
            "attention_distance": heads.distance,
            "head_similarity": heads.similarity,
        }
        # Round the numbers in nested lists, by way of JSON.
        figures = json.loads(json.dumps(figures), parse_float=lambda digits: round(float(digits), 4))
        self._call("on_row", self._row(**result.figures, **figures), sample)
        # The time of the evaluation does not count for the speed of training.
        self.last_report = (run.progress.step, time.perf_counter())

    def _row(self, **values: Any) -> Row:
        run = self.run
        step = run.progress.step
        flops = run.tokens * self.flops_per_token
        row = {"step": step, "tokens": run.tokens, "flops": flops, "seconds": round(run.seconds, 3)} | values
        if run.progress.skipped:
            row["skipped"] = run.progress.skipped
        self.rows.append(row)
        return row

    def _call(self, callback: str, *arguments: Any) -> None:
        for logger in self.loggers[:]:
            try:
                getattr(logger, callback)(*arguments)
            except Exception as error:
                log_failure(type(logger), error, ends=callback == "on_end")
                self.loggers.remove(logger)
                if callback != "on_end":
                    with suppress(Exception):
                        logger.on_end(error)


def log_failure(logger: type[Logger], error: Exception, ends: bool = False) -> None:
    goes_on = "" if ends else "; training goes on without it"
    log.error("%s failed (%s)%s.", logger.writes, first_line(error), goes_on)
