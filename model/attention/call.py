"""One call of attention: all that its result depends on.

    weights(q kᵀ · scale + bias) v,  over the keys that each query sees

The layer makes a Call, modifiers change it, and executors.py chooses the code that computes it, an executor. A field
that is None changes nothing. A field that is given must be served: code that does not declare it never gets the call.
`dense` makes of causality, windows, documents and biases one mask and one matrix, (…, H, T, S), for code that takes no
more.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from model.attention.choice import index_scores, indexed_keys
from model.attention.masks import causal_mask, document_mask, shows_later
from model.attention.weighting import PLAIN, Weighting
from model.cpu import is_recorded
from model.layers import upcast

Query = Float[Tensor, "*lead H T D"]
Key = Float[Tensor, "*lead Hkv S D"]
Value = Float[Tensor, "*lead Hkv S Dv"]
Output = Float[Tensor, "*lead H T Dv"]
# Broadcasts to (…, H, T, S): full rank, or fewer axes.
Overlay = Shaped[Tensor, "*#lead #H #T #S"] | Shaped[Tensor, "#T #S"] | Shaped[Tensor, "#S"] | Shaped[Tensor, ""]
Mask = Overlay | None
Bias = Float[Overlay, ""] | None  # an Overlay of floats
RowColumn = tuple[Float[Tensor, "*#B H T"], Float[Tensor, "*#B H S"]]
"""Rows and columns of a matrix: row_t + column_s."""
Sink = Float[Tensor, " H"] | Float[Tensor, "B H T"]


class Indexer(NamedTuple):
    """A small attention that chooses `best` keys for each query: see sparse.py.

    The score of a key is Σ_j w_tj ReLU(q_tj · k_s) / √(J Di).
    """

    q: Float[Tensor, "B J T Di"]
    k: Float[Tensor, "B S Di"]
    w: Float[Tensor, "B T J"]
    best: int
    learns: bool
    """Whether it is trained, by a loss, to score keys as the attention weighs them."""


class Relative(NamedTuple):
    """A bias for each query and distance, r_t · p_d; zero from the distance `extent` on."""

    r: Float[Tensor, "B H T rank"]
    profiles: Float[Tensor, "rank extent"]


class Call(NamedTuple):
    """The arguments of attention.

    The T queries are at the last T of the S positions. By default a query sees itself and the keys before it; the
    fields below hide some of these or change their scores.
    """

    q: Query
    k: Key
    v: Value
    """Keys and values with Hkv heads, each of which H / Hkv query heads share."""
    weighting: Weighting = PLAIN
    """How scores become weights, softmax by default: see weighting.py."""
    mask: Bool[Overlay, ""] | None = None
    """True where a query may attend. It hides keys besides those that causality, window and documents hide; after
    dense() it has these too."""
    is_causal: bool = True
    """Whether later keys are hidden: by default, unlike in a function of contract.py. False, as in an encoder: only
    mask, documents and indexer hide keys."""
    doc_starts: Int[Tensor, "B T"] | None = None
    """The first key of each query's document."""
    window: int | None = None
    """The number of keys that a query sees, itself included."""
    row_column: RowColumn | None = None
    """A bias row_t + column_s, for which no matrix is made."""
    matrix: Bias = None
    """A bias for each query and key, finite: the mask hides keys. It is the `bias` of contract.py."""
    relative: Relative | None = None
    """A bias that a query reads from profiles over the distance."""
    sink: Sink | None = None
    """The score of one more key, whose value is zero: (H,), or (B, H, T) if each query has its own."""
    indexer: Indexer | None = None
    """The choice of a few keys by an indexer."""
    # Of single forms, as relative and indexer are; skip these two at first.
    faded: Float[Tensor, "*lead Hkv S D"] | None = None
    """For keys that fade, as those of the form wall: the running sum of ln α; a position leaves a share α of each
    channel of earlier keys. See fading.py."""
    tilt: Query | None = None
    """For a local line in place of a mean, as in the form parallax: the r that makes of the weight p of a key k
    the weight p (1 - r·k + m), where m is the mean of r·k over the keys, weighted by p. See local.py."""
    dropout_p: float = 0.0
    """The probability of dropping a weight."""
    scale: float | None = None
    """The factor on the products; None: 1/√D."""


