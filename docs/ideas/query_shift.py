# attention=sdpa+query_shift
"""The previous token's query is added to a token's own, times a trained number for each channel that begins at 0."""

import torch
from torch import nn

from model.attention.modifiers import Modifier
from model.attention.registry import modifier


@modifier("query_shift", changes="queries")
class QueryShift(Modifier):
    needs_doc_starts = True

    def __init__(self, layer, config):
        super().__init__(layer, config)
        self.share = nn.Parameter(torch.zeros(layer.query_heads, layer.head_dim))

    def mix(self, q, k, v, x, ctx):
        (before,) = ctx.previous(self.layer_idx, "query_shift", q, 1)  # (B, H, T, D)
        return q + self.share[:, None].to(q.dtype) * before, k, v
