"""Attention by chunks equals weighting.py and sparse.py: results, gradients, refusals."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt, some

from model.attention import FORMS, MODIFIERS, SETTINGS, make_attention
from model.attention import chunked as chunks
from model.attention.call import Call, Indexer
from model.attention.choice import best_of, indexed_keys, tie_gap
from model.attention.context import AttentionContext
from model.attention.contract import from_weights, of_weighting
from model.attention.masks import causal_mask, document_mask
from model.attention.sparse import IndexedAttention
from model.attention.weighting import Blockwise, Sigmoid, Softcap, Softmax, Sparsemax, Stick
from model.config import AttentionConfig

ROOT = Path(__file__).parent.parent
CAP = 3.0
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@from_weights
def sigmoid_exact(scores):
    """Sigmoid, whose ln n is float32's."""
    n = (scores > -torch.inf).sum(-1, keepdim=True)
    return torch.sigmoid(scores - n.to(scores.dtype).log())


matmul = FORMS["matmul"]
WEIGHTINGS = {each.name: each for each in (Softmax(), Softcap(CAP), Sigmoid(), Sparsemax(), Stick())}
DEFINITIONS = {
    "softmax": matmul,
    "softcap": of_weighting(Softcap(CAP)),
    "sigmoid": sigmoid_exact,
    "sparsemax": FORMS["sparsemax"],
    "stick": FORMS["stick"],
}
SIZES = [(1, 1), (7, 7), (130, 130), (300, 300), (1, 40), (70, 200)]
SIZES_OF = {torch.float64: SIZES, torch.float32: [(130, 130), (70, 200)]}


def chunked(weighting, q, k, v, *, row=None, column=None, **more):
    """Attention by chunks of queries."""
    weighting = WEIGHTINGS.get(weighting, weighting)
    return chunks.chunked(Call(q, k, v, weighting, row_column=None if row is None else (row, column), **more))[0]