REQUIRED = ("q", "k", "v", "weighting")

# Functions, not methods of Call: torch.compile does not trace a named tuple's methods where shapes are checked.


def features(call: Call) -> list[str]:
    """Return the names of the fields that an executor has to serve.

    They are those with other values than by default, without REQUIRED.
    """
    found = [name for name in call._fields if name not in REQUIRED and getattr(call, name) is not None]
    if call.is_causal:  # the default; False is what has to be served
        found.remove("is_causal")
    if not call.dropout_p:
        found.remove("dropout_p")
    # A window that all keys fit into hides none. While torch.export or jit.trace records a call, sizes stand for any
    # number: keep the window then.
    if call.window is not None and not is_recorded() and call.window >= call.k.shape[-2]:
        found.remove("window")
    return found


def lengths(call: Call) -> tuple[int, int]:
    """Return the numbers of queries and keys, T and S."""
    return call.q.shape[-2], call.k.shape[-2]


def contradiction(call: Call) -> str | None:
    """Return why no code computes a call, whose fields mean nothing together; None if they do."""
    if call.sink is not None and call.weighting.no_sink is not None:
        return f"a sink means nothing under {call.weighting.name}: {call.weighting.no_sink}."
    if call.weighting.is_causal and not call.is_causal:
        earlier = f"under {call.weighting.name}, which reads earlier keys alone"
        if call.mask is None:
            return f"is_causal=False means nothing {earlier}: pass is_causal=True or a mask."
        if shows_later(call.mask, *lengths(call)):
            return f"the mask shows later keys {earlier}: pass mask & causal_mask(T, S), of model.attention.masks."
    if call.window is not None and not call.is_causal:
        return "a window ends at a query's own key: leave out window, or is_causal=False."
    if call.faded is not None and not call.is_causal:
        return "keys fade on the way to later queries: leave out faded, or is_causal=False."
    return None


def scale_of(call: Call) -> float:
    """Return the factor on the products."""
    return call.q.shape[-1] ** -0.5 if call.scale is None else call.scale


