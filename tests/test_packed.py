"""The copy of a model that decodes: the same function in fewer, larger products, and nothing of the model changed."""

import copy

import pytest
import torch
from conftest import random_gpt
from torch import nn

import model.packed
from model.attention import forms
from model.packed import Joined, PackedLinear, PackedRMSNorm, packed


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("N", [384, 385])
@torch.no_grad()
def test_a_packed_layer_is_the_linear_layer_for_any_rows_and_threads(N, copied, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(model.packed, "COPIED", 10**9 if copied else 0)
    for bias in (True, False):
        layer = nn.Linear(300, N, bias=bias)
        fast = packed(nn.Sequential(layer))._modules["0"]
        assert isinstance(fast, PackedLinear if copied or N % threads == 0 else nn.Linear)
        for lead in ((1,), (4,), (1, 1), (2, 3), (1, 5)):
            x = torch.randn(*lead, 300)
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
