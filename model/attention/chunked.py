"""Attention by chunks of queries, at about the price of torch's fused kernel.

It is exact, and needs no (T, S) matrix. weighting.py defines the weights; this computes the same for long texts. A
chunk of queries meets the span of keys that any of them sees, and the results of all chunks side by side are the whole.
One skeleton, `forward_pass` and `backward_pass`, serves all weightings. The passes of a weighting add three things to
it: weights from scores, a statistic of each row, and the gradient of scores from the gradient of weights. The second
pass recomputes the scores instead of remembering them.

On a CPU a product of 64 channels costs 1.6 ns for a pair of tokens, so every other step counts. These make it cheap:

scratch     scores and their gradients lie in buffers that every chunk overwrites: a step in place costs 0.1 ns.
statistics  the first pass keeps a number for each row, such as minus its logsumexp. The second pass adds it to the
            scores, and has the weights without a maximum and a sum.
span        keys after the chunk, before its window or before its documents are not touched.
base 2      exp2 takes half the time of exp, so softmax gets its scores times log2(e).
transposes  gradients of keys and values add up as (D, S): products of row-major matrices are faster by a quarter.

In half precision the scores are products in float32. The other products are in the type that the processor multiplies
fastest, and all else in float32. The passes are custom operators, opaque to torch.compile, because stick and sparsemax
look at numbers to know when to stop. On a GPU nothing looks at a number, for which the CPU would wait. Second
derivatives are refused.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.call import Call, Output, scale_of
from model.attention.choice import best_blocks, best_of, block_mask, choose_blocks, tie_gap
from model.attention.weighting import Blockwise, from_key, where_positive
from model.cpu import product_dtype

ROWS_ON_CPU = 128
"""Queries of a chunk.

At 2,048 tokens 64, 192 and 256 cost up to a fifth more (AVX2, one thread and two).
"""
ROWS_OF_SHORT_TEXTS = 64
"""Queries of a chunk below 1,024 tokens.

