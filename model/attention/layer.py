"""Causal self-attention as a layer.

With none of the settings that add something, this is the layer:

    q, k, v = qkv_proj(x).unflatten(-1, (-1, D)).transpose(1, 2).split((H, Hkv, Hkv), dim=1)  # (B, heads, T, D) each
    q, k = rotate(q_norm(q)), rotate(k_norm(k))
    scores = q @ repeat_heads(k, H).mT / math.sqrt(D)  # (B, H, T, T)
    weights = scores.masked_fill(~causal_mask(T, T), -math.inf).softmax(-1)
    y = weights @ repeat_heads(v, H)  # (B, H, T, D)
    change = o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C), to be added to the residual stream

Begin with MultiHeadAttention.head_outputs(), which takes these steps in turn but for the last, which is forward()'s:

project   each token to a query, a key and a value for each head: project()
mix       let modifiers change these: their mix()
rotate    queries and keys by their positions (RoPE): rotate()
cache     the new keys and values, and take the earlier ones from the cache: update_cache()
call      collect what the result depends on: q, k, v, mask, documents, window, ALiBi's bias: make_call()
attend    softmax(q kᵀ / √D + bias) v, or the form's own weights; modifiers may first change the scores: attend()
finish    let modifiers change each head's result: their finish()
merge     the heads into one change to the residual stream: merge()

The layer does not compute attention itself: attend() passes the call to run_call() of executors.py, and that to the
first code that serves all of it. It may be torch's fused kernel, or the definition: dense() of call.py makes a mask of
causality and the rest, and functions.py has the formula.

Modifiers are small changes to a layer; attention=sdpa has none, attention=sdpa+gate has one. Each is an object with
three hooks, mix(), score() and finish(), which change nothing unless it overrides them: the class Modifier of
modifiers.py.
"""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model.attention.call import Call, Key, Output, Query, Value, add_bias, check_broadcast, repeat_heads
from model.attention.context import AttentionContext
from model.attention.contract import AttentionFunction, as_attention_function
from model.attention.executors import run_call
from model.attention.masks import alibi_sum, as_bool, check_dense
from model.attention.registry import FORMS, MODIFIERS, PARTS, SETTINGS
from model.config import AttentionConfig
from model.cpu import is_recorded_for_onnx
from model.layers import Linear, RMSNorm, joined
from model.rope import Pope, Rope, rotate

NORM_EPS = 1e-6
Stream = Float[Tensor, "*lead T C"]
# T new tokens, S with those in the cache. Keys have E channels and values F, which differ from D in some forms.
Keys = Float[Tensor, "B _ S E"]
NewKeys = Float[Tensor, "B _ T E"]
NewValues = Float[Tensor, "B _ T F"]
Heads = tuple[Query, NewKeys, NewValues]
"""The queries, keys and values of T new tokens."""


