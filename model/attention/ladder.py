"""The rungs below multi-head attention, as layers that train.

docs/attention.md climbs them step by step.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from model.attention.contract import named_as
from model.attention.executors import of_steps
from model.attention.functions import head_by_head
from model.attention.layer import Heads, MultiHeadAttention, Stream
from model.attention.registry import FORMS, form
from model.attention.weighting import PLAIN
from model.config import POSITION_SETTINGS, AttentionConfig
from model.layers import Linear
from model.surgery import is_matrix


class OneHead(MultiHeadAttention):
    """A rung with one head as wide as the model."""

    unused_settings = (
        "n_head",
        "n_kv_head",
        "head_size",
        *MultiHeadAttention.unused_settings,
    )

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(replace(config, n_head=1, n_kv_head=None, head_size=None), FORMS["matmul"], layer_idx)


@form("average")
class Average(OneHead):
    """The mean of the values over the past: one head whose scores are all zero.

    RoPE has nothing to rotate, and ALiBi's penalty would make the mean uneven.
    """

    modifiable = ("window",)
    unused_settings = ("qk_norm", *POSITION_SETTINGS, *OneHead.unused_settings)

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(replace(config, position="none"), layer_idx)

    def make_projections(self, config: AttentionConfig) -> None:
        self.v_proj = Linear(config.n_embd, config.n_embd, bias=config.qkv_bias)
        self.o_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def project(self, x: Stream) -> Heads:
        v = self.v_proj(x).unsqueeze(1)  # (B, T, C) -> (B, 1, T, C)
        return torch.zeros_like(v), torch.zeros_like(v), v


@form("simple")
class Simple(OneHead):
    """Every position gathers from the past by likeness.

    The inputs are their own queries, keys and values. It has no weights.
    """

    modifiable = ("window", "rotation")
    unused_settings = ("qk_norm", "qkv_bias", *OneHead.unused_settings)

    def make_projections(self, config: AttentionConfig) -> None:
        self.o_proj = nn.Identity()

    def project(self, x: Stream) -> Heads:
        heads = x.unsqueeze(1)  # (B, T, C) -> (B, 1, T, C)
        return heads, heads, heads


@form("single_head")
class SingleHead(OneHead):
    """One head as wide as the model, with learned queries, keys and values."""


@form("stacked")
class Stacked(MultiHeadAttention):
    """H heads one after the other, each with its own weights, their results side by side.

    Head h owns D rows of each projection. MultiHeadAttention does the same in one product and one reshape, so the two
    share their parameters' names and values: a checkpoint fits both.
    """

    has_plain_weights = True

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(config, named_as(head_by_head, PLAIN, (of_steps(head_by_head),)), layer_idx)

    def project(self, x: Stream) -> Heads:
        if not is_matrix(self.qkv_proj):
            return super().project(x)
        weights = self.qkv_proj.weight.split(self.head_dim)  # (n·D, C) -> n times (D, C)
        biases = [None] * len(weights) if self.qkv_proj.bias is None else self.qkv_proj.bias.split(self.head_dim)
        each = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]  # n times (B, T, D)
        heads = torch.stack(each, 1)  # (B, n, T, D)
        q, k, v = heads.split((self.query_heads, self.kv_heads, self.kv_heads), 1)
        return self.q_norm(q), self.k_norm(k), v
