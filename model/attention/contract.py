"""The contract of every attention function: its arguments, and their reduction.

    attend(q, k, v, *, mask=None, bias=None, is_causal=False, dropout_p=0.0, scale=None)

    q          (…, H, T, D)     queries; any number of leading dimensions, or none
    k          (…, Hkv, S, D)   keys; Hkv divides H, and H / Hkv query heads share a key head
    v          (…, Hkv, S, Dv)  values; Dv may differ from D
    mask       broadcasts to (…, H, T, S): True or 1 = may attend, False or 0 = may not
    bias       broadcasts to (…, H, T, S): finite, added to the scaled scores
    is_causal  no query sees a later key; the last query sees the last key, also where T ≠ S. Not beside a mask.
    dropout_p  probability of dropping a weight; the caller passes 0 outside training
    scale      factor on the products, 1/√D when None
    returns    (…, H, T, Dv); a query that may attend nowhere gets zeros, and no gradient

ValueError, naming the shapes, if the arguments do not fit together. Most functions of functions.py are only their
mathematics, or only their weights: attention_function() and from_weights() do the rest.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from model.attention.masks import as_bool, causal_mask

AttentionFunction = Callable[..., Tensor]
Query = Float[Tensor, "*lead H T D"]
Key = Float[Tensor, "*lead Hkv S D"]
Value = Float[Tensor, "*lead Hkv S Dv"]
Output = Float[Tensor, "*lead H T Dv"]
Scores = Float[Tensor, "*lead H T S"]
# Broadcasts to (…, H, T, S): full rank, or fewer axes.
Overlay = Shaped[Tensor, "*#lead #H #T #S"] | Shaped[Tensor, "#T #S"] | Shaped[Tensor, "#S"] | Shaped[Tensor, ""]
Mask = Overlay | None
Bias = Float[Overlay, ""] | None
Allowed = Bool[Overlay, ""] | None


def attention_function(compute: Callable[..., Tensor]) -> AttentionFunction:
    """Make an attention function of its mathematics.

    compute(q, k, v, allowed, bias, scale, dropout_p) gets k and v with all H heads, and `scale` as a number. `allowed`
    is None if every pair is allowed, else bool with at least one key for every query. Queries that may attend nowhere
    get zeros afterwards.
    """

    def attend(
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
        # Refuse bad arguments; reduce mask and is_causal to one matrix, and give every query head its keys and values.
        check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
        allowed, has_keys = allowed_keys(q, k, mask, is_causal)
        H = q.shape[-3]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        y = compute(q, repeat_heads(k, H), repeat_heads(v, H), allowed, bias, scale, dropout_p)

        # A query without a key was shown all of them, or its softmax would be 0 / 0.
        return y if has_keys is None else y.masked_fill(~has_keys, 0)

    return _named_as(compute, attend)


def from_weights(weights: Callable[[Scores], Scores], cap: float | None = None) -> AttentionFunction:
    """Make an attention function of its weights, weights(scores).

    The scores are −∞ for keys that are not allowed. cap: squash the scaled products into ±cap before mask and bias.
    """

    def compute(
        q: Query,
        k: Key,
        v: Value,
        allowed: Allowed,
        bias: Bias,
        scale: float,
        dropout_p: float,
    ) -> Output:
        # Weights need float32: half precision would lose the small ones.
        scores = upcast(q * scale @ k.mT)  # (…, H, T, D) @ (…, H, D, S) -> (…, H, T, S)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = masked(scores, allowed, bias)
        return F.dropout(weights(scores).to(v.dtype), dropout_p) @ v

    return _named_as(weights, attention_function(compute))


def masked(scores: Tensor, allowed: Allowed, bias: Bias = None) -> Tensor:
    """Return scores plus bias, −∞ for a key that is not allowed, in float32 or wider."""
    scores = upcast(scores) if bias is None else upcast(scores) + bias
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _named_as(source: Callable, function: Any) -> Any:
    # All but the signature, which stays the function's own.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(function, name, getattr(source, name))
    return function


def allowed_keys(
    q: Query,
    k: Key,
    mask: Mask,
    is_causal: bool,
) -> tuple[Allowed, Allowed]:
    """Reduce mask and is_causal to (allowed, has_keys), each None if it would be all True.

    has_keys, (…, T, 1), is False for a query that may attend nowhere. A softmax over nothing is 0/0, and its NaN
    survives multiplication by zero, forwards and backwards. So `allowed` opens such a row to every key. The caller then
    fills this row of the result with zeros, through which no gradient flows.
    """
    T = q.shape[-2]
    S = k.shape[-2]
    if mask is None:
        # A single query is the last, from which causality hides no key.
        if not is_causal or T == 1:
            return None, None
        allowed = causal_mask(T, S, q.device)
        # With a key for every query each sees at least its own.
        if T <= S:
            return allowed, None
    else:
        allowed = as_bool(mask)
    has_keys = allowed.any(-1, keepdim=True)
    return allowed | ~has_keys, has_keys


def repeat_heads(x: Shaped[Tensor, "*lead Hkv S D"], H: int) -> Shaped[Tensor, "*lead {H} S D"]:
    """Give every query head its own copy of the key/value head it shares (Ainslie et al. 2023)."""
    return x if x.shape[-3] == H else x.repeat_interleave(H // x.shape[-3], dim=-3)


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> None:
    """Raise ValueError unless the arguments fit the contract; this takes a microsecond or two."""
    qs, ks, vs = q.shape, k.shape, v.shape
    agree = len(qs) >= 3 and qs[:-3] == ks[:-3] and qs[-1] == ks[-1] and ks[:-1] == vs[:-1]
    if not agree or ks[-3] < 1 or qs[-3] % ks[-3]:
        wanted = "q must be (…, H, T, D), k (…, Hkv, S, D) and v (…, Hkv, S, Dv), where Hkv divides H"
        raise ValueError(f"{wanted}: q is {tuple(qs)}, k is {tuple(ks)}, v is {tuple(vs)}.")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} must lie in [0, 1): 1 would drop every weight of q {tuple(qs)}.")
    if mask is not None and is_causal:
        raise ValueError(f"mask {tuple(mask.shape)} together with is_causal=True: put causality into the mask.")
    for name, overlay in (("mask", mask), ("bias", bias)):
        if overlay is not None:
            check_broadcast(name, overlay, (*qs[:-1], ks[-2]))


def check_broadcast(name: str, overlay: Tensor, to: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor broadcasts to the shape (…, H, T, S).

    Leading axes may be missing.
    """
    shape = overlay.shape
    if len(shape) > len(to) or any(n not in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False)):
        remedy = "a (B, S) padding mask goes through padding_mask() first"
        raise ValueError(f"{name} {tuple(shape)} does not broadcast to (…, H, T, S) = {tuple(to)}; {remedy}.")
