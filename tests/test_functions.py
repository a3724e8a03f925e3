"""The attention functions obey one contract: equal numbers, gradients and errors."""

import inspect
import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import FORMS, SOFTMAX, AttentionContext, functions
from model.attention.contract import AttentionFunction, named_as, of_weighting
from model.attention.executors import FUSED, FUSED_MATRIX, of_steps
from model.attention.masks import alibi_slopes, alibi_sum, as_bool, causal_mask, padding_mask
from model.attention.weighting import PLAIN, Softcap
from model.cpu import SHORT

matmul, sdpa = FORMS["matmul"], FORMS["sdpa"]
fused = AttentionFunction("fused", "torch's kernels in texts of any length.", PLAIN, (FUSED, FUSED_MATRIX))
head_by_head = named_as(functions.head_by_head, PLAIN, (of_steps(functions.head_by_head),))
ALIKE = {name: FORMS[name] for name in SOFTMAX} | {"fused": fused, "head_by_head": head_by_head}
OTHERS = {name: FORMS[name] for name in ("softmax1", "sigmoid", "sparsemax")} | {"softcap": of_weighting(Softcap(2.0))}
ALL = ALIKE | OTHERS
each = pytest.mark.parametrize("attend", ALL.values(), ids=ALL)


# One oracle for all of them: the weights of a single query over the keys that it sees, by their formula.


def nearest_on_simplex(scores):
    """Sparsemax by bisection of its threshold, then by the formula of the keys above it."""
    low, high = scores.detach().max() - 1, scores.detach().max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (scores - middle).clamp(min=0).sum() > 1 else (low, middle)
    inside = scores > high
    return torch.where(inside, scores - (scores[inside].sum() - 1) / inside.sum(), 0)


WEIGHTS = {
    "softmax1": lambda scores: scores.exp() / (1 + scores.exp().sum()),
    "sigmoid": lambda scores: 1 / (1 + len(scores) * (-scores).exp()),
    "sparsemax": nearest_on_simplex,
}


def by_rows(name, q, k, v, *, mask=None, bias=None, is_causal=False, scale=None):
    """Attention one query at a time, over the keys that it sees alone."""
    H, T, D, S, rows = *q.shape[-3:], k.shape[-2], []
    if is_causal:
        mask = torch.tensor([[s - S <= t - T for s in range(S)] for t in range(T)])
    pairs = (*q.shape[:-1], S)
    mask = torch.ones(pairs, dtype=torch.bool) if mask is None else (mask == 1).expand(pairs)
    bias = torch.zeros(pairs) if bias is None else bias.expand(pairs)
    for *b, h, t in itertools.product(*map(range, q.shape[:-1])):
        at, shared = (*b, h, t), (*b, h * k.shape[-3] // H)
        seen = mask[at].nonzero().flatten()
        scores = k[shared][seen] @ q[at] * (1 / math.sqrt(D) if scale is None else scale)
        scores = (2.0 * torch.tanh(scores / 2.0) if name == "softcap" else scores) + bias[at][seen]
        if len(seen):
            weights = WEIGHTS[name](scores) if name in WEIGHTS else scores.exp() / scores.exp().sum()
            rows.append(weights @ v[shared][seen])
        else:
            rows.append(0 * (q.sum() + k.sum() + v[shared].sum(0)))
    return torch.stack(rows).view(*q.shape[:-1], v.shape[-1])


@st.composite
def calls(draw):
    """Shapes and overlays of an attention call, as (q, k, v, keyword arguments) in float64."""
    lead = draw(st.lists(st.integers(1, 2), max_size=2))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    T, S, D, Dv = (draw(st.integers(1, most)) for most in (5, 6, 9, 9))
    generator, arguments = torch.Generator().manual_seed(draw(st.integers(0, 2**31))), {}

    def randn(*shape):  # float32 numbers, so that every precision starts from the same ones
        return torch.randn(shape, generator=generator).double()

    def broadcasting():
        shape = [1 if draw(st.integers(0, 3)) == 0 else n for n in (*lead, kv_heads * group, T, S)]
        shape = shape[draw(st.integers(0, len(shape))) :]  # some axes are 1, and leading ones missing
        may_be_texts = len(lead) == 1 and len(shape) == 3 and shape[0] == lead[0] == kv_heads * group > 1
        return [1, *shape] if may_be_texts else shape  # such a shape is refused

    kind = draw(st.sampled_from(["none", "causal", "bool", "float", "window", "empty rows"]))
    if kind == "causal":
        arguments["is_causal"] = True
    elif kind == "window":
        arguments["mask"] = causal_mask(T, S, window=draw(st.integers(1, S)))
    elif kind != "none":
        mask = torch.rand(shape := broadcasting(), generator=generator) > 0.4
        if kind == "empty rows":
            mask = mask & (torch.rand([*shape[:-1], 1][: len(shape)], generator=generator) > 0.5)
        # Zeros alone may be a mask that is added to scores, and are refused.
        arguments["mask"] = mask.float() if kind == "float" and mask.any() else mask
    if draw(st.booleans()):
        arguments["bias"] = randn(*broadcasting())
    if draw(st.booleans()):
        arguments["scale"] = draw(st.floats(0.1, 1.0))
    return randn(*lead, kv_heads * group, T, D), randn(*lead, kv_heads, S, D), randn(*lead, kv_heads, S, Dv), arguments


def value_and_gradients(attend, q, k, v, arguments, dtype):
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    bias = {"bias": arguments["bias"].to(dtype)} if "bias" in arguments else {}
    y = attend(q, k, v, **arguments | bias)
    # An upstream gradient of norm at most 1 for each query
    weight = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape) / math.sqrt(y.shape[-1])
    return y, *torch.autograd.grad((y * weight).sum(), (q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], 2), ids=str)
