"""The page of a model computes like the model, and cuts text like the tokenizer."""

from __future__ import annotations

import errno
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from browser import AXE, Browser, browse, data_of, needs_axe, needs_browser
from conftest import close, random_gpt, run_here, some, split_patterns, tokens_drawn

import pages.demo
from cli.export import write_export
from common.errors import SettingsError
from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, encode_text, make_tokenizer, train_bpe
from export import ExportConfig
from generation.config import SamplingParams
from generation.generate import encode_prompt
from model.apart import Part, parts, streams, without
from model.config import MLPS, NORMS, GPTConfig
from model.gpt import GPT
from model.heads import for_each_layer
from pages.demo import FORMS, MODIFIERS, browser_tokenizer, demo_page, nearest
from runs.checkpoint import Checkpoint, Meta, Progress, save_checkpoint
from training.config import TrainConfig

BYTE = make_tokenizer(TokenizerConfig(name="byte"), ())
HOSTILE = '</script><b onclick="x">&amp; KIT.JS DATA <!-- 漢字 😀 é\x00\u202e\u2028'
# Every form, modifier, norm, MLP, position and scaling that the page knows is in one of them.
CONFIGS = {
    "defaults": {},
    "grouped": dict(
        attention="matmul", n_kv_head=2, norm="layernorm", bias=True, qkv_bias=True, mlp="gelu", qk_norm=False,
        rope_scaling="linear", rope_scaling_factor=2.0,
    ),
    "alibi": dict(attention="softmax1+sink", position="alibi", mlp="relu2", tie_embeddings=True),
    "windows": dict(attention="sdpa+window/sdpa+nope", attention_window=5, logit_softcap=5.0, rope_fraction=0.5),
    "learned": dict(
        attention="einsum+gate+xsa+out_norm+key_offset/sdpa+gate_softplus", n_kv_head=1, position="learned",
        mlp="gelu_tanh",
    ),
    "faded": dict(
        attention="loop+value_residual+forget+fade/softmax1+fade+value_residual", head_size=6, position="none"
    ),
    "pope": dict(attention="sdpa+sink/sdpa+nope", position="pope", n_kv_head=2),
    "yarn": dict(
        attention="bmm+fade+sink+gate_element/sdpa+token_sink+gate_biased", rope_scaling="yarn",
        rope_scaling_factor=4.0, rope_trained_length=8,
    ),
    "n-grams": dict(
        attention="stacked+gate_silu/single_head+window", attention_window=7, ngrams=[2, 3], ngram_rows=50,
        rope_scaling="llama3", rope_scaling_factor=2.0, norm="layernorm",
    ),
}  # fmt: skip


def write_demo(page: Path, model: GPT, tokenizer=BYTE, dtype: str = "float32", **meta) -> None:
    config = {"model": {}, "data": {}} | meta.pop("config", {})
    checkpoint = Checkpoint(page.parent / "run" / "checkpoints" / "step_1", model, tokenizer, Meta(config, **meta))
    page.write_text(demo_page(checkpoint, page.name, dtype), encoding="utf-8")


def written(model: GPT, prompt: str, seed: int = 1, tokenizer=BYTE, **params) -> list[int]:
    """The ids that sample.py writes after a prompt, without the one that ends the text."""
    prompts = [encode_prompt(tokenizer, prompt)]
    (drawn,) = tokens_drawn(model, tokenizer, prompts, [seed], SamplingParams(**params))
    return [token for token in drawn if token != tokenizer.eot_token]


@needs_browser
@pytest.mark.parametrize("name", some(CONFIGS, 3))
def test_the_page_writes_as_sample_py_does_and_its_logits_and_weights_are_the_models(name, tmp_path):
    model, page = random_gpt(vocab_size=270, **CONFIGS[name]), tmp_path / "demo.html"
    write_demo(page, model)
    ids = [256, *b"all of a window"]
    script = f"""
      const greedy = await tinygpt.generate("hello", {{temperature: 0, max_new_tokens: 24}});
      const settings = {{temperature: 0.9, top_k: 90, top_p: 0.9, seed: 7, max_new_tokens: 20}};
      const sampled = await tinygpt.generate("", settings);
      const text = new Reading(model, tokenizer);
      for (const id of {ids}) text.read(id);
      return [greedy, sampled, [...tinygpt.logits({ids})], text.places.at(-1).heads.map(weights => [...weights])];"""
    greedy, sampled, logits, heads = browse(page, script)
    assert greedy["ids"] == written(model, "hello", temperature=0, max_new_tokens=24)
    assert greedy["text"] == BYTE.decode(greedy["ids"])
    assert sampled["ids"] == written(model, "", seed=7, temperature=0.9, top_k=90, top_p=0.9, max_new_tokens=20)
    with torch.no_grad():
        wanted = model(torch.tensor([ids]))[0, -1]
    torch.testing.assert_close(torch.tensor(logits), wanted, rtol=0, atol=1e-3)
    maps = torch.cat(for_each_layer(model, torch.tensor([ids]), lambda weights: weights[0, :, -1]))  # (heads, S)
    torch.testing.assert_close(torch.tensor(heads), maps, rtol=0, atol=1e-4)


