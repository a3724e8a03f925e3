"""Draw the pictures of docs/attention.md and docs/attention_field.md:  python docs/draw.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

from model.attention import attention_weights, make_attention
from model.config import AttentionConfig
from model.masks import alibi_bias, causal_mask, combine, padding_mask, sliding_window_mask

IMAGES = ROOT / "docs" / "images"


def weights() -> None:
    """Three ways to weigh the past, from a plain average to saturated softmax."""
    torch.manual_seed(4)
    T, D = 8, 16
    q, k = torch.randn(1, T, D), torch.randn(1, T, D)
    panels = {
        "average of the past": attention_weights(0 * q, k, is_causal=True),
        "softmax(q kᵀ/√D), causal": attention_weights(1.5 * q, k, is_causal=True),
        "unscaled: saturated": attention_weights(1.5 * q, k, is_causal=True, scale=1.0),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.6), layout="constrained")
    for panel, (title, weight) in zip(axes, panels.items(), strict=True):
        panel.imshow(weight[0], cmap="magma", vmin=0, vmax=1)
        panel.set(title=title, xlabel="key", ylabel="query")
    figure.savefig(IMAGES / "weights.png", dpi=120)


def masks() -> None:
    """Which query sees which key: bright is allowed."""
    panels = {
        "causal, T = S": causal_mask(6, 6),
        "causal, T = 2, S = 6": causal_mask(2, 6),
        "sliding window of 3": sliding_window_mask(6, 6, 3),
        "causal and padding": combine(causal_mask(6, 6), padding_mask(torch.tensor([[0, 0, 1, 1, 1, 1]])))[0, 0],
        "ALiBi's bias, one head": alibi_bias(8, 6, 6)[1].masked_fill(~causal_mask(6, 6), -4),
    }
    figure, axes = plt.subplots(1, 5, figsize=(12, 2.8), layout="constrained")
    for panel, (title, mask) in zip(axes, panels.items(), strict=True):
        panel.imshow(mask.float(), cmap="magma", interpolation="nearest")
        panel.set(title=title, xlabel="key", ylabel="query", xticks=range(6), yticks=range(mask.shape[0]))
        panel.title.set_fontsize(9)
    figure.savefig(IMAGES / "masks.png", dpi=120)


def rotation() -> None:
    """A query at 5 and a key at 3 form the same angle as a query at 9 and a key at 7."""
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained", subplot_kw={"aspect": "equal"})
    for panel, (m, n) in zip(axes, ((5, 3), (9, 7)), strict=True):
        for name, position, start, color in (("q", m, 0.9, "tab:blue"), ("k", n, 0.2, "tab:orange")):
            angle = torch.tensor(start + 0.35 * position)
            panel.annotate(
                "", (angle.cos(), angle.sin()), (0, 0), arrowprops={"arrowstyle": "->", "color": color, "lw": 2}
            )
            panel.text(1.12 * angle.cos(), 1.12 * angle.sin(), f"{name} at {position}", color=color, ha="center")
        panel.add_patch(plt.Circle((0, 0), 1, fill=False, alpha=0.3))
        panel.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), xticks=[], yticks=[], title=f"positions {m} and {n}")
    figure.savefig(IMAGES / "rope.png", dpi=120)


def field() -> None:
    """The weights of one head over the same text, by what the field has added."""
    forms = ("sdpa", "sdpa+window", "sdpa+forget", "sparsemax", "sigmoid", "sdpa+diff", "retention", "delta")
    T, C = 24, 32
    torch.manual_seed(1)
    x = torch.randn(1, T, C)
    x[:, 12:] = x[:, :12]  # the second half repeats the first
    figure, axes = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
    for panel, form in zip(axes.flat, forms, strict=True):
        torch.manual_seed(1)
        window = 6 if "window" in form else None
        layer = make_attention(
            AttentionConfig(attention=form, n_embd=C, n_head=2, attention_window=window, rope_fraction=0.5)
        )
        with torch.no_grad():
            for name in ("q_proj", "k_proj"):
                torch.nn.init.orthogonal_(getattr(layer, name).weight)
            layer.k_proj.weight.copy_(layer.q_proj.weight[:C])  # tokens look for their like
            weight = layer.eval().weights(x)[0, 0]
        most = weight.abs().max()
        panel.imshow(weight, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        panel.set(title=form, xticks=[], yticks=[])
    figure.savefig(IMAGES / "field.png", dpi=100)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    weights()
    masks()
    rotation()
    field()
    field()
