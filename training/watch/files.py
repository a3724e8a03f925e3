"""metrics.jsonl and summary.json as they are written."""

from __future__ import annotations

import json
import statistics

from model.size import flops_per_token
from runs.metrics import Evaluation, Row, finite
from runs.summary import is_number, sentence_of, write_summary
from training.memory import peak_memory, reset_peak_memory
from training.run import Run
from training.watch import Watcher


class MetricsFile(Watcher):
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


class Summary(Watcher):
    """Keeps a run's summary.json up to date; training goes on where it cannot be written."""

    name = "summary.json"

    def began(self, run: Run) -> None:
        reset_peak_memory(run.device)  # a sweep's job is not charged with those before it
        self.saved(run)

    def saved(self, run: Run) -> None:
        self.write(run, "running")

    def ended(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            self.write(run, "finished")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.write(run, "stopped", f"by a signal after step {run.progress.step}")
        else:
            self.write(run, "failed", sentence_of(error))

    def write(self, run: Run, status: str, reason: str | None = None) -> None:
        tokens = run.progress.step * run.config.tokens_per_step
        speeds = [row["tokens_per_s"] for row in self.rows if is_number(row.get("tokens_per_s"))]
        evaluations = [row for row in self.rows if is_number(row.get("val_loss"))]
        best = min(evaluations, key=lambda row: row["val_loss"], default={})
        values = {
            "status": status,
            "reason": reason,
            "seed": run.config.seed,
            "step": run.progress.step,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "tokens": tokens,
            "flops": tokens * flops_per_token(run.model),
            "seconds": round(run.seconds, 3),
            "tokens_per_s": round(statistics.median(speeds), 1) if speeds else None,
            "device": run.device.type,
            "peak_memory_mb": round(peak_memory(run.device) / 1e6, 1),
            **{name: best.get(name) for name in ("val_loss", "val_bpb")},
        }
        write_summary(run.directory, values)
