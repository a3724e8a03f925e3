"""Attention by chunks of queries: exact, without a (T, S) matrix, at about the price of torch's fused kernel.

functions.py says what each form is; this says the same for texts that are long. A chunk of queries meets the keys in
its reach, and the chunks' results are those of the whole. One skeleton, `forward_pass` and `backward_pass`, serves all
forms. A weighting puts three things into it: weights from scores, what it keeps of a row, and the gradient of scores
from the gradient of weights. The second pass computes the scores again instead of remembering them.

What makes that cheap on a CPU, where a product of 64 channels costs 1.6 ns for a pair of tokens and all else counts:

workspaces  scores and their gradients lie in buffers that every chunk overwrites: a step in place costs 0.1 ns.
channels    a number of each row or of each key is added to all scores by the product itself, as a channel of the
            queries that meets a 1 in the keys, or the reverse: a bias that is a sum, row_t + column_s (ALiBi, the
            forget gate), and minus the logsumexp, of which the second pass makes the weights without a maximum.
reach       keys after the chunk, before its window or before its documents are not touched.
base 2      exp2 takes half the time of exp, so softmax gets its scores times log2(e).
transposes  gradients of keys and values add up as (D, S): products of row-major matrices are faster by a quarter.

In half precision the products are in the inputs' type and all else in float32; a number that rides as a channel is then
three, which sum to its 24 bits. The passes are custom operators, opaque to torch.compile, because stick and sparsemax
look at numbers to know when to stop. Second derivatives are refused.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = {"cpu": 64}
"""Queries of a chunk: on one thread 64 and 128 cost the same, 32 and 256 up to a fifth more."""
ROWS_ELSEWHERE = 512
LOG2E = math.log2(math.e)
NEVER = -(2.0**14)
"""A score that gets no weight, and that fp16 can hold."""
# Steps that torch's own backward passes consist of, which write where they are told to.
sigmoid_gradient = torch.ops.aten.sigmoid_backward.grad_input
where_positive = torch.ops.aten.threshold_backward.grad_input


class Softmax:
    """exp(score) / Σ exp(score), whose gradient is w (d - Σ w d), d the gradient of the weights."""

    factor = LOG2E
    """Times which the products arrive."""
    bias_factor = LOG2E
    """Times which bias and sink do."""
    hidden = -torch.inf
    """The score of a key that a query does not see."""
    reverse = False
    """Whether keys come from the latest to the first."""
    strict = False
    """Whether a query does not see its own key."""
    biased = True
    """Whether the scores arrive with their bias; else the weighting adds it."""
    shifted = True
    """Whether, in the second pass, the scores arrive with the row's statistic added."""
    centred = True
    """Whether gradient() gets d - Σ w d in place of d."""
    slope = 1.0
    """Of the gradient of natural scores in what inner_gradient() returns."""

    def shift(self, chunk: "Chunk") -> Tensor | None:
        """Return a number of each row that is added to its scores."""
        return None

    def weigh(self, scores: Tensor, chunk: "Chunk") -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return weights, a factor of each row's result, and the statistic of each row. May overwrite the scores."""
        top = scores.amax(-1, keepdim=True)
        if chunk.sink is not None:
            top = torch.maximum(top, chunk.sink)
        scores.sub_(top).exp2_()
        total = scores.sum(-1, keepdim=True)
        if chunk.sink is not None:
            total += torch.exp2(chunk.sink - top)  # one more key, with nothing to give
        return scores, total.reciprocal(), -(top + total.log2())

    def again(self, scores: Tensor, chunk: "Chunk") -> Tensor:
        """Return the weights in the second pass."""
        return scores.exp2_()

    def gradient(self, d: Tensor, scores: Tensor, weights: Tensor, chunk: "Chunk") -> Tensor:
        """Return the gradient of the biased scores, in place of d, that of the weights."""
        return d.mul_(weights)

    def inner_gradient(self, d: Tensor, scores: Tensor) -> Tensor:
        """Return the gradient of the products, in place of d, that of the biased scores."""
        return d


class Softcap(Softmax):
    """Softmax of cap tanh(s / cap) + bias.

    With r = 1 / (1 + exp(2 s / cap)) the capped score is cap - 2 cap r, and its slope 4 r (1 - r).
    """

    slope = 4.0
    biased = False
    shifted = False

    def __init__(self, cap: float) -> None:
        self.cap = cap * LOG2E
        self.factor = 2 * LOG2E / cap
        self.hidden = 0.0  # the capped scores are hidden, not the products

    def capped(self, scores: Tensor, chunk: "Chunk", added: Tensor) -> Tensor:
        """Turn the scores into r, and return cap - 2 cap r plus what is added."""
        scores.exp2_().add_(1).reciprocal_()
        capped = torch.add(added + self.cap, scores, alpha=-2 * self.cap, out=chunk.space(1))
        chunk.add_bias(capped)
        return chunk.hide(capped, -torch.inf)

    def weigh(self, scores: Tensor, chunk: "Chunk") -> tuple[Tensor, Tensor | None, Tensor | None]:
        return super().weigh(self.capped(scores, chunk, scores.new_zeros(1)), chunk)

    def again(self, scores: Tensor, chunk: "Chunk") -> Tensor:
        return self.capped(scores, chunk, chunk.statistic).exp2_()

    def inner_gradient(self, d: Tensor, scores: Tensor) -> Tensor:
        return sigmoid_gradient(d, scores, grad_input=d)


