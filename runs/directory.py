"""The directory of a run: making and locking it, its settings and logs.

runs/resume.py finds the directory of an earlier run.
"""

import json
import logging
import secrets
from contextlib import ExitStack, suppress
from datetime import datetime
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from common.errors import SettingsError
from common.files import holder_of, locked, pointed, user_path
from common.text import flat

log = logging.getLogger("tinygpt")
YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
TABLE = "leaderboard.csv"  # of a folder of runs
LOGS = ("metrics.jsonl", "report.jsonl", "train.log")

# Settings of one invocation, which a resumed run does not inherit.
OF_THIS_INVOCATION = ("resume", "allow_changes", "init_from", "dry_run", "plan", "run_dir")
# Settings that change nothing in a run's result.
WITHOUT_RESULT = ("resume", "allow_changes", "dry_run", "plan", "run_dir", "wandb", "data.cache_dir")


def make_run_directory(where: str | None) -> Path:
    """Make and return the directory `where`, or a new one under outputs/ for None."""
    directory = user_path("run_dir", where or f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}-{secrets.token_hex(2)}")
    (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory


def written_settings(run: Path) -> dict[str, Any]:
    """Return the settings in a run's config.yaml by dotted names; none if it is unreadable."""
    file = run / "config.yaml"
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        if file.is_file():
            return flat(yaml.load(file.read_text(encoding="utf-8"), YAML))
    return {}


def written_comments(run: Path) -> str:
    """Return the comments that a person wrote into a run's config.yaml, in lines of their own."""
    file = run / "config.yaml"
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        lines = file.read_text(encoding="utf-8").splitlines()
        plain = settings_text(yaml.load("\n".join(lines), YAML)).splitlines()  # a # in a text is no comment
        comments = [line.strip() for line in lines if "#" in line and line not in plain]
        return "".join(f"{line if line.startswith('#') else f'# {line}'}\n" for line in comments)
    return ""


def settings_text(settings: dict[str, Any]) -> str:
    """Return the text of config.yaml."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def trained_settings(run: Path) -> dict[str, Any]:
    """Return the settings in a run's last checkpoint by dotted names; none without one."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        meta = pointed(run / "checkpoints" / "last") / "meta.json"
        return flat(json.loads(meta.read_bytes())["config"]) if meta.is_file() else {}
    return {}


def settings_of_result(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, by dotted names, on which a run's result may depend."""
    others = tuple(f"{name}." for name in WITHOUT_RESULT)
    return {name: value for name, value in settings.items() if not f"{name}.".startswith(others)}


def in_order(name: str, value: Any) -> Any:
    """Return the value of a setting, of freeze sorted: in any order its parts stay as they are."""
    return sorted({*map(str, value)}) if name == "freeze" and isinstance(value, list) else value


def plain_file(file: Path) -> Path:
    """Return a file to write; SettingsError if it is a link, a FIFO or a folder."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise SettingsError(f"{file} is no plain file", "remove it")
    return file


def open_log(file: Path, mode: str) -> IO[str]:
    """Open a log to write; one that goes on begins a line, if a full disk has cut the last."""
    log_file = plain_file(file).open(mode, encoding="utf-8", errors="backslashreplace")
    if mode == "a" and file.read_bytes()[-1:] not in (b"", b"\n"):
        log_file.write("\n")
    return log_file


class RowFile:
    """A log of JSON rows. A disk that is full for a while costs no row, if there is room later."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self.file = open_log(path, mode)
        self.is_full = False

    def write(self, row: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()  # a reader sees it at once
            self.is_full = False
        except OSError as error:  # rows wait in the file's buffer, of some kilobytes, for the next one
            if not self.is_full:
                log.error("%s cannot be written (%s): rows may be lost until it can.", self.path, error.strerror)
            self.is_full = True

    def close(self) -> None:
        self.file.close()


def log_sizes(run: Path) -> dict[str, int]:
    """Return the current sizes of a run's logs, in bytes."""
    return {name: (run / name).stat().st_size for name in LOGS if (run / name).is_file()}


def log_to(directory: Path, collected: MemoryHandler, stack: ExitStack) -> None:
    """Write the collected log, and all that follows, to train.log until the stack is closed.

    An exception that closes the stack is the last entry: the terminal of a long sweep may be gone.
    """
    handler = logging.FileHandler(plain_file(directory / "train.log"), encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))

    def close() -> None:
        with suppress(OSError):  # of a full disk: the run's own error says more
            handler.close()

    stack.callback(close)

    def write_failure(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # a signal's end has a line of its own
            exception = None if isinstance(error, SettingsError) else (type(error), error, trace)
            handler.handle(logging.LogRecord("tinygpt", logging.ERROR, "", 0, "failed: %s", (error,), exception))

    stack.push(write_failure)
    collected.setTarget(handler)  # the next line writes those before it


def lock_run(run: Path, stack: ExitStack, setting: str = "run_dir") -> None:
    """Lock a run's directory until the stack is closed, if its disk has locks.

    Raises SettingsError if another process has locked it.
    """
    try:
        stack.enter_context(locked(plain_file(run / ".lock")))
    except BlockingIOError:
        raise in_use(run, setting) from None


def in_use(run: Path, setting: str) -> SettingsError:
    """Return the error for a directory that another process has locked."""
    holder = holder_of(run / ".lock")
    problem = f"{setting}={run} is in use by a run that is still going on, or that Ctrl-Z halted{holder}"
    return SettingsError(problem, "stop that one first, a halted one by fg and Ctrl-C")
