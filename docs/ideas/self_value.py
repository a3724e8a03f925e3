# attention=sdpa+self_value
"""A token's own value is added to the result, times a trained number for each head that begins at 0."""

import torch
from torch import nn

from model.attention.modifiers import Modifier
from model.attention.registry import modifier


@modifier("self_value", changes="result")
class SelfValue(Modifier):
    def __init__(self, layer, config):
        super().__init__(layer, config)
        self.share = nn.Parameter(torch.zeros(layer.n_head))

    def finish(self, y, v, x, ctx):
        own = v.repeat_interleave(y.size(1) // v.size(1), dim=1)  # (B, Hkv, T, D) -> (B, H, T, D)
        return y + self.share[:, None, None].to(y.dtype) * own
