"""Small changes to a layer, each at one place of it: attention=sdpa+gate+sink.

A modifier is a class that overrides one of Modifier's hooks. Some start as the identity: at step 0 the modified model
equals the plain one. This file has them by their hook:

mix     changes queries, keys and values before they are rotated and cached
score   changes the call: the scale of the queries, a bias, one more key
finish  changes each head's result

Modifiers of one hook act in the order of their registration, that of this file and then of your own, but a modifier
that is `last` acts after all others.
"""

import difflib
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from common.errors import SettingsError
from model.attention.call import (
    Call,
    Key,
    Output,
    Query,
    Relative,
    Value,
    add_bias,
    add_sink,
    lengths,
    repeat_heads,
    visible_keys,
)
from model.attention.context import AttentionContext
from model.attention.layer import NORM_EPS, Heads, MultiHeadAttention, NewKeys, NewValues, Stream
from model.attention.masks import alibi_slopes
from model.attention.registry import modifier
from model.config import AttentionConfig
from model.layers import Linear, RMSNorm, cumulative_sum, rms_norm, upcast


class Modifier(nn.Module):
    """A change to a layer, made by attention=FORM+NAME.

    Methods that are not overridden change nothing. Muon updates the weights of nn.Linear layers, AdamW every other
    parameter.
    """

    changes: ClassVar[str]
    last = False
    """Whether it acts after all others, in any order of registration or typing, as a sink: its score joins final
    ones."""
    queries_per_head = 1
    """The queries that a head has in the layer's projections; finish() joins their results."""
    replaces_qk_norm = False
    """Whether the layer has no QK-norm, in whose place it has its own."""
    needs_doc_starts = False
    """Whether it sums up or shifts the past: it then needs the text's start, not a mask."""
    on_weights = False
    """Whether finish() acts on weights too (ctx.weights_only): diff's subtracts one map of weights from another."""

    @classmethod
    def check_as(cls, name: str) -> None:
        """Raise SettingsError for a name that torch has, or a class that overrides no hook.

        A base class need not.
        """
        if hasattr(nn.ModuleDict(), name):  # in which a layer keeps its modifiers
            raise SettingsError(f"modifier {name} has the name of a part of torch's modules", "choose another name")
        hooks = ("mix", "score", "finish")
        if any(getattr(cls, hook) is not getattr(Modifier, hook) for hook in hooks):
            return
        for name in vars(cls):
            if near := difflib.get_close_matches(name, hooks, n=1, cutoff=0.8):
                raise SettingsError(f"modifier {cls.__name__} has {name}, which nothing calls", f"write {near[0]}()")
        raise SettingsError(f"modifier {cls.__name__} changes nothing", "override mix(), score() or finish()")

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        """layer: the one that the modifier changes, with its projections."""
        super().__init__()
        self.layer_idx = layer.layer_idx

    def check_stack(self, layers: list[MultiHeadAttention], attention: str) -> None:
        """Raise SettingsError if the layers of a GPT, of the pattern `attention`, do not suit it."""

    def mix(
        self,
        q: Query,
        k: NewKeys,
        v: NewValues,
        x: Stream,
        ctx: AttentionContext,
    ) -> Heads:
        """Change queries, keys and values before they are rotated and cached."""
        return q, k, v

    def score(self, call: Call, x: Stream, ctx: AttentionContext) -> Call:
        """Change the mask or bias over the scores, scale the queries, or add a key."""
        return call

    def finish(
        self,
        y: Output,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Output:
        """Change each head's result; v holds the values of the queries' own tokens."""
        return y

    @classmethod
    def change_projections(cls, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        """Fit a layer to queries_per_head and replaces_qk_norm.

        The layer calls it before it makes any modifier.
        """
        if cls.queries_per_head > 1:
            # Make them again, wider. The first ones, thrown away, have drawn random numbers: a seed would give other
            # weights without them, and the tables of docs/ other results.
            layer.query_heads *= cls.queries_per_head
            layer.make_projections(config)
        if cls.replaces_qk_norm:
            layer.q_norm = nn.Identity()
            layer.k_norm = nn.Identity()


class PerHead(nn.Module):
    """A number per head and token, x Wᵀ + b.

    W starts at zero. It is no nn.Linear, because Muon would then update so thin a matrix.
    """

    def __init__(self, C: int, H: int, bias: Float[Tensor, " H"] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(H, C))
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Stream) -> Float[Tensor, "B H T"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias).mT  # (B, T, C) -> (B, H, T)


# mix()


@modifier("value_residual", changes="values")
class ValueResidual(Modifier):
    """v ← λ₁ v + λ₂ v₁, with v₁ the values of the first layer that has this modifier.

    (Zhou et al. 2024.) λ starts at (1, 0).
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.mixture = nn.Parameter(torch.tensor([1.0, 0.0]))

    def check_stack(self, layers: list[MultiHeadAttention], attention: str) -> None:
        if len({(layer.kv_heads, layer.head_dim) for layer in layers if "value_residual" in layer.modifiers}) > 1:
            problem = f"attention={attention}: value_residual adds the values of layers with other heads"
            raise SettingsError(problem, "leave it out of the layers that differ")

    def mix(
        self,
        q: Query,
        k: Key,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Heads:
        # The first layer with this modifier finds no values yet, and leaves its own for the others.
        own, first = self.mixture.to(v.dtype)
        if "values" not in ctx.shared:
            ctx.check_gradient()
            ctx.shared["values"] = v
        return q, k, own * v + first * ctx.shared["values"]


@modifier("key_offset", changes="keys")
class KeyOffset(Modifier):
    """The later half of a key's channels is the previous token's.

    A query so finds the token after an earlier match. That is induction (Olsson et al. 2022) in one layer instead of
    two. The first token of a text gets zeros. modded-nanogpt's partial key offset (2025) shifts the channels that are
    not rotated; with model.rope_fraction=0.5 this does too.
    """

    needs_doc_starts = True

    def mix(
        self,
        q: Query,
        k: Key,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Heads:
        half = k.shape[-1] // 2
        # The key of each row's previous token, for the first row from the cache.
        (before,) = ctx.previous(self.layer_idx, "last_key", k, 1)
        return q, torch.cat((k[..., :half], before[..., half:]), -1), v


# score()


@modifier("logn", changes="scores")
class LogN(Modifier):
    """Scores × σ ln n, n the number of visible keys, σ learned per head.

    (Nakanishi 2025, eq. 3, SSMax.) A softmax over more keys is flatter; this keeps it as sharp. σ starts at 0.43, where
    their training put it.
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.factor = nn.Parameter(torch.full((layer.n_head,), 0.43))

    def score(self, call: Call, x: Stream, ctx: AttentionContext) -> Call:
        H, T = call.q.shape[1:3]
        S = call.k.shape[2]
        mask = None
        if call.mask is not None or call.indexer is not None:
            mask = visible_keys(call)
        if mask is not None:
            # Count the keys in the mask. A row that sees none counts as 1: the logarithm stays finite.
            mask = mask.expand(*mask.shape[:-1], S)
            n = mask.sum(-1, keepdim=True).clamp(min=1)  # (…, T, S) -> (…, T, 1)
        else:
            # Without a mask n is the position in the text, counted from 1, up to the window: no matrix is needed.
            n = torch.arange(S - T + 1, S + 1, device=call.q.device)[:, None]  # (T, 1)
            if call.doc_starts is not None:
                n = (n - call.doc_starts[:, None, :, None]).clamp(min=1)  # (B, 1, T, 1)
            n = n.clamp(max=call.window or S)

        # Scale the queries: their scores then have the factor. All queries of a head share its σ.
        factor = repeat_heads(self.factor[:, None, None], H)
        logarithm = n.to(torch.promote_types(call.q.dtype, torch.float32)).log()
        return call._replace(q=call.q * (factor * logarithm).to(call.q.dtype))


@modifier("forget", changes="scores")
class Forget(Modifier):
    """Bias F_i − F_j, with F the running sum of ln f (Lin et al. 2025, FoX).

    f = σ(x w + b) per head. A token fades with every later token, at a rate that those tokens choose. b starts at
    ALiBi's slopes: at step 0 this is ALiBi. The paper has no RoPE: sdpa+forget+nope, or model.position=none.
    """

    needs_doc_starts = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        # Solve ln σ(b) = −slope for b. By math, not torch: on the meta device (model/size.py) tensors have no numbers.
        bias = [-math.log(math.expm1(slope)) for slope in alibi_slopes(layer.n_head)]
        self.make_gate(config.n_embd, torch.tensor(bias))

    def make_gate(self, C: int, bias: Float[Tensor, " H"]) -> None:
        self.gate = PerHead(C, len(bias), bias)

    def logits(self, x: Stream) -> Float[Tensor, "B H T"]:
        """Return the gates of each token before the sigmoid."""
        return self.gate(x)

    def score(self, call: Call, x: Stream, ctx: AttentionContext) -> Call:
        T, S = lengths(call)
        log_f = F.logsigmoid(upcast(self.logits(x)))[..., None]
        if ctx.cache is not None:
            # Its keys need the gates of earlier tokens too: (B, H, T, 1) -> (B, H, S, 1).
            log_f = ctx.cache.append(self.layer_idx, type(self).__name__, log_f, call.window)
        # Sum from the first key on: only differences count. F_i is the sum at the query, F_j that at the key.
        total = cumulative_sum(log_f[:, :, -S:, 0], 2)  # (B, H, S)
        return add_bias(call, total[..., -T:], -total)


@modifier("fade", changes="scores")
class Fade(Forget):
    """Forget with one f per head for all tokens: ALiBi with learned slopes."""

    def make_gate(self, C: int, bias: Float[Tensor, " H"]) -> None:
        self.rate = nn.Parameter(bias)

    def logits(self, x: Stream) -> Float[Tensor, "B H T"]:
        return self.rate[:, None].expand(x.shape[0], -1, x.shape[1])


@modifier("sink", changes="scores")
class Sink(Modifier):
    """One more key, of value zero and of score b, learned per head (gpt-oss, 2025).

    b = 0 is softmax1. A head may then attend to nothing. The result is y · σ(ln Σ exp(score) − b): a sink is a gate.
    """

    last = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        no_sink = layer.function.weighting.no_sink
        if no_sink is not None:
            problem = f"attention={config.attention}: {no_sink} under {config.form}"
            raise SettingsError(problem, "leave out sink, or choose another form")
        self.bias = nn.Parameter(torch.zeros(layer.n_head))

    def score(self, call: Call, x: Stream, ctx: AttentionContext) -> Call:
        # The two queries of a head of diff share its sink.
        return add_sink(call, self.bias.repeat_interleave(call.q.shape[-3] // len(self.bias)))


@modifier("token_sink", changes="scores")
class TokenSink(Modifier):
    """A sink whose score each token computes, x w per head (Inkling 2, 2026).

    w starts at 0: softmax1. A token may so ask its heads for little, whatever they find.
    """

    last = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        weighting = layer.function.weighting
        if weighting.no_sink is not None or not weighting.ignores_shifts:
            reason = weighting.no_sink or "a number added to all scores changes the weights"
            problem = f"attention={config.attention}: {reason} under {config.form}"
            raise SettingsError(problem, "leave out token_sink, or choose another form")
        self.weight = PerHead(config.n_embd, layer.n_head)

    def score(self, call: Call, x: Stream, ctx: AttentionContext) -> Call:
        # The two queries of a head of diff share its sink.
        return add_sink(call, repeat_heads(upcast(self.weight(x))[..., None], call.q.shape[-3])[..., 0])


@modifier("diff", changes="queries")
class Differential(Modifier):
    """y₁ − σ(λ) y₂: each head attends twice to the same keys, and common noise cancels.

    (Ye et al. 2026, version 2.) λ = x w per head and token. The queries' projection is twice as wide.
    """

    queries_per_head = 2
    on_weights = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.weight = PerHead(config.n_embd, layer.n_head)

    def finish(
        self,
        y: Output,
        v: Value,
        x: Stream,
        ctx: AttentionContext,
    ) -> Tensor:
        first, second = y.unflatten(1, (-1, 2)).unbind(2)  # (B, 2H, T, Dv) -> twice (B, H, T, Dv)
        return first - torch.sigmoid(self.weight(x))[..., None] * second


# finish()


@modifier("xsa", changes="result")
class Exclusive(Modifier):
    """y − tanh(α) · (the projection of y on the token's own value).

    α is learned per head, at first 0. The residual stream has the token's own value already. Zhai 2026 (XSA) removes
    all of it (α = ∞); modded-nanogpt learns α.
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.strength = nn.Parameter(torch.zeros(layer.n_head))

    def finish(self, y: Output, v: Value, x: Stream, ctx: AttentionContext) -> Output:
        # Normalise in float32: in half precision the squares of small values would vanish.
        v = F.normalize(upcast(v), dim=-1).to(y.dtype)
        v = repeat_heads(v, y.shape[-3])
        strength = torch.tanh(self.strength)[:, None, None].to(y.dtype)  # (H, 1, 1)
        on_v = (y * v).sum(-1, keepdim=True)
        return y - strength * on_v * v


@modifier("out_norm", changes="result")
class OutNorm(Modifier):
    """RMS norm of each head's result, without weights (Muse Spark, 2026).

    It is a gate's control: Qiu et al. (2025, Table 3) gain 0.18 of perplexity by this norm alone, and 0.27 by
    gate_element. With both, the norm comes first.
    """

    def finish(self, y: Output, v: Value, x: Stream, ctx: AttentionContext) -> Output:
        return rms_norm(y, None, NORM_EPS)


@modifier("gate", changes="result")
class Gate(Modifier):
    """y · 2σ(x w), a number per head (Qiu et al. 2025, eq. 5, headwise).

    The 2 makes it start as the identity.
    """

    each_channel = False

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        numbers = layer.head_dim if self.each_channel else 1
        self.gate = PerHead(config.n_embd, layer.n_head * numbers)

    def finish(self, y: Output, v: Value, x: Stream, ctx: AttentionContext) -> Output:
        return y * self.activation(self.logits(x, y.shape[1]))

    def logits(self, x: Stream, heads: int) -> Float[Tensor, "B H T n"]:
        return self.gate(x).unflatten(1, (heads, -1)).transpose(2, 3)  # (B, H·n, T) -> (B, H, T, n)

    def activation(self, logits: Tensor) -> Tensor:
        return 2 * torch.sigmoid(logits)


@modifier("gate_element", changes="result")
class GateElement(Gate):
    """y · 2σ(x W), a number per channel (Qiu et al. 2025, eq. 5, elementwise)."""

    each_channel = True


@modifier("gate_biased", changes="result")
class GateBiased(GateElement):
    """gate_element with a bias for each head, y · 2σ(x W + b_h) (Beam, 2026).

    b starts at 0.
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.bias = nn.Parameter(torch.zeros(layer.n_head))

    def logits(self, x: Stream, heads: int) -> Float[Tensor, "B H T n"]:
        return super().logits(x, heads) + self.bias[:, None, None].to(x.dtype)


@modifier("gate_softplus", changes="result")
class GateSoftplus(Gate):
    """y · softplus(x w) / ln 2, a number per head (Laguna, 2026, without the ln 2).

    It has no upper bound. The ln 2 makes it start as the identity.
    """

    def activation(self, logits: Tensor) -> Tensor:
        return F.softplus(upcast(logits)).to(logits.dtype) / math.log(2)


@modifier("gate_silu", changes="result")
class GateSilu(Modifier):
    """y · SiLU(x W), a number per channel.

    RetNet (Sun et al. 2023) and Gated DeltaNet (Yang et al. 2025) have it. SiLU has no bound, and SiLU(0) = 0, so W
    does not start at zero.
    """

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.gate_proj = Linear(config.n_embd, layer.n_head * layer.head_dim, bias=False)

    def finish(self, y: Output, v: Value, x: Stream, ctx: AttentionContext) -> Output:
        gate = F.silu(self.gate_proj(x))
        return y * gate.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)  # (B, T, H·D) -> (B, H, T, D)


# mix() once more. These came later: they act, and a seed draws their weights, after those above.


@modifier("joint_norm", changes="keys")
class JointNorm(Modifier):
    """RMS norm of queries, and of keys, over all heads at once (OLMo 2, 2025).

    It takes the place of QK-norm per head.
    """

    replaces_qk_norm = True

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
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
        super().__init__(layer, config)
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
        super().__init__(layer, config)
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


# score() once more.


@modifier("relative", changes="scores")
class RelativeBias(Modifier):
    """A bias by the distance, of a shape that the query's token chooses.

    b_td = (x_t W_r) · p_d per head (Inkling, 2026). The layer learns 16 profiles p over the distances up to 1,024, or
    the block size if that is less; beyond them the bias is 0. They start at 0. Inkling has this in place of RoPE:
    sdpa+relative+nope.
    """

    rank = 16
    farthest = 1024

    def __init__(self, layer: MultiHeadAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.r_proj = Linear(config.n_embd, layer.n_head * self.rank, bias=False)
        self.profiles = nn.Parameter(torch.zeros(self.rank, min(self.farthest, config.block_size)))

    def score(self, call: Call, x: Stream, ctx: AttentionContext) -> Call:
        r = self.r_proj(x).unflatten(-1, (-1, self.rank)).transpose(1, 2)  # (B, T, C) -> (B, H, T, rank)
        return call._replace(relative=Relative(repeat_heads(r, call.q.shape[-3]), self.profiles))
