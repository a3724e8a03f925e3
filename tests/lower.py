"""Compile layers for a GPU that is not there, and print as JSON what the compiler makes of them.

LD_PRELOAD=LIBRARY PYTHONPATH=.:tests python tests/lower.py CAPABILITY CUBINS CASE ...

LIBRARY: fake_cuda.cpp, compiled. CAPABILITY: 9.0, or another card's. CUBINS: the number of each case's kernels that
Triton's own ptxas translates to machine code. CASE: an attention, then settings of the model; `loss` is that of a chunk
of tokens. torch.compile takes forward and backward on the fake device down to Triton's source, which needs Triton's
wheel and no driver.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import fake_cuda
import torch
import torch._dynamo.device_interface as interfaces
import torch._functorch.config as aot_config
import torch._inductor.async_compile as async_compile
import torch._inductor.codecache as codecache
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.fx_passes.post_grad as post_grad
import torch.nn.functional as F
import triton
import yaml
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from triton.backends.compiler import GPUTarget

from model.attention.context import AttentionContext
from model.config import GPTConfig
from model.gpt import GPT
from model.loss import chunk_loss_and_gradient
from model.size import without_weights
from training.device import fast_products

MULTIPROCESSORS = {9: 132, 8: 108, 7: 40}
SHARED_MEMORY = {9: 232_448, 8: 166_912, 7: 65_536}  # bytes of a block
SHAPE: dict[str, Any] = dict(n_layer=1, n_head=8, n_kv_head=2, n_embd=512, vocab_size=2048, zero_init=False)
MANY, FEW = (1024, 768, 640), (256, 192, 128)
"""Lengths of texts: the first is lowered."""
IN_CHUNKS = ("linear", "retention", "delta", "kda", "gdn2", "wall")
"""Forms whose chunks are a loop, which the compiler unrolls for each length: they get the few tokens."""
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)
programs: list[str] = []
"""The compiler's programs: one for each graph, forward or backward."""


class Lowered(BaseException):
    """The program would run now."""


