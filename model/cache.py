"""The KV cache: with it a new token costs one row instead of T."""

from collections import defaultdict

from jaxtyping import Float, Int
from torch import Tensor


class KVCache:
    """Named tensors for each layer.

    They are rows of every position, and states of any shape that begins with B. The caller makes the cache and passes
    it to every forward pass. All layers write at `position`, which the GPT advances after the last layer. Keys are
    stored rotated; gradients do not flow.
    """

    def __init__(self, size: int) -> None:
        """size: the most positions, in layers that keep rows."""
        self.size = size
        self.position = 0
        self.doc_starts: Int[Tensor, " B"] | None = None
        """The position at which each row's text begins; None if all begin at 0."""
        self.layers: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def append(self, layer: int, name: str, new: Float[Tensor, "B n T width"]) -> Float[Tensor, "B n S width"]:
        """Write the rows of T new positions, and return the rows of all positions as a view.

        Raises ValueError if they do not fit.
        """
        kept = self.layers[layer]
        end = self.position + new.size(2)
        if end > self.size:
            raise ValueError(f"the cache has room for {self.size} positions, not for {end}: make a larger one.")
        if name not in kept:
            kept[name] = new.new_zeros(*new.shape[:2], self.size, new.size(3))
        rows = kept[name]
        if (*rows.shape[:2], rows.shape[3]) != (*new.shape[:2], new.shape[3]):
            raise ValueError(f"rows {tuple(new.shape)} do not fit a cache of {tuple(rows.shape)}.")
        rows[:, :, self.position : end] = new.detach()
        return rows[:, :, :end]

    def take(self, rows: Int[Tensor, " rows"]) -> "KVCache":
        """Return a new cache of these rows of the batch, in this order.

        Rows may repeat or be left out.
        """
        taken = KVCache(self.size)
        taken.position = self.position
        taken.doc_starts = None if self.doc_starts is None else self.doc_starts[rows]
        for layer, kept in self.layers.items():
            taken.layers[layer] = {name: tensor.index_select(0, rows) for name, tensor in kept.items()}
        return taken

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for kept in self.layers.values() for tensor in kept.values())
