"""Tokens to batches: the sequences of a step are a function of the seed and the step."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from tiktoken import Encoding

from common.errors import DataError
from data.tokenizer import token_bytes


class Batch(NamedTuple):
    """The inputs of a forward pass and their targets, int64 [rows, T] each."""

    inputs: np.ndarray
    targets: np.ndarray
    """The token to predict at each position; -1 where nothing is scored."""
    doc_starts: np.ndarray | None = None
    """The position where each token's document begins, if documents are masked."""


def random_stream(*key: object) -> np.random.RandomState:
    """Return a random generator seeded by `key`; its numbers are the same in every numpy version."""
    # RandomState is frozen by numpy's policy, unlike default_rng().
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4"))


class Batches:
    """Training batches of sequences of block_size + 1 tokens, in an order set by `seed`.

    The sequences of an epoch begin block_size tokens apart, and each is drawn once. Every epoch has an offset of its
    own: sequence borders move, and tokens that one epoch misses at either end of the text appear in others. The order
    takes 8 bytes of memory a sequence.
    """

    def __init__(self, tokens: np.ndarray, *, block_size: int, batch_size: int, seed: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        # One sequence fewer than fits: slack for the offset of each epoch.
        self.sequences_per_epoch = max(1, len(tokens) // block_size - 1)
        # Two epochs, because a batch may reach over the end of one.
        self._epoch = lru_cache(maxsize=2)(self._order)

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows start to stop of the global batch of `step`, int64 [rows, block_size + 1].

        Inputs are [:, :-1], targets [:, 1:].
        """
        rows = np.arange(start, self.batch_size if stop is None else stop)
        # Sequences are numbered through all epochs: a row's number says its epoch and its place in that epoch's order.
        epochs, numbers = np.divmod(step * self.batch_size + rows, self.sequences_per_epoch)
        starts = np.empty_like(numbers)  # [rows], the first token of each
        for epoch in np.unique(epochs):  # mostly one
            offset, order = self._epoch(int(epoch))
            in_epoch = epochs == epoch
            starts[in_epoch] = offset + order[numbers[in_epoch]] * self.block_size
        return sequences_at(self.tokens, starts, self.block_size + 1)

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return the offset of an epoch's first sequence, and the permutation of its sequences."""
        random = random_stream(self.seed, epoch)
        count = self.sequences_per_epoch
        slack = len(self.tokens) - count * self.block_size
        offset = int(random.random_sample() * slack)
        return offset, random.permutation(count)


def sequences_at(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Return the `length` tokens from each of `starts` on, int64 [rows, length]."""
    # A view of all windows [len(tokens) - length + 1, length]: only the chosen rows are read and copied.
    return sliding_window_view(tokens, length)[starts].astype(np.int64)


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Return the position where each token's document begins, int64 [rows, T] like `tokens`.

    A document begins with its <|endoftext|>, `separator`; if it began before the sequence, at position 0.
    """
    # The running maximum carries each separator's position on to the next: [7, e, 5, e, 3] gives [0, 1, 1, 3, 3].
    places = np.where(tokens == separator, np.arange(tokens.shape[-1]), 0)
    return np.maximum.accumulate(places, axis=-1)


def evaluation_batches(
    tokens: np.ndarray, *, block_size: int, batch_size: int, most: int | None = None
) -> Iterator[np.ndarray]:
    """Yield sequences in the order of the text, int64 [rows, length + 1].

    Each token but the first is a target once. `length` is block_size; one shorter sequence at the end has the rest.
    If the text has more than `most` targets, whole sequences with `most` targets are spread evenly over it.
    """
    targets = len(tokens) - 1
    whole = targets // block_size
    if most is None or targets <= most:
        starts = np.arange(whole) * block_size
        rest = targets % block_size
    else:
        count = max(1, most // block_size)
        starts = np.arange(count) * whole // count * block_size
        rest = 0
    for first in range(0, len(starts), batch_size):
        yield sequences_at(tokens, starts[first : first + batch_size], block_size + 1)
    # In a batch by itself, as it is shorter.
    if rest:
        yield tokens[None, -rest - 1 :].astype(np.int64)


@dataclass(frozen=True)
class TokenDataset:
    """The tokens of a text, with the methods that training and evaluation call."""

    tokenizer: Encoding
    train: np.ndarray
    val: np.ndarray
    fingerprint: str
    """A string that changes with the text, its split and the tokenizer."""
    description: str
    """The text in words."""
    document_mask: bool = False
    """Whether attention is confined to each token's document."""

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    def targets(self, block_size: int) -> int:
        """Return the number of targets in a sequence."""
        return block_size

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of each id's text, int64 [n_vocab]."""
        return token_bytes(self.tokenizer)

    def validation_tokens(self, block_size: int, most: int | None = None) -> int:
        """Return the number of tokens that an evaluation of up to `most` targets reads."""
        return len(self.val) if most is None else min(most, len(self.val))

    def epochs(self, tokens: int) -> str:
        """Format a number of tokens as epochs of the training text."""
        return f"{tokens / len(self.train):.2f} epochs"

    def check(self, block_size: int) -> None:
        """Raise DataError if a split is shorter than a sequence of block_size + 1 tokens."""
        for name, tokens in (("training", self.train), ("validation", self.val)):
            if len(tokens) <= block_size:
                problem = f"the {name} split has {len(tokens):,} tokens, too few for model.block_size={block_size}"
                raise DataError(problem, "choose a smaller one, more text, or another data.val_fraction")

    def training(self, block_size: int, batch_size: int, seed: int) -> Callable[[int, int, int], Batch]:
        """Return batch(step, start, stop), which gives rows of a step, deterministic in (seed, step)."""
        batches = Batches(self.train, block_size=block_size, batch_size=batch_size, seed=seed)
        return lambda step, start, stop: self.batch(batches.batch(step, start, stop))

    def validation(self, block_size: int, batch_size: int, most: int | None = None) -> Iterator[Batch]:
        """Yield the validation text's batches, as evaluation_batches() orders them."""
        return map(self.batch, evaluation_batches(self.val, block_size=block_size, batch_size=batch_size, most=most))

    def batch(self, sequences: np.ndarray) -> Batch:
        """Return sequences, int64 [rows, T + 1], as inputs and as targets, one token later."""
        inputs = sequences[:, :-1]
        doc_starts = document_starts(inputs, self.tokenizer.eot_token) if self.document_mask else None
        return Batch(inputs, sequences[:, 1:], doc_starts)
