"""From scores to weights: each way once.

    softmax    exp(score) / Σ exp(score)
    softcap    softmax of scores that are squashed into ±cap
    blockwise  softmax over a query's own block of keys and the best earlier ones
    sigmoid    σ(score − ln n): keys do not compete
    sparsemax  the nearest point of the simplex: many weights are 0
    stick      the nearest key takes its share first, the next one a share of the rest

A Weighting is the definition: a class that ends after a few lines. Where one has a class of Passes, that follows it:
the same weights for a chunk of queries, with their gradient, in steps that overwrite buffers. chunked.py calls them in
long texts. Read the definitions first, and the passes when you need speed.
"""

import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.choice import Scores, best_blocks, block_mask
from model.layers import cumulative_sum


class Weighting:
    """How scores become weights: a subclass defines weights()."""

    name = ""
    no_sink: ClassVar[str | None] = None
    """Why one more key, of value zero, means nothing here; None where it has a meaning."""
    ignores_shifts: ClassVar[bool] = False
    """Whether a number that is added to all scores of a row changes no weight."""
    # The flags and `passes`, and `key` below, are for executors: skip them at first.
    counts_keys: ClassVar[bool] = False
    """Whether weights() may count keys from the last one, a query's own: a sink then stands before all others.

    True for a person's function: suppose it weighs the last key by 1 and the one before it by ½; a sink behind all keys
    would be the last. Stick counts keys too, but takes no sink.
    """
    is_causal: ClassVar[bool] = False
    """Whether later keys have no weight in any call."""
    passes: ClassVar[type["SoftmaxPasses"] | None] = None
    """The same weights in chunked.py's way, for long texts; None if there are none."""

    def __init__(self, *options: float | int) -> None:
        """options: the arguments that make this weighting again."""
        self.options = options
        self.key = json.dumps([self.name, *options])
        """The weighting as a text, for torch's custom operators, which take no objects: see from_key()."""

    def weights(self, scores: Scores) -> Scores:
        """Return the weights of scores, which are float32 or wider, and −∞ where a key is hidden."""
        raise NotImplementedError

    def squashed(self, products: Scores) -> Scores:
        """Change the scaled products of queries and keys, before a bias is added."""
        return products


class Own(Weighting):
    """The weights of a person's function of the scores."""

    counts_keys = True

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name = function.__name__
        self.function = function

    def weights(self, scores: Scores) -> Scores:
        return self.function(scores)


class Unknown(Weighting):
    """Those of a person's function of a whole call, which no other code can compute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


WITH_PASSES: dict[str, type[Weighting]] = {}
"""The weightings that have passes, by name."""


def from_key(key: str) -> Weighting:
    """Return the weighting of a key, such as ["softcap", 50.0]."""
    name, *options = json.loads(key)
    return WITH_PASSES[name](*options)


def passes_of(weighting: type[Weighting]) -> Callable[[type["SoftmaxPasses"]], type["SoftmaxPasses"]]:
    """Say that a class has the passes of a weighting."""

    def register(passes: type["SoftmaxPasses"]) -> type["SoftmaxPasses"]:
        weighting.passes = passes
        WITH_PASSES[weighting.name] = weighting
        return passes

    return register


class Softmax(Weighting):
    """exp(score) / Σ exp(score): positive weights that sum to 1."""

    name = "softmax"
    ignores_shifts = True

    def weights(self, scores: Scores) -> Scores:
        return scores.softmax(-1)


PLAIN = Softmax()
LOG2E = math.log2(math.e)
QueryChunk = Any
"""A chunk of queries, of chunked.py."""
FirstPass = tuple[Tensor, Tensor | None, Tensor | None]
"""Weights, a factor of each row's result, and the statistic of each row."""
# Steps of torch's own backward passes, in the variant that writes into a given tensor.
sigmoid_gradient = torch.ops.aten.sigmoid_backward.grad_input
where_positive = torch.ops.aten.threshold_backward.grad_input


