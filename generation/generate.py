"""From prompts to text: a batch is read once, then continued one token at a time through the KV cache.

A sample depends on its prompt and its seed, not on those beside it.
"""

import codecs
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import tiktoken
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.tokenizer import encode_text
from generation.config import SamplingParams
from model.cache import KVCache
from model.gpt import GPT
from model.layers import cumulative_sum

Logits = Float[Tensor, "B V"]

# cuDNN's attention plans anew for each length of the cache, which takes longer than the step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Part(NamedTuple):
    """The next part of a sample's text."""

    sample: int
    text: str
    finish: str | None = None
    """In a sample's last part why it ended: "end" (of the document), "stop" or "length"."""
    logprob: tuple[int, float] | None = None
    """The token drawn and its log-probability in nats, if asked for; then every token gives a part."""


class Decoder:
    """A model, and the batch of texts that it writes, padded on the left so that all end together.

    A text that has filled block_size begins anew from its latest half; a stack of states alone has no such limit.
    """

    def __init__(self, model: GPT) -> None:
        self.model, self.device = model, model.token_embedding.weight.device

    def prefill(self, texts: list[list[int]], room: int) -> Logits:
        """Begin a batch of texts of 1 to block_size tokens; return the logits that follow. room: tokens to come."""
        if not all(texts):
            raise ValueError("a text to continue needs at least one token")
        self.texts = [list(text) for text in texts]
        longest = max(map(len, texts))
        self.cache = KVCache(min(longest + room, self.model.limit or longest + room))
        padding = torch.tensor([longest - len(text) for text in texts])
        tokens = torch.tensor([[0] * (longest - len(text)) + text for text in texts])  # (B, T)
        doc_starts = padding[:, None] * (torch.arange(longest) >= padding[:, None])  # padding is a text of its own
        return self._forward(tokens, doc_starts.to(self.device) if padding.any() else None)

    def step(self, tokens: list[int]) -> Logits:
        """Append a token to each text; return the logits that follow."""
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        limit = self.model.limit
        if limit and self.cache.position == limit:
            return self.prefill([t if len(t) <= limit else t[-max(1, limit // 2) :] for t in self.texts], room=limit)
        return self._forward(torch.tensor(tokens)[:, None])

    def take(self, rows: list[int]) -> None:
        """Go on with these texts alone, in this order; one that comes several times is continued in several ways."""
        if rows == list(range(len(self.texts))):
            return
        self.texts = [list(self.texts[row]) for row in rows]
        self.cache = self.cache.take(torch.tensor(rows, device=self.device))

    def _forward(self, tokens: Int[Tensor, "B T"], doc_starts: Int[Tensor, "B T"] | None = None) -> Logits:
        with sdpa_kernel(BACKENDS) if self.device.type == "cuda" else nullcontext():
            # A prompt has a length of its own, for which nothing is compiled.
            hidden = self.model.runtime.compiled_hidden if self.cache.position else None
            x = (hidden or self.model.hidden)(sent(tokens, self.device), doc_starts=doc_starts, cache=self.cache)
            return self.model.logits(x[:, -1]).float()


def filtered(logits: Logits, params: SamplingParams, seen: Bool[Tensor, "B V"] | None = None) -> Logits:
    """Change logits in the order of Hugging Face's `generate`; what a filter drops becomes −∞.

    repetition_penalty: make tokens that the text has `seen` less likely (Keskar et al. 2019, CTRL, section 4.1). A
        negative logit is multiplied, because dividing it would make the token likelier.
    temperature: divide by it, where it is not 0.
    top_k: keep the k likeliest tokens (Fan et al. 2018), and any that tie with the last of them.
    top_p: keep the nucleus, the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2020).
    min_p: keep tokens at least min_p times as probable as the likeliest (Nguyen et al. 2024, eq. 1).
    """
    if seen is not None:
        penalty = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    if params.top_k is not None and params.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        descending, order = logits.sort(descending=True)
        probabilities = descending.softmax(-1)
        beyond = cumulative_sum(probabilities, -1) - probabilities >= params.top_p  # what came before already reaches p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        least = params.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def draw(logits: Logits, uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the summed probabilities pass each row's uniform number in [0, 1).

    One number a token, whatever the vocabulary. A token of probability 0 is never drawn.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    summed = (logits.softmax(-1) * 2.0**52).long().cumsum(-1)  # of integers, which CUDA adds deterministically
    total = summed[:, -1:]
    threshold = (sent(uniform, logits.device).to(wide)[:, None] * total).long()
    return torch.searchsorted(summed, torch.minimum(threshold, total - 1), right=True)[:, 0]  # a float32 rounds up


def sent(few: Tensor, device: torch.device) -> Tensor:
    """Copy a few numbers to a device. CUDA stages them first, so that neither side waits for the other."""
    return few.to(device, non_blocking=device.type == "cuda")


@torch.inference_mode()
def complete(
    model: GPT, tokenizer: tiktoken.Encoding, prompts: list[list[int]], *, seeds: list[int], params: SamplingParams,
    logprobs: bool = False,
) -> Iterator[Part]:  # fmt: skip
    """Yield what follows each of `prompts` (from encode_prompt), part by part as it becomes text.

    A sample ends where the model ends the document, before the first of params.stop, or after params.max_new_tokens.
    The model's mode (train or eval) is restored. Raises FloatingPointError when logits are not finite.
    """
    allowed, size = allowed_ids(tokenizer, model), model.config.block_size
    texts = [Detokenizer(tokenizer, params.stop) for _ in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    decoder, samples = Decoder(model), list(range(len(prompts)))
    with eval_mode(model):
        prompts = [prompt[-size:] for prompt in prompts]
        distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]  # equal prompts are read once
        rows = [distinct.index(prompt) for prompt in prompts]
        logits = decoder.prefill(distinct, params.max_new_tokens)[rows]
        decoder.take(rows)
        seen = None
        if params.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                seen[row, prompt] = True
        for left in reversed(range(params.max_new_tokens)):
            # Draw on the device. The tokens are read back together with a flag: the only wait of a step.
            finite = logits.isfinite().all()
            logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
            changed = filtered(logits, params, seen)
            if params.temperature == 0:
                drawn = changed.argmax(-1)
            else:
                drawn = draw(changed, torch.cat([torch.rand(1, generator=generators[sample]) for sample in samples]))
            *tokens, is_finite = torch.cat((drawn, finite[None])).tolist()
            if not is_finite:
                raise FloatingPointError("its logits are not finite")
            nats = logits.log_softmax(-1).gather(-1, drawn[:, None])[:, 0].tolist() if logprobs else []

            # Yield the text that is certain now, and go on with the samples that have not ended.
            rows = []
            for row, (sample, token) in enumerate(zip(samples, tokens, strict=True)):
                text, finish = texts[sample].feed(token, last=not left)
                if text or finish or logprobs:
                    yield Part(sample, text, finish, (token, nats[row]) if logprobs else None)
                if finish is None:
                    rows.append(row)
            if not rows:
                return
            if seen is not None:
                seen = seen.scatter(-1, drawn[:, None], True)
            if len(rows) < len(samples):
                samples = [samples[row] for row in rows]
                seen = seen if seen is None else seen[rows]
                decoder.take(rows)
            logits = decoder.step([tokens[row] for row in rows])


@contextmanager
def eval_mode(model: GPT) -> Iterator[None]:
    """Switch the model's dropout off, and at the end back to what it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def generate_text(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: str, *, max_new_tokens: int, seed: int = 0
) -> Iterator[str]:
    """Yield the text of one sample after `prompt`, part by part."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for part in complete(model, tokenizer, [encode_prompt(tokenizer, prompt)], seeds=[seed], params=params):
        yield part.text


complete_text = generate_text  # its name in version 0.1


def encode_prompt(
    tokenizer: tiktoken.Encoding, prompt: str, special_tokens: bool = False, block_size: int | None = None
) -> list[int]:
    """Return a prompt's tokens as the start of a document, as in training: <|endoftext|>, then the text.

    special_tokens: whether the names of special tokens in the prompt stand for the tokens or are text like any other.
    block_size: the model's context. Only the end of a longer prompt is returned, which is said on stderr.
    """
    text = tokenizer.encode(prompt, allowed_special="all") if special_tokens else encode_text(tokenizer, prompt)
    tokens = [tokenizer.eot_token, *map(int, text)]
    if block_size is not None and len(tokens) > block_size:
        message = f"The prompt has {len(tokens):,} tokens, but the model sees {block_size:,}: only its end is read."
        print(message, file=sys.stderr)
        return tokens[-block_size:]
    return tokens


def allowed_ids(tokenizer: tiktoken.Encoding, model: GPT) -> Bool[Tensor, " V"] | None:
    """Return which ids stand for something: a vocabulary may be padded, and published ones have gaps. None for all."""
    weight = model.token_embedding.weight
    ids = torch.tensor([*tokenizer._mergeable_ranks.values(), *tokenizer._special_tokens.values()])
    known = torch.zeros(len(weight), dtype=torch.bool)
    known[ids[ids < len(weight)]] = True
    return None if known.all() else known.to(weight.device)


class Detokenizer:
    """Turns tokens into text as soon as it is certain.

    A character is held back until all its bytes are there, and the possible beginning of a stop string until it is
    decided. Bytes that can never become text are shown as U+FFFD.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop, self.pending = tokenizer, stop, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int, last: bool = False) -> tuple[str, str | None]:
        """Return the text that one more token makes certain, and a Part's finish; last: no more tokens come."""
        finish = "end" if token == self.tokenizer.eot_token else "length" if last else None
        content = b"" if finish == "end" else self.tokenizer.decode_single_token_bytes(token)
        self.pending += self.decoder.decode(content, final=finish is not None)
        if found := [place for word in self.stop if (place := self.pending.find(word)) >= 0]:
            return self.pending[: min(found)], "stop"
        begun = [n for word in self.stop for n in range(1, len(word)) if self.pending.endswith(word[:n])]
        certain = len(self.pending) - (0 if finish else max(begun, default=0))
        text, self.pending = self.pending[:certain], self.pending[certain:]
        return text, finish


@torch.inference_mode()
def decode_rate(model: GPT, steps: int = 48) -> float:
    """Return how many tokens a second a model generates for one text at the end of its context, by the median step."""
    decoder, times = Decoder(model), list[float]()
    with eval_mode(model):
        token = decoder.prefill([[0] * max(1, model.config.block_size - steps)], steps).argmax(-1).tolist()
        for _ in range(steps):
            started = time.perf_counter()
            token = decoder.step(token).argmax(-1).tolist()  # which waits for the device
            times.append(time.perf_counter() - started)
    return 1 / statistics.median(times)
