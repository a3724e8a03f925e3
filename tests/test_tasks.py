"""Synthetic tasks: their sequences, and that a run on one keeps a text run's promises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import run_here

from cli.eval import score_checkpoints
from common.errors import CheckpointError, SettingsError
from data.batches import random_stream
from data.config import VOCABULARIES, DataConfig, TaskConfig
from data.tasks import HELD_OUT, TASKS, TaskData
from generation.config import EvalConfig
from generation.score import learned_task
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import open_checkpoint, save_checkpoint
from train import train, train_step
from training.config import TrainConfig
from training.plan import plan_run
from training.start import open_data


def drawn(name: str, T: int, rows: int = 64, **task) -> tuple[np.ndarray, np.ndarray]:
    return TASKS[name](random_stream("test"), rows, T, TaskConfig(**task))


@pytest.mark.parametrize(("T", "n"), [(64, 8), (16, 4), (48, 12)])  # the latter two without a place to spare
def test_recall_is_mqar_as_zoology_defines_it(T, n):
    V = 1024
    inputs, targets = drawn("recall", T, items=n, vocab_size=V)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert len(set(keys)) == len(set(values)) == n
        assert all(1 <= key < V // 2 for key in keys) and all(V // 2 <= value < V for value in values)
        asked = [place for place, target in enumerate(wanted) if target != -1]
        assert len(asked) == n and min(asked) >= 2 * n and all(place % 2 == 0 for place in asked)
        assert {row[place]: wanted[place] for place in asked} == dict(zip(keys, values, strict=True))


def test_gaps_of_recall_follow_the_power_law_in_the_order_of_the_pairs():
    inputs, targets = drawn("recall", 64, rows=20_000, items=2, vocab_size=64, random_non_queries=False)
    first = (inputs[:, :1] == inputs[:, 4:]) & (targets[:, 4:] != -1)  # where the first key is asked for
    gaps = first.argmax(axis=1) // 2 + 1
    law = np.arange(1, 31) ** (0.01 - 1)
    assert np.abs(np.bincount(gaps, minlength=31)[1:] / len(gaps) - law / law.sum()).max() < 0.01
    assert (inputs[:, 4:][targets[:, 4:] == -1] == 0).all()


def test_copy_repeats_what_stands_before_the_mark():
    inputs, targets = drawn("copy", 32, vocab_size=9)
    assert np.array_equal(targets[:, 16:], inputs[:, :16]) and (targets[:, :16] == -1).all()
    assert (inputs[:, 16] == 0).all() and np.array_equal(inputs[:, 17:], inputs[:, :15])
    assert set(np.unique(inputs[:, :16])) == set(range(1, 9))


def test_induction_asks_for_what_followed_the_mark():
    inputs, targets = drawn("induction", 10, rows=500)
    places = (inputs[:, :-1] == 0).argmax(axis=1)
    assert ((inputs == 0).sum(axis=1) == 2).all() and set(places) == set(range(8)) and (inputs[:, -1] == 0).all()
    assert np.array_equal(targets[:, -1], inputs[np.arange(500), places + 1]) and (targets[:, :-1] == -1).all()


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_a_function_of_seed_and_step_and_cut_without_a_change(name):
    data, again = (TaskData(name, TaskConfig(items=4), 32, 12, seed=3) for _ in range(2))
    later = again.train_batch(7, 0, 12)
    whole = data.train_batch(5, 0, 12)
    parts = [again.train_batch(5, start, start + 3) for start in range(0, 12, 3)]
    for field in ("inputs", "targets"):
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(whole, field))
    assert not np.array_equal(later.inputs, whole.inputs)
    assert not np.array_equal(replace(data, seed=4).train_batch(5, 0, 12).inputs, whole.inputs)
    assert ((whole.targets != -1).sum(axis=1) == data.targets_per_sequence).all()
    validation = [np.concatenate([part.inputs for part in data.validation_batches(size)]) for size in (5, HELD_OUT)]
    assert np.array_equal(*validation) and len(validation[0]) == HELD_OUT
    assert data.validation_tokens(10**6) == data.validation_tokens(None) == validation[0].size
    few = np.concatenate([part.inputs for part in data.validation_batches(2, max_tokens=100)])
    assert np.array_equal(few, validation[0][:3]) and data.validation_tokens(100) == few.size
    assert not (validation[0][:, None, :] == whole.inputs).all(-1).any()


def test_a_window_never_changes_between_releases():
    assert drawn("recall", 16, rows=1, items=2, vocab_size=16)[0].tolist() == [
        [2, 14, 7, 10, 2, 4, 7, 9, 8, 3, 3, 14, 6, 8, 3, 9]
    ]


@pytest.fixture
def task_config(train_config: TrainConfig) -> TrainConfig:
    """A run of 20 steps of a small recall."""
    data = DataConfig(source="recall", task=TaskConfig(items=2, vocab_size=16))
    return replace(train_config, data=data, sample_tokens=0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_run_reports_accuracy_in_place_of_bits_per_byte(task_config, capsys):
    train(task_config)
    run = Path(task_config.run_dir)
    evaluations = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20] and not any("val_bpb" in row for row in evaluations)
    summary, best = json.loads((run / "summary.json").read_text()), min(evaluations, key=lambda row: row["val_loss"])
    assert summary["val_accuracy"] == best["val_accuracy"] and summary["val_bpb"] is None
    (result,) = score_checkpoints(EvalConfig(checkpoint=f"{run}/checkpoints/step_20", device="cpu"))
    expected = (evaluations[-1]["val_loss"], evaluations[-1]["val_accuracy"])
    assert (result.loss, result.accuracy) == pytest.approx(expected, rel=1e-5) and 0 <= result.accuracy <= 1
    assert f"accuracy    {result.accuracy:.4f}" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="learned data=recall, not text"):
        score_checkpoints(EvalConfig(checkpoint=str(run), data=replace(EvalConfig().data, path=__file__)))


@pytest.mark.parametrize(
    ("name", "task", "size", "remedy"),
    [
        ("recall", {"items": 17}, 64, "a size from 68 on and 36 ids"),
        ("recall", {"vocab_size": 17}, 64, "a size from 32 on and 18 ids"),
        ("recall", {}, 63, "an even size from 32 on"),
        ("copy", {}, 63, "an even size from 2 on and 3 ids"),
        ("induction", {}, 2, "a size from 3 on and 3 ids"),
    ],
)
def test_what_a_task_cannot_be_is_refused_in_one_sentence(name, task, size, remedy):
    given = f"^data={name} with data.task.items=.* cannot have model.block_size={size} and data.task.vocab_size="
    with pytest.raises(SettingsError, match=f"{given}.*: choose {remedy}"):
        TaskData(name, TaskConfig(**task), size).check()
    TaskData(name, TaskConfig(), 64).check()
    TaskData("copy", TaskConfig(vocab_size=3), 2).check()


def test_the_task_of_a_checkpoint_has_the_windows_of_each_step_of_its_run(task_config, tmp_path):
    config = replace(task_config, model=replace(task_config.model, vocab_size=16), batch_size=24, seed=5)
    data = open_data(config, None)
    save_checkpoint(tmp_path / "learned", model=GPT(config.model), tokenizer=None, config=config)
    found = learned_task(open_checkpoint(tmp_path / "learned")).train_batch(3, 0, 24)
    assert np.array_equal(found.inputs, data.train_batch(3, 0, 24).inputs) and len(found.targets) == 24


@pytest.mark.slow
def test_a_model_with_fewer_ids_than_the_task_is_refused_and_a_plan_says_how_much_is_scored(task_config):
    with pytest.raises(SettingsError, match="model.vocab_size=15 is less than the task's 16"):
        open_data(replace(task_config, model=replace(task_config.model, vocab_size=15)), None)
    task_config.plan.device = "h100"
    assert "task      recall: 2 answers in each sequence of " in plan_run(train_step, task_config)


def test_sampling_from_a_task_ends_in_one_sentence(tmp_path):
    config = TrainConfig(model=GPTConfig(n_layer=1, n_embd=16, vocab_size=16), data=DataConfig(source="copy"))
    save_checkpoint(tmp_path / "copied", model=GPT(config.model), tokenizer=None, config=config)
    for command in ("sample.py", "export.py"):
        more = ["to=out"] if command == "export.py" else ["device=cpu"]
        done = run_here(command, f"checkpoint={tmp_path / 'copied'}", *more, cwd=tmp_path)
        assert done.returncode == 1 and "learned data=copy, not text" in done.stderr
    assert not (tmp_path / "out").exists()


CELL = """
import numpy as np
from data.tasks import task


@task("mine", vocab_size=SIZE)
def mine(config, count, length, random):
    return np.full((count, length + 1), SIZE - 1), np.ones((count, length), bool)
"""


@mock.patch.dict("data.tasks.TASKS")
@mock.patch.dict("data.tasks.VOCABULARIES")
def test_a_cell_that_runs_again_takes_the_place_of_its_task():
    for size in (5, 9):
        exec(CELL.replace("SIZE", str(size)), {"__name__": "__main__"})
        assert VOCABULARIES["mine"] == size and TASKS["mine"](None, 1, 2, None)[0].tolist() == [[size - 1] * 3]
    for name, function in (("mine", "other"), ("copy", "copy")):
        with pytest.raises(SettingsError, match=f"the name '{name}' is taken: choose another one"):
            exec(CELL.replace("SIZE", "3").replace('"mine"', f'"{name}"').replace("def mine", f"def {function}"), {})
