"""torch's linear layer and norms, with what decoding and mixed precision need of them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

SIDE = 64  # of the triangle that sums
LARGE = 100_000  # weights from which a product of one row is worth sharing between threads


class Linear(nn.Linear):
    """torch's, of one or several matrices that read the same input; parts: the rows of each, which Muon moves apart.

    A single row on a CPU is multiplied by all threads, where MKL takes one.
    """

    def __init__(self, in_features: int, *parts: int, bias: bool) -> None:
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts

    def forward(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead N"]:
        C, N = self.in_features, self.out_features
        weight = self.weight
        traced = torch.jit.is_tracing() or torch.compiler.is_compiling()
        if torch.is_grad_enabled() or traced or x.numel() != C or C * N < LARGE or not x.is_cpu:
            return super().forward(x)
        if type(weight) is not nn.Parameter:  # a quantised one is of a class of its own, whose numbers no view shows
            return super().forward(x)
        threads = torch.get_num_threads()  # not above: torch.compile, whose graph it would break, gets no further
        share = N // threads  # of the rows, a view without a copy: (threads, C, share)
        shares = weight.as_strided((threads, C, share), (share * C, 1, C))
        y = torch.bmm(x.reshape(1, 1, C).expand(threads, 1, C), shares).view(*x.shape[:-1], threads * share)
        if share * threads < N:
            y = torch.cat((y, F.linear(x, weight[share * threads :])), -1)
        return y if self.bias is None else y + self.bias


# Norms take and return the input's dtype. FSDP may gather the weights in another, autocast leaves them in float32, and
# torch's fused kernels want one dtype for all. CUDA's autocast makes the result float32: queries and keys would then
# reach attention in float32 beside bf16 values, which costs its fast kernel.


class RMSNorm(nn.RMSNorm):
    """x w / √(mean(x²) + ε) (Zhang & Sennrich 2019)."""

    def forward(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) w / √(variance + ε) + b (Ba et al. 2016)."""

    def forward(self, x: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps).to(x.dtype)


def cumulative_sum(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape"]:
    """Return x.cumsum(dim) of finite x, also where torch has no deterministic one, as on CUDA: by products."""
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(dim)
    n = x.shape[dim]
    rows = F.pad(x.movedim(dim, -1), (0, -n % SIDE)).unflatten(-1, (-1, SIDE))  # (…, n) -> (…, N, SIDE)
    sums = rows @ torch.ones(SIDE, SIDE, dtype=x.dtype, device=x.device).triu()  # within each row
    if n > SIDE:
        before = F.pad(cumulative_sum(sums[..., :-1, -1], -1), (1, 0))  # (…, N): of all rows before
        sums = sums + before[..., None]
    return sums.flatten(-2)[..., :n].movedim(-1, dim)
