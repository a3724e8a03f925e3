"""Attention to a few chosen keys: which ones, the text decides."""

import torch

from model.attention.contract import Allowed, AttentionFunction, Scores, weighted
from model.attention.layer import MultiHeadAttention
from model.attention.names import form
from model.config import AttentionConfig


def blockwise(block: int, best: int) -> AttentionFunction:
    """Return softmax attention to the query's own block of keys and to the `best` blocks before it.

    Blocks are counted from the first key that a query may attend to, its own is that of the last. q · mean(k) is the
    mean of q · k, so the mean score of its keys says how good a block is. No gradient flows through the choice.
    """

    @weighted
    def chosen(scores: Scores, allowed: Allowed) -> Scores:
        S, seen = scores.shape[-1], scores.detach() > -torch.inf
        key = torch.arange(S, device=scores.device)
        first = torch.where(seen, key, S).amin(-1, keepdim=True)  # (…, T, 1)
        own = (torch.where(seen, key, -1).amax(-1, keepdim=True) - first) // block
        number = torch.arange(-(-S // block), device=scores.device)
        place = first + torch.arange(len(number) * block, device=scores.device)  # the keys in order of their blocks
        there = seen.gather(-1, place.clamp(max=S - 1)) & (place < S)
        inside = scores.detach().gather(-1, place.clamp(max=S - 1)).masked_fill(~there, 0)
        inside, there = inside.unflatten(-1, (-1, block)).sum(-1), there.unflatten(-1, (-1, block)).sum(-1)
        good = (inside / there).masked_fill((there == 0) | (number >= own), -torch.inf)  # (…, T, blocks)
        best_ones = good.topk(min(best, len(number)), -1).indices
        attended = torch.zeros_like(good, dtype=torch.bool).scatter(-1, best_ones, True) & (good > -torch.inf)
        attended = (attended | (number == own)).gather(-1, (key - first).clamp(min=0) // block)
        return scores.masked_fill(~attended, -torch.inf).softmax(-1)

    return chosen


@form("moba")
class BlockAttention(MultiHeadAttention):
    """Each query attends to its own block of block_size / 8 keys and to the three earlier ones with the best mean key.

    (Lu et al. 2025, MoBA.) It has the weights of softmax attention, which it may replace in some layers or later in
    training. A bias, as ALiBi's, counts in the mean. Blocks are hidden, not skipped: it saves no time here.
    """

    chooses = True
    best = 3

    def __init__(self, config: AttentionConfig, number: int = 0) -> None:
        self.block = max(1, config.block_size // 8)
        super().__init__(config, number, blockwise(self.block, self.best))

    def flops(self, block_size: int) -> float:
        """4 D for each pair of a query head and a key that it attends to, 2 D for each mean of an earlier block."""
        most = [min(t + 1, self.best * self.block + t % self.block + 1) for t in range(block_size)]
        earlier = sum(t // self.block for t in range(block_size))
        return self.query_heads * self.head_size * (4 * sum(most) + 2 * earlier) / block_size
