"""The page of a text shows what the model expected, how surprised it was and what its heads looked at."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import browse, data_of, needs_browser
from conftest import leaky_attention, random_gpt
from test_evaluate import BYTE, PLAIN

import generation.reading
from data.tokenizer import END_OF_TEXT, train_bpe
from generation.reading import beginnings, read, read_prompt
from generation.scoring import score
from model.attention import FUNCTIONS
from model.heads import attention_maps
from pages.text import Reading, write_text_page
from runs.checkpoint import open_checkpoint, save_checkpoint
from training.config import TrainConfig

HOSTILE = '</script><b onclick="x">&amp; KIT.JS DATA TITLE\n漢字 😀 é\x00\u202e \u2028<!--'


def reading_of(model, tokens, *, tokenizer=BYTE, stride=4, name="a run", models=1) -> Reading:
    return read(model, tokenizer, np.array(tokens), name=name, stride=stride, autocast=PLAIN, models=models)


def attention_of(model: dict) -> np.ndarray:
    """All weights that a page holds, [row, token, key]."""
    tokens, top = len(model["tokens"]), model["top"]
    keys = np.frombuffer(base64.b64decode(model["keys"]), "<u2").reshape(-1, tokens, top)
    weights = (np.frombuffer(base64.b64decode(model["weights"]), np.uint8).reshape(keys.shape) / 255.0) ** 2
    full = np.zeros((len(keys), tokens, tokens))
    np.maximum.at(full, (*np.indices(keys.shape)[:2], keys), weights * model["largest"])
    return full


def test_every_weight_of_a_short_text_is_on_the_page_and_so_are_the_means(tmp_path):
    model, tokens = random_gpt(vocab_size=257), [256, *b"a short text"]
    write_text_page(tmp_path / "t.html", [reading_of(model, tokens)], "")
    (shown,) = data_of(tmp_path / "t.html")["models"]
    maps = attention_maps(model, torch.tensor([tokens])).numpy()
    rows = [maps.mean((0, 1)), *(row for layer in maps for row in (layer.mean(0), *layer))]
    assert (shown["heads"], shown["top"]) == ([4, 4], len(tokens))
    np.testing.assert_allclose(attention_of(shown), rows, atol=0.004)


def test_weights_beyond_0_to_1_are_shares_of_the_largest_and_those_below_0_count_as_0(tmp_path, monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "softmax1", leaky_attention)
    model, tokens = random_gpt(vocab_size=257, attention="softmax1"), list(b"hello")
    weights = attention_maps(model, torch.tensor([tokens])).numpy()
    assert weights.max() > 1 and weights.min() < 0
    write_text_page(tmp_path / "t.html", [reading_of(model, tokens)], "")
    (shown,) = data_of(tmp_path / "t.html")["models"]
    assert shown["largest"] == pytest.approx(weights.max())
    heads = attention_of(shown)[[2, 3, 4, 5, 7, 8, 9, 10]].reshape(weights.shape)
    np.testing.assert_allclose(heads, weights.clip(0), atol=0.005 * weights.max())


def test_a_text_longer_than_the_window_is_read_as_it_is_scored():
    model, tokens = random_gpt(vocab_size=257), np.random.default_rng(0).integers(256, size=45)
    found = reading_of(model, tokens, stride=1)
    expected = score(model, BYTE, tokens, stride=1, autocast=PLAIN).nats
    np.testing.assert_allclose(found.nats[1:], expected, atol=1e-4)
    assert np.isnan(found.nats[0])
    window = torch.from_numpy(tokens[25:41])[None]  # the one that ends with token 40
    chances = model(window)[0, -1].softmax(-1).topk(10)
    assert found.likeliest[40].tolist() == chances.indices.tolist()
    np.testing.assert_allclose(found.chances[40], chances.values.detach(), atol=1e-5)
    last_head = attention_maps(model, window)[1, 3, -1].topk(3)
    assert found.keys[-1, 40, :3].tolist() == (last_head.indices + 25).tolist()
    np.testing.assert_allclose(found.weights[-1, 40, :3], last_head.values, atol=1e-5)


def test_many_heads_and_tokens_keep_only_their_largest_weights(monkeypatch):
    monkeypatch.setattr(generation.reading, "ATTENTION_BYTES", 3 * 11 * 16 * 6)
    model, tokens = random_gpt(vocab_size=257), list(range(16))
    whole = [reading_of(model, tokens, models=models) for models in (1, 2)]
    assert [reading.keys.shape for reading in whole] == [(11, 16, 6), (11, 16, 3)]
    assert np.array_equal(whole[0].weights[:, :, :3], whole[1].weights)


def test_two_models_are_compared_on_the_same_bytes(tmp_path):
    text = "the cat sat on the mat.\n" * 4
    bpe = train_bpe([text], 270)
    tokenizers = [BYTE, bpe]
    texts = [np.array([each.eot_token, *each.encode_ordinary(text)]) for each in tokenizers]
    first, second = beginnings(tokenizers, texts)
    readings = [
        reading_of(random_gpt(seed=seed, vocab_size=each.n_vocab), tokens, tokenizer=each, name=f"model {seed}")
        for seed, (each, tokens) in enumerate(zip(tokenizers, (first, second), strict=True))
    ]
    write_text_page(tmp_path / "t.html", readings, "")
    one, other = data_of(tmp_path / "t.html")["models"]
    assert one["ends"][-1] == other["ends"][-1] == len(text) + 1
    assert np.nansum(np.array(other["bits"][1:])) == pytest.approx(sum(one["other"]), abs=0.1)
    last = one["ends"].index(other["ends"][1])  # the bytes of the other's first token with a surprise
    assert sum(one["other"][1 : last + 1]) == pytest.approx(other["bits"][1], abs=0.01)


def test_a_long_text_begins_alike_for_both_and_a_long_prompt_ends_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(generation.reading, "LONGEST", 16)
    bpe = train_bpe(["abcabc" * 9], 258)
    texts = [np.array([each.eot_token, *each.encode_ordinary("abcabc" * 9)]) for each in (BYTE, bpe)]
    begun = beginnings([BYTE, bpe], texts)
    assert len(begun[0]) == 16 and len(begun[1]) < 16 and BYTE.decode(begun[0][1:]) == bpe.decode(begun[1][1:])
    model = random_gpt(vocab_size=257)
    where = tmp_path / "model"
    save_checkpoint(where, model=model, tokenizer=BYTE, config=TrainConfig(model=model.config), step=1)
    said = read_prompt(open_checkpoint(str(where), torch.device("cpu")), "0123456789 the last", False, tmp_path / "p")
    assert said == f"{tmp_path / 'p'}: the last 16 of 20 tokens"
    assert "".join(data_of(tmp_path / "p")["models"][0]["shown"]) == "3456789 the last"


def test_the_page_shows_the_whole_text_whatever_it_holds_and_needs_no_network(tmp_path):
    tokens = [256, *HOSTILE.encode(), 0xFF, 256, *b"x", 0xE6]
    reading = reading_of(random_gpt(vocab_size=259), tokens, name="</title><script>x</script>")
    write_text_page(tmp_path / "t.html", [reading], "&<i>")
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2 and "<title>Text: &lt;/title&gt;" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\(", page)
    (shown,) = data_of(tmp_path / "t.html")["models"]
    seen = HOSTILE.replace("\x00", "␀").replace("\u202e", "\ufffd").replace("\u2028", "\ufffd")
    assert "".join(shown["shown"]) == f"{END_OF_TEXT}{seen}\ufffd{END_OF_TEXT}x\ufffd"
    named = {shown["vocabulary"][token] for token in shown["tokens"]}
    assert {"‹E6›", "␀", END_OF_TEXT} <= named and "漢" not in named
    assert {"‹257›", "‹258›"} & set(shown["vocabulary"]) or 257 not in reading.likeliest  # ids without a text


@needs_browser
def test_a_browser_shows_a_token_and_what_it_looked_at_by_keyboard_alone(tmp_path):
    tokens = [256, *HOSTILE.encode()]
    readings = [reading_of(random_gpt(seed=seed, vocab_size=257), tokens, name=f"<b>{seed}") for seed in (0, 1)]
    write_text_page(tmp_path / "t.html", readings, "<i>summary")
    script = """
      const press = (where, key) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      for (const key of ["End", "ArrowLeft", "ArrowUp", "Home", "ArrowRight", "ArrowRight"]) press($("text"), key);
      const grid = $("heads").querySelectorAll("button");
      grid[0].focus(); press(grid[0], "ArrowDown"); press(grid[4], "ArrowRight"); drawMaps();
      const found = {text: $("text").textContent, options: $("text").querySelectorAll("[role=option]").length,
        active: $("text").getAttribute("aria-activedescendant"),
        selected: document.querySelectorAll("[aria-selected=true]").length,
        figures: $("figures").textContent, answers: $("answers").querySelectorAll("tr").length,
        layer: $("layer").value, head: $("head").value, rows: $("looked").rows.length,
        bold: document.querySelectorAll("b").length,
        wide: document.documentElement.scrollWidth <= innerWidth};
      $("tint").value = "other"; $("tint").onchange(); $("model").selectedIndex = 1; $("model").onchange();
      press($("text"), "Escape");
      return {...found, after: $("chosen").textContent, lines: $("text").querySelectorAll("path").length};
    """
    found = browse(tmp_path / "t.html", script)
    seen = HOSTILE.replace("\x00", "␀").replace("\u202e", "\ufffd").replace("\u2028", "\ufffd")
    assert found.pop("text") == END_OF_TEXT + seen
    bits = readings[0].nats[2] / np.log(2)
    assert f"<b>0: “/”, {bits:.2f} bits" in found.pop("figures")
    assert found == {
        "options": len(tokens), "active": "t2", "selected": 1, "answers": 20, "layer": "1", "head": "1", "rows": 3,
        "bold": 0, "wide": True, "after": "After the text", "lines": 0,
    }  # fmt: skip


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_readable_on_every_tint(theme):
    """WCAG's AA asks for a contrast of 4.5."""
    css = (Path(generation.reading.__file__).parent.parent / "pages" / "kit.css").read_text()
    colours = dict(re.findall(r"--(\w+): ([^;]+);", css.split("@media")[theme]))

    def luminance(colour: str) -> float:
        digits = colour.removeprefix("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) for i in (0, 2, 4)] if colour[0] == "#" else map(int, colour.split())
        linear = [v / 12.92 if (v := part / 255) <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    pairs = [("ink", ground) for ground in ("paper", "field", "hot", "good")]
    for text, ground in [*pairs, *((text, "paper") for text in ("dim", "mark")), ("dim", "field")]:
        low, high = sorted((luminance(colours[text]), luminance(colours[ground])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)
