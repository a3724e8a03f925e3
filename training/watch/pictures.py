"""What a run draws of itself: loss.png, heads.png and report.html."""

import json
import logging
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.files import replace_text
from model.heads import attention_maps, for_each_layer, head_statistics
from pages.kit import packed_shares
from pages.runs import RECORD, run_page
from pages.text import name_of
from runs.metrics import Evaluation, Row
from training.evaluation import first_windows
from training.run import Run

log = logging.getLogger("tinygpt")

LEAST_WORK = 100  # times as long as drawing took is trained before the same is drawn again
PICTURED_TOKENS = 64
MAP_BYTES = 50_000  # of an evaluation, for the maps of all heads
MAPPED = 64  # evaluations until fewer are mapped


class Drawing:
    """Draws at evaluations for at most a hundredth of the time; a drawing that fails does not end the run."""

    next_time = -math.inf  # by time.perf_counter()

    def draw(self, path: Path, how: Callable[[Path], None], *, now: bool = False) -> None:
        if now or time.perf_counter() >= self.next_time:
            started = time.perf_counter()
            try:
                how(path)
            except Exception as error:  # whatever it is; the next picture may succeed
                log.error("%s cannot be drawn (%s).", path, error)
            self.next_time = time.perf_counter() + LEAST_WORK * (time.perf_counter() - started)


class Plots(Drawing):
    """Draws a run's pictures into its directory."""

    name = "drawing"

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        if run.progress.step != run.max_steps:  # it is drawn at the end
            self.draw_loss(run)

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.draw_loss(run, now=True)
        if error is None and not run.is_sharded:
            self.draw_heads(run)

    def draw_loss(self, run: Run, now: bool = False) -> None:
        def how(path: Path) -> None:
            from pages.loss_plot import draw_loss  # matplotlib takes a moment to import

            draw_loss(run.rows, run.directory.name, path)

        self.draw(run.directory / "loss.png", how, now=now)

    def draw_heads(self, run: Run) -> None:
        from pages.heads_plot import draw_heads

        windows, starts = first_windows(run.model, run.data)
        tokens = windows[:1, :PICTURED_TOKENS]
        caption = f"{run.directory.name}, step {run.progress.step:,}: {tokens.size(1)} tokens held out"
        maps, figures = attention_maps(run.model, tokens), head_statistics(run.model, windows, starts)
        how = partial(draw_heads, maps, statistics=figures, caption=caption)
        self.draw(run.directory / "heads.png", how, now=True)


class Report(Drawing):
    """Notes in report.jsonl what only this moment knows, and draws report.html of all that the directory holds."""

    name = "report.html"

    def began(self, run: Run) -> None:
        self.file = (run.directory / RECORD).open("a" if run.progress.step else "w", encoding="utf-8")
        self.note(run, command=shlex.join(["python", *sys.argv]), commit=commit(), machine=machine(run))
        self.evaluations = sum("val_loss" in row for row in run.rows)
        self.draw_page(run)

    def evaluated(self, run: Run, row: Row, result: Evaluation, sample: str) -> None:
        self.evaluations += 1
        maps = repeated_maps(run) if is_mapped(self.evaluations) and not run.is_sharded else {}
        self.note(run, sample=sample, **maps)
        self.draw_page(run)

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.file.close()
        self.draw_page(run, now=True)

    def note(self, run: Run, **values: Any) -> None:
        self.file.write(json.dumps({"step": run.progress.step, **values}) + "\n")
        self.file.flush()

    def draw_page(self, run: Run, now: bool = False) -> None:
        self.draw(run.directory / self.name, lambda path: replace_text(path, run_page(run.directory)), now=now)


def is_mapped(evaluation: int) -> bool:
    """Whether the maps of this evaluation are kept: all of the first, then every second, fourth, … of twice as many."""
    return evaluation % (1 << max(0, (evaluation // MAPPED).bit_length())) == 0


def repeated_maps(run: Run) -> dict[str, Any]:
    """Return maps of all heads over some validation text, twice: where an induction head shows
    (Olsson et al. 2022), for it looks at what followed its token the first time.

    The maps, by layer and head, are the lower triangles by rows, as packed_shares() has weights from 0 to 1.
    """
    config, (windows, _) = run.config.model, first_windows(run.model, run.data)
    heads = config.n_layer * config.n_head
    size = min(32, max(8, math.isqrt(2 * MAP_BYTES // heads)), config.block_size)
    half = windows[:1, -max(1, size // 2) :]  # not the first ones: with them a document begins
    tokens = half.repeat(1, 2)[:, :size]
    rows, columns = torch.tril_indices(tokens.size(1), tokens.size(1)).tolist()
    layers = for_each_layer(run.model, tokens, lambda weights: weights[0].float().cpu().clamp(0, 1))
    maps = packed_shares(torch.cat([layer[:, rows, columns] for layer in layers]).numpy())
    ids, encoding = tokens[0].tolist(), run.data.tokenizer
    texts = [name_of(encoding, i) if encoding else str(i) for i in ids]
    return {"maps": maps, "size": len(texts), "heads": [len(layer) for layer in layers], "tokens": texts}


def machine(run: Run) -> dict[str, Any]:
    """Return what the run computes on, in words."""
    device = run.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    here = {"system": platform.platform(terse=True), "processor": name, "python": platform.python_version()}
    return here | run.computed_on()


def commit() -> str | None:
    """Return the commit of this checkout, "-dirty" after it when files have changed; None where git knows none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
