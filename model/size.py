"""What a model costs: its parameters by part, its arithmetic."""

from __future__ import annotations

from collections import Counter

import torch

from model.config import GPTConfig
from model.gpt import GPT


def without_weights(config: GPTConfig) -> GPT:
    """The model of these settings as shapes alone, which take no memory."""
    with torch.device("meta"):
        return GPT(config)


def count_parameters(model: GPT) -> Counter[str]:
    """Numbers of weights by part; their sum is that of the model's parameters."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        last = name.split(".")
        part = last[2] if last[0] == "blocks" else last[0]
        part = {"token_embedding": "embedding", "position_embedding": "embedding"}.get(part, part)
        parts["norms" if part.endswith("norm") else part] += parameter.numel()
    return parts


def flops_per_token(model: GPT) -> float:
    """Floating-point operations of forward and backward for one token of a text as long as block_size.

    6 for each weight that multiplies it (Kaplan et al. 2020), and 12 · n_layer · H·D for each position that
    causal attention sees on average: half the text, fewer with attention_window.
    """
    config, parts, attention = model.config, count_parameters(model), model.blocks[0].attention
    multiplied = parts["attention"] + parts["mlp"] + config.vocab_size * config.n_embd
    sees = min(config.attention_window or config.block_size, config.block_size)
    seen = sees - sees**2 / (2 * config.block_size)
    return 6 * multiplied + 12 * config.n_layer * attention.n_head * attention.head_size * seen
