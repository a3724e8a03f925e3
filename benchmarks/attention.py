"""What does each form of attention cost?

    python benchmarks/attention.py

One forward and backward pass of each form that takes the whole text at once: its time, all forms in turns, and the most
that it adds to its inputs, each measured in its own process. On a GPU with greater lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import paired
import torch

from model.attention import FORMS as REGISTERED
from model.attention.fused import fused
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory

B, H, D = 4, 8, 64
ON_GPU = paired.device().type == "cuda"
FORMS = {name: REGISTERED[name] for name in ("sdpa", "matmul", "einsum", "bmm")} | {"fused": fused}
LENGTHS = (256, 1024, 4096) if ON_GPU else (64, 256, 1024)
MEMORY_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def main() -> None:
    rounds, device = paired.parser(__doc__).parse_args().rounds, paired.device()
    paired.header()
    for precision in dict.fromkeys((torch.float32, choose_precision("auto", device))):
        programs = {(form, T): passes(form, T, precision) for form in FORMS for T in LENGTHS}
        with fast_products(device):
            seconds = paired.interleave(programs, rounds, warm_ups=2)
        print(f"Forward and backward in {precision}, B = {B}, H = {H}, D = {D}, in ms:\n")
        cells = {key: paired.spread([1e3 * one for one in taken]) for key, taken in seconds.items()}
        table(LENGTHS, cells.__getitem__)
    print(f"Peak memory of a forward and backward pass above its inputs, B = 1, H = {H}, D = {D}, in MB:\n")
    measure = peak if ON_GPU else partial(paired.alone, peak)
    table(MEMORY_LENGTHS, lambda key: f"{measure(*key) / 1e6:.0f}")


def table(lengths: tuple[int, ...], cell: Callable[[tuple[str, int]], str]) -> None:
    """Print a row for each form and a column for each length."""
    rows = ([f"`{form}`", *(cell((form, T)) for T in lengths)] for form in FORMS)
    paired.table(["form", *(f"T = {T}" for T in lengths)], rows)


def passes(form: str, T: int, precision: torch.dtype) -> Callable[[], float]:
    """Return a program that returns the seconds of a forward and backward pass."""
    inputs = [torch.randn(B, H, T, D, device=paired.device(), dtype=precision, requires_grad=True) for _ in "qkv"]

    def once() -> None:
        y = FORMS[form](*inputs, is_causal=True)
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return paired.timed(once, max(1, 2048 // T))


def peak(form: str, T: int) -> float:
    """Return the growth of this process's peak memory in a forward and backward pass, in bytes."""
    device = paired.device()
    for length in (16, T):  # the short one for threads and code pages
        q, k, v = (torch.randn(1, H, length, D, device=device, requires_grad=True) for _ in range(3))
        reset_peak_memory(device)
        before = peak_memory(device)
        FORMS[form](q, k, v, is_causal=True).sum().backward()
    return peak_memory(device) - before


if __name__ == "__main__":
    main()
