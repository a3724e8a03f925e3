"""deterministic=true on CUDA, where torch.cumsum of floats raises: forms train and sample."""

import pytest
import torch
from conftest import close, layer

from generation.config import SamplingParams
from generation.generate import filter_logits, sample
from model.attention import MultiHeadAttention

FORMS = ("linear", "retention", "delta", "kda", "gdn2", "wall", "stick", "sparsemax", "sdpa+forget", "sdpa+fade")


@pytest.fixture
def no_cumsum(monkeypatch):
    """Let the cumulative sum of floats raise, as it does on CUDA in deterministic mode, but for copies on the CPU."""
    cumsum = torch.Tensor.cumsum
    copies = []

    def cpu(x):
        copies.append(x.clone())
        return copies[-1]

    def raises(x, *dim, **dtype):
        if x.is_floating_point() and not any(x is copy for copy in copies):
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return cumsum(x, *dim, **dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    for owner in (torch, torch.Tensor):
        monkeypatch.setattr(owner, "cumsum", raises)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def output_and_gradients(attention: MultiHeadAttention, x: torch.Tensor) -> list[torch.Tensor]:
    y = attention(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *attention.parameters()])]


# Computed before the fixture takes cumsum away.
@pytest.fixture
def wanted():
    torch.manual_seed(0)
    made = {name: (layer(name).double(), torch.randn(2, 70, 16).double().requires_grad_()) for name in FORMS}
    return {name: (*pair, output_and_gradients(*pair)) for name, pair in made.items()}


@pytest.mark.slow
def test_every_form_that_sums_up_trains_without_cumsum_on_the_device_as_with_it(wanted, no_cumsum):
    for attention, x, results in wanted.values():
        for a, b in zip(output_and_gradients(attention, x), results, strict=True):
            close(a, b, rtol=1e-9, atol=1e-9)


def test_tokens_are_drawn_without_cumsum(no_cumsum):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).log()
    assert [sample(logits, torch.tensor([u])).item() for u in (0.0, 0.2, 0.6, 0.999)] == [1, 2, 3, 3]
    assert (filter_logits(logits, SamplingParams(temperature=1.0, top_p=0.6)) > -torch.inf).tolist() == [
        [False, False, True, True]
    ]
