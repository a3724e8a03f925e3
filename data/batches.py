"""Token shards to batches: which windows of the text a step trains on, as a function of seed and step.

An epoch visits its windows in a pseudo-random order that is computed, not stored: a keyed permutation of their numbers
(a Feistel network with cycle walking, Black and Rogaway 2002). So the batch of step N depends on the seed and N alone,
and 10^13 tokens need no more memory than a thousand.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from data.shards import Tokens
from errors import DataError

TokenStream = Tokens | np.ndarray  # integers [N]

_BLOCK = 1024  # windows whose places are computed together: one alone costs as much as a hundred


class Batch(NamedTuple):
    """What a pass reads and is to predict, int64 [rows, T] each."""

    inputs: np.ndarray
    targets: np.ndarray
    """What each place is to predict; -1 where nothing is scored."""
    starts: np.ndarray | None = None
    """Where in its window the document of each token begins, if documents are kept apart."""
    text: str | None = None
    """Which text of a mixture an evaluation's windows are of."""


class Batches:
    """Training batches of windows of block_size + 1 tokens, in an order set by `seed`.

    An epoch visits each of its `windows_per_epoch` windows once. They begin block_size tokens apart, the first at a
    place that differs between epochs. So the borders differ too, and what one epoch leaves out at the two ends of the
    text is seen in others.
    """

    def __init__(self, tokens: TokenStream, *, block_size: int, batch_size: int, seed: int) -> None:
        assert len(tokens) > block_size, "check_split comes first"
        self.tokens, self.block_size, self.batch_size, self.seed = tokens, block_size, batch_size, seed
        # Of several windows one less than would fit, so that the first one has room to move.
        self.windows_per_epoch = max(1, len(tokens) // block_size - 1)
        self._offsets = len(tokens) - self.windows_per_epoch * block_size
        self._places = lru_cache(maxsize=4)(self._find_places)

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows start to stop of the global batch of `step`, int64 [rows, block_size + 1].

        Inputs are [:, :-1], targets [:, 1:]. A batch may span the end of an epoch.
        """
        stop = self.batch_size if stop is None else stop
        assert 0 <= start <= stop <= self.batch_size and step >= 0
        windows = np.empty((stop - start, self.block_size + 1), dtype=np.int64)
        for row in range(stop - start):
            windows[row] = self.window(step * self.batch_size + start + row)
        return windows

    def window(self, number: int) -> np.ndarray:
        """Return window `number`, counted over all epochs from 0, integers [block_size + 1]."""
        epoch, number = divmod(number, self.windows_per_epoch)
        place = self._places(epoch, number // _BLOCK)[number % _BLOCK]
        return self.tokens[place : place + self.block_size + 1]

    def _find_places(self, epoch: int, block: int) -> list[int]:
        """Return the first tokens of the windows that an epoch visits as number block × _BLOCK and following."""
        keys = np.frombuffer(hashlib.sha256(f"{self.seed} {epoch}".encode()).digest(), dtype="<u8")
        offset = int(keys[0]) % self._offsets
        numbers = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.windows_per_epoch), dtype=np.uint64)
        order = permute(numbers, self.windows_per_epoch, keys[1:])
        return [offset + window * self.block_size for window in order.tolist()]


def permute(numbers: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Return where a keyed permutation of 0 … size - 1 takes each of `numbers`, uint64 [N] to uint64 [N].

    Numbers that leave the range are permuted again until they are back in it, which is a permutation too.
    """
    root = np.uint64(math.isqrt(size - 1) + 1)  # the network permutes 0 … root² - 1, and root² >= size
    numbers = _network(numbers, root, keys)
    while (outside := numbers >= size).any():
        numbers[outside] = _network(numbers[outside], root, keys)
    return numbers


def _network(numbers: np.ndarray, root: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Apply Feistel rounds, two for each key, to the two digits of a number in base `root`."""
    left, right = np.divmod(numbers, root)
    for key in [*keys, *~keys]:
        mixed = right + key
        for factor in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95):
            mixed = mixed * np.uint64(factor)  # modulo 2^64, which spreads low bits up
            mixed ^= mixed >> np.uint64(32)  # and high ones down
        left, right = right, (left + mixed % root) % root
    return left * root + right


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Return where in its window the document of each token begins, int64 [rows, T] like `tokens`.

    A document begins with its <|endoftext|>, `separator`; one that began before the window is seen from place 0 on.
    """
    places = np.where(tokens == separator, np.arange(tokens.shape[-1]), 0)
    return np.maximum.accumulate(places, axis=-1)


def evaluation_batches(
    tokens: TokenStream, *, block_size: int, batch_size: int, most: int | None = None
) -> Iterator[np.ndarray]:
    """Yield windows in the order of the text, int64 [rows, length + 1]; each token but the first is a target once.

    `length` is block_size, except in a last batch of one shorter window for what remains. Of more than `most` targets,
    only so many whole windows, spread evenly.
    """
    targets = len(tokens) - 1
    whole = kept = targets // block_size
    if most is not None and targets > most:
        kept = targets = max(1, most // block_size)  # and no rest
    for first in range(0, kept, batch_size):
        places = [number * whole // kept * block_size for number in range(first, min(first + batch_size, kept))]
        yield np.stack([tokens[place : place + block_size + 1] for place in places]).astype(np.int64)
    if whole * block_size < targets:
        yield np.asarray(tokens[whole * block_size : targets + 1]).astype(np.int64)[None, :]


def check_split(tokens: TokenStream, block_size: int, split_name: str) -> None:
    """Raise DataError when the split is shorter than one window of block_size + 1 tokens."""
    if len(tokens) <= block_size:
        raise DataError(
            f"The {split_name} split has {len(tokens):,} tokens, but model.block_size={block_size} needs at least "
            f"{block_size + 1:,}: choose a smaller model.block_size, more text, a larger data.val_fraction if it is "
            "the validation split, or a tokenizer with a smaller vocabulary."
        )
