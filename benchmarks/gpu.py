"""Everything that needs a GPU, in five calls of at most nine minutes each:

    python benchmarks/gpu.py tests PATH_OF_A_NANOGPT_CHECKOUT
    python benchmarks/gpu.py training PATH_OF_A_NANOGPT_CHECKOUT
    python benchmarks/gpu.py kernels PATH_OF_A_NANOGPT_CHECKOUT
    python benchmarks/gpu.py forms PATH_OF_A_NANOGPT_CHECKOUT
    python benchmarks/gpu.py rest PATH_OF_A_NANOGPT_CHECKOUT [PATH_OF_TINY_SHAKESPEARE]

tests     pytest -m gpu: first what needs no compiler, with recompute=block and torch's count of waits, then its 25
          compilations, in what is left of the nine minutes
training  GPT-2 124M beside nanoGPT, compiled, in bf16: tokens/s, and the loss of 200 steps on the same batches;
          then the peak memory of its steps beside dry_run's prediction
kernels   GPT-2 124M and the default run, eager and compiled: tokens/s, the time of the first step, peak memory beside
          its prediction, and the twelve kernels that take longest; `torchrun` with one process, and its resume;
          what CUDA graphs would bring, of which train.py has none: docs/hardware.md
forms     every form and modifier trains, eager and compiled: a step's time and memory; each attention function;
          tokens/s of decoding at batch 1 and 64 beside nanoGPT and Hugging Face
rest      `python train.py` as README has it, eager and compiled; Shakespeare by each project's recipe
A part is a process with a time of its own. One that fails says so, and the next goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import memory
import nanogpt
import paired
import throughput
import torch
from torch.profiler import ProfilerActivity

from common.errors import first_line
from model.attention import FORMS, MODIFIERS
from model.loss import chunk_loss_and_gradient
from train import train_step
from training.config import TrainConfig
from training.device import choose_precision, fast_products, peak_memory, reset_peak_memory
from training.plan import predict_memory

CALLS = ("tests", "training", "kernels", "forms", "rest")
LONGEST = 12  # kernels of a table
SECONDS = 540  # of a call


def main() -> None:
    parser = paired.parser(__doc__)
    parser.add_argument("call", choices=(*CALLS, *PARTS))
    parser.add_argument("nanogpt", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("text", nargs="?", type=Path, help="tiny Shakespeare")
    arguments = parser.parse_args()
    if arguments.call in PARTS:
        return PARTS[arguments.call]()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here: throughput.py and the other benchmarks run on a CPU")
    end = time.monotonic() + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        failed = [
            name
            for name, command in parts(arguments, Path(folder)).items()
            if not ended_well(name, command, end - time.monotonic())
        ]
    sys.exit(f"error: {', '.join(failed)} failed, as said above" if failed else 0)


def parts(arguments: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The commands of a call, in the order of what they are worth."""
    theirs, here = str(arguments.nanogpt), Path(__file__).parent
    if arguments.call == "tests":
        pytest = ["-m", "pytest", "-q", "-rfEs", "-m", "gpu", "-p", "no:cacheprovider"]
        chosen = {"eager tests": "not compiled", "compiled tests": "compiled"}
        return {name: [*pytest, "-k", words, str(paired.ROOT / "tests")] for name, words in chosen.items()}
    if arguments.call == "training":
        corpus = [str(here / "throughput.py"), theirs, "--corpus", "--rounds", "20"]
        return {"throughput": corpus, "memory": [str(here / "memory.py"), "--rounds", "1"]}
    if arguments.call == "kernels":
        run_dir, cache = folder / "ranks", f"data.cache_dir={folder / 'cache'}"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(paired.ROOT / "train.py")]
        return {
            "profile": [__file__, "profile", theirs],
            "torchrun": [*torchrun, f"run_dir={run_dir}", cache, "max_steps=100"],
            "torchrun, resumed": [*torchrun, f"resume={run_dir}", "max_steps=200"],
            "CUDA graphs": [__file__, "graphs", theirs],
        }
    if arguments.call == "forms":
        decoding = [str(here / "generate.py"), theirs, "--shape", "2"]
        return {
            "steps": [__file__, "steps", theirs],
            "decoding": decoding,
            "decoding 64": [*decoding, "--batch", "64"],
            "attention": [str(here / "attention.py")],
        }
    train, commands = str(paired.ROOT / "train.py"), {}
    for compiled in ("off", "on"):
        where = [f"run_dir={folder / compiled}", f"data.cache_dir={folder / 'cache'}"]
        commands[f"train.py compile={compiled}"] = [train, f"compile={compiled}", *where]
    if arguments.text:
        copy = nanogpt.copy_with_data(arguments.nanogpt, folder, arguments.text)
        where = [f"run_dir={folder / 'text'}", f"data.cache_dir={folder / 'cache'}"]
        commands["our Shakespeare"] = [train, "+experiment=shakespeare", f"data.path={arguments.text}", *where]
        commands["nanoGPT's Shakespeare"] = [str(copy / "train.py"), str(copy / "config/train_shakespeare_char.py")]
    return commands


