"""The end of a sweep whose jobs joblib's processes run: a signal ends each job as it ends a single run.

joblib kills its processes when an exception reaches it, in one of them or here, whatever they are saving. So none does:
this process sends SIGTERM to the others and waits, and they return the exception that ended a job as its value.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from console import Signals, ending_signals

ENDS: list[SystemExit] = []
"""What has ended this worker's job: it begins no other one."""


def is_stoppable(launcher: str) -> bool:
    """Return whether a launcher's jobs run in joblib's processes, where a signal can wait; Windows has no masks."""
    return launcher == "joblib" and hasattr(signal, "pthread_sigmask")


@contextmanager
def signals_passed_on() -> Iterator[Signals]:
    """Send SIGTERM to joblib's workers once a signal asks this process to end; raise SystemExit when they are done."""
    from joblib.externals.loky.backend import resource_tracker as joblibs  # type: ignore[import-untyped]

    done = threading.Event()

    def pass_on() -> None:
        while not done.wait(0.2):  # again and again, for workers that have started meanwhile
            for worker in multiprocessing.active_children() if stop.received else ():
                worker.terminate()

    with Signals(passed_on=True) as stop:  # a second Ctrl-C ends the workers, and with them this
        sender = threading.Thread(target=pass_on)
        sender.start()  # before the signals are blocked, so that one thread receives them
        # Workers inherit the mask: before their first job a signal waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
        for tracker in (joblibs, resource_tracker):  # inherit it too; the thread that starts them loses it
            tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
        try:
            yield stop
        except Exception:
            if stop.received:
                raise SystemExit(128 + stop.received) from None
            raise
        finally:
            done.set()
            sender.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class UntilStopped(list[Any]):
    """Jobs that joblib takes one by one, no more of them once a signal has come."""

    def __init__(self, jobs: Iterable[Any], stop: Signals) -> None:
        super().__init__(jobs)
        self.stop = stop

    def __iter__(self) -> Iterator[Any]:
        return takewhile(lambda _: not self.stop.received, super().__iter__())


def run_stoppable(job: Callable[[], Any]) -> Any:
    """Return what a job returns in a worker, or the SystemExit that a signal has brought to it or to an earlier job."""
    is_running = True

    def end(number: int, frame: FrameType | None) -> None:
        if not ENDS:
            ENDS.append(SystemExit(128 + number))
            if is_running:
                raise ENDS[0]

    for number in ending_signals():
        signal.signal(number, end)  # and after the job: threads that it has left do not block signals
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
        if not ENDS:
            return job()
    except SystemExit as stop:
        ENDS.append(stop)
    finally:
        is_running = False
    return ENDS[0]
