"""The forms and modifiers beyond multi-head attention, against other people's code and the cases they reduce to."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt
from test_resume import assert_same_run, stop_at

from data.batches import document_starts
from errors import SettingsError
from generation.scoring import score
from generation.text import complete_text
from model.attention import FUNCTIONS, MODIFIERS, forms, make_attention
from model.attention.check import combinations, make_layer
from model.attention.places import Call, Here
from model.attention.recurrent import in_chunks, token_by_token
from model.config import AttentionConfig, GPTConfig
from model.gpt import GPT
from model.masks import causal_mask, document_mask, padding_mask
from model.rope import RotaryEmbedding, rotate
from runs.checkpoint import open_checkpoint
from runs.summary import read_summary
from train import train
from training.evaluation import evaluate
from training.optimizer import split_parameters
from training.start import start_run

B, T, C, H, HKV, D = 2, 12, 32, 4, 2, 8
LATE = torch.zeros(B, T, dtype=torch.long)
LATE[1, 5:] = 5  # the second row holds two documents


def layer(attention, **settings):
    return make_attention(AttentionConfig(attention=attention, **{"n_embd": C, "n_head": H} | settings)).eval()


def plain_and(attention, **settings):
    """A modified layer as it begins, and the plain one with the same weights."""
    modified, plain = layer(attention, **settings), layer("sdpa", **settings)
    plain.load_state_dict(modified.state_dict(), strict=False)
    return modified, plain


def close(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **{"rtol": 1e-4, "atol": 1e-5, **tolerance})


def qkv(n=3):
    return torch.randn(n, B, H, T, D)


def float_mask():
    return torch.zeros(T, T).masked_fill(~causal_mask(T, T), -torch.inf)


def theirs(name):
    """A model's file in transformers."""
    pytest.importorskip("transformers")
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


class Module(torch.nn.Module):
    """What eager_attention_forward wants to know of its layer."""

    def __init__(self, **attributes):
        super().__init__()
        self.num_key_value_groups, self.head_dim = 1, D
        vars(self).update(attributes)
        self.eval()


# Against other people's code.


@torch.no_grad()
def test_softcap_is_gemma_2s():
    q, k, v = 9 * qkv()
    expected, _ = theirs("gemma2").eager_attention_forward(
        Module(), q, k, v, float_mask(), scaling=D**-0.5, softcap=5.0
    )
    attend = layer("softcap", score_softcap=5.0).attend
    close(attend(q, k, v, is_causal=True), expected.transpose(1, 2))
    assert (attend(q, k, v, is_causal=True) - FUNCTIONS["matmul"](q, k, v, is_causal=True)).abs().max() > 0.1


@torch.no_grad()
def test_a_sink_is_gpt_oss():
    sink, x = layer("sdpa+sink", position="none"), torch.randn(B, T, C)
    sink.modifiers["sink"].bias.normal_()
    q, k, v = sink.project(x)
    module = Module(sinks=sink.modifiers["sink"].bias)
    expected, _ = theirs("gpt_oss").eager_attention_forward(module, q, k, v, float_mask(), scaling=D**-0.5)
    close(sink(x), sink.merge(expected.transpose(1, 2)))


@torch.no_grad()
def test_an_elementwise_gate_is_qwen3_nexts_but_for_the_2_that_begins_it_as_the_identity():
    modeling = theirs("qwen3_next")
    from transformers import Qwen3NextConfig

    ours, x = layer("sdpa+gate_element", position="none", n_kv_head=HKV, qk_norm=False), torch.randn(B, T, C)
    gate = ours.modifiers["gate_element"].gate.weight.normal_()
    config = Qwen3NextConfig(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=HKV, head_dim=D, attn_implementation="eager"
    )
    module = modeling.Qwen3NextAttention(config, 0).eval()
    both = torch.stack((ours.q_proj.weight.view(H, D, C), gate.view(H, D, C)), 1).flatten(0, 2)
    module.q_proj.weight.copy_(both)
    for name in ("k_proj", "v_proj", "o_proj"):
        getattr(module, name).weight.copy_(getattr(ours, name).weight)
    module.q_norm = module.k_norm = torch.nn.Identity()
    unturned = torch.ones(1, T, D), torch.zeros(1, T, D)
    expected, _ = module(x, unturned, float_mask()[None, None].expand(B, 1, T, T))
    close(ours(x), 2 * expected)


