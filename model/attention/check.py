"""Does attention work on this machine? `python -m model.attention.check` prints a table.

The exit status is 1 on a failure. Every form is tested as a layer, in float32 and bfloat16, on the GPU if there is one;
then, in float32, every modifier beside every form that takes it. `python -m model.attention.check sdpa+gate` tests the
names that it is given. n/a marks a check that does not apply: no scores are masked, or a rounding of them may choose
other keys.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.errors import SettingsError
from model.attention import FORMS, MODIFIERS, SETTINGS, SOFTMAX, AttentionContext, MultiHeadAttention, make_attention
from model.attention.code import explained, file_of, run_codes, run_command
from model.attention.executors import CHUNKS, ROWS, anywhere
from model.attention.forms import SoftCapped
from model.attention.masks import padding_mask
from model.attention.recurrent import Recurrent, token_by_token
from model.cache import KVCache
from model.config import GPTConfig

B, T, C, H, HKV, WINDOW = 2, 24, 32, 4, 2, 5
# |a - b| may reach absolute + relative · |b|: a few roundings of the type, over the T terms of a sum.
TOLERANCE = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
DIFFERENCE = 1e-7  # of x and weights in gradient_error(): few steps cross a kink, and roundings are about 1e-8
FINITE = "look at its divisions, roots and logarithms, and at the score -inf of a hidden key"  # a remedy for NaN
Pairs = list[tuple[Tensor, Tensor]]  # what came out, what should have


def value_and_gradient(layer: MultiHeadAttention, x: Tensor) -> Pairs:
    """Agree with the same layer in float64, by matrices and by chunks of queries.

    Softmax forms are compared with the loop, states with token_by_token, others with themselves. Gradients are compared
    in float32 alone: at a kink bfloat16 may round to the other side.
    """
    exact = copy.deepcopy(layer).double()
    if isinstance(exact, Recurrent):
        exact.scan = token_by_token
    elif layer.form in SOFTMAX:
        exact.function = FORMS["loop"]
    by_chunks = copy.deepcopy(layer)
    pieces = [executor._replace(misfit=anywhere) for executor in (CHUNKS, ROWS)]
    by_chunks.function = layer.function.by(*pieces, *layer.function.executors)
    mask = torch.rand(B, 1, T, T, device=x.device) > 0.4
    mask[0, 0, 3] = False  # a query without a key

    with_gradient = x.dtype != torch.bfloat16
    pairs: Pairs = []
    for overlay in (None, mask) if layer.accepts_mask else (None,):
        g = [torch.randn_like(x), torch.randn_like(x[0, 0, 0])] if with_gradient else None  # of the output and the loss
        wanted = results(exact, x.double(), overlay, g)
        for tested in (layer, by_chunks):
            pairs += zip(results(tested, x, overlay, g), wanted, strict=True)

    # Gradients of weights are sums over all tokens. So each tensor is measured against its largest entry, or against a
    # tenth of the largest entry of all if its terms cancel.
    largest = max(b.abs().max() for _, b in pairs)
    # retention and delta normalise results whose length may be small by chance: gradients' roundings grow.
    # The chunks' softcap rounds a score as one of ± cap.
    room = 1
    if with_gradient and isinstance(layer, Recurrent):
        room = 40
    elif with_gradient and isinstance(layer, SoftCapped):
        room = 3
    scales = [room * b.abs().max().clamp(min=0.1 * largest) for _, b in pairs]
    return [(a / scale, b / scale) for (a, b), scale in zip(pairs, scales, strict=True)]


def results(
    layer: MultiHeadAttention,
    x: Tensor,
    mask: Tensor | None,
    g: list[Tensor] | None,
) -> list[Tensor]:
    """Return the layer's output and loss; given their gradients g, also those of x and weights."""
    if g is None:
        return with_loss(layer, x, mask)
    inputs = [x.detach().requires_grad_(), *layer.parameters()]
    with torch.enable_grad():
        y = with_loss(layer, inputs[0], mask)
    return [*y, *torch.autograd.grad(y, inputs, [part.to(x.dtype) for part in g], materialize_grads=True)]


