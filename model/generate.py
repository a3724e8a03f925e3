"""From logits to tokens: temperature, filters, and the loop that feeds each token back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from model.gpt import GPT


def next_token_probabilities(
    logits: Float[Tensor, "B V"], *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Float[Tensor, "B V"]:
    """The distribution that the next token is drawn from: temperature, then top-k, then top-p.

    temperature: divides the logits; 0 puts all weight on the likeliest token.
    top_k: keep the k likeliest tokens. top_p: keep the fewest whose probabilities reach p
        (nucleus sampling, Holtzman et al. 2020); the likeliest always stays.
    """
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.size(-1):
        kth_best = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth_best, float("-inf"))
    if top_p < 1:
        descending, order = logits.sort(descending=True)
        before = descending.softmax(-1).cumsum(-1) - descending.softmax(-1)
        dropped = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits.softmax(-1)


@torch.inference_mode()
def generate(
    model: GPT,
    tokens: Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    n_vocab: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[Int[Tensor, " B"]]:
    """Yield max_new_tokens tokens for each row of `tokens`, one step at a time.

    The model sees at most its block_size latest tokens. Ids from n_vocab on, which the tokenizer
    cannot decode, are never drawn.
    """
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -model.config.block_size :])[:, -1, :n_vocab]
        probabilities = next_token_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        chosen = torch.multinomial(probabilities, 1, generator=generator)  # (B, 1)
        tokens = torch.cat([tokens, chosen], dim=1)
        yield chosen[:, 0]
