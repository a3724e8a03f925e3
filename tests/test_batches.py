"""The rules of data/batches.py: which sequences a step sees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches import Batch, TokenDataset, document_starts, random_stream
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer

BYTE = make_tokenizer(TokenizerConfig(name="byte"), ())


def dataset(length: int, *, block_size: int = 8, batch_size: int = 4, seed: int = 1) -> TokenDataset:
    """A text in which each token is its own position, to train and to validate."""
    tokens = np.arange(length)
    sizes = dict(block_size=block_size, batch_size=batch_size, seed=seed)
    return TokenDataset(BYTE, tokens, tokens, "made up", "made up", **sizes)


def sequences(batch: Batch) -> np.ndarray:
    """Inputs and the last target, (B, T + 1)."""
    assert np.array_equal(batch.inputs[:, 1:], batch.targets[:, :-1]) and batch.doc_starts is None
    return np.hstack([batch.inputs, batch.targets[:, -1:]])


def train(source: TokenDataset, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
    """A step's training sequences."""
    return sequences(source.train_batch(step, start, source.batch_size if stop is None else stop))


def sequences_per_epoch(source: TokenDataset) -> int:
    return max(1, len(source.train) // source.block_size - 1)


def epoch(source: TokenDataset, number: int) -> list[int]:
    """Where the sequences of an epoch begin, in their order."""
    assert source.batch_size == 1
    count = sequences_per_epoch(source)
    return [int(train(source, step)[0, 0]) for step in range(number * count, (number + 1) * count)]


@given(length=st.integers(2, 3000), block_size=st.integers(1, 40), seed=st.integers(0, 2**64), number=st.integers(0, 3))
@settings(max_examples=60)
def test_each_sequence_of_an_epoch_comes_exactly_once(length, block_size, seed, number):
    length += block_size
    source = dataset(length, block_size=block_size, batch_size=1, seed=seed)
    starts = sorted(epoch(source, number))
    assert np.all(np.diff(starts) == block_size) and starts[0] >= 0
    assert starts[-1] + block_size < length
    # Less than two sequences go unseen at the ends.
    assert sequences_per_epoch(source) >= (length - 1) // block_size - 1


@pytest.mark.parametrize("length", [9, 15, 16, 17, 23, 24, 100, 103])
def test_over_the_epochs_every_token_is_a_target(length):
    source = dataset(length, batch_size=100)
    seen = np.concatenate([train(source, step)[:, 1:].ravel() for step in range(6)])
    assert set(seen.tolist()) == set(range(1, length))


def test_a_batch_never_changes_between_releases():
    # Resuming a run of an older version must see the sequences that it would have seen. An epoch ends after the second.
    assert train(dataset(1000, batch_size=6, seed=3), 41)[:, 0].tolist() == [596, 124, 643, 67, 907, 3]
    assert random_stream("a", 1).random_sample(2).tolist() == [0.13433907272685963, 0.08454942021612388]


@pytest.mark.parametrize("step", [0, 5, 33, 10**9])
def test_one_process_with_four_micro_batches_sees_what_four_processes_see(step):
    source = dataset(1000, batch_size=12)
    train(source, step + 700)  # changes nothing
    whole = train(source, step)
    micro = [train(source, step, start, start + 3) for start in range(0, 12, 3)]
    ranks = [train(dataset(1000, batch_size=12), step, rank * 3, rank * 3 + 3) for rank in range(4)]
    assert np.array_equal(np.concatenate(micro), whole)
    assert np.array_equal(np.concatenate(ranks), whole) and whole.shape == (12, 9) and whole.dtype == np.int64


@pytest.mark.slow
def test_epochs_and_seeds_differ_in_order_and_in_borders():
    sources = (dataset(8000, batch_size=1, seed=seed) for seed in (0, 1, 2**63 - 1))
    orders = {(source.seed, number): epoch(source, number) for source in sources for number in range(4)}
    assert len({tuple(order) for order in orders.values()}) == 12
    assert len({min(order) for order in orders.values()}) > 4
    # Not the same order moved along: what comes first differs in place, too.
    assert len({tuple(np.argsort(order)[:20]) for order in orders.values()}) == 12
    for order in orders.values():
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.15


def test_a_document_begins_at_its_separator_or_before_the_sequence():
    tokens = np.array([[5, 9, 5, 9, 9], [9, 5, 5, 5, 5]])
    assert document_starts(tokens, 9).tolist() == [[0, 1, 1, 3, 4], [0, 0, 0, 0, 0]]


@given(length=st.integers(2, 400), block_size=st.integers(1, 50), batch_size=st.integers(1, 9))
@settings(max_examples=80)
def test_an_evaluation_covers_every_target_once_in_order(length, block_size, batch_size):
    rows = list(map(sequences, dataset(length, block_size=block_size).validation_batches(batch_size)))
    targets = np.concatenate([batch[:, 1:].ravel() for batch in rows])
    inputs = np.concatenate([batch[:, :-1].ravel() for batch in rows])
    assert targets.tolist() == list(range(1, length)) and inputs.tolist() == list(range(length - 1))
    assert all(batch.dtype == np.int64 and len(batch) <= batch_size for batch in rows)
    assert all(batch.shape[1] == block_size + 1 for batch in rows[:-1])


@pytest.mark.parametrize(("length", "kept"), [(10_001, 10), (1_002, 10), (1_001, 10), (1_000, 9), (101, 1)])
def test_a_part_of_an_evaluation_is_spread_evenly_over_the_text(length, kept):
    rows = list(map(sequences, dataset(length, block_size=100).validation_batches(4, max_tokens=1_000)))
    places = np.concatenate([batch[:, 0] for batch in rows if batch.shape[1] == 101])
    assert len(places) == kept and all(len(batch) <= 4 for batch in rows)
    gaps = np.diff(places) / 100
    assert places[0] == 0 and (kept == 1 or (gaps.max() - gaps.min() <= 1 and places[-1] >= 0.85 * length - 100))
    assert all(batch.shape[1] == 101 for batch in rows) or length - 1 <= 1_000
