"""What does each form of attention cost?

    python benchmarks/attention.py

Time: one forward and backward pass of each form, also with two key/value heads for eight query heads (GQA). Memory:
the most that a forward and backward pass adds to its inputs, each measured in its own process. All in turns; on a GPU
also flex, and greater lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import paired
import torch

from model.attention import FORMS as REGISTERED
from model.attention.functions import causal_blocks, flex, fused
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory

B, H, D = 4, 8, 64
ON_GPU = paired.device().type == "cuda"
FORMS = {name: REGISTERED[name] for name in ("sdpa", "matmul", "einsum", "bmm", "loop")} | {"fused": fused}
if ON_GPU:
    compiled = torch.compile(flex)
    FORMS["flex"] = lambda q, k, v, *, is_causal: compiled(q, k, v, causal_blocks(q.shape[-2], q.shape[-2], q.device))
MEASURED = [form for form in FORMS if form != "loop"]  # which takes one query at a time
LENGTHS = (256, 1024, 4096) if ON_GPU else (64, 256, 1024)
MEMORY_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


def main() -> None:
    arguments = paired.parser(__doc__).parse_args()
    paired.header()
    with fast_products(paired.device()):
        for precision in dict.fromkeys((torch.float32, choose_precision("auto", paired.device()))):
            speed(precision, arguments.rounds)
    memory()


def speed(precision: torch.dtype, rounds: int) -> None:
    """Print the time of every form, with as many key/value heads as query heads and with two."""
    columns = [(T, heads) for heads in (H, 2) for T in LENGTHS]
    programs = {
        (form, T, heads): forward_and_backward(form, T, heads, precision)
        for form in FORMS
        for T, heads in columns
        if form in MEASURED or T <= 256
    }
    seconds = paired.interleave(programs, rounds, warm_ups=2)
    print(f"Forward and backward in {str(precision).removeprefix('torch.')}, B = {B}, H = {H}, D = {D}, in ms:\n")
    cells = {key: paired.spread([1e3 * one for one in taken]) for key, taken in seconds.items()}
    heads = [f"T = {T}" + (f", Hkv = {heads}" if heads < H else "") for T, heads in columns]
    paired.table(["form", *heads], ([f"`{form}`", *(cells.get((form, *c), "") for c in columns)] for form in FORMS))


def forward_and_backward(form: str, T: int, heads: int, precision: torch.dtype) -> Callable[[], float]:
    inputs = [
        torch.randn(B, h, T, D, device=paired.device(), dtype=precision, requires_grad=True) for h in (H, heads, heads)
    ]

    def once() -> None:
        y = FORMS[form](*inputs, is_causal=True)
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    return paired.timed(once, 1 if form == "loop" else max(1, 2048 // T))


def memory() -> None:
    """Print the peak memory of the forms that take the whole text at once."""
    print(f"Peak memory of a forward and backward pass above its inputs, B = 1, H = {H}, D = {D}, in MB:\n")
    measure = peak if ON_GPU else partial(paired.alone, peak)
    rows = ([f"`{form}`", *(f"{measure(form, T) / 1e6:.0f}" for T in MEMORY_LENGTHS)] for form in MEASURED)
    paired.table(["form", *(f"T = {T}" for T in MEMORY_LENGTHS)], rows)


def peak(form: str, T: int) -> float:
    """What the peak of this process's memory grows by in one forward and backward pass, in bytes."""
    device = paired.device()
    for length in (16, T):  # the short one for threads and code pages
        q, k, v = (torch.randn(1, H, length, D, device=device, requires_grad=True) for _ in range(3))
        reset_peak_memory(device)
        before = peak_memory(device)
        FORMS[form](q, k, v, is_causal=True).sum().backward()
    return peak_memory(device) - before


if __name__ == "__main__":
    main()
