"""docs/where.py: the tokens that it tells apart."""

import numpy as np
import tiktoken

from docs import where


def by_bytes() -> tiktoken.Encoding:
    ranks = {bytes([value]): value for value in range(256)}
    return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={})


def test_a_token_within_sixteen_words_of_the_training_text_is_repeated():
    run = " ".join(f"w{index}" for index in range(where.WORDS))
    trained = np.frombuffer(f"first {run} last".encode(), dtype=np.uint8)
    text = f"new words {run} and end".encode()
    marks = where.repeated(by_bytes(), trained, np.frombuffer(text, dtype=np.uint8))
    found = bytes(value for value, mark in zip(text, marks, strict=True) if mark)
    assert found.decode().strip() == run
    short = f"new words {run.rsplit(maxsplit=1)[0]} end".encode()
    assert not where.repeated(by_bytes(), trained, np.frombuffer(short, dtype=np.uint8)).any()


def test_a_pair_is_known_from_its_second_occurrence_on():
    window = np.array([1, 2, 3, 1, 2, 2, 2, 3])
    assert where.known_pairs(window).tolist() == [False, False, False, True, False, True, True]


def test_an_error_is_of_a_mean_and_a_share_without_tokens_has_none():
    assert where.error_of([0.1, 0.3]) == "+0.2000 ± 0.1000"
    assert where.error_of([0.25]) == "+0.2500" and where.error_of([]) == where.error_of([float("nan")] * 2) == "–"
