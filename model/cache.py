"""The KV cache: with it a new token costs one row instead of T."""

from collections import defaultdict

import torch
from jaxtyping import Float, Int
from torch import Tensor

Tokens = Int[Tensor, "B T"]
DocStarts = Int[Tensor, "B T"] | None
"""The position at which each token's document begins; None if all begin at 0."""


class KVCache:
    """Named tensors for each layer.

    The caller makes the cache and passes it to every forward pass. All layers write at `position`, which the GPT
    advances after the last layer. Keys are stored rotated; gradients do not flow.

    A layer with a window keeps the rows of the window and a few more, so that rows move only now and then.
    """

    def __init__(self, size: int) -> None:
        """size: the most positions, in layers that keep rows."""
        self.size = size
        self.position = 0
        self.doc_starts: Int[Tensor, " B"] | None = None
        """The position at which each row's text begins; None if all begin at 0."""
        self.layers: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def append(
        self,
        layer: int,
        name: str,
        new: Float[Tensor, "B n T width"],
        window: int | None = None,
    ) -> Float[Tensor, "B n S width"]:
        """Write the rows of T new positions, and return the rows of all positions.

        window: the number of positions that a query sees at most. The result has at least the window - 1 rows before
            the new ones, and earlier rows leave the cache.

        Raises ValueError if the new rows do not fit.
        """
        end = self.position + new.size(2)
        if end > self.size:
            raise ValueError(f"the cache has room for {self.size} positions, not for {end}: make a larger one.")
        # Row 0 of the tensor holds position `first`, and after this call `next_first`.
        first = first_kept(self.position, window)
        next_first = first_kept(end, window)

        # The first call makes the tensor: room for all positions, or for a window's and a few more.
        kept = self.layers[layer]
        if name not in kept:
            room = self.size if window is None else min(self.size, window + spare_rows(window))
            kept[name] = new.new_zeros(*new.shape[:2], room, new.size(3))
        rows = kept[name]
        if rows.shape[:2] != new.shape[:2] or rows.shape[3] != new.shape[3]:
            raise ValueError(f"rows {tuple(new.shape)} do not fit a cache of {tuple(rows.shape)}.")

        # Write the new rows after the `old` ones that are kept.
        old = self.position - first
        if next_first == first:
            rows[:, :, old : end - first] = new.detach()
            return rows[:, :, : end - first]
        # The new queries still see all of them. Those that leave now are overwritten by the others.
        seen = torch.cat((rows[:, :, :old], new.detach()), 2)
        rows[:, :, : end - next_first] = seen[:, :, next_first - first :]
        return seen

    def continue_documents(self, doc_starts: DocStarts, T: int) -> DocStarts:
        """Return the doc_starts of T new tokens, if not given those of the cache's last token."""
        if doc_starts is not None:
            self.doc_starts = doc_starts[:, -1]
        elif self.doc_starts is not None:
            return self.doc_starts[:, None].expand(-1, T)
        return doc_starts

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


def spare_rows(window: int) -> int:
    """Return the number of rows for which a cache has room beside a window's.

    Once in so many rows the cache moves the others.
    """
    return -(-window // 4)


def first_kept(end: int, window: int | None) -> int:
    """Return the first position whose row a cache of `end` positions still has.

    The next query sees window - 1 of them.
    """
    if window is None:
        return 0
    # Rows are dropped `spare` at a time: the first position is a multiple.
    spare = spare_rows(window)
    return max(0, end - window + 1) // spare * spare
