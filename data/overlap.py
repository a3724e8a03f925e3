"""The share of a validation text that the training text has too."""

from collections.abc import Iterator

import numpy as np
import tiktoken

PASSAGE = 50
"""Tokens in a row that two texts rarely share by chance (Lee et al. 2022, "Deduplicating training data makes language
models better", section 4.1)."""
BYTES = 200
"""As many where a token is a byte: the length of some 50 tokens of a larger vocabulary."""
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2^64
INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))
BLOCK = 1 << 22  # tokens whose hashes are in memory at a time
FILTER = (1 << 24) - 1  # the bits of a hash that sort out most passages


def passage_length(tokenizer: tiktoken.Encoding) -> int:
    """Return the number of a tokenizer's tokens in a passage."""
    return BYTES if tokenizer.n_vocab == 257 else PASSAGE  # 256 bytes and the separator


def overlap(train: np.ndarray, val: np.ndarray, separator: int, length: int = PASSAGE) -> float:
    """Return the share of `val`, token ids (N,), that lies in passages which `train` has too.

    A passage has `length` tokens, across the ends of documents; a whole document that is shorter is one too. The
    `separator` before each document does not count, so that a text and its sentences have the same passages. A million
    tokens of `train` take 0.2 s.
    """
    if len(val) == 0:  # such as the beginning of a long text, of which nothing is held out
        return 0.0
    # The passages of the validation text: hashes, first and last tokens.
    starts, ends, hashes = (np.concatenate(parts) for parts in zip(*passages(val, separator, length), strict=True))
    wanted = np.unique(hashes)
    may_be = np.zeros(FILTER + 1, dtype=bool)
    may_be[(wanted & np.uint64(FILTER)).astype(np.int64)] = True

    # Those of them that the training text has.
    found = [np.empty(0, np.uint64)]
    for _, _, seen in passages(train, separator, length):
        seen = seen[may_be[(seen & np.uint64(FILTER)).astype(np.int64)]]
        found.append(np.intersect1d(seen, wanted))
    shared = np.isin(hashes, np.concatenate(found))

    # The tokens within them: each begins at +1 and ends at -1 of a running sum.
    edges = np.zeros(len(val) + 1, dtype=np.int64)
    np.add.at(edges, starts[shared], 1)
    np.add.at(edges, ends[shared], -1)
    is_text = val != separator
    return float((edges.cumsum()[:-1] > 0)[is_text].mean()) if is_text.any() else 0.0


def passages(tokens: np.ndarray, separator: int, length: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the passages of a text in groups: their starts, ends and hashes, (P,) each."""
    for first in range(0, len(tokens), BLOCK):
        # A passage may reach into the next block, where every other token may be a separator.
        block = np.asarray(tokens[first : first + BLOCK + 2 * length])
        is_mark = block == separator
        places = np.flatnonzero(~is_mark)  # of the tokens of documents, (N,)
        # hash(s, e) = (sums[e] - sums[s]) · BASE^-s, so that it does not depend on the place.
        powers = np.multiply.accumulate(np.r_[np.uint64(1), np.full(len(places), BASE)])
        inverses = np.multiply.accumulate(np.r_[np.uint64(1), np.full(len(places), INVERSE)])
        sums = np.r_[np.uint64(0), np.cumsum((block[places].astype(np.uint64) + np.uint64(1)) * powers[:-1])]
        # Starts and ends are counted in `places`: first those of `length` tokens.
        starts = np.arange(np.searchsorted(places[: max(0, len(places) - length + 1)], BLOCK))
        ends = starts + length
        # Short documents, whole ones.
        marks = np.r_[np.flatnonzero(is_mark), [len(block)] * (first + len(block) == len(tokens))]
        begins = np.searchsorted(places, marks[:-1])
        stops = np.searchsorted(places, marks[1:])
        is_short = (begins < stops) & (stops < begins + length) & (marks[:-1] < BLOCK)
        starts = np.r_[starts, begins[is_short]].astype(np.int64)
        ends = np.r_[ends, stops[is_short]].astype(np.int64)
        yield first + places[starts], first + places[ends - 1] + 1, (sums[ends] - sums[starts]) * inverses[starts]
