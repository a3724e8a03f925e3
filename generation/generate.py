"""Generation: prefill a batch of prompts, then decode one token at a time with a KV cache.

It comes to this loop, for one text that fits the context:

    tokens = encode_prompt(tokenizer, prompt)
    length = len(tokens)
    for _ in range(params.max_new_tokens):
        logits = model(torch.tensor([tokens]))[:, -1].float()  # the whole text once more for each token
        token = sample(filter_logits(logits, params), uniform_number(generator)).item()
        if token == tokenizer.eot_token:
            break
        tokens.append(token)
    text = tokenizer.decode(tokens[length:])

generate() does so for many texts, with a cache, and yields the text as it comes. It calls Decoder, which turns tokens
into logits, filter_logits() and draw(), which draw a token, and Detokenizer, which turns tokens into text. A sample
depends on its prompt and its seed, and on the rest of the batch by rounding alone.
"""

import codecs
import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import index
from typing import NamedTuple

import tiktoken
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from data.tokenizer import encode_text
from generation.config import SEEDS, SamplingParams
from model.cache import DocStarts, KVCache, Tokens
from model.gpt import GPT
from model.layers import cumulative_sum, upcast
from model.row import DecodedModel
from model.surgery import check_gpt, check_head, uncompiled

Logits = Float[Tensor, "B V"]

# Without cuDNN's attention: it makes a new plan for each length of the cache, which takes longer than the step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Chunk(NamedTuple):
    """The next chunk of a sample's text."""

    sample: int
    text: str
    finish: str | None = None
    """Why the sample ended, in its last chunk: "end" (of the document), "stop" or "length"."""
    tokens: tuple[int, ...] = ()
    """The ids drawn since the sample's previous chunk, the <|endoftext|> that ends it among them."""


def generate(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompts: list[list[int]],
    *,
    seeds: list[int],
    params: SamplingParams,
) -> Iterator[Chunk]:
    """Yield the continuations of `prompts` (from encode_prompt) as chunks of text.

    Each prompt has one sample, which ends where the model ends the document, before the first of params.stop, or after
    params.max_new_tokens. Whenever a piece of text is yielded, the model is in the mode (train or eval) that it had.
    Prompts, seeds and params are those of the call: they may be changed for the next one before this one is read.
    Raises SettingsError for params out of range. Raises FloatingPointError when logits are not finite, and, when the
    first chunk is asked for, ValueError unless prompts are lists of one token id or more, with a seed for each, and
    lm_head has a logit for each id; TypeError for an id or a seed that is no whole number.
    """
    prompts, seeds, stop = copy.deepcopy((prompts, seeds, params.stop))
    return _generate(model, tokenizer, prompts, seeds, replace(params, stop=stop))


