"""What does each form of attention cost?

    python benchmarks/attention.py [--picture docs/images/attention_memory.png]

Overhead: our sdpa beside a direct call of torch's function. Time: one forward and backward pass of each form,
also with two key/value heads for eight query heads (GQA). Memory: the most that a forward and backward pass adds
to its inputs, each measured in its own process. All in turns; on a GPU also flex, and greater lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import paired
import torch
import torch.nn.functional as F

from model.attention.functional import ATTENTION_FUNCTIONS, fused
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory

B, H, D = 4, 8, 64
FUNCTIONS = ATTENTION_FUNCTIONS | {"fused": fused}  # torch's kernels, which sdpa takes for longer texts on a CPU
FORMS = ("sdpa", "fused", "matmul", "einsum", "bmm", "loop")
MEASURED = ("sdpa", "fused", "matmul", "einsum", "bmm")
LOOP_LENGTH = 256
"""The longest text at which a query at a time is bearable."""
LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096)}
MEMORY_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("--picture", type=Path, help="also draw the memory table to this .png")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "T"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak_megabytes(arguments.peak[0], int(arguments.peak[1])))
        return
    paired.need_memory_status()
    paired.header()
    device = paired.device()
    with fast_products(device):
        overhead(arguments.rounds)
        for precision in dict.fromkeys((torch.float32, choose_precision("auto", device))):
            speed(precision, arguments.rounds)
    memory(arguments.picture)


def overhead(rounds: int) -> None:
    """Print our sdpa's time over torch's own."""
    device, rows = paired.device(), []
    for batch, T in ((8, 1024), (8, 64), (1, 1)):
        q, k, v = (torch.randn(batch, H, T, D, device=device) for _ in range(3))
        calls = max(1, 2_000 // (batch * T))
        programs = {
            "ours": paired.timed(lambda q=q, k=k, v=v: FUNCTIONS["sdpa"](q, k, v, is_causal=True), calls),
            "torch": paired.timed(
                lambda q=q, k=k, v=v, T=T: F.scaled_dot_product_attention(q, k, v, is_causal=T > 1), calls
            ),
        }
        with torch.no_grad():
            seconds = paired.interleave(programs, rounds, warm_ups=2)
        milliseconds = (f"{1e3 * statistics.median(seconds[name]):.4f}" for name in ("torch", "ours"))
        ratio = paired.ratio(seconds["torch"], seconds["ours"])
        rows.append([f"{batch} × {H} × {T} × {D}", *milliseconds, ratio])
    paired.table(["B × H × T × D", "torch, ms", "`sdpa`, ms", "torch's / ours"], rows)


def speed(precision: torch.dtype, rounds: int) -> None:
    """Print the time of every form, with as many key/value heads as query heads and with two."""
    device = paired.device().type
    forms = (*FORMS, "flex") if device == "cuda" else FORMS
    columns = [(T, heads) for heads in (H, 2) for T in LENGTHS[device]]
    programs = {
        (form, T, heads): forward_and_backward(form, T, heads, precision)
        for form in forms
        for T, heads in columns
        if form != "loop" or T <= LOOP_LENGTH
    }
    seconds = paired.interleave(programs, rounds, warm_ups=2)
    name = str(precision).removeprefix("torch.")
    print(f"Forward and backward in {name}, B = {B}, H = {H}, D = {D}, in ms:\n")
    rows = []
    for form in forms:
        milliseconds = [[1e3 * one for one in seconds.get((form, *column), [])] for column in columns]
        rows.append([f"`{form}`", *(paired.spread(cell, ".2f") if cell else "" for cell in milliseconds)])
    paired.table(["form", *(f"T = {T}" + (f", Hkv = {heads}" if heads < H else "") for T, heads in columns)], rows)


def forward_and_backward(
    form: str, T: int, heads: int, precision: torch.dtype, B: int = B, H: int = H
) -> Callable[[], float]:
    shapes = ((B, H, T, D), (B, heads, T, D), (B, heads, T, D))
    inputs = [torch.randn(s, device=paired.device(), dtype=precision, requires_grad=True) for s in shapes]

    def once() -> None:
        y = FUNCTIONS[form](*inputs, is_causal=True)
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return paired.timed(once, 1 if form == "loop" else max(1, 2048 // T))


def memory(picture: Path | None) -> None:
    """Print, and draw, the peak memory of the forms that take the whole text at once."""
    device = paired.device().type
    forms = (*MEASURED, "flex") if device == "cuda" else MEASURED
    print(f"Peak memory of a forward and backward pass above its inputs, B = 1, H = {H}, D = {D}, in MB:\n")
    measure = peak_megabytes if device == "cuda" else child
    found = {form: [measure(form, T) for T in MEMORY_LENGTHS] for form in forms}
    rows = ([f"`{form}`", *(f"{megabytes:.0f}" for megabytes in of)] for form, of in found.items())
    paired.table(["form", *(f"T = {T}" for T in MEMORY_LENGTHS)], rows)
    if picture:
        draw(found, MEMORY_LENGTHS, picture)


def child(form: str, T: int) -> float:
    """peak_megabytes in a process of its own, which has not freed anything that it could take again."""
    return float(paired.run([sys.executable, __file__, "--peak", form, str(T)]).stdout.split()[-1])


def peak_megabytes(form: str, T: int) -> float:
    """What the peak of this process's memory grows by in one forward and backward pass."""
    device = paired.device()
    for length in (16, T):  # the short one for threads and code pages
        q, k, v = (torch.randn(1, H, length, D, device=device, requires_grad=True) for _ in range(3))
        reset_peak_memory(device)
        before = peak_memory(device)
        FUNCTIONS[form](q, k, v, is_causal=True).sum().backward()
    return (peak_memory(device) - before) / 1e6


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
