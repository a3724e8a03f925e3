"""What torch compiles, and how often."""

import subprocess
import sys
from pathlib import Path

import pytest

# Runs whose model, or loss, is compiled by a compiler that counts, or fails as told.
RUN = """
import logging, sys
from pathlib import Path
import torch
from torch._dynamo.testing import CompileCounterWithBackend
import training.start
from common.errors import SettingsError
from data.config import DataConfig, TokenizerConfig
from model.attention.contract import from_weights
from model.attention.registry import form
from model.config import GPTConfig
from pages.report import Report
from train import train
from training.config import TrainConfig

folder, *cases = sys.argv[1:]
Path(folder, "text.txt").write_text("the cat sat on the mat. " * 500)
Report.draw = lambda self: None
torch.cuda.manual_seed_all = lambda seed: None
counter = CompileCounterWithBackend("eager")

def backend(graph, inputs):
    if failing == "compiler":
        raise RuntimeError("no kernel for this graph\\nand many lines")
    if failing == "kernel":
        def fail(*inputs):
            raise RuntimeError("PassManager::run failed")
        return fail
    return counter(graph, inputs)

@form("reading")
@from_weights
def reading(scores):
    return scores.softmax(-1) * (1.0 if scores.sum().item() > -2.0 else 1.0)

compiler = torch.compile
torch.compile = lambda function, **more: compiler(function, **{"backend": backend} | more)
compile_module = torch.nn.Module.compile
torch.nn.Module.compile = lambda module: compile_module(module, backend=backend)
training.start.can_compile = lambda *_, **__: True
training.start.choose_compile = lambda *_: compile != "loss"
training.start.choose_compiled_loss = lambda *_: compile == "loss"
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
logging.root.handlers[0].setLevel("WARNING")
for case in cases:
    print("CASE")
    compile, failing, attention = case.split(",")
    torch._dynamo.reset()
    counter.frame_count = 0
    try:
        loss = train(TrainConfig(
            model=GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, attention=attention, zero_init=False),
            data=DataConfig(path=f"{folder}/text.txt", cache_dir=f"{folder}/cache"),
            tokenizer=TokenizerConfig(name="byte"), run_dir=f"{folder}/{compile}-{failing}-{attention}",
            device="cpu", precision="fp32", batch_size=4, max_steps=4, eval_interval=2,
            compile="auto" if compile == "loss" else compile, sample_tokens=4,
        ))
        print("frames", counter.frame_count, f"{loss:.4f}")
    except SettingsError as error:
        print(error)
"""
# Runs of one process, each of another width: how many graphs does each compile?
MANY = (
    RUN.partition("for case in cases:")[0]
    + """
compile, failing = "on", "nothing"
for width in range(8, 88, 8):
    before = counter.frame_count
    model = GPTConfig(n_layer=1, n_head=2, n_embd=width, block_size=8)
    train(TrainConfig(
        model=model, data=DataConfig(path=f"{folder}/text.txt", cache_dir=f"{folder}/cache"), precision="fp32",
        tokenizer=TokenizerConfig(name="byte"), run_dir=f"{folder}/{width}", device="cpu", max_steps=2, batch_size=4,
        eval_interval=2, compile="on", sample_tokens=0,
    ))
    print("frames", counter.frame_count - before)
"""
)
# The loss in one graph, and the furthest that it and its gradients are from those of the logits.
WHOLE = """
import sys
import torch
from model.config import GPTConfig
from model.gpt import GPT

class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        return self.model.loss(tokens, targets)

for form in sys.argv[1:]:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=11, n_layer=1, n_head=2, n_embd=16, block_size=16, attention=form, zero_init=False))
    tokens = torch.randint(11, (2, 13))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -100  # do not count
    loss = torch.compile(Loss(gpt), fullgraph=True, backend="aot_eager")(tokens[:, :-1], targets)
    loss.backward()
    plain = torch.nn.functional.cross_entropy(gpt(tokens[:, :-1]).mT, targets, reduction="sum")
    weights = {name: weight for name, weight in gpt.named_parameters() if "index" not in name}
    wanted = torch.autograd.grad(plain, [*weights.values()])
    apart = [weight.grad - gradient for weight, gradient in zip(weights.values(), wanted)]
    moved = all(weight.grad.any() for weight in gpt.parameters())  # also those of an indexer
    print(form, max(each.abs().max().item() for each in (loss - plain, *apart)) < 1e-4, moved)

gpt.register_forward_hook(lambda module, given, logits: logits / 2)
torch.compiler.reset()  # torch passes by hooks that come after compiling
loss = torch.compile(Loss(gpt), fullgraph=True, backend="aot_eager")(tokens[:, :-1], targets)
plain = torch.nn.functional.cross_entropy(gpt(tokens[:, :-1]).mT, targets, reduction="sum")
print("hooked", abs(loss - plain).item() < 1e-4, True)
"""
# How often the loss of texts of six lengths is compiled, and the furthest that it is from that of the logits.
LENGTHS = """
import torch
from torch._dynamo.testing import CompileCounter
from model.loss import fused_cross_entropy

torch.manual_seed(0)
counter = CompileCounter()
loss = torch.compile(fused_cross_entropy, backend=counter, dynamic=True)
weight = torch.randn(11, 4, requires_grad=True)
apart = []
for tokens in (5, 9, 17, 31, 40, 64):
    x, targets = torch.randn(3, tokens, 4), torch.randint(11, (3, tokens))
    made = loss(x, weight, targets)
    wanted = torch.nn.functional.cross_entropy((x @ weight.T).mT, targets, reduction="sum")
    gradients = [torch.autograd.grad(each, weight)[0] for each in (made, wanted)]
    apart += [abs(made - wanted).item(), (gradients[0] - gradients[1]).abs().max().item()]
print(counter.frame_count, max(apart) < 1e-4)
"""
# How often a model is compiled, each time in one graph, for texts of three lengths beyond the short ones, and the
# furthest that its logits are from those of the weights written out.
LONG = """
import torch
from torch._dynamo.testing import CompileCounter
from model.config import GPTConfig
from model.gpt import GPT

torch.manual_seed(0)
shape = dict(vocab_size=11, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, block_size=500, zero_init=False)
gpt = GPT(GPTConfig(**shape, attention="sdpa"))
plain = GPT(GPTConfig(**shape, attention="einsum")).double()
plain.load_state_dict(gpt.state_dict())
counter = CompileCounter()
compiled = torch.compile(gpt, backend=counter, fullgraph=True)
with torch.no_grad():
    texts = [torch.randint(11, (1, length)) for length in (300, 320, 411)]
    apart = [(compiled(text) - plain(text)).abs().max().item() for text in texts]
print(counter.frame_count, max(apart) < 1e-5)
"""
ROOT = Path(__file__).parent.parent
# Every form and modifier is compiled in test_recompute.py.
COUNTED = ["sdpa", "matmul", "softcap", "sparsemax", "linear", "kda", "index", "mla+gate", "delta+gate_element"]
COUNTED += ["sdpa+key_offset+logn+forget+sink+diff+xsa+gate"]
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[str]]:
    """What runs in one process have said, by their setting of compile, how the compiler fails, and their attention."""
    cases = ["on,,sdpa", "loss,,sdpa", "on,,reading"]
    cases += [f"{compile},{failing},sdpa" for failing in ("compiler", "kernel") for compile in ("auto", "loss", "on")]
    begun, *said = "\n".join(lines(RUN, str(tmp_path_factory.mktemp("runs")), *cases)).split("CASE")
    assert not begun
    return {case: each.strip().splitlines() for case, each in zip(cases, said, strict=True)}