@pytest.mark.parametrize("scan", [token_by_token, in_chunks])
@torch.no_grad()
def test_the_gated_delta_rule_is_qwen3_nexts(scan):
    modeling, T = theirs("qwen3_next"), 150  # several chunks
    q, k, v = torch.randn(3, B, H, T, D)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    decay, beta, state = -torch.rand(B, H, T), torch.rand(B, H, T), torch.randn(B, H, D, D)
    swapped = [t.transpose(1, 2) for t in (q, k, v, decay, beta)]
    options = dict(initial_state=state, output_final_state=True)
    for reference in (modeling.torch_recurrent_gated_delta_rule, modeling.torch_chunk_gated_delta_rule):
        expected, last = reference(*swapped, **options)
        y, ended = scan(q / math.sqrt(D), k, v, decay, beta, None, state)
        close(y, expected.transpose(1, 2), atol=1e-4)
        close(ended, last, atol=1e-4)


@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_mla_is_deepseek_v3s(cached):
    modeling = theirs("deepseek_v3")
    from transformers import DeepseekV3Config

    ours, x = layer("mla", latent_size=12), torch.randn(B, T, C)
    turned, latent = ours.turned, ours.latent
    ours.c_norm.weight.uniform_(0.5, 2)
    config = DeepseekV3Config(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=None, kv_lora_rank=latent,
        qk_rope_head_dim=turned, qk_nope_head_dim=D, v_head_dim=D, head_dim=turned, attn_implementation="eager",
    )  # fmt: skip
    module = modeling.DeepseekV3Attention(config, 0).eval()
    q = ours.q_proj.weight.view(H, turned + D, C)  # ours has the rotated channels in front
    module.q_proj.weight.copy_(torch.cat((q[:, turned:], q[:, :turned]), 1).flatten(0, 1))
    module.kv_a_proj_with_mqa.weight.copy_(torch.cat((ours.c_proj.weight, ours.k_proj.weight)))
    module.kv_a_layernorm.weight.copy_(ours.c_norm.weight)
    up = torch.stack((ours.k_up.weight.view(H, D, latent), ours.v_up.weight.view(H, D, latent)), 1)
    module.kv_b_proj.weight.copy_(up.flatten(0, 2))
    module.o_proj.weight.copy_(ours.o_proj.weight)
    angles = modeling.DeepseekV3RotaryEmbedding(config)(x, torch.arange(T)[None])
    expected = module(x, angles, float_mask()[None, None].expand(B, 1, T, T))[0]
    close(in_pieces(ours, x) if cached else ours(x), expected)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_partial_rotation_is_gpt_neoxs(fraction):
    modeling = theirs("gpt_neox")
    from transformers import GPTNeoXConfig

    D = 16
    q = torch.randn(B, H, T, D)
    config = GPTNeoXConfig(hidden_size=H * D, num_attention_heads=H, rotary_pct=fraction)
    cos, sin = modeling.GPTNeoXRotaryEmbedding(config)(q, torch.arange(T)[None])
    n = int(fraction * D)
    halves = torch.cat((q[..., :n:2], q[..., 1:n:2], q[..., n:]), -1)  # they turn channel i with channel i + n/2
    expected, _ = modeling.apply_rotary_pos_emb(halves, halves, cos, sin)
    rope = layer("sdpa", n_embd=H * D, rope_fraction=fraction).rope
    got = rotate(q, rope.rotation(torch.zeros(T, 1)))
    close(torch.cat((got[..., :n:2], got[..., 1:n:2], got[..., n:]), -1), expected)


@pytest.mark.parametrize(("factor", "length"), [(4.0, 512), (16.0, 32_768), (2.0, 64)])
def test_yarn_is_that_of_transformers(factor, length):
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": factor}
    parameters["original_max_position_embeddings"] = int(length / factor)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=length, rope_parameters=parameters
    )
    frequencies, temperature = utilities.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = RotaryEmbedding(64, 10_000.0, "yarn", factor, length)
    angles = torch.arange(T)[:, None] * frequencies
    close(rope.rotation(torch.zeros(T, 1)), temperature * torch.stack((angles.cos(), angles.sin()), -1))


