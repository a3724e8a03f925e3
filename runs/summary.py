"""summary.json, the outcome of a run, and job.json, the job of a sweep in a folder."""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from common.errors import SettingsError, first_line
from common.files import replace_text
from runs.metrics import Row, finite, is_number

log = logging.getLogger("tinygpt")
NAME = "summary.json"
JOB = "job.json"
STATUSES = ("running", "stopped", "failed", "finished")
PLACE = ("step", "tokens", "flops", "seconds")  # of a row of metrics.jsonl in its run


@dataclass(kw_only=True)
class Summary:
    """The outcome of a run; None for an unknown figure."""

    status: str = "running"
    """running, stopped, failed or finished."""
    reason: str | None = None
    """The reason why the run stopped or failed, in one line."""
    device: str | None = None
    commit: str | None = None
    project_hash: str | None = None
    """The hash of the project's code, see runs/origin.py."""
    code_hash: str | None = None
    """The hash of the file of code= and its neighbours."""
    text_hash: str | None = None
    """The hash of the tokens of a text, see data/prepare.py."""
    weights_hash: str | None = None
    """The hash of the weights that init_from brought."""
    computed_in: str | None = None
    """The type of the products, which precision=auto chooses by the machine."""
    earlier_settings: str | None = None
    """Settings and code that earlier steps had and later ones have not: the run was resumed with others."""
    seed: float | None = None
    threads: float | None = None
    """The threads of a run on a CPU, on which its last bits depend."""
    step: float | None = None
    parameters: float | None = None
    parameters_in_blocks: float | None = None
    tokens: float | None = None
    """Tokens trained on so far."""
    flops: float | None = None
    seconds: float | None = None
    tokens_per_s: float | None = None
    """The median of the training speeds."""
    decode_tokens_per_s: float | None = None
    cache_bytes_per_token: float | None = None
    peak_memory_mb: float | None = None
    best_step: float | None = None
    """The step of the best evaluation."""
    val_loss: float | None = None
    """Figure of that evaluation, as all that begin with val_."""
    val_bpb: float | None = None
    val_bpb_stderr: float | None = None
    val_accuracy: float | None = None
    val_tokens: float | None = None
    """The number of targets, or answers, of these figures."""
    learned: float | None = None
    """The share of what is held out that the weights had learned in earlier runs; None below what is told."""

    @property
    def scored(self) -> float | None:
        """The bytes of text behind these figures, times ln 2; in a task the answers."""
        if self.val_bpb and self.val_loss and self.val_tokens:
            return round(self.val_loss * self.val_tokens / self.val_bpb)
        return self.val_tokens

    def at_last(self, rows: list[Row]) -> Self:
        """Return this at the last row of metrics.jsonl, which may be later than summary.json."""
        last = rows[-1] if rows else {}
        return replace(self, **{name: last[name] for name in PLACE if is_number(last.get(name))})

    @property
    def objective(self) -> float:
        """The figure that a sweeper may minimise: bits per byte, or the loss of a task.

        Losses of tokens do not compare between tokenizers. inf if there is neither.
        """
        figure = self.val_loss if self.val_bpb is None else self.val_bpb
        return math.inf if figure is None else figure


@dataclass
class JobRecord:
    """The job of a sweep that a folder holds."""

    number: int
    overrides: list[str]
    reason: str | None = None
    """The reason why the latest attempt failed, in one line."""


TEXTS = [field.name for field in fields(Summary) if field.type == str | None]
NUMBERS = [field.name for field in fields(Summary) if field.type == float | None]


def write_summary(directory: Path, summary: Summary) -> None:
    """Write a directory's summary.json: strict JSON, with null for NaN and infinity."""
    try:
        replace_text(directory / NAME, json.dumps(finite(asdict(summary)), indent=2) + "\n")
    except OSError as error:
        log.error("%s cannot be written (%s).", directory / NAME, error.strerror)


def read_summary(directory: Path | str) -> Summary | None:
    """Return a directory's summary.json; None if it is missing or unreadable.

    A value of another type, as of a person's change, is left out.
    """
    found = _read(Path(directory) / NAME)
    known = {name: found[name] for name in ("status", *TEXTS) if isinstance(found.get(name), str)}
    known |= {name: found[name] for name in NUMBERS if is_number(found.get(name))}
    return Summary(**known) if found.get("status") in STATUSES else None


