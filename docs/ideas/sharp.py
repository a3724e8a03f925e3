# attention=sharp
"""A softmax of scores that are half as large again."""

from model.attention.contract import from_weights
from model.attention.registry import form


@form("sharp")
@from_weights
def sharp(scores):
    return (1.5 * scores).softmax(-1)  # (…, H, T, S)