@pytest.mark.parametrize("pattern", ["sdpa+window/sdpa", "sdpa+window/sdpa+window/sdpa+window/sdpa"])
@torch.no_grad()
def test_a_pattern_of_windows_is_qwen3s_layer_types_there_and_back(pattern, tmp_path):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from interop.huggingface import from_huggingface, to_huggingface

    model = random_gpt(n_layer=5, attention=pattern, attention_window=4, block_size=32)
    assert to_huggingface(model, tmp_path) == "Qwen3ForCausalLM"
    tokens = torch.randint(61, (2, 20))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    close(model(tokens), reference(tokens).logits, atol=1e-4)
    close(from_huggingface(str(tmp_path))(tokens), model(tokens))


def test_sparsemax_meets_the_conditions_of_the_nearest_point_of_the_simplex():
    q, k, _ = 3 * qkv()
    weights = FUNCTIONS["sparsemax"](q, k, torch.eye(T).expand(B, H, T, T), is_causal=True)
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~causal_mask(T, T), -torch.inf)
    close(weights.sum(-1), torch.ones(B, H, T))
    assert (weights >= 0).all() and (weights == 0).any() and weights.masked_select(~causal_mask(T, T)).max() == 0
    inside = weights > 0
    tau = torch.where(inside, scores - weights, torch.nan).nanmean(-1, keepdim=True)
    close(torch.where(inside, scores - weights, tau), tau.expand_as(scores))  # one threshold for all that are inside,
    assert (scores <= tau + 1e-5)[~inside].all()  # which what is outside does not reach
    inputs = [t[:1, :1, :5].double().requires_grad_() for t in (q, k, torch.randn_like(q))]
    assert torch.autograd.gradcheck(lambda *qkv: FUNCTIONS["sparsemax"](*qkv, is_causal=True), inputs)


def test_sigmoid_is_its_formula_over_the_keys_in_sight():
    q, k, v = qkv()
    n = torch.arange(1, T + 1)[:, None]
    weights = torch.sigmoid(q @ k.mT / math.sqrt(D) - n.log()).tril()
    close(FUNCTIONS["sigmoid"](q, k, v, is_causal=True), weights @ v)


# What each reduces to.


@torch.no_grad()
def test_a_sink_that_never_wins_is_softmax_and_one_of_0_is_softmax1():
    sink, plain = plain_and("sdpa+sink", n_kv_head=HKV)
    x, one = torch.randn(B, T, C), layer("softmax1", n_kv_head=HKV)
    one.load_state_dict(plain.state_dict())
    close(sink(x), one(x))
    sink.modifiers["sink"].bias.fill_(-1e4)
    close(sink(x), plain(x))


@pytest.mark.parametrize("name", ["gate", "gate_element", "xsa", "value_residual"])
@torch.no_grad()
def test_what_begins_as_the_identity_is_the_plain_model_to_the_bit(name):
    modified, x = (
        GPT(GPTConfig(attention=f"sdpa+{name}", vocab_size=9, n_embd=C, zero_init=False)),
        torch.arange(9)[None],
    )
    plain = GPT(GPTConfig(vocab_size=9, n_embd=C, zero_init=False))
    plain.load_state_dict(modified.state_dict(), strict=False)
    assert torch.equal(modified(x), plain(x))


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
    close(forget(x), forget.merge(FUNCTIONS["loop"](*forget.project(x), bias=bias, is_causal=True)))


@torch.no_grad()
def test_logn_multiplies_each_querys_scores_by_the_log_of_its_keys():
    logn, x = layer("sdpa+logn", position="none"), torch.randn(B, T, C)
    attention_mask = torch.ones(B, T)
    attention_mask[1, :4] = 0
    q, k, v = logn.project(x)
    n = attention_mask.cumsum(-1).clamp(min=1)[:, None, :, None]
    factor = logn.modifiers["logn"].factor.uniform_(0.2, 1)[:, None, None]
    mask = padding_mask(attention_mask) & causal_mask(T, T)
    expected = logn.merge(FUNCTIONS["loop"](q * factor * n.log(), k, v, mask=mask))
    close(logn(x, mask=padding_mask(attention_mask))[1, 4:], expected[1, 4:])
    close(logn(x)[0], expected[0])


