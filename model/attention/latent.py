"""Smaller caches: fewer numbers for keys and values.

mla keeps one latent vector for the keys and values of all heads; gta and k_eq_v one vector for a head's key and value.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from common.errors import SettingsError
from model.attention.call import Call, Output, Query, Value, repeat_heads
from model.attention.context import AttentionContext
from model.attention.layer import NORM_EPS, Heads, Keys, MultiHeadAttention, NewKeys, NewValues, Stream
from model.attention.registry import form
from model.config import AttentionConfig
from model.layers import Linear, RMSNorm, rms_norm
from model.rope import Pope, Rope, rotate
from model.surgery import is_matrix


def refuse_pope(config: AttentionConfig) -> Pope:
    """Raise SettingsError: the form's keys are kept, or made, at one width."""
    problem = f"attention={config.attention}: model.position=pope doubles the width of keys, which {config.form} shares"
    raise SettingsError(problem, "set model.position=rope, or choose another form")


class SplitKeys(MultiHeadAttention):
    """Keys of two parts: a rotated one for all heads, then each head's own."""

    modifiable = ("window", "rotation", "queries", "scores", "result")
    turned: int
    """The number of channels of the first part."""

    def make_rope(self, config: AttentionConfig) -> Rope:
        return Rope.of(replace(config, rope_fraction=1.0), self.turned)

    def make_pope(self, config: AttentionConfig) -> Pope:
        return refuse_pope(config)

    def per_head(self, y: Stream) -> Query:
        return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def join(self, turned: Float[Tensor, "B 1 S half"], own: Float[Tensor, "B n S _"]) -> Float[Tensor, "B n S _"]:
        return torch.cat((turned.expand(*own.shape[:-1], -1), own), -1)


