"""Optimizers: parameter groups, AdamW, Muon, and learning-rate schedules.

A step follows the contract of torch's fused optimizers: step() divides the gradients by the attribute grad_scale, and
changes nothing if found_inf is 1. Both are scalars on the device, for which nothing waits but AdamW on a Mac. AdamW is
not torch.optim's, whose constructor imports torch's compiler: 1.4 s and 78 MB at the start of each run.
"""

import math
from collections import defaultdict
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn

from model.gpt import GPT
from training.config import OptimizerConfig, ScheduleConfig
from training.device import choose_precision
from training.distributed import Ranks


class Group(TypedDict):
    """Parameters with one learning rate."""

    params: list[nn.Parameter]
    peak_lr: float
    lr: float  # of the next step, set by set_learning_rate
    weight_decay: float


MATRICES = ("rows", "columns", "whole")
"""The kinds of parameters that Muon moves: see split_parameters()."""
CHANNEL_ROWS = ("qkv_proj", "q_proj", "k_proj", "v_proj", "gate_up_proj", "up_proj")
"""Layers whose weights have a row for each channel of the heads or of the MLP."""

State = dict[nn.Parameter, dict[str, Tensor]]
ALONE = Ranks()


def split_parameters(model: GPT) -> dict[str, list[nn.Parameter]]:
    """Return the parameters by kind.

    rows, columns, whole: weights of the blocks' linear layers, which Muon moves (below): those with a row for each
        channel of the heads or of the MLP (CHANNEL_ROWS), down_proj with a column for each channel of the MLP, and the
        others. Muon cuts the first two into slices of rows or columns. o_proj stays whole, though it has a column for
        each channel of the heads: in slices it was 0.003 to 0.012 bits per byte worse.
    thin: other matrices of the blocks, such as a gate's with one row for each head.
    embeddings, lm_head (untied), vectors (of norms, and biases): the rest.
    """
    matrices = {id(layer.weight) for layer in model.blocks.modules() if isinstance(layer, nn.Linear)}
    by_kind = defaultdict[str, list[nn.Parameter]](list)
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        layer = name.split(".")[-2]
        if parameter.ndim < 2:
            kind = "vectors"
        elif id(parameter) in matrices:
            kind = "rows" if layer in CHANNEL_ROWS else "columns" if layer == "down_proj" else "whole"
        elif part == "blocks":
            kind = "embeddings" if layer == "embedding" else "thin"  # value_embedding has one in a block
        else:
            kind = "lm_head" if part == "lm_head" else "embeddings"
        by_kind[kind].append(parameter)
    return by_kind


def make_optimizers(model: GPT, config: OptimizerConfig, ranks: Ranks = ALONE) -> "list[Muon | AdamW]":
    """Return the optimizer config.name of the blocks' matrices, and AdamW for the rest."""
    # A group for each kind of parameters, with its peak rate. What Muon does not move has two rates: vectors take that
    # of the embeddings, thin matrices that of lm_head.
    embedding_lr = config.embedding_lr or config.lr
    lm_head_lr = config.lm_head_lr or config.lr
    rates = dict.fromkeys(MATRICES, config.lr)
    rates |= {"embeddings": embedding_lr, "lm_head": lm_head_lr, "thin": lm_head_lr, "vectors": embedding_lr}
    parameters = split_parameters(model)
    groups = {}
    for kind, lr in rates.items():
        decay = config.weight_decay if kind != "vectors" else 0.0
        groups[kind] = Group(params=parameters[kind], peak_lr=lr, lr=lr, weight_decay=decay)

    matrices = [groups.pop(kind) for kind in MATRICES]
    rest = [group for group in groups.values() if group["params"]]
    return [OPTIMIZERS[config.name](matrices, config, model, ranks), AdamW(rest, config)]


