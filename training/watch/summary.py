"""summary.json as it is written: what has become of a run so far."""

from __future__ import annotations

import statistics

from model.size import flops_per_token
from runs.metrics import Evaluation, Row
from runs.summary import is_number, sentence_of, write_summary
from training.memory import peak_memory, reset_peak_memory
from training.run import Run
from training.watch import Watcher


class Summary(Watcher):
    """Keeps a run's summary.json up to date; training goes on where it cannot be written."""

    name = "summary.json"

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def began(self, run: Run) -> None:
        self.flops_per_token = flops_per_token(run.model)
        self.parameters = sum(parameter.numel() for parameter in run.model.parameters())
        reset_peak_memory(run.device)  # a sweep's job is not charged with those before it
        self.write(run)

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        self.write(run)

    def saved(self, run: Run) -> None:
        self.write(run)

    def ended(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            self.write(run, "finished")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.write(run, "stopped", f"by a signal after step {run.progress.step}")
        else:
            self.write(run, "failed", sentence_of(error))

    def write(self, run: Run, status: str = "running", reason: str | None = None) -> None:
        step = run.progress.step
        tokens = step * run.config.tokens_per_step
        speeds = [row["tokens_per_s"] for row in self.rows if is_number(row.get("tokens_per_s"))]
        evaluations = [row for row in self.rows if is_number(row.get("val_loss"))]
        best = min(evaluations, key=lambda row: row["val_loss"], default={})
        values = {
            "status": status,
            "reason": reason,
            "seed": run.config.seed,
            "step": step,
            "parameters": self.parameters,
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "seconds": round(run.seconds, 3),
            "tokens_per_s": round(statistics.median(speeds), 1) if speeds else None,
            "device": run.device.type,
            "peak_memory_mb": round(peak_memory(run.device) / 1e6, 1),
            "val_loss": best.get("val_loss"),
            "val_bpb": best.get("val_bpb"),
        }
        write_summary(run.directory, values)