@passes_of(Softmax)
class SoftmaxPasses:
    """Base 2, because exp2 takes half the time of exp.

    The gradient of the scores is w (d - Σ w d), d that of the weights.
    """

    factor = LOG2E
    """The factor by which the products arrive multiplied."""
    bias_factor = LOG2E
    """The factor of bias and sink."""
    hidden = -torch.inf
    """The score of a key that a query does not see."""
    reverse = False
    """Whether keys come from the latest to the first."""
    strict = False
    """Whether a query does not see its own key."""
    biased = True
    """Whether scores arrive with their bias, and in the second pass with their row's statistic.

    Else the passes add them.
    """
    centred = True
    """Whether gradient() gets d - Σ w d in place of d."""
    slope = 1.0
    """The result of inner_gradient() as a multiple of the gradient of natural scores."""

    def __init__(self, weighting: Any) -> None:
        """weighting: that of the passes, which may have options."""

    def shift(self, chunk: QueryChunk) -> Tensor:
        """Return a number of each row (N, G · n, 1), or one of all, that is added to their scores."""
        return chunk.zero

    def first_pass(self, scores: Tensor, chunk: QueryChunk) -> FirstPass:
        """Return the weights of scores, with their factor and statistic; may overwrite the scores."""
        # Less the largest score, so that no exponential overflows.
        top = scores.amax(-1, keepdim=True)
        top = torch.maximum(top, chunk.sink)
        scores.sub_(top).exp2_()

        # The results are divided by the sum, not the weights.
        total = scores.sum(-1, keepdim=True)
        total += torch.exp2(chunk.sink - top)
        minus_logsumexp = -(top + total.log2())
        return scores, total.reciprocal(), minus_logsumexp

    def second_pass(self, scores: Tensor, chunk: QueryChunk) -> Tensor:
        """Return the weights again, of scores with their row's statistic."""
        return scores.exp2_()

    def gradient(self, d: Tensor, weights: Tensor, scores: Tensor, chunk: QueryChunk) -> Tensor:
        """Overwrite d, the gradient of the weights, by that of the biased scores; return it."""
        return d.mul_(weights)

    def inner_gradient(self, d: Tensor, scores: Tensor) -> Tensor:
        """Overwrite d, the gradient of the biased scores, by that of the products; return it."""
        return d


class Softcap(Softmax):
    """Softmax whose scores become cap · tanh(score / cap) before mask and bias.

    (Gemma 2, 2024, section 2.) Scores lie within ±cap; far outside, gradients vanish.
    """

    name = "softcap"
    ignores_shifts = True

    def __init__(self, cap: float) -> None:
        super().__init__(cap)
        self.cap = cap

    def squashed(self, products: Scores) -> Scores:
        return self.cap * torch.tanh(products / self.cap)


@passes_of(Softcap)
class SoftcapPasses(SoftmaxPasses):
    """With r = 1 / (1 + exp(2 s / cap)) the score is cap - 2 cap r, and its slope 4 r (1 - r)."""

    slope = 4.0
    biased = False
    hidden = 0.0  # the capped scores are hidden, not the products

    def __init__(self, weighting: Softcap) -> None:
        self.cap = weighting.cap * LOG2E
        self.factor = 2 * LOG2E / weighting.cap

    def capped(self, scores: Tensor, chunk: QueryChunk) -> Tensor:
        """Turn the scores into r, and return cap - 2 cap r + bias + statistic."""
        scores.exp2_().add_(1).reciprocal_()
        rows = chunk.statistic + self.cap + chunk.row
        capped = chunk.scratch(1)
        torch.add(rows, scores, alpha=-2 * self.cap, out=capped)
        # The columns come last: beside the cap they would lose digits.
        if chunk.column is not None:
            chunk.by_group(capped).add_(chunk.column)
        chunk.hide(capped, -torch.inf)
        return capped

    def first_pass(self, scores: Tensor, chunk: QueryChunk) -> FirstPass:
        return super().first_pass(self.capped(scores, chunk), chunk)

    def second_pass(self, scores: Tensor, chunk: QueryChunk) -> Tensor:
        return self.capped(scores, chunk).exp2_()

    def inner_gradient(self, d: Tensor, scores: Tensor) -> Tensor:
        return sigmoid_gradient(d, scores, grad_input=d)


class Blockwise(Softmax):
    """Softmax over the query's own block of keys and the `best` earlier ones.

    It is that of moba in sparse.py. Blocks are counted from the first key that a query may attend to; its own block
    holds the last. q · mean(k) is the mean of q · k, so a block's mean score ranks it as its mean key would. No
    gradient flows through the choice.
    """

    name = "blockwise"
    ignores_shifts = True
    no_sink = "one more key would shift the blocks"

    def __init__(self, block: int, best: int) -> None:
        super().__init__(block, best)
        self.block = block
        self.best = best

    def weights(self, scores: Scores) -> Scores:
        seen = block_mask(best_blocks(scores.detach(), self.block, self.best), scores, self.block)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1)


