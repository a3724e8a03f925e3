"""Linear layers for decoding, where the input is one row or a few and time goes into reading the weights.

In `packed(model)` layers that read the same input are one product, and on a CPU all threads read its weights.
`to_int8(model)` makes them a quarter of the size.
"""

import copy as copies
import math
import mmap
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

LARGE = 100_000  # weights from which it pays to share a product between threads
COPIED = 2**28  # weights of a model up to which packed() copies them, 1 GiB
SMALLEST = 1e-36  # a scale of whole numbers, so that nothing is divided by zero
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # children that read the same input

Module = TypeVar("Module", bound=nn.Module)


def packed(model: Module) -> Module:
    """Return a copy of a model for decoding, in eval mode, with its present weights; the model is left as it is.

    The two share whatever is no linear layer, and all weights where these are more than COPIED.
    """
    return cast(Module, _packed(model, copy=sum(weights.numel() for weights in model.parameters()) <= COPIED))


def _packed(module: nn.Module, copy: bool) -> nn.Module:
    if type(module) is nn.Linear:
        weight, threads = module.weight, torch.get_num_threads()
        fits = weight.is_cpu and weight.dtype == torch.float32 and torch.backends.mkl.is_available()
        if fits and weight.numel() >= LARGE and (copy or len(weight) % threads == 0):
            kind = PackedLinear if copy else PanelledLinear
            return kind(weight.detach(), module.bias, threads)
    if isinstance(module, nn.RMSNorm) and module.weight.is_cpu and module.weight.dtype == torch.float32:
        return PackedRMSNorm(module)
    if isinstance(module, nn.Dropout):
        return nn.Identity()
    twin = copies.copy(module)
    children = {name: child for name, child in module._modules.items() if child is not None}
    twin._modules = dict.fromkeys(module._modules)
    for names in TOGETHER:
        linears = [child for name in names if isinstance(child := children.get(name), nn.Linear | Int8Linear)]
        if copy and len(linears) == len(names):
            twin._modules |= dict.fromkeys(names, Joined(linears))
            children = {name: child for name, child in children.items() if name not in names}
    twin._modules |= {name: _packed(child, copy) for name, child in children.items()}
    twin.training = False
    # Looked up and called as plain functions: what nn.Module does around that takes longer than some of the work.
    direct = {
        name: child.forward
        for name, child in twin._modules.items()
        if isinstance(child, DIRECT) and not isinstance(child, Unpacked)
    }
    twin.__dict__.update(twin._modules | twin._parameters | twin._buffers | direct)
    return twin


class Unpacked(nn.Linear):
    """A linear layer that packed() and to_int8() leave alone, because decoding reads its weight."""


