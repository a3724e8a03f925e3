"""How a model reads a text, token by token, for the page of a text."""

from pathlib import Path

import numpy as np
import tiktoken
import torch
from jaxtyping import Float, Int
from torch import Tensor

from common.files import writing
from common.text import plural, seen_from_here
from generation.generate import encode_prompt
from generation.score import ScoringParams, model_inputs, passes
from model.gpt import GPT
from model.heads import Weights, for_each_layer
from pages.kit import shape
from pages.text import Reading, byte_ends, text_page
from runs.checkpoint import Checkpoint

LONGEST = 4000  # tokens: more makes a page slow
ALTERNATIVES = 10
MOST_KEYS = 16
ATTENTION_BYTES = 7_500_000  # of a page, before base64 makes four of three


def read_prompt(checkpoint: Checkpoint, prompt: str, special_tokens: bool, page: str) -> str:
    """Write the page of a prompt, or of its last LONGEST tokens, and return a line for the terminal."""
    tokens = np.array(encode_prompt(checkpoint.tokenizer, prompt, special_tokens))
    size = plural(len(tokens), "token") if len(tokens) <= LONGEST else f"the last {LONGEST:,} of {len(tokens):,} tokens"
    plain = ScoringParams(torch.autocast(checkpoint.model.token_embedding.weight.device.type, enabled=False))
    with writing("page", page) as file:
        write_page(file, [checkpoint], [tokens[-LONGEST:]], [plain], f"A prompt: {size}.")
    return f"{page}: {size}"


def write_page(
    file: Path, checkpoints: list[Checkpoint], texts: list[np.ndarray], params: list[ScoringParams], summary: str
) -> None:
    """Write the page of how checkpoints read a text, or its beginning, under a summary."""
    begun = beginnings([checkpoint.tokenizer for checkpoint in checkpoints], texts)
    readings = [
        read(c.model, c.tokenizer, tokens, each, name=seen_from_here(c.path), models=len(checkpoints))
        for c, tokens, each in zip(checkpoints, begun, params, strict=True)
    ]
    if len(begun[0]) < len(texts[0]):
        summary += f" Shown here are the first {len(begun[0]):,} tokens."
    file.write_text(text_page(readings, summary), encoding="utf-8")


def beginnings(tokenizers: list[tiktoken.Encoding], texts: list[np.ndarray]) -> list[np.ndarray]:
    """Return the same beginning of one text in each tokenizer's tokens, at most LONGEST."""
    begun = [tokens[:LONGEST] for tokens in texts]
    ends = [byte_ends(*each) for each in zip(tokenizers, begun, strict=True)]
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
    """Return a model's reading of a text, in the sequences of score().

    name: the model's, on the page. models: how many share the page. Of each token's weights the largest are kept, as
    many as fit and at most MOST_KEYS.
    """
    N = len(tokens)
    config = model.config
    length = min(config.block_size, N)
    rows = 1 + config.n_layer * (1 + config.n_head)
    kept = max(1, min(MOST_KEYS, length, ATTENTION_BYTES // (3 * N * rows * models)))
    nats = np.full(N, np.nan, np.float32)
    expected = list[tuple[np.ndarray, ...]]()  # of each pass: the likeliest tokens and their probabilities
    looked = list[tuple]()  # of each pass: the keys with the largest weights, and these
    for starts, scored in passes(N, length, params.stride, max(1, 2**20 // length**2)):
        # One pass: logits and weights of the last `scored` tokens of each sequence.
        sequences = np.stack([tokens[start : start + length] for start in starts])
        inputs, doc_starts = model_inputs(model, sequences, params.separator)
        with params.autocast:
            logits = model.logits(model.hidden(inputs, doc_starts=doc_starts)[:, -scored:])  # (B, scored, V)
            keys, weights, heads = largest_weights(model, inputs, doc_starts, scored, kept)
        logprobs = logits.float().log_softmax(-1).flatten(0, 1)  # (B·scored, V)
        # The nats of the tokens that follow: the last token of the text has none.
        offsets = np.repeat(starts, scored)
        following = offsets + np.tile(np.arange(length - scored, length), len(starts)) + 1
        following = following[following < N]
        nats[following] = -logprobs[range(len(following)), tokens[following].astype(np.int64)].cpu().numpy()
        # What was expected there, and looked at, by its place in the text.
        best = logprobs.topk(min(ALTERNATIVES, logprobs.size(-1)))
        expected.append((best.indices.cpu().numpy(), best.values.exp().cpu().numpy()))
        looked.append((keys + offsets[:, None], weights))
    likeliest, chances = map(np.concatenate, zip(*expected, strict=True))
    keys, weights = (np.concatenate(parts, 1) for parts in zip(*looked, strict=True))
    title = f"{shape(config.attention, config.n_layer, config.n_head, config.n_embd)} ({name})"
    return Reading(title, tokenizer, tokens, nats, likeliest, chances, heads, keys, weights)


def largest_weights(
    model: GPT, tokens: Int[Tensor, "B T"], doc_starts: Int[Tensor, "B T"] | None, scored: int, kept: int
) -> tuple[Int[np.ndarray, "R Q K"], Float[np.ndarray, "R Q K"], list[int]]:
    """Return the keys and weights that the last `scored` tokens of each sequence look at most, and each layer's heads.

    The rows are a Reading's. Weights below 0 count as 0; one layer's weights are in memory at a time.
    """
    total = torch.zeros(())

    def largest(rows: Float[Tensor, "H B s T"]) -> tuple[np.ndarray, np.ndarray]:
        top = rows.flatten(1, 2).topk(kept)
        return top.indices.cpu().numpy(), top.values.cpu().numpy()

    def visit(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
        nonlocal total
        weights = weights[:, :, -scored:].float().clamp(min=0).transpose(0, 1)
        mean = weights.mean(0, keepdim=True)
        total = total + mean.cpu()
        return largest(torch.cat([mean, weights]))

    layers = for_each_layer(model, tokens, visit, doc_starts)
    keys, weights = (np.concatenate(each) for each in zip(largest(total / len(layers)), *layers, strict=True))
    return keys, weights, [len(each) - 1 for each, _ in layers]