@passes_of(Blockwise)
class BlockwisePasses(SoftmaxPasses):
    """Those of softmax: chunked.py hides the keys of other blocks."""


class Sigmoid(Weighting):
    """σ(score − ln n), n the number of visible keys (Ramapuram et al. 2024, eq. 3).

    Their n is the length of the text. Keys do not compete: a row may sum to less or more than 1.
    """

    name = "sigmoid"
    no_sink = "no key takes weight from others"

    def weights(self, scores: Scores) -> Scores:
        n = (scores > -torch.inf).sum(-1, keepdim=True)
        return torch.sigmoid(scores - n.to(scores.dtype).log())


@passes_of(Sigmoid)
class SigmoidPasses(SoftmaxPasses):
    """No statistic of a row is needed but n, which its place tells."""

    factor = bias_factor = 1.0
    centred = False

    def shift(self, chunk: QueryChunk) -> Tensor:
        return -chunk.number_seen().log()

    def first_pass(self, scores: Tensor, chunk: QueryChunk) -> FirstPass:
        return scores.sigmoid_(), None, None

    def second_pass(self, scores: Tensor, chunk: QueryChunk) -> Tensor:
        return scores.sigmoid_()

    def gradient(self, d: Tensor, weights: Tensor, scores: Tensor, chunk: QueryChunk) -> Tensor:
        return sigmoid_gradient(d, weights, grad_input=d)


class Sparsemax(Weighting):
    """The point of the simplex nearest to the scores: many weights are exactly 0.

    (Martins & Astudillo 2016, alg. 1.) That is max(0, score − τ), with τ = (sum of the scores above τ − 1) ÷ their
    number, so that the row sums to 1.
    """

    name = "sparsemax"
    ignores_shifts = True

    def weights(self, scores: Scores) -> Scores:
        ordered = scores.sort(-1, descending=True).values
        number = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
        summed = cumulative_sum(ordered, -1)
        above = ordered * number + 1 > summed  # True for the largest scores of each row, those that keep a weight
        tau = (ordered.masked_fill(~above, 0).sum(-1, keepdim=True) - 1) / above.sum(-1, keepdim=True)
        return (scores - tau).clamp(min=0)


