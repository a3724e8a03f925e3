# attention=entmax
"""Peters et al. 2019: 1.5-entmax, max(0, s / 2 - τ)²; a softmax that reaches zero."""

import torch

from model.attention.contract import from_weights
from model.attention.registry import form


@form("entmax")
@from_weights
def entmax(scores):
    half = scores / 2
    half = half - half.amax(-1, keepdim=True)
    ordered = half.sort(dim=-1, descending=True).values
    finite = ordered.clamp(min=-1e4)  # forbidden keys: far below every threshold
    count = torch.arange(1, scores.size(-1) + 1, device=scores.device)
    mean = finite.cumsum(-1) / count
    variance = (finite**2).cumsum(-1) / count - mean**2
    threshold = mean - (1 / count - variance).clamp(min=0).sqrt()
    support = (threshold <= finite).sum(-1, keepdim=True).clamp(min=1)
    return (half - threshold.gather(-1, support - 1)).relu() ** 2  # (…, H, T, S)
