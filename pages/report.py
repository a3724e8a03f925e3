"""Report: the logger that draws report.html, the page of a run, while it trains."""

import json
import math
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common.files import replace_text
from model.heads import for_each_layer
from pages.kit import packed_shares
from pages.runs import RECORD, run_page
from pages.text import name_of
from runs.directory import open_log
from runs.metrics import Row
from training.evaluation import first_windows
from training.logger import Logger
from training.run import Run

FIRST = 10  # seconds until the page is drawn, and at least until it is drawn again
LEAST_WORK = 100  # times the time of drawing, at least until it is drawn again
MAP_BYTES = 50_000  # of an evaluation, for the maps of all heads
MAPPED = 64  # evaluations until fewer are mapped


class Report(Logger):
    """Writes command, machine, samples and maps to report.jsonl, and draws report.html from the run's directory."""

    def __init__(self, run: Run, rows: list[Row]) -> None:
        self.run = run
        self.next_time = time.perf_counter() + FIRST
        self.evaluations = sum("val_loss" in row for row in rows)
        self.file = open_log(run.directory / RECORD, "a" if run.progress.step else "w")
        text, cuda = getattr(run.data, "description", run.data.fingerprint), run.device.type == "cuda"
        machine = {"system": platform.platform(terse=True), "python": platform.python_version()}
        machine["processor"] = torch.cuda.get_device_name(run.device) if cuda else platform.machine()
        command = shlex.join(["python", *sys.argv])
        self.note(command=command, commit=commit(), machine=machine | run.computed_on(), text=text)

    def on_step(self) -> None:
        if time.perf_counter() >= self.next_time:
            self.draw()

    def on_row(self, row: Row, sample: str) -> None:
        if "val_loss" in row:
            self.evaluations += 1
            maps = repeated_maps(self.run) if is_mapped(self.evaluations) and not self.run.is_sharded else {}
            self.note(sample=sample, **maps)

    def on_end(self, error: BaseException | None) -> None:
        self.file.close()
        self.draw()

    def note(self, **values: Any) -> None:
        self.file.write(json.dumps({"step": self.run.progress.step, **values}) + "\n")
        self.file.flush()

    def draw(self) -> None:
        """Draw the page, and set the time of the next drawing: they take at most a hundredth of the run."""
        started = time.perf_counter()
        replace_text(self.run.directory / "report.html", run_page(self.run.directory))
        ended = time.perf_counter()
        self.next_time = ended + max(FIRST, LEAST_WORK * (ended - started))


def is_mapped(evaluation: int) -> bool:
    """Return whether the maps of this evaluation are kept: all of the first, then every second, fourth, … of twice as
    many."""
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


def commit() -> str | None:
    """Return the commit of this checkout, "-dirty" after it when files have changed; None where git knows none."""
    root = Path(__file__).parents[1]  # a copy without .git may lie in another repository
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", "describe"]
    command += ["--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