@settings(max_examples=20)
@given(call=calls())
def test_values_and_gradients_are_those_of_the_formula_for_each_query(dtype, call):
    *tensors, arguments = call
    tensors = [t.to(dtype).double() for t in tensors]
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"].to(dtype).double()
    wanted = {}
    for name, attend in ALL.items():
        kind = name if name in OTHERS else "softmax"
        if kind not in wanted:
            by_row = lambda *qkv, kind=kind, **given: by_rows(kind, *qkv, **given)  # noqa: E731
            wanted[kind] = value_and_gradients(by_row, *tensors, arguments, torch.float64)
        got = value_and_gradients(attend, *tensors, arguments, dtype)
        # bfloat16 has 8 bits, and a sum cannot be more exact than its largest term; sparsemax has kinks.
        count = 1 if name == "sparsemax" and dtype == torch.bfloat16 else 4
        for a, b in zip(got[:count], wanted[kind][:count], strict=True):
            rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2e-2, 2e-2 * max(1, b.abs().max().item()))
            close(a.double(), b, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=12)
@given(call=calls(), D=st.sampled_from([16, 64, 256]))
def test_scores_as_large_as_half_precision_holds_stay_finite_and_near_float64(dtype, D, call):
    """fp16 ends at 65,504: scores are exact below 2^15, unscaled products √D times larger."""
    (q, k, v), top = (t.to(dtype).double() for t in call[:3]), 2.0**15
    q = q.sign()[..., :1].expand(*q.shape[:-1], D) * top / math.sqrt(D)
    k = (2 * k).round().clamp(-2, 2)[..., :1].expand(*k.shape[:-1], D) / 2  # five kinds of keys, so that many tie
    arguments = {name: value for name, value in call[3].items() if name in ("mask", "is_causal")}
    for name, attend in ALL.items():
        exact = value_and_gradients(attend if name in OTHERS else FORMS["loop"], q, k, v, arguments, torch.float64)
        for got, wanted in zip(value_and_gradients(attend, q, k, v, arguments, dtype), exact, strict=True):
            near = 2e-2 * max(1, top / D, wanted.abs().max().item())  # the keys' gradients are sums of scaled queries
            close(got.double(), wanted, rtol=2e-2, atol=near, msg=lambda m, n=name: f"{n}: {m}")


