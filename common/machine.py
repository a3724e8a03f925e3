"""The memory and the processors of this process, within the limits of its container.

Docker, Kubernetes, systemd and Slurm set the limits by Linux's control groups (cgroups), which neither psutil nor torch
reads. Version 1 has a hierarchy of folders for each resource, version 2 one for all. A limit holds for a group and all
below it, so the least one on the way up counts.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

NO_LIMIT = 1 << 60  # version 1 writes a number of this size
ROOT = Path("/")


def memory(root: Path = ROOT) -> tuple[int, int]:
    """Return the free and the total RAM for this process in bytes.

    root: the folder in which /proc and /sys are.
    """
    machine = psutil.virtual_memory()
    free = machine.available
    total = machine.total
    for group, is_first_version in groups("memory", root):
        limit = number_in(group / ("memory.limit_in_bytes" if is_first_version else "memory.max"))
        used = number_in(group / ("memory.usage_in_bytes" if is_first_version else "memory.current"))
        if limit is not None and used is not None and limit < NO_LIMIT:
            # Of the files that are kept in memory, those that nobody reads give way.
            cached = number_in(group / "memory.stat", "total_inactive_file" if is_first_version else "inactive_file")
            free = min(free, max(0, limit - used + (cached or 0)))
            total = min(total, limit)
    return free, total


def processors(root: Path = ROOT) -> int:
    """Return the number of processors that this process may keep busy, rounded up."""
    allowed = len(usable_cores())
    for group, is_first_version in groups("cpu", root):
        if is_first_version:
            quota = number_in(group / "cpu.cfs_quota_us")
            period = number_in(group / "cpu.cfs_period_us")
        else:
            quota, period = numbers_in(group / "cpu.max")
        if quota and period and quota > 0:  # a quota of -1 is none
            allowed = min(allowed, math.ceil(quota / period))
    return max(1, allowed)


def usable_cores() -> list[int]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def groups(resource: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group that limits a resource, and whether it is of version 1."""
    with suppress(OSError, ValueError):
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            is_first_version = number != "0"
            if is_first_version and resource not in names.split(","):
                continue
            for mount in mounts:
                # mountinfo(5): … root, place, options …, "-", type, source, options.
                kind, _, options = mount[mount.index("-") + 1 :]
                wanted = "cgroup" if is_first_version else "cgroup2"
                if kind != wanted or (is_first_version and resource not in options.split(",")):
                    continue
                # In a container the mount may show its own group as the root: then the path has no folder here.
                place = root / mount[4].lstrip("/")
                inside = Path(path).relative_to(mount[3]) if Path(path).is_relative_to(mount[3]) else Path()
                for group in [place / inside, *(place / parent for parent in inside.parents)]:
                    if group.is_dir():
                        yield group, is_first_version


def number_in(file: Path, name: str = "") -> int | None:
    """Return the number in a file, or after a name in it; None if there is none, as for max."""
    with suppress(OSError, ValueError, LookupError):
        words = file.read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    return None


def numbers_in(file: Path) -> tuple[int | None, int | None]:
    """Return the two numbers of cpu.max, quota and period; None for max."""
    with suppress(OSError, ValueError):
        quota, period = file.read_text().split()
        return int(quota), int(period)
    return None, None
