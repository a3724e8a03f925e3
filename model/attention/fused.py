"""Attention by torch's fused kernels, which never write the (T, S) matrix.

`fused` serves any device, and takes mask and bias as a matrix. `folded` serves a GPU: it makes channels and keys of
bias, documents and sink, so that FlashAttention, the fastest kernel, can take them.

bias       the sum row_t + column_s is a product of channels: queries have (1, row_t) and keys (column_s, 1). (Wu et al.
           2025, FlashBias.) The product of queries and keys adds it, and its gradient is that of these channels.
documents  are such a bias, which takes 256 from a score for each document that begins between the key and the query.
           The lengths of documents, which FlashAttention would also take, would have to be read from the GPU.
sink       a key in front of all others, whose value is zero. Causality shows it to every query.
window     an argument of torch's varlen_attn, which is FlashAttention as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from model.attention.context import Call, sink_of
from model.attention.contract import (
    Allowed,
    Bias,
    Key,
    Mask,
    Output,
    Query,
    Value,
    attention_function,
    check_arguments,
    masked,
    repeat_heads,
)
from model.layers import autocast_dtype

KNOWS_WINDOWS = torch.__version__ >= "2.13"
"""Whether varlen_attn has the arguments of with_window()."""
Sum = tuple[Float[Tensor, "..."], Float[Tensor, "..."]]
APART = 256.0
"""The difference of scores between two documents: exp(-256) is 0 in float32."""
UNIT = 64.0
"""The channel that a bias is multiplied by, after its division by it.

A power of two rounds nothing, and 64 keeps biases in float16's range.
"""


def fused(
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
    """Return attention by torch's kernels, without a (T, S) matrix unless mask or bias are one."""
    check_arguments(q, k, v, mask, bias, is_causal, dropout_p)
    H, T, D = q.shape[-3:]
    Hkv, S = k.shape[-3:-1]
    Dv = v.shape[-1]

    # Their is_causal aligns the first query with the first key, so T must be S. A single query sees every key.
    is_aligned = not is_causal or T in (1, S)
    if mask is not None or bias is not None or not is_aligned:
        return fused_with_matrix(q, k, v, mask=mask, bias=bias, is_causal=is_causal, dropout_p=dropout_p, scale=scale)
    scale = D**-0.5 if scale is None else scale
    if T == 1 and Hkv != H and not q.is_cpu:
        # Decoding: query heads that share a key head become queries of one head, and no key is copied.
        grouped = q.unflatten(-3, (Hkv, -1)).squeeze(-2)  # (…, H, 1, D) -> (…, Hkv, H/Hkv, D)
        y = fused(grouped, k, v, dropout_p=dropout_p, scale=scale)
        return y.flatten(-3, -2).unsqueeze(-2)  # (…, Hkv, H/Hkv, Dv) -> (…, H, 1, Dv)

    if Dv != D and (q.is_cpu or flash_takes(q, max(D, Dv))):
        # These kernels need one width; channels of zeros change no product.
        q, k, v = (widened(t, max(D, Dv)) for t in (q, k, v))
    # On CUDA only FlashAttention supports GQA. Without it torch would fall back to the plain formula, with (T, T)
    # weights of every head.
    if not (q.is_cpu or flash_takes(q, q.shape[-1])):
        k = repeat_heads(k, H)
        v = repeat_heads(v, H)
    is_causal = is_causal and T > 1
    shares = k.shape[-3] != H
    y = F.scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=shares)
    return y if y.shape[-1] == Dv else y[..., :Dv]


@attention_function
def fused_with_matrix(
    q: Query,
    k: Key,
    v: Value,
    allowed: Allowed,
    bias: Bias,
    scale: float,
    dropout_p: float,
) -> Output:
    """Return attention by torch's kernels, with mask and bias as one matrix."""
    matrix = allowed if bias is None else masked(bias, allowed).to(q.dtype)
    if matrix is not None:
        # The kernels broadcast less than others.
        shape = torch.broadcast_shapes(matrix.shape, (1, k.shape[-2]))
        matrix = matrix.expand(shape)
    return F.scaled_dot_product_attention(q, k, v, matrix, dropout_p, scale=scale)