@needs_browser
@pytest.mark.parametrize("name", some(CONFIGS, 3))
def test_a_page_without_each_part_after_each_and_without_all_computes_as_torch(name, tmp_path):
    model, page = random_gpt(vocab_size=270, **CONFIGS[name]), tmp_path / "demo.html"
    write_demo(page, model)
    ids = [256, *b"all of a window"]
    script = f"""
      const last = off => [...tinygpt.logits({ids}, {{without: off}})];
      const cache = model.cache();
      const {{streams}} = {ids}.map(id => model.forward(id, cache)).at(-1);
      return [names, names.map(name => last([name])), last(names), streams.map(stream => [...model.logits(stream)])];"""
    names, each, nothing, lens = browse(page, script)
    tokens = torch.tensor([ids])

    def last(*off: Part) -> torch.Tensor:
        with torch.no_grad(), without(model, *off):
            return model(tokens)[0, -1]

    assert names == [str(part) for part in parts(model)]
    whole = last()
    for part, logits in zip(parts(model), each, strict=True):
        close(torch.tensor(logits), last(part), rtol=0, atol=1e-4)
        assert not torch.allclose(last(part), whole, atol=1e-3)
    close(torch.tensor(nothing), last(*parts(model)), rtol=0, atol=1e-4)
    with torch.no_grad():
        for logits, stream in zip(lens, streams(model, tokens), strict=True):
            close(torch.tensor(logits), model.logits(stream)[0, -1], rtol=0, atol=1e-4)


def drawn_models(count: int) -> Iterator[GPT]:
    """Models that a page can compute, with settings drawn at random."""
    rng = random.Random(1)

    def layer() -> str:
        kept = [name for name in rng.sample(MODIFIERS, len(MODIFIERS)) if rng.random() < 0.3]
        return "+".join([rng.choice(FORMS), *kept])

    while count:
        position = rng.choice(["rope", "rope", "pope", "learned", "alibi", "none"])
        settings = dict(
            attention="/".join(layer() for _ in range(rng.randint(1, 3))), position=position,
            head_size=rng.choice([None, 4, 6]), n_kv_head=rng.choice([None, 1, 2]), n_inner=rng.choice([None, 24]),
            norm=rng.choice(NORMS), mlp=rng.choice(MLPS), logit_softcap=rng.choice([None, 5.0]),
        )  # fmt: skip
        settings |= {name: rng.random() < 0.5 for name in ("bias", "qkv_bias", "qk_norm", "tie_embeddings")}
        if "window" in settings["attention"]:
            settings["attention_window"] = rng.randint(1, 15)
        if position == "rope":
            scaling = rng.choice(["none", "linear", "yarn", "llama3"])
            settings |= dict(rope_scaling=scaling, rope_scaling_factor=2.0, rope_fraction=rng.choice([0.5, 1.0]))
        if rng.random() < 0.3:
            settings |= dict(ngrams=rng.choice([[2], [2, 3]]), ngram_rows=50)
        with suppress(SettingsError):  # of settings that do not fit together
            yield random_gpt(count, n_layer=3, vocab_size=270, **settings)
            count -= 1


@pytest.mark.slow
@needs_browser
def test_random_models_are_computed_on_a_page_as_in_torch_at_each_token(tmp_path):
    page, other, ids = tmp_path / "demo.html", tmp_path / "other.html", [256, *b"all of a window"]
    write_demo(page, random_gpt(vocab_size=270))
    script = """(other, ids, off) => {
      const tensors = Object.entries(other.weights);
      const unpacked = tensors.map(([name, packed]) => [name, new Float32Array(bytes(packed).buffer)]);
      const model = new GPT(other, Object.fromEntries(unpacked));
      const cache = model.cache();
      const all = ids.map(id => model.forward(id, cache));
      const padded = weights => [...weights, ...Array(ids.length - weights.length).fill(0)];
      const some = model.cache(new Set(off));
      return [
        all.map(({logits}) => [...logits]), all.map(({heads}) => heads.map(padded)),
        ids.map(id => [...model.forward(id, some).logits]), all.map(({streams}) => [...model.logits(streams[3])]),
      ];
    }"""
    wrong, draw = [], random.Random(2)
    with Browser(page) as browser, torch.no_grad():
        for model in drawn_models(60):
            write_demo(other, model)
            off = draw.sample(parts(model), draw.randint(1, len(parts(model))))
            asked = f"{json.dumps(data_of(other))}, {ids}, {[str(part) for part in off]}"
            logits, heads, without_some, lens = browser.run(f"({script})({asked})")
            maps = torch.cat(for_each_layer(model, torch.tensor([ids]), lambda weights: weights[0]))
            error = (torch.tensor(logits) - model(torch.tensor([ids]))[0]).abs().max()
            map_error = (torch.tensor(heads).transpose(0, 1) - maps).abs().max()
            with without(model, *off):
                error = max(error, (torch.tensor(without_some) - model(torch.tensor([ids]))[0]).abs().max())
            after = model.logits(streams(model, torch.tensor([ids]))[3])[0]  # the second layer's attention
            error = max(error, (torch.tensor(lens) - after).abs().max())
            if max(error, map_error) > 1e-4:
                wrong.append((model.config, error, map_error))
    assert wrong == []


@needs_browser
def test_a_nucleus_that_ends_among_equals_keeps_the_tokens_that_sample_py_keeps(tmp_path):
    model, page = random_gpt(vocab_size=270), tmp_path / "demo.html"
    model.lm_head.weight.data[60:] = 0  # as those of ids that training has not seen
    write_demo(page, model)
    settings = dict(temperature=1.4, top_p=0.9, max_new_tokens=30)
    asked = json.dumps(settings | dict(top_k=None))
    found = browse(
        page, f"return await Promise.all([1, 2, 3].map(seed => tinygpt.generate('', {{...{asked}, seed}})));"
    )
    assert [text["ids"] for text in found] == [written(model, "", seed=seed, **settings) for seed in (1, 2, 3)]
    equal = [token for text in found for token in text["ids"] if token >= 60]
    assert max(equal) < 255 and len({*equal}) > 10  # the first of the equal ones, and several of them
    least = browse(page, "return await tinygpt.generate('', {top_p: 1e-300, max_new_tokens: 9});")["ids"]
    assert least == written(model, "", temperature=0, max_new_tokens=9)  # the likeliest stays, though p rounds to 0


