"""The figures of the heads: known weights give known numbers, in every form of attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import attention_maps, close, random_gpt, some

from model.apart import results, streams
from model.attention import FORMS, MODIFIERS, SETTINGS, SOFTMAX
from model.cache import KVCache
from model.heads import for_each_layer, head_similarity, head_statistics

TOKENS = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([[0] * 12, [0] * 5 + [5] * 7, [0] * 2 + [2] * 9 + [11]])
NAMES = ("entropy", "relative_entropy", "distance", "similarity")


def assert_same_figures(found, wanted):
    for name in NAMES:
        close(torch.tensor(getattr(found, name)), torch.tensor(getattr(wanted, name)))


@pytest.mark.parametrize("form", some([*SOFTMAX, "stacked"], 3))
@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 2}, {"attention_window": 4}, {"position": "alibi"}], ids=str)
def test_every_form_of_softmax_has_the_same_figures(form, settings):
    wanted = head_statistics(random_gpt(**settings), TOKENS)
    assert_same_figures(head_statistics(random_gpt(attention=form, **settings), TOKENS), wanted)


def test_figures_of_other_weights_are_of_the_positive_ones_as_shares_of_each_rows_sum(monkeypatch):
    softmax1, gpt = FORMS["softmax1"], random_gpt(n_layer=1, attention="softmax1")
    (weights,) = for_each_layer(gpt, TOKENS, lambda weights: weights)
    assert (weights.sum(-1) < 0.999).any()  # softmax1 keeps some of each query's weight back
    wanted = head_statistics(gpt, TOKENS)
    monkeypatch.setitem(FORMS, "softmax1", lambda *args, **settings: 7 * softmax1(*args, **settings))
    assert_same_figures(head_statistics(random_gpt(n_layer=1, attention="softmax1"), TOKENS), wanted)
    monkeypatch.setitem(FORMS, "softmax1", lambda q, k, v, **_: softmax1(q, k, v, is_causal=True) - v[..., :1, :] / 9)
    found = head_statistics(random_gpt(n_layer=1, attention="softmax1"), TOKENS)
    assert all(0 <= share <= 1 for share in found.relative_entropy[0]) and found.distance[0][0] < 12


@pytest.mark.parametrize("attention", ["stick", "delta", "sdpa+diff"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_figures_of_half_precision_are_those_of_its_weights_in_float64(attention, dtype):
    gpt = random_gpt(attention=attention).to(dtype)
    found, distance = head_statistics(gpt, TOKENS), torch.arange(12)[:, None] - torch.arange(12)
    for layer, weights in enumerate(for_each_layer(gpt, TOKENS, lambda weights: weights.double().clamp(min=0))):
        shares = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)  # the first query of stick has none
        close(found.entropy[layer], torch.special.entr(shares).sum(-1).mean((0, 2)).tolist())
        close(found.distance[layer], (shares * distance).sum(-1).mean((0, 2)).tolist())


@pytest.mark.parametrize("attention", ["sdpa", "linear/sdpa+value_residual"])
@torch.no_grad()
def test_what_is_read_of_a_model_is_of_the_tokens_that_a_hook_on_it_puts_in_place(attention):
    gpt = random_gpt(attention=attention)

    def read(tokens):
        of_parts = results(gpt, tokens)
        assert_same_figures(head_statistics(gpt, tokens), figures)
        return [*for_each_layer(gpt, tokens, lambda weights: weights), *streams(gpt, tokens), *of_parts.values()]

    other = TOKENS.flip(0, 1)
    figures = head_statistics(gpt, other)
    wanted = read(other)
    gpt.register_forward_hook(lambda module, arguments, logits: 2 * logits)
    for found, plain in zip(read(other), wanted, strict=True):
        close(found, plain)
    gpt.register_forward_pre_hook(lambda module, arguments: (arguments[0].flip(0, 1),))
    for found, plain in zip(read(TOKENS), wanted, strict=True):
        close(found, plain)


def test_the_even_average_has_the_most_entropy_that_its_window_and_documents_allow():
    statistics = head_statistics(random_gpt(attention="average"), TOKENS)
    assert statistics.entropy == [pytest.approx([sum(math.log(n) for n in range(1, 13)) / 12])] * 2
    assert statistics.distance == [pytest.approx([sum(t / 2 for t in range(12)) / 12])] * 2
    assert statistics.relative_entropy == [pytest.approx([1.0])] * 2 and statistics.similarity == [None, None]
    single = head_statistics(random_gpt(), TOKENS[:, :1])  # one query has no entropy, and no share of it
    assert single.entropy == single.distance == [[0.0] * 4] * 2
    assert all(math.isnan(share) for layer in single.relative_entropy for share in layer)
    windowed = head_statistics(random_gpt(attention="average/average+window", attention_window=3), TOKENS)
    assert windowed.relative_entropy == [pytest.approx([1.0])] * 2
    assert windowed.entropy[1] == pytest.approx([(math.log(2) + 10 * math.log(3)) / 12])
    apart = head_statistics(random_gpt(attention="average"), TOKENS, STARTS)
    assert apart.relative_entropy == [pytest.approx([1.0])] * 2
    sizes = [*range(1, 13), *range(1, 6), *range(1, 8), 1, 2, *range(1, 10), 1]
    assert apart.entropy[0] == pytest.approx([sum(map(math.log, sizes)) / 36])


@pytest.mark.slow
def test_figures_are_means_over_windows_and_queries_of_the_weights_of_the_forward_pass():
    gpt = random_gpt(attention="matmul")
    maps = torch.stack([attention_maps(gpt, window[None]) for window in TOKENS], dim=1)  # (L, B, H, T, T)
    close(maps.sum(-1), torch.ones(2, 3, 4, 12))
    assert not maps.triu(1).any() and attention_maps(random_gpt().bfloat16(), TOKENS[:1]).dtype == torch.float32
    statistics = head_statistics(gpt, TOKENS)
    close(torch.tensor(statistics.entropy), -(maps * maps.clamp(min=1e-30).log()).sum(-1).mean((1, 3)))
    back = sum(maps[..., t, s] * (t - s) for t in range(12) for s in range(12)).mean(1) / 12
    close(torch.tensor(statistics.distance), back)
    block = gpt.blocks[0]
    x = block.attention_norm(gpt.token_embedding(TOKENS))
    close(block.attention.merge(maps[0] @ block.attention.project(x)[2]), block.attention(x))


def test_similarity_is_one_for_equal_heads_and_zero_for_heads_with_nothing_in_common():
    rows = torch.zeros(2, 3, 5, 5)
    rows[..., 0] = 1
    assert head_similarity(rows) == pytest.approx(1) and head_similarity(rows[:, :1]).isnan()
    rows[:, 1] = rows[:, 1].roll(1, -1)
    rows[:, 2] = rows[:, 2].roll(2, -1)
    assert head_similarity(rows) == pytest.approx(0, abs=1e-6)
    rows[:, 1] = rows[:, 0]  # one of three pairs
    assert head_similarity(rows) == pytest.approx(1 / 3)
    rows[:, 1] = (rows[:, 0] + rows[:, 2]) / 2  # half in common with two: 3/4 log2(4/3) … of each
    overlap = 1 - (0.5 * math.log2(4 / 3) + 0.25 * math.log2(2 / 3) + 0.25 * math.log2(2))
    assert head_similarity(rows) == pytest.approx(2 * overlap / 3)


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace_and_neither_does_an_error_on_the_way(training):
    gpt = random_gpt(dropout=0.5, attention_dropout=0.5, attention="sdpa+value_residual").train(training)
    before = torch.random.get_rng_state()
    assert head_statistics(gpt, TOKENS) == head_statistics(gpt, TOKENS)  # no dropout
    with pytest.raises(ZeroDivisionError):
        for_each_layer(gpt, TOKENS, lambda weights: 1 / 0)
    assert torch.equal(torch.random.get_rng_state(), before) and gpt.training == training
    assert not any(attention._forward_pre_hooks for attention in gpt.attentions)
    assert all(parameter.grad is None for parameter in gpt.parameters())


@pytest.mark.parametrize("n_layer", [1, 3])
def test_figures_are_read_back_from_the_device_once_whatever_the_layers_and_heads(n_layer, device_reads):
    gpt = random_gpt(n_layer=n_layer, attention="matmul")
    device_reads.clear()
    head_statistics(gpt, TOKENS)
    assert device_reads.count("cpu") == 1 and not {"item", "__float__", "__bool__"} & {*device_reads}


LENGTHS = [12, 5, 1, 8]
EVERY = [*FORMS, *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)), "mla+diff+sink/delta+conv"]


@pytest.mark.parametrize("attention", some(EVERY, 40))
@pytest.mark.parametrize("padding", [0, 60])
def test_figures_of_padded_texts_and_of_documents_are_those_of_each_text_alone(attention, padding):
    """The means of the texts alone, by the number of their queries."""
    window = 4 if "window" in attention else None
    model = random_gpt(attention=attention, attention_window=window, block_size=32)
    texts = [torch.randint(60, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    alone = [head_statistics(model, text[None]) for text in texts]

    def wanted(name):
        figures = torch.tensor([getattr(each, name) for each in alone], dtype=torch.float)  # (texts, layers[, H])
        shares = torch.tensor(LENGTHS) / sum(LENGTHS)
        return torch.einsum("t...,t->...", figures, shares)

    padded = torch.full((4, 13), padding)  # and a column that is padding in all rows
    for row, text in zip(padded, texts, strict=True):
        row[13 - len(text) :] = text
    starts = (13 - torch.tensor(LENGTHS))[:, None].expand(4, 13)
    packed, places = torch.cat(texts)[None], torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    in_a_row = places.repeat_interleave(torch.tensor(LENGTHS))[None]
    for found in (head_statistics(model, padded, starts), head_statistics(model, packed, in_a_row)):
        for name in ("entropy", "distance"):
            close(torch.tensor(getattr(found, name)), wanted(name), rtol=1e-4, atol=1e-4)
        if None not in alone[0].similarity:
            close(torch.tensor(found.similarity), wanted("similarity"), rtol=1e-4, atol=1e-4)
        assert not torch.tensor(found.relative_entropy).isnan().any()


def test_a_figure_is_nan_only_where_there_is_none():
    model = random_gpt(vocab_size=61)
    all_padding = head_statistics(model, TOKENS[:, :3], torch.full((3, 3), 5))
    assert all(math.isnan(figure) for layer in all_padding.entropy for figure in layer)
    for starts in (None, torch.tensor([[1, 1], [9, 9]])):
        one_each = head_statistics(model, TOKENS[:2, : 1 if starts is None else 2], starts)
        assert one_each.entropy == one_each.distance == [[0.0] * 4] * 2
        assert all(math.isnan(share) for layer in one_each.relative_entropy for share in layer)
        assert one_each.similarity == pytest.approx([1.0, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "softmax1+value_residual", "mla", "sdpa+window+sink"])
@torch.no_grad()
def test_weights_in_a_hook_are_those_of_the_pass_with_what_other_hooks_do(attention):
    window = 4 if "window" in attention else None
    model = random_gpt(attention=attention, attention_window=window, block_size=32)
    found = []

    def note(attention, given):
        found.append(attention.weights(*given))

    model.blocks[0].attention.register_forward_pre_hook(lambda module, given: (1.5 * given[0], *given[1:]))
    model.blocks[1].attention.register_forward_hook(lambda module, given, y: -y)
    handles = [each.register_forward_pre_hook(note) for each in model.attentions]
    model(TOKENS)
    for handle in handles:
        handle.remove()
    for one, other in zip(found, for_each_layer(model, TOKENS, lambda weights: weights), strict=True):
        assert torch.equal(one, other)

    # In a pass with a cache they are those of its tokens among themselves.
    starts = torch.tensor([[0] * 12, [0] * 5 + [5] * 7, [0] * 8 + [8] * 4])
    cache = KVCache(12)
    model(TOKENS[:, :7], doc_starts=starts[:, :7], cache=cache)
    handle = model.attentions[0].register_forward_pre_hook(note)
    model(TOKENS[:, 7:], doc_starts=starts[:, 7:], cache=cache)
    handle.remove()
    whole = for_each_layer(model, TOKENS, lambda weights: weights, starts)[0]
    after = whole[:, :, 7:, 7:]
    close(F.normalize(found[-1], p=1, dim=-1)[2, :, 1:, 1:], F.normalize(after, p=1, dim=-1)[2, :, 1:, 1:])
