"""Synthetic tasks that tell mechanisms apart in minutes: fresh windows at every step, of which only answers are scored.

A window's inputs are ids below data.task.vocab_size; the target of a place is the answer wanted there, or -1. T is
model.block_size, V the vocabulary and n data.task.items.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.batches import Batch
from data.config import WITH_ITEMS, TaskConfig
from data.prepared import PreparedData
from errors import SettingsError

HELD_OUT = 512  # windows that an evaluation scores
NOTHING = -1  # the target where nothing is scored

Uniforms = Callable[..., np.ndarray]  # of a shape: float64 from 0 to below 1
Windows = tuple[np.ndarray, np.ndarray]  # inputs and targets, int64 [rows, T] each


def recall(uniforms: Uniforms, rows: int, T: int, task: TaskConfig) -> Windows:
    """Multi-query associative recall (Arora et al. 2023, "Zoology", section 3.1 and zoology/data/multiquery_ar.py).

    Begins with n pairs of a key from 1 … V/2 - 1 and a value from V/2 … V - 1, no key and no value twice. In the
    places after them, numbered from 0, each key comes once more, at 2g for a g of 0 … (T - 2n)/2 - 1, none twice,
    drawn with p(g) ∝ power_a · (g + 1)^(power_a - 1) in the order of the pairs; its target is its value. What is left
    holds random ids from 0 … V - 1, or 0 without random_non_queries.
    """
    n, V = task.items, task.ids("recall")
    keys = 1 + distinct(uniforms(rows, V // 2 - 1), n)
    values = V // 2 + distinct(uniforms(rows, V - V // 2), n)
    gaps = np.arange(1, (T - 2 * n) // 2 + 1)
    places = 2 * n + 2 * distinct(uniforms(rows, len(gaps)), n, task.power_a * gaps ** (task.power_a - 1))
    inputs = whole(uniforms(rows, T), 0, V) if task.random_non_queries else np.zeros((rows, T), dtype=np.int64)
    inputs[:, 0 : 2 * n : 2], inputs[:, 1 : 2 * n : 2] = keys, values
    np.put_along_axis(inputs, places, keys, axis=1)
    targets = np.full_like(inputs, NOTHING)
    np.put_along_axis(targets, places, values, axis=1)
    return inputs, targets


def copy(uniforms: Uniforms, rows: int, T: int, task: TaskConfig) -> Windows:
    """Copying (Jelassi et al. 2024, "Repeat After Me"): T/2 random ids from 1 … V - 1, a 0, and they are to follow.

    What has been copied so far is seen, as when text is generated.
    """
    text = whole(uniforms(rows, T // 2), 1, task.ids("copy"))
    mark = np.zeros((rows, 1), dtype=np.int64)
    return np.hstack((text, mark, text[:, :-1])), np.hstack((np.full_like(text, NOTHING), text))


def selective_copy(uniforms: Uniforms, rows: int, T: int, task: TaskConfig) -> Windows:
    """Selective copying (Gu & Dao 2023, "Mamba", section 4.1.1): n ids among noise, to be told in their order.

    The ids, from 2 … V - 1, are at random places of the first T - n; the others there hold 0, the noise. The last n
    places hold 1 each, and the target of the i-th of them is the i-th id.
    """
    n, V = task.items, task.ids("selective_copy")
    ids = whole(uniforms(rows, n), 2, V)
    places = np.sort(distinct(uniforms(rows, T - n), n), axis=1)
    inputs = np.zeros((rows, T), dtype=np.int64)
    np.put_along_axis(inputs, places, ids, axis=1)
    inputs[:, T - n :] = 1
    targets = np.full_like(inputs, NOTHING)
    targets[:, T - n :] = ids
    return inputs, targets


def induction(uniforms: Uniforms, rows: int, T: int, task: TaskConfig) -> Windows:
    """Induction heads (Gu & Dao 2023, "Mamba", section 4.1.2): what came after the mark the first time?

    Random ids from 1 … V - 1, with the mark 0 at a random place before the last two and again at the last, whose
    target is the id that followed the first mark.
    """
    inputs = whole(uniforms(rows, T), 1, task.ids("induction"))
    place = whole(uniforms(rows, 1), 0, T - 2)
    np.put_along_axis(inputs, place, 0, axis=1)
    inputs[:, -1] = 0
    targets = np.full_like(inputs, NOTHING)
    targets[:, -1:] = np.take_along_axis(inputs, place + 1, axis=1)
    return inputs, targets


@dataclass(frozen=True)
class Task:
    """How a task's windows are made, and for n items: answers in one of T, the shortest T, the smallest V."""

    make: Callable[[Uniforms, int, int, TaskConfig], Windows]
    answers: Callable[[int, int], int]
    shortest: Callable[[int], int]
    fewest_ids: Callable[[int], int]
    even: bool = False
    """Whether T must be even."""