def strings(count: int) -> list[str]:
    """Texts of the characters that the patterns of tokenizers tell apart."""
    parts = [
        *(" ", "  ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u2003", "\x85", "\ufeff", "\u200b", "\u2028", "\x00"),
        *(
            "é",
            "e\u0301",
            "ß",
            "ſ",
            "\u212a",
            "ǅ",
            "İ",
            "漢字",
            "😀",
            "👍🏽",
            "\ud83d",
            "½",
            "Ⅷ",
            "٣",
            "1",
            "2024",
            "12345",
        ),
        *("'s", "'S", "'ſ", "'ll", "'Re", "'VE", "don't", "I'M", "hello", " The", "WORLD", "_", "...", "!=", "//", "-"),
        END_OF_TEXT,
    ]
    draw = random.Random(0)
    return ["", *parts] + ["".join(draw.choices(parts, k=draw.randint(2, 12))) for _ in range(count)]


@needs_browser
def test_each_tokenizer_gives_the_ids_of_python_and_their_texts(tmp_path):
    page = tmp_path / "demo.html"
    write_demo(page, random_gpt(vocab_size=257))
    sample = "".join(text for text in strings(300) if text.isprintable()) + "the cat sat on the mat. " * 20
    tokenizers = {name: train_bpe([sample], 600, pattern) for name, pattern in split_patterns().items()} | {
        "byte": BYTE
    }
    texts = strings(500)
    data = {name: browser_tokenizer(tokenizer, "demo.html") for name, tokenizer in tokenizers.items()}
    script = f"""
      const texts = {json.dumps(texts)};
      return Object.entries({json.dumps(data)}).map(([name, data]) => {{
        const tokenizer = new Tokenizer(data);
        const ids = texts.map(text => tokenizer.encode(text));
        return [name, ids, ids.map(ids => tokenizer.decode(ids)), ids.map(ids => tokenizer.decode(ids.slice(0, -1)))];
      }});"""
    for name, ids, decoded, cut in browse(page, script):
        tokenizer = tokenizers[name]
        wanted = [encode_text(tokenizer, text).tolist() for text in texts]
        assert ids == wanted and len(texts) > 500, name
        assert decoded == [tokenizer.decode(each) for each in wanted]
        assert cut == [tokenizer.decode(each[:-1]) for each in wanted]  # may end within a character


@needs_browser
def test_a_text_is_written_once_more_read_as_typed_and_chosen_token_by_token(tmp_path):
    model, page = random_gpt(vocab_size=257), tmp_path / "demo.html"
    write_demo(page, model)
    script = """
      const press = key => $("text").dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const type = text => { $("source").value = text; return $("source").oninput(); };
      const finished = async () => { while (!$("said").textContent) await new Promise(requestAnimationFrame); };
      const texts = [];
      await finished();  // the page opens with a text
      const opening = reading.places.map(({id}) => id);
      await new Promise(requestAnimationFrame);
      const shown = [$("text"), $("source")].map(box => [box.scrollTop, box.scrollHeight > box.clientHeight]);
      $("clear").click();
      const empty = $("source").value;
      $("max_new_tokens").value = 12;
      await type("ab");
      for (const id of ["write", "again"]) {
        $(id).click();
        await finished();
        texts.push(reading.places.map(({id}) => id));
      }
      const seed = $("seed").value;
      for (const key of ["Home", "ArrowRight", "ArrowRight"]) press(key);
      const found = {
        opening, empty, shown, labels: [$("heads").querySelector("text").textContent, $("row").options[1].text],
        times: [$("expected").textContent, $("heads").querySelector("b").textContent],
        texts, seed, chosen: $("chosen").textContent, active: $("text").getAttribute("aria-activedescendant"),
        surprise: $("surprise").textContent, rows: document.querySelectorAll("#heads text").length,
        tinted: [...spans].filter(span => span.style.getPropertyValue("--share") > "0%").length,
        csv: saved.CSV("heads").split("\\n").length,
      };
      $("likely").querySelectorAll("button")[1].click();
      await finished();
      const branch = reading.places.map(({id}) => id);
      await type("ab!");
      const typed = reading.places.map(({id}) => id);
      press("Escape");
      return {...found, branch, typed, said: $("said").textContent, next: $("chosen").textContent,
        options: $("text").querySelectorAll("[role=option]").length};"""
    found = browse(page, script)
    assert found["opening"] == [256, *written(model, "", temperature=0.8, max_new_tokens=256)]
    settings = dict(temperature=0.8, max_new_tokens=12)
    ids = [256, *b"ab"]
    assert found["texts"] == [ids + written(model, "ab", seed=seed, **settings) for seed in (1, 2)]
    with torch.no_grad():
        chances = model(torch.tensor([[256, ord("a")]]))[0, -1].softmax(-1)
    second = int(chances.argsort(descending=True)[1])
    assert found["branch"] == [256, ord("a"), second, *written(model, "a" + chr(second), seed=2, **settings)]
    bits = -float(chances[ord("b")].log2())
    assert found == found | {
        "seed": "2", "chosen": "“b”", "active": "t2", "tinted": 2, "rows": 2 * 8, "csv": 2 + 8 * 2,
        "typed": [*ids, ord("!")], "next": "The next token", "options": 4,
        "shown": [[0, False], [0, True]], "empty": "", "said": "", "labels": ["L1 H1", "layer 1, head 1"],
        "times": [
            "The model expected (choose one to go on from there)",
            "Where the model looked to predict “b”",
        ],
    }  # fmt: skip
    assert found["surprise"].startswith(f"surprise {bits:.2f} bits")


