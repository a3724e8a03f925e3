"""Cross-entropy whose logits exist for a few tokens at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

UNSCORED = -1  # the target of a position that no loss counts
LARGEST_CHUNK = {"cpu": 64 << 20}
"""Bytes of float32 logits at a time, of which several copies are alive at once; larger products no longer gain."""
LARGEST_CHUNK_ON_GPU = 512 << 20


def summed_nats(
    x: Float[Tensor, "*lead C"],
    weight: Float[Tensor, "V C"],
    targets: Int[Tensor, "*lead"],
    softcap: float | None = None,
    nats_and_slope: Callable[..., tuple[Tensor, Tensor]] | None = None,
    largest_chunk: int | None = None,
) -> Float[Tensor, ""]:
    """Return -Σ log p(target) in nats, with logits cap · tanh(x Wᵀ / cap), or x Wᵀ without a softcap.

    Equals F.cross_entropy(…, ignore_index=UNSCORED, reduction="sum") in value and gradient. The gradient is computed in
    the forward pass, while the logits of a chunk of tokens are at hand (Hsu et al. 2024, "Liger Kernel", fused linear
    cross-entropy): that takes the three products of the plain loss and no more. Products are in autocast's dtype, the
    softmax in float32 at least.

    nats_and_slope: chunk_nats_and_slope, which training may compile.
    largest_chunk: bytes of float32 logits at a time; by default what suits the device.
    """
    kind, tokens = x.device.type, targets.numel()
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    most = (largest_chunk or LARGEST_CHUNK.get(kind, LARGEST_CHUNK_ON_GPU)) // (4 * len(weight))
    fewest = -(-tokens // max(1, most))
    # Chunks of one size, where there is one, compile once.
    chunks = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    calls = (softcap, -(-tokens // chunks), dtype, nats_and_slope or chunk_nats_and_slope)
    return _SummedNats.apply(x.flatten(0, -2), weight, targets.flatten(), *calls)


def chunk_nats_and_slope(
    x: Float[Tensor, "N C"], weight: Float[Tensor, "V C"], targets: Int[Tensor, " N"], softcap: float | None
) -> tuple[Float[Tensor, ""], Float[Tensor, "N V"]]:
    """Return the summed loss of a chunk, and its derivative with respect to the product x Wᵀ, in the dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x, weight).to(wide)
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        logits = softcap * squashed
    logs = logits.log_softmax(-1)
    scored, targets = (targets != UNSCORED)[:, None], targets.clamp(min=0)[:, None]
    nats = -(logs.gather(1, targets) * scored).sum()
    slope = logs.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=wide)).mul_(scored)
    return nats, (slope if softcap is None else slope * (1 - squashed.square())).to(x.dtype)


class _SummedNats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        chunk: int,
        dtype: torch.dtype,
        nats_and_slope: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        rows, heads = x.to(dtype), weight.to(dtype)
        summed, to_x, to_weight = torch.zeros((), device=x.device), torch.empty_like(rows), None
        for first in range(0, len(rows), chunk):
            some = rows[first : first + chunk]
            nats, slope = nats_and_slope(some, heads, targets[first : first + chunk], softcap)
            summed = summed + nats
            torch.mm(slope, heads, out=to_x[first : first + chunk])
            part = (slope.mT @ some).to(torch.promote_types(weight.dtype, torch.float32))
            to_weight = part if to_weight is None else to_weight.add_(part)
        assert to_weight is not None
        ctx.save_for_backward(to_x.to(x.dtype), to_weight.to(weight.dtype))
        return summed

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight = ctx.saved_tensors
        return upstream[0] * to_x, upstream[0] * to_weight, None, None, None, None, None
