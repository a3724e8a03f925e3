"""Several processes training one model, under torchrun: who is who, what they tell each other, DDP and FSDP2.

A process alone is rank 0 of 1: for it everything here does nothing, and torch's sharding is not imported.
Figures that the ranks must agree on at every step travel between the CPUs (gloo), so that no device
waits for them.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    together: bool = False
    """Whether torchrun started this process, be it the only one."""

    @property
    def is_first(self) -> bool:
        """Whether this process owns the run directory and the terminal."""
        return self.rank == 0

    def rows(self, batch_size: int) -> range:
        """This rank's rows of a global batch, whose size the number of ranks divides."""
        share = batch_size // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def largest(self, number: float) -> float:
        """The largest of the numbers that the ranks give; all must ask."""
        if not self.together:
            return number
        tensor = torch.tensor(float(number), dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks."""
        if self.together:
            dist.all_reduce(tensor)
        return tensor

    def from_first(self, value: Any) -> Any:
        """What rank 0 gives, on every rank."""
        if not self.together:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def first_to_fail() -> bool:
    """Whether no other rank has failed before: only the first says why, for the others fail because of it."""
    if not dist.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    return dist.PrefixStore("tinygpt", dist.distributed_c10d._get_default_store()).add("failed", 1) == 1


def join_ranks() -> Ranks:
    """Meet the other processes that torchrun started, or be alone."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return Ranks()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)), together=True)


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether a collective failed because a rank is not there any more; gloo and NCCL raise no type of their own."""
    words = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "nccl", "gloo")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


_alive: list[nn.Module] = []
"""What DDP made: destroyed while the process group's threads still run, it can wait for them for ever."""


def spread(model: GPT, how: str, device: torch.device, *, compiled: bool) -> nn.Module:
    """The model as this rank runs it: itself when alone, a copy whose gradients are averaged (DDP), or, in
    place, one shard of every weight, gathered a block at a time (FSDP2)."""
    sharded = dist.is_initialized() and how == "fsdp"
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    forward = torch.compile(model) if compiled else model
    if dist.is_initialized():
        devices = [device.index] if device.type == "cuda" else None
        # The gradients live in the buckets that are sent, instead of beside them.
        forward = DistributedDataParallel(forward, device_ids=devices, gradient_as_bucket_view=True)
        _alive.append(forward)
    return forward


def gradients_of(model: nn.Module, *, last: bool) -> AbstractContextManager:
    """Around the forward and backward pass of a micro-batch: only the last one of a step exchanges gradients."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(last)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be cut into shards, in one piece; all ranks must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors, each rank its own shards, as safetensors files that any number of ranks can read.

    Raises OSError on every rank when one of them cannot write.
    """
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.CheckpointException as error:  # which the ranks have told each other
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"{getattr(cause, 'strerror', None) or cause}, on rank {rank}") from error


def load_shards(folder: Path, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `save_shards` wrote, by its names; a tensor named after a parameter and as large is cut like it."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    tensors = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters.get(name.rpartition(".")[0])
        alike = parameter is not None and parameter.shape == saved.size
        tensors[name] = torch.zeros_like(parameter) if alike else torch.zeros(saved.size)
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return {name: tensor.detach() for name, tensor in tensors.items()}
