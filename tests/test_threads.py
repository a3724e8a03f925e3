"""The rules of common/threads.py and training/threads.py: cores are shared with other programs."""

import csv
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from sweeping import ROOT, run_here, tiny

from common import threads
from common.threads import WAITING, Load, keep_all_threads, sleep_at_barriers, threads_asked
from runs.checkpoint import read_meta
from runs.summary import read_summary
from train import train
from training import threads as training_threads
from training.device import limit_threads
from training.terminal import Terminal
from training.threads import threads_of_run


@pytest.mark.parametrize("own", ["OMP_WAIT_POLICY", *WAITING])
def test_threads_are_asked_to_sleep_unless_somebody_has_decided_it(monkeypatch, own):
    for name in ("OMP_WAIT_POLICY", *WAITING):
        monkeypatch.delenv(name, raising=False)
    sleep_at_barriers()
    assert {name: os.environ[name] for name in WAITING} == WAITING and "OMP_WAIT_POLICY" not in os.environ
    for name in WAITING:
        monkeypatch.delenv(name)
    monkeypatch.setenv(own, "active")
    sleep_at_barriers()
    assert [name for name in WAITING if name in os.environ] == [own] * (own in WAITING) and os.environ[own] == "active"


@pytest.mark.parametrize("limit", ["3", " 3,9", "9", "0", "x", None])
def test_torch_takes_no_more_threads_than_openmp_starts(limit, monkeypatch):
    """oneDNN's products in half precision held garbage, of the threads that OpenMP had not started."""
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr("common.machine.processors", lambda: 8)
    if limit:
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    most = 3 if limit and "3" in limit else 4
    for asked in (None, "4", "2"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
        given.clear()
        limit_threads()
        assert given == [3] * (most == 3)
        given.clear()
        with threads_of_run(4 if asked is None else None) as note:
            assert given == [most]
        assert given == [most, 4]
        if asked == "4" and most == 3:
            assert note == " with 3 threads: OMP_NUM_THREADS=4 is more than OMP_THREAD_LIMIT=3"


def test_openmp_starts_all_threads_that_torch_asks_for(monkeypatch):
    for name, value, left in [
        ("OMP_DYNAMIC", "true", None),
        ("OMP_MAX_ACTIVE_LEVELS", "0", None),
        ("OMP_MAX_ACTIVE_LEVELS", "1", "1"),
    ]:
        monkeypatch.setenv(name, value)
        keep_all_threads()
        assert os.environ.get(name) == left
    keep_all_threads()


@pytest.mark.slow
def test_a_run_in_bf16_has_the_same_loss_where_openmp_starts_one_thread(tmp_path):
    """Its losses were NaN: a half of each product was whatever the memory held."""
    losses = []
    two = {"OMP_NUM_THREADS": "2"}
    for variables in ({"OMP_NUM_THREADS": "1"}, two | {"OMP_THREAD_LIMIT": "1"}, two | {"OMP_MAX_ACTIVE_LEVELS": "0"}):
        folder = tmp_path / f"r{len(losses)}"
        command = [sys.executable, str(ROOT / "train.py"), *tiny(tmp_path, max_steps=3), "precision=bf16"]
        done = subprocess.run([*command, f"run_dir={folder}"], env=os.environ | variables, capture_output=True)
        assert done.returncode == 0, done.stderr
        losses.append(read_summary(folder).val_loss)
    assert losses[0] == losses[1] == pytest.approx(losses[2], abs=1e-2) and losses[0] < 10


def clock(monkeypatch, *, cores: int = 2) -> SimpleNamespace:
    """A machine whose time passes by hand: advance(seconds, busy, own), all in seconds of a core."""
    total = [0.0, 0.0, 0.0]  # idle and busy times of all cores, and the process's own
    kind = type(psutil.cpu_times())

    def advance(seconds: float, busy: float, own: float = 0.0) -> None:
        total[0] += seconds * cores - busy - own
        total[1] += busy + own
        total[2] += own

    def times(percpu: bool) -> list:
        values = {"user": total[1] / cores, "idle": total[0] / cores}
        return [kind(*(values.get(name, 0.0) for name in kind._fields)) for _ in range(cores)]

    monkeypatch.setattr(threads.psutil, "cpu_times", times)
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=total[2], system=0.0))
    monkeypatch.setattr(threads.psutil, "Process", lambda: process)
    monkeypatch.setattr(threads, "usable_cores", lambda: [*range(cores)])
    return SimpleNamespace(advance=advance)


