"""More modifiers of queries, keys and values: +joint_norm, +conv, +value_embedding.

They act after the modifiers of modifiers.py.
"""

import torch
from torch import nn

from common.errors import SettingsError
from model.attention.call import Key, Query, Value
from model.attention.context import AttentionContext
from model.attention.layer import NORM_EPS, Heads, MultiHeadAttention, Stream
from model.attention.modifiers import Modifier, PerHead
from model.attention.registry import modifier
from model.config import AttentionConfig
from model.layers import RMSNorm


@modifier("joint_norm", changes="keys")
class JointNorm(Modifier):
    """RMS norm of queries, and of keys, over all heads at once (OLMo 2, 2025).

    It takes the place of QK-norm per head.
    """

    replaces_qk_norm = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__()
        self.q_norm = RMSNorm(layer.query_heads * layer.head_dim, eps=NORM_EPS)
        self.k_norm = RMSNorm(layer.kv_heads * layer.head_dim, eps=NORM_EPS)

    def mix(
        self,
        q: Query,
        k: Key,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Heads:
        return self.normalize(q, self.q_norm), self.normalize(k, self.k_norm), v

    def normalize(self, heads: Query, norm: RMSNorm) -> Query:
        rows = heads.transpose(1, 2)  # (B, n, T, D) -> (B, T, n, D)
        return norm(rows.flatten(2)).view(rows.shape).transpose(1, 2)  # the norm is over n·D


@modifier("conv", changes="keys")
class Conv(Modifier):
    """Short convolution of queries, keys and values over four tokens.

    Σ_j w_j x_{t-j}, w per channel. w starts at x_t alone. In forms with a state SiLU follows, as in Gated DeltaNet
    (Yang et al. 2025) and Kimi Linear (2025); in others it stays linear, as in Canon layers (Allen-Zhu 2025). QK-norm
    comes before.
    """

    width = 4
    needs_doc_starts = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__()
        channels = (layer.query_heads + 2 * layer.kv_heads) * layer.head_dim
        identity = torch.tensor([0.0] * (self.width - 1) + [1.0])
        self.weight = nn.Parameter(identity.repeat(channels, 1))  # (channels, 4), the latest token last
        self.activation = nn.Identity() if layer.has_kv_cache else nn.SiLU()

    def mix(
        self,
        q: Query,
        k: Key,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Heads:
        # One convolution for all n = H + 2 Hkv heads. The last tap is the token's own, the one before it the previous
        # token's, and so on.
        new = torch.cat((q, k, v), 1)
        *others, own = self.weight.to(q.dtype).view(-1, 1, q.shape[-1], self.width).unbind(-1)  # (n, 1, D) each
        mixed = own * new
        earlier = ctx.previous(self.layer_idx, "conv", new, self.width - 1)
        for tap, before in zip(reversed(others), earlier, strict=True):
            mixed = mixed + tap * before
        return self.activation(mixed).split((q.shape[1], k.shape[1], v.shape[1]), 1)


@modifier("value_embedding", changes="values")
class ValueEmbedding(Modifier):
    """v ← v + 2σ(x w) e per head, with e the token's embedding (modded-nanogpt, 2024).

    The layer has its own table of embeddings, which brings back the token's identity however much the stream has mixed
    it. The table has V rows as wide as a token's values; a token reads one. w starts at 0; nanochat computes the gate
    from the first few channels of x.
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__()
        vocab_size = getattr(config, "vocab_size", None)
        if vocab_size is None:
            problem = f"attention={config.attention}: value_embedding needs the number of token ids"
            raise SettingsError(problem, "make the layer with a GPTConfig that has vocab_size")
        self.gate = PerHead(config.n_embd, layer.kv_heads)
        self.embedding = nn.Embedding(vocab_size, layer.kv_heads * layer.head_dim)

    def mix(
        self,
        q: Query,
        k: Key,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Heads:
        if ctx.tokens is None:
            raise ValueError("value_embedding needs the token ids of x: say them by AttentionContext(tokens=…).")
        # (B, T, Hkv·D) -> (B, T, Hkv, D) -> (B, Hkv, T, D)
        e = self.embedding(ctx.tokens).unflatten(-1, (v.shape[1], -1)).transpose(1, 2).to(v.dtype)
        return q, k, v + 2 * torch.sigmoid(self.gate(x))[..., None] * e
