"""What does each attention cost?

    python benchmarks/attention.py [NAME ...] [code=FILE] [--lengths T ...]

Forward and backward pass of one layer with each form and each modifier, as multiples of sdpa's: time, in turns with
sdpa, and the most memory that the pass adds, each layer in a process of its own. Names choose some layers; code=FILE
registers more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import paired
import torch

from model.attention import FORMS, MODIFIERS, SETTINGS, AttentionContext, make_attention
from model.attention.code import run_codes
from model.config import GPTConfig
from model.cpu import keep_freed_memory
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory

C, H, WINDOW, DOCUMENT = 256, 4, 128, 300
LENGTHS = (512, 2048, 8192)
PEAKS = 3  # processes that measure the memory of a layer
ALIBI, DOCUMENTS = "sdpa, ALiBi", f"sdpa, documents of {DOCUMENT}"
TOO_SLOW = ("loop",)  # a loop in Python over queries and keys, to be read
LAYERS = [
    *("sdpa", *(form for form in FORMS if form not in (*TOO_SLOW, "sdpa"))),
    *(ALIBI, DOCUMENTS),
    *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)),
    *("sdpa+forget+sink", "sdpa+fade+window"),
]


def main() -> None:
    parser = paired.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="layers to measure beside sdpa; all by default")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T", help="tokens in a sequence")
    asked = parser.parse_args()
    chosen = run_codes(asked.names) or LAYERS
    names = ["sdpa", *(name for name in chosen if name != "sdpa")]
    device = paired.device()
    paired.header()

    for precision in dict.fromkeys((torch.float32, choose_precision("auto", device))):
        print(f"Forward and backward pass in {precision}, B = 1, C = {C}, H = {H}, as multiples of sdpa's:\n")
        columns = [times(names, T, precision, asked.rounds) for T in asked.lengths]
        paired.table(
            ["layer", *(f"T = {T:,}" for T in asked.lengths)], ([f"`{n}`", *(c[n] for c in columns)] for n in names)
        )

    longest = max(asked.lengths)
    measure = peak if device.type == "cuda" else partial(paired.alone, peak)
    # The allocator's luck differs from process to process.
    measured = {name: [measure(name, longest, asked.names) / 1e6 for _ in range(PEAKS)] for name in names}
    plain = statistics.median(measured["sdpa"])
    rows = (
        [f"`{name}`", paired.spread(mb, ",.0f"), f"{statistics.median(mb) / plain:.2f}"]
        for name, mb in measured.items()
    )
    print(f"Peak memory of the pass above its inputs in float32, at T = {longest:,}, in {PEAKS} processes:\n")
    paired.table(["layer", "MB", "× sdpa"], rows)


def times(names: list[str], T: int, precision: torch.dtype, rounds: int) -> dict[str, str]:
    """Return the layers' times as multiples of sdpa's just before; of sdpa itself, milliseconds."""

    def program(name: str) -> Callable[[], float]:
        return paired.timed(make_pass(name, T, precision), max(1, 1024 // T))

    cells = {}
    keep_freed_memory()  # as train.py does
    with fast_products(paired.device(), precision):
        # In pairs, not all layers in turns: a round of all takes a minute, in which a shared machine changes its pace.
        for name in names[1:]:
            seconds = paired.interleave({"sdpa": program("sdpa"), name: program(name)}, rounds)
            ratios = [one / other for one, other in zip(seconds[name], seconds["sdpa"], strict=True)]
            cells[name] = paired.spread(ratios)
    plain = paired.interleave({"sdpa": program("sdpa")}, rounds)["sdpa"]
    return cells | {"sdpa": f"{1e3 * statistics.median(plain):.1f} ms"}


def make_pass(name: str, T: int, precision: torch.dtype) -> Callable[[], object]:
    """Return a function that passes T tokens forward and backward through a new layer."""
    device = paired.device()
    attention = name.partition(",")[0]
    config = GPTConfig(
        attention=attention,
        n_embd=C,
        n_head=H,
        block_size=T,
        vocab_size=50,
        position="alibi" if name == ALIBI else "rope",
        attention_window=WINDOW if "window" in attention else None,
    )
    torch.manual_seed(0)
    layer = make_attention(config).to(device)
    x = torch.randn(1, T, C, device=device, requires_grad=True)
    tokens = torch.randint(config.vocab_size, (1, T), device=device)
    starts = torch.arange(T, device=device)[None] // DOCUMENT * DOCUMENT if name == DOCUMENTS else None

    def once() -> None:
        ctx = AttentionContext(doc_starts=starts, tokens=tokens, loss=torch.zeros((), device=device))
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            y = layer(x, ctx)
        loss = y.float().square().mean()
        (loss + ctx.loss / T).backward()

    return once


def peak(name: str, T: int, arguments: list[str]) -> float:
    """Return the growth of this process's peak memory in a pass, in bytes.

    arguments: those of the command, whose files of code=FILE a new process runs again.
    """
    run_codes(arguments)
    device = paired.device()
    make_pass(name, 16, torch.float32)()  # threads and code pages
    once = make_pass(name, T, torch.float32)
    reset_peak_memory(device)
    before = peak_memory(device)
    once()
    return peak_memory(device) - before


if __name__ == "__main__":
    main()
