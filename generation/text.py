"""Text in, text out: a model and its tokenizer complete prompts.

sampling.generate yields token ids, `complete` yields the text that they become.
"""

import codecs
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import tiktoken
import torch
from jaxtyping import Bool
from torch import Tensor

from data.tokenizer import encode_text, token_bytes
from generation.config import Controls
from generation.decoder import Decoder
from generation.sampling import generate
from model.gpt import GPT


@dataclass(frozen=True)
class Chunk:
    """The next part of a sample's text."""

    sample: int
    text: str
    finish: str | None = None
    """In a sample's last chunk why it ended: "end" (of the document), "stop" or "length"."""
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    """(token, log-probability in nats) of the token drawn, if asked for; then every token gives a chunk."""


def complete(
    decoder: Decoder,
    tokenizer: tiktoken.Encoding,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    seeds: list[int],
    controls: Controls | None = None,
    stop: Iterable[str] = (),
    logprobs: bool = False,
) -> Iterator[Chunk]:
    """Yield what follows each of `prompts` (from encode_prompt), chunk by chunk as it becomes text.

    A sample ends where the model ends the document, before the first of the `stop` strings, or after max_new_tokens.
    Its text depends on its prompt and seed, not on the other samples. The model's mode (train or eval) is restored.
    """
    detokenizers = [Detokenizer(tokenizer, tuple(stop)) for _ in prompts]
    finished: set[int] = set()
    model, was_training = decoder.model, decoder.model.training
    model.eval()
    try:
        steps = generate(
            decoder, prompts, max_new_tokens=max_new_tokens, seeds=seeds, controls=controls,
            allowed=allowed_ids(tokenizer, model), logprobs=logprobs, finished=finished,
        )  # fmt: skip
        for number, step in enumerate(steps, start=1):
            for sample, token, logprob in step:
                detokenizer = detokenizers[sample]
                ended = token == tokenizer.eot_token
                text = detokenizer.close() if ended else detokenizer.feed(token)
                finish = "end" if ended else "stop" if detokenizer.stopped else None
                if finish is None and number == max_new_tokens:
                    text, finish = text + detokenizer.close(), "length"
                if finish is not None:
                    finished.add(sample)
                if text or finish or logprobs:
                    yield Chunk(sample, text, finish, [] if logprob is None else [(token, logprob)])
    finally:
        model.train(was_training)


def complete_text(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: str, *, max_new_tokens: int, seed: int = 0
) -> Iterator[str]:
    """Yield the text of one sample after `prompt`, part by part."""
    tokens = encode_prompt(tokenizer, prompt)
    for chunk in complete(Decoder(model), tokenizer, [tokens], max_new_tokens=max_new_tokens, seeds=[seed]):
        yield chunk.text


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
    lengths, weight = token_bytes(tokenizer), model.token_embedding.weight
    known = np.zeros(len(weight), dtype=bool)
    known[: len(lengths)] = lengths[: len(known)] > 0
    known[[token for token in tokenizer._special_tokens.values() if token < len(known)]] = True
    return None if known.all() else torch.from_numpy(known).to(weight.device)


class Detokenizer:
    """Turns tokens into text as soon as it is certain.

    A character is held back until all its bytes are there, and the possible beginning of a stop string until it is
    decided. Bytes that can never become text are shown as U+FFFD.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending, self.stopped = "", False

    def feed(self, token: int) -> str:
        """Return the text that one more token makes certain; sets `stopped` when a stop string ends it."""
        self.pending += self.decoder.decode(self.tokenizer.decode_single_token_bytes(token))
        return self._release(hold=True)

    def close(self) -> str:
        """Return what was held back, when no more tokens come."""
        self.pending += self.decoder.decode(b"", final=True)
        return self._release(hold=False)

    def _release(self, hold: bool) -> str:
        text = self.pending
        if found := [place for word in self.stop if (place := text.find(word)) >= 0]:
            self.stopped, self.pending = True, ""
            return text[: min(found)]
        begun = [n for word in self.stop if hold for n in range(1, len(word)) if text.endswith(word[:n])]
        certain = len(text) - max(begun, default=0)
        self.pending = text[certain:]
        return text[:certain]
