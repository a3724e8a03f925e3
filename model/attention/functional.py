"""One attention, several ways to compute it, all under the contract of contract.py.

Read `matmul`. `einsum`, `bmm` and `loop` spell the same differently; `loop` in float64 is the reference for
all others. They are the mathematics alone: obeys_contract(), which form() applies, has checked the arguments, given
every query head its keys and values, and joined mask and causality into `allowed`. They scale the queries, not the
product: fp16 ends at 65,504, which the products of large queries and keys pass √D times sooner than the scaled scores.

`fused` and `flex` call torch's kernels, which never write the (T, S) matrix to memory (Dao et al. 2022,
FlashAttention). `sdpa` is the fast choice: `fused`, or `bmm` for short texts on a CPU. The layer's blocks() put
flex_attention in its place for windows and ALiBi.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model.attention.contract import (
    Allowed,
    AttentionFunction,
    Bias,
    Key,
    Mask,
    Output,
    Overlay,
    Query,
    Value,
    allowed_keys,
    check_arguments,
    repeat_heads,
    zero_empty_rows,
)
from model.attention.registry import FUNCTIONS, form

SHORT = 256  # up to this many queries and keys `bmm` beats the fused kernels of a CPU: see benchmarks/attention.py
AMPERE = (8, 0)  # the compute capability from which GPUs have FlashAttention, and memory enough for flex_attention
Blocks = tuple[BlockMask | None, Callable[..., Tensor] | None]  # flex_attention's block_mask and score_mod


@form("matmul")
def matmul(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """softmax(q kᵀ / √D) v: scaled dot-product attention (Vaswani et al. 2017, eq. 1), one step per line."""
    # A dot product of D independent terms of variance 1 has variance D. The scale, 1/√D, brings it back
    # to 1; without that the softmax would soon saturate on one key, where its gradient vanishes.
    q = q * scale

    # How well does each key answer each query? One dot product for every pair.
    scores = q @ k.transpose(-2, -1)  # (…, H, T, D) @ (…, H, D, S) -> (…, H, T, S)

    # What is known about a pair besides its content, such as ALiBi's distance penalty.
    if bias is not None:
        scores = scores + bias

    # Forbidden keys score −∞: exp(−∞) = 0, so they get no weight, and the others share all of it.
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)

    # From scores to weights that sum to 1 over the keys. torch subtracts each row's maximum first,
    # which changes nothing but keeps exp from overflowing; float32 keeps small weights from vanishing.
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype(scores)).to(v.dtype)

    # Drop some weights at random and scale the rest by 1/(1-p), so that the expected weight is unchanged.
    weights = F.dropout(weights, dropout_p)

    # The weighted mean of the values.
    return weights @ v  # (…, H, T, S) @ (…, H, S, Dv) -> (…, H, T, Dv)


@form("einsum")
def einsum(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """The same in index notation: it names the axes that are summed and those that stay."""
    scores = torch.einsum("...td,...sd->...ts", q * scale, k)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype(scores)).to(v.dtype)
    return torch.einsum("...ts,...sd->...td", F.dropout(weights, dropout_p), v)


@form("bmm")
def bmm(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """The same with batch and heads folded into one axis, N = … × H.

    baddbmm multiplies, scales and adds in one pass, so mask and bias become one matrix of 0 and −∞ to add.
    """
    lead, (T, S) = q.shape[:-2], (q.shape[-2], k.shape[-2])
    q, k, v = (t.flatten(0, -3) for t in (q, k, v))  # (…, H, T, D) -> (N, T, D)

    added = q.new_zeros(T, S) if bias is None else bias.to(q.dtype)
    if allowed is not None:
        added = torch.where(allowed, added, -torch.inf)
    if added.ndim > 2:  # (…, H, T, S) -> (N, T, S)
        added = added.expand(*lead, T, S).flatten(0, -3)
    scores = torch.baddbmm(added, q, k.transpose(-2, -1), alpha=scale)  # (N, T, S)
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype(scores)).to(v.dtype)
    y = torch.bmm(F.dropout(weights, dropout_p), v)  # (N, T, S) @ (N, S, Dv) -> (N, T, Dv)
    return y.unflatten(0, lead)  # (N, T, Dv) -> (…, H, T, Dv)


@form("loop")
def loop(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """The same one query at a time. In float64 it is the reference for the other forms."""
    every_pair = (*q.shape[:-1], k.shape[-2])  # (…, H, T, S)
    bias = None if bias is None else bias.expand(every_pair)
    allowed = None if allowed is None else allowed.expand(every_pair)

    rows = [v.new_zeros(*q.shape[:-2], 0, v.shape[-1])]  # so that T = 0 has a shape too
    for t in range(q.shape[-2]):
        scores = (q[..., t : t + 1, :] * scale * k).sum(-1)  # (…, H, S)
        if bias is not None:
            scores = scores + bias[..., t, :]
        if allowed is not None:
            scores = scores.masked_fill(~allowed[..., t, :], -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype(scores)).to(v.dtype)
        weights = F.dropout(weights, dropout_p)
        rows.append((weights.unsqueeze(-1) * v).sum(-2, keepdim=True))  # (…, H, 1, Dv)
    return torch.cat(rows, dim=-2)


@form("sdpa")
def sdpa(
    q: Query, k: Key, v: Value, *, mask: Mask = None, bias: Bias = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None,
) -> Output:  # fmt: skip
    """The same by the fastest means: torch's fused kernels, or `bmm` for short texts on a CPU.

    There the kernels save no time, in bf16 they take several times as long, and the matrix they avoid is small.
    """
    how = bmm if q.is_cpu and 1 < q.shape[-2] <= SHORT and k.shape[-2] <= SHORT else fused
    return how(q, k, v, mask=mask, bias=bias, is_causal=is_causal, dropout_p=dropout_p, scale=scale)


@form("fused")
def fused(
    q: Query, k: Key, v: Value, *, mask: Mask = None, bias: Bias = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None,
) -> Output:  # fmt: skip
    """The same by torch's fused kernels, called so that they are correct and make no (T, S) matrix if avoidable."""
    check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
    T, S = q.shape[-2], k.shape[-2]
    has_keys = None
    if mask is None and bias is None and (not is_causal or T in (1, S)):
        is_causal = is_causal and T > 1  # a single query is the last one: it sees every key
    else:  # a chunk (1 < T < S) too: the kernels' own is_causal aligns the first query with the first key
        allowed, has_keys = allowed_keys(q, k, mask, is_causal)
        mask, is_causal = allowed, False
        if bias is not None:
            mask = bias.to(q.dtype) if allowed is None else torch.where(allowed, bias.to(q.dtype), -torch.inf)
        mask = None if mask is None else fold_overlay(mask, q, S)

    D, Dv = q.shape[-1], v.shape[-1]
    if Dv != D and q.is_cpu:  # the CPU kernel wants one width; zero channels change no product
        scale = 1 / math.sqrt(D) if scale is None else scale
        q, k, v = (F.pad(t, (0, max(D, Dv) - t.shape[-1])) for t in (q, k, v))

    q4, k4, v4 = fold(q), fold(k), fold(v)
    grouped = q.shape[-3] != k.shape[-3]
    # Shared key heads need no copy on the CPU and in FlashAttention, which takes half precision and no mask.
    flash = mask is None and q.element_size() == 2 and D == Dv <= 256
    if grouped and not (q.is_cpu or (flash and capability(q.device) >= AMPERE)):
        k4, v4, grouped = repeat_heads(k4, q.shape[-3]), repeat_heads(v4, q.shape[-3]), False
    y = F.scaled_dot_product_attention(q4, k4, v4, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    if q.ndim != 4:
        y = y.reshape(*q.shape[:-1], y.shape[-1])  # (B, H, T, Dv) -> (…, H, T, Dv)
    return zero_empty_rows(y[..., :Dv] if Dv < D else y, has_keys)


def capability(device: torch.device) -> tuple[int, int]:
    """Return what kernels may ask of a CUDA device, also in a compiler's trace; (0, 0) of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


# torch.compiler.assume_constant_result(capability), without importing the compiler, which takes a second.
vars(capability)["_dynamo_marked_constant"] = True


def fold(t: Shaped[Tensor, " ..."]) -> Shaped[Tensor, "B H T D"]:
    """Fold or add leading axes: torch's kernels are fused for exactly four."""
    if t.ndim == 4:
        return t
    return t.flatten(0, -4) if t.ndim > 4 else t.reshape((1,) * (4 - t.ndim) + t.shape)


def fold_overlay(overlay: Overlay, q: Query, S: int) -> Shaped[Tensor, " B #H #T {S}"]:
    """Fold a mask or bias like q, with B, H or T of 1 where it is the same for all."""
    if overlay.shape[-1] != S:  # the kernels broadcast every axis but the last
        overlay = overlay.expand(*overlay.shape[:-1], S).contiguous()
    if q.ndim > 4 and overlay.ndim > 3:  # several leading axes become one only when all are there
        overlay = overlay.expand(*q.shape[:-3], *overlay.shape[-3:])
    return fold(overlay)


@form("flex")
def flex(
    q: Query, k: Key, v: Value, *, mask: Mask = None, bias: Bias = None, is_causal: bool = False,
    dropout_p: float = 0.0, scale: float | None = None,
) -> Output:  # fmt: skip
    """The same by flex_attention (Dong et al. 2024): a kernel compiled for the mask, which skips hidden blocks.

    Raises ValueError also for what flex_attention lacks: dropout anywhere, gradients on the CPU.
    """
    check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
    if dropout_p > 0:
        raise ValueError(f"attention=flex has no dropout, but dropout_p={dropout_p}: choose sdpa, or no dropout.")
    if q.is_cpu and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("attention=flex computes gradients on CUDA only: choose sdpa to train on the CPU.")
    if q.shape[-2] == 1:  # decoding: nothing to skip, and a kernel would be compiled for every S
        return fused(q, k, v, mask=mask, bias=bias, is_causal=is_causal, scale=scale)
    T, S = q.shape[-2], k.shape[-2]
    allowed = has_keys = block_mask = score_mod = None
    if mask is not None or T > S:
        allowed, has_keys = allowed_keys(q, k, mask, is_causal)
    if allowed is not None:
        block_mask = _dense_block_mask(fold_overlay(allowed, q, S).expand(-1, -1, T, -1))
    elif is_causal:
        made = causal_blocks if type(q) is Tensor else causal_blocks.__wrapped__  # a fake mask has no data
        block_mask = made(T, S, S, q.device)
    if bias is not None:
        added = fold_overlay(bias, q, S).expand(math.prod(q.shape[:-3]), q.shape[-3], T, S)
        score_mod = lambda score, b, h, t, s: score + added[b, h, t, s]  # noqa: E731
    return zero_empty_rows(in_blocks(q, k, v, (block_mask, score_mod), scale), has_keys)


def in_blocks(q: Query, k: Key, v: Value, blocks: Blocks, scale: float | None = None) -> Output:
    """Return flex_attention over `blocks`; no tensor is (T, S), and hidden blocks cost nothing."""
    block_mask, score_mod = blocks
    kernel: Callable[..., Tensor] = flex_attention
    if not torch.compiler.is_compiling():
        kernel = _kernel(q.device.type)
    y = kernel(fold(q), fold(k), fold(v), score_mod, block_mask, scale, q.shape[-3] != k.shape[-3])
    return y.reshape(*q.shape[:-1], v.shape[-1])  # (B, H, T, Dv) -> (…, H, T, Dv)


@lru_cache
def _kernel(device: str) -> Callable[..., Tensor]:
    # On the CPU compiling costs more than it gains; torch computes unfused there, with a warning.
    if device != "cpu":
        return torch.compile(flex_attention)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return flex_attention


@lru_cache(maxsize=64)
def causal_blocks(T: int, S: int, window: int, device: torch.device) -> BlockMask:
    """Return the block mask of causal attention from the last T of S positions, each to at most `window` keys."""
    mask_mod = lambda b, h, t, s: (s <= t + S - T) & (t + S - T < s + window)  # noqa: E731  torch counts its arguments
    with torch.inference_mode(False):  # a mask first needed in inference mode must serve training afterwards
        return create_block_mask(mask_mod, None, None, T, S, device=device)


def _dense_block_mask(allowed: Bool[Tensor, "B H T S"]) -> BlockMask:
    B, H, T, S = allowed.shape
    b0, h0 = B == 1, H == 1  # one mask for all is looked up at 0
    mask_mod = lambda b, h, t, s: allowed[0 if b0 else b, 0 if h0 else h, t, s]  # noqa: E731  torch counts its arguments
    return create_block_mask(mask_mod, None if b0 else B, None if h0 else H, T, S, device=allowed.device)


def attention_weights(
    q: Query, k: Key, *, mask: Mask = None, bias: Bias = None, is_causal: bool = False, scale: float | None = None,
    attend: AttentionFunction = matmul,
) -> Float[Tensor, "*lead H T S"]:  # fmt: skip
    """Return the weights of any attention function, for pictures.

    Attention returns weights @ v, so with the identity matrix for v it returns the weights.
    """
    S = k.shape[-2]
    identity = torch.eye(S, dtype=q.dtype, device=q.device).expand(*k.shape[:-2], S, S)
    return attend(q, k, identity, mask=mask, bias=bias, is_causal=is_causal, scale=scale)


def softmax_dtype(scores: Float[Tensor, " ..."]) -> torch.dtype:
    """Return the precision of the softmax: float32 or wider."""
    return torch.promote_types(scores.dtype, torch.float32)


ATTENTION_FUNCTIONS = dict(FUNCTIONS)  # those above: one function, seven ways
