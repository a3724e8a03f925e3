"""The GPT: token embedding, a stack of blocks (attention, then MLP), final norm, language-model head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from model.attention import make_attention
from model.config import GPTConfig
from model.kv_cache import KVCache
from model.masks import padding_mask
from model.packed import together


class GPT(nn.Module):
    """Decoder-only transformer (Radford et al. 2019; pre-norm residual blocks).

    `forward` returns logits; the loss is the trainer's business.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size=null: a GPT needs to know how many token ids its tokenizer has.")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(config) for _ in range(config.n_layer)))
        self.final_norm = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.initialize()

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        positions: Int[Tensor, "B T"] | Int[Tensor, " T"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token that follows each position.

        attention_mask: 1 = real, 0 = padding, over all S keys (S = T without a cache, the cached
            positions and the new ones with it).
        positions: absolute positions; by default they count on from what the cache holds.
        cache: keys and values of earlier tokens; this pass appends its own and advances it.
        """
        return self.logits(self.hidden(tokens, attention_mask=attention_mask, positions=positions, cache=cache))

    def hidden(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        positions: Int[Tensor, "B T"] | Int[Tensor, " T"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T C"]:
        """The residual stream after the last block: forward() up to the logits, for who needs few of them."""
        mask = None if attention_mask is None else padding_mask(attention_mask)
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.config.position == "learned":
            x = x + self.embed_positions(tokens, positions, cache)
        x = self.dropout(x)
        rotation = self.blocks[0].attention.rotation(x, positions, 0 if cache is None else cache.position)
        for layer, block in enumerate(self.blocks):
            x = block(x, mask=mask, positions=positions, rotation=rotation, cache=cache, layer=layer)
        if cache is not None:
            cache.advance(tokens.size(1))
        return x

    def logits(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... V"]:
        """What the residual stream says about the next token."""
        return self.cap(self.lm_head(self.final_norm(x)))

    def cap(self, logits: Float[Tensor, "... V"]) -> Float[Tensor, "... V"]:
        """Logits kept within ± logit_softcap, where there is one."""
        if (cap := self.config.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def embed_positions(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"] | Int[Tensor, " T"] | None,
        cache: KVCache | None,
    ) -> Float[Tensor, "B T C"] | Float[Tensor, "T C"]:
        """The learned embedding of each position; ValueError when there are more positions than were learned."""
        if positions is None:
            past = 0 if cache is None else cache.position
            if past + tokens.size(1) > self.config.block_size:
                raise ValueError(
                    f"{past + tokens.size(1)} positions do not fit the {self.config.block_size} learned position "
                    "embeddings: shorten the text, or train with position=rope."
                )
            positions = torch.arange(past, past + tokens.size(1), device=tokens.device)
        return self.position_embedding(positions)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw the weights afresh from torch's generator.

        zero_init=false is GPT-2's scheme: N(0, 0.02), and 0.02 / √(2 n_layer) where a layer writes to
        the residual stream. zero_init=true draws weights at unit gain, N(0, 1/fan_in), and starts those
        output projections and an untied lm_head at zero: the residual stream begins as the embedding alone.
        """
        config = self.config
        for name, module in self.named_modules():
            writes_residual = name.endswith(("o_proj", "down_proj"))
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear) and module.weight is not self.token_embedding.weight:
                if config.zero_init:
                    std = 0.0 if writes_residual or module is self.lm_head else module.in_features**-0.5
                else:
                    std = 0.02 / math.sqrt(2 * config.n_layer) if writes_residual else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention, then MLP, each normalised at its input and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        *,
        mask: Bool[Tensor, "B 1 1 S"] | None = None,
        positions: Int[Tensor, "B T"] | Int[Tensor, " T"] | None = None,
        rotation: Float[Tensor, "... T half 2"] | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Float[Tensor, "B T C"]:
        """Return x plus what its attention and its MLP add; the other arguments are the attention's."""
        y = self.attention(
            self.attention_norm(x), mask=mask, positions=positions, rotation=rotation, cache=cache, layer=layer
        )
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


ACTIVATIONS = {
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class MLP(nn.Module):
    """Up, activation, down, with one of ACTIVATIONS between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.n_embd, config.inner, bias=config.bias)
        self.down_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        return self.down_proj(self.activation(self.up_proj(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.inner, bias=config.bias)
        self.up_proj = nn.Linear(config.n_embd, config.inner, bias=config.bias)
        self.down_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


def plain_weights(model: GPT) -> dict[str, Tensor]:
    """The weights under their plain names; an lm_head tied to the embedding is left out."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["lm_head.weight"]
    return weights


def load_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Copy weights that `plain_weights` gave into a model; RuntimeError when they do not fit it."""
    if model.config.tie_embeddings:
        weights = weights | {"lm_head.weight": weights["token_embedding.weight"]}
    model.load_state_dict(weights)
