"""Everything that needs a GPU, in one call of under ten minutes:

    python benchmarks/gpu.py [PATH_OF_A_NANOGPT_CHECKOUT [PATH_OF_TINY_SHAKESPEARE]]

Sections, each in a process of its own, which ends when its share of the time has passed (--only chooses some):
  default      `python train.py` and with compile=on: the whole process, its training alone, tokens/s after step 1
  compiling    a step eager and compiled, what compiling costs, the estimates in training/compiling.py measured
  training     GPT-2 124M's tokens/s beside nanoGPT's, both compiled, in bf16
  memory       peak of training steps beside dry_run's prediction
  decode       tokens/s of GPT-2 124M at batch 1 and 64, in float32 and bf16, beside nanoGPT's generate
  attention    time and memory of each form at GPT-2's shape; of training steps with windows and ALiBi
  tests        pytest -m gpu
  shakespeare  `python train.py +experiment=shakespeare` and nanoGPT's train_shakespeare_char: time to 1.47 nats a byte
Rows of nanoGPT need its checkout, `shakespeare` the text; nothing is downloaded. A section that fails says so in two
lines, and the next one goes on. --tiny is a rehearsal of the script itself, on a CPU too.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path

NEEDED = {
    "torch": "torch", "numpy": "numpy", "tqdm": "tqdm", "tiktoken": "tiktoken", "rustbpe": "rustbpe",
    "hydra": "hydra-core", "omegaconf": "omegaconf", "antlr4": "antlr4-python3-runtime", "yaml": "PyYAML",
    "safetensors": "safetensors", "jaxtyping": "jaxtyping", "filelock": "filelock", "matplotlib": "matplotlib",
}  # fmt: skip
if missing := [package for name, package in NEEDED.items() if not find_spec(name)]:
    sys.exit(f"error: {', '.join(missing)} not installed: run  pip install -e .")

import attention
import generate
import memory
import nanogpt
import numpy as np
import paired
import throughput
import time_to_loss
import torch

from model.size import flops_per_token, without_weights
from runs.metrics import read_metrics
from training import compiling
from training.config import TrainConfig
from training.device import choose_precision, fast_products
from training.step import take_step

ENOUGH = 1.47
"""Nats a byte that nanoGPT's README gives for its train_shakespeare_char."""


@dataclass(frozen=True)
class Sizes:
    default: tuple[str, ...]
    """Settings of the default run, and of Shakespeare's."""
    shakespeare: tuple[str, ...]
    theirs: tuple[str, ...]
    """nanoGPT's settings for Shakespeare."""
    small: throughput.Shape
    large: throughput.Shape
    decoded: str
    """One of generate.SHAPES."""
    batches: tuple[int, int]
    tests: tuple[str, ...]
    """What pytest collects."""