def inputs(T, S, dtype=torch.float64, heads=2, D=8, Dv=8):
    shapes = (2, 4, T, D), (2, heads, S, D), (2, heads, S, Dv)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def documents(T, S):
    """The first row's documents have 50 tokens; the second row's first queries see nothing."""
    position = torch.arange(S - T, S)
    return torch.stack((position // 50 * 50, torch.full_like(position, 3)))


def compare(fast, definition, tensors, dtype=torch.float64):
    """fast(*tensors) and its gradients equal the definition in float64 on the same numbers."""
    narrow = [t.detach().to(dtype).requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    y, wanted = fast(*narrow), definition(*wide)
    g = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, narrow, g)]
    for a, b in zip(found, [wanted, *torch.autograd.grad(wanted, wide, g.double())], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=TOLERANCE[dtype] * max(1.0, b.abs().max().item()), rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", some(DEFINITIONS, 3))
def test_every_form_is_its_definition_at_every_length_with_a_cache_and_shared_heads(form, dtype):
    for T, S in SIZES_OF[dtype]:
        mask = causal_mask(T, S)
        for heads in (1, 2, 4):
            compare(
                lambda *qkv: chunked(form, *qkv),
                lambda *qkv, mask=mask: DEFINITIONS[form](*qkv, mask=mask),
                inputs(T, S, heads=heads),
                dtype,
            )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", some(DEFINITIONS, 2))
def test_every_form_is_its_definition_under_windows_and_documents(form, dtype):
    for T, S in SIZES_OF[dtype]:
        seen, starts = causal_mask(T, S), documents(T, S)
        cases = [
            ({"window": 20}, causal_mask(T, S, window=20)),
            ({"window": 90}, causal_mask(T, S, window=90)),
            ({"doc_starts": starts}, seen & document_mask(starts, S)),
            ({"doc_starts": starts, "window": 30}, causal_mask(T, S, window=30) & document_mask(starts, S)),
        ]
        for given, mask in cases:
            compare(
                lambda *qkv, given=given: chunked(form, *qkv, **given),
                lambda *qkv, mask=mask: DEFINITIONS[form](*qkv, mask=mask),
                inputs(T, S),
                dtype,
            )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", some(DEFINITIONS, 3))
def test_a_bias_that_is_a_sum_is_the_bias(form, dtype):
    for T, S in SIZES_OF[dtype]:
        row, column = torch.randn(2, 4, T), torch.randn(2, 4, S)
        mask = causal_mask(T, S, window=90)
        compare(
            lambda q, k, v, row, column: chunked(form, q, k, v, row=row, column=column, window=90),
            lambda q, k, v, row, column, mask=mask: DEFINITIONS[form](
                q, k, v, mask=mask, bias=row[..., None] + column[..., None, :]
            ),
            [*inputs(T, S), row, column],
            dtype,
        )


def with_a_key_in_front(definition, mask):
    """The definition with one more key of value 0, whose logit is the sink."""

    def attend(q, k, v, sink, row, column):
        bias = row[..., None] + column[..., None, :]
        bias = torch.cat((sink[:, None, None].expand(*bias.shape[:-1], 1), bias), -1)
        k, v = (F.pad(t, (0, 0, 1, 0)) for t in (k, v))
        return definition(q, k, v, mask=F.pad(mask, (1, 0), value=True), bias=bias)

    return attend


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", some(["softcap", "softmax", "sparsemax"], 3))
def test_a_sink_is_one_more_key_that_gives_nothing(form, dtype):
    for T, S in SIZES:
        more = [torch.randn(4), torch.randn(2, 4, T), torch.randn(2, 4, S)]
        compare(
            lambda q, k, v, sink, row, column: chunked(form, q, k, v, sink=sink, row=row, column=column),
            with_a_key_in_front(DEFINITIONS[form], causal_mask(T, S)),
            [*inputs(T, S), *more],
            dtype,
        )


def test_values_may_be_wider_or_narrower_than_keys():
    for Dv in (3, 20):
        tensors = inputs(100, 100, Dv=Dv)
        compare(lambda *qkv: chunked("softmax", *qkv, scale=0.9),
                lambda *qkv: matmul(*qkv, is_causal=True, scale=0.9), tensors)  # fmt: skip


@pytest.mark.parametrize("form", DEFINITIONS)
def test_gradients_are_those_of_the_result_with_what_dropout_dropped(form, monkeypatch):
    monkeypatch.setattr(chunks, "ROWS_OF_SHORT_TEXTS", 2)
    tensors = [torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    tensors += [torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for p in (0.0, 0.3):

        def attend(q, k, v, row, column, p=p):
            torch.manual_seed(3)
            return chunked(form, q, k, v, row=row, column=column, dropout_p=p)

        assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


def test_dropout_keeps_the_expected_weight_and_drops_its_share():
    q, k = torch.zeros(1, 1, 200, 4), torch.zeros(1, 1, 200, 4)
    v = torch.eye(200).expand(1, 1, -1, -1)
    weights = chunked("softmax", q, k, v, dropout_p=0.3)
    seen = causal_mask(200, 200)
    assert 0.28 < (weights[0, 0][seen] == 0).float().mean() < 0.32
    assert torch.allclose(weights.sum(-1)[..., 50:].mean(), torch.tensor(1.0), atol=0.02)


@pytest.mark.slow
def test_a_bias_that_runs_to_thousands_costs_near_keys_no_precision():
    T = 1100
    gates = -6 * torch.rand(1, 4, T, dtype=torch.float64)
    total = gates.cumsum(-1).float()  # down to -3,300, where float32 goes in steps of 0.0002
    q, k, v = (t.detach() for t in inputs(T, T, heads=4))
    wanted = matmul(q, k, v, is_causal=True, bias=total.double()[..., None] - total.double()[..., None, :])
    found = chunked("softmax", q.float(), k.float(), v.float(), row=total, column=-total)
    torch.testing.assert_close(found, wanted.float(), atol=3e-5, rtol=0)


@pytest.mark.parametrize("form", ["softmax", "softcap", "sigmoid", "stick"])
def test_in_bf16_only_the_products_are_rounded(form):
    T = 150
    q, k, v = inputs(T, T, torch.bfloat16)
    row = -torch.rand(2, 4, T).cumsum(-1)  # a token fades
    sink = None if form in ("sigmoid", "stick") else torch.randn(4)
    found = chunked(form, q, k, v, row=row, column=-row, sink=sink)
    wanted = chunked(form, q.double(), k.double(), v.double(), row=row, column=-row, sink=sink)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a.double(), b.double(), atol=3e-2 * b.abs().max().item(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("given", some(["both", "nothing", "documents", "window"], 4))
def test_blocks_are_mobas_choice_under_documents_and_windows(given, dtype):
    for T, S in SIZES:
        mask = causal_mask(T, S)
        more = {}
        if given in ("documents", "both"):
            more["doc_starts"] = documents(T, S)
            mask = mask & document_mask(more["doc_starts"], S)
        if given in ("window", "both"):
            more["window"] = 90
            mask = mask & causal_mask(T, S, window=90)
        block = max(1, T // 8)
        column = torch.randn(2, 4, S)

        compare(
            lambda *qkv, block=block, column=column, more=more: chunked(
                Blockwise(block, 3), *qkv, row=torch.zeros(1), column=column.to(qkv[0].dtype), **more
            ),
            lambda *qkv, block=block, mask=mask, column=column: of_weighting(Blockwise(block, 3))(
                *qkv, mask=mask, bias=column[..., None, :].double()
            ),
            inputs(T, S),
            dtype,
        )


@pytest.mark.parametrize("given", [{}, {"window": 40}, {"documents": True}])
def test_an_index_chooses_and_learns_as_the_layer_says(given):
    for T in (1, 7, 130, 300):
        config = AttentionConfig(
            attention="index", n_embd=32, n_head=4, block_size=max(8, T), position="none",
            attention_window=given.get("window"),
        )  # fmt: skip
        layer = IndexedAttention(config).double()
        x = torch.randn(2, T, 32, dtype=torch.float64)
        x[:, 5::7] = x[:, :1]  # tokens that nothing tells apart
        q, k, v = inputs(T, T, heads=4)
        starts = documents(T, T) if "documents" in given else None
        learned = [layer.index_proj.weight, layer.index_norm.weight, layer.index_norm.bias]

        ctx = AttentionContext(loss=torch.zeros((), dtype=torch.float64), doc_starts=starts)
        layer.function = matmul.by(matmul.executors[-1])  # without chunks
        wanted = layer.attend(layer.make_call(q, k, v, ctx), x, ctx), ctx.loss

        asks, key, share = layer.index_proj(x).split(layer.index_proj.parts, -1)
        asks = asks.unflatten(-1, (layer.index_heads, -1)).transpose(1, 2)
        indexer = Indexer(asks, layer.index_norm(key), share, layer.best, learns=True)
        call = Call(q, k, v, doc_starts=starts, window=given.get("window"), indexer=indexer)
        found = chunks.chunked(call)

        g = torch.randn_like(q), torch.tensor(0.7, dtype=torch.float64)
        sides = [[*y, *torch.autograd.grad(y, [q, k, v, *learned], g)] for y in (found, wanted)]
        for a, b in zip(*sides, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11 * max(1.0, b.abs().max().item()), rtol=0)


def test_equals_at_the_boundary_give_way_to_nearer_keys():
    index = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, -torch.inf], [4.0, 3.0, 2.0, 1.0, 0.0, -1.0]])
    chosen = best_of(index, 3, torch.full((2, 1), 1e-6))
    assert chosen.int().tolist() == [[0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.float64, [0, 3]), (torch.float32, [2, 3])])
def test_a_gap_of_some_roundings_of_its_type_is_no_difference_and_a_wider_one_decides(dtype, chosen):
    index = torch.tensor([[1 + 1e-6, 0.5, 1.0, 0.0]], dtype=dtype)  # 8 roundings of float32
    seen = torch.ones(1, 4, dtype=torch.bool)
    # Two keys for each query, its own one.
    assert indexed_keys(index.view(1, 1, 1, 4), seen, 2).nonzero()[:, -1].tolist() == chosen
    own_first = torch.tensor([[torch.inf]], dtype=dtype)
    assert best_of(torch.cat((index[:, :3], own_first), 1), 2, tie_gap(index)).nonzero()[:, -1].tolist() == chosen


def test_a_stick_that_is_spent_ends_the_look_and_changes_nothing():
    T = 400
    q, k, v = inputs(T, T)
    compare(lambda *qkv: chunked("stick", *qkv, scale=2.0),
            lambda *qkv: FORMS["stick"](*qkv, is_causal=True, scale=2.0), [q, k, v])  # fmt: skip


RECOMPUTED = [*FORMS, *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)), "softmax1+sink+window", "stick+forget"]


