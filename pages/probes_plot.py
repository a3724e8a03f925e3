"""The pictures of evaluate.py probes=true."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pages.loss_plot import save_picture


def draw_probes(found: dict[str, Any], folder: Path) -> None:
    """Draw a PNG for each probe whose figures are in `found`, named like the probe."""
    induction, heads = found["induction"], found["heads"]
    change = f"{induction['first_copy']:.2f} nats/token, {induction['second_copy']:.2f} in the copy"
    grid(folder / "induction.png", induction["score"], f"induction score: {induction['block']} random ids, {change}")
    grid(folder / "sinks.png", heads["first"], "mean weight on the first token")
    if any(head > 0 for one in heads["negative"] for head in one or ()):
        grid(folder / "negative.png", heads["negative"], "weight below 0 of a query")
    if gates := heads["gates"]:
        figure = Figure(figsize=(6, 1 + 0.3 * len(gates)), layout="constrained")
        panel = figure.subplots()
        panel.barh(list(gates), [mean for mean, _ in gates.values()])
        panel.invert_yaxis()
        panel.set(xlabel="mean factor of the gate")
        save_picture(figure, folder / "gates.png")
    if "by_position" in found:
        positions(folder / "by_position.png", **found["by_position"])
    if "needle" in found and found["needle"]["lengths"]:
        needle(folder / "needle.png", **found["needle"])


def grid(path: Path, by_head: list[list[float] | None], title: str) -> None:
    """Draw a number for each head: layers downwards, heads to the right; nothing where a layer has none."""
    heads = max((len(one) for one in by_head if one), default=0)
    if not heads:
        return
    values = np.array([one or [np.nan] * heads for one in by_head])
    figure = Figure(figsize=(max(4.5, 0.7 * heads + 1.5), 0.6 * len(values) + 1.4), layout="constrained")
    panel = figure.subplots()
    panel.imshow(values, cmap="magma", vmin=0, vmax=max(1.0, float(np.nanmax(values))), aspect="auto")
    for (layer, head), value in np.ndenumerate(values):
        shown = "–" if np.isnan(value) else f"{value:.2f}"
        panel.text(head, layer, shown, ha="center", va="center", color="black" if value > 0.6 else "white", fontsize=8)
    panel.set(xticks=range(heads), yticks=range(len(values)), xlabel="head", ylabel="layer", facecolor="#888")
    panel.set_title(title, fontsize=9)
    save_picture(figure, path)


def positions(path: Path, trained: int, windows: int, nats: list[float]) -> None:
    """Draw the loss by position, each point the mean of a 128th of the positions."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    parts = np.array_split(np.arange(len(nats)), min(128, len(nats)))
    panel.plot([part.mean() + 1 for part in parts], [np.mean(np.take(nats, part)) for part in parts])
    panel.axvline(trained, color="tab:red", linestyle="--", label=f"trained length, {trained:,}")
    panel.set(xlabel="position", ylabel="nats per token", title=f"mean of {windows} windows that do not slide")
    panel.set_xscale("log", base=2)
    panel.grid(alpha=0.3)
    panel.legend()
    save_picture(figure, path)


def needle(path: Path, lengths: list[int], depths: list[float], nats: list[list[float]]) -> None:
    """Draw what the needle's name adds to its number's log-probability: depths downwards, lengths to the right."""
    figure = Figure(figsize=(max(4.5, 1.1 * len(lengths) + 2), 4), layout="constrained")
    panel, values = figure.subplots(), np.array(nats).T
    most = max(1.0, float(np.abs(values).max()))
    picture = panel.imshow(values, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
    for (depth, length), value in np.ndenumerate(values):
        panel.text(length, depth, f"{value:+.2f}", ha="center", va="center", fontsize=8)
    panel.set(xticks=range(len(lengths)), xticklabels=[f"{n:,}" for n in lengths], xlabel="tokens")
    panel.set(yticks=range(len(depths)), yticklabels=[f"{depth:.0%}" for depth in depths], ylabel="depth of the needle")
    panel.set_title("ln p(number | its name) − ln p(number | another name)", fontsize=9)
    figure.colorbar(picture, label="nats")
    save_picture(figure, path)