def pretend(capability: tuple[int, int]) -> None:
    """Let torch, inductor and Triton see a card of a compute capability."""
    major, minor = capability
    card = SimpleNamespace(
        name="a card",
        major=major,
        minor=minor,
        multi_processor_count=MULTIPROCESSORS[major],
        total_memory=80 << 30,
        warp_size=32,
        max_threads_per_multi_processor=1024 if major == 7 else 2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65_536,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=SHARED_MEMORY[major],
        shared_memory_per_multiprocessor=SHARED_MEMORY[major] + 1024,
        L2_cache_size=50 << 20,
        gcnArchName="",
        clock_rate=1_755_000,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
    )

    class Driver:
        utils = SimpleNamespace(
            get_device_properties=lambda device: dict(
                max_shared_mem=SHARED_MEMORY[major],
                multiprocessor_count=MULTIPROCESSORS[major],
                warpSize=32,
                max_num_regs=65_536,
            )
        )

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **named: 0

    triton.runtime.driver.set_active(Driver())
    answers: dict[str, Any] = {
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: card,
        "is_bf16_supported": lambda including_emulation=True: major >= 8,
        "get_device_name": lambda device=None: card.name,
        "set_device": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *given, **named: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
    }
    fake_cuda.ANSWERS |= {f"torch.cuda.{name}": answer for name, answer in answers.items()}
    torch._C._cuda_getCurrentRawStream = lambda device=0: 0  # type: ignore[attr-defined]

    # Inductor keeps references of its own.
    own = {name: answers[name] for name in ("set_device", "get_device_properties", "synchronize", "memory_allocated")}
    own |= dict(current_device=lambda: 0, device_count=lambda: 1, is_available=lambda: True)
    own |= dict(get_raw_stream=lambda device=0: 0, exchange_device=lambda device: 0)
    own |= dict(maybe_exchange_device=lambda device: 0, get_compute_capability=lambda device=None: 10 * major + minor)
    own |= dict(is_bf16_supported=lambda including_emulation=False: major >= 8)
    own |= dict(is_triton_capable=lambda device=None: True, raise_if_triton_unavailable=lambda device=None: None)
    for name, answer in own.items():
        setattr(interfaces.CudaInterface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device", "set_device"):
        setattr(interfaces.CudaInterface.Worker, name, staticmethod(own[name]))
    for name in ("cuda", "cuda:0"):
        interfaces.register_interface_for_device(name, interfaces.CudaInterface)


def keep_programs(flash: bool) -> None:
    """Keep inductor's programs in place of running them, and name torch's attention kernel.

    flash: whether the card has FlashAttention, for half precision.
    """
    inductor_config.joint_graph_constant_folding = False
    inductor_config.compile_threads = 1
    aot_config.force_non_lazy_backward_lowering = True
    # These compute on the device.
    joint_graph.lazy_init = lambda *given, **named: None
    post_grad.lazy_init = lambda *given, **named: None
    async_compile.AsyncCompile.triton = lambda *given, **named: None

    def run(arguments: list) -> None:
        raise Lowered

    def load(cls: type, key: str, path: str, *given: Any, **named: Any) -> SimpleNamespace:
        programs.append(Path(path).read_text(encoding="utf-8"))
        return SimpleNamespace(call=run, __file__=str(path), key=key, _reload_in_subproc=None)

    codecache.PyCodeCache.load_by_key_path = classmethod(load)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if flash and mask is None and q.dtype.itemsize == 2:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention
            return kernel(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]

    F.scaled_dot_product_attention = attend


def lower(case: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return graphs, breaks, kernels and other calls of forward and backward, and the graphs of several lengths."""
    traced = 0

    def lower_the_first(graph: Any, given: Any) -> Any:
        nonlocal traced
        traced += 1
        if traced == 1:
            compile_fx(graph, given)
        return graph.forward  # on to other lengths

    programs.clear()
    torch._dynamo.reset()
    counters.clear()
    attention, *settings = case.split()
    values = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in settings)}
    documents = values.pop("document_mask", False)
    autocast = torch.autocast("cuda", dtype=dtype)
    try:
        with fast_products(fake_cuda.GPU, dtype), autocast:
            if attention == "loss":
                x, heads = (torch.randn(rows, 512, device=fake_cuda.GPU, dtype=dtype) for rows in (MANY[0], 2048))
                targets = torch.zeros(MANY[0], 1, dtype=torch.int64, device=fake_cuda.GPU)
                torch.compile(chunk_loss_and_gradient)(x, heads, targets, 2000, None)
            else:
                # The second length makes the length a variable, and a third compiles nothing, but for IN_CHUNKS.
                most, *others = FEW if attention in IN_CHUNKS else MANY
                model = layer(GPTConfig(attention=attention, block_size=most, **SHAPE | values))
                model.blocks[-1].compile(backend=lower_the_first)
                for length in (most, *others):
                    pass_through(model, length, documents)
    except Lowered:
        pass
    return {
        "graphs": len(programs),
        "breaks": sum(counters["graph_break"].values()),
        "kernels": [len(KERNEL.findall(program)) for program in programs],
        "products": [len(re.findall(r"extern_kernels\.\w+\(", program)) for program in programs],
        "others": sorted({name for program in programs for name in re.findall(r"torch\.ops\.([\w.]+)\(", program)}),
        "of lengths": traced,
        "in chunks": attention in IN_CHUNKS,
    }


def layer(config: GPTConfig) -> GPT:
    return fake_cuda.on_gpu(without_weights(config)).train()


def pass_through(model: GPT, length: int, documents: bool) -> None:
    """Call the model's blocks as GPT.hidden() does."""
    tokens = torch.zeros(4, length, dtype=torch.int64, device=fake_cuda.GPU)
    ctx = AttentionContext(loss=torch.zeros((), device=fake_cuda.GPU, requires_grad=True))
    model.hidden(tokens, doc_starts=tokens if documents else None, ctx=ctx)


def cubins(most: int) -> int:
    """Translate some kernels of the programs to machine code; return how many."""
    import torch._inductor.runtime.triton_helpers as helpers
    from torch._inductor.runtime import triton_heuristics

    class Translated(BaseException):
        """The machine code is there; no card could load it."""

    translate = triton.compile

    def compile(*given: Any, **named: Any) -> None:
        assert translate(*given, **named).asm["cubin"]
        raise Translated

    triton.compile = compile
    helpers.set_driver_to_gpu = triton_heuristics.triton_helpers.set_driver_to_gpu = lambda: None
    kernels = [kernel for program in programs for kernel in KERNEL.findall(program)]
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, source) in enumerate(kernels[:most]):
            path = Path(folder, f"kernel_{number}.py")
            path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""), encoding="utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            kernel = getattr(module, name)
            try:
                kernel._precompile_config(kernel.configs[0])
            except Translated:
                count += 1
    triton.compile = translate
    return count


def main() -> None:
    capability = tuple(map(int, sys.argv[1].split(".")))
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    pretend(capability)  # type: ignore[arg-type]
    keep_programs(flash=capability >= (8, 0))
    with fake_cuda.fake_gpu():
        for case in sys.argv[3:]:
            try:
                found = lower(case, dtype)
                found["cubins"] = cubins(int(sys.argv[2]))
            except Exception as error:
                error.add_note(f"in {case}")
                raise
            print(json.dumps({case: found}), flush=True)


if __name__ == "__main__":
    main()