FULL = Sizes(
    (), (), (), throughput.Shape(4, 4, 128, 128, 16, 2048, steps=20), replace(throughput.GPT2_124M, steps=5),
    "12 × 768, T = 1024", (1, 64), (),
)  # fmt: skip
FEW = (
    "model.n_layer=1",
    "model.block_size=16",
    "batch_size=2",
    "max_steps=3",
    "log_interval=1",
    "sample_tokens=0",
    "device=cpu",
)
TINY = Sizes(
    ("data.path=README.md", "tokenizer=byte", *FEW),
    FEW,
    (
        "--device=cpu", "--compile=False", "--eval_iters=1", "--eval_interval=2", "--max_iters=3", "--n_layer=1",
        "--n_head=2", "--n_embd=32", "--batch_size=2", "--block_size=16", "--always_save_checkpoint=True",
    ),
    throughput.Shape(1, 2, 32, 16, 2, 64, steps=1),
    throughput.Shape(2, 2, 32, 32, 2, 96, steps=1),
    "4 × 128, T = 64", (1, 2), ("--noconftest", "tests/test_house.py"),
)  # fmt: skip


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("nanogpt", nargs="?", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("text", nargs="?", type=paired.file, help="tiny Shakespeare")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section, as often as given")
    parser.add_argument("--minutes", type=paired.count, default=9, help="for all sections (9)")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with tiny shapes, on a CPU too")
    parser.add_argument("--section", nargs=3, metavar=("NAME", "SECONDS", "LOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sizes = TINY if arguments.tiny else FULL
    if arguments.section:
        name, seconds, load = arguments.section
        paired.already_loaded(float(load))
        sys.exit(0 if measured(name, arguments, float(seconds)) else 1)
    if not torch.cuda.is_available() and not arguments.tiny:
        sys.exit(
            "error: there is no CUDA device here: rehearse with --tiny, or run throughput.py and the others alone."
        )
    end, failed = time.monotonic() + 60 * arguments.minutes, []
    paired.header()
    with tempfile.TemporaryDirectory() as caches:  # new: `default` and `compiling` compile from cold caches
        for name in arguments.only or SECTIONS:
            print(f"## {name}\n", flush=True)
            seconds = min(SECTIONS[name].seconds, end - time.monotonic())
            cache = f"{caches}/{'one' if name == 'default' else 'another'}"
            new = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton", "PYTHONUNBUFFERED": "1"}
            if not ended_well(command(name, seconds), seconds, os.environ | new):
                failed.append(name)
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed, as said above.")


def command(name: str, seconds: float) -> list[str]:
    """What measures one section alone."""
    return [sys.executable, __file__, *sys.argv[1:], "--section", name, f"{seconds:.0f}", f"{paired.load():.1f}"]


def ended_well(words: list[str], seconds: float, environment: dict[str, str]) -> bool:
    """Run a section's process, which prints its tables itself, and end it and its children after its time."""
    started = time.perf_counter()
    if seconds < 1:
        print("\nerror: left out\nthe time is up: give more --minutes, or name it with --only\n", flush=True)
        return False
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
        if status not in (0, 1):
            print(f"\nerror: ended with status {status}\na negative one is the signal that killed it\n", flush=True)
        return status == 0
    except subprocess.TimeoutExpired:
        print(f"\nerror: stopped\nit took longer than its {seconds:.0f} s\n", flush=True)
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"{time.perf_counter() - started:.0f} s of {seconds:.0f}\n", file=sys.stderr, flush=True)


def measured(name: str, arguments: argparse.Namespace, seconds: float) -> bool:
    """Measure a section in this process; rounds stop in time to print their table. An error is said in two lines."""
    paired.stop_after(0.8 * seconds)
    try:
        SECTIONS[name].measure(arguments)
        return True
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).removeprefix("error: ").split())[:300]
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(paired.ROOT)] or frames
        print(f"\nerror: {type(error).__name__}: {words}")
        print(f"in {ours[-1].name}, {Path(ours[-1].filename).name}:{ours[-1].lineno}\n", flush=True)
        return False


def default(arguments: argparse.Namespace) -> None:
    """The run of README's first command."""
    columns = ["whole process, s", "training alone, s", "to the end of step 1, s", "tokens/s after it"]
    with tempfile.TemporaryDirectory() as name:
        paired.table(
            ["one run each", *columns, "loss, nats a token"], default_runs(Path(name), arguments.sizes.default)
        )


def default_runs(folder: Path, settings: tuple[str, ...]) -> Iterator[list[str]]:
    ways = {"`python train.py`, which prepares its text": "auto", "compile=off": "off"}
    ways |= {"compile=on, the first time": "on", "compile=on, the second time": "on"}
    for number, (way, choice) in enumerate(ways.items()):
        run = folder / str(number)
        where = [f"data.cache_dir={folder / 'cache'}", f"run_dir={run}"]
        whole = time_to_loss.train(*where, f"compile={choice}", *settings)
        log = read_metrics(run / "metrics.jsonl")
        steps = [row for row in log if "loss" in row]
        training, first = time_to_loss.training_seconds(log), steps[0]["seconds"]
        rate = (steps[-1]["tokens"] - steps[0]["tokens"]) / (training - first)
        loss = min(row["val_loss"] for row in log if "val_loss" in row)
        yield [way, f"{whole:.1f}", f"{training:.1f}", f"{first:.1f}", f"{rate:,.0f}", f"{loss:.3f}"]


