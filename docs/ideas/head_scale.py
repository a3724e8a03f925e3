# attention=sdpa+head_scale
"""Shleifer et al. 2021, NormFormer: a trained number multiplies the result of each head."""

import torch
from torch import nn

from model.attention.modifiers import Modifier
from model.attention.registry import modifier


@modifier("head_scale", changes="result")
class HeadScale(Modifier):
    def __init__(self, layer, config):
        super().__init__(layer, config)
        self.scale = nn.Parameter(torch.ones(layer.n_head))

    def finish(self, y, v, x, ctx):
        return y * self.scale[:, None, None].to(y.dtype)  # (B, H, T, D)
