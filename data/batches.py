"""Tokens to batches: the sequences of a step are a function of the seed and the step.

A sequence is block_size + 1 tokens in a row. All but the last are the inputs, all but the first their targets: each
input's target is the token after it. A step takes batch_size sequences. Nothing is remembered from one step to the
next. So a resumed run continues exactly, and the processes that share a step divide its sequences without
communication.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from tiktoken import Encoding

from common.errors import DataError
from data.tokenizer import token_bytes


class Batch(NamedTuple):
    """The inputs of a forward pass and their targets, int64 (B, T) each."""

    inputs: np.ndarray
    targets: np.ndarray
    """The token to predict at each position; -1 where nothing is scored."""
    doc_starts: np.ndarray | None = None
    """The position where each input's document begins, if documents are masked."""

    @classmethod
    def of(cls, sequences: np.ndarray, separator: int | None) -> "Batch":
        """Return the batch of sequences (B, T + 1), with doc_starts if given a `separator`."""
        inputs = sequences[:, :-1]
        targets = sequences[:, 1:]
        return cls(inputs, targets, None if separator is None else document_starts(inputs, separator))


StepBatch = Callable[[int, int, int], Batch]
"""batch(step, start, stop): the sequences `start` to `stop` of a step."""


@dataclass
class Batches:
    """The training sequences of every step, in an order set by `seed`.

    An epoch cuts the text into sequences that begin block_size tokens apart, and draws each once. First it skips a
    random number of tokens, its offset. So every epoch cuts at other places, and the tokens that one epoch misses at
    the ends of the text appear in others. The order takes 8 bytes of memory a sequence.
    """

    tokens: np.ndarray
    block_size: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        # An epoch leaves out one sequence: it may then begin at any of the first block_size tokens, or later if the
        # text has a remainder. A text with room for a single sequence keeps it.
        self.sequences_per_epoch = max(1, len(self.tokens) // self.block_size - 1)
        # Keep two epochs in memory: a batch may have the last sequences of one and the first of the next.
        self.epoch = lru_cache(maxsize=2)(self.draw_epoch)

    def batch(self, step: int, start: int, stop: int) -> np.ndarray:
        """Return a step's sequences from `start` to `stop`, int64 (B, block_size + 1)."""
        # Count the sequences of all steps: step 0 has numbers 0 to batch_size - 1, step 1 the next, and so on.
        first = step * self.batch_size
        first_tokens = [self.first_token(first + place) for place in range(start, stop)]
        return sequences_at(self.tokens, first_tokens, self.block_size + 1)

    def first_token(self, number: int) -> int:
        """Return the position in the text at which sequence `number` of the run begins."""
        epoch, place = divmod(number, self.sequences_per_epoch)
        offset, order = self.epoch(epoch)
        return offset + int(order[place]) * self.block_size

    def draw_epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """Return an epoch's offset, and its sequences' numbers in random order."""
        random = random_stream(self.seed, epoch)
        count = self.sequences_per_epoch
        # The last target of the last sequence is token offset + count * block_size, which must be in the text.
        room = len(self.tokens) - count * self.block_size
        offset = int(random.random_sample() * room)
        return offset, random.permutation(count)


def evaluation_batches(tokens: np.ndarray, block_size: int, batch_size: int, scored: int) -> Iterator[np.ndarray]:
    """Yield sequences with `scored` targets in all, int64 (B, T + 1), evenly spaced in the text.

    T is block_size; one shorter sequence at the end has the rest. With len(tokens) - 1 targets, every token but the
    first is a target once.
    """
    targets = len(tokens) - 1
    count, rest = divmod(scored, block_size)
    first_tokens = [number * (targets // block_size) // count * block_size for number in range(count)]
    for first in range(0, count, batch_size):
        yield sequences_at(tokens, first_tokens[first : first + batch_size], block_size + 1)
    # The rest is shorter than the others, so it fills a batch alone.
    if rest:
        yield sequences_at(tokens, [targets - rest], rest + 1)  # (1, rest + 1)


def sequences_at(tokens: np.ndarray, first_tokens: Iterable[int], length: int) -> np.ndarray:
    """Return `length` tokens from each position of `first_tokens` on, int64 (B, length)."""
    # Slices read their own tokens alone from the disk.
    return np.stack([tokens[first : first + length] for first in first_tokens]).astype(np.int64)


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Return the position where each token's document begins, int64 (B, T) as `tokens`.

    A document begins with its `separator`, <|endoftext|>; one that began before the sequence, at position 0.
    """
    # The running maximum repeats each separator's position up to the next one: [7, e, 5, e, 3] gives [0, 1, 1, 3, 3].
    places = np.where(tokens == separator, np.arange(tokens.shape[-1]), 0)
    return np.maximum.accumulate(places, axis=-1)


def random_stream(*key: object) -> np.random.RandomState:
    """Return a random generator seeded by a hash of `key`, the same in every numpy version."""
    # RandomState is frozen by numpy's policy, unlike default_rng().
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4"))


@dataclass(frozen=True)
class TokenDataset:
    """The tokens of a text, with the methods that training and evaluation call.

    TaskData of tasks.py has the same methods; there more of them depend on block_size.
    """

    tokenizer: Encoding
    train: np.ndarray
    val: np.ndarray
    fingerprint: str
    """A string that changes with the text, its split and the tokenizer."""
    description: str
    """The text in words."""
    document_mask: bool = False
    """Whether attention is confined to each token's document."""

    def training(
        self,
        block_size: int,
        batch_size: int,
        seed: int,
    ) -> StepBatch:
        """Return batch(step, start, stop): sequences `start` to `stop` of a step, deterministic."""
        batches = Batches(self.train, block_size, batch_size, seed)
        return lambda step, start, stop: Batch.of(batches.batch(step, start, stop), self.separator)

    def validation(
        self,
        block_size: int,
        batch_size: int,
        max_tokens: int | None = None,
    ) -> Iterator[Batch]:
        """Yield the validation text in batches, as evaluation_batches() orders it."""
        scored = self.validation_tokens(block_size, max_tokens)
        sequences = evaluation_batches(self.val, block_size, batch_size, scored)
        return (Batch.of(each, self.separator) for each in sequences)

    @property
    def separator(self) -> int | None:
        """The token before which attention ends, if documents are masked."""
        return self.tokenizer.eot_token if self.document_mask else None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    def targets(self, block_size: int) -> int:
        """Return the number of targets in a sequence."""
        return block_size

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of each id's text, int64 (V,)."""
        return token_bytes(self.tokenizer)

    def validation_tokens(self, block_size: int, max_tokens: int | None) -> int:
        """Return the number of targets that an evaluation of at most `max_tokens` scores."""
        targets = len(self.val) - 1
        if max_tokens is None or targets <= max_tokens:
            return targets
        return max(1, max_tokens // block_size) * block_size

    def check(self, block_size: int) -> None:
        """Raise DataError if a split is shorter than one sequence."""
        for name, tokens in (("training", self.train), ("validation", self.val)):
            if len(tokens) <= block_size:
                problem = f"the {name} split has {len(tokens):,} tokens, too few for model.block_size={block_size}"
                raise DataError(problem, "choose a smaller one, more text, tokenizer=byte or another data.val_fraction")
