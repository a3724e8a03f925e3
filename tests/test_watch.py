"""Watching a run: what it leaves to look at is right, and nothing of it can change or end the run."""

import errno
import io
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from test_resume import before_step, stop_at
from tqdm import tqdm

import pages.loss_plot
import training.watch.terminal
from data.batches import evaluation_batches
from pages.loss_plot import draw_loss, draw_losses
from runs.metrics import Evaluation, read_metrics, series
from runs.summary import read_summary
from train import train
from training.evaluation import first_windows
from training.start import start_run
from training.watch.pictures import Report
from training.watch.terminal import Terminal, describe, plot_losses, print_losses
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
    windows, _ = first_windows(run.model, run.data)
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


def test_drawing_takes_at_most_a_hundredth_of_the_time(train_config, monkeypatch):
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
@pytest.mark.parametrize("failing", [[MetricsFile, Summary, Terminal], [Plots, Report]], ids=["words", "drawings"])
def test_watchers_that_fail_are_told_no_more_and_the_run_goes_on(train_config, monkeypatch, caplog, failing, told):
    for watcher in failing:
        monkeypatch.setattr(watcher, told, full_disk, raising=False)
    assert math.isfinite(train(replace(train_config, max_steps=2, eval_interval=2)))
    said = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    lost = "failed ([Errno 28] No space left on device); training goes on without it."
    assert sorted(said) == sorted(f"{watcher.name} {lost}" for watcher in failing)
    assert (Path(train_config.run_dir) / "checkpoints/last").exists()