def test_help_shows_the_signature_of_the_contract_and_the_forms_own_words():
    contract = [*inspect.signature(sdpa).parameters.values()]
    for name, attend in ALL.items():
        assert list(inspect.signature(attend).parameters.values()) == contract
        assert attend.__name__ == attend.__qualname__ == name
    assert len({attend.__doc__ for attend in ALL.values()}) == len(ALL)
    assert {attend.__module__ for attend in OTHERS.values()} == {AttentionFunction.__module__}


@each
def test_dropout_of_a_half_leaves_zeros_and_doubled_weights_with_the_same_mean(attend):
    S = 64  # equal weights on an identity: each result is one weight
    q, k, v = torch.zeros(50, 4, 16, 8), torch.zeros(50, 4, S, 8), torch.eye(S).expand(50, 4, S, S)
    shares = (attend(q, k, v, dropout_p=0.5) / attend(q, k, v)).round(decimals=4)
    assert set(shares.unique().tolist()) == {0.0, 2.0} and shares.mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", ["sdpa", "sparsemax"])
def test_gradients_with_a_graph_are_those_without_where_keys_and_values_are_the_queries(name):
    x = torch.randn(4, 12, 8).bfloat16().requires_grad_()
    y = FORMS[name](x, x, x, is_causal=True)
    (without,) = torch.autograd.grad(y, x, y.detach(), retain_graph=True)
    (with_graph,) = torch.autograd.grad(y, x, y.detach(), create_graph=True)
    assert (with_graph - without).float().norm() < 0.02 * without.float().norm()


@each
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(attend):
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 5, 8).unbind())
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 2] = False
    y = attend(q, k, v, mask=mask)
    gradients = torch.autograd.grad(y.square().sum() + y[0, :, 2].sum(), (q, k, v))
    assert not y[0, :, 2].any() and all(g.isfinite().all() for g in gradients) and not gradients[0][0, :, 2].any()
    assert not any(g.any() for g in torch.autograd.grad(attend(q, k, v, mask=mask)[0, :, 2].sum(), (q, k, v)))
    # Nothing to attend to and nothing to ask keep their shapes.
    assert attend(torch.randn(2, 4, 0, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)).shape == (2, 4, 0, 6)
    assert not attend(torch.randn(2, 4, 3, 8), torch.randn(2, 2, 0, 8), torch.randn(2, 2, 0, 6)).any()


@pytest.mark.parametrize("attend", [sdpa, matmul, *OTHERS.values(), FORMS["stick"]], ids=lambda attend: attend.__name__)
def test_queries_before_the_first_key_get_zeros_and_change_nothing_in_long_texts_too(attend):
    before, S = 5, SHORT + 1
    q, k, v = (torch.randn(1, H, n, 4, requires_grad=True) for H, n in ((2, before + S), (1, S), (1, S)))
    y = attend(q, k, v, is_causal=True)
    assert not y[:, :, :before].any()
    rows = [0, 1, 63, 64, S - 1]  # of the other queries: row t sees t + 1 keys
    alone = [attend(q[:, :, [before + t]], k[:, :, : t + 1], v[:, :, : t + 1], is_causal=True) for t in rows]
    alone = torch.cat(alone, 2)
    found = y[:, :, [before + t for t in rows]]
    close(found, alone)
    weight = torch.arange(1.0, 6.0)[:, None]
    wanted = torch.autograd.grad((alone * weight).sum(), (q, k, v))
    gradients = torch.autograd.grad((found * weight).sum() + y[:, :, :before].sum(), (q, k, v))
    for a, b in zip(gradients, wanted, strict=True):
        close(a, b, atol=1e-5)


# sdpa hands the work to the fused kernels.


class Kernels(TorchDispatchMode):
    """Notes whether a fused operator runs, and the largest tensor that any makes."""

    fused, largest = False, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.fused |= "scaled_dot_product_flash_attention" in func.__name__
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


LONG, CAUSAL = 512, {"is_causal": True}
PADDED = {"mask": padding_mask(torch.arange(2 * LONG).view(2, LONG) % 3 > 0)}