@pytest.mark.parametrize("attention", some(RECOMPUTED, 10))
def test_a_block_that_is_computed_again_has_the_same_gradients_in_a_long_text(attention):
    """recompute=block, at 320 tokens: the backward pass of chunks reads what the checkpoint unpacks once."""
    window = 40 if "window" in attention else None
    settings = {"attention": attention, "attention_window": window, "n_embd": 16, "n_head": 2, "block_size": 320}
    gpt = random_gpt(**settings, n_layer=2, vocab_size=11).train()
    tokens, targets = torch.randint(11, (2, 1, 320)).unbind()
    found = []
    for recomputes in (False, True):
        for block in gpt.blocks:
            block.activation_checkpointing = recomputes
        loss = gpt.loss(tokens, targets)
        found.append([loss, *torch.autograd.grad(loss, [*gpt.parameters()], materialize_grads=True)])
    for again, once in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(again, once)


def test_second_derivatives_are_refused():
    q, k, v = inputs(5, 5)
    y = chunked("softmax", q, k, v)
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dq.sum().backward()


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from model.attention.chunked import chunked
from model.attention.call import Call
from model.attention.weighting import Sigmoid, Softcap, Softmax, Sparsemax, Stick

for weighting in (Softmax(), Softcap(3.0), Sigmoid(), Sparsemax(), Stick()):
    torch._dynamo.reset()
    counter = CompileCounter()
    def attend(q, k, v, row):
        return chunked(Call(q * 2, k, v, weighting, window=30, row_column=(row, -row), dropout_p=0.1))[0] * 2
    compiled = torch.compile(attend, backend=counter)
    x = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)] + [torch.randn(1, 2, 70)]
    same = []
    for f in (attend, compiled):
        torch.manual_seed(0)
        y = f(*x)
        same.append(torch.cat([y, *torch.autograd.grad(y.sum(), x[:3])]))
    print(weighting.name, counter.frame_count, len(counters["graph_break"]), torch.equal(*same))
