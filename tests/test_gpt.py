"""The GPT: its shapes, its sizes, what may influence what."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt

from model.config import GPTConfig
from model.gpt import GPT

VARIANTS = [
    {},
    {"n_kv_head": 2},
    {"n_kv_head": 1, "qk_norm": False},
    {"n_head": 6, "head_size": 10, "n_kv_head": 3},
    {"attention": "stacked", "n_head": 3, "head_size": 2},
    {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True},
    {"position": "none", "mlp": "relu2", "tie_embeddings": True},
    {"logit_softcap": 5.0, "attention": "matmul"},
    {"dropout": 0.5, "attention_dropout": 0.5},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_token_influences_only_itself_and_later_positions(settings):
    model = random_gpt(**settings)
    tokens = torch.randint(61, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 61
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 61)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-5)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-4


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_parameter_gets_a_gradient(settings):
    model = random_gpt(**settings).train()
    tokens = torch.randint(61, (2, 13))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_parameters_of_gpt2_are_those_of_the_published_model():
    with torch.device("meta"):
        model = GPT(
            GPTConfig(
                n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257, position="learned",
                norm="layernorm", mlp="gelu", bias=True, qkv_bias=True, qk_norm=False, tie_embeddings=True,
            )
        )  # fmt: skip
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.parametrize("zero_init", [True, False])
def test_an_untrained_model_knows_nothing(zero_init):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_embd=64, vocab_size=1000, zero_init=zero_init))
    tokens = torch.randint(1000, (4, 65))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(1000)) < (1e-4 if zero_init else 0.05)


def test_heads_of_a_size_of_their_own_set_the_width_of_attention_apart_from_the_model_s():
    qwen3 = GPTConfig(n_layer=1, n_embd=1024, n_head=16, n_kv_head=8, head_size=128, vocab_size=8)  # Qwen3-0.6B's heads
    with torch.device("meta"):
        attention = GPT(qwen3).blocks[0].attention
    assert attention.q_proj.weight.shape == (2048, 1024)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (1024, 1024)
    assert attention.o_proj.weight.shape == (1024, 2048)


@torch.no_grad()
def test_dropout_drops_half_of_the_embedding_and_of_what_each_layer_adds_and_doubles_the_rest():
    model, seen = random_gpt(dropout=0.5, n_layer=1, position="learned").train(), {}
    block = model.blocks[0]
    for name in ("token_embedding", "blocks.0.attention", "blocks.0.mlp"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: output}))
    block.register_forward_pre_hook(lambda _, inputs: seen.update(block=inputs[0]))
    block.mlp_norm.register_forward_pre_hook(lambda _, inputs: seen.update(between=inputs[0]))
    after = model.hidden(torch.randint(61, (4, 16)))
    start, between = seen["block"], seen["between"]
    embedded = seen["token_embedding"] + model.position_embedding.weight[:16]
    added = [(start, embedded), (between - start, seen["blocks.0.attention"]), (after - between, seen["blocks.0.mlp"])]
    for got, whole in added:
        kept = got.abs() > whole.abs()
        torch.testing.assert_close(got, 2 * whole * kept, atol=1e-4, rtol=1e-4)
        assert 0.4 < kept.float().mean() < 0.6


def test_softcap_bounds_the_logits():
    model, capped = random_gpt(), random_gpt(logit_softcap=2.0)
    tokens = torch.randint(61, (1, 10))
    assert model(tokens).abs().max() > 2
    torch.testing.assert_close(capped(tokens), 2 * torch.tanh(model(tokens) / 2))


@pytest.mark.parametrize("zero_init", [True, False])
def test_tied_embeddings_are_one_tensor_that_does_not_start_at_zero(zero_init):
    model = GPT(GPTConfig(vocab_size=61, tie_embeddings=True, zero_init=zero_init))
    assert model.lm_head.weight is model.token_embedding.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("zero_init", [False, True])
def test_first_weights_spread_as_their_scheme_says(zero_init):
    model = GPT(GPTConfig(vocab_size=61, n_layer=8, position="learned", bias=True, zero_init=zero_init))
    for name, weight in model.named_parameters():
        layer, kind = name.split(".")[-2:]
        writes_residual = layer in ("o_proj", "down_proj")
        if kind == "bias":
            assert not weight.any(), name
        elif weight.ndim == 2:
            expected = 0.02 / math.sqrt(2 * 8) if writes_residual else 0.02
            if zero_init and "embedding" not in layer:
                expected = 0 if writes_residual or layer == "lm_head" else 1 / math.sqrt(weight.shape[1])
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_learned_positions_refuse_more_tokens_than_they_have():
    with pytest.raises(ValueError, match="17 positions do not fit the 16 learned"):
        random_gpt(position="learned")(torch.randint(61, (1, 17)))


def test_rope_reads_beyond_the_block_it_was_trained_on():
    assert random_gpt()(torch.randint(61, (1, 40))).isfinite().all()


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(GPTConfig())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_head": 3}, "n_head=3 does not divide model.n_embd=128"),
        ({"n_head": 4, "n_kv_head": 3}, "n_kv_head=3 does not divide model.n_head=4"),
        ({"n_kv_head": 0}, "n_kv_head=0"),
        ({"n_embd": 12, "n_head": 4}, "rotates pairs of channels, but a head size of 3 is odd"),
        ({"head_size": 7}, "but a head size of 7 is odd"),
        ({"head_size": 0}, "head_size=0 must be at least 1"),
        ({"attention": "fast"}, "attention=fast: 'fast' is unknown"),
        ({"position": "absolute"}, "position=absolute is not known"),
        ({"norm": "batchnorm"}, "norm=batchnorm is not known"),
        ({"mlp": "relu"}, "mlp=relu is not known"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"attention": "flex", "attention_dropout": 0.1}, "flex has no dropout, but model.attention_dropout=0.1"),
        ({"n_layer": 0}, "n_layer=0"),
        ({"attention_window": 0}, "attention_window=0"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"rope_scaling_factor": 0.5}, "rope_scaling_factor=0.5"),
        ({"logit_softcap": -1.0}, "logit_softcap=-1.0"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        GPT(GPTConfig(**{"vocab_size": 61} | settings))
