"""The training loss: cross-entropy without the logits of a whole batch."""

import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt

import model.loss
from model.loss import UNSCORED, summed_nats
from training.plan import LiveBytes

V, C = 50, 8


def plain(x, weight, targets, softcap):
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=UNSCORED, reduction="sum")


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tokens", [1, 5, 12, 13, 10_000], ids="{} tokens at a time".format)
def test_value_and_gradient_are_those_of_the_plain_loss(softcap, tokens, monkeypatch):
    monkeypatch.setitem(model.loss.LARGEST_CHUNK, "cpu", tokens * V * 4)
    x = torch.randn(4, 9, C, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, C, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(V, (4, 9))
    targets[1, 3:] = UNSCORED
    results = []
    for loss in (summed_nats, plain):
        nats = loss(x, weight, targets, softcap)
        results.append((nats.detach(), *torch.autograd.grad(nats / 7, (x, weight))))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_nothing_scored_is_no_loss_and_moves_nothing():
    x, weight = torch.randn(2, 3, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    nats = summed_nats(x, weight, torch.full((2, 3), UNSCORED))
    assert nats == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(nats, (x, weight)))


def test_products_are_autocasts_and_the_softmax_is_not():
    x, weight, targets = torch.randn(2, 3, C), torch.randn(V, C), torch.randint(V, (2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = summed_nats(x, weight, targets)
    expected = plain(x.bfloat16(), weight.bfloat16(), targets, None)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, expected)


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True, "logit_softcap": 5.0}], ids=str)
def test_a_model_learns_by_it_as_by_its_logits(settings):
    gpt = random_gpt(**settings)
    tokens, targets = torch.randint(11, (2, 2, 6)).unbind()
    gpt(tokens, targets).backward()
    ours = {name: parameter.grad for name, parameter in gpt.named_parameters()}
    gpt.zero_grad()
    F.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for name, parameter in gpt.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_logits_of_a_batch_are_never_held_at_once(monkeypatch):
    N, vocabulary = 4096, 1000
    monkeypatch.setitem(model.loss.LARGEST_CHUNK, "cpu", 4 * vocabulary * N // 16)
    x, weight = torch.randn(1, N, C, requires_grad=True), torch.randn(vocabulary, C, requires_grad=True)
    targets = torch.randint(vocabulary, (1, N))
    logits = 4 * N * vocabulary
    most = {}
    for loss in (summed_nats, plain):
        with LiveBytes() as live:
            loss(x, weight, targets, None).backward()
        most[loss] = live.most
    assert most[summed_nats] < 0.3 * logits < logits < most[plain]
