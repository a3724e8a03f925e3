"""data=tales: the same stories from the same seed, and a reader that finds each kind of slip where it is made."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import random_gpt

from cli.eval import score_checkpoints
from cli.sample import write_samples
from common.errors import SettingsError
from common.settings import from_arguments
from data.config import DataConfig, TalesConfig, TokenizerConfig
from data.prepare import prepare
from data.tales import GRAMMAR, PAIRS, WORDS, first_slip, tales
from data.texts import Source
from data.tokenizer import make_tokenizer
from docs import tales_kept
from generation.config import EvalConfig, SampleConfig
from generation.generate import Chunk
from runs.checkpoint import save_checkpoint
from train import train
from training.config import TrainConfig

SWAP = "So they swapped: Clara got the shell and Ben got the red kite."
ANSWER = '"Ben has it now," said Clara, "and I have the shell."'
STORY = f"""
Clara was a girl who lived by the sea with her aunt. She had a red kite, and she loved it more than anything. One windy
day Clara took the red kite to the market. There she met Ben, who had a shell. "I like your red kite," said Ben. "I like
your shell," said Clara. {SWAP} They played on until the sun stood low. When Clara came home, her aunt asked, "Where is
your red kite?" {ANSWER} That night Clara dreamed of Ben.
""".replace("\n", " ").strip()


def made(count: int, seed: int = 1) -> list[str]:
    return [*tales(TalesConfig(count=count, seed=seed))]


# The stories


def test_a_story_depends_on_its_number_and_the_seed_alone():
    assert made(40)[:7] == made(7) != made(7, seed=2)
    digest = hashlib.sha256("\n".join(made(300)).encode()).hexdigest()
    assert digest[:16] == "25fc131967927d0b"  # the same in every version of Python


@pytest.mark.slow
def test_every_story_keeps_everything_and_hardly_any_two_are_alike():
    stories = made(2000)
    assert Counter(map(first_slip, stories)) == {None: 2000}
    assert len(set(stories)) > 1990 and 500 < sum(map(len, stories)) / 2000 < 650
    assert all(re.fullmatch(r"[A-Z“\"].*[.\"]", story) and "  " not in story and "{" not in story for story in stories)
    assert not any(re.search(r"[.] [a-z]|, [A-Z][a-z]+ [a-z]+ed [A-Z] ", story) for story in stories)


def test_the_walk_ends_from_every_state_and_every_rule_is_told():
    states = {rule.next_state for rules in GRAMMAR.values() for rule in rules}
    assert states == {*GRAMMAR} - {"start"} | {"end"}
    assert {state[-2:] for state in states if state.startswith("ask")} == {*PAIRS}
    told = " ".join(made(3000)).lower()
    for rule in (rule for rules in GRAMMAR.values() for rule in rules):
        assert re.search(rule.pattern.pattern, told), rule.sentences


def test_words_are_different_ones_and_none_is_a_part_of_the_next():
    assert len(set(WORDS["name"])) == len(WORDS["girl"]) + len(WORDS["boy"])
    for kind, choices in WORDS.items():
        assert len({word.lower() for word in choices}) == len(choices) >= 6, kind
        vowels = [word for word in choices if kind == "colour" and word[0] in "aeiou"]
        assert not vowels  # "a orange kite"


# The reader


@pytest.mark.parametrize(
    ("old", "new", "slip"),
    [
        ("", "", None),
        ("said Clara, ", "said Emma, ", "a name"),
        ("dreamed of Ben", "dreamed of Clara", "a name"),
        ("met Ben, who", "met Clara, who", "a name"),
        ("her aunt asked", "his aunt asked", "a pronoun"),
        ("was a girl", "was a boy", "a pronoun"),
        ("Ben got the red kite", "Ben got the red drum", "a thing"),
        ("have the shell", "have the button", "a thing"),
        ("your red kite", "your blue kite", "a colour"),
        ("her aunt asked", "her uncle asked", "another word"),
        (ANSWER, 'Clara held it up and said, "I still have it."', "who has it"),
        (ANSWER, '"I gave it to Ben," said Clara.', "who has it"),
        (SWAP, "After a while Ben gave the red kite back.", "who has it"),
        ("They played on until the sun stood low. ", "", "who has it"),
        ("the sun stood low", "the cows came home", "a sentence"),
        (" That night Clara dreamed of Ben.", "", "a sentence"),
        ("That night Clara dreamed of Ben.", "That night Clara", "a sentence"),
        ("of Ben.", "of Ben. The end.", "a sentence"),
        (STORY, "", "a sentence"),
    ],
)  # fmt: skip
def test_the_reader_names_the_first_slip(old, new, slip):
    assert old in STORY
    assert first_slip(STORY.replace(old, new)) == slip


@pytest.mark.slow
def test_the_reader_finds_every_exchange_of_a_word_that_is_told_twice():
    for story in made(200):
        for kind in ("name", "toy", "treasure", "colour"):
            told = {word: [found.start() for found in re.finditer(rf"\b{word}\b", story)] for word in WORDS[kind]}
            other = next(word for word in WORDS[kind] if not told[word])
            for word, places in told.items():
                for place in places if len(places) > 1 else ():
                    assert first_slip(story[:place] + other + story[place + len(word) :]), (story, word, place)


# As a text


@pytest.mark.long
def test_tales_are_documents_of_their_own_and_a_text_like_any_other(tmp_path):
    config = DataConfig(source="tales", tales=TalesConfig(count=2000), cache_dir=str(tmp_path))
    assert ["".join(document) for document in Source(config).documents()] == made(2000)
    said: list[str] = []
    data = prepare(config, TokenizerConfig(vocab_size=400), log=said.append)
    assert said == ["Preparing 2,000 tales of seed 1 with tokenizer=bpe, once."]
    ends = (data.train == data.tokenizer.eot_token).sum(), (data.val == data.tokenizer.eot_token).sum()
    assert sum(ends) == 2000 and 70 <= ends[1] <= 90  # 4% held out, whole
    begun = data.tokenizer.decode(data.val[1:].tolist()).split("<|endoftext|>")
    assert {*begun} <= {*made(2000)}


def test_another_count_seed_or_grammar_is_another_text(monkeypatch):
    prints = {
        Source(DataConfig(source="tales", tales=TalesConfig(count=n, seed=s))).fingerprint
        for n, s in ((9, 1), (8, 1), (9, 2))
    }
    monkeypatch.setattr("data.texts.RULES", "")
    prints.add(Source(DataConfig(source="tales", tales=TalesConfig(count=9))).fingerprint)
    assert len(prints) == 4


# The command


@pytest.mark.parametrize(
    ("schema", "typed", "said"),
    [
        (TrainConfig, "data.tales.count=0", "data.tales.count=0 must be at least 1"),
        (TrainConfig, "data.tales.seed=many", "data.tales.seed=many is not a whole number"),
        (TrainConfig, "data.tales.seed=-1", "data.tales.seed=-1 must be at least 0"),
        (EvalConfig, "data.path=a", "data.path=a and tales=true are both given: choose one"),
        (EvalConfig, "stride=3", "stride=3 and tales=true are both given: choose one"),
        (EvalConfig, "against=a", "against=a and tales=true are both given: choose one"),
        (EvalConfig, "data=tales", "data=tales and tales=true are both given: choose one"),
        (EvalConfig, "data.text_field=a", "data.text_field=a and tales=true are both given: choose one"),
        (EvalConfig, "data.separator=null", "data.separator=null and tales=true are both given: choose one"),
        (EvalConfig, "precision=fp32", "precision=fp32 and tales=true are both given: choose one"),
    ],
)
def test_what_means_nothing_is_refused_in_a_sentence(schema, typed, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        from_arguments(schema, ["tales=true", typed] if schema is EvalConfig else [typed])


@pytest.mark.long
@pytest.mark.slow
def test_eval_prints_the_share_of_tales_that_are_kept_and_the_first_slips(tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=tokenizer.n_vocab)
    trained = TrainConfig(model=model.config, data=DataConfig(source="tales"))
    save_checkpoint(tmp_path / "one", model=model, tokenizer=tokenizer, config=trained)
    save_checkpoint(tmp_path / "other", model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    config = EvalConfig(checkpoint=str(tmp_path / "one"), tales=True, device="cpu")
    assert score_checkpoints(config) == []
    shown = capsys.readouterr().out
    assert "tales       0 of 64 keep names" in shown and shown.endswith("\nfirst slip  a sentence 64\n")
    assert "data=" not in shown

    # A model that had learned the grammar, but for eight of its stories.
    stories = (
        made(56) + [STORY.replace("her aunt asked", "his aunt asked")] * 5 + [STORY.replace("red kite", "kite")] * 3
    )
    chunks = [Chunk(number, half) for number, story in enumerate(stories) for half in (story[:50], story[50:])]
    monkeypatch.setattr("cli.eval.generate", lambda *_, **__: iter(chunks))
    score_checkpoints(config)
    shown = capsys.readouterr().out
    assert "tales       56 of 64 keep names, pronouns, things and who has them: 88%\n" in shown
    assert shown.endswith("first slip  a pronoun 5, a sentence 3\n")
    score_checkpoints(replace(config, checkpoint=str(tmp_path / "other")))
    assert "has learned data=stdlib, not tales" in capsys.readouterr().out


def test_an_import_is_not_said_to_have_learned_the_default_text(tmp_path, monkeypatch, capsys):
    tokenizer, model = make_tokenizer(TokenizerConfig(name="byte"), []), random_gpt(vocab_size=257)
    monkeypatch.setattr("cli.eval.write_tales", lambda checkpoint: [""] * 64)
    for origin, told in (("hf:theirs", False), (None, True)):
        config = TrainConfig(model=model.config, init_from=origin)
        save_checkpoint(tmp_path / str(told), model=model, tokenizer=tokenizer, config=config)
        score_checkpoints(EvalConfig(checkpoint=str(tmp_path / str(told)), tales=True, device="cpu"))
        assert ("has learned data=stdlib" in capsys.readouterr().out) == told


@pytest.mark.slow
def test_the_table_of_attentions_counts_the_tales_that_each_seed_keeps(train_config, tmp_path, monkeypatch, capsys):
    for number, window in enumerate((None, 4)):
        attention = "sdpa+window" if window else "sdpa"
        model = replace(train_config.model, attention=attention, attention_window=window)
        train(replace(train_config, model=model, max_steps=1, run_dir=str(tmp_path / "runs" / str(number))))
    stopped = tmp_path / "runs" / "2"  # with tales of its last checkpoint, which are not those of a seed
    train(replace(train_config, max_steps=1, seed=7, run_dir=str(stopped)))
    summary = json.loads((stopped / "summary.json").read_text())
    (stopped / "summary.json").write_text(json.dumps(summary | {"status": "stopped"}))
    faster = replace(train_config.optimizer, lr=0.5)
    train(replace(train_config, max_steps=1, optimizer=faster, run_dir=str(tmp_path / "runs" / "3")))
    written = iter([made(64), [*made(62), "", STORY[:-9]], [""] * 64])
    monkeypatch.setattr(tales_kept, "write_tales", lambda checkpoint: next(written))
    tales_kept.main(tmp_path / "runs")
    told, *rows = capsys.readouterr().out.splitlines()
    assert told == "Some models have learned data=files, not tales."
    rate = f"optimizer.lr={train_config.optimizer.lr}"
    assert rows[2:] == [
        f"| `attention=sdpa {rate}` | 64 | 100% |",
        f"| `attention=sdpa+window model.attention_window=4 {rate}` | 62 | 97% |",
        "| `attention=sdpa optimizer.lr=0.5` | 0 | 0% |",
    ]


@pytest.mark.long
@pytest.mark.slow
def test_the_tales_that_are_judged_are_those_that_sample_writes(tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=tokenizer.n_vocab)
    save_checkpoint(tmp_path / "one", model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    judged: list[str] = []
    monkeypatch.setattr("cli.eval.first_slip", judged.append)
    monkeypatch.setattr("cli.eval.TALES", 3)
    score_checkpoints(EvalConfig(checkpoint=str(tmp_path / "one"), tales=True, device="cpu"))
    capsys.readouterr()
    config = SampleConfig(checkpoint=str(tmp_path / "one"), num_samples=3, max_new_tokens=512, device="cpu")
    write_samples(config)
    assert capsys.readouterr().out == "".join(
        f"--- sample {n} of 3, seed={n}\n{text}\n" for n, text in enumerate(judged, 1)
    )
