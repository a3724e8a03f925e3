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
from torch.utils._python_dispatch import TorchDispatchMode

import generation.decoder
from generation.decoder import CapturedCall, Decoder
from generation.sampling import Controls, Sampler, generate
from model.config import GPTConfig
from model.gpt import GPT

PROMPTS, SEEDS = [[1, 2, 3, 4, 5], [6], [7, 8]], [1, 2, 3]
CONTROLS = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
MODELS = [
    {},
    {"position": "learned"},
    *(
        {"attention": form, "position": "alibi"}
        for form in ("sdpa", "softmax1", "average", "simple", "stacked", "flex")
    ),
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

    def __init__(self, function, device):
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

    @contextmanager
    def current(device):
        happened.append(str(device))
        yield
        happened.append("before")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: happened.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", current)
    call = CapturedCall(lambda: happened.append("function") or len(happened), torch.device("cuda:1"))
    assert [call() for _ in range(4)] == [1, 4, 4, 4]
    captured = ["cuda:1", "capture", "function", "before"]  # a graph takes the kernels of the current device
    assert happened == ["function", *captured, "replay", "replay", "replay"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", MODELS, ids=str)
@torch.inference_mode()
@pytest.mark.slow
def test_the_captured_step_gives_the_logits_of_the_plain_one_before_and_past_the_block(case, traces):
    gpt = random_gpt(**{"block_size": 16} | case)
    plain, capturing = Decoder(gpt), Capturing(gpt)
    torch.testing.assert_close(plain.read(PROMPTS, room=40), capturing.read(PROMPTS, room=40))
    for step in range(40):
        tokens = torch.tensor([step, 2 * step, 3 * step]) % 61
        torch.testing.assert_close(capturing.step(tokens), plain.step(tokens), atol=1e-5, rtol=1e-5)
    assert traces


@pytest.mark.parametrize("controls", [{}, {"temperature": 0}, CONTROLS], ids=str)
@pytest.mark.slow
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
    monkeypatch.setattr(generation.decoder, "CapturedCall", lambda function, device: function)
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


class Ahead(Decoder):
    """A decoder whose steps are launched before the last token is read, and overwrite what the last one returned."""

    def __init__(self, model):
        super().__init__(model)
        self.runs_ahead, self.returned = True, {}

    def step(self, tokens, choose):
        results = super().step(tokens.clone(), choose)
        returned = self.returned.setdefault(len(tokens), results)
        return [old.copy_(new) for old, new in zip(returned, results, strict=True)]


@pytest.mark.parametrize("captures", [True, False])  # when the batch shrinks depends on it
@pytest.mark.parametrize("case", [{}, {"position": "learned"}], ids=str)
def test_a_text_is_the_same_when_the_next_step_is_launched_before_its_token_is_read(case, captures, traces):
    gpt, steps = random_gpt(block_size=16, **case), []

    def drawn(decoder) -> list:
        finished: set[int] = set()
        steps = generate(decoder, PROMPTS, max_new_tokens=30, seeds=SEEDS, logprobs=True, finished=finished)
        texts = []
        for number, step in enumerate(steps):
            texts += step
            finished |= {5: {1}, 9: {2}}.get(number, set())
        return texts

    ahead = Ahead(gpt)
    ahead.captures, step = captures, ahead.step
    ahead.step = lambda *arguments: steps.append(len(arguments[0])) or step(*arguments)
    expected, got = drawn(Decoder(gpt)), drawn(ahead)
    assert [each[:2] for each in got] == [each[:2] for each in expected]
    assert [each.logprob for each in got] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert len(steps) == 29 and steps[-1] == 1  # none after the last token


class Operations(TorchDispatchMode):
    """Notes the operations that are no views: on a GPU about as many kernels."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view or (function is torch.ops.aten.to.dtype and result is not args[0]):
            self.names.append(function.overloadpacket.__name__)
        return result


GPT2_SHAPE = dict(
    n_layer=12, n_head=12, n_embd=768, position="learned", norm="layernorm", mlp="gelu_tanh", bias=True,
    qkv_bias=True, qk_norm=False, tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("captures", [True, False])
@torch.inference_mode()
def test_a_step_of_gpt_2s_shape_is_few_operations_and_waits_for_none(captures, monkeypatch):
    """In bf16, whose layers are the same on every device."""
    monkeypatch.setattr(generation.decoder, "CapturedCall", lambda function, device: function)
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**GPT2_SHAPE, block_size=64, vocab_size=61)).eval().bfloat16()
    decoder = Decoder(gpt.to_empty(device="cpu"))
    decoder.captures = captures
    for parameter in decoder.model.parameters():
        parameter.fill_(0.01)
    logits = decoder.read([[1, 2, 3]], room=20)
    sampler = Sampler([[1, 2, 3]], [1], Controls(temperature=0.8), None, logits)
    tokens, _ = sampler.choose(logits)
    decoder.step(tokens)
    with Operations() as model:
        decoder.step(tokens)
    decoder.take([0])  # forgets the captured step
    decoder.step(tokens, sampler.choose)
    with Operations() as drawing:
        sampler.draw_numbers()
        decoder.step(tokens, sampler.choose)
    assert len(model.names) == (164 if captures else 149)
    assert len(drawing.names) - len(model.names) == 8
    assert not {"_local_scalar_dense", "nonzero", "equal", "item", "is_nonzero"} & set(drawing.names)


@pytest.mark.gpu
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("attention", ["sdpa/sigmoid", "average/sdpa"])
@torch.inference_mode()
def test_layers_of_different_forms_are_decoded_each_by_its_own(attention, traces):
    gpt = random_gpt(attention=attention, position="alibi", block_size=16)
    plain, capturing = Decoder(gpt), Capturing(gpt)
    torch.testing.assert_close(plain.read(PROMPTS, room=8), capturing.read(PROMPTS, room=8))
    for step in range(8):
        tokens = torch.tensor([step, 2 * step, 3 * step])
        torch.testing.assert_close(capturing.step(tokens), plain.step(tokens), atol=1e-5, rtol=1e-5)
