"""The GPT: token embedding, a stack of blocks, final norm, language-model head.

plain.py has the default model on one page. Without the settings that add something, this is the model and its loss:

    x = token_embedding(tokens)  # (B, T) -> (B, T, C)
    for block in blocks:
        x = x + block.attention(block.attention_norm(x))
        x = x + block.mlp(block.mlp_norm(x))
    logits = lm_head(final_norm(x))  # (B, T, V)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from model.attention import make_attention
from model.attention.context import AttentionContext
from model.attention.layer import MultiHeadAttention
from model.attention.masks import check_starts
from model.attention.registry import check_names
from model.cache import DocStarts, KVCache, Tokens, undone_on_failure
from model.config import GPTConfig
from model.layers import LayerNorm, Linear, RMSNorm, forget_casts, joined
from model.loss import capped, chunk_loss_and_gradient, fused_cross_entropy, nats_of_each, nats_of_logits
from model.ngrams import NGrams
from model.recompute import recomputed
from model.surgery import (
    HOOKS,
    check_input,
    check_type,
    embedded,
    fit_names,
    is_matrix,
    is_replaced,
    tie_again,
    under_all_names,
)

Stream = Float[Tensor, "B T C"]


def relu2(x: Stream) -> Stream:
    """The square of ReLU (So et al. 2021, Primer)."""
    return F.relu(x).square()


# Functions with names: a model that has them can be pickled.
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """down(activation(up(x))), with one of ACTIVATIONS."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.n_embd, config.inner, bias=config.bias)
        self.down_proj = Linear(config.inner, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x: Stream) -> Stream:
        # model/row.py has the same for one token.
        return self.down_proj(self.activation(self.up_proj(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.n_embd, config.inner, config.inner, bias=config.bias)  # both in one product
        self.down_proj = Linear(config.inner, config.n_embd, bias=config.bias)

    def forward(self, x: Stream) -> Stream:
        # model/row.py has the same for one token.
        return self.down_proj(self.activation(joined(self.gate_up_proj, x)))

    @staticmethod
    def activation(gate_up: Float[Tensor, "*lead both"]) -> Float[Tensor, "*lead inner"]:
        gate, up = gate_up.chunk(2, -1)  # (B, T, 2 inner) -> twice (B, T, inner)
        return F.silu(gate) * up


MLPS = {"swiglu": SwiGLU, **dict.fromkeys(ACTIVATIONS, MLP)}
# {name: function of the settings that returns a new norm of C channels}
NORMS = {
    "rmsnorm": lambda config: RMSNorm(config.n_embd, eps=config.norm_eps),
    "layernorm": lambda config: LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias),
}


def make_dropout(config: GPTConfig) -> nn.Module:
    """Return dropout, or at a probability of 0 the identity, whose call is six times as fast."""
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()


class Block(nn.Module):
    """Attention, then MLP, each normalised at its input and added to the residual stream."""

    activation_checkpointing = False
    """Whether training saves x alone and recomputes the rest in the backward pass."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = NORMS[config.norm](config)
        self.attention = make_attention(config.at(layer), layer)  # at(): of a pattern a/b/c the layer's own
        self.mlp_norm = NORMS[config.norm](config)
        self.mlp = MLPS[config.mlp](config)
        self.dropout = make_dropout(config)

    def forward(self, x: Stream, ctx: AttentionContext) -> Stream:
        # With a cache nothing is recomputed: it would get its rows a second time.
        if self.activation_checkpointing and torch.is_grad_enabled() and ctx.cache is None:
            return recomputed(self._forward, x, ctx)
        return self._forward(x, ctx)

    def _forward(self, x: Stream, ctx: AttentionContext) -> Stream:
        # model/row.py has the same for one token, which it computes until this code is edited.
        x = x + self.dropout(self.attention(self.attention_norm(x), ctx))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Decoder-only transformer (Radford et al. 2019; pre-norm residual blocks)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size=null: a GPT needs the tokenizer's number of token ids.")
        check_names(config.attention)
        self.config = copy.deepcopy(config)  # its own: others may be made of `config`, which a person changes between
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        if config.ngrams:
            self.ngrams = NGrams(config)
        if config.position == "learned":
            self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = make_dropout(config)
        blocks = [Block(config, layer) for layer in range(config.n_layer)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.final_norm = NORMS[config.norm](config)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.ropes = {attention.rope for attention in self.attentions if attention.rope is not None}
        # Modifiers (small changes to a layer) may need other layers: check that once all exist.
        for attention in self.attentions:
            for modifier in attention.modifiers.values():
                modifier.check_stack(self.attentions, config.attention)
        self.runtime = Runtime()
        self.initialize()
        self.register_load_state_dict_pre_hook(fit_names)
        self.register_load_state_dict_post_hook(tie_again)

    def forward(
        self,
        tokens: Tokens,
        *,
        doc_starts: DocStarts = None,
        cache: KVCache | None = None,
        last: bool = False,
        ctx: AttentionContext | None = None,
    ) -> Float[Tensor, "B _ V"]:
        """Return the logits of the token that follows each position, (B, T, V).

        doc_starts: the index of the first token of each token's document, counted from the first token that the cache
            has read. A token sees nothing earlier, and learned positions begin there. Padding on the left is a document
            too. By default the tokens continue the document of the cache's last token; without a cache, one from 0.
        cache: the keys and values of earlier tokens; this pass appends its own and advances it.
        last: return those of the last position alone, (B, 1, V).
        ctx: that of hidden().

        A loss of these logits has no gradient for the indexers of sparse attention (sparse.py), which learn by an
        auxiliary loss: take that of loss().

        Raises ValueError for more positions than position=learned has embeddings or the cache has room for, and for
        tokens of another shape; on a CPU also for ids beyond the vocabulary and doc_starts that number texts. A GPU is
        not waited for: its kernels assert that ids are in the vocabulary.
        """
        x = self.hidden(tokens, doc_starts=doc_starts, cache=cache, ctx=ctx)
        with undone_on_failure(cache, tokens.size(1)):
            return self.logits(x[:, -1:] if last else x)

    def hidden(
        self,
        tokens: Tokens,
        *,
        doc_starts: DocStarts = None,
        cache: KVCache | None = None,
        ctx: AttentionContext | None = None,
    ) -> Stream:
        """Return the residual stream after the last block, before final_norm.

        ctx: the state that the layers share, new for each pass: a caller that passes one in can read their auxiliary
            loss afterwards. Raises ValueError if it has values that this pass sets.
        forward() explains the other arguments.
        """
        # model/row.py has this loop for one token, which it runs until this code is edited.
        x, ctx = self.embed(tokens, doc_starts, cache, ctx or AttentionContext())
        for block in self.blocks:
            x = block(x, ctx)
        if cache is not None:
            cache.advance(tokens.size(1))  # only now: all layers write at the same position
        return x

    def embed(
        self,
        tokens: Tokens,
        doc_starts: DocStarts,
        cache: KVCache | None,
        ctx: AttentionContext,
    ) -> tuple[Stream, AttentionContext]:
        """Return the input of the blocks: the embedded tokens, and the layers' shared context."""
        check_input(self, tokens, doc_starts, cache)
        ctx.check_new()
        past = 0 if cache is None else cache.position
        if doc_starts is not None:
            check_starts(doc_starts, past=past)
        if past == 0:  # a cache has rows of the weights with which its text began
            forget_casts(tokens)
        T = tokens.size(1)
        ctx.tokens = tokens
        ctx.doc_starts = doc_starts if cache is None else cache.continue_documents(doc_starts, T)
        ctx.cache = cache
        ctx.device = self.runtime.device
        ctx.learns = torch.is_grad_enabled()

        # Embed the tokens, and where the settings ask for it their n-grams and positions.
        tokens = tokens.contiguous()  # torch's quantised tables read no slices
        x = embedded(self.token_embedding, tokens)  # (B, T) -> (B, T, C)
        positions = self.embed_positions(tokens, ctx) if self.config.position == "learned" else None
        if cache is not None:
            cache.begin()  # what refuses tokens comes before, what reads them comes after
        if self.config.ngrams:
            x = x + self.ngrams(tokens, ctx)
        if positions is not None:
            x = x + positions

        # Layers with rotary positions find their angles in the context.
        ctx.rotations = {rope: rope.table(x, ctx.past) for rope in self.ropes}
        return self.dropout(x), ctx

    def embed_positions(self, tokens: Tokens, ctx: AttentionContext) -> Float[Tensor, "*#B T C"]:
        """Return the learned embeddings of the positions of new tokens.

        Positions count from the start of each document. Raises ValueError for more than block_size.
        """
        B, T = tokens.shape
        end = ctx.past + T
        most = self.config.block_size
        if end > most:
            raise ValueError(f"{end} positions do not fit the {most} learned embeddings: shorten the text.")
        if ctx.doc_starts is None:
            # A row for each text: a hook, such as Opacus's, may take the first axis for the texts.
            places = torch.arange(ctx.past, end, device=tokens.device).repeat(B, 1)
        else:
            places = ctx.places().clamp(min=0)  # padding, left of a document, is before 0
        return self.position_embedding(places)  # (B, T) -> (B, T, C)

    def logits(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead V"]:
        """Return the logits of the residual stream x, squashed into ±logit_softcap if that is set."""
        return capped(self.lm_head(self.final_norm(x)), self.config.logit_softcap)

    def loss(
        self,
        tokens: Tokens,
        targets: Tokens,
        *,
        doc_starts: DocStarts = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, ""]:
        """Return the loss -Σ log p(target) in nats: F.cross_entropy of the logits, summed.

        It is computed by chunks of tokens (model/loss.py), with at most 64 MB of logits at a time (512 on a GPU). If
        lm_head is more than a matrix (not has_plain_head), or the model itself is_hooked, it is that of the full
        logits. In training mode its gradient is also that of the auxiliary loss which layers may add.

        targets: the tokens that follow; those of -1 (ours) and -100 (torch's) do not count.
        forward() explains the other arguments.

        Raises ValueError if targets do not have the shape of tokens.
        """
        check_targets(tokens, targets)
        ctx = AttentionContext.with_loss(tokens.device) if self.training else AttentionContext()
        is_hooked = self.is_hooked  # asked once: a hook may remove itself
        called = self if is_hooked else self.hidden
        x = called(tokens, doc_starts=doc_starts, cache=cache, ctx=ctx)  # of a hooked model the logits
        with undone_on_failure(cache, tokens.size(1)):
            if is_hooked:
                nats = nats_of_logits(x, targets)[0].sum()
            elif self.has_plain_head:
                nats = fused_cross_entropy(
                    self.final_norm(x),
                    self.lm_head.weight,
                    targets,
                    self.config.logit_softcap,
                    self.runtime.loss_and_gradient,
                    self.runtime.largest_chunk,
                )
            else:
                nats = nats_of_logits(self.logits(x), targets)[0].sum()
        return nats if ctx.loss is None else nats + (ctx.loss - ctx.loss.detach())  # its gradient, not its value

    @torch.no_grad()
    def nats(
        self,
        tokens: Tokens,
        targets: Tokens,
        *,
        doc_starts: DocStarts = None,
        cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Return -log p(target) of each position in nats, and whether the target is likeliest.

        Without a gradient. loss() explains the arguments.
        """
        check_targets(tokens, targets)
        if self.is_hooked:
            return nats_of_logits(self(tokens, doc_starts=doc_starts, cache=cache), targets)
        x = self.hidden(tokens, doc_starts=doc_starts, cache=cache)
        with undone_on_failure(cache, tokens.size(1)):
            return self.nats_of(x, targets)

    @torch.no_grad()
    def nats_of(
        self,
        x: Float[Tensor, "*lead C"],
        targets: Int[Tensor, "*lead"],
    ) -> tuple[Float[Tensor, "*lead"], Bool[Tensor, "*lead"]]:
        """Return what nats() does, of the residual stream x."""
        if not self.has_plain_head:
            return nats_of_logits(self.logits(x), targets)
        return nats_of_each(
            self.final_norm(x),
            self.lm_head.weight,
            targets,
            self.config.logit_softcap,
            self.runtime.largest_chunk,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as torch does, with strict those that modules share by any of their names.

        Without it torch's answer has the missing names, among which safetensors' load_model() looks for those of
        shared weights.
        """
        if strict and isinstance(state_dict, Mapping):
            state_dict = under_all_names(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def has_plain_head(self) -> bool:
        """Whether lm_head is a matrix alone, so that its weight says all of it.

        A bias, a hook, an adapter such as LoRA's or another module is part of the logits too: it has to be called. So
        has a logits() of a person's own.
        """
        return is_matrix(self.lm_head) and self.lm_head.bias is None and not is_replaced(self, GPT, "logits")

    @property
    def is_hooked(self) -> bool:
        """Whether a hook is on the model itself, so that it has to be called.

        It may change tokens or logits. A forward() of a person's own, which may call loss(), is left alone.
        """
        return any(getattr(self, hooks) for hooks in HOOKS) and not is_replaced(self, GPT, "forward")

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw the weights of embeddings and linear layers from torch's generator.

                              zero_init=true       zero_init=false (GPT-2)
            embeddings        N(0, 0.02)           N(0, 0.02)
            linear layers     N(0, 1/√fan_in)      N(0, 0.02)
            starts_at_zero    0                    0
            o_proj, down_proj 0                    N(0, 0.02/√(2 n_layer))
            untied lm_head    0                    N(0, 0.02)
            biases            0                    0

        The second number is the standard deviation. o_proj and down_proj write to the residual stream: with zero_init
        it begins as the embedding alone. Norms and parameters of modifiers keep the values that their modules set, but
        a modifier's nn.Linear and nn.Embedding are drawn as all others: starts_at_zero = True makes a layer begin at 0.
        The draws follow the order of named_modules().
        """
        for name, module in self.named_modules():
            is_tied = module is self.lm_head and self.config.tie_embeddings
            if is_tied or not isinstance(module, (nn.Embedding, nn.Linear)):
                continue

            # The standard deviation, by the table above.
            std = 0.02
            writes_residual = name.endswith(("o_proj", "down_proj"))
            if getattr(module, "starts_at_zero", False):
                std = 0.0
            elif self.config.zero_init and isinstance(module, nn.Linear):
                std = 0.0 if writes_residual or module is self.lm_head else module.in_features**-0.5
            elif writes_residual:
                # 2 n_layer terms add up in the stream; GPT-2 keeps the variance of their sum.
                std /= math.sqrt(2 * self.config.n_layer)

            # Draw with std=0 too: the generator then advances alike for both settings of zero_init.
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def attentions(self) -> list[MultiHeadAttention]:
        """The attention of each block that the model has now.

        A person may drop, copy, wrap or replace blocks.
        """
        found = []
        for block in self.blocks:
            parts = [part for part in block.modules() if isinstance(part, MultiHeadAttention)]
            found += parts[:1]
        return found

    def number_layers(self) -> None:
        """Give each layer the place in a cache that it has in the stack.

        It is needed after blocks were copied.
        """
        for layer, attention in enumerate(self.attentions):
            for module in (attention, *attention.modifiers.values()):
                module.layer_idx = layer

    @property
    def longest_context(self) -> int | None:
        """The maximum length of the context: block_size, or None if there is no limit.

        There is none if every layer keeps a state of fixed size and positions are not learned.
        """
        # any() stops at the first layer that has one: decoding asks before each token.
        parts = self.blocks.modules()
        has_kv_cache = any(part.has_kv_cache for part in parts if isinstance(part, MultiHeadAttention))
        return self.config.block_size if has_kv_cache or self.config.position == "learned" else None


def check_targets(tokens: Tokens, targets: Tokens) -> None:
    """Raise ValueError unless there is a target for each token."""
    check_type("tokens", tokens)
    check_type("targets", targets)
    if targets.shape != tokens.shape:
        problem = f"targets {(*targets.shape,)} need the shape of tokens {(*tokens.shape,)}"
        raise ValueError(f"{problem}: those of ids (B, T + 1) are ids[:, 1:], and their tokens ids[:, :-1].")


@dataclass
class Runtime:
    """Options that training sets for this process; no checkpoint has them."""

    loss_and_gradient: Callable[..., Any] = chunk_loss_and_gradient
    """The loss of a chunk of tokens; in a compiled run torch.compile() of it."""
    largest_chunk: int | None = None
    """The most bytes of float32 logits at a time; None for the default of fused_cross_entropy."""
    device: str | None = None
    """The type of device for which attention is computed; None for that of the tokens. dry_run=true has another."""
