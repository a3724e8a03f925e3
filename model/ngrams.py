"""Hashed n-gram embeddings: for each n a table, in which a token reads the row at the hash of the last n ids.

modded-nanogpt adds bigram embeddings to its token embedding; Engram ("Conditional Memory via Scalable Lookup", DeepSeek
2026) reads longer n-grams in inner layers. The cost per token does not depend on the number of rows.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.attention import AttentionContext
from model.config import GPTConfig

# With a hash below 2^31 and an id below 2^32 no product reaches 2^63.
MULTIPLIER = 1_540_483_477
MODULUS = (1 << 31) - 1
INPUT = -1  # the layer_idx of the model's input in a cache, beside layers 0, 1, …


class NGrams(nn.Module):
    """The sum of one row for each n in config.ngrams, which the GPT adds to the token's embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.ngrams is not None
        self.sizes, self.rows = config.ngrams, config.ngram_rows
        self.tables = nn.ModuleList(nn.Embedding(config.ngram_rows, config.n_embd) for _ in self.sizes)

    def forward(self, tokens: Int[Tensor, "B T"], ctx: AttentionContext) -> Float[Tensor, "B T C"]:
        ids = (tokens + 1)[:, None, :, None]  # 0 is the id before a text
        hashes = ngram_hashes([ids, *ctx.previous(INPUT, "ids", ids, max(self.sizes) - 1)])
        tables = zip(self.sizes, self.tables, strict=True)
        return torch.stack([table(hashes[n - 1][:, 0, :, 0] % self.rows) for n, table in tables]).sum(0)


def ngram_hashes(ids: list[Int[Tensor, "*shape"]]) -> list[Int[Tensor, "*shape"]]:
    """Return the hashes, below 2^31, of the last 1, 2, … ids of each token; `ids` has the latest id first."""
    hashed = torch.zeros_like(ids[0])
    hashes = []
    for each in ids:
        hashed = (hashed ^ each) * MULTIPLIER % MODULUS
        hashes.append(hashed)
    return hashes