def with_gradients(group: Group) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters of a group that have gradients, each with its gradient."""
    return [(weight, weight.grad) for weight in group["params"] if weight.grad is not None]


def has_launches(tensor: Tensor) -> bool:
    """Return whether each operation on a tensor launches a kernel.

    Few large operations are then faster than many.
    """
    return not tensor.is_cpu


def is_skipped(flag: Tensor) -> bool:
    """Return whether a step is to be skipped, if that is known without waiting for a GPU.

    A fake tensor, as dry_run=true has them, has no value.
    """
    return type(flag) is Tensor and flag.is_cpu and bool(flag)


def zeros(groups: list[Group], *names: str) -> State:
    """Return the initial state of each parameter: zeros for each of the names."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {parameter: {name: torch.zeros_like(parameter) for name in names} for parameter in parameters}


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    m ← β₁ m + (1 - β₁) g and v ← β₂ v + (1 - β₂) g², then w ← w - lr (m̂ / (√v̂ + ε) + weight_decay w), where m̂ and v̂ are
    m and v divided by 1 - βᵗ in step t. torch's fused kernel computes it.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: list[Group], config: OptimizerConfig, *_: object) -> None:
        self.betas = {"beta1": config.beta1, "beta2": config.beta2}
        self.param_groups = groups
        self.state = zeros(groups, "exp_avg", "exp_avg_sq")
        for parameter, state in self.state.items():
            state["step"] = torch.zeros((), device=parameter.device)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by their gradients divided by grad_scale, unless found_inf is 1."""
        # On Apple's GPUs the kernel ignores grad_scale and found_inf: divide before it, and wait for the flag.
        on_mac = self.found_inf.device.type == "mps"
        if on_mac and self.found_inf:
            return
        for group in self.param_groups:
            pairs = with_gradients(group)
            if not pairs:  # all are frozen
                continue
            gradients = [gradient / self.grad_scale if on_mac else gradient for _, gradient in pairs]
            states = [self.state[weight] for weight, _ in pairs]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [weight for weight, _ in pairs],
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=steps,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=1e-10,  # small beside the gradients of rare tokens' embeddings
                **self.betas,
                amsgrad=False,
                maximize=False,
                grad_scale=None if on_mac else self.grad_scale,
                found_inf=None if on_mac else self.found_inf,
            )
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))  # a skipped step does not count


class Muon:
    """Muon moves a matrix by its orthogonalised momentum (Jordan et al. 2024).

    With the singular value decomposition U S Vᵀ of the momentum it moves by U Vᵀ: all singular values become 1, so that
    a few large directions do not hide the others. orthogonalize() finds that about, by products of matrices alone.

    Slices: a matrix may be many narrow maps, as qkv_proj has a query, a key and a value for each head. It is cut into
    slices of `width` channels, a head each, which are orthogonalised separately, at a fraction of the cost of the
    whole. The matrices of the MLP are cut alike.

    Size: all slices together would move further than the whole matrix. Take an up_proj of 384 rows and 128 columns. Its
    U Vᵀ has 128 singular values of 1, hence the norm √128. Cut into 12 slices of 32 rows it has 12 times 32, and the
    norm √384. The factor √(128 / 384) takes that back:

        kind      shape    slices                       moves by
        rows      (c, C)   c / width, of width rows     √min(1, C/c) U Vᵀ of each
        columns   (C, c)   c / width, of width columns  the same
        whole     (m, n)   one                          √max(1, m/n) U Vᵀ, as Jordan's code has it

    with C = n_embd and c channels of the heads or of the MLP. split_parameters() says which matrix is of which kind.

    Matrices of one shape are one batch, which the ranks divide among them.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: list[Group], config: OptimizerConfig, model: GPT, ranks: Ranks) -> None:
        """Make an optimizer of three groups: channels in rows, channels in columns, others."""
        self.param_groups = groups
        # The rows of each matrix in a weight that joins several. A person's own nn.Linear is one matrix.
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.parts = {layer.weight: getattr(layer, "parts", (layer.out_features,)) for layer in linear}
        self.momentum = config.momentum
        self.width = model.config.head_channels
        self.ranks = ranks
        self.state = zeros(groups, "momentum_buffer")

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by their gradients divided by grad_scale, unless found_inf is 1."""
        skip = self.found_inf
        if is_skipped(skip):
            return
        moves = 1 - skip
        for group, kind in zip(self.param_groups, MATRICES, strict=True):
            # Batch matrices of the same shape with the same parts.
            batches: dict[tuple, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter, gradient in with_gradients(group):
                batches[parameter.shape, self.parts[parameter]].append((parameter, gradient))
            for (_, parts), pairs in batches.items():
                # Update the momentum; in a skipped step towards itself.
                momenta = [self.state[weight]["momentum_buffer"] for weight, _ in pairs]
                gradients = [gradient for _, gradient in pairs]
                stacks = has_launches(skip)  # a GPU computes on all matrices at once
                if not stacks:
                    gradients = [gradient / self.grad_scale for gradient in gradients]
                else:
                    # Without names, so that none of the stacks outlives the line: each is as large as the matrices.
                    gradients = [*torch.where(skip > 0, torch.stack(momenta), torch.stack(gradients) / self.grad_scale)]
                torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
                nesterov = torch.stack(torch._foreach_lerp(gradients, momenta, self.momentum))  # (N, m, n)

                # Orthogonalise it, each rank a part of the matrices.
                update = partial(self.update, parts=parts, kind=kind)
                updates = self.ranks.divide(update, nesterov)

                # Update the weights.
                weights: list[Tensor] = [weight for weight, _ in pairs]
                rate = moves * group["lr"]
                if group["weight_decay"]:
                    torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
                if not stacks:
                    for weight, change in zip(weights, updates, strict=True):
                        weight.addcmul_(change, rate, value=-1)
                else:
                    torch._foreach_sub_(weights, [*(updates * rate)])

    def update(self, matrices: Tensor, parts: tuple[int, ...], kind: str) -> Tensor:
        """Return the updates of matrices (N, m, n) at a rate of 1, each part of the rows separately."""
        # Are all parts cut alike, and no slice across two? Of qkv_proj with 3 · 128 rows and heads of 32 all 12 slices
        # then are one batch. Heads of 64 make parts of 256 rows, or with two key heads of 256, 128 and 128: of 128
        # columns the first then has a factor of its own.
        slicings = [self.slices(rows, matrices.size(2), kind) for rows in parts]
        are_cut_alike = len(set(slicings)) == 1 and all(rows % self.width == 0 for rows in parts)
        if len(parts) > 1 and not are_cut_alike:
            return torch.cat([self.update(part, (part.size(1),), kind) for part in matrices.split(parts, 1)], 1)
        width, columns, factor = slicings[0]
        orthogonal = orthogonalize(matrices, width, columns)
        return orthogonal if factor == 1 else orthogonal * factor

    def slices(self, m: int, n: int, kind: str) -> tuple[int, bool, float]:
        """Return the width of (m, n)'s slices, whether they are columns, and the update's factor."""
        if kind == "rows" and m % self.width == 0:
            return self.width, False, min(1, n / m) ** 0.5
        if kind == "columns" and n % self.width == 0:
            return self.width, True, min(1, m / n) ** 0.5
        # Also a matrix whose channels are no multiple of the width, such as that of a person's layer, stays whole.
        return min(m, n), m > n, max(1, m / n) ** 0.5


POLAR_EXPRESS = (
    (4.066395, -2.861154, 0.518400),
    (3.909595, -2.823352, 0.525037),
    (3.285564, -2.415302, 0.485294),
    (2.300652, -1.668904, 0.418807),
)
"""a, b, c of the second to fifth iteration of "The Polar Express" (Amsel et al. 2025).