def test_metrics_are_json_whatever_the_numbers_are(train_config):
    train(replace(train_config, max_steps=1))
    run = start_run(replace(train_config, resume=train_config.run_dir))
    with Watchers(run) as watchers:
        watchers.stepped(loss=math.nan, lr=math.inf, of_heads=[[math.nan, 0.5], [-math.inf]])
    row = json.loads((run.directory / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["loss"], row["lr"], row["of_heads"]) == (None, None, [[None, 0.5], [None]])


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


# loss.png

RUN = [
    {"step": 1, "loss": 7.0, "lr": 0.1, "tokens_per_s": 10.0},
    {"step": 10, "loss": 5.0, "lr": 0.2, "tokens_per_s": 20.0},
    {"step": 10, "val_loss": 4.0},
    {"step": 20, "loss": None, "lr": 0.1, "tokens_per_s": 20.0, "skipped": 3},
    {"step": 20, "val_loss": 4.5, "skipped": 3},
    {"step": 30, "loss": 4.0, "lr": None, "tokens_per_s": None, "skipped": 3},
]
ODD = {
    "nothing": [],
    "one step": RUN[:1],
    "only evaluations": RUN[2:3],
    "nothing finite": [
        {"step": n, "loss": None, "val_loss": None, "lr": None, "tokens_per_s": None, "skipped": n} for n in (1, 2)
    ],
    "infinite in the middle": RUN,
    "zero loss": [{"step": 1, "loss": 0.0}, {"step": 2, "loss": 30.0}],
    "a long run": [{"step": n, "loss": 1 + 1 / n, "lr": 0.1, "tokens_per_s": 5.0} for n in range(1, 3000)],
}


def panel_of(rows: list[dict]):
    panel = Figure().subplots()
    draw_losses(panel, rows)
    return panel, panel.get_legend_handles_labels()[1]


@pytest.mark.parametrize("rows", ODD.values(), ids=ODD)
def test_every_kind_of_run_can_be_drawn(rows, tmp_path):
    draw_loss(rows, "a run", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_the_best_evaluation_and_the_skipped_steps_are_marked():
    panel, labels = panel_of(RUN)
    assert labels == ["training", "validation", "best: 4 at step 10", "3 skipped steps"]
    lines = {line.get_label(): line for line in panel.get_lines()}
    assert list(lines["best: 4 at step 10"].get_xdata()) == [10]
    assert lines["best: 4 at step 10"].get_markerfacecolor() == "none"  # the evaluation itself stays visible
    assert list(lines["3 skipped steps"].get_xdata()) == [20]
    _, labels = panel_of([{"step": n, "loss": 1.0, "skipped": skipped} for n, skipped in enumerate((0, 2, 2, 5))])
    assert labels == ["training", "5 skipped steps"]


def test_a_loss_that_is_not_finite_is_a_gap_in_the_line():
    panel, _ = panel_of(RUN)
    losses = list(next(line for line in panel.get_lines() if line.get_label() == "training").get_ydata())
    assert losses[:2] == [7.0, 5.0] and math.isnan(losses[2]) and losses[3] == 4.0


def test_a_short_run_is_shown_as_it_is_and_a_long_one_smoothed():
    losses = [1.0, 3.0] * 150
    panel, _ = panel_of([{"step": n, "loss": loss} for n, loss in enumerate(losses)])
    raw, smoothed = (list(line.get_ydata()) for line in panel.get_lines())
    assert raw == losses and max(smoothed[50:]) - min(smoothed[50:]) < 0.5
    assert all(1.0 - 1e-9 <= mean <= 3.0 for mean in smoothed)  # means, from the first on


@pytest.mark.parametrize(("losses", "scale"), [((7.0, 2.0), "linear"), ((7.0, 900.0), "log"), ((0.0, 9.0), "linear")])
def test_a_loss_that_explodes_leaves_the_rest_readable(losses, scale):
    panel, _ = panel_of([{"step": n, "loss": loss} for n, loss in enumerate(losses)])
    assert panel.get_yscale() == scale


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    draw_loss(RUN, "a run", tmp_path / "loss.png")
    before = (tmp_path / "loss.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", full_disk)
    with pytest.raises(OSError, match="No space left"):
        draw_loss(RUN, "a run", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


# The plot in the terminal

FALLING = [{"step": step, "loss": 8 - step / 25} for step in range(1, 101)]


class Screen(io.TextIOWrapper):
    def __init__(self, encoding: str, tty: bool):
        super().__init__(io.BytesIO(), encoding=encoding)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def content(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.mark.parametrize("columns", [20, 33, 80, 300])
def test_it_fits_the_terminal(columns):
    lines = plot_losses([*FALLING, {"step": 100, "val_loss": 4.5}], columns).splitlines()
    assert len(lines) == 12 and max(map(len, lines)) == min(columns, 100)


def test_a_falling_loss_falls_from_the_first_column_to_the_last():
    lines = plot_losses(FALLING, 40).splitlines()
    assert lines[0].startswith("7.96 │⠈") and lines[9].startswith("   4 │")
    left_most = [min(i for i, c in enumerate(line) if c > "\u2800") for line in lines[:10]]
    assert left_most == sorted(left_most) and left_most[0] == 6
    assert len(lines[9]) == 40  # the last point is in the last column of the lowest row
    assert lines[11].strip().split() == ["0", "steps,", "●", "validation", "100"]
    assert "training, ● validation" in plot_losses(FALLING, 80).splitlines()[11]


def test_evaluations_are_circles_where_they_belong():
    rows = [{"step": 0, "loss": 2.0}, {"step": 100, "loss": 1.0}, {"step": 50, "val_loss": 2.0}]
    lines = plot_losses(rows, 46).splitlines()
    assert lines[0].index("●") == 3 + 43 // 2  # after "2 │"


def test_losses_that_are_none_not_finite_or_all_the_same_are_no_trouble():
    for rows in ([], [{"step": 1, "loss": None}], [{"step": 1, "loss": math.nan}], [{"step": 3}]):
        assert plot_losses(rows, 80) == ""
    assert plot_losses(FALLING, 19) == ""  # too narrow
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 3.0}]
    assert plot_losses(rows, 30).count("\n") == 12
    assert plot_losses([{"step": 1, "loss": 1e30}, {"step": 2, "loss": 1.0}], 30)


@pytest.mark.parametrize(
    ("encoding", "tty", "lines"), [("utf-8", True, 12), ("utf-8", False, 0), ("latin-1", True, 0), ("ascii", True, 0)]
)
def test_a_terminal_gets_it_without_escape_codes_a_pipe_or_another_encoding_nothing(encoding, tty, lines):
    stream = Screen(encoding, tty)
    print_losses(FALLING, stream)
    assert stream.content().count("\n") == lines and "\x1b" not in stream.content()


def test_the_bar_moves_with_every_step_and_says_where_the_run_is(train_config, monkeypatch):
    seen = []
    shown = partial(tqdm, file=io.StringIO())
    monkeypatch.setattr(training.watch.terminal, "tqdm", lambda disable, **given: shown(disable=False, **given))

    def observe(name):
        method = getattr(Terminal, name)

        def told(self, run, *arguments):
            method(self, run, *arguments)
            seen.append((name, self.bar.n, self.bar.desc, self.bar.postfix or ""))

        monkeypatch.setattr(Terminal, name, told)

    for name in ("moved", "stepped", "evaluates", "evaluated"):
        observe(name)
    train_config.log_interval = 5
    train(train_config)
    assert [n for name, n, *_ in seen if name == "moved"] == [*range(1, train_config.max_steps + 1)]
    words = {name: {one[2].strip() for one in seen if one[0] == name} for name, *_ in seen}
    assert words == {"moved": {""}, "stepped": {""}, "evaluates": {"evaluating"}, "evaluated": {""}}
    last = [text for name, *_, text in seen if name == "stepped"][-1]
    tokens = len(start_run(replace(train_config, run_dir=train_config.run_dir + "2")).data.train)
    epochs = train_config.max_steps * train_config.tokens_per_step / tokens
    assert last.startswith("loss ") and f"epoch {epochs:.2f}" in last


def test_the_description_counts_the_matrices_of_all_blocks(train_config):
    run = start_run(train_config)
    matrices = [p.numel() for name, p in run.model.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    assert f"{sum(matrices):,} of them in 2 blocks" in describe(run)
