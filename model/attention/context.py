"""A layer's context of a call, and the arguments that it makes for its attention function."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from model.attention.contract import Key, Query, Value
from model.attention.masks import causal_mask, document_mask
from model.cache import DocStarts, KVCache, Tokens
from model.rope import Rope


@dataclass
class AttentionContext:
    """The state of one forward pass, which the layers share.

    The GPT makes one for each pass; a layer alone may go without.

    name          shape                       written by   read by                            default
    mask          broadcasts to (B, H, T, S)  the caller   see()                              causality alone
    doc_starts    (B, T)                      GPT          see(), previous(), recurrent.py    all 0
    tokens        (B, T)                      GPT          value_embedding                    None
    cache         KVCache                     GPT          remember(), layer_cache(), forget  None: T = S
    rotations     Rope: (T, D/2, 2)           GPT          rotate()                           those of past … past+T-1
    shared        name: any                   layers       value_residual, in later layers    none
    loss          ()                          index        GPT, which adds its gradient       None outside training
    weights_only  bool                        weights()    attend()                           False

    mask        True or 1 where a query may attend; S is T plus the positions in the cache. Causality and window hold in
                any case. Forms and modifiers that accumulate or shift the past accept doc_starts only.
    doc_starts  the position of the first token of each token's text, counted from the first in the cache. Earlier
                tokens are hidden: another document, or padding on the left.
    rotations   Rope.cos_sin() of the positions, of any leading shape: (B, 1, T, D/2, 2) gives each text its own.
    loss        auxiliary, in nats summed over tokens; layers add to it.
    """

    mask: Tensor | None = None
    doc_starts: DocStarts = None
    tokens: Tokens | None = None
    cache: KVCache | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)
    rotations: dict[Rope, Tensor] = field(default_factory=dict)
    loss: Float[Tensor, ""] | None = None
    weights_only: bool = False

    @property
    def past(self) -> int:
        """The number of positions in the cache."""
        return 0 if self.cache is None else self.cache.position

    def layer_cache(self, layer_idx: int) -> dict[str, Tensor]:
        """Return the cache's tensors of a layer, to read and to write.

        Without a cache it is an empty dictionary.
        """
        return {} if self.cache is None else self.cache.layers[layer_idx]

    def previous(
        self,
        layer_idx: int,
        name: str,
        new: Shaped[Tensor, "B n T D"],
        count: int,
    ) -> list[Tensor]:
        """Return the rows 1, 2, … `count` tokens before each row of `new`.

        They are zeros if they belong to another text.
        """
        T = new.shape[2]
        kept = self.layer_cache(layer_idx)

        # The last `count` rows of earlier passes, then the new ones. Without a cache nothing reads the kept ones.
        before = kept.get(name, new.new_zeros(*new.shape[:2], count, new.shape[3]))
        rows = torch.cat((before, new), 2)  # (B, n, count + T, D)
        kept[name] = rows[:, :, T:].detach()
        shifted = [rows[:, :, count - back : count - back + T] for back in range(1, count + 1)]
        if self.doc_starts is None:
            return shifted

        # A token's place in its text says how many of them belong to it.
        place = self.places()  # (B, T)
        return [row.masked_fill((place < back)[:, None, :, None], 0) for back, row in enumerate(shifted, 1)]

    def places(self) -> Int[Tensor, "B T"]:
        """Return the place of each new token in its text, from 0 on; needs doc_starts."""
        assert self.doc_starts is not None
        T = self.doc_starts.shape[1]
        return torch.arange(self.past, self.past + T, device=self.doc_starts.device) - self.doc_starts


class Call(NamedTuple):
    """The arguments of an attention function before a (T, S) matrix is made of them.

    Modifiers may change them. Here S counts the keys in reach, including the cache's. The T queries are at the last T
    of these positions. A query sees itself and the keys before it; the fields below hide some of these or change their
    scores.
    """

    q: Query
    k: Key
    v: Value
    mask: Bool[Tensor, "..."] | None = None
    """True where a query may attend, within causality, window and documents.

    Broadcasts to (B, H, T, S).
    """
    doc_starts: DocStarts = None
    """The first key of each query's document."""
    window: int | None = None
    """The number of keys that a query sees, itself included; None for all."""
    bias: tuple[Float[Tensor, "*#B H T"], Float[Tensor, "*#B H S"]] | None = None
    """Rows and columns that sum to the bias: row_t + column_s."""
    sink: Float[Tensor, " H"] | None = None
    """The score of one more key, whose value is zero."""
    scale: float | None = None


# Functions, not methods of Call: torch.compile does not trace a named tuple's methods where shapes are checked.


def add_bias(call: Call, row: Float[Tensor, "*#B H T"], column: Float[Tensor, "*#B H S"]) -> Call:
    """Return the call with row_t + column_s added to its scores."""
    if call.bias is not None:
        row = row + call.bias[0]
        column = column + call.bias[1]
    return call._replace(bias=(row, column))


def sink_of(call: Call, one_more: bool) -> Float[Tensor, " H"] | None:
    """Return the score of a sink and, if wanted, of one more key that scores 0."""
    if not one_more:
        return call.sink
    return call.q.new_zeros(call.q.shape[-3]) if call.sink is None else F.softplus(call.sink)  # ln(e^0 + e^sink)


def visible_keys(call: Call) -> Bool[Tensor, "..."] | None:
    """Return where a query may attend as one matrix, or None if causality says it all."""
    T = call.q.shape[-2]
    S = call.k.shape[-2]
    mask = call.mask
    if call.doc_starts is not None:
        same_text = document_mask(call.doc_starts, S)
        mask = same_text if mask is None else mask & same_text
    # A single query is the last: causality hides no key from it, and see() has cut the keys to its window.
    if T > 1 and (mask is not None or (call.window or S) < S):
        causal = causal_mask(T, S, call.q.device, call.window)
        mask = causal if mask is None else mask & causal
    return mask


def is_plain(call: Call) -> bool:
    """Return whether causality is all that lies over the scores."""
    nothing = call.mask is None and call.doc_starts is None and call.bias is None and call.sink is None
    S = call.k.shape[-2]
    return nothing and (call.window or S) >= S


def dense_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of an attention function by contract.py, mask and bias as matrices."""
    k = call.k
    v = call.v
    mask = visible_keys(call)
    bias = None
    if call.bias is not None:
        row, column = call.bias
        bias = (row[..., None] + column[..., None, :]).to(torch.promote_types(call.q.dtype, torch.float32))
    if call.sink is not None:
        # The sink's key comes before all others, so that causality lets every query see it.
        H = call.q.shape[-3]
        S = k.shape[-2]
        k, v = (F.pad(t, (0, 0, 1, 0)) for t in (k, v))
        if mask is not None:
            mask = F.pad(mask.expand(*mask.shape[:-1], S), (1, 0), value=True)
        if bias is None:
            bias = call.sink.new_zeros(H, 1, S)
        sink = call.sink[:, None, None].to(bias.dtype)
        bias = torch.cat((sink.expand(*bias.shape[:-1], 1), bias), -1)
    return {"q": call.q, "k": k, "v": v, "mask": mask, "bias": bias, "is_causal": mask is None, "scale": call.scale}
