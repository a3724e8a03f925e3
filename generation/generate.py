"""From prompts to text: a batch is read once, then continued one token at a time through the KV cache.

A sample depends on its prompt and its seed, never on the rest of the batch.
"""

import codecs
import statistics
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


class Chunk(NamedTuple):
    """The next chunk of a sample's text."""

    sample: int
    text: str
    finish: str | None = None
    """Why the sample ended, in its last chunk: "end" (of the document), "stop" or "length"."""
    logprob: tuple[int, float] | None = None
    """The token and its log-probability in nats, if asked for; then every token gives a chunk."""


class Decoder:
    """A model with its KV cache and the batch of texts in it, padded on the left so that all end together.

    When the context is full, the last half of it is prefilled again; a stack of states alone has no such limit.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.device = model.token_embedding.weight.device

    def prefill(self, texts: list[list[int]], room: int) -> Logits:
        """Read a new batch of texts of 1 to block_size tokens; return the next logits. room: tokens to come."""
        if not all(texts):
            raise ValueError("a text to continue needs at least one token")
        self.texts = [list(text) for text in texts]
        longest = max(map(len, texts))
        self.cache = KVCache(min(longest + room, self.model.limit or longest + room))
        padding = torch.tensor([longest - len(text) for text in texts])
        tokens = torch.tensor([[0] * (longest - len(text)) + text for text in texts])  # (B, T)
        doc_starts = padding[:, None] * (torch.arange(longest) >= padding[:, None])  # padding is its own document
        return self._forward(tokens, doc_starts.to(self.device) if padding.any() else None)

    def step(self, tokens: list[int]) -> Logits:
        """Append a token to each text; return the next logits."""
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        limit = self.model.limit
        if limit and self.cache.position == limit:
            return self.prefill([t if len(t) <= limit else t[-max(1, limit // 2) :] for t in self.texts], room=limit)
        return self._forward(torch.tensor(tokens)[:, None])

    def take(self, rows: list[int]) -> None:
        """Keep these rows of the batch alone, in this order; a row that is named twice is copied."""
        if rows == list(range(len(self.texts))):
            return
        self.texts = [list(self.texts[row]) for row in rows]
        self.cache = self.cache.take(torch.tensor(rows, device=self.device))

    def _forward(self, tokens: Int[Tensor, "B T"], doc_starts: Int[Tensor, "B T"] | None = None) -> Logits:
        with sdpa_kernel(BACKENDS) if self.device.type == "cuda" else nullcontext():
            # Prompts have too many lengths to be compiled.
            hidden = self.model.runtime.compiled_hidden if self.cache.position else None
            x = (hidden or self.model.hidden)(copy_to(self.device, tokens), doc_starts=doc_starts, cache=self.cache)
            return self.model.logits(x[:, -1]).float()


def filter_logits(logits: Logits, params: SamplingParams, seen: Bool[Tensor, "B V"] | None = None) -> Logits:
    """Return the logits after the filters, in the order of Hugging Face's `generate`: dropped tokens have −∞.

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
        beyond = cumulative_sum(probabilities, -1) - probabilities >= params.top_p  # the likelier ones already reach p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        least = params.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def sample(logits: Logits, uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the summed probabilities pass each row's uniform number in [0, 1).

    One number a token, whatever the vocabulary. A token of probability 0 is never sampled.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    summed = (logits.softmax(-1) * 2.0**52).long().cumsum(-1)  # of integers, which CUDA adds deterministically
    total = summed[:, -1:]
    threshold = (copy_to(logits.device, uniform).to(wide)[:, None] * total).long()
    return torch.searchsorted(summed, torch.minimum(threshold, total - 1), right=True)[:, 0]  # a float32 rounds up


def copy_to(device: torch.device, few: Tensor) -> Tensor:
    """Copy a few numbers to a device. CUDA stages them first, so that neither side waits for the other."""
    return few.to(device, non_blocking=device.type == "cuda")