Fewer pairs of a query and a later key are then computed for nothing.
"""
ROWS_ELSEWHERE = 512
NEVER = -(2.0**14)
"""A score that gets no weight, and that is finite."""


class Inputs(NamedTuple):
    """The tensors that both passes read.

    The operators take them as a list, in which an empty tensor stands for None.
    """

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, Hkv, S, D)
    v: Tensor  # (B, Hkv, S, Dv)
    row: Tensor | None  # (B, H, T)
    column: Tensor | None  # (B, H, S)
    sink: Tensor | None  # (H,)
    index_q: Tensor | None  # (B, J, T, Di)
    index_k: Tensor | None  # (B, S, Di)
    index_w: Tensor | None  # (B, T, J)
    doc_starts: Tensor | None  # (B, T)
    seed: Tensor | None  # (): where dropout begins to draw


class Settings(NamedTuple):
    """The arguments of the operators that are no tensors."""

    weighting: str  # its key
    window: int | None
    dropout_p: float
    scale: float
    best: int  # how many keys an index chooses
    learns: bool  # whether it learns


class Operands:
    """Queries, keys and values as products want them, and buffers for a chunk's scores.

    No key is copied: there are N = B Hkv key heads, each with the G = H / Hkv query heads that share it.
    """

    def __init__(self, inputs: Inputs, settings: Settings) -> None:
        q, k, v = inputs[:3]
        self.inputs = inputs
        self.settings = settings

        # The weighting, types and buffers.
        self.weighting = from_key(settings.weighting)
        assert self.weighting.passes is not None
        self.passes = self.weighting.passes(self.weighting)
        self.dtype = wide_dtype(q)
        self.narrow = product_dtype(q)
        self.device = q.device
        self.rows = chunk_rows(q)
        self.buffers: dict[int, Tensor] = {}
        self.zero = q.new_zeros(1, dtype=self.dtype)
        self.reads = reads_numbers(q)
        # Dropout draws from the same state in both passes. A plan has no numbers.
        self.generator = None
        if inputs.seed is not None and type(inputs.seed) is Tensor and not inputs.seed.is_meta:
            self.generator = torch.Generator(self.device)
            self.generator.manual_seed(int(inputs.seed))

        # Queries (N, G, T, D), keys (N, S, D) and values (N, S, Dv). Scores are exact: their products are in float32.
        # All other products are narrow.
        self.B, self.H, self.T, _ = q.shape
        Hkv, self.S = k.shape[1:3]
        self.N = self.B * Hkv
        self.G = self.H // Hkv
        self.queries = self.by_group(q.to(self.dtype) * (self.passes.factor * settings.scale))
        self.keys = self.ordered(k.to(self.dtype).flatten(0, 1), 1)
        self.narrow_queries = self.queries.to(self.narrow)
        self.narrow_keys = self.keys.to(self.narrow)
        self.values = self.ordered(v.to(self.narrow).flatten(0, 1), 1)

        # Bias and sink: (N, G, T), (N, G, S) and (N, G, 1).
        self.bias = [x.to(self.dtype).reshape(self.N, self.G, -1) for x in inputs[3:5] if x is not None]
        sink = q.new_full((self.H,), -torch.inf) if inputs.sink is None else inputs.sink
        sink = sink.to(self.dtype) * self.passes.bias_factor
        self.sink = sink.repeat(self.B).view(self.N, self.G, 1)

        # The first key that each query sees, (B or 1, 1, T, 1), and its bounds in the batch: read once for all chunks.
        window = settings.window or self.S
        positions = range(self.S - self.T, self.S)
        self.earliest: Sequence[int] = [max(0, position + 1 - window) for position in positions]
        self.latest: Sequence[int] = self.earliest
        position = torch.arange(self.S - self.T, self.S, device=self.device)
        self.first_seen = (position + 1 - window).clamp_(min=0)[None, None, :, None]
        if inputs.doc_starts is not None:
            doc_starts = inputs.doc_starts[:, None, :, None]
            self.first_seen = torch.maximum(doc_starts, self.first_seen)
            if self.reads:
                bounds = torch.stack(self.first_seen.aminmax(dim=0))
                self.earliest, self.latest = bounds.flatten(1).tolist()
            else:
                self.latest = positions  # a query may see itself alone

    def by_group(self, x: Tensor) -> Tensor:
        """(B, H, T, …) -> (N, G, T, …)."""
        return x.reshape(self.N, self.G, *x.shape[2:])

    def ordered(self, x: Tensor, axis: int) -> Tensor:
        """Turn an axis of keys to the order of the passes, or back to that of the text."""
        return x.flip(axis) if self.passes.reverse else x

    def multiply(
        self,
        added: Tensor,
        a: Tensor,
        b: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Write added + a b to out."""
        # In one step, unless the products are narrower than the sums.
        if a.dtype == out.dtype:
            return torch.baddbmm(added, a, b, out=out)
        return torch.add(torch.bmm(a, b), added, out=out)


def chunk_rows(q: Tensor) -> int:
    """Return the number of queries of a chunk."""
    T = q.shape[2]
    if not q.is_cpu:
        return min(T, ROWS_ELSEWHERE)
    return ROWS_ON_CPU if T >= 1024 else min(T, ROWS_OF_SHORT_TEXTS)


def reads_numbers(q: Tensor) -> bool:
    """Return whether the passes may look at numbers.

    On a GPU that would wait, and a plan's tensors have none.
    """
    return q.is_cpu and type(q) is Tensor


def wide_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


