"""What the benchmarks share: programs that take turns, medians with their spread, ratios, tables, and the machine.

README.md's method is decided here: which statistics a ratio has, and which tables say that they break the rules.

Importing this puts the checkout on the path, so that `model`, `data` and `training` can be imported after it.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn, TypeVar

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

T = TypeVar("T")
ENOUGH_ROUNDS = 5
QUIET = 0.2
"""Cores that may be busy before the start."""
WIDEST = 0.25
"""Of a median: how far apart its least and its most may be."""
PATIENCE = 60
"""Seconds to wait for a quiet machine."""
_load = 0.0  # cores that were busy before the start, for the tables
_end = float("inf")  # of time.monotonic(): when no further round begins


class Figure(str):
    """A cell of a table, which knows what of the method it breaks."""

    __slots__ = ("rounds", "wide")
    rounds: int
    wide: bool


class Parser(argparse.ArgumentParser):
    """A command line with --rounds; --help prints the script's docstring, a mistake ends in one sentence.

    rounds: how many by default; None for a script that times nothing.
    """

    def __init__(self, description: str, rounds: int | None = ENOUGH_ROUNDS) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        if rounds is not None:
            self.add_argument("--rounds", type=count, default=rounds, help=f"rounds of measurement ({rounds})")

    def error(self, message: str) -> NoReturn:
        sys.exit(f"error: {message}")


def count(text: str) -> int:
    """A number of at least 1, from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def file(text: str) -> Path:
    """A file that can be read, from the command line."""
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} is not a file that can be read")
    return path