@needs_browser
def test_a_finished_text_says_so_and_can_be_written_once_more(tmp_path):
    page = tmp_path / "demo.html"
    write_demo(page, random_gpt(vocab_size=257))
    script = """
      const finished = async () => { while (!$("said").textContent) await new Promise(requestAnimationFrame); };
      await finished();
      const {sample} = Reading.prototype;
      $("max_new_tokens").value = 12;
      $("source").value = "ab";
      await $("source").oninput();
      $("write").click();
      await finished();
      Reading.prototype.sample = () => tokenizer.end;
      $("write").click();
      await finished();
      const said = $("said").textContent;
      Reading.prototype.sample = sample;
      $("again").click();
      await finished();
      const count = places.length;
      reading.likeliest = () => [[tokenizer.end, 0.5], [97, 0.2]];
      choose(null);
      return [said, count, $("likely").rows.length, $("likely").querySelectorAll("button").length];"""
    said, count, rows, buttons = browse(page, script)
    assert said.startswith("0 tokens. The model ended the text: clear it to begin another, or delete a part of it")
    assert 3 < count <= 15 and (rows, buttons) == (2, 1), "after <|endoftext|> nothing is written on"


# Wait until something holds; the measurement of a slow machine waits for a press.
WAIT = """
  const until = async holds => { while (!holds()) await new Promise(requestAnimationFrame); };
  const said = () => until(() => $("said").textContent);
  const measurement = async () => {
    if (!isMeasured() && !isMeasuring()) startMeasuring();
    await until(isMeasured);
  };
  const bits = () => places.slice(1).map(({bits}) => bits);
  const ids = () => places.map(({id}) => id);
  const switchOver = name => switches[names.indexOf(name)].click();
  await said();
"""


@pytest.mark.slow
@needs_browser
def test_a_part_that_is_off_changes_what_is_shown_and_written_until_it_is_on_again(tmp_path):
    model, page = random_gpt(vocab_size=257), tmp_path / "demo.html"
    write_demo(page, model)
    script = (
        WAIT
        + """
      $("colour").value = "surprise";
      await measurement();
      const before = [ids(), bits(), $("change").disabled];
      const effects = [...measured.effects.get("L2 H3")].slice(1);
      const tintOf = ({style}) => [style.getPropertyValue("--tint"), style.getPropertyValue("--share")];
      const tints = () => [...spans].map(tintOf);
      pointPart("L2 H3");
      const pointed = tints();
      pointPart();
      const button = switches[names.indexOf("L2 H3")];
      const on = [button.ariaPressed, button.ariaLabel];
      button.click();
      await until(() => whole !== reading);
      const changed = tints();
      choose(5);
      const caption = () => $("parts").caption.textContent.split(" needs ")[1];
      const titles = ["#heads b", "#layers h3"].map(at => document.querySelector(at).textContent);
      const drawing = saved.SVG("heads");
      let file;
      HTMLAnchorElement.prototype.click = function () { file = this.download; };
      document.querySelector("#heads button").click();
      const shown = ["columns", "without"].map(id => $(id).textContent);
      const off = [ids(), bits(), button.ariaPressed, $("colour").value, ...shown];
      const struck = $("heads").querySelectorAll("[text-decoration]").length;
      await measurement();
      const measuredOff = caption();
      const ofToken = button.lastChild.textContent;
      const again = [...measured.effects.get("L2 H3")].slice(1);
      const beside = [...measured.effects.get("L1 MLP")].slice(1);  // L2 H3 stays off
      const rows = places.slice(1).map((place, i) => {
        choose(i + 1);
        return [...$("likely").rows].find(row => row.cells[0].textContent === nameOf(place.id))?.cells[2].textContent;
      });
      const best = places.slice(1).map((place, i) => {
        choose(i + 1);
        return [...$("likely").rows].map(row => row.cells[2].textContent);
      });
      choose(null);
      $("max_new_tokens").value = 8;
      $("temperature").value = 0;
      $("said").textContent = "";
      $("write").click();
      await said();
      const written = ids();
      $("all").click();
      await until(() => whole === reading);
      return {before, effects, pointed, changed, on, off, struck, ofToken, again, beside, rows, best, written,
        measuredOff, titles, drawing, file,
        back: bits(), colour: $("colour").value, status: $("without").textContent};"""
    )
    found = browse(page, script)
    (tokens, surprise, disabled), (same, less, *shown) = found["before"], found["off"]
    part = Part(1, 2)

    def nats(*off: Part) -> torch.Tensor:
        # The page reads windows as sample.py does: the last half again when one is full.
        with torch.no_grad(), without(model, *off):
            found = []
            start = 0
            for place in range(1, len(tokens)):
                if place - start > 16:
                    start = place - 8
                logits = model(torch.tensor([tokens[start:place]]))[0, -1]
                found.append(-logits.log_softmax(-1)[tokens[place]])
        return torch.stack(found) / torch.log(torch.tensor(2.0))

    close(torch.tensor(surprise), nats(), rtol=0, atol=1e-3)
    close(torch.tensor(less), nats(part), rtol=0, atol=1e-3)
    assert same == tokens and disabled
    wanted = nats(part) - nats()
    close(torch.tensor(found["effects"]), wanted, rtol=0, atol=2e-3)
    close(torch.tensor(found["again"]), wanted, rtol=0, atol=2e-3)
    close(torch.tensor(found["beside"]), nats(part, Part(0)) - nats(part), rtol=0, atol=2e-3)
    bits = f"{wanted[4]:+.2f}".replace("-", "−")
    assert found["ofToken"] == ("0.00" if abs(wanted[4]) < 0.005 else bits)
    assert found["on"][0] == "true" and re.fullmatch(r"H3 [+−]?\d\.\d\d bits of L2", found["on"][1])
    # Bars, maps and drawings name the parts that were off: without them another part may do another thing.
    assert found["measuredOff"] == "without each part, measured without L2 H3"
    assert all(title.endswith(" without L2 H3") for title in found["titles"]) and len(found["titles"]) == 2
    assert f">{found['titles'][0]}</text>" in found["drawing"]
    assert "Where_the_model_looked" in found["file"] and found["file"].endswith("_without_L2_H3.svg")
    mean = [each.mean() for each in (nats(part), nats())]
    status = f"Without L2 H3 a token takes {mean[0]:.2f} bits, with all parts {mean[1]:.2f}."
    assert shown == ["false", "change", "tokenwithout L2 H3with all", status] and found["struck"] == 1
    # The tint of a part that is pointed at is that of the change when it is off: orange for more bits, green for fewer.
    assert found["pointed"] == found["changed"]
    for (colour, share), change in zip(found["changed"][1:], wanted.tolist(), strict=True):
        assert abs(float(share[:-1]) - min(100, abs(change) / 6 * 100)) < 1
        assert abs(change) < 0.01 or colour == ("var(--hot)" if change > 0 else "var(--good)")
    # The token itself and the likeliest with all parts are in the table, also where they are not among the ten.
    for shown, rows, bits in zip(found["rows"], found["best"], surprise, strict=True):
        assert abs(shown_share(shown) - 2**-bits) < 0.006
        assert len(rows) >= 10 and max(map(shown_share, rows)) >= 2**-bits - 0.006
    assert max(map(len, found["best"])) == 12
    with torch.no_grad(), without(model, part):
        assert found["written"] == tokens + written_on(model, tokens, 8)
    close(torch.tensor(found["back"][: len(surprise)]), torch.tensor(surprise), rtol=0, atol=1e-6)
    assert found["colour"] == "surprise" and found["status"] == ""