@torch.inference_mode()
def _generate(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompts: list[list[int]],
    seeds: list[int],
    params: SamplingParams,
) -> Iterator[Chunk]:
    """Yield the chunks of generate(), whose arguments nobody else has."""
    if any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts are lists of token ids, not texts: make one by encode_prompt(tokenizer, text).")
    if any(isinstance(prompt, int) or getattr(prompt, "ndim", 1) == 0 for prompt in prompts):
        raise ValueError("prompts are a list of token ids for each text, not the ids of one: give [ids].")
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one for each.")
    if not len(prompts):
        return
    check_gpt(model)
    seeds = [index(seed) for seed in seeds]
    for seed in seeds:
        if not 0 <= seed < SEEDS:
            raise ValueError(f"seed {seed} must be from 0 to 2^32 - 1: beyond, torch repeats the texts of other seeds.")
    limit = model.longest_context  # None: a state reads a text of any length
    prompts = [[index(token) for token in prompt] for prompt in prompts]  # also of tensors and arrays
    prompts = [prompt if limit is None else prompt[-limit:] for prompt in prompts]
    detokenizers = [Detokenizer(tokenizer, params.stop or ()) for _ in prompts]
    pending: list[list[int]] = [[] for _ in prompts]  # the ids that no chunk of the sample has yet
    # A generator for each sample: its random numbers do not depend on the size of the batch.
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    decoder = Decoder(model)

    # 1) Prefill: read the prompts. From here on each row of the batch is a sample.
    logits = decoder.prefill(prompts, params.max_new_tokens)  # (B, V)
    check_head(logits, decoder.model.config.vocab_size)
    allowed = allowed_ids(tokenizer, logits)
    samples = list(range(len(prompts)))  # the sample in each row
    for remaining in reversed(range(params.max_new_tokens)):
        # 2) Draw the next token of each row, on the device.
        finite = logits.isfinite().all()
        if allowed is not None:  # an id without a text is never drawn
            logits = logits.masked_fill(~allowed, -torch.inf)
        if params.temperature == 0:
            drawn = logits.argmax(-1)  # (B,), which no filter changes
        else:
            uniform = [uniform_number(generators[number]) for number in samples]
            drawn = draw(filter_logits(logits, params), torch.cat(uniform))

        # 3) Read tokens and flag, as 0 or 1, in one transfer: a step waits for the device here, and in take().
        *tokens, is_finite = torch.cat((drawn, finite[None])).tolist()
        if not is_finite:
            raise FloatingPointError("its logits are not finite")

        # 4) Yield the text that no later token can change.
        alive = []  # the rows of the samples that have not ended
        for row, (number, token) in enumerate(zip(samples, tokens, strict=True)):
            pending[number].append(token)
            text, finish = detokenizers[number].feed(token, last=not remaining)
            if text or finish:
                yield Chunk(number, text, finish, tuple(pending[number]))
                pending[number] = []
            if finish is None:
                alive.append(row)
        if not alive:
            return

        # 5) Drop the rows that have ended, and feed the others their tokens.
        samples = [samples[row] for row in alive]
        decoder.take(alive)
        logits = decoder.step([tokens[row] for row in alive])


