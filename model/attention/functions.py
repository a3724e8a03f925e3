"""Scaled dot-product attention, step by step: begin with `matmul`.

`einsum`, `bmm`, `loop` and `head_by_head` compute the same in other ways. `weighted` turns the same scores into other
weights, those of weighting.py.

Each is a function of one call:

    call.q          (…, H, T, D)   queries
    call.k          (…, H, S, D)   keys
    call.v          (…, H, S, Dv)  values
    call.scale                     the factor on the products; None: 1/√D
    call.matrix     (…, H, T, S)   a bias to add to the scores, or fewer axes; None: nothing
    call.mask       (…, H, T, S)   True where a query may attend, or fewer axes; None: everywhere
    call.dropout_p                 the probability of dropping a weight, 0 outside training

and returns (…, H, T, Dv). The mask has all that hides a key. weighted() also reads weighting, sink, faded and tilt.

A layer's call has more: causality, windows, documents, keys that several heads share. The function dense() of call.py
turns all of it into mask and matrix, and repeats the keys, before one of these runs. forms.py, and ladder.py for
head_by_head, say which of them a form is; executors.py chooses it, or faster code.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from model.attention.call import Call, Output, scale_of
from model.attention.choice import Scores
from model.attention.fading import faded_scores
from model.layers import upcast


def matmul(call: Call) -> Output:
    """softmax(q kᵀ / √D) v: scaled dot-product attention, one step per line.

    (Vaswani et al. 2017, eq. 1.)
    """
    q = call.q
    k = call.k
    v = call.v

    # A dot product of D independent terms of variance 1 has variance D. The scale, 1/√D, brings it back
    # to 1; without that the softmax would soon saturate on one key, where its gradient vanishes.
    q = upcast(q) * scale_of(call)

    # How well does each key answer each query? One dot product for every pair. Scores are float32 even if queries and
    # keys are not: in half precision the best keys would round to the same score, and in fp16 to infinity.
    scores = q @ upcast(k).mT  # (…, H, T, D) @ (…, H, D, S) -> (…, H, T, S)

    # Add the part of the score that does not depend on content, such as ALiBi's distance penalty.
    if call.matrix is not None:
        scores = scores + call.matrix

    # Forbidden keys score −∞: exp(−∞) = 0, so they get no weight, and the others share all of it. In a text these are
    # the later keys: the mask is a lower triangle, in which query t sees keys 0 to t.
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask, -torch.inf)

    # From scores to weights that sum to 1 over the keys. torch subtracts each row's maximum first,
    # which changes nothing but keeps exp from overflowing.
    weights = scores.softmax(-1).to(v.dtype)

    # Drop some weights at random and scale the rest by 1/(1-p), so that the expected weight is unchanged.
    weights = F.dropout(weights, call.dropout_p)

    # The weighted mean of the values.
    return weights @ v  # (…, H, T, S) @ (…, H, S, Dv) -> (…, H, T, Dv)


def einsum(call: Call) -> Output:
    """The same in index notation: it names the axes that are summed and those that stay."""
    scores = masked(torch.einsum("...td,...sd->...ts", upcast(call.q) * scale_of(call), upcast(call.k)), call)
    weights = F.dropout(scores.softmax(-1).to(call.v.dtype), call.dropout_p)
    return torch.einsum("...ts,...sd->...td", weights, call.v)


def bmm(call: Call) -> Output:
    """The same with batch and heads folded into one axis, N = … × H.

    baddbmm multiplies, scales and adds in one pass.
    """
    q, k, v, added = fold_heads(call)
    scores = torch.baddbmm(added, upcast(q), upcast(k).mT, alpha=scale_of(call))  # (N, T, S)
    weights = F.dropout(scores.softmax(-1).to(v.dtype), call.dropout_p)
    y = torch.bmm(weights, v)  # (N, T, S) @ (N, S, Dv) -> (N, T, Dv)
    return y.unflatten(0, call.q.shape[:-2])  # (N, T, Dv) -> (…, H, T, Dv)


def fold_heads(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values (N, …), and a matrix to add to the scores.

    The matrix, (N, T, S) or (T, S), is the bias or 0, and −∞ for forbidden keys.
    """
    *lead, T, _ = call.q.shape
    S = call.k.shape[-2]
    q, k, v = (t.flatten(0, -3) for t in call[:3])  # (…, H, T, D) -> (N, T, D)
    added = upcast(q.new_zeros(T, S)) if call.matrix is None else call.matrix
    if call.mask is not None:
        added = added.masked_fill(~call.mask, -torch.inf)
    if added.ndim <= 2:
        return q, k, v, added.expand(T, S)
    return q, k, v, added.expand(*lead, T, S).flatten(0, -3)  # (…, H, T, S) -> (N, T, S)


