"""Softmax attention by a local line in place of a mean, and with keys that fade by channel."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from model.attention.call import Call, Output
from model.attention.context import AttentionContext
from model.attention.contract import AttentionFunction
from model.attention.executors import ROWS, WEIGHTED
from model.attention.layer import MultiHeadAttention, Stream
from model.attention.modifiers import PerHead
from model.attention.registry import form
from model.attention.weighting import PLAIN
from model.config import POSITION_SETTINGS, TURNING, AttentionConfig
from model.layers import Linear, cumulative_sum, upcast


@form("parallax")
class Parallax(MultiHeadAttention):
    """A local line in place of a local mean: y = E[v] - Cov(r·k, v).

    (Zuo et al. 2026, Algorithm 1.) Mean and covariance are over softmax's weights p. A mean of values is the
    Nadaraya-Watson estimate of what lies at the query; it is biased where the keys are denser on one side. r = x W_r is
    the slope of the line, one vector a head, which is not scaled; it is rotated as queries are. So weights become

        p (1 + Σ p r·k - r·k)

    and may be negative. W_r starts at 0: sdpa.
    """

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(config, AttentionFunction("parallax", self.__doc__, PLAIN, (ROWS, WEIGHTED)), layer_idx)

    def make_projections(self, config: AttentionConfig) -> None:
        super().make_projections(config)
        self.r_proj = Linear(config.n_embd, self.query_heads * self.head_dim, bias=False)
        self.r_proj.starts_at_zero = True
        nn.init.zeros_(self.r_proj.weight)

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        r = self.r_proj(x).unflatten(-1, (self.query_heads, -1)).transpose(1, 2)  # (B, T, C) -> (B, H, T, D)
        # A slope has a sign: it turns with the queries, but is no length.
        r = self.rotate(r, ctx) if self.pope is None else self.pope.place(upcast(r), ctx.past).to(r.dtype)
        return super().attend(call._replace(tilt=r), x, ctx)

    def flops(self, block_size: int) -> float:
        """As the other forms, and the products of r with the keys."""
        return super().flops(block_size) * (self.channels_of_pair + self.score_channels) / self.channels_of_pair


@form("wall")
class Wall(MultiHeadAttention):
    """Each channel of a key fades with every later token, at a rate that those tokens choose.

    (Tilde 2026, Wall attention.)

        score_ts = Σ_n q_tn k_sn exp(P_tn - P_sn) / √D,  P the running sum of ln σ(x W + 8)

    forget adds one such sum to a score, where this multiplies each of its terms. W starts at 0, so that a channel fades
    by 0.03% a token. There is no rotation: the rates tell the order.
    """

    modifiable = tuple(part for part in MultiHeadAttention.modifiable if part != "rotation")
    unused_settings = (
        *(name for name in POSITION_SETTINGS if name != "position"),
        *MultiHeadAttention.unused_settings,
    )

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        position = "none" if config.position in TURNING else config.position
        function = AttentionFunction("wall", self.__doc__, PLAIN, (ROWS, WEIGHTED))
        super().__init__(replace(config, position=position), function, layer_idx)
        self.accepts_mask = False  # a hidden token would fade the keys before it all the same
        channels = self.kv_heads * self.head_dim
        self.fade = PerHead(config.n_embd, channels, torch.full((channels,), 8.0))

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        log_decay = F.logsigmoid(upcast(self.fade(x)))
        log_decay = log_decay.unflatten(1, (self.kv_heads, -1)).mT  # (B, Hkv·D, T) -> (B, Hkv, T, D)
        if ctx.cache is not None:
            log_decay = ctx.cache.append(self.layer_idx, "log_decay", log_decay, self.window)
        # Only differences of the sums count, and those of near tokens: float64 keeps them where there is one.
        wide = log_decay.to(torch.float32 if x.device.type == "mps" else torch.float64)
        total = cumulative_sum(wide[..., -call.k.shape[-2] :, :], -2)
        return super().attend(call._replace(faded=total), x, ctx)
