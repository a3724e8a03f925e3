"""Run a GPU's programs of torch.compile in Triton's interpreter; print their errors as JSON.

TRITON_INTERPRET=1 LD_PRELOAD=LIBRARY PYTHONPATH=.:tests python tests/interpret.py CASE ...

LIBRARY and CASE: as in lower.py. Each program is a graph of operations, forward or backward. It gets drawn numbers; its
kernels run element by element in Triton's interpreter, and its products of matrices in torch. The graph itself, in
float64, is what they must give. torch's own attention kernels have no code for a CPU: choose forms without them.
"""

import copy
import json
import math
import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import fake_cuda
import lower
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import Graph, GraphModule, Interpreter

from model.config import GPTConfig
from model.loss import chunk_loss_and_gradient

SHAPE: dict[str, Any] = dict(n_layer=1, n_head=4, n_kv_head=2, n_embd=64, vocab_size=64, zero_init=False)
T = 32
BLOCKS = dict(XBLOCK=256, YBLOCK=16, R0_BLOCK=32, R1_BLOCK=32)
DECORATOR = re.compile(r"@triton_heuristics\.\w+\(.*?\n\)\n(?=@triton\.jit)", re.S)
LIBDEVICE = {
    "log1p": "tl.log(1.0 + x)",
    "expm1": "tl.exp(x) - 1.0",
    "tanh": "2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0",
    **{name: f"tl.{name}(x)" for name in ("rsqrt", "exp", "log", "sqrt", "abs")},
}
"""Functions of CUDA's library, which the interpreter has not."""
DEFINED = "".join(f"@triton.jit\ndef libdevice_{name}(x):\n    return {value}\n\n" for name, value in LIBDEVICE.items())
graphs: list[GraphModule] = []
"""The graph of each program."""


def noting_graphs(graph: GraphModule, given: Any, **options: Any) -> Any:
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    graphs.append(GraphModule(graph, nodes))
    return compile_fx_inner(graph, given, **options)


def backend(graph: GraphModule, given: Any) -> Any:
    return compile_fx(graph, given, inner_compile=noting_graphs)


class Exact(Interpreter):
    """The graph on a CPU, with float64 in place of all floating-point types."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        named = dict(kwargs)
        if "device" in named:
            named["device"] = "cpu"
        if isinstance(named.get("dtype"), torch.dtype) and named["dtype"].is_floating_point:
            named["dtype"] = torch.float64
        if target is torch.ops.prims.convert_element_type.default and args[1].is_floating_point:
            args = (args[0], torch.float64)
        if target is torch.ops.prims.iota.default:
            named["requires_grad"] = False
        return super().call_function(target, args, named)

    def run_node(self, node: Any) -> Any:
        found = super().run_node(node)
        return found.double() if isinstance(found, Tensor) and found.is_floating_point() else found


def kernel(name: str, source: str, **options: Any) -> SimpleNamespace:
    """Return a kernel that runs in the interpreter."""
    sizes = re.search(rf"^def {name}\((.*)\):$", source, re.M)
    assert sizes is not None
    names = [each.partition(":")[0].strip() for each in sizes[1].split(",")]
    code = DECORATOR.sub("", source).replace("triton_helpers.set_driver_to_gpu()", "")
    code = re.sub(r"libdevice\.(\w+)\(", r"libdevice_\1(", code).replace("@triton.jit", f"{DEFINED}@triton.jit", 1)
    space: dict[str, Any] = {"__name__": name, "__file__": name}
    path = lower.Path(folder.name, f"{name}_{len(list(lower.Path(folder.name).iterdir()))}.py")
    path.write_text(code, encoding="utf-8")  # Triton reads the source of a function
    exec(compile(code, str(path), "exec"), space)

    def run(*arguments: Any, stream: int) -> None:
        extents = dict(zip(names, arguments, strict=False))
        blocks = {block: size for block, size in BLOCKS.items() if block in names}
        grid = [math.ceil(extents[f"{axis}numel"] / blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in "xyz"
                if f"{axis}numel" in extents]  # fmt: skip
        space[name][(*grid, 1, 1)[:3]](*arguments, **blocks)

    return SimpleNamespace(run=run)


def runner(program: str) -> Callable[[list], Any]:
    """Return the function of a program, on a CPU."""
    program = program.replace("cuda:0", "cpu").replace("empty_strided_cuda(", "empty_strided_cpu(")
    program = program.replace("torch.cuda._DeviceGuard(0)", "nullcontext()").replace("torch.cuda.set_device(0)", "pass")
    program = program.replace("async_compile.triton(", "kernel(").replace("async_compile.wait(globals())", "")
    program = re.sub(r"device\(type='cuda', index=0\)", "'cpu'", program)
    space: dict[str, Any] = {"__name__": "program", "kernel": kernel, "nullcontext": nullcontext}
    exec(program, space)
    return space["call"]


def drawn(program: str) -> list[Any]:
    """Return inputs of a program."""
    space: dict[str, Any] = {"torch": torch, "device": torch.device}
    text = program[program.index("def get_args():") : program.index("def benchmark_compiled_module(")]
    exec(text.replace("cuda:0", "cpu"), space)
    given = []
    for value in space["get_args"]():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.uniform_(0.1, 1.0)
        elif isinstance(value, Tensor) and value.dtype == torch.bool:
            value.random_(0, 2)
        elif isinstance(value, Tensor):
            value.random_(0, 8)
        given.append(value)
    return given


def lowered(case: str) -> list[tuple[str, GraphModule]]:
    """Return programs and their graphs, forward and backward."""
    lower.programs.clear()
    graphs.clear()
    torch._dynamo.reset()
    attention, *settings = case.split()
    values = {name: lower.yaml.safe_load(value) for name, _, value in (each.partition("=") for each in settings)}
    with lower.fast_products(fake_cuda.GPU, torch.bfloat16), torch.autocast("cuda", dtype=torch.bfloat16):
        try:
            if attention == "loss":
                x, heads = (torch.randn(rows, 64, device=fake_cuda.GPU, dtype=torch.bfloat16) for rows in (T, 64))
                targets = torch.zeros(T, 1, dtype=torch.int64, device=fake_cuda.GPU)
                torch.compile(chunk_loss_and_gradient, backend=backend)(x, heads, targets, 60, None)
            else:
                model = lower.layer(GPTConfig(attention=attention, block_size=T, **SHAPE | values))
                model.blocks[-1].compile(backend=backend)
                lower.pass_through(model, T, False)
        except lower.Lowered:
            pass
    return list(zip(lower.programs, graphs, strict=True))


def errors(case: str) -> list[float]:
    """Return for each program the largest error of an output, as a share of its largest number."""
    found = []
    with fake_cuda.fake_gpu():
        programs = lowered(case)
    for program, graph in programs:
        given = drawn(program)
        wanted = Exact(graph).run(*(copy.deepcopy(value) for value in given))
        outputs = runner(program)(given)
        worst = 0.0
        for a, b in zip(outputs, wanted, strict=True):
            if isinstance(a, Tensor):
                assert a.shape == b.shape
                worst = max(worst, ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1)).item())
        found.append(worst)
    return found


def main() -> None:
    lower.pretend((9, 0))
    lower.keep_programs(flash=True)
    inductor_config.triton.descriptive_names = False
    for case in sys.argv[1:]:
        print(json.dumps({case: errors(case)}), flush=True)


folder = lower.tempfile.TemporaryDirectory()
if __name__ == "__main__":
    main()
