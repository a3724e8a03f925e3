"""The forms that differ in the weights alone: weightings, and the executors of each.

A layer attends by one, and FORMS["sdpa"] can be called by itself: see contract.py. softcap has a setting, so it is a
layer.
"""

import model.attention.functions as functions
from model.attention.contract import AttentionFunction, named_as, of_weighting
from model.attention.executors import CHUNKS, HALF, OF_SDPA, OF_WEIGHTING, of_steps
from model.attention.layer import MultiHeadAttention
from model.attention.registry import form
from model.attention.weighting import PLAIN, Sigmoid, Softcap, Sparsemax, Stick
from model.config import AttentionConfig

SDPA = """The same at full speed, by torch's fused kernels.

They never write the (T, S) matrix (Dao et al. 2022). On a CPU short texts go to `bmm`: there the kernels save no time,
and the matrix is small."""
SOFTMAX1 = """Softmax with 1 added to its denominator: a head may attend to nothing (Miller 2023).

1 = exp(0): one more key, of score 0 and value zero."""
LOOP = of_steps(functions.loop)._replace(modes=("eager", "compiled", "transformed"))
"""A record would have as many turns as its text has tokens: matmul is recorded in its place."""

form("matmul")(named_as(functions.matmul, PLAIN, (HALF, CHUNKS, of_steps(functions.matmul))))
form("einsum")(named_as(functions.einsum, PLAIN, (of_steps(functions.einsum),)))
form("bmm")(named_as(functions.bmm, PLAIN, (HALF, CHUNKS, of_steps(functions.bmm))))
form("loop")(named_as(functions.loop, PLAIN, (LOOP, of_steps(functions.matmul))))
form("sdpa")(AttentionFunction("sdpa", SDPA, PLAIN, OF_SDPA))
SOFTMAX = ("matmul", "einsum", "bmm", "loop", "sdpa")
"""The forms that compute the same."""

form("softmax1")(AttentionFunction("softmax1", SOFTMAX1, PLAIN, OF_WEIGHTING, null_key=True))
form("sigmoid")(of_weighting(Sigmoid()))
form("sparsemax")(of_weighting(Sparsemax()))
form("stick")(of_weighting(Stick()))


@form("softcap")
class SoftCapped(MultiHeadAttention):
    """Softmax of bounded scores: see Softcap of weighting.py."""

    has_plain_weights = True
    unused_settings = ("latent_size", "allow_neg_eigval")

    def __init__(self, config: AttentionConfig, layer_idx: int = 0) -> None:
        super().__init__(config, of_weighting(Softcap(config.score_softcap)), layer_idx)
