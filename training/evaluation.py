"""How good a model is on a text: nats per token, perplexity, bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from data.batches import evaluation_batches
from data.shards import Tokens


@dataclass
class Evaluation:
    """The loss over a whole text.

    loss: nats per token; bpb: bits per byte of the original UTF-8 text, comparable between tokenizers.
    """

    loss: float
    bpb: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


@torch.no_grad()
def evaluate(
    model: nn.Module, tokens: Tokens, *, block_size: int, batch_size: int, autocast: torch.autocast
) -> Evaluation:
    """Score every token of a split once, in windows of block_size; the same figures every time.

    The model is left in the mode (train or eval) it came in.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device if device.type != "mps" else "cpu")
    scored = 0
    for batch in evaluation_batches(tokens, block_size=block_size, batch_size=batch_size):
        windows = torch.from_numpy(batch).to(device)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with autocast:
            logits = model(inputs)
        nats += F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").to(nats.device)
        scored += targets.numel()
    model.train(was_training)
    return Evaluation(loss=nats.item() / scored, bpb=nats.item() / math.log(2) / tokens.text_bytes)