@torch.inference_mode()
def generate(
    model: GPT, tokenizer: tiktoken.Encoding, prompts: list[list[int]], *, seeds: list[int], params: SamplingParams,
    logprobs: bool = False,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield the continuation of each of `prompts` (from encode_prompt), chunk by chunk as it becomes text.

    A sample ends where the model ends the document, before the first of params.stop, or after params.max_new_tokens.
    The model's mode (train or eval) is restored. Raises FloatingPointError when logits are not finite.
    """
    allowed = allowed_ids(tokenizer, model)
    detokenizers = [Detokenizer(tokenizer, params.stop) for _ in prompts]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    decoder = Decoder(model)
    with eval_mode(model):
        # 1) Prefill each distinct prompt once, then give each sample its own copy of the cache.
        prompts = [prompt[-model.config.block_size :] for prompt in prompts]
        distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
        rows = [distinct.index(prompt) for prompt in prompts]
        logits = decoder.prefill(distinct, params.max_new_tokens)[rows]
        decoder.take(rows)
        seen = None
        if params.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                seen[row, prompt] = True

        active = list(range(len(prompts)))  # the sample in each row of the batch
        for left in reversed(range(params.max_new_tokens)):
            # 2) Sample the next token of each row, on the device.
            finite = logits.isfinite().all()
            if allowed is not None:
                logits = logits.masked_fill(~allowed, -torch.inf)
            filtered = filter_logits(logits, params, seen)
            if params.temperature == 0:
                sampled = filtered.argmax(-1)
            else:
                sampled = sample(filtered, torch.cat([torch.rand(1, generator=generators[index]) for index in active]))

            # 3) Read the tokens back, together with the flag: the only wait of a step.
            *tokens, is_finite = torch.cat((sampled, finite[None])).tolist()
            if not is_finite:
                raise FloatingPointError("its logits are not finite")
            nats = logits.log_softmax(-1).gather(-1, sampled[:, None])[:, 0].tolist() if logprobs else []

            # 4) Yield the text that is certain now.
            rows = []  # that go on
            for row, (index, token) in enumerate(zip(active, tokens, strict=True)):
                text, finish = detokenizers[index].feed(token, last=not left)
                if text or finish or logprobs:
                    yield Chunk(index, text, finish, (token, nats[row]) if logprobs else None)
                if finish is None:
                    rows.append(row)
            if not rows:
                return

            # 5) Drop the rows that have ended, and feed the others their tokens.
            if seen is not None:
                seen = seen.scatter(-1, sampled[:, None], True)
            if len(rows) < len(active):
                active = [active[row] for row in rows]
                seen = None if seen is None else seen[rows]
                decoder.take(rows)
            logits = decoder.step([tokens[row] for row in rows])


@contextmanager
def eval_mode(model: GPT) -> Iterator[None]:
    """Put the model in eval mode within, and restore its mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def generate_text(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: str, *, max_new_tokens: int, seed: int = 0
) -> Iterator[str]:
    """Yield the continuation of `prompt`, chunk by chunk."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for chunk in generate(model, tokenizer, [encode_prompt(tokenizer, prompt)], seeds=[seed], params=params):
        yield chunk.text


complete_text = generate_text  # its name in version 0.1


def encode_prompt(tokenizer: tiktoken.Encoding, prompt: str, special_tokens: bool = False) -> list[int]:
    """Return a prompt's tokens as the start of a document, as in training: <|endoftext|>, then the text.

    special_tokens: whether the names of special tokens in the prompt stand for the tokens or are text like any other.
    """
    text = tokenizer.encode(prompt, allowed_special="all") if special_tokens else encode_text(tokenizer, prompt)
    return [tokenizer.eot_token, *map(int, text)]


def allowed_ids(tokenizer: tiktoken.Encoding, model: GPT) -> Bool[Tensor, " V"] | None:
    """Return a mask of the ids that have a text, None if all have: padded and published vocabularies have gaps."""
    weight = model.token_embedding.weight
    ids = torch.tensor([*tokenizer._mergeable_ranks.values(), *tokenizer._special_tokens.values()])
    known = torch.zeros(len(weight), dtype=torch.bool)
    known[ids[ids < len(weight)]] = True
    return None if known.all() else known.to(weight.device)


class Detokenizer:
    """Turns tokens into text as soon as the text is certain.

    A character waits for all its bytes, and what may begin a stop string until it does or does not. Bytes that are no
    UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.pending = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int, last: bool = False) -> tuple[str, str | None]:
        """Return the text that one more token makes certain, and a Chunk's finish; last: no token follows."""
        # Bytes to characters: those of an unfinished character wait in the decoder.
        finish = "end" if token == self.tokenizer.eot_token else "length" if last else None
        content = b"" if finish == "end" else self.tokenizer.decode_single_token_bytes(token)
        self.pending += self.decoder.decode(content, final=finish is not None)
        # Cut before a stop string, or hold back the longest ending that may begin one.
        if found := [place for word in self.stop if (place := self.pending.find(word)) >= 0]:
            return self.pending[: min(found)], "stop"
        begun = [n for word in self.stop for n in range(1, len(word)) if self.pending.endswith(word[:n])]
        certain = len(self.pending) - (0 if finish else max(begun, default=0))
        text = self.pending[:certain]
        self.pending = self.pending[certain:]
        return text, finish


@torch.inference_mode()
def decode_rate(model: GPT, steps: int = 48) -> float:
    """Return the tokens per second of one text at the end of the model's context, by the median step."""
    decoder = Decoder(model)
    times = list[float]()
    with eval_mode(model):
        token = decoder.prefill([[0] * max(1, model.config.block_size - steps)], steps).argmax(-1).tolist()
        for _ in range(steps):
            started = time.perf_counter()
            token = decoder.step(token).argmax(-1).tolist()  # which waits for the device
            times.append(time.perf_counter() - started)
    return 1 / statistics.median(times)
