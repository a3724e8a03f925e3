"""Attention functions, all with the same arguments.

    attend(q, k, v, mask=…, bias=…, is_causal=…, dropout_p=…, scale=…)

Begin with `matmul`, which is attention step by step. `einsum`, `bmm` and `loop` compute the same in other ways, `sdpa`
is the fast one. `softmax1`, `sigmoid`, `sparsemax`, `stick` and `softcap` turn the same scores into other weights.

Decorators turn the definitions into functions with the call above:

@form(NAME)          registers attention=NAME
@attention_function  checks the arguments, repeats shared keys and values for all H heads, and makes `allowed` of mask
                     and is_causal: True where a query may attend, None if it may attend everywhere
@from_weights        does that too, computes the scores, −∞ where a key is hidden, and sums the values by the weights
@by_chunks           adds a second way for long texts, by chunks of queries, without a matrix of all scores (chunked.py)
@by_kernel           adds another for GPUs, by torch's fused kernels (fused.py)

contract.py has the second and third, and the shapes of all arguments.
"""

import torch
import torch.nn.functional as F

from model.attention.chunked import by_chunks
from model.attention.contract import (
    Allowed,
    AttentionFunction,
    Bias,
    Key,
    Mask,
    Output,
    Query,
    Scores,
    Value,
    attention_function,
    from_weights,
    masked,
    upcast,
)
from model.attention.fused import by_kernel, fused
from model.attention.registry import form
from model.cpu import prefers_plain_products
from model.layers import cumulative_sum


@form("matmul")
@by_chunks("softmax")
@attention_function
def matmul(
    q: Query,
    k: Key,
    v: Value,
    allowed: Allowed,
    bias: Bias,
    scale: float,
    dropout_p: float,
) -> Output:
    """softmax(q kᵀ / √D) v: scaled dot-product attention, one step per line.

    (Vaswani et al. 2017, eq. 1.)
    """
    # A dot product of D independent terms of variance 1 has variance D. The scale, 1/√D, brings it back
    # to 1; without that the softmax would soon saturate on one key, where its gradient vanishes. The queries are
    # scaled, not the scores: fp16 ends at 65,504, which unscaled scores pass √D times sooner.
    q = q * scale

    # How well does each key answer each query? One dot product for every pair.
    scores = q @ k.mT  # (…, H, T, D) @ (…, H, D, S) -> (…, H, T, S)

    # Add the part of the score that does not depend on content, such as ALiBi's distance penalty.
    if bias is not None:
        scores = scores + bias

    # Forbidden keys score −∞: exp(−∞) = 0, so they get no weight, and the others share all of it. In a text these are
    # the later keys: `allowed` is a lower triangle, in which query t sees keys 0 to t.
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)

    # From scores to weights that sum to 1 over the keys. torch subtracts each row's maximum first,
    # which changes nothing but keeps exp from overflowing; float32 keeps small weights from vanishing.
    weights = upcast(scores).softmax(-1).to(v.dtype)

    # Drop some weights at random and scale the rest by 1/(1-p), so that the expected weight is unchanged.
    weights = F.dropout(weights, dropout_p)

    # The weighted mean of the values.
    return weights @ v  # (…, H, T, S) @ (…, H, S, Dv) -> (…, H, T, Dv)


@form("einsum")
@attention_function
def einsum(
    q: Query,
    k: Key,
    v: Value,
    allowed: Allowed,
    bias: Bias,
    scale: float,
    dropout_p: float,
) -> Output:
    """The same in index notation: it names the axes that are summed and those that stay."""
    scores = masked(torch.einsum("...td,...sd->...ts", q * scale, k), allowed, bias)  # float32
    weights = F.dropout(scores.softmax(-1).to(v.dtype), dropout_p)
    return torch.einsum("...ts,...sd->...td", weights, v)


@form("bmm")
@by_chunks("softmax")
@attention_function
def bmm(
    q: Query,
    k: Key,
    v: Value,
    allowed: Allowed,
    bias: Bias,
    scale: float,
    dropout_p: float,
) -> Output:
    """The same with batch and heads folded into one axis, N = … × H.

    baddbmm multiplies, scales and adds in one pass. It adds one matrix: the bias or 0, and −∞ for forbidden keys.
    """
    *lead, T, _ = q.shape
    S = k.shape[-2]
    q, k, v = (t.flatten(0, -3) for t in (q, k, v))  # (…, H, T, D) -> (N, T, D)
    added = masked(q.new_zeros(T, S) if bias is None else bias, allowed).to(q.dtype)
    if added.ndim > 2:  # (…, H, T, S) -> (N, T, S)
        added = added.expand(*lead, T, S).flatten(0, -3)
    scores = torch.baddbmm(added, q, k.mT, alpha=scale)  # (N, T, S)
    weights = F.dropout(upcast(scores).softmax(-1).to(v.dtype), dropout_p)
    return torch.bmm(weights, v).unflatten(0, lead)  # (N, T, S) @ (N, S, Dv) -> (…, H, T, Dv)


