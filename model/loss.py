"""Cross-entropy whose logits exist for a few tokens at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

UNSCORED = -1  # the target of a position that no loss counts
LARGEST_CHUNK = {"cpu": 64 << 20}  # bytes of float32 logits at a time; larger products no longer gain
LARGEST_CHUNK_ON_GPU = 512 << 20
MULTIPLE = {"cuda": 64}  # of rows of lm_head: a GPU's products are slow where a matrix has a length like 50,257


def summed_nats(
    x: Float[Tensor, "*lead C"], weight: Float[Tensor, "V C"], targets: Int[Tensor, "*lead"],
    softcap: float | None = None, nats_and_slope: Callable[..., Any] | None = None, largest_chunk: int | None = None,
) -> Float[Tensor, ""]:  # fmt: skip
    """Return -Σ log p(target) in nats, with logits cap · tanh(x Wᵀ / cap), or x Wᵀ without a softcap.

    Equals F.cross_entropy(…, ignore_index=UNSCORED, reduction="sum") in value and gradient. The gradient is computed in
    the forward pass, while the logits of a chunk of tokens are at hand (Hsu et al. 2024, "Liger Kernel"): that takes
    the plain loss's three products and no more. They are in autocast's dtype, the softmax in float32 at least.

    nats_and_slope: chunk_nats_and_slope, which training may compile.
    largest_chunk: bytes of float32 logits at a time; by default what suits the device.
    """
    # A task scores few places: the others are left out where no device is waited for, and where there are numbers.
    if x.is_cpu and type(targets) is Tensor:
        scored = targets.numpy() != UNSCORED
        if scored.any() and not scored.all():
            x, targets = x[scored], targets[scored]
    kind, tokens = x.device.type, targets.numel()
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    most = (largest_chunk or LARGEST_CHUNK.get(kind, LARGEST_CHUNK_ON_GPU)) // (4 * len(weight))
    fewest = -(-tokens // max(1, most))
    # Chunks of one size, where there is one, compile once.
    chunks = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    how = (softcap, -(-tokens // chunks), dtype, nats_and_slope or chunk_nats_and_slope)
    return _SummedNats.apply(x.flatten(0, -2), weight, targets.flatten(), *how)


def chunk_nats_and_slope(
    x: Float[Tensor, "N C"], heads: Float[Tensor, "rows C"], targets: Int[Tensor, "N 1"], ids: int, cap: float | None
) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 1"], Float[Tensor, "N rows"]]:  # fmt: skip
    """Return each token's loss, and its derivatives by x · head, for the target's head and for the others'.

    heads: those of the ids, and rows of padding.
    """
    logits = F.linear(x, heads).to(torch.promote_types(x.dtype, torch.float32))
    if cap is not None:
        squashed = torch.tanh(logits / cap)
        logits = cap * squashed
    if ids < len(heads):
        logits[:, ids:] = -torch.inf
    target = logits.gather(1, targets)
    above = logits.amax(-1, keepdim=True) - target
    slope = torch.softmax(logits, -1, out=logits)  # in place
    nats = above - slope.amax(-1, keepdim=True).log()  # the target's own probability may be too small for a logarithm
    at_target = torch.expm1(-nats)  # p - 1
    if cap is not None:
        slope.addcmul_(slope, squashed.square_(), value=-1)
        at_target *= 1 - (target / cap).square()
    return nats, at_target.to(x.dtype), slope.to(x.dtype)


class _SummedNats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk: int, dtype: torch.dtype,
        nats_and_slope: Callable[..., Any],
    ) -> Tensor:  # fmt: skip
        ids, rows, heads = len(weight), x.to(dtype), weight.to(dtype)
        if missing := -ids % MULTIPLE.get(x.device.type, 1):
            heads = F.pad(heads, (0, 0, 0, missing))
        scored, targets = (targets != UNSCORED)[:, None], targets.clamp(min=0)[:, None]
        summed, to_x = torch.zeros((), device=x.device), torch.empty_like(rows)
        to_heads = torch.zeros_like(heads, dtype=torch.promote_types(weight.dtype, torch.float32))
        for part in (slice(first, first + chunk) for first in range(0, len(rows), chunk)):
            nats, at_target, slope = nats_and_slope(rows[part], heads, targets[part], ids, softcap)
            slope.scatter_(1, targets[part], at_target)
            summed = summed + (nats * scored[part]).sum()
            torch.mm(slope, heads, out=to_x[part])
            counted = rows[part] * scored[part]
            if to_heads.dtype == dtype:
                to_heads.addmm_(slope.mT, counted)
            else:
                to_heads += slope.mT @ counted
        ctx.gradients = (to_x * scored).to(x.dtype), to_heads[:ids].to(weight.dtype)
        return summed

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (to_x, to_weight), ctx.gradients = ctx.gradients, None  # scaled in place, so they serve once
        return to_x.mul_(upstream[0]), to_weight.mul_(upstream[0]), None, None, None, None, None