class QueryChunk:
    """A chunk of queries, the span of keys that any of them sees, and buffers for scores."""

    def __init__(
        self,
        operands: Operands,
        start: int,
        most: int,
    ) -> None:
        """most: the number of keys to look at, the latest; `whole` says if that is the span."""
        self.operands = operands
        self.zero = operands.zero
        N, G, S = operands.N, operands.G, operands.S
        self.now = slice(start, min(start + operands.rows, operands.T))
        self.n = self.now.stop - start
        own = S - operands.T + start  # the position of the first query
        last = own + self.n

        # The span of keys.
        first = min(operands.earliest[self.now])
        self.whole = last - first <= most
        self.first = max(first, last - most)
        self.length = self.used = last - self.first
        self.positions = slice(self.first, last)
        self.span = slice(S - last, S - self.first) if operands.passes.reverse else self.positions

        # The keys that queries do not see, by the place in the span where they begin: those after their own, and those
        # before the first that all see.
        self.query = torch.arange(own, last, device=operands.device)[:, None]
        self.first_seen = operands.first_seen[:, :, self.now]
        later = torch.ones(self.n, self.n, dtype=torch.bool, device=operands.device)
        later = later.triu(0 if operands.passes.strict else 1)
        self.unseen = [(self.length - self.n, later)]
        far = max(operands.latest[self.now])
        if far > self.first:
            key = torch.arange(self.first, far, device=operands.device)
            self.unseen.append((0, key < self.first_seen))

        # The statistic of each row, sink and bias: rows (N, G · n, 1), columns (N, G, 1, keys).
        self.statistic = self.zero
        self.sink = operands.sink.expand(N, G, self.n).reshape(N, -1, 1)
        self.row = self.zero
        self.column: Tensor | None = None
        if operands.bias:
            # Sums of gates run to thousands in a long text, where float32 is coarse: less the chunk's own level, near
            # keys have small ones.
            row, column = operands.bias
            middle = own + self.n // 2
            level = column[..., middle : middle + 1]
            factor = operands.passes.bias_factor
            row = (row[..., self.now] + level).mul_(factor)
            column = (column[..., self.positions] - level).mul_(factor)
            self.row = row.reshape(N, -1, 1)
            self.column = operands.ordered(column, -1)[:, :, None]

    def number_seen(self) -> Tensor:
        """Return how many keys each query sees, (N, G · n, 1)."""
        operands = self.operands
        number = self.query + 1 - self.first_seen  # (B or 1, 1, n, 1)
        number = number.expand(operands.B, operands.H, -1, -1).to(operands.dtype)
        return number.reshape(operands.N, -1, 1)

    def scratch(
        self,
        number: int,
        more: int = 0,
    ) -> Tensor:
        """Return a scratch buffer for the scores, with `more` keys."""
        operands = self.operands
        if number not in operands.buffers:
            largest = operands.B * operands.H * operands.rows * (operands.S + 1)
            operands.buffers[number] = operands.zero.new_empty(largest)
        shape = (operands.N, operands.G * self.n, self.length + more)
        buffer = operands.buffers[number]
        return buffer[: math.prod(shape)].view(shape)

    def read(self, x: Tensor) -> Tensor:
        """Return the chunk's rows of x: (N, G, T, …) -> (N, G · n, …)."""
        return x[:, :, self.now].flatten(1, 2)

    def write(self, rows: Tensor, x: Tensor) -> None:
        """Put rows (N, G · n, …) where read() would find them."""
        x[:, :, self.now] = rows.unflatten(1, (x.shape[1], -1))

    def by_group(self, x: Tensor) -> Tensor:
        """(N, G · n, …) -> (N, G, n, …), as biases are."""
        return x.view(self.operands.N, self.operands.G, self.n, -1)

    def by_head(self, x: Tensor) -> Tensor:
        """Return x in the shape of masks: (N, G · n, …) -> (B, H, n, …).

        If all heads share it: (B, n, …) -> (B, 1, n, …).
        """
        return x.view(self.operands.B, -1, self.n, x.shape[-1])

    def hide(self, scores: Tensor, hidden: float) -> None:
        """Add `hidden`, an infinity, where a query does not see a key."""
        for begin, unseen in self.unseen:
            end = begin + unseen.shape[-1]
            if self.operands.passes.reverse:
                unseen = unseen.flip(-1)
                begin, end = self.length - end, self.length - begin
            pairs = self.by_head(scores)[..., begin:end]
            pairs.add_(overlay(unseen, hidden, scores))

    def scores(self) -> Tensor:
        """Return the scores in a scratch buffer."""
        operands = self.operands
        passes = operands.passes
        # Write statistics and bias first: the product then adds itself to them in one pass.
        scores = self.scratch(0)
        added = passes.shift(self)
        if passes.biased:
            added = added + self.statistic
            if self.column is not None:
                rows = self.by_group(added + self.row)
                torch.add(rows, self.column, out=self.by_group(scores))
                added = scores
        keys = operands.keys[:, self.span]
        torch.baddbmm(added, self.read(operands.queries), keys.mT, out=scores)
        if passes.hidden:
            self.hide(scores, passes.hidden)
        return scores

    def dropout(self) -> Tensor:
        """Return 0 for weights that are dropped and 1 / (1 - p) for others: 16 random bits for each."""
        shape = self.scratch(0).shape
        count = math.prod(shape)
        # Four numbers in a word of 64 bits: to draw them takes most of the time.
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=self.query.device)
        words.random_(-(2**63), None, generator=self.operands.generator)
        bits = words.view(torch.int16)[:count].view(shape)

        # A number from -2^15 to 2^15 - 1 is dropped if it is below the share p of them.
        dropped = round(self.operands.settings.dropout_p * 2**16)
        kept = bits >= dropped - 2**15
        return kept.to(self.operands.dtype).mul_(2**16 / (2**16 - dropped))