@form("loop")
@attention_function
def loop(
    q: Query,
    k: Key,
    v: Value,
    allowed: Allowed,
    bias: Bias,
    scale: float,
    dropout_p: float,
) -> Output:
    """The same one query at a time. In float64 it is the reference for the other forms."""
    added = masked(q.new_zeros(*q.shape[:-1], k.shape[-2]), allowed, bias)  # (…, H, T, S): 0, the bias, or −∞
    rows = [v.new_zeros(*q.shape[:-2], 0, v.shape[-1])]  # so that T = 0 has a shape too
    for t in range(q.shape[-2]):
        scores = (q[..., t : t + 1, :] * scale * k).sum(-1) + added[..., t, :]  # (…, H, S)
        weights = F.dropout(scores.softmax(-1).to(v.dtype), dropout_p)
        rows.append((weights.unsqueeze(-1) * v).sum(-2, keepdim=True))  # (…, H, 1, Dv)
    return torch.cat(rows, -2)


@form("sdpa")
@by_kernel()
@by_chunks("softmax")
def sdpa(
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
    """The same at full speed, by torch's fused kernels.

    They never write the (T, S) matrix (Dao et al. 2022). Short texts on a CPU go to `bmm`: there the kernels save no
    time, and the matrix is small.
    """
    function = bmm if prefers_plain_products(q, k) else fused
    return function(q, k, v, mask=mask, bias=bias, is_causal=is_causal, dropout_p=dropout_p, scale=scale)


SOFTMAX = ("matmul", "einsum", "bmm", "loop", "sdpa")  # forms that compute the same


@form("softmax1")
@by_kernel(one_more=True)
@by_chunks("softmax", one_more=True)
@from_weights
def softmax1(scores: Scores) -> Scores:
    """Softmax with 1 added to its denominator: a head may attend to nothing (Miller 2023)."""
    return F.pad(scores, (0, 1)).softmax(-1)[..., :-1]  # 1 = exp(0): one more key, of score 0 and value zero


@form("sigmoid")
@by_chunks("sigmoid")
@from_weights
def sigmoid(scores: Scores) -> Scores:
    """σ(score − ln n), n the number of visible keys (Ramapuram et al. 2024, eq. 3).

    Their n is the length of the text. Keys do not compete: a row may sum to less or more than 1.
    """
    n = (scores > -torch.inf).sum(-1, keepdim=True)
    return torch.sigmoid(scores - n.to(scores.dtype).log())


@form("sparsemax")
@by_chunks("sparsemax")
@from_weights
def sparsemax(scores: Scores) -> Scores:
    """The point of the simplex nearest to the scores: many weights are exactly 0.

    (Martins & Astudillo 2016, alg. 1.) That is max(0, score − τ), with τ = (sum of the scores above τ − 1) ÷ their
    number, so that the row sums to 1.
    """
    ordered = scores.sort(-1, descending=True).values
    number = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    summed = cumulative_sum(ordered, -1)
    above = ordered * number + 1 > summed  # True for the largest scores of each row, those that keep a weight
    tau = (ordered.masked_fill(~above, 0).sum(-1, keepdim=True) - 1) / above.sum(-1, keepdim=True)
    return (scores - tau).clamp(min=0)


@form("stick")
@by_chunks("stick")
@from_weights
def stick(scores: Scores) -> Scores:
    """Stick-breaking: each key takes a share σ(score) of the weight that later keys leave.

    (Tan et al. 2025.) The weight of s is σ(z_s) Π (1 − σ(z_r)) over the keys r between s and the query; the query's own
    key takes none. The nearest key comes first, which tells the order without positions. The rest goes to no key.
    """
    T, S = scores.shape[-2:]
    earlier = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T - 1)
    scores = scores.masked_fill(~earlier, -torch.inf)
    left = F.logsigmoid(-scores)  # ln of the share that a key leaves: 0 for a hidden key
    after = cumulative_sum(left.flip(-1), -1).flip(-1) - left  # the sum over later keys: ln of their rest
    return (F.logsigmoid(scores) + after).exp()


def softcap(cap: float) -> AttentionFunction:
    """Return softmax attention whose scores become cap · tanh(score / cap) before mask and bias.

    (Gemma 2, 2024, section 2.) Scores lie within ±cap; far outside, gradients vanish.
    """
    return by_chunks("softcap", cap=cap)(from_weights(lambda scores: scores.softmax(-1), cap))
