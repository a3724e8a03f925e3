"""The rungs of the ladder: each equals the next one's special case."""

import pytest
import torch

from model.attention import make_attention
from model.attention.functional import matmul
from model.attention.ladder import (
    average_loop,
    average_rows,
    average_softmax,
    average_triangle,
    simple_attention,
)
from model.config import AttentionConfig
from model.masks import padding_mask

C = 16


def layer(form, **settings):
    return make_attention(AttentionConfig(attention=form, **{"n_embd": C, "n_head": 4} | settings))


@pytest.mark.parametrize("average", [average_rows, average_triangle, average_softmax])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_every_way_to_average_the_past_is_one(average, lead):
    x = torch.randn(*lead, 8, C)
    torch.testing.assert_close(average(x), average_loop(x))


def test_the_average_of_the_loop_is_the_running_mean():
    x = torch.randn(3, 8, C)
    torch.testing.assert_close(average_loop(x), x.cumsum(1) / torch.arange(1, 9)[:, None])


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_the_averaging_layer_averages_its_values(position):
    attention, x = layer("average", position=position), torch.randn(2, 8, C)
    torch.testing.assert_close(attention(x), attention.o_proj(average_loop(attention.v_proj(x))))
    assert set(attention.state_dict()) == {"v_proj.weight", "o_proj.weight"}


def test_the_averaging_layer_averages_uniformly_over_what_the_mask_allows():
    attention, x = layer("average"), torch.randn(2, 4, C)
    real = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1]])
    weights = attention.weights(x, mask=padding_mask(real))[1, 0]
    expected = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0.5, 0, 0.5]])
    torch.testing.assert_close(weights, expected)


def test_simple_attention_is_the_inputs_as_their_own_queries_keys_and_values():
    x = torch.randn(2, 8, C)
    by_hand = torch.softmax(x @ x.mT / C**0.5, -1) @ x
    torch.testing.assert_close(simple_attention(x), by_hand)
    one_head = x.unsqueeze(-3)
    torch.testing.assert_close(simple_attention(x), matmul(one_head, one_head, one_head).squeeze(-3))


def test_the_simple_layer_is_causal_simple_attention_without_a_weight():
    attention, x = layer("simple", position="none"), torch.randn(2, 8, C)
    y = attention(x)
    for t in range(8):  # the last position of a text sees all of it
        torch.testing.assert_close(y[:, t], simple_attention(x[:, : t + 1])[:, -1])
    assert not list(attention.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_a_single_head_is_causal_attention_as_wide_as_the_model(bias):
    attention, x = layer("single_head", position="none", qk_norm=False, qkv_bias=bias), torch.randn(2, 8, C)
    q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    mask = torch.triu(torch.ones(32, 32), diagonal=1).bool()[:8, :8]  # made for 32, truncated to the input
    weights = torch.softmax((q @ k.mT).masked_fill(mask, -torch.inf) / C**0.5, -1)
    torch.testing.assert_close(attention(x), attention.o_proj(weights @ v))
    assert ("q_proj.bias" in attention.state_dict()) == bias


def test_a_single_head_is_multi_head_attention_with_one_head():
    single, one = layer("single_head", n_head=4), layer("matmul", n_head=1)
    one.load_state_dict(single.state_dict())
    x = torch.randn(2, 8, C)
    assert torch.equal(single(x), one(x))


@pytest.mark.parametrize(
    "settings", [{}, {"n_kv_head": 2, "qkv_bias": True}, {"n_kv_head": 1, "position": "alibi"}, {"head_size": 6}]
)
@pytest.mark.parametrize(("saved", "loaded"), [("stacked", "matmul"), ("matmul", "stacked")])
def test_stacked_and_split_heads_load_each_others_checkpoints(saved, loaded, settings):
    first, second = layer(saved, **settings), layer(loaded, **settings)
    second.load_state_dict(first.state_dict())
    x = torch.randn(2, 8, C, requires_grad=True)
    real = torch.ones(2, 8)
    real[1, :3] = 0
    for arguments in ({}, {"mask": padding_mask(real)}, {"mask": torch.rand(2, 4, 8, 8) > 0.3}):
        a, b = first(x, **arguments), second(x, **arguments)
        torch.testing.assert_close(a, b)
        for g, h in zip(
            torch.autograd.grad(a.square().sum(), [x, *first.parameters()]),
            torch.autograd.grad(b.square().sum(), [x, *second.parameters()]),
            strict=True,
        ):
            torch.testing.assert_close(g, h, rtol=1e-5, atol=1e-5)


def test_stacked_heads_compute_each_head_from_its_own_rows():
    attention, x = layer("stacked", position="none", qk_norm=False), torch.randn(2, 8, C)
    heads = []
    for h in range(4):
        q, k, v = (x @ p.weight[h * 4 : h * 4 + 4].T for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        future = torch.ones(8, 8).triu(1).bool()
        heads.append(torch.softmax((q @ k.mT / 2).masked_fill(future, -torch.inf), -1) @ v)
    torch.testing.assert_close(attention(x), attention.o_proj(torch.cat(heads, -1)))


@pytest.mark.parametrize("form", ["simple", "single_head", "stacked"])
def test_every_rung_with_scores_rotates_when_the_position_is_rope(form):
    turned, x = layer(form, position="rope"), torch.randn(1, 8, C)
    plain = layer(form, position="none")
    plain.load_state_dict(turned.state_dict())
    assert not torch.allclose(turned(x), plain(x), atol=1e-3)
    torch.testing.assert_close(turned(x, positions=torch.arange(8) + 30), turned(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(plain(x, positions=torch.arange(8) + 30), plain(x))


def test_scores_of_half_precision_do_not_overflow_before_they_are_scaled():
    x = 50 * torch.randn(2, 5, 64).sign()  # of its products with itself, 160,000, fp16 holds the eighth part only
    torch.testing.assert_close(simple_attention(x.half()).float(), simple_attention(x))
