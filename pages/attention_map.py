"""Pictures of attention: what every head of every layer looks at, for one prompt, as HTML or PNG."""

from __future__ import annotations

import base64
import html
from pathlib import Path

import numpy as np
import tiktoken
import torch
from jaxtyping import Float
from torch import Tensor

from errors import SettingsError
from model.gpt import GPT
from model.heads import attention_maps, brightness
from pages.template import fill_page, script_value
from runs.checkpoint import Checkpoint

LONGEST = {".html": 128, ".png": 40}
"""Tokens that are still readable in each kind of picture."""


def draw_prompt(checkpoint: Checkpoint, tokens: list[int], path: Path) -> None:
    """Draw the attention of a checkpoint's model to a prompt's tokens, and say so."""
    if path.suffix not in LONGEST or not path.parent.is_dir():
        raise SettingsError(f"attention_map={path} must be an .html or .png file in an existing folder.")
    shown = draw_attention_map(checkpoint.model, checkpoint.tokenizer, tokens, path)
    kept = "" if shown == len(tokens) else f", the last {shown} of {len(tokens)} tokens"
    print(f"{path}: every layer and head{kept}")


def draw_attention_map(model: GPT, tokenizer: tiktoken.Encoding, tokens: list[int], path: Path) -> int:
    """Draw the attention to the last of `tokens`, as many as fit, to an .html or .png file. Return their number."""
    tokens = tokens[-min(LONGEST[path.suffix], model.config.block_size) :]
    labels = [tokenizer.decode_single_token_bytes(token).decode("utf-8", "replace") for token in tokens]
    maps = attention_maps(model, torch.tensor([tokens], device=next(model.parameters()).device))
    if path.suffix == ".html":
        draw_html(maps, labels, path)
    else:
        from pages.head_plot import draw_heads  # matplotlib is slow to import

        draw_heads(maps, path, tokens=[visible(label) for label in labels])
    return len(tokens)


def draw_html(maps: Float[Tensor, "L H T T"], labels: list[str], path: Path) -> None:
    """Write one page: every head small, the chosen one large with its tokens and numbers."""
    layers, heads, T, _ = maps.shape
    rows, columns = np.tril_indices(T)
    shares, brightest, note = brightness(maps)
    triangles = (shares.numpy()[..., rows, columns] * 65535).round().astype("<u2")  # causal: the rest is 0
    data = {
        "layers": layers,
        "heads": heads,
        "tokens": [visible(label) for label in labels],
        "weights": base64.b64encode(triangles.tobytes()).decode(),
        "brightest": brightest,
        "note": note,
    }
    title = html.escape("".join(labels)[:80])
    path.write_text(fill_page("attention_map.html", TITLE=title, DATA=script_value(data)), encoding="utf-8")


def visible(label: str) -> str:
    """Return a token with its white space made visible, at most 13 characters long."""
    shown = label.replace(" ", "·").replace("\n", "⏎").replace("\t", "→").replace("\r", "␍") or "∅"
    shown = "".join(char if char.isprintable() else "\ufffd" for char in shown)
    return shown if len(shown) <= 13 else shown[:12] + "…"
