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
from conftest import random_gpt, run_here, split_patterns, tokens_drawn

import pages.demo
from common.errors import SettingsError
from data.config import TokenizerConfig
from data.tokenizer import END_OF_TEXT, encode_text, make_tokenizer, train_bpe
from export import ExportConfig
from generation.config import SamplingParams
from generation.generate import encode_prompt
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
@pytest.mark.parametrize("name", CONFIGS)
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
    script = """(other, ids) => {
      const tensors = Object.entries(other.weights);
      const unpacked = tensors.map(([name, packed]) => [name, new Float32Array(bytes(packed).buffer)]);
      const model = new GPT(other, Object.fromEntries(unpacked));
      const cache = model.cache();
      const all = ids.map(id => model.forward(id, cache));
      const padded = weights => [...weights, ...Array(ids.length - weights.length).fill(0)];
      return [all.map(({logits}) => [...logits]), all.map(({heads}) => heads.map(padded))];
    }"""
    wrong = []
    with Browser(page) as browser, torch.no_grad():
        for model in drawn_models(60):
            write_demo(other, model)
            logits, heads = browser.run(f"({script})({json.dumps(data_of(other))}, {ids})")
            maps = torch.cat(for_each_layer(model, torch.tensor([ids]), lambda weights: weights[0]))
            error = (torch.tensor(logits) - model(torch.tensor([ids]))[0]).abs().max()
            map_error = (torch.tensor(heads).transpose(0, 1) - maps).abs().max()
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
      reading.likely = [[tokenizer.end, 0.5], [97, 0.2]];
      choose(null);
      return [said, count, $("likely").rows.length, $("likely").querySelectorAll("button").length];"""
    said, count, rows, buttons = browse(page, script)
    assert said.startswith("0 tokens. The model ended the text: clear it to begin another, or delete a part of it")
    assert 3 < count <= 15 and (rows, buttons) == (2, 1), "after <|endoftext|> nothing is written on"


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
    assert page.count("</script>") == 2 and "&lt;/script&gt;" in page.split("</title>")[0]
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


def test_a_page_to_send_does_not_tell_in_which_folder_its_text_lies(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.jsonl").write_text(json.dumps({"step": 0, "text": "/home/jane/diary/: 3 files, 2.0 MB"}))
    config, progress = {"model": {}, "data": {"path": "/home/jane/diary/"}}, Progress(1, metrics={"val_bpb": 1.5})
    write_demo(tmp_path / "demo.html", random_gpt(vocab_size=257), config=config, progress=progress)
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert "trained on diary: 3 files, 2.0 MB</title>" in page and "jane" not in page


@needs_browser
@needs_axe
@pytest.mark.parametrize("looks", [{"width": 390}, {"width": 1280}, {"width": 1280, "dark": True}])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(hostile_page, looks):
    script = """
      $("max_new_tokens").value = 40;
      await startWriting();
      choose(9);
      document.querySelector("details").open = true;
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
        (dict(full=True), "to=demo.html cannot be written (No space left on device): name another place, or make"),
        (
            dict(to="no/demo.html"),
            "to=no/demo.html cannot be written (No such file or directory): name another place",
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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(to="ours.html", import_from="gpt2"), "to=ours.html is a page, and import_from=gpt2 makes a checkpoint"),
        (dict(to="folder", dtype="float32"), "dtype=float32 is for a page: leave it out, or set to=FILE.html."),
        (dict(to="a.html", dtype="int8"), "dtype=int8 is not known: choose one of float16, float32."),
    ],
)
def test_settings_that_do_not_fit_a_page_are_refused(settings, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        ExportConfig(**settings)


def test_export_py_replaces_a_page_and_tells_its_size(tmp_path):
    checkpoint = saved_run(tmp_path, random_gpt(vocab_size=257))
    for dtype in ("float16", "float32"):
        done = run_here("export.py", checkpoint, "to=demo.html", f"dtype={dtype}", cwd=tmp_path)
        size = (tmp_path / "demo.html").stat().st_size / 1000
        assert done.returncode == 0 and f"is now demo.html, a page of {size:.3g} kB" in done.stdout
        assert data_of(tmp_path / "demo.html")["dtype"] == dtype
