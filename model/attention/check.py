"""Is attention to be trusted on this machine? `python -m model.attention.check` prints a table of tests.

Every form is held to the loop in float64, a variant to itself, on the device at hand, in float32 and
bfloat16. Exits with status 1 when a check fails. A check that a form cannot take says n/a, and why below the table.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from model.attention import ATTENTION_FUNCTIONS, ATTENTION_VARIANTS, CausalSelfAttention, make_attention
from model.config import ATTENTION_FORMS, AttentionConfig
from model.kv_cache import KVCache
from model.masks import padding_mask

B, T, C, H, HKV = 2, 24, 32, 4, 2
# |a - b| may reach absolute + relative · |b|: a few roundings of the type, over the T terms of a sum.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


class NotApplicable(Exception):
    """The form cannot take this check; the message says why."""


def value_and_gradient(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Against the loop in float64: plain, causal, a chunk of queries, and masked with an empty row."""
    if form not in ATTENTION_FUNCTIONS:
        return _layer_value_and_gradient(form, device, dtype)
    mask = torch.rand(B, 1, T, T, device=device) > 0.4
    mask[0, 0, 3] = False  # a query that may attend nowhere
    cases = [({}, T), ({"is_causal": True}, T), ({"is_causal": True}, T // 2), ({"mask": mask}, T)]
    pairs = []
    for arguments, queries in cases:
        shapes = ((B, H, queries, 16), (B, HKV, T, 16), (B, HKV, T, 16))
        inputs = [torch.randn(s, device=device, dtype=dtype, requires_grad=_trains(form, device)) for s in shapes]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        y = ATTENTION_FUNCTIONS[form](*inputs, **arguments)
        reference = ATTENTION_FUNCTIONS["loop"](*exact, **arguments)
        pairs.append((y, reference))
        if _trains(form, device):
            g = torch.randn_like(y)
            pairs += zip(
                torch.autograd.grad(y, inputs, g), torch.autograd.grad(reference, exact, g.double()), strict=True
            )
    return pairs


def _layer_value_and_gradient(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """A rung is held to itself in float64 with the loop for its attention function, a variant to itself in float64.

    Gradients of the weights are included, which are sums over all tokens: each tensor is measured against its
    largest entry. A variant may have a kink, as ReLU has, where bfloat16's rounding takes the other side's gradient:
    its gradients are measured in float32 alone.
    """
    layer, x = _layer_and_input(form, device, dtype)
    exact = copy.deepcopy(layer).double()
    if form not in ATTENTION_VARIANTS:
        exact.attend = ATTENTION_FUNCTIONS["loop"]
    x.requires_grad_()
    x_exact = x.detach().double().requires_grad_()
    y, reference = layer(x), exact(x_exact)
    pairs = [(y, reference)]
    if form not in ATTENTION_VARIANTS or dtype == torch.float32:
        g = torch.randn_like(y)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], g)
        references = torch.autograd.grad(reference, [x_exact, *exact.parameters()], g.double())
        pairs += zip(gradients, references, strict=True)
    return [(a / b.abs().max(), b / b.abs().max()) for a, b in pairs]


def future_leak(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Other tokens from position 16 on leave everything before 16 as it was."""
    layer, x = _layer_and_input(form, device, dtype)
    changed = torch.cat((x[:, :16], torch.randn_like(x[:, 16:])), dim=1)
    return [(layer(changed)[:, :16], layer(x)[:, :16])]


def padding_leak(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """What the padding contains does not reach a real position, and a text alone gives the same as padded."""
    layer, x = _layer_and_input(form, device, dtype)
    attention_mask = torch.ones(B, T, device=device)
    attention_mask[1, :7] = 0  # the second text is padded on the left
    mask, positions = padding_mask(attention_mask), (attention_mask.cumsum(-1) - 1).clamp(min=0).long()
    changed = torch.where(attention_mask[..., None] == 1, x, torch.randn_like(x))
    padded = layer(x, mask=mask, positions=positions)
    return [(layer(changed, mask=mask, positions=positions)[1, 7:], padded[1, 7:]), (padded[1:, 7:], layer(x[1:, 7:]))]


def cache(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """A prefill in two chunks and one-token steps give what one pass over the whole text gives."""
    layer, x = _layer_and_input(form, device, dtype)
    keys = layer.project(x, None, 0)[1]
    store = KVCache(1, B, keys.shape[1], T, keys.shape[-1], device=device, dtype=dtype)
    pieces = []
    for size in (9, 7, *[1] * 8):
        pieces.append(layer(x[:, store.length : store.length + size], cache=store))
        store.advance(size)
    return [(torch.cat(pieces, dim=1), layer(x))]


def rope_relativity(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """All positions moved by 64 change nothing: RoPE tells distances only."""
    if form == "average":
        raise NotApplicable("an average has no scores to rotate")
    layer, x = _layer_and_input(form, device, dtype)
    return [(layer(x, positions=torch.arange(64, 64 + T, device=device)), layer(x))]


def eval_determinism(form: str, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """In eval mode dropout is off: twice the same, to the bit."""
    if form == "flex":
        raise NotApplicable("flex has no dropout to switch off")
    layer, x = _layer_and_input(form, device, dtype, attention_dropout=0.5)
    once, twice = layer(x), layer(x)
    return [(once, once if torch.equal(once, twice) else once * torch.nan)]


CHECKS: dict[str, Callable[[str, torch.device, torch.dtype], list[tuple[Tensor, Tensor]]]] = {
    "value+grad": value_and_gradient,
    "future": future_leak,
    "padding": padding_leak,
    "cache": cache,
    "rope": rope_relativity,
    "eval": eval_determinism,
}


def _trains(form: str, device: torch.device) -> bool:
    return form != "flex" or device.type == "cuda"


def _layer_and_input(
    form: str, device: torch.device, dtype: torch.dtype, **settings: float
) -> tuple[CausalSelfAttention, Tensor]:
    config = AttentionConfig(attention=form, n_embd=C, n_head=H, n_kv_head=HKV, **settings)
    layer = make_attention(config).to(device, dtype).eval()
    return layer, torch.randn(B, T, C, device=device, dtype=dtype)


def worst(pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> float:
    """The largest error as a share of what is allowed: above 1, or NaN, fails."""
    absolute, relative = TOLERANCE[dtype]
    shares = [
        ((a.double() - b.double()).abs() / (absolute + relative * b.double().abs())).max().item() for a, b in pairs
    ]
    return max(shares, key=lambda share: share if share == share else float("inf"))


def run(check: str, form: str, device: torch.device, dtype: torch.dtype, notes: dict[str, None]) -> str:
    """One cell of the table."""
    torch.manual_seed(0)
    try:
        with torch.set_grad_enabled(check == "value+grad"):
            share = worst(CHECKS[check](form, device, dtype), dtype)
    except NotApplicable as reason:
        notes[f"{check}: n/a for {form}: {reason}."] = None
        return "n/a"
    return f"ok {share:.2f}" if share <= 1 else f"FAIL {share:.2g}"


def main() -> int:
    """Print the table; 1 when anything failed."""
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    notes: dict[str, None] = {}  # in the order they came up, each once
    failures = 0
    print(f"torch {torch.__version__} on {device}; a number is the worst error as a share of what is allowed\n")
    for dtype in TOLERANCE:
        print(f"{str(dtype).removeprefix('torch.'):<13}" + "".join(f"{check:<12}" for check in CHECKS))
        for form in ATTENTION_FORMS:
            cells = [run(check, form, device, dtype, notes) for check in CHECKS]
            failures += sum(cell.startswith("FAIL") for cell in cells)
            print(f"{form:<13}" + "".join(f"{cell:<12}" for cell in cells), flush=True)
        print()
    for note in notes:
        print(note)
    print("value+grad: gradients of variants in float32 only: bfloat16 rounds across a kink, such as ReLU's.")
    if device.type == "cpu":
        print("value+grad: gradients n/a for flex: flex_attention computes them on CUDA only.")
    outcome = f"{failures} of the checks failed" if failures else "every check passed"
    print(f"\n{outcome}, {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small threads only wait for each other
    sys.exit(main())