@torch.no_grad()
def test_diff_is_two_calls_of_the_function():
    diff, x = layer("sdpa+diff+sink+forget", n_kv_head=HKV, position="alibi"), torch.randn(B, T, C)
    for parameter in diff.modifiers.parameters():
        parameter.normal_()
    q, k, v = diff.project(x)
    assert q.shape == (B, 2 * H, T, D)
    single = layer("sdpa+sink+forget", n_kv_head=HKV, position="alibi")
    single.modifiers.load_state_dict({name: t for name, t in diff.modifiers.state_dict().items() if "diff" not in name})
    single.o_proj = torch.nn.Identity()
    results = []
    for number in (0, 1):
        single.project = lambda x, number=number: (q[:, number::2], k, v)
        results.append(single(x))
    share = torch.sigmoid(x @ diff.modifiers["diff"].weight.weight.T).mT[..., None]
    first, second = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in results)
    close(diff(x), diff.merge(first - share * second))


@torch.no_grad()
def test_at_full_strength_xsa_leaves_nothing_along_the_tokens_own_value():
    xsa, x = layer("sdpa+xsa", n_kv_head=HKV), torch.randn(B, T, C)
    xsa.modifiers["xsa"].strength.fill_(20)
    xsa.o_proj = torch.nn.Identity()
    v = xsa.project(x)[2].repeat_interleave(H // HKV, 1)
    y = xsa(x).unflatten(-1, (H, D)).transpose(1, 2)
    assert (y * v).sum(-1).abs().max() < 1e-4


@torch.no_grad()
def test_value_residual_mixes_in_the_values_of_the_first_layer():
    first, second = layer("sdpa+value_residual"), layer("sdpa+value_residual")
    second.modifiers["value_residual"].mixture.copy_(torch.tensor([0.3, 0.7]))
    x, z, carried = torch.randn(B, T, C), torch.randn(B, T, C), {}
    first(x, carried=carried)
    q, k, v = second.project(z)
    v = 0.3 * v + 0.7 * first.project(x)[2]
    q, k = second.rope(q), second.rope(k)
    close(second(z, carried=carried), second.merge(FUNCTIONS["loop"](q, k, v, is_causal=True)))


@pytest.mark.slow
def test_one_layer_with_key_offset_learns_induction_where_a_plain_one_cannot():
    """A random block of 6 to 16 tokens, twice: the loss on the second one after 300 steps."""
    losses = {}
    for attention in ("sdpa", "sdpa+key_offset"):
        torch.manual_seed(0)
        settings = dict(n_layer=1, n_head=2, n_embd=64, block_size=32, vocab_size=32, rope_fraction=0.5)
        gpt = GPT(GPTConfig(attention=attention, zero_init=False, **settings))
        optimizer = torch.optim.Adam(gpt.parameters(), lr=0.01)
        for _ in range(300):
            n = int(torch.randint(6, 17, ()))  # no fixed distance, which position alone would tell
            tokens = torch.randint(32, (32, n)).repeat(1, 2)
            logits = gpt(tokens[:, :-1])[:, n:]
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, n + 1 :].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[attention] = loss.item()
    assert losses["sdpa+key_offset"] < 0.5 < 1.0 < losses["sdpa"], losses


@torch.no_grad()
def test_retention_without_decay_is_linear_attention_without_phi_and_normaliser():
    q, k, v = qkv()
    y, _ = in_chunks(q, k, v, torch.zeros(1, T).expand(B, H, T), None, None, torch.zeros(B, H, D, D))
    close(y, (q @ k.mT).tril() @ v)


@torch.no_grad()
def test_linear_attention_is_its_quadratic_form():
    linear, x = layer("linear", n_kv_head=HKV), torch.randn(B, T, C)
    q, k, v = linear.project(x)
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    close(linear(x), linear.merge(weights @ v))
    close(linear.weights(x), weights)


@torch.no_grad()
def test_retention_is_its_quadratic_form():
    retention, x = layer("retention"), torch.randn(B, T, C)
    q, k, v = retention.project(x)
    gamma = (1 - 2.0 ** (-5 - torch.arange(H)))[:, None, None]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    weights = (q @ k.mT / math.sqrt(D) * gamma ** distance.clamp(min=0)).tril()
    close(retention.weights(x), weights)
    close(retention(x), retention.merge(F.rms_norm(weights @ v, [D], eps=1e-6)))


