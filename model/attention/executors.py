"""Which code computes a call? `choose` takes the first executor that serves all of it.

An executor is code that computes whole calls. It declares the fields and the weightings that it serves, and where it
fits: devices, modes, sizes. It never gets a call with a field that it has not declared, so nothing can be dropped in
silence: a new field of Call goes to nobody until an executor declares it.

folded          causal calls by torch's fastest kernel on a GPU, FlashAttention in half precision; bias, documents and
                sink, if there are any, become channels and keys (fused.py)
varlen          such calls in torch's varlen_attn, which knows a window, but no sink and no dropout
half            short texts in half precision on a CPU, half_weighted with other weights (half.py)
bmm             short texts on a CPU: the plain products of functions.py
fused           torch's kernels for calls with nothing but causality: on a CPU, or one token on a GPU (fused.py)
chunks          long texts by chunks of queries, without a matrix of all scores (chunked.py)
rows            the definition, by chunks of queries (rows.py)
fused_matrix    torch's kernels with mask and bias as a matrix
weighted        the definition, for any weighting: functions.py

A form of attention has some of these, the fastest first; the last one serves every call of a layer. `matmul` and its
equals have their own steps in place of torch's kernels; those of `einsum`, `loop` and `stacked` (head_by_head()) run
always, while long texts of `matmul` and `bmm` go to `chunks`, and on a CPU half precision to `half`. `python -m
model.attention.choose NAME` prints the executor of each case.

To exchange one kernel, write a function of a Call, make an Executor of it that declares the fields and weightings which
it serves, and put it in front of a form's executors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import model.attention.functions as functions
from model.attention.call import Call, Output, contradiction, dense, features, lengths, with_constant_sink
from model.attention.choice import index_scores
from model.attention.chunked import chunked
from model.attention.fused import KNOWS_WINDOWS, folded, fused, fused_with_matrix, has_varlen
from model.attention.half import half, half_weighted
from model.attention.rows import CUT_BY_ROWS, by_rows
from model.attention.weighting import WITH_PASSES, Softmax, Weighting
from model.cpu import SHORT, is_recorded, mode

LONGEST_DENSE = SHORT**2
"""The largest T · S for which a matrix of scores is faster than chunks, on a CPU thread; a GPU keeps to it."""
Loss = Float[Tensor, ""] | None
"""The loss of an indexer that learns; None without one."""


def anywhere(call: Call) -> str | None:
    return None


class Executor(NamedTuple):
    """Code that computes calls."""

    name: str
    run: Callable[[Call], Any]
    """Returns the result of a call, or the result and its Loss."""
    fields: frozenset[str]
    """The fields of a call that it serves, besides q, k, v and the weighting."""
    weightings: tuple[type[Weighting], ...] | None = (Softmax,)
    """The weightings that it serves; None for any."""
    devices: tuple[str, ...] | None = None
    """The types of device that it serves; None for any."""
    modes: tuple[str, ...] = ("eager", "compiled", "recorded", "transformed")
    """The modes that it serves: see cpu.mode()."""
    misfit: Callable[[Call], str | None] = anywhere
    """Returns why a call's sizes or type do not suit it; None if they do."""


Executors = tuple[Executor, ...]


def obstacle(executor: Executor, call: Call, device: str) -> str | None:
    """Return why an executor does not compute a call on a type of device; None if it does."""
    if executor.devices is not None and device not in executor.devices:
        return f"not on {device}"
    if executor.weightings is not None and type(call.weighting) not in executor.weightings:
        return f"no {call.weighting.name}"
    unknown = [name for name in features(call) if name not in executor.fields]
    if unknown:
        return f"no {', '.join(unknown).replace('is_causal', 'is_causal=False')}"
    if (now := mode()) not in executor.modes:
        return f"not {now}"
    return executor.misfit(call)


def choose(call: Call, executors: Executors, device: str) -> Executor:
    """Return the first executor that serves all of a call on a type of device.

    Raises ValueError if there is none, or if the call contradicts itself.
    """
    if (problem := contradiction(call)) is not None:
        raise ValueError(problem)
    for executor in executors:
        if obstacle(executor, call, device) is None:
            return executor
    reasons = [f"{executor.name} ({obstacle(executor, call, device)})" for executor in executors]
    raise ValueError(f"nothing computes this attention: {', '.join(reasons)}.")


