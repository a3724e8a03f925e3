"""The console of a command: signals, a progress bar, and streams that may be closed or full."""

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tqdm import tqdm

from common.text import StreamFormatter, for_stream

log = logging.getLogger("tinygpt")
log.setLevel(logging.INFO)  # of train.log's lines, whatever a program that calls train() shows

CONSOLE = logging.StreamHandler()
LINES = StreamFormatter(lambda: CONSOLE.stream)
CONSOLE.setFormatter(LINES)


def say(text: object, end: str = "\n") -> None:
    """Print a text to stdout at once: as it is to a file or a pipe, visible() to a terminal."""
    print(for_stream(text, sys.stdout), end=end, flush=True)


def print_error(line: str) -> None:
    """Print a line to stderr, if anybody can read it."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def show_log(job: int | None = None) -> logging.Handler:
    """Print the log to stdout, and return the handler that prints it.

    job: the number that begins each line from here on, of a job that runs beside others.
    """
    LINES.job = LINES.job if job is None else job
    # Not by setStream(): it would flush the stream before, which may be closed.
    CONSOLE.stream = sys.stdout
    log.addHandler(CONSOLE)
    return CONSOLE


def is_kernel() -> bool:
    """Return whether this process is a notebook's kernel, whose arguments nobody typed."""
    return in_notebook() and "kernel_launcher" in sys.argv[0]


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel."""
    return "ipykernel" in sys.modules


class Bar(tqdm):
    """A tqdm bar that leaves nothing in the process: it starts no thread.

    Its lock is for threads alone. That of tqdm is for processes too, and fixes how multiprocessing starts them.
    """

    monitor_interval = 0

    @classmethod
    @contextmanager
    def external_write_mode(cls, file: Any = None, nolock: bool = False) -> Iterator[None]:
        """Clear the bars, let somebody write a line, and draw them again below it.

        The line leaves its stream before: a notebook shows stdout and stderr in the order in which they are flushed.
        """
        with super().external_write_mode(file, nolock):
            yield
            if file or sys.stdout:  # which may be None
                (file or sys.stdout).flush()


Bar.set_lock(threading.RLock())


def lacks_width() -> bool:
    """Return whether stderr is a terminal of 0 columns, as in some containers: no bar fits."""
    with suppress(OSError, ValueError, AttributeError):  # no terminal, closed, or none at all
        return os.get_terminal_size(sys.stderr.fileno()).columns == 0
    return False


def progress_bar(**options: Any) -> Bar:
    """Return a bar, hidden in a sweep's worker and on a terminal that is dumb or has no width.

    It is also hidden by tqdm's own variable, TQDM_DISABLE=1.
    """
    is_hidden = parent_process() is not None or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
    # None lets tqdm hide the bar if stderr is no terminal, which a notebook's never is.
    disable = False if in_notebook() else os.environ.get("TERM") == "dumb" or lacks_width() or None
    # Without its thread a bar must ask for the time at each update, or it would stand still when steps become slow.
    # It is drawn once a second: a notebook keeps each drawing, and ten a second, tqdm's default, are 14 MB an hour.
    return Bar(disable=is_hidden or disable, dynamic_ncols=True, miniters=1, mininterval=1, **options)


def ending_signals() -> list[int]:
    """Return the signals that ask for an orderly end.

    Among them are those by which Slurm and other schedulers warn before a limit, unless somebody else handles them.
    SIGHUP is not under nohup, which ignores it.
    """
    closing = [getattr(signal, name) for name in ("SIGHUP", "SIGBREAK") if hasattr(signal, name)]
    return [
        signal.SIGINT,
        signal.SIGTERM,
        *(one for one in closing if signal.getsignal(one) != signal.SIG_IGN),
        *(one for one in warnings_of_schedulers() if signal.getsignal(one) in (signal.SIG_DFL, exit_on_signal)),
    ]


def warnings_of_schedulers() -> list[int]:
    """Return the signals by which schedulers warn before a limit, of those that the system has."""
    return [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)]


def signals_of_submitit() -> list[int]:
    """Return the signals at which submitit ends this process and queues its job again."""
    handlers = {one: signal.getsignal(one) for one in warnings_of_schedulers()}
    return [one for one, handler in handlers.items() if str(getattr(handler, "__module__", "")).startswith("submitit.")]


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal by SystemExit with the status that a shell gives it."""
    raise SystemExit(128 + number)


LONGEST_SAVE = 30  # seconds after which a process without a parent ends, saved or not


@cache
def end_with_parent(parent: int | None = None) -> None:
    """Stop this process, as by SIGTERM, when its parent is gone, even if that one was killed.

    parent: its number, by default that of the present one. On Windows a process keeps the number of a parent that is
    gone, so nothing happens there.
    """
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        # The first one makes a run save; a later one ends a worker that waits for another job, or has begun it.
        for _ in range(LONGEST_SAVE):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        os._exit(1)  # checkpoints are atomic: an unfinished one is absent

    threading.Thread(target=watch, name="parent", daemon=True).start()


class Signals:
    """Records the signals of ending_signals() for the loop; a second Ctrl-C ends at once.

    It records those of submitit too, which gets them once the run is saved.
    """

    def __init__(self, passed_on: bool = False) -> None:
        """passed_on: whether torchrun passes signals on, so that one Ctrl-C arrives twice."""
        self.received = 0
        """The number of the signal; 0 for none."""
        self.passed_on = passed_on

    def __enter__(self) -> Self:
        # Python lets only the main thread set handlers.
        is_main = threading.current_thread() is threading.main_thread()
        self.of_submitit = signals_of_submitit() if is_main else []
        taken = [*ending_signals(), *self.of_submitit] if is_main else []
        self.earlier = {number: signal.signal(number, self._remember) for number in taken}
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        # Once a rank has died, torchrun sends the others SIGTERM. One that fails too goes on to record that signal,
        # which would end it before it has told its error.
        if self.passed_on and kind is not None and issubclass(kind, Exception):
            self.earlier.pop(signal.SIGTERM, None)
        for number, handler in self.earlier.items():
            if handler is not None:  # of a library, in C: Python can neither name it nor set it again
                signal.signal(number, handler)
        requeue = self.earlier.get(self.received)
        if self.received in self.of_submitit and callable(requeue) and (kind is None or issubclass(kind, SystemExit)):
            requeue(self.received, None)
        # The signal came too late to stop this run, but it ends a sweep.
        if self.received and not kind:
            raise SystemExit(128 + self.received)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.passed_on:
            if self.received and in_notebook():
                raise KeyboardInterrupt  # keeps the kernel and its variables
            if self.received:
                os._exit(128 + number)  # checkpoints are atomic: an unfinished one is absent
            print_error("\nfinishing this step, then saving; Ctrl-C again leaves at once")
        self.received = max(self.received, number)


def open_console() -> None:
    """Replace closed standard streams by the null device, and let stdout print any character.

    A file or a pipe gets UTF-8 and the line ends as they are, on every system.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # Closed by the shell, as in >&-. A file that we open would get the stream's descriptor.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
        if not sys.stdout.isatty():
            # A person's PYTHONIOENCODING chooses another encoding.
            encoding = None if os.environ.get("PYTHONIOENCODING") else "utf-8"
            sys.stdout.reconfigure(encoding=encoding, errors="replace", newline="\n")
    logging.raiseExceptions = False  # a log message that cannot be printed prints no traceback


def close_console() -> None:
    """Flush stdout and stderr; drop the rest if that fails, lest Python complain at its exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
