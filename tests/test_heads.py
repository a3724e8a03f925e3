"""The figures of the heads: known weights give known numbers, and every form of attention has them."""

import math

import pytest
import torch
from conftest import leaky_attention, random_gpt
from matplotlib.figure import Figure

from model.attention import FUNCTIONS
from model.heads import attention_maps, for_each_layer, head_similarity, head_statistics
from pages.heads_plot import draw_heads

TOKENS = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(5))
UNIFORM = sum(math.log(n) for n in range(1, 13)) / 12


def assert_same_figures(found, wanted):
    for name in ("entropy", "relative_entropy", "distance", "similarity"):
        torch.testing.assert_close(torch.tensor(getattr(found, name)), torch.tensor(getattr(wanted, name)))


@pytest.mark.parametrize("form", ["sdpa", "matmul", "einsum", "bmm", "loop", "flex", "stacked"])
@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2}, {"attention_window": 4}, {"position": "alibi"}], ids=str)
def test_every_form_has_the_same_figures(form, settings):
    wanted = head_statistics(random_gpt(**settings), TOKENS)
    assert_same_figures(head_statistics(random_gpt(attention=form, **settings), TOKENS), wanted)


def test_the_figures_of_a_variant_are_those_of_its_own_weights_as_shares_of_each_row_s_sum(monkeypatch):
    softmax1, model = FUNCTIONS["softmax1"], random_gpt(n_layer=1, attention="softmax1")
    (weights,) = for_each_layer(model, TOKENS, lambda weights: weights)
    assert (weights.sum(-1) < 0.999).any()  # softmax1 keeps some of each query's weight back
    wanted = head_statistics(model, TOKENS)
    monkeypatch.setitem(FUNCTIONS, "softmax1", lambda *args, **settings: 7 * softmax1(*args, **settings))
    found = head_statistics(random_gpt(n_layer=1, attention="softmax1"), TOKENS)
    assert_same_figures(found, wanted)
    assert all(0 <= share <= 1 for share in found.relative_entropy[0]) and found.distance[0][0] < 12


def test_the_even_average_has_the_most_entropy_that_its_window_allows():
    statistics = head_statistics(random_gpt(attention="average"), TOKENS)
    assert statistics.entropy == [pytest.approx([UNIFORM])] * 2
    assert statistics.relative_entropy == [pytest.approx([1.0])] * 2
    assert statistics.distance == [pytest.approx([sum(t / 2 for t in range(12)) / 12])] * 2
    assert statistics.similarity == [None, None]
    windowed = head_statistics(random_gpt(attention="average", attention_window=3), TOKENS)
    assert windowed.relative_entropy[0] == pytest.approx([1.0])
    assert windowed.entropy[0] == pytest.approx([(math.log(2) + 10 * math.log(3)) / 12])


def test_the_figures_are_means_of_the_weights_over_windows_and_queries():
    model = random_gpt()
    maps = torch.stack([attention_maps(model, window[None]) for window in TOKENS], dim=1)  # (L, B, H, T, T)
    entropy = -(maps * maps.clamp(min=1e-30).log()).sum(-1).mean((1, 3))
    back = sum(maps[..., t, s] * (t - s) for t in range(12) for s in range(12)).mean(1) / 12
    statistics = head_statistics(model, TOKENS)
    torch.testing.assert_close(torch.tensor(statistics.entropy), entropy)
    torch.testing.assert_close(torch.tensor(statistics.distance), back)


def test_similarity_is_one_for_equal_heads_and_zero_for_heads_with_nothing_in_common():
    rows = torch.zeros(2, 3, 5, 4)
    rows[..., 0] = 1
    assert head_similarity(rows) == pytest.approx(1)
    rows[:, 1] = rows[:, 1].roll(1, -1)
    rows[:, 2] = rows[:, 2].roll(2, -1)
    assert head_similarity(rows) == pytest.approx(0, abs=1e-6)
    rows[:, 1] = rows[:, 0]  # one of three pairs
    assert head_similarity(rows) == pytest.approx(1 / 3)
    rows[:, 1] = (rows[:, 0] + rows[:, 2]) / 2  # half in common with two: 3/4 log2(4/3) … of each
    overlap = 1 - (0.5 * math.log2(4 / 3) + 0.25 * math.log2(2 / 3) + 0.25 * math.log2(2))
    assert head_similarity(rows) == pytest.approx(2 * overlap / 3)
    assert head_similarity(rows[:, :1]) is None


def test_one_query_has_no_entropy_and_no_share_of_it():
    statistics = head_statistics(random_gpt(), TOKENS[:, :1])
    assert statistics.entropy == [[0.0] * 4] * 2 and statistics.distance == [[0.0] * 4] * 2
    assert all(math.isnan(share) for layer in statistics.relative_entropy for share in layer)


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace_and_neither_does_an_error_on_the_way(training):
    model = random_gpt(dropout=0.5, attention_dropout=0.5).train(training)
    before = torch.random.get_rng_state()
    assert head_statistics(model, TOKENS) == head_statistics(model, TOKENS)  # no dropout
    with pytest.raises(ZeroDivisionError):
        for_each_layer(model, TOKENS, lambda weights: 1 / 0)
    assert torch.equal(torch.random.get_rng_state(), before) and model.training == training
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)
    assert all(parameter.grad is None for parameter in model.parameters())


FORMS = ["sdpa", "matmul", "average", "simple", "single_head", "stacked"]


@pytest.mark.parametrize("form", FORMS)
def test_every_row_of_every_head_is_a_distribution_over_the_past(form):
    model = random_gpt(attention=form).train()
    maps = attention_maps(model, torch.randint(61, (1, 10)))
    heads = 4 if form in ("sdpa", "matmul", "stacked") else 1
    assert maps.shape == (2, heads, 10, 10) and model.training
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, heads, 10))
    assert maps.triu(1).abs().max() == 0 and (maps >= 0).all()


def test_the_weights_drawn_are_those_of_the_forward_pass():
    model = random_gpt(n_layer=1, attention="matmul")
    tokens = torch.randint(61, (1, 8))
    maps = attention_maps(model, tokens)
    block = model.blocks[0]
    x = block.attention_norm(model.token_embedding(tokens))
    _, _, v = block.attention.project(x)
    torch.testing.assert_close(block.attention.merge(maps[0] @ v), block.attention(x))


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 4), (12, 3)])
def test_the_picture_holds_every_head(tmp_path, layers, heads):
    model = random_gpt(n_layer=layers, n_head=heads, n_embd=4 * heads)
    statistics = head_statistics(model, TOKENS)
    draw_heads(attention_maps(model, TOKENS[:1]), tmp_path / "heads.png", statistics=statistics, caption="a run")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_weights_beyond_0_to_1_are_drawn_as_shares_of_the_largest_and_the_picture_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "softmax1", leaky_attention)
    model, captions = random_gpt(attention="softmax1"), []
    maps = attention_maps(model, TOKENS[:1])
    assert maps.max() > 1 and maps.min() < 0
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **style: captions.append(text))
    draw_heads(maps, tmp_path / "m.png", statistics=head_statistics(model, TOKENS[:1]), caption="run")
    note = f"the brightest is a weight of {maps.max():.3g}, and weights below 0 are drawn as 0"
    assert captions == [f"run\n{note}"]
