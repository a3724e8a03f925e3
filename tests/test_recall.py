"""docs/recall.py: its figures of known models."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import random_gpt

from common.errors import SettingsError
from docs import recall
from model.cache import KVCache
from runs.summary import Summary
from sweeps.leaderboard import Job


def checkpoint_of(**settings) -> Any:
    model = random_gpt(vocab_size=64, block_size=32, n_layer=2, **settings)
    data = {"source": "recall", "task": {"items": 5, "vocab_size": 64}}
    meta = SimpleNamespace(config={"data": data, "batch_size": 16, "seed": 3, "optimizer": {"lr": 0.02}})
    return SimpleNamespace(model=model, meta=meta, path="run")


@pytest.mark.parametrize("settings", [{}, {"attention": "sdpa+window", "attention_window": 4}])
def test_the_bytes_of_a_window_are_those_of_the_rows_that_its_cache_keeps(settings):
    """A window's were multiplied by its share of the context once more."""
    checkpoint = checkpoint_of(**settings)
    rate, seed, kept, *right = recall.measured(checkpoint, [4, 5])
    assert (rate, seed, len(right)) == (0.02, 3, 2)
    cache = KVCache(32)
    with torch.no_grad():
        checkpoint.model(torch.zeros(1, 32, dtype=torch.long), cache=cache)
    assert kept == sum(rows.nbytes for layer in cache.layers.values() for rows in layer.values())


def test_runs_are_asked_for_the_pairs_that_fit_and_of_one_width(monkeypatch, tmp_path, capsys):
    """32 pairs do not fit into the 64 ids of the defaults of data=recall."""
    monkeypatch.setattr(recall, "open_checkpoint", lambda place: checkpoint_of())
    widths, bpb = [32, 32], None

    def read_jobs(folder):
        finished = Summary(status="finished", val_bpb=bpb)
        return [
            Job(tmp_path, f"{seed}", {"seed": f"{seed}"}, finished, resolved={"model.n_embd": width})
            for seed, width in enumerate(widths)
        ]

    monkeypatch.setattr(recall, "read_jobs", read_jobs)
    recall.main(tmp_path)
    assert "| 4 pairs " in (shown := capsys.readouterr().out) and "| 5 pairs" in shown and "8 pairs" not in shown
    (tmp_path / "recall.csv").unlink()
    widths[0] = 64
    with pytest.raises(SettingsError, match="several values of model.n_embd"):
        recall.main(tmp_path)
    bpb = 2.0  # of a text: its checkpoint, without a task, was called damaged
    with pytest.raises(SettingsError, match="has no finished run of data=recall"):
        recall.main(tmp_path)
