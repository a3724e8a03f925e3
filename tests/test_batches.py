"""The rules of data/batches.py: which windows a step sees."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import Batches, check_split, evaluation_batches, permute
from errors import DataError

REPOSITORY = Path(__file__).resolve().parent.parent
KEYS = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)


class Counting:
    """A text of any length in which each token is its own position."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(self.length)
        return np.arange(start, stop)


def batches(length: int, *, block_size: int = 8, batch_size: int = 4, seed: int = 1) -> Batches:
    return Batches(Counting(length), block_size=block_size, batch_size=batch_size, seed=seed)


def first_tokens(source: Batches, windows: range) -> list[int]:
    """Where the given windows, counted over all epochs, begin."""
    assert source.batch_size == 1
    return [int(source.batch(number)[0, 0]) for number in windows]


@given(length=st.integers(2, 3000), block_size=st.integers(1, 40), seed=st.integers(0, 2**64), epoch=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_each_window_of_an_epoch_comes_exactly_once(length, block_size, seed, epoch):
    if length <= block_size:
        length += block_size
    source = batches(length, block_size=block_size, batch_size=1, seed=seed)
    count = source.windows_per_epoch
    starts = sorted(first_tokens(source, range(epoch * count, (epoch + 1) * count)))
    assert np.all(np.diff(starts) == block_size) and starts[0] >= 0
    assert starts[-1] + block_size < length
    # Less than two windows go unseen at the ends.
    assert count >= (length - 1) // block_size - 1


@pytest.mark.parametrize("length", [9, 15, 16, 17, 23, 24, 100, 103])
def test_over_the_epochs_every_token_is_a_target(length):
    source = batches(length, block_size=8, batch_size=100)
    seen = np.concatenate([source.batch(step)[:, 1:].ravel() for step in range(20)])
    assert set(seen.tolist()) == set(range(1, length))


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_order_is_a_permutation_for_every_size(size, key):
    order = permute(np.arange(size, dtype=np.uint64), size, np.array([key, 1], dtype=np.uint64))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_the_order_looks_random():
    size = 100_000
    order = permute(np.arange(size, dtype=np.uint64), size, KEYS).astype(np.float64)
    for lag in (1, 2, 316, 317):  # 317 is the base of the digits
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.02
    counts = np.histogram(np.diff(order) % size, bins=50)[0]
    assert abs(counts - size / 50).max() < 6 * np.sqrt(size / 50)
    assert abs(np.sum(order == np.arange(size)) - 1) < 6  # a random one leaves about one in place


def test_a_batch_is_the_same_in_a_new_process():
    code = (
        "import hashlib, numpy as np; from data.batches import Batches;"
        "b = Batches(np.arange(50_000) % 4099, block_size=32, batch_size=12, seed=7);"
        "print(hashlib.sha256(b''.join(b.batch(n).tobytes() for n in (0, 1, 129, 10**6))).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    source = Batches(np.arange(50_000) % 4099, block_size=32, batch_size=12, seed=7)
    here = b"".join(source.batch(step).tobytes() for step in (0, 1, 129, 10**6))
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_a_batch_never_changes_between_releases():
    # Resuming a run of an older version must see the windows that it would have seen.
    rows = batches(1000, batch_size=6, seed=3).batch(41)
    assert rows[:, 0].tolist() == [625, 977, 758, 238, 270, 638]


def test_a_batch_does_not_depend_on_the_batches_before_it():
    used = batches(5000)
    for step in (9, 3, 700, 3):
        used.batch(step)
    assert np.array_equal(used.batch(5), batches(5000).batch(5))


@pytest.mark.parametrize("step", [0, 5, 33, 10**9])
def test_one_process_with_four_micro_batches_sees_what_four_processes_see(step):
    whole = batches(1000, batch_size=12)
    micro = [whole.batch(step, start, start + 3) for start in range(0, 12, 3)]
    ranks = [batches(1000, batch_size=12).batch(step, rank * 3, rank * 3 + 3) for rank in range(4)]
    assert np.array_equal(np.concatenate(micro), whole.batch(step))
    assert np.array_equal(np.concatenate(ranks), whole.batch(step)) and whole.batch(step).shape == (12, 9)
    assert whole.batch(step).dtype == np.int64


def test_a_batch_may_reach_over_several_epochs():
    source = batches(30, block_size=8, batch_size=7)
    assert source.windows_per_epoch == 2
    rows = np.concatenate([source.batch(step) for step in range(2)])
    assert rows[:, 0].tolist() == first_tokens(batches(30, batch_size=1), range(14))


def test_epochs_and_seeds_differ_in_order_and_in_borders():
    def epoch(seed: int, number: int) -> list[int]:
        source = batches(8000, block_size=8, batch_size=1, seed=seed)
        count = source.windows_per_epoch
        return first_tokens(source, range(number * count, (number + 1) * count))

    orders = {(seed, number): epoch(seed, number) for seed in (0, 1) for number in range(6)}
    assert len({tuple(order) for order in orders.values()}) == 12
    assert len({min(order) for order in orders.values()}) > 4
    # Not the same order moved along: what comes first differs in place, too.
    ranks = {tuple(np.argsort(order)[:20]) for order in orders.values()}
    assert len(ranks) == 12


@pytest.mark.parametrize("length", [10**13, 10**13 + 12_345, 2**43 + 1])
def test_ten_trillion_tokens_are_as_exact_as_ten_thousand(length):
    source = batches(length, block_size=1024, batch_size=64)
    seen = np.concatenate([source.batch(step) for step in (0, 1, 10**7, source.windows_per_epoch // 64 + 1)])
    assert np.all(np.diff(seen, axis=1) == 1) and seen.min() >= 0
    assert seen.max() < length and len(np.unique(seen[:, 0])) == len(seen)
    # They come from all of the text, its far end too.
    assert seen[:, 0].max() > length * 0.9 and seen[:, 0].min() < length * 0.1


@given(length=st.integers(2, 400), block_size=st.integers(1, 50), batch_size=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_an_evaluation_covers_every_target_once_in_order(length, block_size, batch_size):
    rows = list(evaluation_batches(Counting(length), block_size=block_size, batch_size=batch_size))
    targets = np.concatenate([batch[:, 1:].ravel() for batch in rows])
    inputs = np.concatenate([batch[:, :-1].ravel() for batch in rows])
    assert targets.tolist() == list(range(1, length)) and inputs.tolist() == list(range(length - 1))
    assert all(batch.dtype == np.int64 and len(batch) <= batch_size for batch in rows)
    assert all(batch.shape[1] == block_size + 1 for batch in rows[:-1])


@pytest.mark.parametrize(("length", "kept"), [(10_001, 10), (1_001, 10), (1_000, 9), (101, 1)])
def test_a_part_of_an_evaluation_is_spread_evenly_over_the_text(length, kept):
    batches = list(evaluation_batches(Counting(length), block_size=100, batch_size=4, most=1_000))
    places = np.concatenate([rows[:, 0] for rows in batches if rows.shape[1] == 101])
    assert len(places) == kept
    gaps = np.diff(places) / 100
    assert places[0] == 0 and (kept == 1 or (gaps.max() - gaps.min() <= 1 and places[-1] >= 0.85 * length - 100))
    assert all(rows.shape[1] == 101 for rows in batches) or length - 1 <= 1_000


def test_a_split_shorter_than_a_window_is_refused_with_the_remedy():
    check_split(np.zeros(65), 64, "validation")
    message = r"validation split has 64 tokens.*model\.block_size=64.*65.*smaller model\.block_size"
    with pytest.raises(DataError, match=message):
        check_split(np.zeros(64), 64, "validation")
    with pytest.raises(DataError):
        check_split(np.zeros(0), 1, "training")
