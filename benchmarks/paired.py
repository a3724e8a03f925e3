"""Shared by the benchmarks: runs in turns, medians with spread, ratios, tables, the machine.

README.md's method is decided here. Importing this puts the checkout on the path, for `model`, `data` and `training`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from common.console import progress_bar
from training.device import processor_name

T = TypeVar("T")
ROUNDS = 5
WIDEST = 0.25  # of a median: how far apart its least and its most may be


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with --rounds, whose --help prints the script's docstring."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of measurement ({ROUNDS})")
    return found


def device() -> torch.device:
    """The GPU where there is one; CUDA_VISIBLE_DEVICES= hides it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def header(*packages: str) -> None:
    """Print the command line, processor, GPU, threads, versions and commit."""
    print(f"`python benchmarks/{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`\n")
    parts = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    parts += [f"{processor_name(torch.device('cpu'))} × {os.cpu_count()}"]
    parts += [f"torch threads {torch.get_num_threads()}", f"Python {platform.python_version()}"]
    parts += [f"{package} {version(package)}" for package in ("torch", *packages)]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    print(", ".join(parts) + (f", commit {commit}" if commit else "") + "\n", flush=True)


def interleave(programs: dict[str, Callable[[], T]], rounds: int, *, warm_ups: int = 1) -> dict[str, list[T]]:
    """Return what every program returned in each round.

    A round calls each once, and each round begins with another, so that a machine that drifts, or a
    program that leaves it hot, harms all alike. Rounds that warm up come first and are not returned.
    """
    names, results = list(programs), {name: list[T]() for name in programs}
    with progress_bar(total=(warm_ups + rounds) * len(names), unit="run", leave=False) as bar:
        for number in range(-warm_ups, rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                bar.set_postfix_str(name)
                result = programs[name]()
                bar.update()
                if number >= 0:
                    results[name].append(result)
    return results


def alone(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a new process, which has no freed memory to use again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def timed(function: Callable[[], object], calls: int = 1) -> Callable[[], float]:
    """Return a program that returns the seconds of one call, of `calls` in a row."""

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


def ratio(first: Sequence[float], second: Sequence[float]) -> str:
    """Return both statistics of first / second, the smaller one, which may be claimed, in bold.

    The ratio of the medians, which the table's other columns divide to; and the median of the rounds' ratios, with
    the least and the most: what the machine did in a round is in both figures and cancels.
    """
    if first is second:
        return "1"
    rounds = [a / b for a, b in zip(first, second, strict=True)]
    medians, median = statistics.median(first) / statistics.median(second), statistics.median(rounds)
    least_to_most = f" ({min(rounds):.2f} to {max(rounds):.2f})"
    if medians <= median:
        return f"**{medians:.2f} ×**, {median:.2f} ×{least_to_most}"
    return f"{medians:.2f} ×, **{median:.2f} ×**{least_to_most}"


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Return the median, and in brackets the least and the most; ‡ if they are too far apart."""
    values = sorted(values)
    median = statistics.median(values)
    wide = " ‡" if values[-1] - values[0] > WIDEST * abs(median) else ""
    return f"{median:{form}}" + (f" ({values[0]:{form}} to {values[-1]:{form}}){wide}" if len(values) > 1 else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table, row by row: a column of names, then columns of figures."""
    print("| " + " | ".join(heads) + " |")
    print("|---|" + "---:|" * (len(heads) - 1))
    wide = False
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
        wide |= any("‡" in cell for cell in row)
    print("\n‡ more than a quarter of the median between least and most: measure again.\n" if wide else "", flush=True)


def run(command: Sequence[str | Path], **settings) -> str:
    """Run a command to its end and return what it printed; end in one sentence when it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **settings)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1].removeprefix("error: ")
        sys.exit(f"error: {shlex.join(str(word) for word in command)} ended with status {done.returncode}: {last}")
    return done.stdout
