"""Modifiers of what queries, keys and values are made of: +conv, +joint_norm, +value_embedding.

They act after those of modifiers.py, which may change the number of queries.
"""

import torch
from torch import nn

from common.errors import SettingsError
from model.attention.contract import Key, Query, Value
from model.attention.layer import NORM_EPS, AttentionContext, MultiHeadAttention, Stream
from model.attention.modifiers import Modifier, PerHead
from model.attention.registry import modifier
from model.config import AttentionConfig
from model.layers import RMSNorm


@modifier("joint_norm", changes="keys")
class JointNorm(Modifier):
    """Queries, and keys, are RMS-normalised over all heads at once, in place of each head by itself (OLMo 2, 2025)."""

    replaces_qk_norm = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.q_norm = RMSNorm(layer.query_heads * layer.head_dim, eps=NORM_EPS)
        self.k_norm = RMSNorm(layer.kv_heads * layer.head_dim, eps=NORM_EPS)

    def mix(self, q: Query, k: Key, v: Value, x: Stream, ctx: AttentionContext) -> tuple[Query, Key, Value]:
        return self.normalize(q, self.q_norm), self.normalize(k, self.k_norm), v

    def normalize(self, heads: Query, norm: RMSNorm) -> Query:
        rows = heads.transpose(1, 2)  # (B, n, T, D) -> (B, T, n, D)
        return norm(rows.flatten(2)).view(rows.shape).transpose(1, 2)  # normalised as (B, T, n·D)


@modifier("conv", changes="keys")
class Conv(Modifier):
    """Queries, keys and values become Σ_j w_j x_{t-j} over four tokens, w learned for each channel, at first x_t alone.

    In forms with a state SiLU follows, as in Gated DeltaNet (Yang et al. 2025) and Kimi Linear (2025); where there is
    none, it stays linear, as in Canon layers (Allen-Zhu 2025). QK-norm comes before.
    """

    width = 4
    needs_doc_starts = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        channels = (layer.query_heads + 2 * layer.kv_heads) * layer.head_dim
        now_alone = torch.tensor([0.0] * (self.width - 1) + [1.0])
        self.weight = nn.Parameter(now_alone.repeat(channels, 1))  # (channels, 4), the latest token last
        self.activation = nn.Identity() if layer.has_kv_cache else nn.SiLU()

    def mix(self, q: Query, k: Key, v: Value, x: Stream, ctx: AttentionContext) -> tuple[Query, Key, Value]:
        new = torch.cat((q, k, v), 1)
        *others, own = self.weight.to(q.dtype).view(-1, 1, q.shape[-1], self.width).unbind(-1)  # (n, 1, D) each
        mixed = own * new
        earlier = ctx.previous(self.layer_idx, "conv", new, self.width - 1)
        for tap, before in zip(reversed(others), earlier, strict=True):
            mixed = mixed + tap * before
        return self.activation(mixed).split((q.shape[1], k.shape[1], v.shape[1]), 1)


@modifier("value_embedding", changes="values")
class ValueEmbedding(Modifier):
    """v ← v + 2σ(x w) e for each head, e a second embedding of the token, this layer's own (modded-nanogpt, 2024).

    What a token is by itself, however much the stream has mixed it. w begins at 0; nanochat reads it off the first few
    channels of x. The table is as large as V tokens' values, but a token reads one row.
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        vocab_size = getattr(config, "vocab_size", None)
        if vocab_size is None:
            problem = f"attention={config.attention}: value_embedding needs the number of token ids"
            raise SettingsError(problem, "make the layer with a GPTConfig that has vocab_size")
        self.gate = PerHead(config.n_embd, layer.kv_heads)
        self.embedding = nn.Embedding(vocab_size, layer.kv_heads * layer.head_dim)

    def mix(self, q: Query, k: Key, v: Value, x: Stream, ctx: AttentionContext) -> tuple[Query, Key, Value]:
        if ctx.tokens is None:
            raise ValueError("value_embedding needs the token ids of x: say them by Pass(tokens=…).")
        # (B, T, Hkv·D) -> (B, T, Hkv, D) -> (B, Hkv, T, D)
        e = self.embedding(ctx.tokens).unflatten(-1, (v.shape[1], -1)).transpose(1, 2).to(v.dtype)
        return q, k, v + 2 * torch.sigmoid(self.gate(x))[..., None] * e
