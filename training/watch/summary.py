"""The observer that keeps a run's summary.json up to date."""

from __future__ import annotations

import math
import statistics

from model.size import flops_per_token
from runs.metrics import read_metrics
from runs.summary import is_number, read_summary, sentence_of, write_summary
from training.memory import peak_memory, reset_peak_memory
from training.run import Run


class Summary:
    """Keeps the summary.json of a run up to date; use it as a context manager.

    What is in the file already stays: the sweep's job number and the overrides, which only Hydra knows.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.flops_per_token = flops_per_token(run.model)
        self.parameters = sum(parameter.numel() for parameter in run.model.parameters())
        self.best: dict[str, float] = {}
        self.speeds: list[float] = []
        self.bytes_read = 0
        reset_peak_memory(run.device)  # a sweep's job is not charged with those before it

    def __enter__(self) -> Summary:
        self.write("running")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.write("finished")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.write("stopped", f"by a signal after step {self.run.progress.step}")
        else:
            self.write("pruned" if kind.__name__.endswith("Pruned") else "failed", sentence_of(error))

    def write(self, status: str = "running", reason: str | None = None) -> None:
        """Write summary.json as of now; where it cannot be written training goes on without it."""
        run, step = self.run, self.run.progress.step
        if not run.ranks.is_first:
            return
        self._read_new_metrics()
        tokens = step * run.config.tokens_per_step
        now = {
            "status": status,
            "reason": reason,
            "seed": run.config.seed,
            "step": step,
            "parameters": self.parameters,
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "seconds": round(run.seconds, 3),
            "tokens_per_s": round(statistics.median(self.speeds), 1) if self.speeds else None,
            "device": run.device.type,
            "peak_memory_mb": round(peak_memory(run.device) / 1e6, 1),
            "val_loss": self.best.get("val_loss"),
            "val_bpb": self.best.get("val_bpb"),
        }
        write_summary(run.directory, (read_summary(run.directory) or {}) | now)

    def _read_new_metrics(self) -> None:
        metrics = self.run.directory / "metrics.jsonl"
        for row in read_metrics(metrics, self.bytes_read):
            if is_number(row.get("tokens_per_s")):
                self.speeds.append(row["tokens_per_s"])
            loss = row.get("val_loss")
            if is_number(loss) and loss < self.best.get("val_loss", math.inf):
                self.best = row
        self.bytes_read = metrics.stat().st_size if metrics.is_file() else 0
