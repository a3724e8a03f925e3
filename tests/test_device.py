"""The rules of training/device.py for processors: what is fast there, and that it stays as exact."""

from __future__ import annotations

import pytest
import torch

from training import device
from training.device import choose_precision, fast_products

CPU = torch.device("cpu")


@pytest.mark.parametrize(("capabilities", "auto"), [({"avx512_bf16": True}, torch.bfloat16), ({}, torch.float32)])
def test_auto_is_bf16_on_processors_that_multiply_it_and_nowhere_else(monkeypatch, capabilities, auto):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_precision("auto", CPU) == auto
    assert choose_precision("fp32", CPU) == torch.float32
    assert choose_precision("bf16", CPU) == torch.bfloat16


def test_fast_products_are_as_exact_as_torchs_own_and_end_with_the_run():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    x, y = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))
    with fast_products(CPU):
        product = x @ y
    assert setting.fp32_precision == before
    exact = x.double() @ y.double()
    assert (product - exact).abs().max() <= 2 * (x @ y - exact).abs().max()


@pytest.mark.parametrize(("fast", "exact", "chosen"), [(True, True, True), (True, False, False), (False, True, False)])
def test_products_that_are_rounded_or_emulated_are_not_taken(monkeypatch, fast, exact, chosen):
    monkeypatch.setattr(device, "multiplies_bf16", lambda _: fast)
    monkeypatch.setattr(device, "onednn_keeps_float32", lambda: exact)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    with fast_products(CPU):
        assert setting.fp32_precision == ("bf16" if chosen else before)
    with fast_products(torch.device("meta")):
        assert setting.fp32_precision == before
