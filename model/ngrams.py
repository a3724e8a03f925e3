"""Hashed n-gram embeddings: a token reads one row of a table for each n.

The row is the hash of its last n ids. modded-nanogpt adds bigram embeddings to its token embedding; Engram
("Conditional Memory via Scalable Lookup", DeepSeek 2026) reads longer n-grams in inner layers. The cost per token does
not depend on the number of rows.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from model.attention import AttentionContext
from model.cache import Tokens
from model.config import GPTConfig

# With a hash below 2^31 and an id below 2^32 no product reaches 2^63.
MULTIPLIER = 1_540_483_477
MODULUS = (1 << 31) - 1
INPUT = -1  # the layer_idx of the model's input in a cache, beside layers 0, 1, …


class NGrams(nn.Module):
    """The sum of one row for each n in config.ngrams.

    The GPT adds it to the token's embedding.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.ngrams is not None
        self.sizes = config.ngrams
        self.rows = config.ngram_rows
        self.tables = nn.ModuleList(nn.Embedding(self.rows, config.n_embd) for _ in self.sizes)

    def forward(self, tokens: Tokens, ctx: AttentionContext) -> Float[Tensor, "B T C"]:
        # Ids count from 1, because previous() gives 0 where the text has not begun.
        # As 64 bits: a product of the hash would leave the 32 bits that ids may have.
        ids = (tokens.long() + 1)[:, None, :, None]  # (B, T) -> (B, 1, T, 1), a cache's shape
        earlier = ctx.previous(INPUT, "ids", ids, max(self.sizes) - 1)
        hashes = ngram_hashes([ids, *earlier])

        embeddings = []
        for n, table in zip(self.sizes, self.tables, strict=True):
            row = hashes[n - 1][:, 0, :, 0] % self.rows  # (B, 1, T, 1) -> (B, T)
            embeddings.append(table(row))
        return torch.stack(embeddings).sum(0)


def ngram_hashes(ids: list[Int[Tensor, "*shape"]]) -> list[Int[Tensor, "*shape"]]:
    """Return the hashes, below 2^31, of the last 1, 2, … ids of each token.

    ids: the latest first.
    """
    hashed = torch.zeros_like(ids[0])
    hashes = []
    for each in ids:
        hashed = (hashed ^ each) * MULTIPLIER % MODULUS
        hashes.append(hashed)
    return hashes
