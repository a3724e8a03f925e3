"""Forms with a state are one function token by token and in chunks, at any length.

test_families.py has the gated delta rule against Qwen3-Next's and Kimi Linear's.
"""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, random_gpt, some

from model.attention import AttentionContext
from model.attention.call import Call
from model.attention.recurrent import CHUNK, LN_ZERO, in_chunks, token_by_token
from model.cache import KVCache

B, T, C, H, HKV, D = 2, 12, 16, 4, 2, 4


@pytest.mark.parametrize("written", ["all", "what is new"])
@pytest.mark.parametrize(
    ("N", "channels"),
    some([(n, channels) for n in (1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 5) for channels in (1, D)], 3),
)
def test_chunks_give_the_values_states_and_gradients_of_one_token_after_the_other(written, N, channels):
    """Fading as one or each channel by itself, however fast."""
    generator = torch.Generator().manual_seed(N)
    q, k, v, state = (torch.randn(B, H, n, D, generator=generator).double().requires_grad_() for n in (N, N, N, D))
    decay = (-30 * torch.rand(B, H, N, channels, generator=generator).double() ** 4).requires_grad_()
    beta = torch.rand(B, H, N, generator=generator).double().requires_grad_() if written != "all" else None
    inputs = [t for t in (q, k, v, decay, beta, state) if t is not None]
    for begins in (None, torch.rand(B, 1, N, generator=generator) < 0.1):
        results = []
        for scan in (token_by_token, in_chunks):
            log_decay = decay if begins is None else decay.masked_fill(begins[..., None], LN_ZERO)
            y, ended = scan(q, F.normalize(k, dim=-1), v, log_decay, beta, state)
            weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
            gradients = torch.autograd.grad((y * weight).sum() + ended.sum(), inputs, allow_unused=True)
            results.append((y, ended, *(torch.zeros(()) if g is None else g for g in gradients)))
        for a, b in zip(*results, strict=True):
            close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("channels", [1, D])
@pytest.mark.parametrize("rate", [0.1, 10, 1000])
def test_strong_decays_cost_no_precision(rate, channels):
    """Also beside weak ones, in float32; values and gradients."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, state = (torch.randn(B, H, n, D, generator=generator) for n in (70, 70, 70, D))
    log_decay = -rate * torch.rand(B, H, 70, channels, generator=generator) ** 3
    inputs = [q, F.normalize(k, dim=-1), v, log_decay, torch.rand(B, H, 70, generator=generator), state]
    results = []
    for scan, dtype in ((token_by_token, torch.float64), (in_chunks, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        y, ended = scan(*leaves)
        results.append((y, ended, *torch.autograd.grad(y.square().sum() + ended.sum(), leaves)))
    for a, b in zip(*results, strict=True):
        close(b.double(), a, rtol=2e-5, atol=2e-5 * a.abs().max().item())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, D])
def test_a_long_text_is_one_graph_in_which_the_state_alone_is_unrolled(channels, unchecked):
    sizes = []

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph

    for chunks in (4, 8):
        torch._dynamo.reset()
        N = chunks * CHUNK
        q, log_decay, beta, state = (
            torch.rand(1, *shape) for shape in ((H, N, D), (H, N, channels), (H, N), (H, D, D))
        )
        torch.compile(in_chunks, backend=backend, fullgraph=True)(q, q, q, -log_decay, beta, state)
    assert (sizes[1] - sizes[0]) / 4 < 10


@torch.no_grad()
def test_linear_attention_is_its_quadratic_form():
    linear, x = layer("linear", n_kv_head=HKV), torch.randn(B, T, C)
    q, k, v = linear.project(x)
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    close(linear(x), linear.merge(weights @ v))
    close(linear.weights(x), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [-60, -20, -8, 30])
def test_linear_attention_of_large_numbers_is_its_quadratic_form(shift, dtype):
    """elu + 1 loses its digits below 0, and a sum of weights may be too small or too large for half precision."""
    linear, x = layer("linear", qk_norm=False, qkv_bias=True).to(dtype), torch.randn(1, 300, C, dtype=dtype)
    torch.nn.init.constant_(linear.qkv_proj.bias[: 2 * C], shift)
    torch.nn.init.normal_(linear.o_proj.weight)
    y = linear(x)
    y.sum().backward()
    assert linear.qkv_proj.weight.grad.isfinite().all()
    with torch.no_grad():
        q, k, v = (t.double() for t in linear.project(x))
        q, k = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (q, k))
        weights = (q @ k.mT).tril()
        wanted = (weights / weights.sum(-1, keepdim=True)) @ v
        close(y, linear.merge(wanted.to(dtype)), rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.05)
        decoded, cache = [], KVCache(9)
        for t in range(9):
            decoded.append(linear(x[:, t : t + 1], AttentionContext(cache=cache)))
            cache.position += 1
        close(torch.cat(decoded, 1), y[:, :9], rtol=0.02, atol=1e-4 if dtype == torch.float32 else 0.05)


@torch.no_grad()
def test_retention_is_its_quadratic_form():
    retention, x = layer("retention"), torch.randn(B, T, C)
    q, k, v = retention.project(x)
    gamma = (1 - 2.0 ** (-5 - torch.arange(H)))[:, None, None]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    weights = (q @ k.mT / math.sqrt(D) * gamma ** distance.clamp(min=0)).tril()
    close(retention.weights(x), weights)
    close(retention(x), retention.merge(F.rms_norm(weights @ v, [D], eps=1e-6)))


def test_the_gated_delta_rule_begins_with_heads_that_fade_from_slowly_to_fast():
    for form in ("delta", "kda"):
        made = layer(form)
        close(made.log_rate.exp(), torch.linspace(1, 16, H))
        close(F.softplus(made.fade.bias), torch.full_like(made.fade.bias, 0.01))


@pytest.mark.parametrize("attention", some(["delta", "linear", "retention", "delta+key_offset+value_residual"], 2))
@pytest.mark.parametrize("borders", [(1, 63, 64, 65, 150), (30, 128), (100,), (64, 127, 129, 192)], ids=str)
@torch.no_grad()
def test_documents_longer_and_shorter_than_a_chunk_are_each_as_alone(attention, borders):
    model, tokens = random_gpt(attention=attention, block_size=200).double(), torch.randint(61, (1, 200))
    ends = [0, *borders, 200]
    doc_starts = torch.cat([torch.full((1, end - start), start) for start, end in pairwise(ends)], 1)
    alone = [model(tokens[:, start:end]) for start, end in pairwise(ends)]
    close(model(tokens, doc_starts=doc_starts), torch.cat(alone, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["linear", "retention", "delta"])
@torch.no_grad()
def test_states_are_float32_and_gathered_in_float32_whatever_the_precision(form):
    attention, x, cache = layer(form).bfloat16(), torch.randn(1, 700, C).bfloat16(), KVCache(700)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = attention.project(x)
        y = attention.attend(Call(q, k, v), x, AttentionContext(cache=cache))
    assert y.dtype == torch.bfloat16 and cache.layers[0]["state"].dtype == torch.float32
    wide = attention.float().attend(Call(q.float(), k.float(), v.float()), x.float(), AttentionContext())
    close(y.float(), wide, rtol=1e-2, atol=2e-3 * wide.abs().max().item())
