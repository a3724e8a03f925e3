"""Attention, the part this project is about. Read it in this order:

ladder.py      from averaging the past to stacked heads, one step at a time
functional.py  scaled dot-product attention: `matmul`, explained line by line, and its equals
contract.py    what they all agree on: shapes, masks, empty rows
layer.py       the layer: project, mix, rotate, remember, overlay, attend, finish, merge
variants.py    other functions in place of softmax attention
places.py      the places of a layer at which modifiers act
modifiers.py   small changes to a layer: gates, sinks, what keys and values are
latent.py      keys and values remembered as one small vector
recurrent.py   a state in place of the cache
registry.py    the decorators that give a form or a modifier its name, yours too
check.py       python -m model.attention.check: does all of it work on your machine?

Next door: model/masks.py, model/rope.py, model/kv_cache.py.
"""

from model.attention import ladder, latent, modifiers, recurrent, variants  # noqa: F401  (they register their names)
from model.attention.functional import ATTENTION_FUNCTIONS, attention_weights
from model.attention.layer import CausalSelfAttention, MultiHeadAttention
from model.attention.registry import FUNCTIONS, LAYERS, MODIFIERS, check_names, form, forms, modifier
from model.config import AttentionConfig

__all__ = [
    "ATTENTION_FUNCTIONS", "FUNCTIONS", "MODIFIERS", "CausalSelfAttention", "MultiHeadAttention", "attention_weights",
    "check_names", "form", "forms", "ignored", "make_attention", "modifier",
]  # fmt: skip


def ignored(config: AttentionConfig) -> set[str]:
    """Return the settings that change nothing in any layer of the pattern."""
    return set.intersection(*(set(LAYERS.get(form, MultiHeadAttention).ignores) for form in config.forms))


def make_attention(config: AttentionConfig) -> CausalSelfAttention:
    """Make the layer that `config.attention` names: a form with its modifiers.

    Raises SettingsError for names that are unknown or do not go together.
    """
    check_names(config.attention)
    layer: CausalSelfAttention = LAYERS.get(config.form, MultiHeadAttention)(config)
    layer.modify(config)
    return layer
