"""Several processes training one model under torchrun: ranks, what they tell each other, DDP and FSDP2.

A process on its own is rank 0 of 1; for it everything here does nothing, and torch's sharding is not imported.
What the ranks must agree on at every step travels between CPUs (gloo), so that no device waits for it.
"""

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from training.compiling import compile_parts

if TYPE_CHECKING:  # these take about as long to import as a third of torch, and only torchrun's processes need them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    together: bool = False
    """Whether torchrun started this process, even if it is the only one."""

    @property
    def is_first(self) -> bool:
        """Whether this process owns the run directory and the terminal."""
        return self.rank == 0

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' numbers; every rank must call."""
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

    def from_first(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if not self.together:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


def first_to_fail() -> bool:
    """Return whether no other rank has failed yet: only the first reports, the others fail because of it."""
    if not dist.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    return dist.PrefixStore("tinygpt", dist.distributed_c10d._get_default_store()).add("failed", 1) == 1


def shutdown_timeout() -> float:
    """Return the seconds after which torchrun kills a process that it has sent SIGTERM."""
    with suppress(OSError, ValueError):  # of Linux; torchrun gives its flag to no process
        flags = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("_", "-").replace("=", "\0").split("\0")
        return float(flags[flags.index("--shutdown-timeout") + 1])
    with suppress(ValueError):
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    return 30.0


def join_ranks() -> Ranks:
    """Join the process group if torchrun started this process."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return Ranks()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "cpu:gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", 0)), together=True)


_alive: list[nn.Module] = []
"""DDP's modules, kept until the process ends: destroying one while the process group's threads run can hang."""


def spread(model: GPT, how: str, device: torch.device, *, compiled: bool) -> nn.Module:
    """Return the model as this rank runs it: itself in a single process, with its gradients averaged (DDP), or, with
    how="fsdp", sharded in place and gathered one block at a time (FSDP2)."""
    if compiled:
        compile_parts(model)
    if dist.is_initialized() and how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    forward: nn.Module = model
    if dist.is_initialized():
        devices = [device.index] if device.type == "cuda" else None
        # As views, the gradients exist once, in the buckets that are sent.
        forward = DistributedDataParallel(forward, device_ids=devices, gradient_as_bucket_view=True)
        _alive.append(forward)
    return forward


def gradients_of(model: nn.Module, *, last: bool) -> AbstractContextManager:
    """Wrap the passes of one micro-batch so that only a step's last one exchanges gradients."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        cast("FSDPModule", model).set_requires_gradient_sync(last)
    return nullcontext()


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return the rows of a sharded tensor that this rank holds; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in one piece, a plain one as it is; every rank must call."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a plain tensor sharded as a parameter of its shape is, any other tensor as it is."""
    if is_sharded(parameter) and not is_sharded(tensor) and tensor.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write each rank's shards of `tensors` as safetensors files that any number of ranks can read.

    Raises OSError on every rank when one of them cannot write.
    """
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except dcp.CheckpointException as error:  # which every rank receives
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"{getattr(cause, 'strerror', None) or cause}, on rank {rank}") from error


def load_shards(folder: Path, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Read what save_shards wrote; state named after a parameter, and of its shape, is sharded as that is."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.HuggingFaceStorageReader(str(folder))
    tensors: dict[str, Tensor] = {}
    for name, saved in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        like = parameters.get(name.rpartition(".")[0], torch.zeros(()))
        if saved.size not in (like.shape, torch.Size()):
            raise ValueError(f"the optimizer's {name} does not have its parameter's shape")
        tensors[name] = torch.zeros_like(like) if like.shape == saved.size else torch.zeros(saved.size)
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return {name: tensor.detach() for name, tensor in tensors.items()}