def overlay(
    where: Tensor,
    number: float,
    like: Tensor,
) -> Tensor:
    """Return the number where it is true, else 0.

    To add it where it broadcasts takes a seventh of masked_fill's time.
    """
    return like.new_zeros(where.shape).masked_fill_(where, number)


class BlockChoice:
    """Hides the keys of blocks that a query has not chosen: see `best_blocks` in choice.py."""

    def __init__(self, weighting: Blockwise, chosen: Tensor) -> None:
        """chosen: bool (B, H, T, blocks), which the first pass writes."""
        self.chosen = chosen
        self.block = weighting.block
        self.best = weighting.best

    def by_block(
        self,
        scores: Tensor,
        chunk: QueryChunk,
    ) -> Tensor | None:
        """Return a view (B, H, n, blocks, block) of the scores.

        It is None unless all blocks are counted from the first key of the span.
        """
        if len(chunk.unseen) > 1:
            return None
        count = chunk.length // self.block
        whole = chunk.by_head(scores)[..., : count * self.block]
        return whole.unflatten(-1, (count, self.block))

    def choose(self, scores: Tensor, chunk: QueryChunk) -> None:
        by_block = self.by_block(scores, chunk)
        # A sum is as good as a mean, for blocks of one size.
        if by_block is None:
            chosen = best_blocks(chunk.by_head(scores), self.block, self.best)
        else:
            own = (chunk.query - chunk.first) // self.block
            chosen = choose_blocks(by_block.sum(-1), own, self.best)
        self.chosen[:, :, chunk.now, : chosen.shape[-1]] = chosen

    def hide(self, scores: Tensor, chunk: QueryChunk) -> None:
        """Add -∞ where a key is in no chosen block."""
        chosen = self.chosen[:, :, chunk.now]
        by_block = self.by_block(scores, chunk)
        if by_block is None:
            pairs = chunk.by_head(scores)
            seen = block_mask(chosen, pairs, self.block)
            pairs.add_(overlay(~seen, -torch.inf, scores))
        else:
            seen = chosen[..., : by_block.shape[-2], None]
            by_block.add_(overlay(~seen, -torch.inf, scores))


