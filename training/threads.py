"""The threads of a run on a CPU, which shares the cores with other programs."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common import machine
from common.text import plural
from common.threads import Load, thread_limit, threads_asked

LOAD = Load()
SHORTEST = 0.3  # seconds over which other programs are watched
IMPORTED_BY = os.getpid()
"""The process that imported this; a fork of it, as by multiprocessing, has another number."""


@contextmanager
def threads_of_run(kept: int | None) -> Iterator[str]:
    """Let torch take the cores that other programs leave; yield a note for the line `run`.

    kept: the number of a run that is resumed, or of the runs with which this one is compared, for threads decide the
    last bits. OMP_NUM_THREADS goes first, but for OMP_THREAD_LIMIT. A forked process has one thread, also afterwards:
    it would wait forever for those of the process that it copies, which are not copied.
    """
    before = torch.get_num_threads()
    limit = thread_limit() or sys.maxsize
    threads = min(before, limit)
    asked = threads_asked()
    note = ""
    if is_fork():
        note = " with 1 thread, for this process is a fork: start it by spawn for more" if threads > 1 else ""
        threads = before = 1
    elif asked is None:
        if kept is None:
            others = cores_of_others()
            if round(others) and before > 1:
                threads = max(1, min(threads, machine.processors()) - round(others))
                note = f" with {threads} of {before} threads, for other programs use {others:.1f} cores"
        elif kept <= min(limit, machine.processors()):
            threads = kept
            if threads != before:
                of = f" of {before}" if threads < before else ""  # torch may take fewer than there are
                note = f" with {threads}{of} threads, as before"
    elif asked != threads:
        note = f" with {plural(threads, 'thread')}: OMP_NUM_THREADS={asked} {why_not(asked, threads)}"
    torch.set_num_threads(threads)
    try:
        yield note
    finally:
        torch.set_num_threads(before)


def why_not(asked: int, before: int) -> str:
    """Return why torch has `before` threads where OMP_NUM_THREADS asks for another number."""
    limit = thread_limit()
    if limit and limit < asked:
        return f"is more than OMP_THREAD_LIMIT={limit}"
    of_mkl = os.environ.get("MKL_NUM_THREADS", "").strip()
    given = int(of_mkl) if of_mkl.isascii() and of_mkl.isdecimal() else None  # torch takes it before the other
    if given is not None and (asked < before <= given or asked > before == given):
        more = "more" if asked > before else "fewer"
        return f"is {more} than MKL_NUM_THREADS={of_mkl}: leave one of them out"
    if asked < before:  # set by hydra.job.env_set, or in a notebook
        return "must be set before torch is imported"
    return "is more than torch takes here, or was set after it was imported"


def is_fork() -> bool:
    """Return whether this process is a copy of the one that imported this file."""
    return os.getpid() != IMPORTED_BY


def cores_of_others() -> float:
    """Return how many cores other programs have used for some time."""
    if torch.get_num_threads() == 1:  # nothing can be left to them
        return 0.0
    time.sleep(max(0.0, SHORTEST - LOAD.age))
    return LOAD.others()