def written_on(model: GPT, tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens, one after the other, of a text whose last half is read again when a window is full."""
    ids = [*tokens]
    start = 0
    for place in range(1, len(tokens) + count):
        if place - start > 16:
            start = place - 8
        if place >= len(tokens):
            ids.append(int(model(torch.tensor([ids[start:place]]))[0, -1].argmax()))
            if ids[-1] == 256:
                return ids[len(tokens) : -1]
    return ids[len(tokens) :]


@needs_browser
def test_layer_by_layer_is_the_guess_after_each_part_and_never_an_id_without_a_text(tmp_path):
    model, page = random_gpt(vocab_size=270, logit_softcap=5.0), tmp_path / "demo.html"
    model.lm_head.weight.data[260:] *= 20  # ids without a text are the likeliest
    write_demo(page, model)
    script = (
        WAIT
        + """
      $("source").value = "abcdef";
      await $("source").oninput();
      const texts = row => [...row.cells].map(cell => cell.textContent);
      const rows = () => [...$("layers").querySelectorAll("tr")].map(texts);
      choose(0);
      const hidden = $("layers").hidden;
      choose(4);
      return [hidden, rows(), (choose(null), rows())];"""
    )
    hidden, chosen, after = browse(page, script)
    stages = ["embedding", "L1 attention", "L1 MLP", "L2 attention", "L2 MLP"]
    assert hidden and chosen[0] == ["after", "guess", "chance", "of “d”"] and after[0] == ["after", "guess", "chance"]
    for rows, ids in ((chosen, [256, *b"abc"]), (after, [256, *b"abcdef"])):
        assert [row[0] for row in rows[1:]] == stages
        for row, stream in zip(rows[1:], streams(model, torch.tensor([ids])), strict=True):
            with torch.no_grad():
                chances = model.logits(stream)[0, -1].softmax(-1)
            best = chances[:257].argmax()
            assert abs(shown_share(row[2]) - chances[best]) < 0.006
            if rows is chosen:
                assert abs(shown_share(row[3]) - chances[ord("d")]) < 0.006


def shown_share(text: str) -> float:
    return float(text.strip("<> %")) / 100


@needs_browser
def test_a_large_model_has_a_row_of_each_layer_alone(tmp_path):
    page = tmp_path / "demo.html"
    write_demo(page, random_gpt(vocab_size=257, n_layer=7, n_head=1))
    script = WAIT + "return [...$('layers').querySelectorAll('tbody th')].map(cell => cell.textContent);"
    assert browse(page, script) == ["embedding", *(f"L{i}" for i in range(1, 8))]


@needs_browser
def test_switching_stops_writing_and_says_so_and_an_ended_task_starts_no_measurement(tmp_path):
    page = tmp_path / "demo.html"
    write_demo(page, random_gpt(vocab_size=257))
    script = (
        WAIT
        + """
      Reading.prototype.sample = () => 97;  // a text without an end
      $("max_new_tokens").value = 100000;
      $("said").textContent = "";
      $("write").click();
      await until(() => places.length > 30);
      switchOver("L1 H1");
      const stopped = $("said").textContent;
      await until(() => whole !== reading && isSwitched());
      await measurement();
      const found = [stopped, $("write").disabled, places.length > 30, isSwitched()];
      // While a measurement runs, writing ends it, and the measurement must not end the writing.
      measured.effects.clear();
      startMeasuring();
      $("said").textContent = "";
      $("write").click();
      const count = places.length;
      await until(() => places.length > count + 30);
      found.push(writer === task, isMeasuring(), $("without").textContent);
      // Two switches in one moment: the latter counts, and the text is read once.
      switchOver("L1 MLP");
      switchOver("L1 H1");
      await until(() => isSwitched() && whole !== reading);
      await measurement();
      found.push([...reading.off], $("said").textContent.startsWith("Stopped: "));
      // A text that is typed as a switch is pressed is read to its end.
      switchOver("L1 MLP");
      $("source").value = "a text that takes some time to read ".repeat(40);
      await $("source").oninput();
      found.push(places.length, isSwitched());
      await measurement();
      // A press stops the measurement at any time.
      measured.effects.clear();
      startMeasuring();
      await until(() => $("progress").value > 0);
      const pressed = $("measure").textContent;
      $("measure").click();
      const left = $("progress").value;
      await new Promise(resolve => setTimeout(resolve, 200));
      found.push(pressed, $("progress").value === left, isMeasuring(), $("measure").textContent.startsWith("Measure"));
      return found;"""
    )
    stopped, *found = browse(page, script)
    assert re.match(r"Stopped: \d+ tokens, \d+ tokens/s", stopped)
    wanted = [False, True, True]  # after the switch: writing has ended, its text is there, and read without the part
    wanted += [True, False, ""]  # while the model writes without it: nothing is read out for each token
    wanted += [["L1 MLP"], True]
    wanted += [1 + 36 * 40, True]
    wanted += ["Stop measuring", True, False, True]
    assert found == wanted


@needs_browser
def test_a_switch_keeps_tokens_that_the_tokenizer_would_cut_otherwise(tmp_path):
    model, page = random_gpt(vocab_size=300), tmp_path / "demo.html"
    tokenizer = train_bpe(["ab " * 99], 300)
    write_demo(page, model, tokenizer)
    script = (
        WAIT
        + """
      Reading.prototype.sample = () => tokenizer.encode("a")[0];  // then b: together they are one token
      $("source").value = "b";
      await $("source").oninput();
      $("max_new_tokens").value = 1;
      $("said").textContent = "";
      $("write").click();
      await said();
      const next = tokenizer.encode("b")[0];
      Reading.prototype.sample = () => next;
      $("said").textContent = "";
      $("write").click();
      await said();
      const written = ids();
      switchOver("L1 H1");
      await until(() => whole !== reading);
      const off = ids();
      switchOver("L1 H1");
      await until(() => whole === reading);
      return [written, off, ids(), tokenizer.encode($("source").value).length];"""
    )
    written, off, on, encoded = browse(page, script)
    assert written == off == on and len(written) == 4 and encoded == 2


KEYS = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, " ": 32, "Home": 36, "End": 35}


@needs_browser
def test_all_switches_are_reached_and_pressed_by_keys_alone(tmp_path):
    page = tmp_path / "demo.html"
    write_demo(page, random_gpt(vocab_size=257, n_layer=6, attention="single_head/sdpa", n_head=4))
    with Browser(page) as browser:
        asked = "(async () => {" + WAIT + "await measurement(); $('text').focus(); return names; })()"
        names = browser.run(asked)
        assert names[:2] == ["L1 H1", "L1 MLP"] and len(names) == 3 * (2 + 5)

        def press(key: str) -> str:
            text = {"text": " "} if key == " " else {}
            for kind in ("keyDown", "keyUp"):
                browser.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=KEYS[key], **text)
                text = {}
            return browser.run("names[switches.indexOf(document.activeElement)] ?? document.activeElement.id")

        assert press("Tab") == "L1 H1"
        moves = [
            "ArrowRight",
            "ArrowRight",
            "ArrowDown",
            "ArrowLeft",
            "ArrowDown",
            "Home",
            "ArrowUp",
            "End",
            "ArrowDown",
        ]
        wanted = ["L1 MLP", "L1 MLP", "L2 MLP", "L2 H4", "L3 H1", "L3 H1", "L2 H1", "L2 MLP", "L3 MLP"]
        assert [press(move) for move in moves] == wanted
        assert browser.run("pointedPart") == "L3 MLP" and browser.run("colour()") == "change"
        assert press(" ") == "L3 MLP"
        until = (
            "(async () => { while (reading === whole) await new Promise(requestAnimationFrame); return [...off]; })()"
        )
        assert browser.run(until) == ["L3 MLP"]
        # The next Tab leaves the switches; the focus stays on a button that has lost its use.
        assert press("Tab") in ("measure", "all")
        if browser.run("document.activeElement.id") == "measure":
            press("Tab")
        assert press(" ") == "all" and browser.run("off.size") == 0
        assert browser.run("$('all').ariaDisabled") == "true"


@needs_browser
def test_a_part_that_does_not_exist_is_refused_on_the_console(tmp_path):
    write_demo(tmp_path / "demo.html", random_gpt(vocab_size=257, n_layer=1, n_head=1))
    script = """
      const told = [];
      try { tinygpt.logits([256], {without: ["L1 H2"]}); } catch (error) { told.push(error.message); }
      await tinygpt.generate("", {without: ["L1"]}).catch(error => told.push(error.message));
      return told;"""
    told = "There is no {}: the parts are L1 H1, L1 MLP."
    assert browse(tmp_path / "demo.html", script) == [told.format("L1 H2"), told.format("L1")]


NO_SETTINGS = {
    "max_new_tokens: null": "max_new_tokens is null: it must be a whole number from 1 on.",  # wrote nothing
    "max_new_tokens: -3": "max_new_tokens is -3: it must be",
    "max_new_tokens: '5'": 'max_new_tokens is "5": it must be',
    "temperature: NaN": "temperature is NaN: it must be 0, or a number from 1e-6 on.",
    "temperature: true": "temperature is true: it must be",
    "top_k: 0.5": "top_k is 0.5: it must be null, or a whole number from 1 on.",
    "top_p: 5": "top_p is 5: it must be a number above 0, at most 1.",
    "seed: 2 ** 32 + 1": "seed is 4294967297: it must be a whole number from 0 to 4294967295.",  # wrote that of 1
    "seed: -1": "seed is -1: it must be",
    "seed: 'x'": 'seed is "x": it must be',  # wrote that of 0
    "without: 'L1 H1'": 'without is a list of parts, such as ["L1 H1"].',
    "topK: 5": "There is no topK: the settings are max_new_tokens, temperature, top_k, top_p, seed, without.",
}


@needs_browser
def test_settings_that_would_have_no_effect_or_another_are_refused_on_the_console(tmp_path):
    write_demo(tmp_path / "demo.html", random_gpt(vocab_size=257, n_layer=1, n_head=1))
    calls = ", ".join(f"tinygpt.generate('', {{{given}}})" for given in NO_SETTINGS)
    script = f"""
      const said = call => call.then(() => "nothing", error => error.message);
      const told = await Promise.all([{calls}].map(said));
      const logits = async (...given) => [...tinygpt.logits(...given)];
      for (const given of [{{off: ["L1 H1"]}}, ["L1 H1"]]) told.push(await said(logits([65], given)));
      for (const text of [5, null]) told.push(await said(tinygpt.generate(text)));
      const settings = {{seed: undefined, max_new_tokens: 5}};
      const one = await tinygpt.generate("", settings);
      const other = await tinygpt.generate("", {{max_new_tokens: 5}});
      const typed = await logits(new Int32Array([65, 66]));
      return [told, one.text === other.text, String(typed) === String(await logits([65, 66]))];"""
    told, is_default, is_typed = browse(tmp_path / "demo.html", script)
    wanted = [*NO_SETTINGS.values(), "There is no off: the settings are without.", "There is no 0: the settings"]
    wanted += ["A text is a string, not 5.", "A text is a string, not null."]
    assert [found[: len(sentence)] for found, sentence in zip(told, wanted, strict=True)] == wanted
    assert is_default and is_typed


@pytest.mark.slow
def test_a_page_takes_at_most_four_tenths_more_than_its_weights_and_has_no_address(tmp_path):
    model = GPT(GPTConfig(vocab_size=2048))  # of the default run
    tokenizer = train_bpe([Path(__file__).read_text(encoding="utf-8") * 3], 2048)
    for dtype, size in (("float16", 2), ("float32", 4)):
        write_demo(tmp_path / "demo.html", model, tokenizer, dtype)
        numbers = sum(parameter.numel() for parameter in model.parameters())
        assert (tmp_path / "demo.html").stat().st_size < 1.4 * size * numbers
    text = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<link|<img|@import|url\((?!#)", text)


@pytest.fixture
def hostile_page(tmp_path) -> Path:
    """The page of a run whose name, text and tokens are markup."""
    tokenizer = train_bpe([HOSTILE * 50], 300)
    config = {"model": {"attention": "<b>"}, "data": {"source": HOSTILE}}
    progress = Progress(1, metrics={"val_bpb": 1.5})
    write_demo(tmp_path / "demo.html", random_gpt(vocab_size=300), tokenizer, config=config, progress=progress)
    return tmp_path / "demo.html"


@needs_browser
def test_a_hostile_name_prompt_or_token_stays_text(hostile_page):
    page = hostile_page.read_text(encoding="utf-8")
    assert page.count("</script>") == 3 and "&lt;/script&gt;" in page.split("</title>")[0]
    script = f"""
      $("source").value = {json.dumps(HOSTILE)};
      await $("source").oninput();
      choose(reading.places.length - 1);
      return [$("text").textContent, document.querySelectorAll("b").length, document.title,
        $("about").textContent];"""
    text, bold, title, about = browse(hostile_page, script)
    assert text == END_OF_TEXT + HOSTILE.replace("\x00", "␀").replace("\u202e", "\ufffd").replace("\u2028", "\ufffd")
    assert bold == 1 and title.startswith("A small language model, trained on </script>")
    assert "2 layers × 4 heads" in about and ", 1.5000 bits per byte, " in about


@needs_browser
def test_a_token_of_bytes_is_read_out_with_the_characters_that_it_shows(hostile_page):
    script = """
      const tokens = [[" 漢", "‹20 E6 BC A2 E5›"], ["", "‹E5›"], [" a", "·a"]];
      return tokens.map(([text, name]) => tokenSpan(0, text, name, 2).ariaLabel);"""
    said = [" 漢 ‹20 E6 BC A2 E5›, 2.0 bits", "‹E5›, 2.0 bits", "·a, 2.0 bits"]
    assert browse(hostile_page, script) == said


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("/home/jane/diary/", "/home/jane/diary/: 3 files, 2.0 MB", "diary: 3 files, 2.0 MB"),
        ("diary/2026", "/home/jane/diary: 3 files; 1 file left out", "diary: 3 files; 1 file left out"),  # resumed
        (
            r"C:\jane\*.md",
            r"C:\jane\*.md: 2 files; validation D:\jane\held: 1 file",
            "*.md: 2 files; validation held: 1 file",
        ),
        (None, "stdlib of CPython 3.11: 532 files, 10.4 MB", "stdlib of CPython 3.11: 532 files, 10.4 MB"),
    ],
)
def test_a_page_to_send_does_not_tell_in_which_folder_its_text_lies(path, text, told, tmp_path):
    """A run that was resumed with another text, or has a validation text of its own, told their folders."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.jsonl").write_text(json.dumps({"step": 0, "text": text}))
    config, progress = {"model": {}, "data": {"path": path}}, Progress(1, metrics={"val_bpb": 1.5})
    write_demo(tmp_path / "demo.html", random_gpt(vocab_size=257), config=config, progress=progress)
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert f"trained on {told}</title>" in page and "jane" not in page


