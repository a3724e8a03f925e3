"""What torch compiles, how often, and when that pays."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from errors import SettingsError
from model.attention import forms
from model.config import GPTConfig
from model.size import without_weights
from training import compiling
from training.compiling import choose_compile
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
CUDA = torch.device("cuda")
GPT2 = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024)


COUNT = """
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from model.attention import forms
from model.config import GPTConfig
from model.gpt import GPT
from training.compiling import uncompiled

for form in (*forms(), "sdpa+key_offset+logn+forget+sink+diff+xsa+gate", "mla+gate", "delta+gate_element"):
    if form == "flex":  # trains on CUDA only
        continue
    torch._dynamo.reset()
    gpt = GPT(GPTConfig(vocab_size=11, n_layer=4, n_head=2, n_embd=16, block_size=8, attention=form, dropout=0.1))
    counter = CompileCounter()
    for block in gpt.blocks:
        block.compile(backend=counter)
    gpt.nats_and_slope = torch.compile(gpt.nats_and_slope, backend=counter)
    tokens = torch.randint(11, (2, 8))
    for _ in range(2):
        gpt(tokens, tokens).backward()
        gpt.eval()
        with uncompiled(True), torch.no_grad():
            gpt(tokens)
            gpt(tokens[:1, :5])
        gpt.train()
    print(form, counter.frame_count, len(counters["graph_break"]))
"""


@pytest.mark.slow
def test_a_run_compiles_twice_without_breaks_whatever_its_form_and_depth_and_evaluations_never():
    # In a process of its own: the checks of annotations, on in the tests, are code that would be compiled too.
    counted = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in counted.stdout.splitlines()]
    modified = ["sdpa+key_offset+logn+forget+sink+diff+xsa+gate", "mla+gate", "delta+gate_element"]
    assert lines == [[form, "2", "0"] for form in (*forms(), *modified) if form != "flex"]


BLOCKS = """
import copy
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from model.attention import functional
from model.config import GPTConfig
from model.gpt import GPT
from training.compiling import uncompiled

flex_attention._validate_device = lambda q, k, v: None  # the reference that is traced has gradients on a CPU too
functional.capability = lambda device: (8, 0)  # as if on a GPU
calls, causal_blocks = [], functional.causal_blocks
functional.causal_blocks = lambda *shape: (calls.append(shape), causal_blocks(*shape))[1]

def count(graph, inputs):
    kernels.append(sum("flex_attention" in str(node.target) for node in graph.graph.nodes))
    return graph

for given in {"attention_window": 70}, {"position": "alibi", "attention_window": 70, "n_kv_head": 2}, {}:
    torch._dynamo.reset()
    calls.clear()
    kernels, settings = [], dict(vocab_size=11, n_layer=4, n_head=4, n_embd=64, block_size=200, zero_init=False)
    plain = GPT(GPTConfig(**settings, **given)).double()
    gpt = copy.deepcopy(plain)
    for block in gpt.blocks:
        block.compile(backend=count)
    tokens = torch.randint(11, (2, 200))
    for _ in range(2):
        for model in gpt, plain:
            model(tokens, tokens).backward()
    for one, other in zip(gpt.parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)
    gpt.eval()
    with uncompiled(True), torch.no_grad():
        gpt(tokens)
    print(kernels, len(counters["graph_break"]), len(calls))
"""


@pytest.mark.slow
def test_windows_and_alibi_are_one_block_mask_a_step_for_all_layers_and_one_compilation():
    counted = subprocess.run([sys.executable, "-c", BLOCKS], cwd=ROOT, capture_output=True, text=True, check=True)
    # A graph with one kernel, no breaks, a mask for each of two steps; causality alone needs no block mask
    assert counted.stdout.splitlines() == ["[1] 0 2", "[1] 0 2", "[0] 0 0"]


def chosen(monkeypatch, compile="auto", model=None, processes=1, steps=600, **settings):
    monkeypatch.setattr(compiling.torch, "compile", lambda function: lambda x: x)
    monkeypatch.setattr(compiling.torch, "zeros", lambda *_, **__: None)
    config = TrainConfig(model=GPTConfig(vocab_size=2048, **(model or {})), compile=compile, **settings)
    return choose_compile(config, CUDA, without_weights(config.model), steps, processes)


def test_auto_compiles_where_the_steps_ahead_pay_for_it(monkeypatch):
    assert not chosen(monkeypatch)  # the default run
    assert chosen(monkeypatch, steps=100_000)
    assert chosen(monkeypatch, model=GPT2, batch_size=480, micro_batch_size=32, steps=5000)
    assert not chosen(monkeypatch, model=GPT2, batch_size=480, micro_batch_size=32, steps=20)
    assert chosen(monkeypatch, steps=None, max_minutes=60.0)
    assert not chosen(monkeypatch, steps=None, max_minutes=1.0)
    assert not chosen(monkeypatch, compile="off", steps=10**9)
    assert chosen(monkeypatch, compile="on", steps=1)


def test_a_cpu_compiles_only_when_asked(monkeypatch):
    config = TrainConfig(model=GPTConfig(vocab_size=50))
    assert not choose_compile(config, torch.device("cpu"), without_weights(config.model), 10**9, 1)


def test_a_machine_without_compiler_trains_eagerly_and_says_so_once(monkeypatch, caplog):
    def fails(function):
        raise RuntimeError("Failed to find C compiler\nin many lines")

    config = TrainConfig(model=GPTConfig(vocab_size=50))
    monkeypatch.setattr(compiling.torch, "compile", fails)
    monkeypatch.setattr(compiling.torch, "zeros", lambda *_, **__: None)
    with caplog.at_level(logging.WARNING):
        assert not choose_compile(config, CUDA, without_weights(config.model), 10**9, 1)
    (said,) = caplog.messages
    assert "Failed to find C compiler" in said and "many lines" not in said
    config.compile = "on"
    with pytest.raises(SettingsError, match="compile=on: torch cannot compile here"):
        choose_compile(config, CUDA, without_weights(config.model), 1, 1)
