"""Other functions under the same contract, in place of the softmax of scaled dot products."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from model.attention.contract import Allowed, AttentionFunction, Bias, Key, Output, Query, Value, obeys_contract
from model.attention.layer import MultiHeadAttention
from model.attention.places import wide
from model.attention.registry import form
from model.config import AttentionConfig


def masked_scores(
    q: Query, k: Key, allowed: Allowed, bias: Bias, scale: float, cap: float | None = None
) -> Float[Tensor, "*lead H T S"]:
    """Return q kᵀ · scale, capped, plus bias, with −∞ where a key is not allowed, in float32 or wider."""
    scores = wide(q * scale @ k.transpose(-2, -1))  # (…, H, T, D) @ (…, H, D, S) -> (…, H, T, S)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


@form("softmax1")
def softmax1(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """Softmax with 1 added to its denominator: a head may give its weight to nothing (Miller 2023)."""
    scores = F.pad(masked_scores(q, k, allowed, bias, scale), (0, 1))  # 1 = exp(0): one more key, with nothing to give
    weights = torch.softmax(scores, dim=-1)[..., :-1].to(v.dtype)
    return F.dropout(weights, dropout_p) @ v


@form("sigmoid")
def sigmoid(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """σ(score − ln n), n the keys that the query may attend to (Ramapuram et al. 2024, eq. 3; theirs is the length).

    Each key is weighed by itself, so a row may sum to less than 1, or to more; with scores of 0 it sums to n / (n + 1).
    """
    scores = masked_scores(q, k, allowed, bias, scale)
    n = scores.new_tensor(scores.shape[-1]) if allowed is None else allowed.sum(-1, keepdim=True).to(scores)
    weights = torch.sigmoid(scores - n.log()).to(v.dtype)
    return F.dropout(weights, dropout_p) @ v


@form("sparsemax")
def sparsemax(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """The point of the simplex nearest to the scores: many weights are exactly 0 (Martins & Astudillo 2016, alg. 1).

    That is max(0, score − τ), where τ makes the row sum to 1: the mean of the scores above it, less 1 / their number.
    """
    scores = masked_scores(q, k, allowed, bias, scale)
    ordered = scores.sort(dim=-1, descending=True).values
    number = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    inside = ordered * number + 1 > ordered.masked_fill(ordered.isinf(), 0).cumsum(
        -1
    )  # of a row's sorted scores the first
    size = inside.sum(-1, keepdim=True)
    tau = (ordered.masked_fill(~inside, 0).sum(-1, keepdim=True) - 1) / size
    weights = (scores - tau).clamp(min=0).to(v.dtype)
    return F.dropout(weights, dropout_p) @ v


@form("softcap")
class SoftCapped(MultiHeadAttention):
    """Softmax of cap · tanh(score / cap), cap = model.score_softcap, before mask and bias (Gemma 2, 2024, section 2).

    No score leaves ± cap, nor any gradient a score far beyond it.
    """

    ignores = ("latent_size",)

    def __init__(self, config: AttentionConfig):
        super().__init__(config, attend=capped_softmax(config.score_softcap))


def capped_softmax(cap: float) -> AttentionFunction:
    """Return the attention function whose scores stay within ± cap."""

    @obeys_contract
    def attend(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
        weights = torch.softmax(masked_scores(q, k, allowed, bias, scale, cap), dim=-1).to(v.dtype)
        return F.dropout(weights, dropout_p) @ v

    return attend
