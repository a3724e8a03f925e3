"""A state in place of the cache: linear attention, retention, the gated delta rule.

Softmax needs every key again for every query. Without it the sum over the past can be kept as one matrix S for each
head, (D, Dv), which a token reads with its query and writes with its key and value:

    S_t = α_t S_{t-1} + k_t u_tᵀ,    y_t = S_tᵀ q_t

    linear     α = 1,  u = v           a sum of everything
    retention  α < 1,  u = v           which fades
    delta      α(x),   u = β (v - (α_t S_{t-1})ᵀ k)    and where only what is new at the key is written
    kda        the same, with an α for each row of S

`token_by_token` is that definition, and decodes. `in_chunks` gives the same by products of matrices, and trains.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from model.attention.contract import Key, Output, Query, Scores, Value, repeat_heads, upcast
from model.attention.functions import matmul
from model.attention.layer import NORM_EPS, OF_ORDER, MultiHeadAttention, Pass, Stream
from model.attention.modifiers import PerHead
from model.attention.names import form
from model.config import AttentionConfig
from model.layers import RMSNorm

CHUNK = 64
FADE = math.log(math.expm1(0.01))
LogDecay = Float[Tensor, "*#lead #H T _"]
"""ln α of each token, (…, H, T, 1), or of each channel of its key, (…, H, T, D), so that rows fade by themselves."""
Beta = Float[Tensor, "*lead H T"] | None
Begins = Bool[Tensor, "*#lead #H T"] | None
State = Float[Tensor, "*lead H D Dv"]


def token_by_token(
    q: Query, k: Key, v: Value, log_decay: LogDecay, beta: Beta, begins: Begins, state: State
) -> tuple[Output, State]:
    """Return y and the last state, one token after the other; `begins` marks tokens that find an empty state."""
    outputs = []
    for t in range(q.shape[-2]):
        decay = log_decay[..., t, :].exp()
        if begins is not None:
            decay = decay.masked_fill(begins[..., t, None], 0)
        state = decay[..., None] * state
        key, written = k[..., t, :, None], v[..., t, None, :]  # (…, H, D, 1), (…, H, 1, Dv)
        if beta is not None:
            written = beta[..., t, None, None] * (written - key.mT @ state)
        state = state + key * written
        outputs.append(q[..., t, None, :] @ state)
    return torch.cat(outputs, -2), state


def in_chunks(
    q: Query, k: Key, v: Value, log_decay: LogDecay, beta: Beta, begins: Begins, state: State
) -> tuple[Output, State]:
    """Return the same as token_by_token, CHUNK tokens at a time (Yang et al. 2024 and 2025).

    In a chunk the state before it is read once. What its tokens write, U, follows from each other's: of the rows of
    (I + A) U = β (V - K S), A strictly lower triangular, the first is known, and each gives the next.
    """
    outputs, size = [], CHUNK if log_decay.shape[-1] == 1 else CHUNK // 4  # as each pair of tokens takes D numbers
    for start in range(0, q.shape[-2], size):
        chunk = slice(start, start + size)
        query, key, written = (t[..., chunk, :] for t in (q, k, v))
        faded = log_decay[..., chunk, :].cumsum(-2)  # (…, H, T, 1 or D): ln of what is left at t of the state before
        between = faded[..., :, None, :] - faded[..., None, :, :]  # (…, H, T, T, 1 or D): and of what s wrote
        before = faded.exp()
        T = between.shape[-2]
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        if begins is not None:
            text = begins[..., chunk].cumsum(-1)  # the number of the token's text in this chunk
            seen = seen & (text[..., :, None] == text[..., None, :])
            before = before * (text == 0)[..., None]
        left = between.masked_fill(~seen[..., None], -torch.inf).exp()
        if beta is not None:
            scale = beta[..., chunk, None]
            system = scale * faded_products(key, key, left)  # its diagonal is taken for 1
            written = scale * (written - (before * key) @ state)
            written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        outputs.append((before * query) @ state + faded_products(query, key, left) @ written)
        state = before[..., -1, :, None] * state + (key * left[..., -1, :, :]).mT @ written
    return torch.cat(outputs, -2), state


def faded_products(a: Query, b: Key, left: Float[Tensor, "*#lead #H T T _"]) -> Scores:
    """Return the products of all pairs, each channel times what is left of it."""
    return left[..., 0] * (a @ b.mT) if left.shape[-1] == 1 else torch.einsum("...td,...sd,...tsd->...ts", a, b, left)


class Recurrent(MultiHeadAttention):
    """A form that keeps a state in place of keys and values. It has no scores to mask or drop, and no window.

    Nothing rotates: order comes from the decay, from learned positions, or from other layers of the pattern.
    """

    takes: ClassVar[tuple[str, ...]] = ("keys", "values", "result")
    ignores = ("attention_window", "attention_dropout", *OF_ORDER, *MultiHeadAttention.ignores)
    keeps_rows = False
    flops_of_state = 4.0
    """Floating-point operations a token for each number of the state: to write it, and to read it."""

    def __init__(self, config: AttentionConfig, number: int = 0) -> None:
        super().__init__(replace(config, position="none", attention_window=None), number, matmul)
        self.scan = in_chunks

    def rates(self, x: Stream) -> tuple[LogDecay, Beta]:
        """Return ln α and β, or None where all of v is written."""
        return x.new_zeros(1, x.shape[1], 1), None

    def gather(self, q: Query, k: Key, v: Value, x: Stream, now: Pass) -> Output:
        """Read and write the state, in float32 at least, whatever autocast says."""
        log_decay, beta = self.rates(x)
        kept, scan = now.kept(self.number), token_by_token if q.shape[-2] == 1 else self.scan
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):  # which knows no meta device
            q, k, v = (repeat_heads(upcast(t), self.n_head) for t in (q, k, v))
            state = kept.get("state", q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]))
            y, state = scan(q, k, v, log_decay.to(q.dtype), beta, now.begins(q.shape[-2]), state)
        kept["state"] = state.detach()
        return y.to(x.dtype)

    def flops(self, block_size: int) -> float:
        """flops_of_state for each number of the states, as token by token; chunks take more, in fewer products."""
        return self.flops_of_state * self.n_head * self.head_size**2


@form("linear")
class LinearAttention(Recurrent):
    """Weights φ(q)ᵀφ(k) divided by their sum, φ = elu + 1 (Katharopoulos et al. 2020, eqs. 4 to 12).

    A value of 1 beside the others sums the weights.
    """

    def gather(self, q: Query, k: Key, v: Value, x: Stream, now: Pass) -> Output:
        y = super().gather(F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0), x, now)
        return y[..., :-1] / y[..., -1:]


@form("retention")
class Retention(Recurrent):
    """Linear attention without φ, whose head h fades by 1 - 2^(-5-h) a token (Sun et al. 2023).

    Nothing divides by the sum of the weights; each head's result is RMS-normalised instead. Their rotation and their
    SiLU gate are left out: retention+gate_silu has the gate.
    """

    def rates(self, x: Stream) -> tuple[LogDecay, Beta]:
        head = torch.arange(self.n_head, dtype=torch.float32, device=x.device)
        return torch.log1p(-torch.exp2(-5 - head))[:, None, None].expand(-1, x.shape[1], -1), None

    def gather(self, q: Query, k: Key, v: Value, x: Stream, now: Pass) -> Output:
        y = super().gather(q * self.head_size**-0.5, k, v, x, now)
        return y if now.weights_only else F.rms_norm(y, [self.head_size], eps=NORM_EPS)


@form("delta")
class GatedDelta(Recurrent):
    """The gated delta rule: a state that fades by α(x), and of which a key's old value makes room for the new one.

    α = exp(-e^a softplus(x w_α + b)), β = σ(x w_β), keys and queries of length 1, each head's result RMS-normalised
    (Yang et al. 2025, Gated Delta Networks, eq. 10). With their convolution and SiLU gate it is delta+conv+gate_silu.
    """

    ignores = ("qk_norm", *Recurrent.ignores)
    flops_of_state = 6.0

    def __init__(self, config: AttentionConfig, number: int = 0) -> None:
        super().__init__(replace(config, qk_norm=False), number)
        C, H = config.n_embd, config.n_head
        self.beta = PerHead(C, H)
        self.fade = PerHead(C, H, torch.full((H,), FADE))  # softplus gives 0.01 at first,
        rates = [math.log(1 + 15 * h / max(1, H - 1)) for h in range(H)]  # so that α is from 0.99 to 0.85
        self.log_rate = nn.Parameter(torch.tensor(rates))
        self.out_norm = RMSNorm(self.head_size, eps=NORM_EPS)

    def rates(self, x: Stream) -> tuple[LogDecay, Beta]:
        fade = F.softplus(upcast(self.fade(x))).unflatten(1, (self.n_head, -1)).mT  # (B, H·n, T) -> (B, H, T, n)
        return -upcast(self.log_rate).exp()[:, None, None] * fade, torch.sigmoid(upcast(self.beta(x)))

    def gather(self, q: Query, k: Key, v: Value, x: Stream, now: Pass) -> Output:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (upcast(q), upcast(k)))  # as theirs
        y = super().gather(q * self.head_size**-0.5, k, v, x, now)
        return y if now.weights_only else self.out_norm(y)


@form("kda")
class KimiDelta(GatedDelta):
    """The gated delta rule with a decay for each channel of the keys (Kimi Team 2025, Kimi Linear, eq. 1).

    Rows of the state keep what they hold for different times. w_α is one matrix, theirs two narrow ones; their
    convolution and gate are kda+conv+gate_element.
    """

    def __init__(self, config: AttentionConfig, number: int = 0) -> None:
        super().__init__(config, number)
        channels = self.n_head * self.head_size
        self.fade = PerHead(config.n_embd, channels, torch.full((channels,), FADE))
