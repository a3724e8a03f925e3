"""Logger: the callbacks of the training loop.

Files, the terminal, the page and wandb are loggers.
"""

from typing import ClassVar

from runs.metrics import Row


class Logger:
    """Callbacks of the training loop."""

    writes: ClassVar[str]
    """The name of its file or service, for messages."""

    def on_step(self) -> None:
        """Called after each step."""

    def on_row(self, row: Row, sample: str) -> None:
        """Called with each row of metrics.jsonl; `sample` is "" except for some evaluations."""

    def on_end(self, error: BaseException | None) -> None:
        """Called at the end of the run, with the exception that ended it, if any."""
