"""What a model keeps of the tokens it has read, so that a new one costs one row instead of T.

GPT.make_cache makes the cache; the caller passes it to every forward pass, and what runs the layers (GPT.hidden)
advances it once, after the last. Until then all layers write to the same positions, and a pass that fails can be
repeated.
"""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor


class LayerCache:
    """What one layer keeps of the latest positions: in `rows` something of each, in `state` the sum of all.

    rows: tensors (B, n, size, width), such as n = 2 Hkv keys and values of width D.
    sight: how many positions, itself included, a query sees; all when None, and then no more than `size` fit.
    state: tensors of any shape that begins with B; who reads one also replaces it.

    Of the slots of `rows` `filled` hold something, the first of them position `start`. Keys keep the rotation of the
    position they were written at. Gradients do not flow through a cache.
    """

    def __init__(self, size: int, sight: int | None, rows: dict[str, Tensor], state: dict[str, Tensor]) -> None:
        self.size, self.sight, self.rows, self.state = size, sight, rows, state
        self.room, self.start, self.filled, self.first = size, 0, 0, 0
        self.slot: Int[Tensor, " 1"] | None = None
        self.bias: Float[Tensor, "#B #H 1 sight"] | None = None

    def make_room(self, T: int) -> None:
        """Have slots for T positions more; what their queries do not see is dropped where there are none.

        A chunk longer than `size` gets more slots, which the next pass gives back.
        """
        end = self.filled + T
        if self.sight is not None:
            self.first = max(0, self.filled + 1 - self.sight)  # what the first of the new queries sees
            if end > self.room:
                kept = self.filled - self.first
                self.room = max(self.size, kept + T)
                for name, rows in self.rows.items():
                    old = rows[:, :, self.first : self.filled].clone()  # the ranges may overlap
                    if rows.size(2) != self.room:
                        rows = self.rows[name] = rows.new_zeros(*rows.shape[:2], self.room, rows.size(3))
                    rows[:, :, :kept] = old
                self.start, self.filled, self.first = self.start + self.first, kept, 0

    def write(self, name: str, *parts: Float[Tensor, "B _ T width"]) -> Float[Tensor, "B n S width"]:
        """Write something of T positions behind the filled slots, parts one after the other on the second axis.

        Returns that of all positions in sight, as a view. ValueError, naming the shapes, when it does not fit.
        """
        rows, T = self.rows[name], parts[0].shape[-2]
        shape = parts[0].shape
        heads = sum(part.shape[1] for part in parts) if len(shape) == 4 else 0
        fits = (*shape[:1], heads, *shape[3:]) == (*rows.shape[:2], *rows.shape[3:])
        fits = fits and all(part.shape[::2] == shape[::2] and part.shape[3] == shape[3] for part in parts)
        if not fits or shape[2] + self.filled > self.room or parts[0].dtype != rows.dtype or parts[0].requires_grad:
            given = " and ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"{given} do not fit a cache of {tuple(rows.shape)} with {self.filled} slots filled: it takes "
                f"(B, Hkv, T, D) of {rows.dtype}, made under torch.no_grad()."
            )
        if self.slot is None:
            begin = 0
            for part in parts:  # not torch.cat(parts, 1, out=…): given one part of size (1, 1, …) it writes nothing
                rows[:, begin : begin + part.shape[1], self.filled : self.filled + T] = part
                begin += part.shape[1]
            return rows[:, :, self.first : self.filled + T]
        assert self.bias is not None
        rows.index_copy_(2, self.slot, torch.cat(parts, 1))
        return rows[:, :, : self.bias.size(-1)]


class KVCache:
    """A LayerCache for every layer, and the position of the next token."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers, self.position = layers, 0

    @property
    def alike(self) -> bool:
        """Whether every layer keeps keys and values of the same positions, and nothing else."""
        return len({(layer.size, layer.sight, *layer.rows, *layer.state) for layer in self.layers}) == 1 and (
            [*self.layers[0].rows, *self.layers[0].state] == ["kv"]
        )

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        kept = [tensor for layer in self.layers for tensor in (*layer.rows.values(), *layer.state.values())]
        return sum(tensor.nbytes for tensor in kept)

    def at(self, slot: Int[Tensor, " 1"], bias: Float[Tensor, "#B #H 1 sight"]) -> "KVCache":
        """Return the same memory for a step that a CUDA graph repeats: for one token, at a slot that is a tensor.

        Layers see the first slots, as many as `bias` has, filled or not, and add it to the scores: ALiBi's, and what
        hides the empty ones, if no mask does. The caller makes room and advances.
        """
        fixed = KVCache([copy.copy(layer) for layer in self.layers])
        fixed.position = self.position
        for layer in fixed.layers:
            layer.slot, layer.bias = slot, bias
        return fixed

    def advance(self, T: int) -> None:
        """Count T positions as read, once every layer has written them."""
        self.position += T
        for layer in self.layers:
            assert not layer.rows or 0 <= T <= layer.room - layer.filled
            layer.filled += T

    def take(self, rows: Int[Tensor, " rows"]) -> "KVCache":
        """Return a new cache of these rows of the batch, in this order; a row may come several times or not at all."""
        taken = KVCache([copy.copy(layer) for layer in self.layers])
        taken.position = self.position
        for layer in taken.layers:
            layer.rows = {name: tensor.index_select(0, rows) for name, tensor in layer.rows.items()}
            layer.state = {name: tensor.index_select(0, rows) for name, tensor in layer.state.items()}
        return taken
