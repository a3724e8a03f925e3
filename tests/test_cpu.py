"""The tricks for a CPU change no value beyond rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.func import grad as func_grad

from model.cpu import FusedRMSNorm, trains_norm
from model.layers import RMSNorm

EPS = 1e-5


def plain(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def drawn(*lead):
    """Return x (*lead, 24), a weight and the gradient of the result, in float64."""
    x, weight, dy = torch.randn(*lead, 24), 1 + torch.randn(24), torch.randn(*lead, 24)
    return x.double().requires_grad_(), weight.double().requires_grad_(), dy.double()


@pytest.mark.slow
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("scale", [0, 1e-3, 1, 1e3])
def test_a_norm_in_training_has_value_and_gradients_of_the_plain_one(lead, scale):
    x, weight, dy = drawn(*lead)
    x.data *= scale
    dy = dy.expand(3, *dy.shape).sum(0)  # of strides that a kernel may not know
    got, wanted = FusedRMSNorm.apply(x, weight, EPS), plain(x, weight)
    torch.testing.assert_close(got, wanted, rtol=0, atol=5e-15)
    for ours, theirs in zip(grad(got, (x, weight), dy), grad(wanted, (x, weight), dy), strict=True):
        largest = theirs.abs().max().item() if theirs.numel() else 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-15 * max(1, largest))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.bfloat16, 2**-8)])
def test_heads_in_another_order_or_dtype_are_normalised_in_the_weights_precision(dtype, tolerance):
    x, weight, dy = (tensor.to(dtype) for tensor in drawn(40, 3))
    norm = RMSNorm(24, eps=EPS).double()
    norm.weight = nn.Parameter(weight.detach().double())
    heads = x.detach().requires_grad_().transpose(0, 1)  # rows out of order
    assert trains_norm(heads, norm.weight)
    got, dy = norm(heads), dy.transpose(0, 1)
    assert got.dtype == dtype and "RMSNorm" in f"{got.grad_fn} {got.grad_fn.next_functions}"
    exact = heads.detach().double().requires_grad_()
    wanted = plain(exact, norm.weight)
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    pairs = zip(grad(got, (heads, norm.weight), dy), grad(wanted, (exact, norm.weight), dy.double()), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@pytest.mark.slow
def test_its_second_derivatives_are_right():
    x, weight, _ = drawn(3)
    assert torch.autograd.gradgradcheck(lambda *pair: FusedRMSNorm.apply(*pair, EPS), (x, weight))


def test_gradients_with_a_graph_are_those_without_where_one_norm_is_called_twice():
    x, weight, dy = drawn(3)
    y = FusedRMSNorm.apply(FusedRMSNorm.apply(x, weight, EPS), weight, EPS)
    wanted = grad(y, (x, weight), dy, retain_graph=True)
    torch.testing.assert_close(grad(y, (x, weight), dy, create_graph=True), wanted)


@pytest.mark.slow
def test_only_training_in_eager_mode_on_a_cpu_takes_it():
    x, weight, _ = drawn(3)
    assert trains_norm(x, weight)
    refused = {
        "no gradient of x": (x.detach(), weight),
        "no gradient of the weight": (x, weight.detach()),
        "half precision": (x.bfloat16(), weight.bfloat16()),
        "a weight of less precision": (x, weight.float()),
        "another device": (x.to("meta"), weight.to("meta")),
    }
    assert not [name for name, pair in refused.items() if trains_norm(*pair)]
    with torch.no_grad():
        assert not trains_norm(x, weight)
    assert not func_grad(lambda x: x.sum() * trains_norm(x, weight))(x.detach()).any()


@torch.inference_mode()
def test_a_trace_in_inference_mode_keeps_no_number_of_its_example():
    norm = RMSNorm(24, eps=EPS)
    example, other = torch.randn(1, 24), 5 * torch.randn(1, 24)
    traced = torch.jit.trace(norm, example)
    torch.testing.assert_close(traced(other), plain(other, norm.weight))


def test_under_torch_func_and_autocast_a_norm_computes_the_same():
    x, weight, dy = drawn(2, 3)
    norm = RMSNorm(24, eps=EPS).double()
    norm.weight = nn.Parameter(weight.detach())
    wanted = grad(plain(x, weight), x, dy)[0]
    got = func_grad(lambda x: (norm(x) * dy).sum())(x.detach())
    torch.testing.assert_close(got, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    torch.testing.assert_close(grad(y, x, dy)[0], wanted)