def read_job(folder: Path) -> JobRecord | None:
    """Return a folder's job.json; None if it is missing or unreadable.

    The reason of a failed attempt is left out if the run has finished since, perhaps in another process, as by resume=.
    """
    with suppress(TypeError):
        record = JobRecord(**_read(folder / JOB))
        if not is_record(record):
            return None
        summary = read_summary(folder) if record.reason else None
        return replace(record, reason=None) if summary and summary.status == "finished" else record
    return None


def is_record(job: JobRecord) -> bool:
    """Return whether the values of a job's record have their types."""
    words = [*job.overrides, job.reason or ""] if isinstance(job.overrides, list) else [None]
    return type(job.number) is int and all(isinstance(word, str) for word in words)


def write_job(folder: Path, job: JobRecord) -> None:
    replace_text(folder / JOB, json.dumps(asdict(job), indent=2) + "\n")


def _read(file: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one if it is missing or unreadable."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_bytes()) if file.is_file() else {}
        return found if isinstance(found, dict) else {}
    return {}


def sentence_of(error: BaseException) -> str:
    """Return an error in one line, with its type unless it is a person's mistake (ValueError)."""
    line = first_line(error)
    return f"{line}." if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"


def begin_job(folder: Path, number: int, overrides: list[str]) -> float | None:
    """Write job.json, or return the objective of the folder's run if it is finished."""
    overrides = overrides_of_job(overrides)
    summary = read_summary(folder)
    refuse_other_run(folder, overrides)
    if summary and summary.status == "finished":
        loss = "none" if summary.val_loss is None else summary.val_loss
        log.info("job %d is finished already: validation loss %s", number, loss)
        return summary.objective
    write_job(folder, JobRecord(number, overrides))
    return None


def refuse_other_run(folder: Path, overrides: Sequence[str], runs: int = 1) -> None:
    """Raise SettingsError if a job's folder in a sweep's holds a run of other overrides."""
    record = read_job(folder)
    is_same = record and key_of(record.overrides) == key_of(overrides)
    if not is_same and has_run(folder):
        before = f"`{' '.join(record.overrides)}`" if record else "unknown settings (no job.json)"
        them = f"type its jobs too, or remove its {runs} runs" if runs > 1 else "or remove that run"
        remedy = f"give the sweep another folder by hydra.sweep.dir=FOLDER, {them}"
        problem = f"{folder} holds a run of {before}, not of `{' '.join(overrides_of_job(overrides))}`"
        raise SettingsError(problem, remedy)


def key_of(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return a key that is equal for jobs of the same overrides."""
    return (*sorted(overrides_of_job(overrides)),)


def overrides_of_job(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each name, without allow_changes, which only lets a job go on."""
    last = {override.partition("=")[0]: override for override in overrides}
    return [override for name, override in last.items() if name != "allow_changes"]


def fail_job(folder: Path, error: BaseException) -> None:
    """Record the reason of a job's failure in its job.json."""
    record = read_job(folder)
    if record:
        write_job(folder, replace(record, reason=sentence_of(error)))


def jobs_of_sweep(sweep: Path) -> Iterator[tuple[Path, JobRecord]]:
    """Yield the folders of a sweep's jobs that have begun, with their records.

    Those of another sweep below the folder are left out: a sweep's folder has a .lock.
    """
    for folder in (file.parent for file in sorted(sweep.glob(f"*/**/{JOB}"))):
        between = takewhile(lambda above: above != sweep, folder.parents)
        record = read_job(folder)
        if record and not any((above / ".lock").exists() for above in between):
            yield folder, record


def threads_of_sweep(sweep: Path) -> int | None:
    """Return the threads of the first run in a sweep's folder; None without one on a CPU."""
    for folder, _ in jobs_of_sweep(sweep):
        summary = read_summary(folder)
        if summary and summary.threads:
            return int(summary.threads)
    return None


def has_run(folder: Path) -> bool:
    """Return whether a job's folder holds more than its record."""
    return read_summary(folder) is not None or has_checkpoints(folder)


def has_checkpoints(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*"))
