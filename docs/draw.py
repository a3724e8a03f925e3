"""Draw the pictures of docs/attention.md and docs/attention_field.md:  python docs/draw.py"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.mistakes import mistakes_explained
from docs.command import arguments_asked
from model.attention import make_attention
from model.attention.masks import alibi_sum, causal_mask, padding_mask
from model.config import AttentionConfig

IMAGES = ROOT / "docs" / "images"


def weights() -> None:
    """Three ways to weight the past, from a plain average to a saturated softmax."""
    torch.manual_seed(4)
    q, k = torch.randn(2, 8, 16)
    scores = {
        "average of the past": 0 * q @ k.mT,
        "softmax(q kᵀ/√D), causal": 1.5 * q @ k.mT / 16**0.5,
        "unscaled: saturated": 1.5 * q @ k.mT,
    }
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for panel, (title, score) in zip(figure.subplots(1, 3), scores.items(), strict=True):
        weight = score.masked_fill(~causal_mask(8, 8), -torch.inf).softmax(-1)
        panel.imshow(weight, cmap="magma", vmin=0, vmax=1)
        panel.set(title=title, xlabel="key", ylabel="query")
    figure.savefig(IMAGES / "weights.png", dpi=120)


def masks() -> None:
    """Which query sees which key: bright is allowed."""
    row, column = (part[1] for part in alibi_sum(8, 6, 6))
    panels = {
        "causal, T = S": causal_mask(6, 6),
        "causal, T = 2, S = 6": causal_mask(2, 6),
        "sliding window of 3": causal_mask(6, 6, window=3),
        "causal and padding": (causal_mask(6, 6) & padding_mask(torch.tensor([[0, 0, 1, 1, 1, 1]])))[0, 0],
        "ALiBi's bias, one head": (row[:, None] + column).masked_fill(~causal_mask(6, 6), -4),
    }
    figure = Figure(figsize=(12, 2.8), layout="constrained")
    for panel, (title, mask) in zip(figure.subplots(1, 5), panels.items(), strict=True):
        panel.imshow(mask.float(), cmap="magma", interpolation="nearest")
        panel.set(xlabel="key", ylabel="query", xticks=range(6), yticks=range(mask.shape[0]))
        panel.set_title(title, fontsize=9)
    figure.savefig(IMAGES / "masks.png", dpi=120)


def rotation() -> None:
    """A query at 5 and a key at 3 form the same angle as a query at 9 and a key at 7."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    for panel, (m, n) in zip(figure.subplots(1, 2, subplot_kw={"aspect": "equal"}), ((5, 3), (9, 7)), strict=True):
        for name, position, start, color in (("q", m, 0.9, "tab:blue"), ("k", n, 0.2, "tab:orange")):
            angle = torch.tensor(start + 0.35 * position)
            x, y = angle.cos(), angle.sin()
            panel.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": color, "lw": 2})
            panel.text(1.12 * x, 1.12 * y, f"{name} at {position}", color=color, ha="center")
        turn = torch.linspace(0, 2 * torch.pi, 100)
        panel.plot(turn.cos(), turn.sin(), color="black", alpha=0.3)
        panel.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), xticks=[], yticks=[], title=f"positions {m} and {n}")
    figure.savefig(IMAGES / "rope.png", dpi=120)


def field() -> None:
    """The weights of one head over the same text, in eight forms of attention."""
    forms = ("sdpa", "sdpa+window", "sdpa+forget", "sparsemax", "sigmoid", "sdpa+diff", "retention", "delta")
    T, C = 24, 32
    torch.manual_seed(1)
    x = torch.randn(1, T, C)
    x[:, 12:] = x[:, :12]  # the second half repeats the first
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    for panel, form in zip(figure.subplots(2, 4).flat, forms, strict=True):
        torch.manual_seed(1)
        window = 6 if "window" in form else None
        config = AttentionConfig(attention=form, n_embd=C, n_head=2, attention_window=window, rope_fraction=0.5)
        layer = make_attention(config).eval()
        with torch.no_grad():
            q, k, _ = layer.qkv_proj.weight.split(layer.qkv_proj.parts)
            torch.nn.init.orthogonal_(q)
            k.copy_(q[:C])  # queries match the keys of equal tokens
            weight = layer.weights(x)[0, 0]
        most = weight.abs().max()
        panel.imshow(weight, cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
        panel.set(title=form, xticks=[], yticks=[])
    figure.savefig(IMAGES / "field.png", dpi=100)


if __name__ == "__main__":
    with mistakes_explained():
        arguments_asked(__doc__)
        IMAGES.mkdir(exist_ok=True)
        weights()
        masks()
        rotation()
        field()