@pytest.mark.parametrize(
    ("lead", "T", "S", "Hkv", "Dv", "arguments"),
    [
        *(((2,), LONG, LONG, Hkv, Dv, CAUSAL) for Hkv, Dv in ((4, 16), (2, 16), (4, 24), (4, 8))),
        *(((2,), T, LONG, 2, 16, arguments) for T, arguments in ((1, CAUSAL), (1, {}), (LONG, {}), (LONG, PADDED))),
        *(((2,), T, S, 2, 16, CAUSAL) for T, S in ((1, SHORT), (SHORT, SHORT), (SHORT + 1, SHORT + 1), (2, SHORT + 1))),
    ],
)
def test_sdpa_makes_no_scores_of_long_texts_where_the_fused_kernel_can_do_without(lead, T, S, Hkv, Dv, arguments):
    q, k, v = torch.randn(*lead, 4, T, 16), torch.randn(*lead, Hkv, S, 16), torch.randn(*lead, Hkv, S, Dv)
    with Kernels() as kernels:
        y = sdpa(q, k, v, **arguments)
    assert kernels.fused == (T == 1 or S > SHORT) and (S < LONG or kernels.largest < S * S)
    close(y, matmul(q, k, v, **arguments))


@pytest.mark.parametrize("shape", [(2, 3, 1, 1, 5), (3, 1, 5, 5), (2, 1, 4, 5, 1), (5, 1), (5,)], ids=str)
def test_the_fused_kernels_take_masks_of_any_leading_dimensions(shape):
    (q, k, v), mask = torch.randn(3, 2, 3, 4, 5, 8), torch.rand(shape) > 0.4
    close(fused(q, k, v, mask=mask), matmul(q, k, v, mask=mask))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "biased", "shares"),
    [
        ("cuda", (8, 0), torch.bfloat16, False, True),
        ("cuda", (8, 0), torch.float16, False, True),
        ("cuda", (8, 0), torch.bfloat16, True, False),  # a bias needs another kernel
        ("cuda", (8, 0), torch.float32, False, False),
        ("cuda", (7, 5), torch.float16, False, False),  # as on a T4, for which torch has no FlashAttention
        ("cuda", (7, 5), torch.bfloat16, False, False),  # which nobody chooses there, but a person may
        ("mps", None, torch.float16, False, False),
    ],
)
def test_key_heads_are_repeated_where_a_gpus_kernels_cannot_share_them(
    monkeypatch, device, capability, dtype, biased, shares
):
    given = []
    kernel = lambda q, k, v, *_, enable_gqa=False, **__: given.append((k.shape[1], v.shape[1], enable_gqa)) or q  # noqa: E731
    monkeypatch.setattr(functions.F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, 5, 8, device=device, dtype=dtype) for heads in (4, 2))
        fused(q, k, k, bias=torch.empty(5, 5, device=device) if biased else None, is_causal=not biased)
    assert given == [(2, 2, True) if shares else (4, 4, False)]


class Elsewhere(torch.Tensor):
    """A tensor that says it is not on a CPU."""

    is_cpu = False


@pytest.mark.parametrize("Dv", [8, 5])
@pytest.mark.parametrize("Hkv", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 3])
def test_heads_that_share_keys_are_queries_of_one_head_where_one_token_is_decoded_on_a_gpu(monkeypatch, T, Hkv, Dv):
    q, k, v = torch.randn(2, 4, T, 8), torch.randn(2, Hkv, 3, 8), torch.randn(2, Hkv, 3, Dv)
    kernel, copied = functions.F.scaled_dot_product_attention, []
    noted = lambda q, k, *others, **named: copied.append(k.shape[1] > Hkv) or kernel(q, k, *others, **named)  # noqa: E731
    monkeypatch.setattr(functions.F, "scaled_dot_product_attention", noted)
    close(fused(*(t.as_subclass(Elsewhere) for t in (q, k, v)), is_causal=True), matmul(q, k, v, is_causal=True))
    assert copied == [T > 1 and Hkv < 4]


