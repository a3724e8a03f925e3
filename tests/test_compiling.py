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
        gpt.loss(tokens, tokens).backward()
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


@pytest.mark.slow
def test_a_run_compiles_twice_without_breaks_whatever_its_form_and_depth_and_evaluations_never():
    assert lines(COUNT, *FORMS, *MIXED) == [f"{form} 2 0" for form in (*FORMS, *MIXED)]