def device() -> torch.device:
    """The GPU where there is one; CUDA_VISIBLE_DEVICES= hides it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def header(*packages: str) -> None:
    """Wait for a quiet machine; print the command line and what the figures depend on beside it."""
    global _load
    _load = settled_load()
    script = Path(sys.argv[0]).name
    print(f"`python benchmarks/{shlex.join([script, *sys.argv[1:]])}`\n")
    print(machine(*packages) + f", load {_load:.1f} at the start\n", flush=True)


def load() -> float:
    """Cores that were busy before the start."""
    return _load


def already_loaded(cores: float) -> None:
    """Take the load from the process that started this one."""
    global _load
    _load = cores


def settled_load() -> float:
    """The load, once it is as low as the method asks, or after PATIENCE."""
    load, end = busy_cores(), time.monotonic() + PATIENCE
    if load >= QUIET:
        print(f"{load:.1f} cores are busy: waiting up to {PATIENCE} s for a quiet machine", file=sys.stderr)
    while load >= QUIET and time.monotonic() < end:
        load = busy_cores()
    return load


def busy_cores(seconds: float = 5) -> float:
    """Cores that were busy in the next seconds. Not the system's load average, which still counts our last table."""
    if not Path("/proc/stat").exists():
        return os.getloadavg()[0]
    before = busy_ticks()
    time.sleep(seconds)
    return (busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def busy_ticks() -> int:
    """Of all cores, since the machine was started; "steal" is what another machine on the same processor took."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq + steal


def machine(*packages: str) -> str:
    """Processor, GPU, threads, versions and the commit."""
    parts = [processor(), f"torch threads {torch.get_num_threads()}"]
    if torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name())
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        parts += [f"{package} {version(package)}" for package in packages]
    except PackageNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed: run  pip install -e '.[dev]'")
    commit = git("rev-parse", "--short", "HEAD")
    if commit.returncode == 0:
        changes = git("diff", "--quiet", "HEAD").returncode
        parts.append(f"commit {commit.stdout.strip()}{' + changes' if changes else ''}")
    return ", ".join(parts)


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)


def processor() -> str:
    """The processor's name and how many of its cores this machine has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0]} × {len(names)}" if names else platform.processor()


def interleave(programs: dict[str, Callable[[], T]], rounds: int, *, warm_ups: int = 1) -> dict[str, list[T]]:
    """What every program returned in each round.

    A round calls each once, and each round begins with another, so that a machine that drifts, or a
    program that leaves it hot, harms all alike. Rounds that warm up come first and are not returned. After
    stop_after()'s seconds no further round begins, but one is measured in any case.
    """
    names = list(programs)
    results: dict[str, list[T]] = {name: [] for name in names}
    with tqdm(total=(warm_ups + rounds) * len(names), unit="run", disable=None, leave=False) as bar:
        for number in range(-warm_ups, rounds):
            if number > 0 and time_is_up():
                break
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                bar.set_postfix_str(name)
                result = programs[name]()
                bar.update()
                if number >= 0:
                    results[name].append(result)
    return results


def stop_after(seconds: float) -> None:
    """Let interleave() begin no further round after as many seconds."""
    global _end
    _end = time.monotonic() + seconds


def time_is_up() -> bool:
    """Whether stop_after()'s seconds have passed."""
    return time.monotonic() > _end


def timed(function: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """A program that returns the seconds of one call, of `calls` in a row."""

    def program() -> float:
        synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (time.perf_counter() - started) / calls

    return program


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(first: Sequence[float], second: Sequence[float], unit: str = "×") -> Figure:
    """Both statistics of first / second, the smaller one in bold: no more than that may be claimed.

    The ratio of the medians, which the table's other columns divide to; and the median of the rounds' ratios, with
    the least and the most: what the machine did in a round is in both figures and cancels.
    """
    rounds = [a / b for a, b in zip(first, second, strict=True)]
    if first is second:
        return figure("1", rounds)
    medians = statistics.median(first) / statistics.median(second)
    whole, by_round = f"{medians:.2f}{unit}", spread(rounds, ".2f", unit)
    if medians <= statistics.median(rounds):
        return figure(f"**{whole}**, {by_round}", rounds)
    median, *least_to_most = by_round.split(" ", 1)
    return figure(" ".join([f"{whole}, **{median}**", *least_to_most]), rounds)


def spread(values: Iterable[float], form: str = ".2f", unit: str = "") -> Figure:
    """The median, and in brackets the least and the most."""
    values = sorted(values)
    median = f"{statistics.median(values):{form}}{unit}"
    return figure(median if len(values) == 1 else f"{median} ({values[0]:{form}} to {values[-1]:{form}})", values)


def figure(text: str, values: Sequence[float]) -> Figure:
    made = Figure(text)
    made.rounds, made.wide = len(values), max(values) - min(values) > WIDEST * abs(statistics.median(values))
    return made


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table, each row as soon as it is there, and below it what of the method it breaks.

    The first column names, the others are figures.
    """
    print("| " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * (len(heads) - 1))
    printed: list[list[str]] = []
    for row in map(list, rows):
        print("| " + " | ".join(row) + " |", flush=True)
        printed.append(row)
    print(breaches(printed) + "\n", flush=True)


def breaches(rows: list[list[str]]) -> str:
    """What of the method a table breaks, in a line; nothing where it keeps it."""
    figures = [(row[0], cell) for row in rows for cell in row if isinstance(cell, Figure)]
    wide = "; ".join(dict.fromkeys(name for name, cell in figures if cell.wide))
    noise = [f"load {_load:.1f} at the start"] if _load >= QUIET else []
    noise += [f"brackets wider than a quarter in rows: {wide}"] if wide else []
    said = [f"Not a quiet machine: {'; '.join(noise)}."] if noise else []
    fewest = min((cell.rounds for _, cell in figures), default=ENOUGH_ROUNDS)
    said += [f"Fewer rounds than {ENOUGH_ROUNDS}: {fewest}."] if fewest < ENOUGH_ROUNDS else []
    return "".join(f"\n{line}" for line in (" ".join(said),) if line)


def run(command: Sequence[str | Path], **settings) -> subprocess.CompletedProcess:
    """Run a command to its end and capture what it prints; one sentence when it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **settings)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1].removeprefix("error: ")
        words = shlex.join(str(word) for word in command if "\n" not in str(word))  # without a script given to -c
        sys.exit(f"error: {words} ended with status {done.returncode}: {last}")
    return done


def need_memory_status() -> None:
    """End in one sentence where a process cannot read its own peak."""
    if not torch.cuda.is_available() and not Path("/proc/self/clear_refs").exists():
        sys.exit("error: peak memory is read from /proc/self, which only Linux has: run this on Linux, or with CUDA.")
