"""heads.png: what every head attends to."""

import math
from pathlib import Path

from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from model.heads import HeadStatistics
from pages.loss_plot import save_picture


def draw_heads(maps: Float[Tensor, "L H T T"], path: Path, *, statistics: HeadStatistics, caption: str) -> None:
    """Draw a PNG of layers downwards and heads to the right; in each panel queries downwards, keys to the right."""
    layers, heads, _, _ = maps.shape
    brightest = max(1.0, maps.max().item())  # 1, or a variant's largest weight above it
    beyond = f"the brightest is a weight of {brightest:.3g}, and weights below 0 are drawn as 0"
    note = beyond if brightest > 1 or maps.min() < 0 else ""
    pictures = (maps.clamp(min=0) / brightest).sqrt().numpy()  # √ shows small weights too
    figure = Figure(figsize=(max(1.6 * heads + 1.2, 4.5), 1.6 * layers + 1.2), layout="constrained")
    figure.suptitle(f"{caption}\n{note}".strip(), fontsize=8)
    axes = figure.subplots(layers, heads, squeeze=False)
    for number, panel in enumerate(axes.flat):
        layer, head = divmod(number, heads)
        panel.imshow(pictures[layer, head], cmap="magma", vmin=0, vmax=1)
        panel.set(xticks=[], yticks=[])
        entropy, share = statistics.entropy[layer][head], statistics.relative_entropy[layer][head]
        of_most = f" ({share:.0%})" if math.isfinite(share) else ""
        figures = f"{entropy:.2f} nats{of_most}, {statistics.distance[layer][head]:.1f} back"
        panel.set_title(f"layer {layer} head {head}\n{figures}", fontsize=7)
        if head == 0 and (similarity := statistics.similarity[layer]) is not None:
            panel.set_ylabel(f"heads alike: {similarity:.2f}", fontsize=7)
    save_picture(figure, path)