@needs_browser
@needs_axe
@pytest.mark.parametrize("looks", [{"width": 390}, {"width": 1280}, {"width": 1280, "dark": True}])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(hostile_page, looks):
    script = """
      $("max_new_tokens").value = 40;
      await startWriting();
      choose(9);
      for (const details of document.querySelectorAll("details")) details.open = true;
      switches[0].click();
      while (whole === reading) await new Promise(requestAnimationFrame);
      if (!isMeasured()) await startMeasuring();
      const {violations} = await axe.run();
      const found = violations.flatMap(({id, nodes}) => nodes.map(node => `${id}: ${node.html}`));
      return [found, document.documentElement.scrollWidth <= innerWidth];"""
    assert browse(hostile_page, script, AXE.read_text(encoding="utf-8"), **looks) == [[], True]


@pytest.mark.parametrize(
    ("attention", "instead"),
    [
        ("delta/delta/sdpa", "sdpa/sdpa/sdpa"),
        ("sdpa+diff+gate", "sdpa+gate"),
        ("mla+nope/softmax1+sink", "sdpa+nope/softmax1+sink"),
        ("sdpa+window/stacked+fade", "sdpa+window/stacked+fade"),
    ],
)
def test_the_nearest_attention_keeps_all_that_a_page_knows(attention, instead):
    assert nearest(attention) == instead


