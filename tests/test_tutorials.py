"""The forms of attention equal the tutorials' forms, from averages to stacked heads."""

import pytest
import torch
from conftest import close, layer
from einops import rearrange
from torch import nn

from model.attention import FORMS, AttentionContext
from model.attention.masks import causal_mask, padding_mask

matmul = FORMS["matmul"]
B, T, C, H = 3, 8, 16, 4
SEEN = causal_mask(T, T)


def softmax(scores):
    return scores.masked_fill(~SEEN, -torch.inf).softmax(-1)


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_average_is_the_running_mean_of_the_values_in_three_ways(position):
    attention, x = layer("average", position=position), torch.randn(B, T, C)
    v = attention.v_proj(x)
    looped = torch.stack([v[:, : t + 1].mean(1) for t in range(T)], 1)
    for means in (
        looped,
        torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None] @ v,
        softmax(torch.zeros(T, T)) @ v,
    ):
        close(attention(x), attention.o_proj(means))
    assert set(attention.state_dict()) == {"v_proj.weight", "o_proj.weight"}
    weights = attention.weights(x[:1, :4], AttentionContext(mask=padding_mask(torch.tensor([[0, 1, 0, 1]]))))
    close(weights[0, 0], torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0.5, 0, 0.5]]))


@pytest.mark.parametrize("bias", [False, True])
def test_simple_attention_a_single_head_and_stacked_heads_are_those_of_the_tutorials(bias):
    x, settings = torch.randn(B, T, C), dict(position="none", qk_norm=False, qkv_bias=bias)
    simple, single, stacked = (layer(form, **settings) for form in ("simple", "single_head", "stacked"))
    close(simple(x), softmax(x @ x.mT / C**0.5) @ x)
    assert not list(simple.parameters()) and ("qkv_proj.bias" in single.state_dict()) == bias
    q, k, v = single.qkv_proj(x).chunk(3, -1)
    after = (q @ k.mT / C**0.5).softmax(-1) * SEEN  # masked after the softmax or before it
    for weights in (softmax(q @ k.mT / C**0.5), after / after.sum(-1, keepdim=True)):
        close(single(x), single.o_proj(weights @ v))
    heads = []
    for q, k, v in zip(*(part.split(C // H, -1) for part in stacked.qkv_proj(x).chunk(3, -1)), strict=True):
        heads.append(softmax(q @ k.mT / 2) @ v)
    close(stacked(x), stacked.o_proj(torch.cat(heads, -1)))
    ours, theirs = layer(**settings), nn.MultiheadAttention(C, H, bias=bias, batch_first=True)  # torch's own
    theirs.in_proj_weight.data, theirs.out_proj.weight.data = ours.qkv_proj.weight.data, ours.o_proj.weight.data
    if bias:
        theirs.in_proj_bias.data = ours.qkv_proj.bias.data
    y, weights = theirs(x, x, x, attn_mask=~SEEN, average_attn_weights=False)
    close((ours(x), ours.weights(x)), (y, weights))


@pytest.mark.parametrize(
    "settings",
    [{}, {"n_kv_head": 2, "qkv_bias": True}, {"n_kv_head": 1, "position": "alibi"}, {"head_size": 6}, {"n_head": 1}],
    ids=str,
)
def test_stacked_heads_single_ones_and_split_ones_load_each_others_weights_and_are_one_function(settings):
    split, x = layer("matmul", **settings), torch.randn(2, T, C, requires_grad=True)
    real = torch.tensor([[1] * T, [0] * 3 + [1] * (T - 3)])
    for name in ("stacked", "sdpa", *(["single_head"] if settings.get("n_head") == 1 else [])):
        other = layer(name, **settings)
        other.load_state_dict(split.state_dict())
        for mask in (None, padding_mask(real), torch.rand(2, settings.get("n_head", H), T, T) > 0.3):
            results = []
            for each in (split, other):
                y = each(x, AttentionContext(mask=mask))
                results.append((y, *torch.autograd.grad(y.square().sum(), [x, *each.parameters()])))
            for a, b in zip(*results, strict=True):
                close(a, b)


def test_the_padded_batch_of_the_tutorial_is_masked_by_ones_and_zeros_of_each_text():
    """attention_mask (B, S) -> (B, 1, 1, S), scores filled with −∞ where it is 0."""
    attention_mask, x = torch.tensor([[1, 1], [1, 0], [1, 0]]), torch.rand(3, 2, 128)
    attention = layer(n_head=8, n_embd=128, position="none", qk_norm=False, bias=True, qkv_bias=True)
    q, k, v = (t.view(3, 2, 8, 16).transpose(1, 2) for t in attention.qkv_proj(x).chunk(3, -1))
    weights = torch.matmul(q, k.transpose(-2, -1)) / 16**0.5
    weights = weights.masked_fill(attention_mask[:, None, None].expand(3, 8, 2, 2) == 0, -torch.inf).softmax(-1)
    close(matmul(q, k, v, mask=padding_mask(attention_mask)), weights @ v)
    y = attention.o_proj((weights @ v).transpose(1, 2).contiguous().view(3, 2, 128))
    close(
        attention(x, AttentionContext(mask=padding_mask(attention_mask)))[:, 1], y[:, 1]
    )  # the last query, which sees all


def test_rotary_positions_are_given_for_each_token_and_turn_queries_and_keys_before_their_products():
    """Any leading dimensions; the mask is a float of 1 and 0."""
    attention, x = layer(qk_norm=False), torch.randn(2, B, T, C)
    positions = torch.arange(T).expand(2, 1, T) + torch.tensor([0, 50])[:, None, None]
    q, k, v = (rearrange(t, "... s (h d) -> ... h s d", h=H) for t in attention.qkv_proj(x).detach().chunk(3, -1))
    angle = rearrange(positions, "... s -> ... 1 s 1") / 10_000 ** (torch.arange(0, 4, 2) / 4)
    for t in (q, k):
        a, b = t[..., ::2].clone(), t[..., 1::2].clone()
        t[..., ::2], t[..., 1::2] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    y = softmax(torch.einsum("... q d, ... k d -> ... q k", q, k) / 4**0.5) @ v
    close(matmul(q, k, v, mask=SEEN.float().view(1, 1, 1, T, T)), y)
    rotation = attention.rope.cos_sin(positions.expand(2, B, T)).flatten(0, 1).unsqueeze(1)  # the same for all heads
    close(
        attention(x, AttentionContext(rotations={attention.rope: rotation})),
        attention.o_proj(rearrange(y, "... h s d -> ... s (h d)")),
    )


def test_the_equivalent_operators_of_the_tutorials_are_equivalent():
    weights, v = torch.rand(2, 3, 5, 5), torch.randn(2, 3, 5, 4)
    product, x = torch.matmul(weights, v), v.transpose(1, 2)
    assert torch.equal(product, weights @ v)
    close(product, torch.einsum("bhij,bhjd->bhid", weights, v))
    close(product, torch.bmm(weights.view(6, 5, 5), v.view(6, 5, 4)).view(2, 3, 5, 4))
    assert torch.equal(x, v.permute(0, 2, 1, 3)) and torch.equal(x, v.swapaxes(1, 2)) and not x.is_contiguous()
    for joined in (x.reshape(2, 5, 12), x.flatten(2), rearrange(v, "b h t d -> b t (h d)")):
        assert torch.equal(x.contiguous().view(2, 5, 12), joined)
    with pytest.raises(RuntimeError):
        x.view(2, 5, 12)