class Sigmoid(Softmax):
    """σ(s - ln n), n the keys that the query sees."""

    factor = bias_factor = 1.0
    shifted = False
    centred = False

    def shift(self, chunk: "Chunk") -> Tensor | None:
        return -chunk.seen().log()

    def weigh(self, scores: Tensor, chunk: "Chunk") -> tuple[Tensor, Tensor | None, Tensor | None]:
        return scores.sigmoid_(), None, None

    def again(self, scores: Tensor, chunk: "Chunk") -> Tensor:
        return scores.sigmoid_()

    def gradient(self, d: Tensor, scores: Tensor, weights: Tensor, chunk: "Chunk") -> Tensor:
        return sigmoid_gradient(d, weights, grad_input=d)


class Sparsemax(Softmax):
    """max(0, s - τ), where τ makes the weights sum to 1.

    The sum falls with τ and is convex, so Newton's steps from a τ that is too low never pass it, and no sort is needed.
    The largest score less 1 is such a τ, and so is that of some of the keys. The first steps look at the largest of
    every 64th key alone, which is nearly all that matter.
    """

    factor = bias_factor = 1.0
    centred = False

    def weigh(self, scores: Tensor, chunk: "Chunk") -> tuple[Tensor, Tensor | None, Tensor | None]:
        tau = scores.amax(-1, keepdim=True) - 1
        if chunk.sink is not None:
            tau = torch.maximum(tau, chunk.sink - 1)
        width = scores.shape[-1] // 64 * 64
        if width > 128:
            large = scores[..., :width].unflatten(-1, (-1, 64)).amax(-2)  # (N, rows, keys) -> (N, rows, 64)
            tau, _ = self.newton(large, tau, 4, torch.empty_like(large), torch.empty_like(large), chunk)
        tau, weights = self.newton(scores, tau, 50, chunk.space(1), chunk.space(2), chunk)
        return weights, None, -tau

    def newton(
        self, scores: Tensor, tau: Tensor, steps: int, weights: Tensor, positive: Tensor, chunk: "Chunk"
    ) -> tuple[Tensor, Tensor]:
        near = 4 * torch.finfo(scores.dtype).eps
        for _ in range(steps):
            torch.sub(scores, tau, out=weights).relu_()
            excess = weights.sum(-1, keepdim=True).sub_(1)
            number = torch.sign(weights, out=positive).sum(-1, keepdim=True)  # faster than to count with bools
            if chunk.sink is not None:
                excess += (chunk.sink - tau).relu_()
                number += chunk.sink > tau
            if excess.max() <= near:
                break
            # Of some of the keys the sum may be too small already: then τ stays.
            step = excess.clamp_(min=0) / number.clamp_(min=1)
            tau = tau + step
            if (step <= near * tau.abs()).all():
                break
        return tau, weights

    def again(self, scores: Tensor, chunk: "Chunk") -> Tensor:
        return scores.relu_()

    def gradient(self, d: Tensor, scores: Tensor, weights: Tensor, chunk: "Chunk") -> Tensor:
        number = torch.sign(weights, out=chunk.space(1)).sum(-1, keepdim=True)
        if chunk.sink is not None:
            number += chunk.sink > -chunk.statistic
        where_positive(d, weights, 0, grad_input=d)
        d.sub_(d.sum(-1, keepdim=True).div_(number))  # moving τ takes from all that have weight alike
        return where_positive(d, weights, 0, grad_input=d)


class Stick(Softmax):
    """From the nearest key on, what is left is the product of 1 - σ(s); a weight is by how much its key lessens it.

    With u = 1 - σ(s) and C_j the sum of d w up to key j, less that of all, the gradient of s_j is C_j - u_j C_{j-1}.
    """

    factor = bias_factor = -1.0  # so that a sigmoid gives u
    hidden = torch.inf
    reverse = True
    strict = True
    shifted = False
    centred = False

    def weigh(self, scores: Tensor, chunk: "Chunk") -> tuple[Tensor, Tensor | None, Tensor | None]:
        weights = self.again(scores, chunk)
        # Where no query of the chunk has anything left, no key farther away needs a look.
        spent = chunk.space(1, 1).amax((0, 1)) < torch.finfo(scores.dtype).tiny
        chunk.used = int((~spent).sum())
        return weights, None, None

    def again(self, scores: Tensor, chunk: "Chunk") -> Tensor:
        left = chunk.space(1, 1)
        left[..., 0] = 1
        torch.cumprod(scores.sigmoid_(), -1, out=left[..., 1:])
        return torch.sub(left[..., :-1], left[..., 1:], out=chunk.space(2))

    def gradient(self, d: Tensor, scores: Tensor, weights: Tensor, chunk: "Chunk") -> Tensor:
        sums = chunk.space(1, 1)
        sums[..., 0] = 0
        torch.mul(d, weights, out=sums[..., 1:])
        sums.cumsum_(-1)
        sums.sub_(sums[..., -1:].clone())  # of all exactly, or far keys would feel its rounding
        return torch.addcmul(sums[..., 1:], scores, sums[..., :-1], value=-1, out=d)


def weighting(name: str, cap: float) -> Softmax:
    kinds = {"softmax": Softmax, "sigmoid": Sigmoid, "sparsemax": Sparsemax, "stick": Stick}
    return Softcap(cap) if name == "softcap" else kinds[name]()


