"""A grid of what every head of every layer looks at, as PNG."""

from __future__ import annotations

import math
from pathlib import Path

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from model.heads import HeadStatistics, brightness
from pages.loss_plot import save_picture


def draw_heads(
    maps: Float[Tensor, "L H T T"],
    path: Path,
    *,
    tokens: list[str] | None = None,
    statistics: HeadStatistics | None = None,
    caption: str | None = None,
) -> None:
    """Draw layers downwards and heads to the right; in each panel queries downwards, keys to the right.

    tokens: the text, written along the edges; statistics: the figures in the panels' titles.
    """
    layers, heads, T, _ = maps.shape
    shares, _, note = brightness(maps)
    caption = "\n".join(line for line in (caption, note) if line)
    side = max(1.6, 0.13 * T) if tokens else 1.6  # inches: room for a readable label a token
    width = max(side * heads + 1.2, 4.5 if caption else 0)
    figure = Figure(figsize=(width, side * layers + 1.2), layout="constrained")
    axes = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            panel = axes[layer, head]
            panel.imshow(shares[layer, head].sqrt().numpy(), cmap="magma", vmin=0, vmax=1)  # √ shows small weights too
            keys, queries = (tokens or []) * (layer == layers - 1), (tokens or []) * (head == 0)
            panel.set_xticks(range(len(keys)), keys, rotation=90, fontsize=6, family="monospace")
            panel.set_yticks(range(len(queries)), queries, fontsize=6, family="monospace")
            panel.tick_params(length=0)
            panel.set_title(title(layer, head, statistics), fontsize=7)
        if statistics and (similarity := statistics.similarity[layer]) is not None:
            axes[layer, 0].set_ylabel(f"heads alike: {similarity:.2f}", fontsize=7)
    if caption:
        figure.suptitle(caption, fontsize=8)
    save_picture(figure, path)


def title(layer: int, head: int, statistics: HeadStatistics | None) -> str:
    name = f"layer {layer} head {head}"
    if statistics is None:
        return name
    entropy, share = statistics.entropy[layer][head], statistics.relative_entropy[layer][head]
    of_most = f" ({share:.0%})" if math.isfinite(share) else ""
    return f"{name}\n{entropy:.2f} nats{of_most}, {statistics.distance[layer][head]:.1f} back"
