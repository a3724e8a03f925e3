"""Ctrl-C and SIGTERM: remembered until the training loop asks, so that it can save and leave."""

from __future__ import annotations

import os
import signal
import sys
import threading


class StopSignals:
    """A context manager within which the first Ctrl-C or SIGTERM only sets `received`.

    A second one ends the process at once; a checkpoint that is being written then counts as absent.
    """

    def __init__(self) -> None:
        self.received = 0
        """The signal's number, 0 while there has been none."""

    def __enter__(self) -> StopSignals:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        if number == signal.SIGINT:
            print("\nfinishing this step, then saving; Ctrl-C again leaves at once", file=sys.stderr, flush=True)
