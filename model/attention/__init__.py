"""Attention, the part this project is about. Read it in this order:

ladder.py      from averaging the past to stacked heads, a rung at a time
functional.py  scaled dot-product attention: `matmul`, explained line by line, and its equals
contract.py    what all of them agree on: shapes, masks, empty rows
variants.py    other functions in the place of softmax attention, yours too
multihead.py   the layer: project, rotate, remember, attend, merge
flex.py        the same by a kernel that is compiled for its mask
check.py       python -m model.attention.check: may this be trusted on your machine?

Next door: model/masks.py, model/rope.py, model/kv_cache.py.
"""

from __future__ import annotations

from model.attention.functional import ATTENTION_FUNCTIONS, attention_weights
from model.attention.ladder import Averaging, SimpleAttention, SingleHead, StackedHeads
from model.attention.layer import CausalSelfAttention, MultiHeadAttention
from model.attention.variants import ATTENTION_VARIANTS
from model.config import AttentionConfig

ATTENTION_LAYERS: dict[str, type[CausalSelfAttention]] = {
    "average": Averaging,
    "simple": SimpleAttention,
    "single_head": SingleHead,
    "stacked": StackedHeads,
    **dict.fromkeys(ATTENTION_FUNCTIONS | ATTENTION_VARIANTS, MultiHeadAttention),
}


def make_attention(config: AttentionConfig) -> CausalSelfAttention:
    """The layer that `config.attention` names."""
    return ATTENTION_LAYERS[config.attention](config)


__all__ = [
    "ATTENTION_FUNCTIONS",
    "ATTENTION_LAYERS",
    "ATTENTION_VARIANTS",
    "CausalSelfAttention",
    "MultiHeadAttention",
    "attention_weights",
    "make_attention",
]
