"""Does attention work on this machine? `python -m model.attention.check` prints a table; exit status 1 on a failure.

Every form is tested as a layer, in float32 and bfloat16, on the GPU if there is one. n/a marks a check that a form
cannot take; the reason is below the table.
"""

import copy
import sys

import torch
from torch import Tensor

from model.attention import ATTENTION_FUNCTIONS, ATTENTION_VARIANTS, CausalSelfAttention, make_attention
from model.config import ATTENTION_FORMS, AttentionConfig
from model.kv_cache import KVCache
from model.masks import padding_mask

B, T, C, H, HKV = 2, 24, 32, 4, 2
# |a - b| may reach absolute + relative · |b|: a few roundings of the type, over the T terms of a sum.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
NOT_APPLICABLE = {
    ("average", "rope"): "an average has no scores to rotate",
    ("flex", "eval"): "flex has no dropout to switch off",
}
Pairs = list[tuple[Tensor, Tensor]]  # what came out, what should have


def value_and_gradient(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Agree with the float64 loop, a variant with itself in float64; also where a mask leaves a query no key.

    Gradients of the weights are sums over all tokens, so each tensor is measured against its largest entry. At a
    variant's kink, as ReLU has, bfloat16 may round to the other side: its gradients are measured in float32 alone.
    """
    exact, variant = copy.deepcopy(layer).double(), layer.attend in ATTENTION_VARIANTS.values()
    if not variant:
        exact.attend = ATTENTION_FUNCTIONS["loop"]
    no_gradient = (layer.attend is ATTENTION_FUNCTIONS["flex"] and x.is_cpu) or (variant and x.dtype == torch.bfloat16)
    mask = torch.rand(B, 1, T, T, device=x.device) > 0.4
    mask[0, 0, 3] = False
    pairs: Pairs = []
    for overlay in (None, mask):
        inputs = [x.detach().requires_grad_(), *layer.parameters()]
        references = [x.detach().double().requires_grad_(), *exact.parameters()]
        with torch.set_grad_enabled(not no_gradient):
            y, reference = layer(inputs[0], mask=overlay), exact(references[0], mask=overlay)
        pairs.append((y, reference))
        if not no_gradient:
            g = torch.randn_like(y)
            gradients = torch.autograd.grad(y, inputs, g)
            pairs += zip(gradients, torch.autograd.grad(reference, references, g.double()), strict=True)
    return [(a / b.abs().max(), b / b.abs().max()) for a, b in pairs]


def future_leak(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Leave everything before position 16 as it was when the tokens from there on change."""
    changed = torch.cat((x[:, :16], torch.randn_like(x[:, 16:])), dim=1)
    return [(layer(changed)[:, :16], layer(x)[:, :16])]


def padding_leak(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Let nothing of the padding reach a real position, and treat a padded text like the same text alone."""
    attention_mask = torch.ones(B, T, device=x.device)
    attention_mask[1, :7] = 0  # the second text is padded on the left
    mask, positions = padding_mask(attention_mask), (attention_mask.cumsum(-1) - 1).clamp(min=0).long()
    changed = torch.where(attention_mask[..., None] == 1, x, torch.randn_like(x))
    padded = layer(x, mask=mask, positions=positions)
    return [(layer(changed, mask=mask, positions=positions)[1, 7:], padded[1, 7:]), (padded[1:, 7:], layer(x[1:, 7:]))]


def cache(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Give in two chunks of prefill and one-token steps what one pass over the whole text gives."""
    store = KVCache(1, B, layer.kv_heads, T, layer.head_size, device=x.device, dtype=x.dtype)
    pieces = []
    for size in (9, 7, *[1] * 8):
        pieces.append(layer(x[:, store.length : store.length + size], cache=store))
        store.advance(size)
    return [(torch.cat(pieces, dim=1), layer(x))]


def rope_relativity(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Give the same when all positions move by 64: RoPE tells distances only."""
    return [(layer(x, positions=torch.arange(64, 64 + T, device=x.device)), layer(x))]


def eval_determinism(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Give the same bits twice in eval mode, where dropout is off."""
    once, twice = layer(x), layer(x)
    return [(once, once if torch.equal(once, twice) else once * torch.nan)]


CHECKS = {
    "value+grad": value_and_gradient, "future": future_leak, "padding": padding_leak,
    "cache": cache, "rope": rope_relativity, "eval": eval_determinism,
}  # fmt: skip


def run(check: str, form: str, device: torch.device, dtype: torch.dtype) -> str:
    """Run one cell of the table: its number is the largest error as a share of what is allowed."""
    if (form, check) in NOT_APPLICABLE:
        return "n/a"
    torch.manual_seed(0)
    dropout = 0.0 if form == "flex" else 0.5  # in eval mode it is off
    config = AttentionConfig(attention=form, n_embd=C, n_head=H, n_kv_head=HKV, attention_dropout=dropout)
    layer = make_attention(config).to(device, dtype).eval()
    with torch.no_grad():
        pairs = CHECKS[check](layer, torch.randn(B, T, C, device=device, dtype=dtype))
    absolute, relative = TOLERANCE[dtype]
    shares = [((a.double() - b.double()).abs() / (absolute + relative * b.double().abs())).max() for a, b in pairs]
    share = torch.stack(shares).max().item()  # NaN where any is: that fails too
    return f"ok {share:.2f}" if share <= 1 else f"FAIL {share:.2g}"


def main() -> int:
    """Print the table; return 1 when anything failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failures = 0
    print(f"torch {torch.__version__} on {device}; a number is the worst error as a share of what is allowed\n")
    for dtype in TOLERANCE:
        print(f"{str(dtype)[6:]:<13}" + "".join(f"{check:<12}" for check in CHECKS))
        for form in ATTENTION_FORMS:
            cells = [run(check, form, device, dtype) for check in CHECKS]
            failures += sum(cell.startswith("FAIL") for cell in cells)
            print(f"{form:<13}" + "".join(f"{cell:<12}" for cell in cells), flush=True)
        print()
    for (form, check), reason in NOT_APPLICABLE.items():
        print(f"{check}: n/a for {form}: {reason}.")
    print("value+grad: flex has gradients on CUDA only; variants in float32: bfloat16 rounds across kinks like ReLU's.")
    print(f"\n{failures} of the checks failed" if failures else "\nevery check passed")
    return min(failures, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small threads only wait for each other
    sys.exit(main())
