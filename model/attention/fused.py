"""Attention by torch's fused kernels, which never write the (T, S) matrix.

`fused` serves any device, where causality or nothing lies over the scores; `fused_with_matrix` takes mask and bias as a
matrix. `folded` serves a GPU: it makes channels and keys of bias, documents and sink, so that FlashAttention, the
fastest kernel, can take them.

bias       the sum row_t + column_s is a product of channels: queries have (1, row_t) and keys (column_s, 1). (Wu et al.
           2025, FlashBias.) The product of queries and keys adds it, and its gradient is that of these channels.
documents  are such a bias, which takes 256 from a score for each document that begins between the key and the query.
           The lengths of documents, which FlashAttention would also take, would have to be read from the GPU.
sink       a key in front of all others, whose value is zero. Causality shows it to every query.
window     an argument of torch's varlen_attn, which is FlashAttention as well.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from model.attention.call import Call, Key, Output, Query, RowColumn, Value, repeat_heads, scale_of
from model.attention.functions import masked
from model.cpu import is_recorded

KNOWS_WINDOWS = torch.__version__ >= "2.13"
"""Whether varlen_attn has the arguments of varlen()."""
DOCUMENT_GAP = 256.0
"""The difference of scores between two documents: exp(-256) is 0 in float32.

A key of another document would need a score some 150 above those of the own one to get weight; QK-norm rules that out.
"""
UNIT = 64.0
"""The channel that a bias is multiplied by, after its division by it.

A power of two rounds nothing, and 64 keeps biases in float16's range.
"""


def fused(call: Call) -> Output:
    """Return attention by torch's kernels, with causality or nothing over the scores."""
    q, k, v = call[:3]
    H, T, D = q.shape[-3:]
    Hkv = k.shape[-3]
    Dv = v.shape[-1]
    scale = scale_of(call)
    is_causal = call.is_causal
    if T == 1 and not is_recorded():  # a single query sees every key, but one that is recorded stands for more
        is_causal = False
    if not is_causal and T == 1 and Hkv != H and not q.is_cpu:
        # Decoding: query heads that share a key head become queries of one head, and no key is copied.
        grouped = q.unflatten(-3, (Hkv, -1)).squeeze(-2)  # (…, H, 1, D) -> (…, Hkv, H/Hkv, D)
        y = fused(Call(grouped, k, v, is_causal=False, dropout_p=call.dropout_p, scale=scale))
        return y.flatten(-3, -2).unsqueeze(-2)  # (…, Hkv, H/Hkv, Dv) -> (…, H, 1, Dv)

    if Dv != D and (q.is_cpu or flash_takes(q, max(D, Dv))):
        # These kernels need one width; channels of zeros change no product.
        q, k, v = (pad_channels(t, max(D, Dv)) for t in (q, k, v))
    # On CUDA only FlashAttention supports GQA. Without it torch would fall back to the plain formula, with (T, T)
    # weights of every head.
    if not (q.is_cpu or flash_takes(q, q.shape[-1])):
        k = repeat_heads(k, H)
        v = repeat_heads(v, H)
    shares = bool(k.shape[-3] != H)  # in a trace sizes are tensors
    y = F.scaled_dot_product_attention(q, k, v, None, call.dropout_p, is_causal, scale=scale, enable_gqa=shares)
    return y if y.shape[-1] == Dv else y[..., :Dv]


def fused_with_matrix(call: Call) -> Output:
    """Return attention by torch's kernels, with mask and bias as one matrix."""
    q, k, v = call[:3]
    matrix = call.mask
    if call.matrix is not None:
        # A CPU's kernels add a bias in float32; a GPU's want it in the type of q, and round it.
        matrix = masked(call.matrix, call._replace(matrix=None))
        matrix = matrix if q.is_cpu else matrix.to(q.dtype)
    if matrix is not None:
        # The kernels broadcast less than others.
        shape = torch.broadcast_shapes(matrix.shape, (1, k.shape[-2]))
        matrix = matrix.expand(shape)
    return F.scaled_dot_product_attention(q, k, v, matrix, call.dropout_p, scale=scale_of(call))


