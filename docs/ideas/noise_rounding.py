# attention=sdpa+noise_rounding
"""Noise: the result is multiplied by 1.0001, which the next matrix can undo."""

from model.attention.modifiers import Modifier
from model.attention.registry import modifier


@modifier("noise_rounding", changes="result")
class NoiseRounding(Modifier):
    def finish(self, y, v, x, ctx):
        return 1.0001 * y
