"""Other functions under the same contract, to compare with scaled dot-product attention.

A variant is a function here and its name in model.config.ATTENTION_VARIANTS. The layer, the cache, the checks and
the tests of every form then hold for it (docs/attention.md).
"""

import torch
import torch.nn.functional as F

from model import config
from model.attention.contract import Allowed, AttentionFunction, Bias, Key, Output, Query, Value, obeys_contract
from model.attention.functional import softmax_dtype


@obeys_contract
def softmax1(q: Query, k: Key, v: Value, allowed: Allowed, bias: Bias, scale: float, dropout_p: float) -> Output:
    """Softmax with 1 added to its denominator: a head may give its weight to nothing (Miller 2023)."""
    scores = q * scale @ k.transpose(-2, -1)  # (…, H, T, S)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    scores = F.pad(scores, (0, 1))  # 1 = exp(0): one more key, which scores 0 and has nothing to give
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype(scores))[..., :-1].to(v.dtype)
    return F.dropout(weights, dropout_p) @ v


ATTENTION_VARIANTS: dict[str, AttentionFunction] = {name: globals()[name] for name in config.ATTENTION_VARIANTS}
