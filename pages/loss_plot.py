"""loss.png: how a run went, at a glance."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data.files import replacing
from runs.metrics import Row, series

FEW = 30  # points that are drawn one by one, as they are


def draw_loss(rows: list[Row], title: str, path: Path) -> None:
    """Draw training and validation loss, learning rate and speed of metrics.jsonl's rows, a panel each."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    loss, lr, speed = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1, 1])
    draw_losses(loss, rows)
    loss.set_title(title, fontsize=10)
    _line(lr, *series(rows, "lr"), color="tab:green")
    lr.set(ylabel="learning rate", ylim=(0, None))
    steps, speeds = series(rows, "tokens_per_s")
    _line(speed, steps, [value / 1000 for value in speeds], color="tab:purple")
    speed.set(ylabel="1,000 tokens/s", ylim=(0, None), xlabel="step")
    if known := [value for value in speeds if math.isfinite(value)]:
        speed.set_title(f"median {median(known):,.0f} tokens/s", fontsize=8, loc="right", pad=2)
    speed.xaxis.get_major_locator().set_params(integer=True)
    for panel in (loss, lr, speed):
        panel.grid(alpha=0.3)
        panel.yaxis.set_label_coords(-0.075, 0.5)
    save_picture(figure, path)


def draw_losses(panel: Axes, rows: list[Row]) -> None:
    """Draw the losses in one panel, and mark the best evaluation and the steps that were skipped."""
    steps, losses = series(rows, "loss")
    if any(map(math.isfinite, losses)):
        if len(losses) > FEW:
            panel.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1)
        _line(panel, steps, _smooth(losses), color="tab:blue", label="training")
    steps, val = series(rows, "val_loss")
    if finite := [(loss, step) for step, loss in zip(steps, val, strict=True) if math.isfinite(loss)]:
        panel.plot(steps, val, "o-", color="tab:orange", markersize=4, label="validation")
        best, step = min(finite)
        (star,) = panel.plot(step, best, "*", color="tab:red", markersize=16)
        star.set(label=f"best: {best:.5g} at step {step:,}", markerfacecolor="none")  # its evaluation is seen in it
    skipped, before = {}, 0
    for row in rows:
        if (count := row.get("skipped", 0)) > before:
            skipped[row["step"]] = count - before
        before = count
    if skipped:
        label, bottom = f"{sum(skipped.values()):,} skipped steps", panel.get_xaxis_transform()
        panel.plot(list(skipped), [0.03] * len(skipped), "|", color="black", transform=bottom, label=label)
    seen = [loss for loss in (*losses, *val) if math.isfinite(loss)]
    if not seen:
        panel.text(0.5, 0.5, "no finite loss", transform=panel.transAxes, ha="center")
    elif min(seen) > 0 and max(seen) > 20 * min(seen):
        panel.set_yscale("log")  # a loss that has exploded leaves the rest readable
    panel.set_ylabel(f"loss (nats per {'answer' if any('val_accuracy' in row for row in rows) else 'token'})")
    if panel.get_legend_handles_labels()[0]:
        panel.legend()


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as PNG in place of what was there; OSError when it cannot be written."""
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def _line(panel: Axes, steps: list[int], values: list[float], **style: Any) -> None:
    panel.plot(steps, values, marker="." if len(steps) <= FEW else None, **style)


def _smooth(losses: list[float]) -> list[float]:
    """An exponential moving average over a 30th of the run, corrected for its start; it has the losses' gaps."""
    weight = 1 - min(1.0, FEW / len(losses))
    smoothed, total, norm = [], 0.0, 0.0
    for loss in losses:
        if math.isfinite(loss):
            total, norm = weight * total + (1 - weight) * loss, weight * norm + (1 - weight)
        smoothed.append(total / norm if math.isfinite(loss) else math.nan)
    return smoothed
