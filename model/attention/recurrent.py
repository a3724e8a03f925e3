"""A state in place of the cache: linear attention, retention, the gated delta rule.

Softmax needs every key again for every query. Without it the sum over the past can be kept as one matrix S for each
head, (D, Dv), which a token reads with its query and writes with its key and value:

    S_t = α_t S_{t-1} + k_t u_tᵀ,    y_t = S_tᵀ q_t

    linear     α = 1,  u = v           a sum of everything
    retention  α < 1,  u = v           which fades
    delta      α(x),   u = β (v - (α_t S_{t-1})ᵀ k)    and where only what is new at the key is written

`token_by_token` is that definition, and decodes. `in_chunks` gives the same by products of matrices, and trains.
"""

import math
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from model.attention.contract import Key, Output, Query, Stream, Value, repeat_heads
from model.attention.functional import matmul
from model.attention.layer import NORM_EPS, MultiHeadAttention
from model.attention.places import Here, Kept, PerHead, wide
from model.attention.registry import form
from model.config import AttentionConfig
from model.masks import check_broadcast, real_keys
from model.norms import RMSNorm

CHUNK = 64
PerToken = Float[Tensor, "*#lead #H T"]
State = Float[Tensor, "*lead H D Dv"]


def token_by_token(
    q: Query, k: Key, v: Value, log_decay: PerToken, beta: PerToken | None, begins: Bool[Tensor, "*#lead #H T"] | None,
    state: State,
) -> tuple[Output, State]:  # fmt: skip
    """Return y and the last state, one token after the other; `begins` marks tokens that find an empty state."""
    outputs = []
    for t in range(q.shape[-2]):
        decay = log_decay[..., t].exp()
        if begins is not None:
            decay = decay.masked_fill(begins[..., t], 0)
        state = decay[..., None, None] * state
        key, written = k[..., t, :, None], v[..., t, None, :]  # (…, H, D, 1), (…, H, 1, Dv)
        if beta is not None:
            written = beta[..., t, None, None] * (written - key.mT @ state)
        state = state + key * written
        outputs.append(q[..., t, None, :] @ state)
    return torch.cat(outputs, -2), state


def in_chunks(
    q: Query, k: Key, v: Value, log_decay: PerToken, beta: PerToken | None, begins: Bool[Tensor, "*#lead #H T"] | None,
    state: State,
) -> tuple[Output, State]:  # fmt: skip
    """Return the same as token_by_token, CHUNK tokens at a time (Yang et al. 2024 and 2025).

    In a chunk the state before it is read once. What its tokens write, U, follows from each other's: of the rows of
    (I + A) U = β (V - K S), A strictly lower triangular, the first is known, and each gives the next.
    """
    outputs = []
    for start in range(0, q.shape[-2], CHUNK):
        chunk = slice(start, start + CHUNK)
        query, key, written = (t[..., chunk, :] for t in (q, k, v))
        faded = log_decay[..., chunk].cumsum(-1)  # (…, H, T): ln of what is left at t of the state before
        between = faded[..., :, None] - faded[..., None, :]  # (…, H, T, T): and of what s wrote
        before = faded.exp()
        T = between.shape[-1]
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        if begins is not None:
            text = begins[..., chunk].cumsum(-1)  # the number of the token's text in this chunk
            seen = seen & (text[..., :, None] == text[..., None, :])
            before = before * (text == 0)
        left = between.masked_fill(~seen, -torch.inf).exp()
        if beta is not None:
            scale = beta[..., chunk, None]
            system = scale * left * (key @ key.mT)  # its diagonal is taken for 1
            written = scale * (written - before[..., None] * (key @ state))
            written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        outputs.append(before[..., None] * (query @ state) + (left * (query @ key.mT)) @ written)
        state = before[..., -1:, None] * state + (key * left[..., -1, :, None]).mT @ written
    return torch.cat(outputs, -2), state


