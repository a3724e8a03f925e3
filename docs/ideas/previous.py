# attention=previous
"""The score of the previous token is higher by 2."""

import torch

from model.attention.contract import from_weights
from model.attention.registry import form


@form("previous")
@from_weights
def previous(scores):
    T, S = scores.shape[-2:]
    bonus = torch.ones(T, S, device=scores.device).triu(S - T - 1).tril(S - T - 1)  # key t - 1 of query t
    return (scores + 2 * bonus).softmax(-1)  # (…, H, T, S)
