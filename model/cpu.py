"""Tricks for a CPU, each with its gain and its condition.

Layers and the trainer call them by name. Figures are from two cores, in float32.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

Rows = Float[Tensor, "*lead C"]
MATMUL = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch replaces that module at run time
LARGE = 100_000
"""Weights from which oneDNN multiplies several rows in decoding."""
SHORT = 256
"""Queries and keys up to which plain products are about as fast as the fused kernels, or faster."""


def decodes(x: Tensor) -> bool:
    """Return whether x belongs to an eager forward pass in inference mode, in float32 on a CPU.

    A decoded token reads every weight for little arithmetic: memory and the number of operators set its time. A mode of
    torch, such as FlopCounterMode, watches or replaces operators: it gets the usual ones.
    """
    # torch.compile cannot trace the question for inference mode: is_eager() comes first.
    if not is_eager() or not torch.is_inference_mode_enabled():
        return False
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return False
    return type(x) is Tensor and x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def multiply(x: Rows, weight: Float[Tensor, "N C"], bias: Float[Tensor, " N"] | None) -> Float[Tensor, "*lead N"]:
    """Return x Wᵀ + b in decoding.

    A single row is a product of a matrix and a vector, for which MKL has a kernel of its own: 384 × 128 weights take
    10 µs instead of 19 (AVX-512, one thread). Several rows are a product of matrices, for which oneDNN takes half of
    MKL's time on an AMD processor (32 × 384 × 1152).
    """
    N, C = weight.shape
    if x.numel() == C:
        row = x.reshape(C)
        y = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return y.view(*x.shape[:-1], N)
    if weight.numel() < LARGE:
        return F.linear(x, weight, bias)
    with fast_products():
        return F.linear(x, weight, bias)


def normalize(x: Rows, weight: Float[Tensor, "*#lead C"], eps: float) -> Rows:
    """Return x w / √(mean(x²) + ε) by four operators, or three for a single row.

    F.rms_norm is a composition of six on a CPU. A row of 128 channels takes 6 µs instead of 16, four heads of 32 take
    10 instead of 17.
    """
    C = x.shape[-1]
    if x.numel() == C:
        row = x.reshape(C)
        mean_square = row.dot(row).item() / C
        return torch.addcmul(constant(0.0), x, weight, value=(mean_square + eps) ** -0.5)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (*lead, 1)
    length = torch.hypot(length, constant((C * eps) ** 0.5))
    return torch.addcmul(constant(0.0), x / length, weight, value=C**0.5)


@cache
def constant(value: float) -> Float[Tensor, ""]:
    """Return a number as a tensor, for operators that take no number there."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def mode() -> str:
    """Return how operations run now.

    eager        as they are called
    compiled     by torch.compile, for the sizes of a call
    recorded     torch.export or torch.jit.trace notes them, for texts of other lengths too
    transformed  torch.func, such as vmap, looks into them, or torch.autograd.forward_ad
    """
    if torch.compiler.is_compiling():  # whose trace knows no interpreters
        return "recorded" if torch.compiler.is_exporting() else "compiled"
    if torch.jit.is_tracing():
        return "recorded"
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return "transformed" if is_transformed else "eager"


def is_eager() -> bool:
    return mode() == "eager"


def is_recorded() -> bool:
    return mode() == "recorded"


def is_recorded_for_onnx() -> bool:
    """Return whether torch.onnx.export records a program."""
    if not is_recorded():
        return False
    # torch.compile's front end, by which torch.onnx.export tries a second time, takes is_in_onnx_export() for False.
    flags: Any = sys.modules.get("torch.onnx._internal.exporter._flags")
    return torch.onnx.is_in_onnx_export() or (flags is not None and flags._is_onnx_exporting)


def trains_norm(x: Rows, weight: Float[Tensor, " C"]) -> bool:
    """Return whether FusedRMSNorm serves x in the dtype of weight: trained in eager mode."""
    if not x.is_cpu or not is_eager():
        return False
    needs_both = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    is_exact = weight.dtype.itemsize >= 4
    return needs_both and is_exact and torch.promote_types(x.dtype, weight.dtype) == weight.dtype


