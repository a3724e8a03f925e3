"""Logger: the callbacks of the training loop. Files, the terminal, the page, wandb and TensorBoard are loggers."""

from runs.metrics import Row


class Logger:
    """Callbacks of the training loop."""

    def on_step(self) -> None:
        """Called after each step."""

    def on_row(self, row: Row, sample: str) -> None:
        """Called with each row of metrics.jsonl; the row of an evaluation may come with a sample of the model."""

    def on_end(self, error: BaseException | None) -> None:
        """Called at the end of the run, with the exception that ends it."""
