"""Everything that needs a GPU, in one call of a few minutes:

    python benchmarks/gpu.py [PATH_OF_A_NANOGPT_CHECKOUT]

Training GPT-2 124M compiled in bf16; every form of attention in bf16, with flex and GQA, and its memory; a step's
memory beside its prediction; generating with GPT-2 124M at batch 1 and 64. throughput.py, attention.py, memory.py
and generate.py say what the columns of the tables mean.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable

import attention
import generate
import memory
import nanogpt
import paired
import throughput
import torch


def main() -> None:
    parser = paired.Parser(__doc__)
    parser.add_argument("nanogpt", nargs="?", type=nanogpt.checkout, help="a checkout of github.com/karpathy/nanoGPT")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: there is no CUDA device here: on a CPU run throughput.py, attention.py and the others alone.")
    paired.header()
    failed = [title for title, section in sections(arguments).items() if not printed(title, section)]
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed, as said above.")


def sections(arguments: argparse.Namespace) -> dict[str, Callable[[], None]]:
    checkout, rounds = arguments.nanogpt, arguments.rounds
    return {
        "Training": lambda: throughput.throughput(throughput.GPT2_124M, checkout, rounds, ("bf16",)),
        "Attention: overhead": lambda: attention.overhead(rounds),
        "Attention: time": lambda: attention.speed(torch.bfloat16, rounds),
        "Attention: memory": lambda: attention.memory(None),
        "Memory of a step": lambda: memory.compare(memory.GPU_BASE, 1),
        "Generation at batch 1": lambda: generate.speed("12 × 768, T = 1024", checkout, 1, rounds),
        "Generation at batch 64": lambda: generate.speed("12 × 768, T = 1024", checkout, 64, rounds),
    }


def printed(title: str, section: Callable[[], None]) -> bool:
    """Whether a section was measured: on a machine that is lent one that fails must not lose the others."""
    print(f"## {title}\n")
    started = time.perf_counter()
    try:
        section()
        return True
    except Exception:
        traceback.print_exc()
        return False
    finally:
        print(f"{title}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
