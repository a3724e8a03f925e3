"""Whether torch compiles, and what: the blocks and the loss of training, where that saves more time than it takes."""

import logging
import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from errors import SettingsError, first_line
from model.gpt import GPT
from model.size import flops_per_token
from training.config import TrainConfig

log = logging.getLogger("tinygpt")

# Estimates for one H100 until benchmarks/gpu.py has measured them; the layers share their compiled code.
COMPILE_SECONDS = 45.0  # for a block and the loss, from a cold cache
SAVED_A_BLOCK = 0.6e-3  # seconds of each forward and backward pass through a block, by launching fewer kernels
SAVED_SHARE = 0.2  # of the time that arithmetic takes, by reading and writing memory less often
ARITHMETIC = 200e12  # FLOP/s that training reaches


def choose_compile(config: TrainConfig, device: torch.device, model: GPT, steps: int | None, processes: int) -> bool:
    """Return whether to compile; auto does on CUDA on Linux where the steps ahead save more time than it takes.

    steps: None where only config.max_minutes ends the run.
    Raises SettingsError for compile=on where torch cannot; auto then warns.
    """
    if config.compile == "off":
        return False
    if config.compile == "auto":
        share = config.batch_size / processes
        passes = share / (config.micro_batch_size or share)
        arithmetic = config.tokens_per_step / processes * flops_per_token(model) / ARITHMETIC
        saved = passes * config.model.n_layer * SAVED_A_BLOCK + SAVED_SHARE * arithmetic
        ahead = float("inf") if steps is None else steps * saved
        if config.max_minutes is not None:
            ahead = min(ahead, 60 * config.max_minutes * SAVED_SHARE)
        if device.type != "cuda" or sys.platform != "linux" or ahead < COMPILE_SECONDS:
            return False
    try:
        torch.compile(torch.neg)(torch.zeros(8, device=device))
    except Exception as error:  # of Triton, of the C compiler, of torch: what they raise is not documented
        problem = f"torch cannot compile here ({first_line(error)})"
        if config.compile == "on":
            raise SettingsError(
                f"compile=on: {problem}: install a C compiler and Triton, or set compile=off."
            ) from None
        log.warning("%s: training goes on without, slower; a C compiler and Triton mend it.", problem)
        return False
    return True


def compile_parts(model: GPT) -> None:
    """Compile the blocks in place, one after another so that gradients of one travel while the next is computed, and
    the loss."""
    for block in model.blocks:
        block.compile()
    model.nats_and_slope = torch.compile(model.nats_and_slope)


def uncompiled(compiled: bool) -> AbstractContextManager[object]:
    """Run a compiled model as it is written: evaluations and samples have shapes of their own, each of which would
    have to be compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
