"""Sparse attention: each query chooses a few keys by their content."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from model.attention.choice import best_blocks, block_mask, nearest_of_equals, tie_gap
from model.attention.chunked import by_chunks, chunked
from model.attention.context import AttentionContext, Call, visible_keys
from model.attention.contract import AttentionFunction, Output, Scores, from_weights, upcast
from model.attention.layer import MultiHeadAttention, Stream
from model.attention.masks import causal_mask
from model.attention.registry import form
from model.config import AttentionConfig
from model.layers import LayerNorm, Linear


def blockwise(block: int, best: int) -> AttentionFunction:
    """Return softmax attention to the query's own block of keys and the `best` earlier ones.

    Blocks are counted from the first key that a query may attend to; its own block holds the last. q · mean(k) is the
    mean of q · k, so a block's mean score ranks it as its mean key would. No gradient flows through the choice.
    """

    @by_chunks("softmax", block=block, best=best)
    @from_weights
    def chosen(scores: Scores) -> Scores:
        seen = block_mask(best_blocks(scores.detach(), block, best), scores, block)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)

    return chosen


@form("moba")
class BlockAttention(MultiHeadAttention):
    """Each query attends to its own block of keys and to the three best earlier ones.

    (Lu et al. 2025, MoBA.) A block has block_size / 8 keys; the score of its mean key ranks it. The form has the
    weights of softmax attention, and may replace it in some layers or later in training. A bias, as ALiBi's, counts in
    the mean. Blocks are hidden, not skipped: it saves no time here.
    """

    is_sparse = True
    best = 3

    def __init__(self, config: AttentionConfig) -> None:
        self.block = max(1, config.block_size // 8)
        super().__init__(config, blockwise(self.block, self.best))

    def flops(self, block_size: int) -> float:
        """Return the operations per token: 4 D for each pair of a query head and a chosen key.

        2 D for each mean of an earlier block.
        """
        most = [min(t + 1, self.best * self.block + t % self.block + 1) for t in range(block_size)]
        earlier = sum(t // self.block for t in range(block_size))
        return self.query_heads * self.head_dim * (4 * sum(most) + 2 * earlier) / block_size


@form("index")
class IndexedAttention(MultiHeadAttention):
    """A small indexer chooses the block_size / 4 keys that a query attends to.

    (DeepSeek-AI 2025, DeepSeek-V3.2-Exp.)

        I_ts = Σ_j w_tj ReLU(q_tj · k_s),  of H / 2 queries q_j and weights w_j, and one key k, of its own

    A token always keeps itself. No gradient flows through the choice: the indexer learns to score as attention weighs,
    by KL(p ‖ softmax I) over the chosen keys, p the mean of the heads' weights, and that loss moves nothing else. Keys
    are hidden, not skipped: it saves no time here.
    """

    is_sparse = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.best = max(1, config.block_size // 4)
        self.index_heads = max(1, self.n_head // 2)
        parts = self.index_heads * self.head_dim, self.head_dim, self.index_heads
        self.index_proj = Linear(config.n_embd, *parts, bias=False)
        self.index_norm = LayerNorm(self.head_dim, eps=1e-6)

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        T = x.shape[1]
        S = call.k.shape[2]

        # The indexer's queries, its key, and a weight for each query; J = index_heads.
        index_q, index_k, index_w = self.index_proj(x.detach()).split(self.index_proj.parts, -1)
        index_q = index_q.unflatten(-1, (self.index_heads, -1)).transpose(1, 2)  # (B, T, J·D) -> (B, J, T, D)
        index_q = self.rotate(index_q, ctx)
        index_k = self.rotate(self.index_norm(index_k).unsqueeze(1), ctx)  # (B, T, D) -> (B, 1, T, D)
        if ctx.cache is not None:
            index_k = ctx.cache.append(self.layer_idx, "index", index_k, self.window)

        # A long text goes by chunks, loss and all.
        if self.is_long(call, ctx) and "logn" not in self.modifiers:  # which counts chosen keys
            y, loss = chunked(
                "softmax",
                self.modified(call, x, ctx),
                index=(index_q, index_k[:, 0, -S:], index_w),
                best=self.best,
                learns=ctx.loss is not None,
                dropout_p=self.dropout_p(ctx),
            )
            ctx.loss = None if ctx.loss is None else ctx.loss + loss
            return y

        # Its scores choose the keys.
        scores = F.relu(upcast(index_q * self.head_dim**-0.5) @ upcast(index_k[:, :, -S:]).mT)  # (B, J, T, S)
        index = (upcast(index_w).mT[..., None] * scores).sum(1, keepdim=True) * self.index_heads**-0.5  # (B, 1, T, S)
        seen = visible_keys(call)
        seen = causal_mask(T, S, x.device) if seen is None else seen
        chosen = self.chosen(index.detach(), seen)
        call = call._replace(mask=chosen)

        # It learns from the mean of the heads' weights.
        if ctx.loss is not None:
            with torch.no_grad():
                identity = torch.eye(S, dtype=call.v.dtype, device=x.device).expand(*call.v.shape[:2], S, S)
                weights = super().attend(call._replace(v=identity), x, replace(ctx, weights_only=True))
            wanted = F.normalize(upcast(weights).sum(1, keepdim=True), p=1, dim=-1)
            found = index.masked_fill(~chosen, -1e9).log_softmax(-1)  # finite, as wanted is 0 there
            ctx.loss = ctx.loss + F.kl_div(found, wanted, reduction="sum")
        return super().attend(call, x, ctx)

    def chosen(self, index: Float[Tensor, "B 1 T S"], seen: Bool[Tensor, "..."]) -> Bool[Tensor, "B _ T S"]:
        """Return the keys that each query attends to: its own and the best that it sees.

        Of equals the nearer is chosen. Scores are equal if no gap in their order is wider than tie_gap(): a rounding,
        which differs between a full pass and decoding, then decides nothing between keys that are the same token
        without a position.
        """
        T, S = index.shape[-2:]
        own = causal_mask(T, S, index.device, window=1)
        gap = tie_gap(index.masked_fill(~seen, 0))
        index = index.masked_fill(~seen, -torch.inf).masked_fill(own, torch.inf)
        return nearest_of_equals(index, self.best, gap) & seen

    def flops(self, block_size: int) -> float:
        """Return the operations per token: 4 D for each pair of a query head and a chosen key.

        2 D for each pair of an index head and any visible key.
        """
        seen = [min(t + 1, self.window or block_size) for t in range(block_size)]
        attended = sum(min(n, self.best) for n in seen)
        return 2 * self.head_dim * (2 * self.query_heads * attended + self.index_heads * sum(seen)) / block_size
