"""torch's linear layer and norms, faster in decoding; a deterministic cumulative sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, TypeGuard, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from model.cpu import FusedRMSNorm, Rows, decodes, multiply, normalize, trains_norm

Own = TypeVar("Own", bound=nn.Module)


PLAIN_TYPES = (nn.Parameter, Tensor, FakeTensor)
"""The types of weights that are numbers alone, or their shapes; quantised ones have others."""


class Linear(nn.Linear):
    """One or several matrices that read the same input, as one product.

    parts: the rows of each matrix; Muon orthogonalises them separately.
    """

    starts_at_zero = False
    """Whether a GPT sets its weights to zero."""

    def __init__(self, in_features: int, *parts: int, bias: bool) -> None:
        super().__init__(in_features, sum(parts), bias)
        self.parts = parts

    def forward(self, x: Rows) -> Float[Tensor, "*lead N"]:
        if decodes(x) and type(self.weight) is nn.Parameter:
            return multiply(x, self.weight, self.bias)
        return super().forward(x)


# Norms return the input's dtype. Autocast leaves the weights in float32, and torch's fused kernels want one dtype for
# all. CUDA's autocast would return float32: queries and keys would reach attention in float32 beside bf16 values, and
# it could not use its fast kernel.


class RMSNorm(nn.RMSNorm):
    """x w / √(mean(x²) + ε) (Zhang & Sennrich 2019)."""

    eps: float

    def forward(self, x: Rows) -> Rows:
        if decodes(x):
            return normalize(x, self.weight, self.eps)
        if trains_norm(x, self.weight):
            rows = x.to(self.weight.dtype, memory_format=torch.contiguous_format)
            y = FusedRMSNorm.apply(rows, self.weight, self.eps)
        else:
            y = rms_norm(x, self.weight.to(x.dtype), self.eps)
        return y.to(x.dtype)


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
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a module multiplies x: autocast's if it is enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def upcast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cumulative_sum(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape"]:
    """Return x.cumsum(dim), by the CPU in deterministic runs: CUDA's is not deterministic."""
    return x.cpu().cumsum(dim).to(x.device) if torch.are_deterministic_algorithms_enabled() else x.cumsum(dim)


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
CALL = ("__call__", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl")
"""By which torch calls a module: those of an instance or a class may be replaced."""


def is_own(module: nn.Module, cls: type[Own]) -> TypeGuard[Own]:
    """Return whether a module is of a class, without hooks and replaced methods."""
    has_hooks = any(getattr(module, hooks) for hooks in HOOKS)
    is_patched = any(name in CALL or callable(getattr(cls, name, None)) for name in vars(module))
    return type(module) is cls and not has_hooks and not is_patched


def is_matrix(layer: nn.Module) -> TypeGuard[Linear]:
    """Return whether a layer is its weight and bias alone, which code may then read.

    A hook, an adapter, a quantised weight or another module has to be called.
    """
    return is_own(layer, Linear) and type(layer.weight) in PLAIN_TYPES


LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""A lock for each module whose mode is set for a while."""


def lock_of(module: nn.Module) -> Any:
    """Return the lock that a thread holds while it reads or sets the modes of a module's parts."""
    return LOCKS.setdefault(module, RLock())


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode, and afterwards it and each part of it in their former modes.

    Other threads that ask for the same wait: they would take eval mode for the former one.
    """
    with lock_of(module):
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            yield
        finally:
            module.train(modes[0][1])
            for part, was_training in modes:
                if part.training != was_training:
                    part.training = was_training


def eval_twin(module: nn.Module) -> nn.Module:
    """Return a module of the same tensors in eval mode, whose former parts keep their modes.

    Attributes, hooks and parameters are shared, not copied.
    """
    twin = module.__class__.__new__(module.__class__)
    vars(twin).update(vars(module))
    twin._modules = {name: None if part is None else eval_twin(part) for name, part in module._modules.items()}
    twin.training = False
    return twin
