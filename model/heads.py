"""The attention weights of a model's heads, and statistics that tell heads apart."""

import math
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from model.gpt import GPT, DocStarts

Result = TypeVar("Result")
Weights = Float[Tensor, "B H T T"]


class HeadStatistics(NamedTuple):
    """Figures of the attention weights: means over all queries of some texts, listed by layer, then head.

    Where a form's rows hold negative weights or do not sum to 1, the positive ones count, divided by their sum.
    """

    entropy: list[list[float]]
    """Nats: 0 where a head attends to one position, ln n where it spreads evenly over n."""
    relative_entropy: list[list[float]]
    """Entropy divided by that of an even average over all allowed positions: 1 is attention=average."""
    distance: list[list[float]]
    """How many positions back a head attends, weighted by its weights (Vig & Belinkov 2019)."""
    similarity: list[float | None]
    """By layer: 1 minus the Jensen–Shannon divergence between heads in bits, the mean over pairs (the distance of
    Clark et al. 2019). 1: the same weights; 0: no position in common. None where there is one head."""


@torch.no_grad()
def for_each_layer(
    model: GPT, tokens: Int[Tensor, "B T"], function: Callable[[Weights], Result], doc_starts: DocStarts = None
) -> list[Result]:
    """Return `function` of each layer's attention weights, dropout off; the model's mode stays as it was.

    A form with one head has H = 1. One layer's weights are in memory at a time.
    """
    results: list[Result] = []
    visit = lambda attention, arguments: results.append(function(attention.weights(*arguments)))  # noqa: E731
    hooks = [attention.register_forward_pre_hook(visit) for attention in model.attentions]
    was_training = model.training
    model.eval()
    try:
        model.hidden(tokens, doc_starts=doc_starts)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return results


def head_statistics(model: GPT, tokens: Int[Tensor, "B T"], doc_starts: DocStarts = None) -> HeadStatistics:
    """Measure every head of a model on some texts; `doc_starts` keeps documents apart."""
    position = torch.arange(tokens.size(1), device=tokens.device)
    back = position[:, None] - position  # (T, T): how far key s lies behind query t
    windows = iter([attention.window or len(position) for attention in model.attentions])

    def measure(weights: Weights) -> Float[Tensor, "4 H"]:
        in_sight = position + 1 - (0 if doc_starts is None else doc_starts)
        most = in_sight.clamp(max=next(windows)).log().mean()  # the entropy of an even average
        weights = F.normalize(weights.clamp(min=0), p=1, dim=-1)
        entropy = torch.special.entr(weights).sum(-1).mean((0, 2))  # (B, H, T, T) -> (H,)
        distance = (weights * back).sum(-1).mean((0, 2))
        return torch.stack((entropy, entropy / most, distance, head_similarity(weights).expand(weights.size(1))))

    layers = for_each_layer(model, tokens, measure, doc_starts)
    heads = [layer.size(1) for layer in layers]
    read = torch.cat(layers, 1).cpu().split(heads, 1)  # all at once: a GPU is waited for once
    entropy, relative, distance, similarity = (
        list(part) for part in zip(*(layer.tolist() for layer in read), strict=True)
    )
    return HeadStatistics(entropy, relative, distance, [None if len(part) == 1 else part[0] for part in similarity])


def head_similarity(weights: Weights) -> Float[Tensor, ""]:
    """Return 1 minus the Jensen–Shannon divergence in bits, the mean over pairs of heads and queries; NaN for one."""
    entropy = torch.special.entr(weights).sum(-1)  # (B, H, T)
    total = weights.new_zeros(())
    pairs = [*combinations(range(weights.size(1)), 2)]
    for one, other in pairs:
        of_mixture = torch.special.entr((weights[:, one] + weights[:, other]) / 2).sum(-1)
        total = total + (of_mixture - (entropy[:, one] + entropy[:, other]) / 2).mean()
    return 1 - total / math.log(2) / (len(pairs) or math.nan)
