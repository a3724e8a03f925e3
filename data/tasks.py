"""Synthetic tasks that tell mechanisms apart in minutes, scored on their answers alone.

Each step has new sequences. Inputs are ids below data.task.vocab_size. A target is an answer; it is -1 if none is due.
T is model.block_size, V the vocabulary and n data.task.items.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np

from common.errors import SettingsError, refuse_taken
from data.batches import Batch, random_stream
from data.config import SOURCES, VOCABULARIES, TaskConfig

HELD_OUT = 512  # sequences of the validation split
POWER = 0.01  # Zoology's power_a: a gap g between a pair and its query has the weight g^(power_a - 1)
NO_TARGET = -1  # IGNORE_INDEX of model/loss.py, which data/ does not import

Random = np.random.RandomState
Sequences = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, int64 (B, T) each."""
Task = Callable[[Random, int, int, TaskConfig], Sequences]


def recall(random: Random, B: int, T: int, task: TaskConfig) -> Sequences:
    """Multi-query associative recall (Arora et al. 2023, "Zoology").

    Section 3.1 and zoology/data/multiquery_ar.py. A sequence begins with n pairs of a key from 1 … V/2 - 1 and a value
    from V/2 … V - 1, all distinct. Each key then returns once as a query, whose target is its value. The query stands
    at 2n + 2 (g - 1), with distinct gaps g from 1 … (T - 2n)/2 drawn with p(g) ∝ g^(POWER - 1). The other positions
    hold random ids from 0 … V - 1, or 0 without random_non_queries.
    """
    # Draw the pairs, and where each key returns: (B, n) each.
    n = task.items
    V = task.ids("recall")
    keys = 1 + distinct(random, B, n, np.ones(V // 2 - 1))
    values = V // 2 + distinct(random, B, n, np.ones(V - V // 2))
    gaps = np.arange(1, (T - 2 * n) // 2 + 1)
    places = 2 * n + 2 * distinct(random, B, n, gaps ** (POWER - 1))

    # Write the pairs and the queries over noise. The answers stand where the queries do.
    inputs = random.randint(0, V if task.random_non_queries else 1, (B, T))
    inputs[:, 0 : 2 * n : 2] = keys
    inputs[:, 1 : 2 * n : 2] = values
    np.put_along_axis(inputs, places, keys, axis=1)
    targets = np.full_like(inputs, NO_TARGET)
    np.put_along_axis(targets, places, values, axis=1)
    return inputs, targets


def copy(random: Random, B: int, T: int, task: TaskConfig) -> Sequences:
    """Copying (Jelassi et al. 2024, "Repeat After Me").

    T/2 random ids from 1 … V - 1, then the mark 0. From the mark on the targets are the same ids. The inputs after it
    are the targets so far, as in generation.
    """
    # The text leaves out 0, the mark. The last answer is no input: nothing follows it.
    text = random.randint(1, task.ids("copy"), (B, T // 2))
    mark = np.zeros((B, 1), dtype=np.int64)
    inputs = np.hstack((text, mark, text[:, :-1]))  # (B, T)
    return inputs, np.hstack((np.full_like(text, NO_TARGET), text))


def induction(random: Random, B: int, T: int, task: TaskConfig) -> Sequences:
    """Induction heads (Gu & Dao 2023, "Mamba", section 4.1.2).

    Random ids from 1 … V - 1. The mark 0 stands at a random position before the last two and again at the last, whose
    target is the id that followed the first mark.
    """
    inputs = random.randint(1, task.ids("induction"), (B, T))
    # Before the last two, so that another id than the second mark follows the first.
    place = random.randint(0, T - 2, (B, 1))
    np.put_along_axis(inputs, place, 0, axis=1)
    inputs[:, -1] = 0
    targets = np.full_like(inputs, NO_TARGET)
    targets[:, -1:] = np.take_along_axis(inputs, place + 1, axis=1)
    return inputs, targets


def distinct(random: Random, B: int, count: int, weights: np.ndarray) -> np.ndarray:
    """Return numbers below N drawn without replacement by `weights` (N,): int64 (B, count)."""
    # Exponential times with these rates, in their order, are such a draw (Efraimidis & Spirakis 2006).
    times = random.standard_exponential((B, len(weights))) / weights  # (B, N)
    return times.argsort(axis=1)[:, :count]


TASKS: dict[str, Task] = {"recall": recall, "copy": copy, "induction": induction}


def task(name: str, vocab_size: int) -> Callable[[Task], Task]:
    """Return a decorator that registers a function like recall() as data.source=NAME.

    All sequences of a length must have the same number of answers. Raises SettingsError for a name that is taken. A
    function that is defined again, as by a notebook's cell that runs twice, takes the place of the earlier one.

    vocab_size: its default of data.task.vocab_size.
    """

    def register(make: Task) -> Task:
        if name in (*SOURCES, *VOCABULARIES):
            refuse_taken(name, TASKS.get(name), make)
        TASKS[name] = make
        VOCABULARIES[name] = vocab_size
        return make

    return register


@dataclass(frozen=True)
class TaskData:
    """The sequences of a synthetic task; a step's are new ones."""

    name: str
    task: TaskConfig
    block_size: int
    batch_size: int = 16
    """Sequences in a step."""
    seed: int = 1
    """Seed of the training sequences, and of those for validation."""

    tokenizer = None  # a task has no text

    def train_batch(self, step: int, start: int, stop: int) -> Batch:
        """Return a step's sequences from `start` to `stop`, a function of the seed and the step."""
        # Its micro-batches are slices of the sequences of a step.
        return Batch(*(ids[start:stop] for ids in self._step(step)))

    @cached_property
    def _step(self) -> Callable[[int], Sequences]:
        """A function that makes the sequences of a step, and remembers the last ones."""
        return lru_cache(maxsize=1)(partial(self._make, self.batch_size, self.seed))

    def validation_batches(self, batch_size: int, max_tokens: int | None = None) -> Iterator[Batch]:
        """Yield the first of HELD_OUT sequences."""
        count = self.validation_tokens(max_tokens) // self.block_size
        # Make all of them: a smaller evaluation then scores the first of the same sequences.
        made = self._make(HELD_OUT, self.seed, "held out")
        for start in range(0, count, batch_size):
            stop = min(start + batch_size, count)
            yield Batch(*(ids[start:stop] for ids in made))

    def validation_tokens(self, max_tokens: int | None) -> int:
        """Return the number of inputs of an evaluation of at most `max_tokens`."""
        count = HELD_OUT if max_tokens is None else min(HELD_OUT, max(1, max_tokens // self.block_size))
        return self.block_size * count

    @property
    def fingerprint(self) -> str:
        return self.name

    @property
    def vocab_size(self) -> int:
        return self.task.ids(self.name)

    @property
    def targets_per_sequence(self) -> int:
        """The number of answers in a sequence: in any, as all have the same."""
        _, targets = self._make(1, "answers")
        return int((targets != NO_TARGET).sum())

    def token_bytes(self) -> np.ndarray:
        """Return 0 for each id: none is text."""
        return np.zeros(self.vocab_size, dtype=np.int64)

    def check(self) -> None:
        """Raise SettingsError if a sequence or the vocabulary is too small for the task."""
        # The shortest sequence and the fewest ids; a task of code=FILE checks its own.
        n = self.task.items
        least = {"recall": (4 * n, 2 * n + 2), "copy": (2, 3), "induction": (3, 3)}
        shortest, fewest_ids = least.get(self.name, (1, 1))
        # A sequence of recall consists of pairs of places, one of copy of two halves.
        is_odd = self.name in ("recall", "copy") and self.block_size % 2
        if self.block_size < shortest or is_odd or self.vocab_size < fewest_ids:
            given = f"model.block_size={self.block_size} and data.task.vocab_size={self.vocab_size}"
            problem = f"data={self.name} with data.task.items={n} cannot have {given}"
            even = "an even size" if is_odd else "a size"
            raise SettingsError(problem, f"choose {even} from {shortest} on and {fewest_ids} ids or more")

    def _make(self, count: int, *key: object) -> Sequences:
        """Return `count` sequences, a function of `key`."""
        return TASKS[self.name](random_stream(self.name, *key), count, self.block_size, self.task)