def generate_text(model: GPT, tokenizer: tiktoken.Encoding, prompt: str, *, max_new_tokens: int) -> Iterator[str]:
    """Yield the continuation of `prompt`, chunk by chunk.

    Its seed is 0, its other parameters are the defaults of SamplingParams; generate() takes others.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for chunk in generate(model, tokenizer, [encode_prompt(tokenizer, prompt)], seeds=[0], params=params):
        yield chunk.text


class Decoder:
    """Decodes a batch of texts with a KV cache.

    The texts are padded on the left, so that all end together. When the context is full, its last half is prefilled
    again. A model whose layers all keep a state has no such limit.
    """

    def __init__(self, model: GPT) -> None:
        # Texts have many lengths, and torch.compile() would compile for each: call the model that it was given.
        model = uncompiled(model)
        self.model = model
        # Weights that are offloaded, as by accelerate, are on no device between two calls of their module.
        self.device = torch.device("cpu") if model.device.type == "meta" else model.device
        # It calls the model in eval mode, and leaves the model's own mode alone: a caller may train it between two
        # tokens. For a single text on a CPU, model/row.py computes the same in fewer operators.
        self.decoded = DecodedModel(model)

    def prefill(self, texts: list[list[int]], room: int) -> Logits:
        """Return the logits of the next token of a new batch of texts of one token or more.

        They fit the context, if the model has a limit.

        room: the number of tokens to come; the cache has place for them, up to the model's limit.
        """
        if not all(texts):
            raise ValueError("a text to continue needs at least one token")
        # Read equal texts once.
        self.texts = [list(text) for text in dict.fromkeys(map(tuple, texts))]
        rows = [self.texts.index(text) for text in texts]
        longest = max(map(len, texts))
        needed = longest + room
        self.cache = KVCache(min(needed, self.model.longest_context or needed))

        # Pad with any token: the padding is a separate document, which no token of the text can see.
        padded = [[0] * (longest - len(text)) + text for text in self.texts]
        padding = torch.tensor([[longest - len(text)] for text in self.texts], device="cpu")  # (B, 1)
        doc_starts = padding * (torch.arange(longest, device="cpu") >= padding)  # (B, T): 0 in the padding
        logits = self._forward(
            torch.tensor(padded, device="cpu"),  # (B, T)
            doc_starts.to(self.device) if padding.any() else None,
        )

        # Give each text its own row.
        self.take(rows)
        return logits[rows]

    def step(self, tokens: list[int]) -> Logits:
        """Append a token to each text; return the logits of the next one."""
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)
        limit = self.model.longest_context
        if limit and self.cache.position == limit:
            # Cut a text to half the context, so that prefills are rare. To drop the oldest row alone would not do: the
            # later rows were computed with it. A short text was padded to the longest, and may still fit whole.
            half = max(1, limit // 2)
            texts = [text if len(text) <= limit else text[-half:] for text in self.texts]
            return self.prefill(texts, room=limit)
        return self._forward(torch.tensor(tokens, device="cpu")[:, None])  # (B, 1)

    def take(self, rows: list[int]) -> None:
        """Keep only these rows of the batch, in this order; a row that is named twice is copied."""
        if rows == list(range(len(self.texts))):
            return
        self.texts = [list(self.texts[row]) for row in rows]
        self.cache = self.cache.take(torch.tensor(rows, device=self.device))

    def _forward(self, tokens: Tokens, doc_starts: DocStarts = None) -> Logits:
        """Return the logits after the last token, in float32."""
        tokens = copy_to(self.device, tokens)
        # As model(tokens, doc_starts=doc_starts, cache=self.cache, last=True)[:, 0] in eval mode.
        with sdpa_kernel(BACKENDS) if self.device.type == "cuda" else nullcontext():
            return self.decoded.next_logits(tokens, self.cache, doc_starts).float()


def filter_logits(logits: Float[Tensor, "*lead V"], params: SamplingParams) -> Float[Tensor, "*lead V"]:
    """Return the filtered logits, in float32 or wider; a dropped token has −∞.

    The filters run in the order of Hugging Face's `generate`:

    temperature: divide by it; 0 keeps the likeliest token alone, which no other filter changes.
    top_k: keep the k likeliest tokens (Fan et al. 2018), and any that tie with the last of them.
    top_p: keep the nucleus, the fewest likeliest tokens whose probabilities reach p (Holtzman et al. 2020).
    min_p: keep tokens at least min_p times as probable as the likeliest (Nguyen et al. 2024, eq. 1).
    """
    if params.temperature == 0:
        logits = upcast(logits)
        likeliest = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, likeliest, logits.gather(-1, likeliest))
    logits = upcast(logits) / params.temperature
    if params.top_k is not None and params.top_k < logits.shape[-1]:
        kth_largest = logits.topk(params.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth_largest, -torch.inf)
    if params.top_p < 1:
        descending, order = logits.sort(stable=True, descending=True)
        probabilities = descending.softmax(-1)
        # A token is dropped if the likelier ones already reach p. The likeliest has no likelier ones, and always stays,
        # also for a p that rounds to 0. Add in float64, and round the sum to the type of p: then 0.4 and 0.3 reach 0.7.
        precise = probabilities.to(widest(logits.device))
        likelier = cumulative_sum(precise[..., :-1], -1).to(probabilities.dtype)  # of all but the likeliest
        dropped = likelier >= torch.tensor(params.top_p, dtype=probabilities.dtype, device="cpu")
        dropped = F.pad(dropped, (1, 0), value=False)
        dropped = torch.empty_like(dropped).scatter_(-1, order, dropped)  # from descending order back to ids
        logits = logits.masked_fill(dropped, -torch.inf)
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        least = params.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def uniform_number(generator: torch.Generator) -> Float[Tensor, " 1"]:
    """Return a random number in [0, 1), the same whatever torch's default type and device are."""
    return torch.rand(1, generator=generator, dtype=torch.float32, device="cpu")


