"""Which code computes an attention? `python -m model.attention.choose NAME` prints it.

For each length, device and type it names the executor that runs, and says why the faster ones do not: see executors.py.
`T=300` is the length of a text, in place of two; `window=128` is attention_window. Without a name it prints the table
of docs/hardware.md. code=FILE runs a file that registers an attention of your own.
Layers are made of shapes alone, so any machine can say what a GPU would run, one from Ampere on.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import SettingsError
from model.attention import FORMS, AttentionContext, make_attention
from model.attention.call import Call
from model.attention.code import explained, file_of, run_codes, run_command
from model.attention.executors import Executors, choose, obstacle
from model.cache import KVCache
from model.config import GPTConfig

SHAPE: dict[str, Any] = dict(n_embd=512, n_head=8, n_kv_head=2, block_size=1024, vocab_size=257)
WINDOW = 64
PLACES = (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16), ("cuda", torch.float32))
LENGTHS = ((128, 128), (1024, 1024), (1, 1024))
"""Queries and keys: of a short text, a long one, and a token that is decoded."""
STATE = "a state"
"""Stands for the executor of a form that keeps a state: see recurrent.py."""
CASES = [
    *FORMS,
    *(
        f"sdpa+{name}"
        for name in ("window", "logn", "diff", "forget", "fade", "sink", "relative", "window+sink", "forget+window")
    ),
    *("softmax1+window", "softcap+forget", "moba+window", "index+logn", "mla+sink"),
    *("sdpa position=alibi", "sdpa documents", "sdpa+window documents", "sdpa mask", "sdpa dropout"),
    *("sdpa+window dropout", "matmul dropout"),
]
"""The rows of the table: an attention, and what else a call has."""


class Choice(NamedTuple):
    """A call that a layer would make, and the executors of its form; None if it has a state."""

    call: Call | None
    executors: Executors


def choice_of(case: str, dtype: torch.dtype, T: int, S: int, window: int = WINDOW) -> Choice:
    """Return the choice of a layer in training, or in decoding if T is not S."""
    # Make the layer.
    attention, *more = case.split()
    settings: dict[str, Any] = {"attention_window": window} if "window" in attention else {}
    if "position=alibi" in more:
        settings["position"] = "alibi"
    if "dropout" in more and T == S:
        settings["attention_dropout"] = 0.1
    settings["block_size"] = max(S, SHAPE["block_size"])
    with torch.device("meta"):
        layer = make_attention(GPTConfig(attention=attention, **SHAPE | settings)).to(dtype)

    # Note the call that it would compute.
    noted: list[Call] = []

    def note(call: Call, ctx: AttentionContext) -> Tensor:
        noted.append(call)
        return call.q.new_empty(*call.q.shape[:-1], call.v.shape[-1])

    layer.compute = note  # type: ignore[method-assign]
    ctx = AttentionContext(tokens=torch.empty(1, T, dtype=torch.long, device="meta"))
    if T != S:
        cache = ctx.cache = KVCache(S)
        if layer.has_kv_cache:
            tokens = torch.empty(1, S - T, dtype=torch.long, device="meta")
            read = torch.empty(1, S - T, SHAPE["n_embd"], dtype=dtype, device="meta")
            layer(read, AttentionContext(cache=cache, tokens=tokens))
            noted.clear()
        cache.advance(S - T)
    if "documents" in more:
        ctx.doc_starts = torch.empty(1, T, dtype=torch.long, device="meta")
    if "mask" in more:
        ctx.mask = torch.empty(1, 1, T, S, dtype=torch.bool, device="meta")
    layer(torch.empty(1, T, SHAPE["n_embd"], dtype=dtype, device="meta"), ctx)
    return Choice(noted[0] if noted else None, layer.function.executors)


def name_of(case: str, device: str, dtype: torch.dtype, T: int, S: int, window: int = WINDOW) -> str:
    """Return the name of the executor that runs."""
    call, executors = choice_of(case, dtype, T, S, window)
    return STATE if call is None else choose(call, executors, device).name


def explain(case: str, lengths: Sequence[tuple[int, int]] = LENGTHS, window: int = WINDOW) -> list[str]:
    """Return lines that say what computes an attention where, and why not the faster executors."""
    lines = [case]
    for device, dtype in PLACES:
        for T, S in lengths:
            text = f"{T:,} tokens" if T == S else f"{T} token, {S:,} keys"
            found = name_of(case, device, dtype, T, S, window)
            line = f"  {device:<5} {str(dtype)[6:]:<9} {text:<20} {found}"
            call, executors = choice_of(case, dtype, T, S, window)
            if call is not None:
                # Join the executors that have one reason.
                reasons = defaultdict(list)
                for executor in executors:
                    if executor.name == found:
                        break
                    reasons[obstacle(executor, call, device)].append(executor.name)
                faster = "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
                line = f"{line:<54}  {faster}"
            lines.append(line.rstrip())
    return lines


def table() -> str:
    """Return the table of docs/hardware.md: a row for each combination of executors."""
    short, long, token = LENGTHS
    rows = defaultdict(list)
    for case in CASES:
        cells = []
        for device, dtype in PLACES:
            names = [name_of(case, device, dtype, *lengths) for lengths in (short, long)]
            cells.append(", ".join(dict.fromkeys(names)))
        tokens = [name_of(case, device, torch.bfloat16, *token) for device in ("cpu", "cuda")]
        cells.append(", ".join(dict.fromkeys(tokens)))
        rows[tuple(cells)].append(f"`{case}`")
    head = ["attention", "CPU, float32", "CPU, bf16", "GPU, bf16", "GPU, float32", "a token"]
    lines = [" | ".join((", ".join(cases), *cells)) for cells, cases in rows.items()]
    return "\n".join(f"| {line} |" for line in (" | ".join(head), "|".join("---" for _ in head), *lines))


def main(arguments: list[str]) -> None:
    """Print what computes some attentions, or the table."""
    # Read the sizes.
    sizes = {}
    named = []
    for argument in arguments:
        name, _, number = argument.partition("=")
        if name in ("T", "window"):
            if not number.isdecimal() or int(number) < 1:
                raise SettingsError(f"{argument} is no number of tokens", f"type {name}=256")
            sizes[name] = int(number)
        else:
            named.append(argument)
    window = sizes.get("window", WINDOW)
    lengths = ((sizes["T"], sizes["T"]), (1, sizes["T"])) if "T" in sizes else LENGTHS

    attentions = run_codes(named)
    if not attentions:
        print(table())
        return
    heads = f"{SHAPE['n_head']} query heads of 64 channels and {SHAPE['n_kv_head']} key heads"
    print(f"layers of {heads}; window: {window}")
    with explained(file_of(named), heads):
        for pattern in attentions:
            for attention in dict.fromkeys(pattern.split("/")):
                print("\n".join(explain(attention, lengths, window)))


if __name__ == "__main__":
    run_command(main)
