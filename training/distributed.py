"""Several processes training one model under torchrun: ranks, what they tell each other, DDP and FSDP2.

A process on its own is rank 0 of 1; for it everything here does nothing, and torch's sharding is not imported.
What the ranks must agree on at every step travels between CPUs (gloo), so that no device waits for it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from errors import SettingsError
from model.config import GPTConfig
from model.gpt import GPT, load_weights
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
    local_size: int = 1
    """How many of them are on this machine."""
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
    """Return whether no other rank has failed yet: only the first reports, the others fail because of it.

    Before they have met, what fails on a machine fails on all its ranks.
    """
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return dist.PrefixStore("tinygpt", dist.distributed_c10d._get_default_store()).add("failed", 1) == 1


def shutdown_timeout() -> float:
    """Return the seconds after which torchrun kills a process that it has sent SIGTERM."""
    with suppress(OSError, ValueError):  # of Linux; torchrun gives its flag to no process
        flags = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("_", "-").replace("=", "\0").split("\0")
        return float(flags[flags.index("--shutdown-timeout") + 1])
    with suppress(ValueError):
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    return 30.0


def ranks_of_torchrun() -> Ranks:
    """Return this process among those that torchrun started."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return Ranks()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = (int(os.environ.get(f"LOCAL_{name}", 0)) for name in ("RANK", "WORLD_SIZE"))
    return Ranks(rank, size, local_rank, local_size or size, together=True)


def join_ranks(ranks: Ranks, device: torch.device) -> None:
    """Join the process group if torchrun started this process; on CUDA, NCCL connects the ranks' devices at once."""
    if ranks.together and not dist.is_initialized():
        cuda = device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30), device_id=device if cuda else None)


@contextmanager
def rows_alone(shard: int, shards: int) -> Iterator[None]:
    """Let every module built within keep only the rows of its parameters that this shard of them has.

    A parameter is whole between being drawn and its module being assigned to another; then it has its shape alone
    (torch's meta device) and its rows beside it, until spread() makes it a DTensor. All draws are those of one process.
    """

    def keep_rows(parent: nn.Module, name: str, module: nn.Module) -> None:
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if not parameter.is_meta:
                    shape = nn.Parameter(parameter.detach().to("meta"))
                    vars(shape)["rows"] = cut(parameter.detach(), shard, shards).clone()
                    setattr(owner, name, shape)

    hook = register_module_module_registration_hook(keep_rows)
    try:
        yield
    finally:
        hook.remove()


def new_model(config: GPTConfig, ranks: Ranks, how: str, device: torch.device) -> GPT:
    """Return a model with fresh weights, of which this rank has its rows only unless how="ddp"; see rows_alone."""
    if how == "ddp" or not ranks.together:
        return GPT(config).to(device)
    shards = ranks.local_size if how == "hsdp" else ranks.size
    if ranks.size % shards or ranks.largest(shards) != shards:
        why = f"needs as many processes on each machine, but of {ranks.size} this one has {shards}"
        raise SettingsError(f"distributed=hsdp {why}: start as many, or choose distributed=fsdp.")
    with rows_alone(ranks.rank % shards, shards):
        return GPT(config)


_alive: list[nn.Module] = []
"""DDP's modules, kept until the process ends: destroying one while the process group's threads run can hang."""


def spread(model: GPT, ranks: Ranks, how: str, device: torch.device, dtype: torch.dtype, compiled: bool) -> nn.Module:
    """Return a new_model as this rank runs it: itself in a single process, with its gradients averaged (DDP), or
    sharded in place and gathered one block at a time (FSDP2). Its blocks are compiled in place first, so that gradients
    of one travel while the next one's are computed."""
    if compiled:
        compile_parts(model)
    if not ranks.together:
        return model
    if how != "ddp":
        shape = (ranks.size,) if how == "fsdp" else (ranks.size // ranks.local_size, ranks.local_size)
        return shard(model, shape, device, dtype)
    # As views, the gradients exist once, in the buckets that are sent.
    devices = [device.index] if device.type == "cuda" else None
    forward = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    _alive.append(forward)
    return forward


def shard(model: GPT, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> GPT:
    """Cut a model built with rows_alone up over a mesh of ranks, the last of whose dimensions shares a copy.

    Weights are gathered in the products' type and gradients summed in float32. Autocast still says what each
    operation computes in: the residual stream, norms, RoPE and the loss are float32 as in a single process, but the
    weights of norms and the embedding are rounded too.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("copy", "shard")[-len(shape) :]
    # Groups of their own: torch would split an eagerly connected one, of which gloo's part may not be able.
    backends = dict.fromkeys(names, "cuda:nccl") if device.type == "cuda" and len(shape) == 2 else None
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=backends)  # type: ignore[arg-type]
    rows = {name: vars(parameter)["rows"] for name, parameter in model.named_parameters()}
    float_stream(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    made: dict[nn.Parameter, nn.Parameter] = {}  # by the one without data: tied weights stay one
    for path, owner in model.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
                local(made[parameter]).detach().copy_(rows.pop(f"{path}.{name}"))
            setattr(owner, name, made[parameter])
    model.initialize(lambda weight, std: copy_rows(torch.empty(weight.shape).normal_(std=std), weight))
    return model


def float_stream(model: GPT) -> None:
    """Let the residual stream be float32 where the embedding's weights are not."""
    model.token_embedding.register_forward_hook(lambda module, arguments, x: x.float())


def cut(tensor: Tensor, shard: int, shards: int) -> Tensor:
    """Return the rows of a tensor that FSDP gives to one of several shards, perhaps none."""
    rows = -(-len(tensor) // shards)
    return tensor[shard * rows : (shard + 1) * rows]


def load_whole(model: GPT, read: Callable[[str], Tensor]) -> None:
    """Copy the whole weights that `read` returns for their plain names into a model, of any of which this rank may
    have its rows only: then it holds one at a time."""
    parameters = dict(model.named_parameters())
    if not is_sharded(model.token_embedding.weight):
        return load_weights(model, {name: read(name) for name in parameters})
    for name, parameter in parameters.items():
        copy_rows(read(name), parameter)


def copy_rows(values: Tensor, parameter: Tensor) -> None:
    """Copy this rank's rows of a tensor into a sharded parameter of its shape."""
    assert is_sharded(parameter) and values.shape == parameter.shape
    mesh = parameter.device_mesh
    rows = cut(values, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
    parameter.to_local().detach().copy_(rows)


def gradients_of(model: nn.Module, *, last: bool) -> AbstractContextManager:
    """Wrap the passes of one micro-batch so that only a step's last one exchanges gradients between copies."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_all_reduce"):  # those of a copy are summed each time: no rank has room for them
        cast("FSDPModule", model).set_requires_all_reduce(last)
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

        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
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
    dcp.load(tensors, storage_reader=reader)
    return {name: tensor.detach() for name, tensor in tensors.items()}
