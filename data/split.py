"""Which text is held out for validation: whole documents where enough are short and unlike the others, else tails."""

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.corpus import Corpus

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
        known: list[tuple[int, int, np.ndarray]] = []  # documents of a single piece: hash, length, lines
        total = 0
        with tqdm(total=corpus.size, desc="choosing the split", unit="B", unit_scale=True, disable=None) as bar:
            for whole, texts in _documents(corpus):
                length = 0
                for text in texts:
                    length += len(text)
                    bar.update(len(text.encode()))
                if whole and total < LOOKED_AT:
                    known.append((_hash(whole), length, _telling_lines(whole)))
                self.lengths.append(length)
                total += length
                if total - length < LOOKED_AT <= total and self._choose(known, total * fraction):
                    return
        self._choose(known, total * fraction)

    def _choose(self, known: list[tuple[int, int, np.ndarray]], wanted: float) -> bool:
        """Set the rule for whole documents; False where they are too few for `wanted` characters."""
        seen, times = np.unique(
            np.concatenate([np.zeros(0, np.uint32), *(own for *_, own in known)]), return_counts=True
        )
        short = [one for one in known if one[1] <= wanted * LONGEST_SHARE]
        copies = {
            number
            for number, _, own in short
            if (times[np.searchsorted(seen, own)] > 1).sum() > COPIED_LINES * len(own)
        }
        for self.copies in (copies, set()):
            free = sorted((number, length) for number, length, _ in short if number not in self.copies)
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
                yield from _cut(texts, 0 if number <= self.highest and number not in self.copies else math.inf, 0)
            else:
                tail = round(length * self.fraction)
                yield from _cut(texts, length - tail, min(_NEAR, tail // 2))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _telling_lines(text: str) -> np.ndarray:
    """Return a number for each different line that is long enough to say where it is from, uint32 [N]."""
    lines = {line for line in map(str.strip, text.split("\n")) if len(line) >= _TELLING}
    return np.unique(np.array([zlib.crc32(line.encode()) for line in lines], dtype=np.uint32))


def _documents(corpus: Corpus) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the text of each document that is not empty, "" where it has several pieces, and its pieces."""
    for document in corpus.documents():
        texts = iter(document)
        if beginning := list(islice(texts, 2)):
            yield beginning[0] if len(beginning) == 1 else "", chain(beginning, texts)


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