# Masks.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_additive_mask_is_refused_with_lines_that_do_what_it_means(dtype):
    """A row of −∞ was NaN, and sigmoid counted the keys that the smallest number hides."""
    q = torch.randn(1, 2, 3, 4, dtype=dtype)
    for least in (torch.finfo(dtype).min, -torch.inf):
        bias = torch.tensor([[0.5, least, least], [0.0, 0.0, least], [least, least, least]], dtype=dtype)
        for name, attend in ALL.items():
            with pytest.raises(ValueError, match=r"bias \(3, 3\) hides keys by -(3|6|inf).*: pass mask = "):
                attend(q, q, q, bias=bias)
            mask = bias > torch.finfo(bias.dtype).min  # as the sentence says
            y = attend(q, q, q, mask=mask, bias=bias.masked_fill(~mask, 0))
            assert (y[:, :, 2] == 0).all()  # it sees nothing
            if name == "sigmoid":
                close(
                    y[:, :, 0],
                    torch.sigmoid(q[:, :, 0].square().sum(-1, keepdim=True) / 2 + 0.5) * q[:, :, 0],
                    atol=0.02,
                )
        with pytest.raises(ValueError, match=r"of an additive mask pass mask > torch.finfo\(mask.dtype\).min"):
            FORMS["sdpa"](q, q, q, mask=bias)


@pytest.mark.usefixtures("unchecked")
def test_a_mask_that_may_be_of_each_text_or_of_each_head_is_refused():
    q = torch.randn(3, 3, 5, 4)
    of_text = torch.rand(3, 5, 5) < 0.7
    of_text[:, :, 0] = True
    for name, attend in ALL.items():
        for overlay in ({"mask": of_text}, {"bias": of_text.float()}):
            with pytest.raises(
                ValueError, match=r"\(3, 5, 5\) may be of 3 texts or of 3 heads: write (mask|bias)\[:, None\]"
            ):
                attend(q, q, q, **overlay)
        alone = torch.cat([attend(q[i : i + 1], q[i : i + 1], q[i : i + 1], mask=of_text[i]) for i in range(3)])
        close(attend(q, q, q, mask=of_text[:, None]), alone, msg=name)
    two = q[:2]
    close(FORMS["sdpa"](two, two, two, mask=of_text), FORMS["sdpa"](two, two, two, mask=of_text[None]))  # of each head
    attention, x = layer(n_head=4), torch.randn(4, 5, 16)
    mask = torch.ones(4, 5, 5, dtype=torch.bool)
    for compute in (attention, attention.weights):
        with pytest.raises(ValueError, match="may be of 4 texts or of 4 heads"):
            compute(x, AttentionContext(mask=mask))


@pytest.mark.parametrize(("T", "S"), [(1, 5), (2, 5), (4, 4), (5, 2), (1, 1)])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 9])
def test_query_t_sees_the_window_of_keys_that_ends_at_its_own_position_from_the_end(T, S, window):
    mask = causal_mask(T, S, window=window)
    assert mask.tolist() == [[0 <= S - T + t - s < (window or S + T) for s in range(S)] for t in range(T)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_true_and_one_attend_false_and_zero_do_not_and_other_numbers_are_refused(dtype):
    assert as_bool(torch.tensor([1, 0]).to(dtype)).tolist() == [True, False]
    for value in (-torch.inf, 0.5, torch.nan) if dtype.is_floating_point else ():
        with pytest.raises(ValueError, match=r"mask \(3,\) has numbers other than 1"):
            as_bool(torch.tensor([1.0, 0.0, value]).to(dtype))


@pytest.mark.parametrize(("dtype", "remedy"), [(torch.bool, "pass it as mask"), (torch.long, r"bias\.float\(\)")])
def test_a_bias_of_no_floats_is_refused_with_what_was_meant(dtype, remedy, unchecked):
    q = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match=rf"bias \(3, 3\) is {dtype}: .*{remedy}"):
        FORMS["sdpa"](q, q, q, bias=torch.ones(3, 3).to(dtype))


