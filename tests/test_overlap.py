"""The rules of data/overlap.py: the share of a validation text that the training text has too."""

from itertools import pairwise

import numpy as np
import pytest

from data import overlap
from data.overlap import BYTES, PASSAGE

END = 256


def documents(random: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    """Documents of random bytes."""
    return [random.integers(0, 256, random.integers(1, longest)).tolist() for _ in range(count)]


def tokens(texts: list[list[int]]) -> list[int]:
    return [token for text in texts for token in (END, *text)]


def spans(texts: list[list[int]]) -> list[tuple[tuple[int, ...], range]]:
    """All passages and short documents of a text, with their places in it without the separators."""
    text = [token for each in texts for token in each]
    runs = [range(begin, begin + PASSAGE) for begin in range(len(text) - PASSAGE + 1)]
    ends = np.cumsum([0, *map(len, texts)]).tolist()
    short = [range(begin, end) for begin, end in pairwise(ends) if end - begin < PASSAGE]
    return [(tuple(text[place] for place in places), places) for places in short + runs]


def by_hand(train: list[list[int]], val: list[list[int]]) -> float:
    known = {passage for passage, _ in spans(train)}
    within = {place for passage, places in spans(val) if passage in known for place in places}
    return len(within) / sum(map(len, val))


@pytest.mark.parametrize("seed", range(6))
def test_it_counts_the_tokens_in_passages_and_short_documents_of_both(seed, monkeypatch):
    monkeypatch.setattr(overlap, "BLOCK", 700)  # passages reach from one block into the next
    random = np.random.default_rng(seed)
    texts = documents(random, 60, 150)
    whole = [token for text in texts for token in text]
    begin = int(random.integers(0, len(whole) - 400))
    val = [*documents(random, 5, 90), texts[7], whole[begin : begin + 200], *documents(random, 2, 90), texts[3]]
    share = overlap.overlap(*(np.array(tokens(each), np.uint16) for each in (texts, val)), END)
    assert 0.1 < share < 0.9 and share == pytest.approx(by_hand(texts, val))


def test_a_text_has_the_passages_of_its_sentences_and_they_have_those_of_the_text(monkeypatch):
    monkeypatch.setattr(overlap, "BLOCK", 700)
    random = np.random.default_rng(2)
    sentences = documents(random, 400, 9)  # many separators in each block
    book = [[token for sentence in sentences for token in sentence]]
    one, other = (np.array(tokens(text), np.uint16) for text in (sentences, book))
    assert overlap.overlap(one, other, END) == overlap.overlap(other, one, END) == 1
    assert overlap.overlap(one, other[:0:-1], END) == 0


def test_one_sentence_of_bytes_is_no_passage_of_bytes():
    """50 tokens are a paragraph's beginning in a large vocabulary, and a few words in bytes."""
    random = np.random.default_rng(1)
    sentence = random.integers(0, 256, 80).tolist()
    texts = ([[*each, *sentence] for each in documents(random, 9, 400)] for _ in range(2))
    train, val = (np.array(tokens(text), np.uint16) for text in texts)
    short, long = (overlap.overlap(train, val, END, length) for length in (PASSAGE, BYTES))
    assert short > 0.2 and long == 0
    assert overlap.overlap(train, train, END, BYTES) == 1


def test_equal_texts_overlap_wholly_and_others_not_at_all():
    random = np.random.default_rng(0)
    one, other = (np.array(tokens(documents(random, 50, 200)), np.uint16) for _ in range(2))
    assert overlap.overlap(one, one, END) == 1 and overlap.overlap(one, other, END) < 0.01
    short = np.array(tokens([[1, 2], [3], [4, 5, 6]]), np.uint16)
    assert overlap.overlap(short[::-1][:0], short, END) == 0 and overlap.overlap(short, short, END) == 1


def test_of_no_text_nothing_is_shared():
    """Such as of the beginning of a long text of which nothing is held out."""
    text = np.array([END, 1, 2, 3])
    assert overlap.overlap(text, text[:0], END) == overlap.overlap(text[:0], text[:0], END) == 0
