"""Which text is held out for validation: whole documents where enough are short and unlike the others, else tails."""

import hashlib
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.corpus import Corpus, Document

SPLITS = ("train", "val")

LOOKED_AT = 64_000_000  # characters of a large corpus that its split is made of
LONGEST_SHARE = 1 / 30  # of the validation text that a single document may be
COPIED_LINES = 0.15  # from this share of telling lines that other documents have too a document is a copy
_TELLING = 16  # characters from which a line says where it is from
_NEAR = 1000  # a tail grows by at most so many characters to begin where a line, or else a word, does


class SplitPiece(NamedTuple):
    """A piece of text, its split, and whether a document of that split begins with it."""

    split: str
    begins: bool
    text: str


class Split:
    """A corpus with `fraction` of its text held out; making one reads the text for the first time.

    A document is held out when the hash of its text is low, so neither names nor order matter. Always trained on are
    documents longer than 1/30 of the validation text, and copies: those that share 15% of their lines with others, as
    families of files or what is little but a licence. So validation text has no near-copies in the training text, and
    no document decides its loss. Of the standard library 4% are held out: 73 files in Python 3.11, 69 in 3.12, 74 in
    3.13, the longest 3.2% of them, none with more than 5% of its runs of 8 words in common with a training file.

    Where such documents are less than twice `fraction` of the text, the last `fraction` of each document is held out.
    Of a longer corpus the first 64 million characters are looked at; after them only exact copies are told.
    """

    def __init__(self, corpus: Corpus, fraction: float) -> None:
        self.corpus, self.fraction = corpus, fraction
        self.longest = 0  # characters of a document that is held out whole; 0 where tails are
        lengths: list[int] = []
        numbers: dict[int, int] = {}  # of the documents that have a single piece: which hash they have
        lines: list[np.ndarray] = []
        total = 0
        with tqdm(total=corpus.size, desc="choosing the split", unit="B", unit_scale=True, disable=None) as bar:
            for document in _not_empty(corpus):
                texts = iter(document)
                length, first = 0, next(texts)
                for text in chain([first], texts):
                    length += len(text)
                    bar.update(len(text.encode()))
                if length == len(first) and total < LOOKED_AT:
                    numbers[len(lengths)] = _hash(first)
                    lines.append(_telling_lines(first))
                lengths.append(length)
                total += length
                if total - length < LOOKED_AT <= total and self._choose(lengths, numbers, lines):
                    break
        if total < LOOKED_AT:
            self._choose(lengths, numbers, lines)
        self.lengths = lengths

    def _choose(self, lengths: list[int], numbers: dict[int, int], lines: list[np.ndarray]) -> bool:
        """Set the rule for whole documents from those known so far; False where there are too few."""
        wanted = self.fraction * sum(lengths)
        longest = int(wanted * LONGEST_SHARE)
        seen, times = np.unique(np.concatenate([*lines, np.zeros(0, np.uint32)]), return_counts=True)
        copies = {
            number
            for number, own in zip(numbers.values(), lines, strict=True)
            if (times[np.searchsorted(seen, own)] > 1).sum() > COPIED_LINES * len(own)
        }
        free = sorted(
            (number, lengths[place])
            for place, number in numbers.items()
            if number not in copies and lengths[place] <= longest
        )
        if not free or sum(length for _, length in free) < 2 * wanted:
            return False
        below = int(np.searchsorted(np.cumsum([length for _, length in free]), wanted))
        self.longest, self.highest, self.copies = longest, free[below][0], copies
        return True

    def __iter__(self) -> Iterator[SplitPiece]:
        """Yield all text of the corpus, each character once."""
        for number, document in enumerate(_not_empty(self.corpus)):
            if self.longest:
                texts = iter(document)
                first, second = next(texts), next(texts, "")
                is_val = not second and len(first) <= self.longest and self._is_low(_hash(first))
                for place, text in enumerate(chain([first, second] if second else [first], texts)):
                    yield SplitPiece("val" if is_val else "train", place == 0, text)
            else:
                length = self.lengths[number] if number < len(self.lengths) else 0  # 0: it appeared meanwhile
                yield from _with_tail(document, length, round(length * self.fraction))

    def _is_low(self, number: int) -> bool:
        return number <= self.highest and number not in self.copies


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _telling_lines(text: str) -> np.ndarray:
    """Return a number for each different line that is long enough to say where it is from, uint32 [N]."""
    lines = {line for line in map(str.strip, text.split("\n")) if len(line) >= _TELLING}
    return np.unique(np.array([zlib.crc32(line.encode()) for line in lines], dtype=np.uint32))


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
