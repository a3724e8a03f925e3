"""The text that evaluate.py scores, how surprised a model is by its every token, and how two models compare on it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from data.batches import document_starts
from data.config import DataConfig, TaskConfig, TokenizerConfig
from data.corpus import open_corpus
from data.prepare import prepare
from data.tasks import TaskData
from data.tokenizer import encode_text, token_bytes, tokenizer_content
from errors import DataError
from model.gpt import GPT
from runs.checkpoint import Checkpoint
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
        return Evaluation.of_tokens(self.nats, self.bytes)


def score(
    model: GPT, tokenizer: tiktoken.Encoding, tokens: Int[np.ndarray, " N"], *, autocast: torch.autocast,
    stride: int | None = None, separator: int | None = None,
) -> Scores:  # fmt: skip
    """Return the scores of every token except the first, with a progress bar.

    Windows of block_size tokens begin `stride` apart, and each scores only its last `stride` targets. So every token
    past the first window is predicted from at least block_size - stride others. separator: <|endoftext|>, where the
    model keeps documents apart.
    """
    assert len(tokens) > 1 and (stride is None or 0 < stride <= model.config.block_size)
    length = min(model.config.block_size, len(tokens) - 1)
    on_gpu = model.token_embedding.weight.is_cuda
    batch = max(1, (131_072 if on_gpu else 16_384) // length)  # windows in one forward pass
    nats = np.empty(len(tokens) - 1, dtype=np.float32)
    with tqdm(total=len(nats), desc="scoring", unit="token", unit_scale=True, disable=None) as bar:
        for starts, scored in passes(len(nats), length, stride, batch):
            windows = np.stack([tokens[start : start + length + 1] for start in starts])
            found = surprise(model, windows, scored, autocast, separator)
            for start, row in zip(starts, found, strict=True):
                nats[start + length - scored : start + length] = row
            bar.update(scored * len(starts))
    return Scores(nats, token_bytes(tokenizer)[tokens[1:]])


def passes(targets: int, length: int, stride: int | None, batch: int) -> Iterator[tuple[list[int], int]]:
    """Yield for each forward pass where its windows begin, and how many targets at a window's end are new.

    stride: of the windows; an eighth of their length for None.
    """
    yield [0], length
    stride = stride or max(1, length // 8)
    starts = list(range(stride, targets - length + 1, stride))
    for first in range(0, len(starts), batch):
        yield starts[first : first + batch], stride
    done = (starts[-1] if starts else 0) + length
    if done < targets:
        yield [targets - length], targets - done


@torch.inference_mode()
def surprise(
    model: GPT, windows: Int[np.ndarray, "B T1"], scored: int, autocast: torch.autocast, separator: int | None = None
) -> Float[np.ndarray, "B scored"]:
    """Return the nats of the last `scored` targets of each window, in halves when memory runs out.

    A window may be longer than block_size, but only the logits of so many tokens are in memory at a time.
    """
    inputs, starts = inputs_of(model, windows[:, :-1], separator)
    targets = torch.from_numpy(windows[:, -scored:].astype(np.int64)).to(inputs.device)
    size, nats = model.config.block_size, []
    try:
        with autocast:
            x = model.hidden(inputs, starts=starts)[:, -scored:]
            for some, wanted in zip(x.split(size, 1), targets.split(size, 1), strict=True):
                logits = model.logits(some).float().transpose(1, 2)  # (B, V, some)
                nats.append(F.cross_entropy(logits, wanted, reduction="none"))
        return torch.cat(nats, 1).cpu().numpy()
    except torch.OutOfMemoryError:
        if len(windows) == 1:
            raise
    return np.concatenate([surprise(model, half, scored, autocast, separator) for half in np.array_split(windows, 2)])


def inputs_of(
    model: GPT, windows: Int[np.ndarray, "B T"], separator: int | None
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"] | None]:
    """Return windows on the model's device, and where in them documents begin if `separator` keeps these apart."""
    device = model.token_embedding.weight.device
    starts = None if separator is None else torch.from_numpy(document_starts(windows, separator)).to(device)
    return torch.from_numpy(windows.astype(np.int64)).to(device), starts


