"""How weights move: parameter groups, Muon with AdamW beside it, and learning-rate schedules.

The optimizers are not torch.optim's: any of those imports torch's compiler, which takes as long as importing torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.gpt import GPT
from training.config import OptimizerConfig, ScheduleConfig
from training.device import multiplies_bf16


def make_optimizers(model: GPT, config: OptimizerConfig) -> list[Muon | AdamW]:
    """One AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest.

    Each parameter group keeps its peak rate in `group["peak_lr"]`; `set_learning_rate` scales it.
    """
    matrices, embeddings, lm_head, vectors = split_parameters(model)
    embedding_lr = config.embedding_lr or config.lr
    groups = [
        {"params": embeddings, "lr": embedding_lr, "weight_decay": config.weight_decay},
        {"params": lm_head, "lr": config.lm_head_lr or config.lr, "weight_decay": config.weight_decay},
        {"params": vectors, "lr": embedding_lr, "weight_decay": 0.0},
    ]
    optimizers: list[Muon | AdamW] = []
    if config.name == "muon":
        optimizers.append(Muon(matrices, config.lr, config.momentum, config.weight_decay))
    else:
        groups.insert(0, {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay})
    groups = [group for group in groups if group["params"]]
    optimizers.append(AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-10))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def split_parameters(model: GPT) -> tuple[list[nn.Parameter], ...]:
    """The parameters by kind: (the blocks' matrices, embeddings, an untied lm_head, norms and biases)."""
    matrices, embeddings, lm_head, vectors = [], [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name.startswith("blocks."):
            matrices.append(parameter)
        elif name.startswith("lm_head."):
            lm_head.append(parameter)
        else:
            embeddings.append(parameter)
    return matrices, embeddings, lm_head, vectors


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), by the kernel of torch's own AdamW.

    groups: dictionaries of params, lr and weight_decay.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        self.param_groups, self.betas, self.eps = groups, betas, eps
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        """Move the weights by their gradients; nothing changes where the device finds the scalar `skip` to be true."""
        found_inf = skip.float()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state(parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [local(parameter) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                found_inf=found_inf,
            )
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]


class Muon:
    """Momentum, orthogonalised: every update of a matrix has singular values near 1 (Jordan et al. 2024).

    The update of an (m, n) matrix is scaled by √max(1, m/n). Matrices of one shape go through
    Newton–Schulz as one batch, which costs a fraction of one at a time. A model cut into shards keeps
    its momentum cut: each rank orthogonalises its share of the matrices and sends the shards back.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        self.param_groups: list[dict[str, Any]] = [{"params": params, "lr": lr, "weight_decay": weight_decay}]
        self.momentum = momentum
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        """Move the weights by their gradients; nothing changes where the device finds the scalar `skip` to be true."""
        moves = 1 - skip.float()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [local(parameter.grad) for parameter in parameters]
                momenta = [local(self._momentum(parameter)) for parameter in parameters]
                # Moved towards itself, the momentum stays what it is.
                gradients = [torch.where(skip, m, g) for m, g in zip(momenta, gradients, strict=True)]
                torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
                nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, self.momentum))
                rate = moves * group["lr"] * math.sqrt(max(1, shape[0] / shape[1]))
                updates = orthogonalize_shards(nesterov, parameters[0]).to(gradients[0].dtype) * rate
                weights = [local(parameter) for parameter in parameters]
                if group["weight_decay"]:
                    torch._foreach_mul_(weights, 1 - moves * group["lr"] * group["weight_decay"])
                torch._foreach_sub_(weights, updates.unbind())

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self.state:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        return self.state[parameter]["momentum_buffer"]


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
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, said without importing that."""
    return hasattr(tensor, "to_local")


def orthogonalize_shards(rows: Tensor, like: Tensor) -> Tensor:
    """`orthogonalize` for matrices of which each rank has some rows, (N, rows, n), cut as `like` is.

    Every rank gets N / ranks of the matrices in one piece, works on these, and returns the rows.
    """
    if not is_sharded(like):
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


def optimizer_state(model: GPT, optimizers: list[Muon | AdamW]) -> dict[str, Tensor]:
    """What the optimizers remember, by parameter and kind: {"lm_head.weight.exp_avg": …}.

    Rates and the like are not in it: they follow from the settings and the step.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}.{kind}": tensor
        for optimizer in optimizers
        for parameter, kinds in optimizer.state.items()
        for kind, tensor in kinds.items()
    }


def load_optimizer_state(model: GPT, optimizers: list[Muon | AdamW], state: dict[str, Tensor]) -> None:
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
        owners[id(parameter)].state.setdefault(parameter, {})[kind] = cut_like(tensor.to(parameter.device), parameter)


def cut_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor cut into shards as a parameter is; anything else as it is."""
    if is_sharded(parameter) and not is_sharded(tensor) and tensor.shape == parameter.shape:
        from torch.distributed.tensor import distribute_tensor

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


def set_learning_rate(optimizers: list[Muon | AdamW], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
