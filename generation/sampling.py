"""From logits to tokens: the controls, the draw, and the loop that feeds each token back.

The controls change the logits in the order of Hugging Face's `generate`: ids that are not allowed, repetition
penalty, temperature (0 takes the likeliest token and skips the rest), top_k, top_p, min_p.
"""

from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from generation.config import Controls
from generation.decoder import Decoder

DRAWS = 256  # uniform numbers that a sample's generator makes at a time

Logits = Float[Tensor, "B V"]
Allowed = Bool[Tensor, " V"] | None


def penalize_repetition(logits: Logits, seen: Bool[Tensor, "B V"], penalty: float) -> Logits:
    """Make tokens that the text already has less likely (Keskar et al. 2019, CTRL, section 4.1).

    A negative logit is multiplied, because dividing it would make the token likelier.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_controls(logits: Logits, controls: Controls) -> Logits:
    """Divide by the temperature, which is not 0, then let each filter drop tokens from what the one before it left.

    top_k: keep the k likeliest tokens (Fan et al. 2018), and any that tie with the last of them.
    top_p: keep the nucleus, the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2020).
    min_p: keep tokens at least min_p times as probable as the likeliest (Nguyen et al. 2024, eq. 1).
    """
    if controls.temperature != 1:
        logits = logits / controls.temperature
    if controls.top_k is not None and controls.top_k < logits.shape[-1]:
        kth_best = logits.topk(controls.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth_best, -torch.inf)
    if controls.top_p < 1:
        descending, order = logits.sort(descending=True)
        probabilities = descending.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= controls.top_p  # what came before already reaches p
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if controls.min_p > 0:
        probabilities = logits.softmax(-1)
        least = controls.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def draw(logits: Logits, uniform: Float[Tensor, "B 1"]) -> Int[Tensor, " B"]:
    """Return the token at which the summed probabilities pass each row's uniform number in [0, 1).

    One number per token, whatever the vocabulary, from the row's own generator: a sample does not depend on
    the rest of the batch. A token of probability 0 is never drawn.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    summed = logits.softmax(-1).cumsum(-1, dtype=wide)
    return torch.searchsorted(summed, uniform.to(wide) * summed[:, -1:], right=True)[:, 0]


class Sampler:
    """Choose a token for each sample, by numbers from that sample's own generator."""

    def __init__(
        self, prompts: list[list[int]], seeds: list[int], controls: Controls, allowed: Allowed, like: Logits
    ) -> None:
        self.controls, self.allowed = controls, allowed
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.drawn = 0
        self.uniform = torch.empty(len(prompts), 1, device=like.device)
        self.draw_numbers()
        self.seen = None
        if controls.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), like.shape[-1], dtype=torch.bool, device=like.device)
            for sample, prompt in enumerate(prompts):
                self.seen[sample, prompt] = True

    def draw_numbers(self) -> None:
        """Put every sample's uniform number for the next choose() where a CUDA graph found the last."""
        if self.drawn % DRAWS == 0:
            numbers = [torch.rand(DRAWS, generator=generator) for generator in self.generators]
            stacked = torch.stack(numbers, dim=1).unsqueeze(-1)  # (DRAWS, B, 1)
            stacked = stacked.pin_memory() if self.uniform.is_cuda else stacked  # else the copy waits for the GPU
            self.numbers = stacked.to(self.uniform.device, non_blocking=True)
        self.uniform.copy_(self.numbers[self.drawn % DRAWS])
        self.drawn += 1

    def choose(self, logits: Logits) -> tuple[Int[Tensor, " B"], Logits]:
        """Return the next token of each sample, and the model's own logits of the allowed ids."""
        own = logits.float() if self.allowed is None else logits.float().masked_fill(~self.allowed, -torch.inf)
        logits = own
        if self.seen is not None:
            logits = penalize_repetition(logits, self.seen, self.controls.repetition_penalty)
        if self.controls.temperature == 0:
            tokens = logits.argmax(-1)
        else:
            tokens = draw(apply_controls(logits, self.controls), self.uniform)
        if self.seen is not None:
            self.seen.scatter_(-1, tokens[:, None], True)
        return tokens, own

    def take(self, rows: list[int]) -> None:
        """Go on with these samples alone."""
        self.generators = [self.generators[row] for row in rows]
        self.numbers, self.uniform = self.numbers[:, rows], self.uniform[rows]
        if self.seen is not None:
            self.seen = self.seen[rows]


