"""The attention layer: what every form keeps, and parity with torch's own."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_mask

from model.attention import ATTENTION_FUNCTIONS, forms, functional, make_attention
from model.attention.recurrent import Recurrent
from model.attention.registry import LAYERS
from model.config import POSITIONS, AttentionConfig
from model.kv_cache import KVCache, LayerCache
from model.masks import causal_mask, padding_mask, sliding_window_mask

C = 16
STATES = [name for name, layer in LAYERS.items() if issubclass(layer, Recurrent)]
# Whose weights are positive and sum to 1.
SOFTMAX = (*ATTENTION_FUNCTIONS, "average", "simple", "single_head", "stacked")
every_form = pytest.mark.parametrize("form", forms())
# flex computes gradients on CUDA only
every_training_form = pytest.mark.parametrize("form", [form for form in forms() if form != "flex"])
every_position = pytest.mark.parametrize("position", POSITIONS)


def layer(form="sdpa", **settings):
    settings = {"n_embd": C, "n_head": 4, "n_kv_head": 2} | settings
    return make_attention(AttentionConfig(attention=form, **settings))


def close(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


@every_form
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(form):
    attention, x = layer(form), torch.randn(2, 9, C)
    y = attention(x)
    for t in (1, 5, 8):
        changed = torch.cat((x[:, :t], torch.randn(2, 9 - t, C)), 1)
        close(attention(changed)[:, :t], y[:, :t])
        assert (attention(changed)[:, t:] - y[:, t:]).abs().amax() > 1e-3  # and the change itself arrives


@every_training_form
@every_position
def test_padding_changes_no_real_position_and_no_gradient(form, position):
    attention = layer(form, position=position)
    attention_mask = torch.ones(3, 8)
    attention_mask[1, :3] = attention_mask[2, 5:] = 0  # padded on the left, and on the right
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0).long()
    real = attention_mask[..., None] == 1
    x = torch.randn(3, 8, C)

    def outputs_and_gradients(x):
        x = x.clone().requires_grad_()
        y = attention(x, mask=padding_mask(attention_mask), positions=positions).masked_fill(~real, 0)
        gradients = torch.autograd.grad(y.square().sum(), [x, *attention.parameters()])
        return y, *gradients

    first = outputs_and_gradients(x)
    for got, wanted in zip(outputs_and_gradients(torch.where(real, x, 9 * torch.randn_like(x))), first, strict=True):
        close(got, wanted)
    assert first[1].masked_select(~real).abs().max() == 0  # padding receives no gradient either
    with torch.no_grad():
        close(first[0][1, 3:], attention(x[1:2, 3:])[0])  # and each text alone gives the same
        close(first[0][2, :5], attention(x[2:, :5])[0])


@every_form
@torch.no_grad()
def test_any_number_of_leading_dimensions(form):
    attention, x = layer(form), torch.randn(3, 2, 5, C)
    y = attention(x)
    close(attention(x[1, 1]), y[1, 1])
    close(attention(x[1]), y[1])
    close(attention(x[:, None]), y[:, None])


@pytest.mark.parametrize("form", [form for form in forms() if form not in STATES])
@torch.no_grad()
def test_a_window_sees_itself_and_the_positions_just_before(form):
    attention, x = layer(form, attention_window=3), torch.randn(1, 9, C)
    weights = attention.weights(x)
    inside = causal_mask(9, 9).triu(-2)
    assert weights[..., ~inside].abs().max() == 0
    if form in SOFTMAX:
        assert (weights[..., inside] > 0).all()
    far = torch.cat((torch.randn(1, 4, C), x[:, 4:]), 1)
    close(attention(far)[:, 6:], attention(x)[:, 6:])


@every_form
@every_position
@torch.no_grad()
def test_the_weights_of_the_picture_are_those_of_the_layer(form, position):
    """Each row sums to 1, where that is so, and weighs the layer's own values to the layer's own output."""
    if form == "flex" and position != "rope":
        pytest.skip("flex traces each of its shapes anew: one case is enough")
    dropout = 0.0 if form == "flex" else 0.5
    attention, x = layer(form, position=position, attention_dropout=dropout), torch.randn(2, 6, C)
    weights = attention.weights(x)
    if form in SOFTMAX:
        close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    values = attention.project(x)[2]
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
    if form not in ("retention", "delta"):  # which normalise what is gathered: see test_attention_field.py
        close(attention.merge(weights @ values), attention.eval()(x))


@pytest.mark.parametrize("form", [form for form in forms() if form not in ("flex", *STATES)])
def test_dropout_acts_in_training_only(form):
    attention, x = layer(form, attention_dropout=0.5), torch.randn(2, 9, C)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@every_training_form
def test_bfloat16_stays_close_to_float32(form):
    attention, x = layer(form).eval(), torch.randn(2, 9, C)
    wanted = attention(x)
    got = attention.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    close(got.float(), wanted, rtol=2e-2, atol=3e-2)


@every_form
@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_autocast_to_bfloat16_stays_close_and_keeps_to_the_fused_kernels(form):
    attention, x = layer(form).eval(), torch.randn(2, 9, C)
    attention(x)  # flex announces once that it is not compiled
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = attention(x)
    close(y.float(), attention(x), rtol=2e-2, atol=3e-2)


def test_the_saved_names_are_the_projections_and_nothing_else():
    names = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "k_norm.weight"}
    assert set(layer(position="rope").state_dict()) == names
    assert set(layer(position="alibi", qk_norm=False, qkv_bias=True).state_dict()) == {
        *(name for name in names if "norm" not in name),
        *("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    }


def test_qk_norm_makes_scores_blind_to_the_size_of_queries_and_keys():
    attention, x = layer(qk_norm=True), torch.randn(2, 6, C)
    wanted = attention.weights(x)
    with torch.no_grad():
        attention.q_proj.weight *= 100
        attention.k_proj.weight *= 0.5
    close(attention.weights(x), wanted, rtol=1e-3, atol=1e-4)


def test_alibi_lowers_far_keys_by_the_slope_of_the_head():
    attention = layer(position="alibi", n_head=4, n_kv_head=4, qk_norm=False)
    nn.init.zeros_(attention.q_proj.weight)  # no content: only the penalty is left
    weights = attention.weights(torch.randn(1, 5, C))[0]
    for h, slope in enumerate([2**-2, 2**-4, 2**-6, 2**-8]):
        close((weights[h, 4, 0] / weights[h, 4, 3]).log(), torch.tensor(-3 * slope), atol=1e-5)


# An independent implementation; test_huggingface.py holds whole models equal to others.


@pytest.mark.parametrize("biased", [False, True])
def test_parity_with_torch_multihead_attention(biased):
    ours = layer(n_kv_head=4, position="none", qk_norm=False, qkv_bias=biased, bias=biased)
    theirs = nn.MultiheadAttention(C, 4, bias=biased, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
        if biased:
            theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
            theirs.out_proj.bias.copy_(ours.o_proj.bias)
    x = torch.randn(3, 7, C)
    y, weights = theirs(x, x, x, attn_mask=~causal_mask(7, 7), average_attn_weights=False)
    close(ours(x), y)
    close(ours.weights(x), weights)
    real = torch.ones(3, 7)
    real[1, 4:] = 0
    y, _ = theirs(x, x, x, attn_mask=~causal_mask(7, 7), key_padding_mask=real == 0)
    close(ours(x, mask=padding_mask(real)), y)


# Bad input.


@every_form
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": torch.ones(2, 5)}, r"mask \(2, 5\) does not broadcast.*padding_mask"),
        ({"mask": torch.ones(2, 1, 1, 4)}, r"mask \(2, 1, 1, 4\) does not broadcast"),
    ],
)
@torch.no_grad()
def test_bad_input_is_a_value_error_that_names_the_shapes(form, arguments, message):
    if form in STATES:
        message = "tell where texts begin|does not broadcast"
    with pytest.raises(ValueError, match=message):
        layer(form)(torch.randn(2, 5, C), **arguments)


@pytest.mark.parametrize("form", [form for form in forms() if form not in STATES])
@torch.no_grad()
def test_a_cache_of_another_shape_is_a_value_error_that_names_the_shapes(form):
    kept = {name: torch.zeros(2, 7, 8, 5) for name in ("kv", "latent")}
    with pytest.raises(ValueError, match=r"do not fit a cache of \(2, 7, 8, 5\)"):
        layer(form)(torch.randn(2, 5, C), cache=KVCache([LayerCache(8, None, kept, {})]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 5), (1, 5)])
def test_positions_that_do_not_fit_are_a_value_error_that_names_the_shapes(shape):
    with pytest.raises(ValueError, match=rf"positions {re.escape(str(shape))}.*\(2, 5, 16\)"):
        layer()(torch.randn(2, 5, C), positions=torch.zeros(shape, dtype=torch.long))


@pytest.mark.usefixtures("unchecked")
def test_it_compiles_into_one_graph():
    attention = layer()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 6, C, requires_grad=True)
    for arguments in ({}, {"mask": torch.ones(2, 1, 1, 6), "positions": torch.arange(6) + 3}):
        y, wanted = compiled(x, **arguments), attention(x, **arguments)
        close(y, wanted)
        close(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (y, wanted)))


def test_it_can_be_built_on_the_meta_device_and_filled_later():
    with torch.device("meta"):
        attention = layer()
        assert attention(torch.randn(2, 5, C)).shape == (2, 5, C)
    real = layer()
    attention.to_empty(device="cpu").load_state_dict(real.state_dict())
    x = torch.randn(2, 5, C)
    assert torch.equal(attention(x), real(x))


@pytest.mark.parametrize(
    ("settings", "T", "given"),
    [
        ({"attention_window": 70}, 200, True),
        ({"position": "alibi"}, 200, True),
        ({"attention": "flex"}, 20, True),
        ({}, 200, False),  # the fused kernels know causality
        ({"attention_window": 200}, 200, False),
        ({"attention_window": 70}, 128, False),
        ({"attention_window": 70, "attention_dropout": 0.1}, 200, False),
        ({"attention_window": 70, "head_size": 8}, 200, False),
        *(({"attention": form, "attention_window": 70}, 200, False) for form in ("fused", "matmul", "softmax1")),
    ],
)
def test_windows_and_alibi_go_through_flex_in_compiled_training_on_a_gpu_that_has_it(monkeypatch, settings, T, given):
    attention = make_attention(AttentionConfig(n_embd=64, n_head=4, **settings))
    x, on_cpu = torch.randn(1, T, 64), attention.blocks(torch.randn(1, T, 64), compiled=True)
    monkeypatch.setattr(functional, "capability", lambda device: (7, 5))
    on_t4 = attention.blocks(x, compiled=True)
    monkeypatch.setattr(functional, "capability", lambda device: (8, 0))
    assert on_cpu is on_t4 is None and (attention.blocks(x, compiled=True) is not None) == given
    if attention.attend is not functional.flex:
        assert attention.blocks(x, compiled=False) is attention.eval().blocks(x, compiled=True) is None


@pytest.mark.parametrize("T", [129, 256])
@pytest.mark.parametrize("window", [None, 1, 70, 128, 1000])
@pytest.mark.parametrize(
    "settings", [{"position": "alibi", "n_kv_head": 2}, {"position": "none"}], ids=["alibi", "none"]
)
def test_the_blocks_show_what_the_dense_masks_show(monkeypatch, settings, window, T):
    monkeypatch.setattr(functional, "capability", lambda device: (8, 0))
    config = AttentionConfig(attention="flex", n_embd=64, n_head=4, attention_window=window, **settings)
    attention, x = make_attention(config).double(), torch.randn(2, T, 64, dtype=torch.float64)
    twin = copy.deepcopy(attention)
    twin.attend = functional.matmul
    with torch.no_grad():
        mask, score_mod = attention.blocks(x, compiled=False)
        torch.testing.assert_close(attention(x, mask=(mask, score_mod)), twin(x))
    seen = create_mask(mask.mask_mod, None, None, T, T, device="cpu")[0, 0]
    assert torch.equal(seen, sliding_window_mask(T, T, window or T))
