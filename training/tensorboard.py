"""TensorBoard, beside our own files."""

from runs.metrics import Row, scalars
from training.logger import Logger
from training.run import Run


class TensorBoard(Logger):
    """A run's figures and samples, in tensorboard/ of its directory; a resumed run hides what it trains again."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.progress.step + 1)

    def on_row(self, row: Row, sample: str) -> None:
        for name, value in scalars(row):
            self.writer.add_scalar(name, value, row["step"])
        if sample:
            self.writer.add_text("sample", sample, row["step"])

    def on_end(self, error: BaseException | None) -> None:
        self.writer.close()
