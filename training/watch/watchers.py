"""What a run measures, made into rows and told to those that watch it.

A watcher has the methods it needs of began(run), moved(run) after every step, stepped(run, row) where one is logged,
evaluates(run), evaluated(run, row, result, sample), saved(run) and ended(run, error). One that raises is told no more,
and the run goes on; its `name` says what is lost then.
"""

import json
import logging
import statistics
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from errors import first_line
from model.heads import head_statistics
from model.size import cache_bytes_per_token, count_parameters, flops_per_token
from runs.metrics import Evaluation, Row, finite, read_metrics
from runs.summary import LOSSES, is_number, sentence_of, write_summary
from training.device import peak_memory, reset_peak_memory
from training.evaluation import first_windows
from training.run import Run
from training.watch.pictures import Plots, Report
from training.watch.terminal import Terminal
from training.watch.wandb import Wandb

log = logging.getLogger("tinygpt")


class MetricsFile:
    """Appends rows to a run's metrics.jsonl, readable at once."""

    name = "metrics.jsonl"

    def began(self, run: Run) -> None:
        self.file = (run.directory / self.name).open("a" if run.progress.step else "w", encoding="utf-8")

    def stepped(self, run: Run, row: Row) -> None:
        self.file.write(json.dumps(finite(row)) + "\n")
        self.file.flush()

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        self.stepped(run, row)

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.file.close()


class Summary:
    """Keeps a run's summary.json up to date; training goes on where it cannot be written."""

    name = "summary.json"

    def began(self, run: Run) -> None:
        reset_peak_memory(run.device)  # a sweep's job is not charged with those before it
        self.saved(run)

    def saved(self, run: Run, status: str = "running", reason: str | None = None) -> None:
        tokens = run.progress.step * run.config.tokens_per_step
        speeds = [row["tokens_per_s"] for row in run.rows if is_number(row.get("tokens_per_s"))]
        evaluations = [row for row in run.rows if is_number(row.get("val_loss"))]
        best = min(evaluations, key=lambda row: row["val_loss"], default={})
        values = {
            "status": status,
            "reason": reason,
            "seed": run.config.seed,
            "step": run.progress.step,
            "parameters": count_parameters(run.model).total(),
            "parameters_in_blocks": sum(p.numel() for block in run.model.blocks for p in block.parameters()),
            "tokens": tokens,
            "flops": tokens * flops_per_token(run.model),
            "seconds": round(run.seconds, 3),
            "tokens_per_s": round(statistics.median(speeds), 1) if speeds else None,
            "decode_tokens_per_s": None if run.decode_rate is None else round(run.decode_rate, 1),
            "cache_bytes_per_token": round(cache_bytes_per_token(run.model), 1),
            "device": run.device.type,
            "peak_memory_mb": round(peak_memory(run.device) / 1e6, 1),
            **{name: best.get(name) for name in LOSSES},
        }
        write_summary(run.directory, values)

    def ended(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            self.saved(run, "finished")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.saved(run, "stopped", f"by a signal after step {run.progress.step}")
        else:
            self.saved(run, "failed", sentence_of(error))


class Watchers:
    """The watchers of a run, on the first rank; use it as a context manager around the training."""

    def __init__(self, run: Run) -> None:
        self.run = run
        run.rows = read_metrics(run.directory / "metrics.jsonl") if run.progress.step else []
        wandb = [Wandb()] if run.config.wandb.active_mode != "disabled" else []
        # The terminal comes last, so that what the others log at the end goes above its bar.
        watchers = [MetricsFile(), Plots(), *wandb, Summary(), Report(), Terminal()]
        self.watchers: list[Any] = watchers if run.ranks.is_first else []

    def __enter__(self) -> Self:
        self.tell("began")
        self.measured = (self.run.progress.step, time.perf_counter())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.tell("ended", error)

    def stepped(self, **measured: float) -> None:
        """Report the step just taken: its loss, lr and grad_norm; its speed is that of all since the report before."""
        step, now = self.run.progress.step, time.perf_counter()
        (since, then), self.measured = self.measured, (step, now)
        measured["tokens_per_s"] = (step - since) * self.run.config.tokens_per_step / (now - then)
        self.tell("stepped", self._row(**measured))

    def evaluated(self, result: Evaluation, sample: str) -> None:
        """Report an evaluation, with a text that the model wrote."""
        if not self.watchers:
            return
        model, figures = self.run.model, dict[str, Any]()
        if not self.run.is_sharded:  # else no process has the whole model
            heads = head_statistics(model, *first_windows(model, self.run.data))
            figures = {"attention_entropy": heads.entropy, "attention_relative_entropy": heads.relative_entropy}
            figures |= {"attention_distance": heads.distance, "head_similarity": heads.similarity}
            figures = json.loads(json.dumps(figures), parse_float=lambda digits: round(float(digits), 4))
        self.tell("evaluated", self._row(**result.figures, **figures), result, sample)
        self.measured = (self.run.progress.step, time.perf_counter())  # an evaluation's time is not the training's

    def _row(self, **values: Any) -> Row:
        step, skipped = self.run.progress.step, self.run.progress.skipped
        row = {"step": step, "tokens": step * self.run.config.tokens_per_step, "seconds": round(self.run.seconds, 3)}
        self.run.rows.append(row | values | ({"skipped": skipped} if skipped else {}))
        return self.run.rows[-1]

    def tell(self, what: str, *arguments: Any) -> None:
        """Call the method `what` of every watcher that has it."""
        for watcher in self.watchers[:]:
            try:
                if method := getattr(watcher, what, None):
                    method(self.run, *arguments)
            except Exception as error:
                log.error("%s failed (%s); training goes on without it.", watcher.name, first_line(error))
                self.watchers.remove(watcher)
                if what != "ended":
                    with suppress(Exception):
                        watcher.ended(self.run, error)
