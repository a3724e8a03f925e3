"""Pictures of attention show the weights that the model used."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from conftest import leaky_attention, random_gpt
from matplotlib.figure import Figure

from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.text import encode_prompt
from model.attention import FUNCTIONS
from model.heads import attention_maps, head_statistics
from pages.attention_map import draw_attention_map, draw_heads, label

FORMS = ["sdpa", "matmul", "average", "simple", "single_head", "stacked"]


@pytest.fixture(scope="module")
def byte():
    return make_tokenizer(TokenizerConfig(name="byte"), [])


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


def drawn(page) -> tuple[dict, np.ndarray]:
    """What a page of 2 layers of 4 heads shows, and its weights in units of the brightest."""
    data = json.loads(re.search(r"const data = (.*);\n", page.read_text(encoding="utf-8"))[1])
    return data, np.frombuffer(base64.b64decode(data["weights"]), dtype="<u2").reshape(2, 4, -1) / 65535


def triangles(model, tokens) -> np.ndarray:
    rows, columns = np.tril_indices(len(tokens))
    return attention_maps(model, torch.tensor([tokens])).numpy()[..., rows, columns]


def test_the_page_holds_the_weights_and_the_tokens_and_needs_no_network(byte, tmp_path):
    model = random_gpt(vocab_size=257)
    tokens = byte.encode_ordinary("</script>\n é")
    draw_attention_map(model, byte, tokens, tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://", page) and page.count("</script>") == 1
    data, packed = drawn(tmp_path / "map.html")
    assert (data["brightest"], data["note"], len(data["tokens"])) == (1, "", len(tokens))
    assert data["tokens"][:3] == ["<", "/", "s"] and data["tokens"][9:11] == ["⏎", "·"]
    np.testing.assert_allclose(packed, triangles(model, tokens), atol=1e-5)


def test_weights_beyond_0_to_1_are_drawn_as_shares_of_the_largest_and_the_pictures_say_so(byte, tmp_path, monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "softmax1", leaky_attention)
    model, tokens = random_gpt(vocab_size=257, attention="softmax1"), list(b"hello")
    weights = triangles(model, tokens)
    largest = weights.max()
    assert largest > 1 and weights.min() < 0
    draw_attention_map(model, byte, tokens, tmp_path / "map.html")
    data, packed = drawn(tmp_path / "map.html")
    np.testing.assert_allclose(data["brightest"] * packed, weights.clip(0), atol=1e-4 * largest)
    assert data["note"] == f"the brightest is a weight of {largest:.3g}, and weights below 0 are drawn as 0"
    captions = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **style: captions.append(text))
    statistics = head_statistics(model, torch.tensor([tokens]))
    draw_heads(attention_maps(model, torch.tensor([tokens])), tmp_path / "m.png", statistics=statistics, caption="run")
    assert captions == [f"run\n{data['note']}"]


def test_a_long_prompt_shows_its_last_tokens(byte, tmp_path, capsys):
    model, tokens = random_gpt(vocab_size=257), list(b"0123456789 the last tokens")
    parts = {"long": tokens, "last": tokens[-16:], "first": tokens[:16]}  # 16: the model's block
    pages = [tmp_path / f"{name}.html" for name in parts]
    for part, page in zip(parts.values(), pages, strict=True):
        draw_attention_map(model, byte, part, page)
    said = [f"{page}: every layer and head" for page in pages]
    assert capsys.readouterr().out.splitlines() == [f"{said[0]}, the last 16 of 26 tokens", *said[1:]]
    long, last, first = (page.read_bytes() for page in pages)
    assert long == last != first and long.startswith(b"<!doctype html>")


def test_a_prompt_may_hold_the_words_that_the_page_is_filled_in_at(byte, tmp_path):
    prompt = encode_prompt(byte, "DATA TITLE data = DATA;")
    draw_attention_map(random_gpt(vocab_size=257, block_size=40), byte, prompt, tmp_path / "m.html")
    title = "<title>Attention: &lt;|endoftext|&gt;DATA TITLE data = DATA;</title>"
    assert title in (tmp_path / "m.html").read_text(encoding="utf-8")
    labels = drawn(tmp_path / "m.html")[0]["tokens"]
    assert len(labels) == 24 and labels[0].startswith("<|endoft")  # as in training, it begins a document


def test_white_space_and_long_tokens_are_made_visible():
    assert [label(text) for text in (" a", "\n", "\t", "", "x" * 20, "\x00")] == [
        *("·a", "⏎", "→", "∅", "x" * 12 + "…", "\ufffd")
    ]
