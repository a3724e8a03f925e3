"""The forms and modifiers of 2026: each against its formula in float64, and what it costs.

test_families.py has the whole layers of Qwen3-Next and Kimi Linear.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, random_gpt, some

from common.errors import SettingsError
from model.attention import FORMS, MODIFIERS, AttentionContext, make_attention
from model.attention.check import CHECKS, make_layer
from model.attention.choice import indexed_keys
from model.attention.contract import of_weighting
from model.attention.masks import causal_mask
from model.attention.weighting import Blockwise
from model.cache import KVCache
from model.config import AttentionConfig, GPTConfig
from model.gpt import GPT
from model.rope import rotate
from model.size import cache_bytes_per_token, count_parameters, flops_per_token, without_weights
from training.optimizer import split_parameters

B, T, C, H, HKV, D = 2, 12, 16, 4, 2, 4
LATE = torch.zeros(B, T, dtype=torch.long)
LATE[1, 5:] = 5  # the second row holds two documents
MIXED = ["delta+conv+gate_silu", "kda+conv+gate_element", "sdpa+joint_norm+diff", "stick+forget+diff+conv"]
MIXED += ["gta+diff+sink+xsa+window", "moba+conv+value_embedding", "index+diff+sink+forget+window"]


def random_layer(attention, **settings):
    """A layer in float64 whose every weight is random."""
    given = {"n_embd": C, "n_head": H, "block_size": 24} | settings
    made = make_attention(GPTConfig(attention=attention, vocab_size=7, **given)).eval().double()
    for parameter in made.parameters():
        parameter.data.copy_(0.5 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return made


def attended(attention, x, ctx):
    """The queries, keys and values that a layer's forward pass attends with."""
    seen = []
    make_call = attention.make_call
    attention.make_call = lambda q, k, v, ctx: seen.append((q, k, v)) or make_call(q, k, v, ctx)
    attention(x, ctx)
    return seen[0]


@torch.no_grad()
def test_stick_breaks_off_a_share_of_what_the_keys_between_have_left():
    stick, x = random_layer("stick", position="none", n_kv_head=HKV), torch.randn(B, T, C).double()
    q, k, v = stick.project(x)
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    share, y = torch.sigmoid(q @ k.mT / math.sqrt(D)), torch.zeros(B, H, T, D).double()
    for t in range(T):
        left = torch.ones(B, H).double()
        for s in reversed(range(t)):
            y[:, :, t] += (share[:, :, t, s] * left)[..., None] * v[:, :, s]
            left = left * (1 - share[:, :, t, s])
    close(stick(x), stick.merge(y), rtol=1e-9, atol=1e-9)
    assert (stick.weights(x).sum(-1) < 1).all() and not stick(x)[:, 0].any()  # the first has nobody to attend to
    swapped = stick(x[:, [1, 0, *range(2, T)]])
    assert not torch.allclose(swapped[:, -1], stick(x)[:, -1])  # it knows order without positions


