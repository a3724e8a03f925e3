"""The decoding step that a GPU captures as a graph, on any machine and on a GPU where there is one.

A trace stands in for the graph: like one it keeps the operations, their sizes and the tensors they read and
write, and nothing of the Python that led to them. What only a GPU can refuse is left to the last test.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import random_gpt
from test_generate import tokens_of
from torch.fx.experimental.proxy_tensor import make_fx

import generation.decoder
from generation.decoder import CapturedCall, Decoder
from generation.sampling import Controls, Sampler
from model.config import ATTENTION_FORMS

PROMPTS, SEEDS = [[1, 2, 3, 4, 5], [6], [7, 8]], [1, 2, 3]
CONTROLS = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
MODELS = [
    {},
    {"position": "learned"},
    *({"attention": form, "position": "alibi"} for form in ATTENTION_FORMS),
    {"position": "alibi", "attention_window": 4, "n_kv_head": 2},
    {"position": "none", "attention": "softmax1"},
    {"n_kv_head": 2},
    {"n_kv_head": 1, "head_size": 6},
    {"attention_window": 3},
    {"position": "learned", "attention_window": 5, "n_kv_head": 2},
    {"logit_softcap": 5.0, "norm": "layernorm", "bias": True, "qkv_bias": True, "mlp": "gelu"},
]


class TracedCall:
    """As a CapturedCall it rehearses a function, then keeps its operations, and repeats those from then on."""

    traces: ClassVar[list[TracedCall]] = []

    def __init__(self, function):
        self.function, self.rehearsed, self.trace = function, False, None

    def __call__(self):
        if not self.rehearsed:
            self.rehearsed = True
            return self.function()
        if self.trace is None:
            self.traces.append(self)
            self.trace = make_fx(lambda: self._run())()
            return self.result
        return self.trace()

    def _run(self):
        self.result = self.function()
        return self.result


class Capturing(Decoder):
    """A decoder that believes to be on a GPU."""

    def __init__(self, model):
        super().__init__(model)
        self.captures = True


@pytest.fixture
def traces(monkeypatch) -> list[TracedCall]:
    monkeypatch.setattr(TracedCall, "traces", [])
    monkeypatch.setattr(generation.decoder, "CapturedCall", TracedCall)
    monkeypatch.setattr(generation.decoder, "FEWEST_SLOTS", 4)
    return TracedCall.traces


def test_a_call_is_rehearsed_then_captured_and_from_then_on_replayed(monkeypatch):
    happened = []

    @contextmanager
    def capture(graph, **_):
        happened.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: happened.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    call = CapturedCall(lambda: happened.append("function") or len(happened))
    assert [call() for _ in range(4)] == [1, 3, 3, 3]
    assert happened == ["function", "capture", "function", "replay", "replay", "replay"]


@pytest.mark.parametrize("case", MODELS, ids=str)
@torch.inference_mode()
def test_the_captured_step_gives_the_logits_of_the_plain_one_before_and_past_the_block(case, traces):
    gpt = random_gpt(**{"block_size": 16} | case)
    plain, capturing = Decoder(gpt), Capturing(gpt)
    torch.testing.assert_close(plain.read(PROMPTS, room=40), capturing.read(PROMPTS, room=40))
    for step in range(40):
        tokens = torch.tensor([step, 2 * step, 3 * step]) % 61
        torch.testing.assert_close(capturing.step(tokens), plain.step(tokens), atol=1e-5, rtol=1e-5)
    assert traces


@pytest.mark.parametrize("controls", [{}, {"temperature": 0}, CONTROLS], ids=str)
def test_a_text_is_the_same_captured_or_not_with_every_control(controls, traces):
    gpt, new = random_gpt(block_size=16), generation.sampling.DRAWS + 20
    plain = tokens_of(gpt, PROMPTS, SEEDS, new=new, **controls)
    assert tokens_of(gpt, PROMPTS, SEEDS, new=new, decoder=Capturing, **controls) == plain
    assert len(traces) == 3  # of 8, 16 and all 21 slots: by then every step is a repeated one


def test_a_finished_sample_stays_in_the_captured_batch_until_half_of_it_is_finished(traces):
    gpt, sizes = random_gpt(block_size=16), []
    finished: set[int] = set()

    class Noting(Capturing):
        def step(self, tokens, choose):
            finished.update({5: {1}, 9: {2}}.get(len(sizes), ()))
            sizes.append(len(tokens))
            return super().step(tokens, choose)

    whole = tokens_of(gpt, PROMPTS, SEEDS)
    texts = tokens_of(gpt, PROMPTS, SEEDS, decoder=Noting, finished=finished)
    assert texts == [whole[0], whole[1][:6], whole[2][:10]]
    assert sizes == [3] * 10 + [1] * 19


@torch.inference_mode()
def test_nothing_in_the_captured_step_waits_for_a_number_or_leaves_the_device(monkeypatch):
    """On the meta device a tensor has no numbers to wait for, and does not mix with those of a CPU."""
    monkeypatch.setattr(generation.decoder, "CapturedCall", lambda function: function)
    gpt = random_gpt(block_size=16, n_kv_head=2).to("meta")
    decoder = Capturing(gpt)
    logits = decoder.read(PROMPTS, room=40)
    sampler = Sampler(PROMPTS, SEEDS, Controls(**CONTROLS), torch.ones(61, dtype=torch.bool, device="meta"), logits)
    tokens, _ = sampler.choose(logits)
    for _ in range(40):
        sampler.draw_numbers()
        tokens, _ = decoder.step(tokens, sampler.choose)
    for mistake in (lambda logits: logits.argmax().item(), lambda logits: logits + torch.zeros(61)):
        decoder.take([0, 1, 2])  # forgets the captured step
        with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)meta"):
            decoder.step(tokens, mistake)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_on_a_gpu_a_text_is_the_same_captured_or_not(case):
    class Plain(Decoder):
        def __init__(self, model):
            super().__init__(model)
            assert self.captures
            self.captures = False

    gpt = random_gpt(**{"block_size": 256} | case).cuda()
    for controls in ({}, {"temperature": 0}, CONTROLS):
        plain = tokens_of(gpt, PROMPTS, SEEDS, new=300, decoder=Plain, **controls)
        assert tokens_of(gpt, PROMPTS, SEEDS, new=300, **controls) == plain