def test_masks_that_are_no_tensors_of_numbers_are_refused_with_what_says_the_same(unchecked):
    """torch's own is a tensor by its class: as a bias it hid nothing."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # imports the compiler

    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    for odd in (causal_lower_right(3, 5), causal_upper_left(3, 5), causal_mask(3, 5).numpy(), [[True]]):
        message = f"is of type {type(odd).__name__}, which is no tensor of numbers: pass is_causal=True, .* create_mask"
        if not isinstance(odd, torch.Tensor):
            message = f"is of type {type(odd).__name__}: make a tensor of it, torch.tensor"
        for name in ("matmul", "sigmoid", "sdpa"):
            for overlay in ({"mask": odd}, {"bias": odd}):
                with pytest.raises(ValueError, match=message):
                    FORMS[name](q, k, v, **overlay)
        with pytest.raises(ValueError, match=message):
            layer("sdpa")(torch.randn(1, 3, 32), AttentionContext(mask=odd))
    with pytest.raises(ValueError, match=r"mask is of type ndarray: make a tensor of it, torch.tensor\(mask\)"):
        padding_mask(causal_mask(3, 5).numpy())
    for other in (torch.ones(5), torch.ones(2, 3, 5)):
        with pytest.raises(ValueError, match=r"needs the shape \(B, S\): give one text's as mask\[None\]"):
            padding_mask(other)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(3, 5))
    for remedy in ({"is_causal": True}, {"mask": causal_mask(3, 5)}):
        close(FORMS["matmul"](q, k, v, **remedy), wanted)


def test_floats_that_are_all_zero_are_an_additive_mask_and_refused():
    """transformers' mask of a batch without padding, which hides nothing there."""
    q = torch.randn(1, 2, 3, 4)
    for dtype in (torch.float32, torch.bfloat16):
        nothing = torch.zeros(3, 3, dtype=dtype)
        with pytest.raises(ValueError, match=r"mask \(3, 3\) of floats is 0 everywhere, .* additive mask as `bias`"):
            FORMS["sdpa"](q, q, q, mask=nothing)
        close(FORMS["sdpa"](q, q, q, bias=nothing), F.scaled_dot_product_attention(q, q, q, attn_mask=nothing.float()))
        assert not as_bool(nothing.bool()).any() and not as_bool(nothing.int()).any()
    assert as_bool(torch.zeros(0, 3)).shape == (0, 3)


def test_alibi_is_minus_slope_times_distance_and_slopes_halve_from_a_half():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)] and alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(12) == alibi_slopes(8) + alibi_slopes(16)[:8:2]  # the authors' rule where no power of two fits
    wanted = -torch.tensor([[2.0, 1, 0, -1], [3, 2, 1, 0]]) * torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
    row, column = alibi_sum(2, 2, 4)
    assert torch.equal(row[:, :, None] + column[:, None], wanted.double())


# Bad input.