An iteration makes of each singular value s of a matrix a s + b s³ + c s⁵, and leaves its directions as they are. In
exact arithmetic these four take values from 0.008…1.99 to 0.88…1.12; orthogonalize() begins at 1.9, which leaves room
for the rounding of bf16. The first iteration, left out, is for smaller values.
"""


def orthogonalize(matrices: Tensor, width: int, columns: bool = False) -> Tensor:
    """Return (N, m, n) with each slice of `width` rows, or columns, made about semi-orthogonal.

    Singular values of at least 0.4% of the slice's norm become 0.8…1.2, rounding in half precision included.
    """
    # In half precision, where that is fast: the result is rough anyway.
    dtype = choose_precision("auto", matrices.device)
    if dtype == torch.float16:
        # Scale the matrices first: gradients below 6e-8 would vanish in fp16.
        mean_square = matrices.square().mean((-2, -1), keepdim=True)
        matrices = matrices * mean_square.clamp(min=1e-30).rsqrt()
    whole = matrices if dtype == torch.float32 else matrices.to(dtype)
    if columns:
        whole = whole.mT
    slices = whole.reshape(-1, width, whole.size(-1))  # (N, m, n) -> (N · m / width, width, n)

    # Scale the singular values to at most 1.9, and iterate x ← (a + b xxᵀ + c (xxᵀ)²) x. a is added to the small
    # matrix, not to the product as a x: on a CPU baddbmm would first copy all of x.
    x = slices / (slices.norm(dim=(-2, -1), keepdim=True) / 1.9).clamp(min=1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        x = polynomial @ x
    x = x.view_as(whole)
    return x.mT if columns else x


OPTIMIZERS = {"muon": Muon, "adamw": AdamW}


def optimizer_state(model: GPT, optimizers: list[Muon | AdamW]) -> dict[str, Tensor]:
    """Return the optimizers' tensors by names such as lm_head.weight.exp_avg.

    Learning rates are not among them: they follow from the settings and the step.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}.{kind}": tensor
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for kind, tensor in state.items()
    }


