"""The choice of keys by their content: the best blocks of keys, or an index's best keys.

sparse.py has the layers that attend to them.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from model.attention.masks import causal_mask
from model.layers import upcast

Scores = Float[Tensor, "*lead T S"]
Blocks = Bool[Tensor, "*lead T blocks"]


def best_blocks(scores: Scores, block: int, best: int) -> Blocks:
    """Return the blocks of keys that each query attends to: its own and the `best` before it.

    The best have the largest mean of the scores. A score of −∞ hides a key. Blocks are counted from the first key that
    a query sees; its own block holds the last.
    """
    # The first and the last key that each query sees.
    S = scores.shape[-1]
    key = torch.arange(S, device=scores.device)
    first = first_seen(scores)
    last = torch.where(scores > -torch.inf, key, -1).amax(-1, keepdim=True)

    # Order the scores by block, each query's from its first key. Padding of −∞ fills its last block.
    count = -(-S // block)
    place = first + torch.arange(count * block, device=scores.device)
    inside = F.pad(scores, (0, count * block), value=-torch.inf).gather(-1, place)
    inside = inside.unflatten(-1, (count, block))  # (…, T, blocks · block) -> (…, T, blocks, block)
    seen = inside > -torch.inf
    mean = inside.masked_fill(~seen, 0).sum(-1) / seen.sum(-1)
    return choose_blocks(mean.nan_to_num(nan=-torch.inf), (last - first) // block, best)


def choose_blocks(mean: Float[Tensor, "*lead T blocks"], own: Int[Tensor, "*#lead T 1"], best: int) -> Blocks:
    """Return each query's own block, and the `best` ones before it."""
    # Fewer than `best` blocks may come before a query's own: topk() then also returns hidden ones, of −∞. Hidden ones
    # are added, so that there are enough for topk() in a text of any length.
    number = torch.arange(mean.shape[-1], device=mean.device)
    earlier = F.pad(mean.masked_fill(number >= own, -torch.inf), (0, best), value=-torch.inf)
    top = earlier.topk(best, -1)
    before = torch.zeros_like(earlier, dtype=torch.bool).scatter(-1, top.indices, top.values > -torch.inf)
    return before[..., : mean.shape[-1]] | (number == own)


def block_mask(chosen: Blocks, scores: Scores, block: int) -> Bool[Tensor, "*lead T S"]:
    """Return where a query may attend: at the keys of its chosen blocks.

    Blocks are counted from the first key whose score is not −∞.
    """
    key = torch.arange(scores.shape[-1], device=scores.device)
    number = (key - first_seen(scores)).clamp(min=0) // block
    return chosen.gather(-1, number)


def first_seen(scores: Scores) -> Int[Tensor, "*lead T 1"]:
    """Return the first key of each query whose score is not −∞."""
    S = scores.shape[-1]
    key = torch.arange(S, device=scores.device)
    return torch.where(scores > -torch.inf, key, S).amin(-1, keepdim=True)


def index_scores(
    q: Float[Tensor, "B J T Di"],
    k: Float[Tensor, "B S Di"],
    w: Float[Tensor, "B T J"],
) -> Float[Tensor, "B 1 T S"]:
    """Return Σ_j w_tj ReLU(q_tj · k_s) / √(J Di): the score of each key for all heads."""
    J, _, Di = q.shape[1:]
    products = F.relu(upcast(q) * Di**-0.5 @ upcast(k)[:, None].mT)  # (B, J, T, S)
    return (upcast(w).mT[..., None] * products).sum(1, keepdim=True) * J**-0.5


def indexed_keys(
    index: Float[Tensor, "B 1 T S"],
    seen: Bool[Tensor, "..."],
    best: int,
) -> Bool[Tensor, "B _ T S"]:
    """Return each query's own key and the best ones that it sees, `best` in all.

    Of equals the nearer is chosen. Scores are equal if no gap in their order is wider than tie_gap(): a rounding, which
    differs between a full pass and decoding, then decides nothing between keys that are the same token without a
    position.
    """
    T, S = index.shape[-2:]
    own = causal_mask(T, S, index.device, window=1)
    gap = tie_gap(index.masked_fill(~seen, 0))
    index = index.masked_fill(~seen, -torch.inf).masked_fill(own, torch.inf)
    return nearest_of_equals(index, best, gap) & seen


def tie_gap(index: Tensor) -> Tensor:
    """Return the gap (…, 1) up to which scores of a row (…, keys) count as equal.

    It is 32 roundings of the row's largest score. In float32 the scores of one token, its key from a full pass or from
    decoding, differ by up to 11 roundings.
    """
    return 32 * torch.finfo(index.dtype).eps * index.abs().amax(-1, keepdim=True)


def best_of(
    index: Tensor,
    best: int,
    gap: Tensor,
    reads: bool = True,
) -> Tensor:
    """Return the `best` keys of each row (…, keys), of equals the nearer; none at -∞.

    Scores are equal if no gap in their order is wider than `gap`.

    reads: whether it may look at numbers, and sort only the rows that need it.
    """
    # With fewer keys than that there is no choice.
    finite = index > -torch.inf
    if index.shape[-1] <= best:
        return finite
    if not reads:
        return nearest_of_equals(index, best, gap) & finite

    # The least of the best and the next: a full sort would take longer.
    top = index.topk(best + 1, sorted=False).values
    next_one, least = top.topk(2, largest=False).values.split(1, -1)
    chosen = index >= least

    # Where these are equal the nearer keys are the best.
    tied = (least - next_one <= gap).squeeze(-1)
    if tied.any():
        chosen[tied] = nearest_of_equals(index[tied], best, gap[tied])
    return chosen & finite


def nearest_of_equals(
    index: Tensor,
    best: int,
    gap: Tensor,
) -> Tensor:
    """Return best_of() by a sort, with keys at -∞."""
    ordered, keys = index.sort(-1, descending=True)

    # The place of each key in the order, the same for equals.
    is_next = ordered[..., :-1] - ordered[..., 1:] > gap
    place = F.pad(is_next.cumsum(-1), (1, 0))
    place = torch.empty_like(place).scatter(-1, keys, place)

    # From the last key on, a stable sort puts the nearer of equals first.
    from_last = place.flip(-1).sort(dim=-1, stable=True).indices
    best_keys = index.shape[-1] - 1 - from_last[..., :best]
    return torch.zeros_like(index).scatter(-1, best_keys, 1.0) > 0
