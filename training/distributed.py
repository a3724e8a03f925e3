"""Several processes that train one model under torchrun: ranks, collectives, DDP.

Each process, a rank, has the whole model and takes its part of a batch. A collective is a call that all ranks make
together, such as a sum over them. torch's DistributedDataParallel (DDP) averages the gradients during the backward
pass: it lays them side by side in buckets of some megabytes, and sends a bucket as soon as all of its gradients are
there. So all ranks take the same step.

A single process is rank 0 of 1, whose collectives have no effect. Signals and times, on which ranks agree at every
step, go from CPU to CPU by the library gloo, so no device waits for them; losses and gradients between NVIDIA GPUs by
NCCL.
"""

import gc
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.console import end_with_parent
from common.errors import DeviceError, SettingsError, first_line
from model.gpt import GPT
from model.loss import LARGEST_CHUNK_ON_GPU, chunk_loss_and_gradient
from training.config import TrainConfig

Value = TypeVar("Value")
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
# Launchers, with the variables of their count of processes and of a process's number.
LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
)
TIMEOUT = timedelta(minutes=30)  # of a collective
RUNS = count()  # numbers the runs of this process under torchrun: a sweep has several
TORCHRUN = "start with torchrun, which sets these variables, or unset them"
ONE_MODEL = "give all of them the same settings, code and text: they train one model"
NETWORK = (
    "set GLOO_SOCKET_IFNAME to the network interface that joins the machines, "
    "and with --max-restarts also TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """The number of processes on this machine."""
    launched: bool = False
    """Whether torchrun started this process, even if alone."""

    @classmethod
    def of_torchrun(cls) -> "Ranks":
        """Return the rank that torchrun gave this process; rank 0 of 1 without torchrun."""
        if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, local_rank, local_size = (int(os.environ.get(name, "0")) for name in names)
        return cls(rank, size, local_rank, local_size or size, launched=True)

    @staticmethod
    def warning() -> str:
        """Return a warning if srun or mpirun has started several processes; otherwise ""."""
        for launcher, size, number in LAUNCHERS:
            count = os.environ.get(size, "")
            if count.isdecimal() and int(count) > 1:
                said = f"{launcher} has started {count} processes, and each trains a model of its own"
                place = f"{number}={os.environ.get(number, '?')} is this one"
                return f"{said} ({place}): to train one together, let {launcher} start torchrun."
        return ""

    def join(self, device: torch.device) -> None:
        """Join the process group if torchrun started this process."""
        if "TORCHELASTIC_RUN_ID" in os.environ:  # of torchrun
            end_with_parent()  # its processes would train on, unseen, if it were killed
        if self.launched and not dist.is_initialized():
            check_interface()
            cuda = device.type == "cuda"
            backend = "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo"
            # With a device_id NCCL connects the devices now, so that an error comes before the run begins.
            try:
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore(f"run {next(RUNS)}", torchrun_store()),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=TIMEOUT,
                    device_id=device if cuda else None,
                )
            except (ValueError, dist.DistError) as error:
                raise SettingsError(f"RANK={self.rank} finds no other ({first_line(error)})", TORCHRUN) from error
            except RuntimeError as error:  # of gloo
                if "gloo" not in str(error).lower():
                    raise
                raise DeviceError(f"RANK={self.rank} reaches no other ({first_line(error)})", NETWORK) from error

    @property
    def is_first(self) -> bool:
        """Whether this process owns the run's directory and the terminal."""
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

    def mean_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its mean over the ranks."""
        return self.sum_(tensor).div_(self.size)

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace a tensor by rank 0's."""
        if self.launched:
            dist.broadcast(tensor, src=0)

    def divide(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return function(rows) for rows (N, …), the same on all ranks; each computes a part."""
        if self.size == 1:
            return function(rows)
        # Pad the rows to a multiple of the ranks, compute this rank's, and gather all.
        count = -(-len(rows) // self.size)
        padded = torch.cat((rows, rows.new_zeros(count * self.size - len(rows), *rows.shape[1:])))
        own = function(padded[self.rank * count : (self.rank + 1) * count]).contiguous()
        whole = own.new_empty(count * self.size, *own.shape[1:])  # (N + padding, …)
        all_gather(whole, own)
        return whole[: len(rows)]

    def wait_for_all(self, place: str, every: float = 1.0) -> None:
        """Wait until all ranks have come to a place, for hours if need be.

        Another machine may still prepare the text, and a collective would end after half an hour.

        place: a name that is used once. every: seconds between two looks.
        """
        if not self.launched:
            return
        store = dist.distributed_c10d._get_default_store()
        arrived = store.add(place, 1)
        while arrived < self.size:
            time.sleep(every)
            arrived = store.add(place, 0)

    def refuse_others(self, facts: dict[str, str], remedy: str = ONE_MODEL) -> None:
        """Raise SettingsError, on all ranks, unless they have the same facts; every rank must call."""
        if self.size == 1:
            return
        known: list[Any] = [None] * self.size
        dist.all_gather_object(known, facts)
        for rank, theirs in enumerate(known):
            for name, value in known[0].items():
                if theirs[name] != value:
                    raise SettingsError(f"RANK=0 has {name}={value}, and RANK={rank} {theirs[name]}", remedy)

    def leave(self) -> None:
        """Leave the process group, which NCCL warns of otherwise. Let nothing refer to DDP any more."""
        if self.launched and dist.is_initialized():
            # DDP is in a cycle of references and holds the group. Collect it now: if the group ended in a later
            # collection, it would wait for gloo's threads with Python's lock held, and these for the lock, for ever.
            gc.collect()
            dist.destroy_process_group()

    def broadcast_object(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if not self.launched:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]


@cache
def torchrun_store() -> dist.Store:
    """Return the store in which the ranks find each other.

    It outlives a run. So a run in it has its own prefix: the next one must not find this one's addresses.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    return store


def check_interface() -> None:
    """Raise DeviceError if GLOO_SOCKET_IFNAME names no network interface of this machine."""
    value = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    if value and not set(value.split(",")) <= set(known):
        remedy = f"choose from {', '.join(known)}, or unset it; the ^ of NCCL_SOCKET_IFNAME has no meaning there"
        raise DeviceError("names no network interface here", remedy, setting="GLOO_SOCKET_IFNAME", value=value)


def with_recompute(model: GPT, config: TrainConfig) -> GPT:
    """Let a new model's blocks checkpoint their activations if config.recompute asks for it."""
    for block in model.blocks:
        block.activation_checkpointing = config.recompute == "block"
    return model


class LossModule(nn.Module):
    """A model whose forward pass is its loss: DDP knows no other method."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **more: Any) -> Tensor:
        return self.model.loss(*arguments, **more)


def parallelize(
    model: GPT,
    ranks: Ranks,
    device: torch.device,
    compiled: bool,
    compiled_loss: bool = False,
) -> Callable[..., Tensor]:
    """Return model.loss() for the training step: compiled, and under torchrun wrapped by DDP.

    DDP gives rank 0's weights to the others. compiled_loss: compile the loss, even if not the model.
    """
    # Compile in place: the loss, and block by block, so that a block's gradients are sent while the next one's are
    # computed.
    if compiled:
        for block in model.blocks:
            block.compile()
    if compiled or compiled_loss:
        model.runtime.loss_and_gradient = torch.compile(model.runtime.loss_and_gradient)
        if device.type == "cuda":
            # A kernel turns the logits into gradients, and no tensor holds them in float32: twice as many fit.
            model.runtime.largest_chunk = 2 * LARGEST_CHUNK_ON_GPU
    if not ranks.launched:
        return model.loss
    if compiled:
        # DDP would split each block's graph at the 25 MB of its buckets. Blocks are small enough.
        torch._dynamo.config.optimize_ddp = False
    devices = [device.index] if device.type == "cuda" else None
    # As views of the buckets, gradients are not copied into them.
    return DistributedDataParallel(LossModule(model), device_ids=devices, gradient_as_bucket_view=True)


def uncompile(model: GPT) -> None:
    """Undo what parallelize() has compiled."""
    for block in model.blocks:
        block._compiled_call_impl = None
    model.runtime.loss_and_gradient = chunk_loss_and_gradient
    model.runtime.largest_chunk = None


def sync_gradients(loss: Callable[..., Tensor], *, last: bool) -> AbstractContextManager[None]:
    """Return a context for a micro-batch; only in the step's `last` do ranks average gradients.

    loss: what parallelize() returned.
    """
    return loss.no_sync() if isinstance(loss, DistributedDataParallel) and not last else nullcontext()


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients of a model together.

    DDP has made them equal on all ranks: no collective is needed.
    """
    return torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters() if weight.grad is not None])
