"""One optimizer step: forward and backward over the micro-batches of a global batch, then the update."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from common.text import hydra_quoted
from training.device import memory_errors, to_device
from training.distributed import sync_gradients
from training.run import Run


def train_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Move the weights once, by the gradient of the global batch of `step`.

    Returns the batch's loss in nats per target and the gradient's norm before clipping, as tensors on
    the device, so that nothing waits for them here. Where one of them is not finite nothing moves.
    """
    config, ranks = run.config, run.ranks
    total_loss = torch.zeros((), device=run.device)
    share = config.batch_size // ranks.size
    end = (ranks.rank + 1) * share
    for first in range(end - share, end, run.micro_batch_size):
        last = first + run.micro_batch_size
        batch = run.batch(step, first, last)
        inputs, targets = (to_device(part, run.device) for part in (batch.inputs, batch.targets))  # (B, T)
        doc_starts = None if batch.doc_starts is None else to_device(batch.doc_starts, run.device)
        torch.manual_seed(dropout_seed(config.seed, step, first))
        with sync_gradients(run.forward, last=last == end):
            with run.autocast:
                # A sum over targets, divided by those of the whole batch: micro-batches change nothing.
                loss = run.forward(inputs, targets, doc_starts=doc_starts) / run.targets_per_step
            # DDP and FSDP average over the ranks, but each rank's loss is already its share of the sum.
            run.scaler.scale(loss * ranks.size).backward()
        total_loss += loss.detach()

    ranks.sum_(total_loss)
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # it needs param_groups only
    gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(gradients)
    grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
    clip_divisor = (grad_norm / (config.grad_clip or float("inf"))).clamp(min=1)
    skip = ~(total_loss + grad_norm).isfinite()
    for optimizer in run.optimizers:
        optimizer.step(skip, clip_divisor)
    # Under DDP gradients stay views of the buckets that are sent: a new step's first micro-batches would fill others.
    run.model.zero_grad(set_to_none=run.forward is run.model)
    run.scaler.update()
    run.skipped = torch.stack([run.skipped[0] + skip, (run.skipped[1] + 1) * skip])
    return total_loss, grad_norm


def dropout_seed(seed: int, step: int, row: int) -> int:
    """Return the seed of the dropout in the micro-batch of `step` that begins with `row`.

    So what is dropped depends neither on resuming nor on the number of processes that take micro-batches
    of the same size.
    """
    return int.from_bytes(hashlib.sha256(f"dropout {seed} {step} {row}".encode()).digest()[:8], "little")


@contextmanager
def explain_out_of_memory(run: Run) -> Iterator[None]:
    """Turn running out of memory into a SettingsError that names micro_batch_size and a smaller one to try."""
    try:
        yield
    except (MemoryError, RuntimeError):  # only now, as every step comes by: the remedy reads the disk
        size = run.micro_batch_size
        smaller = next((divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0), None)
        remedy = f"set micro_batch_size={smaller}" if smaller else "choose a smaller model or model.block_size"
        if smaller:
            remedy += "; the result stays the same"
        if last := run.saver.last():
            remedy += f", and {hydra_quoted('resume', run.directory)} goes on from {last.name}"
        with memory_errors(f"micro_batch_size={size} needs more memory than there is", remedy):
            raise
