"""Which text is held out for validation: whole documents where there are many, else the tail of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from data.corpus import Corpus, Document

SPLITS = ("train", "val")

_NEAR = 1000  # most characters that a tail grows by, to begin where a line does


class SplitPiece(NamedTuple):
    """A piece of text, the split it belongs to, and whether a document of that split begins with it."""

    split: str
    begins: bool
    text: str


def split_corpus(corpus: Corpus, fraction: float) -> Iterator[SplitPiece]:
    """All text of the corpus, each character once, with `fraction` of it in split "val".

    Where there are at least 2 / fraction documents every k-th is held out, k = 1 / fraction rounded;
    where there are fewer the last `fraction` of each. The first so many documents are read twice,
    once for their lengths, so that none need be kept in memory.
    """
    enough = round(2 / fraction)
    every = round(1 / fraction)
    lengths = list(islice(filter(None, map(_length, corpus.documents())), enough))
    whole_documents = len(lengths) == enough
    for number, document in enumerate(_not_empty(corpus)):
        if whole_documents:
            yield from _whole(document, "val" if number % every == every - 1 else "train")
        else:
            length = lengths[number] if number < len(lengths) else 0  # 0: it appeared meanwhile
            yield from _with_tail(document, length, round(length * fraction))


def _length(document: Document) -> int:
    return sum(map(len, document))


def _not_empty(corpus: Corpus) -> Iterator[Document]:
    for document in corpus.documents():
        texts = iter(document)
        first = next(texts, None)
        if first is not None:
            yield chain([first], texts)


def _whole(document: Document, split: str) -> Iterator[SplitPiece]:
    for number, text in enumerate(document):
        yield SplitPiece(split, number == 0, text)


def _with_tail(document: Document, length: int, tail: int) -> Iterator[SplitPiece]:
    """The pieces of a document of `length` characters, about the last `tail` of them held out."""
    position, split, begins = 0, "train", True
    for text in document:
        if split == "train" and length - tail < position + len(text):
            near = max(length - tail - position, 0)
            cut = _line_start(text, near, earliest=near - min(_NEAR, tail // 2))
            if cut:
                yield SplitPiece("train", begins, text[:cut])
            split, begins, text, position = "val", True, text[cut:], position + cut
        if text:
            yield SplitPiece(split, begins, text)
            begins = False
        position += len(text)


def _line_start(text: str, near: int, earliest: int) -> int:
    """The last place from `earliest` to `near` where a line, or else a word, begins; else `near` itself."""
    for mark in ("\n", " "):
        found = text.rfind(mark, max(earliest, 0), near)
        if found >= 0:
            return found + 1
    return near
