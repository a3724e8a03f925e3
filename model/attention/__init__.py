"""Attention, the part this project is about. Read it in this order:

ladder.py      from averaging the past to stacked heads, one step at a time
functional.py  scaled dot-product attention: `matmul`, explained line by line, and its equals
contract.py    what they all agree on: shapes, masks, empty rows
variants.py    other functions in place of softmax attention, yours too
layer.py       the layer: project, rotate, remember, attend, merge
check.py       python -m model.attention.check: does all of it work on your machine?

Next door: model/masks.py, model/rope.py, model/kv_cache.py.
"""

from collections.abc import Callable

from model.attention.functional import ATTENTION_FUNCTIONS
from model.attention.functional import attention_weights as attention_weights
from model.attention.ladder import Averaging, SimpleAttention, SingleHead, StackedHeads
from model.attention.layer import CausalSelfAttention, MultiHeadAttention
from model.attention.variants import ATTENTION_VARIANTS
from model.config import AttentionConfig

RUNGS = dict(average=Averaging, simple=SimpleAttention, single_head=SingleHead, stacked=StackedHeads)
ATTENTION_LAYERS: dict[str, Callable[[AttentionConfig], CausalSelfAttention]]
ATTENTION_LAYERS = {**RUNGS, **dict.fromkeys(ATTENTION_FUNCTIONS | ATTENTION_VARIANTS, MultiHeadAttention)}


def make_attention(config: AttentionConfig) -> CausalSelfAttention:
    """Make the layer that `config.attention` names."""
    return ATTENTION_LAYERS[config.attention](config)