def saved_run(folder: Path, model: GPT, tokenizer=BYTE) -> str:
    config = TrainConfig(model=model.config)
    save_checkpoint(folder / "run" / "checkpoints" / "step_1", model=model, tokenizer=tokenizer, config=config)
    return f"checkpoint={folder / 'run' / 'checkpoints' / 'step_1'}"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            dict(attention="delta"),
            "to=demo.html: a page cannot compute attention=delta: train with attention=sdpa, the nearest that it can.",
        ),
        (dict(weight=1e5), "dtype=float16 ends at 65,504, and lm_head.weight has larger weights: set dtype=float32."),
        (dict(task=True), "has learned data=stdlib, not text"),
        (
            dict(pattern=r"\w+|(?s:.)"),
            "to=demo.html: JavaScript cannot cut text by the pattern of tokenizer=bpe: train with tokenizer=bpe",
        ),
        (
            dict(largest=30_000),
            "to=demo.html would have 132 kB, more than the 30 kB that browsers open: choose a smaller model.",
        ),
        (dict(full=True), "to=demo.html cannot be written (No space left on device): name another place."),
        (
            dict(to="no/demo.html"),
            "to=no/demo.html cannot be written (No such file or directory): name another place, or make its folder",
        ),
    ],
)
def test_a_page_that_cannot_be_is_refused_in_one_sentence_and_nothing_is_written(
    wrong, sentence, tmp_path, monkeypatch
):
    model = random_gpt(vocab_size=257, attention=wrong.get("attention", "sdpa"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = wrong.get("weight", 1.0)
    tokenizer = train_bpe(["ab " * 9], 257, wrong["pattern"]) if "pattern" in wrong else BYTE
    checkpoint = saved_run(tmp_path, model, None if "task" in wrong else tokenizer)
    monkeypatch.setattr(pages.demo, "LARGEST", wrong.get("largest", pages.demo.LARGEST))
    if "full" in wrong:
        monkeypatch.setattr(Path, "write_text", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    before = sorted(tmp_path.iterdir())
    done = run_here("export.py", checkpoint, f"to={wrong.get('to', 'demo.html')}", cwd=tmp_path)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_page_takes_the_place_of_a_page_and_of_no_other_file(tmp_path):
    """A page of one's own was replaced without a word, where a folder or a file of results is refused."""
    where = saved_run(tmp_path, random_gpt(vocab_size=257)).removeprefix("checkpoint=")
    page = tmp_path / "index.html"
    page.write_text("<h1>Mine</h1>")
    config = ExportConfig(checkpoint=where, to=str(page))
    with pytest.raises(SettingsError, match="is there already, and is no page of a model: choose another name"):
        write_export(config)
    assert page.read_text() == "<h1>Mine</h1>" and len(list(tmp_path.iterdir())) == 2
    page.write_text("")  # as mktemp makes it
    for _ in range(2):
        write_export(config)
        assert data_of(page)["dtype"] == "float16"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(to="ours.html", import_from="gpt2"), "to=ours.html is a page, and import_from=gpt2 makes a checkpoint"),
        (dict(to="ours", import_from="gpt2", dtype="float32"), "import_from=gpt2 makes a checkpoint: leave dtype out"),
        (dict(to="folder", dtype="bf16"), "dtype=bf16 is not known: choose one of float32, bfloat16, float16."),
        (dict(to="a.html", dtype="bfloat16"), "dtype=bfloat16 is not known: choose one of float16, float32."),
        (dict(to="a.html", dtype="int8"), "dtype=int8 is not known: choose one of float16, float32."),
    ],
)
def test_settings_that_do_not_fit_a_page_are_refused(settings, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        ExportConfig(**settings)


@pytest.mark.slow
def test_export_py_replaces_a_page_and_tells_its_size(tmp_path):
    checkpoint = saved_run(tmp_path, random_gpt(vocab_size=257))
    for dtype in ("float16", "float32"):
        done = run_here("export.py", checkpoint, "to=demo.html", f"dtype={dtype}", cwd=tmp_path)
        size = (tmp_path / "demo.html").stat().st_size / 1000
        assert done.returncode == 0 and f"is now demo.html, a page of {size:.3g} kB" in done.stdout
        assert data_of(tmp_path / "demo.html")["dtype"] == dtype
