"""loss.png shows what was measured, whatever it was."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from pages.loss_plot import draw_loss, draw_losses

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


def test_a_loss_that_is_not_finite_is_a_gap_in_the_line():
    panel, _ = panel_of(RUN)
    losses = list(next(line for line in panel.get_lines() if line.get_label() == "training").get_ydata())
    assert losses[:2] == [7.0, 5.0] and math.isnan(losses[2]) and losses[3] == 4.0


def test_a_short_run_is_shown_as_it_is_and_a_long_one_smoothed():
    losses = [1.0, 3.0] * 150
    panel, _ = panel_of([{"step": n, "loss": loss} for n, loss in enumerate(losses)])
    raw, smoothed = (list(line.get_ydata()) for line in panel.get_lines())
    assert raw == losses and max(smoothed[50:]) - min(smoothed[50:]) < 0.5


@pytest.mark.parametrize(("losses", "scale"), [((7.0, 2.0), "linear"), ((7.0, 900.0), "log"), ((0.0, 9.0), "linear")])
def test_a_loss_that_explodes_leaves_the_rest_readable(losses, scale):
    panel, _ = panel_of([{"step": n, "loss": loss} for n, loss in enumerate(losses)])
    assert panel.get_yscale() == scale


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("full")

    draw_loss(RUN, "a run", tmp_path / "loss.png")
    before = (tmp_path / "loss.png").read_bytes()
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="full"):
        draw_loss(RUN, "a run", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
