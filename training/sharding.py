"""A sharded model: FSDP2 over the ranks, whole tensors scattered and gathered, and Muon's matrices among ranks.

Imported under torchrun alone, because torch's sharding takes about as long to import as a third of torch.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from model.gpt import GPT


def shard(model: GPT, mesh_shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    """Shard a new_model over a mesh of ranks, and scatter rank 0's weights.

    The ranks along the last dimension of the mesh hold one copy together.

    Weights are gathered in the products' type and gradients summed in float32. Autocast still says what each
    operation computes in: the residual stream, norms, RoPE and the loss are float32 as in a single process, but the
    weights of norms and the embedding are rounded too.
    """
    weights = {name: tensor.detach() for name, tensor in model.named_parameters() if not tensor.is_meta}
    names = ("copy", "shard")[-len(mesh_shape) :]
    # Groups of their own: torch would split an eagerly connected one, of which gloo's part may not be able.
    backends = dict.fromkeys(names, "cuda:nccl") if device.type == "cuda" and len(names) == 2 else None
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=names, backend_override=backends)  # type: ignore[arg-type]
    tied = model.config.tie_embeddings
    model.to("meta")
    if tied:
        model.lm_head.weight = model.token_embedding.weight
    model.token_embedding.register_forward_hook(lambda module, arguments, x: x.float())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    if tied:
        model.lm_head.weight = model.token_embedding.weight
    scatter(weights, dict(model.named_parameters()))


@torch.no_grad()
def scatter(whole: dict[str, Tensor], into: dict[str, Tensor]) -> None:
    """Copy rank 0's whole tensors into every rank's rows of them, one after the other."""
    for name, tensor in into.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if dist.get_rank() == 0:
            full.copy_(whole[name])
        dist.broadcast(full, src=0)
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        tensor.copy_(full)


def gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors of sharded ones, in rank 0's main memory; every rank must call."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            found[name] = whole.cpu()
    return found


def on_whole_matrices(function: Callable[[Tensor], Tensor], rows: Tensor, like: DTensor) -> Tensor:
    """Return function(matrices) for N matrices of which this rank holds some rows, (N, rows, n), sharded as `like` is.

    Every rank receives whole matrices, its part of the N, and sends their rows back.
    """
    mesh, shape = like.device_mesh, torch.Size((len(rows), *like.shape))
    stride = (like.numel(), like.size(1), 1)
    by_rows, by_matrix = ([*like.placements[:-1], Shard(dim)] for dim in (1, 0))  # each copy of the model does it all
    cut = DTensor.from_local(rows, mesh, by_rows, shape=shape, stride=stride)
    matrices = function(cut.redistribute(placements=by_matrix).to_local()).to(rows.dtype).contiguous()
    shared = DTensor.from_local(matrices, mesh, by_matrix, shape=shape, stride=stride)
    return shared.redistribute(placements=by_rows).to_local()
