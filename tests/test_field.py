"""The forms and modifiers beyond multi-head attention equal their formulas and limits.

test_families.py has them against other people's code: softcap, mla, delta, kda, sinks, gates, partial rotation.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, random_gpt, some

from common.errors import SettingsError
from model.attention import FORMS, MODIFIERS, AttentionContext
from model.attention.call import Call, dense
from model.attention.check import make_layer
from model.attention.masks import causal_mask, padding_mask
from model.config import GPTConfig
from model.gpt import GPT
from model.rope import rotate

B, T, C, H, HKV, D = 2, 12, 16, 4, 2, 4
LATE = torch.zeros(B, T, dtype=torch.long)
LATE[1, 5:] = 5  # the second row holds two documents
loop = FORMS["loop"]


def plain_and(attention, **settings):
    """A modified layer as it begins, and the plain one with the same weights."""
    modified, plain = layer(attention, **settings), layer("sdpa", **settings)
    plain.load_state_dict(modified.state_dict(), strict=False)
    return modified, plain


@torch.no_grad()
def test_a_sink_that_never_wins_is_softmax_one_of_0_is_softmax1_and_any_is_a_gate():
    sink, plain = plain_and("sdpa+sink", n_kv_head=HKV, position="none")
    x, one = torch.randn(B, T, C), layer("softmax1", n_kv_head=HKV, position="none")
    one.load_state_dict(plain.state_dict())
    close(sink(x), one(x))
    bias = sink.modifiers["sink"].bias
    q, k, v = plain.project(x)
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    total = (q @ k.mT / math.sqrt(D)).masked_fill(~causal_mask(T, T), -torch.inf).logsumexp(-1)
    gate = torch.sigmoid(total - bias.normal_()[:, None])[..., None]
    close(sink(x), plain.merge(gate * loop(q, k, v, is_causal=True)))
    bias.fill_(-1e4)
    close(sink(x), plain(x))


@pytest.mark.parametrize("name", ["gate", "gate_element", "xsa", "value_residual"])
@torch.no_grad()
def test_what_begins_as_the_identity_is_the_plain_model_to_the_bit(name):
    shape, tokens = dict(vocab_size=9, n_embd=C, zero_init=False), torch.arange(9)[None]
    modified, plain = GPT(GPTConfig(attention=f"sdpa+{name}", **shape)), GPT(GPTConfig(**shape))
    plain.load_state_dict(modified.state_dict(), strict=False)
    assert torch.equal(modified(tokens), plain(tokens))


@torch.no_grad()
def test_forget_begins_as_alibi_and_is_the_running_sum_of_its_gates():
    forget, _ = plain_and("sdpa+forget", position="none")
    alibi, x = layer("sdpa", position="alibi"), torch.randn(B, T, C)
    alibi.load_state_dict(forget.state_dict(), strict=False)
    close(forget(x), alibi(x))
    gate = forget.modifiers["forget"].gate
    gate.weight.normal_()
    log_f = F.logsigmoid(x @ gate.weight.T + gate.bias)  # (B, T, H)
    bias = torch.zeros(B, H, T, T)
    for t in range(T):
        for s in range(t):
            bias[:, :, t, s] = log_f[:, s + 1 : t + 1].sum(1)
    close(forget(x), forget.merge(loop(*forget.project(x), bias=bias, is_causal=True)))


@torch.no_grad()
def test_fade_is_forget_whose_gates_do_not_look():
    fade, forget = layer("sdpa+fade", position="none"), layer("sdpa+forget", position="none")
    x, rate = torch.randn(B, T, C), torch.randn(H)
    fade.modifiers["fade"].rate.copy_(rate)
    forget.modifiers["forget"].gate.bias.copy_(rate)
    forget.load_state_dict({name: fade.state_dict().get(name, own) for name, own in forget.state_dict().items()})
    close(fade(x), forget(x))
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    bias = F.logsigmoid(rate)[:, None, None] * distance
    close(fade(x), fade.merge(loop(*fade.project(x), bias=bias, is_causal=True)))


@torch.no_grad()
def test_forget_sums_its_gates_in_float32_however_the_layer_computes():
    forget, x = make_layer("sdpa+forget").to(torch.bfloat16), torch.randn(1, 700, 32, dtype=torch.bfloat16)
    modifier, q = forget.modifiers["forget"], torch.randn(1, H, 700, 8, dtype=torch.bfloat16)
    total = F.logsigmoid(modifier.gate(x).double()).cumsum(-1)
    bias = dense(modifier.score(Call(q, q, q), x, AttentionContext()))[0].matrix
    close(bias.double(), total[..., :, None] - total[..., None, :], atol=1e-3)


@torch.no_grad()
def test_logn_multiplies_each_querys_scores_by_the_log_of_the_keys_that_it_sees():
    logn, x = layer("sdpa+logn", position="none"), torch.randn(B, T, C)
    close(logn.modifiers["logn"].factor, torch.full((H,), 0.43))
    q, k, v = logn.project(x)
    factor = logn.modifiers["logn"].factor.uniform_(0.2, 1)[:, None, None]
    real = torch.ones(B, T)
    real[1, :4] = 0
    for mask in (torch.ones(B, 1, T, T) > 0, padding_mask(real), torch.rand(B, H, T, T) > 0.3):
        mask = (mask & causal_mask(T, T)).expand(B, H, T, T)
        n = mask.sum(-1, keepdim=True).clamp(min=1)
        expected = logn.merge(loop(q * factor * n.log(), k, v, mask=mask))
        close(logn(x, AttentionContext(mask=mask)), expected)
    close(logn(x), logn(x, AttentionContext(mask=torch.ones(()))))


@torch.no_grad()
def test_diff_is_two_calls_of_the_function_with_one_mask_and_bias():
    settings, x = dict(n_kv_head=HKV, position="alibi"), torch.randn(B, T, C)
    diff, single = layer("matmul+diff+sink+logn", **settings), layer("matmul+sink+logn", **settings)
    for parameter in diff.modifiers.parameters():
        parameter.normal_()
    q, k, v = diff.project(x)
    assert q.shape == (B, 2 * H, T, D)
    single.modifiers.load_state_dict({name: t for name, t in diff.modifiers.state_dict().items() if "diff" not in name})
    single.o_proj, share = torch.nn.Identity(), torch.sigmoid(x @ diff.modifiers["diff"].weight.weight.T).mT[..., None]
    for mask in (None, torch.rand(B, 1, 1, T) > 0.3, torch.rand(B, H, T, T) > 0.3):
        results = []
        for number in (0, 1):
            single.project = lambda x, number=number: (q[:, number::2], k, v)
            results.append(single(x, AttentionContext(mask=mask)).unflatten(-1, (H, D)).transpose(1, 2))
        close(diff(x, AttentionContext(mask=mask)), diff.merge(results[0] - share * results[1]))
    weights = diff.weights(x)
    assert weights.shape == (B, H, T, T) and (weights < 0).any()
    two, mask = layer("sdpa+diff", n_head=2), torch.rand(B, 1, T, T) > 0.3
    close(two(x, AttentionContext(mask=mask.expand(-1, 2, -1, -1))), two(x, AttentionContext(mask=mask)))


@torch.no_grad()
def test_at_full_strength_xsa_leaves_nothing_along_the_tokens_own_value_whatever_its_size():
    xsa, x = layer("sdpa+xsa", n_kv_head=HKV), torch.randn(B, T, C)
    strength, xsa.o_proj = xsa.modifiers["xsa"].strength, torch.nn.Identity()
    v = xsa.project(x)[2].repeat_interleave(H // HKV, 1)
    before, direction = xsa(x).unflatten(-1, (H, D)).transpose(1, 2), F.normalize(v, dim=-1)
    for alpha, share in ((20, 1.0), (0.5, math.tanh(0.5))):
        strength.fill_(alpha)
        y = xsa(x).unflatten(-1, (H, D)).transpose(1, 2)
        close(y, before - share * (before * direction).sum(-1, keepdim=True) * direction)
    small = (1e-4 * v).half()  # whose squares fp16 does not hold
    got = xsa.modifiers["xsa"].half().finish(before.half(), small[:, ::2], x, AttentionContext())
    close(got.float(), y, atol=5e-3, rtol=1e-2)


@torch.no_grad()
def test_value_residual_mixes_in_the_values_of_the_first_layer_that_has_it():
    first, second = layer("sdpa+value_residual"), layer("sdpa+value_residual")
    second.modifiers["value_residual"].mixture.copy_(torch.tensor([0.3, 0.7]))
    x, z, now = torch.randn(B, T, C), torch.randn(B, T, C), AttentionContext()
    first(x, now)
    q, k, v = second.project(z)
    q, k = (rotate(t, second.rope.table(t)) for t in (q, k))
    close(second(z, now), second.merge(loop(q, k, 0.3 * v + 0.7 * first.project(x)[2], is_causal=True)))
    close(second(z), second.merge(loop(q, k, v, is_causal=True)))  # alone it is the first
    with pytest.raises(SettingsError, match="value_residual adds the values of layers with other heads: leave it out"):
        random_gpt(attention="single_head+value_residual/sdpa+value_residual")
    random_gpt(attention="sdpa+value_residual/single_head")


@torch.no_grad()
def test_key_offset_takes_the_second_half_of_a_key_from_the_token_before():
    offset, plain = plain_and("sdpa+key_offset", position="none", n_kv_head=HKV)
    x = torch.randn(B, T, C)
    q, k, v = plain.project(x)
    k[:, :, 1:, D // 2 :], k[:, :, 0, D // 2 :] = k[:, :, :-1, D // 2 :].clone(), 0
    close(offset(x), plain.merge(FORMS["matmul"](q, k, v, is_causal=True)))


# Patterns and combinations.

MIXED = ["sdpa+" + "+".join(MODIFIERS), "mla+diff+sink+gate", "delta+value_residual+key_offset+xsa+gate_element"]


@torch.no_grad()
def test_a_pattern_of_one_is_no_pattern_and_a_longer_one_says_each_layers_form():
    whole, tokens = random_gpt(attention="sdpa+gate", n_layer=3), torch.arange(9)[None]
    for pattern in ("sdpa+gate/sdpa+gate", " sdpa + gate / sdpa+gate/sdpa+gate/delta"):
        other = GPT(GPTConfig(**vars(whole.config) | {"attention": pattern})).eval()
        other.load_state_dict(whole.state_dict())
        assert torch.equal(other(tokens), whole(tokens))
    hybrid = random_gpt(attention="delta/sdpa+window/sdpa+nope", n_layer=5, attention_window=3)
    kinds = ["GatedDelta", "MultiHeadAttention", "MultiHeadAttention"] * 2
    assert [type(attention).__name__ for attention in hybrid.attentions] == kinds[:5]
    assert [attention.window for attention in hybrid.attentions] == [None, 3, None, None, 3]
    assert [attention.rope is None for attention in hybrid.attentions] == [True, False, True, True, False]
    both = random_gpt(attention="sdpa/matmul", attention_window=3)
    assert [attention.window for attention in both.attentions] == [3, 3]


@pytest.mark.parametrize("attention", some([*FORMS, *MIXED, "sdpa+window/delta/mla+sink"], 14))
def test_the_gradient_of_a_packed_window_is_that_of_its_documents_also_where_blocks_are_computed_again(attention):
    settings = {"attention": attention, "position": "learned", "attention_window": 3 if "window" in attention else None}
    gpt = random_gpt(**settings, n_layer=3).double().train()
    tokens, targets = torch.randint(61, (2, 1, T)).unbind()
    weights = [parameter for name, parameter in gpt.named_parameters() if "position" not in name]
    alone = gpt.loss(tokens[:, :5], targets[:, :5]) + gpt.loss(tokens[:, 5:], targets[:, 5:])
    wanted = torch.autograd.grad(alone, weights)
    for gpt.blocks[0].activation_checkpointing in (False, True):
        for got, want in zip(
            torch.autograd.grad(gpt.loss(tokens, targets, doc_starts=LATE[1:]), weights), wanted, strict=True
        ):
            close(got, want)
    assert all(want.any() for want in wanted)
