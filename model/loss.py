"""Cross-entropy in chunks: the logits of a few tokens exist at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from model.layers import autocast_dtype, upcast

HeadWeight = Float[Tensor, "V C"]
IGNORE_INDEX = -1
"""Our target for a position that has none."""
IGNORED = (IGNORE_INDEX, -100)
"""The targets that no loss counts: ours, and the default ignore_index of F.cross_entropy."""
LARGEST_CHUNK = {"cpu": 64 << 20}  # bytes of float32 logits at a time; larger products no longer gain
LARGEST_CHUNK_ON_GPU = 512 << 20
MOST_ROWS_IN_FP16 = 16_384
"""The most tokens of a chunk in fp16 on a GPU. Each entry of lm_head's gradient is a sum of p · x over them, and x is
around 1 after the final norm: it stays below fp16's largest number, 65,504.
"""
MULTIPLE = {"cuda": 64, "cpu": 16}
"""lm_head gets rows of zeros up to a multiple of this: products are slow if a matrix has a length like 50,257.

With 2,048 tokens of 128 channels and 2,049 ids a CPU takes 66 ms for the loss, without padding 85 (AVX2, one thread).
"""


def fused_cross_entropy(
    x: Float[Tensor, "*lead C"],
    weight: HeadWeight,
    targets: Int[Tensor, "*lead"],
    softcap: float | None = None,
    loss_and_gradient: Callable[..., Any] | None = None,
    largest_chunk: int | None = None,
) -> Float[Tensor, ""]:
    """Return -Σ log p(target) in nats, of the logits x Wᵀ or cap · tanh(x Wᵀ / cap).

    cap is softcap, if that is given.

    Equals F.cross_entropy(…, reduction="sum") over the targets that are not IGNORED, in value and gradient. The
    gradient is computed in the forward pass, while the logits of a chunk of tokens are at hand (Hsu et al. 2024, "Liger
    Kernel"): that takes the plain loss's three products and no more. They are in autocast's dtype, the softmax in
    float32 at least.

    loss_and_gradient: chunk_loss_and_gradient, which training may compile.
    largest_chunk: bytes of float32 logits at a time; by default it depends on the device.

    torch raises RuntimeError on a CPU for other targets than ids and IGNORED; on a GPU, which is not waited for, its
    kernels assert that. There are no second derivatives: take F.cross_entropy of the logits for them.
    """
    if not torch.is_grad_enabled():  # one of the three products is enough
        return nats_of_each(x, weight, targets, softcap, largest_chunk)[0].sum()
    loss_and_gradient = loss_and_gradient or chunk_loss_and_gradient
    return _SummedNats.apply(x.flatten(0, -2), weight, targets.flatten(), softcap, loss_and_gradient, largest_chunk)


@torch.no_grad()
def nats_of_each(
    x: Float[Tensor, "*lead C"],
    weight: HeadWeight,
    targets: Int[Tensor, "*lead"],
    softcap: float | None = None,
    largest_chunk: int | None = None,
) -> tuple[Float[Tensor, "*lead"], Bool[Tensor, "*lead"]]:
    """Return -log p(target) of each position in nats, and whether the target is likeliest.

    An IGNORED target has 0 nats. Chunks and dtypes are as in fused_cross_entropy; there is no gradient.
    """
    dtype = autocast_dtype(x)
    rows = x.flatten(0, -2).to(dtype)  # (…, C) -> (N, C)
    lm_head = padded(weight.to(dtype))
    size = chunk_length(rows, len(weight), largest_chunk)
    nats, hits = [], []
    for part, wanted in zip(rows.split(size), targets.flatten().split(size), strict=True):
        # The logits of a chunk, without those of the padding.
        logits = F.linear(part, lm_head)[:, : len(weight)].to(torch.promote_types(dtype, torch.float32))
        logits = capped(logits, softcap)
        hits.append(logits.argmax(-1) == wanted)

        # nats = (largest logit - the target's) - ln of the largest probability. An IGNORED target has no id: take 0.
        scored = scored_places(wanted)
        ids = wanted.masked_fill(~scored, 0)
        above = logits.amax(-1) - logits.gather(1, ids[:, None])[:, 0]
        likeliest = torch.softmax(logits, -1, out=logits).amax(-1)  # in place
        nats.append((above - likeliest.log()).where(scored, 0.0))
    return torch.cat(nats).view(targets.shape), torch.cat(hits).view(targets.shape)


def nats_of_logits(
    logits: Float[Tensor, "*lead V"],
    targets: Int[Tensor, "*lead"],
) -> tuple[Float[Tensor, "*lead"], Bool[Tensor, "*lead"]]:
    """Return what nats_of_each() does, of logits that are there already."""
    scored = scored_places(targets)
    ids = targets.long().masked_fill(~scored, 0)
    log_p = upcast(logits).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return -log_p.where(scored, 0.0), logits.argmax(-1) == targets


def capped(logits: Float[Tensor, "*shape"], softcap: float | None) -> Float[Tensor, "*shape"]:
    """Return logits squashed into ±softcap (Gemma 2, 2024), if that is set."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def scored_places(targets: Int[Tensor, "*lead"]) -> Bool[Tensor, "*lead"]:
    """Return which targets are not IGNORED."""
    return (targets != IGNORED[0]) & (targets != IGNORED[1])


def padded(lm_head: HeadWeight) -> Float[Tensor, "rows C"]:
    """Return lm_head with rows of zeros up to the device's MULTIPLE."""
    missing = -len(lm_head) % MULTIPLE.get(lm_head.device.type, 1)
    return F.pad(lm_head, (0, 0, 0, missing)) if missing else lm_head


def chunk_length(rows: Tensor, ids: int, largest_chunk: int | None) -> int:
    """Return the number of rows per chunk.

    It divides all rows if a number near the largest does, so that a compiler sees one shape.
    """
    # The fewest chunks that fit, or a few more if these divide the rows evenly.
    tokens = len(rows)
    nbytes = largest_chunk or LARGEST_CHUNK.get(rows.device.type, LARGEST_CHUNK_ON_GPU)
    most = max(1, nbytes // (4 * ids))
    if rows.dtype == torch.float16 and not rows.is_cpu:
        most = min(most, MOST_ROWS_IN_FP16)
    fewest = max(1, -(-tokens // most))  # also of no tokens
    chunks = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return max(1, -(-tokens // chunks))


def chunk_loss_and_gradient(
    x: Float[Tensor, "N C"],
    lm_head: Float[Tensor, "rows C"],
    targets: Int[Tensor, "N 1"],
    ids: int,
    cap: float | None,
) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 1"], Float[Tensor, "N rows"]]:
    """Return each token's loss, and the parts of its derivatives by the logits.

    The derivative of -ln p of the target is p at each logit, and p - 1 at the target's.

    nats       -ln p of the target
    at_target  its derivative by the target's logit, p - 1. Made from nats, it keeps its digits where p is near 1
    slope      p of all logits, also of the target. There the caller puts at_target

    at_target and slope are multiplied by the derivative of the cap, if there is one. lm_head: one row per id, then rows
    of padding.
    """
    # The logits, −∞ for the padding.
    logits = F.linear(x, lm_head).to(torch.promote_types(x.dtype, torch.float32))
    if cap is not None:
        squashed = torch.tanh(logits / cap)
        logits = cap * squashed
    if ids < len(lm_head):
        logits[:, ids:] = -torch.inf

    # The loss. The target's own probability may be too small for a logarithm, the largest one never is.
    target = logits[:, :ids].gather(1, targets)  # padding is no target: an error
    above = logits.amax(-1, keepdim=True) - target
    slope = torch.softmax(logits, -1, out=logits)  # in place
    nats = above - slope.amax(-1, keepdim=True).log()

    # The derivatives: p for each id, p - 1 for the target, times that of the cap.
    at_target = torch.expm1(-nats)  # p - 1
    if cap is not None:
        slope.addcmul_(slope, squashed.square_(), value=-1)
        at_target *= 1 - (target / cap).square()
    return nats, at_target.to(x.dtype), slope.to(x.dtype)


class _SummedNats(torch.autograd.Function):
    """The loss. forward() computes its gradients too, and backward() only scales them.

    Without chunks, a cap and targets that do not count:

        p = (rows @ weight.mT).softmax(-1)   # (N, V)
        nats = -p.gather(1, targets).log()   # (N, 1)
        slope = p - F.one_hot(targets[:, 0], V)
        grad_rows = slope @ weight           # (N, C)
        grad_weight = slope.mT @ rows        # (V, C)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "N C"],
        weight: HeadWeight,
        targets: Int[Tensor, " N"],
        softcap: float | None,
        loss_and_gradient: Callable[..., Any],
        largest_chunk: int | None,
    ) -> Tensor:
        ids = len(weight)
        dtype = autocast_dtype(x)
        is_scored = scored_places(targets)
        rows = x.to(dtype)
        scored = is_scored[:, None]  # (N, 1)
        targets = targets.masked_fill(~is_scored, 0)[:, None]

        # A synthetic task scores few targets. On a CPU leave out the others; to count them on a GPU would wait for it,
        # and a fake tensor or one that is compiled has no numbers.
        has_numbers = type(targets) is Tensor and not torch.compiler.is_compiling()
        leaves_out = x.is_cpu and has_numbers and 0 < is_scored.sum() < len(is_scored)
        if leaves_out:
            rows, scored, targets = (t[is_scored] for t in (rows, scored, targets))

        # Loss and gradients, chunk by chunk.
        lm_head = padded(weight.to(dtype))
        size = chunk_length(rows, ids, largest_chunk)
        summed = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(rows)
        grad_lm_head = torch.zeros_like(lm_head, dtype=torch.promote_types(weight.dtype, torch.float32))
        for chunk in range(-(-len(rows) // size)):  # a range of the rows binds a compiler to their number
            part = slice(chunk * size, (chunk + 1) * size)
            nats, at_target, slope = loss_and_gradient(rows[part], lm_head, targets[part], ids, softcap)
            # Each row's derivative by its target's logit. scatter_() would convert all of a bf16 matrix, and back.
            slope[torch.arange(len(slope), device=x.device), targets[part, 0]] = at_target[:, 0]
            summed = summed + (nats * scored[part]).sum()
            torch.mm(slope, lm_head, out=grad_x[part])
            counted = rows[part] * scored[part]
            if grad_lm_head.dtype == dtype:  # under autocast the sum is in float32
                grad_lm_head.addmm_(slope.mT, counted)
            else:
                grad_lm_head += slope.mT @ counted

        # The gradient of targets that do not count, or were left out, is 0.
        grad_x = (grad_x * scored).to(x.dtype)
        if leaves_out:
            grad_x = torch.zeros_like(x).masked_scatter_(is_scored[:, None], grad_x)
        ctx.save_for_backward(grad_x, grad_lm_head[:ids].to(weight.dtype))
        return summed

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # by create_graph=True: the second derivatives would be wrong
            raise RuntimeError("the loss has no second derivatives: take F.cross_entropy of the logits")
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * upstream, grad_weight * upstream, None, None, None, None
