"""Which text is held out for validation: whole documents where enough are short and unlike the others, else tails."""

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.corpus import Corpus

SPLITS = ("train", "val")

LOOKED_AT = 64_000_000  # characters of a large corpus that its split is made of, and of a small one kept in memory
LONGEST_SHARE = 1 / 30  # of the validation text that a single document may be
COPIED_LINES = 0.15  # from this share of telling lines that other documents have too a document is a copy
_TELLING = 16  # characters from which a line says where it is from
_WINDOW = 1 << 14  # characters of which a sample has the first few
_NEAR = 1000  # a tail grows by at most so many characters to begin where a line, or else a word, does


class SplitPiece(NamedTuple):
    """A piece of text, its split, and whether a document of that split begins with it."""

    split: str
    begins: bool
    text: str


class Split:
    """A corpus with `fraction` of its text held out; making one reads the text for the first time.

    Held out are the documents whose text has the lowest hash, of those no longer than 1/30 of the validation text that
    share at most 15% of their lines with others. So names and order do not matter, no document decides the loss, and
    files of a family or under a long licence are trained on. In the standard libraries of Python 3.11 to 3.13 this is
    70 to 76 files, the longest 3.2% of the text, none with more than 10% of its runs of 8 words in a training file.

    Where the unlike ones are less than twice `fraction` of the text, likeness does not count; where the short ones are
    less than that, the last `fraction` of each document is held out. Of a corpus beyond 64 million characters these
    are looked at, and the rest follows the same hash and length.
    """

    def __init__(self, corpus: Corpus, fraction: float) -> None:
        self.corpus, self.fraction = corpus, fraction
        self.longest = 0  # characters of a document that is held out whole; 0 where tails are
        self.lengths: list[int] = []
        self.total = 0
        known: list[tuple[int, int, int]] = []  # documents of a single piece: hash, length, number of lines
        lines = array("I")  # of all of them
        kept: list[list[str]] = []
        with tqdm(total=corpus.size, desc="choosing the split", unit="B", unit_scale=True, disable=None) as bar:
            for whole, texts in _documents(corpus):
                length, document = 0, []
                for text in texts:
                    length += len(text)
                    if self.total + length <= LOOKED_AT:
                        document.append(text)
                    bar.update(len(text.encode()))
                if whole and self.total < LOOKED_AT:
                    own = _telling_lines(whole)
                    lines.extend(own)
                    known.append((_hash(whole), length, len(own)))
                self.lengths.append(length)
                kept.append(document)
                self.total += length
                if self.total - length < LOOKED_AT <= self.total and self._choose(known, lines, self.total * fraction):
                    return
        if self.total <= LOOKED_AT:  # is read once
            self.corpus = replace(corpus, documents=lambda: iter(kept))
        self._choose(known, lines, self.total * fraction)

    def _choose(self, known: list[tuple[int, int, int]], lines: array, wanted: float) -> bool:
        """Set the rule for whole documents; False where they are too few for `wanted` characters."""
        _, places, times = np.unique(np.array(lines, dtype=np.uint32), return_inverse=True, return_counts=True)
        owners = np.repeat(np.arange(len(known)), [own for *_, own in known])
        shared = np.bincount(owners, times[places] > 1, minlength=len(known)).tolist()
        short = [(*one, copied) for one, copied in zip(known, shared, strict=True) if one[1] <= wanted * LONGEST_SHARE]
        copies = {number for number, _, own, copied in short if copied > COPIED_LINES * own}
        for self.copies in (copies, set()):
            free = sorted((number, length) for number, length, *_ in short if number not in self.copies)
            sizes = np.cumsum([0, *(length for _, length in free)])
            if sizes[-1] >= 2 * wanted > 0:
                self.longest = int(wanted * LONGEST_SHARE)
                self.highest = free[int(np.searchsorted(sizes[1:], wanted))][0]
                return True
        return False

    def __iter__(self) -> Iterator[SplitPiece]:
        """Yield all text of the corpus, each character once."""
        for (whole, texts), length in zip(_documents(self.corpus), chain(self.lengths, repeat(0)), strict=False):
            if self.longest:
                number = _hash(whole) if 0 < len(whole) <= self.longest else self.highest + 1
                split = "val" if number <= self.highest and number not in self.copies else "train"
                yield from (SplitPiece(split, not place, text) for place, text in enumerate(texts))
            else:
                tail = round(length * self.fraction)
                yield from _cut(texts, length - tail, min(_NEAR, tail // 2))

    def sample(self, most: int) -> Iterator[str]:
        """Yield about `most` characters to train on, spread evenly over the text, of a large corpus its beginning."""
        size, position = min(self.total, LOOKED_AT), 0
        window, kept = (_WINDOW, _WINDOW * most // size) if most < size else (size, size)
        for split, _, text in self:
            if split == "train":
                for start in range(-(position % window), len(text), window):
                    if part := text[max(start, 0) : max(start + kept, 0)]:
                        yield part
                if (position := position + len(text)) >= size:
                    return


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _telling_lines(text: str) -> set[int]:
    """Return a number for each different line that is long enough to say where it is from."""
    return {zlib.crc32(line.encode()) for line in map(str.strip, text.split("\n")) if len(line) >= _TELLING}


def _documents(corpus: Corpus) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the text of each document that is not empty, "" where it has several pieces, and its pieces."""
    for document in corpus.documents():
        texts = iter(document)
        if first := next(texts, ""):
            second = next(texts, "")
            yield ("", chain((first, second), texts)) if second else (first, (first,))


def _cut(texts: Iterable[str], kept: float, most: int) -> Iterator[SplitPiece]:
    """Yield the pieces of a document, held out after `kept` characters or, for a whole line or word, `most` before."""
    position, split, begins = 0, "train", True
    for text in texts:
        if split == "train" and kept < position + len(text):
            near = max(int(kept) - position, 0)
            earliest = max(near - most, 0)
            line, word = (text.rfind(mark, earliest, near) + 1 for mark in ("\n", " "))
            if cut := line or word or near:
                yield SplitPiece("train", begins, text[:cut])
            split, begins, text, position = "val", True, text[cut:], position + cut
        if text:
            yield SplitPiece(split, begins, text)
            begins = False
        position += len(text)
