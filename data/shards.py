"""Token shards: raw little-endian ids in files of bounded size, written in order and read as one long stream."""

import os
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from threading import Thread, local
from typing import Any, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

from data.split import SPLITS, SplitPiece
from data.tokenizer import copy_encoding, encode_documents
from errors import DataError

SHARD_TOKENS = 100_000_000
VERIFIED_BYTES = 500_000_000
"""A split up to this size is compared with its checksums when opened, in at most 0.4 seconds. The shards of a larger
one are compared once each, while they are used already."""

_FILE = "{split}_{number:05d}.bin"
_CHUNK = 1 << 18  # characters that a thread encodes at a time
_IDS_A_CHUNK = 1 << 15  # of an encoding to copy, for each chunk before it


class Tokens:
    """A split's tokens, memory-mapped; `len(tokens)` and `tokens[start:stop]` as with an array."""

    def __init__(self, shards: list[np.ndarray]) -> None:
        self._shards = shards
        self._starts = [0, *accumulate(len(shard) for shard in shards)]
        self.damage = ""
        """What is wrong with a shard, as soon as it is found."""

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        """Return the tokens of a slice without a step, uint16 or uint32 [stop - start]."""
        start, stop, step = index.indices(len(self))
        assert step == 1, "tokens are read in order"
        if self.damage:
            raise DataError(self.damage)
        if start >= stop:
            return np.zeros(0, dtype=np.uint16)
        shard = bisect_right(self._starts, start) - 1
        offset, end = self._starts[shard : shard + 2]
        part = self._shards[shard][start - offset : stop - offset]
        return part if stop <= end else np.concatenate([part, self[end:stop]])


class ShardWriter:
    """Writes one split's tokens into an empty `directory`."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        self._directory, self._split, self._dtype = directory, split, dtype
        self.summary: dict[str, Any] = {"tokens": 0, "documents": 0, "bytes": 0, "shards": [], "crc32": []}
        """What `open_tokens` needs to know, as plain types."""

    def write(self, tokens: np.ndarray, *, documents: int, text_bytes: int) -> None:
        """Append tokens (any integer type [T]) that begin `documents` documents of `text_bytes` bytes in all."""
        self.summary["tokens"] += len(tokens)
        self.summary["documents"] += documents
        self.summary["bytes"] += text_bytes
        counts, checksums = self.summary["shards"], self.summary["crc32"]
        tokens = tokens.astype(self._dtype, copy=False)
        while len(tokens):
            if not counts or counts[-1] == SHARD_TOKENS:
                counts.append(0)
                checksums.append(0)
            part, tokens = np.split(tokens, [SHARD_TOKENS - counts[-1]])
            with (self._directory / _FILE.format(split=self._split, number=len(counts) - 1)).open("ab") as file:
                file.write(part.data)
            checksums[-1] = zlib.crc32(part.data, checksums[-1])
            counts[-1] += len(part)


def join_tokens(parts: list[Tokens]) -> Tokens:
    """Return splits of several texts, in the same tokens, end to end."""
    return Tokens([shard for part in parts for shard in part._shards])


def open_tokens(directory: Path, split: str, dtype: np.dtype, summary: dict[str, Any]) -> Tokens:
    """Return the split that a ShardWriter wrote. Raises ValueError when a file is missing or altered."""
    if sum(summary["shards"]) != summary["tokens"]:
        raise ValueError(f"the counts of split {split} disagree")
    paths = [directory / _FILE.format(split=split, number=number) for number in range(len(summary["shards"]))]
    for path, count in zip(paths, summary["shards"], strict=True):
        size = path.stat().st_size if path.is_file() else 0
        if size != count * dtype.itemsize or not count:
            raise ValueError(f"{path.name} has {size:,} bytes instead of {count * dtype.itemsize:,}")
    # A plain view: slicing the memmap class itself is several times slower.
    shards = [np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) for path in paths]
    tokens = Tokens(shards)
    later = list(zip(paths, shards, summary["crc32"], strict=True))
    if summary["tokens"] * dtype.itemsize > VERIFIED_BYTES:
        Thread(target=_verify, args=(tokens, later), daemon=True).start()
    elif damaged := [path.name for path, shard, checksum in later if zlib.crc32(shard.data) != checksum]:
        raise ValueError(f"{damaged[0]} is not what was written")
    return tokens


def _verify(tokens: Tokens, shards: list[tuple[Path, np.ndarray, int]]) -> None:
    """Compare shards with their checksums, but for those whose mark, a file with their time of change, says so."""
    for path, shard, checksum in shards:
        mark, changed = path.with_suffix(".verified"), path.stat().st_mtime_ns
        if mark.is_file() and mark.stat().st_mtime_ns == changed:
            continue
        if zlib.crc32(shard.data) != checksum:
            remedy = f"remove the folder {path.parent}, and the text is prepared again"
            tokens.damage = f"{path.name} of the prepared tokens is damaged: {remedy}."
            return
        with suppress(OSError):  # a cache that only others may write is fine
            mark.touch()
            os.utime(mark, ns=(changed, changed))


def token_dtype(n_vocab: int) -> np.dtype:
    """Return the smallest of uint16 and uint32, little-endian, that holds ids below `n_vocab`."""
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


class _Chunk(NamedTuple):
    """About a quarter of a megabyte of one split's text: whole documents, or first the rest of one begun before."""

    split: str
    continued: bool
    texts: list[str]


