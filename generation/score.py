"""The text that eval.py scores, how surprised a model is by its every token, and how two models compare on it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from common.console import progress_bar
from common.errors import DataError
from common.files import from_json
from data.batches import document_starts
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.tasks import TaskData
from data.texts import Source
from data.tokenizer import encode_text, same_tokens, token_bytes
from model.gpt import GPT
from runs.checkpoint import TOKENIZER, Checkpoint, readable
from runs.metrics import Evaluation

PASS_TOKENS = 16_384  # that are read in one forward pass
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
        return Evaluation.of_tokens(self.nats, self.bytes)


class ScoringParams(NamedTuple):
    """How a text is scored.

    Sequences of block_size tokens begin `stride` apart, an eighth of block_size for None, and each scores only its last
    `stride` targets. So every token past the first sequence is predicted from at least block_size - stride others.
    """

    autocast: torch.autocast
    stride: int | None = None
    separator: int | None = None
    """<|endoftext|>, if the model keeps documents apart."""


def score(model: GPT, tokenizer: tiktoken.Encoding, tokens: Int[np.ndarray, " N"], params: ScoringParams) -> Scores:
    """Return the scores of every token except the first, with a progress bar.

    Raises FloatingPointError when they are not finite.
    """
    length = min(model.config.block_size, len(tokens) - 1)
    nats = np.empty(len(tokens) - 1, dtype=np.float32)
    with progress_bar(total=len(nats), desc="scoring", unit="token", unit_scale=True) as bar:
        for starts, scored in passes(len(nats), length, params.stride, max(1, PASS_TOKENS // length)):
            sequences = np.stack([tokens[start : start + length + 1] for start in starts])
            for start, row in zip(starts, token_nats(model, sequences, scored, params), strict=True):
                nats[start + length - scored : start + length] = row
            bar.update(scored * len(starts))
    if not np.isfinite(nats).all():
        raise FloatingPointError("its logits are not finite")
    return Scores(nats, token_bytes(tokenizer)[tokens[1:]])


def passes(targets: int, length: int, stride: int | None, batch_size: int) -> Iterator[tuple[list[int], int]]:
    """Yield for each forward pass the starts of its sequences, and how many targets at the end of each are new.

    stride: between starts; at most `length`, and an eighth of it for None.
    """
    yield [0], length
    stride = min(stride or max(1, length // 8), length)
    starts = list(range(stride, targets - length + 1, stride))
    for first in range(0, len(starts), batch_size):
        yield starts[first : first + batch_size], stride
    done = (starts[-1] if starts else 0) + length
    if done < targets:
        yield [targets - length], targets - done


@torch.inference_mode()
def token_nats(
    model: GPT, sequences: Int[np.ndarray, "B T1"], scored: int, params: ScoringParams
) -> Float[np.ndarray, "B scored"]:
    """Return the nats of the last `scored` targets of each sequence.

    A sequence may be longer than block_size, but the logits of at most so many tokens are in memory at a time.
    """
    inputs, doc_starts = model_inputs(model, sequences[:, :-1], params.separator)
    targets = torch.from_numpy(sequences[:, -scored:].astype(np.int64)).to(inputs.device)
    block_size = model.config.block_size
    nats = []
    with params.autocast:
        x = model.hidden(inputs, doc_starts=doc_starts)[:, -scored:]
        for part, part_targets in zip(x.split(block_size, 1), targets.split(block_size, 1), strict=True):
            logits = model.logits(part).float().transpose(1, 2)  # (B, V, part)
            nats.append(F.cross_entropy(logits, part_targets, reduction="none"))
    return torch.cat(nats, 1).cpu().numpy()


def model_inputs(
    model: GPT, sequences: Int[np.ndarray, "B T"], separator: int | None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """Return sequences on the model's device, and the starts of their documents if `separator` keeps these apart."""
    device = model.token_embedding.weight.device
    doc_starts = None if separator is None else torch.from_numpy(document_starts(sequences, separator)).to(device)
    return torch.from_numpy(sequences.astype(np.int64)).to(device), doc_starts


