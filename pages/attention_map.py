"""Pictures of attention: what every head of every layer looks at, as a page or as heads.png."""

import base64
import math
from pathlib import Path

import numpy as np
import tiktoken
import torch
from jaxtyping import Float
from torch import Tensor

from model.gpt import GPT
from model.heads import HeadStatistics, attention_maps, brightness
from pages.template import fill_page
from runs.formatting import visible

LONGEST = 128  # tokens that are still readable on the page


def draw_attention_map(model: GPT, tokenizer: tiktoken.Encoding, prompt: list[int], path: Path) -> None:
    """Write a page of the attention to the last tokens of a prompt, as many as fit, and say so."""
    tokens = prompt[-min(LONGEST, model.config.block_size) :]
    texts = [tokenizer.decode_single_token_bytes(token).decode("utf-8", "replace") for token in tokens]
    maps = attention_maps(model, torch.tensor([tokens], device=model.token_embedding.weight.device))
    layers, heads, T, _ = maps.shape
    rows, columns = np.tril_indices(T)
    shares, brightest, note = brightness(maps)
    triangles = (shares.numpy()[..., rows, columns] * 65535).round().astype("<u2")  # causal: the rest is 0
    data = {"layers": layers, "heads": heads, "brightest": brightest, "note": note}
    data |= {"tokens": [label(text) for text in texts], "weights": base64.b64encode(triangles.tobytes()).decode()}
    path.write_text(fill_page("attention_map.html", "".join(texts)[:80], data), encoding="utf-8")
    kept = "" if len(tokens) == len(prompt) else f", the last {len(tokens)} of {len(prompt)} tokens"
    print(visible(f"{path}: every layer and head{kept}"))


def label(text: str) -> str:
    """Return a token with its white space made visible, at most 13 characters long."""
    shown = text.replace(" ", "·").replace("\n", "⏎").replace("\t", "→").replace("\r", "␍") or "∅"
    shown = "".join(char if char.isprintable() else "\ufffd" for char in shown)
    return shown if len(shown) <= 13 else shown[:12] + "…"


def draw_heads(maps: Float[Tensor, "L H T T"], path: Path, *, statistics: HeadStatistics, caption: str) -> None:
    """Draw a PNG of layers downwards and heads to the right; in each panel queries downwards, keys to the right."""
    from matplotlib.figure import Figure  # slow to import

    from pages.loss_plot import save_picture

    layers, heads, _, _ = maps.shape
    shares, _, note = brightness(maps)
    figure = Figure(figsize=(max(1.6 * heads + 1.2, 4.5), 1.6 * layers + 1.2), layout="constrained")
    figure.suptitle(f"{caption}\n{note}".strip(), fontsize=8)
    axes = figure.subplots(layers, heads, squeeze=False)
    for number, panel in enumerate(axes.flat):
        layer, head = divmod(number, heads)
        panel.imshow(shares[layer, head].sqrt().numpy(), cmap="magma", vmin=0, vmax=1)  # √ shows small weights too
        panel.set(xticks=[], yticks=[])
        entropy, share = statistics.entropy[layer][head], statistics.relative_entropy[layer][head]
        of_most = f" ({share:.0%})" if math.isfinite(share) else ""
        figures = f"{entropy:.2f} nats{of_most}, {statistics.distance[layer][head]:.1f} back"
        panel.set_title(f"layer {layer} head {head}\n{figures}", fontsize=7)
        if head == 0 and (similarity := statistics.similarity[layer]) is not None:
            panel.set_ylabel(f"heads alike: {similarity:.2f}", fontsize=7)
    save_picture(figure, path)