def sample(logits: Logits, uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return a sampled token for each row, given its uniform random number in [0, 1).

    Raises FloatingPointError on a CPU for logits that leave no token: all are −∞, or one is NaN or ∞. A GPU would have
    to be waited for, as in draw().
    """
    if logits.is_cpu and not logits.amax(-1).isfinite().all():
        raise FloatingPointError("logits leave no token to draw: all of a row are −∞, or one is NaN or ∞")
    return draw(logits, uniform)


def draw(logits: Logits, uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return a sampled token for each row, as sample(), without a look at the logits.

    Inverse transform sampling takes the token at which the cumulative probability passes the number. It needs one
    number a token, however large the vocabulary, and never returns a token of probability 0.
    """
    precise = widest(logits.device)
    # Sum integers: on CUDA the order of additions varies, and with it a sum of floats. The sum is about 2^52, exact in
    # int64 and in float64, and beyond float16.
    cumulative = (upcast(logits).softmax(-1) * 2.0**52).long().cumsum(-1)  # (B, V)
    total = cumulative[:, -1:]  # (B, 1)
    threshold = (copy_to(logits.device, uniform).to(precise)[:, None] * total).long()
    # In float32 the product may round up to the total, beyond the last token.
    threshold = torch.minimum(threshold, total - 1)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def widest(device: torch.device) -> torch.dtype:
    """Return the most precise type of floats on a device."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a small tensor to a device without waiting for it."""
    # The caller may drop the tensor at once: CUDA first copies pageable memory to an internal buffer.
    return tensor.to(device, non_blocking=device.type == "cuda")


def encode_prompt(tokenizer: tiktoken.Encoding, prompt: str) -> list[int]:
    """Return a prompt's tokens as the start of a document: <|endoftext|>, then the text."""
    return [tokenizer.eot_token, *map(int, encode_text(tokenizer, prompt))]


def allowed_ids(tokenizer: tiktoken.Encoding, logits: Logits) -> Bool[Tensor, " V"] | None:
    """Return a mask of the ids of `logits` that have a text, or None if all have one."""
    # A padded vocabulary has ids beyond the tokenizer's, and a published one may have gaps.
    V = logits.shape[-1]
    ids = torch.tensor([*tokenizer._mergeable_ranks.values(), *tokenizer._special_tokens.values()], device="cpu")
    known = torch.zeros(V, dtype=torch.bool, device="cpu")
    known[ids[ids < V]] = True
    return None if known.all() else known.to(logits.device)


class Detokenizer:
    """Streaming detokenizer: returns text once no later token can change it.

    A character waits until all its bytes are there; one that the length limit cuts is left out, for the model did not
    end it. Text that may begin a stop string waits until it does or does not. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.pending = ""
        self.utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int, last: bool = False) -> tuple[str, str | None]:
        """Return the text that a token completes, and why the sample ends here (a Chunk's finish).

        last: no token follows.
        """
        finish = "length" if last else None
        content = b""
        if token == self.tokenizer.eot_token:
            finish = "end"
        else:
            content = self.tokenizer.decode_single_token_bytes(token)
        self.pending += self.utf8_decoder.decode(content, final=finish == "end")  # keeps incomplete characters
        # Cut before the first stop string.
        found = [self.pending.find(word) for word in self.stop if word in self.pending]
        if found:
            return self.pending[: min(found)], "stop"
        # Hold back the longest ending that may begin a stop string, unless no token follows.
        begun = [n for word in self.stop for n in range(1, len(word)) if self.pending.endswith(word[:n])]
        certain = len(self.pending) - (0 if finish else max(begun, default=0))
        text = self.pending[:certain]
        self.pending = self.pending[certain:]
        return text, finish