@pytest.mark.slow
def test_a_run_compiles_model_and_loss_before_its_first_step_and_nothing_else(runs):
    both, loss = runs["on,,sdpa"][-1].split(), runs["loss,,sdpa"][-1].split()
    assert both[:2] == ["frames", "2"] and loss[:2] == ["frames", "1"] and both[2] == loss[2]


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["compiler", "kernel"])
def test_a_compiler_that_fails_in_the_real_model_is_told_and_the_run_goes_on_unless_compile_is_on(runs, failing):
    expected = "torch cannot compile attention=sdpa here"
    told, *_, last = runs[f"auto,{failing},sdpa"]
    assert told.startswith(f"WARNING {expected}") and told.endswith("training goes on uncompiled, which is slower.")
    assert last.startswith("frames 0 ")
    told, *_, last = runs[f"loss,{failing},sdpa"]
    assert told.startswith(f"WARNING {expected}") and last.startswith("frames 0 ")
    (sentence,) = runs[f"on,{failing},sdpa"]
    assert sentence.startswith(f"compile=on: {expected}") and sentence.endswith("): set compile=off.")


@pytest.mark.slow
def test_a_part_of_the_model_that_torch_leaves_uncompiled_is_told(runs):
    told, *_, last = runs["on,,reading"]
    assert told.startswith("WARNING torch leaves a part of the model uncompiled, which is slower: ")
    assert last.startswith("frames ")


def lines(code: str, *arguments: str) -> list[str]:
    """In a new process: the tests' checks of annotations would be compiled too."""
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.long
def test_a_run_compiles_twice_without_breaks_whatever_its_form_and_depth_and_evaluations_never():
    assert lines(COUNT, *COUNTED) == [f"{form} 2 0" for form in COUNTED]


@pytest.mark.long
def test_model_and_loss_are_one_graph_for_those_who_compile_them_whole():
    forms = ["sdpa+gate", "index"]
    assert lines(WHOLE, *forms) == [f"{form} True True" for form in [*forms, "hooked"]]


@pytest.mark.long
def test_each_run_of_a_process_is_compiled_though_torch_keeps_eight(tmp_path):
    found = [line for line in lines(MANY, str(tmp_path)) if line.startswith("frames")]
    assert len(found) == 10 and "frames 0" not in found, found


@pytest.mark.long
def test_the_loss_is_compiled_once_for_texts_of_many_lengths():
    assert lines(LENGTHS) == ["1 True"]


@pytest.mark.slow
def test_a_model_is_compiled_once_more_for_long_texts_of_all_other_lengths():
    assert lines(LONG) == ["2 True"]