class FusedRMSNorm(torch.autograd.Function):
    """RMSNorm as one function: three passes over x forward, and a fused kernel backward.

    F.rms_norm is a composition of operators on a CPU, each with a backward pass of its own. Forward and backward of
    (2048, 128) take 1.1 ms instead of 2.3, of (2048, 384) 2.6 instead of 6.9. The queries and keys of 2,048 tokens with
    4 heads of 32 channels take 2.6 ms instead of 4.5, in bf16 2.6 instead of 4.9 (AVX2; bf16: AVX-512; one thread).
    """

    @staticmethod
    def forward(ctx: Any, x: Rows, weight: Float[Tensor, " C"], eps: float) -> Rows:
        square_sum = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_rms = square_sum.div_(len(weight)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.eps = eps
        return (x * inverse_rms).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Rows) -> tuple[Any, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        if torch.is_grad_enabled():  # by create_graph=True: someone may ask for second derivatives
            norm = partial(normed, eps=ctx.eps)
            return *gradients_with_graph(norm, (x, weight), (True, True), dy), None

        # RMSNorm is layer norm with a mean of 0. The kernel also takes the derivative by that mean, and subtracts the
        # mean of dy w from each row: add it again.
        zero = torch.zeros_like(inverse_rms)
        mask = [True, True, False]  # the gradients wanted: of x and weight, not of a bias
        dy = dy.contiguous()
        to_x, to_weight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, weight.shape, zero, inverse_rms, weight, None, mask
        )
        to_mean = (dy @ weight)[..., None] * inverse_rms / len(weight)  # (*lead, C) @ (C,) -> (*lead, 1)
        return to_x.add_(to_mean), to_weight, None


def normed(x: Rows, weight: Float[Tensor, " C"], eps: float) -> Rows:
    return F.rms_norm(x, weight.shape, weight, eps)


def gradients_with_graph(
    compute: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    dy: Tensor,
) -> list[Any]:
    """Return the gradients of compute(*inputs) as functions that have derivatives too.

    An input may be made from another one, by way of which no gradient shall come: views of them are computed with.
    """
    views = [x if x is None else x.view_as(x) for x in inputs]
    wanted = [view for view, is_needed in zip(views, needed, strict=True) if view is not None and is_needed]
    found = iter(torch.autograd.grad(compute(*views), wanted, dy, create_graph=True, allow_unused=True))
    return [next(found) if is_needed else None for is_needed in needed]


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones.

    Other C libraries are left alone. By default glibc returns large blocks to the system and gets them back zeroed, one
    page fault per page, which took half the time of a small model's training step. In exchange the process never
    shrinks.
    """
    _set_malloc(mmap_threshold=32 << 20, trim_threshold=2**31 - 1, top_pad=64 << 20)  # the first is the most it takes


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory inside; afterwards set glibc's defaults, and return it to the system."""
    keep_freed_memory()
    try:
        yield
    finally:
        _set_malloc(mmap_threshold=128 << 10, trim_threshold=128 << 10, top_pad=128 << 10)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _set_malloc(*, mmap_threshold: int, trim_threshold: int, top_pad: int) -> None:
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, mmap_threshold)  # the numbers are of malloc.h
        mallopt(-1, trim_threshold)
        mallopt(-2, top_pad)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the fastest type of products of x: its own, or float32 if a CPU would convert."""
    converts = x.is_cpu and (x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not multiplies_bf16()))
    return torch.float32 if converts else x.dtype


@cache
def multiplies_bf16() -> bool:
    """Return whether bf16 products are faster than float32 ones on this processor."""
    capabilities = torch.cpu.get_capabilities()
    # Without AMX, Intel's instructions for bf16 take twice as long as those for float32.
    is_intel = "Intel" in capabilities.get("cpu_name", "")
    return capabilities.get("amx_bf16", False) or (capabilities.get("avx512_bf16", False) and not is_intel)


@contextmanager
def fast_products() -> Iterator[None]:
    """Multiply float32 matrices by oneDNN if it is as exact as MKL, torch's usual library.

    MKL wastes half the speed of an AMD processor with AVX-512. torch takes oneDNN if bf16 is allowed; on processors
    with AMX that rounds to bf16, on others it does not.
    """
    before = MATMUL.fp32_precision
    # The thread that sets it restores it. One that finds it set might restore it after the other.
    if before == "bf16" or not (multiplies_bf16() and onednn_keeps_float32()):
        yield
        return
    MATMUL.fp32_precision = "bf16"
    try:
        yield
    finally:
        MATMUL.fp32_precision = before


@cache
def onednn_keeps_float32() -> bool:
    """Return whether products stay exact if torch may take oneDNN's bf16."""
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "bf16"
    try:
        finer_than_bf16 = torch.full((256, 256), 1 + 2**-20)
        return torch.equal(finer_than_bf16 @ torch.eye(256), finer_than_bf16)
    finally:
        MATMUL.fp32_precision = before
