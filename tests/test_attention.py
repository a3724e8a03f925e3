"""The attention functions obey one contract: the same numbers, the same gradients, the same errors."""

import inspect
import itertools
import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import functional
from model.attention.contract import AttentionFunction
from model.attention.functional import ATTENTION_FUNCTIONS, SHORT, attention_weights, flex, fused, loop, matmul, sdpa
from model.attention.ladder import head_by_head
from model.attention.registry import FUNCTIONS
from model.attention.variants import softmax1
from model.masks import causal_mask, combine, padding_mask, sliding_window_mask

ALL = ATTENTION_FUNCTIONS | {"head_by_head": head_by_head}
ATTENTION_VARIANTS = {name: f for name, f in FUNCTIONS.items() if name not in ATTENTION_FUNCTIONS}
UNDER_CONTRACT = ALL | ATTENTION_VARIANTS
TRAINING = {name: f for name, f in ALL.items() if name != "flex"}  # flex has no gradients on a CPU, and no dropout


def each(functions):
    return pytest.mark.parametrize("attend", functions.values(), ids=functions)


@st.composite
def calls(draw):
    """Shapes and overlays of an attention call, as (q, k, v, keyword arguments) in float64."""
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T, S = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    D, Dv = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape):
        # float32 numbers, so that every precision starts from the same ones
        return torch.randn(*shape, generator=generator).double()

    H = kv_heads * group
    arguments = {}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float", "padding", "window", "empty rows"]))
    if kind == "causal":
        arguments["is_causal"] = True
    elif kind == "window":
        arguments["mask"] = sliding_window_mask(T, S, draw(st.integers(1, S)))
    elif kind == "padding":
        real = torch.rand(*lead, 1, 1, S, generator=generator) > 0.4
        arguments["mask"] = combine(real, causal_mask(T, S)) if draw(st.booleans()) else real
    elif kind != "none":
        full = [*lead, H, T, S]
        shape = [1 if draw(st.integers(0, 3)) == 0 else n for n in full]  # some axes broadcast,
        shape = shape[draw(st.integers(0, len(full) - 1)) :]  # and some leading ones are missing
        mask = torch.rand(shape, generator=generator) > 0.4
        if kind == "empty rows":
            mask = mask & (torch.rand([*shape[:-1], 1], generator=generator) > 0.5)
        arguments["mask"] = mask.float() if kind == "float" else mask
    if draw(st.booleans()):
        arguments["bias"] = randn(*draw(st.sampled_from([[H, T, S], [T, S], [H, 1, S], [*lead, H, T, S]])))
    if draw(st.booleans()):
        arguments["scale"] = draw(st.floats(0.1, 1.0))
    return randn(*lead, H, T, D), randn(*lead, kv_heads, S, D), randn(*lead, kv_heads, S, Dv), arguments


def value_and_gradients(attend, q, k, v, arguments, dtype):
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    if "bias" in arguments:
        arguments = {**arguments, "bias": arguments["bias"].to(dtype)}
    y = attend(q, k, v, **arguments)
    # An upstream gradient of norm at most 1 for each query
    weight = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape) / math.sqrt(y.shape[-1])
    return y, *torch.autograd.grad((y * weight).sum(), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40, deadline=None)
@given(call=calls())
def test_values_and_gradients_agree_with_the_float64_loop(dtype, call):
    *tensors, arguments = call
    tensors = [t.to(dtype).double() for t in tensors]
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"].to(dtype).double()
    reference = value_and_gradients(loop, *tensors, arguments, torch.float64)
    for name, attend in TRAINING.items():
        for got, wanted in zip(value_and_gradients(attend, *tensors, arguments, dtype), reference, strict=True):
            # bfloat16 has 8 bits, and a sum cannot be more exact than its largest term
            rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-2 * max(1, wanted.abs().max().item()))
            torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=8, deadline=None)
