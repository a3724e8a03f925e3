"""summary.json: what became of a run, in one small file; a sweep's leaderboard is made of them."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from data.files import replacing
from errors import first_line
from runs.metrics import finite

log = logging.getLogger("tinygpt")

NAME = "summary.json"
DONE = ("finished",)
STATUSES = ("running", "stopped", "failed", *DONE)
NUMBERS = (
    *("seed", "step", "parameters", "tokens", "flops", "seconds", "tokens_per_s", "peak_memory_mb"),
    *("val_loss", "val_bpb"),
)
NOTHING_KNOWN: dict[str, Any] = {"status": "running", "reason": None, "device": None, **dict.fromkeys(NUMBERS)}


def write_summary(directory: Path, values: dict[str, Any]) -> None:
    """Write `values` as a directory's summary.json: strict JSON, null for what is unknown or not finite."""
    text = json.dumps(finite(NOTHING_KNOWN | values), indent=2, allow_nan=False) + "\n"
    try:
        with replacing(directory / NAME) as unfinished:
            unfinished.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        log.error("%s cannot be written (%s).", directory / NAME, error)


def read_summary(directory: Path) -> dict[str, Any] | None:
    """Return a directory's summary.json; None where there is none that can be read."""
    try:
        found = json.loads((directory / NAME).read_bytes())
        return NOTHING_KNOWN | found if found["status"] in STATUSES else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_number(value: Any) -> bool:
    """Whether a value from a file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def sentence_of(error: BaseException) -> str:
    """One line that says what went wrong; a mistake of a person's needs no name of its type."""
    line, kind = first_line(error), type(error).__name__
    if line == kind:
        return kind
    return f"{line}." if isinstance(error, ValueError) else f"{kind}: {line}"
