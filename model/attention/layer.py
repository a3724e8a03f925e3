"""Causal self-attention as a layer: project, remember, attend, merge.

CausalSelfAttention is what every trainable form has in common, MultiHeadAttention the form a GPT uses.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from model.attention.contract import AttentionFunction
from model.attention.functional import ATTENTION_FUNCTIONS, attention_weights, matmul
from model.attention.variants import ATTENTION_VARIANTS
from model.config import AttentionConfig
from model.kv_cache import KVCache
from model.masks import alibi_bias, causal_with, check_broadcast
from model.rope import RotaryEmbedding, rotate

NORM_EPS = 1e-6


class CausalSelfAttention(nn.Module):
    """A layer in which every position gathers from itself and the positions before it.

    Its children say how queries, keys and values come about (`project`) and what becomes of the result
    (`merge`); the rest, mask, window, cache, ALiBi, dropout, is the same for all and is here.
    """

    def __init__(self, config: AttentionConfig, n_head: int, head_size: int, attend: AttentionFunction):
        super().__init__()
        self.n_head, self.head_size = n_head, head_size
        self.attend = attend
        self.dropout = config.attention_dropout
        self.window = config.attention_window
        self.alibi = config.position == "alibi"

    def forward(
        self,
        x: Float[Tensor, "... T C"],
        *,
        mask: Shaped[Tensor, " ..."] | None = None,
        positions: Int[Tensor, "... T"] | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Float[Tensor, "... T C"]:
        """x mixed over the past, in any number of leading dimensions.

        `mask` broadcasts to (…, H, T, S), with S = T plus the length of the cache, and says what may be
        attended beside causality and window, which are always kept. `positions` turn RoPE; without them
        they follow on from the cache, or from 0. With a `cache`, x is (B, T, C): its keys and values are
        written at `layer`, and the caller advances the cache once all layers are through.

        Raises ValueError, naming the shapes, when mask, positions or cache do not fit x.
        """
        q, k, v = self.project(x, positions, 0 if cache is None else cache.position)
        if cache is not None:
            k, v = cache.write(layer, k, v)  # (…, Hkv, T, D) -> (…, Hkv, S, D)
        k, v, overlay = self._overlay(q, k, v, mask)
        y = self.attend(q, k, v, **overlay, dropout_p=self.dropout if self.training else 0.0)
        return self.merge(y)

    def weights(
        self,
        x: Float[Tensor, "... T C"],
        *,
        mask: Shaped[Tensor, " ..."] | None = None,
        positions: Int[Tensor, "... T"] | None = None,
    ) -> Float[Tensor, "... H T T"]:
        """The weights that forward() gives x, without dropout, for pictures and figures."""
        q, k, v = self.project(x, positions, 0)
        k, _, overlay = self._overlay(q, k, v, mask)
        # By matmul, with which all but the variants agree: fused kernels are not made for values as wide as the
        # text is long.
        attend = self.attend if self.attend in ATTENTION_VARIANTS.values() else matmul
        return attention_weights(q, k, **overlay, attend=attend)

    def project(
        self, x: Float[Tensor, "... T C"], positions: Int[Tensor, "... T"] | None, start: int
    ) -> tuple[Float[Tensor, "... H T D"], Float[Tensor, "... Hkv T D"], Float[Tensor, "... Hkv T D"]]:
        """Queries, keys and values of x, whose first position is `start`."""
        raise NotImplementedError

    def merge(self, y: Float[Tensor, "... H T D"]) -> Float[Tensor, "... T C"]:
        """What the heads gathered, as a change to the residual stream."""
        raise NotImplementedError

    def _overlay(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, dict]:
        """The keys and values in reach, and the mask, is_causal and bias to lay over their scores."""
        T, S = q.shape[-2], k.shape[-2]
        if mask is not None:
            check_broadcast("mask", mask, (*q.shape[:-1], S))
        reach = S if self.window is None else min(S, self.window + T - 1)
        if reach < S:  # the first query does not see further back, so neither does any other
            k, v = k[..., -reach:, :], v[..., -reach:, :]
            if mask is not None and mask.shape[-1] > 1:
                mask = mask[..., -reach:]
        mask, is_causal = causal_with(mask, T, reach, self.window, q.device)
        bias = alibi_bias(self.n_head, T, reach, q.device) if self.alibi else None
        return k, v, {"mask": mask, "is_causal": is_causal, "bias": bias}


class MultiHeadAttention(CausalSelfAttention):
    """H heads that each attend in a subspace of D channels, C / H by default (Vaswani et al. 2017, section 3.2.2).

    With fewer key/value heads than query heads several queries share one: multi-query (Shazeer 2019) and
    grouped-query attention (Ainslie et al. 2023). QK-norm keeps the scores bounded (Henry et al. 2020).
    """

    def __init__(self, config: AttentionConfig, attend: AttentionFunction | None = None):
        C, D = config.n_embd, config.head_channels
        attend = attend or (ATTENTION_FUNCTIONS | ATTENTION_VARIANTS)[config.attention]
        super().__init__(config, config.n_head, D, attend)
        self.kv_heads = config.kv_heads
        self.q_proj = nn.Linear(C, config.n_head * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, config.kv_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(C, config.kv_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, bias=config.bias)
        self.q_norm = nn.RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.rope = make_rope(config, D)

    def project(
        self, x: Float[Tensor, "... T C"], positions: Int[Tensor, "... T"] | None, start: int
    ) -> tuple[Float[Tensor, "... H T D"], Float[Tensor, "... Hkv T D"], Float[Tensor, "... Hkv T D"]]:
        q = self.split(self.q_proj, x, self.n_head)
        k = self.split(self.k_proj, x, self.kv_heads)
        v = self.split(self.v_proj, x, self.kv_heads)
        if self.q_norm is not None:
            q, k = _normalise(self.q_norm, q), _normalise(self.k_norm, k)
        if self.rope is not None:
            rotation = self.rope.rotation(x, positions, start)
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def split(self, projection: nn.Linear, x: Float[Tensor, "... T C"], n: int) -> Float[Tensor, "... n T D"]:
        """One projection for all heads, its channels cut into n heads."""
        heads = projection(x).unflatten(-1, (n, self.head_size))  # (…, T, n·D) -> (…, T, n, D)
        return heads.transpose(-3, -2)  # (…, T, n, D) -> (…, n, T, D)

    def merge(self, y: Float[Tensor, "... H T D"]) -> Float[Tensor, "... T C"]:
        joined = y.transpose(-3, -2).flatten(-2)  # (…, H, T, D) -> (…, T, H, D) -> (…, T, H·D)
        return self.o_proj(joined)  # (…, T, H·D) -> (…, T, C)


def _normalise(norm: nn.RMSNorm, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    # Under autocast x is half precision and the weight is not: torch's fused kernel wants them alike.
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def make_rope(config: AttentionConfig, head_size: int) -> RotaryEmbedding | None:
    """The rotation of one head, when the settings ask for it."""
    if config.position != "rope":
        return None
    return RotaryEmbedding(head_size, config.rope_theta, config.rope_scaling, config.rope_scaling_factor)
