"""Attention, the part this project is about. Read it in this order:

ladder.py      from averaging the past to stacked heads, one step at a time
functions.py   scaled dot-product attention: `matmul`, explained line by line, its equals, and other weights
contract.py    what they all agree on: shapes, masks, empty rows
masks.py       which keys a query may see, and at what penalty
layer.py       the layer: project, mix, rotate, remember, score, attend, finish, merge
modifiers.py   small changes to a layer: gates, sinks, what keys and values are
mixing.py      more of them: what queries, keys and values are made of
latent.py      keys and values remembered as one small vector
recurrent.py   a state in place of the cache
sparse.py      a few chosen keys
registry.py    the decorators that give a form or a modifier its name, yours too
check.py       python -m model.attention.check: does all of it work on your machine?

Next door: model/rope.py, model/cache.py.
"""

from typing import TYPE_CHECKING, Any

from common.errors import SettingsError
from model.attention import registry
from model.attention.functions import SOFTMAX
from model.attention.layer import AttentionContext, MultiHeadAttention
from model.attention.registry import SETTINGS, check_names, form, modifier, register_all
from model.config import AttentionConfig

if TYPE_CHECKING:
    from model.attention.registry import FORMS, MODIFIERS

__all__ = [
    "FORMS", "MODIFIERS", "SETTINGS", "SOFTMAX", "AttentionContext", "MultiHeadAttention", "Pass", "check_names",
    "form", "ignored", "make_attention", "modifier",
]  # fmt: skip

Pass = AttentionContext  # its name in version 0.1

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return FORMS or MODIFIERS: who asks for a table wants all that there is."""
        if name not in ("FORMS", "MODIFIERS"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        register_all()
        return getattr(registry, name)


def layer_class(form: str) -> type[MultiHeadAttention]:
    kind = registry.FORMS[form]
    return kind if isinstance(kind, type) else MultiHeadAttention


def make_attention(config: AttentionConfig, number: int = 0) -> MultiHeadAttention:
    """Make the layer that `config.attention` names: a form with its modifiers. number: which one of the GPT's.

    Raises SettingsError for names that are unknown or do not go together.
    """
    check_names(config.attention)
    kind = layer_class(config.form)
    for name in config.modifiers:
        changes = SETTINGS.get(name) or registry.MODIFIERS[name].changes
        if changes not in kind.takes:
            problem = f"attention={config.attention}: {config.form} has no {changes} for {name} to change"
            raise SettingsError(problem, f"leave out {name}, or choose another form")
    return kind(config, number)


def ignored(config: AttentionConfig) -> set[str]:
    """Return the settings that change nothing in any layer of the pattern."""
    check_names(config.attention)
    return set.intersection(*(set(layer_class(form).ignores) for form in config.forms))
