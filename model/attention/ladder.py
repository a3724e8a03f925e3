"""The rungs that lead from an average to multi-head attention. Each adds one idea to the one before."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from model.attention.contract import Allowed, Bias, Key, Output, Query, Stream, Value, obeys_contract
from model.attention.functional import matmul
from model.attention.layer import CausalSelfAttention, MultiHeadAttention
from model.attention.registry import form
from model.config import AttentionConfig

# What rungs with one head of width n_embd make nothing of.
OF_HEADS = ("n_head", "n_kv_head", "head_size", *CausalSelfAttention.ignores)

# Rung 1: the average of the past, four times the same.


def average_loop(x: Stream) -> Stream:
    """Position t becomes the mean of positions 0 … t: a loop that says so."""
    return torch.stack([x[..., : t + 1, :].mean(-2) for t in range(x.shape[-2])], dim=-2)


def average_rows(x: Stream) -> Stream:
    """A mean is a product with weights: 1/(t+1) for the past, 0 for the future, a row at a time."""
    rows = []
    for t in range(x.shape[-2]):
        row = torch.zeros(x.shape[-2], dtype=x.dtype, device=x.device)
        row[: t + 1] = 1 / (t + 1)
        rows.append(row @ x)  # (T,) @ (…, T, C) -> (…, C)
    return torch.stack(rows, dim=-2)


def average_triangle(x: Stream) -> Stream:
    """All rows at once are a lower triangle of ones, each row divided by its sum."""
    triangle = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype, device=x.device).tril()
    return triangle / triangle.sum(-1, keepdim=True) @ x  # (T, T) @ (…, T, C) -> (…, T, C)


def average_softmax(x: Stream) -> Stream:
    """The same triangle as a softmax: every key of the past scores 0, every later one −∞.

    From here on only the scores change: they will come from the content.
    """
    T = x.shape[-2]
    future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    scores = torch.zeros(T, T, dtype=x.dtype, device=x.device).masked_fill(future, -torch.inf)
    return torch.softmax(scores, dim=-1) @ x  # (T, T) @ (…, T, C) -> (…, T, C)


@form("average")
class Averaging(CausalSelfAttention):
    """`attention=average`: the mean of the values over whatever the mask allows, as in average_softmax().

    One head whose scores are all zero: RoPE has nothing to rotate, and ALiBi's penalty would make the mean uneven.
    """

    ignores = ("position", *OF_HEADS)

    def __init__(self, config: AttentionConfig):
        super().__init__(replace(config, position="none"), 1, 1, config.n_embd, matmul)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def project(self, x: Stream) -> tuple[Query, Key, Value]:
        v = self.v_proj(x).unsqueeze(-3)  # (…, T, C) -> (…, 1, T, C)
        nothing = torch.zeros_like(v)
        return nothing, nothing, v

    def merge(self, y: Output) -> Stream:
        return self.o_proj(y.squeeze(-3))  # (…, 1, T, C) -> (…, T, C)


# Rung 2: scores from the content, without a weight to train.


def simple_attention(x: Stream) -> Stream:
    """Every position gathers from all that resemble it: the inputs are their own queries, keys and values."""
    scores = x / math.sqrt(x.shape[-1]) @ x.transpose(-2, -1)  # (…, T, C) @ (…, C, T) -> (…, T, T)
    return torch.softmax(scores, dim=-1) @ x  # (…, T, T) @ (…, T, C) -> (…, T, C)


@form("simple")
class SimpleAttention(CausalSelfAttention):
    """`attention=simple`: simple_attention() over the past. No weights, hence no projections and no QK-norm."""

    places = ("window", "rotation")
    ignores = OF_HEADS

    def __init__(self, config: AttentionConfig):
        super().__init__(config, 1, 1, config.n_embd, matmul)

    def project(self, x: Stream) -> tuple[Query, Key, Value]:
        heads = x.unsqueeze(-3)  # (…, T, C) -> (…, 1, T, C)
        return heads, heads, heads

    def merge(self, y: Output) -> Stream:
        return y.squeeze(-3)  # (…, 1, T, C) -> (…, T, C)


# Rung 3: queries, keys and values that can be trained.


@form("single_head")
class SingleHead(MultiHeadAttention):
    """`attention=single_head`: one head of size C, which learns what to ask, what to answer and what to say."""

    ignores = OF_HEADS

    def __init__(self, config: AttentionConfig):
        super().__init__(replace(config, n_head=1, n_kv_head=None, head_size=None), attend=matmul)


# Rung 4: several heads, each with its own subspace and its own weights.


@form("stacked")
class StackedHeads(MultiHeadAttention):
    """`attention=stacked`: H heads one after the other, their results side by side.

    Head h owns rows h·D … (h+1)·D of each projection. MultiHeadAttention does the same in one product
    and one reshape, so the two share their parameters' names and values: a checkpoint fits both.
    """

    def __init__(self, config: AttentionConfig):
        super().__init__(config, attend=head_by_head)

    def products(self, x: Stream) -> tuple[Float[Tensor, "*lead T _"], ...]:
        """Return the products of each head with its own rows of the weights, side by side."""
        if not isinstance(self.q_proj, nn.Linear):  # packed for decoding: the rows of all heads are one product
            return super().products(x)
        joined = []
        for projection, n in (self.q_proj, self.n_head), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads):
            weights = projection.weight.chunk(n)  # (n·D, C) -> n times (D, C)
            biases = [None] * n if projection.bias is None else projection.bias.chunk(n)
            joined.append(torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1))
        return tuple(joined)


@obeys_contract
def head_by_head(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """The attention of each head by itself, the results stacked."""
    if q.shape[-2] == 1:  # decoding, where H small calls take longer than all else: the heads at once
        return matmul(q, k, v, mask=allowed, bias=bias, dropout_p=dropout_p, scale=scale)

    def of_head(t: Tensor | None, h: int) -> Tensor | None:
        return t if t is None or t.ndim < 3 or t.shape[-3] == 1 else t[..., h : h + 1, :, :]  # or the same for all

    heads = []
    for h in range(q.shape[-3]):
        one, mask = [t[..., h : h + 1, :, :] for t in (q, k, v)], of_head(allowed, h)
        heads.append(matmul(*one, mask=mask, bias=of_head(bias, h), dropout_p=dropout_p, scale=scale))
    return torch.cat(heads, dim=-3)  # H times (…, 1, T, D) -> (…, H, T, D)