def models(sizes: Sizes) -> dict[str, tuple[throughput.Shape, TrainConfig]]:
    large = sizes.large
    return {
        "the default": (sizes.small, throughput.make_config(sizes.small, {}, throughput.MUON)),
        "GPT-2's shape": (large, throughput.make_config(large, throughput.GPT2_SHAPE, throughput.ADAMW)),
        "default, GPT-2's size": (large, throughput.make_config(large, {}, throughput.MUON)),
    }


def compiling_pays(arguments: argparse.Namespace) -> None:
    """Steps of the default and of GPT-2's shape, and from both the constants of training/compiling.py."""
    found: list[Compiled] = []
    heads = ["", "eager step, ms", "compiled, ms", "first two eager, s", "first two compiled, s", "compiling, s"]
    paired.table([*heads, "steps until it pays"], compiled_steps(arguments.sizes, found))
    # saved = blocks × SAVED_A_BLOCK + SAVED_SHARE × FLOP / ARITHMETIC, at both shapes
    reached = found[-1].flops / found[-1].eager
    block, share = np.linalg.solve([(of.blocks, of.flops / reached) for of in found], [of.saved for of in found])
    constants = {"COMPILE_SECONDS": max(of.cost for of in found), "SAVED_A_BLOCK": block}
    constants |= {"SAVED_SHARE": share, "ARITHMETIC": reached}
    rows = ([f"`{name}`", f"{getattr(compiling, name):.3g}", f"{value:.3g}"] for name, value in constants.items())
    paired.table(["training/compiling.py", "there", "measured here"], rows)


@dataclass(frozen=True)
class Compiled:
    blocks: int
    flops: float
    """Of a step."""
    eager: float
    """Seconds of a step."""
    saved: float
    """Of these, compiled."""
    cost: float
    """Seconds that the first two steps take longer."""


def compiled_steps(sizes: Sizes, found: list[Compiled]) -> Iterator[list[str]]:
    for name, (shape, config) in list(models(sizes).items())[:2]:
        (first, eager), (first_compiled, compiled) = (few_steps(config, way, shape.steps) for way in (False, True))
        flops = config.tokens_per_step * flops_per_token(without_weights(config.model))
        of = Compiled(shape.n_layer, flops, eager, eager - compiled, first_compiled - first)
        found.append(of)
        pays = f"{of.cost / of.saved:,.0f}" if of.saved > 0 else "never"
        figures = [f"{1e3 * eager:.2f}", f"{1e3 * compiled:.2f}", f"{first:.1f}", f"{first_compiled:.1f}"]
        yield [f"{name}: {shape}", *figures, f"{of.cost:.1f}", pays]


def few_steps(config: TrainConfig, compiled: bool, steps: int) -> tuple[float, float]:
    """Seconds of the first two steps, and of a later one: the median of five rounds."""
    device = paired.device()
    torch.compiler.reset()
    run = throughput.make_run(config, choose_precision("auto", device), device, compiled=compiled)
    numbers = iter(range(10**9))
    step = lambda: take_step(run, next(numbers))  # noqa: E731
    with fast_products(device):
        first = 2 * paired.timed(step, 2)()
        return first, statistics.median(paired.timed(step, steps)() for _ in range(5))


def training(arguments: argparse.Namespace) -> None:
    throughput.throughput(arguments.sizes.large, arguments.nanogpt, arguments.rounds, ("bf16",))


def memory_of_steps(arguments: argparse.Namespace) -> None:
    configs = {f"{name}: {shape}": config for name, (shape, config) in models(arguments.sizes).items()}
    memory.compare_steps(configs, (False, True))