def loop(call: Call) -> Output:
    """The same one query at a time. In float64 it is the reference for the others."""
    q, k, v = (upcast(t) for t in call[:3])
    q = q * scale_of(call)
    added = masked(q.new_zeros(*q.shape[:-1], k.shape[-2]), call)  # (…, H, T, S): 0, the bias, or −∞
    rows = [v.new_zeros(*q.shape[:-2], 0, v.shape[-1])]  # so that T = 0 has a shape too
    for t in range(q.shape[-2]):
        scores = (q[..., t : t + 1, :] * k).sum(-1) + added[..., t, :]  # (…, H, S)
        weights = F.dropout(scores.softmax(-1), call.dropout_p)
        rows.append((weights.unsqueeze(-1) * v).sum(-2, keepdim=True))  # (…, H, 1, Dv)
    return torch.cat(rows, -2).to(call.v.dtype)


def head_by_head(call: Call) -> Output:
    """The same for each head separately, with the results stacked."""
    # One matrix for each head: 0 or the bias, and −∞ for forbidden keys.
    added = masked(upcast(call.q).new_zeros(*call.q.shape[:-1], call.k.shape[-2]), call)  # (…, H, T, S)
    each = zip(*(t.split(1, -3) for t in (*call[:3], added)), strict=True)  # (…, 1, T, D) and so on
    heads = [matmul(call._replace(q=q, k=k, v=v, matrix=one, mask=None)) for q, k, v, one in each]
    return torch.cat(heads, -3)  # H times (…, 1, T, D) -> (…, H, T, D)


def weighted(call: Call, products: Tensor | None = None) -> Output:
    """The same with any weights of the scores, and a sink if the call has one.

    products: q kᵀ times the scale, (…, H, T, S), if it is there already.
    """
    weights = F.dropout(weights_of(call, products).to(call.v.dtype), call.dropout_p)
    return weights @ call.v


def weights_of(call: Call, products: Tensor | None = None) -> Scores:
    """Return the weights of a call, (…, H, T, S)."""
    if products is None:
        q = upcast(call.q) * scale_of(call)
        k = upcast(call.k)
        products = q @ k.mT if call.faded is None else faded_scores(q, k, call.faded)
    scores = masked(call.weighting.squashed(products), call)
    if call.sink is None:
        weights = call.weighting.weights(scores)
    else:
        # One more key takes weight from the others, and gives nothing. Its score is (H,): with_constant_sink() has
        # replaced one for each query. It comes here if its place among the keys changes nothing: for a weighting that
        # counts keys with_matrices() has made it a real key, in front.
        sink = call.sink[:, None, None].expand(*scores.shape[:-1], 1)
        weights = call.weighting.weights(torch.cat((scores, sink), -1))[..., :-1]
    if call.tilt is None:
        return weights
    # Skip the rest at first. The form parallax (local.py) has a local line in place of a local mean: over the weights,
    # E[v] - Cov(r·k, v).
    along = upcast(call.tilt) @ upcast(call.k).mT  # (…, H, T, S)
    weighted_along = weights * along
    return weights * (1 + weighted_along.sum(-1, keepdim=True)) - weighted_along


def masked(scores: Float[Tensor, "..."], call: Call) -> Float[Tensor, "..."]:
    """Return scores plus the bias, and −∞ for forbidden keys."""
    if call.matrix is not None:
        scores = scores + call.matrix
    return scores if call.mask is None else scores.masked_fill(~call.mask, -torch.inf)
