"""Those that watch a run: its metrics.jsonl, pictures and summary.json, Weights & Biases, the terminal."""

from __future__ import annotations

from runs.metrics import Evaluation, Row
from training.run import Run


class Watcher:
    """Is told how a run goes. One that raises is told no more, and the run goes on."""

    name: str
    """What the person loses then."""

    def __init__(self, rows: list[Row]) -> None:
        """rows: all of the run so far, those from before it was resumed too; what is measured is appended to it."""
        self.rows = rows

    def began(self, run: Run) -> None:
        """The run is about to take its first step in this process."""

    def stepped(self, run: Run, row: Row) -> None:
        """A step was logged; `row` is its line of metrics.jsonl."""

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        """The model was evaluated and wrote `sample`, "" where it was not asked to."""

    def saved(self, run: Run) -> None:
        """A checkpoint was written, or is being written."""

    def ended(self, run: Run, error: BaseException | None) -> None:
        """The run is over in this process: at its end, or by `error`."""
