"""How surprised a model is by every token of a text, and how two models compare on the same text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tqdm import tqdm

from data.tokenizer import token_bytes
from model.gpt import GPT
from runs.metrics import Evaluation

BLOCK_BYTES = 1000  # of text that are compared as one: enough for blocks to be nearly independent


@dataclass(frozen=True)
class Scores:
    """A model's surprise at each token of a text except the first, which nothing precedes."""

    nats: Float[np.ndarray, " N"]
    """-log p(token | what precedes it)."""
    bytes: Int[np.ndarray, " N"]
    """Length of each token's text in UTF-8; 0 for <|endoftext|>."""

    @property
    def total(self) -> Evaluation:
        """The figures of the whole text."""
        return Evaluation(float(self.nats.sum(dtype=np.float64)), len(self.nats), int(self.bytes.sum()))


def score(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    tokens: Int[np.ndarray, " N"],
    *,
    stride: int,
    autocast: torch.autocast,
    batch_tokens: int | None = None,
) -> Scores:
    """Return the scores of every token except the first, with a progress bar.

    Windows of block_size tokens begin `stride` apart, and each scores only its last `stride` targets. So every token
    past the first window is predicted from at least block_size - stride others.
    batch_tokens: tokens in one forward pass; a number that suits the device when None.
    """
    assert len(tokens) > 1 and 0 < stride <= model.config.block_size
    device = model.token_embedding.weight.device
    length = min(model.config.block_size, len(tokens) - 1)
    batch = max(1, (batch_tokens or (131_072 if device.type == "cuda" else 16_384)) // length)
    nats = np.empty(len(tokens) - 1, dtype=np.float32)
    with tqdm(total=len(nats), desc="scoring", unit="token", unit_scale=True, disable=None) as bar:
        for starts, scored in _passes(len(nats), length, stride, batch):
            rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
            surprise = _surprise(model, torch.from_numpy(rows).to(device), scored, autocast)
            for start, row in zip(starts, surprise, strict=True):
                nats[start + length - scored : start + length] = row
            bar.update(scored * len(starts))
    return Scores(nats, token_bytes(tokenizer)[tokens[1:]])


def _passes(targets: int, length: int, stride: int, batch: int) -> Iterator[tuple[list[int], int]]:
    """Yield for each forward pass where its windows begin, and how many targets at a window's end are new."""
    yield [0], length
    starts = list(range(stride, targets - length + 1, stride))
    for first in range(0, len(starts), batch):
        yield starts[first : first + batch], stride
    done = (starts[-1] if starts else 0) + length
    if done < targets:
        yield [targets - length], targets - done


@torch.inference_mode()
def _surprise(
    model: GPT, windows: Int[torch.Tensor, "B T1"], scored: int, autocast: torch.autocast
) -> Float[np.ndarray, "B scored"]:
    """Return the nats of the last `scored` targets of each window, in halves when memory runs out."""
    try:
        with autocast:
            logits = model.logits(model.hidden(windows[:, :-1])[:, -scored:])  # (B, scored, V)
        nats = F.cross_entropy(logits.float().transpose(1, 2), windows[:, -scored:], reduction="none")
        return nats.cpu().numpy()
    except torch.OutOfMemoryError:
        if len(windows) == 1:
            raise
    return np.concatenate([_surprise(model, half, scored, autocast) for half in windows.chunk(2)])


@dataclass(frozen=True)
class Difference:
    """How much worse the second of two models is, in bits per byte; below 0 it is better."""

    bpb: float
    standard_error: float | None
    """None where the text is shorter than two blocks."""


def compare(first: Scores, second: Scores) -> Difference:
    """Return the second model's bits per byte minus the first's on the same text, whatever their tokenizers.

    The text is cut into blocks of about BLOCK_BYTES. Most of what makes a block hard is hard for both models, so the
    standard error is that of the differences between their blocks.
    """
    total = int(first.bytes.sum())
    assert total == int(second.bytes.sum()), "both read the same text"
    blocks = max(1, total // BLOCK_BYTES)
    bits = []
    for scores in (first, second):
        begins = np.cumsum(scores.bytes) - scores.bytes  # the byte that each token begins at
        block = np.minimum(begins * blocks // max(total, 1), blocks - 1)
        bits.append(np.bincount(block, weights=scores.nats, minlength=blocks) / math.log(2))
    differences = (bits[1] - bits[0]) * blocks / total  # bits per byte of each block
    error = float(differences.std(ddof=1)) / math.sqrt(blocks) if blocks > 1 else None
    return Difference(float(differences.mean()), error)
