"""The page of a text shows a model's predictions, its surprise and its heads' weights."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import browse, data_of, needs_browser
from conftest import attention_maps, random_gpt

import pages
import pages.reading
from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, make_tokenizer, train_bpe
from generation.score import ScoringParams, score
from pages.reading import beginnings, read
from pages.text import Reading, text_page

BYTE = make_tokenizer(TokenizerConfig(name="byte"), ())
PLAIN = torch.autocast("cpu", enabled=False)
WEIGHTS = (0.2126, 0.7152, 0.0722)  # of red, green and blue in luminance
HOSTILE = '</script><b onclick="x">&amp; KIT.JS DATA TITLE\n漢字 😀 é\x00\u202e \u2028<!--'


def write_text_page(page: Path, readings: list[Reading], summary: str) -> None:
    page.write_text(text_page(readings, summary), encoding="utf-8")


def reading_of(model, tokens, *, tokenizer=BYTE, stride=4, name="a run", models=1) -> Reading:
    return read(model, tokenizer, np.array(tokens), ScoringParams(PLAIN, stride), name=name, models=models)


def attention_of(model: dict) -> np.ndarray:
    """All weights that a page holds, [row, token, key]."""
    tokens, top = len(model["tokens"]), model["top"]
    keys = np.frombuffer(base64.b64decode(model["keys"]), "<u2").reshape(-1, tokens, top)
    weights = (np.frombuffer(base64.b64decode(model["weights"]), np.uint8).reshape(keys.shape) / 255.0) ** 2
    full = np.zeros((len(keys), tokens, tokens))
    np.maximum.at(full, (*np.indices(keys.shape)[:2], keys), weights * model["largest"])
    return full


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "sdpa+diff"])
def test_every_weight_of_a_short_text_is_on_the_page_those_below_0_as_0_as_shares_of_one_above_1(
    attention, times, tmp_path
):
    model, tokens = random_gpt(vocab_size=257, attention=attention), [256, *b"a short text"]
    reading, weights = reading_of(model, tokens), attention_maps(model, torch.tensor([tokens])).numpy()
    assert (weights.min() < 0) == (attention == "sdpa+diff")
    weights = weights.clip(0)
    write_text_page(tmp_path / "t.html", [replace(reading, weights=times * reading.weights)], "")
    (shown,) = data_of(tmp_path / "t.html")["models"]
    rows = [weights.mean((0, 1)), *(row for layer in weights for row in (layer.mean(0), *layer))]
    assert (shown["heads"], shown["top"]) == ([4, 4], len(tokens))
    assert shown["largest"] == pytest.approx(max(1, times * reading.weights.max()), rel=1e-6)
    np.testing.assert_allclose(attention_of(shown), times * np.array(rows), atol=0.005 * shown["largest"])


def test_a_text_longer_than_the_window_is_read_as_it_is_scored():
    model, tokens = random_gpt(vocab_size=257), np.random.default_rng(0).integers(256, size=45)
    found = reading_of(model, tokens, stride=1)
    expected = score(model, BYTE, tokens, ScoringParams(PLAIN, 1)).nats
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
    monkeypatch.setattr(pages.reading, "ATTENTION_BYTES", 3 * 11 * 16 * 6)
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


def test_a_long_text_begins_alike_for_both(monkeypatch):
    monkeypatch.setattr(pages.reading, "LONGEST", 16)
    bpe = train_bpe(["abcabc" * 9], 258)
    texts = [np.array([each.eot_token, *each.encode_ordinary("abcabc" * 9)]) for each in (BYTE, bpe)]
    begun = beginnings([BYTE, bpe], texts)
    assert len(begun[0]) == 16 and len(begun[1]) < 16 and BYTE.decode(begun[0][1:]) == bpe.decode(begun[1][1:])


def test_the_page_shows_the_whole_text_whatever_it_holds_and_needs_no_network(tmp_path):
    tokens = [256, *HOSTILE.encode(), 0xFF, 256, *b"x", 0xE6]
    reading = reading_of(random_gpt(vocab_size=259), tokens, name="</title><script>x</script>")
    write_text_page(tmp_path / "t.html", [reading], "&<i></script>")
    page = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2 and "wide (&lt;/title&gt;&lt;script&gt;x" in page.split("</title>")[0]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\((?!#)", page)
    (shown,) = data_of(tmp_path / "t.html")["models"]
    seen = HOSTILE.replace("\x00", "␀").replace("\u202e", "\ufffd").replace("\u2028", "\ufffd")
    assert "".join(shown["shown"]) == f"{END_OF_TEXT}{seen}\ufffd{END_OF_TEXT}x\ufffd"
    named = {shown["vocabulary"][token] for token in shown["tokens"]}
    assert {"‹E6›", "␀", END_OF_TEXT} <= named and "漢" not in named
    assert {"‹257›", "‹258›"} & set(shown["vocabulary"]) or 257 not in reading.likeliest  # ids without a text


def page_of_two(page: Path) -> list[Reading]:
    """Write the page of two models' readings of a hostile text."""
    models = [random_gpt(seed=seed, vocab_size=257) for seed in (0, 1)]
    readings = [reading_of(model, [256, *HOSTILE.encode()], name=f"<b>{i}") for i, model in enumerate(models)]
    write_text_page(page, readings, "<i>summary")
    return readings


