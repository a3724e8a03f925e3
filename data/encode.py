"""Split text to token shards: chunks of text, encoded in parallel, written in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tqdm import tqdm

from data.shards import ShardWriter, token_dtype
from data.split import SPLITS, SplitPiece
from data.tokenizer import encode_documents

_CHUNK = 1 << 20  # characters that a thread encodes at a time


@dataclass(frozen=True)
class _Chunk:
    """About a megabyte of one split's text: whole documents, or first the rest of one begun before."""

    split: str
    continued: bool
    texts: list[str]


@dataclass(frozen=True)
class _Encoded:
    chunk: _Chunk
    tokens: np.ndarray
    text_bytes: int


def encode_splits(
    split_pieces: Iterable[SplitPiece], encoding: tiktoken.Encoding, directory: Path, *, size: int | None
) -> dict[str, dict[str, Any]]:
    """Encode text on all cores and write the shards of both splits, in order, into `directory`.

    `size` is the bytes of text that the progress bar counts up to, where known. Returns for each
    split the summary that open_tokens takes.
    """
    dtype = token_dtype(encoding.n_vocab)

    def encode(chunk: _Chunk) -> _Encoded:
        tokens = encode_documents(encoding, chunk.texts, continued=chunk.continued).astype(dtype)
        return _Encoded(chunk, tokens, sum(len(text.encode()) for text in chunk.texts))

    with ExitStack() as stack:
        writers = {split: stack.enter_context(ShardWriter(directory, split, dtype)) for split in SPLITS}
        bar = stack.enter_context(tqdm(total=size, desc="preparing tokens", unit="B", unit_scale=True, disable=None))
        for encoded in _in_order(encode, _chunks(split_pieces)):
            chunk = encoded.chunk
            documents = len(chunk.texts) - chunk.continued
            writers[chunk.split].write(encoded.tokens, documents=documents, text_bytes=encoded.text_bytes)
            bar.update(encoded.text_bytes)
    return {split: writer.summary() for split, writer in writers.items()}


def _chunks(split_pieces: Iterable[SplitPiece]) -> Iterator[_Chunk]:
    """Pieces gathered into chunks; one that goes on with a document always begins a chunk, so that
    no text between two <|endoftext|> grows beyond a piece again."""
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
    for split in SPLITS:
        if waiting[split]:
            yield _Chunk(split, continued[split], waiting[split])


def _in_order(encode: Callable[[_Chunk], _Encoded], chunks: Iterable[_Chunk]) -> Iterator[_Encoded]:
    """`map(encode, chunks)` on all cores, with a bounded number of chunks under way."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    under_way: deque[Future[_Encoded]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for chunk in chunks:
                under_way.append(pool.submit(encode, chunk))
                if len(under_way) > 2 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
