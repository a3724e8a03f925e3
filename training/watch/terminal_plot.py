"""A plot of the loss in the terminal, in braille: two dots across and four down in every character."""

from __future__ import annotations

import math
import sys
from shutil import get_terminal_size
from typing import TextIO

from runs.metrics import series

HEIGHT = 10
WIDEST = 100
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # Unicode 11.1: the bit of each dot, by column and row
BLANK = 0x2800


def print_losses(rows: list[dict], stream: TextIO | None = None) -> None:
    """Print the losses of metrics.jsonl's rows where a person sees it: to a UTF-8 terminal, and nowhere else."""
    stream = stream or sys.stdout
    if stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8":
        print(plot_losses(rows, get_terminal_size().columns), end="", file=stream)


def plot_losses(rows: list[dict], columns: int) -> str:
    """The plot in at most `columns` columns: training loss as a line, evaluations as ●; "" where there is none."""
    train, val = (
        [p for p in zip(*series(rows, name), strict=True) if math.isfinite(p[1])] for name in ("loss", "val_loss")
    )
    if not train + val or columns < 20:
        return ""
    losses = [loss for _, loss in train + val]
    low, high, last = min(losses), max(losses), max(step for step, _ in train + val)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    width = min(columns, WIDEST) - margin - 2

    def place(step: int, loss: float) -> tuple[int, int]:
        """Column and row of a point, counted in dots."""
        x = step / max(last, 1) * (2 * width - 1)
        return round(x), round((high - loss) / (high - low or 1) * (4 * HEIGHT - 1))

    cells = [[BLANK] * width for _ in range(HEIGHT)]
    points = [place(*point) for point in train]
    for (x, y), (to_x, to_y) in zip(points, points[1:] or points, strict=False):
        for dot in range(n := max(to_x - x, abs(to_y - y), 1)):
            column, row = x + (to_x - x) * dot // n, y + (to_y - y) * dot // n
            cells[row // 4][column // 2] |= DOTS[column % 2][row % 4]
    for column, row in (place(*point) for point in val):
        cells[row // 4][column // 2] = ord("●")
    end = f"{last:,}"
    legend = next((text for text in ("steps, ● validation", "steps", "") if len(text) < width - len(end)), "")
    lines = [
        f"{label:>{margin}} │{''.join(map(chr, row)).rstrip(chr(BLANK))}"
        for label, row in zip(labels, cells, strict=True)
    ]
    lines += [f"{'':{margin}} └{'─' * width}", f"{'':{margin}}  0{legend:^{width - 1 - len(end)}}{end}", ""]
    return "\n".join(lines)