@torch.no_grad()
def test_a_pattern_of_one_is_no_pattern_and_a_longer_one_says_each_layers_form():
    whole, tokens = random_gpt(attention="sdpa+gate", n_layer=3), torch.arange(9)[None]
    for pattern in ("sdpa+gate/sdpa+gate", "sdpa+gate/sdpa+gate/sdpa+gate/delta"):
        other = GPT(GPTConfig(**vars(whole.config) | {"attention": pattern})).eval()
        other.load_state_dict(whole.state_dict())
        assert torch.equal(other(tokens), whole(tokens))
    hybrid = random_gpt(attention="delta/sdpa+window", n_layer=5, attention_window=3)
    assert [type(block.attention).__name__ for block in hybrid.blocks] == ["GatedDelta", "MultiHeadAttention"] * 2 + [
        "GatedDelta"
    ]
    assert [block.attention.window for block in hybrid.blocks] == [None, 3, None, 3, None]


# The contract holds for all.


def in_pieces(attention, x, sizes=(5, 3, 1, 1, 1, 1)):
    """What a layer gives with a cache, in chunks and single tokens."""
    from model.kv_cache import KVCache

    cache, pieces = KVCache([attention.make_store(len(x), T, None, x.device, x.dtype)]), []
    for piece in x.split(sizes, 1):
        pieces.append(attention(piece, cache=cache))
        cache.advance(piece.size(1))
    return torch.cat(pieces, 1)


EVERY = [*forms(), *combinations()]
MIXED = ["sdpa+" + "+".join(MODIFIERS), "mla+diff+sink+gate", "delta+value_residual+key_offset+xsa+gate_element"]


@pytest.mark.parametrize("attention", [*EVERY, *MIXED])
@torch.no_grad()
def test_a_packed_window_is_every_document_alone_and_nothing_leaks_over_the_border(attention):
    attention, x = make_layer(attention), torch.randn(B, T, C)
    apart = {"mask": document_mask(LATE), "begins": torch.arange(T) == LATE}
    y = attention(x, **apart)
    close(y[0], attention(x[:1])[0])
    close(y[1:], torch.cat((attention(x[1:, :5]), attention(x[1:, 5:])), 1))
    changed = torch.cat((torch.randn(B, 5, C), x[:, 5:]), 1)
    close(attention(changed, **apart)[1, 5:], y[1, 5:], atol=1e-6)


@pytest.mark.parametrize("attention", [*(form for form in forms() if form != "flex"), *MIXED])
def test_the_gradient_of_a_packed_window_is_that_of_its_documents(attention):
    window = 3 if "window" in attention else None
    gpt = random_gpt(
        attention=attention, position="rope" if "nope" in attention else "learned", attention_window=window
    )
    gpt, (tokens, targets) = gpt.double().train(), torch.randint(61, (2, 1, T)).unbind()
    weights = [parameter for name, parameter in gpt.named_parameters() if "position" not in name]
    together = torch.autograd.grad(gpt(tokens, targets, starts=LATE[1:]), weights)
    alone = gpt(tokens[:, :5], targets[:, :5]) + gpt(tokens[:, 5:], targets[:, 5:])
    for got, wanted in zip(together, torch.autograd.grad(alone, weights), strict=True):
        close(got, wanted)