def run_call(call: Call, executors: Executors, device: str | None = None) -> tuple[Output, Loss]:
    """Compute a call by the first executor that serves it.

    device: the type of device to choose for; by default that of the tensors. dry_run asks for another.
    """
    kind = call.q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        # Autocast gives the type of queries, keys and values. Then it is off, or its products would round the scores.
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (t.to(dtype) if t.dtype.itemsize <= 4 else t for t in call[:3])
        with torch.autocast(kind, enabled=False):
            return run_call(call._replace(q=q, k=k, v=v), executors, device)

    call = with_constant_sink(call)
    executor = choose(call, executors, device or kind)
    if device not in (None, kind):
        # A GPU's kernels keep no scores to drop weights, as a CPU's do, on which the tensors of a plan are.
        call = call._replace(dropout_p=0.0)
    result = executor.run(call)
    return result if isinstance(result, tuple) else (result, None)


# Sizes and types.


def unless_whole(call: Call) -> str | None:
    """Return why FlashAttention does not serve a call, or None.

    It wants as many queries as keys. A bias becomes more channels of queries and keys (fused.py), which round the
    scores by less than half precision does, but by more than float32.
    """
    T, S = lengths(call)
    if call.q.ndim != 4 or T == 1 or T != S:
        return "one token" if T == 1 else "not (B, H, T, D) with S = T"
    has_channels = call.row_column is not None or call.doc_starts is not None
    return "a bias needs half precision" if has_channels and call.q.dtype.itemsize > 2 else None


def unless_varlen(call: Call) -> str | None:
    T, S = lengths(call)
    if call.q.ndim != 4 or T == 1:
        return "one token" if T == 1 else "not (B, H, T, D)"
    if T > S:
        return "more queries than keys"
    if T != S and call.doc_starts is not None:
        return "keys of a cache do not say whose document is theirs"
    if call.q.dtype.itemsize > 2:
        return "needs half precision"
    if max(call.q.shape[-1] + 8, call.v.shape[-1]) > 256:  # six channels for a bias, in a multiple of 8
        return "wider than 256"
    if has_varlen(call.q.device):
        return None
    return "needs an NVIDIA GPU from Ampere on" if KNOWS_WINDOWS else "needs torch 2.13"


def unless_short(call: Call) -> str | None:
    """Return why a text is not short.

    In a short one torch's kernels save no time, and the matrix is small.

    Forward and backward of 24 × 4 heads of 32 channels: 1.5 ms instead of 1.7 at T = 64, 6.6 instead of 6.2 at 256, 31
    instead of 28 at 512. The fused kernel slows down 9 times where oneDNN multiplies in bf16, and bmm gains.
    """
    T, S = lengths(call)
    if T == 1:
        return "one token"
    return None if T <= SHORT and S <= SHORT else f"more than {SHORT} tokens"


def unless_short_half(call: Call) -> str | None:
    return "not in half precision" if call.q.dtype.itemsize > 2 else unless_short(call)


def unless_long(call: Call) -> str | None:
    T, S = lengths(call)
    if call.q.ndim != 4 or T == 1:
        return "one token" if T == 1 else "not (B, H, T, D)"
    if call.q.shape[0] == 0:
        return "no texts"  # chunked.py's operators take an empty tensor for none
    if T > S:
        return "more queries than keys"  # the first ones, which see none, would have no span
    return None if T * S > LONGEST_DENSE else f"no more than {SHORT}² pairs"


def unless_more(call: Call) -> str | None:
    """chunked.py is faster where it knows all fields."""
    if call.relative is None and call.faded is None and call.tilt is None:
        return "for relative, faded and tilt"
    return unless_long(call)


def unless_bias_in_vmap(call: Call) -> str | None:
    """Within vmap torch does not see that a bias learns, and its fused kernel then refuses it."""
    biases = call.row_column, call.matrix, call.relative, call.sink
    has_bias = any(bias is not None for bias in biases)
    return "a bias within vmap" if has_bias and mode() == "transformed" else None


def unless_aligned(call: Call) -> str | None:
    """torch's causality aligns the first query with the first key; a single query sees all."""
    T, S = lengths(call)
    fits = not call.is_causal or T == S or (T == 1 and not is_recorded())
    return None if fits else "S is not T"


# The executors.


def by_matrices(compute: Callable[[Call], Output], sink_in_front: bool, call: Call) -> tuple[Output, Loss]:
    """Compute a call by a function that knows matrices alone, as those of functions.py."""
    index = None if call.indexer is None else index_scores(*call.indexer[:3])
    laid, has_keys = dense(call, index, sink_in_front or call.weighting.counts_keys)
    y = compute(laid)
    loss = None
    if call.indexer is not None and index is not None and call.indexer.learns:
        loss = index_loss(index, laid, has_keys)
    # A query without a key was shown all of them, or its softmax would be 0 / 0.
    return y if has_keys is None else y.masked_fill(~has_keys, 0), loss


