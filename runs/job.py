"""job.json: which job of a sweep a folder holds, and why it failed."""

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from data.files import replacing
from errors import SettingsError
from runs.summary import DONE, read_summary, sentence_of

log = logging.getLogger("tinygpt")

NAME = "job.json"


@dataclass
class JobRecord:
    """What job.json holds."""

    number: int
    overrides: list[str]
    reason: str | None = None
    """Why the latest attempt failed, in one line."""

    def write(self, folder: Path) -> None:
        if os.environ.get("RANK", "0") == "0":
            with replacing(folder / NAME) as file:
                file.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_job(folder: Path) -> JobRecord | None:
    """Return a folder's job.json; None where there is none that can be read."""
    try:
        found = json.loads((folder / NAME).read_bytes())
        return JobRecord(int(found["number"]), [str(o) for o in found["overrides"]], found["reason"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


def begin_job(folder: Path, number: int, overrides: list[str]) -> float | None:
    """Write job.json, unless the folder's run is finished: then return its validation loss in nats per token.

    Raises SettingsError when the folder holds a run of other overrides.
    """
    record, summary = read_job(folder), read_summary(folder)
    if summary or has_checkpoints(folder):
        if record is None or sorted(record.overrides) != sorted(overrides):
            before = f"`{' '.join(record.overrides)}`" if record else "unknown settings (no job.json)"
            raise SettingsError(
                f"{folder} holds a run of {before}, not of `{' '.join(overrides)}`: remove it, or give the sweep "
                "another folder by hydra.sweep.dir=FOLDER."
            )
        if summary and summary["status"] in DONE:
            log.info("job %d is finished already: %s bits/byte", number, summary["val_bpb"])
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