def ended_well(name: str, words: list[str], seconds: float) -> bool:
    """Run a part, which prints its tables itself, until its time is over; say how it ended."""
    print(f"## {name}\n", flush=True)
    started = time.perf_counter()
    try:
        status = subprocess.run([sys.executable, *words], timeout=max(1, seconds), check=False).returncode
        problem = f"ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        problem = "took longer than what was left of the call"
    print(f"\n{problem or 'done'} after {time.perf_counter() - started:.0f} s\n", flush=True)
    return not problem


def steps() -> None:
    """Print time and peak memory of a training step: every form, and sdpa with every modifier."""
    names = [*FORMS, *(f"sdpa+{name}" for name in MODIFIERS), "sdpa+window", "sdpa+window/sdpa"]
    shape, device = throughput.GPT2_124M._replace(n_layer=2, batch_size=8, vocab_size=2048), paired.device()
    precision = choose_precision("auto", device)

    def row(name: str) -> list[str]:
        window = {"attention_window": 256} if "window" in name else {}
        config = throughput.make_config(shape, {"attention": name} | window, {})
        cells = []
        for compiled in (False, True):
            try:
                peak = memory.peak(config, compiled=compiled)
                run = throughput.make_run(config, precision, device, compiled=compiled)
                with fast_products(device, precision):
                    losses = [train_step(run, step)[0].item() for step in range(3)]
                    seconds = paired.timed(lambda run=run: train_step(run, 3), 10)()
                cells += [f"{1e3 * seconds:.1f}", f"{peak / 1e9:.2f}", f"{losses[-1]:.3f}"]
            except Exception as error:
                cells += ["failed", first_line(error)[:120], ""]
        return [f"`{name}`", *cells]

    print(f"Training steps of {shape}, {precision}; a loss after three steps:\n")
    heads = [f"{way} {what}" for way in ("eager", "compiled") for what in ("step, ms", "peak, GB", "loss")]
    paired.table(["attention", *heads], map(row, names))


def profile() -> None:
    """Print speed, memory and the longest kernels of steps."""
    device = paired.device()
    shape = throughput.GPT2_124M
    if device.type == "cpu":  # a rehearsal
        shape = shape._replace(n_layer=2, n_head=2, n_embd=64, block_size=320, batch_size=2, vocab_size=257)
    configs = {
        f"GPT-2, {shape}": throughput.make_config(shape, throughput.GPT2_SHAPE, throughput.ADAMW),
        f"default, {shape}": throughput.make_config(shape, {}, {}),
    }
    for name, config in configs.items():
        for compiled in (False, True) if device.type == "cuda" else (False,):
            print(f"### {name}, {'compiled' if compiled else 'eager'}\n")
            try:
                profile_steps(config, compiled)
            except Exception as error:
                print(f"failed: {first_line(error)}\n", flush=True)


