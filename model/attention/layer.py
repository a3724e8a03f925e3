"""Causal self-attention as a layer: project, mix, rotate, remember, score, attend, finish, merge.

Modifiers (modifiers.py) act at three of these: mix, score and finish. Within a layer shapes have one batch dimension.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from model.attention.contract import AttentionFunction, Key, Output, Query, Value, check_broadcast, repeat_heads
from model.attention.functions import flex, matmul, sdpa, softcap
from model.attention.masks import alibi_bias, alibi_slopes, as_bool, causal_mask, text_mask
from model.attention.registry import FORMS, MODIFIERS, form
from model.cache import KVCache
from model.config import AttentionConfig
from model.layers import Linear, RMSNorm
from model.rope import Rope, rotate

NORM_EPS = 1e-6
# What means nothing to a form that has no order of its own.
POSITION_SETTINGS = (
    "position",
    "rope_theta",
    "rope_fraction",
    "rope_scaling",
    "rope_scaling_factor",
    "rope_trained_length",
)

Stream = Float[Tensor, "*lead T C"]
Keys = Float[Tensor, "B _ S E"]
"""What tokens are found by: in multi-head latent attention of another width than the queries."""


@dataclass
class AttentionContext:
    """Per-call state shared by the layers. The GPT makes one for each forward pass; a layer alone may go without."""

    mask: Shaped[Tensor, "..."] | None = None
    """Broadcasts to (B, H, T, S), S = T plus what is cached: 1 or True where a query may attend. Causality and window
    hold in any case. Forms and modifiers that sum up or shift the past take `starts` instead."""
    doc_starts: Int[Tensor, "B T"] | None = None
    """At which position, counted from the first in the cache, the text of each token begins; 0 when None. What comes
    before is out of sight, as the document before or the padding on the left."""
    tokens: Int[Tensor, "B T"] | None = None
    """The token ids of x, where a layer reads them: see ValueEmbedding."""
    cache: KVCache | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)
    """What layers leave for those after them."""
    rotations: dict[Rope, Tensor] = field(default_factory=dict)
    """Rope.cos_sin() of positions, (T, D/2, 2) or (B, 1, T, D/2, 2); by default they count on from the cache."""
    blocks: dict[int, BlockMask] = field(default_factory=dict)
    """By window, causal_blocks() for layers that flex_attention serves best."""
    loss: Float[Tensor, ""] | None = None
    """To which a layer adds a loss of its own, in nats summed over tokens; None where nobody trains."""
    weights_only: bool = False
    """Whether the values are an identity matrix, so that the result is the weights."""

    @property
    def past(self) -> int:
        return 0 if self.cache is None else self.cache.position

    def kept(self, layer: int) -> dict[str, Tensor]:
        """Return what the cache keeps for a layer, to read and to write; without a cache nothing comes of it."""
        return {} if self.cache is None else self.cache.layers[layer]

    def earlier(self, layer: int, name: str, new: Shaped[Tensor, "B n T D"], most: int) -> list[Tensor]:
        """Return what stood 1, 2, … `most` tokens before each row of `new`, zeros where that was another text."""
        T, kept = new.shape[2], self.kept(layer)
        rows = torch.cat((kept.get(name, new.new_zeros(*new.shape[:2], most, new.shape[3])), new), 2)
        kept[name] = rows[:, :, T:].detach()
        before = [rows[:, :, most - back : most - back + T] for back in range(1, most + 1)]
        if self.doc_starts is None:
            return before
        into = torch.arange(self.past, self.past + T, device=new.device) - self.doc_starts  # (B, T)
        return [row.masked_fill((into < back)[:, None, :, None], 0) for back, row in enumerate(before, 1)]

    def begins(self, T: int) -> Bool[Tensor, "B 1 T"] | None:
        """Return which tokens are the first of their text, for all heads."""
        if self.doc_starts is None:
            return None
        return (self.doc_starts == torch.arange(self.past, self.past + T, device=self.doc_starts.device))[:, None]


class Call(NamedTuple):
    """The arguments of an attention function, which modifiers may change."""

    q: Query
    k: Key
    v: Value
    mask: Bool[Tensor, "..."] | None
    bias: Float[Tensor, "..."] | None
    is_causal: bool
    scale: float | None = None


class MultiHeadAttention(nn.Module):
    """H heads that attend in subspaces of D channels to the positions up to their own (Vaswani et al. 2017, 3.2.2).

    With fewer key/value heads than query heads several queries share one: multi-query (Shazeer 2019) and
    grouped-query attention (Ainslie et al. 2023). QK-norm keeps the scores bounded and training stable (Dehghani
    et al. 2023, ViT-22B; Henry et al. 2020 did it first, with an L2 norm and a learned scale).
    """

    takes: ClassVar[tuple[str, ...]] = ("window", "rotation", "queries", "keys", "values", "scores", "result")
    """What modifiers may change."""
    ignores: ClassVar[tuple[str, ...]] = ("score_softcap", "latent_size")
    """Settings that change nothing in this form; position, where it is ALiBi that does not."""
    has_kv_cache: ClassVar[bool] = True
    """Whether the cache grows with the text; else a state sums it up."""
    chooses: ClassVar[bool] = False
    """Whether it leaves out keys by their scores, so that a rounding may change the result."""

    def __init__(self, config: AttentionConfig, number: int = 0, attend: AttentionFunction | None = None) -> None:
        """number: which one of the GPT's layers this is; attend: the function, by default that of config.attention."""
        super().__init__()
        self.n_head = self.query_heads = config.n_head
        self.kv_heads, self.head_dim, self.number = config.kv_heads, config.head_channels, number
        self.function = attend or FORMS[config.form]
        self.dropout, self.window = config.attention_dropout, config.attention_window
        self.alibi = config.position == "alibi"
        self.rope = self.make_rope(config) if config.position == "rope" and "nope" not in config.modifiers else None
        self.make_projections(config)
        self.modifiers = nn.ModuleDict()
        kinds = {name: kind for name, kind in MODIFIERS.items() if name in config.modifiers}
        for name in sorted(kinds, key=lambda name: kinds[name].last):  # a stable sort
            self.modifiers[name] = kinds[name](self, config)
        self.changing: list[Any] = [*self.modifiers.values()]  # a list is quicker to walk
        self.takes_masks = self.has_kv_cache and not any(kind.needs_starts for kind in kinds.values())

    def make_rope(self, config: AttentionConfig) -> Rope:
        return Rope.of(config, self.head_dim)

    def make_projections(self, config: AttentionConfig) -> None:
        """Make what project() and merge() multiply by; again where a modifier has changed query_heads."""
        C, D, rows = config.n_embd, self.head_dim, self.kv_heads * self.head_dim
        self.qkv_proj = Linear(C, self.query_heads * D, rows, rows, bias=config.qkv_bias)
        self.o_proj: nn.Module = Linear(self.n_head * D, C, bias=config.bias)
        self.q_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None
        self.k_norm = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else None

    def forward(self, x: Stream, now: AttentionContext | None = None) -> Stream:
        """Mix x over the past. Any number of leading dimensions count as one, which the pass is about.

        Raises ValueError, naming the shapes, when mask, starts or cache do not fit x.
        """
        now = now or AttentionContext()
        if x.ndim != 3:
            return self(x.reshape(-1, *x.shape[-2:]), now).view(x.shape)
        return self.merge(self.attended(x, now))

    def weights(self, x: Stream, now: AttentionContext | None = None) -> Float[Tensor, "B H T T"]:
        """Return the weights of forward(x) without dropout, for pictures and statistics.

        What is gathered is the weights times the values, so with the identity matrix for values it is the weights.
        """
        return self.attended(x, replace(now or AttentionContext(), cache=None, weights_only=True))

    def attended(self, x: Stream, now: AttentionContext) -> Float[Tensor, "B H T _"]:
        """Return what each head gathered, or its weights."""
        self.check(x, now)
        q, k, v = self.rotated(x, now)
        if now.weights_only:
            v = torch.eye(x.shape[1], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)
        y = self.gather(q, k, v, x, now)
        for modifier in self.changing:
            if modifier.on_weights or not now.weights_only:
                y = modifier.finish(y, v, x, now)
        return y

    def check(self, x: Stream, now: AttentionContext) -> None:
        """Raise ValueError where this layer cannot do with x what the pass says."""
        B, T, _ = x.shape
        if now.mask is not None:
            if not self.takes_masks:
                raise ValueError("what sums up or shifts the past takes no mask: doc_starts says where texts begin.")
            check_broadcast("mask", now.mask, (B, self.n_head, T, now.past + T))
        if now.doc_starts is not None and now.doc_starts.shape != (B, T):
            raise ValueError(
                f"doc_starts {tuple(now.doc_starts.shape)} are not one for each token of x {tuple(x.shape)}."
            )

    def rotated(self, x: Stream, now: AttentionContext) -> tuple[Query, Keys, Value]:
        """Project, mix and rotate."""
        q, k, v = self.project(x)
        for modifier in self.changing:
            q, k, v = modifier.mix(q, k, v, x, now)
        q, k = self.at_positions(x, now, q, k)
        return q, k, v

    def at_positions(self, x: Stream, now: AttentionContext, *heads: Float[Tensor, "B _ T _"]) -> tuple[Tensor, ...]:
        """Rotate queries or keys of x by their positions, where the layer has RoPE."""
        if self.rope is None:
            return heads
        rotation = now.rotations[self.rope] if self.rope in now.rotations else self.rope.table(x, now.past)
        return tuple(rotate(each, rotation) for each in heads)

    def project(self, x: Stream) -> tuple[Query, Keys, Value]:
        """Return the queries, keys and values of x, not yet rotated."""
        q, k, v = self.heads(x).split((self.query_heads, self.kv_heads, self.kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def heads(self, x: Stream) -> Float[Tensor, "B n T D"]:
        """Multiply x by the weights of all queries, keys and values at once, and cut the channels into heads."""
        # (B, T, n·D) -> (B, T, n, D) -> (B, n, T, D)
        return self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def gather(self, q: Query, k: Keys, v: Value, x: Stream, now: AttentionContext) -> Output:
        """Remember keys and values, and attend to all in reach."""
        T = q.shape[-2]
        if now.cache is not None:
            k, v = (now.cache.append(self.number, name, new) for name, new in (("k", k), ("v", v)))
        elif self.flex_window and (blocks := now.blocks.get(self.window or T)):
            slopes = torch.tensor(alibi_slopes(self.n_head), device=q.device) if self.alibi else None
            return flex(q, k, v, blocks, slopes)
        return self.attend_to(self.call(q, k, v, now), x, now)

    def call(self, q: Query, k: Key, v: Value, now: AttentionContext) -> Call:
        """Return the keys and values in reach, and the mask, bias and is_causal to lay over their scores."""
        T, S, mask = q.shape[-2], k.shape[-2], None
        if now.mask is not None:
            mask = as_bool(now.mask)
            if mask.ndim > 2 and mask.shape[-3] > 1:  # a head may have several queries: see Differential
                mask = repeat_heads(mask, self.query_heads)
        if now.doc_starts is not None:
            apart = text_mask(now.doc_starts, S)
            mask = apart if mask is None else mask & apart
        reach = S if self.window is None else min(S, self.window + T - 1)
        if reach < S:  # the first query does not see further back, so neither does any other
            k, v = k[..., -reach:, :], v[..., -reach:, :]
            mask = mask if mask is None else mask[..., -reach:]
        if T > 1 and (mask is not None or (self.window or reach) < reach):  # a single query is the last: it sees all
            causal = causal_mask(T, reach, q.device, self.window)
            mask = causal if mask is None else mask & causal
        bias = alibi_bias(self.n_head, T, reach, q.device) if self.alibi else None
        return Call(q, k, v, mask, bias, is_causal=mask is None)

    def attend_to(self, call: Call, x: Stream, now: AttentionContext) -> Output:
        """Let the modifiers change the call, and make it."""
        for modifier in self.changing:
            call = modifier.score(call, x, now)
        dropout_p = self.dropout if self.training and not now.weights_only else 0.0
        attend = (
            matmul if now.weights_only and self.function is sdpa else self.function
        )  # its kernels take no such values
        return attend(**call._asdict(), dropout_p=dropout_p)

    def merge(self, y: Output) -> Stream:
        """Return what the heads gathered as a change to the residual stream."""
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H·D) -> (B, T, C)

    def flops(self, block_size: int) -> float:
        """Return the floating-point operations of a forward pass per token beside those of the weights.

        4 D for each pair of a query head and a position that causal attention sees: half the text on average, fewer
        with a window.
        """
        sees = min(self.window or block_size, block_size)
        return 4 * self.query_heads * self.head_dim * (sees - sees**2 / (2 * block_size))

    @property
    def flex_window(self) -> bool:
        """Whether compiled training on a GPU is faster by flex_attention: torch's fused kernels take ALiBi and windows
        as a (T, T) matrix only."""
        plain = self.function is sdpa and not any(
            modifier.changes in ("queries", "scores") for modifier in self.changing
        )
        takes = plain and self.dropout == 0 and 16 <= self.head_dim <= 256
        return takes and (self.alibi or self.window is not None)


@form("softcap")
class SoftCapped(MultiHeadAttention):
    """Softmax of bounded scores: see functions.softcap."""

    ignores = ("latent_size",)

    def __init__(self, config: AttentionConfig, number: int = 0) -> None:
        super().__init__(config, number, softcap(config.score_softcap))
