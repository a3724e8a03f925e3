"""The memory and the processors of a container are those that its control groups leave it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from common.machine import memory, processors
from training.device import limit_threads, memory_of

GB = 10**9
NONE = "9223372036854771712"  # version 1 without a limit

V1_MEMORY = "32 31 0:30 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "33 31 0:31 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct"
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
HYBRID = "42 31 0:39 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def machine(folder: Path, mounts: list[str], group: list[str], files: dict[str, str]) -> Path:
    """A folder with the files of /proc and /sys."""
    found = {"proc/self/mountinfo": "\n".join(mounts), "proc/self/cgroup": "\n".join(group)}
    found |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in found.items():
        (file := folder / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return folder


def v1(folder: Path, limit: str, used: str, cached: str = "0", quota: str = "-1", at: str = "") -> Path:
    files = {f"memory{at}/memory.limit_in_bytes": limit, f"memory{at}/memory.usage_in_bytes": used}
    files |= {f"memory{at}/memory.stat": f"cache 7\ninactive_file 1\ntotal_inactive_file {cached}"}
    files |= {f"cpu,cpuacct{at}/cpu.cfs_quota_us": quota, f"cpu,cpuacct{at}/cpu.cfs_period_us": "100000"}
    mounts = [V1_MEMORY.format(root="/"), V1_CPU.format(root="/"), HYBRID]
    return machine(folder, mounts, [f"4:memory:{at or '/'}", f"2:cpu,cpuacct:{at or '/'}", "0::/"], files)


def v2(folder: Path, groups: dict[str, tuple[str, str, str, str]], path: str = "/", root: str = "/") -> Path:
    """groups: the limit, use, cached files and cpu.max of each group's folder."""
    files = {}
    for at, (limit, used, cached, cpu) in groups.items():
        files |= {f"{at}memory.max": limit, f"{at}memory.current": used, f"{at}cpu.max": cpu}
        files |= {f"{at}memory.stat": f"anon 5\ninactive_file {cached}\nactive_file 9"}
    return machine(folder, [V2.format(root=root)], [f"0::{path}"], files)


@pytest.fixture
def host(monkeypatch) -> None:
    """A machine with 64 GB, of which 50 are free, and 32 processors."""
    host = psutil.virtual_memory()._replace(total=64 * GB, available=50 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)), raising=False)


WHOLE = (50 * GB, 64 * GB, 32)
# What each machine has: free and total memory in bytes, and processors.
MACHINES = {
    "no groups": (lambda at: machine(at, [], [], {}), WHOLE),
    "no /proc": (lambda at: at, WHOLE),
    "1: none": (lambda at: v1(at, NONE, "5"), WHOLE),
    "1: 4 GB": (lambda at: v1(at, f"{4 * GB}", f"{GB}", quota="250000"), (3 * GB, 4 * GB, 3)),
    "1: files in memory": (lambda at: v1(at, f"{4 * GB}", f"{3 * GB}", f"{2 * GB}"), (3 * GB, 4 * GB, 32)),
    "1: more than the machine": (lambda at: v1(at, f"{99 * GB}", "0", quota="6400000"), WHOLE),
    "1: full": (lambda at: v1(at, f"{GB}", f"{2 * GB}"), (0, GB, 32)),
    "1: a group below": (lambda at: v1(at, f"{2 * GB}", "0", quota="50000", at="/docker/x"), (2 * GB, 2 * GB, 1)),
    "2: none": (lambda at: v2(at, {"": ("max", "5", "0", "max 100000")}), WHOLE),
    "2: 8 GB": (lambda at: v2(at, {"": (f"{8 * GB}", f"{GB}", "0", "200000 100000")}), (7 * GB, 8 * GB, 2)),
    "2: a period": (lambda at: v2(at, {"": ("max", "0", "0", "25000 50000")}), (*WHOLE[:2], 1)),
    "2: the group above is less": (
        lambda at: v2(
            at,
            {
                "": ("max", "0", "0", "max 100000"),
                "slice/": (f"{3 * GB}", f"{2 * GB}", f"{GB // 2}", "300000 100000"),
                "slice/job/": (f"{9 * GB}", f"{GB}", "0", "max 100000"),
            },
            "/slice/job",
        ),
        (3 * GB // 2, 3 * GB, 3),
    ),
    # Docker without a namespace: the path is the host's, the mount shows the container's own group.
    "2: the host's path": (
        lambda at: v2(at, {"": (f"{2 * GB}", "0", "0", "150000 100000")}, "/docker/abc", "/docker/abc"),
        (2 * GB, 2 * GB, 2),
    ),
    "2: a path that is not there": (
        lambda at: v2(at, {"": (f"{2 * GB}", "0", "0", "max 1")}, "/x"),
        (2 * GB, 2 * GB, 32),
    ),
    "2: outside": (lambda at: v2(at, {"": (f"{2 * GB}", "0", "0", "max 1")}, "/../x"), (2 * GB, 2 * GB, 32)),
    "nonsense": (lambda at: machine(at, ["a - b"], ["x"], {"memory.max": "?"}), WHOLE),
    "no number": (lambda at: v2(at, {"": ("a lot", "", "x", "1 2 3")}), WHOLE),
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", MACHINES)
def test_the_limits_of_a_container_hold(name, tmp_path):
    make, wanted = MACHINES[name]
    root = make(tmp_path)
    assert (*memory(root), processors(root)) == wanted


def test_this_machine_has_its_own_memory_and_processors():
    free, total = memory()
    assert 0 < free <= total <= psutil.virtual_memory().total and 1 <= processors() <= (os.cpu_count() or 1)
    assert memory_of(torch.device("cpu"))[1] == total


def test_threads_are_no_more_than_a_container_keeps_busy_unless_somebody_says_so(monkeypatch):
    took: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", took.append)
    monkeypatch.setattr("common.machine.processors", lambda: 3)
    limit_threads()
    assert took == []  # OMP_NUM_THREADS is set by conftest.py
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert took == [3]
    monkeypatch.setattr("common.machine.processors", lambda: 9)
    limit_threads()
    assert took == [3]
