"""FSDP2: a model sharded over ranks, its whole tensors, and Muon's matrices.

Imported only under torchrun: importing torch's sharding takes a third as long as importing torch.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from model.gpt import GPT


def shard(model: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """Shard a new_model() over all ranks, and scatter rank 0's weights.

    Weights are gathered in `dtype`, and gradients are summed in float32. Autocast computes in the same types as in a
    single process, but the weights of norms and of the embedding are rounded too.
    """
    # The other ranks have shapes alone.
    weights = {name: tensor.detach() for name, tensor in model.named_parameters() if not tensor.is_meta}
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    # Shard shapes without data, then allocate. Both to() and to_empty() separate tied weights.
    tied = model.config.tie_embeddings
    model.to("meta")
    if tied:
        model.lm_head.weight = model.token_embedding.weight
    # The residual stream is float32, though the embedding is gathered in `dtype`.
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
    """Copy rank 0's whole tensors into every rank's rows of them, one at a time."""
    for name, tensor in into.items():
        # The whole tensor on each device, sent from rank 0; then this rank keeps its rows.
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if dist.get_rank() == 0:
            full.copy_(whole[name])
        dist.broadcast(full, src=0)
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        tensor.copy_(full)


def gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return sharded tensors whole, in rank 0's main memory; every rank must call."""
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            found[name] = whole.cpu()
    return found


def on_whole_matrices(function: Callable[[Tensor], Tensor], rows: Tensor, like: DTensor) -> Tensor:
    """Return this rank's rows of function(matrices), (N, rows, n), given its rows of N matrices.

    The matrices are sharded as `like`. Each rank receives a part of the N whole, and sends their rows back.
    """
    # Describe the stack of matrices (N, m, n): cut by rows, or by matrix.
    mesh = like.device_mesh
    shape = torch.Size((len(rows), *like.shape))  # (N, m, n)
    stride = (like.numel(), like.size(1), 1)
    by_rows, by_matrix = ([Shard(dim)] for dim in (1, 0))
    # Exchange rows for whole matrices, compute, and exchange back.
    cut = DTensor.from_local(rows, mesh, by_rows, shape=shape, stride=stride)
    whole = cut.redistribute(placements=by_matrix).to_local()  # (N / ranks, m, n)
    matrices = function(whole).to(rows.dtype).contiguous()
    shared = DTensor.from_local(matrices, mesh, by_matrix, shape=shape, stride=stride)
    return shared.redistribute(placements=by_rows).to_local()