def weighted_alone(call: Call) -> Output:
    """Return the result of the definition, for a call without a loss."""
    return by_matrices(functions.weighted, False, call)[0]


def index_loss(index: Tensor, laid: Call, has_keys: Tensor | None) -> Float[Tensor, ""]:
    """Return KL(p ‖ softmax of the index over the chosen keys), summed over queries.

    p: the mean of the heads' weights. index: (B, 1, T, S).
    """
    S = index.shape[-1]
    assert laid.mask is not None
    with torch.no_grad():
        weights = functions.weights_of(laid)[..., -S:]  # without a sink in front
        if has_keys is not None:
            weights = weights.masked_fill(~has_keys, 0)
        wanted = F.normalize(weights.sum(1, keepdim=True), p=1, dim=-1)
    chosen = laid.mask if has_keys is None else laid.mask & has_keys
    if chosen.ndim > 2:
        chosen = chosen.any(-3, keepdim=True)  # by any head, if a mask differs between heads
    found = index.masked_fill(~chosen[..., -S:], -1e9).log_softmax(-1)  # finite, as wanted is 0 there
    return F.kl_div(found, wanted, reduction="sum")


FIELDS_OF_ALL = frozenset(("dropout_p", "scale"))
MATRICES = FIELDS_OF_ALL | {
    "mask",
    "is_causal",
    "doc_starts",
    "window",
    "row_column",
    "matrix",
    "relative",
    "sink",
    "indexer",
}  # what dense() lays out
FACTORS = {"faded", "tilt"}
"""Factors of products and of weights, which no matrix over the scores can be."""
UNRECORDED = "eager", "compiled"


def of_steps(compute: Callable[[Call], Output]) -> Executor:
    """Return the executor of a function of functions.py, or of one like these."""
    return Executor(compute.__name__, partial(by_matrices, compute, True), MATRICES)


FOLDED = Executor(
    name="folded",
    run=folded,
    fields=FIELDS_OF_ALL | {"doc_starts", "row_column", "sink"},
    devices=("cuda",),
    modes=UNRECORDED,
    misfit=unless_whole,
)
VARLEN = Executor(
    name="varlen",
    run=partial(folded, with_varlen=True),
    # varlen_attn has no dropout, and the key of a sink would lie outside the window.
    fields=frozenset(("scale", "doc_starts", "row_column", "window")),
    devices=("cuda",),
    modes=UNRECORDED,
    misfit=unless_varlen,
)
HALF = Executor(
    name="half",
    run=partial(by_matrices, half, True),
    fields=MATRICES,
    devices=("cpu",),
    modes=UNRECORDED,
    misfit=unless_short_half,
)
HALF_WEIGHTED = HALF._replace(
    name="half_weighted",
    run=partial(by_matrices, half_weighted, False),
    weightings=None,
)
BMM = of_steps(functions.bmm)._replace(
    devices=("cpu",),
    modes=(*UNRECORDED, "transformed"),
    misfit=unless_short,
)
FUSED = Executor(
    name="fused",
    run=fused,
    fields=FIELDS_OF_ALL | {"is_causal"},
    misfit=unless_aligned,
)
CHUNKS = Executor(
    name="chunks",
    run=chunked,
    fields=FIELDS_OF_ALL | {"doc_starts", "row_column", "window", "sink"},
    weightings=tuple(WITH_PASSES.values()),
    devices=("cpu", "cuda"),
    modes=UNRECORDED,
    misfit=unless_long,
)
# The keys of an index are hidden by scores that softmax makes zero.
CHUNKS_OF_INDEX = CHUNKS._replace(fields=CHUNKS.fields | {"indexer"}, weightings=(Softmax,))
FUSED_MATRIX = of_steps(fused_with_matrix)._replace(name="fused_matrix", misfit=unless_bias_in_vmap)
WEIGHTED = Executor(
    name="weighted",
    run=partial(by_matrices, functions.weighted, False),
    fields=MATRICES | FACTORS,
    weightings=None,
)
ROWS = Executor(
    name="rows",
    run=partial(by_rows, weighted_alone),
    fields=frozenset(CUT_BY_ROWS),
    weightings=tuple(WITH_PASSES.values()),
    devices=("cpu", "cuda"),
    modes=("eager",),  # torch's compiler cannot trace a backward pass that makes a graph of its own
    misfit=unless_more,
)

OF_SDPA = FOLDED, VARLEN, HALF, BMM, FUSED, CHUNKS_OF_INDEX, ROWS, FUSED_MATRIX, WEIGHTED
OF_WEIGHTING = FOLDED, VARLEN, HALF_WEIGHTED, CHUNKS, ROWS, WEIGHTED
"""For any weighting, also a person's: each leaves to the next what it does not serve."""
