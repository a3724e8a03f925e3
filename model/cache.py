"""The KV cache: with it a new token costs one row instead of T."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from model.cpu import is_eager, mode

Tokens = Int[Tensor, "B T"]
DocStarts = Int[Tensor, "B T"] | None
"""The position at which each token's document begins; None if all begin at 0."""


class Span(NamedTuple):
    """The positions whose rows a tensor of the cache holds: from `first` to before `end`."""

    first: int
    end: int
    reach: int
    """The most positions before its own that a query sees."""

    def holds(self, position: int) -> bool:
        """Return whether the row of a position can come next.

        There must be no gap before it, and all rows that its query sees, as far as `reach`, must be kept.
        """
        return max(0, position - self.reach) >= self.first and position <= self.end


class KVCache:
    """Named tensors for each layer.

    The caller makes the cache and passes it to every forward pass. All layers write at `position`, which the GPT
    advances after the last layer. Keys are stored rotated. Gradients flow through the rows of the present pass alone,
    as in Transformer-XL (Dai et al. 2019).

    A layer with a window keeps the rows of the window and a few more, so that rows move only now and then. Other layers
    keep a state of all that was read, such as recurrent.py's, or the last rows, as a convolution does.

    To go back, as after draft tokens that are not taken, call crop().
    """

    is_amid_pass = False
    """Whether a pass of the GPT has begun and has not ended; between two passes, that the last one failed."""

    def __init__(self, size: int) -> None:
        """size: the most positions, in layers that keep rows."""
        self.size = size
        self._position = 0
        self.doc_starts: Int[Tensor, " B"] | None = None
        """The position at which each row's text begins; None if all begin at 0."""
        self.layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
        """Rows (B, n, size, width), or what a layer keeps in their place.

        Between two passes others may be put in place, of their shapes: the next pass writes into them.
        """
        self.spans: dict[tuple[int, str], Span] = {}
        """The positions of each tensor of rows; others have none."""
        self.documents: list[tuple[int, Int[Tensor, "B T"]]] = []
        """The doc_starts of each pass that had some, and the pass's first position."""

    @property
    def position(self) -> int:
        """The number of positions that have been read.

        Set it to an earlier one to go back, as by crop(). If a layer is used without a GPT, its caller sets it to the
        end of the rows after each pass. Raises ValueError where rows would be missing.
        """
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if position <= self._position:
            self.crop(position)
            return
        ends = [span.end for span in self.spans.values()]
        # Rows must reach the position. A state does not say how far it has read: with states alone the caller is
        # believed.
        has_states_alone = any(kept for kept in self.layers.values()) and not ends
        if position > max(ends, default=0) and not has_states_alone:
            raise ValueError(
                f"position={position} of a cache whose rows end at {max(ends, default=0)}: let a layer read them first."
            )
        self._position = position

    @property
    def texts(self) -> int | None:
        """The number of texts that have been read, None before the first pass."""
        for kept in self.layers.values():
            for tensor in kept.values():
                return tensor.size(0)
        return None

    def begin(self) -> None:
        """Note that a pass begins, before a layer reads its tokens.

        Raises ValueError after a pass that failed if some layers have read its tokens and cannot go back.
        """
        if self.is_amid_pass:
            remedy = "begin a new cache, or copy one by take() before a pass that may fail"
            self._check_rows(self._position, "a pass with this cache failed", remedy)
        self.is_amid_pass = True

    def advance(self, T: int) -> None:
        """Count T positions that all layers have read."""
        self._position += T
        self.is_amid_pass = False

    def crop(self, n: int) -> None:
        """Go back to the first n positions, as if the later ones had never been read.

        Raises ValueError, and changes nothing, for more positions than were read, and where a layer does not have what
        it had then: it keeps a state, or rows have left its window. A copy by take() before them has it.
        """
        if not 0 <= n <= self._position:
            raise ValueError(f"crop({n}) of a cache of {self._position} positions: n must lie between 0 and these.")
        if n == self._position:
            return
        if n == 0:
            self.layers.clear()
            self.spans.clear()
            self.documents.clear()
            self._position = 0
            self.doc_starts = None
            self.is_amid_pass = False
            return
        self._check_rows(n, f"crop({n})", "copy the cache by take() before the positions that may have to go")
        for key, span in self.spans.items():
            self.spans[key] = span._replace(end=min(span.end, n))
        self._position = n

        # The document of position n - 1. One that was set by hand, without a pass, stays.
        if self.documents:
            while self.documents and self.documents[-1][0] >= n:
                self.documents.pop()
            self.doc_starts = None
            if self.documents:
                first, doc_starts = self.documents[-1]
                self.doc_starts = doc_starts[:, min(n - first, doc_starts.shape[1]) - 1]

    def _check_rows(self, n: int, what: str, remedy: str) -> None:
        """Raise ValueError if a layer does not have what it had after the first n positions."""
        for layer, kept in self.layers.items():
            for name in kept:
                span = self.spans.get((layer, name))
                if span is None:
                    raise ValueError(f"{what}: layer {layer} keeps a state ({name}), which does not go back; {remedy}.")
                if not span.holds(n):
                    problem = f"the rows before {span.first} have left the window of layer {layer}"
                    raise ValueError(f"{what}: {problem}; {remedy}.")

    def append(
        self,
        layer: int,
        name: str,
        new: Float[Tensor, "B n T width"],
        window: int | None = None,
    ) -> Float[Tensor, "B n S width"]:
        """Write the rows of T new positions; return those that are kept and these, in their order.

        window: the number of positions that a query sees at most. The result has the window - 1 rows before the new
            ones, or more, as far as there are so many; earlier rows leave the cache.

        Raises ValueError if the new rows do not fit or have other axes, or if rows before them are missing.
        """
        check_rows(name, new)
        # Check that the new rows fit, and that all rows which their queries see are kept.
        position = self._position
        end = position + new.size(2)
        if end > self.size:
            raise ValueError(f"the cache has room for {self.size} positions, not for {end}: make a larger one.")
        reach = self.size if window is None else window - 1
        span = self.spans.get((layer, name), Span(0, 0, reach))
        if not span._replace(reach=reach).holds(position):  # with this call's window, which a person may have changed
            problem = f"layer {layer} has rows of the positions from {span.first} to before {span.end}"
            raise ValueError(f"{problem}, not all before {position}: every layer has to read every token, once.")
        rows = self._rows(layer, name, new, window)
        old = rows[:, :, : position - span.first]

        # Row 0 holds position span.first, and from now on `first`: 0 without a window.
        first = max(span.first, first_kept(end, window))
        self.spans[layer, name] = Span(first, end, reach)
        if first == span.first:
            # No row leaves: write the new ones after the old. Return a view of them all, but with gradients a copy
            # that is made before: autograd refuses a view that is written to, and it has no tangents of the new ones.
            learns = (torch.is_grad_enabled() and new.requires_grad) or mode() == "transformed"
            seen = torch.cat((old, new), 2) if learns else rows[:, :, : end - first]
            rows[:, :, position - first : end - first] = new.detach()
            return seen
        # Rows leave: move those that stay to the front. The new queries still see all of them.
        seen = torch.cat((old, new), 2)
        rows[:, :, : end - first] = seen[:, :, first - span.first :].detach()
        return seen

    def _rows(self, layer: int, name: str, new: Tensor, window: int | None) -> Tensor:
        """Return the tensor of the rows `new` and all others of its name, made by the first call.

        With a window it has room for as many positions as first_kept() leaves.
        """
        kept = self.layers[layer]
        room = self.size if window is None else min(self.size, window + spare_rows(window))
        if name not in kept:
            with ordinary_tensors():
                kept[name] = new.new_zeros(*new.shape[:2], room, new.size(3))
        kept[name] = in_type_of(new, kept[name], name, layer)
        if kept[name].size(2) < room:  # the window has been enlarged, or a person has left out the room
            span = self.spans.get((layer, name), Span(0, 0, 0))
            count = span.end - span.first
            if kept[name].size(2) < count:
                problem = f"layer {layer} has {kept[name].size(2)} rows of {name} for {count} positions"
                raise ValueError(f"{problem}: none may be left out; hide them by a mask, or go back by crop().")
            with ordinary_tensors():
                kept[name] = F.pad(kept[name], (0, 0, 0, room - kept[name].size(2)))
        rows = kept[name]
        if rows.shape[:2] != new.shape[:2] or rows.shape[3] != new.shape[3]:
            raise ValueError(f"rows {tuple(new.shape)} do not fit a cache of {tuple(rows.shape)}.")
        return rows

    def continue_documents(self, doc_starts: DocStarts, T: int) -> DocStarts:
        """Return the doc_starts of T new tokens: those given, else that of the last token."""
        if doc_starts is not None:
            self.doc_starts = doc_starts[:, -1]
            while self.documents and self.documents[-1][0] >= self._position:  # of a pass that failed
                self.documents.pop()
            self.documents.append((self._position, doc_starts))
        elif self.doc_starts is not None:
            return self.doc_starts[:, None].expand(-1, T)
        return doc_starts

    def take(self, rows: Int[Tensor, " rows"]) -> "KVCache":
        """Return a new cache of these rows of the batch, in this order.

        Rows may repeat or be left out.
        """
        return self._of_each(lambda tensor: tensor.index_select(0, rows))

    def __copy__(self) -> "KVCache":
        # Rows are written in place: a copy that shared them would be written to with its original.
        return self._of_each(Tensor.clone)

    def _of_each(self, function: Callable[[Tensor], Tensor]) -> "KVCache":
        """Return a cache with `function` of each tensor, whose first axis has the texts."""
        made = type(self).__new__(type(self))  # of a person's own class, too
        vars(made).update(vars(self))
        made.layers = defaultdict(dict)
        made.spans = dict(self.spans)
        made.doc_starts = None if self.doc_starts is None else function(self.doc_starts)
        made.documents = [(first, function(doc_starts)) for first, doc_starts in self.documents]
        with ordinary_tensors():
            for layer, kept in self.layers.items():
                made.layers[layer] = {name: function(tensor) for name, tensor in kept.items()}
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for kept in self.layers.values() for tensor in kept.values())


