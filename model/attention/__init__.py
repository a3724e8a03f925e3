"""Attention, the part this project is about. Read it in this order:

masks.py       the keys that a query may see, and ALiBi's penalty
call.py        the call: all that its result depends on
functions.py   softmax(q kᵀ / √D) v: `matmul`, explained line by line, and its equals
context.py     the state of a forward pass, which layers share
registry.py    the decorators that give a form or a modifier its name, yours too
layer.py       the layer: project, mix, rotate, cache, call, attend, finish, merge
weighting.py   other weights of the same scores; its class Weighting is read with call.py
executors.py   which code computes a call: what each declares, and the choice
contract.py    the attention functions that people call and write; forms.py has ours
modifiers.py   small changes to a layer: gates, sinks, biases, other keys and values

Other layers:

ladder.py      from averaging the past to stacked heads, one step at a time
local.py       a local line in place of a mean; keys that fade by channel
latent.py      keys and values cached as one small vector
recurrent.py   a state in place of the cache
fading.py      products of queries and keys that fade by channel
sparse.py      a few chosen keys; choice.py says which

Executors, and how they keep the scores exact:

fused.py       torch's kernels, on a GPU with biases, sinks, windows and documents
chunked.py     long texts by chunks of queries, with passes of their own
rows.py        long texts by chunks of queries, by the definition
half.py        short texts in half precision on a CPU

Around them:

code.py        a file of your own, run by code=FILE
check.py       python -m model.attention.check: does all of it work on your machine?
choose.py      python -m model.attention.choose NAME: which code computes it?

Next door: model/layers.py, to be read first; model/rope.py and model/cache.py, before layer.py.
"""

from inspect import signature

from common.errors import SettingsError

# Importing these registers their forms and modifiers, in this order.
from model.attention import forms, ladder, latent, layer, local, modifiers, recurrent, sparse  # noqa: F401
from model.attention.context import AttentionContext
from model.attention.forms import SOFTMAX
from model.attention.layer import MultiHeadAttention
from model.attention.registry import FORMS, MODIFIERS, SETTINGS, check_names
from model.config import POSITION_SETTINGS, AttentionConfig

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
    if "/" in config.attention:
        first, _, _ = config.attention.partition("/")
        remedy = f"give that of one layer, such as {first}; in a GPT config.at(LAYER) has it"
        raise SettingsError(f"attention={config.attention} is of several layers, and this is one", remedy)
    cls = layer_class(config.form)
    for name in config.modifiers:
        changes = SETTINGS.get(name) or MODIFIERS[name].changes
        if changes not in cls.modifiable:
            problem = f"attention={config.attention}: {config.form} has no {changes} for {name} to change"
            raise SettingsError(problem, f"leave out {name}, or choose another form")
    if "layer_idx" in signature(cls).parameters:
        return cls(config, layer_idx=layer_idx)
    # The __init__ of a class of one's own may take the settings alone.
    attention = cls(config)
    for module in (attention, *attention.modifiers.values()):
        module.layer_idx = layer_idx
    return attention


def unused_settings(config: AttentionConfig) -> set[str]:
    """Return the settings without effect in any layer of the pattern."""
    check_names(config.attention)
    unused = []
    for name in config.attention.split("/"):
        form, *changes = name.split("+")
        unused.append(set(layer_class(form).unused_settings))
        if "nope" in changes:
            unused[-1] |= set(POSITION_SETTINGS)
        if config.position == "pope" and "rope_theta" in unused[-1]:  # wall adds a bias by position, and turns nothing
            unused[-1].add("position")
    return set.intersection(*unused)
