"""Pictures of attention show the weights that the model used."""

from __future__ import annotations

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
from errors import SettingsError
from generation.text import encode_prompt
from model.attention import ATTENTION_VARIANTS
from model.heads import attention_maps
from pages.attention_map import draw_attention_map, draw_prompt, visible
from runs.checkpoint import Checkpoint

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
    assert maps.triu(1).abs().max() == 0
    assert (maps >= 0).all()


def test_the_weights_drawn_are_those_of_the_forward_pass():
    model = random_gpt(n_layer=1, attention="matmul")
    tokens = torch.randint(61, (1, 8))
    maps = attention_maps(model, tokens)
    block = model.blocks[0]
    x = block.attention_norm(model.token_embedding(tokens))
    _, _, v = block.attention.project(x)
    torch.testing.assert_close(block.attention.merge(maps[0] @ v), block.attention(x))


def test_the_page_holds_the_weights_and_the_tokens_and_needs_no_network(byte, tmp_path):
    model = random_gpt(vocab_size=257)
    tokens = byte.encode_ordinary("</script>\n é")
    shown = draw_attention_map(model, byte, tokens, tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text(encoding="utf-8")
    assert shown == len(tokens) and not re.search(r"https?://", page) and page.count("</script>") == 1
    data = json.loads(re.search(r"const data = (.*);\n", page)[1])
    assert data["brightest"] == 1 and data["note"] == ""
    assert data["tokens"][:3] == ["<", "/", "s"] and data["tokens"][9:11] == ["⏎", "·"]
    packed = np.frombuffer(base64.b64decode(data["weights"]), dtype="<u2").reshape(2, 4, -1) / 65535
    maps = attention_maps(model, torch.tensor([tokens])).numpy()
    rows, columns = np.tril_indices(len(tokens))
    np.testing.assert_allclose(packed, maps[..., rows, columns], atol=1e-5)


def test_weights_beyond_0_to_1_are_drawn_as_shares_of_the_largest_and_the_pictures_say_so(byte, tmp_path, monkeypatch):
    monkeypatch.setitem(ATTENTION_VARIANTS, "softmax1", leaky_attention)
    model, tokens = random_gpt(vocab_size=257, attention="softmax1"), list(b"hello")
    maps = attention_maps(model, torch.tensor([tokens])).numpy()
    largest = maps.max()
    assert largest > 1 and maps.min() < 0
    draw_attention_map(model, byte, tokens, tmp_path / "map.html")
    data = json.loads(re.search(r"const data = (.*);\n", (tmp_path / "map.html").read_text(encoding="utf-8"))[1])
    packed = np.frombuffer(base64.b64decode(data["weights"]), dtype="<u2").reshape(2, 4, -1) / 65535
    rows, columns = np.tril_indices(len(tokens))
    np.testing.assert_allclose(data["brightest"] * packed, maps[..., rows, columns].clip(0), atol=1e-4 * largest)
    assert data["note"] == f"the brightest is a weight of {largest:.3g}, and weights below 0 are drawn as 0"
    captions = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **style: captions.append(text))
    draw_attention_map(model, byte, tokens, tmp_path / "map.png")
    assert captions == [data["note"]]


@pytest.mark.parametrize("form", [".png", ".html"])
def test_a_long_prompt_shows_its_last_tokens(byte, tmp_path, form):
    model, tokens = random_gpt(vocab_size=257), list(b"0123456789 the last tokens")
    parts = {"long": tokens, "last": tokens[-16:], "first": tokens[:16]}
    pages = [tmp_path / f"{name}{form}" for name in parts]
    shown = [draw_attention_map(model, byte, part, page) for part, page in zip(parts.values(), pages, strict=True)]
    assert shown == [16, 16, 16]  # the model's block
    long, last, first = (page.read_bytes() for page in pages)
    assert long == last != first and long.startswith({".png": b"\x89PNG", ".html": b"<!doctype html>"}[form])


def test_a_prompt_may_hold_the_words_that_the_page_is_filled_in_at(byte, tmp_path):
    draw_attention_map(
        random_gpt(vocab_size=257, block_size=40), byte, list(b"DATA TITLE data = DATA;"), tmp_path / "m.html"
    )
    page = (tmp_path / "m.html").read_text(encoding="utf-8")
    assert "<title>Attention: DATA TITLE data = DATA;</title>" in page
    assert len(json.loads(re.search(r"const data = (.*);\n", page)[1])["tokens"]) == 23


def test_a_prompt_is_drawn_after_the_token_that_begins_a_document(byte, tmp_path, capsys):
    checkpoint = Checkpoint(tmp_path, random_gpt(vocab_size=257), byte, {})
    draw_prompt(checkpoint, encode_prompt(checkpoint.tokenizer, "hello"), tmp_path / "map.html")
    assert '"<|endoftext|>"'.replace("<", "\\u003c") in (tmp_path / "map.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"{tmp_path}/map.html: every layer and head\n"
    draw_prompt(checkpoint, encode_prompt(checkpoint.tokenizer, "x" * 50), tmp_path / "map.html")
    assert "the last 16 of 51 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["map.pdf", "map", "nowhere/map.html"])
def test_another_kind_of_file_is_refused(byte, tmp_path, name):
    with pytest.raises(SettingsError, match=r"attention_map=.*must be an \.html or \.png file"):
        draw_prompt(Checkpoint(tmp_path, random_gpt(), byte, {}), [120], tmp_path / name)


def test_white_space_and_long_tokens_are_made_visible():
    assert [visible(label) for label in (" a", "\n", "\t", "", "x" * 20, "\x00")] == [
        *("·a", "⏎", "→", "∅", "x" * 12 + "…", "\ufffd")
    ]
