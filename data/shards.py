"""Token shards as llm.c and modded-nanogpt write them.

They are memory-mapped, and several of them are one text. A shard has a header of 256 int32: a magic number, a version
and the number of tokens. GPT-2's ids follow, uint16. Each document begins with <|endoftext|>, as it does here. Integers
are little-endian.
"""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from common.errors import DataError, first_line

MAGIC = 20240520
VERSION = 1
HEADER = 256  # int32


class Shards:
    """The tokens of several shards, with the length and the slices of one array."""

    def __init__(self, shards: list[np.ndarray]) -> None:
        self.shards = shards
        self.ends = [*accumulate(map(len, shards))]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, where: slice) -> np.ndarray:
        """Return a copy of the tokens from `where.start` to `where.stop`, uint16 (N,)."""
        # Take from each shard, from the one that holds `start` on. The empty part serves an empty slice.
        start, stop, _ = where.indices(len(self))
        parts = [np.empty(0, self.shards[0].dtype)]
        number = bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[number] - len(self.shards[number])
            parts.append(self.shards[number][start - begin : stop - begin])
            start = self.ends[number]
            number += 1
        return np.concatenate(parts)


Tokens = np.ndarray | Shards


def open_shards(files: list[Path], n_vocab: int) -> Tokens:
    """Return the tokens of shards, in the order of `files`.

    Raises DataError if one is damaged or has an id from n_vocab on. Reads all ids for this check: 0.1 s for 300 MB
    that are in memory.
    """
    shards = []
    for file in files:
        try:
            shards.append(map_shard(file))
            highest = shards[-1].max()
            if highest >= n_vocab:
                raise ValueError(f"it has the id {highest}, and the tokenizer ids below {n_vocab}")
        except ValueError as error:
            problem = f"data.path: {file} cannot be used ({first_line(error)})"
            raise DataError(problem, "download it again, or move it elsewhere") from error
    return shards[0] if len(shards) == 1 else Shards(shards)


def map_shard(file: Path) -> np.ndarray:
    """Return the tokens of a shard, memory-mapped, uint16 (N,).

    Raises ValueError if its header does not fit.
    """
    header = np.fromfile(file, "<i4", HEADER)
    if len(header) < HEADER or header[:2].tolist() != [MAGIC, VERSION]:
        raise ValueError(f"it begins with {header[:2].tolist()}, and a shard with {[MAGIC, VERSION]}")
    # As a plain array: slicing numpy's memmap class is several times slower.
    tokens = np.memmap(file, "<u2", "r", header.nbytes).view(np.ndarray)
    if len(tokens) != header[2]:
        raise ValueError(f"it has {len(tokens):,} tokens, and its header says {header[2]:,}")
    return tokens