@given(calls())
def test_flex_values_agree_with_the_float64_loop(call):
    q, k, v, arguments = call
    in_float32 = {name: x.float() if name == "bias" else x for name, x in arguments.items()}
    got = flex(q.float(), k.float(), v.float(), **in_float32)
    torch.testing.assert_close(got.double(), loop(q, k, v, **arguments), rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(calls())
def test_the_loop_is_plain_arithmetic(call):
    """The oracle itself, against sums and exponentials of Python floats."""
    q, k, v, arguments = call
    H, T, D, S = q.shape[-3], q.shape[-2], q.shape[-1], k.shape[-2]
    group = H // k.shape[-3]
    scale = arguments.get("scale", 1 / math.sqrt(D))
    pairs = (*q.shape[:-1], S)
    mask = arguments.get("mask", torch.ones(T, S).tril(S - T) if "is_causal" in arguments else torch.ones(()))
    mask = mask.expand(pairs).reshape(-1, H, T, S).tolist()
    bias = arguments.get("bias", torch.zeros(())).expand(pairs).reshape(-1, H, T, S).tolist()
    got = loop(q, k, v, **arguments).reshape(-1, H, T, v.shape[-1])
    q, k, v = (t.reshape(-1, *t.shape[-3:]).tolist() for t in (q, k, v))
    for b, h, t in itertools.product(range(len(q)), range(H), range(T)):
        keys, values = k[b][h // group], v[b][h // group]
        exponentials = [
            math.exp(scale * sum(map(operator.mul, q[b][h][t], keys[s])) + bias[b][h][t][s]) * mask[b][h][t][s]
            for s in range(S)
        ]
        total = sum(exponentials) or 1
        wanted = [sum(map(operator.mul, exponentials, channel)) / total for channel in zip(*values, strict=True)]
        torch.testing.assert_close(got[b, h, t].tolist(), wanted)


@pytest.mark.parametrize("name", UNDER_CONTRACT)
def test_help_shows_the_signature_of_the_contract_and_the_form_s_own_words(name):
    attend = UNDER_CONTRACT[name]
    _, *contract = inspect.signature(AttentionFunction.__call__).parameters.values()  # without self
    assert list(inspect.signature(attend).parameters.values()) == contract
    assert attend.__name__ == name
    assert sum(attend.__doc__ == other.__doc__ for other in UNDER_CONTRACT.values()) == 1


# The numbers of the textbooks.


def scores_as_input(scores):
    """q, k, v for which the scaled scores are `scores` and the result is the weights: (1, 1, S)."""
    S = len(scores)
    return torch.ones(1, 1, 1), torch.tensor(scores).reshape(1, S, 1), torch.eye(S).reshape(1, S, S)


@each(ALL)
def test_equal_scores_average_the_past(attend):
    v = torch.randn(2, 3, 5, 4)
    y = attend(torch.zeros(2, 3, 5, 8), torch.randn(2, 3, 5, 8), v, is_causal=True)
    torch.testing.assert_close(y, torch.stack([v[..., : t + 1, :].mean(-2) for t in range(5)], -2))


@each(ALL)
def test_scores_of_a_tenth_and_two_tenths_weigh_0_4750_and_0_5250(attend):
    q, k, v = scores_as_input([0.1, 0.2, 0.3, 0.4])
    weights = attend(q, k, v, mask=torch.tensor([1.0, 1.0, 0.0, 0.0]), scale=1.0)
    torch.testing.assert_close(weights.flatten(), torch.tensor([0.4750, 0.5250, 0.0, 0.0]), atol=5e-5, rtol=0)
    assert weights.flatten()[2:].tolist() == [0.0, 0.0]


@each(ALL)
def test_huge_scores_do_not_overflow(attend):
    q, k, v = scores_as_input([1e4, 1e4, -1e4])
    torch.testing.assert_close(attend(q, k, v, scale=1.0).flatten(), torch.tensor([0.5, 0.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=12, deadline=None)
@given(call=calls(), D=st.sampled_from([16, 64, 256]))
@pytest.mark.slow
def test_scores_as_large_as_half_precision_holds_stay_finite_and_near_float64(dtype, D, call):
    """fp16 ends at 65,504. No score here is beyond 2^15, and all are exact; unscaled, the largest are √D times that."""
    (q, k, v), top = (t.to(dtype).double() for t in call[:3]), 2.0**15
    q = q.sign()[..., :1].expand(*q.shape[:-1], D) * top / math.sqrt(D)
    k = (2 * k).round().clamp(-2, 2)[..., :1].expand(*k.shape[:-1], D) / 2  # five kinds of keys, so that many tie
    arguments = {name: value for name, value in call[3].items() if name in ("mask", "is_causal")}
    torch.testing.assert_close(
        flex(*(t.to(dtype) for t in (q, k, v)), **arguments).double(), loop(q, k, v, **arguments), rtol=2e-2, atol=2e-2
    )
    for name, attend in (TRAINING | ATTENTION_VARIANTS).items():
        reference = value_and_gradients(
            attend if name in ATTENTION_VARIANTS else loop, q, k, v, arguments, torch.float64
        )
        for got, wanted in zip(value_and_gradients(attend, q, k, v, arguments, dtype), reference, strict=True):
            near = 2e-2 * max(1, top / D, wanted.abs().max().item())  # the keys' gradients are sums of scaled queries
            torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=near, msg=lambda m, n=name: f"{n}: {m}")


@each(TRAINING)
def test_dropout_of_a_half_leaves_zeros_and_twos_with_mean_one(attend):
    torch.manual_seed(0)
    # Equal weights 1/S on a value of ones times S: each kept weight contributes exactly 2, a dropped one 0.
    S = 64
    y = attend(torch.zeros(50, 4, 16, 8), torch.zeros(50, 4, S, 8), S * torch.eye(S).expand(50, 4, S, S), dropout_p=0.5)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert y.mean().item() == pytest.approx(1, abs=0.01)


@each(TRAINING)
def test_scores_of_variance_one_keep_it_whatever_the_head_size(attend):
    torch.manual_seed(0)
    for D in (4, 256):
        q, k = torch.randn(64, 1, 8, D), torch.randn(64, 1, 8, D)
        log_weights = attention_weights(q, k, attend=attend).log()
        scores = log_weights - log_weights.mean(-1, keepdim=True)  # the softmax hides each row's mean
        assert scores.var(-1).mean().item() == pytest.approx(1, abs=0.1)


# Causality, empty rows, grouped heads.


@each(UNDER_CONTRACT)
@pytest.mark.parametrize("T", [1, 2, 5, 7])
def test_causal_aligns_the_last_query_with_the_last_key(attend, T):
    """A chunk of the last T queries gives the last T rows of the whole."""
    q, k, v = torch.randn(2, 4, 7, 8), *torch.randn(2, 2, 4, 5, 8)
    whole = attend(q, k, v, is_causal=True)  # its first two queries stand before every key
    assert whole[:, :, :2].abs().max() == 0
    torch.testing.assert_close(attend(q[:, :, -T:], k, v, is_causal=True), whole[:, :, -T:])


@each(TRAINING | ATTENTION_VARIANTS)
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(attend):
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 5, 8).unbind())
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[0, :, 2] = False
    y = attend(q, k, v, mask=mask)
    assert y[0, :, 2].abs().max() == 0
    gradients = torch.autograd.grad(y.square().sum() + y[0, :, 2].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][0, :, 2].abs().max() == 0
    only_empty = torch.autograd.grad(attend(q, k, v, mask=mask)[0, :, 2].sum(), (q, k, v))
    assert all(g.abs().max() == 0 for g in only_empty)


@each(ALL)
@pytest.mark.parametrize(
    "shape",
    [(5,), (4, 1), (4, 4, 5), (3, 1, 1, 5), (3, 4, 1, 1), (1, 3, 1, 1, 5), (2, 1, 4, 4, 5), (2, 3, 1, 4, 1)],
)
def test_masks_and_biases_broadcast_to_two_batch_axes(attend, shape):
    q, k, v = torch.randn(2, 3, 4, 4, 8), torch.randn(2, 3, 2, 5, 8), torch.randn(2, 3, 2, 5, 8)
    full = (2, 3, 4, 4, 5)
    mask, bias = torch.rand(shape) > 0.3, torch.randn(shape)
    wanted = loop(*(t.double() for t in (q, k, v)), mask=mask.expand(full), bias=bias.double().expand(full))
    torch.testing.assert_close(attend(q, k, v, mask=mask, bias=bias).double(), wanted, rtol=1e-5, atol=1e-6)


@each(UNDER_CONTRACT)
def test_grouped_heads_equal_repeated_key_and_value_heads(attend):
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    repeated = [t.repeat_interleave(3, dim=1) for t in (k, v)]
    torch.testing.assert_close(attend(q, k, v, is_causal=True), attend(q, *repeated, is_causal=True))


@each(ALL)
def test_weights_sum_to_one_and_reproduce_the_output(attend):
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    weights = attention_weights(q, k, is_causal=True, attend=attend)
    assert weights.shape == (2, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    assert weights.triu(1).abs().max() == 0
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), matmul(q, k, v, is_causal=True))


