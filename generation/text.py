"""Text in, text out: a model and its tokenizer continue prompts."""

from __future__ import annotations

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
class TextChunk:
    """The next bit of a sample's text, and when it is the last one why: "end" (of the document), "stop" or "length"."""

    sample: int
    text: str
    finish: str | None = None
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    """(token, log-probability in nats) of the tokens drawn since the chunk before, if asked for."""


def write(
    decoder: Decoder,
    tokenizer: tiktoken.Encoding,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    seeds: list[int],
    controls: Controls | None = None,
    stop: Iterable[str] = (),
    logprobs: bool = False,
) -> Iterator[TextChunk]:
    """Yield what follows each of `prompts` (from encode_prompt), chunk by chunk as it becomes text.

    A sample ends where the model ends the document, before the first of the `stop` strings, or after
    max_new_tokens. Its text depends on its prompt and seed, not on the other samples. The model is left
    in the mode (train or eval) it came in.
    """
    end = tokenizer.eot_token
    streams = [TextStream(tokenizer, tuple(stop)) for _ in prompts]
    finished: set[int] = set()
    model, was_training = decoder.model, decoder.model.training
    model.eval()
    try:
        steps = generate(
            decoder,
            prompts,
            max_new_tokens=max_new_tokens,
            seeds=seeds,
            controls=controls,
            allowed=allowed_ids(tokenizer, model),
            logprobs=logprobs,
            finished=finished,
        )
        for number, step in enumerate(steps, start=1):
            for sample, token, logprob in step:
                stream = streams[sample]
                text = stream.close() if token == end else stream.feed(token)
                finish = "end" if token == end else "stop" if stream.stopped else None
                if finish is None and number == max_new_tokens:
                    text, finish = text + stream.close(), "length"
                if finish is not None:
                    finished.add(sample)
                if text or finish or logprobs:
                    yield TextChunk(sample, text, finish, [(token, logprob)] if logprobs else [])
    finally:
        model.train(was_training)


def continue_text(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: str, *, max_new_tokens: int, seed: int = 0
) -> Iterator[str]:
    """Yield the chunks of one sample after `prompt`."""
    tokens = encode_prompt(tokenizer, prompt)
    for chunk in write(Decoder(model), tokenizer, [tokens], max_new_tokens=max_new_tokens, seeds=[seed]):
        yield chunk.text


def encode_prompt(tokenizer: tiktoken.Encoding, prompt: str, *, special_tokens: bool = False) -> list[int]:
    """A prompt's tokens: the start of a document, as in training, so an empty one is <|endoftext|> alone.

    Special tokens in it are text like any other, unless `special_tokens` lets them mean themselves.
    """
    if special_tokens:
        tokens = tokenizer.encode(prompt, allowed_special="all")
    else:
        tokens = encode_text(tokenizer, prompt).tolist()
    return [tokenizer.eot_token, *tokens]


def fit_prompt(tokens: list[int], block_size: int) -> list[int]:
    """The prompt's tail, where it is longer than the model's context; says so on stderr."""
    if len(tokens) <= block_size:
        return tokens
    print(
        f"The prompt has {len(tokens):,} tokens, but the model sees {block_size:,}: only its end is read.",
        file=sys.stderr,
    )
    return tokens[-block_size:]


def allowed_ids(tokenizer: tiktoken.Encoding, model: GPT) -> Bool[Tensor, " V"] | None:
    """Which of the model's ids stand for something, on its device; None when all do.

    A vocabulary may be padded for speed, and published encodings leave ids unused.
    """
    lengths = token_bytes(tokenizer)
    known = np.zeros(model.config.vocab_size, dtype=bool)
    known[: len(lengths)] = lengths[: len(known)] > 0
    known[[token for token in tokenizer._special_tokens.values() if token < len(known)]] = True
    return None if known.all() else torch.from_numpy(known).to(model.token_embedding.weight.device)


class TextStream:
    """Tokens to text as soon as it is certain.

    A character is held back until all its bytes are there, and what may be the beginning of a stop
    string until it is or is not. Bytes that can never become text are shown as U+FFFD.
    """

    def __init__(self, tokenizer: tiktoken.Encoding, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that one more token makes certain; sets `stopped` when a stop string ends it."""
        self.pending += self.decoder.decode(self.tokenizer.decode_single_token_bytes(token))
        return self._release(hold=True)

    def close(self) -> str:
        """What was held back, when no more tokens come."""
        self.pending += self.decoder.decode(b"", final=True)
        return self._release(hold=False)

    def _release(self, hold: bool) -> str:
        found = [place for word in self.stop if (place := self.pending.find(word)) >= 0]
        if found:
            self.stopped = True
            certain = min(found)
        else:
            certain = len(self.pending) - (max(map(self._begun, self.stop), default=0) if hold else 0)
        text, self.pending = self.pending[:certain], "" if found else self.pending[certain:]
        return text

    def _begun(self, word: str) -> int:
        """How many characters at the end of the pending text may be the beginning of `word`."""
        lengths = range(min(len(word) - 1, len(self.pending)), 0, -1)
        return next((n for n in lengths if self.pending.endswith(word[:n])), 0)
