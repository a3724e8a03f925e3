# attention=previous4
"""After `previous`: the score of the previous token is higher by 4."""

import torch

from model.attention.contract import from_weights
from model.attention.registry import form


@form("previous4")
@from_weights
def previous4(scores):
    T, S = scores.shape[-2:]
    bonus = torch.ones(T, S, device=scores.device).triu(S - T - 1).tril(S - T - 1)  # key t - 1 of query t
    return (scores + 4 * bonus).softmax(-1)  # (…, H, T, S)