def with_loss(layer: MultiHeadAttention, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the layer's output, and its auxiliary loss."""
    ctx = AttentionContext(mask=mask, loss=torch.zeros((), device=x.device, requires_grad=True))
    y = layer(x, ctx)
    assert ctx.loss is not None
    return [y, ctx.loss]


def future_leak(layer: MultiHeadAttention, x: Tensor) -> Pairs:
    """Leave all outputs before a position unchanged if the tokens from there on change."""
    # A batch of copies of x, (T, B, T, C): copy i goes on with other tokens from position i on.
    is_before = torch.ones(T, T, dtype=torch.bool, device=x.device).tril(-1)[:, None, :, None]
    y = layer(torch.where(is_before, x, torch.randn_like(x)))
    return [(y * is_before, layer(x) * is_before)]


def padding_leak(layer: MultiHeadAttention, x: Tensor) -> Pairs:
    """Let no token that a mask hides, anywhere in a text, affect a real position."""
    attention_mask = torch.ones(B, T, device=x.device)
    attention_mask[1, [0, 1, 9, 10, 20]] = 0
    changed = torch.where(attention_mask[..., None] == 1, x, -2 * x)  # by the sign give_tokens() has other ids too
    real = attention_mask[1] == 1
    ctx = AttentionContext(mask=padding_mask(attention_mask))
    return [(layer(changed, ctx)[1, real], layer(x, ctx)[1, real])]


def document_leak(layer: MultiHeadAttention, x: Tensor) -> Pairs:
    """Treat each of several documents in a row as if it were alone, also in pieces."""
    doc_starts = torch.zeros(B, T, dtype=torch.long, device=x.device)
    doc_starts[1, 10:] = 10
    alone = torch.cat((layer(x[1:, :10]), layer(x[1:, 10:])), dim=1)
    y = layer(x, AttentionContext(doc_starts=doc_starts))
    return [(y, torch.cat((layer(x[:1]), alone))), (in_pieces(layer, x, doc_starts), y)]


def cached(layer: MultiHeadAttention, x: Tensor) -> Pairs:
    """Compute the same in two chunks of prefill and one-token steps as in one pass."""
    return [(in_pieces(layer, x), layer(x))]


def in_pieces(layer: MultiHeadAttention, x: Tensor, doc_starts: Tensor | None = None) -> Tensor:
    """Return a layer's output with a cache, in two chunks of prefill and one-token steps."""
    cache = KVCache(T)
    pieces = []
    for piece in x.split((9, 7, *[1] * 8), dim=1):
        ctx = AttentionContext(cache=cache)
        last = cache.position + piece.size(1)
        if doc_starts is not None:
            ctx.doc_starts = doc_starts[:, cache.position : last]
        pieces.append(layer(piece, ctx))
        cache.position = last
    return torch.cat(pieces, dim=1)


CHECKS = {
    "value+grad": value_and_gradient,
    "future": future_leak,
    "padding": padding_leak,
    "document": document_leak,
    "cache": cached,
}


def make_layer(attention: str) -> MultiHeadAttention:
    """Make a small layer, as moved_layer() does."""
    return moved_layer(small(attention))


def small(attention: str) -> GPTConfig:
    """Return the settings of a small layer."""
    return GPTConfig(
        attention=attention,
        n_embd=C,
        n_head=H,
        n_kv_head=HKV,
        attention_dropout=0.5,  # in eval mode it is off
        attention_window=WINDOW if "window" in attention else None,
        block_size=T,
        vocab_size=2,
    )


def moved_layer(config: GPTConfig) -> MultiHeadAttention:
    """Make a layer in eval mode, whose weights have moved from their initial values."""
    layer = make_attention(config).eval()
    layer.register_forward_pre_hook(give_tokens)
    check_output(layer, config)
    # At their initial values most modifiers and many own forms are the plain layer, which would hide a mistake.
    for name, parameter in layer.named_parameters():
        if not name.startswith(("qkv_proj", "o_proj", "q_norm", "k_norm")):  # the plain layer's are random or norms
            parameter.data += 0.3 * torch.randn_like(parameter)
    check_output(layer, config)
    return layer


def tried_layer(config: GPTConfig) -> MultiHeadAttention:
    """Make a layer, as moved_layer() does, after a check of its gradient.

    Raises SettingsError if that is not finite, before the weights move or afterwards.
    """
    moved = moved_layer(config)
    initial = make_attention(config).eval()
    initial.register_forward_pre_hook(give_tokens)
    for layer in (initial, moved):
        found = gradients(layer, example(config)).values()
        if not all(gradient.isfinite().all() for gradient in found if gradient is not None):
            raise SettingsError(f"attention={config.attention} has a gradient of infinity or NaN", FINITE)
    return moved


def give_tokens(layer: torch.nn.Module, arguments: tuple) -> tuple:
    """Give a layer token ids, 0 or 1 by the sign of x."""
    x, ctx = (*arguments, AttentionContext())[:2]
    ctx.tokens = (x[..., 0] > 0).long()
    return x, ctx


def run(
    check: str,
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Run one cell of the table: its number is the largest error as a share of the allowed one."""
    torch.manual_seed(0)
    layer = make_layer(attention).to(device, dtype)
    # Leave out a check that cannot hold: rounding to bfloat16 may choose other keys, and some forms take no mask.
    rounds = dtype == torch.bfloat16 and layer.is_sparse
    if (check in ("value+grad", "document") and rounds) or (check == "padding" and not layer.accepts_mask):
        return "n/a"
    with torch.no_grad():
        share = largest_error(CHECKS[check](layer, torch.randn(B, T, C, device=device, dtype=dtype)), dtype)
    return f"ok {share:.2f}" if share <= 1 else f"FAIL {share:.2g}"


def largest_error(pairs: Pairs, dtype: torch.dtype) -> float:
    """Return the largest error as a share of the one that is allowed there; NaN if any is NaN."""
    absolute, relative = TOLERANCE[dtype]
    shares = []
    for found, wanted in pairs:
        allowed = absolute + relative * wanted.double().abs()
        shares.append(((found.double() - wanted.double()).abs() / allowed).max())
    return torch.stack(shares).max().item()


@torch.no_grad()
def refuse_leak(attention: str, function: Callable[[Tensor], Tensor], texts: Tensor) -> None:
    """Raise SettingsError if later tokens change earlier results of a layer or a model.

    From some ten positions on, the tokens of texts (B, T, …) give way to others. function: returns (B, T, C).
    """
    # One position after the other: in a batch, copies of long texts would take the memory of a run.
    y = function(texts)
    T = texts.shape[1]
    # An odd stride has all remainders of 2 and 4 in either half of a text, for layers that join tokens in groups.
    for first in range(1, T, T // 10 | 1):
        changed = function(torch.cat((texts[:, :first], texts.flip(1)[:, first:]), dim=1))
        if (changed[:, :first] - y[:, :first]).abs().max() > 1e-4:
            problem = f"attention={attention} lets later tokens change earlier positions"
            raise SettingsError(problem, "correct it, for a layer that sees the future wins every comparison")


@torch.no_grad()
def check_output(layer: MultiHeadAttention, config: GPTConfig) -> None:
    """Raise SettingsError if a layer's output is not finite, repeatable and of x's shape."""
    x = example(config)
    y = layer(x)
    attention = f"attention={config.attention}"
    if y.shape != x.shape:
        problem = f"{attention} makes {tuple(y.shape)} of tokens {tuple(x.shape)}"
        raise SettingsError(problem, "return (…, H, T, Dv), a row for each query")
    if not y.isfinite().all():
        raise SettingsError(f"{attention} gives infinity or NaN", FINITE)
    if (y - layer(x)).abs().max() > 1e-4:
        raise SettingsError(f"{attention} gives two results for the same tokens", "keep state in ctx.layer_cache()")
    weights_of(layer, *give_tokens(layer, (x,)))


def weights_of(layer: MultiHeadAttention, x: Tensor, ctx: AttentionContext | None = None) -> Tensor:
    """Return layer.weights(); SettingsError if the layer sums up other values than its call's."""
    weights = layer.weights(x, ctx)
    if weights.shape[-1] != x.shape[-2]:
        problem = f"attention={layer.form} sums up other values than call.v, so nothing tells its weights"
        raise SettingsError(problem, "let attend() keep call.v, and change values before, in project()")
    return weights


def example(config: GPTConfig) -> Tensor:
    """Return tokens of two short texts, (2, 3, C)."""
    return torch.eye(6, config.n_embd).view(2, 3, -1)


def unreached(layer: MultiHeadAttention, x: Tensor) -> list[str]:
    """Return the names of the parameters that the gradient of a layer's output does not reach."""
    return [name for name, gradient in gradients(layer, x).items() if gradient is None]


def gradient_error(layer: MultiHeadAttention, x: Tensor) -> float:
    """Return the error of the gradient of a layer's output, as a share of the larger one.

    It is measured by differences of the output along a random step of x and all weights, in float64, for
    value_and_gradient() compares a backward of the layer's own with itself. The auxiliary loss is left out: parts of it
    get no gradient on purpose.
    """
    g = torch.randn_like(x)
    inputs = [x.detach().requires_grad_(), *layer.parameters()]
    with torch.enable_grad():
        y = layer(inputs[0])
    found = torch.autograd.grad(y, inputs, g, materialize_grads=True)
    steps = [torch.randn_like(part) for part in inputs]
    by_gradient = torch.stack([(gradient * step).sum() for gradient, step in zip(found, steps, strict=True)]).sum()

    ends = []
    with torch.no_grad():
        for sign in (1, -1):
            moved = copy.deepcopy(layer)
            for parameter, step in zip(moved.parameters(), steps[1:], strict=True):
                parameter.add_(step, alpha=sign * DIFFERENCE)
            ends.append((moved(x + sign * DIFFERENCE * steps[0]) * g).sum())
    by_differences = (ends[0] - ends[1]) / (2 * DIFFERENCE)
    largest = torch.stack((by_gradient.abs(), by_differences.abs())).max()
    return ((by_gradient - by_differences).abs() / largest.clamp(min=1e-9)).item()


def gradients(layer: MultiHeadAttention, x: Tensor) -> dict[str, Tensor | None]:
    """Return the gradient of a layer's output and loss, summed up, for each parameter.

    None where the gradient does not reach.
    """
    parameters = dict(layer.named_parameters())
    if not parameters:
        return {}
    y, loss = with_loss(layer, x, None)
    found = torch.autograd.grad(y.sum() + loss, [*parameters.values()], allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def combinations() -> Iterator[str]:
    """Yield every modifier beside every form that accepts it.

    sdpa stands for the forms in SOFTMAX.
    """
    for form in ("sdpa", *(form for form in FORMS if form not in SOFTMAX)):
        for modifier in (*SETTINGS, *MODIFIERS):
            try:
                make_attention(small(f"{form}+{modifier}"))
            except SettingsError:  # it says which of the two does not take the other
                continue
            yield f"{form}+{modifier}"


def main(arguments: list[str]) -> int:
    """Print the table of some attentions, or of all; return 1 if a check failed.

    arguments: the attentions, and code=FILE for a file that registers them.
    """
    # Run the files first: they register names.
    patterns = run_codes(arguments)
    attentions = [*dict.fromkeys(layer for pattern in patterns for layer in pattern.split("/"))]
    sizes = f"the check's n_embd={C}, n_head={H}, n_kv_head={HKV} and up to {T} tokens"
    with explained(file_of(arguments), sizes), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        return check_all(attentions)


def check_all(attentions: list[str]) -> int:
    """Print the table of some attentions, or of all; return 1 if a check failed."""
    # Try every layer once, before the long work, to find a mistake.
    for attention in attentions:
        layer = tried_layer(small(attention))
        untrained = unreached(layer.double(), torch.randn(B, T, C).double())  # as value+grad does
        if untrained:
            print(f"note: no gradient reaches {', '.join(untrained)} of {attention}\n")
        error = gradient_error(layer, torch.randn(B, T, C).double())
        if error > 1e-3:
            remedy = "correct its backward, unless a detach() or a rounding there is meant"
            print(f"note: the gradient of {attention} is {error:.1%} off differences of its output: {remedy}\n")

    # Print a table for each dtype, and by default one of all combinations.
    tables = [(dtype, attentions or [*FORMS]) for dtype in TOLERANCE]
    if not attentions:
        tables.append((torch.float32, [*combinations()]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failures = 0
    print(f"torch {torch.__version__} on {device}; a number is the worst error as a share of what is allowed\n")
    for dtype, names in tables:
        print(f"{str(dtype)[6:]:<29} " + " ".join(f"{check:<12}" for check in CHECKS))
        for attention in names:
            cells = [run(check, attention, device, dtype) for check in CHECKS]
            failures += sum(cell.startswith("FAIL") for cell in cells)
            print(f"{attention:<29} " + " ".join(f"{cell:<12}" for cell in cells), flush=True)
        print()
    print(f"{failures} of the checks failed" if failures else "every check passed")
    return min(failures, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small threads only wait for each other
    run_command(main)