@contextmanager
def undone_on_failure(cache: KVCache | None, T: int) -> Iterator[None]:
    """Take back the T positions of a pass that fails after its last layer.

    It then is as one that failed before.
    """
    try:
        yield
    except BaseException:
        if cache is not None:
            cache.advance(-T)
            cache.is_amid_pass = True
        raise


def ordinary_tensors() -> AbstractContextManager[object]:
    """Return a context whose new tensors may also be written to outside of inference mode."""
    # torch.compile cannot trace the question for inference mode: is_eager() comes first.
    in_inference_mode = is_eager() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if in_inference_mode else nullcontext()


def in_type_of(new: Tensor, kept: Tensor, name: str, layer: int) -> Tensor:
    """Return what a cache keeps in the type of a pass.

    It is another under autocast, or after a change of the model's type. Raises ValueError for integers in the place of
    other numbers, for they lack a scale.
    """
    if kept.dtype == new.dtype or not new.is_floating_point():
        return kept
    if not kept.is_floating_point():
        problem = f"layer {layer} has {name} as {kept.dtype}, without a scale"
        raise ValueError(f"{problem}: put its numbers in place, such as rounded * scale.")
    with ordinary_tensors():
        return kept.to(new.dtype)


def check_rows(name: str, rows: Tensor) -> None:
    """Raise ValueError unless rows of tokens have four axes, (B, n, T, width)."""
    if rows.dim() != 4:
        problem = f"the rows of {name} are {tuple(rows.shape)}, not (B, n, T, width)"
        raise ValueError(f"{problem}: a layer's input x (B, T, C) is x[:, None]")


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
