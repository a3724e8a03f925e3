"""Decoding with the KV cache: texts are read once, then go on a token at a time.

What a text sees once it is longer than block_size:

rope, alibi, none   the latest block_size tokens, in every layer: the cache slides along with the text.
learned             there is no embedding for position block_size, so the text begins anew with its latest
                    block_size // 2 tokens whenever the next one would stand there.

Both depend on nothing but the text itself, so a batch of texts is decoded as each would be alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from generation.cuda_graph import CapturedCall
from model.attention import ATTENTION_VARIANTS, MultiHeadAttention
from model.gpt import GPT, Block
from model.kv_cache import KVCache
from model.rope import rotate

FEWEST_SLOTS = 128  # that a CUDA graph looks at
LARGE = 100_000  # weights from which on it pays to share a product between threads
COPIED = 2**28  # weights of a model up to which the decoder keeps a copy of them, 1 GiB


class Decoder:
    """A model that writes, and the batch of texts that it is writing: `read` begins one, `step` goes on.

    Texts of different lengths are padded on the left, so that all end in the same slot of the cache. On a CPU
    it holds copies of the weights as they were when it was made, for which it is worth keeping.
    """

    @torch.no_grad()
    def __init__(self, model: GPT) -> None:
        config = model.config
        self.model = model
        self.device = model.token_embedding.weight.device
        self.slides = config.position != "learned"
        self.window = min(config.block_size, config.attention_window or config.block_size)
        # ALiBi, variants and the rungs below multi-head attention take the way of a whole text, which is slower.
        slower = config.position == "alibi" or config.attention in ATTENTION_VARIANTS
        lean = isinstance(model.blocks[0].attention, MultiHeadAttention) and not slower
        self.captures = lean and self.device.type == "cuda"
        copy = sum(parameter.numel() for parameter in model.parameters()) <= COPIED
        self.steps = [OneTokenBlock(block, copy=copy) for block in model.blocks] if lean else None
        self.lm_head = one_row_product(model.lm_head.weight, None, copy=copy)
        self.graphs: dict[int, CapturedCall] = {}  # by the number of slots that each looks at

    def read(self, texts: list[list[int]], room: int) -> Float[Tensor, "B V"]:
        """Logits of the token after each text of 1 to block_size tokens; `room` more will be asked for."""
        longest = max(map(len, texts))
        assert min(map(len, texts)) > 0 and longest <= self.model.config.block_size
        rows = [[0] * (longest - len(text)) + text for text in texts]
        tokens = torch.tensor(rows, device=self.device)  # (B, T)
        self.padding = torch.tensor([longest - len(text) for text in texts], device=self.device)  # (B,)
        self.most_padding = longest - min(map(len, texts))

        largest = self.window + self.window // 4 + 1 if self.slides else self.model.config.block_size
        self.cache = self._make_cache(len(texts), max(longest, min(longest + room, largest)))
        # The tokens behind the cache's slots, from which learned positions begin anew.
        self.written = torch.zeros(len(texts), self.cache.size, dtype=torch.long, device=self.device)
        self.written[:, :longest] = tokens
        self.graphs.clear()

        real = positions = None
        if self.most_padding:
            slots = torch.arange(longest, device=self.device)
            real = slots >= self.padding[:, None]  # (B, T)
            positions = (slots - self.padding[:, None]).clamp(min=0)  # (B, T)
        x = self.model.hidden(tokens, attention_mask=real, positions=positions, cache=self.cache)
        return self.model.logits(x[:, -1])

    def step(
        self, tokens: Int[Tensor, " B"], choose: Callable[[Float[Tensor, "B V"]], Any] = lambda logits: logits
    ) -> Any:
        """What `choose` makes of the logits (B, V) after these tokens, which go to the end of each text.

        On a GPU the step and its `choose` are captured as one CUDA graph. So `choose` must be the same from one
        `read` or `take` to the next, and work on tensors alone; the next step overwrites what it returns.
        """
        cache = self.cache
        if cache.length == cache.size:
            if not self.slides:
                return choose(self._begin_anew(tokens))
            cache.drop_oldest(cache.length + 1 - self.window)
        if not self.slides:
            self.written[:, cache.length] = tokens
        if self.steps is None:
            return choose(self._plain_step(tokens))
        result = self._captured_step(tokens, choose) if self.captures else choose(self._lean_step(tokens))
        cache.advance(1)
        return result

    def _lean_step(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """step() over no more than the slots in sight, with a mask only where there is something to hide."""
        cache, position = self.cache, self.cache.position
        first, end = max(0, cache.length + 1 - self.window), cache.length + 1  # the slots in sight
        positions = mask = None
        if self.most_padding:
            positions = (position - self.padding)[:, None]  # (B, 1)
            if self.most_padding > cache.start + first:
                mask = torch.arange(cache.start + first, position + 1, device=self.device) >= self.padding[:, None]
                mask = mask[:, None, None, :]  # (B, S) -> (B, 1, 1, S)
        return self._run_blocks(tokens, positions, mask, slice(first, end), slice(end - 1, end), Tensor.copy_)

    def _captured_step(self, tokens: Int[Tensor, " B"], choose: Callable[[Float[Tensor, "B V"]], Any]) -> Any:
        """step() as a CUDA graph, one for each power of two of filled slots: a short text is not read as a long one."""
        length = self.cache.length
        if not self.graphs:
            self.tokens = torch.empty_like(tokens)
            self.slot, self.position = (torch.empty(1, dtype=torch.long, device=self.device) for _ in range(2))
        self.tokens.copy_(tokens)
        self.slot.fill_(length)
        self.position.fill_(self.cache.position)
        S = min(self.cache.size, max(FEWEST_SLOTS, 1 << length.bit_length()))
        if S not in self.graphs:
            self.graphs[S] = CapturedCall(lambda: choose(self._fixed_step(S)))
        return self.graphs[S]()

    def _fixed_step(self, S: int) -> Float[Tensor, "B V"]:
        """step() in tensors that keep size and address: a mask hides those of S slots that are empty or out of sight.

        The numbers that change from step to step come in as tensors: slot, position and tokens.
        """
        slots = torch.arange(S, device=self.device)
        mask = slots + (self.position - self.slot) >= self.padding[:, None]  # (B, S)
        mask = mask & (slots <= self.slot) & (slots > self.slot - self.window)
        # As numbers, which the kernels take as they are; each layer would make them of bools again.
        mask = torch.where(mask, 0.0, -torch.inf).to(self.cache.keys.dtype)[:, None, None, :]  # (B, 1, 1, S)
        positions = (self.position - self.padding)[:, None]  # (B, 1)

        def put(slots: Tensor, new: Tensor) -> None:
            slots.index_copy_(-2, self.slot, new)

        return self._run_blocks(self.tokens, positions, mask, slice(0, S), slice(0, S), put)

    def _run_blocks(
        self,
        tokens: Int[Tensor, " B"],
        positions: Int[Tensor, "B 1"] | None,
        mask: Bool[Tensor, "B 1 1 S"] | Float[Tensor, "B 1 1 S"] | None,
        seen: slice,
        new: slice,
        put: Callable[[Tensor, Tensor], object],
    ) -> Float[Tensor, "B V"]:
        """Logits after these tokens, which see the slots `seen`; put() stores their keys and values in `new`.

        positions: None where all stand at the cache's next one.
        """
        cache, x = self.cache, self.model.token_embedding(tokens)  # (B, C)
        if not self.slides:
            x = x + self.model.position_embedding.weight[cache.position if positions is None else positions[:, 0]]
        rotation = None
        if (rope := self.model.blocks[0].attention.rope) is not None:
            # (1, D/2, 2), or with positions (B, 1, 1, D/2, 2)
            rotation = rope.rotation(x[:, None], positions, cache.position)
        stored = (cache.keys, cache.values)
        layers = (part[..., slots, :].unbind() for slots in (new, seen) for part in stored)
        for block, k_new, v_new, keys, values in zip(self.steps, *layers, strict=True):
            x = block(x, rotation, put, k_new, v_new, keys, values, mask)
        return self.model.cap(self.lm_head(self.model.final_norm(x)))

    def take(self, rows: list[int]) -> None:
        """Go on with these texts alone, in this order; one that comes several times goes on in several ways."""
        index = torch.tensor(rows, device=self.device)
        self.cache = self.cache.take(index)
        self.padding, self.written = self.padding[index], self.written[index]
        self.graphs.clear()

    def _plain_step(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """step() by way of the model's own forward pass, for forms that have no OneTokenBlock."""
        cache, real, positions = self.cache, None, None
        if self.most_padding:
            positions = (cache.position - self.padding)[:, None]  # (B, 1)
        if self.most_padding > cache.start or cache.length >= self.window:
            slots = torch.arange(cache.start, cache.position + 1, device=self.device)
            real = (slots >= self.padding[:, None]) & (slots > cache.position - self.window)  # (B, S)
        x = self.model.hidden(tokens[:, None], attention_mask=real, positions=positions, cache=cache)
        return self.model.logits(x[:, -1])

    def _begin_anew(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """step() where the longest text has used up the learned positions; a shorter one keeps all it has."""
        most = self.model.config.block_size
        texts = []
        for written, padding, token in zip(*(t.tolist() for t in (self.written, self.padding, tokens)), strict=True):
            text = [*written[padding:], token]
            texts.append(text if len(text) <= most else text[-max(1, most // 2) :])
        return self.read(texts, room=most)

    def _make_cache(self, B: int, size: int) -> KVCache:
        weight = self.model.token_embedding.weight
        attention = self.model.blocks[0].attention
        probe = torch.zeros(1, 1, weight.shape[1], device=self.device, dtype=weight.dtype)
        Hkv, _, D = attention.project(probe, None, 0)[1].shape[1:]  # the form decides how many heads of which size
        return KVCache(len(self.model.blocks), B, Hkv, size, D, device=self.device, dtype=weight.dtype)


class OneTokenBlock:
    """Block.forward for T = 1, in as few operations as there are: at that size each costs more than its arithmetic.

    The three projections are one product with a copy of their weights; heads come out where attention
    wants them, so that nothing is transposed; keys and values go straight to their slots in the cache.
    """

    def __init__(self, block: Block, *, copy: bool) -> None:
        self.block, attention = block, block.attention
        self.H, self.Hkv, self.D = attention.n_head, attention.kv_heads, attention.head_size
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = torch.cat([projection.weight for projection in projections])  # ((H + 2 Hkv) · D, C)
        bias = None if attention.q_proj.bias is None else torch.cat([projection.bias for projection in projections])
        self.project = one_row_product(weight, bias, copy=copy)
        self.merge = one_row_product(attention.o_proj.weight, attention.o_proj.bias, copy=copy)
        self.mlp = {
            name: one_row_product(layer.weight, layer.bias, copy=copy) for name, layer in block.mlp.named_children()
        }
        self.eps = None
        if attention.q_norm is not None:
            self.eps = attention.q_norm.eps
            q_weight = attention.q_norm.weight.expand(self.H, 1, self.D)
            k_weight = attention.k_norm.weight.expand(self.Hkv, 1, self.D)
            self.qk_weight = torch.cat((q_weight, k_weight))  # (H + Hkv, 1, D)

    def __call__(
        self,
        x: Float[Tensor, "B C"],
        rotation: Float[Tensor, "... 1 half 2"] | None,
        put: Callable[[Tensor, Tensor], object],
        k_new: Float[Tensor, "B Hkv N D"],
        v_new: Float[Tensor, "B Hkv N D"],
        keys: Float[Tensor, "B Hkv S D"],
        values: Float[Tensor, "B Hkv S D"],
        mask: Bool[Tensor, "B 1 1 S"] | Float[Tensor, "B 1 1 S"] | None,
    ) -> Float[Tensor, "B C"]:
        """x after this block; put() stores its key in `k_new`, which is part of `keys`, and its value alike."""
        B, H, Hkv = x.shape[0], self.H, self.Hkv
        qkv = self.project(self.block.attention_norm(x)).view(B, -1, 1, self.D)  # (B, H + 2 Hkv, 1, D)
        qk, v = qkv[:, : H + Hkv], qkv[:, H + Hkv :]
        if self.eps is not None:
            qk = F.rms_norm(qk, (self.D,), eps=self.eps) * self.qk_weight
        if rotation is not None:
            qk = rotate(qk, rotation)
        put(k_new, qk[:, H:])
        put(v_new, v)
        # One query sees every key in sight, so this is all there is of causality. Heads that share a key are its rows.
        q = qk[:, :H].reshape(B, Hkv, -1, self.D)  # (B, Hkv, H / Hkv, D)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.merge(y.reshape(B, -1))
        return x + self._mlp(self.block.mlp_norm(x))

    def _mlp(self, x: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        up = self.mlp["up_proj"](x)
        hidden = F.silu(self.mlp["gate_proj"](x)) * up if "gate_proj" in self.mlp else self.block.mlp.activation(up)
        return self.mlp["down_proj"](hidden)


def one_row_product(
    weight: Float[Tensor, "N C"], bias: Float[Tensor, " N"] | None, *, copy: bool
) -> Callable[[Tensor], Tensor]:
    """The linear layer with these weights, for a row or a few.

    Its time is that of reading the weights, which MKL does on a single core, and slowly. Cut into as many panels
    as there are threads, (panels, C, N / panels), they are read by all. One row is then, in each panel, the sum of
    its C rows weighted by x: an embedding bag, whose kernel fetches ahead. Several rows are a batch of products.
    copy: whether the panels may be a copy, each in one piece; without, one row is a batch of products too.
    """
    panels, (N, C) = torch.get_num_threads(), weight.shape
    if weight.dtype != torch.float32 or not weight.is_cpu or not torch.backends.mkl.is_available():
        return lambda x: F.linear(x, weight, bias)
    missing = -N % panels
    if weight.numel() < LARGE or (missing and not copy):
        return lambda x: F.linear(x, weight, bias)
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    stacked = padded.unflatten(0, (panels, -1)).mT  # (panels, C, N / panels)
    if copy:
        stacked = in_large_pages(stacked)
    table = stacked.reshape(panels * C, -1) if copy else None
    index, offsets = torch.arange(panels * C), torch.arange(0, panels * C, C)

    def product(x: Float[Tensor, "B C"]) -> Float[Tensor, "B N"]:
        if copy and len(x) == 1:
            factors = x.expand(panels, C).reshape(-1)
            y = F.embedding_bag(index, table, offsets, mode="sum", per_sample_weights=factors)  # (panels, N / panels)
            y = y.view(1, -1)
        else:
            y = torch.bmm(x.expand(panels, -1, -1), stacked)  # (panels, B, N / panels)
            y = y.transpose(0, 1).flatten(1)
        y = y[:, :N] if missing else y
        return y if bias is None else y + bias

    return product


def in_large_pages(tensor: Tensor) -> Tensor:
    """A copy in pages of 2 MB where Linux has them: with small ones a third of the reading is looking pages up."""
    memory = mmap.mmap(-1, tensor.nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
