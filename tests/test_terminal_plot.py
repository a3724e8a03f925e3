"""The plot in the terminal: right, narrow enough, and only where a person sees it."""

from __future__ import annotations

import io
import math

import pytest

from training.watch.terminal import plot_losses, print_losses

FALLING = [{"step": step, "loss": 8 - step / 25} for step in range(1, 101)]


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding: str, tty: bool = True):
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


def test_evaluations_are_circles_where_they_belong():
    rows = [{"step": 0, "loss": 2.0}, {"step": 100, "loss": 1.0}, {"step": 50, "val_loss": 2.0}]
    lines = plot_losses(rows, 46).splitlines()
    assert lines[0].index("●") == 3 + 43 // 2  # after "2 │"


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": None}], [{"step": 1, "loss": math.nan}], [{"step": 3}]])
def test_nothing_to_plot_is_no_plot(rows):
    assert plot_losses(rows, 80) == ""


def test_too_narrow_is_no_plot():
    assert plot_losses(FALLING, 19) == ""


def test_losses_that_are_not_finite_or_all_the_same_are_no_trouble():
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 3.0}]
    assert plot_losses(rows, 30).count("\n") == 12
    assert plot_losses([{"step": 1, "loss": 1e30}, {"step": 2, "loss": 1.0}], 30)


def test_a_terminal_gets_it_without_escape_codes():
    terminal = Terminal("utf-8")
    print_losses(FALLING, terminal)
    assert terminal.content().count("\n") == 12 and "\x1b" not in terminal.content()


@pytest.mark.parametrize(("encoding", "tty"), [("utf-8", False), ("latin-1", True), ("ascii", True)])
def test_a_pipe_or_another_encoding_gets_nothing(encoding, tty):
    stream = Terminal(encoding, tty)
    print_losses(FALLING, stream)
    assert stream.content() == ""
