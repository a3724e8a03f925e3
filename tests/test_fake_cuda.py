"""A GPU's kernels, found without one: fake_cuda.py makes the table of docs/hardware.md."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from model.attention import FORMS, MODIFIERS

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "hardware.md").read_text(encoding="utf-8")
TORCH = Path(torch.__file__).parent
EVERY = [
    *FORMS,
    *(f"sdpa+{name}" + " n_layer=2" * (name == "value_residual") for name in MODIFIERS),
    "sdpa+nope",
    "sdpa+window attention_window=8",
    "sdpa n_kv_head=8",
    "sdpa attention_dropout=0.1",
    "sdpa document_mask=true",
    "sdpa+forget+sink document_mask=true",
    "sdpa+forget+window attention_window=8 document_mask=true",
    "sdpa+sink+window attention_window=8",
    "sdpa position=alibi",
    "sdpa head_size=20",
    "sdpa+sink head_size=20",
    "mla head_size=192",
]
PASSES = ("training", "prompt", "token")

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or not shutil.which("g++"), reason="compiles a library by g++ for Linux"
    ),
    pytest.mark.skipif(bool(torch.version.cuda), reason="stands for the CUDA that a CPU build of torch lacks"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    where = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]
    source = [str(HERE / "fake_cuda.cpp"), "-o", str(made), "-lc10", "-ltorch_cpu"]
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *where, *source], check=True)
    return made


def on_fake_cuda(library: Path, *arguments: str) -> list[str]:
    """The lines printed by fake_cuda.py or other code, in a new process: it changes torch."""
    places = {"LD_PRELOAD": str(library), "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    command, environment = [sys.executable, *arguments], os.environ | places
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shown(case: str) -> str:
    return f"`{case}`"


def kernels_of(found: dict) -> tuple[str, ...]:
    return tuple(", ".join(found[each]["kernels"]) for each in PASSES)


def table_of(results: dict[str, dict]) -> str:
    """The page's table: a row for each combination of kernels."""
    rows = defaultdict(list)
    for case, found in results.items():
        rows[kernels_of(found)].append(shown(case))
    lines = [f"| {', '.join(cases)} | {' | '.join(kernels)} |" for kernels, cases in rows.items()]
    return "\n".join(["| attention | training | a prompt | a token |", "|---|---|---|---|", *lines])


@pytest.mark.long
def test_kernels_and_dtypes_are_those_of_the_page_and_no_step_waits_for_the_gpu(library):
    lines = on_fake_cuda(library, str(HERE / "fake_cuda.py"), *EVERY)
    results = {case: found for line in lines for case, found in json.loads(line).items()}
    assert [*results] == EVERY
    for case, found in results.items():
        heads = "fp32 fp32 fp32" if case == "simple" else "bf16 bf16 bf16"  # which has no projections
        assert found["training"]["heads"] == [heads], case
        assert found["prompt"]["heads"] == found["token"]["heads"] == ["bf16 bf16 bf16"], case
        streams = [found[each]["stream"] for each in ("training", "evaluation", *PASSES[1:])]
        assert streams == [["fp32"], ["fp32"], ["bf16"], ["bf16"]], case
        figures = [found["training"]["loss"], found["training"]["norm"], found["evaluation"]["logits"]]
        assert [*figures, found["token"]["logits"]] == ["fp32", "fp32", "bf16", "fp32"], case
        assert found["evaluation"]["kernels"] == found["training"]["kernels"], case
        kernels = PAGE.partition("## Kernels of each form")[2]
        rows = (line for line in kernels.splitlines() if line.startswith("|") and shown(case) in line)
        row = next(rows, "no row")
        assert row.endswith(f" | {' | '.join(kernels_of(found))} |"), f"{case}: {kernels_of(found)}"
    assert table_of(results) in PAGE, f"docs/hardware.md should have this table:\n{table_of(results)}"


LONG = [
    *(form for form in FORMS if form not in ("loop", "stacked")),
    *(f"sdpa+{name}" + " n_layer=2" * (name == "value_residual") for name in [*MODIFIERS][::2]),
    *("sdpa document_mask=true", "sdpa+window attention_window=64 document_mask=true", "sdpa position=alibi"),
    *(f"{form} document_mask=true" for form in ("matmul", "sigmoid", "sparsemax", "stick", "moba", "index", "delta")),
    *("matmul attention_dropout=0.1 dropout=0.1", "sdpa+sink+window attention_window=64"),
]
# The operators of a step of one layer that launch a kernel; Muon and AdamW are some 250 of them.
MOST_LAUNCHES = {"sdpa": 450, "sparsemax": 930, "index": 800}


@pytest.mark.long
def test_no_step_of_a_long_text_waits_for_the_gpu_inside_of_chunks_either(library):
    lines = on_fake_cuda(library, str(HERE / "fake_cuda.py"), *(f"{case} block_size=320" for case in LONG))
    found = {case.removesuffix(" block_size=320"): each for line in lines for case, each in json.loads(line).items()}
    assert [*found] == LONG
    assert "_foreach_sub_" in found["sdpa"]["launches"] and "addcmul_" not in found["sdpa"]["launches"]
    for case, most in MOST_LAUNCHES.items():
        assert sum(found[case]["launches"].values()) <= most, found[case]["launches"]


READS = """
import sys
from unittest import mock
import torch
from fake_cuda import fake_gpu, rehearse
from model.gpt import Block

forward = Block._forward
with fake_gpu():
    for line in sys.argv[1:]:
        def reading(self, x, ctx):
            exec(line, {"x": x, "torch": torch})
            return forward(self, x, ctx)
        with mock.patch.object(Block, "_forward", reading):
            try:
                rehearse("sdpa")
            except Exception as error:
                print(type(error).__name__)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_read_of_a_number_a_truth_a_tensor_or_a_size_in_a_step_is_found(library):
    lines = ["x.sum().item()", "bool(x.sum() > 0)", "x.to('cpu')", "x[x > 0]", "x + torch.ones(1).to(x.device)"]
    errors = ["DataDependentOutputException"] * 2 + ["RuntimeError", "DynamicOutputShapeException", "RuntimeError"]
    assert on_fake_cuda(library, "-c", READS, *lines) == errors
