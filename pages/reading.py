"""How a model reads a text, token by token, for the page of a text."""

from pathlib import Path

import numpy as np
import tiktoken
import torch
from jaxtyping import Float, Int
from torch import Tensor

from common.text import seen_from_here
from generation.score import ScoringParams, model_inputs, passes
from model.cache import DocStarts, Tokens
from model.gpt import GPT
from model.heads import Weights, for_each_layer
from pages.kit import shape
from pages.text import Reading, byte_ends, text_page
from runs.checkpoint import Checkpoint

LONGEST = 4000  # tokens on a page: more makes it slow
ALTERNATIVES = 10  # predictions for a token
MOST_KEYS = 16  # keys of a token with their weights, at most
ATTENTION_BYTES = 7_500_000  # of keys and weights in a page; base64 makes four of three


def write_page(
    file: Path, checkpoints: list[Checkpoint], texts: list[np.ndarray], params: list[ScoringParams], summary: str
) -> None:
    """Write the page of a text, or of its beginning, as checkpoints read it."""
    begun = beginnings([checkpoint.tokenizer for checkpoint in checkpoints], texts)
    readings = []
    for checkpoint, tokens, each in zip(checkpoints, begun, params, strict=True):
        reading = read(
            checkpoint.model,
            checkpoint.tokenizer,
            tokens,
            each,
            name=seen_from_here(checkpoint.path),
            models=len(checkpoints),
        )
        readings.append(reading)
    if len(begun[0]) < len(texts[0]):
        summary += f" Shown here are the first {len(begun[0]):,} tokens."
    file.write_text(text_page(readings, summary), encoding="utf-8")


def beginnings(tokenizers: list[tiktoken.Encoding], texts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the same beginning of a text in the tokens of each tokenizer, at most LONGEST."""
    begun = [tokens[:LONGEST] for tokens in texts]
    ends = [byte_ends(*each) for each in zip(tokenizers, begun, strict=True)]
    # Cut all of them at the byte where the shortest one ends.
    last = min(end[-1] for end in ends)
    return [tokens[: np.searchsorted(end, last, "right")] for tokens, end in zip(begun, ends, strict=True)]


@torch.inference_mode()
def read(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    tokens: Int[np.ndarray, " N"],
    params: ScoringParams,
    *,
    name: str,
    models: int = 1,
) -> Reading:
    """Return a model's reading of a text, in overlapping sequences as score() cuts them.

    Of each token's attention weights it keeps the largest: as many as fit into the page, and at most MOST_KEYS.

    name: the model's name on the page.
    models: the number of models on the page.
    """
    N = len(tokens)
    config = model.config
    length = min(config.block_size, N)
    rows = 1 + config.n_layer * (1 + config.n_head)
    fitting = ATTENTION_BYTES // (3 * N * rows * models)  # two bytes for a key, one for its weight
    kept = max(1, min(MOST_KEYS, length, fitting))
    nats = np.full(N, np.nan, np.float32)
    predicted = list[tuple[np.ndarray, ...]]()  # of each pass: the likeliest tokens and their probabilities
    attended = list[tuple]()  # of each pass: keys and their weights
    batch_size = max(1, 2**20 // length**2)  # a head's weights have length² numbers for each sequence
    for starts, scored in passes(N, length, params.stride, batch_size):
        # One pass: logits and weights of the last `scored` tokens of each sequence.
        sequences = np.stack([tokens[start : start + length] for start in starts])  # (B, T)
        inputs, doc_starts = model_inputs(model, sequences, params.separator)
        with params.autocast:
            logits = model.logits(model.hidden(inputs, doc_starts=doc_starts)[:, -scored:])  # (B, scored, V)
            keys, weights, heads = largest_weights(model, inputs, doc_starts, scored, kept)
        logprobs = logits.float().log_softmax(-1).flatten(0, 1)  # (B·scored, V)
        # The nats of the next tokens. The last token of the text has none; it is in the last row.
        offsets = np.repeat(starts, scored)  # (B·scored,)
        following = offsets + np.tile(np.arange(length - scored, length), len(starts)) + 1
        following = following[following < N]
        nats[following] = -logprobs[range(len(following)), tokens[following].astype(np.int64)].cpu().numpy()
        # The predictions, and the keys by their places in the text instead of the sequence.
        best = logprobs.topk(min(ALTERNATIVES, logprobs.size(-1)))
        predicted.append((best.indices.cpu().numpy(), best.values.exp().cpu().numpy()))
        attended.append((keys + offsets[:, None], weights))
    likeliest, chances = map(np.concatenate, zip(*predicted, strict=True))  # (N, A)
    keys, weights = (np.concatenate(parts, 1) for parts in zip(*attended, strict=True))  # (R, N, K)
    title = f"{shape(config.attention, config.n_layer, config.n_head, config.n_embd)} ({name})"
    return Reading(
        title,
        tokenizer,
        tokens,
        nats,
        likeliest,
        chances,
        heads,
        keys,
        weights,
    )


def largest_weights(
    model: GPT, tokens: Tokens, doc_starts: DocStarts, scored: int, kept: int
) -> tuple[Int[np.ndarray, "R Q K"], Float[np.ndarray, "R Q K"], list[int]]:
    """Return the keys with the largest weights, these weights, and each layer's number of heads.

    There are Q = B · scored queries, the last `scored` tokens of each sequence, and the rows R of a Reading. Weights
    below 0 count as 0.
    """
    total = torch.zeros(())  # the layers' mean weights are summed at once: one layer's weights are in memory at a time

    def largest(rows: Float[Tensor, "H B s T"]) -> tuple[np.ndarray, np.ndarray]:
        top = rows.flatten(1, 2).topk(kept)  # (H, B·s, T) -> (H, B·s, kept)
        return top.indices.cpu().numpy(), top.values.cpu().numpy()

    def visit(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
        nonlocal total
        weights = weights[:, :, -scored:].float().clamp(min=0).transpose(0, 1)  # (H, B, s, T)
        mean = weights.mean(0, keepdim=True)  # (1, B, s, T)
        total = total + mean.cpu()
        return largest(torch.cat([mean, weights]))

    layers = for_each_layer(model, tokens, visit, doc_starts)
    of_all = largest(total / len(layers))
    keys, weights = (np.concatenate(each) for each in zip(of_all, *layers, strict=True))
    return keys, weights, [len(each) - 1 for each, _ in layers]