def add_bias(call: Call, row: Float[Tensor, "*#B H T"], column: Float[Tensor, "*#B H S"]) -> Call:
    """Return the call with row_t + column_s added to its scores.

    The several queries that a modifier may have given to a head share its bias.
    """
    H = call.q.shape[-3]
    if row.shape[-2] != H or column.shape[-2] != H:
        row, column = (part.repeat_interleave(H // part.shape[-2], -2) for part in (row, column))
    if call.row_column is not None:
        row = row + call.row_column[0]
        column = column + call.row_column[1]
    return call._replace(row_column=(row, column))


def add_matrix(call: Call, matrix: Float[Tensor, "*#B #H #T S"]) -> Call:
    """Return the call with a bias of any kind added to its scores.

    It is finite: what hides a key belongs in the mask. Only code that makes a (T, S) matrix serves it.
    """
    return call._replace(matrix=matrix if call.matrix is None else call.matrix + matrix)


def add_sink(call: Call, score: Sink) -> Call:
    """Return the call with one more key, whose value is zero.

    score: (H,), or (B, H, T) for a score of each query's own.
    """
    if call.sink is None:
        return call._replace(sink=score)
    # Two such keys are one, of score ln(eᵃ + eᵇ).
    a, b = (each[:, None] if each.ndim == 1 else each for each in (call.sink, score))  # (H, 1) or (B, H, T)
    joint = torch.logaddexp(a, b)
    return call._replace(sink=joint[:, 0] if joint.ndim == 2 else joint)


def visible_keys(call: Call, index: Tensor | None = None) -> Bool[Tensor, "..."] | None:
    """Return where a query may attend, as a matrix; None if nothing but causality hides keys.

    index: the scores of the call's indexer, if they are there already.
    """
    T, S = lengths(call)
    has_window = "window" in features(call)
    mask = call.mask
    if call.doc_starts is not None:
        same_text = document_mask(call.doc_starts, S)
        mask = same_text if mask is None else mask & same_text
    # A mask has causality too, for with_matrices() then clears is_causal. A single query, the last, needs none, but for
    # a window.
    makes_mask = mask is not None or call.indexer is not None
    if has_window or (makes_mask and hides_later(call)):
        causal = causal_mask(T, S, call.q.device, call.window)
        mask = causal if mask is None else mask & causal
    if call.indexer is not None:
        seen = torch.ones((), dtype=torch.bool, device=call.q.device) if mask is None else mask
        index = index_scores(*call.indexer[:3]) if index is None else index
        mask = indexed_keys(index.detach(), seen, call.indexer.best)
    return mask


def hides_later(call: Call) -> bool:
    """Return whether causality may hide a key; from a single query, the last, it hides none."""
    return call.is_causal and (is_recorded() or call.q.shape[-2] != 1)


def with_matrices(call: Call, index: Tensor | None = None, sink_in_front: bool = False) -> Call:
    """Return the call with one mask and one matrix.

    They take the place of window, documents, indexer and biases. If one of these makes a mask, causality joins it; else
    it stays is_causal. A sink is (H,) here: with_constant_sink() has replaced one for each query.

    index: the scores of the call's indexer, if they are there already.
    sink_in_front: make of the sink a key of value zero before all others: for code that knows no sink, and for
        weightings that count keys from the last one, a query's own.
    """
    k = call.k
    v = call.v
    S = k.shape[-2]
    mask = visible_keys(call, index)
    is_causal = mask is None and hides_later(call)  # a mask has causality by now

    # The bias, in the type of the scores.
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    matrix = None if call.matrix is None else call.matrix.to(dtype)
    if call.row_column is not None:
        row, column = call.row_column
        summed = (row[..., None] + column[..., None, :]).to(dtype)
        matrix = summed if matrix is None else summed + matrix
    if call.relative is not None:
        by_distance = relative_bias(call.relative, S).to(dtype)
        matrix = by_distance if matrix is None else by_distance + matrix

    faded = call.faded
    sink = None if call.sink is None else call.sink.to(dtype)
    if sink is not None and sink_in_front:
        k, v = (F.pad(t, (0, 0, 1, 0)) for t in (k, v))
        faded = None if faded is None else F.pad(faded, (0, 0, 1, 0))
        matrix = with_key_in_front(matrix, sink, S)
        if mask is not None:
            mask = F.pad(mask.expand(*mask.shape[:-1], S), (1, 0), value=True)
        sink = None
    laid = Call(call.q, k, v, call.weighting, mask, is_causal, matrix=matrix, sink=sink)
    return laid._replace(faded=faded, tilt=call.tilt, dropout_p=call.dropout_p, scale=scale_of(call))


def dense(
    call: Call,
    index: Tensor | None = None,
    sink_in_front: bool = False,
) -> tuple[Call, Bool[Tensor, "..."] | None]:
    """Return the call with a mask and a matrix over its scores, and which queries see a key.

    Keys and values get all H heads. The mask is None if every pair is allowed. The second result, (…, T, 1), is None if
    every query sees a key. A softmax over nothing is 0/0, and its NaN survives multiplication by zero, forwards and
    backwards. So a query that may attend nowhere is shown every key. The caller then fills its row of the result with
    zeros, through which no gradient flows.

    index, sink_in_front: as for with_matrices().
    """
    q = call.q
    H, T = q.shape[-3:-1]
    # Before a sink's key joins them: torch.export knows which of 8T and 16T is less, and not of 8(T + 1) and 16(T + 1).
    call = call._replace(k=repeat_heads(call.k, H), v=repeat_heads(call.v, H))
    laid = with_matrices(call, index, sink_in_front)
    S = laid.k.shape[-2]
    mask = laid.mask
    may_see_none = mask is not None
    if mask is None and laid.is_causal:
        # With a key for every query each sees at least its own. With fewer keys, T > S, the first queries see none.
        mask = causal_mask(T, S, q.device)
        may_see_none = is_recorded() or T > S

    has_keys = None
    if mask is not None and may_see_none:
        has_keys = mask.any(-1, keepdim=True)
        mask = mask | ~has_keys
    faded = None if laid.faded is None else repeat_heads(laid.faded, H)
    return laid._replace(faded=faded, mask=mask, is_causal=False), has_keys


def repeat_heads(x: Shaped[Tensor, "*lead Hkv S D"], H: int) -> Shaped[Tensor, "*lead {H} S D"]:
    """Give every query head its own copy of the key/value head it shares (Ainslie et al. 2023)."""
    return x if x.shape[-3] == H else x.repeat_interleave(H // x.shape[-3], dim=-3)


def check_broadcast(name: str, overlay: Tensor, to: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor broadcasts to the shape (…, H, T, S).

    Leading axes may be missing.
    """
    if not isinstance(overlay, Tensor) and not type(overlay).__module__.startswith("torch"):
        raise ValueError(f"{name} is of type {type(overlay).__name__}: make a tensor of it, torch.tensor({name}).")
    # torch's CausalBias is a tensor by its class, with any numbers in it.
    if not isinstance(overlay, Tensor) or type(overlay).__module__ == "torch.nn.attention.bias":
        problem = f"{name} is of type {type(overlay).__name__}, which is no tensor of numbers"
        remedy = "pass is_causal=True, by which the last query sees the last key, or a mask of booleans"
        raise ValueError(f"{problem}: {remedy}, such as create_mask() of torch's flex_attention makes.")
    shape = overlay.shape
    if len(shape) == 3 and len(to) == 4 and shape[0] == to[0] == to[1] > 1:
        problem = f"{name} {tuple(shape)} may be of {to[0]} texts or of {to[1]} heads"
        raise ValueError(f"{problem}: write {name}[:, None] for one of each text, {name}[None] for one of each head.")
    if len(shape) > len(to) or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False)):
        remedy = "a (B, S) padding mask goes through padding_mask() first, and one (B, T, S) is written [:, None]"
        raise ValueError(f"{name} {tuple(shape)} does not broadcast to (…, H, T, S) = {tuple(to)}; {remedy}.")


# For fields of single forms and modifiers.


def with_constant_sink(call: Call) -> Call:
    """Return the same call with a sink of score 0 in place of each query's own.

    A softmax does not see a number that is added to all scores of a row: of the scores z with a sink b, (z, b), it
    makes the same weights as of (z - b, 0). So do the other weightings that know a sink. Code for a constant sink and a
    bias thus serves a sink of each query's own.
    """
    if call.sink is None or call.sink.ndim == 1:
        return call
    assert call.weighting.ignores_shifts
    H = call.q.shape[-3]
    S = call.k.shape[-2]
    constant = call._replace(sink=call.sink.new_zeros(H))
    return add_bias(constant, -call.sink, call.sink.new_zeros(H, S))


def with_key_in_front(
    matrix: Bias,
    score: Float[Tensor, " H"],
    S: int,
) -> Float[Tensor, "*lead H #T keys"]:
    """Return a bias over S keys with one more before them, which has a score for each head."""
    column = score[:, None, None]  # (H, 1, 1)
    others = column.new_zeros(len(score), 1, S) if matrix is None else matrix.expand(*matrix.shape[:-1], S)
    shape = torch.broadcast_shapes(column.shape[:-1], others.shape[:-1])
    return torch.cat((column.expand(*shape, 1), others.expand(*shape, S)), -1)


def relative_bias(relative: Relative, S: int) -> Float[Tensor, "B H T S"]:
    """Return the bias of each query and key by their distance, in float32 at least."""
    T = relative.r.shape[-2]
    extent = relative.profiles.shape[-1]
    if not is_recorded():  # a recorded call has no length
        extent = min(extent, S)
    # From the farthest key to the query's own.
    nearer = upcast(relative.r) @ upcast(relative.profiles[:, :extent].flip(-1))  # (B, H, T, extent)

    # Shift each row one place further right than the row before. Rows that are one number longer than the matrix is
    # wide do so by themselves when they are cut anew: [[a b 0 0], [c d 0 0]] in rows of 3 begins [[a b 0], [0 c d]].
    width = T + extent - 1
    rows = F.pad(nearer, (0, width + 1 - extent)).flatten(-2)
    shifted = rows[..., : T * width].unflatten(-1, (T, width))
    # The last column is the last key. Keys before the first column are too far; columns before the first key go.
    return F.pad(shifted, (S - width, 0))