@passes_of(Sparsemax)
class SparsemaxPasses(SoftmaxPasses):
    """Newton's steps find τ without a sort: the sum of the weights falls with τ and is convex.

    From a τ that is too low they never pass it. The largest score less 1 is such a τ, and so is the τ of a subset of
    the keys. The first steps look at the largest of every 64th key alone: these are nearly all that matter.
    """

    factor = bias_factor = 1.0
    centred = False

    def first_pass(self, scores: Tensor, chunk: QueryChunk) -> FirstPass:
        largest = scores.amax(-1, keepdim=True)
        tau = torch.maximum(largest, chunk.sink) - 1

        # A few steps on the largest of every 64th key.
        keys = scores.shape[-1]
        width = keys // 64 * 64
        if width > 128:
            every = scores[..., :width].unflatten(-1, (-1, 64))  # (N, G · n, keys / 64, 64)
            tau, _ = self.newton(every.amax(-2), tau, 4, chunk)

        # The rest on all keys. A step divides the excess times the number of weights by four at least, because its
        # share of the one and its share of the other sum to 1 at most: from keys² to a rounding.
        steps = math.ceil(math.log2(keys + 1) - math.log2(torch.finfo(scores.dtype).eps) / 2)
        scratch = chunk.scratch(1), chunk.scratch(2)
        tau, weights = self.newton(scores, tau, 50 if chunk.operands.reads else steps, chunk, *scratch)
        return weights, None, -tau

    def newton(
        self,
        scores: Tensor,
        tau: Tensor,
        steps: int,
        chunk: QueryChunk,
        out: Tensor | None = None,
        signs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return τ after so many steps or when it stays, and the weights, in `out` if it is given.

        Where no number may be read it takes all the steps.
        """
        near = 4 * torch.finfo(scores.dtype).eps
        reads = chunk.operands.reads
        for _ in range(steps):
            # By how much the weights pass 1, the sink's among them.
            weights = torch.sub(scores, tau, out=out).relu_()
            excess = weights.sum(-1, keepdim=True) - 1
            excess += (chunk.sink - tau).relu()
            if reads and excess.max() <= near:
                break

            # The step: the excess over the number of weights. To add signs is faster than to count bools.
            number = torch.sign(weights, out=signs).sum(-1, keepdim=True)
            number += chunk.sink > tau
            # Of some of the keys the sum may be too small already: then τ stays.
            excess.clamp_(min=0)
            step = excess / number.clamp_(min=1)
            tau = tau + step
            if reads and (step <= near * tau.abs()).all():
                break
        return tau, weights

    def second_pass(self, scores: Tensor, chunk: QueryChunk) -> Tensor:
        return scores.relu_()

    def gradient(self, d: Tensor, weights: Tensor, scores: Tensor, chunk: QueryChunk) -> Tensor:
        signs = torch.sign(weights, out=chunk.scratch(1))
        number = signs.sum(-1, keepdim=True)
        number += chunk.sink > -chunk.statistic
        where_positive(d, weights, 0, grad_input=d)
        # A move of τ takes from all that have weight alike.
        mean = d.sum(-1, keepdim=True).div_(number)
        d.sub_(mean)
        return where_positive(d, weights, 0, grad_input=d)


class Stick(Weighting):
    """Stick-breaking: each key takes a share σ(score) of the weight that later keys leave.

    (Tan et al. 2025.) The weight of s is σ(z_s) Π (1 − σ(z_r)) over the keys r between s and the query; the query's own
    key takes none. The nearest key comes first, which tells the order without positions. The rest goes to no key. Later
    keys get nothing, and a mask that shows them is refused: it means nothing for the keys of another sequence.
    """

    name = "stick"
    no_sink = "a share that no key takes goes nowhere already"
    is_causal = True

    def weights(self, scores: Scores) -> Scores:
        T, S = scores.shape[-2:]
        earlier = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T - 1)
        scores = scores.masked_fill(~earlier, -torch.inf)
        left = F.logsigmoid(-scores)  # ln of the share that a key leaves: 0 for a hidden key
        after = cumulative_sum(left.flip(-1), -1).flip(-1) - left  # the sum over later keys: ln of their rest
        return (F.logsigmoid(scores) + after).exp()


@passes_of(Stick)
class StickPasses(SoftmaxPasses):
    """From the nearest key on: after a key the product of 1 - σ(s) is left.

    The key's weight is the difference that it makes. Let u be 1 - σ(s), and C_j the sum of d w up to key j, less the
    sum over all. The gradient of s_j is C_j - u_j C_{j-1}.
    """

    factor = bias_factor = -1.0  # so that a sigmoid gives u
    hidden = torch.inf
    reverse = True
    strict = True
    centred = False

    def first_pass(self, scores: Tensor, chunk: QueryChunk) -> FirstPass:
        weights = self.second_pass(scores, chunk)
        # Where no query of the chunk has anything left, no key farther away needs a look.
        if not chunk.operands.reads:
            return weights, None, None
        left = chunk.scratch(1, 1)
        lasts = left.amax((0, 1)) >= torch.finfo(scores.dtype).tiny
        chunk.used = int(lasts.sum())
        return weights, None, None

    def second_pass(self, scores: Tensor, chunk: QueryChunk) -> Tensor:
        left = chunk.scratch(1, 1)
        before = left[..., :-1]
        after = left[..., 1:]
        left[..., 0] = 1
        torch.cumprod(scores.sigmoid_(), -1, out=after)
        return torch.sub(before, after, out=chunk.scratch(2))

    def gradient(self, d: Tensor, weights: Tensor, scores: Tensor, chunk: QueryChunk) -> Tensor:
        sums = chunk.scratch(1, 1)
        before = sums[..., :-1]
        after = sums[..., 1:]
        sums[..., 0] = 0
        torch.mul(d, weights, out=after)
        sums.cumsum_(-1)
        sums.sub_(sums[..., -1:].clone())  # of all exactly, or far keys would feel its rounding
        return torch.addcmul(after, scores, before, value=-1, out=d)
