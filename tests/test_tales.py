"""data=tales: the same stories from the same seed, and a reader that finds each kind of slip where it is made."""

import hashlib
import re
from collections import Counter

import pytest
from conftest import random_gpt

from cli.eval import score_checkpoints
from cli.sample import write_samples
from common.errors import SettingsError
from common.settings import from_arguments
from common.text import visible
from data.config import DataConfig, TalesConfig, TokenizerConfig
from data.prepare import prepare
from data.tales import GRAMMAR, PAIRS, WORDS, first_slip, tales
from data.texts import Source
from data.tokenizer import make_tokenizer
from generation.config import EvalConfig, SampleConfig
from generation.generate import Chunk
from runs.checkpoint import save_checkpoint
from training.config import TrainConfig

SWAP = "So they swapped: Mia got the drum and Ben got the kite."
ANSWER = '"Ben has it now," said Mia, "and I have the blue drum."'
STORY = f"""
Mia was a girl who lived by the sea with her aunt. She had a red kite, and she loved it more than anything. One windy
day Mia took the kite to the market. There she met Ben, who had a blue drum. "I like your kite," said Ben. "Red is my
favourite colour." {SWAP} They played on until the sun stood low. When it grew dark, Mia said goodbye and walked home.
"Where is your red kite?" asked her aunt. {ANSWER} That night Mia dreamed of Ben and the market.
""".replace("\n", " ").strip()


def made(count: int, seed: int = 1) -> list[str]:
    return [*tales(TalesConfig(count=count, seed=seed))]


# The stories


def test_a_story_depends_on_its_number_and_the_seed_alone():
    assert made(40)[:7] == made(7) != made(7, seed=2)
    digest = hashlib.sha256("\n".join(made(300)).encode()).hexdigest()
    assert digest[:16] == "9515becaa9b58ae2"  # the same in every version of Python


def test_every_story_keeps_everything_and_hardly_any_two_are_alike():
    stories = made(2000)
    assert Counter(map(first_slip, stories)) == {None: 2000}
    assert len(set(stories)) > 1990 and 550 < sum(map(len, stories)) / 2000 < 750
    assert all(re.fullmatch(r"[A-Z“\"].*[.\"]", story) and "  " not in story and "{" not in story for story in stories)
    assert not any(re.search(r"[.] [a-z]|, [A-Z][a-z]+ [a-z]+ed [A-Z] ", story) for story in stories)


def test_the_walk_ends_from_every_state_and_every_rule_is_told():
    states = {rule.next_state for rules in GRAMMAR.values() for rule in rules}
    assert states == {*GRAMMAR} - {"start"} | {"end"}
    assert {state[-2:] for state in states if state.startswith("home")} == {*PAIRS}
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
        ("said Mia, ", "said Zoe, ", "a name"),
        ("dreamed of Ben", "dreamed of Mia", "a name"),
        ("met Ben, who", "met Mia, who", "a name"),
        ("asked her aunt", "asked his aunt", "a pronoun"),
        ("was a girl", "was a boy", "a pronoun"),
        ("Ben got the kite", "Ben got the drum", "a toy"),
        ("your red kite", "your blue kite", "a colour"),
        ("who had a blue drum", "who had a red drum", "a colour"),
        ("asked her aunt", "asked her uncle", "another word"),
        ("Ben and the market", "Ben and the lake", "another word"),
        (ANSWER, 'Mia held it up and said, "I still have it."', "who has it"),
        (ANSWER, '"I gave it to Ben," said Mia.', "who has it"),
        (SWAP, "After a while Ben gave the kite back.", "who has it"),
        ("They played on until the sun stood low. ", "", "who has it"),
        ("the sun stood low", "the cows came home", "a sentence"),
        (" That night Mia dreamed of Ben and the market.", "", "a sentence"),
        ("That night Mia dreamed of Ben and the market.", "That night Mia", "a sentence"),
        ("the market.", "the market. The end.", "a sentence"),
        (STORY, "", "a sentence"),
    ],
)  # fmt: skip
def test_the_reader_names_the_first_slip(old, new, slip):
    assert old in STORY
    assert first_slip(STORY.replace(old, new)) == slip


def test_the_reader_finds_every_exchange_of_a_word_that_is_told_twice():
    for story in made(200):
        for kind in ("name", "toy", "colour"):
            told = {word: [found.start() for found in re.finditer(rf"\b{word}\b", story)] for word in WORDS[kind]}
            other = next(word for word in WORDS[kind] if not told[word])
            for word, places in told.items():
                for place in places if len(places) > 1 else ():
                    assert first_slip(story[:place] + other + story[place + len(word) :]), (story, word, place)


# As a text


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
        (EvalConfig, "page=a.html", "page=a.html and tales=true are both given: choose one"),
        (EvalConfig, "data.path=a", "data.path=a and tales=true are both given: choose one"),
        (EvalConfig, "probes=true", "probes=true and tales=true are both given: choose one"),
    ],
)
def test_what_means_nothing_is_refused_in_a_sentence(schema, typed, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        from_arguments(schema, ["tales=true", typed] if schema is EvalConfig else [typed])


def test_eval_prints_the_share_of_tales_that_are_kept_and_the_first_slips(tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
    model = random_gpt(vocab_size=tokenizer.n_vocab)
    save_checkpoint(tmp_path / "one", model=model, tokenizer=tokenizer, config=TrainConfig(model=model.config))
    config = EvalConfig(checkpoint=str(tmp_path / "one"), tales=True, device="cpu")
    assert score_checkpoints(config) == []
    shown = capsys.readouterr().out
    assert "tales       0 of 64 keep names" in shown and shown.endswith("\nfirst slip  a sentence 64\n")

    # A model that had learned the grammar, but for eight of its stories.
    stories = (
        made(56) + [STORY.replace("asked her aunt", "asked his aunt")] * 5 + [STORY.replace("red kite", "kite")] * 3
    )
    chunks = [Chunk(number, half) for number, story in enumerate(stories) for half in (story[:50], story[50:])]
    monkeypatch.setattr("cli.eval.generate", lambda *_, **__: iter(chunks))
    score_checkpoints(config)
    shown = capsys.readouterr().out
    assert "tales       56 of 64 keep names, pronouns, toys and who has them: 88%\n" in shown
    assert shown.endswith("first slip  a pronoun 5, a sentence 3\n")


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
        f"--- sample {n} of 3\n{visible(text)}\n" for n, text in enumerate(judged, 1)
    )
