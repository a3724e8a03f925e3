"""Synthetic tasks: what their windows are, and that a run on one keeps the promises of a run on text."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import random_gpt, run_here
from test_train import metrics

from data.config import DataConfig, TaskConfig
from data.tasks import HELD_OUT, TASKS, TaskData, distinct, uniform_stream
from errors import CheckpointError, SettingsError
from evaluate import EvaluateConfig, evaluate
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import open_checkpoint, save_checkpoint
from sweeps.leaderboard import write_leaderboard
from train import train
from training.config import TrainConfig
from training.distributed import Ranks
from training.evaluation import evaluate as score
from training.run import Run
from training.step import take_step

NO_PICTURES = pytest.mark.usefixtures("no_pictures")


def drawn(name: str, T: int, rows: int = 64, **task) -> tuple[np.ndarray, np.ndarray]:
    return TASKS[name].make(uniform_stream("test"), rows, T, TaskConfig(**task))


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


def test_draws_without_replacement_are_those_of_numpy():
    weights = np.array([5.0, 1.0, 3.0, 1.0])
    ours = Counter(map(tuple, distinct(uniform_stream("draws")(8_000, 4), 2, weights).tolist()))
    generator = np.random.default_rng(1)
    theirs = Counter(tuple(generator.choice(4, 2, replace=False, p=weights / 10).tolist()) for _ in range(8_000))
    assert ours.keys() == theirs.keys() and all(abs(ours[pair] - theirs[pair]) < 260 for pair in ours)


def test_copy_repeats_what_stands_before_the_mark():
    inputs, targets = drawn("copy", 32, vocab_size=9)
    assert np.array_equal(targets[:, 16:], inputs[:, :16]) and (targets[:, :16] == -1).all()
    assert (inputs[:, 16] == 0).all() and np.array_equal(inputs[:, 17:], inputs[:, :15])
    assert set(np.unique(inputs[:, :16])) == set(range(1, 9))


def test_selective_copy_tells_the_ids_among_the_noise_in_their_order():
    inputs, targets = drawn("selective_copy", 40, items=5, vocab_size=9)
    for row, wanted in zip(inputs[:, :35], targets, strict=True):
        assert row[row != 0].tolist() == wanted[35:].tolist() and (wanted[:35] == -1).all()
    assert (inputs[:, 35:] == 1).all() and set(np.unique(targets[:, 35:])) == set(range(2, 9))


def test_induction_asks_for_what_followed_the_mark():
    inputs, targets = drawn("induction", 10, rows=500)
    places = (inputs[:, :-1] == 0).argmax(axis=1)
    assert ((inputs == 0).sum(axis=1) == 2).all() and set(places) == set(range(8)) and (inputs[:, -1] == 0).all()
    assert np.array_equal(targets[:, -1], inputs[np.arange(500), places + 1]) and (targets[:, :-1] == -1).all()


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_a_function_of_seed_and_step_and_cut_without_a_change(name):
    data = TaskData(name, TaskConfig(items=4), seed=3)
    batch, again = data.training(32, 12, seed=3), data.training(32, 12, seed=3)
    later = again(7, 0, 12)
    whole = batch(5, 0, 12)
    parts = [again(5, start, start + 3) for start in range(0, 12, 3)]
    for field in ("inputs", "targets"):
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(whole, field))
    assert not np.array_equal(later.inputs, whole.inputs)
    assert not np.array_equal(data.training(32, 12, seed=4)(5, 0, 12).inputs, whole.inputs)
    assert ((whole.targets != -1).sum(axis=1) == data.targets(32)).all()
    held_out = [np.concatenate([part.inputs for part in data.held_out(32, size)]) for size in (5, HELD_OUT)]
    assert np.array_equal(*held_out) and len(held_out[0]) == HELD_OUT
    assert not (held_out[0][:, None, :] == whole.inputs).all(-1).any()


def test_the_same_seed_draws_the_same_windows_on_every_machine():
    assert uniform_stream("a")(3).tolist() == [0.5532476238985743, 0.08723437013155333, 0.05861510453332841]


@pytest.fixture
def task_config(train_config: TrainConfig) -> TrainConfig:
    """A run of 20 steps of a small recall."""
    data = DataConfig(source="recall", task=TaskConfig(items=2, vocab_size=16))
    return replace(train_config, data=data, sample_tokens=0)


@NO_PICTURES
def test_a_run_reports_accuracy_in_place_of_bits_per_byte_and_resumes_to_the_same_bits(task_config, tmp_path, capsys):
    train(task_config)
    evaluations = [row for row in metrics(task_config.run_dir) if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20] and not any("val_bpb" in row for row in evaluations)
    assert all(0 <= row["val_accuracy"] <= 1 for row in evaluations)
    summary = json.loads((Path(task_config.run_dir) / "summary.json").read_text())
    best = min(evaluations, key=lambda row: row["val_loss"])
    assert summary["val_accuracy"] == best["val_accuracy"] and summary["val_bpb"] is None

    checkpoint = open_checkpoint(f"{task_config.run_dir}/checkpoints/step_10")
    assert not (checkpoint.path / "tokenizer.json").exists() and checkpoint.model.config.vocab_size == 16
    whole = open_checkpoint(f"{task_config.run_dir}/checkpoints/step_20").model.state_dict()
    resumed = tmp_path / "resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    checkpoint.path.resolve().rename(resumed / "checkpoints" / "step_10")
    train(replace(task_config, run_dir=None, resume=str(resumed)))
    again = open_checkpoint(f"{resumed}/checkpoints/step_20").model.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)

    (result,) = evaluate(EvaluateConfig(checkpoint=f"{resumed}/checkpoints/step_20", device="cpu"))
    assert (result.loss, result.accuracy) == pytest.approx(
        (evaluations[-1]["val_loss"], evaluations[-1]["val_accuracy"]), rel=1e-5
    )
    assert f"accuracy    {result.accuracy:.4f}" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="learned data=recall and has no tokenizer"):
        evaluate(EvaluateConfig(checkpoint=str(resumed), data=replace(EvaluateConfig().data, path=__file__)))


def test_a_second_model_that_is_too_small_for_the_task_is_refused_before_the_first_one_answers(
    task_config, tmp_path, monkeypatch
):
    monkeypatch.setattr("training.evaluation.evaluate", None)
    for name, size in (("whole", 16), ("small", 8)):
        model = replace(task_config.model, vocab_size=size)
        save_checkpoint(tmp_path / name, model=GPT(model), tokenizer=None, config=replace(task_config, model=model))
    both = EvaluateConfig(checkpoint=str(tmp_path / "whole"), against=str(tmp_path / "small"), device="cpu")
    with pytest.raises(SettingsError, match="small has 8 ids and windows of 16, too few for recall: name another"):
        evaluate(both)


def test_micro_batches_take_the_step_of_the_whole_batch(task_config):
    def stepped(micro: int | None) -> tuple[float, float]:
        config = replace(task_config, micro_batch_size=micro, model=replace(task_config.model, vocab_size=16))
        torch.manual_seed(0)
        data = TaskData("recall", config.data.task, seed=1)
        model = GPT(config.model)
        run = Run(config, torch.device("cpu"), torch.float32, data, model, model)
        loss, norm = take_step(run, 0)
        return loss.item(), norm.item()

    assert stepped(None) == pytest.approx(stepped(2), rel=1e-5)


def test_ranks_share_an_evaluation_whose_parts_make_the_whole():
    model, task = random_gpt(vocab_size=16), TaskData("recall", TaskConfig(items=2, vocab_size=16), seed=1)
    whole, *parts = (
        score(model, task, 16, 100, torch.autocast("cpu", enabled=False), ranks)
        for ranks in (Ranks(), *(mock.Mock(rank=rank, size=2, is_first=False, sum_=lambda x: x) for rank in (0, 1)))
    )
    assert whole.tokens == 2 * HELD_OUT and sum(part.nats for part in parts) == pytest.approx(whole.nats, rel=1e-6)
    assert sum(part.accuracy for part in parts) == pytest.approx(whole.accuracy) and 0 < whole.accuracy < 1


def test_a_leaderboard_of_a_task_is_ranked_by_accuracy(tmp_path):
    for number, accuracy in enumerate((0.5, None, 0.99)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"number": number, "overrides": [f"n={number}"], "reason": None}))
        known = {"status": "finished", "val_loss": 1.0, "val_accuracy": accuracy}
        (folder / "summary.json").write_text(json.dumps(known))
    table = write_leaderboard(tmp_path)
    assert "val accuracy" in table and "val bpb" not in table
    rows = list(csv.DictReader((tmp_path / "leaderboard.csv").open()))
    assert [row["job"] for row in rows] == ["2", "0", "1"] and rows[0]["val_accuracy"] == "0.99"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("data=recall data.task.items=17", "data=recall with data.task.items=17 needs model.block_size=68 or more"),
        ("data=recall data.task.vocab_size=17", "needs data.task.vocab_size=18 or more, not 17"),
        ("data=recall model.block_size=63", "data=recall needs an even model.block_size, not 63"),
        ("data=recall data.task.items=0", "data.task.items=0 must be at least 1"),
        ("data=recall data.task.power_a=0", "data.task.power_a=0.0 must be finite and above 0"),
        ("data=recall data.path=notes.txt", "data.path=notes.txt means nothing with data=recall"),
        ("data=recall tokenizer=byte", "tokenizer means nothing with data=recall"),
        ("data=copy data.task.items=4", "data.task.items=4 means nothing with data=copy"),
        ("data.task.vocab_size=64", "data.task.vocab_size=64 means nothing with data=stdlib"),
        ("data=recall model.vocab_size=100", "model.vocab_size=100 is less than the task's 1024"),
    ],
)
def test_what_a_task_cannot_be_is_refused_in_one_sentence(arguments, sentence, tmp_path):
    done = run_here("train.py", *arguments.split(), "dry_run=true", cwd=tmp_path)
    assert done.returncode == 1 and sentence in done.stderr and done.stderr.count("\n") == 1


def test_a_plan_of_a_task_says_how_much_is_scored(tmp_path):
    done = run_here(
        "train.py", "data=recall", "model.n_layer=1", "model.n_embd=16", "batch_size=2", "dry_run=true", cwd=tmp_path
    )
    assert "task        recall, 8 of a window's tokens are scored" in done.stdout and done.returncode == 0


def test_sampling_from_a_task_ends_in_one_sentence(tmp_path):
    config = TrainConfig(model=GPTConfig(n_layer=1, n_embd=16, vocab_size=16), data=DataConfig(source="copy"))
    save_checkpoint(tmp_path / "copied", model=GPT(config.model), tokenizer=None, config=config)
    for command in ("sample.py", "export.py"):
        more = ["to=out"] if command == "export.py" else ["device=cpu"]
        done = run_here(command, f"checkpoint={tmp_path / 'copied'}", *more, cwd=tmp_path)
        assert done.returncode == 1 and "has learned data=copy and has no tokenizer" in done.stderr
    assert not (tmp_path / "out").exists()
