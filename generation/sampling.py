"""From logits to tokens: the controls, the draw, and the loop that feeds each token back.

The controls change the logits in this order, each a function of its own:

1. forbid               ids that are no tokens get no probability
2. penalize_repetition  what the text already has becomes less likely
3. temperature          divides the logits; 0 takes the likeliest token and skips the rest
4. keep_top_k, keep_top_p, keep_min_p   each drops tokens from what the one before it left

It is the order of Hugging Face's `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from generation.config import Controls
from generation.decoder import Decoder

DRAWS = 256  # uniform numbers that a sample's generator makes at a time


def forbid(logits: Float[Tensor, "B V"], allowed: Bool[Tensor, " V"]) -> Float[Tensor, "B V"]:
    """No probability for the ids that are not allowed."""
    return logits.masked_fill(~allowed, -torch.inf)


def penalize_repetition(
    logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], penalty: float
) -> Float[Tensor, "B V"]:
    """Less of what the text already has (Keskar et al. 2019, CTRL, section 4.1).

    A negative logit is multiplied, as dividing it would make the token likelier.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """The k likeliest tokens (Fan et al. 2018), and any that tie with the last of them; all when k ≥ V."""
    if k >= logits.shape[-1]:
        return logits
    kth_best = logits.topk(k).values[:, -1:]
    return logits.masked_fill(logits < kth_best, -torch.inf)


def keep_top_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """The nucleus: the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2020, section 3.1)."""
    descending, order = logits.sort(descending=True)
    probabilities = descending.softmax(-1)
    beyond = probabilities.cumsum(-1) - probabilities >= p  # what came before already reaches p
    beyond[:, 0] = False
    return logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)


def keep_min_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """The tokens at least p times as probable as the likeliest (Nguyen et al. 2024, eq. 1)."""
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), -torch.inf)


def apply_controls(logits: Float[Tensor, "B V"], controls: Controls) -> Float[Tensor, "B V"]:
    """Temperature (not 0) and filters, in the order above."""
    if controls.temperature != 1:
        logits = logits / controls.temperature
    if controls.top_k is not None:
        logits = keep_top_k(logits, controls.top_k)
    if controls.top_p < 1:
        logits = keep_top_p(logits, controls.top_p)
    if controls.min_p > 0:
        logits = keep_min_p(logits, controls.min_p)
    return logits


def draw(logits: Float[Tensor, "B V"], uniform: Float[Tensor, "B 1"]) -> Int[Tensor, " B"]:
    """The token at which the summed probabilities pass each row's uniform number in [0, 1).

    One number a token, whatever the vocabulary, drawn by the row's own generator: nothing else in the
    batch has a say. A token of probability 0 is never where the sum passes a number below it.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    summed = logits.softmax(-1).cumsum(-1, dtype=wide)
    return torch.searchsorted(summed, uniform.to(wide) * summed[:, -1:], right=True)[:, 0]


class Sampler:
    """Chooses a token for each sample, by numbers from that sample's own generator."""

    def __init__(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        controls: Controls,
        allowed: Bool[Tensor, " V"] | None,
        like: Float[Tensor, "B V"],
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
        """Every sample's uniform number for the next choose(), which like a CUDA graph finds it where the last was."""
        if self.drawn % DRAWS == 0:
            numbers = [torch.rand(DRAWS, generator=generator) for generator in self.generators]
            self.numbers = torch.stack(numbers, dim=1).unsqueeze(-1).to(self.uniform.device)  # (DRAWS, B, 1)
        self.uniform.copy_(self.numbers[self.drawn % DRAWS])
        self.drawn += 1

    def choose(self, logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"]]:
        """The next token of each sample, and the model's own logits of the ids allowed."""
        own = logits.float() if self.allowed is None else forbid(logits.float(), self.allowed)
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


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    seeds: list[int],
    controls: Controls | None = None,
    allowed: Bool[Tensor, " V"] | None = None,
    logprobs: bool = False,
    finished: Set[int] = frozenset(),
) -> Iterator[list[Drawn]]:
    """Yield the next token of every unfinished sample, max_new_tokens times.

    decoder: that of the model, which may have written other texts before.

    prompts: one for each sample, of at least one token; of a prompt longer than block_size its tail counts.
        Equal prompts are read once.
    seeds: one for each sample; its draws depend on nothing else.
    allowed: False for ids that must never be drawn.
    finished: samples that need no more tokens; the caller adds to it as it goes.

    Its model is expected in eval mode; generation/decoder.py says what it sees of a long text. Raises
    FloatingPointError when the first logits are not finite.
    """
    prompts = [prompt[-decoder.model.config.block_size :] for prompt in prompts]
    distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    samples = list(range(len(prompts)))
    logits = decoder.read(distinct, room=max_new_tokens)  # (B, V)
    if not logits.isfinite().all():
        raise FloatingPointError("its logits are not finite")
    if len(distinct) < len(prompts):
        rows = [distinct.index(prompt) for prompt in prompts]
        decoder.take(rows)
        logits = logits[rows]
    sampler = Sampler(prompts, seeds, controls or Controls(), allowed, logits)

    tokens, own = sampler.choose(logits)  # (B,), (B, V)
    for _ in range(max_new_tokens - 1):
        yield _drawn(samples, tokens, own if logprobs else None, finished)
        rows = [row for row, sample in enumerate(samples) if sample not in finished]
        if not rows:
            return
        # To capture the step anew for a smaller batch takes longer than a few finished samples.
        if len(rows) <= len(samples) // 2 if decoder.captures else len(rows) < len(samples):
            samples, tokens = [samples[row] for row in rows], tokens[rows]
            decoder.take(rows)
            sampler.take(rows)
        sampler.draw_numbers()
        tokens, own = decoder.step(tokens, sampler.choose)
    yield _drawn(samples, tokens, own if logprobs else None, finished)


def _drawn(
    samples: list[int], tokens: Int[Tensor, " B"], own: Float[Tensor, "B V"] | None, finished: Set[int]
) -> list[Drawn]:
    nats = [None] * len(samples) if own is None else own.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()
    drawn = map(Drawn, samples, tokens.tolist(), nats)
    return [each for each in drawn if each.sample not in finished]
