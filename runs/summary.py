"""summary.json: what became of a run. job.json: which job of a sweep a folder holds, and why it failed."""

import json
import logging
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.files import replace_text
from errors import SettingsError, first_line
from runs.metrics import finite

log = logging.getLogger("tinygpt")
NAME, JOB = "summary.json", "job.json"
STATUSES = ("running", "stopped", "failed", "finished")
LOSSES = ["val_loss", "val_bpb", "val_bpb_stderr", "val_accuracy"]
NUMBERS = ["seed", "step", "parameters", "tokens", "flops", "seconds", "tokens_per_s", "peak_memory_mb", *LOSSES]
NUMBERS += ["decode_tokens_per_s", "cache_bytes_per_token", "parameters_in_blocks"]
NOTHING_KNOWN: dict[str, Any] = {"status": "running", "reason": None, "device": None, **dict.fromkeys(NUMBERS)}


def write_summary(directory: Path, values: dict[str, Any]) -> None:
    """Write `values` as a directory's summary.json: strict JSON, null for what is unknown or not finite."""
    text = json.dumps(finite(NOTHING_KNOWN | values), indent=2, allow_nan=False) + "\n"
    try:
        replace_text(directory / NAME, text)
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
    line = first_line(error)
    return f"{line}." if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


@dataclass
class JobRecord:
    """What job.json holds."""

    number: int
    overrides: list[str]
    reason: str | None = None
    """Why the latest attempt failed, in one line."""

    def write(self, folder: Path) -> None:
        if os.environ.get("RANK", "0") == "0":
            replace_text(folder / JOB, json.dumps(asdict(self), indent=2) + "\n")


def read_job(folder: Path) -> JobRecord | None:
    """Return a folder's job.json; None where there is none that can be read."""
    try:
        found = json.loads((folder / JOB).read_bytes())
        return JobRecord(int(found["number"]), [str(o) for o in found["overrides"]], found["reason"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


def begin_job(folder: Path, number: int, overrides: list[str]) -> float | None:
    """Write job.json, unless the folder's run is finished: then return its validation loss in nats per token."""
    record, summary = read_job(folder), read_summary(folder)
    if summary or has_checkpoints(folder):
        if record is None or sorted(record.overrides) != sorted(overrides):
            before = f"`{' '.join(record.overrides)}`" if record else "unknown settings (no job.json)"
            remedy = "remove it, or give the sweep another folder by hydra.sweep.dir=FOLDER"
            raise SettingsError(f"{folder} holds a run of {before}, not of `{' '.join(overrides)}`: {remedy}.")
        if summary and summary["status"] == "finished":
            log.info("job %d is finished already: validation loss %s", number, summary["val_loss"])
            return float("inf") if summary["val_loss"] is None else summary["val_loss"]
    JobRecord(number, overrides).write(folder)
    return None


def fail_job(folder: Path, error: BaseException) -> None:
    """Record in job.json why the job failed."""
    if record := read_job(folder):
        replace(record, reason=sentence_of(error)).write(folder)


def has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*"))


def device_of_job(device: str, number: int) -> str:
    """Return the device of job `number` of those that share the machine: auto and cuda are dealt out in turn."""
    import torch  # commands that only print something do not wait for it

    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if device in ("auto", "cuda") and count > 1 else device