TASKS = {
    "recall": Task(recall, lambda T, n: n, lambda n: 4 * n, lambda n: 2 * n + 2, even=True),
    "copy": Task(copy, lambda T, n: T // 2, lambda n: 2, lambda n: 3, even=True),
    "selective_copy": Task(selective_copy, lambda T, n: n, lambda n: 2 * n, lambda n: 4),
    "induction": Task(induction, lambda T, n: 1, lambda n: 3, lambda n: 3),
}


@dataclass(frozen=True)
class TaskData:
    """A task as training and evaluation read it, in place of prepared text; the same methods as PreparedData."""

    name: str
    task: TaskConfig
    seed: int
    """Determines the windows that are held out."""

    tokenizer = None

    @property
    def vocab_size(self) -> int:
        return self.task.ids(self.name)

    def targets(self, block_size: int) -> int:
        """Return the number of answers in a window."""
        return TASKS[self.name].answers(block_size, self.task.items)

    def token_bytes(self) -> np.ndarray:
        """Return 0 for each id: none is text."""
        return np.zeros(self.vocab_size, dtype=np.int64)

    def held_out_tokens(self, block_size: int, most: int) -> int:
        """Return how many tokens an evaluation reads."""
        return HELD_OUT * block_size

    def check(self, block_size: int) -> None:
        """Raise SettingsError when a window or the vocabulary is too small for the task."""
        task, T, n, V = TASKS[self.name], block_size, self.task.items, self.vocab_size
        has_items = self.name in WITH_ITEMS
        given = f"data={self.name}" + f" with data.task.items={n}" * has_items
        if (least := task.shortest(n)) > T:
            fewer = " or lower data.task.items" * has_items
            raise SettingsError(f"{given} needs model.block_size={least} or more, not {T}: raise it{fewer}.")
        if task.even and T % 2:
            raise SettingsError(f"data={self.name} needs an even model.block_size, not {T}: choose {T + 1}.")
        if (least := task.fewest_ids(n)) > V:
            raise SettingsError(f"{given} needs data.task.vocab_size={least} or more, not {V}: raise it.")

    def training(self, block_size: int, batch_size: int, seed: int) -> Callable[[int, int, int], Batch]:
        """Return what gives rows start to stop of the batch of a step, a function of the seed and the step."""
        draw = lru_cache(maxsize=1)(lambda step: self._draw(f"{seed} {step}", batch_size, block_size))
        return lambda step, start, stop: _rows(draw(step), start, stop)

    def held_out(self, block_size: int, batch_size: int, most: int | None = None) -> Iterator[Batch]:
        """Yield the HELD_OUT windows of an evaluation, whatever `most` is, batch_size at a time."""
        windows = self._draw(f"{self.seed} held out", HELD_OUT, block_size)
        for first in range(0, HELD_OUT, batch_size):
            yield _rows(windows, first, first + batch_size)

    def _draw(self, stream: str, rows: int, block_size: int) -> Windows:
        return TASKS[self.name].make(uniform_stream(f"{self.name} {stream}"), rows, block_size, self.task)


Data = PreparedData | TaskData
"""What a run learns from."""


def _rows(windows: Windows, start: int, stop: int) -> Batch:
    inputs, targets = windows
    return Batch(inputs[start:stop], targets[start:stop])


def uniform_stream(name: str) -> Uniforms:
    """Return a generator of uniform numbers; `name` determines all of them, in every version of numpy."""
    bits = np.random.Philox(key=int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big"))
    return lambda *shape: (bits.random_raw(math.prod(shape)) >> np.uint64(11)).reshape(shape) * 2.0**-53


def whole(uniforms: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return whole numbers from `low` to below `high`, int64."""
    return low + (uniforms * (high - low)).astype(np.int64)


def distinct(uniforms: np.ndarray, count: int, weights: np.ndarray | float = 1.0) -> np.ndarray:
    """Return for each row [rows, N] `count` different numbers below N, drawn one after the other with these weights.

    The order of exponential times with rates `weights` is that of such draws (Efraimidis & Spirakis 2006).
    """
    times = -np.log1p(-uniforms) / weights
    first = np.argpartition(times, count - 1, axis=1)[:, :count]
    return np.take_along_axis(first, np.take_along_axis(times, first, axis=1).argsort(axis=1), axis=1)
