"""Multi-head latent attention: what a token is remembered by is one small vector for all heads."""

from dataclasses import replace

import torch
from torch import nn

from model.attention.contract import Output, Query, Stream, Value
from model.attention.functional import sdpa
from model.attention.layer import NORM_EPS, CausalSelfAttention, Keys
from model.attention.places import Here, Kept
from model.attention.registry import form
from model.config import AttentionConfig
from model.norms import RMSNorm
from model.packed import Unpacked, together
from model.rope import RotaryEmbedding


@form("mla")
class LatentAttention(CausalSelfAttention):
    """Keys and values of all heads are made from one latent vector c of a token (DeepSeek-V2, 2024, section 2.1).

        c = norm(x W_c),  k_h = [RoPE(x W_r), c W_k,h],  v_h = c W_v,h,  q_h = [RoPE(x W_s,h), x W_q,h]

    The cache keeps c and the rotated key alone: latent_size + D / 2 numbers a token, where H heads keep 2 H D.
    A rotation does not commute with W_k, hence the part of D / 2 channels that is rotated, one key for all heads.

    With a cache W_k moves to the queries and W_v to the result, because qᵀ (W_k c) = (W_kᵀ q)ᵀ c. What is left is
    multi-query attention, whose keys are [RoPE, c] and whose values are c.
    """

    places = ("window", "queries", "scores", "result")
    ignores = ("n_kv_head", "rope_fraction", "score_softcap")

    def __init__(self, config: AttentionConfig):
        C, H, D = config.n_embd, config.n_head, config.head_channels
        self.latent, self.turned = config.latent_size or 4 * D, max(2, D // 4 * 2)  # before the parent rotates them
        super().__init__(config, H, H, D, sdpa)
        self.q_proj = nn.Linear(C, H * (self.turned + D), bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, self.turned, bias=config.qkv_bias)
        self.c_proj = nn.Linear(C, self.latent, bias=config.qkv_bias)
        self.c_norm = RMSNorm(self.latent, eps=NORM_EPS)
        self.k_up, self.v_up = (Unpacked(self.latent, H * D, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(H * D, C, bias=config.bias)

    def make_rope(self, config: AttentionConfig, head_size: int) -> RotaryEmbedding:
        return super().make_rope(replace(config, rope_fraction=1.0), self.turned)

    def project(self, x: Stream) -> tuple[Query, Keys, Value]:
        """Return the queries (…, H, T, turned + D), one key [rotated, c], and the values of all heads."""
        q, turned, c = together(x, self.q_proj, self.k_proj, self.c_proj)
        c = self.c_norm(c)
        q = q.unflatten(-1, (-1, self.turned + self.head_size)).transpose(-3, -2)
        return q, torch.cat((turned, c), -1).unsqueeze(-3), self.heads(self.v_up(c))

    def heads(self, y: Stream) -> Output:
        return y.unflatten(-1, (self.n_head, -1)).transpose(-3, -2)  # (…, T, H·D) -> (…, H, T, D)

    def gather(self, q: Query, k: Keys, v: Value, here: Here) -> Output:
        if here.store is None:
            turned, c = k.split((self.turned, self.latent), -1)
            k = torch.cat((turned.expand(*v.shape[:-1], -1), self.heads(self.k_up(c[..., 0, :, :]))), -1)
            return self.attend_to(self.call(q, k, v, here), here)
        k = here.store.write("latent", k)
        # For each query head, (H, D, latent); with diff two of them share one.
        k_up, v_up = (
            up.weight.view(self.n_head, -1, self.latent).repeat_interleave(self.query_heads // self.n_head, 0)
            for up in (self.k_up, self.v_up)
        )
        absorbed = torch.cat((q[..., : self.turned], q[..., self.turned :] @ k_up), -1)  # (B, H, T, turned + latent)
        call = self.call(absorbed, k, k[..., self.turned :], here)._replace(scale=q.shape[-1] ** -0.5)
        return self.attend_to(call, here) @ v_up.mT  # (B, H, T, latent) -> (B, H, T, D)

    def keeps(self, dtype: torch.dtype) -> Kept:
        return {"latent": ((1, None, self.turned + self.latent), dtype)}

    def flops(self, block_size: int) -> float:
        """As the other forms: scores of turned + D channels, values of D."""
        return super().flops(block_size) * (self.turned + 2 * self.head_size) / (2 * self.head_size)