# Variants: other functions.


@settings(max_examples=30, deadline=None)
@given(calls())
def test_softmax1_is_attention_with_one_more_key_that_scores_0_and_gives_nothing(call):
    q, k, _, arguments = call
    weights = attention_weights(q, k, **arguments, attend=softmax1)
    ordinary = attention_weights(q, k, **arguments)
    scores = q @ k.repeat_interleave(q.shape[-3] // k.shape[-3], -3).mT * arguments.get("scale", q.shape[-1] ** -0.5)
    # exp(s) / (1 + Σ exp) is the ordinary weight times Σ / (1 + Σ)
    total = torch.where(ordinary > 0, (scores + arguments.get("bias", 0)).exp(), 0).sum(-1, keepdim=True)
    torch.testing.assert_close(weights, ordinary * total / (1 + total))


# sdpa hands the work to the fused kernel.


OTHER_CASES = ["two batch axes causal", "one query", "no mask", "grouped", "padding"]


class Kernels(TorchDispatchMode):
    """Collects the operators that run and the largest tensor that they make."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.__name__)
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("case", ["causal", "grouped causal", "wide values causal", "no batch causal", *OTHER_CASES])
def test_sdpa_never_makes_the_scores_when_the_fused_kernel_can_do_without(case):
    T, D = 512, 16
    lead = {"no batch causal": (), "two batch axes causal": (2, 1)}.get(case, (2,))
    q = torch.randn(*lead, 4, 1 if case == "one query" else T, D)
    k = torch.randn(*lead, 2 if "grouped" in case else 4, T, D)
    v = torch.randn(*k.shape[:-1], 24 if "wide" in case else D)
    arguments = {"is_causal": "causal" in case or case == "one query"}
    if case == "padding":
        arguments = {"mask": padding_mask(torch.ones(2, T))}
    with Kernels() as kernels:
        y = sdpa(q, k, v, **arguments)
    assert any("scaled_dot_product_flash_attention" in name for name in kernels.names), kernels.names
    assert kernels.largest < T * T
    torch.testing.assert_close(y, matmul(q, k, v, **arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("T", "is_fused"), [(SHORT, False), (SHORT + 1, True)])
def test_sdpa_takes_the_fused_kernels_of_a_cpu_for_longer_texts_only(T, is_fused):
    q, k, v = torch.randn(3, 1, 2, T, 8)
    with Kernels() as kernels:
        sdpa(q, k, v, is_causal=True)
    assert any("flash_attention" in name for name in kernels.names) == is_fused, kernels.names


T4, A100 = (7, 5), (8, 0)
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("gpu", "dtype", "D", "biased", "shares"),
    [
        (A100, HALF, 8, False, True),
        (T4, HALF, 8, False, False),
        (A100, torch.float32, 8, False, False),
        (A100, HALF, 264, False, False),
        (A100, HALF, 8, True, False),
    ],
)
def test_key_heads_are_repeated_where_a_gpu_s_kernel_cannot_share_them(monkeypatch, gpu, dtype, D, biased, shares):
    def sdpa_of_torch(q, k, v, *_, enable_gqa, **__):
        given.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    given = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.setattr(functional.F, "scaled_dot_product_attention", sdpa_of_torch)
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, 5, D, device="cuda", dtype=dtype) for heads in (4, 2))
        bias = torch.empty(5, 5, device="cuda") if biased else None
        fused(q, k, k, bias=bias, is_causal=not biased)
    assert given == [(2, 2, True) if shares else (4, 4, False)]


# Bad input.

Q, K, V = (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)


@pytest.mark.usefixtures("unchecked")
@each(UNDER_CONTRACT)
@pytest.mark.parametrize(
    ("shapes", "arguments", "message"),
    [
        ([(5, 8), (5, 8), (5, 8)], {}, r"\(5, 8\).*"),
        ([Q, K[1:], V[1:]], {}, r"same rank.*\(2, 5, 8\)"),
        ([Q, (3, 2, 5, 8), (3, 2, 5, 8)], {}, r"leading dimensions.*\(3, 2, 5, 8\)"),
        ([Q, (2, 2, 5, 7), V], {}, r"same size D.*\(2, 2, 5, 7\)"),
        ([Q, K, (2, 2, 6, 8)], {}, r"one value.*\(2, 2, 6, 8\)"),
        ([Q, (2, 3, 5, 8), (2, 3, 5, 8)], {}, r"3 key/value heads must divide the 4 query heads"),
        ([Q, K, V], {"mask": torch.ones(5, 4)}, r"mask \(5, 4\) does not broadcast.*\(2, 4, 5, 5\)"),
        ([Q, K, V], {"mask": torch.ones(2, 5)}, r"mask \(2, 5\) does not broadcast.*padding_mask"),
        ([Q, K, V], {"mask": torch.ones(1, 2, 4, 5, 5)}, r"mask \(1, 2, 4, 5, 5\)"),
        ([Q, K, V], {"mask": torch.ones(5, 5), "is_causal": True}, r"mask \(5, 5\) together with is_causal"),
        ([Q, K, V], {"mask": torch.zeros(5, 5) - torch.inf}, r"mask \(5, 5\) has numbers other than"),
        ([Q, K, V], {"bias": torch.ones(3, 5, 5)}, r"bias \(3, 5, 5\) does not broadcast"),
        ([Q, K, V], {"dropout_p": 1.0}, r"dropout_p=1.0 must lie in \[0, 1\)"),
        ([Q, K, V], {"dropout_p": -0.1}, r"dropout_p=-0.1"),
    ],
)
def test_bad_input_is_a_value_error_that_names_the_shapes(attend, shapes, arguments, message):
    with pytest.raises(ValueError, match=message):
        attend(*(torch.randn(s) for s in shapes), **arguments)


@pytest.mark.usefixtures("unchecked")
def test_flex_keeps_no_mask_of_a_predictor_s_fake_tensors():
    q = torch.randn(1, 2, 11, 8)
    with FakeTensorMode() as fakes, torch.no_grad():
        flex(*[fakes.from_tensor(q)] * 3, is_causal=True)
    torch.testing.assert_close(flex(q, q, q, is_causal=True), matmul(q, q, q, is_causal=True))


def test_flex_says_what_it_lacks():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="no dropout"):
        flex(q, q, q, dropout_p=0.1)
    with pytest.raises(ValueError, match="on CUDA only: choose sdpa"):
        flex(q.requires_grad_(), q, q)


@each(TRAINING | ATTENTION_VARIANTS)
def test_nothing_to_attend_to_and_nothing_to_ask_keep_their_shapes(attend):
    assert attend(torch.randn(2, 4, 0, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)).shape == (2, 4, 0, 6)
    empty = attend(torch.randn(2, 4, 3, 8), torch.randn(2, 2, 0, 8), torch.randn(2, 2, 0, 6))
    assert torch.equal(empty, torch.zeros(2, 4, 3, 6))
