"""Pictures of attention: what every head of every layer looks at, as HTML or PNG."""

import base64
import math
from pathlib import Path

import numpy as np
import tiktoken
import torch
from jaxtyping import Float
from torch import Tensor

from errors import SettingsError
from model.gpt import GPT
from model.heads import HeadStatistics, attention_maps, brightness
from pages.template import fill_page
from runs.formatting import visible

LONGEST = {".html": 128, ".png": 40}  # tokens that are still readable in each kind of picture


def draw_attention_map(model: GPT, tokenizer: tiktoken.Encoding, prompt: list[int], path: Path) -> None:
    """Draw the attention to the last tokens of a prompt, as many as fit, to an .html or .png file, and say so."""
    if path.suffix not in LONGEST or not path.parent.is_dir():
        raise SettingsError(f"attention_map={path} must be an .html or .png file in an existing folder.")
    tokens = prompt[-min(LONGEST[path.suffix], model.config.block_size) :]
    texts = [tokenizer.decode_single_token_bytes(token).decode("utf-8", "replace") for token in tokens]
    maps = attention_maps(model, torch.tensor([tokens], device=model.token_embedding.weight.device))
    labels = [label(text) for text in texts]
    if path.suffix == ".png":
        draw_heads(maps, path, tokens=labels)
    else:
        layers, heads, T, _ = maps.shape
        rows, columns = np.tril_indices(T)
        shares, brightest, note = brightness(maps)
        triangles = (shares.numpy()[..., rows, columns] * 65535).round().astype("<u2")  # causal: the rest is 0
        data = {"layers": layers, "heads": heads, "tokens": labels, "brightest": brightest, "note": note}
        data["weights"] = base64.b64encode(triangles.tobytes()).decode()
        path.write_text(fill_page("attention_map.html", "".join(texts)[:80], data), encoding="utf-8")
    kept = "" if len(tokens) == len(prompt) else f", the last {len(tokens)} of {len(prompt)} tokens"
    print(visible(f"{path}: every layer and head{kept}"))


def label(text: str) -> str:
    """Return a token with its white space made visible, at most 13 characters long."""
    shown = text.replace(" ", "·").replace("\n", "⏎").replace("\t", "→").replace("\r", "␍") or "∅"
    shown = "".join(char if char.isprintable() else "\ufffd" for char in shown)
    return shown if len(shown) <= 13 else shown[:12] + "…"


def draw_heads(
    maps: Float[Tensor, "L H T T"],
    path: Path,
    *,
    tokens: list[str] | None = None,
    statistics: HeadStatistics | None = None,
    caption: str = "",
) -> None:
    """Draw a PNG of layers downwards and heads to the right; in each panel queries downwards, keys to the right.

    tokens: the text, written along the edges; statistics: the figures in the panels' titles.
    """
    from matplotlib.figure import Figure  # slow to import

    from pages.loss_plot import save_picture

    layers, heads, T, _ = maps.shape
    shares, _, note = brightness(maps)
    caption = f"{caption}\n{note}".strip()
    side = max(1.6, 0.13 * T) if tokens else 1.6  # inches: room for a readable label a token
    width = max(side * heads + 1.2, 4.5 if caption else 0)
    figure = Figure(figsize=(width, side * layers + 1.2), layout="constrained")
    axes = figure.subplots(layers, heads, squeeze=False)
    for number, panel in enumerate(axes.flat):
        layer, head = divmod(number, heads)
        title = f"layer {layer} head {head}"
        panel.imshow(shares[layer, head].sqrt().numpy(), cmap="magma", vmin=0, vmax=1)  # √ shows small weights too
        keys, queries = (tokens or []) * (layer == layers - 1), (tokens or []) * (head == 0)
        panel.set_xticks(range(len(keys)), keys, rotation=90, fontsize=6, family="monospace")
        panel.set_yticks(range(len(queries)), queries, fontsize=6, family="monospace")
        panel.tick_params(length=0)
        if statistics:
            entropy, share = statistics.entropy[layer][head], statistics.relative_entropy[layer][head]
            of_most = f" ({share:.0%})" if math.isfinite(share) else ""
            title += f"\n{entropy:.2f} nats{of_most}, {statistics.distance[layer][head]:.1f} back"
            if head == 0 and (similarity := statistics.similarity[layer]) is not None:
                panel.set_ylabel(f"heads alike: {similarity:.2f}", fontsize=7)
        panel.set_title(title, fontsize=7)
    if caption:
        figure.suptitle(caption, fontsize=8)
    save_picture(figure, path)