Q, K, V = (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        *(
            ([q, k, v], {}, re.escape(f"where Hkv divides H: q is {q}, k is {k}, v is {v}."))
            for q, k, v in (
                *(((5, 8),) * 3, (Q, K[1:], V[1:]), (Q, K, V[1:]), (Q, K, (3, *V[1:])), (Q, (3, *K[1:]), V)),
                *((Q, (2, 2, 5, 7), V), (Q, K, (2, 2, 6, 8)), *((Q, (2, n, 5, 8), (2, n, 5, 8)) for n in (0, 3))),
            )
        ),
        ([Q, K, V], {"mask": torch.ones(2, 5)}, r"mask \(2, 5\) does not broadcast.*\(2, 4, 5, 5\).*padding_mask"),
        ([Q, K, V], {"mask": torch.ones(5, 5), "is_causal": True}, r"mask \(5, 5\) together with is_causal"),
        ([Q, K, V], {"mask": torch.zeros(5, 5) - torch.inf}, r"mask \(5, 5\) has numbers other than"),
        ([Q, K, V], {"bias": torch.ones(3, 5, 5)}, r"bias \(3, 5, 5\) does not broadcast"),
        *(
            ([Q, K, V], {"mask": torch.ones(s)}, re.escape(f"mask {s} does not"))
            for s in ((4,), (5, 4), (1, *Q[:3], 5))
        ),
        *(([Q, K, V], {"dropout_p": p}, rf"dropout_p={p} must lie in \[0, 1\)") for p in (1.0, -0.1)),
    ],
)
def test_bad_input_is_a_value_error_that_names_the_shapes(shapes, arguments, message):
    for attend in ALL.values():
        with pytest.raises(ValueError, match=message):
            attend(*(torch.randn(s) for s in shapes), **arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("T", [5, 300])
def test_a_factor_that_learns_is_refused_at_every_length_with_what_gives_it_a_gradient(T):
    """Some ways to compute took its number and gave it no gradient, by the length of the text."""
    q, k, v = (torch.randn(1, n, T, 8) for n in (4, 2, 2))
    scale = torch.full((), 0.3, requires_grad=True)
    for attend in ALL.values():
        for name, number in (("scale", scale), ("scale", torch.ones(4, 1, 1)), ("dropout_p", torch.tensor(0.5))):
            with pytest.raises(ValueError, match=f"{name} is a tensor: "):
                attend(q, k, v, is_causal=True, **{name: number})
    alone = layer("sdpa")
    alone.scale = nn.Parameter(torch.tensor(0.3))
    with pytest.raises(ValueError, match=r"q \* scale \(in a layer in a modifier's score\(\)\)"):
        alone(torch.randn(1, T, 16))

    def result(factor):
        return FORMS["sdpa"](q.double() * factor, k.double(), v.double(), is_causal=True, scale=1.0).square().sum()

    (gradient,) = torch.autograd.grad(result(scale), scale)
    close(gradient.double(), (result(0.3 + 1e-5) - result(0.3 - 1e-5)) / 2e-5, rtol=1e-3)


@pytest.mark.parametrize("T", [5, 300])
def test_queries_keys_and_values_of_two_types_are_refused_at_every_length_and_taken_by_autocast(T):
    """Some ways to compute would take them, by the length of the text."""
    q, k, v = (torch.randn(1, n, T, 8) for n in (4, 2, 2))
    half = [k.bfloat16(), v.bfloat16()]
    for attend in ALL.values():
        for mixed in ([q, *half], [q, k, half[1]], [q.double(), k, v]):
            with pytest.raises(ValueError, match="q is torch.float.*: give them one type"):
                attend(*mixed, is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = FORMS["sdpa"](q, *half, is_causal=True)
    close(found, FORMS["sdpa"](q.bfloat16(), *half, is_causal=True), atol=2e-2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_with_what_pads_them_and_that_is_each_text_alone(layout):
    """torch raised `NestedTensorImpl doesn't support sizes. Please file an issue.`"""
    lengths = (3, 1, 5)
    texts = [torch.randn(n, 4, 8) for n in lengths]
    q = torch.nested.nested_tensor(texts, layout=layout).transpose(1, 2)  # (B, H, T, D), T of each text
    padded = torch.nested.to_padded_tensor(q.contiguous(), 0)
    seen = torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=layout)
    mask = padding_mask(torch.nested.to_padded_tensor(seen.contiguous(), 0))
    for name in ("sdpa", "loop", "sigmoid"):
        attend = FORMS[name]
        for nested in ((q, q, q), (padded, padded, q)):
            with pytest.raises(ValueError, match=r"^[qv] is nested: .* torch.nested.to_padded_tensor\([qv].contiguous"):
                attend(*nested)
        found = attend(padded, padded, padded, mask=mask)
        for text, y in zip(texts, found, strict=True):
            alone = text.transpose(0, 1)
            close(y[:, : len(text)], attend(alone, alone, alone), msg=name)
    with pytest.raises(ValueError, match="^mask is nested"):
        padding_mask(seen)

    x = [text.flatten(1)[:, :16] for text in texts]
    nested = torch.nested.nested_tensor(x, layout=layout)
    for form in ("sdpa", "delta"):
        alone = layer(form)
        with pytest.raises(ValueError, match="^x is nested"):
            alone(nested)
        found = alone(torch.nested.to_padded_tensor(nested.contiguous(), 0))
        for text, y in zip(x, found, strict=True):
            close(y[: len(text)], alone(text[None])[0])
