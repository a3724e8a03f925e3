"""docs/apart.py: the words that it tells apart, its errors, what it patches, and its tables."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from browser import browse, needs_browser
from conftest import random_gpt

from common.errors import SettingsError
from data.config import DataConfig, TalesConfig, TokenizerConfig
from data.tales import WORDS, first_slip, tales
from data.tokenizer import encode_text, make_tokenizer, train_bpe
from docs import apart, probes
from generation.score import ScoringParams
from model.apart import Part
from model.config import GPTConfig
from model.gpt import GPT
from model.heads import for_each_layer
from runs.checkpoint import open_checkpoint, save_checkpoint
from runs.metrics import Evaluation
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results/apart"
TALES = [*tales(TalesConfig(count=60, seed=3))]
BYTE = make_tokenizer(TokenizerConfig(name="byte"), ())
OFF = ScoringParams(torch.autocast("cpu", enabled=False))


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(tales(TalesConfig(count=400, seed=1)), 700)


def test_the_mentions_of_a_tale_are_those_of_its_grammar():
    lists = {
        "colour": "colour",
        "toy": "toy",
        "parent": "elder",
        "treasure": "treasure",
        "hero": "name",
        "friend": "name",
    }
    for tale in TALES:
        found = {}
        for mention in apart.mentions(tale):
            found.setdefault(mention.kind, []).append(tale[mention.start : mention.end].lower())
        for kind, words in found.items():
            assert len({*words}) == 1 and words[0] in map(str.lower, WORDS[lists[kind]])
        # The words of these lists stand nowhere else in a tale; colours also in places, as "on a green hill".
        for kind in ("toy", "parent", "treasure", "hero", "friend"):
            (word,) = {*found[kind]}
            count = sum(each.strip('.,!?;:"').lower() == word for each in tale.split())
            assert count == len(found[kind]), (kind, tale)
    green = next(tale for tale in TALES if "green hill" in tale)
    places = [mention.start for mention in apart.mentions(green) if mention.kind == "colour"]
    assert green.index("green hill") not in places and places


@pytest.mark.slow
def test_the_pairs_are_right_tales_that_differ_in_one_word_until_its_last_mention(bpe):
    for kind in apart.KINDS.values():
        pairs, earlier = apart.pairs_of(bpe, TALES, kind, 256)
        assert len(pairs.ids) >= 15
        for row, places in enumerate(earlier):
            last = int(pairs.answers[row]) + 1
            ids, other = pairs.ids[row, :last].tolist(), pairs.other[row, :last].tolist()
            differing = [place for place in range(last) if ids[place] != other[place]]
            assert differing == places and places and pairs.places[row].tolist() == [last - 1]
            own_word, other_word = (
                bpe.decode([int(each[row])]).strip() for each in (pairs.own_answer, pairs.other_answer)
            )
            assert own_word != other_word and own_word.lower() in bpe.decode(ids).lower()
            both = (re.findall(r"\w+", bpe.decode(each).lower()) for each in (ids, other))
            changed = {pair for pair in zip(*both, strict=True) if pair[0] != pair[1]}
            assert len(changed) == 1 and {*next(iter(changed))} <= {
                word.lower() for words in WORDS.values() for word in words
            }
    # Words of a byte tokenizer take several tokens: those of one length make pairs.
    pairs, _ = apart.pairs_of(BYTE, TALES, "toy", 2000)
    assert len(pairs.ids) > 10


def test_a_replaced_word_leaves_a_tale_without_a_slip():
    for tale in TALES[:20]:
        own = [mention for mention in apart.mentions(tale) if mention.kind == "toy"]
        assert first_slip(apart.replaced(tale, own, "drum")) is None
        assert first_slip(tale) is None


def test_a_target_is_shown_before_if_the_window_or_its_document_has_it():
    rows = np.array([[1, 2, 1, 3, 2, 2, 4]])
    assert apart.shown_before(rows, None).tolist() == [[False, True, False, True, True, False]]
    starts = np.array([[0, 0, 2, 2, 2, 2]])
    assert apart.shown_before(rows, starts).tolist() == [[False, True, False, False, True, False]]


def test_the_error_over_documents_is_that_of_an_evaluation():
    draw = np.random.default_rng(1)
    sizes = draw.integers(0, 5, 400)
    nats = draw.normal(1, 1, 400)
    wanted = Evaluation.of_tokens(nats, sizes)
    everywhere = np.ones(400, dtype=bool)
    found = apart.ratio(nats / math.log(2), sizes, np.cumsum(sizes == 0), everywhere)
    assert found == pytest.approx((wanted.bpb, wanted.bpb_stderr))
    one = apart.ratio(nats, sizes, np.zeros(400, dtype=int), everywhere)
    assert one[0] == pytest.approx(nats.sum() / sizes.sum()) and math.isnan(one[1])
    assert all(map(math.isnan, apart.ratio(nats, sizes, sizes, ~everywhere)))
    # That of a mean over equal clusters is the textbook's.
    values = draw.normal(size=50)
    mean, error = apart.ratio(values, np.ones(50), np.arange(50), np.ones(50, dtype=bool))
    assert (mean, error) == pytest.approx((values.mean(), values.std(ddof=1) / 50**0.5))
    assert apart.mean_of(values) == pytest.approx((mean, error))
    assert apart.ratio(values, -np.ones(50), np.arange(50), np.ones(50, dtype=bool)) == pytest.approx((-mean, error))


def test_a_window_below_every_tale_is_told_in_place_of_the_tables_by_kind_of_word(bpe):
    model = random_gpt(vocab_size=bpe.n_vocab)
    tokens = np.array([bpe.eot_token, *[1] * 20] * 3)
    found = apart.tales_figures(model, bpe, tokens, OFF)
    figures = {"loss": {"all tokens": (1.0, 0.1)}, "change": {"L1 H1": {"all tokens": (0.1, 0.1)}}} | found
    assert "No whole tale of the text fits model.block_size" in "\n".join(apart.tables(figures))


def test_a_rank_correlation_is_that_of_the_ranks():
    x = np.array([0.1, 5.0, 2.0, 3.0])
    assert apart.rank_correlation(x, x**3) == pytest.approx(1) and apart.rank_correlation(x, -x) == pytest.approx(-1)
    assert apart.rank_correlation(x, np.array([1, 2, 3, 4])) == pytest.approx(1 - 6 * (0 + 4 + 1 + 1) / (4 * 15))


@torch.no_grad()
def test_the_share_that_a_part_carries_is_that_of_a_hook_of_ones_own():
    model = random_gpt()
    ids = torch.randint(1, 60, (5, 9), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 7) % 60
    answers = torch.tensor([8, 7, 6, 8, 5])
    # The answers that the two sequences tell apart best, as a trained model does.
    changes = (model(other) - model(ids))[torch.arange(5), answers]
    own_answer, other_answer = changes.argmin(-1), changes.argmax(-1)
    pairs = apart.Pairs(ids, other, answers[:, None], answers, own_answer, other_answer)
    found = apart.carried(model, pairs)

    N = torch.arange(5)
    difference = lambda logits: logits[N, answers, other_answer] - logits[N, answers, own_answer]  # noqa: E731
    own, gap = difference(model(ids)), difference(model(other)) - difference(model(ids))
    D = model.attentions[0].head_dim
    kept = {}
    for name, module, columns in (
        ("L1 H2", model.blocks[0].attention.o_proj, slice(D, 2 * D)),
        ("L2 heads", model.blocks[1].attention.o_proj, slice(0, 4 * D)),
        ("L2 MLP", model.blocks[1].mlp.down_proj, slice(None)),
    ):
        note = lambda module, given: kept.update(x=given[0].clone())  # noqa: E731
        handle = module.register_forward_pre_hook(note)
        model(other)
        handle.remove()

        def patch(module, given, columns=columns):
            x = given[0].clone()
            for row, place in enumerate(answers.tolist()):
                x[row, place, columns] = kept["x"][row, place, columns]
            return (x,)

        handle = module.register_forward_pre_hook(patch)
        share = (difference(model(ids)) - own).sum() / gap.sum()
        handle.remove()
        assert found[name][0] == pytest.approx(float(share), abs=1e-4)
        assert found[name][1] > 0
    assert [*found] == [*(name for name in apart.variants(model) if name != "all")]
    # A model that does not tell the two apart carries nothing that could be shared out.
    for unclear in (
        pairs._replace(own_answer=other_answer),
        pairs._replace(own_answer=other_answer, other_answer=own_answer),
    ):
        unknown = apart.carried(model, unclear)
        assert [*unknown] == [*found] and all(math.isnan(value) for figure in unknown.values() for value in figure)


def test_a_pair_of_one_sequence_carries_nothing_and_the_facts_of_induction_move():
    model = random_gpt(vocab_size=16)
    draw = np.random.default_rng(1)
    inputs = torch.from_numpy(draw.integers(1, 16, (6, 16)))
    inputs[:, -1] = 0
    for row, place in enumerate((0, 3, 13, 7, 5, 9)):
        inputs[row, place] = 0
    seen = {}

    def carried(model, pairs):
        seen[len(seen)] = pairs
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apart, "carried", carried)
        found = apart.induction_figures(model, inputs)
    which, where = seen.values()
    N = torch.arange(6)
    mark = torch.tensor([0, 3, 13, 7, 5, 9])
    assert (which.ids != which.other).nonzero().tolist() == [[n, m + 1] for n, m in enumerate(mark.tolist())]
    assert torch.equal(which.own_answer, inputs[N, mark + 1])
    assert torch.equal(which.other_answer, which.other[N, mark + 1]) and (which.other > 0).sum() == (inputs > 0).sum()
    # The mark moves, and the ids after both places stay.
    other_mark = (where.other[:, :-1] == 0).int().argmax(1)
    assert ((where.other == 0).sum(1) == 2).all() and ((other_mark - mark).abs() > 1).all()
    assert torch.equal(where.places, torch.stack((mark + 1, other_mark + 1), 1))
    assert torch.equal(where.ids.gather(1, where.places), where.other.gather(1, where.places))
    assert torch.equal(where.other_answer, where.other[N, other_mark + 1])
    weights = for_each_layer(model, inputs, lambda weights: weights)
    wanted = weights[1][N, 2, mark + 1, mark].mean()
    assert found["looks"]["where the mark is"]["L2 H3"][0] == pytest.approx(float(wanted), abs=1e-5)
    wanted = weights[0][N, 1, -1, mark + 1].mean()
    assert found["looks"]["which id"]["L1 H2"][0] == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.slow
def test_the_bits_of_a_text_without_a_part_are_those_of_a_model_without_its_weights(bpe):
    model = random_gpt(vocab_size=700)
    tokens = np.concatenate([[bpe.eot_token, *encode_text(bpe, tale)] for tale in TALES[:8]])
    params = OFF._replace(separator=bpe.eot_token)
    found = apart.text_figures(model, bpe, tokens, params)
    T = 16
    windows = (len(tokens) - 1) // T
    assert found["tokens"] == windows * T and [*found["change"]][:2] == ["L1 H1", "L1 H2"]

    @torch.no_grad()
    def bits_per_byte() -> float:
        nats = size = 0.0
        for start in range(0, windows * T, T):
            row = torch.from_numpy(tokens[start : start + T + 1].astype(np.int64))
            starts = torch.tensor([max([0, *(p for p in range(t + 1) if row[p] == bpe.eot_token)]) for t in range(T)])
            logits = model(row[None, :-1], doc_starts=starts[None])[0].log_softmax(-1)
            nats -= float(logits[torch.arange(T), row[1:]].sum())
            size += sum(len(bpe.decode_bytes([t])) for t in row[1:].tolist() if t != bpe.eot_token)
        return nats / math.log(2) / size

    whole = bits_per_byte()
    assert found["loss"]["all tokens"][0] == pytest.approx(whole, rel=1e-4)
    assert found["lens"]["L2 MLP"] == pytest.approx(found["loss"]["all tokens"], rel=1e-4)
    D = model.attentions[0].head_dim
    with torch.no_grad():
        model.blocks[1].attention.o_proj.weight[:, D : 2 * D] = 0
    assert found["change"]["L2 H2"]["all tokens"][0] == pytest.approx(bits_per_byte() - whole, abs=1e-4)


@pytest.mark.slow
def test_the_bits_of_a_word_are_those_of_its_tokens_after_its_first_mention(bpe):
    model = random_gpt(vocab_size=700, block_size=256, position="none")
    tokens = np.concatenate([[bpe.eot_token, *encode_text(bpe, tale)] for tale in TALES[:9]])
    found = apart.tales_figures(model, bpe, tokens, OFF._replace(separator=bpe.eot_token))
    assert found["tales"] == 8  # the last one may be cut
    bits, count = 0.0, 0
    for tale in TALES[:8]:
        ids = [bpe.eot_token, *encode_text(bpe, tale).tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0].log_softmax(-1) / math.log(2)
        position, seen = 0, 0
        (kite,) = {tale[m.start : m.end] for m in apart.mentions(tale) if m.kind == "toy"}
        for place in range(1, len(ids)):
            text = bpe.decode([ids[place]])
            if text == f" {kite}" and tale[position : position + len(text)] == text:
                seen += 1
                count += seen > 1
                bits -= float(logits[place - 1, ids[place]]) if seen > 1 else 0
            position += len(text)
    assert found["words"]["toy"]["count"] == count
    assert found["words"]["toy"]["bits"][0] == pytest.approx(bits / count, rel=1e-3)


def test_a_text_too_short_for_a_figure_goes_without_it(bpe):
    model = random_gpt(vocab_size=700)
    tokens = np.concatenate([[bpe.eot_token, *encode_text(bpe, tale)] for tale in TALES[:3]])
    params = OFF._replace(separator=bpe.eot_token)
    assert apart.tales_figures(model, bpe, tokens, params) == {"tales": 0}  # no tale fits into 16 tokens
    figures = apart.text_figures(model, bpe, tokens[:3], params)
    assert figures["tokens"] == 2 and figures["rank_correlation"] is None
    printed = [*apart.tables(figures | {"carried": {}})]
    assert printed[2].startswith("| (all parts) | ") and not any("share" in line or "rank" in line for line in printed)
    assert printed[2].endswith(" | – |")  # nothing was there before


def saved(folder: Path, tokenizer=BYTE, **data) -> str:
    model = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=257)
    config = TrainConfig(model=model, data=DataConfig(**data))
    save_checkpoint(folder / "run/checkpoints/step_1", model=GPT(model), tokenizer=tokenizer, config=config)
    return str(folder / "run")


@pytest.mark.long
@pytest.mark.slow
def test_the_command_prints_what_it_writes_and_prints_it_again(tmp_path, capsys):
    run = saved(tmp_path)
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)

    def command(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / "docs/apart.py"), *arguments], cwd=tmp_path, capture_output=True, text=True
        )

    done = command(run, "text.txt")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("text        text.txt: 1 file, 1 document")
    assert lines[2] == "| bits/byte more without | all tokens | seen before |" and "| L2 heads |" in done.stdout
    (file,) = (tmp_path / "run/checkpoints").glob("step_1.apart.*.json")
    assert lines[-1].endswith(file.name)
    assert command(str(file)).stdout.splitlines() == lines[:-1]
    told = command(run, "text.txt", "more")
    assert told.returncode == 1 and told.stderr.startswith("error: python docs/apart.py [RUN [TEXT]] is wanted")
    assert told.stderr.count("\n") == 1
    for wrong in (["--mean"], [run, "mean=true"]):
        with mock.patch("sys.argv", ["apart.py", *wrong]), pytest.raises(SystemExit, match="1"):
            runpy.run_path(str(ROOT / "docs/apart.py"), run_name="__main__")
        told = capsys.readouterr().err
        assert told.startswith("error: python docs/apart.py [RUN [TEXT]] is wanted") and told.count("\n") == 1


@pytest.mark.parametrize("command", [apart, probes])
def test_no_texts_figures_take_the_place_of_anothers(command, tmp_path, monkeypatch, capsys):
    run = saved(tmp_path)
    opened = open_checkpoint(run)
    monkeypatch.setattr(command, "open_checkpoint", lambda where: opened)
    texts = [str(tmp_path / folder / "text.txt") for folder in ("a", "b")]
    figures = {"loss": {}, "change": {}, "induction": {}, "heads": {}}
    monkeypatch.setattr(apart, "take_apart", lambda checkpoint, path: figures | {"text": path or "its own"})
    monkeypatch.setattr(probes, "probe", lambda checkpoint, params, path: figures | {"text": path or "its own"})
    monkeypatch.setattr(probes, "probe_lines", lambda figures: [])
    monkeypatch.chdir(tmp_path)
    for arguments in ([run], [run, texts[0]], [run, texts[1]], [run, "a/text.txt"]):
        command.main(*arguments)
    assert capsys.readouterr().out.count("text        its own") == 1
    kind = command.__name__.removeprefix("docs.")
    files = (tmp_path / "run/checkpoints").glob(f"step_1.{kind}*.json")
    found = {json.loads(file.read_text(encoding="utf-8"))["text"]: file.name for file in files}
    assert found.keys() == {"its own", "a/text.txt", texts[1]}  # the one text under both of its names
    assert found["its own"] == f"step_1.{kind}.json"


@pytest.mark.slow
def test_a_model_of_a_task_has_nats_per_answer(tmp_path):
    run = saved(tmp_path, None, source="recall", task=dict(vocab_size=64, items=4))
    figures = apart.take_apart(open_checkpoint(run))
    assert figures["task"] == "recall" and "carried" not in figures
    (first, *_) = apart.tables(figures)
    assert first == "| nats/answer more without | answers |"
    assert figures["loss"]["answers"][0] == pytest.approx(math.log(257), abs=0.5)


def test_files_that_are_no_figures_are_refused_in_a_sentence(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"a\.json has no figures of docs/apart\.py"):
        apart.main(str(tmp_path / "a.json"))
    with pytest.raises(SettingsError, match=r"missing\.json has no figures"):
        apart.main(str(tmp_path / "missing.json"))


def test_a_head_of_another_name_is_no_part():
    assert str(Part(0, 1)) == "L1 H2" and apart.signed((-0.00001, 0.0001)) == "0.0000 ± 0.0001"
    assert apart.signed((0.5, None), 2) == "+0.50" and apart.signed((-0.5, 0.25), 2) == "−0.50 ± 0.25"
    assert apart.plain((math.nan, math.nan)) == "–"


def shown(*names: str) -> str:
    """What the command prints of recorded figures."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        apart.main(*(str(RESULTS / f"{name}.json") for name in names))
    return printed.getvalue()


