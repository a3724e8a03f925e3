"""Watching a run: what it leaves to look at, and that nothing of it can change or end the run."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pages.loss_plot
import training.step
import training.watch.monitor
from data.batches import evaluation_batches
from runs.metrics import MetricsLog, read_metrics, series
from train import train
from training.evaluation import first_windows
from training.run import Run
from training.start import start_run

FIGURES = ("attention_entropy", "attention_relative_entropy", "attention_distance", "head_similarity")


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def evaluations(run_dir: str) -> list[dict]:
    return [row for row in read_metrics(Path(run_dir) / "metrics.jsonl") if "val_loss" in row]


def test_an_evaluation_says_of_every_head_what_it_attends_to(train_config):
    train(train_config)
    for row in evaluations(train_config.run_dir):
        layers, heads = train_config.model.n_layer, train_config.model.n_head
        for name in FIGURES[:3]:
            assert [len(of_layer) for of_layer in row[name]] == [heads] * layers, name
        assert all(0 <= share <= 1 for of_layer in row["attention_relative_entropy"] for share in of_layer)
        assert all(0 <= alike <= 1 for alike in row["head_similarity"]) and len(row["head_similarity"]) == layers


def test_measuring_the_heads_does_not_change_a_bit_of_the_run(train_config, tmp_path, monkeypatch):
    train_config.model = replace(train_config.model, dropout=0.2, attention_dropout=0.2)
    unwatched = replace(train_config, run_dir=str(tmp_path / "unwatched"))
    train(train_config)
    monkeypatch.setattr(training.watch.monitor.Monitor, "heads", lambda self: None)
    train(unwatched)
    watched, blind = (
        load_file(Path(c.run_dir) / "checkpoints/last/model.safetensors") for c in (train_config, unwatched)
    )
    assert all(torch.equal(watched[name], blind[name]) for name in blind)
    assert not set(FIGURES) & evaluations(unwatched.run_dir)[-1].keys()
    assert not (Path(unwatched.run_dir) / "heads.png").exists()


def test_heads_are_measured_on_the_beginning_of_the_validation_text_in_few_tokens(train_config):
    run = start_run(train_config)
    windows = first_windows(run.model, run.data.val)
    whole = next(evaluation_batches(run.data.val, block_size=16, batch_size=10_000))[:, :-1]
    assert windows.shape[1] == 16 and 0 < windows.numel() <= 512
    assert torch.equal(windows, torch.from_numpy(whole[: len(windows)]))


def test_the_pictures_are_there_and_the_loss_already_at_an_evaluation(train_config, monkeypatch):
    def take_step(run: Run, step: int):
        if step == 11:  # the evaluation after 10 updates is over
            assert (run.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
        return original(run, step)

    original = training.step.take_step
    monkeypatch.setattr("training.step.take_step", take_step)
    train(train_config)
    for name in ("loss.png", "heads.png"):
        assert (Path(train_config.run_dir) / name).read_bytes().startswith(b"\x89PNG")
    assert not list(Path(train_config.run_dir).glob(".*unfinished"))


def test_drawing_takes_at_most_a_fiftieth_of_the_time(train_config, monkeypatch):
    """Drawings that take a while are not repeated at every evaluation."""
    drawn = []

    def slow(rows, title, path):
        drawn.append(len(rows))
        monkeypatch.setattr(training.watch.monitor.time, "perf_counter", lambda: clock() + 100)

    clock = training.watch.monitor.time.perf_counter
    monkeypatch.setattr(pages.loss_plot, "draw_loss", slow)
    train(replace(train_config, eval_interval=2))
    assert len(drawn) == 2  # at the first evaluation, and at the end


def test_a_stopped_run_leaves_its_picture(train_config, monkeypatch):
    def stop(run: Run, step: int):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, step)

    original = training.step.take_step
    monkeypatch.setattr("training.step.take_step", stop)
    with pytest.raises(SystemExit):
        train(train_config)
    assert (Path(train_config.run_dir) / "loss.png").exists()


@pytest.mark.parametrize("settings", [{"max_steps": 1}, {"sample_tokens": 0}, {"log_interval": 1000}], ids=str)
def test_the_shortest_runs_are_drawn_too(train_config, settings):
    train(replace(train_config, **settings))
    assert (Path(train_config.run_dir) / "loss.png").exists()


def test_a_full_disk_costs_the_pictures_and_not_the_run(train_config, monkeypatch, caplog):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full_disk)
    train_config.wandb.mode = "offline"
    assert math.isfinite(train(train_config))
    assert "loss.png cannot be drawn ([Errno 28] No space left on device)." in caplog.text
    assert "heads.png cannot be drawn" in caplog.text and "wandb failed" not in caplog.text
    assert (Path(train_config.run_dir) / "checkpoints/last").exists()


def test_a_full_disk_ends_the_metrics_and_not_the_run(tmp_path, caplog):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", append=False)
    metrics.write({"step": 1, "loss": 2.0})

    class Full:
        write = flush = full_disk

    metrics.file = Full()
    metrics.write({"step": 2})
    metrics.write({"step": 3})
    metrics.close()
    assert len(caplog.records) == 1 and "training goes on without it" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def test_metrics_are_json_whatever_the_numbers_are(tmp_path):
    metrics = MetricsLog(tmp_path / "metrics.jsonl", append=False)
    metrics.write({"step": 1, "loss": math.nan, "attention_entropy": [[1.0, math.inf]], "head_similarity": [None]})
    line = (tmp_path / "metrics.jsonl").read_text()
    metrics.close()
    assert json.loads(line) == {
        "step": 1, "loss": None, "attention_entropy": [[1.0, None]], "head_similarity": [None]
    }  # fmt: skip


def test_lines_that_are_not_whole_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n\n7\n{"loss": 1}\n\xff\xfe\n{"step": 3, "loss": null}\n{"st'
    )
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [1, 3]
    steps, losses = series(rows, "loss")
    assert steps == [1, 3] and losses[0] == 2.0 and math.isnan(losses[1])


def test_an_evaluation_between_two_lines_does_not_speed_the_training_up(train_config, monkeypatch):
    """tokens_per_s counts the steps and the time since the evaluation, not since the line before it."""
    now = [0.0]
    monkeypatch.setattr(training.watch.monitor.time, "perf_counter", lambda: now[0])
    monitor = training.watch.monitor.Monitor(start_run(train_config))

    def step(number: int) -> None:
        now[0] += 1.0
        if number % 4 == 0:
            monitor.step(number, loss=1.0, lr=0.1, grad_norm=1.0)
        if number == 6:
            now[0] += 500
            monitor.evaluation(6, training.watch.monitor.Evaluation(1.0, 1, 1), "")

    for number in range(1, 9):
        step(number)
    rows = read_metrics(monitor.run.directory / "metrics.jsonl")
    assert [row["tokens_per_s"] for row in rows if "loss" in row] == [8 * 16, 8 * 16]
