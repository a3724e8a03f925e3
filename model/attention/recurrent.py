"""A state in place of the cache: linear attention, retention, the gated delta rule.

Softmax needs every key again for every query. Without it, one matrix S (D, Dv) for each head holds the sum over the
past. A token reads it with its query, and writes to it with its key and value:

    S_t = α_t S_{t-1} + k_t u_tᵀ,    y_t = S_tᵀ q_t

    linear     α = 1,  u = v                           a sum of everything
    retention  α < 1,  u = v                           a sum that fades
    delta      α(x),   u = β (v - (α_t S_{t-1})ᵀ k)    a sum that fades, with the value at the key replaced
    kda        the same, with an α for each row of S
    gdn2       u = w v - (α_t S_{t-1})ᵀ (b k), with an α and a b for each row of S and a w for each column

`token_by_token` is that definition, and decodes. `in_chunks` gives the same by products of matrices, and trains.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from model.attention.call import Call, Key, Output, Query, Value, repeat_heads
from model.attention.context import AttentionContext
from model.attention.fading import CHUNK, faded_products, left_between, split_chunks
from model.attention.layer import NORM_EPS, MultiHeadAttention, Stream
from model.attention.modifiers import PerHead
from model.attention.registry import form
from model.cache import in_type_of
from model.config import POSITION_SETTINGS, AttentionConfig
from model.layers import RMSNorm, rms_norm, upcast

LN_ZERO = -1000.0
"""ln α of a token that starts a text, so that the state before it vanishes.

Its exp is 0 in every precision, and 0 times it is 0: −∞ would give NaN.
"""
FADE = math.log(math.expm1(0.01))  # softplus(FADE) = 0.01
LogDecay = Float[Tensor, "*#lead #H T _"]
"""ln α of each token, (…, H, T, 1), or of each channel of its key, (…, H, T, D).