@pytest.mark.parametrize("attention", ["linear", "retention", "delta", "delta+key_offset+value_residual"])
@pytest.mark.parametrize("borders", [(1, 63, 64, 65, 150), (30, 128), (100,), (64, 127, 129, 192)], ids=str)
@torch.no_grad()
def test_documents_longer_and_shorter_than_a_chunk_of_a_state_are_each_as_alone(attention, borders):
    model, tokens = random_gpt(attention=attention, block_size=200).double(), torch.randint(61, (1, 200))
    ends = [0, *borders, 200]
    starts = torch.cat([torch.full((1, end - start), start) for start, end in pairwise(ends)], 1)
    alone = [model(tokens[:, start:end]) for start, end in pairwise(ends)]
    torch.testing.assert_close(model(tokens, starts=starts), torch.cat(alone, 1), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_forget_sums_its_gates_in_float32_however_the_layer_computes():
    layer = make_layer("sdpa+forget").to(torch.bfloat16)
    x = torch.randn(1, 700, C, dtype=torch.bfloat16)
    modifier = layer.modifiers["forget"]
    call = Call(*(torch.randn(1, H, 700, 8, dtype=torch.bfloat16) for _ in "qkv"), None, True, None)
    total = F.logsigmoid(modifier.gate(x).double()).cumsum(-1)
    bias = modifier.overlay(call, Here(x, None, None, None, {})).bias
    torch.testing.assert_close(bias.double(), total[..., :, None] - total[..., None, :], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("attention", MIXED)
@torch.no_grad()
def test_all_modifiers_at_once_keep_the_contract(attention):
    attention, x = make_layer(attention), torch.randn(B, T, C)
    y = attention(x)
    close(in_pieces(attention, x), y)
    changed = torch.cat((x[:, :7], torch.randn(B, 5, C)), 1)
    close(attention(changed)[:, :7], y[:, :7])
    close(attention(x[None])[0], y)
    assert attention.weights(x).shape == (B, H, T, T)


def test_they_act_in_the_order_of_their_registration_and_are_named_in_the_state_dict():
    one, other = layer("sdpa+gate+sink+forget"), layer("sdpa+forget+gate+sink")
    assert list(one.state_dict()) == list(other.state_dict())
    assert {"modifiers.gate.gate.weight", "modifiers.sink.bias"} < one.state_dict().keys()


def test_muon_moves_matrices_and_adamw_what_has_a_row_for_each_head():
    model = GPT(GPTConfig(attention="sdpa+gate+sink+forget/delta/mla", n_layer=3, vocab_size=61, n_embd=C))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows, columns, whole, _, _, thin, vectors = ([names[id(p)] for p in group] for group in split_parameters(model))
    matrices = [*rows, *columns, *whole]
    assert all(name.endswith(("_proj.weight", "_up.weight")) for name in matrices) and len(matrices) == 4 + 4 + 6 + 9
    assert {name.split(".")[-2] for name in whole} == {"o_proj", "c_proj", "k_up", "v_up"}
    assert {name.split(".", 3)[3] for name in thin} == {
        "modifiers.gate.gate.weight", "modifiers.forget.gate.weight", "beta.weight", "fade.weight",
    }  # fmt: skip
    assert "blocks.0.attention.modifiers.sink.bias" in vectors and "blocks.1.attention.log_rate" in vectors


# What a person may get wrong.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": "sdap"}, r"attention=sdap: 'sdap' is unknown: choose a form from matmul, "),
        ({"attention": "gate"}, r"'gate' is a modifier, which is added to a form, as in sdpa\+gate"),
        ({"attention": "sdpa+delta"}, r"'delta' is a form, and a layer has one: choose modifiers from window, "),
        ({"attention": "sdpa+"}, r"'' is unknown"),
        ({"attention": "sdpa//sdpa"}, r"'' is unknown"),
        ({"attention": "sdpa+gate+gate"}, r"has gate twice in one layer: leave one out"),
        (
            {"attention": "linear+sink"},
            r"linear has no scores for sink to change: leave out sink, or choose another form",
        ),
        ({"attention": "mla+key_offset"}, r"mla has no keys for key_offset to change"),
        ({"attention": "average+gate"}, r"average has no result for gate to change"),
        ({"attention": "sigmoid+sink"}, r"attention=sigmoid\+sink: .*leave out sink"),
        ({"attention": "sdpa+window"}, r"attention=sdpa\+window needs model\.attention_window=W"),
        ({"attention": "sdpa+nope", "position": "alibi"}, r"nope leaves out the rotation of model\.position=rope"),
        ({"rope_fraction": 0.3}, r"model\.rope_fraction=0\.3 of a head size of 8"),
        ({"rope_fraction": 0.0}, r"model\.rope_fraction=0\.0 must be"),
        ({"score_softcap": 0.0}, r"model\.score_softcap=0\.0 must be finite and above 0"),
        ({"latent_size": 0}, r"model\.latent_size=0 must be at least 1"),
    ],
)
def test_what_means_nothing_is_refused_in_a_sentence(settings, words):
    with pytest.raises(SettingsError, match=words):
        GPT(GPTConfig(**{"n_embd": C, "n_head": H, "vocab_size": 9} | settings))


def test_a_state_takes_no_mask_that_differs_between_queries():
    with pytest.raises(ValueError, match="tell where texts begin"):
        layer("delta")(torch.randn(B, T, C), mask=torch.ones(T, T).tril())


# From training to text.


