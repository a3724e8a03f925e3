"""The GPT: token embedding, a stack of blocks (attention, then MLP), final norm, language-model head."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from errors import SettingsError
from model.attention import check_names, make_attention
from model.attention.functional import Blocks
from model.config import GPTConfig
from model.kv_cache import KVCache
from model.loss import chunk_nats_and_slope, summed_nats
from model.masks import Device, combine, document_mask, padding_mask
from model.norms import LayerNorm, RMSNorm
from model.packed import together

Tokens = Int[Tensor, "B T"]
Padding = Shaped[Tensor, "B S"] | None
Positions = Int[Tensor, "B T"] | Int[Tensor, " T"] | None
Starts = Int[Tensor, "B T"] | None
Stream = Float[Tensor, "B T C"]
Mask = Bool[Tensor, "B 1 #T S"] | Blocks | None
Cache = KVCache | None


class GPT(nn.Module):
    """Decoder-only transformer (Radford et al. 2019; pre-norm residual blocks)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size=null: a GPT needs the tokenizer's number of token ids.")
        check_names(config.attention)
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)))
        self.final_norm = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.layers_alike = len(set(config.attention.split("/")[: config.n_layer])) == 1
        mixing = [block.attention for block in self.blocks if "value_residual" in block.attention.modifiers]
        if len({(attention.kv_heads, attention.head_size) for attention in mixing}) > 1:
            problem = f"attention={config.attention}: value_residual adds the values of layers with other heads"
            raise SettingsError(f"{problem}: leave it out of the layers that differ.")
        ropes = [block.attention.rope for block in self.blocks]
        self.planes = [None if rope is None else rope.planes for rope in ropes]  # that each layer turns
        self.ropes = list({rope.planes: rope for rope in ropes if rope is not None}.values())
        self.nats_and_slope = chunk_nats_and_slope  # which training may compile
        self.largest_chunk: int | None = None  # see summed_nats
        self.initialize()

    def forward(
        self,
        tokens: Tokens,
        targets: Tokens | None = None,
        *,
        attention_mask: Padding = None,
        positions: Positions = None,
        starts: Starts = None,
        cache: Cache = None,
    ) -> Float[Tensor, "B T V"] | Float[Tensor, ""]:
        """Return the logits of the token that follows each position; with `targets` the loss they are wanted for.

        targets: the tokens that follow. The loss is -Σ log p(target) in nats over those that are not -1; no
            tensor holds the logits of them all.

        attention_mask: 1 = real, 0 = padding, over all S keys (S = T without a cache, the cached
            positions and the new ones with it).
        positions: absolute positions; by default they count on from what the cache holds.
        starts: where in the window each token's document begins: what comes before is out of sight, and learned
            positions count from there. Not together with a cache.
        cache: what make_cache() made, with earlier tokens; this pass appends its own and advances it.

        Raises ValueError for more positions than position=learned has embeddings.
        """
        x = self.hidden(tokens, attention_mask=attention_mask, positions=positions, starts=starts, cache=cache)
        if targets is None:
            return self.logits(x)
        x, weight = self.final_norm(x), self.lm_head.weight
        return summed_nats(x, weight, targets, self.config.logit_softcap, self.nats_and_slope, self.largest_chunk)

    def hidden(
        self,
        tokens: Tokens,
        *,
        attention_mask: Padding = None,
        positions: Positions = None,
        starts: Starts = None,
        cache: Cache = None,
    ) -> Stream:
        """Return the residual stream after the last block, as forward(), for callers that need only a few logits."""
        mask: Mask
        mask = real = None if attention_mask is None else padding_mask(attention_mask)
        begins = None
        past = 0 if cache is None else cache.position
        if starts is not None:
            if cache is not None or attention_mask is not None:
                given = "a cache" if attention_mask is None else "attention_mask"
                raise ValueError(f"starts and {given} are both given: pad or continue one document to a row.")
            place = torch.arange(tokens.size(1), device=tokens.device)
            begins, mask = starts == place, combine(real, document_mask(starts))
            if positions is None and self.config.position == "learned":
                positions = place - starts
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.config.position == "learned":
            x = x + self.embedded_positions(past, tokens.size(1), positions)
        x = self.dropout(x)
        rotations = {rope.planes: rope.rotation(x, positions, past) for rope in self.ropes}
        if mask is None and cache is None and self.layers_alike:
            mask = self.blocks[0].attention.blocks(x, compiled=self.blocks[0]._compiled_call_impl is not None)
        shared: dict[str, Any] = {"mask": mask, "cache": cache, "begins": begins, "carried": {}}
        for layer, (block, planes) in enumerate(zip(self.blocks, self.planes, strict=True)):
            x = block(x, rotation=None if planes is None else rotations[planes], layer=layer, **shared)
        if cache is not None:
            cache.advance(tokens.size(1))
        return x

    def embedded_positions(self, past: int, T: int, positions: Positions) -> Float[Tensor, "*B T C"]:
        """Return the learned embeddings of these positions, or of past … past+T-1; ValueError beyond the last."""
        if positions is not None:
            return self.position_embedding(positions)
        end, most = past + T, self.config.block_size
        if end > most:
            remedy = "shorten the text, or train with position=rope"
            raise ValueError(f"{end} positions do not fit the {most} learned embeddings: {remedy}.")
        return self.position_embedding.weight[past:end]

    def make_cache(self, B: int, size: int, sight: int | None = None, device: Device = None) -> KVCache:
        """Return an empty cache for B texts with room for `size` positions.

        sight: how many positions a token sees in every layer, which lets a text outgrow the cache; all when None.
        device: where it is, if not beside the weights; "meta" to count its bytes.
        """
        weight, attentions = self.token_embedding.weight, (block.attention for block in self.blocks)
        device = torch.device(device or weight.device)
        return KVCache([layer.make_store(B, size, sight, device, weight.dtype) for layer in attentions])

    def logits(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead V"]:
        """Return the logits of the residual stream x, squashed into ± logit_softcap where that is set."""
        logits, cap = self.lm_head(self.final_norm(x)), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def initialize(self, draw: Callable[..., object] = nn.init.normal_) -> None:
        """Draw the weights from torch's generator, each by draw(weight, std=…).

        zero_init=false is GPT-2's scheme: N(0, 0.02), and 0.02 / √(2 n_layer) where a layer writes to
        the residual stream. zero_init=true draws weights at unit gain, N(0, 1/fan_in), and starts those
        output projections and an untied lm_head at zero: the residual stream begins as the embedding alone.
        """
        for name, module in self.named_modules():
            writes_residual = name.endswith(("o_proj", "down_proj"))
            if isinstance(module, nn.Embedding):
                draw(module.weight, std=0.02)
            elif isinstance(module, nn.Linear) and module.weight is not self.token_embedding.weight:
                if self.config.zero_init:
                    std = 0.0 if writes_residual or module is self.lm_head else module.in_features**-0.5
                else:
                    std = 0.02 / math.sqrt(2 * self.config.n_layer) if writes_residual else 0.02
                draw(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention, then MLP, each normalised at its input and added to the residual stream."""

    recompute = False
    """Whether training keeps x alone for the backward pass, and there computes the rest again (Chen et al. 2016)."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config.at(layer))
        self.mlp_norm = make_norm(config)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Stream, **others: Any) -> Stream:
        """Return x plus what attention and MLP add; the other arguments are the attention's."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._add, x, use_reentrant=False, **others)
        return self._add(x, **others)

    def _add(self, x: Stream, **others: Any) -> Stream:
        x = x + self.dropout(self.attention(self.attention_norm(x), **others))
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

    def forward(self, x: Stream) -> Stream:
        return self.down_proj(self.activation(self.up_proj(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.inner, bias=config.bias)
        self.up_proj = nn.Linear(config.n_embd, config.inner, bias=config.bias)
        self.down_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)

    def forward(self, x: Stream) -> Stream:
        gate, up = together(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=config.norm_eps)
    return LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


def plain_weights(model: GPT) -> dict[str, Tensor]:
    """Return the weights under their plain names, without an lm_head tied to the embedding."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["lm_head.weight"]
    return weights


def load_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Copy the weights of `plain_weights` into a model; ValueError, naming one, when they do not fit."""
    if model.config.tie_embeddings:
        weights = weights | {"lm_head.weight": weights["token_embedding.weight"]}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if wrong := {item[0] for item in shapes.items() ^ {name: tensor.shape for name, tensor in weights.items()}.items()}:
        raise ValueError(f"the weight {min(wrong)} is missing, or not what the settings ask for")
    model.load_state_dict(weights)


def save_file(weights: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file, readable as the umask says; the library would make it the owner's alone."""
    file.touch()
    mode = file.stat().st_mode
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    if file.stat().st_mode != mode:  # some file systems have one mode for all, and refuse to change it
        file.chmod(mode)