def separator_of(checkpoint: Checkpoint) -> int | None:
    """Return the id of <|endoftext|> where the checkpoint's run kept documents apart, else None."""
    apart = checkpoint.meta["config"]["data"].get("document_mask")
    return checkpoint.tokenizer.eot_token if apart else None


def compare(first: Scores, second: Scores) -> tuple[float, float | None]:
    """Return the second model's bits per byte minus the first's on the same text, and the standard error of that.

    Their tokenizers may differ. The error is None where the text is shorter than two blocks.

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
    return float(differences.mean()), error


def load_text(path: str | None, checkpoints: list[Checkpoint]) -> tuple[str, list[np.ndarray]]:
    """Return what the text is, in words, and its tokens for each checkpoint.

    path: as data.path; None means the validation split of the first checkpoint's run. Raises DataError when there is
    no such text any more, or too little of it.
    """
    tokenizers = [checkpoint.tokenizer for checkpoint in checkpoints]
    if path is not None:
        corpus = open_corpus(DataConfig(source="text", path=path))
        description, documents = corpus.description, ["".join(document) for document in corpus.documents()]
        texts = [_encode(tokenizer, documents) for tokenizer in tokenizers]
    else:
        description, tokens = _validation_split(checkpoints[0])
        first = tokenizers[0]
        parts = np.split(tokens, np.flatnonzero(tokens == first.eot_token))
        documents = [first.decode(part[part != first.eot_token].tolist()) for part in parts if len(part) > 1]
        texts = [tokens if _same(other, first) else _encode(other, documents) for other in tokenizers]
    if min(map(len, texts)) < 2:
        raise DataError(f"{description} has nothing to score: give a longer text with data.path=...")
    return description, texts


def learned_task(checkpoint: Checkpoint) -> TaskData:
    """Return the synthetic task that a checkpoint has learned."""
    settings = checkpoint.meta["config"]
    return TaskData(settings["data"]["source"], TaskConfig(**settings["data"]["task"]), settings["seed"])


def _validation_split(checkpoint: Checkpoint) -> tuple[str, np.ndarray]:
    settings, remedy = checkpoint.meta["config"], "give a text with data.path=..."
    if not checkpoint.meta["data"]:
        raise DataError(f"{checkpoint.path} was not trained here and has no validation split: {remedy}")
    encoding = checkpoint.tokenizer if checkpoint.meta["own_tokenizer"] else None
    data_settings, tokenizer_settings = (  # without those that there are no more
        {field.name: settings[group][field.name] for field in fields(schema) if field.name in settings[group]}
        for group, schema in (("data", DataConfig), ("tokenizer", TokenizerConfig))
    )
    try:
        data = prepare(DataConfig(**data_settings), TokenizerConfig(**tokenizer_settings), encoding=encoding)
    except DataError as error:
        raise DataError(f"the validation split of {checkpoint.path} cannot be read ({error}): {remedy}") from error
    if not _same(data.tokenizer, checkpoint.tokenizer):
        raise DataError(
            f"the text of {checkpoint.path} ({data.description}) has changed and gives other tokens than those it was "
            f"trained on, so there is no validation split to score: {remedy}"
        )
    return f"validation split of {data.description}", np.asarray(data.val[:])


def _same(one: tiktoken.Encoding, other: tiktoken.Encoding) -> bool:
    return one is other or tokenizer_content(one) | {"name": ""} == tokenizer_content(other) | {"name": ""}


def _encode(tokenizer: tiktoken.Encoding, documents: list[str]) -> np.ndarray:
    """Return the tokens of each document after its <|endoftext|>, as in training."""
    mark = np.array([tokenizer.eot_token], dtype=np.uint32)
    return np.concatenate([mark, *(part for text in documents for part in (encode_text(tokenizer, text), mark))][:-1])
