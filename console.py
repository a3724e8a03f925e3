"""The terminal of a command: what is done when it is closed, full or gone, and when Ctrl-C is typed in it.

The commands import this first: from here on Ctrl-C ends in one line, while the rest is imported too.
"""

import io
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

INTERRUPTED = "stopped by Ctrl-C"


def end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As sys.excepthook, with one line and status 130 for Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    say(INTERRUPTED)
    os._exit(130)


if Path(sys.argv[0]).parent == Path(__file__).parent:  # one of our commands, and not a program that uses us
    sys.excepthook = end_at_once


def say(line: str) -> None:
    """Print a line to stderr, if anybody can read it."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def ending_signals() -> list[int]:
    """Return the signals that ask for an orderly end; nohup's wish to ignore SIGHUP is kept."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


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
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
