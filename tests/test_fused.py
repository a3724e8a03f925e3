"""What lies over the scores, folded into queries and keys for a GPU: results, gradients, the calls of torch."""

import pytest
import torch
import torch.nn.functional as F

from model.attention import FORMS, AttentionContext, fused, make_attention
from model.attention.call import Call
from model.attention.executors import FOLDED, OF_WEIGHTING, VARLEN, WEIGHTED, choose, run_call
from model.attention.fused import folded
from model.attention.masks import causal_mask
from model.cache import KVCache
from model.config import AttentionConfig

B, H, T, D = 2, 4, 70, 8
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
STARTS = torch.stack((torch.arange(T) // 20 * 20, torch.full((T,), 3)))  # the second row's first queries see nothing


def qkv(dtype, heads=H, Dv=D, S=T, T=T, D=D):
    shapes = (B, H, T, D), (B, heads, S, D), (B, heads, S, Dv)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def overlays(S=T, T=T):
    """A bias and a sink, as modifiers give them."""
    bias = torch.randn(B, H, T) * 3, torch.randn(B, H, S) * 3
    return [each.requires_grad_() for each in (*bias, torch.randn(H))]


class Varlen:
    """varlen_attn by the plain formula, as torch documents its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert q.dtype == k.dtype == v.dtype and q.dtype.itemsize == 2
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert enable_gqa == (q.shape[1] != k.shape[1])
        self.calls.append((cu_seq_q.tolist(), cu_seq_k.tolist(), max_q, max_k, window_size))
        texts = []
        for n in range(len(cu_seq_q) - 1):
            of_q, of_k = (slice(starts[n], starts[n + 1]) for starts in (cu_seq_q, cu_seq_k))
            one = [t.transpose(0, 1) for t in (q[of_q], k[of_k], v[of_k])]
            left, right = window_size
            assert right == 0
            mask = causal_mask(max_q, max_k, window=None if left == -1 else left + 1)
            texts.append(FORMS["matmul"](*one, mask=mask, scale=scale).transpose(0, 1))
        return torch.cat(texts)


@pytest.fixture
def varlen(monkeypatch):
    """varlen_attn, which a CPU lacks."""
    made = Varlen()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", made)
    return made


def exactly(call):
    """The plain formula."""
    return WEIGHTED.run(call)[0]


def compare(call, with_varlen=False):
    """Let folded() and its gradients be those of the plain formula in float64."""
    tensors = [call.q, call.k, call.v, *(call.row_column or ()), *([] if call.sink is None else [call.sink])]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    more = {
        "row_column": tuple(wide[3:5]) if call.row_column else None,
        "sink": None if call.sink is None else wide[-1],
    }
    wanted = exactly(call._replace(q=wide[0], k=wide[1], v=wide[2], **more))
    y = folded(call, with_varlen)
    assert y.dtype == call.q.dtype and y.shape == wanted.shape
    g = torch.randn_like(wanted)
    found = [y, *torch.autograd.grad(y, tensors, g.to(y.dtype), allow_unused=True)]
    exact = [wanted, *torch.autograd.grad(wanted, wide, g)]
    for place, (a, b) in enumerate(zip(found, exact, strict=True)):
        if a is None:  # rows, without a key in front
            assert place == 4 and b.abs().max() < 1e-8
            continue
        room = 4 if place > 3 and y.dtype.itemsize == 2 else 1  # sums of gradients that were rounded
        atol = room * TOLERANCE[y.dtype] * max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b, atol=atol, rtol=0)


@pytest.mark.parametrize("given", ["nothing", "bias", "sink", "bias+sink"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_biases_and_sinks_are_channels_and_rows_with_shared_heads_and_other_widths(given, dtype):
    for heads, Dv in ((4, 8), (2, 12), (1, 5)):
        row, column, sink = overlays()
        more = {"row_column": (row, column) if "bias" in given else None, "sink": sink if "sink" in given else None}
        compare(Call(*qkv(dtype, heads, Dv), scale=0.3, **more))


@pytest.mark.parametrize("given", ["nothing", "bias", "sink", "bias+sink"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_documents_are_channels_and_queries_before_their_text_see_nothing(given, dtype):
    row, column, sink = overlays()
    more = {"row_column": (row, column) if "bias" in given else None, "sink": sink if "sink" in given else None}
    call = Call(*qkv(dtype, 2), doc_starts=STARTS, **more)
    compare(call)
    assert folded(call)[1, :, :3].abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_hundreds_of_documents_and_biases_of_ten_thousand_cost_no_digit_that_the_type_has(dtype):
    length = 1500
    q, k, v = (t.detach()[:1, :1] for t in qkv(dtype, S=length, T=length, D=64, Dv=16))
    decay = -(torch.rand(1, 1, length, dtype=torch.float64) * 14).cumsum(-1).float()
    assert decay.min() < -10_000
    for call in (
        Call(q, k, v, row_column=(decay, -decay)),
        Call(q, k, v, doc_starts=(torch.arange(length) // 8 * 8)[None]),
    ):
        bias = call.row_column and tuple(t.double() for t in call.row_column)
        exact = exactly(call._replace(q=q.double(), k=k.double(), v=v.double(), row_column=bias))
        of_folded, of_matrix = ((y - exact).abs().max() for y in (folded(call), exactly(call)))
        assert of_folded < 1.5 * of_matrix


@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize("given", ["nothing", "bias", "documents", "everything"])
def test_windows_and_fewer_queries_than_keys_are_arguments_of_varlen_attn(given, window, varlen):
    row, column, _ = overlays()
    bias = (row, column) if given in ("bias", "everything") else None
    starts = STARTS if given in ("documents", "everything") else None
    call = Call(*qkv(torch.bfloat16, 2, 12), doc_starts=starts, window=window, row_column=bias)
    needs_varlen = window not in (None, T)
    assert choose(call, OF_WEIGHTING, "cuda") is (VARLEN if needs_varlen else FOLDED)
    compare(call, needs_varlen)
    rows = [0, T, 2 * T]
    assert varlen.calls == ([(rows, rows, T, T, (window - 1, 0))] if needs_varlen else [])

    # The last 30 of 70 positions, their keys in reach.
    if starts is None:
        bias = None if bias is None else tuple(overlays(S=T, T=30)[:2])
        part = Call(*qkv(torch.bfloat16, 2, T=30), window=window, row_column=bias)
        assert choose(part, OF_WEIGHTING, "cuda") is VARLEN
        compare(part, True)
        left = -1 if window is None else window - 1
        assert varlen.calls[-1] == ([0, 30, 60], rows, 30, T, (left, 0))


def test_calls_that_no_kernel_serves_without_a_matrix_go_elsewhere(monkeypatch):
    bf16, fp32 = torch.bfloat16, torch.float32
    row, column, sink = overlays()
    bias = row, column
    mask = torch.ones(T, T, dtype=torch.bool)
    cases = [
        (Call(*qkv(fp32), dropout_p=0.1), FOLDED),
        (Call(*qkv(fp32), sink=sink, dropout_p=0.1), FOLDED),
        (Call(*qkv(fp32), row_column=bias), WEIGHTED),  # its digits
        (Call(*qkv(fp32), doc_starts=STARTS), WEIGHTED),
        (Call(*qkv(fp32), window=20), WEIGHTED),  # no flash
        (Call(*qkv(bf16), row_column=bias, doc_starts=STARTS, sink=sink, dropout_p=0.1), FOLDED),
        (Call(*qkv(bf16), row_column=bias, doc_starts=STARTS, window=20), VARLEN),
        (Call(*qkv(bf16), window=20, dropout_p=0.1), WEIGHTED),  # no dropout
        (Call(*qkv(bf16), window=20, sink=sink), WEIGHTED),  # a key out of the window
        (FORMS["softmax1"].new_call(*qkv(bf16), window=20), WEIGHTED),  # whose null key is one
        (Call(*qkv(bf16), window=T, sink=sink), FOLDED),
        (Call(*qkv(bf16, D=256), window=20), WEIGHTED),  # too wide
        (Call(*qkv(bf16), mask=mask), WEIGHTED),
        (Call(*qkv(bf16, T=30)), VARLEN),
        (Call(*qkv(bf16, T=30), doc_starts=STARTS[:, :30]), WEIGHTED),  # whose are the keys?
        (Call(*qkv(bf16, T=1)), WEIGHTED),
    ]
    for call, executor in cases:
        assert choose(call, OF_WEIGHTING, "cuda") is executor

    # On a card that lacks FlashAttention's window.
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert choose(Call(*qkv(bf16), window=20), OF_WEIGHTING, "cuda") is WEIGHTED
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not fused.has_varlen(torch.device("cuda", 0)) and fused.has_varlen(torch.device("cpu"))


def layer(attention, **settings):
    config = AttentionConfig(attention=attention, n_embd=64, n_head=4, n_kv_head=2, block_size=T, **settings)
    made = make_attention(config).eval()
    for parameter in made.modifiers.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("document", [False, True])
@pytest.mark.parametrize(
    ("attention", "settings", "with_window"),
    [
        *((name, {}, False) for name in ("sdpa", "softmax1", "mla", "gta", "sdpa+forget", "sdpa+sink", "sdpa+diff")),
        *((name, {}, False) for name in ("softmax1+fade", "softmax1+sink", "sdpa+fade+sink", "sdpa+logn")),
        ("sdpa", {"position": "alibi"}, False),
        ("sdpa+sink", {"position": "alibi"}, False),
        *((name, {"attention_window": 20}, True) for name in ("sdpa", "sdpa+forget", "gta")),
    ],
)
@torch.no_grad()
def test_layers_compute_on_a_gpu_what_they_compute_on_a_cpu(attention, settings, with_window, document, varlen):
    made = layer(attention, **settings)
    x = torch.randn(B, T, 64)
    expected = made(x, AttentionContext(doc_starts=STARTS if document else None))
    made.bfloat16()
    x = x.bfloat16()
    found = made(x, AttentionContext(doc_starts=STARTS if document else None, device="cuda"))
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)
    assert len(varlen.calls) == with_window

    # In two parts by a cache, then one token.
    if not document and "sink" not in attention and "softmax1" not in attention:
        cache = KVCache(T)
        parts = []
        for part in x.split((40, T - 41, 1), 1):
            parts.append(made(part, AttentionContext(cache=cache, device="cuda")))
            cache.position += part.shape[1]
        torch.testing.assert_close(torch.cat(parts, 1).float(), expected, atol=0.04, rtol=0.04)
        assert len(varlen.calls) == 1 + 2 * with_window


def test_autocast_rounds_no_channel(varlen):
    q, k, v = (t.detach() for t in qkv(torch.float32))
    decay = -(torch.rand(B, H, T) * 100).cumsum(-1)
    expected = exactly(Call(q, k, v, row_column=(decay, -decay)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = run_call(Call(q, k, v, row_column=(decay, -decay)), (FOLDED,), "cuda")
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)


def test_dropout_goes_to_the_kernel(monkeypatch):
    seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **more: seen.append(args[4]) or attend(*args, **more)
    )
    folded(Call(*qkv(torch.float32), sink=torch.zeros(H), dropout_p=0.3))
    assert seen == [0.3]


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
def test_it_compiles_to_one_graph(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *rest, **more: q * 2)
    x = torch.randn(B, T, 64, dtype=torch.bfloat16)
    for attention, settings in (("softmax1+forget+sink", {}), ("sdpa+forget", {"attention_window": 20})):
        made = layer(attention, **settings).bfloat16()
        ctx = AttentionContext(doc_starts=STARTS, device="cuda")
        compiled = torch.compile(made.forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, ctx), made(x, ctx), atol=0.01, rtol=0)
