"""Watching a run: what it leaves to look at, and that nothing of it can change or end the run."""

from __future__ import annotations

import errno
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_resume import before_step, stop_at

import pages.loss_plot
from data.batches import evaluation_batches
from runs.metrics import Evaluation, read_metrics, series
from runs.summary import read_summary
from train import train
from training.evaluation import first_windows
from training.start import start_run
from training.watch.terminal import Terminal
from training.watch.watchers import MetricsFile, Plots, Summary, Watchers

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


def test_watching_does_not_change_a_bit_of_the_run(train_config, tmp_path, monkeypatch):
    train_config.model = replace(train_config.model, dropout=0.2, attention_dropout=0.2)
    unwatched = replace(train_config, run_dir=str(tmp_path / "unwatched"))
    train(train_config)
    for told in ("stepped", "evaluated", "tell"):
        monkeypatch.setattr(Watchers, told, lambda *_, **__: None)
    train(unwatched)
    watched, blind = (
        load_file(Path(c.run_dir) / "checkpoints/last/model.safetensors") for c in (train_config, unwatched)
    )
    assert all(torch.equal(watched[name], blind[name]) for name in blind)
    assert not list(Path(unwatched.run_dir).glob("*.png"))


def test_heads_are_measured_on_the_beginning_of_the_validation_text_in_few_tokens(train_config):
    run = start_run(train_config)
    windows = first_windows(run.model, run.data.val)
    whole = next(evaluation_batches(run.data.val, block_size=16, batch_size=10_000))[:, :-1]
    assert windows.shape[1] == 16 and 0 < windows.numel() <= 512
    assert torch.equal(windows, torch.from_numpy(whole[: len(windows)]))


def test_the_pictures_are_there_and_the_loss_already_at_an_evaluation(train_config, monkeypatch):
    before_step(monkeypatch, 11, lambda run: seen.append((run.directory / "loss.png").is_file()))
    seen: list[bool] = []
    train(train_config)
    assert seen == [True]
    for name in ("loss.png", "heads.png"):
        assert (Path(train_config.run_dir) / name).read_bytes().startswith(b"\x89PNG")
    assert not list(Path(train_config.run_dir).glob(".*unfinished"))


def test_drawing_takes_at_most_a_fiftieth_of_the_time(train_config, monkeypatch):
    """Drawings that take a while are not repeated at every evaluation."""
    drawn = []

    def slow(rows, title, path):
        drawn.append(len(rows))
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + 100)

    clock = time.perf_counter
    monkeypatch.setattr(pages.loss_plot, "draw_loss", slow)
    train(replace(train_config, eval_interval=2))
    assert len(drawn) == 2  # at the first evaluation, and at the end


def test_a_stopped_and_resumed_run_leaves_the_picture_of_both_parts(train_config, monkeypatch):
    pictured = []
    monkeypatch.setattr(pages.loss_plot, "draw_loss", lambda rows, title, path: pictured.append(list(rows)))
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        with pytest.raises(SystemExit):
            train(train_config)
    assert [row["step"] for row in pictured[-1]] == [1, 2, 3, 4, 5, 6]
    train(replace(train_config, resume=train_config.run_dir))
    assert [row["step"] for row in pictured[-1] if "loss" in row] == list(range(1, 21))
    assert len(evaluations(train_config.run_dir)) == 2
    summary = read_summary(Path(train_config.run_dir))
    assert summary["status"] == "finished" and summary["val_loss"] == evaluations(train_config.run_dir)[-1]["val_loss"]


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


@pytest.mark.parametrize("told", ["began", "stepped", "evaluated", "saved", "ended"])
@pytest.mark.parametrize("watcher", [MetricsFile, Plots, Summary, Terminal])
def test_a_watcher_that_fails_is_told_no_more_and_the_run_goes_on(train_config, monkeypatch, caplog, watcher, told):
    monkeypatch.setattr(watcher, told, full_disk, raising=False)
    assert math.isfinite(train(replace(train_config, max_steps=2, eval_interval=2)))
    said = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert said == [f"{watcher.name} failed ([Errno 28] No space left on device); training goes on without it."]
    assert (Path(train_config.run_dir) / "checkpoints/last").exists()


def test_metrics_are_json_whatever_the_numbers_are(train_config):
    train(replace(train_config, max_steps=1))
    run = start_run(replace(train_config, resume=train_config.run_dir))
    with Watchers(run) as watchers:
        watchers.stepped(loss=math.nan, lr=math.inf)
    row = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["loss"] is None and row["lr"] is None


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
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with start_run(train_config) as run, Watchers(run) as watchers:
        for number in range(1, 9):
            now[0] += 1.0
            run.progress.step = number
            if number % 4 == 0:
                watchers.stepped(loss=1.0, lr=0.1, grad_norm=1.0)
            if number == 6:
                now[0] += 500
                watchers.evaluated(Evaluation(1.0, 1, 1), "")
    rows = read_metrics(run.directory / "metrics.jsonl")
    assert [row["tokens_per_s"] for row in rows if "loss" in row] == [8 * 16, 8 * 16]
