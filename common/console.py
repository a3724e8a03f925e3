"""The terminal of a command: Ctrl-C and other signals, and streams that are closed, full or gone."""

import io
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from tqdm import tqdm

from common.text import LogFormatter

log = logging.getLogger("tinygpt")
CONSOLE = logging.StreamHandler()
CONSOLE.setFormatter(LogFormatter())


def print_error(line: str) -> None:
    """Print a line to stderr, if anybody can read it."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def show_log() -> logging.Handler:
    """Print the log to stdout, and return the handler that does it."""
    CONSOLE.stream = sys.stdout  # setStream() would flush the one before, which may be closed
    log.addHandler(CONSOLE)
    return CONSOLE


def in_notebook() -> bool:
    """Return whether a Jupyter kernel shows what is printed."""
    return "ipykernel" in sys.modules


def progress_bar(is_shown: bool = True, **options: Any) -> "tqdm[NoReturn]":
    """Return a tqdm bar as wide as the terminal is at the time; none in a sweep's worker or on a dumb terminal."""
    is_hidden = not is_shown or parent_process() is not None
    disable = False if in_notebook() else os.environ.get("TERM") == "dumb" or None  # None: if stderr is no terminal
    return tqdm(disable=is_hidden or disable, dynamic_ncols=True, **options)


def ending_signals() -> list[int]:
    """Return this system's signals that ask for an orderly end; nohup's wish to ignore SIGHUP is kept."""
    closing = [getattr(signal, name) for name in ("SIGHUP", "SIGBREAK") if hasattr(signal, name)]
    return [signal.SIGINT, signal.SIGTERM, *(one for one in closing if signal.getsignal(one) != signal.SIG_IGN)]


class Signals:
    """Remembers the signal that asks for an orderly end, until somebody looks; Ctrl-C then ends at once."""

    def __init__(self, passed_on: bool = False) -> None:
        """passed_on: whether one Ctrl-C comes twice, because torchrun passes on what the terminal sends to all."""
        self.received = 0
        """The signal; 0 for none."""
        self.passed_on = passed_on

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
        self.earlier = {number: signal.signal(number, self._remember) for number in ending_signals() if is_main}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        if self.received and not error:  # too late for this run, but a sweep ends here
            raise SystemExit(128 + self.received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.passed_on:
            if self.received and in_notebook():
                raise KeyboardInterrupt  # the kernel, with all that the notebook holds, goes on
            if self.received:
                os._exit(128 + number)  # a checkpoint that is being written then counts as absent
            print_error("\nfinishing this step, then saving; Ctrl-C again leaves at once")
        self.received = max(self.received, number)


def open_console() -> None:
    """Give every standard stream something to write to or read from, whatever characters it knows."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by >&-; no file of ours may get its number
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    logging.raiseExceptions = False  # a message that nobody can read is no reason for a traceback


def close_console() -> None:
    """Write what is left to be printed, or else drop it: Python would complain at its exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
