"""docs/where.py: the tokens that it tells apart."""

import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from conftest import random_gpt

from common.errors import SettingsError
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from docs import where
from runs.checkpoint import Meta
from runs.summary import Summary
from sweeps.leaderboard import Job


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


@pytest.mark.parametrize("name", ["model.block_size", "model.n_embd", "max_steps"])
@pytest.mark.parametrize(
    ("texts", "sizes", "is_refused"),
    [("aa", (32, 32), False), ("ab", (32, 32), True), ("aa", (32, 64), True), (("a", None), (32, 32), False)],
)
def test_runs_of_other_tokens_or_sizes_are_not_read_as_those_of_the_first(texts, sizes, is_refused, name):
    """Two tokenizers of one text, for example: bpe seemed to need 7.75 bits per byte, where it needs 2.04."""
    jobs = [
        Job(Path(), "", {}, Summary(text_hash=text), resolved={name: size})
        for text, size in zip(texts, sizes, strict=True)
    ]
    said = "has runs of several (texts or tokenizers: give a folder whose runs have one of each|values of .*)"
    with pytest.raises(SettingsError, match=said) if is_refused else nullcontext():
        where.refuse_others(Path("sweep"), jobs)


def test_the_bits_of_a_model_that_keeps_documents_apart_are_those_of_its_validation():
    model = random_gpt(n_layer=1)
    tokens = np.random.default_rng(1).integers(0, 61, (3, 17))
    tokens[:, 6] = 60  # begins a document
    sizes = [bytes([65 + number]) for number in range(60)]
    tokenizer = tiktoken.Encoding(
        "letters",
        pat_str=r"(?s:.)",
        mergeable_ranks={text: number for number, text in enumerate(sizes)},
        special_tokens={"<|endoftext|>": 60},
    )
    meta = Meta({"data": {"document_mask": True}})
    checkpoint: Any = SimpleNamespace(model=model, meta=meta, encoding=tokenizer, tokenizer=tokenizer, path=Path())
    (found,) = where.bits(checkpoint, tokens, [np.ones((3, 16), dtype=bool)])
    starts = torch.tensor([[0] * 6 + [6] * 10] * 3)
    with torch.no_grad():
        logits = model(torch.tensor(tokens[:, :-1]), doc_starts=starts)
    nats = F.cross_entropy(logits.flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten(), reduction="sum").item()
    assert found == pytest.approx(nats / math.log(2) / where.token_bytes(tokenizer)[tokens[:, 1:]].sum(), rel=1e-5)


def test_the_tokens_are_those_that_the_run_has_read_whatever_has_become_of_its_text(tmp_path, capsys):
    """A text that was written to was prepared anew, and its bpe learned anew, whose ids mean others to the model."""
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six\n" * 60)
    data = DataConfig(path=str(text), cache_dir=str(tmp_path / "cache"))
    tokens = prepare(data, TokenizerConfig(name="byte"), log=lambda line: None)
    text.write_text("seven eight\n" * 90)
    meta = SimpleNamespace(config={"data": asdict(data), "tokenizer": {"name": "bpe"}}, data=tokens.fingerprint)
    model = SimpleNamespace(config=SimpleNamespace(block_size=16))
    checkpoint: Any = SimpleNamespace(model=model, meta=meta, tokenizer=tokens.tokenizer, encoding=tokens.tokenizer)
    windows, _ = where.read_tokens(checkpoint)
    assert (windows == where.windows_of(np.asarray(tokens.val[:]), 16)).all()
    meta.data = ""
    windows, _ = where.read_tokens(checkpoint)
    assert "seven" in tokens.tokenizer.decode(windows.flatten().tolist())
    assert "no longer in the cache: these are of its text as it is now" in capsys.readouterr().out


def test_an_error_is_of_a_mean_and_a_share_without_tokens_has_none():
    assert where.error_of([0.1, 0.3]) == "+0.2000 ± 0.1000"
    assert where.error_of([0.25]) == "+0.2500" and where.error_of([]) == where.error_of([float("nan")] * 2) == "–"
