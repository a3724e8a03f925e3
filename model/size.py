"""What a model costs: its parameters by part, its arithmetic."""

from collections import Counter

import torch

from model.config import GPTConfig
from model.gpt import GPT


def without_weights(config: GPTConfig) -> GPT:
    """Make the model as shapes alone, on torch's meta device, where it takes no memory."""
    with torch.device("meta"):
        return GPT(config)


def count_parameters(model: GPT) -> Counter[str]:
    """Count weights by part: embedding, attention, mlp, norms, lm_head."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        path = name.split(".")
        part = path[2] if path[0] == "blocks" else path[0]
        part = "norms" if part.endswith("norm") else "embedding" if part.endswith("embedding") else part
        parts[part] += parameter.numel()
    return parts


def flops_per_token(model: GPT) -> float:
    """Return the floating-point operations of forward and backward per token, in texts of block_size tokens.

    6 for each weight that multiplies it (Kaplan et al. 2020), and 12 · n_layer · H·D for each position that
    causal attention sees on average: half the text, fewer with attention_window.
    """
    config, parts, attention = model.config, count_parameters(model), model.blocks[0].attention
    multiplied = parts["attention"] + parts["mlp"] + model.lm_head.weight.numel()
    sees = min(config.attention_window or config.block_size, config.block_size)
    seen = sees - sees**2 / (2 * config.block_size)
    return 6 * multiplied + 12 * config.n_layer * attention.n_head * attention.head_size * seen
