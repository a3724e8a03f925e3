"""A text as tokens, as training and evaluation read it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from data.batches import Batch, Batches, check_split, document_starts, evaluation_batches
from data.shards import Tokens
from data.tokenizer import token_bytes


@dataclass(frozen=True)
class PreparedData:
    """A corpus as tokens."""

    tokenizer: Encoding
    train: Tokens
    val: Tokens
    directory: Path
    """Where the shards are."""
    description: str
    """The corpus in words."""
    document_mask: bool = False
    """Whether the documents of a window are kept apart."""

    @property
    def name(self) -> str:
        """What changes with the text, its split and the tokenizer."""
        return self.directory.name

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    def targets(self, block_size: int) -> int:
        """Return the number of targets in a window."""
        return block_size

    def token_bytes(self) -> np.ndarray:
        """Return the length in bytes of each id's text, int64 [n_vocab]."""
        return token_bytes(self.tokenizer)

    def held_out_tokens(self, block_size: int, most: int) -> int:
        """Return how many tokens an evaluation of up to `most` targets reads."""
        return min(most, len(self.val))

    def epochs(self, tokens: int) -> str:
        """Say how often training on so many tokens reads the text."""
        return f"{tokens / len(self.train):.2f} epochs"

    def check(self, block_size: int) -> None:
        """Raise DataError when a split is shorter than a window."""
        check_split(self.train, block_size, "training")
        check_split(self.val, block_size, "validation")

    def training(self, block_size: int, batch_size: int, seed: int) -> Callable[[int, int, int], Batch]:
        """Return what gives rows start to stop of the batch of a step, a function of the seed and the step."""
        batches = Batches(self.train, block_size=block_size, batch_size=batch_size, seed=seed)
        return lambda step, start, stop: self.batch(batches.batch(step, start, stop))

    def held_out(self, block_size: int, batch_size: int, most: int | None = None) -> Iterator[Batch]:
        """Yield the validation text as evaluation_batches()."""
        return map(self.batch, evaluation_batches(self.val, block_size=block_size, batch_size=batch_size, most=most))

    def batch(self, windows: np.ndarray) -> Batch:
        """Return windows of text, int64 [rows, T + 1], as inputs and the tokens that follow them."""
        inputs = windows[:, :-1]
        starts = document_starts(inputs, self.tokenizer.eot_token) if self.document_mask else None
        return Batch(inputs, windows[:, 1:], starts)