class _Own(local):
    """A thread's own encoding, once it wins back its making: one that another used first takes a third longer."""

    chunks = 0  # encoded so far
    encoding: tiktoken.Encoding | None = None


_Encoded = tuple[_Chunk, np.ndarray, int]  # its tokens, and the bytes of its text


def encode_splits(
    split_pieces: Iterable[SplitPiece], encoding: tiktoken.Encoding, directory: Path, *, size: int | None
) -> dict[str, dict[str, Any]]:
    """Encode text on all cores and write the shards of both splits, in order, into `directory`.

    size: bytes of text that the progress bar counts up to, where known. Returns the summary of each split that
    open_tokens takes.
    """
    dtype, own = token_dtype(encoding.n_vocab), _Own()

    def encode(chunk: _Chunk) -> _Encoded:
        if own.chunks == 1 + _workers() * encoding.n_vocab // _IDS_A_CHUNK:
            own.encoding = copy_encoding(encoding)
        own.chunks += 1
        tokens = encode_documents(own.encoding or encoding, chunk.texts, continued=chunk.continued).astype(dtype)
        return chunk, tokens, sum(map(len, map(str.encode, chunk.texts)))

    writers = {split: ShardWriter(directory, split, dtype) for split in SPLITS}
    with tqdm(total=size, desc="preparing tokens", unit="B", unit_scale=True, disable=None) as bar:
        for chunk, tokens, text_bytes in _in_order(encode, _chunks(split_pieces)):
            documents = len(chunk.texts) - chunk.continued
            writers[chunk.split].write(tokens, documents=documents, text_bytes=text_bytes)
            bar.update(text_bytes)
    return {split: writer.summary for split, writer in writers.items()}


def _chunks(split_pieces: Iterable[SplitPiece]) -> Iterator[_Chunk]:
    """Gather pieces into chunks. A piece that continues a document begins a chunk, so that the text between two
    <|endoftext|> is never joined into more than a piece."""
    waiting: dict[str, _Chunk] = {}
    sizes = dict.fromkeys(SPLITS, 0)
    for split, begins, text in split_pieces:
        if split in waiting and (not begins or sizes[split] + len(text) > _CHUNK):
            yield waiting.pop(split)
        if split not in waiting:
            waiting[split], sizes[split] = _Chunk(split, not begins, []), 0
        waiting[split].texts.append(text)
        sizes[split] += len(text)
    yield from waiting.values()


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_order(function: Callable[[_Chunk], _Encoded], items: Iterable[_Chunk]) -> Iterator[_Encoded]:
    """Yield map(function, items) from threads on all cores, with a bounded number of items under way."""
    workers = _workers()
    under_way: deque[Future[_Encoded]] = deque()
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
