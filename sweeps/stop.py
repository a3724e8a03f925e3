"""The end of a sweep in joblib's processes: a signal ends each job like a single run.

joblib kills its processes, even while they save, if an exception reaches it in one of them or in this process. So no
exception may: this process sends SIGTERM to the workers and waits for them, and a worker returns from a job that a
signal ends.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from common.console import Signals, ending_signals

STOPS: list[Any] = []
"""The signals that this worker has received: after one it begins no other job."""


def launch_stoppable(launch: Callable[..., Any], jobs: Sequence[Sequence[str]], number: int) -> Any:
    """Return the results of jobs in joblib's workers.

    A signal ends the jobs first, then raises SystemExit. launch: the method of joblib's launcher. number: the number of
    the first job.
    """
    # joblib has no public call that starts its tracker before its workers (tried with 1.6.0).
    from joblib.externals.loky.backend import resource_tracker as joblibs  # type: ignore[import-untyped]

    waiting = list(jobs)
    done = threading.Event()

    def pass_on() -> None:
        while not done.wait(0.2):  # repeatedly, because joblib may start further workers
            if stop.received:
                waiting.clear()  # joblib takes the next job from here
                for worker in multiprocessing.active_children():
                    worker.terminate()

    with Signals(passed_on=True) as stop:
        # The sender starts before the signals are blocked, so that one thread receives them. Workers inherit the mask:
        # a signal waits until their first job. Trackers inherit it too, but the thread that starts one loses it.
        sender = threading.Thread(target=pass_on)
        sender.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
        joblibs.ensure_running()
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
        try:
            return launch(waiting, initial_job_idx=number)
        except Exception:
            if stop.received:  # a second Ctrl-C has ended the workers
                return []  # not to the caller: leaving Signals raises SystemExit
            raise
        finally:
            done.set()
            sender.join()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())


def run_stoppable(job: Callable[[Any], Any], config: Any) -> Any:
    """Return the result of a job in a worker.

    It is None if a signal ends this job or has ended an earlier one.
    """
    is_running = True

    def end(number: int, frame: FrameType | None) -> None:
        STOPS.append(number)
        if is_running and len(STOPS) == 1:
            raise SystemExit(128 + number)

    # Handlers stay after the job: threads that it has left, as torch's, do not block the signals.
    for number in ending_signals():
        signal.signal(number, end)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())
        return None if STOPS else job(config)
    except SystemExit as stop:
        STOPS.append(stop)
    finally:
        is_running = False
