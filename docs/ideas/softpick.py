# attention=softpick
"""Zuhri et al. 2025: relu(exp(s) - 1) over the sum of |exp(s) - 1|; a row's weights sum to at most 1."""

import torch

from model.attention.contract import from_weights
from model.attention.registry import form


@form("softpick")
@from_weights
def softpick(scores):
    highest = scores.amax(-1, keepdim=True).clamp(min=0)
    seen = scores > -torch.inf
    difference = torch.where(seen, (scores - highest).exp() - (-highest).exp(), 0)  # times exp(highest)
    return difference.relu() / (difference.abs().sum(-1, keepdim=True) + 1e-6)  # (…, H, T, S)
