"""Failures of memory, of a device or another rank, in sentences with a way back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import (
    ON_THE_CPU,
    DeviceError,
    SettingsError,
    device_failed,
    first_line,
    lacks_operator,
)
from common.text import hydra_quoted
from training.device import memory_shortage
from training.run import Run


@contextmanager
def explain_failures(run: Run) -> Iterator[None]:
    """Turn a lack of memory, or the failure of a device or another rank, into a sentence.

    Raises DeviceError or SettingsError, with the newest checkpoint.
    """
    try:
        yield
    except DeviceError as error:  # of an activity whose memory ran out
        raise DeviceError(error.problem, f"{error.remedy}; {way_back(run)}") from None
    except (MemoryError, RuntimeError) as error:
        # Name the failure. Few of these errors have a type, so their words decide. Memory comes first, because its
        # errors have the words of device failures too. If it runs out in no other activity, it does so in a step.
        words = str(error)
        after = f"after step {run.progress.step}"
        kind: type[SettingsError] = DeviceError
        lost = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "gloo")
        shortage = memory_shortage(error)
        if shortage:
            problem = f"micro_batch_size={run.micro_batch_size} {after} needs more memory than there is ({shortage})"
            remedy = smaller_step(run)
        elif lacks_operator(error):
            problem = f"device={run.device} lacks an operation of this run ({first_line(error).partition('. ')[0]})"
            remedy = ON_THE_CPU
        elif device_failed(error):
            problem = f"{run.device} failed {after} ({first_line(error)})"
            tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
            look = "" if run.device.type == "mps" else f"look for the cause in {tool} and dmesg, or "
            remedy = f"{look}set device=cpu"
        elif run.config.deterministic and "deterministic" in words:
            problem = f"deterministic=true cannot be kept on {run.device} ({words.partition(', but')[0]})"
            remedy = "set deterministic=false"
        elif run.ranks.launched and any(word in words.lower() for word in lost):
            problem = f"another process ended {after}, so this one cannot continue"
            remedy = "look above for its message"
            kind = SettingsError
        else:
            raise
        raise kind(problem, f"{remedy}; {way_back(run)}") from None


def way_back(run: Run) -> str:
    """Return how to go on from the newest checkpoint."""
    run.checkpointer.wait()  # the copy that it writes is in main memory
    last = run.checkpointer.last()
    if not last:
        return "nothing has been saved yet"
    code = f" {hydra_quoted('code', run.config.code)}" if run.config.code else ""
    return f"{hydra_quoted('resume', run.directory)}{code} goes on from {last.name}"


def smaller_step(run: Run) -> str:
    """Return the remedy for a step that needs too much memory.

    It is the next smaller micro-batch, or recompute=block.
    """
    size = run.micro_batch_size
    smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), None)
    if smaller:
        return f"set micro_batch_size={smaller}"
    return "set recompute=block" if run.config.recompute == "none" else "choose a smaller model or model.block_size"
