"""Several texts mixed by weight: which of them each training window is of, as a function of the window's number."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from data.batches import Batch, Batches
from data.prepared import PreparedData
from data.shards import join_tokens
from data.split import SPLITS
from errors import DataError

SHARES = 10_000  # a share of the windows is a whole number of about so many parts


class Turns:
    """Whose turn it is: of any n windows from the first on, each text has less than one more or less than its share.

    The order repeats itself. In it the next window is of the text whose own next one is due first, among those that
    it does not put a whole window ahead of their share (the chairman assignment problem, Tijdeman 1980).
    """

    def __init__(self, weights: list[float]) -> None:
        total = sum(weight / max(weights) for weight in weights)
        counts = [max(1, round(SHARES * (weight / max(weights)) / total)) for weight in weights]
        self.counts = [count // math.gcd(*counts) for count in counts]
        """The windows of each text in one round of the order."""
        size, done = sum(self.counts), [0] * len(counts)
        self.shares = [count / size for count in self.counts]
        self._order: list[tuple[int, int]] = []  # each window's text, and how many of the text came before in the round
        for row in range(1, size + 1):
            ready = (text for text, count in enumerate(self.counts) if done[text] * size < row * count)
            text = min(ready, key=lambda text: (done[text] + 1) / self.counts[text])
            self._order.append((text, done[text]))
            done[text] += 1

    def __call__(self, number: int) -> tuple[int, int]:
        """Return the text of window `number`, and how many windows before it are of that text."""
        rounds, place = divmod(number, len(self._order))
        text, before = self._order[place]
        return text, rounds * self.counts[text] + before


@dataclass(frozen=True, kw_only=True)
class MixedData(PreparedData):
    """Texts in the same tokens, mixed by weight for training. `train` and `val` are those of all, end to end."""

    texts: dict[str, PreparedData]
    """The texts by the names that data.mix gives them."""
    turns: Turns

    def epochs(self, tokens: int) -> str:
        """Say how often training on so many tokens reads each text."""
        named = zip(self.turns.shares, self.texts.items(), strict=True)
        return " and ".join(f"{tokens * share / len(text.train):.2f} epochs of {name}" for share, (name, text) in named)

    def check(self, block_size: int) -> None:
        """Raise DataError when a split of a text is shorter than a window."""
        for name, text in self.texts.items():
            with naming(name):
                text.check(block_size)

    def training(self, block_size: int, batch_size: int, seed: int) -> Callable[[int, int, int], Batch]:
        """Return what gives rows start to stop of the batch of a step; each text has epochs of its own."""
        texts = [
            Batches(text.train, block_size=block_size, batch_size=batch_size, seed=seed) for text in self.texts.values()
        ]

        def batch(step: int, start: int, stop: int) -> Batch:
            numbers = range(step * batch_size + start, step * batch_size + stop)
            windows = [texts[text].window(place) for text, place in map(self.turns, numbers)]
            return self.batch(np.array(windows, dtype=np.int64).reshape(-1, block_size + 1))

        return batch

    def held_out_tokens(self, block_size: int, most: int) -> int:
        """Return how many tokens an evaluation of up to `most` targets reads."""
        return sum(text.held_out_tokens(block_size, most // len(self.texts)) for text in self.texts.values())

    def held_out(self, block_size: int, batch_size: int, most: int | None = None) -> Iterator[Batch]:
        """Yield the validation text of each text in turn, as evaluation_batches(), up to the same number of targets."""
        for name, text in self.texts.items():
            for batch in text.held_out(block_size, batch_size, most and most // len(self.texts)):
                yield batch._replace(text=name)


def mix_texts(texts: dict[str, PreparedData], weights: list[float]) -> MixedData:
    """Return texts in the same tokens, by name, as a mixture in which their shares of the windows are as `weights`."""
    train, val = (join_tokens([getattr(text, split) for text in texts.values()]) for split in SPLITS)
    turns, (first, *_) = Turns(weights), texts.values()
    named = zip(turns.shares, texts.values(), strict=True)
    description = "; ".join(f"{share:.3g} × {text.description}" for share, text in named)
    key = json.dumps([text.name for text in texts.values()])  # the weights are settings
    place = first.directory.with_name(f"mix-{hashlib.sha256(key.encode()).hexdigest()[:16]}")
    return MixedData(first.tokenizer, train, val, place, description, texts=texts, turns=turns)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say which text of a mixture a DataError is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"data.mix, {name}: {error}") from error
