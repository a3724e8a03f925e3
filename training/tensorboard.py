"""Logger for TensorBoard."""

from runs.metrics import Row, scalars
from training.logger import Logger
from training.run import Run


class TensorBoard(Logger):
    """Writes a run's figures and samples into tensorboard/ of its directory."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional

        # A run that was killed trains the steps after its checkpoint again: purge their figures.
        self.writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.progress.step + 1)

    def on_row(self, row: Row, sample: str) -> None:
        for name, value in scalars(row):
            self.writer.add_scalar(name, value, row["step"])
        if sample:
            self.writer.add_text("sample", sample, row["step"])

    def on_end(self, error: BaseException | None) -> None:
        self.writer.close()