class Drawn(NamedTuple):
    """A token, the sample it belongs to, and its log-probability in nats before any control, if asked for."""

    sample: int
    token: int
    logprob: float | None


def later(tensors: list[Tensor], copied: bool) -> Callable[[], list[list[Any]]]:
    """Return a function that reads these tensors: with `copied` as they are now, whatever overwrites them until then.

    A GPU copies in the order of its work, and reading waits for the copy alone.
    """
    if not copied:
        return lambda: [tensor.tolist() for tensor in tensors]
    copies = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda).copy_(t, non_blocking=True) for t in tensors]
    arrived = torch.cuda.current_stream(tensors[0].device).record_event() if tensors[0].is_cuda else None

    def read() -> list[list[Any]]:
        if arrived is not None:
            arrived.synchronize()
        return [copy.tolist() for copy in copies]

    return read


def read_once(decoder: Decoder, prompts: list[list[int]], room: int) -> Logits:
    """Begin the batch of these prompts, equal ones by reading one of them; return the logits that follow.

    Raises FloatingPointError when they are not finite.
    """
    distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    logits = decoder.read(distinct, room=room)  # (B, V)
    if not logits.isfinite().all():
        raise FloatingPointError("its logits are not finite")
    if len(distinct) == len(prompts):
        return logits
    rows = [distinct.index(prompt) for prompt in prompts]
    decoder.take(rows)
    return logits[rows]


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    seeds: list[int],
    controls: Controls | None = None,
    allowed: Allowed = None,
    logprobs: bool = False,
    finished: Set[int] = frozenset(),
) -> Iterator[list[Drawn]]:
    """Yield the next token of every unfinished sample, max_new_tokens times.

    decoder: of a model in eval mode; it may have written other texts before.
    prompts: one for each sample, of at least one token; only the last block_size tokens count. Equal prompts are
        read once.
    seeds: one for each sample; its draws depend on nothing else.
    allowed: False for ids that must never be drawn.
    finished: samples that need no more tokens; the caller may add to it between two tokens.

    Raises FloatingPointError when the first logits are not finite.
    """
    prompts = [prompt[-decoder.model.config.block_size :] for prompt in prompts]
    samples = list(range(len(prompts)))
    logits = read_once(decoder, prompts, max_new_tokens)
    sampler = Sampler(prompts, seeds, controls or Controls(), allowed, logits)

    def step(tokens: Int[Tensor, " B"]) -> tuple[Int[Tensor, " B"], Logits]:
        sampler.draw_numbers()
        return decoder.step(tokens, sampler.choose)

    tokens, own = sampler.choose(logits)  # (B,), (B, V)
    for left in reversed(range(max_new_tokens)):
        nats = own.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] if logprobs else None
        read = later([tokens] if nats is None else [tokens, nats], decoder.runs_ahead)
        if left and decoder.runs_ahead:
            tokens, own = step(tokens)
        ids, *own_nats = read()
        drawn = map(Drawn, samples, ids, own_nats[0] if logprobs else [None] * len(samples))
        yield [each for each in drawn if each.sample not in finished]
        rows = [row for row, sample in enumerate(samples) if sample not in finished]
        if not rows or not left:
            return
        # Capturing the step anew for a smaller batch takes longer than a few finished samples.
        if len(rows) <= len(samples) // 2 if decoder.captures else len(rows) < len(samples):
            samples, tokens, own = [samples[row] for row in rows], tokens[rows], own[rows] if logprobs else own
            decoder.take(rows)
            sampler.take(rows)
        if not decoder.runs_ahead:
            tokens, own = step(tokens)