class Text:
    """What both passes need: queries, keys and values as products want them, and buffers for a chunk's scores.

    Heads come as N = B Hkv key heads, each with the G = H / Hkv query heads that share it, so that no key is copied.
    """

    def __init__(
        self,
        form: Softmax,
        q: Tensor,  # (B, H, T, D)
        k: Tensor,  # (B, Hkv, S, D)
        v: Tensor,  # (B, Hkv, S, Dv)
        row: Tensor | None,  # (B, H, T)
        column: Tensor | None,  # (B, H, S)
        sink: Tensor | None,  # (H,)
        asked: Tensor | None,  # (B, H, T, n): what a query adds to the scores of the keys of each block
        given: Tensor | None,  # (B, Hkv, S, n): 1 in the channel of a key's block, else 0
        doc_starts: Tensor | None,  # (B, T)
        mask: Tensor | None,  # bool, (B, H, T, S) or ones in place of any of these
        window: int | None,
        scale: float,
    ) -> None:
        (B, H, T, self.D), (Hkv, self.S) = q.shape, k.shape[1:3]
        self.form, self.window, self.mask = form, window, mask
        self.B, self.N, self.G, self.T = B, B * Hkv, H // Hkv, T
        self.rows = min(T, ROWS.get(q.device.type, ROWS_ELSEWHERE))
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        # A CPU multiplies bf16 at least as fast as float32, and fp16 twelve times as slowly.
        self.narrow = self.dtype if q.is_cpu and q.dtype == torch.float16 else q.dtype
        self.factor = form.factor * scale  # of products of q and k in the scores that the form gets
        queries = [(q * self.factor).reshape(self.N, self.G, T, -1)]
        keys = [k.reshape(self.N, self.S, -1)]
        if asked is not None and given is not None:
            queries.append(asked.reshape(self.N, self.G, T, -1))
            keys.append(given.reshape(self.N, self.S, -1))
        self.queries = self.joined(*queries)
        self.plain = self.queries.shape[-1]  # channels that are the same in every chunk
        # After them the keys have a channel for each query head's bias, which every chunk writes anew, and ones.
        self.bias = None
        if row is not None and column is not None:
            row, column = (part.to(self.dtype).reshape(self.N, self.G, -1) for part in (row, column))
            self.bias = row, column
            if form.biased:
                keys.append(q.new_zeros(self.N, self.S, self.G * self.parts))
        one = q.new_ones(self.N, self.S, self.parts)
        self.keys = self.joined(*keys, one)
        self.values = self.joined(v.reshape(self.N, self.S, -1), one)
        if form.reverse:
            self.keys = self.keys.flip(1)
            self.values = self.values.flip(1)
        self.sink = None
        if sink is not None:
            self.sink = (sink.to(self.dtype) * form.bias_factor).repeat(B).view(self.N, self.G, 1, 1)
        # Where the documents of the batch begin, at the earliest and at the latest: read once for all chunks.
        self.doc_starts = doc_starts
        self.earliest: list[int] | None = None
        self.latest: list[int] | None = None
        if doc_starts is not None:
            self.earliest, self.latest = torch.stack((doc_starts.amin(0), doc_starts.amax(0))).tolist()
        self.buffers: dict[int, Tensor] = {}

    @property
    def parts(self) -> int:
        """Over how many channels a number goes."""
        return 1 if self.narrow == self.dtype else 3

    def joined(self, *channels: Tensor) -> Tensor:
        return torch.cat([part.to(self.narrow) for part in channels], -1)

    def split(self, x: Tensor) -> Tensor:
        """Return numbers (…, n) as (…, parts · n) summands in the type of the products."""
        first = x.to(self.narrow)
        if self.parts == 1:
            return first
        rest = x - first
        second = rest.to(self.narrow)
        return torch.cat((first, second, (rest - second).to(self.narrow)), -1)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        if self.parts == 1:
            return torch.bmm(a, b, out=out)
        return out.copy_(torch.bmm(a, b))

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        if self.parts == 1:
            total.baddbmm_(a, b)
        else:
            total.add_(torch.bmm(a, b))


