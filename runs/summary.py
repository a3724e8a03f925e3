"""summary.json: what became of a run, in one small file; a sweep's leaderboard is made of them."""

from __future__ import annotations

import json
import logging
import math
import secrets
from pathlib import Path
from typing import Any

from runs.metrics import finite

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
