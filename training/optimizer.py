"""How weights move: parameter groups, Muon with AdamW beside it, and learning-rate schedules."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from model.gpt import GPT
from training.config import OptimizerConfig, ScheduleConfig


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
    Newton–Schulz as one batch, which costs a fraction of one at a time.
    """

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
                gradients = [parameter.grad for parameter in parameters]
                momenta = [self._momentum(parameter) for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
                updates = orthogonalize(torch.stack(nesterov))
                if group["weight_decay"]:
                    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * math.sqrt(max(1, shape[0] / shape[1]))
                torch._foreach_add_(parameters, updates.to(parameters[0].dtype).unbind(), alpha=-rate)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to each of (N, m, n), roughly: singular values within 0.7…1.2.

    A quintic Newton–Schulz iteration (Jordan et al. 2024), in bf16 on CUDA, where it is as good and
    faster, and in the given precision elsewhere.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    if tall := x.size(-2) > x.size(-1):
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


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
