"""How weights move: parameter groups, Muon with AdamW beside it, and learning-rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from model.gpt import GPT
from training.config import OptimizerConfig, ScheduleConfig
from training.device import multiplies_bf16


def make_optimizers(model: GPT, config: OptimizerConfig) -> list[Optimizer]:
    """One AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest.

    Each parameter group keeps its peak rate in `group["peak_lr"]`; `set_learning_rate` scales it.
    """
    matrices, embeddings, head, vectors = split_parameters(model)
    embedding_lr = config.embedding_lr or config.lr
    groups = [
        {"params": embeddings, "lr": embedding_lr, "weight_decay": config.weight_decay},
        {"params": head, "lr": config.head_lr or config.lr, "weight_decay": config.weight_decay},
        {"params": vectors, "lr": embedding_lr, "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = []
    if config.name == "muon":
        optimizers.append(Muon(matrices, config.lr, config.momentum, config.weight_decay))
    else:
        groups.insert(0, {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay})
    groups = [group for group in groups if group["params"]]
    optimizers.append(AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-10, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def split_parameters(model: GPT) -> tuple[list[nn.Parameter], ...]:
    """The parameters by kind: (the blocks' matrices, embeddings, an untied head, norms and biases)."""
    matrices, embeddings, head, vectors = [], [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name.startswith("blocks."):
            matrices.append(parameter)
        elif name.startswith("head."):
            head.append(parameter)
        else:
            embeddings.append(parameter)
    return matrices, embeddings, head, vectors


class Muon(Optimizer):
    """Momentum, orthogonalised: every update of a matrix has singular values near 1 (Jordan et al. 2024).

    The update of an (m, n) matrix is scaled by √max(1, m/n). Matrices of one shape go through
    Newton–Schulz as one batch, which costs a fraction of one at a time. A model cut into shards keeps
    its momentum cut: each rank orthogonalises its share of the matrices and sends the shards back.
    """

    found_inf: Tensor | None = None
    """1.0 where this step must change nothing, else 0.0, as torch's fused optimizers have it."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [local(parameter.grad) for parameter in parameters]
                momenta = [local(self._momentum(parameter)) for parameter in parameters]
                rate, decay = group["lr"] * math.sqrt(max(1, shape[0] / shape[1])), group["lr"] * group["weight_decay"]
                if self.found_inf is not None:  # moved towards itself, the momentum stays what it is
                    skipped = self.found_inf.bool()
                    gradients = [torch.where(skipped, m, g) for m, g in zip(momenta, gradients, strict=True)]
                    rate, decay = rate * (1 - self.found_inf), decay * (1 - self.found_inf)
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
                updates = orthogonalize_shards(nesterov, parameters[0]).to(gradients[0].dtype) * rate
                weights = [local(parameter) for parameter in parameters]
                if group["weight_decay"]:
                    torch._foreach_mul_(weights, 1 - decay)
                torch._foreach_sub_(weights, updates.unbind())

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to each of (N, m, n), roughly: singular values within 0.7…1.2.

    A quintic Newton–Schulz iteration (Jordan et al. 2024), in bf16 where that is faster, which is as
    good, and in the given precision elsewhere.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if multiplies_bf16(matrices.device) else matrices
    if tall := x.size(-2) > x.size(-1):
        x = x.mT.contiguous()  # products into a transposed matrix take nearly twice as long
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds of a tensor cut into shards; the tensor itself when it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonalize_shards(rows: Tensor, like: Tensor) -> Tensor:
    """`orthogonalize` for matrices of which each rank has some rows, (N, rows, n), cut as `like` is.

    Every rank gets N / ranks of the matrices in one piece, works on these, and returns the rows.
    """
    if not isinstance(like, DTensor):
        return orthogonalize(rows)
    ranks, (m, n) = like.device_mesh.size(), like.shape
    group, most_rows = like.device_mesh.get_group(), -(-m // ranks)
    count = -(-len(rows) // ranks)  # matrices of one rank
    sent = rows.new_zeros(ranks * count, most_rows, n)  # shards that are shorter, and matrices that are missing, are 0
    sent[: len(rows), : rows.size(1)] = rows
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # (ranks, count, rows, n) -> (count, ranks · rows, n): the shards of a matrix below each other
    whole = received.view(ranks, count, most_rows, n).transpose(0, 1).reshape(count, ranks * most_rows, n)
    whole[:, :m] = orthogonalize(whole[:, :m]).to(whole.dtype)
    sent = whole.view(count, ranks, most_rows, n).transpose(0, 1).contiguous()  # may share memory with received
    returned = torch.empty_like(received)
    dist.all_to_all_single(returned, sent, group=group)
    return returned[: len(rows), : rows.size(1)]


def update_weights(optimizers: list[Optimizer], skip: Tensor) -> None:
    """One step of every optimizer, or none where the device finds `skip` to be true: nothing waits for it."""
    for optimizer in optimizers:
        optimizer.found_inf, optimizer.grad_scale = skip.float(), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def optimizer_state(model: GPT, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """What the optimizers remember, by parameter and kind: {"head.weight.exp_avg": …}.

    Rates and the like are not in it: they follow from the settings and the step.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}.{kind}": tensor
        for optimizer in optimizers
        for parameter, kinds in optimizer.state.items()
        for kind, tensor in kinds.items()
    }


def load_optimizer_state(model: GPT, optimizers: list[Optimizer], state: dict[str, Tensor]) -> None:
    """Give the optimizers what `optimizer_state` returned, whole or cut as the parameters are.

    Raises ValueError when it is another model's or another optimizer's.
    """
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    for key, tensor in state.items():
        name, _, kind = key.rpartition(".")
        if name not in parameters:
            raise ValueError(f"it has optimizer state for {name}, which the model has not")
        parameter = parameters[name]
        owners[id(parameter)].state[parameter][kind] = cut_like(tensor.to(parameter.device), parameter)


def cut_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor cut into shards as a parameter is; anything else as it is."""
    if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor


def schedule_factor(schedule: ScheduleConfig, step: int, progress: float) -> float:
    """The factor on the peak learning rates for the update after `step` finished updates.

    progress: how much of the run is over, in [0, 1]; the decay follows it, the warm-up follows steps.
    """
    warmup = min(1.0, (step + 1) / (schedule.warmup_steps + 1))
    remaining = 1 - progress
    if schedule.name == "cosine":
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule.name == "warmup_stable_decay" and schedule.decay_fraction > 0:
        decay = min(1.0, remaining / schedule.decay_fraction)
    else:
        decay = 1.0
    return warmup * (schedule.final_factor + (1 - schedule.final_factor) * decay)


def set_learning_rate(optimizers: list[Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
