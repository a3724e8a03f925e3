# attention=cubic
"""Large scores grow: s + s³ / 50 in place of s."""

from model.attention.contract import from_weights
from model.attention.registry import form


@form("cubic")
@from_weights
def cubic(scores):
    return (scores + scores**3 / 50).softmax(-1)  # (…, H, T, S)