@pytest.fixture
def documents(train_config, tmp_path):
    """A run on many short documents, kept apart, through most of what there is."""
    texts = ["".join(f"line {i} of text {n}\n" for i in range(n % 4)) + "end" for n in range(400)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = replace(
        train_config.data, source="jsonl", path=str(tmp_path / "t.jsonl"), val_fraction=0.2, document_mask=True
    )
    attention = "sdpa+window+key_offset+forget/delta+value_residual+key_offset/mla+sink+gate"
    model = replace(train_config.model, n_layer=3, block_size=32, attention=attention, attention_window=8)
    return replace(train_config, model=model, data=data)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_a_hybrid_on_packed_documents_trains_resumes_scores_and_writes(documents, tmp_path, monkeypatch):
    train(documents)
    stopped = replace(documents, run_dir=str(tmp_path / "stopped"))
    stop_at(monkeypatch, 13)
    with pytest.raises(SystemExit):
        train(stopped)
    monkeypatch.undo()
    train(replace(stopped, resume=stopped.run_dir))
    assert_same_run(documents.run_dir, stopped.run_dir)

    whole = open_checkpoint(documents.run_dir)
    run = start_run(replace(documents, run_dir=None))
    result = evaluate(whole.model, run.data, 32, 8, run.autocast)
    assert result.loss == pytest.approx(whole.meta["metrics"]["val_loss"], rel=1e-6)
    separate = score(
        *(whole.model, run.data.tokenizer, run.data.val[:]),
        **dict(stride=32, autocast=run.autocast, separator=run.data.tokenizer.eot_token),
    )
    assert separate.total.loss == pytest.approx(result.loss, rel=1e-5)
    together = score(whole.model, run.data.tokenizer, run.data.val[:], stride=32, autocast=run.autocast)
    assert abs(together.total.loss - result.loss) > 1e-3
    text = "".join(complete_text(whole.model, whole.tokenizer, "line", max_new_tokens=100))
    assert text
    summary = read_summary(Path(documents.run_dir))
    assert summary["decode_tokens_per_s"] > 0
    kept = 2 * 32 * (8 + 3) + (8 + 3) * 2 + 32 + 2  # a window's keys and values, gates; the last key, their sum
    kept += 2 * 16 * 16 + 32  # a state, the last key
    kept += 32 * (64 + 8)  # latent vectors and rotated keys
    assert summary["cache_bytes_per_token"] == pytest.approx(4 * kept / 32, abs=0.1)


@pytest.mark.usefixtures("no_pictures")
def test_micro_batches_of_packed_documents_are_the_batch(documents, tmp_path):
    losses = [
        train(replace(documents, run_dir=str(tmp_path / str(n)), micro_batch_size=n, max_steps=3)) for n in (2, 8)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_where_documents_begin_is_where_their_mark_is():
    tokens = np.array([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5, 9]])
    expected = [[0, 1, 1, 1, 4, 5, 5], [0] * 7, [0, 0, 0, 0, 0, 0, 6]]
    assert document_starts(tokens, separator=9).tolist() == expected


def test_starts_beside_padding_or_a_cache_are_refused():
    model, tokens = random_gpt(attention="delta"), torch.randint(61, (2, 6))
    starts, real = torch.zeros(2, 6, dtype=torch.long), torch.ones(2, 6)
    with pytest.raises(ValueError, match="starts and attention_mask are both given"):
        model(tokens, starts=starts, attention_mask=real)
    with pytest.raises(ValueError, match="starts and a cache are both given"):
        model(tokens, starts=starts, cache=model.make_cache(2, 6))


def test_forget_refuses_padding_within_a_text_and_takes_it_before_and_behind():
    model, tokens, real = random_gpt(attention="sdpa+forget"), torch.randint(61, (2, 6)), torch.ones(2, 6)
    real[0, :2] = real[1, 4:] = 0
    padded = model(tokens, attention_mask=real)
    close(padded[0, 2:], model(tokens[:1, 2:])[0])
    close(padded[1, :4], model(tokens[1:, :4])[0])
    real[0, 4] = 0
    with pytest.raises(ValueError, match="not within"):
        model(tokens, attention_mask=real)


def test_value_residual_between_layers_of_other_heads_is_refused():
    with pytest.raises(SettingsError, match="value_residual adds the values of layers with other heads"):
        random_gpt(attention="single_head+value_residual/sdpa+value_residual")
    random_gpt(attention="sdpa+value_residual/single_head")
