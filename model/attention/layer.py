"""Causal self-attention as a layer: project, mix, rotate, remember, overlay, attend, finish, merge.

CausalSelfAttention is what every trainable form has in common, MultiHeadAttention the form a GPT uses. Modifiers
(modifiers.py) act at three of these places: mix, overlay and finish.
"""

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from errors import SettingsError
from model.attention import functional
from model.attention.contract import AttentionFunction, Key, Output, Query, Stream, Value
from model.attention.functional import ATTENTION_FUNCTIONS, matmul
from model.attention.places import Begins, Call, Here, Kept, LayerMask, Modifier
from model.attention.registry import FUNCTIONS, MODIFIERS
from model.config import AttentionConfig
from model.kv_cache import KVCache, LayerCache
from model.masks import alibi_bias, alibi_slopes, causal_with, check_broadcast
from model.norms import RMSNorm
from model.packed import together
from model.rope import RotaryEmbedding, rotate

NORM_EPS = 1e-6

Positions = Int[Tensor, "*#lead T"] | Int[Tensor, " T"] | None
Rotation = Float[Tensor, "... T half 2"] | None

# What tokens are found by: the one of multi-head latent attention has another width than the queries.
Keys = Float[Tensor, "*lead _ S E"]


class CausalSelfAttention(nn.Module):
    """A layer in which every position gathers from itself and the positions before it.

    Its children say how queries, keys and values come about (`project`) and what becomes of the result
    (`merge`). Mask, window, cache, ALiBi and dropout are the same for all and are here.
    """

    places: ClassVar[tuple[str, ...]] = ("window",)
    """What modifiers may change."""
    ignores: ClassVar[tuple[str, ...]] = ("score_softcap", "latent_size")
    """Settings that change nothing in this form; position, where it is ALiBi that does not."""
    o_proj: nn.Module

    def __init__(self, config: AttentionConfig, n_head: int, kv_heads: int, head_size: int, attend: AttentionFunction):
        super().__init__()
        self.n_head, self.kv_heads, self.head_size = n_head, kv_heads, head_size
        self.query_heads = n_head
        self.attend = attend
        self.rope = self.make_rope(config, head_size) if config.position == "rope" else None
        self.dropout, self.window = config.attention_dropout, config.attention_window
        self.alibi = config.position == "alibi"
        self.modifiers = nn.ModuleDict()
        self.mixers, self.overlayers, self.finishers = list[Modifier](), list[Modifier](), list[Modifier]()

    def make_rope(self, config: AttentionConfig, head_size: int) -> RotaryEmbedding:
        """Return the rotation of queries and keys."""
        scaling = config.rope_scaling, config.rope_scaling_factor, config.block_size
        return RotaryEmbedding(config.rotated(head_size), config.rope_theta, *scaling)

    def modify(self, config: AttentionConfig) -> None:
        """Add the modifiers that config.attention names, in the order of their registration."""
        for name in (name for name in MODIFIERS if name in config.modifiers):
            kind: type[Modifier] = MODIFIERS[name]
            if kind.place not in self.places:
                what = f"attention={config.attention}: {config.form} has no {kind.place} for {name} to change"
                raise SettingsError(f"{what}: leave out {name}, or choose another form.")
            self.modifiers[name] = modifier = kind(self, config)
            for method, users in (("mix", self.mixers), ("overlay", self.overlayers), ("finish", self.finishers)):
                if getattr(kind, method) is not getattr(Modifier, method):
                    users.append(modifier)

    def forward(
        self,
        x: Stream,
        *,
        mask: LayerMask | functional.Blocks = None,
        positions: Positions = None,
        rotation: Rotation = None,
        cache: KVCache | None = None,
        layer: int = 0,
        begins: Begins = None,
        carried: dict[str, Tensor] | None = None,
    ) -> Stream:
        """Mix x over the past, in any number of leading dimensions.

        mask: broadcasts to (…, H, T, S), with S = T plus the length of the cache, and says what may be
            attended; causality and window hold in any case. Or the blocks() that the caller has made for all layers.
        positions: turn RoPE; by default they follow on from the cache, or from 0.
        rotation: that of these positions, where the caller has made it for all layers.
        cache: what is kept of earlier tokens, for an x of (B, T, C). The new ones are written at `layer`; the
            caller advances the cache after the last layer.
        begins: (…, T), True for the first token of each document, where a mask keeps them apart: what shifts along
            time or sums up the past stops there. Padding that `mask` hides from all queries needs no telling.
        carried: what layers leave for those after them; the same dict for all layers of a pass.

        Raises ValueError, naming the shapes, when mask, positions or cache do not fit x.
        """
        store = None if cache is None else cache.layers[layer]
        if store is not None and store.slot is None:
            store.make_room(x.shape[-2])
        here = Here(x, mask, store, begins, {} if carried is None else carried)
        q, k, v = self.queries_keys_values(here, positions, rotation, 0 if cache is None else cache.position)
        y = functional.in_blocks(q, k, v, mask) if isinstance(mask, tuple) else self.gather(q, k, v, here)
        for modifier in self.finishers:
            y = modifier.finish(y, here, v)
        return self.merge(y)

    def weights(
        self, x: Stream, *, mask: LayerMask = None, positions: Positions = None, begins: Begins = None
    ) -> Float[Tensor, "... H T T"]:
        """Return the weights of forward(x) without dropout, for pictures and statistics.

        What is gathered is the weights times the values, so with the identity matrix for values it is the weights.
        """
        here = Here(x, mask, None, begins, {}, pictured=True)
        q, k, v = self.queries_keys_values(here, positions, None, 0)
        T = x.shape[-2]
        y = self.gather(q, k, torch.eye(T, dtype=v.dtype, device=v.device).expand(*v.shape[:-2], T, T), here)
        for modifier in self.finishers:
            y = modifier.finish(y, here, y) if modifier.pictured else y
        return y

    def queries_keys_values(
        self, here: Here, positions: Positions, rotation: Rotation, start: int
    ) -> tuple[Query, Keys, Value]:
        """Project, mix and rotate."""
        q, k, v = self.project(here.x)
        for modifier in self.mixers:
            q, k, v = modifier.mix(q, k, v, here)
        if self.rope is not None:
            if rotation is None:
                rotation = self.rope.rotation(here.x, positions, start)
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v

    def gather(self, q: Query, k: Keys, v: Value, here: Here) -> Output:
        """Remember, overlay and attend."""
        store = here.store
        if store is not None:
            k, v = store.write("kv", k, v).chunk(2, 1)  # (B, Hkv, T, D) -> (B, Hkv, S, D)
            if store.slot is not None:  # one query, at a slot that only the device knows
                assert not isinstance(here.mask, tuple)
                return self.attend(q, k, v, mask=here.mask, bias=store.bias)
        return self.attend_to(self.call(q, k, v, here), here)

    def call(self, q: Query, k: Key, v: Value, here: Here) -> Call:
        """Return the keys and values in reach, and the mask, is_causal and bias to lay over their scores."""
        T, S, mask = q.shape[-2], k.shape[-2], here.mask
        assert not isinstance(mask, tuple)
        if mask is not None:
            if here.store is not None and mask.shape[-1] > S:  # it covers more than this layer keeps
                mask = mask[..., -S:]
            check_broadcast("mask", mask, (*q.shape[:-1], S))
        reach = S if self.window is None else min(S, self.window + T - 1)
        if reach < S:  # the first query does not see further back, so neither does any other
            k, v = k[..., -reach:, :], v[..., -reach:, :]
            if mask is not None and mask.shape[-1] > 1:
                mask = mask[..., -reach:]
        bias = alibi_bias(self.n_head, T, reach, q.device) if self.alibi else None
        mask, is_causal = causal_with(mask, T, reach, self.window, q.device)
        call = Call(q, k, v, mask, is_causal, bias)
        for modifier in self.overlayers:
            call = modifier.overlay(call, here)
        return call

    def attend_to(self, call: Call, here: Here) -> Output:
        """Call the attention function."""
        dropout_p = self.dropout if self.training and not here.pictured else 0.0
        pictured = here.pictured and self.attend in ATTENTION_FUNCTIONS.values()
        attend = matmul if pictured else self.attend  # fused kernels take no values of width S
        return attend(
            call.q, call.k, call.v, mask=call.mask, bias=call.bias, is_causal=call.is_causal, dropout_p=dropout_p,
            scale=call.scale,
        )  # fmt: skip

    def blocks(self, x: Stream, *, compiled: bool) -> functional.Blocks | None:
        """Return what flex_attention needs for a whole text x in every layer; None where `attend` does better.

        Torch's fused kernels take windows and ALiBi as a (T, T) matrix only. In compiled training on a GPU `sdpa`
        leaves them to flex_attention, whose kernel is compiled with the layer.
        """
        T, attend = x.shape[-2], self.attend
        window = T if self.window is None else min(T, self.window)
        instead = attend is functional.sdpa and compiled and self.training and self.dropout == 0
        instead &= T > 128 and (self.alibi or window < T)  # in one block there is nothing to skip
        instead &= 16 <= self.head_size <= 256 and not self.overlayers  # the kernels' sizes
        if not (attend is functional.flex or instead) or functional.capability(x.device) < functional.AMPERE:
            return None
        block_mask = functional.causal_blocks(T, T, window, x.device)
        if not self.alibi:
            return block_mask, None
        slopes = alibi_slopes(self.n_head, x.device)
        return block_mask, lambda score, b, h, t, s: score - slopes[h] * (t - s)

    def make_store(self, B: int, size: int, sight: int | None, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """Return room for `size` positions, or for no more than a window sees and a quarter; see LayerCache."""
        sight = min((n for n in (sight, self.window) if n is not None), default=None)
        size = size if sight is None else min(size, sight + sight // 4 + 1)
        kept = self.keeps(dtype)
        for modifier in self.modifiers.values():
            kept |= modifier.keeps(dtype)  # type: ignore[operator]
        rows, state = dict[str, Tensor](), dict[str, Tensor]()
        for name, (shape, kind) in kept.items():
            full = [B, *(size if length is None else length for length in shape)]
            (rows if None in shape else state)[name] = torch.zeros(full, device=device, dtype=kind)
        return LayerCache(size, sight, rows, state)

    def keeps(self, dtype: torch.dtype) -> Kept:
        """Return what the form itself keeps in the cache."""
        return {"kv": ((2 * self.kv_heads, None, self.head_size), dtype)}

    def flops(self, block_size: int) -> float:
        """Return the floating-point operations of a forward pass per token beside those of the weights.

        4 D for each pair of a query head and a position that causal attention sees: half the text on average, fewer
        with a window.
        """
        sees = min(self.window or block_size, block_size)
        return 4 * self.query_heads * self.head_size * (sees - sees**2 / (2 * block_size))

    def project(self, x: Stream) -> tuple[Query, Keys, Value]:
        """Return the queries, keys and values of x, not yet rotated."""
        raise NotImplementedError

    def merge(self, y: Output) -> Stream:
        """Return what the heads gathered as a change to the residual stream."""
        joined = y.transpose(-3, -2).flatten(-2)  # (…, H, T, D) -> (…, T, H, D) -> (…, T, H·D)
        return self.o_proj(joined)  # (…, T, H·D) -> (…, T, C)


class MultiHeadAttention(CausalSelfAttention):
    """H heads that each attend in a subspace of D channels, C / H by default (Vaswani et al. 2017, section 3.2.2).

    With fewer key/value heads than query heads several queries share one: multi-query (Shazeer 2019) and
    grouped-query attention (Ainslie et al. 2023). QK-norm keeps the scores bounded and training stable (Dehghani
    et al. 2023, ViT-22B; Henry et al. 2020 did it first, with an L2 norm and a learned scale).
    """

    places: ClassVar[tuple[str, ...]] = ("window", "rotation", "queries", "keys", "values", "scores", "result")

    def __init__(self, config: AttentionConfig, attend: AttentionFunction | None = None):
        C, D = config.n_embd, config.head_channels
        super().__init__(config, config.n_head, config.kv_heads, D, attend or FUNCTIONS[config.form])
        self.q_proj = nn.Linear(C, config.n_head * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, config.kv_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(C, config.kv_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_head * D, C, bias=config.bias)
        self.q_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.k_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None

    def project(self, x: Stream) -> tuple[Query, Key, Value]:
        # (…, T, n·D) -> (…, T, n, D) -> (…, n, T, D): one product for all n heads, its channels cut into heads
        heads = (*x.shape[:-1], -1, self.head_size)
        q, k, v = [y.view(heads).transpose(-3, -2) for y in self.products(x)]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def products(self, x: Stream) -> tuple[Float[Tensor, "*lead T _"], ...]:
        """Return x times the weights of all queries, of all keys and of all values."""
        return together(x, self.q_proj, self.k_proj, self.v_proj)