def profile_steps(config: TrainConfig, compiled: bool) -> None:
    """Print the tables of one config."""
    # Take the first step, which compiles, and some more.
    device = paired.device()
    precision = choose_precision("auto", device)
    torch.compiler.reset()
    reset_peak_memory(device)
    run = throughput.make_run(config, precision, device, compiled=compiled)
    with fast_products(device, precision):
        first = paired.timed(lambda: train_step(run, 0)[0].item())()
        train_step(run, 1)
        seconds = paired.timed(lambda: [train_step(run, step) for step in range(2, 12)])() / 10
        peak = peak_memory(device)

        # Record one.
        activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as recorded:
            loss = train_step(run, 12)[0].item()
    predicted = predict_memory(train_step, config, config.batch_size, precision, on_gpu=device.type == "cuda").peak
    heads = ["tokens/s", "a step, ms", "the first, s", "peak, GB", "predicted, GB", "loss"]
    rate = config.tokens_per_step / seconds
    figures = [f"{rate:,.0f}", f"{1e3 * seconds:.1f}", f"{first:.1f}", f"{peak / 1e9:.2f}", f"{predicted / 1e9:.2f}"]
    paired.table(heads, [[*figures, f"{loss:.3f}"]])

    # Its kernels.
    time_of = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    kernels = sorted(recorded.key_averages(), key=lambda kernel: -getattr(kernel, time_of))[:LONGEST]
    rows = [[f"`{kernel.key[:90]}`", f"{getattr(kernel, time_of) / 1e3:.2f}", str(kernel.count)] for kernel in kernels]
    paired.table(["kernel", "ms a step", "launches"], rows)


def graphs() -> None:
    """Print the speed of steps eager, compiled, and compiled with CUDA graphs, and how far their losses are apart."""
    shapes = [DEFAULT_RUN, throughput.GPT2_124M] if paired.device().type == "cuda" else [DEFAULT_RUN]  # a rehearsal
    for shape in shapes:
        config = throughput.make_config(shape, {}, {})
        found: dict[str, tuple[float, list[float]]] = {}
        failed = {}
        for way in WAYS:
            try:
                found[way] = steps_of(config, way)
            except Exception as error:  # a CUDA error fails the rows after it too
                failed[way] = ["failed", first_line(error)[:120], "", ""]
        rows = []
        for way in WAYS:
            cells = failed.get(way)
            if not cells:
                seconds, losses = found[way]
                cells = [f"{config.tokens_per_step / seconds:,.0f}", f"{1e3 * seconds:.2f}", f"{losses[-1]:.4f}", "–"]
                if COMPILED in found:
                    cells[-1] = f"{max(abs(a - b) for a, b in zip(losses, found[COMPILED][1], strict=True)):.1e}"
            rows.append([way, *cells])
        print(f"default, {shape}\n")
        paired.table(["", "tokens/s", "a step, ms", "the last loss", f"losses from {COMPILED}"], rows)


def steps_of(config: TrainConfig, way: str) -> tuple[float, list[float]]:
    """Return the seconds of a step of one of WAYS, and the losses of 30 steps on the same batches."""
    device = paired.device()
    precision = choose_precision("auto", device)
    torch.compiler.reset()
    run = throughput.make_run(config, precision, device, compiled=way != "eager")
    if way == GRAPHED:
        for block in run.model.blocks:
            block.compile(mode="reduce-overhead")
        run.model.runtime.loss_and_gradient = torch.compile(chunk_loss_and_gradient, mode="reduce-overhead")

    losses = []

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            torch.compiler.cudagraph_mark_step_begin()  # what the graphs of the last step returned is not needed
            losses.append(train_step(run, step)[0])

    with fast_products(device, precision):
        steps(0, 10)  # they compile and record
        seconds = paired.timed(lambda: steps(10, 30))() / 20
    return seconds, torch.stack(losses).tolist()


DEFAULT_RUN = throughput.Shape(4, 4, 128, 128, 16, 2049, 8)
COMPILED, GRAPHED = "compiled", "compiled, with CUDA graphs"
WAYS = ("eager", COMPILED, GRAPHED)
PARTS = {"steps": steps, "profile": profile, "graphs": graphs}


if __name__ == "__main__":
    main()