def flash_takes(q: Query, width: int) -> bool:
    """Return whether FlashAttention serves unmasked queries, keys and values of this width.

    It needs half precision and compute capability 8.0. This asks for bf16 alone: training takes fp16 on older cards.
    """
    return q.is_cuda and q.dtype == torch.bfloat16 and width <= 256


def by_kernel(**options: Any) -> Callable[[Any], Any]:
    """Mark an attention function that `folded` computes too: see MultiHeadAttention.attend."""

    def mark(function: Any) -> Any:
        function.by_kernel = partial(folded, **options)
        return function

    return mark


def folds(call: Call, dropout_p: float) -> bool:
    """Return whether `folded` serves the call on a GPU."""
    T, S = call.q.shape[-2], call.k.shape[-2]
    if T == 1 or call.mask is not None:  # the matrix of a single query is small
        return False
    # A large bias rounds the scores, though by less than half precision does. float32 would lose digits.
    half = call.q.dtype.itemsize == 2
    if call.bias is not None and not half:
        return False
    # Keys from a cache do not say which document is theirs.
    if call.doc_starts is not None and not (half and T == S):
        return False
    if not needs_varlen(call):
        return True
    # varlen_attn has no dropout, and a key in front lies outside the window.
    widest = max(call.q.shape[-1] + 8, call.v.shape[-1])  # six channels for a bias, in a multiple of 8
    fits = half and widest <= 256 and dropout_p == 0 and call.sink is None
    return fits and has_varlen(call.q.device)


def needs_varlen(call: Call) -> bool:
    """Return whether the call has a window, or fewer queries than keys."""
    T, S = call.q.shape[-2], call.k.shape[-2]
    return T != S or (call.window or S) < S


