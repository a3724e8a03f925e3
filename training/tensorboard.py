"""TensorBoard, beside our own files."""

from torch.utils.tensorboard import SummaryWriter

from runs.metrics import Evaluation, Row, scalars
from training.run import Run


class TensorBoard:
    """A run's figures and samples, in tensorboard/ of its directory; a resumed run hides what it trains again."""

    def __init__(self, run: Run) -> None:
        self.writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=run.progress.step + 1)

    def on_step(self, row: Row | None) -> None:
        if row:
            for name, value in scalars(row):
                self.writer.add_scalar(name, value, row["step"])

    def on_evaluation(self, row: Row, result: Evaluation, sample: str) -> None:
        self.on_step(row)
        if sample:
            self.writer.add_text("sample", sample, row["step"])

    def on_end(self, error: BaseException | None) -> None:
        self.writer.close()