@form("mla")
class LatentAttention(SplitKeys):
    """Keys and values of all heads are made from one latent vector c of a token.

    (DeepSeek-V2, 2024, section 2.1.)

        c = norm(x W_c),  k_h = [RoPE(x W_r), c W_k,h],  v_h = c W_v,h,  q_h = [RoPE(x W_s,h), x W_q,h]

    The cache keeps c and the rotated key alone: latent_size + D / 2 numbers a token, where H heads keep 2 H D.
    A rotation does not commute with W_k, hence the part of D / 2 channels that is rotated, one key for all heads.

    With a cache W_k moves to the queries and W_v to the result, because qᵀ (W_k c) = (W_kᵀ q)ᵀ c. That leaves
    multi-query attention with keys [RoPE, c] and values c.
    """

    unused_settings = (
        "n_kv_head",
        "qk_norm",
        "rope_fraction",
        "rope_proportional",
        "score_softcap",
        "allow_neg_eigval",
    )

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        D = config.head_channels
        self.latent = config.latent_size or min(4, config.n_head) * D
        self.turned = max(2, D // 4 * 2)  # half of D, in pairs of channels
        super().__init__(replace(config, n_kv_head=None), layer_idx=layer_idx)
        self.scale = (self.turned + D) ** -0.5  # also of queries that W_k has made wider

    def make_projections(self, config: AttentionConfig) -> None:
        C = config.n_embd
        width = self.n_head * self.head_dim
        q_width = self.query_heads * (self.turned + self.head_dim)
        self.q_proj = Linear(C, q_width, bias=config.qkv_bias)
        self.k_proj = Linear(C, self.turned, bias=config.qkv_bias)
        self.c_proj = Linear(C, self.latent, bias=config.qkv_bias)
        self.c_norm = RMSNorm(self.latent, eps=NORM_EPS)
        self.k_up = Linear(self.latent, width, bias=False)
        self.v_up = Linear(self.latent, width, bias=False)
        self.o_proj = Linear(width, C, bias=config.bias)

    def project(self, x: Stream) -> Heads:
        """Return the queries, one key [rotated, c], and the values of all heads.

        The queries are (B, H, T, turned + D), the key is (B, 1, T, turned + latent).
        """
        q = self.q_proj(x).unflatten(-1, (self.query_heads, -1)).transpose(1, 2)
        # c stands in the key's row, because the cache keeps both together.
        c = self.c_norm(self.c_proj(x))
        k = torch.cat((self.k_proj(x), c), -1).unsqueeze(1)  # (B, T, C) -> (B, 1, T, C)
        v = self.per_head(self.v_up(c))
        return q, k, v

    def update_cache(
        self,
        k: NewKeys,
        v: NewValues,
        ctx: AttentionContext,
    ) -> tuple[Keys, Value]:
        # One vector a token serves all heads, as key and, without the rotated part, as value. v is not kept.
        assert ctx.cache is not None
        latent = ctx.cache.append(self.layer_idx, "latent", k, self.window)
        return latent, latent[..., self.turned :]

    def make_call(self, q: Query, k: Keys, v: Value, ctx: AttentionContext) -> Call:
        """Make the keys of all heads, or with a cache move W_k to the queries."""
        if not self.moves_weights(ctx):
            # Training has as many queries as keys: scores of D channels are cheaper than of latent_size.
            turned, c = k.split((self.turned, self.latent), -1)
            of_heads = self.per_head(self.k_up(c[:, 0]))
            k = self.join(turned, of_heads)
            if ctx.cache is not None:
                v = self.per_head(self.v_up(c[:, 0]))
        else:
            # Decoding has one query and many keys: move the query, and make no key.
            of_latent = q[..., self.turned :] @ self.of_queries(self.k_up)  # (B, H, T, D) -> (B, H, T, latent)
            q = torch.cat((q[..., : self.turned], of_latent), -1)
        return super().make_call(q, k, v, ctx)

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        # Where W_k is moved the values are c, so the result is a mean of c: W_v makes it one of values.
        y = super().attend(call, x, ctx)
        if not self.moves_weights(ctx):
            return y
        return y @ self.of_queries(self.v_up).mT  # (B, H, T, latent) -> (B, H, T, D)

    def moves_weights(self, ctx: AttentionContext) -> bool:
        """Return whether W_k and W_v multiply queries and results, not the cached vectors."""
        return ctx.cache is not None and is_matrix(self.k_up) and is_matrix(self.v_up)

    def of_queries(self, up: Linear) -> Float[Tensor, "H D latent"]:
        """Return the weights for each query head; with diff two of them share one."""
        weight = up.weight.view(self.n_head, -1, self.latent)  # (H·D, latent) -> (H, D, latent)
        return repeat_heads(weight, self.query_heads)

    @property
    def score_channels(self) -> int:
        """The rotated channels, and D of each head."""
        return self.turned + self.head_dim


@form("gta")
class GroupedTied(SplitKeys):
    """A key/value head keeps one vector for both (Zadouri et al. 2025, grouped tied attention).

        v_h = x W_h,  k_h = [RoPE(x W_r), the later half of v_h],  q_h = [RoPE(x W_s,h), x W_q,h]

    A value must not be rotated. So half of each key is one rotated vector for all heads. The cache keeps Hkv D + D / 2
    numbers a token; grouped-query attention keeps 2 Hkv D.
    """

    unused_settings = ("qk_norm", "rope_fraction", "rope_proportional", *MultiHeadAttention.unused_settings)

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        self.turned = max(1, config.head_channels // 2)
        super().__init__(config, layer_idx=layer_idx)

    def make_projections(self, config: AttentionConfig) -> None:
        C = config.n_embd
        D = self.head_dim
        self.q_proj = Linear(C, self.query_heads * D, bias=config.qkv_bias)
        self.k_proj = Linear(C, self.turned, bias=config.qkv_bias)
        self.v_proj = Linear(C, self.kv_heads * D, bias=config.qkv_bias)
        self.o_proj = Linear(self.n_head * D, C, bias=config.bias)

    def project(self, x: Stream) -> Heads:
        """Return the queries, the keys [rotated, half of v], and the values."""
        q = self.per_head(self.q_proj(x))
        v = self.per_head(self.v_proj(x))
        turned = self.k_proj(x).unsqueeze(1)  # (B, T, half) -> (B, 1, T, half)
        return q, self.join(turned, v[..., self.turned :]), v

    def update_cache(
        self,
        k: NewKeys,
        v: NewValues,
        ctx: AttentionContext,
    ) -> tuple[Keys, Value]:
        # The rotated half is equal in all heads, and the other half is in the values: keep one row of the first.
        assert ctx.cache is not None
        turned = ctx.cache.append(self.layer_idx, "turned", k[:, :1, :, : self.turned], self.window)
        v = ctx.cache.append(self.layer_idx, "tied", v, self.window)
        return self.join(turned, v[..., self.turned :]), v


@form("k_eq_v")
class KeysAreValues(MultiHeadAttention):
    """Keys and values are one vector of a token (Gemma 4, 2026, in its full layers).

        u_h = x W_h,  v_h = norm(u_h),  k_h = RoPE(γ v_h)

    Both have the root mean square of QK-norm, and keys its weights γ. Without QK-norm v = u and k = RoPE(u).
    The cache keeps v alone, half of what other forms keep, and makes the keys again: a token then rotates all of them.
    """

    modifiable = ("window", "rotation", "queries", "scores", "result")

    def make_pope(self, config: AttentionConfig) -> Pope:
        return refuse_pope(config)

    def make_projections(self, config: AttentionConfig) -> None:
        D = self.head_dim
        self.q_proj = Linear(config.n_embd, self.query_heads * D, bias=config.qkv_bias)
        self.kv_proj = Linear(config.n_embd, self.kv_heads * D, bias=config.qkv_bias)
        self.o_proj = Linear(self.n_head * D, config.n_embd, bias=config.bias)
        self.q_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else nn.Identity()
        self.k_scale = nn.Parameter(torch.ones(D)) if config.qk_norm else None

    def project(self, x: Stream) -> Heads:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        v = self.kv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.k_scale is not None:
            v = rms_norm(v, None, NORM_EPS)
        return q, self.keys_of(v), v

    def keys_of(self, v: Value) -> Value:
        """Return the keys of values, before they are rotated."""
        return v if self.k_scale is None else v * self.k_scale.to(v.dtype)

    def update_cache(
        self,
        k: NewKeys,
        v: NewValues,
        ctx: AttentionContext,
    ) -> tuple[Keys, Value]:
        assert ctx.cache is not None
        if self.rope is not None and ctx.has_own_positions(self.rope, v):
            problem = "k_eq_v makes the keys of a cache again, at the positions 0, 1, …, and not at your own"
            raise ValueError(f"{problem}: read the whole text without a cache.")
        values = ctx.cache.append(self.layer_idx, "tied", v, self.window)
        keys = self.keys_of(values)
        if self.rope is not None:
            # The last row is the last new token's.
            first = ctx.past + v.shape[-2] - values.shape[-2]
            keys = rotate(keys, self.rope.table(keys, first))
        return keys, values