By channel, each row of the state fades at its own rate.
"""
Beta = Float[Tensor, "*lead H T"] | None
Rates = tuple[LogDecay, Beta]
State = Float[Tensor, "*lead H D Dv"]


def token_by_token(
    q: Query,
    k: Key,
    v: Value,
    log_decay: LogDecay,
    beta: Beta,
    state: State,
    erase: Key | None = None,
) -> tuple[Output, State]:
    """Return y and the last state, one token after the other.

    erase: what reads the old value that a write removes, in place of β k; β is then None, and v is written whole.
    """
    outputs = []
    decay = log_decay.exp()
    for t in range(q.shape[-2]):
        state = decay[..., t, :, None] * state
        key = k[..., t, :, None]  # (…, H, D, 1)
        written = v[..., t, None, :]  # (…, H, 1, Dv)
        if beta is not None:
            # The delta rule: subtract the value that the state has at the key, so that the write replaces it.
            written = beta[..., t, None, None] * (written - key.mT @ state)
        if erase is not None:
            written = written - erase[..., t, None, :] @ state
        state = state + key * written
        outputs.append(q[..., t, None, :] @ state)
    return torch.cat(outputs, -2), state


def in_chunks(
    q: Query,
    k: Key,
    v: Value,
    log_decay: LogDecay,
    beta: Beta,
    state: State,
    erase: Key | None = None,
) -> tuple[Output, State]:
    """Return the same as token_by_token, by matrix products in chunks of CHUNK tokens.

    (Yang et al. 2024 and 2025.) A token reads the state S before its chunk, and the writes U of its chunk up to itself.
    By the delta rule each write depends on those before it: (I + A) U = β (V - K S), A strictly lower triangular. The
    solution is U = fresh - erased S. Neither factor needs the state, so all chunks compute them at once. Only S goes
    from chunk to chunk.
    """
    # 1) For all chunks at once: everything that needs no state. n counts the heads of all texts, N the chunks.
    *lead, T, _ = q.shape
    log_decay = log_decay.expand(*lead, T, -1)
    q, k, v, log_decay = (split_chunks(t) for t in (q, k, v, log_decay))  # (…, H, T, D) -> (n, N, C, D)
    # The shares of the state before the chunk that are left at each token, and at the chunk's end.
    before = left_between(log_decay, -1)  # (n, N, C, 1 or D)
    left_at_end = before[..., -1, :, None]  # (n, N, 1 or D, 1)
    # The keys, faded as much as they are at the chunk's end.
    end_keys = (left_between(log_decay, CHUNK - 1) * k).mT  # (n, N, C, D) -> (n, N, D, C)
    reads = k if erase is None else split_chunks(erase)
    has_delta = beta is not None or erase is not None
    inside, *overlaps = faded_products([q, reads] if has_delta else [q], k, log_decay)  # (n, N, C, C)
    fresh = v
    erased = []
    if erase is not None:
        identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        solved = torch.linalg.solve_triangular(overlaps[0], identity, upper=False, unitriangular=True)
        fresh = solved @ v
        erased = [solved @ (before * reads)]
    if beta is not None:
        # Invert I + A. Of the overlaps the solver reads the part below the diagonal alone, which it takes for 1.
        scale = split_chunks(beta[..., None])  # (n, N, C, 1)
        identity = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        solved = torch.linalg.solve_triangular(scale * overlaps[0], identity, upper=False, unitriangular=True)
        solved = solved * scale.mT  # (…, C, C)
        fresh = solved @ v  # (…, C, C) @ (…, C, Dv) -> (…, C, Dv)
        erased = [solved @ (before * k)]  # (…, C, C) @ (…, C, D) -> (…, C, D)

    # 2) From chunk to chunk: the state, which each chunk reads, fades and writes to.
    state = state.flatten(0, -3)  # (…, H, D, Dv) -> (n, D, Dv)
    states, writes = [], []
    by_chunk = (t.unbind(1) for t in (fresh, left_at_end, end_keys, *erased))
    for written, left, keys, *readers in zip(*by_chunk, strict=True):
        states.append(state)
        for reader in readers:  # one by the delta rule, else none
            written = torch.baddbmm(written, reader, state, alpha=-1)  # (n, C, D) @ (n, D, Dv) -> (n, C, Dv)
        writes.append(written)
        state = torch.baddbmm(left * state, keys, written)  # (n, D, C) @ (n, C, Dv) -> (n, D, Dv)

    # 3) For all chunks at once: the results, from the state before the chunk and the writes inside it.
    # (n, N, C, D) @ (n, N, D, Dv) + (n, N, C, C) @ (n, N, C, Dv)
    written = torch.stack(writes, 1) if erased else fresh
    y = (before * q) @ torch.stack(states, 1) + inside @ written
    # (n, N, C, Dv) -> (…, H, T, Dv), without the padding; -1 would not do for no texts
    y = y.view(*lead, y.shape[1] * CHUNK, y.shape[-1])[..., :T, :]
    return y, state.view(*lead, *state.shape[-2:])


def of_one_length(x: Stream) -> Stream:
    """Return x, but let a trace, which repeats the steps of its length, refuse others."""
    if not torch.jit.is_tracing():
        return x
    T = int(x.shape[1])
    fits = torch._shape_as_tensor(x)[1] == T
    message = f"this trace serves texts of {T} tokens: trace a form with a state at the length of its texts."
    nothing = torch.ops.aten._functional_assert_async.msg(fits, message, x.new_zeros((), device="cpu"))
    return x + nothing.to(x)


def unit_length(x: Key) -> Key:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)  # as in Gated DeltaNet's own code


class Recurrent(MultiHeadAttention):
    """A form that keeps a state in place of keys and values.

    It has no scores to mask or drop, no window and no rotation. The order of tokens comes from the decay, from learned
    positions, or from other layers of the pattern.
    """

    modifiable = ("keys", "values", "result")
    unused_settings = ("attention_window", "attention_dropout", *POSITION_SETTINGS, *MultiHeadAttention.unused_settings)
    has_kv_cache = False
    has_onnx = False
    flops_of_state = 4.0
    """Floating-point operations for a token to read and write one number of the state."""

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(replace(config, position="none", attention_window=None), layer_idx=layer_idx)
        self.scan = in_chunks

    def rates(self, x: Stream) -> Rates:
        """Return ln α and β; β is None if all of v is written."""
        return x.new_zeros(1, x.shape[1], 1), None

    def erasers(self, k: Key, x: Stream) -> Key | None:
        """Return what reads the old values in place of β k; None for β k."""
        return None

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        """Read and write the state, in float32 at least, without autocast."""
        x = of_one_length(x)
        log_decay, beta = self.rates(x)
        if ctx.doc_starts is not None:
            # The first token of a text finds an empty state.
            is_first = ctx.places() == 0  # (B, T)
            log_decay = log_decay.masked_fill(is_first[:, None, :, None], LN_ZERO)
        kept = ctx.layer_cache(self.layer_idx)
        # One token, as in decoding, would fill no chunk.
        scan = token_by_token if x.shape[1] == 1 else self.scan
        # Rounding errors of half precision would add up in the state. Autocast knows no meta device.
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            q, k, v = (repeat_heads(upcast(t), self.n_head) for t in call[:3])
            state = kept.get("state", q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]))
            if state.size(0) != q.size(0):  # a product would broadcast one of them
                problem = f"queries of {q.size(0)} texts do not continue a state of {state.size(0)}"
                raise ValueError(f"{problem}: number the texts that go on by take() of the cache.")
            state = in_type_of(q, state, "state", self.layer_idx)
            y, state = scan(q, k, v, log_decay.to(q.dtype), beta, state, self.erasers(k, x))
        kept["state"] = state.detach()
        return y.to(x.dtype)

    def flops(self, block_size: int) -> float:
        """Return flops_of_state for each number of the states, as token by token.

        Chunks take more operations, in fewer products.
        """
        return self.flops_of_state * self.n_head * self.head_dim**2


@form("linear")
class LinearAttention(Recurrent):
    """Weights φ(q)ᵀφ(k) divided by their sum, φ = elu + 1.

    (Katharopoulos et al. 2020, eqs. 4 to 12.)
    """

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        q = upcast(call.q)
        k = feature(upcast(call.k))
        # A factor of a query's features cancels: of one that is negative in all channels the largest becomes 1.
        q = feature(q - q.detach().amax(-1, keepdim=True).clamp(max=0))
        # The channel of ones sums the weights, by which the others are divided.
        v = F.pad(call.v, (0, 1), value=1.0)  # (B, H, T, D) -> (B, H, T, D + 1)
        y = super().attend(Call(q, k, v), upcast(x), ctx)  # a sum may be too small or too large for half precision
        return (y[..., :-1] / y[..., -1:]).to(x.dtype)


def feature(x: Key) -> Key:
    """Return φ(x) = elu(x) + 1: x + 1 from 0 on, and e^x below, with all its digits.

    Below -80 it stays e^-80, so that no sum of weights is 0.
    """
    return torch.where(x > 0, x + 1, x.clamp(-80, 0).exp())


@form("retention")
class Retention(Recurrent):
    """Linear attention without φ, whose head h fades by 1 - 2^(-5-h) a token (Sun et al. 2023).

    Nothing divides by the sum of the weights; each head's result is RMS-normalised instead. The paper's rotation and
    SiLU gate are left out; retention+gate_silu has the gate.
    """

    def rates(self, x: Stream) -> Rates:
        head = torch.arange(self.n_head, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        log_decay = torch.log1p(-torch.exp2(-5 - head))
        return log_decay[:, None, None].expand(-1, x.shape[1], -1), None  # (H,) -> (H, T, 1)

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        y = super().attend(call._replace(q=call.q * self.head_dim**-0.5), x, ctx)
        return y if ctx.weights_only else rms_norm(y, None, NORM_EPS)


@form("delta")
class GatedDelta(Recurrent):
    """The gated delta rule: a state that fades by α(x), with writes that replace.

    A key's old value makes room for the new one.

    α = exp(-e^a softplus(x w_α + b)), β = σ(x w_β), keys and queries of length 1, each head's result RMS-normalised
    (Yang et al. 2025, Gated Delta Networks, eq. 10). With their convolution and SiLU gate it is delta+conv+gate_silu.
    model.allow_neg_eigval doubles β: at 2 a write reflects the state at the key, so the rule has eigenvalues from -1 to
    1 (Grazzi et al. 2025).
    """

    unused_settings = ("qk_norm", *(name for name in Recurrent.unused_settings if name != "allow_neg_eigval"))
    flops_of_state = 6.0
    fades_by_channel = False

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(replace(config, qk_norm=False), layer_idx)
        C = config.n_embd
        H = config.n_head
        self.largest_beta = 2.0 if config.allow_neg_eigval else 1.0
        self.beta = PerHead(C, H)
        # softplus gives 0.01 at first. e^a goes from 1 in the first head to 16 in the last: α from 0.99 to 0.85.
        decays = H * self.head_dim if self.fades_by_channel else H
        self.fade = PerHead(C, decays, torch.full((decays,), FADE))
        rates = [math.log(1 + 15 * h / max(1, H - 1)) for h in range(H)]
        self.log_rate = nn.Parameter(torch.tensor(rates))
        self.out_norm = RMSNorm(self.head_dim, eps=NORM_EPS)

    def rates(self, x: Stream) -> Rates:
        beta = torch.sigmoid(upcast(self.beta(x)))
        return self.log_decay(x), beta if self.largest_beta == 1 else self.largest_beta * beta

    def log_decay(self, x: Stream) -> LogDecay:
        """Return ln α, of each token or of each channel of its key."""
        fade = F.softplus(upcast(self.fade(x)))
        fade = fade.unflatten(1, (self.n_head, -1)).mT  # (B, H·n, T) -> (B, H, T, n)
        rate = upcast(self.log_rate).exp()[:, None, None]
        return -rate * fade

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        q = unit_length(upcast(call.q)) * self.head_dim**-0.5
        k = unit_length(upcast(call.k))
        y = super().attend(call._replace(q=q, k=k), x, ctx)
        return y if ctx.weights_only else self.out_norm(y)


@form("kda")
class KimiDelta(GatedDelta):
    """The gated delta rule with a decay for each channel of the keys.

    (Kimi Team 2025, Kimi Linear, eq. 1.) Each row of the state so fades at its own rate. w_α is one matrix; the paper
    has two narrow ones. kda+conv+gate_element has its convolution and gate.
    """

    fades_by_channel = True


@form("gdn2")
class GatedDelta2(KimiDelta):
    """The gated delta rule with β for each channel, one to erase and one to write.

    (NVIDIA 2026, Gated DeltaNet-2.)

        S_t = (I - k (b k)ᵀ) Diag(α) S_{t-1} + k (w v)ᵀ

    b = σ(x W_b) of each channel of a key, w = σ(x W_w) of each channel of a value; model.allow_neg_eigval doubles b.
    With b = w = β in all channels it is kda. gdn2+conv+gate_element has the paper's convolution and gate.
    """

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx)
        del self.beta
        channels = self.n_head * self.head_dim
        self.erase = PerHead(config.n_embd, channels)
        self.write = PerHead(config.n_embd, channels)

    def rates(self, x: Stream) -> Rates:
        return self.log_decay(x), None

    def erasers(self, k: Key, x: Stream) -> Key:
        return self.largest_beta * self.of_channels(self.erase, x) * k

    def of_channels(self, gate: PerHead, x: Stream) -> Float[Tensor, "B H T D"]:
        return torch.sigmoid(upcast(gate(x))).unflatten(1, (self.n_head, -1)).mT  # (B, H·D, T) -> (B, H, T, D)

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        if ctx.weights_only:  # of w v, whose weight is one number for all channels
            return super().attend(call, x, ctx)
        return super().attend(call._replace(v=self.written(call.v, x)), x, ctx)

    def written(self, v: Value, x: Stream) -> Output:
        """Return the values as they are written, w v, for each head."""
        return self.of_channels(self.write, x) * upcast(repeat_heads(v, self.n_head))


@form("short_conv")
class ShortConvolution(Recurrent):
    """A gated convolution over three tokens, in place of attention (LFM2, Liquid AI 2025).

        y_t = c_t Σ_j w_j (b x̃)_{t-j},  j from 0 to 2,  (c, b, x̃) = x W

    All products are of channels, and w has a number for each. There is no state but two tokens; other layers of the
    pattern look further. w starts at the token alone. Queries, keys and values are c, b and x̃.
    """

    unused_settings = ("qk_norm", "n_head", "n_kv_head", *Recurrent.unused_settings)
    width = 3

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(replace(config, qk_norm=False, n_kv_head=None), layer_idx)
        alone = torch.tensor([0.0] * (self.width - 1) + [1.0])
        self.taps = nn.Parameter(alone.repeat(self.n_head * self.head_dim, 1))  # (H·D, 3), the latest token last

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        taps = self.taps.to(x.dtype).view(self.n_head, 1, self.head_dim, self.width).unbind(-1)
        if ctx.weights_only:
            return self.mean_weights(call, taps, ctx)
        written = call.k * call.v
        y = taps[-1] * written
        earlier = ctx.previous(self.layer_idx, "written", written, self.width - 1)
        for tap, before in zip(reversed(taps[:-1]), earlier, strict=True):
            y = y + tap * before
        return call.q * y

    def mean_weights(self, call: Call, taps: tuple[Tensor, ...], ctx: AttentionContext) -> Output:
        """Return each head's weights, the mean of those of its channels, for pictures."""
        T = call.q.shape[-2]
        weights = call.q.new_zeros(*call.q.shape[:-1], T)
        for back, tap in enumerate(reversed(taps)):
            if back >= T:
                break
            mean = (call.q[..., back:, :] * tap * call.k[..., : T - back, :]).mean(-1)
            if ctx.doc_starts is not None:
                mean = mean.masked_fill((ctx.places() < back)[:, None, back:], 0)
            weights = weights + torch.diag_embed(mean, -back)
        return weights

    def flops(self, block_size: int) -> float:
        """Return two operations for each tap, and two gates, of each channel."""
        return (2 * self.width + 2) * self.n_head * self.head_dim
