"""How long OpenMP's threads spin, and the cores that other programs leave.

Nothing here imports torch.
"""

import os

import psutil

from common.machine import usable_cores

SPINS = "5000"
"""The times that libgomp's threads look for work at a barrier before they sleep. By default they do so a billion times,
which costs most of the speed if another program needs a core: each barrier waits for a thread that is not scheduled."""
BLOCK_TIME = "1"
"""The milliseconds that the threads of Intel's and LLVM's OpenMP do so."""
WAITING = {"GOMP_SPINCOUNT": SPINS, "KMP_BLOCKTIME": BLOCK_TIME}


def sleep_at_barriers() -> None:
    """Let the threads of OpenMP sleep soon while they wait; call it before torch is imported.

    A person's own OMP_WAIT_POLICY, or a variable of WAITING, decides instead.
    """
    if "OMP_WAIT_POLICY" not in os.environ and not WAITING.keys() & os.environ.keys():
        os.environ.update(WAITING)


def keep_all_threads() -> None:
    """Let OpenMP start all threads that torch asks for; call it before torch is imported.

    With OMP_DYNAMIC=true a busy machine gets fewer, and with OMP_MAX_ACTIVE_LEVELS=0 each gets one. oneDNN, by which
    torch multiplies in half precision and at times in float32, does not look how many there are: the parts of those
    that are missing hold whatever was in the memory.
    """
    os.environ.pop("OMP_DYNAMIC", None)
    if os.environ.get("OMP_MAX_ACTIVE_LEVELS", "").strip() == "0":
        del os.environ["OMP_MAX_ACTIVE_LEVELS"]


def threads_asked() -> int | None:
    """Return the number of OMP_NUM_THREADS, of a list the first; None if there is none."""
    return number_of("OMP_NUM_THREADS")


def thread_limit() -> int | None:
    """Return OMP_THREAD_LIMIT, the most threads that OpenMP starts; None if there is none.

    Some clusters set it, such as HTCondor. A product by more threads is wrong, as keep_all_threads() says.
    """
    return number_of("OMP_THREAD_LIMIT")


def number_of(variable: str) -> int | None:
    """Return the number in a variable of OpenMP's, of a list the first; None if there is none.

    OpenMP passes over 0 and what is no number, as if the variable were not set.
    """
    first = os.environ.get(variable, "").partition(",")[0].strip()
    return int(first) or None if first.isascii() and first.isdecimal() else None


class Load:
    """Measures how many cores other programs use."""

    def __init__(self) -> None:
        self.before = self._now()

    @property
    def age(self) -> float:
        """Seconds since the last call of others(), or since this was made."""
        return self._now()[0] - self.before[0]

    def others(self) -> float:
        """Return the mean number of this process's cores that others used since the last call."""
        before = self.before
        self.before = self._now()
        clock, busy, own = (after - earlier for after, earlier in zip(self.before, before, strict=True))
        return max(0.0, (busy - own) / clock) if clock > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        """Return seconds: of the clock, of all programs on this process's cores, of this process."""
        times = psutil.cpu_times(percpu=True)
        cores = [times[core] for core in usable_cores() if core < len(times)]
        idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
        total = sum(sum(core[:8]) for core in cores)  # without guests, which are in the times of users
        own = psutil.Process().cpu_times()
        return total / max(1, len(cores)), total - idle, own.user + own.system
