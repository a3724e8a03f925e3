"""Activation checkpointing: the backward pass computes a part of the model once more."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.attention.context import AttentionContext

Stream = Float[Tensor, "B T C"]
Forward = Callable[[Stream, AttentionContext], Stream]
Result = tuple[Stream, Tensor | None, dict[str, Tensor]]


def recomputed(forward: Forward, x: Stream, ctx: AttentionContext) -> Stream:
    """Return forward(x, ctx), of which only x is kept for the backward pass.

    (Chen et al. 2016.)
    """
    # Layers also write to the context. checkpoint() runs its function twice, and the second run must find the context
    # of the first: the function writes to a copy, and returns its new tensors. torch.compile asks for that too.
    function = partial(run_on_copy, forward)
    x, ctx.loss, written = checkpoint(function, x, ctx, ctx.loss, dict(ctx.shared), use_reentrant=False)
    ctx.shared.update(written)
    return x


def run_on_copy(
    forward: Forward,
    x: Stream,
    ctx: AttentionContext,
    loss: Tensor | None,
    shared: dict[str, Tensor],
) -> Result:
    """Return forward() of a copy of the context, with its loss and its new shared tensors."""
    own = ctx.changed(loss=loss, shared=dict(shared))
    x = forward(x, own)
    return x, own.loss, {name: t for name, t in own.shared.items() if t is not shared.get(name)}
