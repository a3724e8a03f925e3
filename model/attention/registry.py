"""The registry of names for `attention=`: forms, and the modifiers that `+` adds to them.

One decorator registers a name; nothing else has to be edited:

    @form("mine")                       the weights of an attention function: contract.py
    @from_weights
    def mine(scores): ...

    @form("retention")                  or a layer that keeps something other than keys and values: recurrent.py
    class Retention(Recurrent): ...

    @modifier("gate", changes="result") a change at one place of a layer: modifiers.py
    class Gate(Modifier): ...
"""

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from common.errors import SettingsError, refuse_taken

Subject = TypeVar("Subject")

FORMS: dict[str, Any] = {}
"""Attention functions, whose weighting and executors MultiHeadAttention takes, and subclasses of it."""
MODIFIERS: dict[str, Any] = {}
PARTS = ("queries", "keys", "values", "scores", "result")
"""The parts of a layer that a modifier may change."""
SETTINGS = {"window": "window", "nope": "rotation"}
"""Modifiers without a class, and the part that each changes. No class may change these two.

They are settings of single layers in a pattern, as in sdpa+window/sdpa+nope: a window, and no positions (no RoPE).
config.py has them.
"""


def form(name: str) -> Callable[[Subject], Subject]:
    """Register attention=NAME: an attention function or a layer class.

    Raises SettingsError for a name that is taken, as modifier() does. What is defined again, as by a notebook's cell
    that runs twice, takes the place of what it was; models that were made before keep that.
    """
    if not isinstance(name, str):  # a decorator without brackets gets the function
        raise SettingsError("@form has no name", 'write @form("NAME")')
    return lambda subject: _register(FORMS, name, subject)


def modifier(name: str, *, changes: str) -> Callable[[Subject], Subject]:
    """Register a Modifier under attention=FORM+NAME.

    changes: the part of a layer, one of PARTS. Forms without that part refuse the modifier.
    """

    if changes not in PARTS:
        raise SettingsError(f"modifier {name} changes {changes!r}", f"choose one of {', '.join(PARTS)}")

    def register(subject: Any) -> Any:
        if not hasattr(subject, "check_as"):
            raise SettingsError(f"modifier {name} is no Modifier", "derive its class from Modifier of modifiers.py")
        subject.check_as(name)
        subject.changes = changes
        return _register(MODIFIERS, name, subject)

    return register


def _register(names: dict[str, Any], name: str, subject: Subject) -> Subject:
    if not name.isidentifier():
        raise SettingsError(f"the name {name!r} is no identifier", "choose one of letters, digits and _")
    if name in FORMS | MODIFIERS | SETTINGS:
        refuse_taken(name, names.get(name), subject)
    names[name] = subject
    return subject


def check_names(attention: str) -> None:
    """Raise SettingsError for a name of a pattern that is unknown or comes twice.

    A pattern is such as sdpa+gate/delta.
    """
    for layer in attention.split("/"):
        names = layer.split("+")
        for place, name in enumerate(names):
            known = [*SETTINGS, *MODIFIERS] if place else [*FORMS]
            if name not in known:
                near = "".join(
                    f"did you mean {match}? Else " for match in difflib.get_close_matches(name.lower(), known, n=1)
                )
                remedy = f"{near}choose one of {', '.join(known)}, or give the file that registers it by code=FILE"
                if name in SETTINGS | MODIFIERS:
                    remedy = f"add it to a form, as in sdpa+{name}"
                elif name in FORMS:
                    remedy = f"it is a form, and {names[0]}/{name} has the two in turns, layer by layer"
                elif not name:
                    remedy = "leave out the + or / beside it"
                fault = f": {name!r} is no {'modifier' if place else 'form'}"
                raise SettingsError(fault, remedy, setting="attention", value=attention)
            if names.count(name) > 1:
                raise SettingsError(f"attention={attention} has {name} twice in one layer", "leave one out")
