"""torch's linear layer and norms, faster in decoding; dtypes; a cumulative sum."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from model.cpu import FusedRMSNorm, Rows, decodes, multiply, normalize, trains_norm


class Linear(nn.Linear):
    """One or several matrices that read the same input, as one product.

    parts: the rows of each matrix; the optimizer Muon moves them separately.
    """

    starts_at_zero = False
    """Whether a GPT sets its weights to zero at the beginning."""

    def __init__(self, in_features: int, *parts: int, bias: bool) -> None:
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts

    def forward(self, x: Rows) -> Float[Tensor, "*lead N"]:
        # A CPU's shortcut in inference mode, with the same result. A quantised weight is of another type.
        if decodes(x) and type(self.weight) is nn.Parameter:
            return multiply(x, self.weight, self.bias)
        return super().forward(x)


def joined(layer: nn.Module, x: Rows) -> Float[Tensor, "*lead N"]:
    """Return layer(x), whose columns are those of several matrices, one after the other.

    Raises ValueError if this process has a part of the columns, as after torch's ColwiseParallel, which divides them
    across the matrices.
    """
    y = layer(x)
    if type(layer) is Linear and type(layer.weight) is not nn.Parameter and y.shape[-1] < layer.weight.shape[0]:
        problem = f"the columns of {len(layer.parts)} matrices in one layer are divided among processes as those of one"
        remedy = "leave it whole, and give the layer behind it RowwiseParallel(input_layouts=Replicate())"
        raise ValueError(f"{problem}: {remedy}.")
    return y


class RMSNorm(nn.RMSNorm):
    """x w / √(mean(x²) + ε) (Zhang & Sennrich 2019)."""

    eps: float

    def forward(self, x: Rows) -> Rows:
        if decodes(x):
            return normalize(x, self.weight, self.eps)
        if trains_norm(x, self.weight):  # a CPU's kernel with its own backward pass, in the type of the weight
            rows = x.to(self.weight.dtype, memory_format=torch.contiguous_format)
            y = FusedRMSNorm.apply(rows, self.weight, self.eps)
            return y.to(x.dtype)
        # Autocast leaves the weight in float32, and torch's kernels want one dtype: that of x. If the norm returned
        # float32, queries and keys would stand beside values in bf16, and attention could not use its fast kernel.
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


def rms_norm(x: Rows, weight: Float[Tensor, " C"] | None, eps: float) -> Rows:
    """Return x w / √(mean(x²) + ε) in the dtype of x and w; w may be missing."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype.itemsize == 2:
        # Autocast would copy x to float32. The kernel computes in it anyway.
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """(x - mean) w / √(variance + ε) + b (Ba et al. 2016)."""

    def forward(self, x: Rows) -> Rows:
        weight = self.weight.to(x.dtype)  # as in RMSNorm
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a module multiplies x: autocast's if it is enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def forget_casts(x: Tensor) -> None:
    """Let autocast cast weights anew, where it casts those of modules that read x.

    torch keeps the casts until the outermost autocast ends, and uses them also after the weights have changed: by an
    optimizer's step, by others that are loaded, or by hand.
    """
    if not x.is_meta and not torch.compiler.is_compiling() and torch.is_autocast_enabled(x.device.type):
        torch.clear_autocast_cache()


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cumulative_sum(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape"]:
    """Return x.cumsum(dim), by the CPU in deterministic runs: CUDA's is not deterministic."""
    return x.cpu().cumsum(dim).to(x.device) if torch.are_deterministic_algorithms_enabled() else x.cumsum(dim)