class MultiHeadAttention(nn.Module):
    """H heads that attend in subspaces of D channels to the positions up to their own.

    (Vaswani et al. 2017, 3.2.2.) With fewer key/value heads than query heads several queries share one: multi-query
    (Shazeer 2019) and grouped-query attention (Ainslie et al. 2023). QK-norm keeps the scores bounded and training
    stable (Dehghani et al. 2023, ViT-22B; Henry et al. 2020 did it first, with an L2 norm and a learned scale).

    A form is this class with another attention function, or a subclass that overrides a step: project, update_cache,
    make_call, attend or merge. One with other parameters overrides make_projections(), which a modifier may call again.
    """

    # Traits of a form, for the registry, the settings' checks, generation and the tests.
    modifiable: ClassVar[tuple[str, ...]] = (*SETTINGS.values(), *PARTS)
    """The parts that modifiers may change."""
    unused_settings: ClassVar[tuple[str, ...]] = ("score_softcap", "latent_size", "allow_neg_eigval")
    """Settings without effect in this form: those that only other forms read."""
    has_kv_cache = True
    """Whether the cache grows with the text; else the form keeps a state of fixed size."""
    has_plain_weights = False
    """For a subclass: whether it has the weights of this class, so that a checkpoint of one serves the other."""
    is_sparse = False
    """Whether scores decide which keys are left out, so that rounding may change the result."""
    has_onnx = True
    """Whether ONNX can express it for texts of every length."""

    def __init__(
        self,
        config: AttentionConfig,
        function: AttentionFunction | None = None,
        layer_idx: int = 0,
    ) -> None:
        """function: the attention function; by default that of config.attention, or sdpa's.

        layer_idx: the layer's place in the model, by which it finds its tensors in the cache.
        """
        super().__init__()
        self.layer_idx = layer_idx
        self.form = config.form
        self.n_head = self.query_heads = config.n_head  # a modifier may give each head more queries
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_channels
        self.scale: float | None = None  # of the scores; None: 1/√D
        # A module, though its call is not used: people look for dropout by its class, to turn it on or off.
        self.dropout: nn.Module = nn.Dropout(config.attention_dropout)
        self.window = config.attention_window  # None in the layers of a pattern without +window: see GPTConfig.at()

        # How scores become weights: an AttentionFunction of contract.py. It has a Weighting, and the executors that may
        # compute a call with it, the fastest first.
        named = FORMS[config.form]
        default = FORMS["sdpa"] if isinstance(named, type) else named  # a class inherits sdpa's
        self.function: AttentionFunction = as_attention_function(function or default)

        # Positions: angles of queries and keys (RoPE, PoPE), or a bias over the scores (ALiBi).
        turns = "nope" not in config.modifiers
        self.rope = self.make_rope(config) if config.position == "rope" and turns else None
        self.pope = self.make_pope(config) if config.position == "pope" and turns else None
        self.alibi = config.position == "alibi"
        if self.pope is not None:
            self.scale = self.head_dim**-0.5  # its keys are 2 D wide, but their products are those of D lengths

        self.make_projections(config)

        # Modifiers act in the order of registration, those that are `last` at the end (sorted() is stable).
        classes = {name: cls for name, cls in MODIFIERS.items() if name in config.modifiers}
        # Let them change the projections first, which few do. To make these again brings QK-norm back, so whatever
        # replaces QK-norm comes last.
        for cls in sorted(classes.values(), key=lambda cls: cls.replaces_qk_norm):
            cls.change_projections(self, config)
        self.accepts_mask = self.has_kv_cache and not any(cls.needs_doc_starts for cls in classes.values())
        self.modifiers: Any = nn.ModuleDict()
        for name in sorted(classes, key=lambda name: classes[name].last):
            self.modifiers[name] = classes[name](self, config)

    def make_rope(self, config: AttentionConfig) -> Rope:
        return Rope.of(config, self.head_dim)

    def make_pope(self, config: AttentionConfig) -> Pope:
        return Pope(self.kv_heads, self.head_dim, config.rope_theta)

    def make_projections(self, config: AttentionConfig) -> None:
        """Make the weights of project() and merge()."""
        C, D = config.n_embd, self.head_dim
        q_width = self.query_heads * D
        kv_width = self.kv_heads * D
        self.qkv_proj = Linear(C, q_width, kv_width, kv_width, bias=config.qkv_bias)  # three in one product
        self.o_proj: nn.Module = Linear(self.n_head * D, C, bias=config.bias)
        self.q_norm: nn.Module = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(D, eps=NORM_EPS) if config.qk_norm else nn.Identity()

    def forward(self, x: Stream, ctx: AttentionContext | None = None) -> Stream:
        """Return the change to each token, gathered from itself and the tokens before it.

        Leading dimensions are flattened into B. Raises ValueError with the shapes if mask, doc_starts or cache do not
        fit x.
        """
        ctx = ctx or AttentionContext()
        check_dense("x", x)
        if x.shape[-2] == 0:
            return x  # no token changes, nor a cache
        if x.ndim != 3:
            return self(x.reshape(-1, *x.shape[-2:]), ctx).view(x.shape)
        y = self.head_outputs(x, ctx)

        # Merge the heads into a change to the residual stream.
        return self.merge(y)  # (B, H, T, D) -> (B, T, C)

    def head_outputs(self, x: Stream, ctx: AttentionContext) -> Output:
        """Return the result of each head."""
        self.check(x, ctx)

        # Project, mix and rotate: (B, T, C) -> (B, H, T, D), (B, Hkv, T, D), (B, Hkv, T, D)
        q, k, v = self.queries_keys_values(x, ctx)

        # Cache: append the new rows, and get all S that are kept; a state keeps no rows. Without a cache, S = T.
        keys, values = k, v
        if ctx.cache is not None and self.has_kv_cache:
            keys, values = self.update_cache(k, v, ctx)  # (B, Hkv, T, D) -> (B, Hkv, S, D)

        # Call: all that the result depends on, with mask, documents, window and bias. It is causal: the code that
        # computes it hides later keys, or makes a mask.
        call = self.make_call(q, keys, values, ctx)

        # Attend: softmax(q kᵀ / √D + bias) v, or the form's own weights.
        y = self.attend(call, x, ctx)  # (B, H, T, D)

        # Finish: modifiers change each head's result, given each token's own value.
        for modifier in self.modifiers.values():
            y = modifier.finish(y, v, x, ctx)
        return y

    def queries_keys_values(self, x: Stream, ctx: AttentionContext) -> Heads:
        """Return the queries, keys and values of x, mixed and rotated."""
        # Project each token: its query asks, its key answers, and others gather its value.
        q, k, v = self.project(x)

        # Mix: modifiers change queries, keys and values, for example by a convolution with earlier tokens.
        for modifier in self.modifiers.values():
            q, k, v = modifier.mix(q, k, v, x, ctx)

        # Rotate queries and keys by their positions: their products then depend on the distance.
        if self.pope is not None:
            q, k = self.pope(q, k, ctx.past)
        else:
            q = self.rotate(q, ctx)
            k = self.rotate(k, ctx)
        return q, k, v

    def project(self, x: Stream) -> Heads:
        """Return the queries, keys and values of x, normalised if the layer has QK-norm."""
        # From here to merge() model/row.py has the same for one token, which it computes until this code is edited.

        # One product for all n = H + 2 Hkv heads: (B, T, C) -> (B, T, n·D) -> (B, T, n, D) -> (B, n, T, D)
        projected = joined(self.qkv_proj, x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = projected.split((self.query_heads, self.kv_heads, self.kv_heads), 1)
        return self.q_norm(q), self.k_norm(k), v

    def rotate(self, heads: Query, ctx: AttentionContext) -> Float[Tensor, "*lead H T E"]:
        """Rotate queries or keys by their positions, if the layer has RoPE or PoPE.

        Those of an indexer (sparse.py) come here with PoPE too, and have no phase.
        """
        if self.pope is not None:  # an indexer's: queries_keys_values() rotates the others
            return self.pope.of_lengths(heads, ctx.past)
        if self.rope is None:
            return heads
        return rotate(heads, ctx.rotation(self.rope, heads))

    def update_cache(
        self,
        k: NewKeys,
        v: NewValues,
        ctx: AttentionContext,
    ) -> tuple[Keys, Value]:
        """Append new keys and values to the cache; return all that it holds."""
        assert ctx.cache is not None
        k = ctx.cache.append(self.layer_idx, "k", k, self.window)
        v = ctx.cache.append(self.layer_idx, "v", v, self.window)
        return k, v

    def make_call(self, q: Query, k: Key, v: Value, ctx: AttentionContext) -> Call:
        """Return the call of attention, over the keys that any query sees."""
        # The span of these keys: a window for the first of the T queries, and a key more for each later one. With a
        # window of 3, queries 8 and 9 see the keys 6 to 9. The cache may have returned more, which it keeps to spare
        # copies.
        T = q.shape[-2]
        span = ctx.past + T
        dropped = 0
        if ctx.cache is not None and self.window is not None:
            dropped = max(0, span - (self.window + T - 1))
            span -= dropped
            k = k[..., -span:, :]
            v = v[..., -span:, :]

        # Mask and doc_starts come counted from position 0. Cut the mask to these keys, and count doc_starts from the
        # first of them.
        mask = ctx.mask
        if mask is not None:
            mask = as_bool(mask)
            if dropped and mask.ndim:
                mask = mask[..., -span:]
            if mask.ndim > 2 and mask.shape[-3] > 1:
                # The mask has a row for each head, and a modifier may have given the head several queries.
                mask = repeat_heads(mask, self.query_heads)
        doc_starts = ctx.doc_starts
        if doc_starts is not None and dropped:
            doc_starts = (doc_starts - dropped).clamp(min=0)

        call = self.function.new_call(  # a Call with the form's weighting
            q,
            k,
            v,
            mask=mask,
            is_causal=True,
            doc_starts=doc_starts,
            window=self.window,
            dropout_p=self.dropout_p,
            scale=self.scale,
        )
        # ALiBi penalises the distance: a bias for each query and key.
        if self.alibi:
            call = add_bias(call, *alibi_sum(self.n_head, T, span, q.device))
        return call

    @property
    def dropout_p(self) -> float:
        """The probability of dropping a weight now.

        Raises ValueError for a module of a person's own, which would have to be called, and for one that drops all.
        """
        dropout = self.dropout
        if isinstance(dropout, nn.Identity):
            return 0.0
        remedy = "put nn.Dropout(p) or nn.Identity() in place, p below 1"
        if not isinstance(dropout, nn.Dropout) or type(dropout).forward is not nn.Dropout.forward:
            kind = type(dropout).__name__
            raise ValueError(f"a layer's dropout is of type {kind}, and weights pass through no module: {remedy}.")
        if dropout.training and dropout.p >= 1:
            raise ValueError(f"a layer's dropout has p={dropout.p}: {remedy}.")
        return dropout.p if dropout.training else 0.0

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        """Let the modifiers change the scores, and compute the call."""
        for modifier in self.modifiers.values():
            call = modifier.score(call, x, ctx)
        return self.compute(call, ctx)

    def compute(self, call: Call, ctx: AttentionContext) -> Output:
        """Compute a call by the first executor of the form that serves all of it: see executors.py."""
        executors = self.function.executors
        if ctx.weights_only:
            # weights() has values of T channels, which the fast executors are not made for. Take the last one: it is
            # the plain formula.
            executors = executors[-1:]
        y, loss = run_call(call, executors, ctx.device)  # the loss of an indexer, else None
        if loss is not None and ctx.loss is not None:
            ctx.check_gradient()
            ctx.loss = ctx.loss + loss
        return y

    def merge(self, y: Output) -> Stream:
        """Join the heads' results and project them: a change to the residual stream."""
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, H·D) -> (B, T, C)

    def check(self, x: Stream, ctx: AttentionContext) -> None:
        """Raise ValueError if the context does not fit x or this layer."""
        B, T, _ = x.shape
        if not self.has_onnx and is_recorded_for_onnx():
            # It would lose the guards by which torch.export binds a program to some lengths.
            raise ValueError(f"attention={self.form} cannot be exported to ONNX for texts of every length.")
        if ctx.mask is not None:
            if not self.accepts_mask:
                raise ValueError("a form or modifier that sums up or shifts the past takes no mask: pass doc_starts.")
            check_broadcast("mask", ctx.mask, (B, self.n_head, T, ctx.past + T))
        if ctx.doc_starts is not None and ctx.doc_starts.shape != (B, T):
            raise ValueError(f"doc_starts {tuple(ctx.doc_starts.shape)} need the shape (B, T) of x {tuple(x.shape)}.")

    def weights(self, x: Stream, ctx: AttentionContext | None = None) -> Float[Tensor, "B H T T"]:
        """Return the weights of forward(x) without dropout and cache, for pictures and statistics.

        Those of the T positions of x among themselves, if the context has a cache.
        """
        ctx = ctx or AttentionContext()
        mask = ctx.mask
        doc_starts = ctx.doc_starts
        if ctx.past:
            mask = mask if mask is None or not mask.ndim or mask.shape[-1] == 1 else mask[..., ctx.past :]
            doc_starts = None if doc_starts is None else (doc_starts - ctx.past).clamp(min=0)
        own = {"cache": None, "mask": mask, "doc_starts": doc_starts, "weights_only": True, "learns": False}
        ctx = ctx.changed(**own, shared=dict(ctx.shared))  # it leaves nothing for later layers

        # The steps of head_outputs(), with values that are the identity: weights times the identity are the weights.
        self.check(x, ctx)
        q, k, v = self.queries_keys_values(x, ctx)
        v = torch.eye(x.shape[1], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)  # (B, Hkv, T, T)
        call = self.make_call(q, k, v, ctx)._replace(dropout_p=0.0)
        y = self.attend(call, x, ctx)
        for modifier in self.modifiers.values():
            if modifier.on_weights:
                y = modifier.finish(y, v, x, ctx)
        return y

    def flops(self, block_size: int) -> float:
        """Return the floating-point operations of attention per token of a forward pass.

        Projections are not counted. A query head takes 4 D for each position that it sees: half the text on average,
        fewer with a window.
        """
        window = min(self.window or block_size, block_size)
        mean_seen = window - window**2 / (2 * block_size)
        return 2 * self.query_heads * self.channels_of_pair * mean_seen

    @property
    def score_channels(self) -> int:
        """Channels of a query and a key where they are multiplied: with PoPE 2 D."""
        return self.head_dim * (1 if self.pope is None else 2)

    @property
    def channels_of_pair(self) -> int:
        """Channels of a score and of a value."""
        return self.score_channels + self.head_dim
