"""Products of queries and keys whose channels fade on the way from one to the other.

Each channel of a key is multiplied by the share of it that is left at the query, a product of decays α from 0 to 1. No
factor of any step exceeds 1, however strong the decay: recurrent.py has a state that fades so.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from model.cpu import is_recorded

CHUNK = 32
"""The tokens of a chunk, whose writes solve one triangular system; a power of two."""
Chunks = Float[Tensor, "n N C D"]
Fading = Float[Tensor, "n N C _"]
BLOCK = 128
"""The queries for which faded_scores() fades all earlier keys once; a power of two."""
SMALL = 1024
"""Pairs of a query and a key up to which faded_scores() is its definition."""


def faded_scores(
    q: Float[Tensor, "*lead T D"],
    k: Float[Tensor, "*lead S D"],
    total: Float[Tensor, "*lead S D"],
) -> Float[Tensor, "*lead T S"]:
    """Return Σ_n q_tn k_sn exp(P_tn - P_sn).

    total: P, the running sum of ln α of each channel over the positions, in float64 where there is one; the queries are
        at the last of these. The score of a later key is without meaning, for causality hides it.
    """
    T = q.shape[-2]
    S = k.shape[-2]
    if is_recorded() or T * S <= SMALL:
        # A later key has a positive difference, whose exponential could overflow.
        left = (total[..., S - T :, None, :] - total[..., None, :, :]).clamp(max=0).to(q.dtype).exp()  # (…, T, S, D)
        return (q[..., None, :] * k[..., None, :, :] * left).sum(-1)

    # Pad the queries to blocks, whose first one says how much the keys before it have faded.
    size = min(BLOCK, 1 << (T - 1).bit_length())
    parts = []
    for first in range(0, T, size):
        count = min(size, T - first)
        begin = S - T + first  # the position of the first query
        rows = slice(begin, begin + count)
        start = total[..., begin : begin + 1, :]
        queries = q[..., first : first + count, :]
        faded = (total[..., rows, :] - start).to(q.dtype).exp() * queries
        before = faded @ ((start - total[..., :begin, :]).to(q.dtype).exp() * k[..., :begin, :]).mT
        inside = products_inside(queries, k[..., rows, :], total[..., rows, :], size)
        parts.append(F.pad(torch.cat((before, inside), -1), (0, T - first - count)))
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


def products_inside(
    q: Float[Tensor, "*lead C D"],
    k: Float[Tensor, "*lead C D"],
    total: Float[Tensor, "*lead C D"],
    size: int,
) -> Float[Tensor, "*lead C C"]:
    """Return the products of each query with its own and earlier keys of its block.

    By halves: the queries of the late half of 2m tokens meet the keys of the early half. The share left is that from
    the key to the middle, times that from the middle to the query.

    size: the tokens of a whole block.
    """
    C = q.shape[-2]
    pad = (0, 0, 0, size - C)
    # Padding fades no more than the last token.
    q = F.pad(q, pad)
    k = F.pad(k, pad)
    total = torch.cat((total, total[..., -1:, :].expand(*total.shape[:-2], size - C, -1)), -2)
    products = (q * k).sum(-1)[..., None, None]  # (…, size, 1, 1): of each token with itself
    m = 1
    while m < size:
        early_k, _ = halves(k, m)
        _, late_q = halves(q, m)
        early, late = halves(total, m)
        middle = early[..., -1:, :]
        keys = (middle - early).to(q.dtype).exp() * early_k
        across = (late - middle).to(q.dtype).exp() * late_q @ keys.mT  # (…, size/2m, m, m)
        first, second = products.unflatten(-3, (-1, 2)).unbind(-3)
        products = torch.cat((F.pad(first, (0, m)), torch.cat((across, second), -1)), -2)
        m *= 2
    return products[..., 0, :C, :C]


def split_chunks(x: Float[Tensor, "*lead T D"]) -> Chunks:
    """Cut the text into chunks, the last one padded with zeros.

    Padding neither fades nor writes: its ln α, keys and values are 0.
    """
    missing = -x.shape[-2] % CHUNK
    whole = F.pad(x, (0, 0, 0, missing)) if missing else x
    return whole.flatten(0, -3).unflatten(-2, (-1, CHUNK))  # (…, H, T, D) -> (n, N, C, D)


def left_between(log_decay: Fading, landmark: int | Int[Tensor, "C 1"]) -> Fading:
    """Return Π α between token t and its landmark: the share left of the earlier one's state.

    ln of it is a sum of ln α, not a difference of two running sums. No factor exceeds 1, and strong decays cost no
    precision.
    """
    token = torch.arange(CHUNK, device=log_decay.device)
    t = token[:, None]
    # A row for each t, True for the tokens after the earlier of t and its landmark, up to the later.
    between = (token > t.clamp(max=landmark)) & (token <= t.clamp(min=landmark))  # (C, C)
    return (between.to(log_decay.dtype) @ log_decay).exp()


def faded_products(queries: list[Chunks], k: Chunks, log_decay: Fading) -> list[Float[Tensor, "n N C C"]]:
    """Return the products of each of `queries` with its own and earlier keys.

    Each channel of a key is multiplied by the share of it that is left at the query.
    """
    if log_decay.shape[-1] == 1:
        # All channels fade alike, so the share is one factor of the score.
        lower = torch.ones(CHUNK, CHUNK, dtype=k.dtype, device=k.device).tril()
        between = lower @ (log_decay * lower.tril(-1))  # (C, C) @ (…, C, C): the sum of ln α after s up to t
        left = lower * between.exp()
        return [left * (q @ k.mT) for q in queries]
    # The channels fade at different rates: go by halves. In a block of 2m tokens the queries of the late half meet the
    # keys of the early half. The share left is that from the key to the middle, times that from the middle to the
    # query: one product serves all pairs, and no factor exceeds 1. The blocks of m tokens gave the products inside the
    # halves.
    token = torch.arange(CHUNK, device=k.device)[:, None]
    products = [(q * k).sum(-1)[..., None, None] for q in queries]  # (…, C, 1, 1): of each token with itself
    for m in (2**i for i in range(CHUNK.bit_length() - 1)):
        middle = token // (2 * m) * 2 * m + m - 1
        early, late = halves(left_between(log_decay, middle), m)  # (…, C/2m, m, D)
        keys = (early * halves(k, m)[0]).mT  # (…, C/2m, D, m)
        for i, q in enumerate(queries):
            across = (late * halves(q, m)[1]) @ keys  # (…, m, D) @ (…, D, m) -> (…, C/2m, m, m)
            # Two blocks of m and the products across them make a block of 2m: [[first, 0], [across, second]].
            first, second = products[i].unflatten(-3, (-1, 2)).unbind(-3)
            lower = torch.cat((across, second), -1)  # (…, C/2m, m, 2m)
            products[i] = torch.cat((F.pad(first, (0, m)), lower), -2)  # (…, C/2m, 2m, 2m)
    return [product.squeeze(-3) for product in products]


def halves(x: Float[Tensor, "*lead C D"], m: int) -> tuple[Float[Tensor, "*lead _ m D"], ...]:
    """Return the early and the late half of every 2m tokens: (…, C, D) -> twice (…, C/2m, m, D)."""
    return x.unflatten(-2, (-1, 2, m)).unbind(-3)
