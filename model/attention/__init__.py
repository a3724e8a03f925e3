"""Attention, the part this project is about. Read it in this order:

ladder.py      from averaging the past to stacked heads, one step at a time
functions.py   scaled dot-product attention: `matmul`, explained line by line, its equals, and other weights
fused.py       the same by torch's kernels, on a GPU with biases, sinks, windows and documents
chunked.py     the same in long texts on a CPU, by chunks of queries
contract.py    their common contract: shapes, masks, empty rows
masks.py       the keys that a query may see, and ALiBi's penalty
layer.py       the layer: project, mix, rotate, remember, see, attend, finish, merge
context.py     the state that layers share, and the arguments of an attention function
modifiers.py   small changes to a layer: gates, sinks, biases, other keys and values
mixing.py      more of them: norms and convolutions of queries, keys and values
latent.py      keys and values remembered as one small vector
recurrent.py   a state in place of the cache
sparse.py      a few chosen keys; choice.py says which
registry.py    the decorators that give a form or a modifier its name, yours too
code.py        a file of your own, run by code=FILE
check.py       python -m model.attention.check: does all of it work on your machine?

Next door: model/rope.py, model/cache.py.
"""

from common.errors import SettingsError

# Importing these registers their forms and modifiers, in this order.
from model.attention import contract, ladder, latent, layer, mixing, modifiers, recurrent, sparse  # noqa: F401
from model.attention.context import AttentionContext
from model.attention.contract import SOFTMAX
from model.attention.layer import MultiHeadAttention
from model.attention.registry import FORMS, MODIFIERS, SETTINGS, check_names
from model.config import AttentionConfig

__all__ = [
    "FORMS", "MODIFIERS", "SETTINGS", "SOFTMAX", "AttentionContext", "MultiHeadAttention", "check_names",
    "make_attention", "unused_settings",
]  # fmt: skip


def layer_class(form: str) -> type[MultiHeadAttention]:
    cls = FORMS[form]
    return cls if isinstance(cls, type) else MultiHeadAttention


def make_attention(config: AttentionConfig, layer_idx: int = 0) -> MultiHeadAttention:
    """Return the layer that `config.attention` names: a form with its modifiers.

    Raises SettingsError for names that are unknown or do not go together.
    """
    check_names(config.attention)
    cls = layer_class(config.form)
    for name in config.modifiers:
        changes = SETTINGS.get(name) or MODIFIERS[name].changes
        if changes not in cls.modifiable:
            problem = f"attention={config.attention}: {config.form} has no {changes} for {name} to change"
            raise SettingsError(problem, f"leave out {name}, or choose another form")
    attention = cls(config)
    for module in (attention, *attention.modifiers.values()):
        module.layer_idx = layer_idx
    return attention


def unused_settings(config: AttentionConfig) -> set[str]:
    """Return the settings without effect in any layer of the pattern."""
    check_names(config.attention)
    return set.intersection(*(set(layer_class(form).unused_settings) for form in config.forms))
