"""Small changes to a layer, each at one place of it: attention=sdpa+gate+sink.

A modifier is a class with one of Modifier's methods. Where it can, it begins as the identity, so that at step 0 the
modified model is the plain one. They act in the order of this file, whatever the order in which they are typed.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from errors import SettingsError
from model.attention.contract import Key, Output, Query, Value, repeat_heads
from model.attention.layer import CausalSelfAttention
from model.attention.places import Call, Here, Kept, Modifier, PerHead, wide
from model.attention.registry import modifier
from model.config import AttentionConfig
from model.masks import alibi_slopes, has_holes, keys_allowed

# What the layer's settings say for all layers, a modifier says for one of a pattern.


@modifier("window")
class Window(Modifier):
    """Only the layers of a pattern that say so have model.attention_window, as in Gemma 2 (2024)."""

    place = "window"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        if config.attention_window is None:
            raise SettingsError(f"attention={config.attention} needs model.attention_window=W: positions that it sees.")


@modifier("nope")
class NoPosition(Modifier):
    """No rotation in this layer: order comes from the others, and from the mask (Yang et al. 2025, RNoPE)."""

    place = "rotation"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        if config.position != "rope":
            raise SettingsError(f"attention={config.attention}: nope leaves out the rotation of model.position=rope.")
        layer.rope = None


# What queries, keys and values are.


@modifier("value_residual")
class ValueResidual(Modifier):
    """v ← λ₁ v + λ₂ v₁, with the values v₁ of the first layer that has this (Zhou et al. 2024).

    λ begins at (1, 0).
    """

    place = "values"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.mixture = nn.Parameter(torch.tensor([1.0, 0.0]))

    def mix(self, q: Query, k: Key, v: Value, here: Here) -> tuple[Query, Key, Value]:
        own, first = self.mixture.to(v.dtype)
        return q, k, own * v + first * here.carried.setdefault("values", v)


@modifier("key_offset")
class KeyOffset(Modifier):
    """Half of a key's channels come from the token before: a query then finds what followed its like.

    That is induction (Olsson et al. 2022) in one layer, where it takes two otherwise: modded-nanogpt's partial key
    offset, 2025. The first token of a text gets zeros.
    """

    place = "keys"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.shape = layer.kv_heads, layer.head_size

    def mix(self, q: Query, k: Key, v: Value, here: Here) -> tuple[Query, Key, Value]:
        D = k.shape[-1]
        if here.store is None:
            before = F.pad(k[..., :-1, :], (0, 0, 1, 0))
        else:
            before = torch.cat((here.store.state["key_offset"][:, :, None], k[:, :, :-1]), 2)
            here.store.state["key_offset"] = k[:, :, -1]
        if here.begins is not None:
            before = before.masked_fill(here.begins[..., None, :, None], 0)
        return q, torch.cat((k[..., : D // 2], before[..., D // 2 :]), -1), v

    def keeps(self, dtype: torch.dtype) -> Kept:
        return {"key_offset": (self.shape, dtype)}


# What lies over the scores.


@modifier("logn")
class LogN(Modifier):
    """Scores × σ ln n, n the keys a query may attend to, σ learned for each head (Nakanishi 2025, eq. 3, SSMax).

    A softmax over more keys is flatter; this keeps it as sharp. σ begins at 0.43, where they found it in training.
    """

    place = "scores"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.factor = nn.Parameter(torch.full((layer.n_head,), 0.43))

    def overlay(self, call: Call, here: Here) -> Call:
        T, S = call.q.shape[-2], call.k.shape[-2]
        n = keys_allowed(call.mask, call.is_causal, T, S, call.q.device)  # (…, T)
        factor = self.factor.repeat_interleave(call.q.shape[-3] // len(self.factor))[:, None, None]
        return call._replace(q=call.q * (factor * n.log()[..., None]).to(call.q.dtype))


@modifier("forget")
class Forget(Modifier):
    """Bias F_i − F_j, F the running sum of ln f, f = σ(x w + b) for each head (Lin et al. 2025, FoX).

    A token fades with every token after it, and some fade faster. b begins where f is ALiBi's slope, so that at step 0
    this is ALiBi.
    """

    place = "scores"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        # Not computed on the default device: on the meta device arithmetic would import torch's compiler.
        bias = -torch.log(torch.expm1(alibi_slopes(layer.n_head, torch.device("cpu"))))  # ln σ(b) = −slope
        self.gate = PerHead(config.n_embd, layer.n_head, torch.tensor(bias.tolist()))

    def overlay(self, call: Call, here: Here) -> Call:
        if here.told is None and isinstance(here.mask, Tensor) and has_holes(here.mask):
            raise ValueError("forget fades with every position: mask may hide keys before or after a text, not within.")
        T, reach = call.q.shape[-2], call.k.shape[-2]
        total = F.logsigmoid(wide(self.gate(here.x))).cumsum(-1)  # (…, H, T)
        if here.store is not None:
            total = total + here.store.state["forgotten"][..., None]
            here.store.state["forgotten"] = total[..., -1]
            total = here.store.write("forget", total[..., None])[..., 0]  # (B, H, S)
        total = total[..., -reach:]
        bias = total[..., -T:, None] - total[..., None, :]
        return call._replace(bias=bias if call.bias is None else call.bias + bias)

    def keeps(self, dtype: torch.dtype) -> Kept:
        H = len(self.gate.weight)
        at_least_float32 = torch.promote_types(dtype, torch.float32)
        return {"forget": ((H, None, 1), at_least_float32), "forgotten": ((H,), at_least_float32)}


@modifier("sink")
class Sink(Modifier):
    """One more key, which gives nothing and scores b, learned for each head (gpt-oss, 2025; b = 0 is softmax1).

    A head may then attend to nothing. It comes to y · σ(ln Σ exp(score) − b): a sink is a gate.
    """

    place = "scores"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        if config.form == "sigmoid":
            raise SettingsError(
                "attention=sigmoid+sink: no key takes weight from others under sigmoid: leave out sink."
            )
        self.bias = nn.Parameter(torch.zeros(layer.n_head))

    def overlay(self, call: Call, here: Here) -> Call:
        # In front, where causality lets every query see it.
        k, v = (F.pad(t, (0, 0, 1, 0)) for t in (call.k, call.v))
        mask, S = call.mask, call.k.shape[-2]
        if mask is not None:
            mask = F.pad(mask.expand(*mask.shape[:-1], S), (1, 0), value=True)
        sink = self.bias[:, None, None]  # (H, 1, 1)
        others = sink.new_zeros(1, 1, 1) if call.bias is None else call.bias
        others = others.expand(*others.shape[:-3], len(sink), -1, S)
        sink = sink.to(others.dtype).expand(*others.shape[:-1], 1)
        return call._replace(k=k, v=v, mask=mask, bias=torch.cat((sink, others), -1))


# What becomes of the result.


@modifier("diff")
class Differential(Modifier):
    """y₁ − σ(λ) y₂: each head attends twice to the same keys, and what both find cancels (Ye et al. 2026, version 2).

    λ = x w for each head and token. The queries' projection is twice as wide.
    """

    place, pictured = "queries", True

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        q_proj = layer.q_proj
        assert isinstance(q_proj, nn.Linear)
        layer.q_proj = nn.Linear(q_proj.in_features, 2 * q_proj.out_features, bias=q_proj.bias is not None)
        layer.query_heads = 2 * layer.n_head
        self.weight = PerHead(config.n_embd, layer.n_head)

    def overlay(self, call: Call, here: Here) -> Call:
        """Give both queries of a head what lies over its scores."""
        H = call.q.shape[-3] // 2
        bias, mask = (
            t.repeat_interleave(2, -3) if t is not None and t.ndim > 2 and t.shape[-3] == H > 1 else t
            for t in (call.bias, call.mask)
        )
        return call._replace(bias=bias, mask=mask)

    def finish(self, y: Output, here: Here, v: Value) -> Float[Tensor, "..."]:
        first, second = y.unflatten(-3, (-1, 2)).unbind(-3)  # (…, 2H, T, Dv) -> twice (…, H, T, Dv)
        return first - torch.sigmoid(self.weight(here.x))[..., None] * second


@modifier("xsa")
class Exclusive(Modifier):
    """y less tanh(α) of its part along the token's own value, α learned for each head (Zhai 2026, XSA).

    What a token has already, it need not gather. α begins at 0.
    """

    place = "result"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.strength = nn.Parameter(torch.zeros(layer.n_head))

    def finish(self, y: Output, here: Here, v: Value) -> Output:
        v = F.normalize(wide(v), dim=-1).to(y.dtype)  # in half precision small values would vanish when squared
        v = repeat_heads(v, y.shape[-3])
        return y - torch.tanh(self.strength)[:, None, None].to(y.dtype) * (y * v).sum(-1, keepdim=True) * v


@modifier("gate")
class Gate(Modifier):
    """y · 2σ(x w), a number for each head (Qiu et al. 2025, eq. 5, headwise; the 2 makes it begin as the identity)."""

    place = "result"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.gate = PerHead(config.n_embd, layer.n_head)

    def finish(self, y: Output, here: Here, v: Value) -> Output:
        return y * (2 * torch.sigmoid(self.gate(here.x)))[..., None]


@modifier("gate_element")
class GateElement(Modifier):
    """y · 2σ(x W), a number for each channel (Qiu et al. 2025, eq. 5, elementwise)."""

    place = "result"

    def __init__(self, layer: CausalSelfAttention, config: AttentionConfig) -> None:
        super().__init__(layer, config)
        self.gate = PerHead(config.n_embd, layer.n_head * layer.head_size)

    def finish(self, y: Output, here: Here, v: Value) -> Output:
        gate = self.gate(here.x).unflatten(-2, (y.shape[-3], -1)).transpose(-2, -1)  # (…, H·D, T) -> (…, H, T, D)
        return y * (2 * torch.sigmoid(gate))
