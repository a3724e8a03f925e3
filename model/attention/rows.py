"""Long texts by chunks of queries, for what chunked.py does not know.

A chunk is a call of its own: its queries, and the keys that they may see. Only its scores exist at that time. The
backward pass computes each chunk once more, with autograd: a new field of a call needs no derivative by hand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model.attention.call import Call, Output, Relative, lengths
from model.cpu import gradients_with_graph

CHUNK = 128
"""The queries of a chunk."""
CUT_BY_ROWS = (
    *("scale", "window", "mask", "doc_starts", "row_column", "matrix"),
    *("relative", "sink", "faded", "tilt"),
)
"""The fields of a call that chunks_of() knows.

Not is_causal=False: the last key that a chunk keeps tells the place of its last query, from which distances count.
"""
Compute = Callable[[Call], Output]


def by_rows(compute: Compute, call: Call) -> Output:
    """Return compute(call), without a matrix of all scores."""
    return Rows.apply(compute, call, *tensors_of(call))


class Rows(torch.autograd.Function):
    """compute(call) by chunks, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, call: Call, *tensors: Tensor | None) -> Output:
        ctx.compute = compute
        ctx.call = with_tensors(call, [None] * len(tensors))  # which hold no tensor while backward() waits
        ctx.save_for_backward(*tensors)
        return by_chunks(compute, ctx.call, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Output) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # once: a block that is computed again gives them a single time
        if torch.is_grad_enabled():  # by create_graph=True: someone may ask for second derivatives
            compute = partial(by_chunks, ctx.compute, ctx.call)
            return None, None, *gradients_with_graph(compute, saved, needed, grad)
        total = [torch.zeros_like(t) if is_needed else t for t, is_needed in zip(saved, needed, strict=True)]
        chunks = chunks_of(with_tensors(ctx.call, saved))
        sums = chunks_of(with_tensors(ctx.call, total))  # the same parts of the sums, as views
        for chunk, sums_of_chunk, grad_of_chunk in zip(chunks, sums, grad.split(CHUNK, -2), strict=True):
            tensors = [t if t is None else t.detach() for t in tensors_of(chunk)]
            leaves = [
                t.requires_grad_() for t, is_needed in zip(tensors, needed, strict=True) if t is not None and is_needed
            ]
            with torch.enable_grad():
                y = ctx.compute(with_tensors(chunk, tensors))
            found = iter(torch.autograd.grad(y, leaves, grad_of_chunk, allow_unused=True))
            for part, is_needed in zip(tensors_of(sums_of_chunk), needed, strict=True):
                gradient = next(found) if is_needed else None
                if part is not None and gradient is not None:
                    part += gradient
        return None, None, *(t if is_needed else None for t, is_needed in zip(total, needed, strict=True))


def by_chunks(compute: Compute, call: Call, *tensors: Tensor | None) -> Output:
    """Return compute(call) of a call with other tensors, chunk by chunk."""
    return torch.cat([compute(chunk) for chunk in chunks_of(with_tensors(call, tensors))], -2)


def tensors_of(call: Call) -> list[Tensor | None]:
    """Return the tensors of a call, in the order in which with_tensors() takes them."""
    bias = call.row_column or (None, None)
    relative = call.relative or (None, None)
    return [*call[:3], call.mask, call.doc_starts, *bias, call.matrix, *relative, call.sink, call.faded, call.tilt]


def with_tensors(call: Call, tensors: Any) -> Call:
    """Return a call with other tensors in place of its own."""
    q, k, v, mask, doc_starts, row, column, matrix, r, profiles, sink, faded, tilt = tensors
    call = call._replace(q=q, k=k, v=v, mask=mask, doc_starts=doc_starts, matrix=matrix, sink=sink)
    call = call._replace(row_column=None if row is None else (row, column), faded=faded, tilt=tilt)
    return call._replace(relative=None if r is None else Relative(r, profiles))


def chunks_of(call: Call) -> Any:
    """Yield a call for each chunk of queries, with the keys that one of them may see."""
    T, S = lengths(call)
    for start in range(0, T, CHUNK):
        end = min(T, start + CHUNK)
        # The first and the last key.
        first = 0 if call.window is None else max(0, S - T + start - call.window + 1)
        last = S - T + end
        rows = slice(start, end)
        keys = slice(first, last)
        chunk = call._replace(q=call.q[..., rows, :], k=call.k[..., keys, :], v=call.v[..., keys, :])
        chunk = chunk._replace(mask=cut(call.mask, rows, keys), matrix=cut(call.matrix, rows, keys))
        if call.doc_starts is not None:
            chunk = chunk._replace(doc_starts=(call.doc_starts[:, rows] - first).clamp(min=0))
        if call.row_column is not None:
            row, column = call.row_column
            chunk = chunk._replace(row_column=(row[..., rows], column[..., keys]))
        if call.relative is not None:
            chunk = chunk._replace(relative=call.relative._replace(r=call.relative.r[..., rows, :]))
        if call.faded is not None:
            chunk = chunk._replace(faded=call.faded[..., keys, :])
        if call.tilt is not None:
            chunk = chunk._replace(tilt=call.tilt[..., rows, :])
        yield chunk


def cut(overlay: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """Return a part of a tensor that broadcasts to (…, T, S)."""
    if overlay is None or overlay.ndim == 0:
        return overlay
    if overlay.shape[-1] > 1:
        overlay = overlay[..., keys]
    return overlay[..., rows, :] if overlay.ndim > 1 and overlay.shape[-2] > 1 else overlay
