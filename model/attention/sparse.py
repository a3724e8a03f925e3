"""Sparse attention: each query chooses a few keys by their content."""

from model.attention.call import Call, Indexer, Output
from model.attention.context import AttentionContext
from model.attention.contract import of_weighting
from model.attention.latent import LatentAttention
from model.attention.layer import MultiHeadAttention, Stream
from model.attention.registry import form
from model.attention.weighting import Blockwise
from model.config import AttentionConfig
from model.layers import LayerNorm, Linear


@form("moba")
class BlockAttention(MultiHeadAttention):
    """Each query attends to its own block of keys and to the three best earlier ones.

    (Lu et al. 2025, MoBA.) A block has block_size / 8 keys; the score of its mean key ranks it. The form has the
    weights of softmax attention, and may replace it in some layers or later in training. A bias, as ALiBi's, counts in
    the mean. Blocks are hidden, not skipped: it saves no time here.
    """

    has_plain_weights = True
    is_sparse = True
    has_onnx = False
    best = 3

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        self.block = max(1, config.block_size // 8)
        super().__init__(config, of_weighting(Blockwise(self.block, self.best)), layer_idx)

    def flops(self, block_size: int) -> float:
        """Return the operations per token: two for each channel of a chosen key and its value.

        The same for the mean key of each earlier block.
        """
        # Blocks are counted from the first visible key: n keys are earlier blocks, and 1 to `block` keys of its own.
        seen = [min(t + 1, self.window or block_size) for t in range(block_size)]
        chosen = sum(min(n, self.best * self.block + (n - 1) % self.block + 1) for n in seen)
        earlier = sum((n - 1) // self.block for n in seen)
        return 2 * self.query_heads * (self.channels_of_pair * chosen + self.score_channels * earlier) / block_size


class Indexed(MultiHeadAttention):
    """A layer whose queries attend to the keys that a small indexer chooses.

    A token always keeps itself. No gradient flows through the choice: the indexer learns to score as attention weighs,
    by KL(p ‖ softmax I) over the chosen keys, p the mean of the heads' weights, and that loss moves nothing else. Keys
    are hidden, not skipped: it saves no time here.

    The loss is added to ctx.loss, as the GPT passes it. A layer alone that is called without one trains no indexer: its
    parameters get no gradient, which DistributedDataParallel refuses unless find_unused_parameters=True.
    """

    is_sparse = True
    has_onnx = False

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.best = max(1, config.block_size // 4)
        self.index_heads = max(1, self.n_head // 2)
        self.index_widths = self.index_heads * self.head_dim, self.head_dim, self.index_heads
        self.index_proj = Linear(config.n_embd, *self.index_widths, bias=False)
        self.index_norm = LayerNorm(self.head_dim, eps=1e-6)

    def attend(self, call: Call, x: Stream, ctx: AttentionContext) -> Output:
        """Attend to the keys that the indexer chooses."""
        # The indexer's queries, its key, and a weight for each query; J = index_heads.
        index_q, index_k, index_w = self.index_proj(x.detach()).split(self.index_widths, -1)
        index_q = index_q.unflatten(-1, (self.index_heads, -1)).transpose(1, 2)  # (B, T, J·D) -> (B, J, T, D)
        index_q = self.rotate(index_q, ctx)
        index_k = self.rotate(self.index_norm(index_k).unsqueeze(1), ctx)  # (B, T, D) -> (B, 1, T, D)
        if ctx.cache is not None:
            index_k = ctx.cache.append(self.layer_idx, "index", index_k, self.window)
        index_k = index_k[:, 0, -call.k.shape[2] :]  # of the keys that a query may see
        indexer = Indexer(index_q, index_k, index_w, self.best, learns=ctx.loss is not None and not ctx.weights_only)
        return super().attend(call._replace(indexer=indexer), x, ctx)

    def flops(self, block_size: int) -> float:
        """Return the operations per token: two for each channel of a chosen key and its value.

        The same for each pair of an index head and any visible key, which has no value.
        """
        seen = [min(t + 1, self.window or block_size) for t in range(block_size)]
        attended = sum(min(n, self.best) for n in seen)
        of_pair = 2 * self.channels_of_pair * self.query_heads * attended
        index_channels = self.head_dim * (1 if self.pope is None else 2)
        return (of_pair + 2 * index_channels * self.index_heads * sum(seen)) / block_size


@form("index")
class IndexedAttention(Indexed):
    """A small indexer chooses the block_size / 4 keys that a query attends to.

    (DeepSeek-AI 2025, DeepSeek-V3.2-Exp.)

        I_ts = Σ_j w_tj ReLU(q_tj · k_s),  of H / 2 queries q_j and weights w_j, and one key k, of its own

    Indexed says how it learns.
    """


@form("dsa")
class IndexedLatent(Indexed, LatentAttention):
    """mla whose keys an indexer chooses: DeepSeek Sparse Attention.

    (DeepSeek-AI 2025, DeepSeek-V3.2-Exp, and GLM-5, 2026.) The indexer is that of index. It rotates as many channels as
    mla does.
    """
