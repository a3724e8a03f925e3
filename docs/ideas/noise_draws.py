# attention=sdpa+noise_draws
"""Noise: a number is drawn before the weights, so that they begin elsewhere. Nothing else differs."""

import torch

from model.attention.modifiers import Modifier
from model.attention.registry import modifier


@modifier("noise_draws", changes="result")
class NoiseDraws(Modifier):
    def __init__(self, layer, config):
        super().__init__(layer, config)
        torch.rand(())

    def finish(self, y, v, x, ctx):
        return y
