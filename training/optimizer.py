"""How weights move: parameter groups, Muon with AdamW beside it, and learning-rate schedules.

The optimizers are our own: constructing any of torch.optim's imports torch's compiler, which doubles torch's import.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn

from model.gpt import GPT
from training.config import OptimizerConfig, ScheduleConfig
from training.device import choose_precision
from training.distributed import is_sharded, local, shard_like


class Group(TypedDict):
    """Parameters that move at one rate."""

    params: list[nn.Parameter]
    peak_lr: float
    lr: float  # the rate of the next step, set by set_learning_rate
    weight_decay: float


CHANNEL_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

State = dict[nn.Parameter, dict[str, Tensor]]


def make_optimizers(model: GPT, config: OptimizerConfig) -> "list[Muon | AdamW]":
    """Return one AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest."""
    embedding_lr = config.embedding_lr or config.lr
    lm_head_lr = config.lm_head_lr or config.lr
    rates = (config.lr, config.lr, config.lr, embedding_lr, lm_head_lr, lm_head_lr, embedding_lr)
    kinds = zip(split_parameters(model), rates, [config.weight_decay] * 6 + [0.0], strict=True)
    groups = [Group(params=params, peak_lr=lr, lr=lr, weight_decay=decay) for params, lr, decay in kinds]
    matrices, others = groups[:3], [group for group in groups[3:] if group["params"]]
    if config.name == "muon":
        muon = Muon(matrices, config.momentum, model.config.head_channels)
        return [muon, AdamW(others, config.beta1, config.beta2)]
    return [AdamW(matrices + others, config.beta1, config.beta2)]


def split_parameters(model: GPT) -> tuple[list[nn.Parameter], ...]:
    """Return (matrices with a row for each channel of a head or the MLP, with a column for each, other matrices of the
    blocks, embeddings, an untied lm_head, other weights of the blocks, norms and biases).

    The matrices, which Muon moves, are the weights of the blocks' nn.Linear layers: what has a few rows, as a gate for
    each head has, is a parameter of its own.
    """
    matrices = {id(layer.weight) for layer in model.blocks.modules() if isinstance(layer, nn.Linear)}  # type: ignore[attr-defined]
    names = ("rows", "columns", "whole", "embeddings", "lm_head", "thin", "vectors")
    kinds = {name: list[nn.Parameter]() for name in names}
    for name, parameter in model.named_parameters():
        kind, layer = name.partition(".")[0], name.split(".")[-2]
        if parameter.ndim < 2:
            kind = "vectors"
        elif id(parameter) in matrices:
            kind = "rows" if layer in CHANNEL_ROWS else "columns" if layer == "down_proj" else "whole"
        elif kind == "blocks":
            kind = "thin"
        kinds[kind if kind in kinds else "embeddings"].append(parameter)
    return tuple(kinds.values())


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), on torch's fused kernel."""

    kinds = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, groups: list[Group], beta1: float, beta2: float) -> None:
        fixed = {"beta1": beta1, "beta2": beta2, "eps": 1e-10, "amsgrad": False, "maximize": False}
        self._move = partial(torch._fused_adamw_, **fixed)
        self.param_groups, self.state = groups, State()

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        """Move the weights by their gradients, or change nothing if `skip`, a bool scalar on the device, is true."""
        found_inf = skip.float()
        for group in self.param_groups:
            pairs = [(parameter, parameter.grad) for parameter in group["params"] if parameter.grad is not None]
            for parameter in (parameter for parameter, _ in pairs if parameter not in self.state):
                zeros = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}
            states = [self.state[parameter] for parameter, _ in pairs]
            weights, gradients = [local(weight) for weight, _ in pairs], [local(gradient) for _, gradient in pairs]
            means, squares = ([local(state[kind]) for state in states] for kind in ("exp_avg", "exp_avg_sq"))
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            rates = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            self._move(weights, gradients, means, squares, [], steps, **rates, found_inf=found_inf)
            torch._foreach_sub_(steps, [found_inf] * len(steps))


class Muon:
    """Orthogonalised momentum: every update has singular values near 1 (Jordan et al. 2024).

    A matrix with a row or a column for each channel of the heads or the MLP is many narrow maps, slices of `width`
    channels. Each is orthogonalised by itself, at a fraction of the cost of the whole. An (m, n) matrix moves by
    √max(1, m/n) times its orthogonalised momentum; one in slices, by √min(1, C/channels), so that the update's norm is
    √C. Matrices of one shape are one batch. The momentum of a sharded model is sharded too.
    """

    kinds = ("momentum_buffer",)

    def __init__(self, groups: list[Group], momentum: float, width: int) -> None:
        """groups: matrices with channels in rows, with channels in columns, and others."""
        self.param_groups, self.momentum, self.width, self.state = groups, momentum, width, State()

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        """Move the weights by their gradients, or change nothing if `skip`, a bool scalar on the device, is true."""
        moves = 1 - skip.float()
        for group, channels in zip(self.param_groups, ("rows", "columns", ""), strict=True):
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter not in self.state:
                        self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
                    by_shape[parameter.shape].append((parameter, local(parameter.grad)))
            for (m, n), pairs in by_shape.items():
                momenta = [local(self.state[parameter]["momentum_buffer"]) for parameter, _ in pairs]
                # A skipped step moves the momentum towards itself.
                gradients = [torch.where(skip, mean, grad) for mean, (_, grad) in zip(momenta, pairs, strict=True)]
                torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
                nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, self.momentum))
                width, columns, size = self.slices(m, n, channels)
                rate = moves * group["lr"] * math.sqrt(size)
                sliced = partial(orthogonalize, width=width, columns=columns)
                updates = on_whole_matrices(sliced, nesterov, pairs[0][0])
                weights = [local(parameter) for parameter, _ in pairs]
                if group["weight_decay"]:
                    torch._foreach_mul_(weights, 1 - moves * group["lr"] * group["weight_decay"])
                for weight, update in zip(weights, updates, strict=True):
                    weight.addcmul_(update, rate, value=-1)

    def slices(self, m: int, n: int, channels: str) -> tuple[int, bool, float]:
        """Return how wide the slices of (m, n) are, whether they are columns, and the square of the step's factor."""
        count, others = (m, n) if channels == "rows" else (n, m)
        if channels and count % self.width == 0:
            return self.width, channels == "columns", min(1, others / count)
        return min(m, n), m > n, max(1, m / n)