def decode(arguments: argparse.Namespace) -> None:
    for batch, precision in product(arguments.sizes.batches, (torch.float32, torch.bfloat16)):
        generate.speed(arguments.sizes.decoded, arguments.nanogpt, batch, arguments.rounds, precision, engine=False)


def forms(arguments: argparse.Namespace) -> None:
    """Of one layer's attention; then of a small model's training steps, with masks that are not causal alone."""
    shape, device = arguments.sizes.large, paired.device()
    names = [*attention.MEASURED, *(["flex"] if device.type == "cuda" else [])]
    like = (shape.block_size, shape.n_head, torch.bfloat16, shape.batch_size, shape.n_head)
    programs = {form: attention.forward_and_backward(form, *like) for form in names}
    seconds, rows = paired.interleave(programs, arguments.rounds), []
    for form, taken in seconds.items():
        megabytes = memory.added(device, programs[form]) / 1e6
        rows.append([f"`{form}`", paired.spread([1e3 * one for one in taken]), f"{megabytes:,.0f}"])
    sizes = f"B = {shape.batch_size}, H = {shape.n_head}, T = {shape.block_size}"
    print(f"Forward and backward in bfloat16, {sizes}, D = {attention.D}:\n")
    paired.table(["form", "ms", "peak above the inputs, MB"], rows)
    few = replace(shape, n_layer=2, vocab_size=256)
    print(f"Training steps of {few}:\n")
    paired.table(["mask", "a step, ms", "peak of the steps, GB"], masked_steps(few, device))


def masked_steps(shape: throughput.Shape, device: torch.device) -> Iterator[list[str]]:
    masks = {"causal": {}, "window": dict(attention_window=shape.block_size // 4), "ALiBi": dict(position="alibi")}
    for (name, model), compiled in product(masks.items(), (False, True)):
        config, seconds = throughput.make_config(shape, model, throughput.ADAMW), []
        peak = memory.added(device, lambda c=config, w=compiled, s=seconds: s.append(few_steps(c, w, shape.steps)[1]))
        yield [f"{name}, {'compiled' if compiled else 'eager'}", f"{1e3 * seconds[0]:.2f}", f"{peak / 1e9:.2f}"]


def tests(arguments: argparse.Namespace) -> None:
    """Without plugins, and so without the options of pyproject.toml."""
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "-rfEs", "-p", "no:cacheprovider"]
    words += ["--continue-on-collection-errors", *arguments.sizes.tests]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=paired.ROOT, env=alone, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:] or ["no output"]
    counts = {kind: count for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error|deselected)", lines[-1])}
    kinds = ("passed", "failed", "error", "skipped")
    paired.table(["`pytest -m gpu`", *kinds], [[lines[-1].strip("= "), *(counts.get(kind, "0") for kind in kinds)]])
    if said := [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))][:20]:
        print("\n".join(said) + "\n", flush=True)
    if done.returncode not in (0, 5):  # 5: nothing was selected
        sys.exit(f"error: pytest ended with status {done.returncode}: {lines[-1].strip('= ')}")


def shakespeare(arguments: argparse.Namespace) -> None:
    """The text is not downloaded, so without it this says so and is left out."""
    if arguments.text is None:
        print("Left out: give the path of tiny Shakespeare after that of nanoGPT.\n", flush=True)
        return
    sizes = arguments.sizes
    time_to_loss.until(ENOUGH, arguments.text.resolve(), arguments.nanogpt, sizes.shakespeare, sizes.theirs)


@dataclass(frozen=True)
class Section:
    measure: Callable[[argparse.Namespace], None]
    seconds: int
    """At most; what one leaves, the next ones may take."""


SECTIONS = {
    "default": Section(default, 130),
    "compiling": Section(compiling_pays, 120),
    "training": Section(training, 150),
    "memory": Section(memory_of_steps, 90),
    "decode": Section(decode, 80),
    "attention": Section(forms, 90),
    "tests": Section(tests, 100),
    "shakespeare": Section(shakespeare, 300),
}

if __name__ == "__main__":
    main()
