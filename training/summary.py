"""summary.json: what became of a run, in one small file; a sweep's leaderboard is made of them."""

from __future__ import annotations

import json
import logging
import math
import secrets
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.metrics import finite, read_metrics

if TYPE_CHECKING:  # a leaderboard is made without torch
    from training.run import Run

log = logging.getLogger("tinygpt")

NAME = "summary.json"
DONE = ("finished", "pruned")
STATUSES = ("running", "stopped", "failed", *DONE)
NUMBERS = (
    *("seed", "step", "parameters", "tokens", "flops", "seconds", "tokens_per_s", "peak_memory_mb"),
    *("val_loss", "val_bpb"),
)
NOTHING_KNOWN = {
    "status": "running",
    "reason": None,
    "job": None,
    "overrides": [],
    "device": None,
    **dict.fromkeys(NUMBERS),
}


class Summary:
    """Keeps the summary.json of a run up to date; use it as a context manager.

    What is in the file already stays: the sweep's job number and the overrides, which only Hydra knows.
    """

    def __init__(self, run: Run) -> None:
        from model.size import flops_per_token
        from training.memory import reset_peak_memory

        self.run = run
        self.flops_per_token = flops_per_token(run.model)
        self.parameters = sum(parameter.numel() for parameter in run.model.parameters())
        self.best: dict[str, float] = {}
        self.speeds: list[float] = []
        self.bytes_read = 0
        reset_peak_memory(run.device)  # a sweep's job is not charged with those before it

    def __enter__(self) -> Summary:
        self.write("running")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.write("finished")
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.write("stopped", f"by a signal after step {self.run.progress.step}")
        else:
            self.write("pruned" if kind.__name__.endswith("Pruned") else "failed", sentence_of(error))

    def write(self, status: str = "running", reason: str | None = None) -> None:
        """Write summary.json as of now; where it cannot be written training goes on without it."""
        from training.memory import peak_memory

        run, step = self.run, self.run.progress.step
        if not run.ranks.is_first:
            return
        self._read_new_metrics()
        tokens = step * run.config.tokens_per_step
        now = {
            "status": status,
            "reason": reason,
            "seed": run.config.seed,
            "step": step,
            "parameters": self.parameters,
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            "seconds": round(run.seconds, 3),
            "tokens_per_s": round(statistics.median(self.speeds), 1) if self.speeds else None,
            "device": run.device.type,
            "peak_memory_mb": round(peak_memory(run.device) / 1e6, 1),
            "val_loss": self.best.get("val_loss"),
            "val_bpb": self.best.get("val_bpb"),
        }
        write_summary(run.directory, (read_summary(run.directory) or {}) | now)

    def _read_new_metrics(self) -> None:
        metrics = self.run.directory / "metrics.jsonl"
        for row in read_metrics(metrics, self.bytes_read):
            if is_number(row.get("tokens_per_s")):
                self.speeds.append(row["tokens_per_s"])
            loss = row.get("val_loss")
            if is_number(loss) and loss < self.best.get("val_loss", math.inf):
                self.best = row
        self.bytes_read = metrics.stat().st_size if metrics.is_file() else 0


def write_summary(directory: Path, values: dict[str, Any]) -> None:
    """Put `values` in a directory's summary.json, in one step and as strict JSON: what is not finite is null."""
    whole = NOTHING_KNOWN | values
    try:
        replace_file(directory / NAME, json.dumps(finite(whole), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        log.error("%s cannot be written (%s).", directory / NAME, error)


def read_summary(directory: Path) -> dict[str, Any] | None:
    """A directory's summary.json; None where there is none that can be read."""
    try:
        found = json.loads((directory / NAME).read_bytes())
        return NOTHING_KNOWN | found if found["status"] in STATUSES else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_number(value: Any) -> bool:
    """Whether a value from a file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def replace_file(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old one or the new one, whoever else writes it too."""
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def sentence_of(error: BaseException) -> str:
    """One line that says what went wrong."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    kind = type(error).__name__
    return line if isinstance(error, ValueError) and line else f"{kind}: {line}" if line else kind
