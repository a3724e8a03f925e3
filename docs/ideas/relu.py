# attention=relu
"""Wortsman et al. 2023: positive scores, divided by the number of visible keys, in place of a softmax."""

import torch

from model.attention.contract import from_weights
from model.attention.registry import form


@form("relu")
@from_weights
def relu(scores):
    n = (scores > -torch.inf).sum(-1, keepdim=True)
    return scores.relu() / n  # (…, H, T, S)