"""


@pytest.mark.long
def test_chunks_are_one_operator_to_a_compiler():
    run = [sys.executable, "-c", COMPILED]
    printed = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert printed[:-1] == [f"{form} 1 0 True" for form in DEFINITIONS]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_compiled_layer_goes_by_chunks_in_one_graph():
    layer = make_attention(AttentionConfig(attention="sdpa+forget", n_embd=16, n_head=2, block_size=300))
    x, ctx = torch.randn(1, 300, 16), AttentionContext()
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(layer.forward, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, ctx), layer(x, ctx))
    assert [name for name in called if "chunked" in name] == ["tinygpt.chunked.default"]


@pytest.mark.long
def test_a_first_call_imports_no_compiler():
    code = """
import sys, torch
from model.attention.chunked import chunked
from model.attention.call import Call
q = torch.randn(1, 2, 9, 4, requires_grad=True)
y, _ = chunked(Call(q, q, q))
y.sum().backward()
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# On a GPU


GPU_CASES = {
    "alone": {},
    "window": {"window": 40},
    "documents": {"doc_starts": documents(300, 300)},
    "both": {"doc_starts": documents(300, 300), "window": 40},
}


@pytest.mark.parametrize("given", GPU_CASES)
@pytest.mark.parametrize("form", some([*DEFINITIONS, "blockwise", "indexed"], 3))
def test_passes_that_look_at_no_number_compute_the_same(monkeypatch, form, given):
    weighting = {"blockwise": Blockwise(7, 2), "indexed": Softmax()}.get(form, form)
    q, k, v = inputs(300, 300)
    more = dict(GPU_CASES[given])
    if form not in ("sigmoid", "stick", "blockwise"):
        more["sink"] = torch.randn(4, dtype=torch.float64)
    if form == "indexed":
        index_k = torch.randn(2, 300, 8).round()  # with equals among them
        more["indexer"] = Indexer(torch.randn(2, 2, 300, 8).round(), index_k, torch.randn(2, 300, 2).round(), 20, False)
    found = []
    for reads in (True, False):
        monkeypatch.setattr(chunks, "reads_numbers", lambda q, reads=reads: reads)
        y = chunked(weighting, q, k, v, **more)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("keys", [2, 65, 257, 1500])
def test_newtons_steps_for_a_gpu_suffice_for_the_rows_that_need_most(monkeypatch, dtype, keys):
    """Scores whose number above τ falls by a fixed share in each step, and random ones of any spread."""
    monkeypatch.setattr(chunks, "reads_numbers", lambda q: False)
    far = torch.arange(1, keys + 1, dtype=torch.float64)
    rows = [-torch.log2(far), -far.sqrt() / keys**0.5, -1 + 1 / far, -(far / keys), torch.zeros(keys).double()]
    rows += [spread * torch.randn(keys, dtype=torch.float64) for spread in (1e-6, 1e-2, 1, 100)]
    scores = torch.stack(rows).to(dtype)  # as keys of one channel, seen by a query of 1
    n = len(rows)
    k = scores[:, None, :, None]
    q = torch.ones(n, 1, 1, 1, dtype=dtype)
    weights = chunked("sparsemax", q, k, torch.eye(keys, dtype=dtype).expand(n, 1, -1, -1), scale=1.0)[:, 0, 0]
    exact = WEIGHTINGS["sparsemax"].weights(scores.double())
    torch.testing.assert_close(weights.double(), exact, atol=100 * torch.finfo(dtype).eps, rtol=0)
