"""Decoding with the KV cache: texts are read once, then continued one token at a time.

What a text sees once it is longer than block_size:

rope, alibi, none   the latest block_size tokens, in every layer: the cache slides along with the text.
learned             there is no embedding for position block_size, so the text begins anew with its latest
                    block_size // 2 tokens whenever the next one would stand there.

Both depend on nothing but the text itself, so a batch of texts is decoded as each would be alone.

A plain step of GPT-2's shape (12 layers) is 149 operations that are no views; drawing a token adds 8. On a GPU a step
is captured as a graph, and the next one launched before the last token is read. The aim is 2,500 tokens/s for GPT-2
124M at batch 1 in bf16 on an H200; that has not been measured.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errors import SettingsError
from model.attention.functional import ATTENTION_FUNCTIONS
from model.gpt import GPT
from model.masks import alibi_slopes
from model.packed import packed
from model.size import memory_of

FEWEST_SLOTS = 128  # that a CUDA graph looks at


class Decoder:
    """A model and the batch of texts that it writes: `read` begins a batch, `step` continues it.

    Texts of different lengths are padded on the left, so that all end in the same slot of the cache. On a CPU a
    decoder holds a copy of the weights as they were when it was made: keep it to write several batches.
    """

    @torch.no_grad()
    def __init__(self, model: GPT) -> None:
        config = model.config
        self.model, self.packed = model, packed(model)
        self.device = model.token_embedding.weight.device
        self.slides = config.position != "learned"
        self.sight = config.block_size if self.slides else None
        self.captures = self.runs_ahead = self.device.type == "cuda"
        self.graphs: dict[int, CapturedCall] = {}  # by the number of slots that each looks at

    def refuse_more(self, name: str, texts: int, room: int) -> None:
        """Raise SettingsError, naming the setting that asks for so many texts at a time, when they cannot fit."""
        weight = self.model.token_embedding.weight
        cache = self.model.make_cache(1, self.slots(1, room), self.sight, device="meta")
        each = cache.nbytes + len(weight) * weight.element_size()  # and logits
        if (fit := memory_of(self.device) // each) < texts:
            at_once = f"{texts:,} texts at a time need {texts * each / 1e9:,.1f} GB"
            raise SettingsError(
                f"{name}={texts} is more than {self.device} holds ({at_once}): set {name}={fit} or less."
            )

    def read(self, texts: list[list[int]], room: int) -> Float[Tensor, "B V"]:
        """Return the logits of the token after each text of 1 to block_size tokens, with room for `room` more."""
        model, longest, shortest = self.model, max(map(len, texts)), min(map(len, texts))
        assert shortest > 0 and longest <= model.config.block_size
        tokens = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=self.device)  # (B, T)
        self.padding = torch.tensor([longest - len(text) for text in texts], device=self.device)  # (B,)
        self.most_padding = longest - shortest

        size = self.slots(longest, room)
        self.cache = model.make_cache(len(texts), size, self.sight)
        # What a layer keeps beside keys and values changes its place, which a graph does not.
        self.can_capture = (
            model.layers_alike and self.cache.alike and not any(block.attention.overlayers for block in model.blocks)
        )
        # The tokens in the cache's slots, from which learned positions begin anew.
        self.written = torch.zeros(len(texts), size, dtype=torch.long, device=self.device)
        self.written[:, :longest] = tokens
        self.graphs.clear()

        real = positions = None
        if self.most_padding:
            positions = torch.arange(longest, device=self.device) - self.padding[:, None]  # (B, T)
            real, positions = positions >= 0, positions.clamp(min=0)
        x = model.hidden(tokens, attention_mask=real, positions=positions, cache=self.cache)
        return model.logits(x[:, -1])

    def slots(self, longest: int, room: int) -> int:
        """Return how many positions to have room for: with a quarter more, the oldest are seldom dropped."""
        block_size = self.model.config.block_size
        largest = block_size + block_size // 4 + 1 if self.slides else block_size
        return max(longest, min(longest + room, largest))

    def step(
        self, tokens: Int[Tensor, " B"], choose: Callable[[Float[Tensor, "B V"]], Any] = lambda logits: logits
    ) -> Any:
        """Append a token to each text; return what `choose` makes of the logits (B, V) that follow.

        On a GPU the step and its `choose` are captured as a CUDA graph, one for each power of two of filled slots, so
        that a short text is not read as a long one. `choose` must therefore be the same from one `read` or `take` to
        the next, and work on tensors alone; the next step overwrites what it returns.
        """
        cache = self.cache
        if not self.slides:
            if cache.position == self.written.size(1):
                return choose(self._begin_anew(tokens))
            self.written[:, cache.position] = tokens
        if not (self.captures and self.can_capture):
            return choose(self._plain_step(tokens))

        for layer in cache.layers:
            layer.make_room(1)
        filled, most = cache.layers[0].filled, cache.layers[0].room
        if not self.graphs:
            self.tokens = torch.empty_like(tokens)
            self.slot, self.position = (torch.empty(1, dtype=torch.long, device=self.device) for _ in range(2))
        self.tokens.copy_(tokens)
        self.slot.fill_(filled)
        self.position.fill_(cache.position)
        S = min(most, max(FEWEST_SLOTS, 1 << filled.bit_length()))
        if S not in self.graphs:
            self.graphs[S] = CapturedCall(lambda: choose(self._fixed_step(S)), self.device)
        result = self.graphs[S]()
        cache.advance(1)
        return result

    def _plain_step(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """step() over no more than the slots in sight, with a mask only where there is something to hide."""
        cache, position, positions, real = self.cache, self.cache.position, None, None
        if self.most_padding:
            positions = (position - self.padding)[:, None]  # (B, 1)
            first = 0 if self.sight is None else max(0, position + 1 - self.sight)
            if self.most_padding > first:
                real = torch.arange(first, position + 1, device=self.device) >= self.padding[:, None]  # (B, S)
        x = self.packed.hidden(tokens[:, None], attention_mask=real, positions=positions, cache=cache)
        return self.packed.logits(x[:, -1])

    def _fixed_step(self, S: int) -> Float[Tensor, "B V"]:
        """step() in tensors that keep size and address, over S slots, some of which are empty or out of sight.

        The numbers that change from step to step come in as tensors: slot, position and tokens. What hides a slot is
        a number that all layers add to their scores; a variant, which may be no softmax, gets a mask instead.
        """
        slots = torch.arange(S + -S % 16, device=self.device)  # fused kernels want rows of such a length
        seen = slots + (self.position - self.slot) >= self.padding[:, None]  # (B, S)
        store, attention = self.cache.layers[0], self.model.blocks[0].attention
        seen = seen & (slots <= self.slot)
        if store.sight is not None:
            seen = seen & (slots > self.slot - store.sight)
        dtype = store.rows["kv"].dtype
        bias = alibi_slopes(attention.n_head, self.device) if attention.alibi else seen.new_zeros(1, dtype=dtype)
        bias = (bias[None, :, None, None] * (slots - self.slot)).to(dtype)  # (1, H, 1, S)
        mask: Tensor | None = seen[:, :S]
        if attention.attend in ATTENTION_FUNCTIONS.values():
            mask, bias = None, bias.where(seen[:, None, None], torch.finfo(dtype).min)  # (B, H, 1, S)
        positions = (self.position - self.padding)[:, None]  # (B, 1)
        cache = self.cache.at(self.slot, bias[..., :S])
        x = self.packed.hidden(self.tokens[:, None], attention_mask=mask, positions=positions, cache=cache)
        return self.packed.logits(x[:, -1])

    def take(self, rows: list[int]) -> None:
        """Continue these texts alone, in this order; one that comes several times is continued in several ways."""
        index = torch.tensor(rows, device=self.device)
        self.cache = self.cache.take(index)
        self.padding, self.written = self.padding[index], self.written[index]
        self.graphs.clear()

    def _begin_anew(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """step() where the longest text has used up the learned positions; a shorter one keeps all it has."""
        most, texts = self.model.config.block_size, []
        for written, padding, token in zip(*(t.tolist() for t in (self.written, self.padding, tokens)), strict=True):
            text = [*written[padding:], token]
            texts.append(text if len(text) <= most else text[-max(1, most // 2) :])
        return self.read(texts, room=most)


@torch.inference_mode()
def decode_rate(model: GPT, steps: int = 48) -> float:
    """Return how many tokens a second a model generates for one text at the end of its context, by the median step."""
    was_training = model.training
    decoder = Decoder(model.eval())
    length = max(1, model.config.block_size - steps)
    token, times = decoder.read([[0] * length], room=steps).argmax(-1), []
    for _ in range(steps):
        started = time.perf_counter()
        token = decoder.step(token).argmax(-1)
        token.item()  # waits for the device
        times.append(time.perf_counter() - started)
    model.train(was_training)
    return 1 / statistics.median(times)


class CapturedCall:
    """Call a function: the first time as it is, the second while capturing it as a CUDA graph, then replay the graph.

    A graph launches its kernels as one: where each is small, launching them is most of their time.
    The function takes no arguments and works in place on tensors, whose addresses the graph keeps. Every size and
    number that Python knows stays what it was when captured, and nothing may wait for the GPU. The result is the
    same tensors each time, which the next call overwrites. The first call is a rehearsal: libraries allocate and
    load what they need at first use, which a capture does not allow.

    Source: Gray 2019, "Getting Started with CUDA Graphs"; PyTorch's notes on CUDA semantics, "CUDA Graphs".
    """

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self.function, self.device, self.rehearsed = function, device, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Any:
        if not self.rehearsed:
            self.rehearsed = True
            return self.function()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Record the kernels, run none: those of the current device, so it must be the function's. Other threads
            # may use the GPU meanwhile: NCCL's watchdog, a checkpoint.
            with torch.cuda.device(self.device), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = self.function()
        self.graph.replay()
        return self.result
