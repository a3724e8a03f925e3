# attention=last_three
"""After `previous`: the scores of the last three tokens before a token are higher by 2."""

import torch

from model.attention.contract import from_weights
from model.attention.registry import form


@form("last_three")
@from_weights
def last_three(scores):
    T, S = scores.shape[-2:]
    bonus = torch.ones(T, S, device=scores.device).triu(S - T - 3).tril(S - T - 1)  # keys t - 3 to t - 1 of query t
    return (scores + 2 * bonus).softmax(-1)  # (…, H, T, S)
