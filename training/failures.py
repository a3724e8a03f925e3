"""Failures of a device or another rank, in sentences with a remedy and a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import DeviceError, SettingsError, device_failed, first_line
from common.text import command, hydra_quoted
from training.device import memory_errors, memory_shortage
from training.run import Run


@contextmanager
def explain_out_of_memory(run: Run) -> Iterator[None]:
    """Turn running out of memory in a step into a DeviceError with a smaller micro_batch_size."""
    try:
        yield
    except (MemoryError, RuntimeError):
        # Make the remedy only now, not in every step: it reads the disk.
        size = run.micro_batch_size
        smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), None)
        remedy = "choose a smaller model or model.block_size"
        if smaller:
            remedy = f"set micro_batch_size={smaller}; the result stays the same"
        last = run.checkpointer.last()
        if last:
            remedy += f", and {hydra_quoted('resume', run.directory)} goes on from {last.name}"
        with memory_errors(f"micro_batch_size={size} needs more memory than there is", remedy):
            raise


@contextmanager
def explain_out_of_memory_between_steps(run: Run, activity: str, setting: str = "") -> Iterator[None]:
    """Turn running out of memory elsewhere into a DeviceError with the command that continues.

    setting: one that needs less memory, for that command.
    """
    try:
        yield
    except (MemoryError, RuntimeError):
        # The step was saved before, unless the copy or the write has failed.
        step = run.progress.step
        is_saved = run.checkpointer.has(step)
        saved = f"step {step} is saved" if is_saved else f"the checkpoints are in {run.checkpointer.checkpoints}"
        again = f"{command('train.py')} {hydra_quoted('resume', run.directory)} {setting}".rstrip()
        problem = f"{activity} after step {step} needs more memory than there is"
        with memory_errors(problem, f"{saved}; go on with  {again}"):
            raise


@contextmanager
def explain_failures(run: Run) -> Iterator[None]:
    """Turn the failure of this process's device, or of another rank, into a sentence.

    Raises DeviceError or SettingsError, with the newest checkpoint.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # Name the failure. Few of these errors have a type, so their words decide. Memory comes first, because its
        # errors have the words of device failures too.
        words = str(error)
        after = f"after step {run.progress.step}"
        kind: type[SettingsError] = DeviceError
        lost = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "gloo")
        shortage = memory_shortage(error)
        if shortage:
            problem = f"{run.device} has no memory left {after} ({shortage})"
            remedy = f"lower micro_batch_size={run.micro_batch_size}, or end other programs"
        elif device_failed(error):
            problem = f"{run.device} failed {after} ({first_line(error)})"
            remedy = "look for the cause in nvidia-smi and dmesg, or set device=cpu"
        elif run.config.deterministic and "deterministic" in words:
            problem = f"deterministic=true cannot be kept on {run.device} ({words.partition(', but')[0]})"
            remedy = "set deterministic=false"
        elif run.ranks.launched and any(word in words.lower() for word in lost):
            problem = f"another process ended {after}, so this one cannot continue"
            remedy = "look above for its message"
            kind = SettingsError
        else:
            raise

        # Name the newest checkpoint, once it is written: its copy is in main memory.
        run.checkpointer.wait()
        last = run.checkpointer.last()
        resume = hydra_quoted("resume", run.directory)
        again = f"{resume} goes on from {last.name}" if last else "nothing has been saved yet"
        raise kind(problem, f"{remedy}; {again}") from None
