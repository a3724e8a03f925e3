"""The copy of a model that decodes: the same function in fewer, larger products, and nothing of the model changed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt
from torch import nn

import model.packed
from generation.decoder import Decoder
from model.attention import forms
from model.packed import Int8Linear, Joined, PackedLinear, PackedRMSNorm, PanelledLinear, packed, to_int8


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize(("N", "C"), [(384, 300), (385, 300), (384, 301)])
@pytest.mark.parametrize(("maker", "capability"), [("AMD", "AVX512"), ("AMD", "AVX2"), ("Intel", "AVX512")])
@torch.no_grad()
def test_a_packed_layer_is_the_linear_layer_on_any_processor(maker, capability, N, C, copied, threads, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": maker})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(model.packed, "COPIED", 10**9 if copied else 0)
    for bias in (True, False):
        layer = nn.Linear(C, N, bias=bias)
        fast = packed(nn.Sequential(layer))._modules["0"]
        assert type(fast) is (PackedLinear if copied else PanelledLinear if N % threads == 0 else nn.Linear)
        for lead in ((1,), (4,), (1, 1), (2, 3), (1, 5)):
            x = torch.randn(*lead, C)
            torch.testing.assert_close(fast(x), layer(x), atol=1e-5, rtol=1e-5)


def test_small_layers_and_other_types_than_float32_stay_as_they_are():
    for layer in (nn.Linear(30, 30), nn.Linear(400, 400).bfloat16(), nn.Linear(400, 400, device="meta")):
        assert type(packed(nn.Sequential(layer))._modules["0"]) is nn.Linear


@torch.no_grad()
def test_a_packed_norm_is_the_norm():
    norm = nn.RMSNorm(24, eps=1e-3)
    nn.init.normal_(norm.weight)
    fast = packed(nn.Sequential(norm))._modules["0"]
    assert isinstance(fast, PackedRMSNorm)
    for x in (torch.randn(2, 3, 24), 1e-3 * torch.randn(5, 24), torch.zeros(1, 24)):
        torch.testing.assert_close(fast(x), norm(x))


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("limits", [{"LARGE": 1}, {"LARGE": 1, "COPIED": 0}, {}], ids=str)
@torch.no_grad()
def test_a_packed_model_is_the_model_in_eval_mode_and_leaves_it_as_it_was(form, limits, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(model.packed, name, value)
    gpt = random_gpt(attention=form, n_kv_head=2, qkv_bias=True, dropout=0.5).train()
    names, weights = [name for name, _ in gpt.named_modules()], copy.deepcopy(gpt.state_dict())
    fast, tokens = packed(gpt), torch.randint(61, (2, 9))
    assert gpt.training and [name for name, _ in gpt.named_modules()] == names
    assert all(torch.equal(value, weights[name]) for name, value in gpt.state_dict().items())
    torch.testing.assert_close(fast(tokens), gpt.eval()(tokens), atol=1e-4, rtol=1e-4)
    joined = isinstance(fast.blocks[0].mlp._modules["up_proj"], Joined)
    assert joined == (limits.get("COPIED") != 0)


@torch.no_grad()
def test_a_packed_model_keeps_the_weights_it_was_made_with():
    gpt = random_gpt()
    fast, tokens = packed(gpt), torch.randint(61, (1, 9))
    before = fast.blocks[0].mlp(torch.ones(1, 1, 32))
    assert before.isfinite().all() and fast(tokens).shape == (1, 9, 61)
    gpt.blocks[0].mlp.up_proj.weight.zero_()
    assert torch.equal(fast.blocks[0].mlp(torch.ones(1, 1, 32)), before)


@pytest.fixture(params=[None, 63])
def largest(request, monkeypatch):
    """The largest whole number of an input: this processor's, or that of one without VNNI."""
    if request.param:
        monkeypatch.setattr(model.packed, "largest_input", lambda: request.param)
    return model.packed.largest_input()


@torch.no_grad()
def test_an_int8_layer_multiplies_rounded_weights_by_rounded_inputs(largest):
    torch.manual_seed(0)
    layer = nn.Linear(40, 8)
    layer.weight.data[1] = 0  # a row that nothing scales
    layer.weight.data[2] *= 1e-30
    rounded = Int8Linear(layer)
    weight = rounded.whole.double() * rounded.scale.double()[:, None]
    assert ((weight - layer.weight).abs() <= 0.501 * rounded.scale[:, None]).all() and rounded.whole.abs().max() == 127
    x = torch.randn(6, 2, 40)
    x[0, 0], x[1] = 0, 1e-30 * x[1]
    size = x.double().abs().amax(-1, keepdim=True) / largest
    exact = F.linear((x / size.clamp(min=1e-300)).round() * size, weight, layer.bias.double())
    torch.testing.assert_close(rounded(x).double(), exact, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_an_int8_layer_gives_a_token_the_same_bits_whatever_is_beside_it():
    layer = Int8Linear(nn.Linear(300, 70))
    x = torch.randn(33, 300) * torch.logspace(-3, 3, 33)[:, None]
    assert torch.equal(layer(x), torch.cat([layer(row) for row in x.split(1)]))


@torch.no_grad()
def test_no_int8_product_overflows_on_this_processor():
    layer = nn.Linear(256, 64, bias=False)
    nn.init.ones_(layer.weight)
    torch.testing.assert_close(Int8Linear(layer)(torch.ones(2, 256)), torch.full((2, 64), 256.0), rtol=1e-4, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings", [{}, {"tie_embeddings": True, "bias": True, "qkv_bias": True}, {"attention": "mla"}]
)
def test_a_model_in_int8_decodes_as_it_reads(settings):
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
    gpt = random_gpt(n_embd=64, **settings).eval()
    whole = gpt(tokens)
    to_int8(gpt)
    linears = [name for name, module in gpt.named_modules() if isinstance(module, nn.Linear)]
    assert all(name.endswith(("k_up", "v_up")) for name in linears)  # those that decoding reads
    rounded = gpt(tokens)
    error = (rounded - whole).norm() / whole.norm()
    assert 1e-4 < error < 0.1
    decoder = Decoder(gpt)
    logits = [decoder.read(tokens[:, :1].tolist(), room=tokens.size(1))]
    logits += [decoder.step(token) for token in tokens[:, 1:].unbind(1)]
    assert (torch.stack(logits, 1) - rounded).norm() < 0.02 * rounded.norm()