def has_varlen(device: torch.device) -> bool:
    """Return whether varlen_attn serves windows: on NVIDIA's GPUs from Ampere on.

    On another device a plan of a run asks, for such a GPU.
    """
    if torch.version.hip or not KNOWS_WINDOWS:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def folded(
    call: Call,
    dropout_p: float = 0.0,
    one_more: bool = False,
) -> Output:
    """Return causal attention (B, H, T, Dv) by a kernel that knows causality and a window alone.

    It serves the calls for which folds() is true.
    one_more: add a key that scores 0 and gives nothing.
    """
    in_front = one_more or call.sink is not None
    # Convert here: within the kernel autocast would round a bias to one channel's digits.
    dtype = autocast_dtype(call.q)
    q, k, v = (t.to(dtype) for t in (call.q, call.k, call.v))
    H, T, D = q.shape[-3:]
    Dv = v.shape[-1]
    scale = D**-0.5 if call.scale is None else call.scale
    bias = call.bias
    if call.doc_starts is not None:
        bias = apart(call.doc_starts, bias)

    # Bias: channels for the columns, then for the rows.
    if bias is not None:
        row, column = bias
        # Floats are finest near 0: centre the columns, and give their mean to the rows. Without a key in front the rows
        # change no weight; they only keep the scores small, and need no gradient.
        level = column.detach().mean(-1, keepdim=True)
        row = row + level if in_front else (row + level).detach()
        column = column - level
        if column.shape[-2] > 1:  # each head has a bias of its own, so heads share no keys
            k = repeat_heads(k, H)
            v = repeat_heads(v, H)
        columns = summands(column / (scale * UNIT), dtype)  # (…, H, T) -> (…, H, T, 1 or 3)
        rows = summands(row / (scale * UNIT), dtype)
        units = torch.full_like(columns[..., :1, :], UNIT)
        q = beside(q, units, rows)
        k = beside(k, columns, units)

    # Sink: a key in front, which alone meets the channels of its score.
    if in_front:
        sink = sink_of(call, one_more)
        assert sink is not None
        scores = summands(sink[:, None] / (scale * UNIT), dtype)  # (H, 1, 1 or 3)
        units = torch.full_like(scores[:1], UNIT)
        front = beside(torch.zeros_like(k[..., :1, :]), units)
        others = beside(k, torch.zeros_like(units))
        k = torch.cat((front, others), -2)
        q = F.pad(beside(q, scores), (0, 0, 1, 0))
        v = F.pad(v, (0, 0, 1, 0))

    # The kernels take multiples of 8 channels.
    q, k, v = (widened(t, -(-t.shape[-1] // 8) * 8) for t in (q, k, v))
    if needs_varlen(call):
        y = with_window(q, k, v, call.window, scale)
    else:
        y = fused(q, k, v, is_causal=True, dropout_p=dropout_p, scale=scale)
    y = y[..., in_front:, :Dv]

    # A query before its text sees nothing.
    if call.doc_starts is None:
        return y
    position = torch.arange(T, device=y.device)
    sees_nothing = call.doc_starts > position  # (B, T)
    return y.masked_fill(sees_nothing[:, None, :, None], 0)


def apart(doc_starts: Int[Tensor, "B T"], bias: Sum | None) -> Sum:
    """Return rows and columns that hide the keys of other documents, and add a bias."""
    # The number of each token's document; padding has 0.
    position = torch.arange(doc_starts.shape[-1], device=doc_starts.device)
    number = (doc_starts == position).cumsum(-1)
    column = APART * number.float()[:, None]  # (B, T) -> (B, 1, T)
    if bias is None:
        return -column, column
    return bias[0] - column, bias[1] + column


def summands(
    number: Float[Tensor, "*lead T"],
    dtype: torch.dtype,
) -> Float[Tensor, "*lead T n"]:
    """Return 1 or 3 numbers of a type with the sum `number`; the first has the gradient."""
    first = number.to(dtype)
    if dtype.itemsize > 2:
        return first[..., None]
    rest = (number - first.to(number.dtype)).detach()
    second = rest.to(dtype)
    third = (rest - second.to(number.dtype)).to(dtype)
    return torch.stack((first, second, third), -1)


def beside(
    x: Float[Tensor, "*lead T D"],
    *channels: Float[Tensor, "*#lead #T n"],
) -> Float[Tensor, "*lead T E"]:
    """Return x with more channels."""
    wide = [each.expand(*x.shape[:-1], -1) for each in channels]
    return torch.cat((x, *wide), -1)


def widened(
    x: Float[Tensor, "*lead T D"],
    width: int,
) -> Float[Tensor, "*lead T {width}"]:
    """Return x with channels of zeros, up to a width."""
    return F.pad(x, (0, width - x.shape[-1]))


def with_window(
    q: Query,
    k: Key,
    v: Value,
    window: int | None,
    scale: float,
) -> Output:
    """Return causal attention of the last T positions to at most `window` of S, by varlen_attn."""
    from torch.nn.attention import varlen  # it imports torch's compiler, which takes a second

    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    Dv = v.shape[3]

    # Its tokens lie in one row, text after text.
    q, k, v = (widened(t, max(D, Dv)) for t in (q, k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B, H, T, D) -> (B, T, H, D) -> (B · T, H, D)
    text = torch.arange(B + 1, dtype=torch.int32, device=q.device)
    y = varlen.varlen_attn(
        q,
        k,
        v,
        cu_seq_q=text * T,
        cu_seq_k=text * S,
        max_q=T,
        max_k=S,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # keys before a query's own, and after
        enable_gqa=Hkv != H,
    )
    assert isinstance(y, Tensor)
    return y[..., :Dv].unflatten(0, (B, T)).transpose(1, 2)  # (B · T, H, Dv) -> (B, T, H, Dv) -> (B, H, T, Dv)
