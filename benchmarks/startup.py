"""How long does a person wait before something happens?

    python benchmarks/startup.py [PATH_OF_A_NANOGPT_CHECKOUT]

Processes take turns, each timed from its start: `train.py --help` to its end; train.py to its first line in
metrics.jsonl (polled every 5 ms), with tokens already prepared, with the default settings and with
+experiment=shakespeare_cpu; sample.py to its first character; nanoGPT's train.py, with its README's CPU recipe on
the same text, to the log line of its first iteration, with its first evaluation cut to one batch per split
(eval_iters=1), as ours does not evaluate there. Then what train.py imports before its first step, by package, from
python -X importtime.
"""

from __future__ import annotations

import random
import re
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import nanogpt
import paired

SAME_TEXT = "`train.py +experiment=shakespeare_cpu`, first step"
PEER = "nanoGPT's train.py, first iteration"
PATIENCE = 300
"""Seconds after which a process that shows nothing is given up."""


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("nanogpt", nargs="?", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    arguments = parser.parse_args()
    paired.header()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "input.txt"  # as long as tiny Shakespeare, of as many characters
        characters = string.ascii_letters + " \n.,:;!?-'&$3"
        text.write_text("".join(random.Random(0).choices(characters, k=1_115_394)))
        cache, shakespeare = f"data.cache_dir={folder / 'cache'}", ["+experiment=shakespeare_cpu", f"data.path={text}"]
        for number, settings in enumerate(([], shakespeare)):  # prepares the tokens, and leaves a checkpoint to sample
            train = [sys.executable, "train.py", *settings, cache, "max_steps=1", "sample_tokens=0"]
            paired.run([*train, f"run_dir={folder / f'warm-{number}'}"], cwd=paired.ROOT)
        programs = {
            "`train.py --help`": help_shown,
            "`train.py`, first step": first_step(folder, [cache]),
            SAME_TEXT: first_step(folder, [*shakespeare, cache]),
            "`sample.py`, first character": first_character(folder / "warm-0"),
        }
        if arguments.nanogpt:
            programs[PEER] = first_iteration(arguments.nanogpt, folder, text)
        seconds = paired.interleave(programs, arguments.rounds)
        rows = [
            [
                name,
                paired.spread(taken, ".2f"),
                paired.ratio(seconds[PEER], taken) if name in (PEER, SAME_TEXT) and PEER in seconds else "",
            ]
            for name, taken in seconds.items()
        ]
        paired.table(["from the start of the process to", "seconds", "nanoGPT's / this"], rows)
        imports([*shakespeare, cache, "max_steps=1", f"run_dir={folder / 'imports'}"])


def help_shown() -> float:
    started = time.perf_counter()
    paired.run([sys.executable, "train.py", "--help"], cwd=paired.ROOT)
    return time.perf_counter() - started


def first_step(folder: Path, settings: list[str]) -> Callable[[], float]:
    numbers = count()

    def program() -> float:
        run = Path(tempfile.mkdtemp(dir=folder)) / str(next(numbers))
        metrics = run / "metrics.jsonl"
        started = time.perf_counter()
        with start([sys.executable, "train.py", *settings, f"run_dir={run}"], paired.ROOT) as process:
            while not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.005)
                if process.poll() is not None or time.perf_counter() - started > PATIENCE:
                    fail(process)
            taken = time.perf_counter() - started
            process.kill()
        return taken

    return program


def first_character(run: Path) -> Callable[[], float]:
    def program() -> float:
        started = time.perf_counter()
        with start([sys.executable, "sample.py", f"checkpoint={run}"], paired.ROOT) as process:
            if not process.stdout.read(1):
                fail(process)
            taken = time.perf_counter() - started
            process.kill()
        return taken

    return program


def first_iteration(checkout: Path, folder: Path, text: Path) -> Callable[[], float]:
    copy = nanogpt.copy_with_data(checkout, folder, text)

    def program() -> float:
        started = time.perf_counter()
        command = [*nanogpt.command(copy / "out"), "--eval_iters=1"]
        with start(command, copy, nanogpt.environment()) as process:
            for line in process.stdout:
                if line.startswith(b"iter 0:"):
                    break
            else:
                fail(process)
            taken = time.perf_counter() - started
            process.kill()
        return taken

    return program


def start(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )


def fail(process: subprocess.Popen) -> None:
    """End in one sentence, with the last line that the process had to say."""
    process.kill()
    last = (process.stderr.read().decode(errors="replace").strip() or "no output").splitlines()[-1]
    sys.exit(f"error: {' '.join(process.args[:3])} did not show what was waited for: {last}")


def imports(settings: list[str]) -> None:
    """Print which packages take longest to import, what they import themselves of others not counted."""
    done = paired.run([sys.executable, "-X", "importtime", "train.py", *settings], cwd=paired.ROOT)
    own: Counter[str] = Counter()
    for microseconds, name in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \| +(\S+)$", done.stderr, re.M):
        own[name.partition(".")[0]] += int(microseconds) / 1000
    rows = [[f"`{package}`", f"{taken:,.0f}"] for package, taken in own.most_common(8)]
    paired.table(["package", "import, ms"], [*rows, ["all", f"{own.total():,.0f}"]])


if __name__ == "__main__":
    main()