class Chunk:
    """Queries `start` to `end` of a text, the keys in their reach, and workspaces for their scores (N, G · n, keys)."""

    statistic: Tensor
    """In the second pass what the first kept of each row, (N, G · n, 1)."""

    def __init__(self, text: Text, start: int, most: int) -> None:
        """most: how many keys to look at, counted from the latest; `whole` says whether these are all."""
        self.text = text
        self.start = start
        self.end = min(start + text.rows, text.T)
        self.n = self.end - start
        self.own = text.S - text.T + start  # the position of the first query
        self.last = self.own + self.n  # after the keys in reach
        first = 0
        if text.window is not None:
            first = max(first, self.own - text.window + 1)
        if text.earliest is not None:
            first = max(first, min(text.earliest[start : self.end]))
        self.whole = self.last - first <= most
        self.first = max(first, self.last - most)
        self.length = self.last - self.first
        self.used = self.length
        self.now = slice(start, self.end)
        self.places = slice(self.first, self.last)  # of the keys in reach
        # The same in the text's keys and values, which may be reversed.
        self.reach = slice(text.S - self.last, text.S - self.first) if text.form.reverse else self.places
        self.shape = (text.N, text.G * self.n, self.length)
        self.allowed: Tensor | None = None
        self.empty: Tensor | None = None
        if text.mask is not None:
            self.read_mask(text.mask)
        self.sink: Tensor | None = None
        if text.sink is not None:
            self.sink = text.sink.expand(-1, -1, self.n, -1).flatten(1, 2)  # (N, G, n, 1) -> (N, G · n, 1)

    def space(self, number: int, more: int = 0) -> Tensor:
        """Return a workspace for the scores, with `more` keys."""
        text = self.text
        if number not in text.buffers:
            largest = text.N * text.G * text.rows * (text.S + 1)
            text.buffers[number] = torch.empty(largest, dtype=text.dtype, device=text.queries.device)
        N, rows, length = self.shape
        return text.buffers[number][: N * rows * (length + more)].view(N, rows, length + more)

    def by_head(self, x: Tensor) -> Tensor:
        """(N, G · n, …) -> (B, H, n, …), as masks are; of what all heads share, (B, n, …) -> (B, 1, n, …)."""
        return x.view(self.text.B, -1, self.n, x.shape[-1])

    def read_mask(self, mask: Tensor) -> None:
        """Put the mask, causality, window and documents together; a query that sees nothing is let see all.

        Its result is nothing, and gives no gradient: see `allowed_keys` in contract.py.
        """
        text = self.text
        mask = mask[..., self.now, :] if mask.shape[-2] > 1 else mask
        mask = mask[..., self.places] if mask.shape[-1] > 1 else mask
        key = torch.arange(self.first, self.last, device=mask.device)
        query = torch.arange(self.own, self.last, device=mask.device)[:, None]
        allowed = mask & (key <= query)
        if text.window is not None:
            allowed = allowed & (key > query - text.window)
        if text.doc_starts is not None:
            allowed = allowed & (key >= text.doc_starts[:, None, self.now, None])
        self.empty = ~allowed.any(-1, keepdim=True)  # (B or 1, H or 1, n, 1)
        allowed = allowed | self.empty
        self.allowed = allowed & (key < query) if text.form.strict else allowed

    def without_empty(self, x: Tensor) -> Tensor:
        """Return x (N, G, n, D), with zeros for queries that see nothing."""
        if self.empty is None:
            return x
        return self.by_head(x).masked_fill(self.empty, 0).view(x.shape)

    def hide(self, scores: Tensor, hidden: float) -> Tensor:
        """Put `hidden` where a query does not see a key."""
        text, n, device = self.text, self.n, scores.device
        if self.allowed is not None:
            unseen = ~self.allowed
            self.by_head(scores).masked_fill_(unseen.flip(-1) if text.form.reverse else unseen, hidden)
            return scores
        # Causality: a triangle over the last n keys.
        later = torch.ones(n, n, dtype=torch.bool, device=device).triu(0 if text.form.strict else 1)
        self.add_where(scores, later, hidden, self.length - n)
        # A window: another over the first ones. Query i sees no key up to place `out` + i of the reach.
        if text.window is not None:
            out = self.own - text.window - self.first
            width = min(out + n, self.length)
            if width > 0:
                place = torch.arange(width, device=device)
                self.add_where(scores, place <= out + torch.arange(n, device=device)[:, None], hidden, 0)
        # Documents: of the keys before the last one to begin in the chunk, those before a query's own.
        if text.doc_starts is not None and text.latest is not None:
            end = min(max(text.latest[self.now]), self.last)
            if end > self.first:
                place = torch.arange(self.first, end, device=device)
                self.add_where(scores, place < text.doc_starts[:, self.now, None], hidden, 0)
        return scores

    def add_where(self, scores: Tensor, where: Tensor, number: float, first: int) -> None:
        """Add a number where (n, keys) or (B, n, keys) is true; first: where in the reach these keys begin."""
        width = where.shape[-1]
        over = scores.new_zeros(where.shape).masked_fill_(where, number)
        if self.text.form.reverse:
            over = over.flip(-1)
            first = self.length - first - width
        if over.ndim == 3:
            over = over[:, None]
        self.by_head(scores)[..., first : first + width].add_(over)

    def seen(self) -> Tensor:
        """Return how many keys each query sees, as (N, G, n, 1) or what broadcasts to it."""
        text = self.text
        if self.allowed is not None:
            number = self.allowed.sum(-1, keepdim=True)  # (B or 1, H or 1, n, 1)
        else:
            number = torch.arange(self.own + 1, self.last + 1, device=text.queries.device)[None, None, :, None]
            if text.doc_starts is not None:
                number = number - text.doc_starts[:, None, self.now, None]
            if text.window is not None:
                number = number.clamp(max=text.window)
        number = number.expand(text.B, text.N * text.G // text.B, -1, -1)
        return number.reshape(text.N, text.G, self.n, 1).to(text.dtype)

    def scores(self, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the scores in a workspace, and the queries with their channels. shift: (N, G, n, 1), added to rows."""
        text = self.text
        channels = [text.queries[:, :, self.now]]
        if text.bias is not None and text.form.biased:
            row, column = self.near_bias()
            written = text.keys[:, self.reach, text.plain : text.plain + text.G * text.parts]
            written.copy_(text.split(column.mT))  # (N, G, keys) -> (N, keys, G · parts)
            own_head = torch.eye(text.G, dtype=text.narrow, device=row.device).repeat(1, text.parts)
            channels.append(own_head[:, None].expand(text.N, -1, self.n, -1))  # (G, G · parts) -> (N, G, n, G · parts)
            shift = row if shift is None else row + shift
        if shift is not None:
            channels.append(text.split(shift))
        queries = torch.cat(channels, -1).flatten(1, 2)  # (N, G, n, channels) -> (N, G · n, channels)
        keys = text.keys[:, self.reach, : queries.shape[-1]]
        scores = text.multiply(queries, keys.mT, self.space(0))
        if text.form.hidden:
            self.hide(scores, text.form.hidden)
        return scores, queries

    def near_bias(self) -> tuple[Tensor, Tensor]:
        """Return the bias's rows (N, G, n, 1) and columns (N, G, keys), from which the chunk's own level is taken off.

        Sums of gates run to thousands in a long text, where float32 is coarse. Near keys matter, and theirs are small.
        """
        assert self.text.bias is not None
        row, column = self.text.bias
        middle = self.own + self.n // 2
        level = column[..., middle : middle + 1]
        row = (row[..., self.now] + level) * self.text.form.bias_factor
        column = (column[..., self.places] - level) * self.text.form.bias_factor
        return row[..., None], column.flip(-1) if self.text.form.reverse else column

    def add_bias(self, scores: Tensor) -> None:
        """Add the bias to scores that the product has not added it to."""
        if self.text.bias is not None:
            row, column = self.near_bias()
            by_group = scores.view(self.text.N, self.text.G, self.n, -1)
            by_group.add_(row).add_(column[:, :, None])

    def dropout(self, p: float, generator: torch.Generator) -> Tensor:
        """Return 0 for weights that are dropped and 1 / (1 - p) for others: 16 random bits for each."""
        count = math.prod(self.shape)
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=self.text.queries.device)
        bits = words.random_(-(2**63), None, generator=generator).view(torch.int16)[:count].view(self.shape)
        dropped = round(p * 2**16)
        return (bits >= dropped - 2**15).to(self.text.dtype).mul_(2**16 / (2**16 - dropped))


class ChosenKeys:
    """Hides the keys that an index has not chosen, which are kept as a bit for each pair of tokens."""

    def __init__(self, bits: Tensor) -> None:
        """bits: (B, T, bytes), of the keys in a chunk's reach from the first on."""
        self.bits = bits

    def hide(self, scores: Tensor, chunk: Chunk) -> None:
        """Add NEVER to the scores of other keys."""
        byte = torch.arange(256, device=scores.device)[:, None]
        chosen = byte >> torch.arange(8, device=scores.device) & 1  # (256, 8): the bits of each byte
        hidden = (1 - chosen).to(scores.dtype) * NEVER
        bits = self.bits[:, chunk.now, : -(-chunk.length // 8)]
        self.hidden = F.embedding(bits.int(), hidden).flatten(2)[..., : chunk.length]  # (B, n, keys)
        chunk.by_head(scores).add_(self.hidden[:, None])


class Indexer(ChosenKeys):
    """Scores keys by an index, Σ_j share_tj ReLU(asks_tj · key_s), and chooses the best of each query.

    Its loss, KL(p ‖ softmax of the index over the chosen keys), p the mean of the heads' weights, adds up where the
    weights are at hand, and so does the gradient, softmax - p: the loss alone moves the index.
    """

    def __init__(self, text: Text, asks: Tensor, key: Tensor, share: Tensor, best: int, learns: bool) -> None:
        """asks (B, J, T, Di), key (B, S, Di), share (B, T, J)."""
        super().__init__(torch.zeros(text.B, text.T, -(-text.S // 8), dtype=torch.uint8, device=asks.device))
        self.heads = asks.shape[1]
        self.asks = asks.to(text.dtype) * asks.shape[-1] ** -0.5
        self.key = key.to(text.dtype)
        self.share = share.to(text.dtype) * self.heads**-0.5
        self.best = best
        self.learns = learns
        self.loss = self.asks.new_zeros(())
        self.gradients = (
            [torch.zeros_like(t) for t in (self.asks, self.key.mT.contiguous(), self.share)] if learns else []
        )

    def hide(self, scores: Tensor, chunk: Chunk) -> None:
        asks = self.asks[:, :, chunk.now].flatten(1, 2)  # (B, J, n, Di) -> (B, J · n, Di)
        found = torch.bmm(asks, self.key[:, chunk.places].mT).relu_()
        self.found = found.unflatten(1, (self.heads, -1))  # (B, J, n, keys)
        self.index = (self.found * self.share[:, chunk.now].mT[..., None]).sum(1)  # (B, n, keys)
        index = chunk.hide(self.index, -torch.inf).clone()
        gap = tie_gap(index.nan_to_num(neginf=0))
        own = torch.arange(chunk.n, device=index.device)
        index[:, own, chunk.length - chunk.n + own] = torch.inf  # a token always keeps itself
        chosen = best_of(index, self.best, gap)
        eights = F.pad(chosen, (0, -chunk.length % 8)).unflatten(-1, (-1, 8)).to(index.dtype)
        powers = 2.0 ** torch.arange(8, device=index.device, dtype=index.dtype)
        self.bits[:, chunk.now, : eights.shape[2]] = (eights @ powers).to(torch.uint8)
        super().hide(scores, chunk)

    def learn(self, weights: Tensor, factor: Tensor, chunk: Chunk) -> None:
        """Add to the loss and to its gradients. weights: those of each head, less a factor of each row."""
        if not self.learns:
            return
        weights, factor = chunk.by_head(weights), chunk.by_head(factor)
        wanted = weights[:, 0] * factor[:, 0]  # (B, n, keys)
        for h in range(1, weights.shape[1]):
            wanted.addcmul_(weights[:, h], factor[:, h])
        wanted /= wanted.sum(-1, keepdim=True)
        found = self.index.clamp_min_(NEVER).add_(self.hidden).log_softmax(-1)
        surprise = wanted.clamp_min(torch.finfo(wanted.dtype).tiny).log2_().mul_(1 / LOG2E).sub_(found).mul_(wanted)
        d = found.mul_(LOG2E).exp2_().sub_(wanted)
        if chunk.empty is not None:
            surprise.masked_fill_(chunk.empty[:, 0], 0)
            d.masked_fill_(chunk.empty[:, 0], 0)
        self.loss += surprise.sum()
        d_asks, d_key, d_share = self.gradients
        each = d[:, None]
        d_share[:, chunk.now] = (each * self.found).sum(-1).mT * self.heads**-0.5
        each = each * self.share[:, chunk.now].mT[..., None]  # (B, J, n, keys)
        each = where_positive(each, self.found, 0, grad_input=each).flatten(1, 2)
        d_asks[:, :, chunk.now] = (each @ self.key[:, chunk.places]).unflatten(1, (self.heads, -1))
        d_key[..., chunk.places].baddbmm_(self.asks[:, :, chunk.now].flatten(1, 2).mT, each)


def tie_gap(index: Tensor) -> Tensor:
    """Return the gap (…, 1) up to which scores of a row (…, keys) are equal: 32 roundings of its largest one.

    In float32 the scores of one token, its key from a full pass or from decoding, differ by up to 11 roundings.
    """
    return 32 * torch.finfo(index.dtype).eps * index.abs().amax(-1, keepdim=True)


def best_of(index: Tensor, best: int, gap: Tensor) -> Tensor:
    """Return the `best` keys of each row (…, keys), of equals the nearer; none at -inf.

    Scores are equal if no gap in their order is wider than `gap`.
    """
    finite = index > -torch.inf
    if index.shape[-1] <= best:
        return finite
    least, first_out = index.topk(best + 1, sorted=False).values.topk(2, -1, largest=False).values.flip(-1).split(1, -1)
    chosen = finite & (index >= least)
    tied = (least - first_out <= gap).squeeze(-1)
    if tied.any():
        # A sort tells which ones are equal to the last that is chosen, and of these the nearer ones are.
        ordered, keys = index[tied].sort(descending=True)  # (rows, keys)
        place = F.pad((ordered[:, :-1] - ordered[:, 1:] > gap[tied]).cumsum(-1), (1, 0))  # the same for equals
        last = place[:, best - 1, None]
        place = torch.empty_like(place).scatter(-1, keys, place)
        before, equal = place < last, place == last
        room = best - before.sum(-1, keepdim=True)
        chosen[tied] = (before | equal & (equal.flip(-1).cumsum(-1).flip(-1) <= room)) & finite[tied]
    return chosen


def forward_pass(text: Text, dropout_p: float, seed: int, indexer: Indexer | None) -> tuple[Tensor, Tensor, list[int]]:
    """Return the results (N, G, T, Dv), the rows' statistic (N, G, T, 1), and how many keys each chunk looked at."""
    form = text.form
    Dv = text.values.shape[-1] - text.parts
    y = torch.empty(text.N, text.G, text.T, Dv, dtype=text.dtype, device=text.queries.device)
    statistic = y.new_zeros(text.N, text.G, text.T, 1)
    generator = torch.Generator(y.device).manual_seed(seed)
    lengths = []
    likely = text.S
    for start in range(0, text.T, text.rows):
        # A stick may be spent before the last key: try what the chunk before looked at and some more, then all.
        for most in (likely, text.S):
            chunk = Chunk(text, start, most)
            scores, _ = chunk.scores(form.shift(chunk))
            if indexer is not None:
                indexer.hide(scores, chunk)
            weights, factor, number = form.weigh(scores, chunk)
            if chunk.whole or chunk.used < chunk.length:
                break
        lengths.append(chunk.length if dropout_p else min(chunk.used, chunk.length))
        likely = chunk.used + 2 * text.rows
        if indexer is not None and factor is not None:
            indexer.learn(weights, factor, chunk)
        if dropout_p:
            weights.mul_(chunk.dropout(dropout_p, generator))
        part = torch.bmm(weights.to(text.narrow), text.values[:, chunk.reach, :Dv]).to(text.dtype)  # (N, G · n, Dv)
        if factor is not None:
            part.mul_(factor)
        y[:, :, chunk.now] = chunk.without_empty(part.unflatten(1, (text.G, -1)))
        if number is not None:
            statistic[:, :, chunk.now] = number.unflatten(1, (text.G, -1))
    return y, statistic, lengths


def backward_pass(
    text: Text,
    dy: Tensor,
    y: Tensor,
    statistic: Tensor,
    lengths: list[int],
    dropout_p: float,
    seed: int,
    chosen: ChosenKeys | None,
    bias_learns: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q (N, G, T, D), k (N, S, D), v (N, S, Dv), row (N, G, T) and column (N, G, S)."""
    form, N, G, D = text.form, text.N, text.G, text.D
    Dv = text.values.shape[-1] - text.parts
    delta = (dy.to(text.dtype) * y).sum(-1, keepdim=True)  # (N, G, T, 1): of each row Σ d w
    dq = torch.empty(N, G, text.T, D, dtype=text.dtype, device=y.device)
    dk = dq.new_zeros(N, D, text.S)
    dv = dq.new_zeros(N, Dv, text.S)
    d_row = dq.new_zeros(N, G, text.T)
    d_column = dq.new_zeros(N, G, text.S)
    generator = torch.Generator(y.device).manual_seed(seed)
    for start, length in zip(range(0, text.T, text.rows), lengths, strict=True):
        # The weights, once more.
        chunk = Chunk(text, start, length)
        now, reach = chunk.now, chunk.reach
        rows = statistic[:, :, now]
        chunk.statistic = rows.flatten(1, 2)
        scores, queries = chunk.scores(rows if form.shifted else form.shift(chunk))
        if chosen is not None:
            chosen.hide(scores, chunk)
        weights = form.again(scores, chunk)

        # Their gradient, less Σ d w, which rides as a channel that meets the values' ones.
        arrived = chunk.without_empty(dy[:, :, now])  # (N, G, n, Dv)
        rides = form.centred and not dropout_p
        less = [text.split(-delta[:, :, now])] if rides else []
        gradient = text.joined(arrived, *less).flatten(1, 2)  # (N, G · n, Dv and channels)
        d = text.multiply(gradient, text.values[:, reach, : gradient.shape[-1]].mT, chunk.space(3))
        dropped = weights
        if dropout_p:
            kept = chunk.dropout(dropout_p, generator)
            d.mul_(kept)
            if form.centred:
                d.sub_(delta[:, :, now].flatten(1, 2))
            dropped = kept.mul_(weights)
        text.add_product(dv[..., reach], gradient[..., :Dv].mT, dropped.to(text.narrow))

        # The gradient of the scores, and what it comes to for queries, keys and bias.
        d = form.gradient(d, scores, weights, chunk)
        if bias_learns:
            by_group = d.view(N, G, chunk.n, -1)
            d_row[..., now] = by_group.sum(-1)
            d_column[..., reach] += by_group.sum(2)
        d = form.inner_gradient(d, scores).to(text.narrow)
        part = torch.bmm(d, text.keys[:, reach, :D])  # (N, G · n, D)
        dq[:, :, now] = part.unflatten(1, (G, -1))
        text.add_product(dk[..., reach], queries[..., :D].mT, d)
    if form.reverse:
        dk, dv, d_column = (t.flip(-1) for t in (dk, dv, d_column))
    dq.mul_(form.slope * text.factor / form.factor)
    dk.mul_(form.slope / form.factor)
    return dq, dk.mT, dv.mT, d_row, d_column


# The operators take no objects, so a text comes as its tensors and a weighting by its name.


@torch.library.custom_op("tinygpt::chunked_attention", mutates_args=())
def forward_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    sink: Tensor | None,
    asks: Tensor | None,
    key: Tensor | None,
    share: Tensor | None,
    asked: Tensor | None,
    given: Tensor | None,
    doc_starts: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    form: str,
    cap: float,
    window: int | None,
    dropout_p: float,
    scale: float,
    best: int,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the result (B, H, T, Dv), what the second pass needs, and an index's loss with its gradients."""
    text = Text(weighting(form, cap), q, k, v, row, column, sink, asked, given, doc_starts, mask, window, scale)
    indexer = None
    if asks is not None and key is not None and share is not None:
        indexer = Indexer(text, asks, key, share, best, learns)
    y, statistic, lengths = forward_pass(text, dropout_p, 0 if seed is None else int(seed), indexer)
    bits = text.queries.new_empty(0, dtype=torch.uint8) if indexer is None else indexer.bits
    loss = statistic.new_zeros(())
    d_asks, d_key, d_share = (statistic.new_empty(0) for _ in range(3))
    if indexer is not None and learns:
        loss = indexer.loss
        d_asks, d_key, d_share = indexer.gradients
        d_asks = d_asks * d_asks.shape[-1] ** -0.5
        d_key = d_key.mT.contiguous()
    y = y.to(v.dtype).view(*q.shape[:-1], -1)  # (N, G, T, Dv) -> (B, H, T, Dv)
    return y, statistic, torch.tensor(lengths), bits, loss, d_asks, d_key, d_share


@forward_operator.register_fake
def _(q, k, v, row, column, sink, asks, key, share, *rest):
    B, H, T, _ = q.shape
    statistic = q.new_empty(B * k.shape[1], H // k.shape[1], T, 1, dtype=torch.promote_types(q.dtype, torch.float32))
    chunks = -(-T // ROWS.get(q.device.type, ROWS_ELSEWHERE))
    bits = (0,) if asks is None else (B, T, -(-k.shape[2] // 8))
    learned = [statistic.new_empty(t.shape if rest[-1] else 0) for t in (asks, key, share)] if asks is not None else []
    learned = learned or [statistic.new_empty(0) for _ in range(3)]
    return (
        v.new_empty(B, H, T, v.shape[-1]), statistic, torch.empty(chunks, dtype=torch.int64, device="cpu"),
        q.new_empty(bits, dtype=torch.uint8), statistic.new_empty(()), *learned,
    )  # fmt: skip


@torch.library.custom_op("tinygpt::chunked_attention_backward", mutates_args=())
def backward_operator(
    dy: Tensor,
    y: Tensor,
    statistic: Tensor,
    lengths: Tensor,
    bits: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    sink: Tensor | None,
    asked: Tensor | None,
    given: Tensor | None,
    doc_starts: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    form: str,
    cap: float,
    window: int | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, row and column."""
    text = Text(weighting(form, cap), q, k, v, row, column, sink, asked, given, doc_starts, mask, window, scale)
    dy, y = (t.reshape(text.N, text.G, text.T, -1) for t in (dy, y))
    found = backward_pass(
        text, dy, y, statistic, lengths.tolist(), dropout_p, 0 if seed is None else int(seed),
        chosen=ChosenKeys(bits) if bits.numel() else None, bias_learns=row is not None or sink is not None,
    )  # fmt: skip
    shapes = (q.shape, k.shape, v.shape, q.shape[:-1], (*q.shape[:2], k.shape[2]))
    dtypes = (q.dtype, k.dtype, v.dtype, text.dtype, text.dtype)
    dq, dk, dv, d_row, d_column = (
        t.to(dtype).reshape(shape).contiguous() for t, dtype, shape in zip(found, dtypes, shapes, strict=True)
    )
    return dq, dk, dv, d_row, d_column


@backward_operator.register_fake
def _(dy, y, statistic, lengths, bits, q, k, v, *rest):
    row = statistic.new_empty(q.shape[:-1])
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        row,
        row.new_empty(*q.shape[:2], k.shape[2]),
    )


def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keep for the second pass what it needs: of a learned index its gradients alone."""
    q, k, v, row, column, sink, asks, key, share, *others = inputs
    ctx.save_for_backward(*output, q, k, v, row, column, sink, *others[:5])
    ctx.rest = others[5:10]
    ctx.dtypes = [None if t is None else t.dtype for t in (asks, key, share)]


def gradients(ctx: Any, dy: Tensor, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = list(ctx.saved_tensors)
    y, statistic, lengths, bits, _, *learned = saved[:8]
    row, column, sink = saved[11:14]
    found = backward_operator(dy, y, statistic, lengths, bits, *saved[8:], *ctx.rest)
    dq, dk, dv, d_row, d_column = found
    d_bias = (None, None) if row is None else (d_row.to(row.dtype), d_column.to(column.dtype))
    # If all logits of a row rise alike nothing changes, so a sink's gradient is minus those of the others.
    d_sink = None if sink is None else -d_row.sum((0, 2)).to(sink.dtype)
    d_loss = d_outputs[3]
    d_index = [
        None if dtype is None or not part.numel() else (d_loss * part).to(dtype)
        for dtype, part in zip(ctx.dtypes, learned, strict=True)
    ]
    return dq, dk, dv, *d_bias, d_sink, *d_index, *[None] * 12


forward_operator.register_autograd(gradients, setup_context=keep)


class Index(NamedTuple):
    """What chooses each query's keys: see Indexer."""

    asks: Tensor  # (B, J, T, Di)
    key: Tensor  # (B, S, Di)
    share: Tensor  # (B, T, J)
    best: int
    learns: bool


def is_transformed() -> bool:
    """Return whether somebody looks into the operations: torch.export, a trace, or torch.func, as vmap does."""
    looking = torch.compiler.is_exporting() or torch.jit.is_tracing()
    return looking or torch._C._functorch.peek_interpreter_stack() is not None


def by_chunks(form: str, **options: Any) -> Callable[[Any], Any]:
    """Mark an attention function as one that `chunked` computes too, for long texts: see MultiHeadAttention.attend."""

    def mark(function: Any) -> Any:
        function.by_chunks = partial(chunked, form, **options)
        return function

    return mark


def chunked(form: str, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """Return the result of chunked_with_index, without an index."""
    return chunked_with_index(form, q, k, v, **more)[0]


def chunked_with_index(
    form: str, q: Tensor, k: Tensor, v: Tensor, *, row: Tensor | None = None, column: Tensor | None = None,
    sink: Tensor | None = None, blocks: tuple[Tensor, Tensor] | None = None, index: Index | None = None,
    doc_starts: Tensor | None = None, mask: Tensor | None = None, window: int | None = None, dropout_p: float = 0.0,
    scale: float | None = None, cap: float = 0.0, one_more: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return causal attention (B, H, T, Dv) of queries (B, H, T, D), the last T of S, to keys (B, Hkv, S, D).

    And the loss of the index, 0 without one.

    form: softmax, softcap, sigmoid, sparsemax or stick. row and column, which broadcast to (B, H, T) and (B, H, S): a
    bias, their sum. sink (H,): the logit of one more key, which gives nothing. blocks: see block_channels. doc_starts
    (B, T): the first key that a query sees. mask, bool, broadcasts to (B, H, T, S). A query that sees nothing gets
    zeros.
    """
    (B, H, T, D), S = q.shape, k.shape[2]
    if row is not None and column is not None:
        row, column = row.expand(B, H, T), column.expand(B, H, S)
    unseeing = None
    if doc_starts is not None:
        position = torch.arange(S - T, S, device=q.device)
        unseeing = (doc_starts > position)[:, None, :, None]
        doc_starts = torch.minimum(doc_starts, position)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    if one_more:
        sink = q.new_zeros(H) if sink is None else F.softplus(sink)  # ln(e^0 + e^sink)
    seed = torch.randint(2**62, ()) if dropout_p else None
    asks, key, share, *choice = (None, None, None, 0, False) if index is None else index
    asked, given = (None, None) if blocks is None else blocks
    scale = D**-0.5 if scale is None else scale
    y, _, _, _, loss, *_ = forward_operator(
        q, k, v, row, column, sink, asks, key, share, asked, given, doc_starts, mask, seed,
        form, cap, window, dropout_p, scale, *choice,
    )  # fmt: skip
    return y if unseeing is None else y.masked_fill(unseeing, 0), loss


@torch.no_grad()
def block_channels(
    q: Tensor, k: Tensor, block: int, best: int, column: Tensor | None = None, doc_starts: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return channels by which queries attend to their own block of keys and the `best` blocks before: see blockwise.

    A query has NEVER in the channels of other blocks, a key has 1 in that of its own. doc_starts, from which blocks are
    counted, only if T = S.
    """
    (B, H, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    # Blocks by their number within the document, and those of all documents one after the other.
    key = torch.arange(S, device=q.device)
    number = each = (key // block).expand(B, S)
    count = blocks = -(-S // block)
    if doc_starts is not None:
        into = key - torch.minimum(doc_starts, key)  # a query that sees nothing is a document of its own
        number = into // block
        each = (into % block == 0).cumsum(-1) - 1
        count, blocks = int(each.max()) + 1, int(number.max()) + 1

    # The mean of each block's keys, and of their bias.
    block_of = torch.arange(count, device=q.device)
    member = (each[..., None] == block_of).to(torch.promote_types(q.dtype, torch.float32))  # (B, S, count)
    mean = member / member.sum(1, keepdim=True).clamp(min=1)
    keys = mean.mT[:, None] @ k.to(mean.dtype)  # (B, Hkv, count, D)
    grouped = q.to(mean.dtype).reshape(B, Hkv, -1, D) * (D**-0.5 if scale is None else scale)
    good = (grouped @ keys.mT).view(B, H, T, count)
    if column is not None:
        good = good + (column.expand(B, H, S).to(mean.dtype) @ mean)[:, :, None]

    # The best of those before a query's own, in its document.
    own, own_number = (x[:, None, S - T :, None] for x in (each, number))  # (B, 1, T, 1)
    good = good.masked_fill((block_of >= own) | (block_of < own - own_number), -torch.inf)
    top = good.topk(min(best, count), -1)
    chosen = torch.zeros_like(good, dtype=torch.bool).scatter(-1, top.indices, top.values > -torch.inf)
    # As channels for numbers within the document.
    channel = torch.arange(blocks, device=q.device)
    at = (own - own_number + channel).clamp(max=count - 1).expand(B, H, T, -1)
    asked = (chosen.gather(-1, at) & (channel < own_number)) | (channel == own_number)
    given = (channel == number[:, None, :, None]).expand(B, Hkv, S, -1)
    return (~asked).to(q.dtype) * NEVER, given.to(k.dtype)
