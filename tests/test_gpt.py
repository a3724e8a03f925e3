"""The GPT: its shapes, its sizes, what may influence what, its loss."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import close, layer, random_gpt, some
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune

import model.loss
from common.errors import SettingsError
from model.apart import streams
from model.attention import FORMS, MODIFIERS, AttentionContext
from model.cache import KVCache
from model.config import MLPS, GPTConfig
from model.cpu import LARGE
from model.gpt import GPT, NORMS
from model.layers import LayerNorm, Linear, RMSNorm
from model.loss import IGNORE_INDEX, chunk_length, fused_cross_entropy
from model.row import mlp_step
from model.size import cache_bytes_per_token, count_parameters, count_weights, flops_per_token, without_weights
from model.weights import load_weights, plain_weights
from training.plan import LiveBytes

VARIANTS = [
    {},
    {"n_kv_head": 2},
    {"n_kv_head": 1, "qk_norm": False},
    {"n_head": 6, "head_size": 10, "n_kv_head": 3},
    {"attention": "stacked", "n_head": 3, "head_size": 2},
    {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True},
    {"position": "none", "ngrams": [2, 3], "ngram_rows": 5, "mlp": "relu2", "tie_embeddings": True},
    {"logit_softcap": 5.0, "attention": "matmul", "mlp": "gelu_tanh"},
    {"dropout": 0.5, "attention_dropout": 0.5, "attention": "delta/mla"},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_token_influences_only_itself_and_later_positions_and_every_weight_gets_a_gradient(settings):
    gpt, tokens = random_gpt(**settings), torch.randint(61, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 61
    before, after = gpt(tokens), gpt(changed)
    assert before.shape == (2, 12, 61)
    close(after[:, :7], before[:, :7], rtol=0)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4
    gpt.train().loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@torch.no_grad()
def test_rotations_set_in_a_hook_are_positions_of_ones_own():
    """Against the whole text of these positions, of whose other tokens nobody sees the keys."""
    gpt, tokens = random_gpt(block_size=48), torch.randint(61, (2, 48))
    positions = torch.tensor([0, 1, 2, 10, 11, 30, 31, 47])
    seen = torch.zeros(48, dtype=torch.bool)
    seen[positions] = True
    wanted = gpt.logits(gpt.hidden(tokens, ctx=AttentionContext(mask=seen)))[:, positions]

    def place(block, arguments):
        rope = gpt.attentions[0].rope
        arguments[1].rotations = {rope: rope.cos_sin(positions)}

    hook = gpt.blocks[0].register_forward_pre_hook(place)
    close(gpt(tokens[:, positions]), wanted)
    hook.remove()
    assert not torch.allclose(gpt(tokens[:, positions]), wanted)


@torch.no_grad()
def test_positions_of_each_text_its_own_have_an_axis_for_heads(unchecked):
    """With as many texts as heads they were taken for those of each head, without a word."""
    gpt, tokens = random_gpt(n_head=4, attention="sdpa/mla"), torch.randint(61, (4, 6))
    positions = torch.randint(48, (4, 1, 6))

    def read(tokens, positions, **kwargs):
        def place(block, arguments):
            arguments[1].rotations = {rope: rope.cos_sin(positions) for rope in gpt.ropes}

        hook = gpt.blocks[0].register_forward_pre_hook(place)
        try:
            return gpt(tokens, **kwargs)
        finally:
            hook.remove()

    assert len(gpt.ropes) == 2
    alone = torch.cat([read(text[None], own[0]) for text, own in zip(tokens, positions, strict=True)])
    close(read(tokens, positions), alone)
    for wrong in (positions[:, 0], positions[0, :, :1], positions[:2], torch.arange(5), positions[:, None]):
        with pytest.raises(ValueError, match=r"do not fit 4 x 6 tokens: make them of positions \(6,\), or of \(4, 1, "):
            read(tokens, wrong)
    with pytest.raises(ValueError, match="rotations of positions \\(6,\\) do not fit 4 x 1 tokens.*anew for each pass"):
        read(tokens[:, :1], torch.arange(6), cache=KVCache(8))


@pytest.mark.parametrize("attention", some(["k_eq_v", "mla", "sdpa+window"], 2))
@torch.no_grad()
def test_positions_of_ones_own_are_those_of_cached_keys_too_or_refused(attention):
    """k_eq_v turned the keys of a cache to the plain positions, and the queries to the own ones, without a word."""
    gpt, tokens = (
        random_gpt(attention=attention, **({"attention_window": 4} if "window" in attention else {})),
        torch.randint(61, (2, 12)),
    )
    plain = gpt(tokens)

    def place(step, offset):
        def set_rotations(block, arguments):
            x, ctx = arguments
            positions = step * torch.arange(ctx.past, ctx.past + x.size(1)) + offset
            ctx.rotations = {rope: rope.cos_sin(positions) for rope in gpt.ropes}

        return gpt.blocks[0].register_forward_pre_hook(set_rotations)

    def decoded():
        cache = KVCache(12)
        return torch.cat([gpt(piece, cache=cache) for piece in tokens.split((5, *[1] * 7), 1)], 1)

    hook = place(1, 0)
    close(decoded(), plain)
    hook.remove()
    hook = place(3, 7)
    whole = gpt(tokens)
    assert not torch.allclose(whole, plain, atol=1e-3)
    if attention == "k_eq_v":
        with pytest.raises(ValueError, match=r"k_eq_v makes the keys of a cache again.*: read the whole text without"):
            decoded()
    else:
        close(decoded(), whole)
    hook.remove()
    close(decoded(), plain)


@pytest.mark.parametrize("given", ["doc_starts", "cache", "rotations", "shared"])
def test_what_a_pass_sets_in_its_context_is_not_taken_from_a_caller_unnoticed(given):
    gpt, tokens = random_gpt(), torch.randint(61, (1, 5))
    rope = gpt.attentions[0].rope
    values = {"doc_starts": torch.zeros_like(tokens), "cache": KVCache(8)}
    values |= {"rotations": {rope: rope.cos_sin(torch.arange(5))}, "shared": {"values": tokens}}
    with pytest.raises(ValueError, match=f"ctx has {given}, which a pass of the model sets anew: give the"):
        gpt.hidden(tokens, ctx=AttentionContext(**{given: values[given]}))


@torch.no_grad()
def test_the_logits_are_those_of_the_architecture_written_out():
    gpt, tokens = random_gpt(n_layer=1, position="learned", logit_softcap=5.0), torch.randint(61, (2, 9))
    block, x = gpt.blocks[0], gpt.token_embedding(tokens) + gpt.position_embedding.weight[:9]

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    x = x + block.attention(normed(x, block.attention_norm))
    gate, up = block.mlp.gate_up_proj.weight.chunk(2)
    inner = normed(x, block.mlp_norm)
    x = x + (F.silu(inner @ gate.T) * (inner @ up.T)) @ block.mlp.down_proj.weight.T
    close(gpt(tokens), 5 * torch.tanh(normed(x, gpt.final_norm) @ gpt.lm_head.weight.T / 5))
    close(gpt.logits(gpt.hidden(tokens)), gpt(tokens))
    activations = {
        "relu2": lambda x: x.relu() ** 2,
        "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,
        "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    }
    assert {"swiglu", *activations} == {*MLPS}
    for mlp, activation in activations.items():
        other = random_gpt(mlp=mlp).blocks[0].mlp
        close(other(inner), activation(inner @ other.up_proj.weight.T) @ other.down_proj.weight.T)


@torch.no_grad()
def test_dropout_drops_half_of_the_embedding_and_of_what_each_layer_adds_and_doubles_the_rest():
    gpt, seen = random_gpt(dropout=0.5, n_layer=1, position="learned").train(), []
    for module in gpt.modules():
        if isinstance(module, nn.Dropout):  # what goes in, what comes out
            module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    tokens = torch.randint(61, (4, 16))
    after = gpt.hidden(tokens)
    assert len(seen) == 3 and torch.equal(seen[0][0], gpt.token_embedding(tokens) + gpt.position_embedding.weight)
    assert torch.equal(after, seen[0][1] + seen[1][1] + seen[2][1])
    for whole, got in seen:
        kept = got != 0
        close(got, 2 * whole * kept)
        assert 0.4 < kept.float().mean() < 0.6


def test_a_name_in_the_pattern_that_no_layer_has_is_refused_too():
    with pytest.raises(SettingsError, match="attention=sdpa/nope: 'nope' is no form"):
        random_gpt(n_layer=1, attention="sdpa/nope")


def test_learned_positions_and_rope_end_where_they_were_made_for():
    with pytest.raises(ValueError, match="17 positions do not fit the 16 learned embeddings: shorten the text"):
        random_gpt(position="learned")(torch.randint(61, (1, 17)))
    assert random_gpt()(torch.randint(61, (1, 40))).isfinite().all()  # RoPE reads on


# First weights and sizes.


@pytest.mark.parametrize("zero_init", [False, True])
def test_first_weights_spread_as_their_scheme_says_and_know_nothing(zero_init):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=500, n_layer=8, position="learned", bias=True, qkv_bias=True, zero_init=zero_init))
    tokens = torch.randint(500, (4, 65))
    loss = gpt.loss(tokens[:, :-1], tokens[:, 1:]).item() / 256
    assert loss == pytest.approx(math.log(500), abs=1e-4 if zero_init else 0.05)
    for name, weight in gpt.named_parameters():
        part, kind = name.split(".")[-2:]
        writes_residual = part in ("o_proj", "down_proj")
        if kind == "bias":
            assert not weight.any(), name
        elif weight.ndim == 2:
            expected = 0.02 / math.sqrt(2 * 8) if writes_residual else 0.02
            if zero_init and "embedding" not in part:
                expected = 0 if writes_residual or part == "lm_head" else 1 / math.sqrt(weight.shape[1])
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
    assert not any("bias" in name for name in random_gpt(norm="layernorm").state_dict())
    tied = GPT(GPTConfig(vocab_size=61, tie_embeddings=True, zero_init=zero_init))
    assert tied.lm_head.weight is tied.token_embedding.weight and "lm_head.weight" not in plain_weights(tied)
    assert tied.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_weights_come_back_under_their_names_and_what_does_not_fit_is_named():
    gpt, other = random_gpt(tie_embeddings=True), random_gpt(seed=1, tie_embeddings=True)
    load_weights(other, plain_weights(gpt))
    tokens = torch.randint(61, (1, 5))
    assert torch.equal(other(tokens), gpt(tokens))
    for wrong in ({"blocks.1.mlp.down_proj.weight": torch.zeros(2, 2)}, {"blocks.9.x": torch.zeros(2)}):
        with pytest.raises(ValueError, match=f"the weight {next(iter(wrong))} is missing, or does not fit"):
            load_weights(other, plain_weights(gpt) | wrong)


GPT2 = dict(
    n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, position="learned", norm="layernorm",
    mlp="gelu", bias=True, qkv_bias=True, qk_norm=False, tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa/delta/mla+gate", "stacked+diff", "average/simple"])
def test_sizes_are_counted_without_making_the_weights_and_gpt_2s_are_those_that_were_published(attention):
    gpt, parts = random_gpt(attention=attention, n_layer=5), count_parameters(without_weights(GPTConfig(**GPT2)))
    weights = plain_weights(gpt)
    assert count_weights(gpt.config) == sum(t.numel() for t in weights.values())
    assert without_weights(gpt.config).lm_head.weight.is_meta and sum(parts.values()) == 124_439_808
    assert (parts["embedding"], parts["norms"]) == ((50257 + 1024) * 768, 25 * 2 * 768)
    assert parts["attention"] == 12 * (4 * 768**2 + 4 * 768)
    assert count_weights(GPTConfig(**GPT2)) == 124_439_808


def test_flops_are_six_for_each_weight_and_twelve_for_each_pair_of_a_query_channel_and_a_key():
    for window, keys in ((None, 8), (4, 4 - 16 / 32), (99, 8)):  # half the text, or what a window sees of it
        gpt = random_gpt(attention_window=window, mlp="relu2")
        weights = 2 * (4 * 32 * 32 + 8 * 32 * 32) + 61 * 32
        norms = 2 * 2 * 8  # of queries and keys, in the layers' count
        assert flops_per_token(gpt) == 6 * (weights + norms) + 3 * 2 * 4 * 32 * keys
    block, per_state = 16, 4 * 4 * 8**2
    assert [random_gpt(attention=form).attentions[0].flops(block) for form in ("linear", "delta")] == [
        per_state, 1.5 * per_state,
    ]  # fmt: skip
    assert layer("mla").flops(16) == layer().flops(16) * (2 + 2 * 4) / (2 * 4)
    assert layer("sdpa+diff").flops(16) == 2 * layer().flops(16)


def test_a_cache_takes_for_each_token_what_its_layers_keep():
    kept = {"sdpa": 2 * 2 * 8, "mla": 32 + 4, "sdpa+forget": 2 * 2 * 8 + 4, "delta": 4 * 64 / 16}
    for attention, numbers in kept.items():
        gpt = random_gpt(attention=attention, n_kv_head=2, dropout=0.5).train()
        assert cache_bytes_per_token(gpt) == 2 * 4 * numbers and gpt.training
    gpt = random_gpt(attention="sdpa+window/sdpa", attention_window=4)  # a window's layer keeps 4 rows and one more
    assert cache_bytes_per_token(gpt) == (5 + 16) * 2 * 32 * 4 / 16
    assert [layer("mla", n_head=n_head).latent for n_head in (1, 2, 8)] == [16, 16, 8]  # four heads, or all


@pytest.mark.parametrize("attention", some([*FORMS, "sdpa+" + "+".join(MODIFIERS), "delta+conv+gate_silu"], 8))
def test_what_a_cache_takes_is_known_of_shapes_alone(attention):
    gpt = random_gpt(attention=attention)
    assert cache_bytes_per_token(without_weights(gpt.config)) == cache_bytes_per_token(gpt) > 0


# Layers.


def test_rows_times_a_weight_are_the_product_however_many_and_however_stored():
    for N, C in ((384, 300), (385, 300), (300, 384), (4, 4)):
        for bias in (True, False):
            linear = Linear(C, N - 1, 1, bias=bias).eval()
            assert (linear.parts, linear.out_features) == ((N - 1, 1), N) and (N * C > LARGE) == (N > 4)
            rows = linear.weight.detach().clone()
            for weight in (rows, rows.t().contiguous().t()):
                linear.weight.data = weight
                for lead in ((1,), (4,), (1, 1), (2, 3), (1, 5), ()):
                    x = torch.randn(*lead, C)
                    wanted = F.linear(x, rows, linear.bias)
                    close(linear(x), wanted)
                    with torch.inference_mode():
                        close(linear(x), wanted)
                assert linear.weight.stride() == weight.stride() and torch.equal(linear.weight, rows)


def test_norms_in_inference_mode_are_those_of_training_within_rounding():
    norm = RMSNorm(24, eps=1e-3)
    nn.init.normal_(norm.weight)
    strided = torch.randn(2, 24, 3).mT  # (2, 3, 24)
    for x in (torch.randn(24), torch.randn(1, 1, 24), strided[:1, :1], strided, torch.zeros(1, 24)):
        for scale in (1.0, 1e-4, 1e4):
            wanted = norm(scale * x)
            with torch.inference_mode():
                close(norm(scale * x), wanted, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        assert norm(torch.full((1, 24), torch.nan)).isnan().all() and norm(torch.full((2, 24), torch.inf)).isnan().all()


@pytest.mark.parametrize("name", MLPS)
def test_every_mlp_has_about_eight_weights_for_two_channels_and_a_step_for_a_single_token(name):
    mlp = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=192, vocab_size=11, mlp=name)).blocks[0].mlp
    assert sum(weight.numel() for weight in mlp.parameters()) == pytest.approx(8 * 192**2, rel=0.02)
    assert mlp_step(mlp) is not mlp


@pytest.mark.parametrize("name", NORMS)
def test_a_norms_result_has_the_type_of_its_input_whatever_its_weights(name):
    norm = NORMS[name](GPTConfig(n_embd=24, n_head=2))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert norm(torch.randn(2, 3, 24, dtype=dtype)).dtype == dtype


def test_norms_compute_in_the_type_of_their_input():
    pairs = ((RMSNorm(24, eps=1e-3), nn.RMSNorm(24, eps=1e-3)), (LayerNorm(24), nn.LayerNorm(24)))
    made = {type(make(GPTConfig(vocab_size=9))) for make in NORMS.values()}
    assert made == {type(norm) for norm, _ in pairs}, "add the new norm to the pairs, with its formula"
    for norm, plain in pairs:
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        plain.load_state_dict(norm.state_dict())
        for x in (torch.randn(2, 3, 24), 1e-3 * torch.randn(5, 24), torch.zeros(1, 24)):
            close(norm(x), plain(x))
            assert norm(x.bfloat16()).dtype == torch.bfloat16
            close(norm(x.bfloat16()).float(), plain(x), rtol=3e-2, atol=3e-2)


# The loss: cross-entropy without the logits of a whole batch.

V, C = 50, 8


def plain(x, weight, targets, softcap):
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tokens", [0.5, 1, 5, 12, 13, 10_000], ids="{} tokens at a time".format)
def test_the_loss_has_value_and_gradient_of_the_plain_one(softcap, tokens, monkeypatch):
    x = torch.randn(4, 9, C, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, C, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(V, (4, 9))
    targets[1, 3:] = IGNORE_INDEX
    expected = plain(x, weight, targets, softcap)
    expected = (expected, *torch.autograd.grad(expected / 7, (x, weight)))
    for most, multiple in ((int(tokens * V * 4), 1), (None, 1), (None, 64)):  # a GPU wants padding of the heads
        monkeypatch.setitem(model.loss.LARGEST_CHUNK, "cpu", int(tokens * V * 4) if most is None else 1 << 30)
        monkeypatch.setitem(model.loss.MULTIPLE, "cpu", multiple)
        nats = fused_cross_entropy(x, weight, targets, softcap, largest_chunk=most)
        for got, wanted in zip((nats, *torch.autograd.grad(nats / 7, (x, weight))), expected, strict=True):
            close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("scale", [0.01, 5, 200], ids="logits of {}".format)
def test_in_float32_value_and_gradient_are_near_float64_however_large_or_small_the_loss(softcap, scale):
    x, weight = torch.randn(1, 40, C) * scale, torch.randn(V, C)
    targets = (x @ weight.T).argmax(-1)  # half of them nearly sure
    targets[:, ::2] = (x @ weight.T).argmin(-1)[:, ::2]  # and the others nearly impossible: exp(-1000) is 0
    exact, rounded = (
        [part.detach().to(dtype).requires_grad_() for part in (x, weight)] for dtype in (torch.float64, torch.float32)
    )
    for tensors in (exact, rounded):
        nats = (
            plain(*tensors, targets, softcap) if tensors is exact else fused_cross_entropy(*tensors, targets, softcap)
        )
        tensors += [nats, *torch.autograd.grad(nats, tensors[:2])]
    for got, wanted in zip(rounded[2:], exact[2:], strict=True):
        close(got.double(), wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_nothing_scored_is_no_loss_and_products_of_the_loss_are_autocasts_but_the_softmax_is_not():
    x, weight = torch.randn(2, 3, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    nats, targets = fused_cross_entropy(x, weight, torch.full((2, 3), IGNORE_INDEX)), torch.randint(V, (2, 3))
    assert nats == 0 and not any(gradient.any() for gradient in torch.autograd.grad(nats, (x, weight)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = fused_cross_entropy(x, weight, targets)
    assert rounded.dtype == torch.float32
    close(rounded, plain(x.bfloat16(), weight.bfloat16(), targets, None))


def test_a_second_pass_back_adds_the_same_gradient_again():
    x, weight = torch.randn(2, 3, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    nats = 3 * fused_cross_entropy(x, weight, torch.randint(V, (2, 3)))
    nats.backward(retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    nats.backward()
    assert torch.equal(x.grad, 2 * once[0]) and torch.equal(weight.grad, 2 * once[1])


def test_second_derivatives_are_those_of_the_logits_and_the_loss_refuses_them():
    gpt, (tokens, targets) = random_gpt(), torch.randint(11, (2, 2, 6)).unbind()
    weights = [*gpt.parameters()]
    by_logits = F.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    slopes = torch.autograd.grad(by_logits, weights, create_graph=True)
    torch.autograd.grad(sum(slope.square().sum() for slope in slopes), weights)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(gpt.loss(tokens, targets), weights, create_graph=True)


def test_targets_of_minus_1_and_minus_100_count_nothing_and_what_is_no_id_is_an_error():
    gpt, (tokens, targets) = random_gpt(), torch.randint(61, (2, 2, 6)).unbind()
    targets[0, 2:4], targets[1, 1:5] = -100, -1
    wanted = F.cross_entropy(gpt(tokens)[targets >= 0], targets[targets >= 0], reduction="sum")
    close(gpt.loss(tokens, targets), wanted)
    for wrong in (-2, 61):
        targets[0, 0] = wrong
        with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
            gpt.loss(tokens, targets)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("unchecked")
def test_a_traced_model_reads_texts_of_another_length():
    gpt, others = random_gpt(), torch.randint(61, (3, 14))
    traced = torch.jit.trace(gpt, torch.randint(61, (2, 9)))
    close(traced(others), gpt(others))


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True, "logit_softcap": 5.0}], ids=str)
def test_a_model_learns_by_its_loss_as_by_its_logits(settings):
    gpt, (tokens, targets) = random_gpt(**settings), torch.randint(11, (2, 2, 6)).unbind()
    targets[1, 3:] = -1  # which no loss counts
    gpt.loss(tokens, targets).backward()
    ours = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    gpt.zero_grad()
    F.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum").backward()
    for name, parameter in gpt.named_parameters():
        close(ours[name], parameter.grad)


@pytest.mark.slow
def test_the_logits_of_a_batch_are_never_held_at_once(monkeypatch):
    N, vocabulary = 4096, 1000
    monkeypatch.setitem(model.loss.LARGEST_CHUNK, "cpu", 4 * vocabulary * N // 16)
    x, weight = torch.randn(1, N, C, requires_grad=True), torch.randn(vocabulary, C, requires_grad=True)
    targets, logits, most = torch.randint(vocabulary, (1, N)), 4 * N * vocabulary, {}
    for loss in (fused_cross_entropy, plain):
        with LiveBytes() as live:
            loss(x, weight, targets, None).backward()
        most[loss] = live.most
    assert most[fused_cross_entropy] < 0.3 * logits < logits < most[plain]
    monkeypatch.setitem(model.loss.LARGEST_CHUNK, "cpu", 1 << 40)  # all at once: one buffer of logits
    with LiveBytes() as live:
        fused_cross_entropy(x, weight, targets).backward()
    assert live.most < 1.1 * logits < 0.5 * most[plain]


# What a person may get wrong.


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"vocab_size": None}, "vocab_size=null: a GPT needs the tokenizer's number of token ids"),
        ({"n_head": 3}, "model.n_head=3 does not divide model.n_embd=128: choose model.n_head from 1, 2, 4, 8, 16,"),
        ({"n_head": 4, "n_kv_head": 3}, "n_kv_head=3 does not divide model.n_head=4: choose model.n_kv_head from"),
        ({"n_embd": 12, "n_head": 4}, "rotates pairs of channels, but model.n_embd=12 / model.n_head=4 makes 3"),
        ({"attention": "fast"}, "attention=fast: 'fast' is no form"),
        ({"attention": "sdpa/window"}, r"'window' is no form: add it to a form, as in sdpa\+window"),
        ({"attention": "sdpa+window"}, r"attention=sdpa\+window needs a window: set model.attention_window=POSITIONS"),
        ({"attention": "sdpa/sdpa+nope", "position": "alibi"}, "nope leaves out the rotation of model.position=rope"),
        ({"position": "absolute"}, "position=absolute is not known: choose one of rope, pope, learned, alibi, none"),
        *(({name: "no"}, f"model.{name}=no is not known") for name in ("norm", "mlp", "rope_scaling")),
        *(({name: 1.0}, f"{name}=1 must be at least 0 and below 1") for name in ("dropout", "attention_dropout")),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        *(({name: 0}, f"model.{name}=0 must be at least 1") for name in
          ("n_layer", "n_embd", "n_head", "n_kv_head", "head_size", "attention_window", "latent_size", "block_size",
           "vocab_size", "n_inner")),
        *(({name: 0.0}, f"model.{name}=0 must be") for name in
          ("rope_theta", "rope_fraction", "score_softcap", "norm_eps", "logit_softcap")),
        ({"rope_fraction": 1.5}, "rope_fraction=1.5"),
        ({"attention_window": 10**30}, "attention_window=1.* must be below 2\\^63: leave it out for all positions"),
        ({"rope_scaling_factor": 0.5}, "rope_scaling_factor=0.5 must be finite and at least 1"),
        ({"n_embd": 2**40, "n_head": 1}, "a weight would have more than 2\\^63 numbers: lower model.n_embd=10995"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        config = GPTConfig(**{"vocab_size": 61} | settings)
        count_weights(config) if config.vocab_size else GPT(config)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"n_embd": 12, "n_head": 5}, "choose model.n_head from 1, 2, 3, 6, or another model.n_embd"),
        ({"n_embd": 12, "n_head": 5, "n_kv_head": 3}, "choose model.n_head from 3, 6, or another model.n_embd"),
        ({"n_embd": 12, "n_head": 5, "position": "none"}, "choose model.n_head from 1, 2, 3, 4, 6, 12, or another"),
        ({"n_embd": 12, "n_head": 5, "n_kv_head": 5}, "choose another model.n_embd"),
        ({"attention": "gta", "head_size": 3}, "set model.head_size=4, or another model.position"),
        ({"n_inner": 2**62}, f"lower model.n_inner={2**62}"),
        ({"ngrams": [2], "ngram_rows": 2**61}, f"lower model.ngram_rows={2**61}"),
    ],
    ids=str,
)
def test_a_remedy_for_sizes_fits_the_other_settings(settings, remedy):
    with pytest.raises(SettingsError) as raised:
        count_weights(GPTConfig(vocab_size=50, **settings))
    assert raised.value.remedy.startswith(remedy)


@pytest.mark.usefixtures("unchecked")
def test_a_size_may_be_an_integer_of_numpys():
    config = GPTConfig(vocab_size=np.int64(61), n_layer=np.int32(2))
    assert json.loads(json.dumps(asdict(config)))["vocab_size"] == 61


def test_a_chunk_in_fp16_on_a_gpu_is_no_longer_than_its_sums_allow():
    # In the first steps the largest sum of a gradient over 2,048 tokens is 1,258, and fp16 ends at 65,504.
    of = lambda dtype, N: chunk_length(torch.empty(N, 4, dtype=dtype, device="meta"), 257, None)  # noqa: E731
    assert of(torch.bfloat16, 262_144) == 262_144 and of(torch.float16, 262_144) == 16_384
    assert of(torch.float16, 20_000) == 10_000 and 16_384 * 1258 / 2048 < 65_504 / 4


class Adapted(nn.Module):
    """LoRA around a linear layer, whose `weight` is the frozen one, as in peft."""

    def __init__(self, base, V):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, V, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


HEADS = {
    "bias": lambda gpt: setattr(gpt, "lm_head", nn.Linear(gpt.config.n_embd, 61)),
    "hook": lambda gpt: gpt.lm_head.register_forward_hook(lambda head, given, logits: 2 * logits),
    "pre-hook": lambda gpt: gpt.lm_head.register_forward_pre_hook(lambda head, given: (given[0] + 1,)),
    "forward": lambda gpt: setattr(gpt.lm_head, "forward", lambda x: F.linear(x, -gpt.lm_head.weight)),
    "adapter": lambda gpt: setattr(gpt, "lm_head", Adapted(gpt.lm_head, 61)),
    "parametrization": lambda gpt: parametrizations.weight_norm(gpt.lm_head),
    "pruning": lambda gpt: prune.l1_unstructured(gpt.lm_head, "weight", 0.5),
    "layers": lambda gpt: setattr(gpt, "lm_head", nn.Sequential(nn.Linear(gpt.config.n_embd, 8), nn.Linear(8, 61))),
}


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_is_that_of_the_logits_whatever_the_head_is(head):
    """Value, gradient and the nats of each token; those that do not count are of either number."""
    gpt, (tokens, targets) = random_gpt(logit_softcap=5.0), torch.randint(61, (2, 2, 6)).unbind()
    HEADS[head](gpt)
    targets[0, 1], targets[1, 2:4] = -1, -100
    counts = targets >= 0
    wanted = F.cross_entropy(gpt(tokens)[counts].double(), targets[counts], reduction="sum")
    weights = [weight for weight in gpt.parameters() if weight.requires_grad]
    slopes = torch.autograd.grad(wanted, weights)
    loss = gpt.loss(tokens, targets)
    close(loss, wanted.float())
    for ours, theirs in zip(torch.autograd.grad(loss, weights), slopes, strict=True):
        close(ours, theirs)
    nats, hits = gpt.nats(tokens, targets)
    close(nats.sum(), wanted.float())
    assert nats[~counts].eq(0).all() and torch.equal(hits, gpt(tokens).argmax(-1) == targets)


def test_a_batch_of_no_texts_costs_nothing():
    gpt, none = random_gpt(), torch.zeros(0, 6, dtype=torch.long)
    assert gpt(none).shape == (0, 6, 61) and gpt.loss(none, none) == 0 and gpt.nats(none, none)[0].shape == (0, 6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.arange(6), r"tokens \(6,\) need the shape \(B, T\): tokens\[None\] is"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"tokens \(1, 2, 3\) need the shape"),
        (torch.tensor([[3, 61]]), "token id 61 is not in the vocabulary of 61 ids, 0 to 60: encode"),
        (torch.tensor([[-100, 3]]), "token id -100 is not in the vocabulary"),
    ],
)
def test_tokens_that_are_none_are_refused_in_a_sentence(tokens, message):
    for learned in ("rope", "learned"):
        gpt = random_gpt(position=learned)
        for function in (gpt, gpt.hidden, lambda tokens, gpt=gpt: gpt.loss(tokens, tokens)):
            with pytest.raises(ValueError, match=message):
                function(tokens)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_ids_are_refused_with_what_pads_them_and_that_is_the_loss_of_each_text(layout):
    gpt = random_gpt()
    texts = [torch.randint(61, (n,)) for n in (4, 2, 7)]
    tokens = torch.nested.nested_tensor([text[:-1] for text in texts], layout=layout)
    targets = torch.nested.nested_tensor([text[1:] for text in texts], layout=layout)
    padded = torch.nested.to_padded_tensor(tokens, 0)
    for function in (gpt, gpt.hidden, lambda tokens: gpt.loss(tokens, targets), lambda _: gpt.nats(padded, targets)):
        with pytest.raises(ValueError, match="^t.* are nested: pad the texts on the right, torch.nested.to_padded"):
            function(tokens)
    found = gpt.loss(padded, torch.nested.to_padded_tensor(targets, -100))
    alone = [F.cross_entropy(gpt(text[None, :-1])[0], text[1:], reduction="sum") for text in texts]
    close(found, sum(alone))


@pytest.mark.usefixtures("unchecked")
def test_embeddings_and_probabilities_in_place_of_ids_are_refused_with_what_takes_them():
    gpt, ids = random_gpt(), torch.randint(61, (2, 7))
    embeddings = gpt.token_embedding(ids)
    for function in (gpt, lambda tokens: gpt.loss(tokens, ids), lambda tokens: gpt.nats(tokens, ids)):
        with pytest.raises(
            ValueError, match=r"^tokens \(2, 7, 32\) are torch.float32, .*hook on model.token_embedding"
        ):
            function(embeddings)
    hook = gpt.token_embedding.register_forward_hook(lambda embedding, arguments, x: embeddings)
    logits = gpt(torch.zeros_like(ids))
    hook.remove()
    close(logits, gpt(ids))
    targets = torch.rand(2, 7, 61).softmax(-1)
    with pytest.raises(ValueError, match=r"^targets .*F.cross_entropy\(model\(tokens\).mT, targets.mT\) takes"):
        gpt.loss(ids, targets)
    close(F.cross_entropy(logits.mT, targets.mT), -(targets * logits.log_softmax(-1)).sum(-1).mean())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("given", [torch.uint8, torch.uint16, torch.int16, torch.float32, "numpy", "list"])
def test_ids_of_another_type_are_refused_with_what_makes_ids_of_them(given):
    """As bytes have it, and files of ids."""
    gpt, ids = random_gpt(ngrams=[2], ngram_rows=53), torch.randint(61, (1, 7))
    tokens = {"numpy": ids.numpy().astype("uint16"), "list": ids.tolist()}.get(given)
    tokens = ids.to(given) if tokens is None else tokens
    mended = torch.tensor(tokens).long() if isinstance(given, str) else tokens.long()
    for name, function in (
        ("tokens", gpt),
        ("tokens", lambda tokens: streams(gpt, tokens)[-1]),
        ("targets", lambda targets: gpt.loss(ids, targets)),
        ("targets", lambda targets: gpt.nats(ids, targets)[0]),
    ):
        with pytest.raises(ValueError, match=rf"^{name} are .*{name}\)?\.long\(\)\.$"):
            function(tokens)
        assert torch.equal(function(mended), function(ids))


@pytest.mark.usefixtures("unchecked")
def test_targets_of_another_shape_are_refused_with_the_usual_cut():
    gpt, ids = random_gpt(), torch.randint(61, (2, 7))
    for function in (gpt.loss, gpt.nats):
        with pytest.raises(ValueError, match=r"targets \(2, 6\) need the shape of tokens \(2, 7\): .* ids\[:, 1:\]"):
            function(ids, ids[:, 1:])
        function(ids[:, :-1], ids[:, 1:])


def test_ids_of_32_bits_are_those_of_64():
    """Also the hashes of n-grams, whose products need 64; and in chunks with a cache."""
    gpt, (ids, targets) = random_gpt(ngrams=[2, 3], ngram_rows=53), torch.randint(61, (2, 2, 8)).unbind()
    small = ids.int()
    assert torch.equal(gpt(small), gpt(ids)) and torch.equal(gpt.loss(small, targets.int()), gpt.loss(ids, targets))
    cache = KVCache(8)
    with torch.no_grad():
        close(torch.cat([gpt(part, cache=cache) for part in small.split(3, 1)], 1), gpt(ids))


@pytest.mark.parametrize("settings", [{}, {"attention": "sdpa+sink", "attention_window": 3}, {"attention": "softcap"}])
def test_forward_mode_derivatives_are_those_of_differences(settings):
    """torch.autograd.forward_ad, for which functions with a backward pass of their own have no rule."""
    gpt, tokens = random_gpt(**settings), torch.randint(61, (2, 6))
    weights = {name: weight.detach() for name, weight in gpt.named_parameters()}
    ways = {name: torch.randn_like(weight) for name, weight in weights.items()}
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(weight, ways[name]) for name, weight in weights.items()}
        slope = forward_ad.unpack_dual(torch.func.functional_call(gpt, dual, tokens)).tangent
    gpt.double()

    def at(step):
        moved = {name: weight.double() + step * ways[name].double() for name, weight in weights.items()}
        return torch.func.functional_call(gpt, moved, tokens)

    close(slope, ((at(1e-6) - at(-1e-6)) / 2e-6).float(), atol=1e-3 * slope.abs().max().item())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("numbers", [[0, 0, 0, 1, 1], [0, 1, 1, 1, 2], [1, 1, 1, 2, 2], [0, 0, 2, 2, 1]])
def test_texts_that_are_numbered_are_refused_with_the_starts_that_are_meant(numbers):
    model = random_gpt()
    tokens, ids = torch.arange(5).repeat(2, 1), torch.tensor([[0] * 5, numbers])
    starts = torch.tensor([[0] * 5, [numbers.index(number) for number in numbers]])
    alone = [model(tokens[:1, i:j]) for i, j in itertools.pairwise([*sorted(set(starts[1].tolist())), 5])]
    close(model(tokens, doc_starts=starts)[1:], torch.cat(alone, 1))
    layer, x = model.blocks[0].attention, torch.randn(2, 5, 32)
    layer(x, AttentionContext(doc_starts=starts))
    for run in (lambda: model(tokens, doc_starts=ids), lambda: layer(x, AttentionContext(doc_starts=ids))):
        with pytest.raises(ValueError, match="doc_starts has . for token .*the positions of the first tokens") as found:
            run()
        assert eval(str(found.value).split("they are ")[-1].rstrip("."), {"ids": ids}).equal(starts)
    cache = KVCache(5)
    model(tokens[:, :3], doc_starts=starts[:, :3], cache=cache)
    close(model(tokens[:, 3:], doc_starts=starts[:, 3:], cache=cache), model(tokens, doc_starts=starts)[:, 3:])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_loss_without_gradients_makes_none(softcap):
    x, weight, targets = torch.randn(2, 9, 8), torch.randn(31, 8), torch.randint(31, (2, 9))
    targets[0, :4] = IGNORE_INDEX
    logits = x @ weight.mT if softcap is None else softcap * (x @ weight.mT / softcap).tanh()
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    with torch.no_grad():
        made = fused_cross_entropy(x, weight, targets, softcap, lambda *_: pytest.fail("gradients"), largest_chunk=999)
    close(made, wanted)
