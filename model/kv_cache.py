"""The keys and values a model has already computed, so that a new token costs one row instead of T.

The caller makes the cache and passes it to every forward pass; whoever runs the layers (GPT.forward)
advances it once, after the last. No layer owns or moves it, so all of them write to the same slots, and a
pass that fails leaves no trace.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor


class KVCache:
    """Room for `size` positions of every layer's keys and values, allocated once.

    `length` slots are filled, the same ones in every layer and row. Slot 0 holds position `start`, which
    is 0 until drop_oldest() has made room: keys keep the rotation of the position they were written at.
    Slots before `first`, which is the caller's to move, are out of sight: no layer gets them.
    It serves inference: gradients do not flow through it.
    """

    def __init__(
        self,
        n_layer: int,
        batch_size: int,
        kv_heads: int,
        size: int,
        head_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        shape = (n_layer, batch_size, kv_heads, size, head_size)
        if min(shape) < 1:
            raise ValueError(f"a cache of shape (n_layer, B, Hkv, size, D) = {shape} has no room.")
        self.keys: Float[Tensor, "n_layer B Hkv size D"] = torch.zeros(shape, device=device, dtype=dtype)
        self.values: Float[Tensor, "n_layer B Hkv size D"] = torch.zeros_like(self.keys)
        self.layers = list(zip(self.keys, self.values, strict=True))
        self.length = 0
        self.start = 0
        self.first = 0
        self.slot: Int[Tensor, " 1"] | None = None
        self.sight = size

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.keys.shape[-2]

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.start + self.length

    def write(
        self, layer: int, k: Float[Tensor, "B Hkv T D"], v: Float[Tensor, "B Hkv T D"]
    ) -> tuple[Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]:
        """Put T new keys and values behind the filled slots; return those of all slots in sight, as views.

        Raises ValueError, naming the shapes, when they do not fit or there is no room left.
        """
        keys, values = self.layers[layer]
        T = k.shape[-2]
        first, end = self.first, self.length + T
        fits = k.shape[:-2] == keys.shape[:-2] and k.shape[-1] == keys.shape[-1] and k.shape == v.shape
        if not fits or k.dtype != keys.dtype or end > self.size or k.requires_grad:
            raise ValueError(self._misfit(k, v, end))
        if self.slot is None:
            keys.narrow(2, self.length, T).copy_(k)
            values.narrow(2, self.length, T).copy_(v)
        else:
            keys.index_copy_(2, self.slot, k)
            values.index_copy_(2, self.slot, v)
            end = self.sight
        return keys[:, :, first:end], values[:, :, first:end]

    def at(self, slot: Int[Tensor, " 1"], sight: int) -> KVCache:
        """The same memory for a step that a CUDA graph repeats: for one token, at a slot that is a tensor.

        Layers see the first `sight` slots, filled or not: the caller masks the empty ones, and counts the token.
        """
        fixed = copy.copy(self)
        fixed.slot, fixed.first, fixed.sight = slot, 0, sight
        return fixed

    def advance(self, T: int) -> None:
        """Count T positions as filled, once every layer has written them."""
        if not 0 <= T <= self.size - self.length:
            raise ValueError(f"cannot advance by {T}: {self.length} of size={self.size} slots are filled.")
        self.length += T

    def drop_oldest(self, n: int) -> None:
        """Forget the first n slots and move the rest forward, so that a text may outgrow the cache.

        Positions go on counting, so this suits rope, alibi and none. Moving costs a copy: drop many at once.
        """
        if not 0 <= n <= self.length:
            raise ValueError(f"cannot drop {n}: {self.length} of size={self.size} slots are filled.")
        for stored in (self.keys, self.values):
            stored[..., : self.length - n, :] = stored[..., n : self.length, :].clone()  # the two ranges overlap
        self.length -= n
        self.start += n
        self.first = max(0, self.first - n)

    def take(self, rows: Int[Tensor, " rows"]) -> KVCache:
        """A new cache of these rows of the batch, in this order: a row may come several times or not at all.

        One prefill serves n samples as `cache.take(torch.zeros(n, dtype=torch.long))`.
        """
        taken = copy.copy(self)
        taken.keys = self.keys.index_select(1, rows.to(self.keys.device))
        taken.values = self.values.index_select(1, rows.to(self.values.device))
        taken.layers = list(zip(taken.keys, taken.values, strict=True))
        return taken

    def _misfit(self, k: Tensor, v: Tensor, end: int) -> str:
        B, Hkv, size, D = self.keys.shape[1:]
        shapes = f"the cache is (B, Hkv, size, D) = {(B, Hkv, size, D)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}"
        if k.requires_grad:
            return f"gradients cannot flow through a KVCache ({shapes}): wrap the call in torch.no_grad()."
        if k.dtype != self.keys.dtype:
            return f"{shapes}, but it holds {self.keys.dtype} and k is {k.dtype}: make the cache with dtype={k.dtype}."
        if k.ndim == 4 and end > size:
            return (
                f"the cache is too short: {self.length} of its {size} positions are filled and {k.shape[-2]} more were "
                f"asked ({shapes}). Make it at least {end} long, or drop_oldest({end - size}) first."
            )
        return f"k and v must be (B, Hkv, T, D) and fit the cache: {shapes}."
