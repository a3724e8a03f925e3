"""Tricks for a CPU, each with its gain and its condition; layers call them by name.

Figures are from two cores, in float32.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

LARGE = 100_000
"""Weights from which a product of one row is worth sharing between threads."""
SHORT = 256
"""Queries and keys up to which plain products beat the fused kernels."""


def shares_row(x: Float[Tensor, "*lead C"], weight: Float[Tensor, "N C"]) -> bool:
    """Return whether x is a single row, as in decoding, that multiply_row() takes faster than F.linear.

    Not with gradients, nor traced or compiled. A quantised weight has a class of its own: no view shows its numbers.
    """
    if torch.is_grad_enabled() or torch.jit.is_tracing() or torch.compiler.is_compiling():
        return False
    if type(weight) is not nn.Parameter or not x.is_cpu:
        return False
    return x.numel() == weight.shape[-1] and weight.numel() >= LARGE


def multiply_row(
    x: Float[Tensor, "*one C"], weight: Float[Tensor, "N C"], bias: Float[Tensor, " N"] | None
) -> Float[Tensor, "*one N"]:
    """Return x Wᵀ + b of a single row by all threads, where MKL takes one.

    Two threads: 388 µs instead of 575 for a weight of 2304 × 768, 101 instead of 170 for 1152 × 384.
    """
    N, C = weight.shape
    threads = torch.get_num_threads()
    share = N // threads  # rows of W for each thread
    shares = weight.as_strided((threads, C, share), (share * C, 1, C))  # a view: nothing is copied
    y = torch.bmm(x.reshape(1, 1, C).expand(threads, 1, C), shares).view(*x.shape[:-1], threads * share)
    if share * threads < N:
        y = torch.cat((y, F.linear(x, weight[share * threads :])), -1)
    return y if bias is None else y + bias


def prefers_plain_products(q: Float[Tensor, "*lead H T D"], k: Float[Tensor, "*lead Hkv S D"]) -> bool:
    """Return whether `bmm` serves these queries and keys better than torch's fused kernels.

    Forward and backward of 24 × 4 heads of 32 channels: 1.5 ms instead of 1.7 at T = 64, 6.6 instead of 6.2 at 256, 31
    instead of 28 at 512. The fused kernel slows down 9 times where oneDNN multiplies in bf16, and bmm gains.
    """
    return q.is_cpu and 1 < q.shape[-2] <= SHORT and k.shape[-2] <= SHORT
