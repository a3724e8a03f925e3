"""The contract of every attention function: its arguments, their checks, and the cases they reduce to.

An attention function has this signature and meaning, however it computes:

    attend(q, k, v, *, mask=None, bias=None, is_causal=False, dropout_p=0.0, scale=None)

    q          (…, H, T, D)     queries; any number of leading dimensions, or none
    k          (…, Hkv, S, D)   keys; Hkv divides H, and H / Hkv query heads share a key head
    v          (…, Hkv, S, Dv)  values; Dv may differ from D
    mask       broadcasts to (…, H, T, S): True or 1 = may attend, False or 0 = may not
    bias       broadcasts to (…, H, T, S): finite, added to the scaled scores
    is_causal  no query sees a later key; the last query sees the last key, also where T ≠ S.
               Not together with a mask: combine the two with model.masks.
    dropout_p  probability of dropping a weight; the caller passes 0 outside training
    scale      factor on the products, 1/√D when None
    returns    (…, H, T, Dv); a query that may attend nowhere gets zeros, and no gradient

It raises ValueError, naming the shapes, when the arguments do not fit together. Most functions are only
their mathematics; obeys_contract() does the rest.
"""

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from model.masks import as_bool, causal_mask, check_broadcast

Query = Float[Tensor, "*lead H T D"]
Key = Float[Tensor, "*lead Hkv S D"]
Value = Float[Tensor, "*lead Hkv S Dv"]
Output = Float[Tensor, "*lead H T Dv"]
Stream = Float[Tensor, "*lead T C"]
# What broadcasts to (…, H, T, S): full rank or, where it is the same for all, fewer axes.
Overlay = Shaped[Tensor, "*#lead #H #T #S"] | Shaped[Tensor, "#T #S"] | Shaped[Tensor, "#S"] | Shaped[Tensor, ""]
Mask = Overlay | None
Bias = Float[Overlay, ""] | None
Allowed = Bool[Overlay, ""] | None


@runtime_checkable
class AttentionFunction(Protocol):
    """The contract above as a type."""

    def __call__(
        self, q: Query, k: Key, v: Value, *, mask: Mask = None, bias: Bias = None, is_causal: bool = False,
        dropout_p: float = 0.0, scale: float | None = None,
    ) -> Output: ...  # fmt: skip


Mathematics = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, float], Tensor]


def obeys_contract(compute: Mathematics) -> AttentionFunction:
    """Make an attention function of its mathematics, `compute(q, k, v, allowed, bias, scale, dropout_p)`.

    compute gets checked arguments: k and v with all H heads; `allowed`, which is None where every pair is,
    or bool with at least one key for every query; `scale` as a number. Its result for a query that may attend
    nowhere is replaced by zeros.
    """

    def attend(
        q: Query, k: Key, v: Value, *, mask: Mask = None, bias: Bias = None, is_causal: bool = False,
        dropout_p: float = 0.0, scale: float | None = None,
    ) -> Output:  # fmt: skip
        check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
        allowed, has_keys = allowed_keys(q, k, mask, is_causal)
        H, scale = q.shape[-3], 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        y = compute(q, repeat_heads(k, H), repeat_heads(v, H), allowed, bias, scale, dropout_p)
        return zero_empty_rows(y, has_keys)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # the signature stays attend's own
        setattr(attend, name, getattr(compute, name))
    return attend


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, is_causal: bool, dropout_p: float
) -> None:
    """Raise ValueError unless the arguments obey the contract; a good call costs a microsecond or two."""
    qs, ks, vs, wrong = q.shape, k.shape, v.shape, ""
    if len(qs) < 3 or not len(qs) == len(ks) == len(vs):
        wrong = "q must be (…, H, T, D), k (…, Hkv, S, D) and v (…, Hkv, S, Dv), of the same rank"
    elif not qs[:-3] == ks[:-3] == vs[:-3]:
        wrong = "the leading dimensions of q, k and v must be equal"
    elif qs[-1] != ks[-1]:
        wrong = "queries and keys must have the same size D"
    elif ks[:-1] != vs[:-1]:
        wrong = "every key needs one value, so k and v must agree in Hkv and S"
    elif ks[-3] < 1 or qs[-3] % ks[-3]:
        wrong = f"the {ks[-3]} key/value heads must divide the {qs[-3]} query heads"
    if wrong:
        raise ValueError(f"{wrong}: q is {tuple(qs)}, k is {tuple(ks)}, v is {tuple(vs)}.")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} must lie in [0, 1): 1 would drop every weight of q {tuple(qs)}.")
    if mask is not None:
        if is_causal:
            raise ValueError(f"mask {tuple(mask.shape)} together with is_causal=True: combine() them first.")
        check_broadcast("mask", mask, (*qs[:-1], ks[-2]))
    if bias is not None:
        check_broadcast("bias", bias, (*qs[:-1], ks[-2]))


def allowed_keys(q: Query, k: Key, mask: Mask, is_causal: bool) -> tuple[Allowed, Allowed]:
    """Reduce mask and is_causal to (allowed, has_keys), each None where it would be all True.

    `allowed` broadcasts to (…, H, T, S). `has_keys`, (…, T, 1), is False for an empty row: a query that may
    attend nowhere. A softmax over nothing is 0/0, and its NaN survives multiplication by zero, forwards and
    backwards. So `allowed` opens an empty row to every key, which keeps all numbers finite, and
    zero_empty_rows() then cuts the row out of the result, and with it out of the gradient.
    """
    T, S = q.shape[-2], k.shape[-2]
    if mask is None:
        if not is_causal or T == 1:
            return None, None
        allowed = causal_mask(T, S, q.device)
        if T <= S:  # each query sees at least its own key
            return allowed, None
    else:
        allowed = as_bool(mask)
    has_keys = allowed.any(-1, keepdim=True)
    return allowed | ~has_keys, has_keys


def zero_empty_rows(y: Output, has_keys: Allowed) -> Output:
    """Return y with zeros for every query that has no key."""
    return y if has_keys is None else y.masked_fill(~has_keys, 0.0)


def repeat_heads(x: Float[Tensor, "*lead Hkv S D"], H: int) -> Float[Tensor, "*lead {H} S D"]:
    """Give every query head its own copy of the key/value head it shares (Ainslie et al. 2023)."""
    return x if x.shape[-3] == H else x.repeat_interleave(H // x.shape[-3], dim=-3)