def compare(first: Scores, second: Scores) -> tuple[float, float | None]:
    """Return the second model's bits per byte minus the first's on the same text, and its standard error.

    Their tokenizers may differ. The text is cut into blocks of about BLOCK_BYTES. Most of what makes a block hard is
    hard for both models, so the error is that of the differences between their blocks; None of a single block.
    """
    total = int(first.bytes.sum())
    blocks = max(1, total // BLOCK_BYTES)
    bits = []
    for scores in (first, second):
        begins = np.cumsum(scores.bytes) - scores.bytes  # the byte that each token begins at
        block = np.minimum(begins * blocks // max(total, 1), blocks - 1)
        bits.append(np.bincount(block, weights=scores.nats, minlength=blocks) / math.log(2))
    differences = (bits[1] - bits[0]) * blocks / total  # bits per byte of each block
    error = float(differences.std(ddof=1)) / math.sqrt(blocks) if blocks > 1 else None
    return float(differences.mean()), error


def load_text(path: str | None, checkpoints: list[Checkpoint]) -> tuple[str, list[np.ndarray]]:
    """Return a description of the text, and its tokens for each checkpoint.

    path: as data.path; None means the validation split of the first checkpoint's run. Raises DataError when there is
    no such text any more, or too little of it.
    """
    first = checkpoints[0].tokenizer
    own = None  # the tokens of the validation split, in the first checkpoint's ids
    if path is not None:
        source = Source(DataConfig(source="text", path=path))
        description = source.description
        documents = ["".join(pieces) for pieces in source.documents()]
    else:
        description, own = validation_split(checkpoints[0])
        parts = np.split(own, np.flatnonzero(own == first.eot_token))
        documents = [first.decode(part[part != first.eot_token].tolist()) for part in parts if len(part)]
    texts = [
        own if own is not None and same_tokens(each.tokenizer, first) else encode_documents(each.tokenizer, documents)
        for each in checkpoints
    ]
    if min(map(len, texts)) < 2:
        raise DataError(f"{description} has nothing to score", "give a longer text with data.path=...")
    return description, texts


def validation_split(checkpoint: Checkpoint) -> tuple[str, np.ndarray]:
    """Return the description and the tokens of a run's validation split; DataError if it is gone."""
    meta = checkpoint.meta
    path = checkpoint.path
    remedy = "give a text with data.path=..."
    run = path.parents[1] if path.parent.name == "checkpoints" else path
    if not meta.data or meta.home != str(run.resolve()):  # its settings choose no places on this machine
        raise DataError(f"{path} was not trained here and has no validation split", remedy)
    with readable(path):
        source = from_json(DataConfig, meta.config["data"])
        tokenizer = from_json(TokenizerConfig, meta.config["tokenizer"])
    try:
        # The ids of a nanoGPT folder are the checkpoint's, for which no published tokenizer need be downloaded.
        given = meta.own_tokenizer or source.source == "nanogpt"
        data = prepare(source, tokenizer, encoding=checkpoint.tokenizer if given else None)
    except DataError as error:
        raise DataError(f"the validation split of {path} cannot be read ({error.problem})", remedy) from error
    if not same_tokens(data.tokenizer, checkpoint.tokenizer):
        problem = f"the text of {path} ({data.description}) has changed and gives other tokens than those it learned"
        raise DataError(f"{problem}, so there is no validation split to score", remedy)
    return f"validation split of {data.description}", np.asarray(data.val[:])


def learned_task(checkpoint: Checkpoint) -> TaskData:
    """Return the synthetic task that a checkpoint has learned."""
    with readable(checkpoint.path):
        settings = checkpoint.meta.config
        data = from_json(DataConfig, settings["data"])
        if not data.is_task:
            raise KeyError(TOKENIZER)
        return TaskData(data.source, data.task, settings["seed"])


def encode_documents(tokenizer: tiktoken.Encoding, documents: list[str]) -> np.ndarray:
    """Return the tokens of each document after its <|endoftext|>, as in training."""
    mark = np.array([tokenizer.eot_token], dtype=np.uint32)
    parts = [mark[:0]]  # of no document
    for text in documents:
        parts += [mark, encode_text(tokenizer, text)]
    return np.concatenate(parts)
