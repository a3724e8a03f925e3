"""Hashed n-gram embeddings: for each n a table, of which a token reads the row at the hash of the last n ids.

modded-nanogpt adds those of bigrams to its token embedding; Engram ("Conditional Memory via Scalable Lookup", DeepSeek
2026) reads longer ones in inner layers. A token reads one row of each table, however many rows there are.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.cache import KVCache
from model.config import GPTConfig

MULTIPLIER, MODULUS = 1_540_483_477, (1 << 31) - 1  # a hash below 2^31 and an id below 2^32: no product reaches 2^63
NONE = 0  # the id of what is before the text; others are one higher here
INPUT = -1  # where a cache keeps the input's part, beside those of layers 0, 1, …

Ids = Int[Tensor, "B T"]


class NGrams(nn.Module):
    """The sum of one row for each n in config.ngrams, to be added to the token's embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.ngrams is not None
        self.sizes, self.before, self.rows = config.ngrams, max(config.ngrams) - 1, config.ngram_rows
        self.tables = nn.ModuleList(nn.Embedding(config.ngram_rows, config.n_embd) for _ in self.sizes)

    def forward(
        self, tokens: Ids, past: int = 0, starts: Ids | None = None, cache: KVCache | None = None
    ) -> Float[Tensor, "B T C"]:
        """Return the sum of the rows, for tokens at the positions past, past+1, …

        starts: where the text of each token begins; ids before that count as none.
        cache: keeps the last ids for the next pass.
        """
        known = self.with_earlier(tokens, cache)
        hashes = ngram_hashes(known, self.before, past, starts)
        rows = [table(hashes[n - 1] % self.rows) for n, table in zip(self.sizes, self.tables, strict=True)]
        return torch.stack(rows).sum(0)

    def with_earlier(self, tokens: Ids, cache: KVCache | None) -> Int[Tensor, "B more_than_T"]:
        """Return the ids + 1 of `before` earlier tokens and of these, and let the cache remember the last of them."""
        earlier = tokens.new_full((len(tokens), self.before), NONE)
        kept = {} if cache is None else cache.layers[INPUT]
        known = torch.cat((kept.get("ids", earlier), tokens + 1), 1)
        kept["ids"] = known[:, -self.before :].clone()
        return known


def ngram_hashes(
    known: Int[Tensor, "B more_than_T"], before: int, past: int = 0, starts: Ids | None = None
) -> list[Ids]:
    """Return for n = 1, 2, … before + 1 the hash, below 2^31, of the last n ids of each position but the first ones."""
    T = known.size(1) - before
    positions = torch.arange(past, past + T, device=known.device)
    hashes = [torch.zeros_like(known[:, before:])]
    for back in range(before + 1):
        ids = known[:, before - back : before - back + T]
        if starts is not None and back:
            ids = ids.masked_fill(positions - back < starts, NONE)
        hashes.append((hashes[-1] ^ ids) * MULTIPLIER % MODULUS)
    return hashes[1:]
