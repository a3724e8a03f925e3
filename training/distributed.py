"""Several processes training one model under torchrun: ranks, their collectives, DDP and FSDP.

A single process is rank 0 of 1; for it everything here does nothing. Values on which the ranks agree at every step
travel between CPUs (gloo), so that no device waits for them.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import SettingsError, first_line
from model.gpt import GPT
from model.size import without_weights
from training.config import TrainConfig

Value = TypeVar("Value")
TORCHRUN = "start with torchrun, which sets these variables, or unset them"


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """How many of them are on this machine."""
    launched: bool = False
    """Whether torchrun started this process, even if it is the only one."""

    @classmethod
    def of_torchrun(cls) -> "Ranks":
        if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = {name: os.environ.get(name, "0") for name in names}
        if not all(map(str.isdecimal, given.values())) or int(given["RANK"]) >= int(given["WORLD_SIZE"]):
            problem = f"{' '.join(f'{name}={value}' for name, value in given.items())} cannot be"
            raise SettingsError(problem, TORCHRUN)
        rank, size, local_rank, local_size = map(int, given.values())
        return cls(rank, size, local_rank, local_size or size, launched=True)

    def join(self, device: torch.device) -> None:
        """Join the process group if torchrun started this process; on CUDA, NCCL connects the devices at once."""
        if self.launched and not dist.is_initialized():
            cuda = device.type == "cuda"
            backend = "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo"
            try:
                dist.init_process_group(backend, timeout=timedelta(minutes=30), device_id=device if cuda else None)
            except (ValueError, dist.DistError) as error:
                raise SettingsError(f"RANK={self.rank} finds no other ({first_line(error)})", TORCHRUN) from error

    @property
    def is_first(self) -> bool:
        """Whether this process owns the run directory and the terminal."""
        return self.rank == 0

    def max(self, number: float) -> float:
        """Return the largest of the ranks' numbers; every rank must call."""
        if not self.launched:
            return number
        tensor = torch.tensor(float(number), dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks."""
        if self.launched:
            dist.all_reduce(tensor)
        return tensor

    def divide(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return function(rows); each rank computes its part of the rows. All must call with the same (N, …)."""
        if self.size == 1:
            return function(rows)
        count = -(-len(rows) // self.size)  # rows of each rank; the last ones are padded
        padded = torch.cat((rows, rows.new_zeros(count * self.size - len(rows), *rows.shape[1:])))
        own = function(padded[self.rank * count : (self.rank + 1) * count]).contiguous()
        whole = own.new_empty(count * self.size, *own.shape[1:])
        dist.all_gather_into_tensor(whole, own)
        return whole[: len(rows)]

    def broadcast(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if not self.launched:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def new_model(config: TrainConfig, ranks: Ranks, device: torch.device) -> GPT:
    """Return the model with fresh weights; for FSDP rank 0 has them in main memory, the others have shapes only."""
    if config.distributed == "ddp" or not ranks.launched:
        model = GPT(config.model).to(device)
    else:
        model = GPT(config.model) if ranks.is_first else without_weights(config.model)
    return with_recompute(model, config)


def with_recompute(model: GPT, config: TrainConfig) -> GPT:
    """Return a new model whose blocks checkpoint their activations if config says so."""
    for block in model.blocks:
        block.activation_checkpointing = config.recompute == "block"
    return model


def parallelize(
    model: GPT, ranks: Ranks, distributed: str, device: torch.device, dtype: torch.dtype, compiled: bool
) -> nn.Module:
    """Return a new_model as the training step calls it: itself, wrapped by DDP, or sharded in place by FSDP2.

    Blocks are compiled in place first, one by one, so that the gradients of one travel while those of the next are
    computed, and so is the loss.
    """
    if compiled:
        for block in model.blocks:
            block.compile()
        model.runtime.blocks_are_compiled = True
        model.runtime.loss_and_gradient = torch.compile(model.runtime.loss_and_gradient)
    if not ranks.launched:
        return model
    if distributed == "ddp":  # as views, the gradients exist once, in the buckets that are sent
        if compiled:  # DDP would split each block's graph at the 25 MB of its buckets; blocks are short enough
            torch._dynamo.config.optimize_ddp = False
        devices = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    mesh: tuple[int, ...] = (ranks.size,)
    if distributed == "hsdp":
        if ranks.size % ranks.local_size or ranks.max(ranks.local_size) != ranks.local_size:
            problem = f"distributed=hsdp needs as many processes on each machine, but of {ranks.size} this one has"
            raise SettingsError(f"{problem} {ranks.local_size}", "start as many, or choose distributed=fsdp")
        mesh = (ranks.size // ranks.local_size, ranks.local_size)
    from training.sharding import shard  # half a second that only torchrun needs

    shard(model, mesh, device, dtype)
    return model


def sync_gradients(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a context for one micro-batch: only the `last` of a step averages gradients over the ranks."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_all_reduce"):  # FSDP: those of a copy are summed each time, as no rank has room
        model.set_requires_all_reduce(last)  # type: ignore[operator]
    return nullcontext()


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of all of a model's gradients together, on every rank."""
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP: over the shards


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
