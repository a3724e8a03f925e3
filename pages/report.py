"""Report: the logger that draws report.html, the page of a run, while it trains."""

import logging
import math
import platform
import shlex
import sys
import time
from typing import Any

import tiktoken
import torch

from common.console import is_kernel
from common.files import replace_text
from common.text import visible
from model.heads import for_each_layer
from pages.kit import packed_shares
from pages.runs import RECORD, run_page
from runs.directory import RowFile
from runs.metrics import Row
from runs.origin import commit
from training.evaluation import first_sequences
from training.logger import Logger
from training.run import Run

log = logging.getLogger("tinygpt")
FIRST = 10  # seconds to the first drawing, and the least between two
LEAST_WORK = 100  # the next drawing waits for at least so many times the duration of the last one
MAP_BYTES = 50_000  # for the maps of all heads in one evaluation
MAPPED = 64  # evaluations after which only every second one is mapped


class Report(Logger):
    """Logger that writes samples and attention maps to report.jsonl, and draws report.html."""

    writes = "report.html"

    def __init__(self, run: Run, rows: list[Row]) -> None:
        self.run = run
        self.next_time = time.perf_counter() + FIRST
        self.is_drawn = True
        self.evaluations = sum("val_loss" in row for row in rows)
        self.file = RowFile(run.directory / RECORD, "a" if run.progress.step else "w")
        machine = {"system": platform.platform(terse=True), "python": platform.python_version()}
        self.note(
            command="train() in a notebook" if is_kernel() else shlex.join(["python", *sys.argv]),
            commit=commit(),
            machine=machine | run.computed_on(),
            text=getattr(run.data, "description", run.data.fingerprint),
        )

    def on_step(self) -> None:
        if time.perf_counter() >= self.next_time:
            self.draw()

    def on_row(self, row: Row, sample: str) -> None:
        if "val_loss" in row:
            self.evaluations += 1
            maps = repeated_maps(self.run) if is_mapped(self.evaluations) else {}
            self.note(sample=sample, **maps)

    def on_end(self, error: BaseException | None) -> None:
        self.file.close()
        self.draw()

    def note(self, **values: Any) -> None:
        """Append a line to report.jsonl."""
        self.file.write({"step": self.run.progress.step, **values})

    def draw(self) -> None:
        """Draw the page, and schedule the next drawing: they take at most a hundredth of the run.

        A page that cannot be written, as on a full disk, is drawn anew the next time.
        """
        started = time.perf_counter()
        page = self.run.directory / "report.html"
        content = run_page(self.run.directory)
        try:
            replace_text(page, content)
            self.is_drawn = True
        except OSError as error:
            if self.is_drawn:
                log.error("%s cannot be written (%s): it is drawn anew when it can.", page, error.strerror)
            self.is_drawn = False
        ended = time.perf_counter()
        self.next_time = ended + max(FIRST, LEAST_WORK * (ended - started))


def is_mapped(evaluation: int) -> bool:
    """Return whether an evaluation is mapped: each at first, later every second, then fourth, …"""
    # The interval doubles whenever the number of evaluations does: from MAPPED on 2, from 2 × MAPPED on 4.
    interval = 1 << (evaluation // MAPPED).bit_length()
    return evaluation % interval == 0


def repeated_maps(run: Run) -> dict[str, Any]:
    """Return attention maps of all heads on some validation tokens, repeated once.

    Repetition shows induction heads (Olsson et al. 2022), which attend to the token that followed the first copy.
    "maps" are the packed_shares() of the lower triangles, by layer, head and row.
    """
    config = run.config.model
    windows, _ = first_sequences(run.model, run.data)
    heads = config.n_layer * config.n_head
    # From 8 to 32 tokens: as many as let the triangles of all heads fit into MAP_BYTES.
    size = min(32, max(8, math.isqrt(2 * MAP_BYTES // heads)), config.block_size)
    half = windows[:1, -max(1, size // 2) :]  # the end of a window: its start may begin a document
    tokens = half.repeat(1, 2)[:, :size]  # (1, size)
    triangle = torch.tril_indices(tokens.size(1), tokens.size(1))  # rows and columns
    layers = for_each_layer(run.model, tokens, lambda weights: weights[0].float().cpu().clamp(0, 1))
    triangles = torch.cat([layer[:, *triangle] for layer in layers])  # (heads, size · (size + 1) / 2)
    encoding = run.data.tokenizer
    texts = [name_of(encoding, token) if encoding else str(token) for token in tokens[0].tolist()]
    return {
        "maps": packed_shares(triangles.numpy()),
        "size": len(texts),
        "heads": [len(layer) for layer in layers],
        "tokens": texts,
    }


def name_of(tokenizer: tiktoken.Encoding, token: int) -> str:
    """Return the visible name of a token.

    That is its text; its bytes as ‹E6› if they are part of a character; its id as ‹257› if it has no bytes.
    """
    try:
        content = tokenizer.decode_single_token_bytes(token)
        return visible(content.decode())
    except UnicodeDecodeError:
        return f"‹{content.hex(' ').upper()}›"
    except KeyError:  # of a padded vocabulary
        return f"‹{token}›"