class Recurrent(MultiHeadAttention):
    """A form that keeps a state in place of keys and values. It has no scores to drop, and no window.

    Nothing rotates: order comes from the decay, from learned positions, or from other layers of the pattern.
    """

    places: ClassVar[tuple[str, ...]] = ("keys", "values", "result")
    ignores = ("position", "attention_window", "attention_dropout", *MultiHeadAttention.ignores)
    flops_of_state = 4.0
    """Floating-point operations a token for each number of the state: to write it, and to read it."""

    def __init__(self, config: AttentionConfig):
        super().__init__(replace(config, position="none", attention_window=None), attend=matmul)
        self.scan = in_chunks

    def rates(self, x: Stream) -> tuple[PerToken, PerToken | None]:
        """Return ln α and β, or None where all of v is written."""
        return x.new_zeros(1, 1).expand(self.n_head, x.shape[-2]), None

    def gather(self, q: Query, k: Key, v: Value, here: Here) -> Output:
        """Read and write the state, in float32 at least, whatever autocast says."""
        (log_decay, beta), begins, store = self.rates(here.x), here.told, here.store
        if (real := self.real_tokens(here)) is not None:  # padding writes nothing, and nothing fades meanwhile
            k, log_decay = k.masked_fill(~real[..., None], 0), log_decay.masked_fill(~real, 0)
        begins = None if begins is None else begins.unsqueeze(-2)  # (…, 1, T)
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (repeat_heads(wide(t), self.n_head) for t in (q, k, v))
            state = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1]) if store is None else store.state["state"]
            scan = token_by_token if q.shape[-2] == 1 else self.scan
            log_decay = log_decay.to(q.dtype).expand(q.shape[:-1])
            y, state = scan(q, k, v, log_decay, None if beta is None else beta.to(q.dtype), begins, state.to(q.dtype))
        if store is not None:
            store.state["state"] = state
        return y.to(here.x.dtype)

    def real_tokens(self, here: Here) -> Bool[Tensor, "... 1 T"] | None:
        """Return which tokens the mask hides from no query; ValueError for one that says more than that."""
        mask = here.mask
        if mask is None or here.told is not None:
            return None
        real = real_keys(mask) if isinstance(mask, Tensor) else None
        if real is None:
            raise ValueError(
                "a state sums up the past: mask may hide keys from all queries alike; tell where texts begin"
            )
        *lead, T, _ = here.x.shape
        check_broadcast("mask", real[..., None, None, -T:], (*lead, 1, 1, T))
        return real[..., None, -T:].expand(*lead, 1, T)

    def keeps(self, dtype: torch.dtype) -> Kept:
        return {"state": ((self.n_head, self.head_size, self.head_size), torch.promote_types(dtype, torch.float32))}

    def flops(self, block_size: int) -> float:
        """flops_of_state for each number of the states, as token by token; chunks take more, in fewer products."""
        return self.flops_of_state * self.n_head * self.head_size**2


@form("linear")
class LinearAttention(Recurrent):
    """Weights φ(q)ᵀφ(k) divided by their sum, φ = elu + 1 (Katharopoulos et al. 2020, eqs. 4 to 12).

    A value of 1 beside the others sums the weights.
    """

    def gather(self, q: Query, k: Key, v: Value, here: Here) -> Output:
        y = super().gather(F.elu(q) + 1, F.elu(k) + 1, F.pad(v, (0, 1), value=1.0), here)
        return y[..., :-1] / y[..., -1:].masked_fill(y[..., -1:] == 0, 1)  # nothing before padding: 0 / 1

    def keeps(self, dtype: torch.dtype) -> Kept:
        return {"state": ((self.n_head, self.head_size, self.head_size + 1), torch.promote_types(dtype, torch.float32))}


@form("retention")
class Retention(Recurrent):
    """Linear attention without φ, whose head h fades by 1 - 2^(-5-h) a token (Sun et al. 2023).

    Nothing divides by the sum of the weights; each head's result is RMS-normalised instead. Their gate is
    retention+gate_element, their rotation is left out.
    """

    def rates(self, x: Stream) -> tuple[PerToken, PerToken | None]:
        head = torch.arange(self.n_head, dtype=torch.float32, device=x.device)
        return torch.log1p(-torch.exp2(-5 - head))[:, None].expand(-1, x.shape[-2]), None

    def gather(self, q: Query, k: Key, v: Value, here: Here) -> Output:
        y = super().gather(q * self.head_size**-0.5, k, v, here)
        return y if here.pictured else F.rms_norm(y, [self.head_size], eps=NORM_EPS)


@form("delta")
class GatedDelta(Recurrent):
    """The gated delta rule: a state that fades by α(x), and of which a key's old value makes room for the new one.

    α = exp(-e^a softplus(x w_α + b)), β = σ(x w_β), keys and queries of length 1, each head's result RMS-normalised
    (Yang et al. 2025, Gated Delta Networks, eq. 10). Their gate is delta+gate_element, their convolution over four
    tokens is left out.
    """

    flops_of_state = 6.0

    def __init__(self, config: AttentionConfig):
        super().__init__(replace(config, qk_norm=False))
        C, H = config.n_embd, config.n_head
        self.beta = PerHead(C, H)
        self.fade = PerHead(C, H, torch.full((H,), math.log(math.expm1(0.01))))  # softplus gives 0.01 at first,
        rates = torch.linspace(1, 16, H, device="cpu").log()  # so that α is from 0.99 to 0.85
        self.log_rate = nn.Parameter(torch.tensor(rates.tolist()))  # on the default device: see Forget
        self.out_norm = RMSNorm(self.head_size, eps=NORM_EPS)

    def rates(self, x: Stream) -> tuple[PerToken, PerToken | None]:
        log_decay = -wide(self.log_rate).exp()[:, None] * F.softplus(wide(self.fade(x)))
        return log_decay, torch.sigmoid(self.beta(x))

    def gather(self, q: Query, k: Key, v: Value, here: Here) -> Output:
        q, k = (F.normalize(wide(t), dim=-1) for t in (q, k))
        y = super().gather(q * self.head_size**-0.5, k, v, here)
        return y if here.pictured else self.out_norm(y)