@needs_browser
def test_a_token_and_what_it_looked_at_are_shown_by_keyboard_alone_and_two_models_by_their_difference(tmp_path):
    script = """
      const press = (where, key) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const tint = $("tint").value, differing = $("apart").querySelectorAll("button");
      differing[0].click();
      const farthest = beyond(chosen);
      for (const key of ["End", "ArrowLeft", "Home", "ArrowRight", "ArrowDown"]) press($("text"), key);
      const heads = document.querySelector("#heads .plot");
      for (const key of ["ArrowDown", "ArrowDown", "ArrowRight", "Enter"]) press(heads, key);
      const found = {text: $("text").textContent, options: $("text").querySelectorAll("[role=option]").length,
        active: $("text").getAttribute("aria-activedescendant"),
        selected: document.querySelectorAll("[aria-selected=true]").length,
        figures: $("surprise").textContent, answers: $("answers").querySelectorAll("tr").length, tint, farthest,
        row: $("row").value, rows: $("looked").rows.length, bold: [...document.querySelectorAll("b")].length,
        csv: saved.CSV("heads").split("\\n").length, wide: document.documentElement.scrollWidth <= innerWidth};
      press($("text"), "Escape");
      return {...found, after: $("chosen").textContent};
    """
    readings = page_of_two(tmp_path / "t.html")
    found = browse(tmp_path / "t.html", script)
    seen = HOSTILE.replace("\x00", "␀").replace("\u202e", "\ufffd").replace("\u2028", "\ufffd")
    assert found.pop("text") == END_OF_TEXT + seen
    bits = readings[0].nats[2] / np.log(2)
    assert f"first: “/”, {bits:.2f} bits" in found.pop("figures")
    apart = np.abs(readings[0].nats - readings[1].nats)[1:].max() / np.log(2)
    assert abs(found.pop("farthest")) == pytest.approx(apart, abs=0.002)
    size = min(len(readings[0].tokens), 40)
    assert found == {
        "options": len(readings[0].tokens), "active": "t2", "selected": 1, "answers": 20, "row": "1 1", "rows": 3,
        "bold": 1, "wide": True, "after": "After the text", "tint": "difference", "csv": 2 + 8 * size**2,
    }  # fmt: skip


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_four_and_a_half_and_lines_of_three(theme):
    """WCAG's AA."""
    css = Path(pages.__path__[0], "kit.css").read_text()
    colours = {name: both[theme] for name, *both in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)}

    def luminance(name: str) -> float:
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return float(np.dot([v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts], WEIGHTS))

    def contrast(one: str, other: str) -> float:
        low, high = sorted(map(luminance, (one, other)))
        return (high + 0.05) / (low + 0.05)

    grounds = ("paper", "field", "hot", "good", "cell")
    assert {ground: contrast("ink", ground) for ground in grounds if contrast("ink", ground) < 4.5} == {}
    assert min(contrast(text, ground) for text in ("dim", "ink") for ground in ("paper", "field")) >= 4.5
    lines = [name for name in colours if re.match(r"hue|step|mark|map|ray", name)]
    assert len(lines) == 19 and [line for line in lines if contrast(line, "paper") < 3] == []
