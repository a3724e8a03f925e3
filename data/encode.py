"""Split text to token shards: chunks of text, encoded in parallel, written in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tiktoken
from tqdm import tqdm

from data.shards import ShardWriter, token_dtype
from data.split import SPLITS, SplitPiece
from data.tokenizer import encode_documents

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 1 << 20  # characters that a thread encodes at a time


class _Chunk(NamedTuple):
    """About a megabyte of one split's text: whole documents, or first the rest of one begun before."""

    split: str
    continued: bool
    texts: list[str]


def encode_splits(
    split_pieces: Iterable[SplitPiece], encoding: tiktoken.Encoding, directory: Path, *, size: int | None
) -> dict[str, dict[str, Any]]:
    """Encode text on all cores and write the shards of both splits, in order, into `directory`.

    size: bytes of text that the progress bar counts up to, where known. Returns the summary of each split that
    open_tokens takes.
    """
    dtype = token_dtype(encoding.n_vocab)

    def encode(chunk: _Chunk) -> tuple[_Chunk, np.ndarray, int]:
        tokens = encode_documents(encoding, chunk.texts, continued=chunk.continued).astype(dtype)
        return chunk, tokens, sum(len(text.encode()) for text in chunk.texts)

    writers = {split: ShardWriter(directory, split, dtype) for split in SPLITS}
    with tqdm(total=size, desc="preparing tokens", unit="B", unit_scale=True, disable=None) as bar:
        for chunk, tokens, text_bytes in _in_order(encode, _chunks(split_pieces)):
            documents = len(chunk.texts) - chunk.continued
            writers[chunk.split].write(tokens, documents=documents, text_bytes=text_bytes)
            bar.update(text_bytes)
    return {split: writer.summary() for split, writer in writers.items()}


def _chunks(split_pieces: Iterable[SplitPiece]) -> Iterator[_Chunk]:
    """Gather pieces into chunks. A piece that continues a document begins a chunk, so that the text between two
    <|endoftext|> is never joined into more than a piece."""
    waiting: dict[str, list[str]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    continued = dict.fromkeys(SPLITS, False)
    for split, begins, text in split_pieces:
        if waiting[split] and (not begins or sizes[split] + len(text) > _CHUNK):
            yield _Chunk(split, continued[split], waiting[split])
            waiting[split], sizes[split] = [], 0
        if not waiting[split]:
            continued[split] = not begins
        waiting[split].append(text)
        sizes[split] += len(text)
    yield from (_Chunk(split, continued[split], texts) for split, texts in waiting.items() if texts)


def _in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield map(function, items) from threads on all cores, with a bounded number of items under way."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    under_way: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(function, item))
                if len(under_way) > 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
