"""What lies over the scores: which keys a query may see (masks), and at what penalty (ALiBi).

A mask is True where a query may attend. Queries are the last T of S positions, so query t stands at
position S - T + t: with T = S that is the usual lower triangle, with T = 1 (one new token, S cached)
the whole row. Aligned at the other corner, a cached token would see nothing but key 0.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Device = torch.device | str | None


def causal_mask(T: int, S: int, device: Device = None) -> Bool[Tensor, "{T} {S}"]:
    """Hide later keys from each query (Vaswani et al. 2017, section 3.2.3); the last query sees every key."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def sliding_window_mask(T: int, S: int, window: int, device: Device = None) -> Bool[Tensor, "{T} {S}"]:
    """Show each query itself and the `window` - 1 positions before it (Beltagy et al. 2020)."""
    assert window > 0, "a position sees itself"
    return causal_mask(T, S, device).triu(S - T - window + 1)


def padding_mask(attention_mask: Shaped[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """Shape a tokenizer's mask, 1 for a token and 0 for padding, for every head and query."""
    assert attention_mask.ndim == 2, f"must be (B, S), one row per text, but is {tuple(attention_mask.shape)}"
    return as_bool(attention_mask)[:, None, None, :]


def document_mask(starts: Int[Tensor, "B T"]) -> Bool[Tensor, "B 1 T T"]:
    """Hide from each token the documents before its own, which begins at position `starts` of the window.

    Together with causality a token sees s where starts[t] ≤ s ≤ t.
    """
    return torch.arange(starts.size(1), device=starts.device) >= starts[:, None, :, None]


def real_keys(mask: Shaped[Tensor, " ..."]) -> Bool[Tensor, " ..."] | None:
    """Return which keys a mask shows, (…, S), if it is the same for all heads and queries; None of any other."""
    if any(size != 1 for size in mask.shape[-3:-1]):
        return None
    return as_bool(mask).reshape(*mask.shape[:-3], mask.shape[-1])


def first_of_text(mask: Shaped[Tensor, " ..."], T: int) -> Bool[Tensor, "... T"] | None:
    """Return which of the last T keys have no key before them; None of a mask that does not say, as in real_keys."""
    real = real_keys(mask)
    if real is None or real.shape[-1] < T:
        return None
    before = F.pad(real, (1, 0))[..., -T - 1 : -1]
    return real[..., -T:] & ~before


def has_holes(mask: Shaped[Tensor, " ..."]) -> bool:
    """Return whether a mask hides keys between others from all queries; False while torch compiles."""
    real = real_keys(mask)
    if real is None or torch.compiler.is_compiling():
        return False
    seen = real.int()
    return bool(((seen.cumsum(-1) > 0) & ~real & (seen.flip(-1).cumsum(-1).flip(-1) > 0)).any())


def keys_allowed(
    mask: Shaped[Tensor, " ..."] | None, is_causal: bool, T: int, S: int, device: Device = None
) -> Float[Tensor, "... #T"]:
    """Return how many keys each query may attend to, as an attention function is told by mask and is_causal."""
    if mask is not None:
        return as_bool(mask).expand(*mask.shape[:-1], S).sum(-1).clamp(min=1).float()  # of none there is no logarithm
    if is_causal:
        return torch.arange(S - T + 1, S + 1, dtype=torch.float32, device=device)
    return torch.full((1,), float(S), device=device)


def combine(*masks: Shaped[Tensor, " ..."] | None) -> Bool[Tensor, " ..."] | None:
    """Allow what all masks allow. None allows everything; of Nones alone the result is None."""
    given = [as_bool(mask) for mask in masks if mask is not None]
    return reduce(torch.logical_and, given) if given else None


def causal_with(
    mask: Shaped[Tensor, " ..."] | None, T: int, S: int, window: int | None = None, device: Device = None
) -> tuple[Bool[Tensor, " ..."] | None, bool]:
    """Return the `mask` and `is_causal` that a causal layer passes to its attention function.

    With nothing else to hide that is (None, True): the fused kernels know causality without a (T, S) mask.
    Otherwise one mask holds everything: causality, the window and `mask`.
    """
    if window is not None and window < S:
        return combine(mask, sliding_window_mask(T, S, window, device)), False
    if mask is None:
        return None, True
    return combine(mask, causal_mask(T, S, device) if T > 1 else None), False  # one query is the last: it sees all


def as_bool(mask: Shaped[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return True where the mask is True or 1.

    Raises ValueError for a number other than 0 and 1: an additive mask of 0 and −∞ means the opposite.
    """
    if mask.dtype == torch.bool:
        return mask
    attend = mask == 1
    # The check reads values, which neither a compiler's trace nor a meta tensor has.
    if not torch.compiler.is_compiling() and not mask.is_meta and not (attend | (mask == 0)).all():
        raise ValueError(
            f"mask {tuple(mask.shape)} has numbers other than 1 (may attend) and 0 (may not); "
            "pass what should be added to the scores as `bias`."
        )
    return attend


def check_broadcast(name: str, tensor: Shaped[Tensor, " ..."], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor broadcasts to `shape`, (…, H, T, S)."""
    # Compared from the last axis: a missing leading axis broadcasts.
    fits = all(a in (1, b) for a, b in zip(reversed(tensor.shape), reversed(shape), strict=False))
    if not fits or tensor.ndim > len(shape):
        raise ValueError(
            f"{name} {tuple(tensor.shape)} does not broadcast to (…, H, T, S) = {tuple(shape)}; "
            "a (B, S) padding mask goes through padding_mask() first."
        )


def alibi_slopes(n_head: int, device: Device = None) -> Float[Tensor, " {n_head}"]:
    """Return each head's penalty per position (Press et al. 2022, section 3): 2^(-8/H), 2^(-16/H), … 2^-8.

    For H between powers of two, the authors' rule: the slopes of the power below, then every other
    slope of twice that power.
    """
    power = 1 << (n_head.bit_length() - 1)  # the largest power of two that is at most H
    slopes = torch.exp2(torch.arange(1, power + 1, device=device) * (-8 / power))
    between = torch.exp2(torch.arange(1, 2 * power, 2, device=device) * (-4 / power))
    return torch.cat((slopes, between[: n_head - power]))


def alibi_bias(n_head: int, T: int, S: int, device: Device = None) -> Float[Tensor, "{n_head} {T} {S}"]:
    """Return minus slope × distance for each pair, to add to the scaled scores (Press et al. 2022)."""
    query = torch.arange(S - T, S, device=device)
    distance = (query[:, None] - torch.arange(S, device=device)).abs()  # (T, S)
    return -alibi_slopes(n_head, device)[:, None, None] * distance