def recorded(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


PAGE = (ROOT / "docs/apart.md").read_text(encoding="utf-8")
SEEDS = ("tales_1", "tales_2", "tales_3")


def test_each_table_of_the_page_is_what_the_command_prints_of_the_recorded_runs():
    printed = "".join(map(shown, ("tales_3", "induction", "induction_4_heads"))) + shown(*SEEDS)
    tables = {table.strip() for table in printed.split("\n\n") if table.startswith("|")}
    on_page = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    unknown = [table for table in on_page if table.strip() not in tables]
    assert len(on_page) == 11 and len(unknown) == 1 and unknown[0].startswith("| blue | red |")  # of the page's model


def test_the_numbers_between_the_tables_are_those_of_the_recorded_runs():
    text = " ".join(PAGE.split())
    all_runs = [recorded(name) for name in SEEDS]
    colours = []
    for figures in all_runs:
        carries = {part: share for part, (share, _) in figures["carried"]["colour"].items() if " H" in part}
        (best,) = (part for part, share in carries.items() if share > 0.99)
        bits, error = figures["words"]["colour"]["change"][best]
        assert abs(bits - math.log2(6)) < 0.1 and error < 0.03
        colours.append(apart.plain((bits, error), 2))
        # One head carries half of each kind or more, none all of them.
        heads = [part for part in figures["carried"]["colour"] if " H" in part]
        for kind, shares in figures["carried"].items():
            share, error = max(shares[head] for head in heads)
            assert share > 0.5 - error, kind
        assert not any(all(shares[head][0] > 0.5 for shares in figures["carried"].values()) for head in heads)
    assert f"{colours[0]}, {colours[1]} and {colours[2]} bits more" in text
    small = [f"{figures['change']['L1 MLP']['all tokens'][0]:.4f}" for figures in all_runs]
    assert f"{small[0]}, {small[1]} and {small[2]} bits per byte" in text
    lesson, one, four = recorded("tales_3"), recorded("induction"), recorded("induction_4_heads")
    words = lesson["words"]["colour"]
    assert f"the {words['count']} colours of {lesson['tales']} held-out stories" in text
    assert f"a colour costs {apart.plain(words['change']['L2 H2'], 2)} bits more without this head" in text
    assert f"Without L1 H2 a colour costs {apart.plain(words['change']['L1 H2'], 2)} bits more" in text
    correlations = [f"{recorded(name)['rank_correlation'][0]:.2f}" for name in ("tales_3", "default")]
    assert f"of {correlations[0]} in the median for these stories, and of {correlations[1]} for the default" in text
    single = [each["answers"][0] for name, each in four["change"].items() if re.fullmatch(r"L2 H\d", name)]
    assert max(single) < 0.035 and f"all four together cost {four['change']['L2 heads']['answers'][0]:.1f}" in text
    assert f"ln 15 = {math.log(15):.2f} nats" in text
    assert f"needs {one['change']['L1 H1']['answers'][0]:.1f}, for it" in text
    treasure = lesson["carried"]["treasure"]["L2 H2"][0], lesson["looks"]["treasure"]["L2 H2"][0]
    assert f"carries {treasure[0]:.2f} of the treasure, with {treasure[1]:.2f} of its weight" in text
    for figures, wanted in zip(all_runs, (0, 1, 0), strict=True):
        change = figures["words"]["treasure"]["change"]
        longest = max((part for part in change if re.fullmatch(r"L\d H\d", part)), key=lambda part: change[part][0])
        assert longest == "L1 H1" and abs(figures["carried"]["treasure"][longest][0] - wanted) < 0.005
    assert "for the treasures of tales_1 and of tales_3 it is that of L1 H1, which carries 0.00 of them" in text
    heads = sum(lesson["carried"]["treasure"][f"L{layer} H{head}"][0] for layer in (1, 2) for head in (1, 2))
    assert abs(heads - 1) < 0.03
    default = recorded("default")
    costs = [each["all tokens"][0] for name, each in default["change"].items() if re.fullmatch(r"L\d H\d", name)]
    told = f"{min(costs):.3f} to {max(costs):.3f} bits per byte of {default['loss']['all tokens'][0]:.2f}"
    assert told in text and len(costs) == 16


@needs_browser
def test_the_switches_of_the_gallerys_page_do_what_the_lesson_says(tmp_path):
    page = tmp_path / "demo.html"
    page.write_bytes((ROOT / "docs/gallery/demo.html").read_bytes())
    script = """
      while (!$("said").textContent) await new Promise(requestAnimationFrame);
      const text = tokenizer.decode(places.slice(1).map(({id}) => id));
      const last = word => places.findLastIndex(({id}) => tokenizer.decode([id]).trim() === word);
      const without = (off, word) => {
        const other = new Reading(model, tokenizer, new Set(off));
        for (const {id} of places) other.read(id);
        const likeliest = other.likeliest(other.chancesAt(last(word)), 7);
        const shown = likeliest.map(([id, chance]) => [tokenizer.decode([id]).trim(), percent(chance)]);
        return [shown, other.places[last(word)].bits];
      };
      const prompt = text.split('"Take this')[0].trimEnd();
      const on = async off => (await tinygpt.generate(prompt, {temperature: 0, without: off})).text;
      return {text, whole: without([], "red"), colour: without(["L2 H2"], "red"), kite: without(["L2 H2"], "kite"),
        aunt: without(["L2 H1"], "aunt"), red: without(["L2 H1"], "red"), lost: without(["L1 H2"], "red"),
        stories: [await on([]), await on(["L2 H2"]), await on(["L2 H1"]), await on(["L1 MLP"])]};"""
    found = browse(page, script)
    text = " ".join(PAGE.replace("\n> ", " ").replace("**", "").split())
    story = re.search(r"(Once upon.*?together\.)", text)[1]
    for piece in story.split(" … "):
        assert piece in found["text"]
    assert found["whole"][0][0] == ["red", "> 99 %"] and found["red"][0][0] == ["red", "> 99 %"]
    head, shares = re.search(r"^\| (blue.*) \|\n\|.*\n\| (.*) \|$", PAGE, re.MULTILINE).groups()
    chances = [*zip(head.split(" | "), shares.split(" | "), strict=True)]
    for (name, share), (word, chance) in zip(chances[:6], found["colour"][0], strict=False):
        assert name == word and abs(int(share[:-2]) - int(chance[:-2])) <= 1
    assert found["colour"][0][6][1] == "< 0.1 %" == chances[6][1]
    for kind, least, most in (("kite", 15, 20), ("aunt", 14, 20)):
        percents = [int(chance[:-2]) for _, chance in found[kind][0][:6]]
        assert least - 1 <= min(percents) and max(percents) <= most + 1 and found[kind][0][6][1] == "< 0.1 %"
    assert found["lost"][0][0] == ["whistle", "> 99 %"] and round(found["lost"][1]) == 13
    # The pieces of the four stories stand in them in their order.
    lines = re.findall(r"- (?:with all parts|without L\d \w+): (.*?)(?= - with| ## 2)", text)
    assert len(lines) == 4
    for line, written in zip(lines, found["stories"], strict=True):
        assert re.search(".*".join(map(re.escape, line.split(" … "))), written)


@pytest.mark.slow
def test_the_lines_of_the_lesson_draw_the_row_of_its_table(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "savefig", lambda name: pyplot.gcf().savefig(tmp_path / name))
    monkeypatch.chdir(ROOT)
    lines = re.search(r"```py\n(import json\n.*?pyplot.*?)```", PAGE, re.DOTALL)[1]
    exec(lines, {})
    heights = [bar.get_height() for bar in pyplot.gca().patches]
    pyplot.close()
    row = re.search(r"^\| colour \| 848 \| [^|]* \| (.*) \|$", PAGE, re.MULTILINE)[1]
    cells = [float(cell.split(" ± ")[0]) for cell in row.split(" | ")]
    assert heights == pytest.approx(cells[:6], abs=0.005) and (tmp_path / "parts.svg").is_file()


@pytest.mark.long
def test_in_a_new_model_of_stories_one_head_carries_the_colour(tmp_path, monkeypatch):
    settings = ["data=tales", "seed=3", "max_steps=400"]
    settings += [f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    command = [sys.executable, str(ROOT / "train.py"), *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, count in (("SCORED", 1 << 12), ("TALES", 60), ("PAIRS", 24)):  # the figures are far from the bounds
        monkeypatch.setattr(apart, name, count)
    figures = apart.take_apart(open_checkpoint(str(tmp_path / "run")))
    shares = {part: each for part, each in figures["carried"]["colour"].items() if " H" in part}
    best = max(shares, key=lambda part: shares[part][0])
    assert shares[best][0] > 0.9
    assert abs(figures["words"]["colour"]["change"][best][0] - math.log2(6)) < 0.3
    assert figures["change"]["L1 MLP"]["all tokens"][0] < 0.01
