"""Short texts in half precision on a CPU: scores in float32, at the price of half precision.

A product of half precision rounds its result, to 8 bits in bf16, by which large scores become equal. So the products of
queries and keys are in float32. Their backward pass keeps half precision: its factors are rounded in any case. Forward
and backward of 64 × 128 queries of 32 channels take 3.6 ms, where rounded scores took 3.9, and float32 in both passes
takes 4.5 (two cores with AMX).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.call import Call, Output, scale_of
from model.attention.functions import fold_heads, weighted
from model.cpu import gradients_with_graph


def half(call: Call) -> Output:
    """Return softmax attention, as bmm() of functions.py does."""
    q, k, v, added = fold_heads(call)
    weights = SoftmaxOfProducts.apply(q, k, added, scale_of(call))
    y = torch.bmm(F.dropout(weights, call.dropout_p), v)  # (N, T, S) @ (N, S, Dv) -> (N, T, Dv)
    return y.unflatten(0, call.q.shape[:-2])  # (N, T, Dv) -> (…, H, T, Dv)


def half_weighted(call: Call) -> Output:
    """Return attention with any weights, as weighted() of functions.py does."""
    q, k = (t.flatten(0, -3) for t in call[:2])  # (…, H, T, D) -> (N, T, D)
    products = Products.apply(q, k, scale_of(call))
    return weighted(call, products.unflatten(0, call.q.shape[:-2]))


class Products(torch.autograd.Function):
    """scale · q kᵀ, (N, T, S) in float32, of q (N, T, D) and k (N, S, D) in half precision."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale = scale
        return products(q, k, scale)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        q, k = ctx.saved_tensors
        if torch.is_grad_enabled():  # by create_graph=True: someone may ask for second derivatives
            compute = partial(products, scale=ctx.scale)
            return *gradients_with_graph(compute, (q, k), ctx.needs_input_grad[:2], d), None
        return *gradients(d.to(q.dtype), q, k, ctx.scale), None


class SoftmaxOfProducts(torch.autograd.Function):
    """softmax(scale · q kᵀ + added), (N, T, S), in the type of q and k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, added: Tensor, scale: float) -> Tensor:
        weights = softmax_of_products(q, k, added, scale)
        ctx.save_for_backward(q, k, added, weights)
        ctx.scale = scale
        return weights

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        q, k, added, weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            compute = partial(softmax_of_products, scale=ctx.scale)
            return *gradients_with_graph(compute, (q, k, added), ctx.needs_input_grad[:3], d), None
        # w (d - Σ w d), whose sum the kernel takes in float32.
        d = torch._softmax_backward_data(d, weights, -1, weights.dtype)
        d_added = None
        if ctx.needs_input_grad[2]:
            d_added = d.float() if added.ndim == 3 else d.float().sum(0)
        return *gradients(d, q, k, ctx.scale), d_added, None


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q.float() * scale @ k.float().mT


def softmax_of_products(q: Tensor, k: Tensor, added: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(added, q.float(), k.float().mT, alpha=scale).softmax(-1).to(q.dtype)


def gradients(d: Tensor, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k, of d (N, T, S), that of the scaled products."""
    dq = torch.baddbmm(q, d, k, beta=0, alpha=scale)  # (N, T, S) @ (N, S, D) -> (N, T, D)
    dk = torch.baddbmm(k, d.mT, q, beta=0, alpha=scale)
    return dq, dk
