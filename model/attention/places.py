"""What a modifier is, and what it may know: the places of a layer at which modifiers act.

A modifier's class has one of the methods mix, overlay and finish; modifiers.py holds them all.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from model.attention.contract import Key, Output, Query, Stream, Value
from model.attention.functional import Blocks, softmax_dtype
from model.config import AttentionConfig
from model.kv_cache import LayerCache
from model.masks import first_of_text

LayerMask = Shaped[Tensor, "..."] | None
Begins = Bool[Tensor, "... T"] | None

# By name, what a cache keeps: (heads, None, width) of every token, or of a text a state of any shape; and its type.
Kept = dict[str, tuple[tuple[int | None, ...], torch.dtype]]


class Here(NamedTuple):
    """Where a layer stands in a forward pass: what its parts may know beside their arguments."""

    x: Stream
    mask: LayerMask | Blocks
    store: LayerCache | None
    told: Begins
    carried: dict[str, Tensor]
    """What a layer leaves for those after it."""
    pictured: bool = False
    """Whether the weights are wanted, for which the values are an identity matrix."""

    @property
    def begins(self) -> Begins:
        """Which tokens are the first of a document, or follow padding: nothing of the token before may reach them."""
        if self.told is None and isinstance(self.mask, Tensor):
            return first_of_text(self.mask, self.x.shape[-2])
        return self.told


class Call(NamedTuple):
    """The arguments of an attention function, which modifiers may change before the call."""

    q: Query
    k: Key
    v: Value
    mask: LayerMask
    is_causal: bool
    bias: Float[Tensor, "..."] | None
    scale: float | None = None


class Modifier(nn.Module):
    """A change to a layer, which attention=FORM+NAME makes; what a child does not define changes nothing.

    Muon moves the weights of nn.Linear layers alone: what a modifier holds as a parameter of its own, AdamW moves.
    """

    place: ClassVar[str]
    """What of the layer it changes: window, rotation, queries, keys, values, scores or result. Forms that have no
    such thing refuse it."""
    pictured = False
    """Whether finish() applies to the weights too, where there are several to one head."""

    def __init__(self, layer: nn.Module, config: AttentionConfig) -> None:
        super().__init__()

    def mix(self, q: Query, k: Key, v: Value, here: Here) -> tuple[Query, Key, Value]:
        """Change what queries, keys and values are, before they are rotated and remembered."""
        return q, k, v

    def overlay(self, call: Call, here: Here) -> Call:
        """Change what lies over the scores, or add a key."""
        return call

    def finish(self, y: Output, here: Here, v: Value) -> Float[Tensor, "..."]:
        """Change what each head gathered; v holds the values of the queries' own tokens."""
        return y

    def keeps(self, dtype: torch.dtype) -> Kept:
        """Return what to keep in the cache."""
        return {}


class PerHead(nn.Module):
    """A number for each head and token, x Wᵀ + b: W begins at zero, and is too thin for Muon (see Modifier)."""

    def __init__(self, C: int, H: int, bias: Float[Tensor, " H"] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(H, C))
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Stream) -> Float[Tensor, "*lead H T"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias).transpose(-2, -1)  # (…, T, C) -> (…, H, T)


def wide(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x in float32 or wider."""
    return x.to(softmax_dtype(x))
