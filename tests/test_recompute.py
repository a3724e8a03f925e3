"""recompute=block changes no loss and no gradient, whatever the attention, the length and the compiler."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import some
from torch.utils.checkpoint import checkpoint

from model.attention import FORMS, MODIFIERS, AttentionContext
from model.config import GPTConfig
from model.gpt import GPT

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("unchecked")
ATTENTIONS = [
    *FORMS,
    *(f"sdpa+{name}" for name in MODIFIERS),
    *("sdpa+window", "moba+value_residual", "index+value_residual", "softcap+forget+sink"),
    "sdpa+window/sdpa+value_residual",
]
CASES = [
    *((name, {}) for name in ATTENTIONS),
    *(("sdpa", {"position": "alibi"}), ("matmul", {"attention_dropout": 0.3})),
]
LONG = 320  # by chunks of queries
SLOW = ("loop", "stacked")


def model_of(attention: str, T: int, recompute: bool, **settings) -> GPT:
    window = {"attention_window": 24} if "window" in attention else {}
    shape = dict(n_layer=3, n_head=2, n_embd=16, block_size=T, vocab_size=31, zero_init=False, dropout=0.1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(attention=attention, **shape | window | settings))
    for block in model.blocks:
        block.activation_checkpointing = recompute
    return model


def figures(model: GPT, T: int) -> list[torch.Tensor]:
    """The loss of one text and all gradients."""
    tokens = torch.arange(T)[None] * 7 % 31
    torch.manual_seed(1)
    loss = model.loss(tokens, tokens.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("T", [64, LONG])
@pytest.mark.parametrize(("attention", "settings"), some(CASES, 16), ids=str)
def test_a_block_that_is_computed_twice_has_the_bits_of_one_that_is_kept(attention, settings, T):
    if attention in SLOW and T == LONG:
        pytest.skip("a loop over queries takes seconds")
    kept, again = (figures(model_of(attention, T, recompute, **settings), T) for recompute in (False, True))
    assert len(kept) == len(again) and all(map(torch.equal, kept, again))


COMPILED = """
import sys, types
import torch
# conftest.py would let annotations be checked, which breaks graphs.
sys.modules["conftest"] = types.SimpleNamespace(some=lambda values, each: values)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from test_recompute import CASES, SLOW, figures, model_of

T = int(sys.argv[1])
for number, (attention, settings) in enumerate(CASES[T > 64 :: 2]):
    if attention in SLOW and T > 64:
        continue
    is_lowered = T > 64 and number % 6 == 0  # which takes three times as long; the other compiler keeps no generator
    if not is_lowered:
        settings = settings | {"dropout": 0.0, "attention_dropout": 0.0}
    kept = figures(model_of(attention, T, False, **settings), T)
    torch._dynamo.reset()
    counters.clear()
    model = model_of(attention, T, True, **settings)
    counter = CompileCounterWithBackend("aot_eager" if is_lowered else "eager")
    for block in model.blocks:
        block.compile(backend=counter)
    again = figures(model, T)
    gaps = [(a - b).abs().max() / b.abs().max().clamp(min=1) for a, b in zip(again, kept, strict=True)]
    print(attention, counter.frame_count, len(counters["graph_break"]), max(gaps).item() < 1e-5)
"""


@pytest.mark.long
@pytest.mark.parametrize("T", [64, LONG])
def test_a_compiled_block_is_checkpointed_in_one_graph_without_breaks(T):
    """In a new process: the tests' checks of annotations would be compiled too."""
    command = [sys.executable, "-c", COMPILED, str(T)]
    places = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=places)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        attention, frames, breaks, is_equal = line.split()
        # A pattern has two kinds of block, and the first layer with value_residual has no values to add.
        expected = 1 + attention.count("/") + ("value_residual" in attention)
        assert (int(frames), int(breaks), is_equal) == (expected, 0, "True"), line


def test_what_a_block_writes_to_the_context_is_there_for_later_ones():
    model = model_of("index+value_residual", 16, True)
    ctx = AttentionContext(loss=torch.zeros((), requires_grad=True))
    hidden = model.hidden(torch.arange(16)[None], ctx=ctx)
    assert [*ctx.shared] == ["values"] and ctx.loss is not None and ctx.loss.item() > 0
    ctx.shared["values"].sum().backward(retain_graph=True)
    hidden.sum().backward()


def mixed(attention: str) -> GPT:
    """A model whose value_residual adds the first layer's values."""
    model = model_of(attention, 16, False)
    for name, weight in model.named_parameters():
        if name.endswith("mixture"):
            torch.nn.init.constant_(weight, 0.5)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "sdpa+value_residual", "index"])
def test_torchs_checkpoint_around_blocks_has_the_gradients_of_kept_ones_or_is_refused(attention):
    """Its reentrant kind runs a block without gradients at first: what the block leaves for others would have none."""
    kept = figures(mixed(attention), 16)
    for reentrant in (False, True):
        model = mixed(attention)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        if reentrant and attention != "sdpa":
            with pytest.raises(ValueError, match="set use_reentrant=False"):
                figures(model, 16)
        else:
            again = figures(model, 16)
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(kept, again, strict=True))


def test_weights_that_a_hook_reads_without_gradients_leave_those_of_the_pass():
    """The first layer's values, which later ones add, would else be those of the reading: constants."""

    def read(attention, arguments):
        with torch.no_grad():
            attention.weights(*arguments)

    kept, watched = mixed("sdpa+value_residual"), mixed("sdpa+value_residual")
    for attention in watched.attentions:
        attention.register_forward_pre_hook(read)
    assert all(map(torch.equal, figures(kept, 16), figures(watched, 16)))
