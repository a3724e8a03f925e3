"""Causal self-attention as a layer: project, rotate, remember, attend, merge.

CausalSelfAttention is what every trainable form has in common, MultiHeadAttention the form a GPT uses.
"""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from model.attention import functional
from model.attention.contract import AttentionFunction, Key, Output, Query, Stream, Value
from model.attention.functional import ATTENTION_FUNCTIONS, attention_weights, matmul
from model.attention.variants import ATTENTION_VARIANTS
from model.config import AttentionConfig
from model.kv_cache import KVCache
from model.masks import alibi_bias, alibi_slopes, causal_with, check_broadcast
from model.packed import together
from model.rope import RotaryEmbedding, rotate

NORM_EPS = 1e-6

LayerMask = Shaped[Tensor, "..."] | None
LayerBias = Float[Tensor, "H T reach"] | None
Positions = Int[Tensor, "*#lead T"] | Int[Tensor, " T"] | None
Rotation = Float[Tensor, "... T half 2"] | None


class CausalSelfAttention(nn.Module):
    """A layer in which every position gathers from itself and the positions before it.

    Its children say how queries, keys and values come about (`project`) and what becomes of the result
    (`merge`). Mask, window, cache, ALiBi and dropout are the same for all and are here.
    """

    def __init__(self, config: AttentionConfig, n_head: int, kv_heads: int, head_size: int, attend: AttentionFunction):
        super().__init__()
        self.n_head, self.kv_heads, self.head_size = n_head, kv_heads, head_size
        self.attend = attend
        rope = (head_size, config.rope_theta, config.rope_scaling, config.rope_scaling_factor)
        self.rope = RotaryEmbedding(*rope) if config.position == "rope" else None
        self.dropout, self.window = config.attention_dropout, config.attention_window
        self.alibi = config.position == "alibi"

    def forward(
        self,
        x: Stream,
        *,
        mask: LayerMask | functional.Blocks = None,
        positions: Positions = None,
        rotation: Rotation = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Stream:
        """Mix x over the past, in any number of leading dimensions.

        mask: broadcasts to (…, H, T, S), with S = T plus the length of the cache, and says what may be
            attended; causality and window hold in any case. Or the blocks() that the caller has made for all layers.
        positions: turn RoPE; by default they follow on from the cache, or from 0.
        rotation: that of these positions, where the caller has made it for all layers.
        cache: keys and values of earlier tokens, for an x of (B, T, C). The new ones are written at `layer`; the
            caller advances the cache after the last layer.

        Raises ValueError, naming the shapes, when mask, positions or cache do not fit x.
        """
        q, k, v = self.project(x)
        if rotation is None:
            rotation = self.rotation(x, positions, 0 if cache is None else cache.position)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if isinstance(mask, tuple):
            return self.merge(functional.in_blocks(q, k, v, mask))
        if cache is not None:
            k, v = cache.write(layer, k, v)  # (…, Hkv, T, D) -> (…, Hkv, S, D)
        if cache is not None and cache.slot is not None:  # one query, at a slot that only the device knows
            is_causal, bias = False, cache.bias
        else:
            k, v, mask, is_causal, bias = self._overlay(q, k, v, mask)
        dropout_p = self.dropout if self.training else 0.0
        return self.merge(self.attend(q, k, v, mask=mask, bias=bias, is_causal=is_causal, dropout_p=dropout_p))

    def weights(self, x: Stream, *, mask: LayerMask = None, positions: Positions = None) -> Float[Tensor, "... H T T"]:
        """Return the weights of forward(x) without dropout, for pictures and statistics."""
        q, k, v = self.project(x)
        if (rotation := self.rotation(x, positions, 0)) is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        k, _, mask, is_causal, bias = self._overlay(q, k, v, mask)
        # All forms but the variants have matmul's weights, and fused kernels are not made for values of width S.
        attend = self.attend if self.attend in ATTENTION_VARIANTS.values() else matmul
        return attention_weights(q, k, mask=mask, bias=bias, is_causal=is_causal, attend=attend)

    def rotation(self, x: Stream, positions: Positions, start: int) -> Rotation:
        """Return RoPE's rotation of x's `positions`, or of start … start+T-1; None without RoPE."""
        return None if self.rope is None else self.rope.rotation(x, positions, start)

    def blocks(self, x: Stream, *, compiled: bool) -> functional.Blocks | None:
        """Return what flex_attention needs for a whole text x in every layer; None where `attend` does better.

        Torch's fused kernels take windows and ALiBi as a (T, T) matrix only. In compiled training on a GPU `sdpa`
        leaves them to flex_attention, whose kernel is compiled with the layer.
        """
        T, attend = x.shape[-2], self.attend
        window = T if self.window is None else min(T, self.window)
        instead = attend is functional.sdpa and compiled and self.training and self.dropout == 0
        instead &= T > 128 and (self.alibi or window < T)  # in one block there is nothing to skip
        instead &= 16 <= self.head_size <= 256  # the kernels' sizes
        if not (attend is functional.flex or instead) or functional.capability(x.device) < functional.AMPERE:
            return None
        block_mask = functional.causal_blocks(T, T, window, x.device)
        if not self.alibi:
            return block_mask, None
        slopes = alibi_slopes(self.n_head, x.device)
        return block_mask, lambda score, b, h, t, s: score - slopes[h] * (t - s)

    def project(self, x: Stream) -> tuple[Query, Key, Value]:
        """Return the queries, keys and values of x, not yet rotated."""
        raise NotImplementedError

    def merge(self, y: Output) -> Stream:
        """Return what the heads gathered as a change to the residual stream."""
        raise NotImplementedError

    def _overlay(
        self, q: Query, k: Key, v: Value, mask: LayerMask
    ) -> tuple[Float[Tensor, "... Hkv reach D"], Float[Tensor, "... Hkv reach Dv"], LayerMask, bool, LayerBias]:
        """Return the keys and values in reach, and the mask, is_causal and bias to lay over their scores."""
        T, S = q.shape[-2], k.shape[-2]
        if mask is not None:
            check_broadcast("mask", mask, (*q.shape[:-1], S))
        bias = None
        reach = S if self.window is None else min(S, self.window + T - 1)
        if reach < S:  # the first query does not see further back, so neither does any other
            k, v = k[..., -reach:, :], v[..., -reach:, :]
            if mask is not None and mask.shape[-1] > 1:
                mask = mask[..., -reach:]
        if self.alibi:
            bias = alibi_bias(self.n_head, T, reach, q.device)
        mask, is_causal = causal_with(mask, T, reach, self.window, q.device)
        return k, v, mask, is_causal, bias


class MultiHeadAttention(CausalSelfAttention):
    """H heads that each attend in a subspace of D channels, C / H by default (Vaswani et al. 2017, section 3.2.2).

    With fewer key/value heads than query heads several queries share one: multi-query (Shazeer 2019) and
    grouped-query attention (Ainslie et al. 2023). QK-norm keeps the scores bounded and training stable (Dehghani
    et al. 2023, ViT-22B; Henry et al. 2020 did it first, with an L2 norm and a learned scale).
    """

    def __init__(self, config: AttentionConfig, attend: AttentionFunction | None = None):
        C, D = config.n_embd, config.head_channels
        attend = attend or (ATTENTION_FUNCTIONS | ATTENTION_VARIANTS)[config.attention]
        super().__init__(config, config.n_head, config.kv_heads, D, attend)
        self.q_proj = nn.Linear(C, config.n_head * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, config.kv_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(C, config.kv_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, bias=config.bias)
        self.q_norm = nn.RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None

    def project(self, x: Stream) -> tuple[Query, Key, Value]:
        # (…, T, n·D) -> (…, T, n, D) -> (…, n, T, D): one product for all n heads, its channels cut into heads
        heads = (*x.shape[:-1], -1, self.head_size)
        q, k, v = [y.view(heads).transpose(-3, -2) for y in self.products(x)]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normalise(self.q_norm, q), _normalise(self.k_norm, k)
        return q, k, v

    def products(self, x: Stream) -> tuple[Float[Tensor, "*lead T _"], ...]:
        """Return x times the weights of all queries, of all keys and of all values."""
        return together(x, self.q_proj, self.k_proj, self.v_proj)

    def merge(self, y: Output) -> Stream:
        joined = y.transpose(-3, -2).flatten(-2)  # (…, H, T, D) -> (…, T, H, D) -> (…, T, H·D)
        return self.o_proj(joined)  # (…, T, H·D) -> (…, T, C)


def _normalise(norm: Callable[[Tensor], Tensor], x: Query) -> Query:
    if isinstance(norm, nn.RMSNorm) and x.dtype != norm.weight.dtype:
        # Under autocast x is half precision and the weight is not: torch's fused kernel wants them alike.
        return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)
    return norm(x)