def test_the_load_is_that_of_other_programs_since_the_last_look(monkeypatch):
    machine = clock(monkeypatch)
    load = Load()
    assert load.others() == 0 and load.age == 0
    machine.advance(10, busy=5, own=10)
    assert load.age == pytest.approx(10) and load.others() == pytest.approx(0.5)
    machine.advance(2, busy=3)
    assert load.others() == pytest.approx(1.5)


@pytest.mark.parametrize(("busy", "expected"), [(0.0, 2), (0.4, 2), (0.6, 1), (1.0, 1), (2.0, 1)])
def test_a_new_run_takes_the_cores_that_others_leave_and_gives_its_caller_back_their_number(
    monkeypatch, busy, expected
):
    machine, given = clock(monkeypatch), []
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(training_threads, "LOAD", Load())
    machine.advance(5, busy=5 * busy, own=4)
    with threads_of_run(None) as note:
        assert given == [expected]
    assert given == [expected, 2]
    assert note == ("" if expected == 2 else f" with 1 of 2 threads, for other programs use {busy:.1f} cores")


def test_a_resumed_run_keeps_its_threads_and_omp_num_threads_goes_first(monkeypatch):
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(training_threads.machine, "processors", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    for kept in (3, 4, 5):  # more than there are processors would be slow
        with threads_of_run(kept) as note:
            assert note == (" with 3 of 4 threads, as before" if kept == 3 else "")
    assert given == [3, 4, 4, 4, 4, 4]
    late = " with 4 threads: OMP_NUM_THREADS=2 must be set before torch is imported"
    much = " with 4 threads: OMP_NUM_THREADS=8 is more than torch takes here, or was set after it was imported"
    for asked, expected in (("2", late), ("2,4", late), ("4", ""), (" 4,2", ""), ("8", much)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        with threads_of_run(3) as note:
            assert given[-1] == 4 and note == expected


@pytest.mark.parametrize(
    ("omp", "mkl", "said"),
    [
        ("8", "4", "is more than MKL_NUM_THREADS=4: leave one of them out"),
        ("1", "4", "is fewer than MKL_NUM_THREADS=4: leave one of them out"),
        ("1", "100", "is fewer than MKL_NUM_THREADS=100: leave one of them out"),
        ("8", "6", "is more than torch takes here, or was set after it was imported"),
        ("2", "1", "must be set before torch is imported"),
        ("2", "4,1", "must be set before torch is imported"),
    ],
)
def test_a_number_of_mkl_is_named_where_torch_takes_it_and_not_that_of_openmp(monkeypatch, omp, mkl, said):
    """With 1 and 2 the first was said to be set too late."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setenv("MKL_NUM_THREADS", mkl)
    with threads_of_run(None) as note:
        assert note == f" with 4 threads: OMP_NUM_THREADS={omp} {said}"


@pytest.mark.parametrize(("cores", "left"), [(2, 1), (4, 2), (6, 4), (16, 4)])
def test_more_threads_than_cores_leave_no_more_to_others(cores, left, monkeypatch):
    """Of two cores, 1.6 in use, torch.set_num_threads(5) left 3 threads."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(training_threads, "cores_of_others", lambda: 1.6)
    monkeypatch.setattr(training_threads.machine, "processors", lambda: cores)
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    with threads_of_run(None) as note:
        assert given == [left] and note == f" with {left} of 6 threads, for other programs use 1.6 cores"


@pytest.mark.parametrize("passed_over", ["", "0", "all", "1.0", "-1"])
def test_a_number_of_threads_that_openmp_passes_over_asks_for_none(passed_over, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", passed_over)
    assert threads_asked() is None
    monkeypatch.setattr(training_threads, "cores_of_others", lambda: 1.0)
    monkeypatch.setattr(training_threads.machine, "processors", lambda: 4)
    given: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    with threads_of_run(None) as note:
        assert given == [3] and note == " with 3 of 4 threads, for other programs use 1.0 cores"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_forked_process_computes_with_one_thread_for_those_of_its_parent_are_not_there(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    a = torch.rand(400, 400)
    product = a @ a  # starts the second thread
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with threads_of_run(None) as note, suppress(BaseException):
            is_right = torch.allclose(a @ a, product, atol=1e-3)
            os.write(write, f"{is_right} {torch.get_num_threads()}{note}".encode())
        os._exit(0)
    try:
        os.close(write)
        with selectors.DefaultSelector() as reader:  # instead of waiting forever
            reader.register(read, selectors.EVENT_READ)
            assert reader.select(timeout=20), "the child waits"
        assert os.read(read, 1000) == b"True 1 with 1 thread, for this process is a fork: start it by spawn for more"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_checkpoint_names_the_threads_with_which_the_run_goes_on(train_config, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(training_threads, "cores_of_others", lambda: 1.0)
    monkeypatch.setattr(training_threads.machine, "processors", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        train(replace(train_config, max_steps=10))
        last = Path(train_config.run_dir) / "checkpoints/last"
        assert read_meta(last).computed_on["threads"] == 2 and torch.get_num_threads() == 3
        monkeypatch.setattr(training_threads, "cores_of_others", lambda: 0.0)
        train(replace(train_config, resume=train_config.run_dir))
        assert read_meta(last).computed_on["threads"] == 2
    finally:
        torch.set_num_threads(before)


def test_a_run_is_told_once_that_the_machine_has_become_busy(monkeypatch, caplog):
    machine = clock(monkeypatch)
    terminal = Terminal.__new__(Terminal)
    terminal.run = SimpleNamespace(device=torch.device("cpu"), progress=SimpleNamespace(step=70))
    terminal.load, terminal.fastest, terminal.is_told_busy = Load(), 0.0, False
    for seconds, busy, speed in ((20, 0, 1000), (20, 20, 900), (5, 5, 300), (20, 0, 300), (20, 20, 300), (20, 20, 200)):
        machine.advance(seconds, busy=busy, own=seconds)
        terminal.tell_if_busy(speed)
    assert [record.getMessage() for record in caplog.records] == [
        "step 70: other programs use 1.0 cores, and a step takes 3.3 times as long as it did"
    ]


@pytest.mark.long
@pytest.mark.slow
def test_all_jobs_of_a_sweep_have_the_threads_of_its_first_however_busy_the_machine_becomes(tmp_path, monkeypatch):
    """Threads round otherwise: runs that are compared must not differ in them."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    busy = iter([1.0, 0.0])
    monkeypatch.setattr(training_threads.machine, "processors", lambda: 3)
    monkeypatch.setattr(training_threads, "cores_of_others", lambda: next(busy))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        asked = ["-m", *tiny(tmp_path, max_steps=2), "hydra.sweep.dir=sweep"]
        assert run_here(*asked, "seed=1,2", cwd=tmp_path).returncode == 0
        assert run_here(*asked, "seed=1,2,3", cwd=tmp_path).returncode == 0  # goes on
        alone = run_here(*tiny(tmp_path, max_steps=2), "run_dir=alone", cwd=tmp_path)
    finally:
        torch.set_num_threads(before)
    with (tmp_path / "sweep/leaderboard.csv").open() as file:
        assert [row["threads"] for row in csv.DictReader(file)] == ["2", "2", "2"]
    assert alone.returncode == 0 and read_summary(tmp_path / "alone").threads == 3  # it looked again


def test_a_clock_that_goes_on_between_two_looks_is_no_mistake(monkeypatch):
    """Other programs may run between the look at an age and its use."""
    ages = iter([0.0, 0.29999, 0.30001, 5.0, 5.0])
    slept = []

    class Watched:
        age = property(lambda self: next(ages))

        def others(self):
            return 1.0

    monkeypatch.setattr(training_threads, "LOAD", Watched())
    monkeypatch.setattr(training_threads.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(training_threads, "time", SimpleNamespace(sleep=slept.append))
    for _ in range(3):
        assert training_threads.cores_of_others() == 1.0
    assert slept == pytest.approx([0.3, 0.00001, 0.0], abs=1e-6)
