"""Tokens to batches: the sequences of a step are a function of the seed and the step.

A sequence is block_size + 1 tokens in a row. All but the last are the inputs, all but the first their targets: each
input's target is the token after it.

    tokens    7 3 9 9 2 5 8 …     with a block_size of 4
    inputs    7 3 9 9
    targets     3 9 9 2           the last is the first input of the sequence that follows in the text

Within an epoch, which takes every sequence once, a batch is this, after `taken` sequences:

    offset, order = draw_epoch(seed, epoch, count, room)  # where the first of `count` sequences begins, and their order
    first_tokens = [offset + sequence * block_size for sequence in order[taken : taken + batch_size]]
    sequences = np.stack([tokens[first : first + block_size + 1] for first in first_tokens])  # (B, block_size + 1)
    inputs, targets = sequences[:, :-1], sequences[:, 1:]  # (B, T)

A step takes batch_size sequences. Nothing is remembered from one step to the next. So a resumed run continues exactly,
and the processes that share a step divide its sequences without communication.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

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


@dataclass(frozen=True)
class TokenDataset:
    """The tokens of a text, in sequences."""

    tokenizer: Encoding
    train: np.ndarray
    val: np.ndarray
    fingerprint: str
    """A string that changes with the text, its split and the tokenizer."""
    description: str
    """The text in words."""
    document_mask: bool = False
    """Whether attention is confined to each token's document."""
    block_size: int = 128
    """Inputs of a sequence."""
    batch_size: int = 16
    """Sequences in a step."""
    seed: int = 1
    """Seed of the order of the sequences."""
    ahead: int = 0
    """Sequences that were read beyond those of as many steps, after a change of batch_size."""
    more_tokens: tuple[str, ...] = ("more text",)
    """What may make the splits longer, in the words of an error."""

    def train_batch(self, step: int, start: int, stop: int) -> Batch:
        """Return a step's sequences from `start` to `stop`, a function of the seed and the step."""
        # Count the sequences of all steps: step 0 has numbers 0 to batch_size - 1, step 1 the next, and so on.
        first = step * self.batch_size + self.ahead
        first_tokens = [self.first_token(first + place) for place in range(start, stop)]
        return self.batch(sequences_at(self.train, first_tokens, self.block_size + 1))

    def first_token(self, number: int) -> int:
        """Return the position in the text at which the run's training sequence `number` begins."""
        # An epoch has one sequence fewer than fit, which leaves places for its offset. For example 7 sequences of 128
        # fit into 1,000 tokens; an epoch takes six, and its first one may begin at any of 1,000 - 768 = 232 tokens. A
        # text with room for one keeps it.
        count = max(1, len(self.train) // self.block_size - 1)
        epoch, place = divmod(number, count)
        # The last target of the last sequence is token offset + count * block_size, which must be in the text.
        room = len(self.train) - count * self.block_size
        offset, order = draw_epoch(self.seed, epoch, count, room)
        return offset + int(order[place]) * self.block_size

    def validation_batches(self, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yield sequences of the validation text, evenly spaced in it.

        One shorter sequence at the end has the rest. Without max_tokens every token but the first is a target once.
        """
        first_tokens, rest = self.validation_places(max_tokens)
        for first in range(0, len(first_tokens), batch_size):
            yield self.batch(sequences_at(self.val, first_tokens[first : first + batch_size], self.block_size + 1))
        # The rest is shorter than the others, so it fills a batch alone.
        if rest:
            yield self.batch(sequences_at(self.val, [len(self.val) - 1 - rest], rest + 1))  # (1, rest + 1)

    def validation_places(self, max_tokens: int | None) -> tuple[list[int], int]:
        """Return where the sequences of validation_batches() begin, and the length of the rest."""
        fitting = (len(self.val) - 1) // self.block_size  # sequences in the whole text
        count, rest = divmod(self.validation_tokens(max_tokens), self.block_size)
        return [(number * fitting // count) * self.block_size for number in range(count)], rest

    def validation_documents(self, max_tokens: int | None = None) -> np.ndarray:
        """Return the number of the document of each target of validation_batches(), (N,).

        Sequences with a gap between them may be of several documents, though no <|endoftext|> is among their targets.
        """
        first_tokens, rest = self.validation_places(max_tokens)
        places = np.add.outer(np.array(first_tokens, dtype=np.int64), np.arange(1, self.block_size + 1)).ravel()
        places = np.concatenate([places, np.arange(len(self.val) - rest, len(self.val))])
        return np.searchsorted(self.validation_ends, places, side="right")

    @cached_property
    def validation_ends(self) -> np.ndarray:
        """The places of <|endoftext|> in the validation split."""
        separators = np.flatnonzero(self.token_bytes() == 0)
        return np.flatnonzero(np.isin(self.val, separators))

    def validation_tokens(self, max_tokens: int | None) -> int:
        """Return the number of inputs, each with a target, of an evaluation of at most `max_tokens`.

        It reads one sequence at least.
        """
        targets = len(self.val) - 1
        if max_tokens is None or targets <= max_tokens:
            return targets
        return max(1, max_tokens // self.block_size) * self.block_size

    def batch(self, sequences: np.ndarray) -> Batch:
        """Return the batch of sequences (B, T + 1), with doc_starts if documents are masked."""
        return Batch.of(sequences, self.tokenizer.eot_token if self.document_mask else None)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    @property
    def targets_per_sequence(self) -> int:
        return self.block_size

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of each id's text, int64 (V,)."""
        return token_bytes(self.tokenizer)

    def check(self) -> None:
        """Raise DataError if a split is shorter than one sequence."""
        splits = {"training": self.train, "validation": self.val}
        for name, tokens in splits.items():
            if len(tokens) <= self.block_size:
                problem = f"the {name} split has {len(tokens):,} tokens, too few for model.block_size={self.block_size}"
                longest = min(len(self.train), len(self.val)) - 1
                shorter = f"set model.block_size={longest} or less, or " if longest > 0 else ""
                helps = {
                    "tokenizer=byte": all(self.has_bytes(split) for split in splits.values()),
                    "another data.val_fraction": len(self.train) + len(self.val) > 2 * self.block_size + 1,
                    # Of a validation text of its own, which is scored alone.
                    "a longer data.val_path": name == "validation",
                    "more text": name == "training" or "a longer data.val_path" not in self.more_tokens,
                }
                choices = [choice for choice in self.more_tokens if helps.get(choice, True)]
                raise DataError(problem, f"{shorter}choose {' or '.join(choices)}")

    def has_bytes(self, split: np.ndarray) -> bool:
        """Return whether a split is longer than a sequence if each of its bytes is a token."""
        # <|endoftext|> is a token of no byte.
        return len(split) > self.block_size or self.token_bytes()[split].clip(min=1).sum() > self.block_size


@lru_cache(maxsize=2)  # a batch may have the last sequences of one epoch and the first of the next
def draw_epoch(seed: int, epoch: int, count: int, room: int) -> tuple[int, np.ndarray]:
    """Return an epoch's offset, below `room`, and its sequences' numbers in random order.

    An epoch cuts the text into sequences that begin block_size tokens apart, and draws each once. First it skips a
    random number of tokens, its offset. So every epoch cuts at other places, and the tokens that one epoch misses at
    the ends of the text appear in others. The order takes 8 bytes of memory a sequence.
    """
    random = random_stream(seed, epoch)
    offset = int(random.random_sample() * room)
    return offset, random.permutation(count)


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


class Dataset(Protocol):
    """The sequences of a run: TokenDataset for a text, TaskData for a synthetic task."""

    @property
    def tokenizer(self) -> Encoding | None:
        """None for a task, which has no text."""

    @property
    def block_size(self) -> int:
        """The number of inputs of a sequence."""

    @property
    def fingerprint(self) -> str:
        """A string that changes with the data."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def targets_per_sequence(self) -> int:
        """The number of targets in each training sequence."""

    def check(self) -> None:
        """Raise SettingsError if a sequence is too long, or too short, for the data."""

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of each id's text, int64 (V,)."""

    def train_batch(self, step: int, start: int, stop: int) -> Batch:
        """Return a step's sequences from `start` to `stop`, always the same ones."""

    def validation_batches(self, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yield at most `max_tokens` inputs for validation, or one sequence; all if None.

        They are always the same ones.
        """

    def validation_tokens(self, max_tokens: int | None) -> int:
        """Return the number of inputs that validation_batches() yields."""