def load_optimizer_state(
    model: GPT,
    optimizers: list[Muon | AdamW],
    saved: dict[str, Tensor],
    ranks: Ranks,
) -> None:
    """Load rank 0's `saved` optimizer_state() on all ranks; KeyError if a tensor is missing."""
    state = optimizer_state(model, optimizers)
    for name, tensor in state.items():
        if ranks.is_first:
            tensor.copy_(saved[name])
        ranks.broadcast_(tensor)


# The decay of a learning rate after its warm-up. Each function returns a number from 1, the peak rate, to 0, which is
# final_factor times that rate. The arguments are fractions of the run:
#
# left   what is still to come; it falls from `whole` to 0
# whole  what comes after the warm-up: 1 - warmup / steps, if the run's steps are known
#
# Fractions, not steps: a run that time ends does not know its steps. Of 450 steps with 10 of warm-up, `whole` is
# 440/450; with decay_fraction 0.7 the rate is 1 to step 135, where `left` is 0.7, and falls along a line to 0 at 450.


def stable_then_linear(left: float, whole: float, decay_fraction: float) -> float:
    return min(1.0, left / min(decay_fraction, whole)) if decay_fraction else 1.0


def half_cosine(left: float, whole: float, decay_fraction: float) -> float:
    return 0.5 * (1 - math.cos(math.pi * left / whole))


def constant(left: float, whole: float, decay_fraction: float) -> float:
    return 1.0


# The most steps that each schedule's warm-up has by default (it has a tenth of the run at most), and its decay.
SCHEDULES = {
    "warmup_stable_decay": (10, stable_then_linear),
    "cosine": (100, half_cosine),
    "constant": (100, constant),
}


def warmup_steps(schedule: ScheduleConfig, steps: int | None) -> int:
    """Return the steps of the warm-up in a run of `steps` steps.

    None: only the time ends it.
    """
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    most, _ = SCHEDULES[schedule.name]
    return min(most, math.ceil((steps or 1000) / 10))


def schedule_factor(
    schedule: ScheduleConfig,
    step: int,
    done: float,
    steps: int | None = None,
) -> float:
    """Return the factor on the peak learning rates for the update after `step` finished updates.

    The warm-up counts steps. The decay follows `done`, the fraction of the run that is done.
    steps: all steps of the run, or None if only the time ends it.
    """
    # Warm up.
    warmup = warmup_steps(schedule, steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)

    # Decay. Of a run of known steps the warm-up is warmup / steps; in one that time ends it is an estimate, by the mean
    # time of the steps so far.
    warmed_up = warmup * done / max(1, step)
    whole = 1 - warmed_up
    _, decay = SCHEDULES[schedule.name]
    factor = decay(1 - done, whole, schedule.decay_fraction) if whole > 0 else 1.0
    return schedule.final_factor + (1 - schedule.final_factor) * factor


def set_learning_rate(optimizers: list[Muon | AdamW], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
