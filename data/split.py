"""Which text is held out for validation: whole documents where there are many, else the tail of each."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from data.corpus import Corpus, Document

SPLITS = ("train", "val")

_NEAR = 1000  # a tail grows by at most so many characters to begin where a line, or else a word, does


class SplitPiece(NamedTuple):
    """A piece of text, its split, and whether a document of that split begins with it."""

    split: str
    begins: bool
    text: str


def split_corpus(corpus: Corpus, fraction: float) -> Iterator[SplitPiece]:
    """Yield all text of the corpus, each character once, with `fraction` of it in split "val".

    Of at least 2 / fraction documents every k-th is held out, k = 1 / fraction rounded; of fewer the last `fraction`
    of each. So the first 2 / fraction documents are read twice, the first time for their lengths.
    """
    enough, every = round(2 / fraction), round(1 / fraction)
    lengths = [sum(map(len, document)) for document in islice(_not_empty(corpus), enough)]
    for number, document in enumerate(_not_empty(corpus)):
        if len(lengths) == enough:
            split = "val" if number % every == every - 1 else "train"
            for place, text in enumerate(document):
                yield SplitPiece(split, place == 0, text)
        else:
            length = lengths[number] if number < len(lengths) else 0  # 0: it appeared meanwhile
            yield from _with_tail(document, length, round(length * fraction))


def _not_empty(corpus: Corpus) -> Iterator[Document]:
    for document in corpus.documents():
        texts = iter(document)
        for first in texts:
            yield chain([first], texts)
            break


def _with_tail(document: Document, length: int, tail: int) -> Iterator[SplitPiece]:
    """Yield the pieces of a document of `length` characters, about the last `tail` of them held out."""
    position, split, begins = 0, "train", True
    for text in document:
        if split == "train" and length - tail < position + len(text):
            near = max(length - tail - position, 0)
            earliest = max(near - min(_NEAR, tail // 2), 0)
            line, word = (text.rfind(mark, earliest, near) + 1 for mark in ("\n", " "))
            if cut := line or word or near:
                yield SplitPiece("train", begins, text[:cut])
            split, begins, text, position = "val", True, text[cut:], position + cut
        if text:
            yield SplitPiece(split, begins, text)
            begins = False
        position += len(text)