POLAR_EXPRESS = (
    (4.066395, -2.861154, 0.518400),
    (3.909595, -2.823352, 0.525037),
    (3.285564, -2.415302, 0.485294),
    (2.300652, -1.668904, 0.418807),
)
"""a, b, c of the second to fifth iteration of Amsel et al. 2025, "The Polar Express", which take singular values from
0.008…1.99 to 0.88…1.12, with their safety factor of 1.01 for bf16. The first iteration is for smaller ones."""


def orthogonalize(matrices: Tensor, width: int, columns: bool = False) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrix to each slice of `width` rows, or columns, of (N, m, n).

    Each iteration is x ← (a + b xxᵀ + c (xxᵀ)²) x, in bf16 where that is fast or, on older GPUs, fp16, which loses
    nothing that matters, and in the given precision elsewhere. Singular values from 0.4% of the slice's norm on come
    within 0.8…1.2.
    """
    dtype = choose_precision("auto", matrices.device)
    whole = matrices if dtype == torch.float32 else matrices.to(dtype)
    if columns:
        whole = whole.mT
    slices = whole.reshape(-1, width, whole.size(-1))
    x = slices / (slices.norm(dim=(-2, -1), keepdim=True) / 1.9).clamp(min=1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.view_as(whole)
    return x.mT if columns else x


def on_whole_matrices(function: Callable[[Tensor], Tensor], rows: Tensor, like: Tensor) -> Tensor:
    """Return function(matrices) for N matrices of which this rank holds some rows, (N, rows, n), sharded as `like` is.

    Every rank receives its share of the matrices whole, and sends their rows back.
    """
    if not is_sharded(like):
        return function(rows)
    from torch.distributed.tensor import DTensor, Shard

    mesh, shape = like.device_mesh, torch.Size((len(rows), *like.shape))
    stride = (like.numel(), like.size(1), 1)
    by_rows, by_matrix = ([*like.placements[:-1], Shard(dim)] for dim in (1, 0))  # each copy of the model does it all
    cut = DTensor.from_local(rows, mesh, by_rows, shape=shape, stride=stride)
    matrices = function(cut.redistribute(placements=by_matrix).to_local()).to(rows.dtype).contiguous()
    shared = DTensor.from_local(matrices, mesh, by_matrix, shape=shape, stride=stride)
    return shared.redistribute(placements=by_rows).to_local()


def optimizer_state(model: GPT, optimizers: list[Muon | AdamW]) -> dict[str, Tensor]:
    """Return the optimizers' state by parameter and kind: {"lm_head.weight.exp_avg": …}.

    Learning rates are not part of it: they follow from the settings and the step.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}.{kind}": tensor
        for optimizer in optimizers
        for parameter, kinds in optimizer.state.items()
        for kind, tensor in kinds.items()
    }


def load_optimizer_state(model: GPT, optimizers: list[Muon | AdamW], state: dict[str, Tensor]) -> None:
    """Give the optimizers what `optimizer_state` returned, whole or sharded as the parameters are.

    Raises KeyError or ValueError when it is not that.
    """
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters() if state else ():
        optimizer = owners[id(parameter)]
        for kind in optimizer.kinds:
            tensor = state[f"{name}.{kind}"].to(parameter.device)
            if tensor.shape != (() if kind == "step" else parameter.shape) or tensor.dtype != torch.float32:
                raise ValueError(f"the optimizer's {kind} of {name} does not have its shape and type")
            optimizer.state.setdefault(parameter, {})[kind] = shard_like(tensor, parameter)


def schedule_factor(schedule: ScheduleConfig, step: int, progress: float) -> float:
    """Return the factor on the peak learning rates for the update after `step` finished updates.

    The warm-up counts steps; after it the decay follows `progress`, the share of the run that is over, in [0, 1].
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    warmed = progress * schedule.warmup_steps / max(1, step)  # the share of the run that the warm-up took
    left, decay = 1 - progress, 1.0
    if schedule.name == "cosine" and warmed < 1:
        decay = 0.5 * (1 - math.cos(math.pi * left / (1 - warmed)))
    elif schedule.name == "warmup_stable_decay" and (falling := min(schedule.decay_fraction, 1 - warmed)) > 0:
        decay = min(1.0, left / falling)
    return schedule.final_factor + (1 - schedule.final_factor) * decay


def set_learning_rate(optimizers: list[Muon | AdamW], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
