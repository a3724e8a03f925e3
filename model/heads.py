"""The attention weights of a model's heads, and statistics that tell heads apart."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from model.attention import AttentionContext
from model.attention.check import weights_of
from model.cache import DocStarts, Tokens
from model.gpt import GPT
from model.layers import upcast
from model.modes import eval_mode, uncompiled_calls
from model.surgery import read

Result = TypeVar("Result")
Weights = Float[Tensor, "B H T T"]


class HeadStatistics(NamedTuple):
    """Statistics of the attention weights, listed by layer, then head.

    Each is a mean over all queries of some texts, without padding. If a form's weights are negative or do not sum to 1,
    the positive ones are divided by their sum.
    """

    entropy: list[list[float]]
    """Nats: 0 where a head attends to one position, ln n where it spreads evenly over n."""
    relative_entropy: list[list[float]]
    """Entropy ÷ the entropy of an even average over all allowed positions.

    1 is attention=average. NaN if no query sees a second position.
    """
    distance: list[list[float]]
    """The mean distance of a key from its query, by the weights (Vig & Belinkov 2019)."""
    similarity: list[float | None]
    """By layer: 1 minus the Jensen–Shannon divergence between heads, in bits.

    The mean over pairs of heads (the distance of Clark et al. 2019). 1: the same weights; 0: no position in common.
    None if there is one head.
    """


@torch.no_grad()
def for_each_layer(
    model: GPT,
    tokens: Tokens,
    function: Callable[[Weights], Result],
    doc_starts: DocStarts = None,
) -> list[Result]:
    """Return `function` of each layer's attention weights, without dropout and gradient.

    A form with one head has H = 1. One layer's weights are in memory at a time. The model's mode stays as it was.
    """
    results: list[Result] = []
    ctx = AttentionContext()

    def visit(attention: Any, arguments: Any, named: Any = None) -> None:
        # Another thread may read the model too, also in the instant in which torch has the hook, but does not know yet
        # that it takes named arguments.
        given = dict(zip(("x", "ctx"), arguments, strict=False)) | (named or {})
        if given.get("ctx") is not ctx:
            return
        results.append(function(weights_of(attention, **given)))

    # A hook before each layer's forward() gets the arguments of that layer, after the hooks of others.
    layers = dict.fromkeys(model.attentions)  # a block may stand in several places
    hooks = [attention.register_forward_pre_hook(visit, with_kwargs=True) for attention in layers]
    try:
        with eval_mode(model), uncompiled_calls():
            read(model, tokens, doc_starts=doc_starts, ctx=ctx)
    finally:
        for hook in hooks:
            hook.remove()
    return results


def head_statistics(
    model: GPT,
    tokens: Tokens,
    doc_starts: DocStarts = None,
) -> HeadStatistics:
    """Measure every head of a model on some texts.

    doc_starts: keeps documents apart. A token before the start of its document is padding, and does not count: for
        texts of these lengths on the right, (T - lengths)[:, None].expand(B, T).
    """
    # The distances and the numbers of visible keys, which all layers share but for their windows.
    position = torch.arange(tokens.size(1), device=tokens.device)
    back = position[:, None] - position  # (T, T): the distance of key s from query t
    in_sight = position + 1 - (0 if doc_starts is None else doc_starts)  # (T,) or (B, T): keys of each query
    counted = None if doc_starts is None else in_sight > 0  # (B, T)
    windows = iter([attention.window or len(position) for attention in model.attentions])

    def measure(weights: Weights) -> Float[Tensor, "4 H"]:
        even = mean(in_sight.clamp(min=1, max=next(windows)).log(), counted)  # the entropy of an even average
        weights = F.normalize(upcast(weights).clamp(min=0), p=1, dim=-1)  # in float16 no sum is as small as its ε
        by_query = torch.special.entr(weights).sum(-1)  # (B, H, T, T) -> (B, H, T)
        entropy = mean(by_query.transpose(0, 1), counted)  # (B, H, T) -> (H, B, T) -> (H,)
        distance = mean((weights * back).sum(-1).transpose(0, 1), counted)
        similarity = head_similarity(weights, counted).expand(weights.size(1))
        return torch.stack((entropy, entropy / even, distance, similarity))

    layers = for_each_layer(model, tokens, measure, doc_starts)

    # From one (4, H) of each layer to one list over layers of each statistic. One copy waits for a GPU once.
    heads = [layer.size(1) for layer in layers]
    read = torch.cat(layers, 1).cpu().split(heads, 1)
    rows = [layer.tolist() for layer in read]
    entropy, relative, distance, similar = (list(part) for part in zip(*rows, strict=True))
    similarity = [None if len(part) == 1 else part[0] for part in similar]
    return HeadStatistics(entropy, relative, distance, similarity)


def mean(by_query: Float[Tensor, "... T"], counted: Bool[Tensor, "B T"] | None) -> Float[Tensor, "..."]:
    """Return the mean over all queries that count, of (…, B, T) or (T,).

    Those that do not count may have any value, NaN too.
    """
    if counted is None:
        return by_query.mean() if by_query.ndim == 1 else by_query.mean((-2, -1))
    return by_query.masked_fill(~counted, 0).sum((-2, -1)) / counted.sum()


def head_similarity(weights: Weights, counted: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
    """Return 1 minus the Jensen–Shannon divergence between heads, in bits.

    The mean over pairs of heads and over queries that count, by default all; NaN for one head.
    """
    entropy = torch.special.entr(weights).sum(-1)  # (B, H, T)
    total = weights.new_zeros(())
    pairs = [*combinations(range(weights.size(1)), 2)]
    for one, other in pairs:
        # The divergence is the entropy of the mixture less the mean entropy.
        mixture = (weights[:, one] + weights[:, other]) / 2  # (B, T, T)
        of_mixture = torch.special.entr(mixture).sum(-1)
        divergence = of_mixture - (entropy[:, one] + entropy[:, other]) / 2  # (B, T), in nats
        total = total + mean(divergence, counted)
    return 1 - total / math.log(2) / (len(pairs) or math.nan)
