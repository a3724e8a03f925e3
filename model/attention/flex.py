"""Attention by torch's flex_attention: a fused kernel compiled for the mask and bias at hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from model.attention.contract import (
    Bias,
    Key,
    Mask,
    Output,
    Query,
    Value,
    allowed_keys,
    check_arguments,
    fold,
    fold_overlay,
    zero_empty_rows,
)


def flex(
    q: Query,
    k: Key,
    v: Value,
    *,
    mask: Mask = None,
    bias: Bias = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Output:
    """The contract by flex_attention (Dong et al. 2024): blocks the mask rules out are never computed.

    Raises ValueError also for what flex_attention lacks: dropout anywhere, gradients on the CPU.
    """
    check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
    if dropout_p > 0:
        raise ValueError(
            f"attention=flex has no dropout, but dropout_p={dropout_p}: set attention_dropout=0, or choose sdpa."
        )
    if q.is_cpu and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("attention=flex computes gradients on CUDA only: choose sdpa to train on the CPU.")
    T, S = q.shape[-2], k.shape[-2]
    allowed = has_keys = block_mask = score_mod = None
    if mask is not None or (is_causal and T > S):
        allowed, has_keys = allowed_keys(q, k, mask, is_causal)
        block_mask = _dense_block_mask(fold_overlay(allowed, q, S).expand(-1, -1, T, -1))
    elif is_causal and T > 1:
        block_mask = _causal_block_mask(T, S, q.device)
    if bias is not None:
        score_mod = _adding(fold_overlay(bias, q, S).expand(math.prod(q.shape[:-3]), q.shape[-3], T, S))
    grouped = q.shape[-3] != k.shape[-3]
    y = _kernel(q.device.type)(fold(q), fold(k), fold(v), score_mod, block_mask, scale, grouped)
    y = y.reshape(*q.shape[:-1], v.shape[-1])  # (B, H, T, Dv) -> (…, H, T, Dv)
    return zero_empty_rows(y, has_keys)


@lru_cache
def _kernel(device: str) -> Callable[..., Tensor]:
    # On the CPU compiling costs more than it gains; there torch computes unfused, and says so once.
    if device != "cpu":
        return torch.compile(flex_attention)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return flex_attention


@lru_cache(maxsize=64)
def _causal_block_mask(T: int, S: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda b, h, t, s: s <= t + (S - T), None, None, T, S, device=device)


def _dense_block_mask(allowed: Bool[Tensor, "B H T S"]) -> BlockMask:
    B, H, T, S = allowed.shape
    several, heads = B > 1, H > 1  # one mask for all is looked up at 0
    return create_block_mask(
        lambda b, h, t, s: allowed[b if several else 0, h if heads else 0, t, s],
        B if several else None,
        H if heads else None,
        T,
        S,
        device=allowed.device,
    )


def _adding(bias: Float[Tensor, "B H T S"]) -> Callable[..., Tensor]:
    return lambda score, b, h, t, s: score + bias[b, h, t, s]
