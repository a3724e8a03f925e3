"""metrics.jsonl as it is written."""

from __future__ import annotations

import json

from runs.metrics import Evaluation, Row, finite
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
