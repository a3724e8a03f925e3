# attention=sdpa+value_shift
"""The previous token's value is added to a token's own, times a trained number for each channel that begins at 0."""

import torch
from torch import nn

from model.attention.modifiers import Modifier
from model.attention.registry import modifier


@modifier("value_shift", changes="values")
class ValueShift(Modifier):
    needs_doc_starts = True

    def __init__(self, layer, config):
        super().__init__(layer, config)
        self.share = nn.Parameter(torch.zeros(config.kv_heads, config.head_channels))

    def mix(self, q, k, v, x, ctx):
        (before,) = ctx.previous(self.layer_idx, "value_shift", v, 1)  # (B, Hkv, T, D)
        return q, k, v + self.share[:, None].to(v.dtype) * before