def test_stick_refuses_a_call_that_is_not_causal_and_others_read_keys_of_another_length():
    """A padding mask says which keys count; padding changes nothing."""
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 10, 8), torch.randn(2, 4, 10, 8)
    keys = (torch.arange(10) < 6)[None, None, None]
    for form in ("sdpa", "softmax1", "sigmoid", "sparsemax", "loop"):
        close(FORMS[form](q, k, v, mask=keys), FORMS[form](q, k[:, :, :6], v[:, :, :6]))
    with pytest.raises(
        ValueError, match="is_causal=False means nothing under stick, .*: pass is_causal=True or a mask"
    ):
        FORMS["stick"](q, k, v)
    close(FORMS["stick"](q, k, v, mask=causal_mask(7, 10)), FORMS["stick"](q, k, v, is_causal=True))
    later = keys & (torch.arange(10) < 5)  # queries 0 and 1 stand at 3 and 4, and see 5 keys
    for mask in (keys, later, later[0, 0]):
        with pytest.raises(ValueError, match=r"the mask shows later keys under stick, .*: pass mask & causal_mask"):
            FORMS["stick"](q, k, v, mask=mask)
        seen = int(mask.sum())
        share = (q[:, :, -1:] @ k[:, :, :seen].mT / math.sqrt(8)).sigmoid()
        rest = torch.stack([(1 - share[..., s + 1 :]).prod(-1) for s in range(seen)], -1)
        close(FORMS["stick"](q, k, v, mask=mask & causal_mask(7, 10))[:, :, -1:], share * rest @ v[:, :, :seen])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_gta_takes_half_of_each_key_from_its_value_and_the_other_from_one_rotated_vector(kv_heads):
    gta, x = random_layer("gta", n_kv_head=kv_heads, head_size=8), torch.randn(B, T, C).double()
    q, v = (proj(x).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (gta.q_proj, gta.v_proj))
    turned, table = gta.k_proj(x)[:, None], gta.rope.table(x)
    q, y = torch.cat((rotate(q[..., :4], table), q[..., 4:]), -1), []
    for h in range(H):
        own = v[:, h * kv_heads // H]
        key = torch.cat((rotate(turned, table)[:, 0], own[..., 4:]), -1)
        scores = (q[:, h] @ key.mT / math.sqrt(8)).masked_fill(torch.ones(T, T).triu(1) > 0, -math.inf)
        y.append(scores.softmax(-1) @ own)
    close(gta(x), gta.merge(torch.stack(y, 1)), rtol=1e-9, atol=1e-9)
    cache = KVCache(T)
    gta(x, AttentionContext(cache=cache))
    assert cache.nbytes == B * T * (kv_heads * 8 + 4) * 8  # where grouped-query attention has 2 kv_heads · 8


@pytest.mark.parametrize(("block", "best"), [(1, 3), (3, 1), (3, 2), (4, 9), (50, 1)])
@torch.no_grad()
def test_moba_is_softmax_over_the_own_block_and_the_best_before_it_by_mean_key(block, best):
    q, k, v = torch.randn(3, B, H, T, D).double()
    attended = torch.zeros(B, H, T, T, dtype=torch.bool)
    for b, h, t in [(b, h, t) for b in range(B) for h in range(H) for t in range(T)]:
        start = LATE[b, t].item()
        own = (t - start) // block
        means = [k[b, h, start + n * block : start + (n + 1) * block].mean(0) @ q[b, h, t] for n in range(own)]
        for n in [own, *sorted(range(own), key=lambda n: -means[n])[:best]]:
            attended[b, h, t, start + n * block : min(start + (n + 1) * block, t + 1)] = True
    seen = torch.ones(T, T).tril() * (torch.arange(T) >= LATE[:, None, :, None]) > 0
    wanted = (q @ k.mT / math.sqrt(D)).masked_fill(~attended, -math.inf).softmax(-1) @ v
    close(of_weighting(Blockwise(block, best))(q, k, v, mask=seen), wanted, rtol=1e-9, atol=1e-9)


def test_index_attends_to_the_keys_that_its_indexer_scores_best_which_learns_what_attention_weighs():
    made = random_layer("index", n_kv_head=HKV, position="none", block_size=12)  # 3 keys, 2 queries of the indexer
    x, ctx = torch.randn(B, T, C).double().requires_grad_(), AttentionContext(doc_starts=LATE, loss=torch.zeros(()))
    y = made(x, ctx)
    q, k, v = made.project(x)
    k, v = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
    asks, key, share = (x @ made.index_proj.weight.T).split((2 * D, D, 2), -1)
    norm, rows, loss = made.index_norm, torch.zeros(B, H, T, D).double(), 0
    key = F.layer_norm(key, [D], norm.weight, norm.bias, 1e-6)
    for b, t in [(b, t) for b in range(B) for t in range(T)]:
        scores = F.relu(asks[b, t].view(2, D) @ key[b].T) / math.sqrt(D)
        index = share[b, t] @ scores / math.sqrt(2)  # (T,)
        best = sorted(range(LATE[b, t], t + 1), key=lambda s: (s == t, index[s], s))[-3:]
        weights = (torch.einsum("hd,hsd->hs", q[b, :, t], k[b, :, best]) / math.sqrt(D)).softmax(-1)
        rows[b, :, t] = torch.einsum("hs,hsd->hd", weights, v[b, :, best])
        wanted = weights.detach().mean(0)
        loss = loss + (wanted * (wanted.log() - index[best].log_softmax(0))).sum()
    close((y, ctx.loss), (made.merge(rows), loss), rtol=1e-9, atol=1e-9)
    indexer = [made.index_proj.weight, norm.weight, norm.bias]
    found, wanted = (torch.autograd.grad(each, indexer, retain_graph=True) for each in (ctx.loss, loss))
    close(found, wanted, rtol=1e-9, atol=1e-9)
    others = [x, *(p for name, p in made.named_parameters() if "index" not in name)]
    assert not any(g is not None for g in torch.autograd.grad(ctx.loss, others, allow_unused=True))


@torch.no_grad()
def test_an_indexer_learns_the_keys_of_all_heads_if_a_mask_differs_between_them():
    """It was 10⁹ for each key that some head does not see."""
    made = random_layer("index", n_kv_head=HKV, position="none", block_size=12)
    x, mask = torch.randn(B, T, C).double(), torch.rand(H, T, T) > 0.4
    mask[0, 5] = mask[:, 6] = False  # no key for one head, and for all
    ctx = AttentionContext(mask=mask, loss=torch.zeros(()))
    made(x, ctx)
    weights = made.weights(x, AttentionContext(mask=mask))  # (B, H, T, T), of the chosen keys
    asks, key, share = (x @ made.index_proj.weight.T).split((2 * D, D, 2), -1)
    key = F.layer_norm(key, [D], made.index_norm.weight, made.index_norm.bias, 1e-6)
    loss = 0
    for b, t in [(b, t) for b in range(B) for t in range(T)]:
        total = weights[b, :, t].sum(0)
        union = total.nonzero()[:, 0]  # softmax of small scores: no weight of a chosen key is 0
        index = share[b, t] @ F.relu(asks[b, t].view(2, D) @ key[b].T) / math.sqrt(2 * D)
        wanted = total[union] / total.sum()
        loss += (wanted * (wanted.log() - index[union].log_softmax(0))).sum()
    close(ctx.loss, torch.as_tensor(loss), rtol=1e-6, atol=1e-6, check_dtype=False)


@torch.no_grad()
def test_the_indexer_chooses_the_keys_that_deepseek_v32s_chooses_and_always_the_own(monkeypatch):
    pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    from transformers import DeepseekV32Config

    made, x, chosen = random_layer("index", n_head=16, head_size=8, block_size=16).float(), torch.randn(B, T, C), []
    choose = lambda *given: chosen.append(indexed_keys(*given)) or chosen[0]  # noqa: E731
    monkeypatch.setattr("model.attention.call.indexed_keys", choose)
    made(x)
    shape = dict(hidden_size=C, q_lora_rank=C, qk_rope_head_dim=8, index_head_dim=8, index_n_heads=8, index_topk=4)
    config = DeepseekV32Config(**shape)
    theirs = modeling.DeepseekV32Indexer(config, 0).eval()
    asks, key, share = made.index_proj.weight.split(made.index_proj.parts)
    halves = lambda t: torch.cat((t[..., ::2, :], t[..., 1::2, :]), -2)  # noqa: E731  they turn channel i with i + 4
    theirs.wq_b.weight.copy_(halves(asks.view(8, 8, C)).flatten(0, 1))
    theirs.wk.weight.copy_(halves(key))
    theirs.weights_proj.weight.copy_(share)
    for name, weight in made.index_norm.named_parameters():
        getattr(theirs.k_norm, name).copy_(halves(weight[:, None])[:, 0])
    angles = modeling.DeepseekV32RotaryEmbedding(config)(x, torch.arange(T)[None])
    best = theirs(x, x, angles, torch.ones(T, T).tril() > 0, torch.arange(T)[None])  # (B, T, 4), the best first
    for b, t in [(b, t) for b in range(B) for t in range(T)]:
        wanted = [s for s in best[b, t].tolist() if s <= t]
        wanted = wanted if t in wanted else [*wanted[:-1], t]
        assert chosen[0][b, 0, t].nonzero().flatten().tolist() == sorted(wanted)


def test_a_models_loss_stays_the_cross_entropy_while_its_indexers_learn():
    gpt, (tokens, targets) = random_gpt(attention="index/sdpa"), torch.randint(61, (2, 2, 12)).unbind()
    indexer = [p for name, p in gpt.named_parameters() if "index" in name]
    nats = F.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    close(gpt.loss(tokens, targets), nats)
    assert all(g is None for g in torch.autograd.grad(nats, indexer, allow_unused=True))
    trained = gpt.train().loss(tokens, targets)
    close(trained, nats)
    assert len(indexer) == 3 and all(g.any() for g in torch.autograd.grad(trained, indexer))


@pytest.mark.parametrize("attention", ["sdpa", "delta"])
@torch.no_grad()
def test_conv_sums_four_tokens_of_one_document_channel_by_channel(attention):
    made, x = random_layer(f"{attention}+conv", n_kv_head=HKV, position="none"), torch.randn(B, T, C).double()
    raw = torch.cat(made.project(x), 1)
    taps, mixed = made.modifiers["conv"].weight.view(H + 2 * HKV, D, 4), torch.zeros_like(raw)
    for b, t, back in [(b, t, back) for b in range(B) for t in range(T) for back in range(4)]:
        if t - back >= LATE[b, t]:
            mixed[b, :, t] += taps[..., 3 - back] * raw[b, :, t - back]
    if attention == "delta":
        mixed = F.silu(mixed)
    got = torch.cat(attended(made, x, AttentionContext(doc_starts=LATE)), 1)
    close(got, mixed, rtol=1e-9, atol=1e-9)
    fresh, plain = layer("sdpa+conv"), layer()
    plain.load_state_dict(fresh.state_dict(), strict=False)
    close(fresh(x.float()), plain(x.float()))  # at first there is none


@torch.no_grad()
def test_a_value_embedding_joins_the_values_by_the_token_as_much_as_its_gate_says():
    made, x, tokens = random_layer("sdpa+value_embedding", n_kv_head=HKV), torch.randn(B, T, C).double(), LATE
    modifier, v = made.modifiers["value_embedding"], made.project(x)[2]
    own = modifier.embedding.weight[tokens].view(B, T, HKV, D)
    wanted = v + (2 * torch.sigmoid(x @ modifier.gate.weight.T)[..., None] * own).transpose(1, 2)
    close(attended(made, x, AttentionContext(tokens=tokens))[2], wanted, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="needs the token ids of x"):
        made(x)
    with pytest.raises(SettingsError, match="needs the number of token ids: make the layer with a GPTConfig"):
        make_attention(AttentionConfig(attention="sdpa+value_embedding"))
    model = random_gpt(attention="sdpa/sdpa+value_embedding")
    before, later = model(tokens), tokens == 5
    model.attentions[1].modifiers["value_embedding"].embedding.weight[5] += 1
    assert (model(tokens)[later] != before[later]).any() and torch.equal(model(tokens)[~later], before[~later])


# Together; test_layer.py checks each form, and each modifier beside each.


@pytest.mark.parametrize("check", ["value+grad", "future", "document", "cache"])
@pytest.mark.parametrize("attention", some(MIXED, 12))
def test_mixtures_are_themselves_in_float64_blind_to_the_future_apart_in_documents_and_the_same_cached(
    attention, check
):
    made, near = make_layer(attention).double(), 1e-5 if check == "document" else 1e-9  # RoPE's angles are float32
    for got, wanted in CHECKS[check](made, torch.randn(2, 24, 32).double()):
        close(got, wanted, rtol=near, atol=near)


@pytest.mark.slow
def test_what_each_costs():
    def model(attention, **settings):
        return without_weights(GPTConfig(attention=attention, vocab_size=50, n_layer=1, block_size=64, **settings))

    plain, embedded = model("sdpa"), model("sdpa+value_embedding")
    assert count_parameters(embedded)["embedding"] == count_parameters(plain)["embedding"] + 50 * 128
    assert flops_per_token(embedded) - flops_per_token(plain) == 6 * 4 * 128  # its gate: a table is read
    table = embedded.attentions[0].modifiers["value_embedding"].embedding.weight
    assert any(
        weight is table for weight in split_parameters(embedded)["embeddings"]
    )  # it moves as the other embedding
    assert flops_per_token(model("sdpa+conv")) - flops_per_token(plain) == 6 * 4 * 3 * 128
    assert flops_per_token(model("gta")) == flops_per_token(plain) - 6 * (128 * (128 - 16) + 2 * 32)  # and no norms
    seen = sum(4 * min(t + 1, 3 * 8 + t % 8 + 1) + 2 * (t // 8) for t in range(64))
    assert model("moba").attentions[0].flops(64) == 128 * seen / 64
    seen = sum(4 * 4 * min(t + 1, 16) + 2 * 2 * (t + 1) for t in range(64))
    assert model("index").attentions[0].flops(64) == 32 * seen / 64
    state, kept = (
        4 * 32 * 32 / 64,
        {"sdpa": 256, "moba": 256, "index": 256 + 32, "gta": 128 + 16, "sdpa+conv": 256 + 3 * 3 * 128 / 64},
    )
    for attention, numbers in (kept | {"delta": state, "kda": state}).items():
        assert cache_bytes_per_token(GPT(model(attention).config)) == 4 * numbers


def test_the_weights_of_each_are_those_of_the_pages_prices():
    """Those of norms are left out, as on the page."""
    C, H, Hkv, D, V = 32, 4, 2, 8, 50

    def weights(attention, n_kv_head=Hkv):
        config = GPTConfig(attention=attention, n_embd=C, n_head=H, n_kv_head=n_kv_head, vocab_size=V)
        parameters = make_attention(config).named_parameters()
        return sum(weight.numel() for name, weight in parameters if "norm" not in name)

    added = {"sink": H, "gate": C * H, "gate_element": C * H * D, "gate_silu": C * H * D, "xsa": H, "value_residual": 2}
    added |= {"value_embedding": V * Hkv * D + C * Hkv, "diff": C * H * D + C * H, "forget": H * (C + 1), "fade": H}
    added |= {"relative": 16 * (C * H + 128)}  # its block size
    added |= {"token_sink": C * H, "out_norm": 0, "gate_biased": C * H * D + H, "gate_softplus": C * H}
    added |= {"logn": H, "key_offset": 0, "conv": 4 * D * (H + 2 * Hkv), "joint_norm": 0}
    plain = weights("sdpa")
    assert {name: weights(f"sdpa+{name}") - plain for name in MODIFIERS} == added
    assert weights("gta") == plain - C * (Hkv * D - D // 2)
    assert weights("index") == plain + C * (H * D // 2 + D + H // 2)
    latent = C * H * D // 2 + C * (4 * D + D // 2) + 8 * H * D**2
    assert weights("mla") == weights("sdpa", n_kv_head=H) - 2 * C * H * D + latent
