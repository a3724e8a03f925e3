"""What each form of attention costs:  python benchmarks/attention.py [--picture docs/images/attention_memory.png]

Three tables. Overhead: our sdpa against calling torch's function directly, in turns. Time: one forward
and backward pass of each form. Memory: the most that a forward and backward pass adds to what its
inputs take, each measured in a process of its own.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from model.attention import ATTENTION_FUNCTIONS

H, D = 8, 64
TIMED = ("sdpa", "matmul", "einsum", "bmm", "loop")
MEASURED = ("sdpa", "matmul", "einsum", "bmm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timings for a median")
    parser.add_argument("--picture", type=Path, help="also draw the memory table to this .png")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "T"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak_megabytes(arguments.peak[0], int(arguments.peak[1])))
        return
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    processor = models[0].split(": ")[1] if models else platform.processor()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {processor}, {torch.get_num_threads()} threads"
    )
    overhead(arguments.pairs)
    speed(arguments.pairs)
    memory(arguments.picture)


def overhead(pairs: int) -> None:
    print("\n| B × H × T × D | torch (ms) | ours (ms) | ratio, median (min to max) |\n|---|---|---|---|")
    for B, T in ((8, 1024), (8, 64), (1, 1)):
        q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
        calls = max(1, 2_000 // (B * T))
        ours, theirs = in_turns(
            lambda q=q, k=k, v=v: ATTENTION_FUNCTIONS["sdpa"](q, k, v, is_causal=True),
            lambda q=q, k=k, v=v, T=T: F.scaled_dot_product_attention(q, k, v, is_causal=T > 1),
            pairs,
            calls,
        )
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        print(
            f"| {B} × {H} × {T} × {D} | {1e3 * statistics.median(theirs):.4f} | {1e3 * statistics.median(ours):.4f} "
            f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |"
        )


def in_turns(first: Callable[[], object], second: Callable[[], object], pairs: int, calls: int) -> tuple[list, list]:
    """Seconds a call of each, measured one after the other so that a drifting machine drifts for both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for turn in range(pairs + 2):
            for function, measured in zip((first, second), seconds, strict=True):
                started = time.perf_counter()
                for _ in range(calls):
                    function()
                if turn >= 2:  # the first two warm up
                    measured.append((time.perf_counter() - started) / calls)
    return seconds


def speed(pairs: int) -> None:
    lengths = (64, 256, 1024)
    print(f"\nForward and backward, B = 4, H = {H}, D = {D}, in ms:\n")
    print("| form | " + " | ".join(f"T = {T}" for T in lengths) + " |\n|---" + "|---" * len(lengths) + "|")
    measured: dict[tuple[str, int], list[float]] = {(form, T): [] for form in TIMED for T in lengths}
    for turn in range(max(5, pairs // 3) + 1):
        for form, T in measured:
            if form == "loop" and T > 256:
                continue
            q, k, v = (torch.randn(4, H, T, D, requires_grad=True) for _ in range(3))
            started = time.perf_counter()
            ATTENTION_FUNCTIONS[form](q, k, v, is_causal=True).sum().backward()
            if turn:
                measured[form, T].append(1e3 * (time.perf_counter() - started))
    for form in TIMED:
        cells = (measured[form, T] for T in lengths)
        print(f"| `{form}` | " + " | ".join(f"{statistics.median(cell):.2f}" if cell else "" for cell in cells) + " |")


def memory(picture: Path | None) -> None:
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    print(f"\nPeak memory of a forward and backward pass above its inputs, B = 1, H = {H}, D = {D}, in MB:\n")
    print("| form | " + " | ".join(f"T = {T}" for T in lengths) + " |\n|---" * 1 + "|---" * len(lengths) + "|")
    table = {}
    for form in MEASURED:
        table[form] = [
            float(subprocess.check_output([sys.executable, __file__, "--peak", form, str(T)])) for T in lengths
        ]
        print(f"| `{form}` | " + " | ".join(f"{megabytes:.0f}" for megabytes in table[form]) + " |")
    if picture:
        draw(table, lengths, picture)


def peak_megabytes(form: str, T: int) -> float:
    """What the peak of this process's memory grows by in one forward and backward pass."""
    q, k, v = (torch.randn(1, H, 16, D, requires_grad=True) for _ in range(3))
    ATTENTION_FUNCTIONS[form](q, k, v, is_causal=True).sum().backward()  # threads and code pages
    q, k, v = (torch.randn(1, H, T, D, requires_grad=True) for _ in range(3))
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is held now (Linux)
    before = memory_status("VmHWM")
    ATTENTION_FUNCTIONS[form](q, k, v, is_causal=True).sum().backward()
    return memory_status("VmHWM") - before


def memory_status(name: str) -> float:
    """A figure of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def draw(table: dict[str, list[float]], lengths: tuple[int, ...], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for form, megabytes in table.items():
        axes.loglog(lengths, megabytes, "o-", label=form, base=2)
    axes.set(
        xlabel="T (tokens)", ylabel="MB above the inputs", title=f"Peak memory, forward and backward, H={H}, D={D}"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
