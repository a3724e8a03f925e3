"""The rules of data/mix.py: several texts, window by window in their shares."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig, TokenizerConfig
from data.mix import MixedData, Turns
from data.prepare import prepare
from data.tokenizer import tokenizer_content
from errors import DataError
from train import train
from training.start import start_run


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7), start=st.integers(0, 10**9))
@settings(max_examples=20, deadline=None)
def test_any_number_of_windows_has_each_texts_share_to_less_than_one(weights, start):
    turns = Turns(weights)
    assert np.allclose(turns.shares, np.array(weights) / sum(weights), atol=1e-3)
    seen = [0] * len(weights)
    for number in range(2 * sum(turns.counts)):
        text, before = turns(number)
        assert before == seen[text]
        seen[text] += 1
        assert all(abs(one - (number + 1) * share) < 1 for one, share in zip(seen, turns.shares, strict=True))
    text, before = turns(start)  # far away, without those before
    assert abs(before - start * turns.shares[text]) < 1


def test_shares_of_few_digits_are_exact_and_their_order_short():
    assert Turns([0.7, 0.2, 0.1]).counts == [7, 2, 1] and Turns([1, 1, 1]).counts == [1, 1, 1]
    assert Turns([1e308, 1e308]).counts == [1, 1] and Turns([1, 1e-300]).counts == [10_000, 1]


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Three texts of different letters: 70%, 20% and 10%."""
    (tmp_path / "a.txt").write_text("".join(f"aa{number} aaa\n" for number in range(400)))
    (tmp_path / "b.txt").write_text("".join(f"bb{number} bbb\n" for number in range(900)))
    lines = (json.dumps({"text": f"cc{number} " * 20}) for number in range(300))
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    mix = [f"{tmp_path}/a.txt:7", f"{tmp_path}/b.txt:2", f"{tmp_path}/c.jsonl:1"]
    return DataConfig(mix=mix, cache_dir=str(tmp_path / "cache"))


def mixed(config: DataConfig, tokenizer: str = "byte") -> MixedData:
    data = prepare(config, TokenizerConfig(name=tokenizer, vocab_size=300), log=lambda _: None)
    assert isinstance(data, MixedData)
    return data


def letter(data: MixedData, window: np.ndarray) -> str:
    """The letter of which a window has most."""
    return max("abc", key=data.tokenizer.decode(window.tolist()).count)


def test_a_step_has_the_windows_of_each_text_in_its_share_whoever_asks(config):
    data = mixed(config)
    batch = data.training(16, 10, seed=3)
    for step in (0, 5, 10**6):
        whole = batch(step, 0, 10)
        assert Counter(letter(data, row) for row in whole.inputs) == {"a": 7, "b": 2, "c": 1}
        parts = [batch(step, row, row + 2).targets for row in (0, 2, 4, 6, 8)]  # of five ranks
        assert np.array_equal(np.concatenate(parts), whole.targets)
        assert np.array_equal(data.training(16, 10, seed=3)(step, 0, 10).inputs, whole.inputs)
    assert batch(0, 4, 4).inputs.shape == (0, 16)


def test_each_text_has_epochs_of_its_own_in_which_a_window_comes_once(config):
    data = mixed(config)
    batch, text = data.training(16, 10, seed=3), next(iter(data.texts.values()))
    windows = max(1, len(text.train) // 16 - 1)
    seen = (row.tobytes() for step in range(windows) for row in batch(step, 0, 10).inputs if letter(data, row) == "a")
    epoch = [window for window, _ in zip(seen, range(windows), strict=False)]
    assert len(epoch) == windows == len(set(epoch))


def test_one_bpe_is_trained_on_all_texts_and_the_weights_do_not_matter_to_it(config, tmp_path):
    data = mixed(config, "bpe")
    merged = {token for token in data.tokenizer._mergeable_ranks if len(token) > 1}
    assert all(any(letter in token for token in merged) for letter in (b"aa", b"bb", b"cc"))
    prepared = sorted(path.name for path in (tmp_path / "cache" / "tokens").iterdir())
    config.mix = [entry.rpartition(":")[0] + ":1" for entry in config.mix]
    again = mixed(config, "bpe")
    assert tokenizer_content(again.tokenizer) == tokenizer_content(data.tokenizer) and again.name == data.name
    assert sorted(path.name for path in (tmp_path / "cache" / "tokens").iterdir()) == prepared


def test_a_change_in_any_text_is_another_mixture(config, tmp_path):
    before = mixed(config).name
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    assert mixed(config).name != before


def test_as_much_of_each_text_is_held_out_and_scored_apart(config):
    data = mixed(config)
    names = [batch.text for batch in data.held_out(16, 4, 96)]
    assert names == [name for name in data.texts for _ in range(1)]  # 32 targets are two windows, of one pass
    assert data.held_out_tokens(16, 96) == 96 and len(data.val) == sum(len(text.val) for text in data.texts.values())


def test_documents_are_kept_apart_in_training_and_in_what_is_held_out(config):
    data = mixed(replace(config, document_mask=True))
    assert data.training(16, 4, 1)(0, 0, 4).starts is not None
    assert all(batch.starts is not None for batch in data.held_out(16, 4))


def test_a_text_that_cannot_be_used_is_named(config, tmp_path):
    (tmp_path / "short.txt").write_text("ab")
    config.mix = [*config.mix, f"{tmp_path}/short.txt:1"]
    with pytest.raises(DataError, match=r"^data\.mix, .*short\.txt: The training split has"):
        mixed(config).check(16)
    config.mix = [*config.mix[:2], "nowhere.txt:1"]
    with pytest.raises(DataError, match=r"^data\.mix, nowhere\.txt: data\.path=nowhere\.txt does not exist"):
        mixed(config)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_on_a_mixture_reports_each_text_and_is_resumed(train_config, config, tmp_path):
    train_config = replace(train_config, data=config, max_steps=10)
    train(train_config)
    rows = [json.loads(line) for line in (Path(train_config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    (last,) = (row for row in rows if "val_loss" in row)
    assert {name for name in last if name.startswith("val_loss/")} == {
        f"val_loss/{tmp_path}/{name}" for name in ("a.txt", "b.txt", "c.jsonl")
    }
    with start_run(replace(train_config, resume=train_config.run_dir, max_steps=12)) as run:
        assert run.progress.step == 10
