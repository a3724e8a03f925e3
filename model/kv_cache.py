"""The keys and values a model has already computed, so that a new token costs one row instead of T.

The caller makes the cache and passes it to every forward pass; what runs the layers (GPT.hidden) advances it once,
after the last. No layer moves it, so all of them write to the same slots, and a pass that fails leaves no trace.
"""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.masks import Device


class KVCache:
    """Room for `size` positions of every layer's keys and values, allocated once.

    `length` slots are filled, the same ones in every layer and row. Slot 0 holds position `start`, which
    is 0 until drop_oldest() has made room: keys keep the rotation of the position they were written at.
    Slots before `first`, which the caller sets, are out of sight: no layer gets them.
    Gradients do not flow through a cache.
    """

    def __init__(
        self, n_layer: int, B: int, Hkv: int, size: int, D: int, device: Device = None, dtype: torch.dtype | None = None
    ):
        self._keep(torch.zeros(n_layer, B, 2 * Hkv, size, D, device=device, dtype=dtype))
        self.length = self.start = self.first = 0
        self.slot: Int[Tensor, " 1"] | None = None
        self.bias: Float[Tensor, "#B #H 1 sight"] | None = None
        self.size = size

    def _keep(self, stored: Float[Tensor, "n_layer B both size D"]) -> None:
        """Hold a layer's keys and values in one tensor, one behind the other: a token's are written by one kernel."""
        self.stored, (self.keys, self.values) = stored, stored.chunk(2, dim=2)
        self.layers = list(zip(stored, self.keys, self.values, strict=True))

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.start + self.length

    def write(
        self, layer: int, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T D"]
    ) -> tuple[Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]:
        """Write T new keys and values behind the filled slots; return those of all slots in sight, as views.

        Raises ValueError, naming the shapes, when they do not fit or no room is left.
        """
        both, keys, values = self.layers[layer]
        T = k.shape[-2]
        first, end = self.first, self.length + T
        fits = k.shape[:-2] == keys.shape[:-2] and k.shape[-1] == keys.shape[-1] and k.shape == v.shape
        if not fits or k.dtype != keys.dtype or end > self.size or k.requires_grad:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of {tuple(keys.shape)} with "
                f"{self.length} slots filled: it takes (B, Hkv, T, D) of {keys.dtype}, made under torch.no_grad()."
            )
        if self.slot is None:
            torch.cat((k, v), 1, out=both.narrow(2, self.length, T))
        else:
            assert self.bias is not None
            keys.index_copy_(2, self.slot, k)
            values.index_copy_(2, self.slot, v)
            end = self.bias.size(-1)
        return keys[:, :, first:end], values[:, :, first:end]

    def at(self, slot: Int[Tensor, " 1"], bias: Float[Tensor, "#B #H 1 sight"]) -> "KVCache":
        """Return the same memory for a step that a CUDA graph repeats: for one token, at a slot that is a tensor.

        Layers see the first slots, as many as `bias` has, filled or not, and add it to the scores: ALiBi's, and what
        hides the empty ones, if no mask does. The caller advances.
        """
        fixed = copy.copy(self)
        fixed.slot, fixed.first, fixed.bias = slot, 0, bias
        return fixed

    def advance(self, T: int) -> None:
        """Count T positions as filled, once every layer has written them."""
        assert 0 <= T <= self.size - self.length
        self.length += T

    def drop_oldest(self, n: int) -> None:
        """Drop the first n slots and move the rest forward, so that a text may outgrow the cache.

        Positions go on counting, so this suits rope, alibi and none. Moving costs a copy: drop many at once.
        """
        assert 0 <= n <= self.length
        self.stored[..., : self.length - n, :] = self.stored[..., n : self.length, :].clone()  # the ranges overlap
        self.length -= n
        self.start += n
        self.first = max(0, self.first - n)

    def take(self, rows: Int[Tensor, " rows"]) -> "KVCache":
        """Return a new cache of these rows of the batch, in this order; a row may come several times or not at all."""
        taken = copy.copy(self)
        taken._keep(self.stored.index_select(1, rows))
        return taken
