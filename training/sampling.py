"""Text in, text out: a model and its tokenizer continue a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

import tiktoken
import torch

from data.tokenizer import end_of_text
from model.generate import generate
from model.gpt import GPT


def continue_text(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[str]:
    """Yield what the model writes after `prompt`, piece by piece, until it ends the document.

    The same seed gives the same text. The model is left in the mode (train or eval) it came in.
    """
    device = next(model.parameters()).device
    stop = end_of_text(tokenizer)
    # A prompt is the start of a document, as in training; special tokens in it are plain text.
    tokens = torch.tensor([[stop, *tokenizer.encode_ordinary(prompt)]], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    was_training = model.training
    model.eval()
    drawn = generate(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        n_vocab=tokenizer.n_vocab,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    )
    try:
        yield from decode_stream(tokenizer, _until(stop, drawn))
    finally:
        model.train(was_training)


def decode_stream(tokenizer: tiktoken.Encoding, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens` as it becomes whole: a character is held back until all its bytes are there."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if piece := decoder.decode(tokenizer.decode_single_token_bytes(token)):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest


def _until(stop: int, drawn: Iterator[torch.Tensor]) -> Iterator[int]:
    for token in drawn:
        if token.item() == stop:
            return
        yield int(token.item())
