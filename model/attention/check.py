"""Does attention work on this machine? `python -m model.attention.check` prints a table; exit status 1 on a failure.

Every form is tested as a layer, in float32 and bfloat16, on the GPU if there is one; then, in float32, every modifier
beside every form that takes it. n/a marks a check that does not apply; the reason is below the table.
"""

import copy
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from errors import SettingsError
from model.attention import ATTENTION_FUNCTIONS, MODIFIERS, CausalSelfAttention, forms, make_attention
from model.attention.recurrent import Recurrent, token_by_token
from model.config import AttentionConfig
from model.kv_cache import KVCache
from model.masks import document_mask, padding_mask

B, T, C, H, HKV, WINDOW = 2, 24, 32, 4, 2, 5
# |a - b| may reach absolute + relative · |b|: a few roundings of the type, over the T terms of a sum.
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
REASONS = {
    "rope": "the layer rotates nothing",
    "eval": "flex has no dropout to switch off",
}
Pairs = list[tuple[Tensor, Tensor]]  # what came out, what should have


def value_and_gradient(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Agree with the float64 loop, another function or a state with itself in float64, token by token; also where a
    mask leaves a query no key.

    Gradients of the weights are sums over all tokens, so each tensor is measured against its largest entry, or a tenth
    of the largest of all where its terms cancel. At a kink, as ReLU has, bfloat16 may round to the other side:
    gradients of other functions are measured in float32 alone.
    """
    exact, softmax = copy.deepcopy(layer).double(), layer.attend in ATTENTION_FUNCTIONS.values()
    if softmax:
        exact.attend = ATTENTION_FUNCTIONS["loop"]
    if isinstance(exact, Recurrent):
        exact.scan, softmax = token_by_token, False
    no_gradient = layer.attend is ATTENTION_FUNCTIONS["flex"] and x.is_cpu
    no_gradient |= not softmax and x.dtype == torch.bfloat16
    mask = torch.rand(B, 1, T, T, device=x.device) > 0.4
    mask[0, 0, 3] = False
    pairs: Pairs = []
    for overlay in (None, mask) if not isinstance(layer, Recurrent) else (None,):
        inputs = [x.detach().requires_grad_(), *layer.parameters()]
        references = [x.detach().double().requires_grad_(), *exact.parameters()]
        with torch.set_grad_enabled(not no_gradient):
            y, reference = layer(inputs[0], mask=overlay), exact(references[0], mask=overlay)
        pairs.append((y, reference))
        if not no_gradient:
            g = torch.randn_like(y)
            gradients = torch.autograd.grad(y, inputs, g)
            pairs += zip(gradients, torch.autograd.grad(reference, references, g.double()), strict=True)
    largest = max(b.abs().max() for _, b in pairs)
    # retention and delta divide by the length of a result, which chance may make small: gradients' roundings grow.
    room = 10 if isinstance(layer, Recurrent) and not no_gradient else 1
    return [(a / scale, b / scale) for a, b in pairs for scale in [room * b.abs().max().clamp(min=0.1 * largest)]]


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


def document_leak(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Let nothing of a document reach the next one in the window, and treat each like the same document alone."""
    starts = torch.zeros(B, T, dtype=torch.long, device=x.device)
    starts[1, 10:] = 10
    apart = {"mask": document_mask(starts), "begins": starts == torch.arange(T, device=x.device)}
    changed = torch.cat((torch.randn_like(x[:, :10]), x[:, 10:]), dim=1)
    y = layer(x, **apart)
    alone = torch.cat((layer(x[1:, :10]), layer(x[1:, 10:])), dim=1)
    return [(layer(changed, **apart)[1, 10:], y[1, 10:]), (y[1:], alone), (y[:1], layer(x[:1]))]


def cache(layer: CausalSelfAttention, x: Tensor) -> Pairs:
    """Give in two chunks of prefill and one-token steps what one pass over the whole text gives."""
    store = KVCache([layer.make_store(B, T, None, x.device, x.dtype)])
    pieces = []
    for size in (9, 7, *[1] * 8):
        pieces.append(layer(x[:, store.position : store.position + size], cache=store))
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
    "value+grad": value_and_gradient, "future": future_leak, "padding": padding_leak, "document": document_leak,
    "cache": cache, "rope": rope_relativity, "eval": eval_determinism,
}  # fmt: skip


def make_layer(attention: str) -> CausalSelfAttention:
    """Make a small layer in eval mode, whose modifiers are away from where they begin."""
    config = AttentionConfig(
        attention=attention, n_embd=C, n_head=H, n_kv_head=HKV,
        attention_dropout=0.0 if attention.startswith("flex") else 0.5,  # in eval mode it is off
        attention_window=WINDOW if "window" in attention else None,
    )  # fmt: skip
    layer = make_attention(config).eval()
    for parameter in layer.modifiers.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return layer


def run(check: str, attention: str, device: torch.device, dtype: torch.dtype) -> str:
    """Run one cell of the table: its number is the largest error as a share of what is allowed."""
    torch.manual_seed(0)
    layer = make_layer(attention).to(device, dtype)
    if (check == "rope" and layer.rope is None) or (check == "eval" and attention.startswith("flex")):
        return "n/a"
    with torch.no_grad():
        pairs = CHECKS[check](layer, torch.randn(B, T, C, device=device, dtype=dtype))
    absolute, relative = TOLERANCE[dtype]
    shares = [((a.double() - b.double()).abs() / (absolute + relative * b.double().abs())).max() for a, b in pairs]
    share = torch.stack(shares).max().item()  # NaN where any is: that fails too
    return f"ok {share:.2f}" if share <= 1 else f"FAIL {share:.2g}"


def combinations() -> Iterator[str]:
    """Yield every modifier beside every form that takes it; of the ways to compute softmax attention beside sdpa."""
    for form in forms():
        if form in ATTENTION_FUNCTIONS and form != "sdpa":
            continue
        for modifier in MODIFIERS:
            try:
                make_layer(f"{form}+{modifier}")
            except SettingsError:  # it says which of the two does not take the other
                continue
            yield f"{form}+{modifier}"


def main() -> int:
    """Print the table; return 1 when anything failed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failures = 0
    print(f"torch {torch.__version__} on {device}; a number is the worst error as a share of what is allowed\n")
    tables = [(torch.float32, forms()), (torch.bfloat16, forms()), (torch.float32, combinations())]
    for dtype, names in tables:
        print(f"{str(dtype)[6:]:<27}" + "".join(f"{check:<12}" for check in CHECKS))
        for attention in names:
            cells = [run(check, attention, device, dtype) for check in CHECKS]
            failures += sum(cell.startswith("FAIL") for cell in cells)
            print(f"{attention:<27}" + "".join(f"{cell:<12}" for cell in cells), flush=True)
        print()
    for check, reason in REASONS.items():
        print(f"{check}: n/a where {reason}.")
    print("value+grad: flex has gradients on CUDA only; in bfloat16 other functions round across kinks like ReLU's.")
    print(f"\n{failures} of the checks failed" if failures else "\nevery check passed")
    return min(failures, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small threads only wait for each other
    sys.exit(main())
