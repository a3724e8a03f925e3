"""What torch compiles, and how often."""

import subprocess
import sys
from pathlib import Path

import pytest

from model.attention import FORMS

ROOT = Path(__file__).parent.parent
MIXED = ["sdpa+key_offset+logn+forget+sink+diff+xsa+gate", "mla+gate", "delta+gate_element"]
COUNT = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from model.config import GPTConfig
from model.gpt import GPT
from training.device import run_eagerly

for form in sys.argv[1:]:
    torch._dynamo.reset()
    gpt = GPT(GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=16, block_size=8, attention=form, dropout=0.1))
    counter = CompileCounter()
    for block in gpt.blocks:
        block.compile(backend=counter)
    gpt.runtime.loss_and_gradient = torch.compile(gpt.runtime.loss_and_gradient, backend=counter)
    tokens = torch.randint(11, (2, 8))
    for _ in range(2):
        gpt(tokens, tokens).backward()
        gpt.eval()
        with run_eagerly(True), torch.no_grad():
            gpt(tokens)
            gpt(tokens[:1, :5])
        gpt.train()
    print(form, counter.frame_count, len(counters["graph_break"]))
"""


def lines(code: str, *arguments: str) -> list[str]:
    """In a new process: the tests' checks of annotations would be compiled too."""
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


DECODE = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.config import SamplingParams
from generation.generate import generate
from model.config import GPTConfig
from model.gpt import GPT

tokenizer = make_tokenizer(TokenizerConfig(name="byte"), [])
sizes = dict(vocab_size=257, n_head=4, n_kv_head=2, n_embd=32, block_size=48, zero_init=False)
for form in sys.argv[1:]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    window = {"attention_window": 8} if "window" in form else {}
    gpt, texts = GPT(GPTConfig(attention=form, n_layer=form.count("/") + 1, **sizes, **window)), []
    counter = CompileCounter()
    for compiled in (None, torch.compile(gpt.hidden, dynamic=True, backend=counter)):
        gpt.runtime.compiled_hidden = compiled
        for prompts in ([[1], [2, 3], [4, 5, 6]], [[7]]):
            seeds, params = [1, 2, 3][: len(prompts)], SamplingParams(max_new_tokens=60)
            parts = generate(gpt, tokenizer, prompts, seeds=seeds, params=params)
            texts.append(sorted((part.sample, part.text) for part in parts))
    print(form, counter.frame_count, len(counters["graph_break"]), texts[:2] == texts[2:])
"""


@pytest.mark.slow
def test_decoding_compiles_a_few_times_whatever_the_lengths_and_writes_the_same_text():
    ((_, frames, breaks, same),) = (line.split() for line in lines(DECODE, "sdpa"))
    assert 1 <= int(frames) <= 4 and breaks == "0" and same == "True"


@pytest.mark.slow
def test_decoding_compiles_a_few_times_with_other_caches_states_and_modifiers():
    for line in lines(DECODE, "mla", "delta", "sdpa+window/sdpa", MIXED[0]):  # not index: torch traces it in pieces
        _, frames, breaks, same = line.split()
        assert 1 <= int(frames) <= 8 and breaks == "0" and same == "True", line


@pytest.mark.slow
def test_a_run_compiles_twice_without_breaks_whatever_its_form_and_depth_and_evaluations_never():
    assert lines(COUNT, *FORMS, *MIXED) == [f"{form} 2 0" for form in (*FORMS, *MIXED)]
