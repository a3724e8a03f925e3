"""The names that `attention=` may be made of: forms, and the modifiers that `+` adds to them.

One decorator registers a name, and nothing else has to be edited:

    @form("leaky")                      an attention function under the contract, given as its mathematics
    def leaky(q, k, v, allowed, bias, scale, dropout_p): ...

    @form("retention")                  or a layer, where something other than keys and values is kept
    class Retention(MultiHeadAttention): ...

    @modifier("gate")                   a change at one place of a layer: see modifiers.py
    class Gate(Modifier): ...
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

from torch import nn

from errors import SettingsError
from model.attention.contract import AttentionFunction, Mathematics, obeys_contract

Class = TypeVar("Class", bound=type[nn.Module])


@runtime_checkable
class Register(Protocol):
    """What form(NAME) does with what it decorates."""

    @overload
    def __call__(self, subject: Class) -> Class: ...
    @overload
    def __call__(self, subject: AttentionFunction | Mathematics) -> AttentionFunction: ...


FUNCTIONS: dict[str, AttentionFunction] = {}
"""Forms that are functions; MultiHeadAttention calls them."""
LAYERS: dict[str, Any] = {}
"""Forms that are layers, classes of CausalSelfAttention."""
MODIFIERS: dict[str, Any] = {}
"""In the order in which a layer applies them, whatever the order in which they are typed."""


def form(name: str) -> Register:
    """Register attention=NAME: a layer class, an attention function, or the mathematics of one."""

    def register(subject: Any) -> Any:
        assert name.isidentifier() and name not in FUNCTIONS | LAYERS | MODIFIERS, f"{name} is no free name"
        if isinstance(subject, type):
            LAYERS[name] = subject
            return subject
        FUNCTIONS[name] = obeys_contract(subject) if "allowed" in inspect.signature(subject).parameters else subject
        return FUNCTIONS[name]

    return register


def modifier(name: str) -> Callable[[Class], Class]:
    """Register a Modifier as what attention=FORM+NAME adds to a form."""

    def register(subject: Class) -> Class:
        assert name.isidentifier() and name not in FUNCTIONS | LAYERS | MODIFIERS, f"{name} is no free name"
        MODIFIERS[name] = subject
        return subject

    return register


def forms() -> tuple[str, ...]:
    """Return the names of all forms."""
    return (*FUNCTIONS, *LAYERS)


def check_names(attention: str) -> None:
    """Raise SettingsError for a name in a pattern such as sdpa+gate/delta that is not registered."""
    for layer in attention.split("/"):
        name, *modifiers = layer.split("+")
        if name not in forms():
            given = "is a modifier, which is added to a form, as in sdpa+" + name if name in MODIFIERS else "is unknown"
            raise SettingsError(f"attention={attention}: {name!r} {given}: choose a form from {', '.join(forms())}.")
        for added in modifiers:
            if added not in MODIFIERS:
                given = "is a form, and a layer has one" if added in forms() else "is unknown"
                choices = ", ".join(MODIFIERS)
                raise SettingsError(f"attention={attention}: {added!r} {given}: choose modifiers from {choices}.")
            if modifiers.count(added) > 1:
                raise SettingsError(f"attention={attention} has {added} twice in one layer: leave one out.")
