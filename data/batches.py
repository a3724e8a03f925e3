"""Tokens to batches: which windows of the text a step trains on, as a function of seed and step."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from tiktoken import Encoding

from common.errors import DataError
from data.tokenizer import token_bytes


class Batch(NamedTuple):
    """What a pass reads and is to predict, int64 [rows, T] each."""

    inputs: np.ndarray
    targets: np.ndarray
    """What each place is to predict; -1 where nothing is scored."""
    doc_starts: np.ndarray | None = None
    """Where in its window the document of each token begins, if documents are kept apart."""


def random_stream(*key: object) -> np.random.RandomState:
    """Return a generator of random numbers that `key` determines, the same in every version of numpy."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4"))


class Batches:
    """Training batches of windows of block_size + 1 tokens, in an order set by `seed`.

    An epoch visits each of its `windows_per_epoch` windows once. They begin block_size tokens apart, the first at a
    place that differs between epochs. So the borders differ too, and what one epoch leaves out at the two ends of the
    text is seen in others. The order is in memory, 8 bytes a window.
    """

    def __init__(self, tokens: np.ndarray, *, block_size: int, batch_size: int, seed: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        # Of several windows one less than would fit, so that the first one has room to move.
        self.windows_per_epoch = max(1, len(tokens) // block_size - 1)
        self._epoch = lru_cache(maxsize=2)(self._order)  # a batch may reach over the end of an epoch

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows start to stop of the global batch of `step`, int64 [rows, block_size + 1].

        Inputs are [:, :-1], targets [:, 1:].
        """
        stop = self.batch_size if stop is None else stop
        windows = np.empty((stop - start, self.block_size + 1), dtype=np.int64)
        for row in range(stop - start):
            epoch, number = divmod(step * self.batch_size + start + row, self.windows_per_epoch)
            offset, order = self._epoch(epoch)
            place = offset + int(order[number]) * self.block_size
            windows[row] = self.tokens[place : place + self.block_size + 1]
        return windows

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return where the first window of an epoch begins, and the order of its windows, int64 [windows_per_epoch]."""
        random = random_stream(self.seed, epoch)
        count = self.windows_per_epoch
        return int(random.random_sample() * (len(self.tokens) - count * self.block_size)), random.permutation(count)


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Return where in its window the document of each token begins, int64 [rows, T] like `tokens`.

    A document begins with its <|endoftext|>, `separator`; one that began before the window is seen from place 0 on.
    """
    places = np.where(tokens == separator, np.arange(tokens.shape[-1]), 0)
    return np.maximum.accumulate(places, axis=-1)


def evaluation_batches(
    tokens: np.ndarray, *, block_size: int, batch_size: int, most: int | None = None
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
        yield tokens[None, whole * block_size : targets + 1].astype(np.int64)


@dataclass(frozen=True)
class TokenDataset:
    """A text as tokens, as training and evaluation read it."""

    tokenizer: Encoding
    train: np.ndarray
    val: np.ndarray
    fingerprint: str
    """Changes with the text, its split and the tokenizer."""
    description: str
    """The text in words."""
    document_mask: bool = False
    """Whether the documents of a window are kept apart."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    def targets(self, block_size: int) -> int:
        """Return the number of targets in a window."""
        return block_size

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of each id's text, int64 [n_vocab]."""
        return token_bytes(self.tokenizer)

    def validation_tokens(self, block_size: int, most: int | None = None) -> int:
        """Return how many tokens an evaluation of up to `most` targets reads."""
        return len(self.val) if most is None else min(most, len(self.val))

    def epochs(self, tokens: int) -> str:
        """Say how often training on so many tokens reads the text."""
        return f"{tokens / len(self.train):.2f} epochs"

    def check(self, block_size: int) -> None:
        """Raise DataError when a split is shorter than a window of block_size + 1 tokens."""
        for name, tokens in (("training", self.train), ("validation", self.val)):
            if len(tokens) <= block_size:
                problem = f"the {name} split has {len(tokens):,} tokens, too few for model.block_size={block_size}"
                raise DataError(problem, "choose a smaller one, more text, or another data.val_fraction")

    def training(self, block_size: int, batch_size: int, seed: int) -> Callable[[int, int, int], Batch]:
        """Return what gives rows start to stop of the batch of a step, a function of the seed and the step."""
        batches = Batches(self.train, block_size=block_size, batch_size=batch_size, seed=seed)
        return lambda step, start, stop: self.batch(batches.batch(step, start, stop))

    def validation(self, block_size: int, batch_size: int, most: int | None = None) -> Iterator[Batch]:
        """Yield the validation text as evaluation_batches()."""
        return map(self.batch, evaluation_batches(self.val, block_size=block_size, batch_size=batch_size, most=most))

    def batch(self, windows: np.ndarray) -> Batch:
        """Return windows of text, int64 [rows, T + 1], as inputs and the tokens that follow them."""
        inputs = windows[:, :-1]
        doc_starts = document_starts(inputs, self.tokenizer.eot_token) if self.document_mask else None
        return Batch(inputs, windows[:, 1:], doc_starts)
