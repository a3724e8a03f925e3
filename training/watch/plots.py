"""loss.png, drawn as the run goes, and heads.png at its end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from model.heads import attention_maps, head_statistics
from runs.metrics import Evaluation, Row
from training.evaluation import first_windows
from training.run import Run
from training.watch import Watcher

log = logging.getLogger("tinygpt")

LEAST_WORK = 50  # times as long as it took to draw loss.png is trained before it is drawn again
PICTURED_TOKENS = 64


class Plots(Watcher):
    """Draws a run's pictures into its directory."""

    name = "drawing"

    next_picture = -math.inf
    """When loss.png may be drawn again, by time.perf_counter()."""

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        if time.perf_counter() >= self.next_picture and run.progress.step != run.max_steps:  # it is drawn at the end
            self.draw_loss(run)

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.draw_loss(run)
        if error is None and not run.is_sharded:
            self.draw_heads(run)

    def draw_loss(self, run: Run) -> None:
        from pages.loss_plot import draw_loss  # matplotlib takes a moment to import

        started = time.perf_counter()
        self.draw(run.directory / "loss.png", lambda path: draw_loss(self.rows, run.directory.name, path))
        self.next_picture = time.perf_counter() + LEAST_WORK * (time.perf_counter() - started)

    def draw_heads(self, run: Run) -> None:
        """Draw every head's weights on the beginning of the validation text."""
        from pages.head_plot import draw_heads

        windows = first_windows(run.model, run.data.val)
        tokens = windows[:1, :PICTURED_TOKENS]
        caption = f"{run.directory.name}, step {run.progress.step:,}: {tokens.size(1)} tokens of validation text"
        maps, statistics = attention_maps(run.model, tokens), head_statistics(run.model, windows)
        self.draw(
            run.directory / "heads.png", lambda path: draw_heads(maps, path, statistics=statistics, caption=caption)
        )

    def draw(self, path: Path, how: Callable[[Path], None]) -> None:
        try:
            how(path)
        except Exception as error:  # whatever it is; the next picture may succeed
            log.error("%s cannot be drawn (%s).", path, error)