class IndexChoice:
    """Hides the keys that an index has not chosen; the first pass chooses them, and learns.

    The index of a key is Σ_j w_tj ReLU(q_tj · k_s). Its loss is KL(p ‖ softmax of the index over the chosen keys), with
    p the mean of the heads' weights. Loss and gradient, softmax - p, add up in the first pass, where the weights are at
    hand. Nothing but this loss moves the index.
    """

    def __init__(self, operands: Operands, outputs: "Outputs") -> None:
        self.bits = outputs.chosen  # (B, T, bytes): of the keys in a chunk's span
        self.best = operands.settings.best
        self.q, self.k, w = (x.to(operands.dtype) for x in operands.inputs[6:9] if x is not None)
        self.heads, _, D = self.q.shape[1:]
        self.scale = (self.heads * D) ** -0.5  # of the products and of the sum
        self.w = (w * self.scale).mT[..., None]  # (B, J, T, 1)

    def choose(self, scores: Tensor, chunk: QueryChunk) -> None:
        """Choose each query's keys, its own among them."""
        # The index of each key.
        keys = self.k[:, chunk.positions]
        products = torch.bmm(chunk.read(self.q), keys.mT).relu_()  # (B, J · n, Di) @ (B, Di, keys)
        self.products = products.unflatten(1, (self.heads, -1))  # (B, J, n, keys)
        self.index = (self.products * self.w[:, :, chunk.now]).sum(1)  # (B, n, keys)
        chunk.hide(self.index, -torch.inf)

        # Its best keys; the query's own is the best of all.
        index = self.index.clone()
        gap = tie_gap(index.nan_to_num(neginf=0))
        own = torch.arange(chunk.n, device=index.device)
        index[:, own, chunk.length - chunk.n + own] = torch.inf
        chosen = best_of(index, self.best, gap, chunk.operands.reads)

        # A bit for each key, eight in a byte.
        chosen = F.pad(chosen, (0, -chunk.length % 8))
        eights = chosen.unflatten(-1, (-1, 8)).to(index.dtype)  # (B, n, bytes, 8)
        powers = 2.0 ** torch.arange(8, device=index.device, dtype=index.dtype)
        self.bits[:, chunk.now, : eights.shape[2]] = (eights @ powers).to(torch.uint8)

    def hide(self, scores: Tensor, chunk: QueryChunk) -> None:
        """Add NEVER to the scores of other keys."""
        # Make a table: the numbers to add for the eight keys of each of 256 bytes.
        byte = torch.arange(256, device=scores.device)
        place = torch.arange(8, device=scores.device)
        chosen = byte[:, None] >> place & 1  # (256, 8)
        hidden = (1 - chosen).to(scores.dtype) * NEVER

        # Look up the numbers for the keys of the span.
        bits = self.bits[:, chunk.now, : -(-chunk.length // 8)]
        by_byte = F.embedding(bits.int(), hidden)  # (B, n, bytes, 8)
        self.hidden = by_byte.flatten(2)[..., : chunk.length]  # (B, n, keys)
        chunk.by_head(scores).add_(self.hidden[:, None])

    def learn(
        self,
        weights: Tensor,
        factor: Tensor,
        chunk: QueryChunk,
        outputs: "Outputs",
    ) -> None:
        """Add to the loss and to its gradients.

        weights: the weights of each head, without the `factor` of each row.
        """
        # p, and the logarithm of the index's softmax.
        weights = chunk.by_head(weights)
        factor = chunk.by_head(factor)
        wanted = weights[:, 0] * factor[:, 0]  # (B, n, keys)
        for h in range(1, weights.shape[1]):
            wanted.addcmul_(weights[:, h], factor[:, h])
        wanted /= wanted.sum(-1, keepdim=True)
        found = self.index.clamp_min_(NEVER).add_(self.hidden).log_softmax(-1)

        # The loss and its gradient.
        outputs.loss.add_(F.kl_div(found, wanted, reduction="sum"))
        d = found.exp_().sub_(wanted)

        # The gradients of w, q and k.
        d = d[:, None]
        d_w = (d * self.products).sum(-1) * self.scale  # (B, J, n)
        outputs.d_index_w[:, chunk.now] = d_w.mT
        d = d * self.w[:, :, chunk.now]  # (B, J, n, keys)
        d = where_positive(d, self.products, 0, grad_input=d).flatten(1, 2)
        chunk.write(d @ self.k[:, chunk.positions], outputs.d_index_q)
        outputs.d_index_k[:, chunk.positions].baddbmm_(d.mT, chunk.read(self.q))


class Outputs(NamedTuple):
    """The tensors that the first pass writes."""

    y: Tensor  # (B, H, T, Dv)
    statistic: Tensor  # (N, G, T, 1): the weighting's number for each row
    lengths: Tensor  # (chunks,), on the CPU: the number of keys that each chunk looked at
    chosen: Tensor  # the choice of keys or blocks
    loss: Tensor  # (): the loss of an index
    d_index_q: Tensor  # the gradients of the loss
    d_index_k: Tensor
    d_index_w: Tensor


def make_outputs(inputs: Inputs, settings: Settings) -> Outputs:
    q, k, v = inputs[:3]
    B, H, T, _ = q.shape
    Hkv, S = k.shape[1:3]
    wide = q.new_zeros(0, dtype=wide_dtype(q))

    # A block of keys takes a byte, a key of an index a bit.
    chosen = wide.to(torch.uint8)
    weighting = from_key(settings.weighting)
    if isinstance(weighting, Blockwise):
        chosen = chosen.new_zeros(B, H, T, -(-S // weighting.block), dtype=torch.bool)
    if inputs.index_q is not None:
        chosen = chosen.new_zeros(B, T, -(-S // 8))

    # Without an index that learns there are empty tensors: an operator returns no None.
    learned = [wide.new_zeros(0 if x is None or not settings.learns else x.shape) for x in inputs[6:9]]
    chunks = -(-T // chunk_rows(q))
    return Outputs(
        v.new_empty(B, H, T, v.shape[-1]),
        wide.new_zeros(B * Hkv, H // Hkv, T, 1),
        torch.zeros(chunks, dtype=torch.int64, device="cpu"),
        chosen,
        wide.new_zeros(()),
        *learned,
    )


def make_choice(
    operands: Operands,
    outputs: Outputs,
) -> BlockChoice | IndexChoice | None:
    """Return the choice that hides other keys from each query; None if queries attend to all."""
    if isinstance(operands.weighting, Blockwise):
        return BlockChoice(operands.weighting, outputs.chosen)
    return None if operands.inputs.index_q is None else IndexChoice(operands, outputs)


def forward_pass(operands: Operands, outputs: Outputs) -> None:
    """Compute results, statistics of rows, each chunk's number of keys, and an index's loss."""
    passes = operands.passes
    p = operands.settings.dropout_p
    choice = make_choice(operands, outputs)
    y = operands.by_group(outputs.y)
    likely = operands.S
    for number, start in enumerate(range(0, operands.T, operands.rows)):
        # A stick may be spent before the last key: try a few keys more than the last chunk looked at, then all.
        for most in (likely, operands.S):
            chunk = QueryChunk(operands, start, most)
            scores = chunk.scores()
            if choice is not None:
                choice.choose(scores, chunk)
                choice.hide(scores, chunk)
            weights, factor, statistic = passes.first_pass(scores, chunk)
            if chunk.whole or chunk.used < chunk.length:
                break
        outputs.lengths[number] = chunk.length if p else min(chunk.used, chunk.length)
        likely = chunk.used + 2 * operands.rows
        if isinstance(choice, IndexChoice) and factor is not None and operands.settings.learns:
            choice.learn(weights, factor, chunk, outputs)

        # The results: weights times values, after dropout.
        if p:
            weights.mul_(chunk.dropout())
        values = operands.values[:, chunk.span]
        part = torch.bmm(weights.to(operands.narrow), values)  # (N, G · n, keys) @ (N, keys, Dv)
        if factor is not None:
            part = part * factor
        chunk.write(part, y)
        if statistic is not None:
            chunk.write(statistic, outputs.statistic)


class Gradients(NamedTuple):
    """The gradients of the first five inputs, in their shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    row: Tensor
    column: Tensor


def make_gradients(inputs: Inputs) -> Gradients:
    q, k, v = inputs[:3]
    wide = q.new_zeros(0, dtype=wide_dtype(q))
    # The gradients of keys and values are transposed in memory.
    return Gradients(
        wide.new_empty(q.shape),
        wide.new_zeros(k.mT.shape).mT,
        wide.new_zeros(v.mT.shape).mT,
        wide.new_zeros(q.shape[:3]),
        wide.new_zeros(*q.shape[:2], k.shape[2]),
    )


def backward_pass(
    operands: Operands,
    outputs: Outputs,
    dy: Tensor,
) -> Gradients:
    """Return the gradients, of dy (B, H, T, Dv)."""
    passes = operands.passes
    N, G = operands.N, operands.G
    p = operands.settings.dropout_p
    bias_learns = operands.bias or operands.inputs.sink is not None
    choice = make_choice(operands, outputs)
    dy = operands.by_group(dy)
    delta = dy.to(operands.dtype) * operands.by_group(outputs.y)
    delta = -delta.sum(-1, keepdim=True)  # (N, G, T, 1): of a row -Σ d w
    gradients = make_gradients(operands.inputs)
    dq = operands.by_group(gradients.q)
    dk, dv = (x.mT.view(N, -1, operands.S) for x in gradients[1:3])
    d_row, d_column = (x.view(N, G, -1) for x in gradients[3:])
    for number, start in enumerate(range(0, operands.T, operands.rows)):
        # The weights, once more.
        most = int(outputs.lengths[number]) if operands.reads else operands.S
        chunk = QueryChunk(operands, start, most)
        span = chunk.span
        chunk.statistic = chunk.read(outputs.statistic)
        scores = chunk.scores()
        if choice is not None:
            choice.hide(scores, chunk)
        weights = passes.second_pass(scores, chunk)

        # The gradient of the weights, less Σ d w; that of a dropped one is 0.
        arrived = chunk.read(dy).to(operands.narrow)  # (N, G · n, Dv)
        values = operands.values[:, span]
        less = chunk.read(delta) if passes.centred else operands.zero
        d = operands.multiply(operands.zero if p else less, arrived, values.mT, chunk.scratch(3))
        kept = weights
        if p:
            kept = chunk.dropout()
            d.mul_(kept).add_(less)
            kept.mul_(weights)
        operands.multiply(dv[..., span], arrived.mT, kept.to(operands.narrow), dv[..., span])

        # The gradient of the scores, and from it those of bias, queries and keys.
        d = passes.gradient(d, weights, scores, chunk)
        if bias_learns:
            d_row[..., chunk.now] = chunk.by_group(d).sum(-1)
            d_column[..., span] += chunk.by_group(d).sum(2)
        d = passes.inner_gradient(d, scores).to(operands.narrow)
        chunk.write(torch.bmm(d, operands.narrow_keys[:, span]), dq)  # (N, G · n, keys) @ (N, keys, D)
        queries = chunk.read(operands.narrow_queries)
        operands.multiply(dk[..., span], queries.mT, d, dk[..., span])

    # Back to the order of the keys, and the factors that all scores share.
    for x in (dk, dv, d_column):
        x.copy_(operands.ordered(x, -1))
    dq.mul_(passes.slope * operands.settings.scale)
    dk.mul_(passes.slope / passes.factor)
    return gradients


def unpack(
    tensors: Sequence[Tensor],
    settings: Sequence[Any],
) -> tuple[Inputs, Settings, list[Tensor]]:
    """Return the operators' arguments by name, and further tensors."""
    count = len(Inputs._fields)
    # An empty tensor stands for None.
    inputs = Inputs(*(x if x.numel() else None for x in tensors[:count]))  # type: ignore[arg-type]
    return inputs, Settings(*settings), [*tensors[count:]]


# Operators, so that torch.compile takes them as they are. torch.library.custom_op would import the compiler at the
# first call, in two seconds.
SETTINGS = "str weighting, int? window, float dropout_p, float scale, int best, bool learns"
SCHEMA = f"(Tensor[] tensors, {SETTINGS}) -> Tensor[]"
torch.library.define("tinygpt::chunked", SCHEMA)
torch.library.define("tinygpt::chunked_backward", SCHEMA)
torch.library.define("tinygpt::seed", "(*, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def seed_operator(*, device: torch.device) -> Tensor:
    """Return a seed of dropout, drawn on the CPU.

    device: the CPU; by it the compiler knows whose generator to keep.
    """
    return torch.randint(2**62, ())


torch.library.impl("tinygpt::seed", "default", seed_operator)


@torch.library.register_fake("tinygpt::seed")
def _(*, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def draw_seed(q: Tensor) -> Tensor:
    # As an operator of ours, or a compiled block of a GPU would need a compiler for the CPU too.
    cpu = torch.device("cpu")
    return seed_operator(device=cpu) if q.is_cpu else torch.ops.tinygpt.seed.default(device=cpu)


def forward_operator(
    tensors: Sequence[Tensor],
    *settings: Any,
) -> list[Tensor]:
    """Return the outputs of inputs."""
    inputs, named, _ = unpack(tensors, settings)
    outputs = make_outputs(inputs, named)
    forward_pass(Operands(inputs, named), outputs)
    return [*outputs]


torch.library.impl("tinygpt::chunked", "default", forward_operator)


@torch.library.register_fake("tinygpt::chunked")
def _(
    tensors: Sequence[Tensor],
    *settings: Any,
) -> list[Tensor]:
    inputs, named, _ = unpack(tensors, settings)
    return [*make_outputs(inputs, named)]


def backward_operator(
    tensors: Sequence[Tensor],
    *settings: Any,
) -> list[Tensor]:
    """Return the gradients, of inputs, outputs and dy."""
    inputs, named, (*outputs, dy) = unpack(tensors, settings)
    return [*backward_pass(Operands(inputs, named), Outputs(*outputs), dy)]


torch.library.impl("tinygpt::chunked_backward", "default", backward_operator)


@torch.library.register_fake("tinygpt::chunked_backward")
def _(
    tensors: Sequence[Tensor],
    *settings: Any,
) -> list[Tensor]:
    return [*make_gradients(unpack(tensors, settings)[0])]


OPERATORS = {
    torch.ops.tinygpt.chunked.default: forward_operator,
    torch.ops.tinygpt.chunked_backward.default: backward_operator,
}
"""The operators and what they run, for whoever counts the tensors inside: see training/plan.py."""


def keep(
    ctx: Any,
    inputs: tuple,
    output: list[Tensor],
) -> None:
    tensors, *ctx.settings = inputs
    ctx.save_for_backward(*tensors, *output)


def differentiate(
    ctx: Any,
    arrived: Sequence[Tensor],
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: a checkpointed block unpacks them a single time
    inputs, settings, outputs = unpack(saved, ctx.settings)
    dy = arrived[0]
    d_loss = arrived[4]
    gradients = Gradients(*torch.ops.tinygpt.chunked_backward.default([*saved, dy], *ctx.settings))

    # If all scores of a row rise alike, nothing changes: the gradients of a row and its sink sum to 0.
    d_sink = -gradients.row.sum((0, 2))
    # The first pass has computed the gradients of the index.
    d_index = [d_loss * x for x in outputs[5:]] if settings.learns else [None] * 3

    # In the order of the inputs, then of the settings; documents and seed have none.
    found = [*gradients, d_sink, *d_index, None, None]
    of_inputs = [None if x is None else d for d, x in zip(found, inputs, strict=True)]
    return of_inputs, *[None] * len(settings)


def refuse(
    ctx: Any,
    arrived: Sequence[Tensor],
) -> None:
    raise RuntimeError("attention by chunks has no second derivatives: take those of texts of at most 256 tokens.")


torch.library.register_autograd("tinygpt::chunked", differentiate, setup_context=keep)
torch.library.register_autograd("tinygpt::chunked_backward", refuse)


def chunked(call: Call) -> tuple[Output, Tensor | None]:
    """Return causal attention (B, H, T, Dv) by chunks, and the loss of an indexer that learns."""
    q = call.q
    B, H, T, _ = q.shape
    S = call.k.shape[2]

    # Give the bias all axes.
    row = column = None
    if call.row_column is not None:
        row = call.row_column[0].expand(B, H, T)
        column = call.row_column[1].expand(B, H, S)

    # Let a query before its document see itself: its result is set to zeros afterwards.
    doc_starts = call.doc_starts
    if doc_starts is not None:
        position = torch.arange(S - T, S, device=q.device)
        sees_nothing = (doc_starts > position)[:, None, :, None]
        doc_starts = torch.minimum(doc_starts, position)

    # Call the operator, which takes no None in a list.
    indexer = call.indexer
    index_q, index_k, index_w = (None, None, None) if indexer is None else indexer[:3]
    seed = draw_seed(q) if call.dropout_p else None
    inputs = Inputs(q, call.k, call.v, row, column, call.sink, index_q, index_k, index_w, doc_starts, seed)
    tensors = [q.new_empty(0) if x is None else x for x in inputs]
    best = 0 if indexer is None else indexer.best
    learns = indexer is not None and indexer.learns
    settings = Settings(call.weighting.key, call.window, call.dropout_p, scale_of(call), best, learns)
    outputs = Outputs(*torch.ops.tinygpt.chunked.default(tensors, *settings))
    y = outputs.y
    if doc_starts is not None:
        y = y.masked_fill(sees_nothing, 0)
    return y, outputs.loss if learns else None