def flash_takes(q: Query, width: int) -> bool:
    """Return whether FlashAttention serves unmasked queries, keys and values of this width.

    It needs half precision and compute capability 8.0.
    """
    if not q.is_cuda or q.dtype.itemsize != 2 or width > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def has_varlen(device: torch.device) -> bool:
    """Return whether varlen_attn serves windows: in torch 2.13, on NVIDIA's GPUs from Ampere on.

    On another device a plan of a run asks, for such a GPU.
    """
    if torch.version.hip or not KNOWS_WINDOWS:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def folded(call: Call, with_varlen: bool = False) -> Output:
    """Return causal attention (B, H, T, Dv) by a kernel that knows causality alone.

    with_varlen: by varlen_attn, which knows a window, and fewer queries than keys.
    """
    q, k, v = call[:3]
    dtype = q.dtype
    H, T = q.shape[-3:-1]
    Dv = v.shape[-1]
    scale = scale_of(call)
    has_sink = call.sink is not None
    bias = call.row_column
    if call.doc_starts is not None:
        bias = document_bias(call.doc_starts, bias)

    # Bias: channels for the columns, then for the rows.
    if bias is not None:
        row, column = bias
        # Floats are finest near 0: centre the columns, and give their mean to the rows. Without a sink the rows
        # change no weight; they only keep the scores small, and need no gradient.
        level = column.detach().mean(-1, keepdim=True)
        row = row + level if has_sink else (row + level).detach()
        column = column - level
        if column.shape[-2] > 1:  # each head has a bias of its own, so heads share no keys
            k = repeat_heads(k, H)
            v = repeat_heads(v, H)
        columns = summands(column / (scale * UNIT), dtype)  # (…, H, T) -> (…, H, T, 1 or 3)
        rows = summands(row / (scale * UNIT), dtype)
        units = torch.full_like(columns[..., :1, :], UNIT)
        q = cat_channels(q, units, rows)
        k = cat_channels(k, columns, units)

    # Sink: a key in front, which alone meets the channels of its score.
    if call.sink is not None:
        scores = summands(call.sink[:, None] / (scale * UNIT), dtype)  # (H, 1, 1 or 3)
        units = torch.full_like(scores[:1], UNIT)
        sink = cat_channels(torch.zeros_like(k[..., :1, :]), units)
        others = cat_channels(k, torch.zeros_like(units))
        k = torch.cat((sink, others), -2)
        q = F.pad(cat_channels(q, scores), (0, 0, 1, 0))
        v = F.pad(v, (0, 0, 1, 0))

    # The kernels take multiples of 8 channels.
    q, k, v = (pad_channels(t, -(-t.shape[-1] // 8) * 8) for t in (q, k, v))
    if with_varlen:
        y = varlen(q, k, v, call.window, scale)
    else:
        y = fused(Call(q, k, v, dropout_p=call.dropout_p, scale=scale))
    y = y[..., has_sink:, :Dv]

    # A query before its text sees nothing.
    if call.doc_starts is None:
        return y
    position = torch.arange(T, device=y.device)
    sees_nothing = call.doc_starts > position  # (B, T)
    return y.masked_fill(sees_nothing[:, None, :, None], 0)


def document_bias(doc_starts: Int[Tensor, "B T"], bias: RowColumn | None) -> RowColumn:
    """Return rows and columns that hide the keys of other documents, and add a bias."""
    # The number of each token's document, or of its padding, which is one too.
    position = torch.arange(doc_starts.shape[-1], device=doc_starts.device)
    number = (doc_starts == position).cumsum(-1)
    column = DOCUMENT_GAP * number.float()[:, None]  # (B, T) -> (B, 1, T)
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


def cat_channels(
    x: Float[Tensor, "*lead T D"],
    *channels: Float[Tensor, "*#lead #T n"],
) -> Float[Tensor, "*lead T E"]:
    """Return x with more channels."""
    wide = [each.expand(*x.shape[:-1], -1) for each in channels]
    return torch.cat((x, *wide), -1)


def pad_channels(
    x: Float[Tensor, "*lead T D"],
    width: int,
) -> Float[Tensor, "*lead T {width}"]:
    """Return x with channels of zeros, up to a width."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x  # to pad by nothing would copy


def varlen(
    q: Query,
    k: Key,
    v: Value,
    window: int | None,
    scale: float,
) -> Output:
    """Return causal attention of the last T positions to at most `window` of S, by varlen_attn."""
    from torch.nn.attention import varlen as torchs  # it imports torch's compiler, which takes a second

    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    Dv = v.shape[3]

    # Its tokens lie in one row, text after text.
    q, k, v = (pad_channels(t, max(D, Dv)) for t in (q, k, v))
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B, H, T, D) -> (B, T, H, D) -> (B · T, H, D)
    text = torch.arange(B + 1, dtype=torch.int32, device=q.device)
    y = torchs.varlen_attn(
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
