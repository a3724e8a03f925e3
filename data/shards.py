"""Token shards: raw little-endian ids in files of bounded size, read as one long stream."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

SHARD_TOKENS = 100_000_000
VERIFIED_BYTES = 500_000_000
"""A split up to this size is compared with its checksums when opened, in at most 0.4 seconds. Of a larger one only
the sizes are compared."""


class Tokens:
    """A split's tokens, memory-mapped; `len(tokens)` and `tokens[start:stop]` as with an array."""

    def __init__(self, shards: list[np.ndarray], *, documents: int, text_bytes: int) -> None:
        self.documents = documents
        """Number of documents, each preceded by <|endoftext|>."""
        self.text_bytes = text_bytes
        """Bytes of UTF-8 text that the tokens stand for, without the <|endoftext|>."""
        self._shards = shards
        self._starts = [0, *accumulate(len(shard) for shard in shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        """Return the tokens of a slice without a step, uint16 or uint32 [stop - start]."""
        start, stop, step = index.indices(len(self))
        assert step == 1, "tokens are read in order"
        shard = bisect_right(self._starts, start, hi=len(self._shards)) - 1
        if start >= stop:
            return np.zeros(0, dtype=np.uint16)
        if stop <= self._starts[shard + 1]:
            offset = self._starts[shard]
            return self._shards[shard][start - offset : stop - offset]
        middle = self._starts[shard + 1]
        return np.concatenate([self[start:middle], self[middle:stop]])


class ShardWriter:
    """Writes one split's tokens into an empty `directory`."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self._directory, self._split, self._dtype, self._shard_tokens = directory, split, dtype, shard_tokens
        self._counts: list[int] = []
        self._checksums: list[int] = []
        self._documents = self._text_bytes = 0

    def write(self, tokens: np.ndarray, *, documents: int, text_bytes: int) -> None:
        """Append tokens (any integer type [T]) that begin `documents` documents of `text_bytes` bytes in all."""
        self._documents += documents
        self._text_bytes += text_bytes
        tokens = tokens.astype(self._dtype, copy=False)
        while len(tokens):
            if not self._counts or self._counts[-1] == self._shard_tokens:
                self._counts.append(0)
                self._checksums.append(0)
            part = tokens[: self._shard_tokens - self._counts[-1]]
            with (self._directory / _name(self._split, len(self._counts) - 1)).open("ab") as file:
                file.write(part.data)
            self._checksums[-1] = zlib.crc32(part.data, self._checksums[-1])
            self._counts[-1] += len(part)
            tokens = tokens[len(part) :]

    def summary(self) -> dict[str, Any]:
        """Return what `open_tokens` needs to know, as plain types."""
        return {
            "tokens": sum(self._counts),
            "documents": self._documents,
            "bytes": self._text_bytes,
            "shards": self._counts,
            "crc32": self._checksums,
        }


def open_tokens(directory: Path, split: str, dtype: np.dtype, summary: dict[str, Any]) -> Tokens:
    """Return the split that a ShardWriter wrote. Raises ValueError when a file is missing or altered."""
    shards = []
    verified = sum(summary["shards"]) * dtype.itemsize <= VERIFIED_BYTES
    for number, (count, checksum) in enumerate(zip(summary["shards"], summary["crc32"], strict=True)):
        path = directory / _name(split, number)
        size = path.stat().st_size if path.is_file() else 0
        if size != count * dtype.itemsize or not count:
            raise ValueError(f"{path.name} has {size:,} bytes instead of {count * dtype.itemsize:,}")
        # A plain view: slicing the memmap class itself is several times slower.
        shard = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        if verified and checksum != zlib.crc32(shard.data):
            raise ValueError(f"{path.name} is not what was written")
        shards.append(shard)
    if sum(summary["shards"]) != summary["tokens"]:
        raise ValueError(f"the counts of split {split} disagree")
    return Tokens(shards, documents=summary["documents"], text_bytes=summary["bytes"])


def token_dtype(n_vocab: int) -> np.dtype:
    """Return the smallest of uint16 and uint32, little-endian, that holds ids below `n_vocab`."""
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


def _name(split: str, number: int) -> str:
    return f"{split}_{number:05d}.bin"