def to_int8(module: nn.Module) -> None:
    """Put Int8Linear in the place of every linear layer, the lm_head among them."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Int8Linear(child))
        else:
            to_int8(child)


class Int8Linear(nn.Module):
    """A linear layer of whole numbers: weights within ±127 times a scale for each row, inputs times one for each token
    (Dettmers et al. 2022, "LLM.int8()", section 2).

    Products of whole numbers are exact: what a token gets does not depend on those beside it.
    """

    scale: Float[Tensor, " N"]
    whole: Int8[Tensor, "N C"]
    shift: Float[Tensor, " N"]
    """What the inputs' zero, most + 1, adds to the products, taken back."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.out_features, self.in_features = weight.shape
        self.bias = layer.bias
        scale = (weight.abs().amax(1) / 127).clamp(min=SMALLEST)
        whole = (weight / scale[:, None]).round()
        self.most = largest_input()
        self.register_buffer("scale", scale)
        self.register_buffer("whole", whole.to(torch.int8))
        self.register_buffer("shift", -(self.most + 1) * whole.sum(1) * scale)
        self.smallest, self.half_up = torch.tensor(SMALLEST), torch.tensor(self.most + 1.5)

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... N"]:
        rows = x.reshape(-1, self.in_features).float()
        size = torch.add(self.smallest, rows.abs().amax(1, True), alpha=1 / self.most)
        inputs = torch.addcdiv(self.half_up, rows, size).byte()  # rounded, since byte() cuts fractions off
        y = torch.addcmul(self.shift, torch._int_mm(inputs, self.whole.mT), self.scale).mul_(size)
        y = y.view(*x.shape[:-1], self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias


@cache
def largest_input() -> int:
    """Return 127, or 63 on processors that add two products of 8-bit numbers in 16 bits (x86 without VNNI)."""
    inputs, weights = torch.full((1, 64), 255, dtype=torch.uint8), torch.full((64, 64), 127, dtype=torch.int8)
    return 127 if (torch._int_mm(inputs, weights) == 64 * 255 * 127).all() else 63


class Joined(nn.Module):
    """Several linear layers as one."""

    def __init__(self, layers: list[nn.Linear | Int8Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        joined = copies.copy(layers[0])
        joined.out_features = sum(self.sizes)
        for held in ("_parameters", "_buffers"):
            parts = [getattr(layer, held) for layer in layers]
            whole = {
                name: t if t is None else torch.cat([part[name].detach() for part in parts])
                for name, t in parts[0].items()
            }
            setattr(joined, held, whole)
        self.product = _packed(joined, copy=True).forward

    def forward(self, x: Float[Tensor, "... C"]) -> tuple[Float[Tensor, "... _"], ...]:
        return torch.split_with_sizes(self.product(x), self.sizes, -1)


def together(x: Float[Tensor, "... C"], *layers: Callable[[Tensor], Any]) -> tuple[Float[Tensor, "... _"], ...]:
    """Return what each of these linear layers makes of x: one product where packed() has joined them."""
    if layers[0] == layers[-1]:
        return layers[0](x)
    return tuple([layer(x) for layer in layers])


def on_intel() -> bool:
    """Return whether this is one of Intel's processors, for which MKL is made."""
    return "Intel" in torch.cpu.get_capabilities().get("cpu_name", "")


class PackedLinear(nn.Module):
    """A linear layer for a row or a few, with a copy of the weights.

    Its time is that of reading them, which MKL does on a single core, and slowly. Cut along C into parts they are read
    by all, and the parts' products summed. On AMD's processors with AVX-512, which MKL serves badly, one row is faster
    as, in each part, the sum of its rows weighted by x: an embedding bag, whose kernel fetches ahead.
    """

    def __init__(self, weight: Float[Tensor, "N C"], bias: Float[Tensor, " N"] | None, threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        memory = mmap.mmap(-1, weight.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # with pages below 2 MB a third of reading is looking pages up
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.table = torch.frombuffer(memory, dtype=weight.dtype).view(weight.mT.shape).copy_(weight.mT)  # (C, N)
        self.parts = math.gcd(self.in_features, 2 * threads)
        self.stacked = self.table.unflatten(0, (self.parts, -1))  # (parts, C / parts, N)
        self.sums_rows = torch.backends.cpu.get_cpu_capability() == "AVX512" and not on_intel()
        self.index = torch.arange(self.in_features)
        self.offsets = torch.arange(0, self.in_features, self.in_features // self.parts)

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... N"]:
        lead = x.shape[:-1]
        if self.sums_rows and x.numel() == self.in_features:
            y = torch.embedding_bag(self.table, self.index, self.offsets, False, 0, False, x.reshape(-1))[0]
        else:
            y = torch.bmm(x.reshape(-1, self.parts, self.stacked.size(1)).transpose(0, 1), self.stacked)
        y = y.sum(0).view(*lead, self.out_features)  # (parts, …) -> (…)
        return y if self.bias is None else y + self.bias


class PanelledLinear(nn.Module):
    """The same with the model's own weights, as a batch of products with as many panels of their rows as threads."""

    def __init__(self, weight: Float[Tensor, "N C"], bias: Float[Tensor, " N"] | None, threads: int) -> None:
        super().__init__()
        self.panels = weight.unflatten(0, (threads, -1)).mT  # (threads, C, N / threads)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... N"]:
        y = torch.bmm(x.reshape(1, -1, x.shape[-1]).expand(len(self.panels), -1, -1), self.panels)
        y = y.transpose(0, 1).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class PackedRMSNorm(nn.Module):
    """x w / √(mean(x²) + ε) as x (w √C) / √(‖x‖² + C ε): four operations, where torch's takes eight on a CPU."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        C = norm.normalized_shape[-1]
        self.weight = norm.weight.detach() * C**0.5
        self.floor = self.weight.new_tensor((C * (norm.eps or 0.0)) ** 0.5)

    def forward(self, x: Float[Tensor, "... C"]) -> Float[Tensor, "... C"]:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(size, self.floor) * self.weight


DIRECT = (nn.Linear, nn.LayerNorm, nn.Identity, PackedLinear, PanelledLinear, PackedRMSNorm, Joined, Int8Linear)
